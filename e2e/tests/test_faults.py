"""Actions, targets and overlaps of the faults."""

import itertools
from collections.abc import Iterable, Sequence
from types import SimpleNamespace as Thing
from typing import Any

import pytest
from bindery_e2e.cluster.cluster import Cluster, ClusterError
from bindery_e2e.cluster.commands import CommandFailed, Nodes
from bindery_e2e.cluster.release import Release
from bindery_e2e.cluster.world import NOT_STARTED_POLLS_MAX, World, compared
from bindery_e2e.faults.faults import (
    CLAIMS_SEEN_S,
    WHOLE,
    Fault,
    KillProcess,
    LoseVolume,
    NodeFault,
    StopNode,
    StopProcess,
    UpgradeImages,
    catalogue,
)
from bindery_e2e.runs import chaos, suite

from .test_cluster import FakeApps, FakeCore, Recorded, node, v1_pod


def world_of(*pods: Any, runner: Recorded | None = None, nodes: Nodes | None = None) -> World:
    runner = runner or Recorded()
    cluster = Cluster(FakeCore(pods), FakeApps(), namespace="ns", runner=runner)
    return World(cluster, Release(cluster, runner=runner), nodes, topics=("public/default/a",))


def test_every_fault_is_in_the_quick_suite_once() -> None:
    played = [name for names in suite.STEPS for name in names]
    assert sorted(played) == sorted(catalogue())


def test_the_quick_suite_overlaps_only_faults_that_may_overlap() -> None:
    for step in suite.quick_steps(1):
        for first, second in itertools.combinations(step, 2):
            assert chaos.fit(first, second), (str(first), str(second))


def names_of_steps(steps: Iterable[Sequence[Fault]]) -> list[tuple[str, ...]]:
    return [tuple(fault.name for fault in step) for step in steps]


def test_a_sample_has_one_step_of_every_kind_and_depends_on_the_seed() -> None:
    for seed in range(50):
        names = names_of_steps(suite.sampled_steps(seed))
        assert names == names_of_steps(suite.sampled_steps(seed))
        assert len(names) == len(suite.KINDS)
        assert all(step in kind for step, kind in zip(names, suite.KINDS, strict=True))
        assert [type(step[0]) for step in suite.sampled_steps(seed)][4].__mro__[1] is NodeFault


def test_samples_of_many_seeds_play_every_fault() -> None:
    played = {name for seed in range(50) for step in names_of_steps(suite.sampled_steps(seed)) for name in step}
    assert played == set(catalogue())


def figures(fault: str, outcome: str) -> Any:
    return Thing(fault=fault, outcome=outcome)


PLAN: list[list[Fault]] = [[StopNode()], [KillProcess(0.0), StopProcess(0.0, "broker", "owner")]]
PLAYED = [figures("stop node", "ok"), figures("kill -9 bookie", "ok"), figures("SIGSTOP broker owner", "ok")]


@pytest.mark.parametrize(
    ("played", "has_nodes", "problems"),
    [
        (PLAYED, True, []),
        ([figures("stop node", "not offered"), *PLAYED[1:]], True, ["stop node: not offered"]),
        ([figures("stop node", "not offered"), *PLAYED[1:]], False, []),
        ([PLAYED[0], figures("kill -9 bookie", "not offered"), PLAYED[2]], False, ["kill -9 bookie: not offered"]),
        (PLAYED[:2], True, ["SIGSTOP broker owner: not begun"]),
        ([*PLAYED[:2], figures("SIGSTOP broker owner", "")], True, ["SIGSTOP broker owner: never ended"]),
    ],
)
def test_a_planned_fault_that_was_not_played_is_a_failure(
    played: list[Any], has_nodes: bool, problems: list[str]
) -> None:
    assert suite.not_played(PLAN, played, has_nodes=has_nodes) == problems


def names_of(seed: int, count: int) -> list[list[tuple[str, float]]]:
    return [[(fault.name, fault.draw) for fault in step] for step in itertools.islice(chaos.random_steps(seed), count)]


def test_the_seed_determines_the_sequence() -> None:
    assert names_of(7, 200) == names_of(7, 200)
    assert names_of(7, 200) != names_of(8, 200)


def test_a_long_run_has_every_fault_and_only_allowed_overlaps() -> None:
    steps = list(itertools.islice(chaos.random_steps(3), 500))
    assert {fault.name for step in steps for fault in step} == set(catalogue())
    pairs = [step for step in steps if len(step) == 2]
    assert len(pairs) > 50
    for first, second in pairs:
        assert not first.takes & second.takes
        assert WHOLE not in first.takes | second.takes


@pytest.mark.parametrize("state", [{"node": None}, {"waiting": "ContainerCreating"}], ids=["no node", "no containers"])
def test_a_pod_that_does_not_start_is_deleted_once(state: dict[str, Any]) -> None:
    world = world_of(v1_pod("b-0"), v1_pod("b-1", ready=False, **state))
    assert isinstance(world.cluster.core, FakeCore)
    for _ in range(NOT_STARTED_POLLS_MAX - 1):
        assert "b-1" in world.problem()
    assert world.cluster.core.deleted == []
    for _ in range(NOT_STARTED_POLLS_MAX):
        assert "b-1" in world.problem()
    assert [name for name, _ in world.cluster.core.deleted] == ["b-1"], "another one has another uid"


def test_a_pod_in_crash_loop_back_off_is_deleted() -> None:
    world = world_of(v1_pod("b-0"), v1_pod("b-1", ready=False, restarts=6, waiting="CrashLoopBackOff"))
    assert isinstance(world.cluster.core, FakeCore)
    assert "b-1" in world.problem()
    assert [name for name, _ in world.cluster.core.deleted] == ["b-1"]


def test_the_random_number_selects_a_ready_pod() -> None:
    world = world_of(v1_pod("b-0"), v1_pod("b-1", ready=False), v1_pod("b-2"), v1_pod("b-3"))
    assert [world.chosen("bookie", lot).name for lot in (0.0, 0.4, 0.99)] == ["b-0", "b-2", "b-3"]
    with pytest.raises(ClusterError, match="no auditor is ready"):
        world.chosen("auditor", 0.5)


def test_a_kill_ends_only_after_a_restart() -> None:
    world = world_of(v1_pod("b-0", restarts=2))
    fault = KillProcess(0.0)
    assert fault.choose(world) == "b-0"
    assert str(fault) == "kill -9 bookie (b-0)"
    assert fault.problem(world) == "b-0 has not been restarted"


def test_stop_continues_the_same_process_and_leaves_a_restarted_one_alone() -> None:
    runner = Recorded()
    pod = v1_pod("b-0")
    world = world_of(pod, runner=runner)
    slept: list[float] = []
    fault = StopProcess(0.0, seconds=9.0, sleep=slept.append)
    fault.choose(world)
    fault.inject(world)
    fault.heal(world)
    assert slept == [9.0]
    assert ["STOP" in runner.commands[0][-1], "CONT" in runner.commands[1][-1]] == [True, True]
    pod.status.container_statuses[0].restart_count = 1
    fault.heal(world)
    assert len(runner.commands) == 2


def test_a_signal_to_continue_that_hangs_is_repeated_unless_the_process_was_restarted() -> None:
    pod = v1_pod("b-0")
    runner = Recorded("", CommandFailed("not done after 15 s"), CommandFailed("not done after 15 s"), "")
    polls: list[float] = []
    cluster = Cluster(FakeCore([pod]), FakeApps(), namespace="ns", runner=runner, sleep=polls.append)
    world = World(cluster, Release(cluster, runner=runner))
    fault = StopProcess(0.0, sleep=lambda seconds: None)
    fault.choose(world)
    fault.inject(world)
    fault.heal(world)
    assert ["CONT" in command[-1] for command in runner.commands] == [False, True, True, True]
    assert polls == [1.0, 1.0]
    runner.answers = [CommandFailed("not done after 15 s")]
    pod.status.container_statuses[0].restart_count = 1
    fault.heal(world)
    assert len(runner.commands) == 4


def nodes_of(world: World, *names: str) -> None:
    core: Any = world.cluster.core
    core.list_node = lambda **_: Thing(items=[node(name, name) for name in names])
    core.read_namespaced_endpoints = lambda *_, **__: Thing(subsets=[Thing(addresses=[Thing(ip=names[0])])])


class CoreWithClaims(FakeCore):
    """Also has volume claims, and records the order of deletions. A deleted claim stays while a pod uses it."""

    def __init__(self, pods: Sequence[Any], claims: dict[str, str]) -> None:
        super().__init__(pods)
        self.claims = claims
        self.order: list[str] = []

    def list_namespaced_persistent_volume_claim(self, namespace: str, **_: Any) -> Any:
        return Thing(items=[Thing(metadata=Thing(name=name, uid=uid)) for name, uid in self.claims.items()])

    def delete_namespaced_persistent_volume_claim(self, name: str, namespace: str, **_: Any) -> None:
        self.order.append(name)

    def delete_namespaced_pod(self, name: str, namespace: str, *, _request_timeout: float, **options: Any) -> None:
        super().delete_namespaced_pod(name, namespace, _request_timeout=_request_timeout, **options)
        self.order.append(name)


def test_a_lost_volume_is_replaced_only_when_its_claims_are_new() -> None:
    core = CoreWithClaims([v1_pod("b-0", claims=("ledgers-b-0",))], {"ledgers-b-0": "old"})
    cluster = Cluster(core, FakeApps(), namespace="ns", runner=Recorded())
    world = World(cluster, Release(cluster, runner=Recorded()), say=lambda text: None)
    fault = LoseVolume(0.0)
    fault.sleep = lambda seconds: core.order.append(f"{seconds:g} s")
    assert fault.choose(world) == "b-0"
    fault.inject(world)
    assert core.order == ["ledgers-b-0", f"{CLAIMS_SEEN_S:g} s", "b-0"]
    assert core.deleted == [("b-0", {"grace_period_seconds": 0})]
    core.there = [v1_pod("b-0", uid="new", ready=False, waiting="ContainerCreating")]
    for _ in range(NOT_STARTED_POLLS_MAX):
        assert fault.problem(world).startswith("not replaced yet: ledgers-b-0; ")
    assert core.order[3:] == ["b-0"], "a pod that waits for its old claim is deleted"
    core.claims = {"ledgers-b-0": "new"}
    assert "not replaced yet" not in fault.problem(world)


def test_a_node_fault_spares_the_control_plane_and_prefers_the_fewest_bookies() -> None:
    runner = Recorded()
    world = world_of(
        v1_pod("b-0", node="n1"),
        v1_pod("b-1", node="n2"),
        v1_pod("b-2", node="n2"),
        v1_pod("b-3", node="n3"),
        v1_pod("z-1", "zookeeper", node="n3"),
        nodes=Nodes(("nodes",), runner=runner),
    )
    nodes_of(world, "n1", "n2", "n3")
    fault = StopNode(0.99, sleep=lambda seconds: None)
    assert fault.precondition(world) == ""
    assert fault.choose(world) == "n3"
    fault.inject(world)
    fault.heal(world)
    assert runner.commands == [["nodes", "stop", "n3"], ["nodes", "start", "n3"]]


def test_a_node_with_two_zookeepers_is_never_a_target() -> None:
    world = world_of(
        v1_pod("z-1", "zookeeper", node="n2"), v1_pod("z-2", "zookeeper", node="n2"), nodes=Nodes(("nodes",))
    )
    nodes_of(world, "n1", "n2")
    assert "at most one ZooKeeper" in StopNode(0.0).precondition(world)


def test_without_the_hook_node_faults_are_not_offered() -> None:
    assert "E2E_NODES is not set" in StopNode(0.0).precondition(world_of())


def test_only_an_upgrade_that_was_begun_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Recorded()
    world = world_of(runner=runner)
    world.next_version = "0.1.1"
    fault = UpgradeImages(0.0)
    fault.choose(world)

    def refuse(**_: Any) -> float:
        raise ClusterError("3 ledgers marked")

    monkeypatch.setattr(world, "wait_whole", refuse)
    with pytest.raises(ClusterError):
        fault.inject(world)
    fault.heal(world)
    assert runner.commands == []
    monkeypatch.setattr(world, "wait_whole", lambda **_: 0.0)
    fault.inject(world)
    fault.heal(world)
    assert [command[3] for command in runner.commands] == ["upgrade", "rollback"]


def test_faults_overlap_only_if_they_stop_different_components() -> None:
    make = catalogue()
    assert chaos.fit(make["kill -9 bookie"](0), make["kill -9 zookeeper leader"](0))
    assert not chaos.fit(make["kill -9 bookie"](0), make["delete bookie"](0))
    assert not chaos.fit(make["kill -9 bookie"](0), make["stop node"](0))
    assert not chaos.fit(make["lose the volume of bookie"](0), make["kill -9 broker owner"](0))


def test_all_replicas_are_counted_and_every_wrong_ledger_is_reported() -> None:
    good = {
        "ledger_id": 1,
        "state": "closed",
        "verdict": "agrees",
        "entries": 2,
        "bad": [],
        "reasons": [],
        "bookies": {"a": {"good": 2}, "b": {"good": 2}},
    }
    bad = {
        **good,
        "ledger_id": 2,
        "verdict": "differs",
        "bad": ["entry 1: missing on b"],
        "reasons": [{"bookie": "b", "reason": "timed out", "entries": 1}],
    }
    found = compared([good, bad])
    assert (found.ledgers, found.entries, found.copies) == (2, 4, 8)
    assert found.wrong == ["ledger 2 (closed) differs: entry 1: missing on b; b: timed out"]
