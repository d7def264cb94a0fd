"""Operator commands on a cluster of real processes: drain and return, refused drain, pause, a lost bookie, and
metadata that is lost and restored from a backup."""

import asyncio
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from bindery_metadata.stores.embedded import EmbeddedZooKeeper, ServerSpec
from command import bindery
from forked_cluster import ForkedCluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]  # a busy machine needs minutes instead of seconds
TOPICS = ("one", "two", "three")
MESSAGES = 100


class Operator:
    """Runs commands as processes. The environment names the ZooKeeper."""

    def __init__(self, cluster: ForkedCluster) -> None:
        self.cluster = cluster
        self.unknown: set[str] = set()
        """Messages that were sent again."""

    def run(self, *arguments: str, code: int = 0, timeout_s: float = 200) -> "subprocess.CompletedProcess[str]":
        done = bindery(*arguments, timeout_s=timeout_s)
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def lines(self, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.run(*arguments, "--json", code=code).stdout.splitlines()]

    def members(self) -> dict[str, dict[str, Any]]:
        return {member["bookie_id"]: member for member in self.lines("bookie", "members")}

    def ledgers(self) -> dict[int, dict[str, Any]]:
        return {ledger["ledger_id"]: ledger for ledger in self.lines("ledger", "list")}

    def named(self) -> set[str]:
        """Return all bookies in the metadata of any ledger."""
        return {b for ledger in self.ledgers().values() for segment in ledger["segments"] for b in segment["ensemble"]}

    def check_all(self) -> None:
        """Read every replica of every ledger from its bookie."""
        for ledger_id in self.ledgers():
            *_, summary = self.lines("ledger", "check", str(ledger_id), "--deep")
            assert summary["verdict"] == "good", summary

    def produce(self, start: int) -> None:
        """Send the messages from `start` on to each topic, in order. A message with unknown outcome is sent again."""
        with httpx.Client(base_url=self.cluster.url, timeout=60) as http:
            for topic in TOPICS:
                for number in range(start, start + MESSAGES):
                    self.send(http, topic, number)

    def send(self, http: httpx.Client, topic: str, number: int) -> None:
        for _ in range(20):
            answer = http.post(f"/v1/topics/public/default/{topic}/messages", content=payload(topic, number))
            if answer.status_code == 200:
                return
            # Recovery closed the ledger of an idle topic. The owner detects this now and opens the topic again.
            assert answer.status_code in (503, 504), answer.text
            self.unknown.add(payload(topic, number))
            time.sleep(0.5)
        raise AssertionError(answer.text)

    def verify_messages(self, count: int) -> None:
        """Assert that every acknowledged message exists, in order, once; at most twice if an outcome was unknown."""
        for topic in TOPICS:
            found = self.run("consume", topic, "--url", self.cluster.url).stdout.splitlines()
            once = [
                text for at, text in enumerate(found) if not (at and text == found[at - 1] and text in self.unknown)
            ]
            assert once == [payload(topic, number) for number in range(count)]


def payload(topic: str, number: int) -> str:
    return f"{topic} {number} " * 50


def until(condition: Callable[[], bool], what: str, *, timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting for: {what}"
        time.sleep(0.5)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delays and intervals of seconds, which the processes read from the environment."""
    monkeypatch.setenv("AUDITOR_OPEN_LEDGER_GRACE_S", "2")
    monkeypatch.setenv("AUDITOR_DRAIN_INTERVAL_S", "2")


@pytest.fixture
def operator(quick: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Operator]:
    with ForkedCluster(bookies=4, options=("--auditors", "1")) as cluster:
        monkeypatch.setenv("BINDERY_ZOOKEEPER", cluster.zookeeper)
        yield Operator(cluster)


@pytest.mark.long_run
def test_a_bookie_is_drained_and_returned_and_a_lost_bookie_is_recovered(operator: Operator) -> None:
    operator.produce(0)
    victim, other, *_ = sorted(operator.named())

    # Drain the bookie with a progress line while messages are sent.
    drained = operator.lines("bookie", "drain", victim, "--wait")
    assert drained[0]["ledgers"] >= 1
    assert (drained[-1]["done"], drained[-1]["ledgers_left"], drained[-1]["percent"]) == (True, 0, 100.0)
    assert victim not in operator.named()
    assert operator.members()[victim]["registered"] == "read-only"
    operator.check_all()
    operator.produce(MESSAGES)
    assert victim not in operator.named(), "a draining bookie gets no new ledgers"

    # Three bookies remain, and ledgers have ensembles of three.
    refused = operator.run("bookie", "drain", other, code=1)
    assert "needs 3 bookies, and without it 2 would be writable" in refused.stderr

    # Return the bookie to the cluster.
    operator.run("bookie", "drain", victim, "--cancel")
    until(lambda: operator.members()[victim]["registered"] == "writable", "the drained bookie is writable again")
    kinds = [event["kind"] for event in operator.lines("recovery", "history")]
    assert [kind for kind in kinds if kind.startswith("drain_")] == [
        "drain_started",
        "drain_finished",
        "drain_cancelled",
    ]

    # Remove a bookie permanently while recovery is paused: the command reports that it waits, then continues.
    assert f"{other} is registered" in operator.run("bookie", "recover", other, "--yes", code=1).stderr
    operator.run("recovery", "pause", "--reason", "rack is moving")
    operator.run("standalone", "stop", other, "--data", str(operator.cluster.directory.root))
    until(lambda: operator.members()[other]["registered"] == "absent", "the stopped bookie's session ends")
    (planned,) = operator.lines("bookie", "recover", other, "--dry-run")
    assert planned["ledgers"] >= 1
    operator.run("bookie", "recover", other, "--yes")
    (status,) = operator.lines("recovery", "status", code=1)
    assert (status["enabled"], status["pause"]["reason"]) == (False, "rack is moving")
    assert status["marked"]["ledgers"] == planned["ledgers"]
    a_ledger = min(ledger_id for ledger_id, facts in operator.ledgers().items() if other in str(facts["segments"]))
    (explained,) = operator.lines("recovery", "explain", str(a_ledger), code=1)
    assert "automatic recovery was disabled" in explained["sentence"]
    assert operator.run("ledger", "check", str(a_ledger), code=3).stdout.count("GONE") >= 1
    operator.run("recovery", "resume")
    *_, last = operator.lines("bookie", "recover", other, "--yes", "--wait")
    assert (last["done"], last["cookie_removed"]) == (True, True)
    assert other not in operator.named()
    assert operator.members()[other]["has_cookie"] is False
    operator.check_all()
    (status,) = operator.lines("recovery", "status")
    assert (status["marked"]["ledgers"], status["lost_bookies"]) == (0, [])

    # No message was lost or duplicated.
    operator.verify_messages(2 * MESSAGES)
    *_, summary = operator.lines("ledgers", "orphans", "--older-than", "0s")
    assert summary["orphans"] == 0


def test_a_cluster_whose_zookeeper_is_lost_reads_its_topics_after_a_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        spec = ServerSpec(tmp_path / "zookeeper", probe.getsockname()[1])
    address = f"127.0.0.1:{spec.client_port}"
    server = EmbeddedZooKeeper(spec)
    asyncio.run(server.start())
    cluster = ForkedCluster(bookies=3, options=("--zookeeper", address))
    monkeypatch.setenv("BINDERY_ZOOKEEPER", address)
    operator = Operator(cluster)
    file = str(tmp_path / "metadata.jsonl")
    try:
        cluster.start()
        operator.produce(0)
        (backup,) = operator.lines("cluster", "backup", file)
        before = set(operator.ledgers())
        assert backup["settled"]
        assert backup["ledgers"] == len(before)
        cluster.stop()

        # All data of ZooKeeper is lost.
        asyncio.run(server.stop())
        shutil.rmtree(spec.data_dir)
        server = EmbeddedZooKeeper(spec)
        asyncio.run(server.start())
        operator.run("cluster", "restore", file, "--dry-run")
        (restored,) = operator.lines("cluster", "restore", file)
        assert restored["created"] == backup["nodes"]
        assert "the target is not empty" in operator.run("cluster", "restore", file, code=1).stderr

        cluster.start()
        operator.produce(MESSAGES)
        operator.verify_messages(2 * MESSAGES)
        new = set(operator.ledgers()) - before
        assert new
        assert min(new) >= restored["next_ledger_id"] > max(before)
    finally:
        cluster.close()
        asyncio.run(server.stop())
