"""Take marked ledgers one after the other and repair them (`ledger_repair`).

    free mark --lock--> attempt --repaired--> mark, lock and record removed
                           |
                           +--not--> the record states the reason; lock released; the ledger is parked

A parked ledger is tried again at its retry time, or as soon as a bookie registers, a membership changes, or an operator
requests it. A ledger that cannot be repaired at all is parked without a retry time. Retry times are stored in the
record, so all workers respect them. A worker that has just started tries each unrecoverable ledger once, because
bookies may have returned since the last attempt.

If the session expires, the locks are released. A copy in progress still completes: compare-and-set protects the
metadata, and only the holder of the lock can remove the mark. Source: BookKeeper ReplicationWorker.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from bindery_client.ledger.api import LedgerClient
from bindery_core.backoff import Backoff
from bindery_core.errors import BinderyError
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
"""First delay in seconds after a failed attempt; it doubles with each further one."""
BACKOFF_MAX_S: Final = 300.0
"""Maximum seconds between two attempts at a ledger. Source: lockReleaseOfFailedLedgerGracePeriod."""
JITTER: Final = 0.25
"""Share by which a back-off may be shorter or longer."""
CLUSTER_POLL_S: Final = 2.0
"""Interval in seconds at which the bookies are polled for changes that may help parked ledgers."""
RETRY_REQUEST_POLL_S: Final = 10.0
"""Interval in seconds at which the records of parked ledgers are read, because an operator may request a retry."""
RETRY_REQUEST_READS_MAX: Final = 200
"""Maximum number of these records read in one pass."""
SWEEP_S: Final = 600.0
"""Interval in seconds at which records without a mark are searched for."""
SEARCH_S: Final = 30.0
"""Maximum seconds between two searches for marks."""
REPORT_S: Final = 2.0
"""Interval in seconds between two reports of a worker."""
REPORT_UNCHANGED_S: Final = 10.0
"""Seconds after which a report is written again even if it has not changed."""
UNREADABLE_MAX: Final = 1_000
"""Maximum number of unreadable entries that are remembered for one ledger."""
UNRECORDED_MAX: Final = 100
"""Maximum number of events that wait until they can be written to the history."""
METADATA_PAUSE_S: Final = 2.0
"""Pause in seconds after the metadata store failed."""

log = get_logger(__name__)


@dataclass(slots=True)
class WorkerStats:
    """Counters since the process started, for metrics."""

    ledgers_healed: int = 0
    ledgers_without_need: int = 0
    """Of the healed ledgers, those for which no entry had to be copied."""
    replicas_moved: int = 0
    """Replicas that were moved to bookies of other racks."""
    ledgers_deleted: int = 0
    """Of the healed ledgers, those that had been deleted."""
    ledgers_fenced: int = 0
    """Open ledgers that were fenced and closed."""
    attempts_failed: int = 0
    locks_lost: int = 0
    """Repaired ledgers whose mark was kept, because it was renewed or the lock was lost."""
    entries_copied: int = 0
    bytes_copied: int = 0
    seconds_busy: float = 0.0


class ReplicationWorker:
    """The worker of a process; it repairs `settings.workers` ledgers at a time."""

    def __init__(
        self,
        *,
        name: str,
        store: MetadataStore,
        client: LedgerClient,
        marks: UnderreplicationManager,
        records: RecoveryRecords,
        read_cluster: Callable[[], Awaitable[ClusterView]],
        budget: RepairBudget,
        settings: RecoverySettings,
        clock_ms: Callable[[], int],
        randomness: RandomFloats,
        layout: BinderyLayout | None = None,
    ) -> None:
        """`store`: the store of `marks` and `records`. `read_cluster`: `ClusterReader.read`. `clock_ms`: the wall
        clock."""
        self.name: Final = name
        self.stats: Final = WorkerStats()
        self._store = store
        self._marks = marks
        self._records = records
        self._read_cluster = read_cluster
        self._budget = budget
        self._settings = settings
        self._clock_ms = clock_ms
        self._randomness = randomness
        self._layout = layout or BinderyLayout()
        self._tools = RepairTools(
            client, read_cluster, marks.is_enabled, budget, Graces(settings.open_ledger_grace_s), randomness
        )
        self._backoff = Backoff(BACKOFF_MIN_S, BACKOFF_MAX_S, jitter=JITTER, randomness=randomness)
        self._wake_event = asyncio.Event()
        self._parked: dict[LedgerId, float | None] = {}
        """Retry time of each parked ledger by the loop's clock; None: parked until something changes."""
        self._changes = 0
        """Number of changes of the cluster that may help parked ledgers."""
        self._tried: dict[LedgerId, int] = {}
        """Value of `_changes` when a parked ledger was last tried here."""
        self._current: dict[LedgerId, str] = {}
        self._unreadable: dict[LedgerId, frozenset[int]] = {}
        """Entries that no bookie could return, by ledger that could not be repaired."""
        self._leftovers: set[LedgerId] = set()
        """Repaired ledgers whose record may still exist."""
        self._unrecorded: deque[HistoryEvent] = deque(maxlen=UNRECORDED_MAX)
        """Events that the history does not have yet, the oldest first."""
        self._doubtful: HistoryEvent | None = None
        """The oldest of them if the history may have it."""
        self._recording = asyncio.Lock()
        self._sweep_at = 0.0
        self._is_enabled_now = True
        self._rate = SmoothedRate()

    # --- state ----------------------------------------------------------------------------------------------------

    @property
    def current(self) -> Sequence[LedgerId]:
        """Ledgers that are being checked or repaired."""
        return list(self._current)

    @property
    def parked(self) -> int:
        """Number of parked ledgers."""
        return len(self._parked)

    def retry_now(self) -> None:
        """Try every parked ledger again, whatever its retry time."""
        self._changes += 1
        self._parked.clear()
        self._wake()

    def report(self) -> WorkerReport:
        """Return the present state of this worker."""
        ledger_id, state = next(iter(self._current.items()), (None, "idle" if self._is_enabled_now else "paused"))
        return WorkerReport(
            self.name,
            self._clock_ms(),
            state,
            ledger_id,
            self.stats.bytes_copied,
            self.stats.entries_copied,
            round(self._rate.value, 1),
            self._budget.foreground_p99_ms,
            self._budget.bytes_per_s,
        )

    # --- running --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Repair ledgers until cancelled; the locks are then released. If the metadata store fails, wait and try
        again."""
        while True:
            try:
                await self._marks.prepare()
                # before the first attempt, so that a bookie that joins later is recognized as new
                seen = await self._read_cluster()
                break
            except BinderyError as error:
                log.warning("worker_waits", worker=self.name, error=str(error))
                await asyncio.sleep(METADATA_PAUSE_S)
        async with asyncio.TaskGroup() as group:
            for _ in range(self._settings.workers):
                group.create_task(self._work())
            if self._settings.workers:
                group.create_task(self._watch_marks())
                group.create_task(self._watch_cluster(seen))
                group.create_task(self._report())

    async def _work(self) -> None:
        while True:
            woken = self._wake_event
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
                del self._parked[ledger_id]  # due but not available: locked, deleted, or recovery is disabled
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await woken.wait()

    def _pause_s(self) -> float:
        now = asyncio.get_running_loop().time()
        due = min((until for until in self._parked.values() if until is not None), default=now + SEARCH_S)
        return min(max(due - now, 0.05), SEARCH_S)

    def _wake(self) -> None:
        woken, self._wake_event = self._wake_event, asyncio.Event()
        woken.set()

    async def _watch_marks(self) -> None:
        """Wake the workers when there are new marks. A poll that finds no new marks wakes none, so that the workers do
        not search the tree in vain."""
        while True:
            if await self._marks.wait_for_marks():
                self._wake()

    # --- one ledger -----------------------------------------------------------------------------------------------

    async def _process(self, held: HeldMark) -> None:
        ledger_id = held.mark.ledger_id
        self._current[ledger_id] = "checking"
        began = asyncio.get_running_loop().time()
        try:
            await self._attempt(held)
        except BinderyError as error:  # the metadata store failed, so the record cannot be written either
            log.warning("ledger_postponed", worker=self.name, ledger_id=ledger_id, error=str(error))
            self._park(ledger_id, METADATA_PAUSE_S * (1 + self._randomness.random()))
        except Exception as error:  # a defect must not stop the repair of other ledgers
            log.exception("ledger_repair_failed", worker=self.name, ledger_id=ledger_id, error=repr(error))
            self._park(ledger_id, BACKOFF_MAX_S)
        finally:
            self._current.pop(ledger_id, None)
            self.stats.seconds_busy += asyncio.get_running_loop().time() - began
            with contextlib.suppress(BinderyError):  # otherwise the lock ends with the session, or is taken over
                await self._marks.release(held)

    async def _attempt(self, held: HeldMark) -> None:
        ledger_id = held.mark.ledger_id
        record = await self._records.get(ledger_id)
        if record is not None and (until_s := self._pause_of_record_s(record)) is not None:
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
            spread=run.record.reason is Reason.PLACEMENT and self._settings.placement_repair,
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
        self.stats.replicas_moved += repair.moves
        if outcome.state is RecoveryState.HEALED:
            await self._healed(run, outcome, moves=repair.moves)
        else:
            await self._not_healed(run, outcome)

    def _new_record(self, mark: Mark) -> RecoveryRecord:
        """Return a record for a mark that was created without one."""
        return RecoveryRecord(
            mark.ledger_id,
            reason=Reason.BOOKIE_LOST if mark.replicas else Reason.PLACEMENT,
            first_marked_ms=mark.ctime_ms or self._clock_ms(),
            bookies=mark.replicas,
        )

    def _pause_of_record_s(self, record: RecoveryRecord) -> float | None:
        """Return the seconds until the next attempt according to the record; negative: until something changes; None:
        try now."""
        is_unrecoverable = record.state is RecoveryState.UNRECOVERABLE
        if self._tried.get(record.ledger_id, -1 if is_unrecoverable else 0) != self._changes:
            return None
        if is_unrecoverable:
            return -1.0
        left_ms = (record.next_retry_ms or 0) - self._clock_ms()
        return left_ms / 1000 if left_ms > 0 else None

    async def _healed(self, run: Attempt, outcome: Outcome, *, moves: int) -> None:
        ledger_id = run.record.ledger_id
        if not await self._marks.mark_replicated(run.held):
            self.stats.locks_lost += 1
            log.info("mark_stays", worker=self.name, ledger_id=ledger_id)
            self._wake()
            return
        self._tried.pop(ledger_id, None)
        self._parked.pop(ledger_id, None)
        self.stats.ledgers_healed += 1
        self.stats.ledgers_deleted += outcome.is_deleted
        self.stats.ledgers_without_need += not run.entries
        seconds = asyncio.get_running_loop().time() - run.began
        if outcome.is_deleted:
            text = f"ledger {ledger_id} was deleted"
        elif moves:
            text = (
                f"ledger {ledger_id} is on more racks: {sentences.counted(moves, 'move', 'moves')},"
                f" {sentences.counted(run.entries, 'copy', 'copies')}, {sentences.size(run.bytes)}"
            )
        elif run.entries:
            text = (
                f"ledger {ledger_id} is whole again: {sentences.counted(run.entries, 'copy', 'copies')},"
                f" {sentences.size(run.bytes)}"
            )
        else:
            text = f"ledger {ledger_id} is whole: nothing had to be copied"
        log.info(
            "ledger_healed",
            worker=self.name,
            ledger_id=ledger_id,
            entries=run.entries,
            bytes=run.bytes,
            seconds=round(seconds, 3),
            is_deleted=outcome.is_deleted,
        )
        await self._record_event(
            "healed",
            text,
            ledger_id=ledger_id,
            entries=run.entries,
            bytes=run.bytes,
            seconds=round(seconds, 3),
            worker=self.name,
            reason=str(run.record.reason),
        )
        await self._remove(run.record)

    async def _remove(self, record: RecoveryRecord) -> None:
        """Remove the record of a ledger whose mark was removed. If the store fails, or the record has changed since and
        may belong to a new mark, it is examined later."""
        if record.version == NOT_STORED:
            self._leftovers.add(record.ledger_id)
            return
        try:
            await self._records.remove(record.ledger_id, guard=Unchanged(self._store, self._layout, record))
        except BinderyError:
            self._leftovers.add(record.ledger_id)

    async def _remove_leftovers(self) -> None:
        """Remove records without a mark. They remain if a worker stops after it removed the mark, or writes the record
        after that."""
        leftovers, self._leftovers = self._leftovers, set()
        now = asyncio.get_running_loop().time()
        try:
            if now >= self._sweep_at:
                async for one in self._records.list():
                    if await self._marks.get(one.ledger_id) is None:
                        self._leftovers.add(one.ledger_id)  # removed if it still has no mark in the next pass
                self._sweep_at = now + SWEEP_S
            while leftovers:
                ledger_id = next(iter(leftovers))
                record = await self._records.get(ledger_id)
                if record is not None and await self._marks.get(ledger_id) is None:
                    await self._remove(record)
                leftovers.remove(ledger_id)
        finally:
            self._leftovers |= leftovers

    async def _not_healed(self, run: Attempt, outcome: Outcome) -> None:
        record = run.record
        is_failure = outcome.state is not RecoveryState.WAITING
        attempts = record.attempts + is_failure
        if outcome.state is RecoveryState.UNRECOVERABLE:
            pause_s = None
        elif outcome.retry_s is not None:
            pause_s = outcome.retry_s
        else:
            pause_s = self._backoff.delay_s(record.attempts + 1)
        self.stats.attempts_failed += is_failure
        was_unrecoverable = run.state_before is RecoveryState.UNRECOVERABLE
        await run.write(
            state=outcome.state,
            obstacle=outcome.obstacle,
            detail=outcome.detail,
            attempts=attempts,
            worker="",
            last_error=outcome.detail if is_failure else record.last_error,
            next_retry_ms=None if pause_s is None else self._clock_ms() + int(pause_s * 1000),
            missing_entries=outcome.missing_entries if outcome.missing_entries is not None else record.missing_entries,
            missing_bytes=outcome.missing_bytes if outcome.missing_bytes is not None else record.missing_bytes,
        )
        has_changed = run.is_outdated or self._tried.get(record.ledger_id) != self._changes  # during the attempt
        self._park(record.ledger_id, 0.0 if has_changed else pause_s)
        log.info(
            "ledger_not_healed",
            worker=self.name,
            ledger_id=record.ledger_id,
            state=str(outcome.state),
            obstacle=str(outcome.obstacle),
            detail=outcome.detail,
            attempts=attempts,
        )
        if outcome.state is RecoveryState.UNRECOVERABLE and not was_unrecoverable:
            text = f"ledger {record.ledger_id} cannot be healed: {outcome.detail}"
            await self._record_event("unrecoverable", text, ledger_id=record.ledger_id, worker=self.name)

    async def _record_event(self, kind: str, text: str, **fields: object) -> None:
        self._unrecorded.append(HistoryEvent(self._clock_ms(), kind, text, fields))
        with contextlib.suppress(BinderyError):  # an event must not fail a repair; `_report` tries again
            await self._record_events()

    async def _record_events(self) -> None:
        async with self._recording:
            while self._unrecorded:
                event = self._unrecorded[0]
                is_certain = await self._records.append_history(event, may_exist=event is self._doubtful)
                self._doubtful = None if is_certain else event
                if not is_certain:
                    return
                if self._unrecorded[0] is event:  # otherwise newer ones have displaced it
                    self._unrecorded.popleft()

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
        """Wake parked ledgers when a change of the cluster may help them."""
        loop = asyncio.get_running_loop()
        polled_at = loop.time()
        while True:
            await asyncio.sleep(CLUSTER_POLL_S)
            try:
                is_enabled = await self._marks.is_enabled()
                if is_enabled and not self._is_enabled_now:
                    self._wake()
                self._is_enabled_now = is_enabled
                now = await self._read_cluster()
                if _may_help(before, now):
                    log.info("parked_ledgers_woken", worker=self.name, ledgers=len(self._parked))
                    self.retry_now()
                before = now
                if loop.time() - polled_at >= RETRY_REQUEST_POLL_S:
                    polled_at = loop.time()
                    await self._unpark_requested()
                    await self._remove_leftovers()
            except BinderyError as error:
                log.info("cluster_not_seen", worker=self.name, error=str(error))

    async def _unpark_requested(self) -> None:
        """Unpark ledgers whose record another process changed: a retry was requested, or the mark was removed."""
        for ledger_id in list(self._parked)[:RETRY_REQUEST_READS_MAX]:
            record = await self._records.get(ledger_id)
            is_due = record is not None and (record.next_retry_ms or 0) <= self._clock_ms()
            if record is None:
                self._unreadable.pop(ledger_id, None)
            if record is None or (is_due and record.state is not RecoveryState.UNRECOVERABLE):
                self._parked.pop(ledger_id, None)
                self._tried.pop(ledger_id, None)
                self._wake()
            elif ledger_id in self._parked:
                # moved to the end, so that the next pass reads other records
                self._parked[ledger_id] = self._parked.pop(ledger_id)

    # --- reporting ------------------------------------------------------------------------------------------------

    async def _report(self) -> None:
        loop = asyncio.get_running_loop()
        reported: tuple[object, ...] | None = None
        reported_at = 0.0
        bytes_before, at = self.stats.bytes_copied, loop.time()
        while True:
            now = loop.time()
            if now > at:
                self._rate.see(max(0.0, (self.stats.bytes_copied - bytes_before) / (now - at)))
                bytes_before, at = self.stats.bytes_copied, now
            report = self.report()
            news = (report.state, report.ledger_id, report.bytes_done_total, report.bytes_per_s)
            if self._unrecorded or news != reported or now - reported_at >= REPORT_UNCHANGED_S:
                try:
                    await self._records.report(report)
                    reported, reported_at = news, now
                    await self._record_events()
                except BinderyError as error:
                    log.info("report_postponed", worker=self.name, error=str(error))
            await asyncio.sleep(REPORT_S)

    def at_work(self, ledger_id: LedgerId, entries: int, size: int) -> None:
        """For `Attempt`: entries were copied."""
        self._current[ledger_id] = "copying"
        self.stats.entries_copied += entries
        self.stats.bytes_copied += size

    async def put(self, record: RecoveryRecord, *, known: Collection[str]) -> RecoveryRecord:
        """For `Attempt`: write the record of a ledger, and merge it with changes that other processes made in the
        meantime.

        `known`: bookies for which the ledger was marked when the attempt started. The result of the attempt does
        not apply to other bookies.
        """

        def change(found: RecoveryRecord | None) -> RecoveryRecord:
            if found is None:
                return record
            merged = record.with_changes(
                reason=stronger(found.reason, record.reason),
                bookies=found.bookies,
                version=found.version,
                first_marked_ms=found.first_marked_ms or record.first_marked_ms,
            )
            if set(found.bookies) <= set(known) or record.state is RecoveryState.COPYING:
                return merged
            return merged.with_changes(state=RecoveryState.WAITING, next_retry_ms=None)

        return await self._records.update(record.ledger_id, change) or record


def _may_help(before: ClusterView, now: ClusterView) -> bool:
    """Return True if a bookie registered, became writable, or its membership or cookie changed."""
    if any(
        b not in before.bookies or (is_writable and not before.bookies[b]) for b, is_writable in now.bookies.items()
    ):
        return True
    if any(before.intent(b) is not now.intent(b) for b in before.memberships.keys() | now.memberships.keys()):
        return True
    return before.known != now.known
