"""A cluster whose bookies require authentication and TLS: brokers, auditors and commands can use them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from bindery_simulation import certificates
from command import bindery
from forked_cluster import ForkedCluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
TOKEN = "correct-horse-battery-staple"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedCluster]:
    token = tmp_path_factory.mktemp("secrets") / "token"
    token.write_text(TOKEN + "\n")
    bookie = {
        "AUTH_PROVIDER": "token",
        "AUTH_SECRETS_FILE": str(token),
        "TLS_REQUIRED": "true",
        "TLS_CERTIFICATE_FILE": str(certificates.certificate("bookie")),
        "TLS_KEY_FILE": str(certificates.key("bookie")),
        "TLS_CA_FILE": str(certificates.CA),
    }
    shown = {"TOKEN_FILE": str(token), "CA_FILE": str(certificates.CA)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in bookie.items():
            patch.setenv(f"BOOKIE_{name}", value)
        for name, value in shown.items():
            for program in ("BROKER", "AUDITOR", "BINDERY"):
                patch.setenv(f"{program}_CLIENT_{name}", value)
        with ForkedCluster(bookies=3) as running:
            yield running


def test_messages_are_sent_and_consumed_and_every_copy_is_read(cluster: ForkedCluster) -> None:
    at = ("--url", cluster.url)
    done = bindery("produce", "secured", *at, stdin="one\ntwo\n")
    assert (done.returncode, done.stdout) == (0, "2 messages sent\n"), done.stderr
    assert bindery("consume", "secured", *at).stdout == "one\ntwo\n"
    ledgers = bindery("ledger", "list", "--zookeeper", cluster.zookeeper, "--json").stdout.splitlines()
    assert ledgers
    for line in ledgers:
        ledger_id = str(json.loads(line)["ledger_id"])
        done = bindery("ledger", "compare", ledger_id, "--zookeeper", cluster.zookeeper)
        assert done.returncode == 0, done.stderr + done.stdout


def test_without_the_token_nothing_is_read(cluster: ForkedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    bindery("produce", "kept", "--url", cluster.url, stdin="secret\n")
    first = bindery("ledger", "list", "--zookeeper", cluster.zookeeper, "--json").stdout.splitlines()[-1]
    ledger_id = str(json.loads(first)["ledger_id"])
    monkeypatch.delenv("BINDERY_CLIENT_TOKEN_FILE")
    done = bindery("ledger", "read", ledger_id, "--zookeeper", cluster.zookeeper)
    assert done.returncode == 1
    assert "BINDERY_CLIENT_TOKEN_FILE" in done.stderr
    assert "secret" not in done.stdout


def test_a_missing_token_file_is_named(cluster: ForkedCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    monkeypatch.setenv("BINDERY_CLIENT_TOKEN_FILE", str(absent))
    done = bindery("ledger", "list", "--zookeeper", cluster.zookeeper)
    assert done.returncode == 2
    assert str(absent) in done.stderr
