"""Mutants of healing: auditor, election, worker and copier with one promise broken on purpose, for `mutants`."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Final
from unittest.mock import patch

from bindery_client.client import LedgerClient
from bindery_client.ledger.replica import ReplicaRead, Verdict
from bindery_core.wire.messages import Status
from bindery_metadata.coordination.election import AuditorElection, Leadership
from bindery_metadata.ledgers.closing_records import ClosingRecords
from bindery_metadata.recovery.underreplication import HeldMark, UnderreplicationManager
from bindery_recovery.checks import checker
from bindery_recovery.checks.closing_check import ClosingCheck, Finding
from bindery_recovery.cluster.cluster_view import ClusterView
from bindery_recovery.cluster.lost_bookies import LostBookies, View
from bindery_recovery.repair.copier import Copier, CopyResult
from bindery_recovery.repair.ledger_repair import LedgerRepair
from bindery_recovery.repair.worker import ReplicationWorker

Patched = contextlib.AbstractContextManager[Any]
LEARNS_LATE_S: Final = 10.0


def mark_removed_before_copy() -> Patched:
    """The mark goes when the work on a ledger begins, not when it is done."""
    real = ReplicationWorker._attempt

    async def attempt(self: Any, held: HeldMark) -> None:
        await self._marks.mark_replicated(held)
        await real(self, held)

    return patch.object(ReplicationWorker, "_attempt", attempt)


def lock_ignored() -> Patched:
    """A lock that another holds keeps nobody away."""
    real = UnderreplicationManager._take_lock

    async def take_lock(self: Any, ledger_id: Any) -> HeldMark | None:
        held = await real(self, ledger_id)
        mark = await self.get(ledger_id) if held is None else None
        if mark is None:
            return held
        return HeldMark(mark, self._layout.mark_lock(ledger_id), self._store.session_id)

    stack = contextlib.ExitStack()
    stack.enter_context(patch.object(UnderreplicationManager, "_take_lock", take_lock))
    stack.enter_context(patch.object(UnderreplicationManager, "take", _take_whatever))
    return stack


async def _take_whatever(self: Any, *, skip: Any = lambda _: False) -> HeldMark | None:
    """As `take`, without a look at the locks."""
    if not await self.is_enabled():
        return None
    async for mark in self.list():
        if not skip(mark.ledger_id):
            held: HeldMark | None = await self.lock(mark.ledger_id)
            if held is not None:
                return held
    return None


def leader_unchecked() -> Patched:
    """What an auditor writes is written whoever leads by then. It learns late that its office is over, as a process
    that was held up does: with the check that is harmless."""
    real_until = AuditorElection._until

    async def multi(self: Any, ops: Sequence[Any]) -> Any:
        return await self._store.multi(ops)

    async def until(self: Any, event: asyncio.Event) -> None:
        await real_until(self, event)
        await asyncio.sleep(LEARNS_LATE_S)

    stack = contextlib.ExitStack()
    stack.enter_context(patch.object(Leadership, "multi", multi))
    stack.enter_context(patch.object(AuditorElection, "_until", until))
    return stack


def limbo_is_absence() -> Patched:
    """A bookie that cannot tell is taken for one that denies."""
    real = checker._Run._judge

    def judge(self: Any, replica: ReplicaRead, findings: Any) -> None:
        if replica.status == Status.UNKNOWN_LEDGER_STATE:
            replica = replace(replica, verdict=Verdict.ABSENT, status=int(Status.NO_ENTRY))
        real(self, replica, findings)

    return patch.object(checker._Run, "_judge", judge)


def metadata_before_copies() -> Patched:
    """Metadata name a replacement that has nothing yet; the next check finds that out, and fills it."""
    real = Copier.copy

    async def copy(self: Any, ledger_id: Any, metadata: Any, targets: Any, **others: Any) -> CopyResult:
        if any(not target.is_replacement for target in targets):
            return await real(self, ledger_id, metadata, targets, **others)
        return CopyResult(done=list(targets))

    return patch.object(Copier, "copy", copy)


def membership_not_asked_again() -> Patched:
    """Who was away when a ledger was taken is away for as long as it takes."""
    real_run, real_copy = LedgerRepair.run, Copier.copy

    async def run(self: Any, **others: Any) -> Any:
        look: Callable[[], Awaitable[ClusterView]] = self._look
        seen: list[ClusterView] = []

        async def once() -> ClusterView:
            if not seen:
                seen.append(await look())
            return seen[0]

        self._look = once
        return await real_run(self, **others)

    async def copy(self: Any, *args: Any, **others: Any) -> CopyResult:
        async def is_wanted() -> bool:
            return True

        return await real_copy(self, *args, **{**others, "is_wanted": is_wanted})

    stack = contextlib.ExitStack()
    stack.enter_context(patch.object(LedgerRepair, "run", run))
    stack.enter_context(patch.object(Copier, "copy", copy))
    return stack


def lease_ignored() -> Patched:
    """A bookie that is away with leave counts as lost."""
    stack = contextlib.ExitStack()
    stack.enter_context(patch.object(View, "absent", property(lambda self: self.known - self.registered)))
    stack.enter_context(patch.object(ClusterView, "is_excused", lambda self, bookie_id: False))
    stack.enter_context(patch.object(LostBookies, "observe", _observe_without_excuses(LostBookies.observe)))
    return stack


def _observe_without_excuses(real: Any) -> Any:
    def observe(self: Any, view: View, now_s: float, now_ms: int) -> Any:
        return real(self, View(view.known, view.registered), now_s, now_ms)

    return observe


def delay_ignored() -> Patched:
    """Whoever is absent is lost."""
    return patch.object(LostBookies, "_left_s", lambda self, absence, now_s: 0.0)


def copies_unanswered() -> Patched:
    """A copy that was sent counts, whatever the bookie answers."""
    real = LedgerClient.store_replicas

    async def store(self: Any, ledger_id: Any, metadata: Any, bookie_id: Any, frames: Any, **others: Any) -> Any:
        with contextlib.suppress(Exception):
            await real(self, ledger_id, metadata, bookie_id, frames, **others)
        return [int(Status.OK)] * len(frames)

    return patch.object(LedgerClient, "store_replicas", store)


def recovery_without_note() -> Patched:
    """Ledgers are closed without a word about copies that their writer may have gone on without."""

    async def add(self: Any, ledger_id: Any, cause: Any) -> None:
        return None

    return patch.object(ClosingRecords, "add", add)


def note_removed_unlooked() -> Patched:
    """A note goes whatever the bookies answered, or did not, and nothing is marked for it."""
    real = ClosingCheck._judge

    async def judge(self: Any, ledger_id: Any) -> Any:
        found = await real(self, ledger_id)
        return Finding.WHOLE if found in (Finding.UNANSWERED, Finding.MARKED) else found

    async def mark(self: Any, *args: Any) -> None:
        return None

    stack = contextlib.ExitStack()
    stack.enter_context(patch.object(ClosingCheck, "_judge", judge))
    stack.enter_context(patch.object(ClosingCheck, "_mark", mark))
    return stack


def no_second_attempt() -> Patched:
    """What could not be healed at once is looked at no more."""

    def park(self: Any, ledger_id: Any, pause_s: float | None) -> None:
        self._parked[ledger_id] = None

    stack = contextlib.ExitStack()
    stack.enter_context(patch.object(ReplicationWorker, "_park", park))
    stack.enter_context(patch.object(ReplicationWorker, "retry_now", lambda self: None))
    stack.enter_context(patch.object(ReplicationWorker, "_wake_asked", _nothing))
    return stack


async def _nothing(self: Any) -> None:
    return None
