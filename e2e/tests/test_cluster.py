"""Pods, protected nodes and commands, without a cluster."""

import json
from collections.abc import Sequence
from types import SimpleNamespace as Thing
from typing import Any

import pytest
from bindery_e2e.cluster.cluster import (
    SIGNAL_SCRIPT,
    Cluster,
    ClusterError,
    Pod,
    control_plane_nodes,
    pod_of,
)
from bindery_e2e.cluster.commands import CommandFailed, Nodes, hook, json_lines, run


def v1_pod(name: str, component: str = "bookie", **changed: Any) -> Any:
    values: dict[str, Any] = {
        "ready": True, "ip": "10.0.0.1", "node": "node2", "restarts": 0, "waiting": None, "deleted": None,
        "claims": (), "image": "bindery/bookie:0.1.0", "uid": f"uid-{name}", **changed,
    }  # fmt: skip
    waiting = Thing(reason=values["waiting"]) if values["waiting"] else None
    return Thing(
        metadata=Thing(
            name=name,
            uid=values["uid"],
            deletion_timestamp=values["deleted"],
            labels={"app.kubernetes.io/component": component},
        ),
        spec=Thing(
            node_name=values["node"],
            volumes=[Thing(persistent_volume_claim=Thing(claim_name=claim)) for claim in values["claims"]]
            + [Thing(persistent_volume_claim=None)],
            containers=[Thing(image=values["image"])],
        ),
        status=Thing(
            phase="Running",
            pod_ip=values["ip"],
            conditions=[Thing(type="Ready", status="True" if values["ready"] else "False")],
            container_statuses=[Thing(restart_count=values["restarts"], state=Thing(waiting=waiting))],
        ),
    )


class FakeCore:
    """A fake of the part of CoreV1Api that reads and deletes pods."""

    def __init__(self, pods: Sequence[Any]) -> None:
        self.there = list(pods)
        self.deleted: list[tuple[str, dict[str, Any]]] = []

    def list_namespaced_pod(self, namespace: str, *, label_selector: str, **_: Any) -> Any:
        wanted = dict(part.split("=") for part in label_selector.split(","))
        component = wanted.get("app.kubernetes.io/component")
        return Thing(
            items=[pod for pod in self.there if component in (None, pod.metadata.labels["app.kubernetes.io/component"])]
        )

    def read_namespaced_pod(self, name: str, namespace: str, **_: Any) -> Any:
        return next(pod for pod in self.there if pod.metadata.name == name)

    def delete_namespaced_pod(self, name: str, namespace: str, *, _request_timeout: float, **options: Any) -> None:
        self.deleted.append((name, options))


class FakeApps:
    def __init__(self, **replicas: int) -> None:
        self.replicas = replicas

    def list_namespaced_stateful_set(self, namespace: str, **_: Any) -> Any:
        return Thing(items=[self._one(name) for name in self.replicas if name in ("bookie", "zookeeper")])

    def list_namespaced_deployment(self, namespace: str, **_: Any) -> Any:
        return Thing(items=[self._one(name) for name in self.replicas if name not in ("bookie", "zookeeper")])

    def _one(self, name: str) -> Any:
        return Thing(
            metadata=Thing(labels={"app.kubernetes.io/component": name}), spec=Thing(replicas=self.replicas[name])
        )


class Recorded:
    """A Runner with prepared outputs that records the commands."""

    def __init__(self, *answers: str | Exception) -> None:
        self.answers = list(answers)
        self.commands: list[list[str]] = []
        self.stdin: list[str | None] = []

    def __call__(
        self, command: Sequence[str], *, timeout_s: float, stdin: str | None = None, check: bool = True
    ) -> str:
        self.commands.append(list(command))
        self.stdin.append(stdin)
        answer = self.answers.pop(0) if self.answers else ""
        if isinstance(answer, Exception):
            raise answer
        return answer


def cluster_of(*pods: Any, runner: Any = None, **replicas: int) -> Cluster:
    return Cluster(FakeCore(pods), FakeApps(**replicas), namespace="ns", runner=runner or Recorded())


def node(name: str, address: str, **labels: str) -> Any:
    return Thing(
        metadata=Thing(name=name, labels=labels),
        status=Thing(addresses=[Thing(type="InternalIP", address=address)]),
    )


def test_a_pod_has_the_facts_of_its_status() -> None:
    pod = pod_of(v1_pod("b-0", waiting="CrashLoopBackOff", restarts=3, ready=False, claims=("j", "l")))
    assert pod == Pod(
        name="b-0",
        component="bookie",
        node="node2",
        ip="10.0.0.1",
        uid="uid-b-0",
        phase="Running",
        is_ready=False,
        is_going=False,
        restarts=3,
        waits_for="CrashLoopBackOff",
        claims=("j", "l"),
        image="bindery/bookie:0.1.0",
    )


def test_nodes_of_the_control_plane_are_known_by_their_label_or_by_serving_the_api() -> None:
    nodes = [
        node("labelled", "10.0.0.1", **{"node-role.kubernetes.io/control-plane": ""}),
        node("serving", "10.0.0.2"),
        node("worker", "10.0.0.3"),
    ]
    assert control_plane_nodes(nodes, ["10.0.0.2"]) == {"labelled", "serving"}


def test_missing_deleted_and_unready_pods_are_named() -> None:
    cluster = cluster_of(
        v1_pod("b-0"),
        v1_pod("b-1", ready=False, waiting="ImagePullBackOff"),
        v1_pod("b-2", deleted="now"),
        v1_pod("t-0", "toolbox"),
        v1_pod("job", "init", ready=False),
        bookie=4,
        toolbox=1,
    )
    assert cluster.not_ready() == ["b-1: ImagePullBackOff", "b-2: is being deleted", "bookie: 3 of 4 pods"]


def test_a_signal_goes_to_every_process_but_the_sandbox_and_the_shell_that_sends_it() -> None:
    runner = Recorded()
    cluster_of(runner=runner).signal(pod_of(v1_pod("b-0")), "STOP")
    (command,) = runner.commands
    assert command[:8] == ["kubectl", "-n", "ns", "exec", "-c", "bookie", "b-0", "--"]
    assert "kill -STOP" in command[-1]
    assert '[ "$p" = 1 ] || [ "$p" = $$ ]' in SIGNAL_SCRIPT


def test_a_signal_to_a_pod_without_a_shared_process_namespace_names_the_setting() -> None:
    refused = CommandFailed("kubectl exec: exit code 99\n")
    with pytest.raises(ClusterError, match="shareProcessNamespace=true"):
        cluster_of(runner=Recorded(refused)).signal(pod_of(v1_pod("b-0")), "KILL")


def test_an_exec_that_ends_with_the_killed_container_succeeds_but_a_failed_stop_fails() -> None:
    ended = CommandFailed("kubectl exec: exit code 137\n")
    cluster_of(runner=Recorded(ended)).signal(pod_of(v1_pod("b-0")), "KILL")
    with pytest.raises(CommandFailed):
        cluster_of(runner=Recorded(ended)).signal(pod_of(v1_pod("b-0")), "STOP")


def test_the_zookeeper_leader_is_found_by_its_mode() -> None:
    pods = [v1_pod(f"z-{i}", "zookeeper") for i in (1, 2, 3)] + [v1_pod("t", "toolbox")]
    roles = json.dumps({"z-1": "follower", "z-2": "leader", "z-3": "silent"})
    assert cluster_of(*pods, runner=Recorded(roles)).zookeeper_leader().name == "z-2"
    assert cluster_of(*pods, runner=Recorded(roles)).zookeeper_follower(0.9).name == "z-1"
    with pytest.raises(ClusterError, match="no zookeeper is leader"):
        cluster_of(*pods, runner=Recorded(json.dumps({"z-1": "silent"}))).zookeeper_leader()


def test_waiting_reports_the_last_problem_and_treats_errors_as_problems() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    cluster = Cluster(FakeCore([]), FakeApps(), namespace="ns", clock=lambda: now[0], sleep=sleep)
    problems = iter([ClusterError("no auditor leads"), "two bookies are away", ""])

    def problem() -> str:
        found = next(problems)
        if isinstance(found, Exception):
            raise found
        return found

    assert cluster.until(problem, "it is well", timeout_s=10) == 2.0
    with pytest.raises(ClusterError, match="not within 3 s: it is well; last: never"):
        cluster.until(lambda: "never", "it is well", timeout_s=3)


def test_last_words_are_those_of_containers_that_ended_with_an_error() -> None:
    ended, running = v1_pod("b-0"), v1_pod("b-1")
    ended.status.container_statuses[0].state.terminated = None
    ended.status.container_statuses[0].last_state = Thing(terminated=Thing(exit_code=1, message="no disk; mount one"))
    running.status.container_statuses[0].state.terminated = None
    running.status.container_statuses[0].last_state = None
    cluster = cluster_of(ended, running, runner=Recorded("starting\n", "no disk; mount one\n"))
    assert cluster.last_words("bookie") == {"b-0": ("no disk; mount one", ["starting", "no disk; mount one"])}


def test_the_toolbox_must_be_ready() -> None:
    with pytest.raises(ClusterError, match="no toolbox is ready"):
        cluster_of(v1_pod("t", "toolbox", ready=False)).toolbox("true")


def test_a_failed_command_reports_its_output() -> None:
    with pytest.raises(CommandFailed, match="exit code 3\nwhy not"):
        run(["sh", "-c", "echo why not >&2; exit 3"], timeout_s=10)
    with pytest.raises(CommandFailed, match="not done after"):
        run(["sleep", "5"], timeout_s=0.1)
    with pytest.raises(CommandFailed, match="there is no no-such-command"):
        run(["no-such-command"], timeout_s=1)
    assert run(["cat"], timeout_s=10, stdin="given") == "given"
    assert run(["sh", "-c", "echo out; exit 1"], timeout_s=10, check=False) == "out\n"


def test_hooks_come_from_the_environment_as_words() -> None:
    assert hook("E2E_NODES", environment={"E2E_NODES": "sudo 'my nodes'"}.get) == ["sudo", "my nodes"]
    assert hook("E2E_NODES", environment={}.get) is None
    runner = Recorded()
    nodes = Nodes(("nodes",), runner=runner)
    nodes.stop("n2")
    nodes.start("n2")
    nodes.partition("n3")
    nodes.heal("n3")
    assert runner.commands == [
        ["nodes", "stop", "n2"],
        ["nodes", "start", "n2"],
        ["nodes", "partition", "n3"],
        ["nodes", "heal", "n3"],
    ]


def test_only_lines_with_json_objects_are_parsed() -> None:
    assert json_lines('warning: slow\n{"a": 1}\n{"b": 2}\n') == [{"a": 1}, {"b": 2}]
