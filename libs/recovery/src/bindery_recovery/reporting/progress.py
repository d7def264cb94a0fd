"""Report the progress of recovery: remaining work, rate and estimated end, or why there is no estimate.

`collect` reads a Snapshot from the metadata; `summarize`, which is pure, turns it into Progress. ProgressCollector does
both for callers that ask repeatedly (metrics, HTTP) and limits how often the metadata is read.

Basis of the estimate
- Bytes left: of marked ledgers that can be repaired now. The record of a closed ledger has no size if a writer reported
  the ledger, or if a tool that writes no records marked it. Its size is then everything that the ledger's metadata
  assigns to the bookies of the mark, which is at least as much as has to be copied. A ledger of unknown size, such as
  an open one, counts as the mean of the others.
- Rate: bytes that workers copied in the last PACE_WINDOW_S; before enough samples exist, the rates that the workers
  report.
- Blocked and unrecoverable ledgers are not included: the end of their obstacle cannot be predicted.
- There is no estimate if nothing is being copied; `why_no_eta` then states what has to happen.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeVar

from bindery_core.errors import NoSuchNode
from bindery_core.formats import ledger_metadata_codec
from bindery_core.ids import BookieId, LedgerId
from bindery_metadata.bookies.membership import Intent, Membership, MembershipStore
from bindery_metadata.coordination.election import current_auditor
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.closing_records import ClosingRecord, ClosingRecords
from bindery_metadata.recovery.recovery_records import (
    Obstacle,
    Pause,
    RecoveryRecord,
    RecoveryRecords,
    RecoveryState,
    WorkerReport,
)
from bindery_metadata.recovery.underreplication import Mark, UnderreplicationManager
from bindery_metadata.stores.store import MetadataStore

from bindery_recovery.checks import bookie_audit, full_check, placement_repair
from bindery_recovery.cluster import bookie_watch
from bindery_recovery.cluster.ledger_index import Share, share_of
from bindery_recovery.cluster.ledger_walk import LedgerWalk, Skip, each
from bindery_recovery.cluster.lost_bookies import GAP_MAX_S, Phase
from bindery_recovery.records.reasons import is_move
from bindery_recovery.records.sentences import counted, span

PACE_WINDOW_S: Final = 60.0
"""Working time in seconds over which the speed of copying is averaged."""
PACE_SPAN_MIN_S: Final = 10.0
"""Minimum time span in seconds over which a rate is computed."""
REPORT_FRESH_S: Final = 60.0
"""Maximum age in seconds of a worker's reported rate: an idle worker reports nothing."""
AGE_BUCKETS_S: Final = (60, 600, 3600, 21_600, 86_400, 604_800)
"""Age limits in seconds by which marked ledgers are counted."""
SIZES_READ_MAX: Final = 10_000
"""Maximum number of ledgers whose metadata is read because their records have no size."""
SIZES_IN_FLIGHT: Final = 64
"""Maximum number of these ledgers read at a time."""
CLOSINGS_READ_MAX: Final = 1_000
"""Maximum number of closing records that are read for their age. Further ones have higher ledger ids and are usually
younger."""
COLLECT_INTERVAL_S: Final = 5.0
"""Default minimum time in seconds between two reads."""
COLLECT_SHARE: Final = 10
"""Minimum time between two reads, as a multiple of the duration of a read."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The metadata at approximately one moment."""

    now_ms: int
    marks: Sequence[Mark] = ()
    """Marks of under-replicated ledgers."""
    moving: int = 0
    """Number of ledgers that are marked only because they can be on more racks."""
    records: Mapping[LedgerId, RecoveryRecord] = field(default_factory=dict)
    locks: Mapping[LedgerId, str] = field(default_factory=dict)
    reports: Sequence[WorkerReport] = ()
    is_enabled: bool = True
    pause: Pause | None = None
    auditor: str | None = None
    memberships: Mapping[BookieId, Membership] = field(default_factory=dict)
    lost: Mapping[str, Any] = field(default_factory=dict)
    """The cursor of `bookie_watch`."""
    draining: Mapping[str, Any] = field(default_factory=dict)
    """The cursor of `bookie_audit`."""
    ledger_check: Mapping[str, Any] = field(default_factory=dict)
    """The cursor of `full_check`."""
    placement: Mapping[str, Any] = field(default_factory=dict)
    """The cursor of `placement_repair`."""
    shares: Mapping[LedgerId, Share] = field(default_factory=dict)
    """What the bookies of the mark should store, for each closed ledger whose record has no size."""
    closings: int = 0
    """Number of ledgers with a closing record: closed, or being closed, and not yet found whole."""
    closing_notes: Sequence[ClosingRecord] = ()
    """The first CLOSINGS_READ_MAX closing records."""

    def missing(self, ledger_id: LedgerId) -> Share:
        """Return what has to be copied of a marked ledger, as far as known. The length is None if it is unknown."""
        record = self.records.get(ledger_id)
        if record is not None and record.missing_bytes is not None:
            return Share(record.missing_entries or 0, record.missing_bytes)
        entries = record.missing_entries if record is not None else None
        return self.shares.get(ledger_id) or Share(entries or 0, None)


@dataclass(frozen=True, slots=True)
class Closings:
    """Closing records that the auditor has not processed yet."""

    pending: int
    oldest_age_s: float | None
    """None: there are none."""


@dataclass(frozen=True, slots=True)
class LostBookie:
    bookie_id: str
    phase: str
    since_ms: int
    left_s: float | None
    """Remaining seconds of its delay; 0: due; None: its ledgers are marked."""


@dataclass(frozen=True, slots=True)
class DrainingBookie:
    bookie_id: str
    since_ms: int
    ledgers_left: int | None
    """None: not counted yet."""
    bytes_left: int | None
    percent: float | None
    """Completed share of what it stored when the drain started; 100 only when no ledger names it any more."""


@dataclass(frozen=True, slots=True)
class LedgerCheckProgress:
    is_running: bool
    started_ms: int | None
    ledgers: int
    """Ledgers checked so far."""
    marked: int
    last_finished_ms: int | None
    last_result: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PlacementProgress:
    """The last run in which ledgers were moved to more racks. Without racks, all numbers are 0."""

    racks: int
    """Racks with writable bookies."""
    is_running: bool
    started_ms: int | None
    finished_ms: int | None
    """End of the last run that finished; None: none has."""
    total: int
    """Ledgers to move."""
    done: int
    """Of these, ledgers that were moved."""
    waiting: int
    """Ledgers that the next run looks at: open, under-replicated, or not moved yet."""
    stuck: int
    """Ledgers on fewer racks than possible that no move helps, for example without a spare bookie."""
    moving: int
    """Ledgers that are marked for a move now."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Times in ms since 1970, sizes in bytes."""

    at_ms: int
    is_enabled: bool
    pause: Pause | None
    auditor: str | None
    marked: int
    copying: int
    """Marked ledgers that a worker has locked."""
    unrecoverable: int
    blocked: int
    bytes_left: int
    """Known bytes to copy, of all marked ledgers that are not unrecoverable."""
    entries_left: int
    """Known number of replicas to create, of the same ledgers."""
    unknown_size: int
    """Marked ledgers with an unknown amount of missing data."""
    rate_bytes_per_s: float
    eta_s: float | None
    """Estimated seconds until the end. 0: nothing is marked."""
    why_no_eta: str
    """Reason without a full stop; empty if there is an estimate."""
    oldest_mark_age_s: float | None
    age_counts: Mapping[str, int]
    """Number of marked ledgers by maximum age in seconds (AGE_BUCKETS_S, `inf`)."""
    by_state: Mapping[str, int]
    by_reason: Mapping[str, int]
    by_obstacle: Mapping[str, int]
    lost: tuple[LostBookie, ...]
    draining: tuple[DrainingBookie, ...]
    maintenance: Mapping[str, int | None]
    """End of the lease, by bookie."""
    workers: tuple[WorkerReport, ...]
    """Reports of workers with a live session."""
    ledger_check: LedgerCheckProgress
    closings: Closings
    placement: PlacementProgress

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Pace:
    """The rate at which all workers copy, averaged over the last PACE_WINDOW_S of work."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int]] = deque()
        """Samples: (time in ms, bytes copied until then)."""
        self._done: dict[str, int] = {}
        self._total = 0

    def note(self, reports: Sequence[WorkerReport], now_ms: int, *, is_working: bool = True) -> None:
        """Add the reports of the workers. `is_working`: entries can be copied. Times without work, or without a call of
        this method, do not count."""
        if not is_working or (self._samples and now_ms - self._samples[-1][0] > PACE_WINDOW_S * 1000):
            self._samples.clear()
        for report in reports:
            before = self._done.get(report.name)
            if before is not None:
                done = report.bytes_done_total
                self._total += done - before if done >= before else done  # the worker was restarted
            self._done[report.name] = report.bytes_done_total
        if is_working:
            self._samples.append((now_ms, self._total))
        while len(self._samples) > 2 and self._samples[1][0] <= now_ms - PACE_WINDOW_S * 1000:
            self._samples.popleft()

    def bytes_per_s(self) -> float | None:
        """Return the rate; None: there are not enough samples."""
        if not self._samples:
            return None
        (first_ms, first), (last_ms, last) = self._samples[0], self._samples[-1]
        seconds = (last_ms - first_ms) / 1000
        return (last - first) / seconds if seconds >= PACE_SPAN_MIN_S else None


async def collect(
    store: MetadataStore,
    layout: LedgersLayout,
    *,
    marks: UnderreplicationManager,
    records: RecoveryRecords,
    memberships: MembershipStore,
    clock_ms: Callable[[], int],
) -> Snapshot:
    """Read the state of recovery: two nodes for each marked ledger, three if its record has no size.

    Raises MetadataUnavailable.
    """
    listed = asyncio.gather(_all(marks.list()), _all(records.list()), marks.locks(), records.reports())
    switches = asyncio.gather(marks.is_enabled(), records.pause_info(), current_auditor(store, layout))
    cursors = asyncio.gather(
        records.get_cursor(bookie_watch.CURSOR),
        records.get_cursor(bookie_audit.CURSOR_DRAINING),
        records.get_cursor(full_check.CURSOR),
        records.get_cursor(placement_repair.CURSOR),
    )
    others = asyncio.gather(memberships.all(), _closings(ClosingRecords(store)))
    (found_marks, found_records, locks, reports), (is_enabled, pause, auditor), kept, rest = await asyncio.gather(
        listed, switches, cursors, others
    )
    found, (closings, closing_notes) = rest
    lost, draining, ledger_check, placement = kept
    records_by_ledger = {record.ledger_id: record for record in found_records}
    under_replicated = [
        mark for mark in found_marks if not is_move(mark.replicas, records_by_ledger.get(mark.ledger_id))
    ]
    return Snapshot(
        now_ms=clock_ms(),
        marks=under_replicated,
        moving=len(found_marks) - len(under_replicated),
        records=records_by_ledger,
        shares=await _shares(store, layout, under_replicated, records_by_ledger),
        locks=locks,
        reports=reports,
        is_enabled=is_enabled,
        pause=pause,
        auditor=auditor,
        memberships=found,
        lost=lost or {},
        draining=draining or {},
        ledger_check=ledger_check or {},
        placement=placement or {},
        closings=closings,
        closing_notes=closing_notes,
    )


async def _shares(
    store: MetadataStore, layout: LedgersLayout, marks: Sequence[Mark], records: Mapping[LedgerId, RecoveryRecord]
) -> dict[LedgerId, Share]:
    """Return the sizes of marked ledgers whose records have none, from their metadata. Open and unreadable ledgers are
    left out."""
    bookies: dict[LedgerId, Sequence[str]] = {}
    for mark in marks:
        record = records.get(mark.ledger_id)
        if record is None or record.missing_bytes is None:
            bookies[mark.ledger_id] = (record.bookies if record else ()) or mark.replicas

    async def read(ledger_id: LedgerId) -> Share:
        try:
            node = await store.get(layout.ledger(ledger_id))
        except NoSuchNode:
            return Share(0, None)  # deleted
        return share_of(ledger_metadata_codec.decode(node.data), [BookieId(name) for name in bookies[ledger_id]])

    ledger_ids = sorted(ledger_id for ledger_id, names in bookies.items() if names)[:SIZES_READ_MAX]
    async with LedgerWalk(SIZES_IN_FLIGHT, unreadable_event="").run(each(ledger_ids), read) as shares:
        return {
            ledger_id: share
            async for ledger_id, share in shares
            if not isinstance(share, Skip) and share.length is not None
        }


async def _closings(notes: ClosingRecords) -> tuple[int, Sequence[ClosingRecord]]:
    ledger_ids = await notes.ledger_ids()
    return len(ledger_ids), await notes.get_all(ledger_ids[:CLOSINGS_READ_MAX])


def summarize(snapshot: Snapshot, *, rate_bytes_per_s: float | None = None) -> Progress:
    """Summarize a snapshot. `rate_bytes_per_s`: the measured rate; None: use the rates that the workers report."""
    now_ms = snapshot.now_ms
    if rate_bytes_per_s is None:
        fresh = [report for report in snapshot.reports if now_ms - report.at_ms <= REPORT_FRESH_S * 1000]
        rate_bytes_per_s = sum(report.bytes_per_s for report in fresh)
    marked = [(mark, snapshot.records.get(mark.ledger_id)) for mark in snapshot.marks]
    states = [record.state if record else RecoveryState.WAITING for _, record in marked]
    left = [snapshot.missing(mark.ledger_id) for mark, record in marked if not _is(record, RecoveryState.UNRECOVERABLE)]
    ages_s = sorted(_age_s(mark, record, now_ms) for mark, record in marked)
    eta_s, why = _estimate(snapshot, marked, rate_bytes_per_s)
    return Progress(
        at_ms=now_ms,
        is_enabled=snapshot.is_enabled,
        pause=None if snapshot.is_enabled else snapshot.pause,
        auditor=snapshot.auditor,
        marked=len(marked),
        copying=sum(mark.ledger_id in snapshot.locks for mark in snapshot.marks),
        unrecoverable=states.count(RecoveryState.UNRECOVERABLE),
        blocked=states.count(RecoveryState.BLOCKED),
        bytes_left=sum(share.length or 0 for share in left),
        entries_left=sum(share.entries for share in left),
        unknown_size=sum(share.length is None for share in left),
        rate_bytes_per_s=rate_bytes_per_s,
        eta_s=eta_s,
        why_no_eta=why,
        oldest_mark_age_s=ages_s[-1] if ages_s else None,
        age_counts={**{str(limit): sum(age <= limit for age in ages_s) for limit in AGE_BUCKETS_S}, "inf": len(ages_s)},
        by_state=dict(Counter(str(state) for state in states)),
        by_reason=dict(Counter(str(record.reason) if record else "unknown" for _, record in marked)),
        by_obstacle=dict(
            Counter(str(record.obstacle) for _, record in marked if record and record.obstacle is not Obstacle.NONE)
        ),
        lost=tuple(_lost(snapshot)),
        draining=tuple(_draining(snapshot)),
        maintenance={
            bookie_id: membership.until_ms
            for bookie_id, membership in sorted(snapshot.memberships.items())
            if membership.effective(now_ms) is Intent.MAINTENANCE
        },
        workers=tuple(snapshot.reports),
        ledger_check=_ledger_check(snapshot.ledger_check),
        closings=Closings(snapshot.closings, _oldest_s(snapshot)),
        placement=_placement(snapshot.placement, snapshot.moving),
    )


class ProgressCollector:
    """Reads the progress at a limited frequency. Concurrent callers share one read."""

    def __init__(
        self,
        store: MetadataStore,
        layout: LedgersLayout,
        *,
        marks: UnderreplicationManager,
        records: RecoveryRecords,
        memberships: MembershipStore,
        clock_ms: Callable[[], int],
        interval_s: float = COLLECT_INTERVAL_S,
    ) -> None:
        self._store = store
        self._layout = layout
        self._marks = marks
        self._records = records
        self._memberships = memberships
        self._clock_ms = clock_ms
        self._interval_s = interval_s
        self._pace = Pace()
        self._lock = asyncio.Lock()
        self._good_until = 0.0
        self.latest: Progress | None = None
        """The last progress that was read, however old, for metrics."""

    async def get(self) -> Progress:
        """Return the progress, read again if the last read is too old. Raises MetadataUnavailable."""
        loop = asyncio.get_running_loop()
        async with self._lock:
            if self.latest is None or loop.time() >= self._good_until:
                began = loop.time()
                snapshot = await collect(
                    self._store,
                    self._layout,
                    marks=self._marks,
                    records=self._records,
                    memberships=self._memberships,
                    clock_ms=self._clock_ms,
                )
                is_working = bool(snapshot.marks and snapshot.reports) and snapshot.is_enabled
                self._pace.note(snapshot.reports, snapshot.now_ms, is_working=is_working)
                self.latest = summarize(snapshot, rate_bytes_per_s=self._pace.bytes_per_s())
                self._good_until = loop.time() + max(self._interval_s, COLLECT_SHARE * (loop.time() - began))
            return self.latest


# --- the parts of a summary -------------------------------------------------------------------------------------------


def _estimate(
    snapshot: Snapshot, marked: Sequence[tuple[Mark, RecoveryRecord | None]], rate: float
) -> tuple[float | None, str]:
    """Return the seconds that are left, or the reason why there is no estimate."""
    if not marked:
        return 0.0, ""
    if not snapshot.is_enabled:
        return None, _switched_off(snapshot.pause)
    moves = [(mark, r) for mark, r in marked if not _is(r, RecoveryState.UNRECOVERABLE, RecoveryState.BLOCKED)]
    moving = [record for _, record in moves]
    if not moving:
        return None, _stuck([record for _, record in marked if record])
    if not snapshot.reports:
        return None, "no replication worker is running: start an auditor, or bookies with autorecovery_embedded"
    retries_s = [(r.next_retry_ms - snapshot.now_ms) / 1000 for r in moving if r and r.next_retry_ms is not None]
    waiting_s = [max(0.0, retry_s) for retry_s in retries_s]
    if rate <= 0 and len(retries_s) == len(moving) and min(retries_s) > 0:
        ledgers = counted(len(moving), "ledger waits", "ledgers wait")
        return (
            None,
            f"{ledgers} for the next attempt, the first in {span(min(waiting_s))}: {_common_detail(moving)}",
        )
    if rate <= 0:
        return None, "no entries were copied recently: workers check the marked ledgers, or have just started"
    lengths = (snapshot.missing(mark.ledger_id).length for mark, _ in moves)
    sizes = [length for length in lengths if length is not None]
    if not sizes:
        return None, "how much is missing is not known yet"
    size = sum(sizes) * len(moving) / len(sizes)
    return max(size / rate, *waiting_s, 0.0), ""


def _switched_off(pause: Pause | None) -> str:
    who = ""
    if pause is not None:
        who = f" by {pause.by}" if pause.by else ""
        who += f" ({pause.reason})" if pause.reason else ""
    return f"automatic recovery is disabled{who}: run `bindery recovery resume` to enable it"


def _stuck(records: Sequence[RecoveryRecord]) -> str:
    unrecoverable = sum(record.state is RecoveryState.UNRECOVERABLE for record in records)
    if unrecoverable == len(records):
        return f"{counted(unrecoverable, 'ledger is', 'ledgers are')} unrecoverable: {_common_detail(records)}"
    blocked = [record for record in records if record.state is RecoveryState.BLOCKED]
    return f"{counted(len(blocked), 'ledger is', 'ledgers are')} blocked: {_common_detail(blocked)}"


def _common_detail(records: Sequence[RecoveryRecord | None]) -> str:
    """Return the detail of the most common obstacle."""
    obstacles = Counter(record.obstacle for record in records if record)
    if not obstacles:
        return "the reason is not recorded"
    obstacle = obstacles.most_common(1)[0][0]
    details = (record.detail or record.last_error for record in records if record and record.obstacle is obstacle)
    return next(filter(None, details), str(obstacle).replace("_", " "))


def _age_s(mark: Mark, record: RecoveryRecord | None, now_ms: int) -> float:
    """Return the seconds since the first mark. A mark that was extended has a later ctime."""
    times = [at_ms for at_ms in (mark.ctime_ms, record.first_marked_ms if record else None) if at_ms]
    return max(0.0, (now_ms - min(times)) / 1000) if times else 0.0


def _oldest_s(snapshot: Snapshot) -> float | None:
    ages_ms = [snapshot.now_ms - note.noted_at_ms for note in snapshot.closing_notes]
    return max(0, *ages_ms) / 1000 if ages_ms else None


def _is(record: RecoveryRecord | None, *states: RecoveryState) -> bool:
    return record is not None and record.state in states


def _lost(snapshot: Snapshot) -> list[LostBookie]:
    kept = snapshot.lost
    bookies = kept.get("bookies")
    found = []
    for bookie_id, fields in sorted(bookies.items() if isinstance(bookies, dict) else ()):
        try:
            phase, since_ms = Phase(fields["phase"]), int(fields["since_ms"])
            left_s: float | None = None
            if phase is Phase.FORCED:
                left_s = 0.0
            elif phase is Phase.WAITING:
                # The auditor counts the absence and saved it a few seconds ago.
                since_saved_s = (snapshot.now_ms - int(kept["saved_ms"])) / 1000 if snapshot.auditor else 0.0
                counted_s = float(fields["absent_s"]) + min(GAP_MAX_S, max(0.0, since_saved_s))
                left_s = max(0.0, float(kept["delay_s"]) - counted_s)
        except (KeyError, TypeError, ValueError):
            continue
        found.append(LostBookie(bookie_id, str(phase), since_ms, left_s))
    return found


def _draining(snapshot: Snapshot) -> list[DrainingBookie]:
    counts = snapshot.draining.get("bookies")
    counts = counts if isinstance(counts, dict) else {}
    found = []
    for bookie_id, membership in sorted(snapshot.memberships.items()):
        if membership.effective(snapshot.now_ms) is not Intent.DRAINING:
            continue
        left = counts.get(bookie_id)
        left = left if isinstance(left, dict) else {}
        ledgers_left, bytes_left = _number(left.get("ledgers_left")), _number(left.get("bytes_left"))
        percent = None
        if ledgers_left == 0:
            percent = 100.0
        elif ledgers_left is not None and bytes_left is not None:
            for total, rest in (
                (membership.drain.get("bytes_total", 0), bytes_left),
                (membership.drain.get("ledgers_total", 0), ledgers_left),
            ):
                if total > 0:
                    percent = min(99.9, max(0.0, 100.0 * (1 - rest / total)))
                    break
        found.append(DrainingBookie(bookie_id, membership.since_ms, ledgers_left, bytes_left, percent))
    return found


def _ledger_check(kept: Mapping[str, Any]) -> LedgerCheckProgress:
    is_running = full_check.is_unfinished(kept)
    result = kept.get("result")
    figures = full_check.FullCheckResult.of(result if isinstance(result, dict) else {})
    last = kept.get("last_result")
    return LedgerCheckProgress(
        is_running=is_running,
        started_ms=kept["started_ms"] if is_running else None,
        ledgers=figures.ledgers if is_running else 0,
        marked=figures.marked if is_running else 0,
        last_finished_ms=_number(kept.get("last_finished_ms")),
        last_result=last if isinstance(last, dict) else {},
    )


def _placement(kept: Mapping[str, Any], moving: int) -> PlacementProgress:
    def count(name: str) -> int:
        return _number(kept.get(name)) or 0

    return PlacementProgress(
        racks=count("racks"),
        is_running=kept.get("is_running") is True,
        started_ms=count("started_ms") or None,
        finished_ms=count("finished_ms") or None,
        total=count("total"),
        done=count("done"),
        waiting=count("waiting"),
        stuck=count("stuck"),
        moving=moving,
    )


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None


async def _all(items: AsyncIterator[T]) -> list[T]:
    return [item async for item in items]
