"""The target of faults: a cluster, its release and its nodes, and the conditions under which it counts as recovered."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bindery_e2e.cluster.cluster import SERVICES, Cluster, ClusterError, Pod
from bindery_e2e.cluster.commands import Nodes
from bindery_e2e.cluster.release import Release

ENTRIES_COPIED: Final = "bindery_recovery_this_entries_copied_total"
BYTES_COPIED: Final = "bindery_recovery_this_bytes_copied_total"
MARKS_TIMEOUT_S: Final = 180.0
COMPARE_TIMEOUT_S: Final = 600.0
NOT_STARTED_POLLS_MAX: Final = 40
"""Number of polls, at least one second apart, after which a pod that has no node or no containers is replaced."""
COMPARE_SCRIPT: Final = """
import asyncio, json, os, sys
from bindery.common.operator import connected
from bindery.ledger.ledger_compare import Summary, last_confirmed
from bindery.ledger.replicas import compare
from bindery_core.errors import NoSuchLedger

async def one(client, ledger_id, metadata):
    last = await last_confirmed(client, ledger_id, metadata)
    summary = Summary(ledger_id, metadata, first=0, last=last, limit=last)
    bad = []
    async for rows in compare(client, ledger_id, metadata, first=0, last=last, limit=last, rate=0):
        summary.add(rows)
        bad += [f"entry {row.entry_id}: {row.words}" for row in rows if row.is_bad]
    return {**summary.as_json(), "bad": bad[:5]}

async def main():
    async with connected(os.environ["BINDERY_ZOOKEEPER"]) as found_cluster:
        client = found_cluster.client
        for ledger_id in [ledger_id async for ledger_id in client.list_ledgers()]:
            try:
                metadata = await client.metadata(ledger_id)
                found = await one(client, ledger_id, metadata)
            except NoSuchLedger:
                continue
            found["write_quorum"] = metadata.write_quorum
            found["ensembles"] = [list(segment.ensemble) for segment in metadata.segments]
            print(json.dumps(found), flush=True)

asyncio.run(main())
"""


@dataclass
class Compared:
    """Result of comparing all replicas of all confirmed entries, each read from its bookie."""

    ledgers: int = 0
    entries: int = 0
    copies: int = 0
    wrong: list[str] = field(default_factory=list)
    """One text for each ledger with missing or different replicas."""


def compared(ledgers: Sequence[dict[str, Any]]) -> Compared:
    """Sum up the output of COMPARE_SCRIPT. `ledgers`: one object for each ledger."""
    found = Compared()
    for one in ledgers:
        found.ledgers += 1
        found.entries += one["entries"]
        found.copies += sum(sum(counts.values()) for counts in one["bookies"].values())
        if one["verdict"] != "agrees":
            reasons = "; ".join([*one["bad"], *(f"{r['bookie']}: {r['reason']}" for r in one["reasons"])][:5])
            found.wrong.append(f"ledger {one['ledger_id']} ({one['state']}) {one['verdict']}: {reasons}")
    return found


@dataclass
class World:
    """The cluster under test as faults and runs see it."""

    cluster: Cluster
    release: Release
    nodes: Nodes | None = None
    topics: Sequence[str] = ()
    """Topics of the traffic, as tenant/namespace/name."""
    next_version: str = ""
    """A second version whose images are loaded on the nodes; empty: there is none."""
    say: Callable[[str], None] = print
    _not_started: dict[str, int] = field(default_factory=dict)
    """Pod uid -> number of polls at which the pod had no node or no containers."""

    def bookie_ids(self) -> dict[str, str]:
        """Pod -> bookie id: the ordinal's DNS name, relative to the namespace."""
        service = f"{self.cluster.fullname}-bookie"
        return {pod.name: f"{pod.name}.{service}" for pod in self.cluster.pods("bookie")}

    def problem(self) -> str:
        """Why the cluster has not recovered. Empty: every pod is ready, every bookie is writable, an auditor is the
        leader, and no bookie counts as lost. Ledgers may still be under-replicated."""
        if pods := self.cluster.not_ready():
            self._renew_stuck_pods()
            return "; ".join(pods)
        leader, status = self.cluster.auditor_status()
        if status["lost"]:
            return "lost: " + ", ".join(one["bookie_id"] for one in status["lost"])
        states = {
            one["bookie_id"]: (one["registration"], one["intent"])
            for one in self.cluster.http_json(leader, "/v1/bookies")["bookies"]
        }
        wrong = [
            f"{bookie_id} is {', '.join(states.get(bookie_id, ('unknown',)))}"
            for bookie_id in self.bookie_ids().values()
            if states.get(bookie_id) != ("writable", "active")
        ]
        return "; ".join(wrong)

    def marked(self) -> str:
        """Which ledgers are under-replicated according to the auditor. Empty: no ledger is marked, and no closing
        record waits for its check."""
        _, status = self.cluster.auditor_status()
        if not status["marked"]:
            pending = status.get("closings", {}).get("pending", 0)  # older releases have no closing records
            return f"{pending} closing records wait for their check" if pending else ""
        why = ", ".join(f"{count} {obstacle}" for obstacle, count in status["by_obstacle"].items() if count)
        return f"{status['marked']} ledgers marked, {status['copying']} being copied{f' ({why})' if why else ''}"

    def whole(self) -> str:
        """Why the cluster has not recovered or has under-replicated ledgers."""
        return self.problem() or self.marked()

    def wait_whole(self, *, timeout_s: float = MARKS_TIMEOUT_S) -> float:
        return self.cluster.until(self.whole, "no ledger is under-replicated", timeout_s=timeout_s)

    def copied(self) -> tuple[int, int]:
        """(entries, bytes) that the running auditors have copied since they started."""
        entries, size = (self.cluster.metric("auditor", name) for name in (ENTRIES_COPIED, BYTES_COPIED))
        return int(entries), int(size)

    def compare_replicas(self) -> Compared:
        """Read and compare all replicas of all confirmed entries of all ledgers, from inside the cluster."""
        text = self.cluster.toolbox("python", "-", stdin=COMPARE_SCRIPT, timeout_s=COMPARE_TIMEOUT_S)
        return compared([json.loads(line) for line in text.splitlines()])

    def _renew_stuck_pods(self) -> None:
        """Delete pods that Kubernetes would retry only after a back-off of up to five minutes, or never; a new pod is
        tried at once.

        Such pods are in CrashLoopBackOff after repeated kills; or have no node because their volumes became available
        just after scheduling; or have no containers because their volumes cannot be mounted, for example those of a
        claim that is being deleted. A pod that fails for a reason of its own fails again.
        """
        for component in SERVICES:
            for pod in self.cluster.pods(component):
                if pod.is_going:
                    continue
                if pod.waits_for == "CrashLoopBackOff":
                    self.cluster.delete_pod(pod.name)
                    self.say(f"{pod.name} was in {pod.waits_for} after {pod.restarts} restarts: deleted")
                elif not pod.node or pod.waits_for == "ContainerCreating":
                    polls = self._not_started[pod.uid] = self._not_started.get(pod.uid, 0) + 1
                    if polls == NOT_STARTED_POLLS_MAX:
                        self.cluster.delete_pod(pod.name)
                        state = "containers" if pod.node else "node"
                        self.say(f"{pod.name} had no {state} in {polls} polls: deleted, Kubernetes creates it again")

    def chosen(self, component: str, draw: float) -> Pod:
        """The ready pod that `draw`, a random number in [0, 1), selects."""
        pods = [pod for pod in self.cluster.pods(component) if pod.is_ready and not pod.is_going]
        if not pods:
            raise ClusterError(f"no {component} is ready")
        return pods[int(draw * len(pods))]

    def role(self, component: str, role: str, draw: float) -> Pod:
        """A pod with a role: any, leader, follower, owner."""
        match component, role:
            case _, "any":
                return self.chosen(component, draw)
            case "zookeeper", "leader":
                return self.cluster.zookeeper_leader()
            case "zookeeper", "follower":
                return self.cluster.zookeeper_follower(draw)
            case "auditor", "leader":
                return self.cluster.auditor_status()[0]
            case "broker", "owner":
                return self.cluster.topic_owner(self.topics[int(draw * len(self.topics))])
        raise ValueError(f"no {component} is a {role}")
