"""`bindery standalone` and the other commands with real processes, as a new user runs them."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bindery.standalone.directory import ProcessIdentity
from bindery.standalone.throwaway import ThrowawayCluster, free_port_offset
from command import bindery

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

SECOND_START_S_MAX = 45.0
"""Maximum seconds of a second start on a busy machine. An idle one needs a few seconds."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThrowawayCluster]:
    with ThrowawayCluster(bookies=4) as running:
        yield running


def ok(*arguments: str, stdin: str | None = None) -> str:
    done = bindery(*arguments, stdin=stdin)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_the_three_printed_example_commands_work(cluster: ThrowawayCluster) -> None:
    words = cluster.output(100)
    assert re.search(r"^ready after [0-9.]+ s$", words, re.MULTILINE)
    lines = re.findall(r"^  (curl .*)$", words, re.MULTILINE)
    assert len(lines) == 3
    answers = []
    for line in lines:
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=True)
        answers.append(json.loads(done.stdout))
    sent, received, acknowledged = answers
    assert len(sent["message_ids"]) == 1
    assert [(m["message_id"], m["payload"]) for m in received["messages"]] == [(sent["message_ids"][0], "hello, world")]
    assert acknowledged == {"acknowledged": 1}


def test_status_shows_every_process_ready(cluster: ThrowawayCluster) -> None:
    data = str(cluster.directory.root)
    status = json.loads(ok("standalone", "status", "--data", data, "--json"))
    assert status["state"] == "ready"
    assert [process["name"] for process in status["processes"]] == [
        "zookeeper-0",
        "bookie-0",
        "bookie-1",
        "bookie-2",
        "bookie-3",
        "broker-0",
        "auditor-0",
    ]
    for process in status["processes"]:
        assert process["state"] == "ready"
        assert process["pid"] == cluster.pid(process["name"])
        assert Path(process["log"]).exists()
    shown = ok("standalone", "--data", data, "status")
    assert "bookie-3" in shown
    assert cluster.url in shown
    assert cluster.auditor_url() in shown


def test_consume_prints_what_produce_sent(cluster: ThrowawayCluster, tmp_path: Path) -> None:
    at = ("--url", cluster.url)
    lines = "one\ntwo\n\nfour \u20ac\n"
    assert ok("produce", "lines", *at, "--property", "from=test", stdin=lines) == "4 messages sent\n"
    assert ok("consume", "lines", *at) == lines
    out = ok("consume", "public/default/lines", *at, "--json", "--max", "2")
    messages = [json.loads(line) for line in out.splitlines()]
    assert [(m["payload"], m["properties"]) for m in messages] == [("one", {"from": "test"}), ("two", {"from": "test"})]

    file = tmp_path / "data.bin"
    file.write_bytes(bytes(range(256)))
    result = json.loads(ok("produce", "files", str(file), *at, "--json", "--key", "k", "--property", "Upper=1"))
    (message,) = [json.loads(line) for line in ok("consume", "files", *at, "--json").splitlines()]
    assert message["message_id"] == result["results"][0]["message_id"]
    assert (message["key"], message["properties"]) == ("k", {"path": str(file), "Upper": "1"})
    done = subprocess.run(
        [sys.executable, "-m", "bindery", "consume", "files", *at], capture_output=True, timeout=60, check=True
    )
    assert done.stdout == bytes(range(256)) + b"\n"

    objects = '{"payload": "a", "key": "x"}\n{"payload_base64": "/w=="}\n'
    assert ok("produce", "objects", "--ndjson", *at, stdin=objects) == "2 messages sent\n"
    first = json.loads(ok("consume", "objects", *at, "--json", "--max", "1"))
    assert (first["payload"], first["key"]) == ("a", "x")


def test_consume_with_ack_takes_each_message_once(cluster: ThrowawayCluster) -> None:
    at = ("--url", cluster.url)
    ok("produce", "acked", *at, stdin="".join(f"{i}\n" for i in range(5)))
    assert ok("consume", "acked", *at, "--ack", "--max", "2") == "0\n1\n"
    assert ok("consume", "acked", *at, "--ack") == "2\n3\n4\n"
    assert ok("consume", "acked", *at, "--ack") == ""
    assert ok("consume", "acked", *at, "--ack", "--subscription", "other", "--max", "1") == "0\n"


def test_consume_with_follow_ends_after_max_messages(cluster: ThrowawayCluster) -> None:
    at = ("--url", cluster.url)
    ok("produce", "followed", *at, stdin="first\n")
    command = [sys.executable, "-m", "bindery", "consume", "followed", *at, "--follow", "--max", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
        try:
            assert following.stdout is not None
            assert following.stdout.readline() == "first\n"
            ok("produce", "followed", *at, stdin="second\n")
            assert following.stdout.readline() == "second\n"
            assert following.wait(timeout=30) == 0
        finally:
            following.kill()


def test_consume_ends_without_a_message_when_its_reader_ends(cluster: ThrowawayCluster) -> None:
    at = ("--url", cluster.url)
    ok("produce", "piped", *at, stdin="".join(f"{i} {'x' * 1000}\n" for i in range(2000)))
    line = f"{sys.executable} -m bindery consume piped --url {cluster.url} | head -1"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout[:2], done.stderr) == ("0 ", "")


def test_topics_are_listed_with_their_figures(cluster: ThrowawayCluster) -> None:
    at = ("--url", cluster.url)
    ok("produce", "counted", *at, stdin="a\nb\n")
    ok("consume", "counted", *at, "--ack", "--max", "1")
    names = json.loads(ok("topics", "list", *at, "--json"))
    assert any(name.endswith("public/default/counted") for name in names)
    assert any(line.endswith("public/default/counted") for line in ok("topics", "list", *at).splitlines())
    stats = json.loads(ok("topics", "stats", "counted", *at, "--json"))
    assert stats["subscriptions"]["cli"]["type"] in ("shared", "exclusive")
    for verb in ("stats", "subscriptions"):
        assert any(line.startswith("cli ") for line in ok("topics", verb, "counted", *at).splitlines())
    (found,) = json.loads(ok("topics", "subscriptions", "counted", *at, "--json"))
    assert (found["subscription"], found["messages_out"]) == ("cli", 1)


def test_a_topic_is_deleted_after_a_confirmation(cluster: ThrowawayCluster) -> None:
    at = ("--url", cluster.url)
    ok("produce", "unwanted", *at, stdin="a\nb\n")
    asked = bindery("topics", "delete", "unwanted", *at)
    assert asked.returncode == 2
    assert "public/default/unwanted has 1 entry and 0 subscriptions" in asked.stderr
    ok("consume", "unwanted", *at, "--ack", "--max", "1")
    assert ok("topics", "delete", "unwanted", *at, "--yes", "--force") == "public/default/unwanted is deleted\n"
    assert "unwanted" not in ok("topics", "list", *at)
    for again in (("--yes",), ()):
        done = bindery("topics", "delete", "unwanted", *at, *again)
        assert done.returncode == 1
        assert "no such topic" in done.stderr
    held = bindery("produce", "unwanted", *at, stdin="c\n")  # by force: clients must not create it again
    assert held.returncode == 1
    assert "`bindery topics create`" in held.stderr
    ok("topics", "create", "unwanted", *at)
    ok("produce", "unwanted", *at, stdin="c\n")
    assert json.loads(ok("topics", "delete", "unwanted", *at, "--yes", "--json")) == {
        "deleted": "public/default/unwanted"
    }


def test_ledgers_are_listed_shown_and_read_from_each_bookie(cluster: ThrowawayCluster) -> None:
    at = ("--zookeeper", cluster.zookeeper)
    sent = json.loads(ok("produce", "looked-at", "--url", cluster.url, "--json", stdin="findme\n"))
    ledger, entry = sent["results"][0]["message_id"].split(":")[:2]
    every = [json.loads(line) for line in ok("ledger", "list", *at, "--json").splitlines()]
    listed = {str(facts["ledger_id"]): facts for facts in every}
    assert (listed[ledger]["ensemble_size"], listed[ledger]["write_quorum"], listed[ledger]["ack_quorum"]) == (3, 3, 2)
    shown = json.loads(ok("ledger", "show", ledger, *at, "--json"))
    assert shown == listed[ledger]
    assert "write_quorum" in ok("ledger", "show", ledger, *at)
    assert "findme" in ok("ledger", "read", ledger, *at, "--first", entry, "--last", entry, "--payload", "escaped")
    verdicts = []
    for bookie in shown["segments"][0]["ensemble"]:
        out = ok("ledger", "read", ledger, *at, "--first", entry, "--last", entry, "--from-bookie", bookie, "--json")
        verdicts.append(json.loads(out)["verdict"])
    assert verdicts.count("good") >= 2  # the ack quorum; the third copy may not have arrived
    missing = bindery("ledger", "show", "999999", *at)
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "no such ledger" in missing.stderr


def test_cluster_init_may_be_repeated(cluster: ThrowawayCluster) -> None:
    first = json.loads(ok("cluster", "init", "--zookeeper", cluster.zookeeper, "--json"))
    assert first["created"] == []
    assert json.loads(ok("cluster", "init", "--zookeeper", cluster.zookeeper, "--json")) == first


def test_errors_name_the_fix_and_have_their_exit_codes(cluster: ThrowawayCluster) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        done = bindery("consume", "x", "--url", f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert done.returncode == 1
    assert "is it running? `make run`" in done.stderr
    for how in ((), ("--ack", "--max", "1")):
        done = bindery("consume", "never-made", "--url", cluster.url, *how)
        assert done.returncode == 1
        assert "no such topic" in done.stderr
    assert "never-made" not in ok("topics", "list", "--url", cluster.url)
    assert bindery("consume", "a/b").returncode == 2
    assert bindery("consume").returncode == 2
    assert bindery("produce", "x", "--property", "novalue").returncode == 2
    done = bindery("produce", "x", "--ndjson", "--url", cluster.url, stdin='{"payload": "a"}\n{broken\n')
    assert done.returncode == 1
    assert "line 2" in done.stderr


def test_a_url_of_another_service_is_reported_in_one_line(cluster: ThrowawayCluster) -> None:
    processes = {process["name"]: process["ports"] for process in (cluster.status() or {})["processes"]}
    bookie, auditor = (f"http://127.0.0.1:{processes[name]['HTTP']}" for name in ("bookie-0", "auditor-0"))
    for command, url, service in (
        (("topics", "list"), auditor, "an auditor, not a broker"),
        (("consume", "x", "--ack"), bookie, "a bookie, not a broker"),
        (("bookie", "state"), cluster.url, "a broker, not a bookie"),
        (("bookie", "gc", "run"), auditor, "an auditor, not a bookie"),
    ):
        done = bindery(*command, "--url", url)
        assert done.returncode == 1
        assert f"bindery: {url} is {service}; --url or " in done.stderr
        assert len(done.stderr) < 150
    assert ok("bookie", "disks", "--url", bookie)


def test_a_process_is_stopped_and_started_by_name(cluster: ThrowawayCluster) -> None:
    data = str(cluster.directory.root)
    before = ProcessIdentity.of(cluster.pid("bookie-3"))
    assert before is not None
    ok("standalone", "stop", "bookie-3", "--data", data)
    assert not before.is_alive
    assert not cluster.directory.pid_file("bookie-3").exists()
    ok("produce", "with-three", "--url", cluster.url, stdin="still here\n")
    assert ok("standalone", "start", "bookie-3", "--data", data) == "bookie-3 is ready\n"
    assert json.loads(ok("standalone", "status", "--data", data, "--json"))["state"] == "ready"
    unknown = bindery("standalone", "stop", "bookie-9", "--data", data)
    assert unknown.returncode == 1
    assert "bookie-0, bookie-1" in unknown.stderr


def test_the_restart_of_a_killed_bookie_is_shown(cluster: ThrowawayCluster) -> None:
    before = cluster.kill("bookie-0")
    deadline = time.monotonic() + 60

    def is_back() -> bool:
        status = cluster.status()
        return status is not None and status["state"] == "ready" and cluster.has_restarted("bookie-0", since=before)

    while not is_back():
        assert time.monotonic() < deadline, cluster.output()
        time.sleep(0.05)
    assert "bookie-0 exited: killed by SIGKILL" in cluster.output(100)
    assert "bookie-0 is again ready" in cluster.output(100)


def test_a_second_cluster_on_the_same_data_or_ports_is_refused_with_a_fix(
    cluster: ThrowawayCluster, tmp_path: Path
) -> None:
    offset = str(cluster.port_offset)
    same_data = bindery("standalone", "--data", str(cluster.directory.root), "--port-offset", offset)
    assert same_data.returncode == 1
    assert "runs on this data already" in same_data.stderr
    same_ports = bindery("standalone", "--data", str(tmp_path / "other"), "--port-offset", offset)
    assert same_ports.returncode == 1
    assert re.search(r"port \d+ \(for .*--port-offset \d+", same_ports.stderr)
    assert str(8080 + cluster.port_offset) in same_ports.stderr


def test_a_second_start_finds_all_data_and_is_ready_in_time() -> None:
    """Uses a cluster of its own: first a regular stop, then a kill of the supervisor, with which its children end."""
    with ThrowawayCluster(bookies=4) as cluster:
        ok("produce", "kept", "--url", cluster.url, stdin="".join(f"{i}\n" for i in range(100)))
        ok("consume", "kept", "--url", cluster.url, "--ack", "--max", "40")
        cluster.stop()
        assert "all stopped" in cluster.output()
        took_s = cluster.start()
        assert took_s < SECOND_START_S_MAX, cluster.output(60)
        assert ok("consume", "kept", "--url", cluster.url) == "".join(f"{i}\n" for i in range(100))
        assert ok("consume", "kept", "--url", cluster.url, "--ack") == "".join(f"{i}\n" for i in range(40, 100))

        children = [cluster.pid(process["name"]) for process in (cluster.status() or {})["processes"]]
        identities = [ProcessIdentity.of(pid) for pid in children]
        supervisor = (cluster.status() or {})["supervisor_pid"]
        os.kill(supervisor, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while any(identity is not None and identity.is_alive for identity in identities):
            assert time.monotonic() < deadline, "children outlived their supervisor"
            time.sleep(0.05)
        for name in ("bookie-0", "broker-0"):
            assert "killed_while_stopping" not in cluster.directory.log_file(name).read_text()


def test_detach_returns_when_ready_and_stop_ends_it(tmp_path: Path) -> None:
    offset = free_port_offset(bookies=0, brokers=0, auditors=0)
    data = str(tmp_path / "data")
    try:
        size = ("--bookies", "0", "--brokers", "0", "--auditors", "0")
        out = ok("standalone", "--detach", *size, "--data", data, "--port-offset", str(offset))
        assert "ready after" in out
        assert json.loads(ok("standalone", "status", "--data", data, "--json"))["state"] == "ready"
    finally:
        done = bindery("standalone", "stop", "--data", data)
    assert (done.returncode, done.stdout) == (0, "all stopped\n")
    assert bindery("standalone", "status", "--data", data).returncode == 1
    with contextlib.suppress(FileNotFoundError):
        assert list((tmp_path / "data" / "run").glob("*.pid")) == []
