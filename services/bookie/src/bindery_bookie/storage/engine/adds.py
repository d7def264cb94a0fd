"""Put added entries into the journal and the write cache, or answer with the reason for the refusal.

While both write caches are full, adds wait in order, for a bounded time and in bounded memory; then they are refused.

Adds and fences of a ledger are ordered by the journal. A fence sets `is_fenced` before its record is appended, so no
later add is accepted. Adds that were accepted before the fence are answered before it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import structlog
from bindery_core.errors import DamagedStorage
from bindery_core.wire.messages import AddRequest, Status, WriteFlag

from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.entry_log.entry_log_format import BODY_SIZE_MAX
from bindery_bookie.storage.flushing.flush_loop import FlushLoop
from bindery_bookie.storage.journal.journal import Journal
from bindery_bookie.storage.journal.journal_format import RECORD_OVERHEAD, pack_record_size, record_parts
from bindery_bookie.storage.memory.copies_seen import CopiesSeen
from bindery_bookie.storage.memory.ledgers import LedgerState, LedgerTable
from bindery_bookie.storage.memory.write_cache import ENTRY_OVERHEAD, WriteCaches
from bindery_bookie.storage.settings import StorageSettings
from bindery_bookie.storage.stats import StorageStats
from bindery_bookie.storage.store import AddDone

log = structlog.get_logger(__name__)

_DEFERRED: Final = int(WriteFlag.DEFERRED_SYNC)

_Waiting = tuple[Sequence[AddRequest], AddDone, int, float]
"""Adds, their callback, their bytes, the loop's time at which they are refused if still waiting."""


class Adds:
    """The add path of one shard. Event loop only."""

    def __init__(
        self,
        *,
        ledgers: LedgerTable,
        caches: WriteCaches,
        journal: Journal,
        flush_loop: FlushLoop,
        wall_clock_ms: Callable[[], int],
        settings: StorageSettings,
        stats: StorageStats,
    ) -> None:
        self._ledgers = ledgers
        self._caches = caches
        self._journal = journal
        self._flush_loop = flush_loop
        self._wall_clock_ms = wall_clock_ms
        self._settings = settings
        self._stats = stats
        self._loop = asyncio.get_running_loop()
        self.copies_seen = CopiesSeen(self._loop.time())
        """Ledgers that recently received copies. Times are seconds of the loop's clock."""
        self._waiting: deque[_Waiting] = deque()
        self._waiting_timer: asyncio.TimerHandle | None = None

    def add_many(self, adds: Sequence[AddRequest], done: AddDone) -> None:
        """See EntryStore. Answers in the order of the calls, except for adds that are refused at once."""
        if self._journal.failed:
            done([Status.IO_ERROR] * len(adds))
        elif self._journal.is_full:
            done([Status.READ_ONLY] * len(adds))  # the client replaces this bookie
        elif self._waiting or (self._caches.active.is_full and not self._flush_loop.make_room()):
            self._wait(adds, done)
        else:
            self._accept(adds, done)

    def resume(self) -> None:
        """Accept waiting adds, in order, while the write cache has room."""
        while self._waiting and self._flush_loop.make_room():
            adds, done, size, _ = self._waiting.popleft()
            self._stats.waiting_size -= size
            self._stats.waiting_adds -= len(adds)
            if self._journal.failed:
                done([Status.IO_ERROR] * len(adds))
            elif self._journal.is_full:
                done([Status.READ_ONLY] * len(adds))
            else:
                self._accept(adds, done)
        if not self._waiting:
            self._stop_timer()

    def close(self) -> None:
        """Refuse all waiting adds."""
        self._stop_timer()
        while self._waiting:
            self._refuse_first()

    def _accept(self, adds: Sequence[AddRequest], done: AddDone) -> None:
        """Put adds into cache and journal. This is the hot loop: calls are made per batch where possible."""
        statuses = [int(Status.OK)] * len(adds)
        parts: list[bytes] = []
        append = parts.append
        cache = self._caches.active
        cached = cache.ledgers
        states = self._ledgers.states
        unpack, pack_size = control.unpack_ids_and_lac, pack_record_size
        entry_size_min, entry_size_max = control.ENTRY_SIZE_MIN, BODY_SIZE_MAX
        size = 0
        flags_all = _DEFERRED
        advanced: dict[int, LedgerState] = {}
        copied: set[int] = set()
        ledger_id_before = -1
        state: LedgerState | None = None
        entries: dict[int, bytes] = {}
        for at, add in enumerate(adds):
            body = add.body
            body_size = len(body)
            if not entry_size_min <= body_size <= entry_size_max:
                statuses[at] = Status.BAD_REQUEST
                continue
            ledger_id, entry_id, lac = unpack(body)
            if entry_id < 0 or ledger_id < 0:  # negative entry ids are control records, which clients may not write
                statuses[at] = Status.BAD_REQUEST
                continue
            if ledger_id != ledger_id_before or state is None:
                state = states.get(ledger_id)
                if state is None:
                    state = self._find_for_add(add, ledger_id, parts, statuses, at)
                    if state is None:
                        continue
                ledger_id_before = ledger_id
                entries = cached.get(ledger_id) or cached.setdefault(ledger_id, {})
            if state.master_key != add.master_key and not self._ledgers.learn_key(state, add.master_key, parts):
                statuses[at] = Status.UNAUTHORIZED
                continue
            if add.recovery:
                copied.add(ledger_id)
            elif state.is_fenced:
                statuses[at] = Status.FENCED
                continue
            entries[entry_id] = body
            append(pack_size(body_size))
            append(body)
            size += body_size
            flags_all &= add.write_flags
            if entry_id > state.last_entry_id:
                state.last_entry_id = entry_id
            if lac > state.lac:
                state.lac = lac
                advanced[ledger_id] = state
        self._added(adds, done, statuses, parts, size, is_deferred=bool(flags_all))
        if copied:
            self.copies_seen.record(copied, self._loop.time())
        if advanced:
            now_ms = self._wall_clock_ms()
            for state in advanced.values():
                state.lac_updated_ms = now_ms
                if state.watchers:
                    state.wake()

    def _find_for_add(
        self, add: AddRequest, ledger_id: int, parts: list[bytes], statuses: list[int], at: int
    ) -> LedgerState | None:
        """Return a ledger that is not in memory, read from the index or created with its key added to `parts`.

        None: the add is refused, and its status is set.
        """
        was_deleted = self._ledgers.is_tombstone(ledger_id)
        if was_deleted and not add.recovery:
            statuses[at] = Status.FENCED
            return None
        try:
            state = self._ledgers.find(ledger_id)
        except (DamagedStorage, OSError) as error:
            log.error("ledger_lookup_failed", ledger_id=ledger_id, error=str(error))
            statuses[at] = Status.IO_ERROR
            return None
        if state is None:
            state = self._ledgers.create(ledger_id, add.master_key)
            parts += record_parts(control.pack_master_key(ledger_id, add.master_key))
            if was_deleted:  # recovery adds store copies again; the former writer stays fenced
                self._ledgers.fence(state)
                parts += record_parts(control.pack_fence(ledger_id))
        return state

    def _added(
        self,
        adds: Sequence[AddRequest],
        done: AddDone,
        statuses: list[int],
        parts: list[bytes],
        size: int,
        *,
        is_deferred: bool,
    ) -> None:
        """Update the counters for a batch and append it to the journal."""
        stats = self._stats
        if not parts:
            self._count_refused(statuses)
            done(statuses)
            return
        records = len(parts) // 2
        accepted = statuses.count(Status.OK)
        cache = self._caches.active
        if not cache.entries:
            self._flush_loop.start_age_timer()
        cache.size += size + ENTRY_OVERHEAD * accepted
        cache.entries += accepted
        stats.adds_ok += accepted
        stats.add_bytes += size
        stats.active_cache_size = cache.size
        if accepted != len(statuses):
            self._count_refused(statuses)
        journaled = sum(map(len, parts)) if records != accepted else size + RECORD_OVERHEAD * records
        self._journal.append(parts, journaled, partial(self._answer, done, statuses), when_written=is_deferred)
        if cache.is_full:
            self._flush_loop.make_room()

    def _count_refused(self, statuses: Sequence[int]) -> None:
        self._stats.adds_fenced += statuses.count(Status.FENCED)
        self._stats.adds_unauthorized += statuses.count(Status.UNAUTHORIZED)
        self._stats.adds_bad += statuses.count(Status.BAD_REQUEST)

    def _answer(self, done: AddDone, statuses: list[int], is_durable: bool) -> None:
        if not is_durable:
            failed = Status.READ_ONLY if self._journal.is_full else Status.IO_ERROR
            statuses = [failed if status == Status.OK else status for status in statuses]
        done(statuses)

    def _wait(self, adds: Sequence[AddRequest], done: AddDone) -> None:
        size = sum(len(add.body) + ENTRY_OVERHEAD for add in adds)
        if self._stats.waiting_size + size > self._settings.waiting_size_max:
            self._stats.adds_rejected += len(adds)
            done([Status.TOO_MANY_REQUESTS] * len(adds))
            return
        self._stats.waiting_size += size
        self._stats.waiting_adds += len(adds)
        self._stats.adds_waited += len(adds)
        self._waiting.append((adds, done, size, self._loop.time() + self._settings.waiting_time_max_s))
        if self._waiting_timer is None:
            self._waiting_timer = self._loop.call_at(self._waiting[0][3], self._refuse_expired)

    def _refuse_expired(self) -> None:
        """Refuse adds that waited longer than `waiting_time_max_s`."""
        self._waiting_timer = None
        now = self._loop.time()
        while self._waiting and self._waiting[0][3] <= now:
            self._refuse_first()
        if self._waiting:
            self._waiting_timer = self._loop.call_at(self._waiting[0][3], self._refuse_expired)

    def _refuse_first(self) -> None:
        adds, done, size, _ = self._waiting.popleft()
        self._stats.waiting_size -= size
        self._stats.waiting_adds -= len(adds)
        self._stats.adds_rejected += len(adds)
        done([Status.TOO_MANY_REQUESTS] * len(adds))

    def _stop_timer(self) -> None:
        if self._waiting_timer is not None:
            self._waiting_timer.cancel()
            self._waiting_timer = None
