"""Faults: what is done to a cluster, how it is undone, and by what it is recognised that the cluster got over it.

A fault chooses its target (`choose`, by a lot in [0, 1), so that a seed repeats it), acts (`inject`), undoes it
(`heal`; for a kill Kubernetes does) and is over when `problem` has nothing more to say. `takes` names what it takes
away one of while it lasts: two faults may overlap when together they take at most one of each, and what changes the
whole cluster (`WHOLE`) stands alone. That is what the promise covers: any single failure of each kind.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from bindery_e2e.cluster.cluster import ClusterError, Pod
from bindery_e2e.cluster.world import World

WHOLE: Final = "the whole cluster"
RECOVER_S: Final = 120.0
NODE_RECOVER_S: Final = 180.0
STOP_S: Final = 12.0
"""Longer than a ZooKeeper session of 10 s: what is stopped counts as dead and then goes on as if nothing had been."""
NODE_AWAY_S: Final = 15.0
FULL_S: Final = 10.0
SMALL_DISK_KIB: Final = 2**20
"""Larger ones are not filled: they may be the machine's own."""
MISSED_MAX: Final = 40
"""Entries of one topic that a bookie may miss while it goes: those that are on their way to it. Two producers have one
request of at most 20 messages under way."""


@dataclass
class Fault:
    """`choose`, then `inject`, then `heal`, then `problem` until it is empty."""

    recover_s_max: ClassVar[float] = RECOVER_S
    gap_s_max: ClassVar[float] = 45.0
    """Longest that a topic may go without a successful produce because of it."""

    lot: float = 0.0
    target: str = field(default="", init=False)
    entries_copied_max: int | None = field(default=None, init=False)
    """Most entries that may be copied because of it; None: as many as it takes. Known once it has chosen."""

    @property
    def name(self) -> str:
        raise NotImplementedError

    @property
    def takes(self) -> frozenset[str]:
        """What it takes away one of while it lasts."""
        return frozenset({WHOLE})

    def precondition(self, world: World) -> str:
        """Why it cannot be injected here; empty: it can."""
        return ""

    def choose(self, world: World) -> str:
        """Decide on the target; its name."""
        return self.target

    def inject(self, world: World) -> None:
        raise NotImplementedError

    def heal(self, world: World) -> None:
        """Undo it, also after half an injection. What Kubernetes heals by itself needs nothing."""

    def problem(self, world: World) -> str:
        return world.problem()

    def __str__(self) -> str:
        return f"{self.name}{f' ({self.target})' if self.target else ''}"


@dataclass
class PodFault(Fault):
    """Against one pod, chosen by what it is."""

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
        self._pod = world.role(self.component, self.role, self.lot)
        self.target = self._pod.name
        return self.target

    @property
    def pod(self) -> Pod:
        assert self._pod is not None, "choose comes first"
        return self._pod


@dataclass
class DeletePod(PodFault):
    """As `kubectl delete pod`: preStop, SIGTERM, a new pod."""

    verb: ClassVar[str] = "delete"

    def inject(self, world: World) -> None:
        world.cluster.delete_pod(self.pod.name)

    def problem(self, world: World) -> str:
        found = world.cluster.pod(self.pod.name)
        if found is not None and found.uid == self.pod.uid:
            return f"{self.pod.name} is still the old pod"
        return super().problem(world)


@dataclass
class KillProcess(PodFault):
    """kill -9: no preStop, nothing is flushed; the container is started again in its pod."""

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
    """SIGSTOP for some seconds, then SIGCONT: a pause as long as its sessions, after which it goes on where it was."""

    verb: ClassVar[str] = "SIGSTOP"
    seconds: float = STOP_S
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)

    def inject(self, world: World) -> None:
        world.cluster.signal(self.pod, "STOP")
        self.sleep(self.seconds)

    def heal(self, world: World) -> None:
        found = world.cluster.pod(self.pod.name)
        if found is not None and found.uid == self.pod.uid and found.restarts == self.pod.restarts:
            world.cluster.signal(self.pod, "CONT")


@dataclass
class NodeFault(Fault):
    """Against a node without the control plane, and with at most one member of each quorum."""

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
        self.target = nodes[int(self.lot * len(nodes))]
        return self.target

    def _candidates(self, world: World) -> list[str]:
        """Those with the fewest bookies: two at once stall adds, though they lose nothing."""
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
    """Everything on it dies at once; then it starts again."""

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
    """Nobody reaches it and it reaches nobody; what runs on it goes on."""

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
    """A bookie's claims and its pod are deleted: it comes back with empty disks under its old identity, says so, and is
    filled again from its peers."""

    recover_s_max: ClassVar[float] = 240.0
    verb: ClassVar[str] = "lose the volume of"
    _claims: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    @property
    def takes(self) -> frozenset[str]:
        return frozenset({WHOLE})

    def choose(self, world: World) -> str:
        super().choose(world)
        there = world.cluster.claims()
        self._claims = {claim: there[claim] for claim in self.pod.claims if claim in there}
        return self.target

    def precondition(self, world: World) -> str:
        return "" if any(pod.claims for pod in world.cluster.pods("bookie")) else "the bookies have no volume claims"

    def inject(self, world: World) -> None:
        for claim in self._claims:
            world.cluster.delete_claim(claim)
        world.cluster.delete_pod(self.pod.name, grace_s=0)

    def problem(self, world: World) -> str:
        there = world.cluster.claims()
        old = [claim for claim, uid in self._claims.items() if there.get(claim) == uid]
        if old:
            return f"still the old volumes: {', '.join(old)}"
        if found := super().problem(world):
            return found
        pod = world.cluster.pod(self.pod.name)
        assert pod is not None
        limbo = world.cluster.http_json(pod, "/api/v1/bookie/limbo")
        return f"{pod.name} is in limbo" if limbo["inLimbo"] else world.marked()


@dataclass
class FillDisk(PodFault):
    """A bookie's disk is filled to its last byte for some seconds: it turns read-only or holds its adds back, serves
    what it has all the while, and takes writes again by itself once there is room."""

    disk: str = "ledgers"
    seconds: float = FULL_S
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)

    @property
    def name(self) -> str:
        return f"fill the {self.disk} disk of {self.component}"

    def precondition(self, world: World) -> str:
        size = int(
            self._shell(world.chosen(self.component, self.lot), world, f"df -Pk {self._path} | tail -1").split()[1]
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
    """Every bookie is restarted, one after the other, by Kubernetes. What a bookie held is not copied: only what it
    missed while it was away."""

    recover_s_max: ClassVar[float] = 300.0
    _before: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    @property
    def name(self) -> str:
        return "rolling restart of the bookies"

    def choose(self, world: World) -> str:
        if left := world.whole():
            raise ClusterError(left)  # what earlier faults left to copy is not this one's
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
    """helm upgrade with a changed value that restarts the brokers."""

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
    """helm upgrade to the next version of all images, and back with helm rollback, both under traffic."""

    recover_s_max: ClassVar[float] = 420.0
    _has_begun: bool = field(default=False, init=False, repr=False)
    """A rollback without an upgrade before it would undo somebody else's."""

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
        images = {pod.image for pod in world.cluster.pods() if pod.component in ("bookie", "broker", "auditor")}
        assert all(image.endswith(f":{world.next_version}") for image in images), images

    def heal(self, world: World) -> None:
        if self._has_begun:
            world.wait_whole()
            world.release.rollback()

    def problem(self, world: World) -> str:
        left = [pod.name for pod in world.cluster.pods() if pod.image.endswith(f":{world.next_version}")]
        return f"still {world.next_version}: {', '.join(left)}" if left else super().problem(world)


@dataclass
class ScaleBookies(Fault):
    """Two bookies more; then they are drained, taken away, and forgotten."""

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
        world.cluster.until(world.marked, "what was drained is copied", timeout_s=120)
        claims = [claim for pod in world.cluster.pods("bookie") if pod.name in extra for claim in pod.claims]
        world.release.upgrade([f"bookie.replicas={self._count}"])
        for name in extra:
            world.cluster.until(
                lambda name=name: "" if world.cluster.pod(name) is None else f"{name} is there",  # type: ignore[misc]
                f"{name} has gone", timeout_s=90,
            )  # fmt: skip
        world.cluster.until(lambda: self._retire(world, [ids[name] for name in extra]), "cookies retired", timeout_s=60)
        for claim in claims:
            world.cluster.delete_claim(claim)

    @staticmethod
    def _retire(world: World, bookie_ids: Sequence[str]) -> str:
        for bookie_id in bookie_ids:
            world.cluster.bindery("bookie", "cookie", "retire", "--bookie-id", bookie_id)
        return ""


def catalogue() -> dict[str, Callable[[float], Fault]]:
    """Every fault by name; each is made with its lot."""
    made: list[Callable[[float], Fault]] = [
        *(
            lambda lot, kind=kind, component=component, role=role: kind(lot, component, role)
            for kind in (DeletePod, KillProcess)
            for component, role in (
                ("bookie", "any"), ("broker", "owner"), ("auditor", "leader"),
                ("zookeeper", "leader"), ("zookeeper", "follower"),
            )
        ),
        *(
            lambda lot, component=component, role=role: StopProcess(lot, component, role)
            for component, role in (("bookie", "any"), ("broker", "owner"), ("zookeeper", "leader"))
        ),
        StopNode, PartitionNode, LoseVolume, RollingRestart, UpgradeValues, UpgradeImages, ScaleBookies,
    ]  # fmt: skip
    return {make(0.0).name: make for make in made}
