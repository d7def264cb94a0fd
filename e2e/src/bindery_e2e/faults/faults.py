"""Define the faults: how each is injected and undone, and when the cluster has recovered from it.

A fault chooses its target (`choose`, with a random number in [0, 1) from the seed), acts (`inject`) and undoes its
action (`heal`; after a kill Kubernetes does that). The cluster has recovered when `problem` returns an empty text.
`takes` names the components of which the fault makes one process unavailable. Two faults may overlap if together they
make at most one process of each component unavailable, because Bindery promises to survive any single failure of each
component. A fault that changes the whole cluster (`WHOLE`) overlaps with no other fault.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from bindery_e2e.cluster.cluster import ClusterError, Pod
from bindery_e2e.cluster.world import World

OLD_PODS_S: Final = 90.0
"""Maximum seconds from the end of a helm upgrade to the end of the last pod of the version before: the termination time
of a broker, and some more."""

WHOLE: Final = "the whole cluster"
"""Component of faults that overlap with no other fault."""
RECOVER_S: Final = 120.0
"""Maximum time in seconds from the end of a fault until the cluster has recovered, unless the fault has its own."""
NODE_RECOVER_S: Final = 180.0
"""The same for faults of nodes."""
STOP_S: Final = 12.0
"""Seconds of a stop. Longer than a ZooKeeper session of 10 s, so the process counts as dead before it continues."""
CONTINUE_S: Final = 120.0
"""Maximum time in seconds until a stopped process has received SIGCONT or was restarted."""
CONTINUE_ATTEMPT_S: Final = 15.0
"""Maximum time in seconds of one attempt to send SIGCONT."""
NODE_AWAY_S: Final = 15.0
"""Seconds for which a node is stopped or disconnected."""
CLAIMS_SEEN_S: Final = 2.0
"""Seconds after the deletion of claims until all of Kubernetes' controllers have seen it."""
LIMBO_SIZE_MAX: Final = 800
"""Maximum characters shown of the state of a bookie that did not leave limbo in time."""
FULL_S: Final = 10.0
"""Seconds for which a disk stays full."""
SMALL_DISK_KIB: Final = 2**20
"""Maximum size in KiB of a disk that is filled. A larger one may be the machine's own disk."""
MISSED_MAX: Final = 40
"""Maximum number of entries of one topic that a bookie misses when it stops: those in flight. Two producers each have
one request of at most 20 messages in flight."""


@dataclass
class Fault:
    """A fault. Call `choose`, `inject`, `heal`, and then `problem` until it returns an empty text."""

    recover_s_max: ClassVar[float] = RECOVER_S
    gap_s_max: ClassVar[float] = 45.0
    """Maximum seconds that a topic may be without a successful produce because of the fault."""

    draw: float = 0.0
    """Random number in [0, 1) that selects the target."""
    target: str = field(default="", init=False)
    entries_copied_max: int | None = field(default=None, init=False)
    """Maximum entries that may be copied because of the fault; None: no limit. Set by `choose`."""

    @property
    def name(self) -> str:
        raise NotImplementedError

    @property
    def takes(self) -> frozenset[str]:
        """Components of which the fault makes one process unavailable while it lasts."""
        return frozenset({WHOLE})

    def precondition(self, world: World) -> str:
        """Reason why this cluster does not allow the fault; empty: it allows the fault."""
        return ""

    def choose(self, world: World) -> str:
        """Choose the target and return its name."""
        return self.target

    def inject(self, world: World) -> None:
        raise NotImplementedError

    def heal(self, world: World) -> None:
        """Undo the fault, also after an incomplete injection. Does nothing where Kubernetes recovers by itself."""

    def problem(self, world: World) -> str:
        return world.problem()

    def __str__(self) -> str:
        return f"{self.name}{f' ({self.target})' if self.target else ''}"


@dataclass
class PodFault(Fault):
    """A fault of one pod, chosen by component and role."""

    component: str = "bookie"
    role: str = "any"
    verb: ClassVar[str] = ""
    _pod: Pod | None = field(default=None, init=False, repr=False)

    @property
    def name(self) -> str:
        return f"{self.verb} {self.component}{'' if self.role == 'any' else f' {self.role}'}"

    @property
    def takes(self) -> frozenset[str]:
        return frozenset({self.component})

    def choose(self, world: World) -> str:
        self._pod = world.role(self.component, self.role, self.draw)
        self.target = self._pod.name
        return self.target

    @property
    def pod(self) -> Pod:
        assert self._pod is not None, "`choose` was not called"
        return self._pod


@dataclass
class DeletePod(PodFault):
    """Delete the pod as `kubectl delete pod` does: preStop, SIGTERM, a new pod."""

    verb: ClassVar[str] = "delete"

    def inject(self, world: World) -> None:
        world.cluster.delete_pod(self.pod.name)

    def problem(self, world: World) -> str:
        found = world.cluster.pod(self.pod.name)
        if found is not None and found.uid == self.pod.uid:
            return f"{self.pod.name} was not replaced yet"
        return super().problem(world)


@dataclass
class KillProcess(PodFault):
    """kill -9: no preStop, nothing is flushed. Kubernetes restarts the container in its pod."""

    verb: ClassVar[str] = "kill -9"

    def inject(self, world: World) -> None:
        world.cluster.signal(self.pod, "KILL")

    def problem(self, world: World) -> str:
        found = world.cluster.pod(self.pod.name)
        if found is not None and found.uid == self.pod.uid and found.restarts <= self.pod.restarts:
            return f"{self.pod.name} has not been restarted"
        return super().problem(world)


@dataclass
class StopProcess(PodFault):
    """SIGSTOP, and SIGCONT after some seconds: a pause longer than the process's sessions, after which it continues."""

    verb: ClassVar[str] = "SIGSTOP"
    seconds: float = STOP_S
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)

    def inject(self, world: World) -> None:
        world.cluster.signal(self.pod, "STOP")
        self.sleep(self.seconds)

    def heal(self, world: World) -> None:
        what = f"{self.pod.name} has received SIGCONT or was restarted"
        world.cluster.until(lambda: self._continued(world), what, timeout_s=CONTINUE_S)

    def _continued(self, world: World) -> str:
        """Send SIGCONT to the same process.

        On a busy cluster, `kubectl exec` can hang. An attempt therefore gets less time than a command usually has, and
        is repeated: otherwise the fault would last until the process is restarted.
        """
        found = world.cluster.pod(self.pod.name)
        if found is not None and found.uid == self.pod.uid and found.restarts == self.pod.restarts:
            world.cluster.signal(self.pod, "CONT", timeout_s=CONTINUE_ATTEMPT_S)
        return ""


@dataclass
class NodeFault(Fault):
    """A fault of a node without the control plane and with at most one ZooKeeper and two bookies."""

    verb: ClassVar[str] = ""
    recover_s_max: ClassVar[float] = NODE_RECOVER_S
    gap_s_max: ClassVar[float] = 90.0
    seconds: float = NODE_AWAY_S
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)

    @property
    def name(self) -> str:
        return f"{self.verb} node"

    def precondition(self, world: World) -> str:
        if world.nodes is None:
            return "E2E_NODES is not set: this cluster offers no way to harm a node"
        if not self._candidates(world):
            return "no node without the control plane has at most one ZooKeeper and two bookies"
        return ""

    def choose(self, world: World) -> str:
        nodes = self._candidates(world)
        self.target = nodes[int(self.draw * len(nodes))]
        return self.target

    def _candidates(self, world: World) -> list[str]:
        """Nodes with the fewest bookies. The failure of two bookies at once loses nothing, but it stalls adds."""
        count = {node: {"bookie": 0, "zookeeper": 0} for node in world.cluster.safe_nodes()}
        for component in ("bookie", "zookeeper"):
            for pod in world.cluster.pods(component):
                if pod.node in count:
                    count[pod.node][component] += 1
        fit = [node for node, has in count.items() if has["zookeeper"] <= 1 and has["bookie"] <= 2]
        fewest = min((count[node]["bookie"] for node in fit), default=0)
        return sorted(node for node in fit if count[node]["bookie"] == fewest)


@dataclass
class StopNode(NodeFault):
    """Stop the node, which kills all its processes at once, and start it again."""

    verb: ClassVar[str] = "stop"

    def inject(self, world: World) -> None:
        assert world.nodes is not None
        world.nodes.stop(self.target)
        self.sleep(self.seconds)

    def heal(self, world: World) -> None:
        assert world.nodes is not None
        world.nodes.start(self.target)


@dataclass
class PartitionNode(NodeFault):
    """Disconnect the node from the network in both directions; its processes continue."""

    verb: ClassVar[str] = "partition"

    def inject(self, world: World) -> None:
        assert world.nodes is not None
        world.nodes.partition(self.target)
        self.sleep(self.seconds)

    def heal(self, world: World) -> None:
        assert world.nodes is not None
        world.nodes.heal(self.target)


@dataclass
class LoseVolume(PodFault):
    """Delete a bookie's volume claims and its pod. The bookie restarts with empty disks under its old identity, reports
    the loss, and copies its entries back from other bookies.

    A claim is deleted only after the pod that uses it. If Kubernetes creates the next pod before it has seen that the
    claim is being deleted, this pod refers to the old claim: it never starts, and the claim is never deleted, because a
    pod uses it. The pod is therefore deleted only some seconds after its claims; `World.problem` deletes a pod that
    does not start in spite of that.
    """

    recover_s_max: ClassVar[float] = 240.0
    verb: ClassVar[str] = "lose the volume of"
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)
    _claims: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    @property
    def takes(self) -> frozenset[str]:
        return frozenset({WHOLE})

    def choose(self, world: World) -> str:
        super().choose(world)
        uids = world.cluster.claims()
        self._claims = {claim: uids[claim] for claim in self.pod.claims if claim in uids}
        return self.target

    def precondition(self, world: World) -> str:
        return "" if any(pod.claims for pod in world.cluster.pods("bookie")) else "the bookies have no volume claims"

    def inject(self, world: World) -> None:
        for claim in self._claims:
            world.cluster.delete_claim(claim)
        self.sleep(CLAIMS_SEEN_S)
        world.cluster.delete_pod(self.pod.name, grace_s=0)

    def problem(self, world: World) -> str:
        uids = world.cluster.claims()
        old = [claim for claim, uid in self._claims.items() if uids.get(claim) == uid]
        if old:
            return "; ".join(filter(None, [f"not replaced yet: {', '.join(old)}", world.problem()]))
        if found := super().problem(world):
            return found
        pod = world.cluster.pod(self.pod.name)
        assert pod is not None
        limbo = world.cluster.http_json(pod, "/api/v1/bookie/limbo")
        return f"{pod.name} is in limbo: {json.dumps(limbo)[:LIMBO_SIZE_MAX]}" if limbo["inLimbo"] else world.marked()


@dataclass
class FillDisk(PodFault):
    """Fill a disk of a bookie to its last byte for some seconds. The bookie turns read-only or delays adds, continues
    to serve reads, and accepts writes again by itself once there is free space."""

    disk: str = "ledgers"
    seconds: float = FULL_S
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)

    @property
    def name(self) -> str:
        return f"fill the {self.disk} disk of {self.component}"

    def precondition(self, world: World) -> str:
        size = int(
            self._shell(world.chosen(self.component, self.draw), world, f"df -Pk {self._path} | tail -1").split()[1]
        )
        if size > SMALL_DISK_KIB:
            return (
                f"the bookies' disks are not small ones of their own ({size // 1024} MiB): e2e/values/small-disks.yaml"
            )
        return ""

    def inject(self, world: World) -> None:
        fill = f"cat /dev/zero >{self._path}/filler 2>/dev/null; df -Pk {self._path} | tail -1"
        free = int(self._shell(self.pod, world, fill).split()[3])
        assert free == 0, f"{free} KiB are still free on {self.pod.name}"
        self.sleep(self.seconds)
        if self.disk == "ledgers":
            world.cluster.until(lambda: self._is_writable(world), "the bookie is read-only", timeout_s=20)

    def heal(self, world: World) -> None:
        self._shell(self.pod, world, f"rm -f {self._path}/filler")

    def problem(self, world: World) -> str:
        found = world.cluster.pod(self.pod.name)
        assert found is not None
        assert (found.uid, found.restarts) == (self.pod.uid, self.pod.restarts), f"{self.pod.name} died of a full disk"
        return super().problem(world)

    def _is_writable(self, world: World) -> str:
        state = world.cluster.http_json(self.pod, "/api/v1/bookie/disks")
        return "" if state["readOnly"] else f"{self.pod.name} takes writes on a full disk"

    @property
    def _path(self) -> str:
        return f"/data/{self.disk}"

    def _shell(self, pod: Pod, world: World, script: str) -> str:
        return world.cluster.exec(pod.name, "sh", "-c", script, container=self.component)


@dataclass
class RollingRestart(Fault):
    """Restart all bookies one after the other (kubectl rollout). Only entries that a bookie missed while it was down
    may be copied, not those it already had."""

    recover_s_max: ClassVar[float] = 300.0
    _before: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    @property
    def name(self) -> str:
        return "rolling restart of the bookies"

    def choose(self, world: World) -> str:
        if left := world.whole():
            raise ClusterError(left)  # copies that are due to earlier faults must not count for this one
        self._before = {pod.name: pod.uid for pod in world.cluster.pods("bookie")}
        self.entries_copied_max = MISSED_MAX * len(world.topics) * len(self._before)
        self.target = world.cluster.workload("bookie")
        return self.target

    def inject(self, world: World) -> None:
        world.cluster.kubectl("rollout", "restart", self.target)
        world.cluster.kubectl("rollout", "status", self.target, "--timeout=280s", timeout_s=300)

    def problem(self, world: World) -> str:
        same = [pod.name for pod in world.cluster.pods("bookie") if self._before.get(pod.name) == pod.uid]
        return f"not restarted: {', '.join(same)}" if same else world.whole()


@dataclass
class UpgradeValues(Fault):
    """Run helm upgrade with a changed value, which restarts the brokers."""

    recover_s_max: ClassVar[float] = 240.0
    settings: Sequence[str] = ("broker.config.receiveWaitMsMax=20000",)

    @property
    def name(self) -> str:
        return "helm upgrade, changed values"

    def choose(self, world: World) -> str:
        self.target = " ".join(self.settings)
        return self.target

    def inject(self, world: World) -> None:
        world.wait_whole()
        world.release.upgrade(self.settings)


@dataclass
class UpgradeImages(Fault):
    """Run helm upgrade to the next version of all images, then helm rollback, both under traffic."""

    recover_s_max: ClassVar[float] = 420.0
    _has_begun: bool = field(default=False, init=False, repr=False)
    """Whether the upgrade was started. Without it, a rollback would undo an earlier revision."""

    @property
    def name(self) -> str:
        return "helm upgrade to a new version and rollback"

    def precondition(self, world: World) -> str:
        return "" if world.next_version else "there are no images of a second version"

    def choose(self, world: World) -> str:
        self.target = world.next_version
        return self.target

    def inject(self, world: World) -> None:
        world.wait_whole()
        self._has_begun = True
        world.release.upgrade([f"global.imageTag={world.next_version}"])

        def old() -> str:
            pods = [pod for pod in world.cluster.pods() if pod.component in ("bookie", "broker", "auditor")]
            left = sorted(pod.name for pod in pods if not pod.image.endswith(f":{world.next_version}"))
            return f"not {world.next_version}: {', '.join(left)}" if left else ""

        # helm waits for new pods, not for the end of old ones: a broker hands its bundles over first.
        world.cluster.until(old, "only pods of the new version", timeout_s=OLD_PODS_S)

    def heal(self, world: World) -> None:
        if self._has_begun:
            world.wait_whole()
            world.release.rollback()

    def problem(self, world: World) -> str:
        left = [pod.name for pod in world.cluster.pods() if pod.image.endswith(f":{world.next_version}")]
        return f"still {world.next_version}: {', '.join(left)}" if left else super().problem(world)


@dataclass
class ScaleBookies(Fault):
    """Add two bookies; then drain them, remove them, and retire their cookies."""

    recover_s_max: ClassVar[float] = 300.0
    more: int = 2
    _count: int = field(default=0, init=False, repr=False)

    @property
    def name(self) -> str:
        return "scale the bookies up, drain, and down"

    def choose(self, world: World) -> str:
        self._count = len(world.cluster.pods("bookie"))
        self.target = f"{self._count} -> {self._count + self.more} -> {self._count}"
        return self.target

    def inject(self, world: World) -> None:
        world.wait_whole()
        world.release.upgrade([f"bookie.replicas={self._count + self.more}"])

    def heal(self, world: World) -> None:
        ids = world.bookie_ids()
        extra = [f"{world.cluster.fullname}-bookie-{self._count + index}" for index in range(self.more)]
        extra = [name for name in extra if name in ids]
        for name in extra:
            world.cluster.bindery("bookie", "drain", ids[name], "--reason", "fewer bookies")
        for name in extra:
            world.cluster.bindery("bookie", "drain", ids[name], "--wait", timeout_s=240)
        world.cluster.until(world.marked, "the drained entries are copied", timeout_s=120)
        claims = [claim for pod in world.cluster.pods("bookie") if pod.name in extra for claim in pod.claims]
        world.release.upgrade([f"bookie.replicas={self._count}"])
        for name in extra:
            world.cluster.until(
                lambda name=name: "" if world.cluster.pod(name) is None else f"{name} exists",  # type: ignore[misc]
                f"{name} is deleted",
                timeout_s=90,
            )
        world.cluster.until(lambda: self._retire(world, [ids[name] for name in extra]), "cookies retired", timeout_s=60)
        for claim in claims:
            world.cluster.delete_claim(claim)

    @staticmethod
    def _retire(world: World, bookie_ids: Sequence[str]) -> str:
        for bookie_id in bookie_ids:
            world.cluster.bindery("bookie", "cookie", "retire", "--bookie-id", bookie_id)
        return ""


def catalogue() -> dict[str, Callable[[float], Fault]]:
    """Name -> constructor of a fault; its argument is `Fault.draw`."""
    constructors: list[Callable[[float], Fault]] = [
        *(
            lambda draw, kind=kind, component=component, role=role: kind(draw, component, role)
            for kind in (DeletePod, KillProcess)
            for component, role in (
                ("bookie", "any"),
                ("broker", "owner"),
                ("auditor", "leader"),
                ("zookeeper", "leader"),
                ("zookeeper", "follower"),
            )
        ),
        *(
            lambda draw, component=component, role=role: StopProcess(draw, component, role)
            for component, role in (("bookie", "any"), ("broker", "owner"), ("zookeeper", "leader"))
        ),
        StopNode,
        PartitionNode,
        LoseVolume,
        RollingRestart,
        UpgradeValues,
        UpgradeImages,
        ScaleBookies,
    ]
    return {make(0.0).name: make for make in constructors}
