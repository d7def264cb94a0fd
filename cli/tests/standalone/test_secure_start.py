"""`bindery standalone --secure` with real processes: what it prints works, and nothing works without it."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from bindery.standalone.plan import ZOOKEEPER_PORT
from forked_cluster import ForkedCluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
PROGRAMS = Path(sys.executable).parent


@pytest.fixture(scope="module")
def cluster() -> Iterator[ForkedCluster]:
    with ForkedCluster(bookies=3, options=("--secure",)) as running:
        yield running


def shell(line: str) -> "subprocess.CompletedProcess[str]":
    clean = {name: value for name, value in os.environ.items() if not name.startswith("BINDERY_")}
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=90, check=False, env=clean)


def printed(cluster: ForkedCluster) -> list[str]:
    """Return the commands that the supervisor printed: three of curl, and one that sets the environment."""
    return re.findall(r"^  ((?:curl|\.) .*)$", cluster.output(100), re.MULTILINE)


def test_what_is_printed_works_as_it_is(cluster: ForkedCluster) -> None:
    produce, receive, ack, environment = printed(cluster)
    sent = json.loads(shell(produce).stdout)
    received = json.loads(shell(receive).stdout)
    assert [(m["message_id"], m["payload"]) for m in received["messages"]] == [(sent["message_ids"][0], "hello, world")]
    assert json.loads(shell(ack).stdout) == {"acknowledged": 1}
    commands = "bindery produce greetings; bindery consume greetings; bindery recovery status"
    done = shell(f"{environment}; PATH=$PATH:{PROGRAMS}; echo hello | {{ {commands}; }}")
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 message sent\nhello\n" in done.stdout
    assert "automatic recovery is enabled" in done.stdout


def test_without_the_token_without_tls_and_without_the_ca_there_is_nothing_to_get(cluster: ForkedCluster) -> None:
    produce, *_ = printed(cluster)
    found = re.match(r"curl -s (--cacert \S+) -H (\S+) (\S+)/messages ", produce)
    assert found is not None
    ca, header, topic = found.groups()
    for url in (f"{topic}/messages", f"{cluster.url}/v1/topics", f"{cluster.auditor_url()}/api/v1/autorecovery/status"):
        refused = json.loads(shell(f"curl -s {ca} {url}").stdout)
        assert refused["code"] == "unauthorized"
        assert shell(f"curl -s -H {header} {url}").returncode == 60  # the certificate is not trusted
    urls = (cluster.url, cluster.bookie_url(), cluster.auditor_url())
    for url in urls:
        refused = json.loads(shell(f"curl -s -H {header} {url.replace('https', 'http')}/api/v1/x").stdout)
        assert refused["code"] == "https_required"
    entries = f"{cluster.bookie_url()}/api/v1/ledger/read?ledger_id=0"
    assert json.loads(shell(f"curl -s {ca} '{entries}'").stdout)["code"] == "unauthorized"


def test_metadata_needs_the_credentials_and_entries_need_the_token(cluster: ForkedCluster) -> None:
    *_, environment = printed(cluster)
    with socket.create_connection(("127.0.0.1", ZOOKEEPER_PORT + cluster.port_offset), timeout=30) as plain:
        plain.sendall(b"srvr")
        plain.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            assert b"Mode:" not in plain.recv(65_536)
    begin = f"{environment}; PATH=$PATH:{PROGRAMS}; unset"
    done = shell(f"{begin} BINDERY_ZOOKEEPER_CREDENTIALS_FILE BINDERY_ZOOKEEPER_NEW_NODES; bindery ledger list")
    assert (done.returncode, done.stdout) == (1, "")
    assert "access list" in done.stderr
    done = shell(f"{begin} BINDERY_CLIENT_TOKEN_FILE; bindery ledger read 0")
    assert (done.returncode, done.stdout) == (1, "")
    assert "BINDERY_CLIENT_TOKEN_FILE" in done.stderr
