"""Auditors as real processes: a bookie is lost, the leader is killed, and ports, files or ZooKeeper cannot be used."""

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from bindery.standalone.throwaway import ThrowawayCluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]  # a busy machine takes minutes for seconds

HEALED_WITHIN_S = 120.0
"""Time limit of a repair in seconds: 15 s of quiet time after an auditor is elected, 10 s of delay, up to 30 s of grace
for the writers of open ledgers, and a margin for a busy machine."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThrowawayCluster]:
    with ThrowawayCluster(bookies=4, auditors=2) as running:
        yield running


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def bindery(*arguments: str, stdin: str | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "bindery", *arguments], input=stdin, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def leader(cluster: ThrowawayCluster) -> tuple[str, str]:
    """Wait until an auditor is elected. Return its name and URL."""
    seen: list[str | None] = []

    def is_elected() -> bool:
        seen.append(get(f"{cluster.auditor_url()}/v1/recovery/status")["auditor"])
        return seen[-1] is not None

    until(is_elected, limit_s=60, what="no auditor was elected")
    assert seen[-1] is not None
    return seen[-1], cluster.auditor_url(int(seen[-1].rpartition("-")[2]))


def until(condition: Any, *, limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.25)


def test_the_data_of_a_stopped_bookie_is_copied_although_the_leader_is_killed(cluster: ThrowawayCluster) -> None:
    lines = "".join(f"{number} {'x' * 200}\n" for number in range(3000))
    for topic in ("one", "two", "three"):
        bindery("produce", topic, "--url", cluster.url, stdin=lines)
    zookeeper = ("--zookeeper", cluster.zookeeper)

    def ledgers() -> list[dict[str, Any]]:
        return [json.loads(line) for line in bindery("ledger", "list", *zookeeper, "--json").splitlines()]

    named = json.dumps(ledgers())
    lost = max((f"bookie-{n}" for n in range(4)), key=named.count)
    assert named.count(lost) > 0

    bindery("standalone", "stop", lost, "--data", str(cluster.directory.root))
    name, url = leader(cluster)
    seen: list[dict[str, Any]] = []

    def is_marked() -> bool:
        seen.append(get(f"{url}/v1/recovery/status"))
        return bool(seen[-1]["marked"])

    until(is_marked, limit_s=HEALED_WITHIN_S, what="nothing was marked")
    assert any(one["bookie_id"] == lost for status in seen for one in status["lost"])

    pid = cluster.kill(name)
    other = cluster.auditor_url(1 - int(name.rpartition("-")[2]))

    def is_done() -> bool:
        status = get(f"{other}/v1/recovery/status")
        return status["marked"] == 0 and status["auditor"] is not None

    until(is_done, limit_s=HEALED_WITHIN_S, what="marks are left")
    until(lambda: cluster.has_restarted(name, since=pid), limit_s=60, what="not restarted")

    # The killed leader may not have marked all ledgers; the next one marks the rest in its first audit.
    until(lambda: lost not in json.dumps(ledgers()), limit_s=HEALED_WITHIN_S, what="ledgers still name it")
    for one in ledgers():
        assert {len(set(segment["ensemble"])) for segment in one["segments"]} == {3}
    texts = [event["text"] for event in get(f"{other}/v1/recovery/history?limit=1000")["events"]]
    assert any(text.startswith(f"{lost} is lost") for text in texts)
    assert sum(" is whole again: " in text for text in texts) >= 3
    for one in ledgers():
        bindery("ledger", "compare", str(one["ledger_id"]), *zookeeper)  # fails unless all replicas are equal
    assert bindery("consume", "one", "--url", cluster.url) == lines

    page = urllib.request.urlopen(f"{other}/", timeout=30).read().decode()
    assert "No ledger is known to be under-replicated." in page
    assert lost in page
    bookies = {one["bookie_id"]: one for one in get(f"{other}/v1/bookies")["bookies"]}
    assert (bookies[lost]["registration"], bookies[lost]["intent"]) == ("absent", "active")

    bindery("standalone", "start", lost, "--data", str(cluster.directory.root))

    def is_back() -> bool:
        return not get(f"{other}/v1/recovery/status")["lost"]

    until(is_back, limit_s=60, what="the bookie that came back still counts as lost")


def test_an_orderly_stop_hands_leadership_over_within_seconds(cluster: ThrowawayCluster) -> None:
    name, _ = leader(cluster)
    other = cluster.auditor_url(1 - int(name.rpartition("-")[2]))
    bindery("standalone", "stop", name, "--data", str(cluster.directory.root))
    began = time.monotonic()
    until(lambda: get(f"{other}/v1/recovery/status")["this"]["is_leader"], limit_s=30, what="no auditor took over")
    assert time.monotonic() - began < 20
    assert httpx.get(f"{other}/readyz").status_code == 200
    log = cluster.directory.log_file(name).read_text()
    assert "auditor_stopped" in log
    assert "recovery_not_stopped" not in log
    bindery("standalone", "start", name, "--data", str(cluster.directory.root))


def run_auditor(*arguments: str, timeout_s: float = 60.0) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "bindery_auditor", *arguments], capture_output=True, text=True, timeout=timeout_s
    )


def test_a_port_in_use_is_reported_at_once(cluster: ThrowawayCluster) -> None:
    port = cluster.auditor_url().rpartition(":")[2]
    done = run_auditor("--port", port, "--zookeeper", cluster.zookeeper)
    assert done.returncode == 2
    assert "cannot listen" in done.stderr


def test_without_zookeeper_the_start_waits_and_sigterm_ends_it() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "bindery_auditor", "--port", "0", "--zookeeper", "127.0.0.1:1", "--name", "a"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "zookeeper_not_reached" in line:
                break
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()


def test_before_initialization_the_start_waits_and_names_the_command(cluster: ThrowawayCluster) -> None:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "bindery_auditor", "--port", "0", "--name", "early"),
            *("--zookeeper", cluster.zookeeper, "--ledgers-root", "/nothing-yet"),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "cluster_not_initialised" in line:
                assert "bindery cluster init" in line
                break
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()


def test_a_start_with_a_timeout_ends_with_cause_and_fix_on_the_last_line(
    cluster: ThrowawayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = tmp_path / "termination-log"
    monkeypatch.setenv("BINDERY_TERMINATION_LOG", str(message))
    bounded = ("--port", "0", "--zookeeper-connect-timeout-s", "1")
    done = run_auditor(*bounded, "--zookeeper", "127.0.0.1:1")
    assert done.returncode == 1
    assert (
        done.stderr.splitlines()[-1]
        == message.read_text()
        == (
            "bindery-auditor: gave up waiting for ZooKeeper after 1 s: 127.0.0.1:1: connection refused; "
            "start ZooKeeper, or set AUDITOR_ZOOKEEPER to its servers"
        )
    )
    done = run_auditor(*bounded, "--zookeeper", cluster.zookeeper, "--ledgers-root", "/nothing-yet")
    assert done.returncode == 1
    assert "`bindery cluster init --zookeeper" in done.stderr.splitlines()[-1]


def test_an_address_beyond_loopback_requires_insecure() -> None:
    done = run_auditor("--host", "0.0.0.0", "--port", "0")
    assert done.returncode == 2
    assert "--insecure" in done.stderr
