"""Throwaway clusters: their ports, and the processes that end with a supervisor that is killed."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from bindery.standalone import throwaway
from bindery.standalone.directory import ProcessIdentity
from bindery.standalone.options import Options
from bindery.standalone.plan import plan_cluster
from bindery.standalone.throwaway import CLAIM_PORT, OFFSETS, ThrowawayCluster
from forked_cluster import ForkedCluster


def test_two_clusters_have_different_ports_also_before_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throwaway.random, "SystemRandom", lambda: random.Random(1))
    first = ThrowawayCluster(bookies=1)
    second = ThrowawayCluster(bookies=1)
    assert first.port_offset != second.port_offset
    first.close()
    third = ThrowawayCluster(bookies=1)
    assert third.port_offset == first.port_offset, "given back"
    second.close()
    third.close()


def test_clusters_of_different_offsets_share_no_port() -> None:
    def ports(offset: int) -> list[int]:
        options = Options(zookeepers=3, bookies=10, brokers=10, auditors=10, port_offset=offset)
        plan = plan_cluster(options, root=Path("/d"), zookeeper_command=lambda *_: ["zookeeper"])
        return [CLAIM_PORT + offset, *(port for process in plan.processes for _, port in process.ports)]

    used = [port for offset in OFFSETS for port in ports(offset)]
    assert len(used) == len(OFFSETS) * (1 + 9 + 20 + 10 + 10)
    assert len(set(used)) == len(used)
    assert max(used) < 32_768, "an outgoing connection may use the port"


@pytest.mark.integration
def test_the_processes_of_a_forked_cluster_end_when_its_supervisor_is_killed() -> None:
    cluster = ForkedCluster(bookies=1, brokers=0, auditors=0)
    try:
        cluster.start()
        bookie = ProcessIdentity.of(cluster.pid("bookie-0"))
        assert bookie is not None
        os.kill(cluster.status()["supervisor_pid"], signal.SIGKILL)
        deadline = time.monotonic() + 30
        while bookie.is_alive:
            assert time.monotonic() < deadline, "the bookie runs without a supervisor"
            time.sleep(0.05)
    finally:
        cluster.close()
