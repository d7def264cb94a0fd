"""BookieAudit: marks the ledgers of bookies that are lost, removed or draining.

An audit
1. sync, and look at the bookies; nothing is concluded while cut off, or just back.
2. read the metadata of all ledgers. An outage ends the audit: nothing is marked from a part.
3. look again: who came back meanwhile is no target any more. So it is before each single ledger.
4. for each ledger that names a target, by its metadata as they are now: a record that says why, and the mark. What is
   marked already for the same draining bookie is left alone: a worker may be at it.
5. a bookie that was due all the time is handled.

It runs when somebody is due, when an audit is asked for, at the start of a term and once in `bookie_check_interval_s`
(then for those handled before too, and for bookies that ledgers name and that have no cookie), and while bookies drain
or were removed every `drain_interval_s`, or less often where reading all metadata takes longer than a tenth of that.

Every write goes through the leadership.
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
from bindery_recovery.records.drain_end import drain_finished, drain_goes_on, is_drain_end_told
from bindery_recovery.records.reasons import CHECKED_ALL, marked_for

CURSOR_DRAINING: Final = "draining"
INDEX_SHARE: Final = 10
"""Draining bookies are looked at again after this many times what reading all metadata took, if that is longer."""

log = get_logger(__name__)


class AuditPostponed(TryAgain):
    code = "audit_postponed"


@dataclass(slots=True)
class AuditState:
    """For health, metrics and the admin API. Times in ms since 1970, 0: never."""

    is_running: bool = False
    started_ms: int = 0
    finished_ms: int = 0
    """The last one that went through."""
    duration_s: float = 0.0
    index_s: float = 0.0
    """Of that, reading all metadata."""
    last_error: str = ""
    """Why the last one did not go through; empty: it did."""
    audits: int = 0
    postponed: int = 0
    ledgers: int = 0
    """Read by the last one."""
    unreadable: int = 0
    """Of those, ledgers whose metadata cannot be understood: whom they name is not known."""
    marked: int = 0
    """New or widened marks of the last one."""
    marked_total: dict[str, int] = field(default_factory=dict)
    """Since the process began, by reason."""


@dataclass(frozen=True, slots=True)
class Marked:
    """One ledger that was marked."""

    ledger_id: LedgerId
    reason: Reason
    bookies: tuple[BookieId, ...]
    is_new: bool
    missing_bytes: int | None


class LedgerMarker:
    """Marks a ledger and says why: for the audit, for the full check, and for who audits from outside."""

    def __init__(
        self, marks: UnderreplicationManager, records: RecoveryRecords, *, leadership: Leadership | None,
        clock_ms: Callable[[], int],
    ) -> None:  # fmt: skip
        """`leadership`: the auditor's; None: who marks is no auditor, and so never a stale one."""
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
        """Whether something was new. `only_new`: leave a mark alone that lists these bookies already, for a reason
        that calls for as much. A reason that calls for more replaces one that calls for less.

        The record comes first: a mark without one is healed all the same, but nobody can say what for.
        Raises NotLeader, MetadataUnavailable, MetadataOutcomeUnknown.
        """
        names = tuple(sorted(bookies))
        if only_new:
            mark = await self._marks.get(ledger_id)
            if (
                mark is not None
                and set(names) <= set(mark.replicas)
                and not await self._calls_for_more(ledger_id, reason)
            ):
                return False

        def change(current: RecoveryRecord | None) -> RecoveryRecord:
            return marked_for(
                current, ledger_id, names, reason, missing_entries=missing_entries, missing_bytes=missing_bytes,
                now_ms=self._clock_ms(),
            )  # fmt: skip

        await self._records.update(ledger_id, change, guard=self._leadership)
        return await self._marks.mark(ledger_id, names, guard=self._leadership)

    async def _calls_for_more(self, ledger_id: LedgerId, reason: Reason) -> bool:
        """Whether what stands would have too little looked at."""
        if reason not in CHECKED_ALL:
            return False
        record = await self._records.get(ledger_id)
        return record is None or record.reason not in CHECKED_ALL


class BookieAudit:
    """One term's. `run` for ever."""

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
        """Draining and removed bookies of the last audit."""
        self._not_before = self._loop.time()
        """After one that was postponed."""

    @property
    def is_pending(self) -> bool:
        """An audit is running, or will as soon as it may: other walks over all ledgers wait for it."""
        return self._state.is_running or self._watch.audit_asked or bool(self._watch.due())

    async def run(self) -> None:
        while True:
            self._watch.changed.clear()
            now = self._loop.time()
            if self._is_wanted(now) and now >= self._not_before:
                await self._try(is_check=now >= self._check_at or self._watch.audit_asked)
                continue
            wakes = [self._check_at, self._not_before, *([self._leaving_at] if self._leaving() else [])]
            pause_s = min((at - now for at in wakes if at > now), default=self._limits.look_interval_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(pause_s, self._limits.look_interval_s)):
                    await self._watch.changed.wait()

    def _leaving(self) -> frozenset[BookieId]:
        return self._watch.standing.draining | self._watch.standing.gone

    def _is_wanted(self, now: float) -> bool:
        if not self._watch.is_enabled or self._watch.is_blind:
            return False
        if now >= self._check_at or self._watch.audit_asked or self._watch.due():
            return True
        leaving = self._leaving()
        return bool(leaving) and (now >= self._leaving_at or not leaving <= self._leaving_seen)

    async def _try(self, *, is_check: bool) -> None:
        state = self._state
        state.is_running = True
        state.started_ms = self._clock_ms()
        began = self._loop.time()
        was_asked = self._watch.audit_asked
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
            self._watch.audit_asked = False
        self._leaving_at = now + max(self._drain_interval_s, INDEX_SHARE * state.index_s)

    async def _audit(self, *, is_check: bool) -> None:
        watch, state = self._watch, self._state
        await self._store.sync(self._layout.available)
        await watch.look()
        if is_check:
            watch.lost.recheck()
        registered = frozenset(watch.standing.registered)
        writable = frozenset(b for b, is_writable in watch.standing.registered.items() if is_writable)
        leaving = self._leaving()
        began = self._loop.time()
        index = await build_index(
            self._client, lambda b: b not in registered or b in leaving, reads_in_flight=self._limits.reads_in_flight
        )
        state.index_s = self._loop.time() - began
        state.ledgers, state.unreadable = index.ledger_count, index.unreadable_count
        await self._store.sync(self._layout.available)
        await watch.look()
        if watch.is_blind:
            raise AuditPostponed("the metadata store was away during the audit")
        self._take_strangers(index)
        due = frozenset(filter(index.is_wanted, watch.due()))  # others were there when it began: next time
        targets = dict.fromkeys(due | (leaving & watch.standing.gone), Reason.BOOKIE_LOST)
        for bookie_id in leaving & watch.standing.draining:
            targets.setdefault(bookie_id, Reason.BOOKIE_DRAINING)
        marked = await self._mark(index, targets)
        watch.lost.handled(due & watch.due())
        state.marked = sum(one.is_new for one in marked)
        await self._tell(index, targets, marked, due)
        await self._tell_draining(index, writable)
        self._leaving_seen = leaving

    def _take_strangers(self, index: LedgerIndex) -> None:
        """Bookies without a cookie that ledgers name: from now on they are known, and absent."""
        standing = self._watch.standing
        strangers = index.totals.keys() - standing.registered.keys() - standing.known - standing.removed
        if strangers - self._watch.strangers:
            log.info("bookies_without_cookie", bookies=sorted(strangers))
        self._watch.strangers = set(strangers)
        self._watch.observe()
        if self._watch.audit_asked:
            self._watch.lost.force()

    async def _mark(self, index: LedgerIndex, targets: Mapping[BookieId, Reason]) -> list[Marked]:
        """Mark each ledger for those that are still targets when it is its turn."""

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
            raise AuditPostponed("the metadata store was away during the audit")
        try:
            metadata = await self._client.metadata(ledger_id)
        except NoSuchLedger:
            return None
        except (Corrupt, BadVersion):
            return None  # since the index was read; the next audit counts it
        still = self._watch.due() | self._leaving()
        named = [b for b in targets if b in still and b in members_of(metadata)]
        if not named:
            return None
        lost = any(targets[b] is Reason.BOOKIE_LOST for b in named)
        reason = Reason.BOOKIE_LOST if lost else Reason.BOOKIE_DRAINING
        share = share_of(metadata, named)
        is_new = await self._marker.mark(
            ledger_id, named, reason, missing_entries=share.entries, missing_bytes=share.length,
            only_new=not (set(named) & watch.due()),
        )  # fmt: skip
        if is_new:
            self._state.marked_total[reason] = self._state.marked_total.get(reason, 0) + 1
        return Marked(ledger_id, reason, tuple(named), is_new, share.length)

    async def _tell(
        self, index: LedgerIndex, targets: Mapping[BookieId, Reason], marked: list[Marked], due: Collection[BookieId]
    ) -> None:
        """History, and what the next leader and progress read."""
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
            self._watch.tell(event)
        await self._watch.save()

    async def _tell_draining(self, index: LedgerIndex, writable: Collection[BookieId]) -> None:
        """What draining bookies still hold, for progress; and, once for each drain, that it is nothing any more.

        `writable`: who was registered so before the index was begun. These may get new ledgers at any time.
        """
        draining = frozenset(filter(index.is_wanted, self._watch.standing.draining))  # others were not looked for
        if not draining and not self._leaving_seen:
            return
        before = await self._records.get_cursor(CURSOR_DRAINING) or {}
        finished: dict[str, int] = {}
        """By bookie, when the drain was begun that is finished."""
        left: dict[str, Any] = {}
        for bookie_id in sorted(draining):
            totals = index.totals.get(bookie_id)
            left[bookie_id] = {
                "bytes_left": totals.length if totals else 0,
                "entries_left": totals.entries if totals else 0,
                "ledgers_left": totals.ledgers if totals else 0,
            }
            since_ms = self._watch.standing.draining_since_ms[bookie_id]
            if before.get("finished", {}).get(bookie_id) == since_ms:
                if totals is None:
                    finished[bookie_id] = since_ms
                else:
                    self._watch.tell(drain_goes_on(bookie_id, self._clock_ms(), ledgers=totals.ledgers))
                    await self._watch.save()
            elif totals is None and index.is_complete and bookie_id not in writable:
                finished[bookie_id] = since_ms
                if not await is_drain_end_told(self._records, bookie_id):
                    self._watch.tell(drain_finished(bookie_id, self._clock_ms()))
                    await self._watch.save()  # before it is noted as told
        data = {
            "at_ms": self._clock_ms(), "bookies": left, "finished": finished, "is_complete": index.is_complete,
        }  # fmt: skip
        await self._records.put_cursor(CURSOR_DRAINING, data, guard=self._leadership)
