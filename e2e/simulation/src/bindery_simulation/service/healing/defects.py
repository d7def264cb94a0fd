"""Defects of auditor, election, worker and copier, which the invariants of `healing.verdict` must report.

`service.mutants` describes each of them in a table.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from bindery_client.client import LedgerClient
from bindery_client.ledger.replica import ReplicaRead, Verdict
from bindery_core.wire.messages import Status
from bindery_metadata.coordination.election import AuditorElection, Leadership
from bindery_metadata.ledgers.closing_records import ClosingRecords
from bindery_metadata.recovery.underreplication import HeldMark, UnderreplicationManager
from bindery_recovery.checks import checker
from bindery_recovery.checks.closing_check import ClosingCheck, Finding
from bindery_recovery.cluster.cluster_view import ClusterView
from bindery_recovery.cluster.lost_bookies import LostBookies, Observation
from bindery_recovery.repair.copier import Copier, CopyResult
from bindery_recovery.repair.ledger_repair import LedgerRepair
from bindery_recovery.repair.worker import ReplicationWorker

from bindery_simulation.mutant import Replacement

DEPOSED_LEADER_DELAY_S: Final = 10.0
"""Delay in seconds after which a former leader notices the end of its leadership."""


def mark_removed_before_copy() -> list[Replacement]:
    original = ReplicationWorker._attempt

    async def attempt(self: Any, held: HeldMark) -> None:
        await self._marks.mark_replicated(held)
        await original(self, held)

    return [(ReplicationWorker, "_attempt", attempt)]


def lock_ignored() -> list[Replacement]:
    original = UnderreplicationManager._take_lock

    async def take_lock(self: Any, ledger_id: Any) -> HeldMark | None:
        held = await original(self, ledger_id)
        mark = await self.get(ledger_id) if held is None else None
        if mark is None:
            return held
        return HeldMark(mark, self._layout.mark_lock(ledger_id), self._store.session_id)

    async def take(self: Any, *, skip: Any = lambda _: False) -> HeldMark | None:
        """Like the original, but without reading the locks."""
        if not await self.is_enabled():
            return None
        async for mark in self.list():
            if not skip(mark.ledger_id):
                held: HeldMark | None = await self.lock(mark.ledger_id)
                if held is not None:
                    return held
        return None

    return [(UnderreplicationManager, "_take_lock", take_lock), (UnderreplicationManager, "take", take)]


def leader_unchecked() -> list[Replacement]:
    """Leave out the check of the vote. The auditor also notices the end of its leadership late, like a process that was
    paused; with the check, this delay is harmless."""
    original = AuditorElection._until

    async def multi(self: Any, ops: Sequence[Any]) -> Any:
        return await self._store.multi(ops)

    async def until(self: Any, event: asyncio.Event) -> None:
        await original(self, event)
        await asyncio.sleep(DEPOSED_LEADER_DELAY_S)

    return [(Leadership, "multi", multi), (AuditorElection, "_until", until)]


def limbo_is_absence() -> list[Replacement]:
    original = checker._Run._judge

    def judge(self: Any, replica: ReplicaRead, findings: Any) -> None:
        if replica.status == Status.UNKNOWN_LEDGER_STATE:
            replica = replace(replica, verdict=Verdict.ABSENT, status=int(Status.NO_ENTRY))
        original(self, replica, findings)

    return [(checker._Run, "_judge", judge)]


def metadata_before_copies() -> list[Replacement]:
    """Name a replacement in the metadata without copies. The next check finds the missing entries and copies them."""
    original = Copier.copy

    async def copy(self: Any, ledger_id: Any, metadata: Any, targets: Any, **others: Any) -> CopyResult:
        if any(not target.is_replacement for target in targets):
            return await original(self, ledger_id, metadata, targets, **others)
        return CopyResult(done=list(targets))

    return [(Copier, "copy", copy)]


def copies_unanswered() -> list[Replacement]:
    original = LedgerClient.store_replicas

    async def store(self: Any, ledger_id: Any, metadata: Any, bookie_id: Any, frames: Any, **others: Any) -> Any:
        with contextlib.suppress(Exception):
            await original(self, ledger_id, metadata, bookie_id, frames, **others)
        return [int(Status.OK)] * len(frames)

    return [(LedgerClient, "store_replicas", store)]


def membership_not_read_again() -> list[Replacement]:
    original_run, original_copy = LedgerRepair.run, Copier.copy

    async def run(self: Any, **others: Any) -> Any:
        read: Callable[[], Awaitable[ClusterView]] = self._read_cluster
        seen: list[ClusterView] = []

        async def once() -> ClusterView:
            if not seen:
                seen.append(await read())
            return seen[0]

        self._read_cluster = once
        return await original_run(self, **others)

    async def copy(self: Any, *args: Any, **others: Any) -> CopyResult:
        async def is_wanted() -> bool:
            return True

        return await original_copy(self, *args, **{**others, "is_wanted": is_wanted})

    return [(LedgerRepair, "run", run), (Copier, "copy", copy)]


def lease_ignored() -> list[Replacement]:
    original = LostBookies.observe

    def observe(self: Any, view: Observation, now_s: float, now_ms: int) -> Any:
        return original(self, Observation(view.known, view.registered), now_s, now_ms)

    return [
        (Observation, "absent", property(lambda self: self.known - self.registered)),
        (ClusterView, "is_exempt", lambda self, bookie_id: False),
        (LostBookies, "observe", observe),
    ]


def delay_ignored() -> list[Replacement]:
    return [(LostBookies, "_left_s", lambda self, absence, now_s: 0.0)]


def recovery_without_record() -> list[Replacement]:
    async def add(self: Any, ledger_id: Any, cause: Any) -> None:
        return None

    return [(ClosingRecords, "add", add)]


def record_removed_unchecked() -> list[Replacement]:
    original = ClosingCheck._judge

    async def judge(self: Any, ledger_id: Any) -> Any:
        found = await original(self, ledger_id)
        return Finding.WHOLE if found in (Finding.UNANSWERED, Finding.MARKED) else found

    async def mark(self: Any, *args: Any) -> None:
        return None

    return [(ClosingCheck, "_judge", judge), (ClosingCheck, "_mark", mark)]


def no_second_attempt() -> list[Replacement]:
    def park(self: Any, ledger_id: Any, pause_s: float | None) -> None:
        self._parked[ledger_id] = None

    async def do_nothing(self: Any) -> None:
        return None

    return [
        (ReplicationWorker, "_park", park),
        (ReplicationWorker, "retry_now", lambda self: None),
        (ReplicationWorker, "_unpark_requested", do_nothing),
    ]
