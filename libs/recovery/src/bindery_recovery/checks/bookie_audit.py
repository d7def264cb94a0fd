"""Mark the ledgers of bookies that are lost, removed or draining.

An audit
1. syncs with the metadata store and reads the list of bookies. It is postponed if the session is disconnected, or was
   reconnected less than `settle_s` ago.
2. reads the metadata of all ledgers. If the store fails, the audit ends: an incomplete read leads to no mark.
3. reads the list of bookies again. A bookie that has returned is no longer a target. The same is checked before each
   ledger is marked.
4. for each ledger that names a target, by its current metadata: writes a record with the reason, then the mark. A
   ledger that is already marked for the same draining bookie is left alone, because a worker may be repairing it.
5. sets a bookie to HANDLED if it was due during the whole audit.

An audit runs when a bookie is due, when an operator requests one, at the start of a term, and every
`bookie_check_interval_s`. The last three also include bookies that were handled before. Each audit also finds bookies
without a cookie that ledgers name; from then on, these count as known. While bookies are draining or removed, an audit
also runs every `drain_interval_s`, or less often if reading all metadata takes longer than a tenth of that.

Every write checks the leadership.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from bindery_core.errors import BadVersion, BinderyError, Corrupt, NoSuchLedger, TryAgain
from bindery_core.ids import BookieId, LedgerId
from bindery_kit.observability.logs import get_logger
from bindery_metadata.coordination.election import Leadership, NotLeader
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.recovery.recovery_records import HistoryEvent, Reason, RecoveryRecord, RecoveryRecords
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.store import MetadataStore

from bindery_recovery.cluster.bookie_watch import AuditorLimits, BookieWatch
from bindery_recovery.cluster.ledger_index import LedgerIndex, MetadataReader, build_index, members_of, share_of
from bindery_recovery.cluster.ledger_walk import each, in_order
from bindery_recovery.records.drain_end import drain_finished, drain_goes_on, is_drain_end_recorded
from bindery_recovery.records.reasons import CHECKED_ALL, marked_for

CURSOR_DRAINING: Final = "draining"
"""Name of the cursor that stores what draining bookies still hold."""
INDEX_SHARE: Final = 10
"""Minimum interval between audits of draining bookies, as a multiple of the time that it takes to read all metadata."""

log = get_logger(__name__)


class AuditPostponed(TryAgain):
    code = "audit_postponed"


@dataclass(slots=True)
class AuditState:
    """Results for health, metrics and the admin API. Times in ms since 1970; 0: never."""

    is_running: bool = False
    started_ms: int = 0
    finished_ms: int = 0
    """End of the last audit that completed."""
    duration_s: float = 0.0
    index_s: float = 0.0
    """Part of `duration_s` in which all metadata was read."""
    last_error: str = ""
    """Why the last audit was postponed; empty: it completed."""
    audits: int = 0
    postponed: int = 0
    ledgers: int = 0
    """Number of ledgers that the last audit read."""
    unreadable: int = 0
    """Of these, ledgers whose metadata cannot be parsed, so that their bookies are unknown."""
    marked: int = 0
    """Marks that the last audit created or extended."""
    marked_total: dict[str, int] = field(default_factory=dict)
    """Marks since the process started, by reason."""


@dataclass(frozen=True, slots=True)
class Marked:
    """A ledger that was marked."""

    ledger_id: LedgerId
    reason: Reason
    bookies: tuple[BookieId, ...]
    is_new: bool
    missing_bytes: int | None


class LedgerMarker:
    """Marks a ledger and records the reason. Used by the checks of the auditor and by Spark audits."""

    def __init__(
        self,
        marks: UnderreplicationManager,
        records: RecoveryRecords,
        *,
        leadership: Leadership | None,
        clock_ms: Callable[[], int],
    ) -> None:
        """`leadership`: checked with each write; None: the caller is not an auditor and needs no check."""
        self._marks = marks
        self._records = records
        self._leadership = leadership
        self._clock_ms = clock_ms

    async def mark(
        self,
        ledger_id: LedgerId,
        bookies: Collection[BookieId],
        reason: Reason,
        *,
        missing_entries: int | None,
        missing_bytes: int | None,
        only_new: bool = False,
    ) -> bool:
        """Mark the ledger. Return True if the mark is new or extended. With `only_new`, a mark that lists these bookies
        is left alone, unless `reason` requires a deeper check than the recorded reason: `reason` then replaces it.

        The record is written before the mark: a mark without a record is repaired too, but its reason is unknown.
        Raises NotLeader, MetadataUnavailable, MetadataOutcomeUnknown.
        """
        names = tuple(sorted(bookies))
        if only_new:
            mark = await self._marks.get(ledger_id)
            if (
                mark is not None
                and set(names) <= set(mark.replicas)
                and not await self._requires_deeper_check(ledger_id, reason)
            ):
                return False

        def change(current: RecoveryRecord | None) -> RecoveryRecord:
            return marked_for(
                current,
                ledger_id,
                names,
                reason,
                missing_entries=missing_entries,
                missing_bytes=missing_bytes,
                now_ms=self._clock_ms(),
            )

        await self._records.update(ledger_id, change, guard=self._leadership)
        return await self._marks.mark(ledger_id, names, guard=self._leadership)

    async def _requires_deeper_check(self, ledger_id: LedgerId, reason: Reason) -> bool:
        """Return True if the recorded reason requires fewer entries to be read than `reason`."""
        if reason not in CHECKED_ALL:
            return False
        record = await self._records.get(ledger_id)
        return record is None or record.reason not in CHECKED_ALL


class BookieAudit:
    """The audits of one term. `run` never returns."""

    def __init__(
        self,
        client: MetadataReader,
        store: MetadataStore,
        layout: LedgersLayout,
        records: RecoveryRecords,
        watch: BookieWatch,
        marker: LedgerMarker,
        *,
        leadership: Leadership,
        bookie_check_interval_s: float,
        drain_interval_s: float,
        limits: AuditorLimits,
        clock_ms: Callable[[], int],
        state: AuditState,
    ) -> None:
        self._client = client
        self._store = store
        self._layout = layout
        self._records = records
        self._watch = watch
        self._marker = marker
        self._leadership = leadership
        self._bookie_check_interval_s = bookie_check_interval_s
        self._drain_interval_s = drain_interval_s
        self._limits = limits
        self._clock_ms = clock_ms
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._check_at = self._loop.time()
        self._leaving_at = self._loop.time()
        self._leaving_seen: frozenset[BookieId] = frozenset()
        """Draining and removed bookies at the last audit."""
        self._not_before = self._loop.time()
        """Earliest time of the next audit after one was postponed."""

    @property
    def is_pending(self) -> bool:
        """Whether an audit is running or due. Checks of all ledgers wait for it."""
        return self._state.is_running or self._watch.audit_requested or bool(self._watch.due())

    async def run(self) -> None:
        while True:
            self._watch.changed.clear()
            now = self._loop.time()
            if self._is_wanted(now) and now >= self._not_before:
                await self._try(is_check=now >= self._check_at or self._watch.audit_requested)
                continue
            wakes = [self._check_at, self._not_before, *([self._leaving_at] if self._leaving() else [])]
            pause_s = min((at - now for at in wakes if at > now), default=self._limits.poll_interval_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(pause_s, self._limits.poll_interval_s)):
                    await self._watch.changed.wait()

    def _leaving(self) -> frozenset[BookieId]:
        return self._watch.snapshot.draining | self._watch.snapshot.gone

    def _is_wanted(self, now: float) -> bool:
        if not self._watch.is_enabled or self._watch.is_blind:
            return False
        if now >= self._check_at or self._watch.audit_requested or self._watch.due():
            return True
        leaving = self._leaving()
        return bool(leaving) and (now >= self._leaving_at or not leaving <= self._leaving_seen)

    async def _try(self, *, is_check: bool) -> None:
        state = self._state
        state.is_running = True
        state.started_ms = self._clock_ms()
        began = self._loop.time()
        was_asked = self._watch.audit_requested
        try:
            await self._audit(is_check=is_check)
        except NotLeader:
            raise
        except BinderyError as error:
            state.postponed += 1
            state.last_error = str(error)
            self._not_before = self._loop.time() + self._limits.retry_s
            log.warning("audit_postponed", error=str(error))
            return
        finally:
            state.is_running = False
        now = self._loop.time()
        state.audits += 1
        state.last_error = ""
        state.finished_ms = self._clock_ms()
        state.duration_s = now - began
        if is_check:
            self._check_at = now + self._bookie_check_interval_s
        if was_asked:
            self._watch.audit_requested = False
        self._leaving_at = now + max(self._drain_interval_s, INDEX_SHARE * state.index_s)

    async def _audit(self, *, is_check: bool) -> None:
        watch, state = self._watch, self._state
        await self._store.sync(self._layout.available)
        await watch.poll()
        if is_check:
            watch.lost.recheck()
        registered = frozenset(watch.snapshot.registered)
        writable = frozenset(b for b, is_writable in watch.snapshot.registered.items() if is_writable)
        leaving = self._leaving()
        began = self._loop.time()
        index = await build_index(
            self._client, lambda b: b not in registered or b in leaving, reads_in_flight=self._limits.reads_in_flight
        )
        state.index_s = self._loop.time() - began
        state.ledgers, state.unreadable = index.ledger_count, index.unreadable_count
        await self._store.sync(self._layout.available)
        await watch.poll()
        if watch.is_blind:
            raise AuditPostponed("the metadata store was disconnected during the audit")
        self._add_bookies_without_cookie(index)
        # bookies that the index does not include were registered when it was built; the next audit handles them
        due = frozenset(filter(index.is_wanted, watch.due()))
        targets = dict.fromkeys(due | (leaving & watch.snapshot.gone), Reason.BOOKIE_LOST)
        for bookie_id in leaving & watch.snapshot.draining:
            targets.setdefault(bookie_id, Reason.BOOKIE_DRAINING)
        marked = await self._mark(index, targets)
        watch.lost.handled(due & watch.due())
        state.marked = sum(one.is_new for one in marked)
        await self._record(index, targets, marked, due)
        await self._record_draining(index, writable)
        self._leaving_seen = leaving

    def _add_bookies_without_cookie(self, index: LedgerIndex) -> None:
        """Add bookies without a cookie that ledgers name: from now on they count as known, and absent."""
        snapshot = self._watch.snapshot
        without_cookie = index.totals.keys() - snapshot.registered.keys() - snapshot.known - snapshot.removed
        if without_cookie - self._watch.without_cookie:
            log.info("bookies_without_cookie", bookies=sorted(without_cookie))
        self._watch.without_cookie = set(without_cookie)
        self._watch.observe()
        if self._watch.audit_requested:
            self._watch.lost.force()

    async def _mark(self, index: LedgerIndex, targets: Mapping[BookieId, Reason]) -> list[Marked]:
        """Mark each ledger for the bookies that are still targets at that moment."""

        async def mark(item: tuple[LedgerId, tuple[BookieId, ...]]) -> Marked | None:
            ledger_id, bookies = item
            return await self._mark_one(ledger_id, {b: targets[b] for b in bookies})

        marked: list[Marked] = []
        ledgers = each(index.bookies_by_ledger(targets).items())
        async with contextlib.aclosing(in_order(ledgers, mark, limit=self._limits.marks_in_flight)) as results:
            async for one in results:
                if one is not None:
                    marked.append(one)
        return marked

    async def _mark_one(self, ledger_id: LedgerId, targets: Mapping[BookieId, Reason]) -> Marked | None:
        watch = self._watch
        if not watch.is_enabled:
            raise AuditPostponed("automatic recovery was disabled during the audit")
        if watch.is_blind:
            raise AuditPostponed("the metadata store was disconnected during the audit")
        try:
            metadata = await self._client.metadata(ledger_id)
        except NoSuchLedger:
            return None
        except (Corrupt, BadVersion):
            return None  # changed since the index was built; the next audit counts it
        still = self._watch.due() | self._leaving()
        named = [b for b in targets if b in still and b in members_of(metadata)]
        if not named:
            return None
        lost = any(targets[b] is Reason.BOOKIE_LOST for b in named)
        reason = Reason.BOOKIE_LOST if lost else Reason.BOOKIE_DRAINING
        share = share_of(metadata, named)
        is_new = await self._marker.mark(
            ledger_id,
            named,
            reason,
            missing_entries=share.entries,
            missing_bytes=share.length,
            only_new=not (set(named) & watch.due()),
        )
        if is_new:
            self._state.marked_total[reason] = self._state.marked_total.get(reason, 0) + 1
        return Marked(ledger_id, reason, tuple(named), is_new, share.length)

    async def _record(
        self, index: LedgerIndex, targets: Mapping[BookieId, Reason], marked: list[Marked], due: Collection[BookieId]
    ) -> None:
        """Write the history, and the state that the next leader and the progress report read."""
        for bookie_id in sorted(targets):
            mine = [one for one in marked if bookie_id in one.bookies]
            new = [one for one in mine if one.is_new]
            if not new and bookie_id not in due:
                continue
            size = sum(one.missing_bytes or 0 for one in new)
            word = "draining" if targets[bookie_id] is Reason.BOOKIE_DRAINING else "lost"
            event = HistoryEvent(
                self._clock_ms(),
                "marked" if word == "draining" else "bookie_lost",
                f"{bookie_id} is {word}: {len(new)} of the {len(mine)} ledgers that name it were marked now",
                {"bookie_id": bookie_id, "bytes": size, "ledgers": len(mine), "marked": len(new), "reason": word},
            )
            log.info("bookie_audited", **event.fields)
            self._watch.record(event)
        await self._watch.save()

    async def _record_draining(self, index: LedgerIndex, writable: Collection[BookieId]) -> None:
        """Record what draining bookies still store, and, once for each drain, that no ledger names the bookie any more.

        `writable`: bookies that were registered as writable before the index was built. They may receive new ledgers at
        any time.
        """
        # the index does not include others
        draining = frozenset(filter(index.is_wanted, self._watch.snapshot.draining))
        if not draining and not self._leaving_seen:
            return
        before = await self._records.get_cursor(CURSOR_DRAINING) or {}
        finished: dict[str, int] = {}
        """Start of each finished drain in ms since 1970, by bookie."""
        left: dict[str, Any] = {}
        for bookie_id in sorted(draining):
            totals = index.totals.get(bookie_id)
            left[bookie_id] = {
                "bytes_left": totals.length if totals else 0,
                "entries_left": totals.entries if totals else 0,
                "ledgers_left": totals.ledgers if totals else 0,
            }
            since_ms = self._watch.snapshot.draining_since_ms[bookie_id]
            if before.get("finished", {}).get(bookie_id) == since_ms:
                if totals is None:
                    finished[bookie_id] = since_ms
                else:
                    self._watch.record(drain_goes_on(bookie_id, self._clock_ms(), ledgers=totals.ledgers))
                    await self._watch.save()
            elif totals is None and index.is_complete and bookie_id not in writable:
                finished[bookie_id] = since_ms
                if not await is_drain_end_recorded(self._records, bookie_id):
                    self._watch.record(drain_finished(bookie_id, self._clock_ms()))
                    await self._watch.save()  # before it is stored as reported
        data = {
            "at_ms": self._clock_ms(),
            "bookies": left,
            "finished": finished,
            "is_complete": index.is_complete,
        }
        await self._records.put_cursor(CURSOR_DRAINING, data, guard=self._leadership)
