"""What faults act on: a cluster, its release, its nodes; and what it means that the cluster is well again."""

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
UNSCHEDULED_LOOKS: Final = 60
"""Looks, a second apart, at a pod without a node before it is made anew."""
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
    """Every copy of every confirmed entry, read from its bookie and compared."""

    ledgers: int = 0
    entries: int = 0
    copies: int = 0
    wrong: list[str] = field(default_factory=list)
    """One text for each ledger whose copies are not all there and equal."""


def compared(ledgers: Sequence[dict[str, Any]]) -> Compared:
    """`ledgers`: what COMPARE_SCRIPT says of each."""
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
    cluster: Cluster
    release: Release
    nodes: Nodes | None = None
    topics: Sequence[str] = ()
    """tenant/namespace/name of those that carry the traffic."""
    next_version: str = ""
    """A second version whose images are on the nodes; empty: there is none."""
    say: Callable[[str], None] = print
    _unscheduled: dict[str, int] = field(default_factory=dict)
    """Looks at pods that have no node, by uid."""

    def bookie_ids(self) -> dict[str, str]:
        """Pod -> bookie id: the ordinal's DNS name, relative to the namespace."""
        service = f"{self.cluster.fullname}-bookie"
        return {pod.name: f"{pod.name}.{service}" for pod in self.cluster.pods("bookie")}

    def problem(self) -> str:
        """Why the cluster is not well; empty: every pod is ready, every bookie takes writes, an auditor leads, and
        nothing counts as lost. Ledgers may still lack copies."""
        if pods := self.cluster.not_ready():
            self._renew_stuck_pods()
            return "; ".join(pods)
        leader, status = self.cluster.auditor_status()
        if status["lost"]:
            return "lost: " + ", ".join(one["bookie_id"] for one in status["lost"])
        standing = {
            one["bookie_id"]: (one["registration"], one["intent"])
            for one in self.cluster.http_json(leader, "/v1/bookies")["bookies"]
        }
        wrong = [
            f"{bookie_id} is {', '.join(standing.get(bookie_id, ('unknown',)))}"
            for bookie_id in self.bookie_ids().values()
            if standing.get(bookie_id) != ("writable", "active")
        ]
        return "; ".join(wrong)

    def marked(self) -> str:
        """Why not every ledger has all its copies, as far as the auditor knows; empty: none is marked, and none is
        still to be looked at since it was closed by who does not know of all copies."""
        _, status = self.cluster.auditor_status()
        if not status["marked"]:
            noted = status.get("closings", {}).get("pending", 0)  # a release from before them says nothing
            return f"{noted} closed ledgers are still to be looked at" if noted else ""
        why = ", ".join(f"{count} {obstacle}" for obstacle, count in status["by_obstacle"].items() if count)
        return f"{status['marked']} ledgers marked, {status['copying']} being copied{f' ({why})' if why else ''}"

    def whole(self) -> str:
        """Why the cluster is not well or lacks copies."""
        return self.problem() or self.marked()

    def wait_whole(self, *, timeout_s: float = MARKS_TIMEOUT_S) -> float:
        return self.cluster.until(self.whole, "every ledger has all its copies", timeout_s=timeout_s)

    def copied(self) -> tuple[int, int]:
        """(entries, bytes) that the auditors copied, summed over them since each started."""
        entries, size = (self.cluster.metric("auditor", name) for name in (ENTRIES_COPIED, BYTES_COPIED))
        return int(entries), int(size)

    def compare_replicas(self) -> Compared:
        """Read and compare all copies of all confirmed entries of all ledgers, from inside the cluster."""
        text = self.cluster.toolbox("python", "-", stdin=COMPARE_SCRIPT, timeout_s=COMPARE_TIMEOUT_S)
        return compared([json.loads(line) for line in text.splitlines()])

    def _renew_stuck_pods(self) -> None:
        """Delete pods that only wait for Kubernetes to look at them again, which may take it five minutes: a new pod is
        looked at at once.

        These are one whose container was killed again and again, and one without a node, whose volumes came a moment
        after the scheduler looked. Only what faults did to them is undone by this; what fails by itself fails anew.
        """
        for component in SERVICES:
            for pod in self.cluster.pods(component):
                if pod.is_going:
                    continue
                if pod.waits_for == "CrashLoopBackOff":
                    self.cluster.delete_pod(pod.name)
                    self.say(f"{pod.name} waited in {pod.waits_for} after {pod.restarts} restarts: deleted")
                elif not pod.node:
                    looks = self._unscheduled[pod.uid] = self._unscheduled.get(pod.uid, 0) + 1
                    if looks == UNSCHEDULED_LOOKS:
                        self.cluster.delete_pod(pod.name)
                        self.say(f"{pod.name} was given no node in {looks} looks: deleted, to be made anew")

    def chosen(self, component: str, lot: float) -> Pod:
        """A ready pod by lot in [0, 1)."""
        pods = [pod for pod in self.cluster.pods(component) if pod.is_ready and not pod.is_going]
        if not pods:
            raise ClusterError(f"no {component} is ready")
        return pods[int(lot * len(pods))]

    def role(self, component: str, role: str, lot: float) -> Pod:
        """A pod by what it is: any, leader, follower, owner."""
        match component, role:
            case _, "any":
                return self.chosen(component, lot)
            case "zookeeper", "leader":
                return self.cluster.zookeeper_leader()
            case "zookeeper", "follower":
                return self.cluster.zookeeper_follower(lot)
            case "auditor", "leader":
                return self.cluster.auditor_status()[0]
            case "broker", "owner":
                return self.cluster.topic_owner(self.topics[int(lot * len(self.topics))])
        raise ValueError(f"no {component} is a {role}")
