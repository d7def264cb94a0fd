"""ReplicationWorker: takes marked ledgers one after the other and heals them (`ledger_repair`).

    free mark --lock--> attempt --whole--> mark, lock and record removed
                           |
                           +--not--> record says why; lock released; parked until its time, or until something changes

A parked ledger is looked at again when its time has come, or as soon as a bookie came (back), a membership changed, or
an operator asked for it. What cannot be healed at all is parked without a time. Times are in the record, so that all
workers keep to them; a worker that has just been started tries the hopeless ones once, for it cannot know what it
missed.

Losing the session loses the locks. What is being copied is finished even so: the compare-and-set protects the metadata,
and only the lock's holder can remove the mark.
Source: BookKeeper ReplicationWorker; spec section 6.4.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from bindery_client.ledger.api import LedgerClient
from bindery_core.errors import BinderyError, VersionConflict
from bindery_core.ids import LedgerId
from bindery_core.sources import RandomFloats
from bindery_kit.observability.logs import get_logger
from bindery_metadata.layout.layout import BinderyLayout
from bindery_metadata.recovery.recovery_records import (
    NOT_STORED,
    HistoryEvent,
    Reason,
    RecoveryRecord,
    RecoveryRecords,
    RecoveryState,
    WorkerReport,
)
from bindery_metadata.recovery.underreplication import HeldMark, Mark, UnderreplicationManager
from bindery_metadata.stores.store import MetadataStore

from bindery_recovery.budget import RepairBudget
from bindery_recovery.checks.checker import ALL, Depth
from bindery_recovery.cluster.cluster_view import ClusterView
from bindery_recovery.records import sentences
from bindery_recovery.records.reasons import CHECKED_ALL, stronger
from bindery_recovery.repair.attempt import Attempt, Unchanged
from bindery_recovery.repair.graces import Graces
from bindery_recovery.repair.ledger_repair import LedgerRepair, RepairTools
from bindery_recovery.repair.repair_plan import Outcome
from bindery_recovery.repair.smoothed_rate import SmoothedRate
from bindery_recovery.settings import RecoverySettings

BACKOFF_MIN_S: Final = 5.0
BACKOFF_MAX_S: Final = 300.0
"""Source: lockReleaseOfFailedLedgerGracePeriod."""
JITTER: Final = 0.25
"""Part of a back-off by which it may be shorter or longer."""
LOOK_S: Final = 2.0
"""How often it is looked who is there, while ledgers are parked."""
ASKED_S: Final = 10.0
"""How often it is looked whether an operator wants parked ledgers tried again."""
ASKED_READS_MAX: Final = 200
SWEEP_S: Final = 600.0
"""How often records without a mark are looked for."""
SEARCH_S: Final = 30.0
"""How often marks are searched for although nothing tells of new ones."""
REPORT_S: Final = 2.0
REPORT_ANYWAY_S: Final = 10.0
UNREADABLE_MAX: Final = 1_000
"""Entries of one ledger that are remembered as unreadable."""
METADATA_PAUSE_S: Final = 2.0
"""After metadata could not be had."""

log = get_logger(__name__)


@dataclass(slots=True)
class WorkerStats:
    """Since the start. For metrics."""

    ledgers_healed: int = 0
    ledgers_without_need: int = 0
    """Of those healed: nothing had to be copied."""
    ledgers_deleted: int = 0
    """Of those healed: they were gone."""
    ledgers_fenced: int = 0
    attempts_failed: int = 0
    locks_lost: int = 0
    """Healed, but the mark had to stay: it was renewed, or the lock was lost."""
    entries_copied: int = 0
    bytes_copied: int = 0
    seconds_busy: float = 0.0


class ReplicationWorker:
    """One for a process; `settings.workers` ledgers at a time."""

    def __init__(
        self,
        *,
        name: str,
        store: MetadataStore,
        client: LedgerClient,
        marks: UnderreplicationManager,
        records: RecoveryRecords,
        look: Callable[[], Awaitable[ClusterView]],
        budget: RepairBudget,
        settings: RecoverySettings,
        clock_ms: Callable[[], int],
        randomness: RandomFloats,
        layout: BinderyLayout | None = None,
    ) -> None:
        """`store`: that of `marks` and `records`. `look`: `ClusterLook.look`. `clock_ms`: the wall clock."""
        self.name: Final = name
        self.stats: Final = WorkerStats()
        self._store = store
        self._marks = marks
        self._records = records
        self._look = look
        self._budget = budget
        self._settings = settings
        self._clock_ms = clock_ms
        self._randomness = randomness
        self._layout = layout or BinderyLayout()
        self._tools = RepairTools(
            client, look, marks.is_enabled, budget, Graces(settings.open_ledger_grace_s), randomness
        )
        self._kicked = asyncio.Event()
        self._parked: dict[LedgerId, float | None] = {}
        """Until when, by the loop's clock; None: until something changes."""
        self._changes = 0
        """How often something changed that may help."""
        self._tried: dict[LedgerId, int] = {}
        """`_changes` when a parked ledger was last tried here."""
        self._current: dict[LedgerId, str] = {}
        self._unreadable: dict[LedgerId, frozenset[int]] = {}
        """Of ledgers that could not be healed: entries that no bookie could give."""
        self._leftovers: set[LedgerId] = set()
        """Healed ledgers whose record may still be there."""
        self._sweep_at = 0.0
        self._is_enabled_now = True
        self._rate = SmoothedRate()

    # --- what the process shows -----------------------------------------------------------------------------------

    @property
    def current(self) -> Sequence[LedgerId]:
        """Ledgers that are being looked at."""
        return list(self._current)

    @property
    def parked(self) -> int:
        return len(self._parked)

    def retry_now(self) -> None:
        """Look at every parked ledger again, whatever its time."""
        self._changes += 1
        self._parked.clear()
        self._kick()

    def report(self) -> WorkerReport:
        ledger_id, state = next(iter(self._current.items()), (None, "idle" if self._is_enabled_now else "paused"))
        return WorkerReport(
            self.name, self._clock_ms(), state, ledger_id, self.stats.bytes_copied, self.stats.entries_copied,
            round(self._rate.value, 1), self._budget.foreground_p99_ms, self._budget.bytes_per_s,
        )  # fmt: skip

    # --- running --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Heal until cancelled; locks are released then. Rides out outages of the metadata store."""
        while True:
            try:
                await self._marks.prepare()
                seen = await self._look()  # before the first attempt: who joins later is new
                break
            except BinderyError as error:
                log.warning("worker_waits", worker=self.name, error=str(error))
                await asyncio.sleep(METADATA_PAUSE_S)
        async with asyncio.TaskGroup() as group:
            for _ in range(self._settings.workers):
                group.create_task(self._work())
            if self._settings.workers:
                group.create_task(self._scout())
                group.create_task(self._watch_cluster(seen))
                group.create_task(self._report())

    async def _work(self) -> None:
        while True:
            kicked = self._kicked
            began = asyncio.get_running_loop().time()
            try:
                held = await self._marks.take(skip=self._is_parked)
            except BinderyError as error:
                log.warning("marks_unavailable", worker=self.name, error=str(error))
                await asyncio.sleep(METADATA_PAUSE_S)
                continue
            if held is not None:
                await self._process(held)
                continue
            for ledger_id in [one for one, until in self._parked.items() if until is not None and until <= began]:
                del self._parked[ledger_id]  # due, and not to be had: locked, gone, or nothing is to be taken up now
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await kicked.wait()

    def _pause_s(self) -> float:
        now = asyncio.get_running_loop().time()
        due = min((until for until in self._parked.values() if until is not None), default=now + SEARCH_S)
        return min(max(due - now, 0.05), SEARCH_S)

    def _kick(self) -> None:
        kicked, self._kicked = self._kicked, asyncio.Event()
        kicked.set()

    async def _scout(self) -> None:
        """Tell of new marks. A poll that shows nothing does not make everybody search the tree."""
        while True:
            if await self._marks.wait_for_marks():
                self._kick()

    # --- one ledger -----------------------------------------------------------------------------------------------

    async def _process(self, held: HeldMark) -> None:
        ledger_id = held.mark.ledger_id
        self._current[ledger_id] = "checking"
        began = asyncio.get_running_loop().time()
        try:
            await self._attempt(held)
        except BinderyError as error:  # of the metadata: the record cannot be written either
            log.warning("ledger_postponed", worker=self.name, ledger_id=ledger_id, error=str(error))
            self._park(ledger_id, METADATA_PAUSE_S * (1 + self._randomness.random()))
        except Exception as error:  # a fault of ours is not worth all other ledgers
            log.exception("ledger_repair_failed", worker=self.name, ledger_id=ledger_id, error=repr(error))
            self._park(ledger_id, BACKOFF_MAX_S)
        finally:
            self._current.pop(ledger_id, None)
            self.stats.seconds_busy += asyncio.get_running_loop().time() - began
            with contextlib.suppress(BinderyError):  # it then ends with the session, or is taken over
                await self._marks.release(held)

    async def _attempt(self, held: HeldMark) -> None:
        ledger_id = held.mark.ledger_id
        record = await self._records.get(ledger_id)
        if record is not None and (until_s := self._honoured_s(record)) is not None:
            self._park(ledger_id, None if until_s < 0 else until_s)
            return
        self._tried[ledger_id] = self._changes
        run = Attempt(self, held, record or self._new_record(held.mark))
        repair = LedgerRepair(
            ledger_id,
            self._tools,
            run,
            marked_ms=run.record.first_marked_ms,
            unreadable=self._unreadable.pop(ledger_id, ()),
            unsure=dict(run.record.unsure),
        )
        depth = ALL if run.record.reason in CHECKED_ALL else Depth(self._settings.check_depth_percent)
        try:
            outcome = await repair.run(depth=depth, marked=held.mark.replicas)
        finally:
            await run.stop()
        if repair.unreadable and outcome.state is not RecoveryState.HEALED:
            self._unreadable[ledger_id] = frozenset(list(repair.unreadable)[:UNREADABLE_MAX])
        run.record = run.record.with_changes(unsure=tuple(sorted(repair.unsure.items())))
        self.stats.ledgers_fenced += repair.was_fenced
        if outcome.state is RecoveryState.HEALED:
            await self._healed(run, outcome)
        else:
            await self._not_healed(run, outcome)

    def _new_record(self, mark: Mark) -> RecoveryRecord:
        """For a mark of somebody who keeps none."""
        return RecoveryRecord(
            mark.ledger_id, reason=Reason.BOOKIE_LOST if mark.replicas else Reason.PLACEMENT,
            first_marked_ms=mark.ctime_ms or self._clock_ms(), bookies=mark.replicas,
        )  # fmt: skip

    def _honoured_s(self, record: RecoveryRecord) -> float | None:
        """How many seconds the ledger is to be left alone, as somebody found; negative: until something changes."""
        is_hopeless = record.state is RecoveryState.UNRECOVERABLE
        if self._tried.get(record.ledger_id, -1 if is_hopeless else 0) != self._changes:
            return None
        if is_hopeless:
            return -1.0
        left_ms = (record.next_retry_ms or 0) - self._clock_ms()
        return left_ms / 1000 if left_ms > 0 else None

    async def _healed(self, run: Attempt, outcome: Outcome) -> None:
        ledger_id = run.record.ledger_id
        if not await self._marks.mark_replicated(run.held):
            self.stats.locks_lost += 1
            log.info("mark_stays", worker=self.name, ledger_id=ledger_id)
            self._kick()
            return
        self._tried.pop(ledger_id, None)
        self._parked.pop(ledger_id, None)
        self.stats.ledgers_healed += 1
        self.stats.ledgers_deleted += outcome.is_deleted
        self.stats.ledgers_without_need += not run.entries
        await self._remove(run.record)
        seconds = asyncio.get_running_loop().time() - run.began
        if outcome.is_deleted:
            text = f"ledger {ledger_id} was deleted"
        elif run.entries:
            text = (
                f"ledger {ledger_id} is whole again: {sentences.counted(run.entries, 'copy', 'copies')},"
                f" {sentences.size(run.bytes)}"
            )
        else:
            text = f"ledger {ledger_id} is whole: nothing had to be copied"
        log.info("ledger_healed", worker=self.name, ledger_id=ledger_id, entries=run.entries, bytes=run.bytes,
                 seconds=round(seconds, 3), is_deleted=outcome.is_deleted)  # fmt: skip
        await self._tell(
            "healed", text, ledger_id=ledger_id, entries=run.entries, bytes=run.bytes, seconds=round(seconds, 3),
            worker=self.name, reason=str(run.record.reason),
        )  # fmt: skip

    async def _remove(self, record: RecoveryRecord) -> None:
        """With its mark. What somebody wrote meanwhile may be about a new mark: it is looked at later."""
        if record.version == NOT_STORED:
            self._leftovers.add(record.ledger_id)
            return
        try:
            await self._records.remove(record.ledger_id, guard=Unchanged(self._store, self._layout, record))
        except VersionConflict:
            self._leftovers.add(record.ledger_id)

    async def _remove_leftovers(self) -> None:
        """Records whose mark has gone: of workers that ended in between, or that came too late."""
        leftovers, self._leftovers = self._leftovers, set()
        now = asyncio.get_running_loop().time()
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_S
            async for one in self._records.list():
                if await self._marks.get(one.ledger_id) is None:
                    self._leftovers.add(one.ledger_id)  # and if that is so still when we are here again
        for ledger_id in leftovers:
            record = await self._records.get(ledger_id)
            if record is not None and await self._marks.get(ledger_id) is None:
                await self._remove(record)

    async def _not_healed(self, run: Attempt, outcome: Outcome) -> None:
        record = run.record
        is_failure = outcome.state is not RecoveryState.WAITING
        attempts = record.attempts + is_failure
        if outcome.state is RecoveryState.UNRECOVERABLE:
            pause_s = None
        elif outcome.retry_s is not None:
            pause_s = outcome.retry_s
        else:
            pause_s = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2 ** min(record.attempts, 30))
            pause_s *= 1 + JITTER * (2 * self._randomness.random() - 1)
        self.stats.attempts_failed += is_failure
        was_hopeless = record.state is RecoveryState.UNRECOVERABLE
        await run.write(
            state=outcome.state, obstacle=outcome.obstacle, detail=outcome.detail, attempts=attempts, worker="",
            last_error=outcome.detail if is_failure else record.last_error,
            next_retry_ms=None if pause_s is None else self._clock_ms() + int(pause_s * 1000),
            missing_entries=outcome.missing_entries if outcome.missing_entries is not None else record.missing_entries,
            missing_bytes=outcome.missing_bytes if outcome.missing_bytes is not None else record.missing_bytes,
        )  # fmt: skip
        has_changed = run.is_outdated or self._tried.get(record.ledger_id) != self._changes  # while we were at it
        self._park(record.ledger_id, 0.0 if has_changed else pause_s)
        log.info("ledger_not_healed", worker=self.name, ledger_id=record.ledger_id, state=str(outcome.state),
                 obstacle=str(outcome.obstacle), detail=outcome.detail, attempts=attempts)  # fmt: skip
        if outcome.state is RecoveryState.UNRECOVERABLE and not was_hopeless:
            text = f"ledger {record.ledger_id} cannot be healed: {outcome.detail}"
            await self._tell("unrecoverable", text, ledger_id=record.ledger_id, worker=self.name)

    async def _tell(self, kind: str, text: str, **fields: object) -> None:
        with contextlib.suppress(BinderyError):  # a line of history is not worth a repair
            await self._records.append_history(HistoryEvent(self._clock_ms(), kind, text, fields))

    # --- parking --------------------------------------------------------------------------------------------------

    def _park(self, ledger_id: LedgerId, pause_s: float | None) -> None:
        self._parked[ledger_id] = None if pause_s is None else asyncio.get_running_loop().time() + pause_s

    def _is_parked(self, ledger_id: LedgerId) -> bool:
        if ledger_id in self._current:
            return True
        until = self._parked.get(ledger_id, 0.0)
        if until is None or until > asyncio.get_running_loop().time():
            return True
        self._parked.pop(ledger_id, None)
        return False

    async def _watch_cluster(self, before: ClusterView) -> None:
        """See what may help parked ledgers."""
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                is_enabled = await self._marks.is_enabled()
                if is_enabled and not self._is_enabled_now:
                    self._kick()
                self._is_enabled_now = is_enabled
                now = await self._look()
                if _may_help(before, now):
                    log.info("parked_ledgers_woken", worker=self.name, ledgers=len(self._parked))
                    self.retry_now()
                before = now
                if loop.time() - asked_at >= ASKED_S:
                    asked_at = loop.time()
                    await self._wake_asked()
                    await self._remove_leftovers()
            except BinderyError as error:
                log.info("cluster_not_seen", worker=self.name, error=str(error))

    async def _wake_asked(self) -> None:
        """Ledgers whose record another wrote: it says to look again sooner, or marks are gone."""
        for ledger_id in list(self._parked)[:ASKED_READS_MAX]:
            record = await self._records.get(ledger_id)
            is_due = record is not None and (record.next_retry_ms or 0) <= self._clock_ms()
            if record is None:
                self._unreadable.pop(ledger_id, None)
            if record is None or (is_due and record.state is not RecoveryState.UNRECOVERABLE):
                self._parked.pop(ledger_id, None)
                self._tried.pop(ledger_id, None)
                self._kick()
            elif ledger_id in self._parked:
                self._parked[ledger_id] = self._parked.pop(ledger_id)  # the others' turn next time

    # --- reporting ------------------------------------------------------------------------------------------------

    async def _report(self) -> None:
        loop = asyncio.get_running_loop()
        told: tuple[object, ...] | None = None
        told_at = 0.0
        bytes_before, at = self.stats.bytes_copied, loop.time()
        while True:
            now = loop.time()
            if now > at:
                self._rate.see(max(0.0, (self.stats.bytes_copied - bytes_before) / (now - at)))
                bytes_before, at = self.stats.bytes_copied, now
            report = self.report()
            news = (report.state, report.ledger_id, report.bytes_done_total, report.bytes_per_s)
            if news != told or now - told_at >= REPORT_ANYWAY_S:
                try:
                    await self._records.report(report)
                    told, told_at = news, now
                except BinderyError as error:
                    log.info("report_postponed", worker=self.name, error=str(error))
            await asyncio.sleep(REPORT_S)

    def at_work(self, ledger_id: LedgerId, entries: int, size: int) -> None:
        """For `Attempt`: copies were made."""
        self._current[ledger_id] = "copying"
        self.stats.entries_copied += entries
        self.stats.bytes_copied += size

    async def put(self, record: RecoveryRecord, *, known: Collection[str]) -> RecoveryRecord:
        """For `Attempt`: what the worker says of a ledger, over what others may have said of it meanwhile.

        `known`: whom it was marked for when it was looked at. Why it was not healed for them says nothing of others.
        """

        def change(found: RecoveryRecord | None) -> RecoveryRecord:
            if found is None:
                return record
            said = record.with_changes(
                reason=stronger(found.reason, record.reason), bookies=found.bookies, version=found.version,
                first_marked_ms=found.first_marked_ms or record.first_marked_ms,
            )  # fmt: skip
            if set(found.bookies) <= set(known) or record.state is RecoveryState.COPYING:
                return said
            return said.with_changes(state=RecoveryState.WAITING, next_retry_ms=None)

        return await self._records.update(record.ledger_id, change) or record


def _may_help(before: ClusterView, now: ClusterView) -> bool:
    """A bookie came, became writable, or is meant otherwise."""
    if any(
        b not in before.bookies or (is_writable and not before.bookies[b]) for b, is_writable in now.bookies.items()
    ):
        return True
    if any(before.intent(b) is not now.intent(b) for b in before.memberships.keys() | now.memberships.keys()):
        return True
    return before.known != now.known
