"""A run from its first message to its report, with a fake cluster and fake traffic."""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
from bindery_e2e.cluster.cluster import ClusterError
from bindery_e2e.cluster.commands import CommandFailed
from bindery_e2e.cluster.endpoint import BrokerEndpoint
from bindery_e2e.cluster.world import Compared, World
from bindery_e2e.faults.faults import WHOLE, Fault
from bindery_e2e.judging.history import read_history
from bindery_e2e.runs import runner, session
from bindery_e2e.runs.runner import Run, RunSettings, minutes, settled
from bindery_e2e.traffic.traffic import Counts, TrafficSettings

from .test_cluster import FakeApps, FakeCore, Recorded, node, v1_pod
from .test_faults import world_of


class StillTraffic:
    """Traffic that acknowledges immediately."""

    def __init__(self, history: Any, endpoint: Any, *, files: Any, settings: TrafficSettings) -> None:
        self.counts = Counts()
        self._history = history

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def wait_acknowledged(self, count: int, *, timeout_s: float) -> None:
        self.counts.acknowledged += count

    async def finish(self, *, timeout_s: float) -> None:
        self._history.observe("note", text="drained")


class Scripted(Fault):
    """A fault that calls the given functions and records the calls."""

    def __init__(self, *, inject: Callable[[], None] = lambda: None, why_not: str = "", over: bool = True) -> None:
        super().__init__(0.0)
        self.done: list[str] = []
        self._inject = inject
        self._why_not = why_not
        self._over = over

    name = "scripted"  # type: ignore[assignment]
    recover_s_max = 0.0

    def precondition(self, world: World) -> str:
        return self._why_not

    def choose(self, world: World) -> str:
        self.target = "b-0"
        return self.target

    def inject(self, world: World) -> None:
        self.done.append("injected")
        self._inject()

    def heal(self, world: World) -> None:
        self.done.append("healed")

    def problem(self, world: World) -> str:
        return "" if self._over else "b-0 does not come back"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """A cluster without pods that is always recovered."""
    monkeypatch.setattr(runner, "Traffic", StillTraffic)
    made = world_of(v1_pod("a-0", "auditor"))
    monkeypatch.setattr(made, "wait_whole", lambda **_: 0.0)
    monkeypatch.setattr(made, "copied", lambda: (7, 700))
    monkeypatch.setattr(made, "compare_replicas", lambda: Compared(1, 2, 6))
    monkeypatch.setattr(made.cluster, "auditor_status", lambda: (None, {"marked": 0}))
    made.say = lambda text: None
    return made


def played(world: World, folder: Path, *steps: list[Fault]) -> tuple[Run, list[Any]]:
    run = Run(world, RunSettings(folder=folder, data=(Path(__file__),)))
    asyncio.run(run.play(steps))
    return run, list(read_history(run.history_path))


def ends(records: list[Any]) -> list[tuple[str, str]]:
    return [(one.values["outcome"], one.values.get("detail", "")) for one in records if one.type == "fault-end"]


def observed(records: list[Any]) -> dict[str, dict[str, Any]]:
    """The last observation of each kind."""
    return {one.values["what"]: one.values for one in records if one.type == "observation"}


def test_a_complete_run_has_made_all_checks(world: World, tmp_path: Path) -> None:
    fault = Scripted()
    run, records = played(world, tmp_path, [fault])
    assert run.failures == []
    assert fault.done == ["injected", "healed"]
    assert [outcome for outcome, _ in ends(records)] == ["ok"]
    seen = observed(records)
    assert seen["replicas"]["compared"] == 2
    assert seen["under-replicated"]["count"] == 0
    assert seen["ready"]["ready"] == seen["ready"]["wanted"]


def test_a_fault_that_is_not_offered_is_neither_injected_nor_passed(world: World, tmp_path: Path) -> None:
    fault = Scripted(why_not="no nodes here")
    _, records = played(world, tmp_path, [fault])
    assert fault.done == []
    assert ends(records) == [("not offered", "no nodes here")]


def test_a_fault_that_fails_is_undone_and_ends_the_faults_and_the_run_is_judged(world: World, tmp_path: Path) -> None:
    def refuse() -> None:
        raise ClusterError("the API server says no")

    failing, next_one = Scripted(inject=refuse), Scripted()
    run, records = played(world, tmp_path, [failing], [next_one])
    assert failing.done == ["injected", "healed"]
    assert next_one.done == []
    assert run.failures == ["ClusterError: the API server says no"]
    assert [one.values["reason"] for one in records if one.values.get("what") == "incomplete"] == run.failures
    assert {"replicas", "under-replicated", "ready"} <= observed(records).keys()
    ((outcome, detail),) = ends(records)
    assert outcome == "failed"
    assert "the API server says no" in detail
    report = session.conclude(run, say=lambda text: None)
    assert report.judgement.verdict == "BAD"
    assert [(one.kind, one.count) for one in report.judgement.findings] == [("fault-failed", 1)]
    assert "the API server says no" in report.judgement.findings[0].examples[0]
    assert not {"diverged", "under-replicated", "not-ready"} & report.judgement.unjudged.keys()
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "cluster" / "pods.txt").exists()


def test_a_fault_that_could_not_be_undone_is_undone_before_the_drain(world: World, tmp_path: Path) -> None:
    class Stubborn(Scripted):
        def heal(self, world: World) -> None:
            super().heal(world)
            if self.done.count("healed") == 1:
                raise ClusterError("the node does not answer")
            self.done.append("after the drain" if "drained" in (tmp_path / "history.jsonl").read_text() else "in time")

    fault = Stubborn()
    run, records = played(world, tmp_path, [fault])
    assert fault.done == ["injected", "healed", "healed", "in time"]
    assert [(outcome, detail) for outcome, detail in ends(records)] == [
        ("failed", "ClusterError: the node does not answer")
    ]
    assert len(run.failures) == 1


def test_a_check_that_fails_does_not_prevent_the_others(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(_: World) -> Compared:
        raise CommandFailed("no toolbox")

    monkeypatch.setattr(runner, "settled", unreachable)
    run, records = played(world, tmp_path, [Scripted()])
    assert run.failures == ["CommandFailed: no toolbox"]
    assert {"under-replicated", "ready"} <= observed(records).keys()
    judgement = session.conclude(run, say=lambda text: None).judgement
    assert "diverged" in judgement.unjudged


def test_a_cluster_that_does_not_recover_from_a_fault_is_bad(world: World, tmp_path: Path) -> None:
    run, records = played(world, tmp_path, [Scripted(over=False)])
    ((outcome, detail),) = ends(records)
    assert outcome == "failed"
    assert "b-0 does not come back" in detail
    assert session.conclude(run, say=lambda text: None).judgement.verdict == "BAD"


def test_a_stopped_run_undoes_its_faults_and_writes_its_report(world: World, tmp_path: Path) -> None:
    async def stopped(fault: Scripted, settings: RunSettings) -> None:
        playing = asyncio.create_task(session.play(world, settings, [[fault]], say=lambda text: None))
        while not fault.done:
            await asyncio.sleep(0.01)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    fault = Scripted(inject=lambda: time.sleep(0.3))
    asyncio.run(stopped(fault, RunSettings(folder=tmp_path, data=(Path(__file__),))))
    assert fault.done == ["injected", "healed"]
    assert (tmp_path / "report.html").exists()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["verdict"] == "INCOMPLETE"
    assert "stopped by hand" in summary["missing"]


def test_a_fault_without_a_target_fails(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(*_: object, **__: object) -> float:
        raise ClusterError("no auditor leads")

    monkeypatch.setattr(world.cluster, "until", nobody)
    run, records = played(world, tmp_path, [Scripted()])
    assert ends(records) == [("failed", "ClusterError: no auditor leads")]
    assert session.conclude(run, say=lambda text: None).judgement.verdict == "BAD"


def test_a_fault_whose_precondition_cannot_be_checked_fails(world: World, tmp_path: Path) -> None:
    class Blind(Scripted):
        def precondition(self, world: World) -> str:
            raise CommandFailed("kubectl: no route to host")

    _, records = played(world, tmp_path, [Blind()])
    assert ends(records) == [("failed", "CommandFailed: kubectl: no route to host")]


def test_faults_of_a_step_overlap(world: World, tmp_path: Path) -> None:
    meet = threading.Barrier(2, timeout=30)
    _, records = played(world, tmp_path, [Scripted(inject=meet.wait), Scripted(inject=meet.wait)])
    assert [outcome for outcome, _ in ends(records)] == ["ok", "ok"]


def test_no_step_begins_after_the_time_limit(world: World, tmp_path: Path) -> None:
    faults = [Scripted() for _ in range(5)]
    now = itertools.count(0.0, 10.0)
    run = Run(world, RunSettings(folder=tmp_path, seconds=60, data=(Path(__file__),)), clock=lambda: next(now))
    asyncio.run(run.play([[fault] for fault in faults]))
    assert 0 < sum(bool(fault.done) for fault in faults) < 5
    assert run.failures == []


def test_only_faults_with_a_limit_record_copied_entries(world: World, tmp_path: Path) -> None:
    counted = Scripted()
    counted.entries_copied_max = 5
    _, records = played(world, tmp_path, [counted], [Scripted()])
    begun = [one.values.get("entries_copied_max") for one in records if one.type == "fault-begin"]
    ended = [one.values.get("entries_copied") for one in records if one.type == "fault-end"]
    assert (begun, ended) == ([5, None], [0, None])


def test_replicas_are_compared_until_they_agree(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.cluster, "_sleep", lambda seconds: None)
    looks = iter([Compared(wrong=["ledger 3"]), Compared(entries=9)])
    monkeypatch.setattr(world, "compare_replicas", lambda: next(looks))
    assert settled(world).entries == 9
    monkeypatch.setattr(world, "compare_replicas", lambda: Compared(wrong=["ledger 3"]))
    assert settled(world, timeout_s=0).wrong == ["ledger 3"]


def test_a_fault_takes_the_whole_cluster_by_default() -> None:
    assert Scripted().takes == {WHOLE}


def test_time_is_shown_in_minutes() -> None:
    assert minutes(754.9) == "12:34"


class TestEndpoint:
    def cluster(self, node_port: int | None) -> Any:
        from types import SimpleNamespace as Thing

        from bindery_e2e.cluster.cluster import Cluster

        core: Any = FakeCore([])
        core.list_node = lambda **_: Thing(items=[node("n2", "10.0.0.2"), node("n1", "10.0.0.1")])
        core.read_namespaced_endpoints = lambda *_, **__: Thing(subsets=[Thing(addresses=[Thing(ip="10.0.0.2")])])
        core.read_namespaced_service = lambda *_, **__: Thing(spec=Thing(ports=[Thing(node_port=node_port)]))
        return Cluster(core, FakeApps(), namespace="ns", runner=Recorded())

    def test_a_configured_url_is_preferred(self) -> None:
        endpoint = BrokerEndpoint(self.cluster(30000), environment={"BINDERY_E2E_URL": "http://b"}.get)
        assert endpoint.url() == "http://b"

    def test_a_nodes_port_is_tried_at_the_control_plane_first(self) -> None:
        tried: list[tuple[str, int]] = []

        def reachable(host: str, port: int) -> bool:
            tried.append((host, port))
            return host == "10.0.0.1"

        endpoint = BrokerEndpoint(self.cluster(30000), environment={}.get, reachable=reachable)
        assert endpoint.url() == "http://10.0.0.1:30000"
        assert tried == [("10.0.0.2", 30000), ("10.0.0.1", 30000)]
