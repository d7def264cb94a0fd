"""StorageEngine: journal, write caches, entry logs and index joined into an EntryStore.

An add goes to the journal and to the active write cache at once, and is answered when its journal group was synced.
When the active cache is full or old, it becomes the flushing one and a fresh one takes its place (`flush`). While both
are full, adds wait in order, bounded in bytes and time. A read looks into active cache, flushing cache, read cache, and
then goes to the reader's worker (`cold_reads`). `opening` says what a start accepts.

Invariants: what was answered OK is in the journal behind LastLogMark, or in entry log and index; the journal's order
decides between an add and a fence: `is_fenced` is set before the fence's record is appended, so no later add passes,
and the adds before it are answered before the fence is. Everything here runs in the event loop; workers own what they
write.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

import structlog
from bindery_core.errors import BadRequest, BinderyError, DamagedStorage, NoSuchLedger, Unauthorized
from bindery_core.wire.messages import AddRequest, Status, WriteFlag

from bindery_bookie.storage import control_records as control
from bindery_bookie.storage import journal_format, opening
from bindery_bookie.storage.cold_reads import ColdRead, ColdReader
from bindery_bookie.storage.disk import Disk, RealDisk
from bindery_bookie.storage.entry_log import EntryLogReader, EntryLogWriter, cut_logs
from bindery_bookie.storage.errors import JournalFailed
from bindery_bookie.storage.flush import Flush, Flusher
from bindery_bookie.storage.index import Index
from bindery_bookie.storage.journal import Journal, JournalWriter
from bindery_bookie.storage.journal_format import Group, JournalPosition, pack_record_size
from bindery_bookie.storage.kv import LevelDbKV, OpenKV
from bindery_bookie.storage.ledgers import LedgerState, LedgerTable
from bindery_bookie.storage.mark import LastLogMark, read_mark, write_mark
from bindery_bookie.storage.read_cache import ReadCache
from bindery_bookie.storage.settings import StorageSettings
from bindery_bookie.storage.stats import StorageStats
from bindery_bookie.storage.worker import ThreadWorker, Worker, run_in
from bindery_bookie.storage.write_cache import ENTRY_OVERHEAD, WriteCache
from bindery_bookie.store import AddDone, LacState, ReadDone, ReplayProgress

log = structlog.get_logger(__name__)

_RELEASE_ENTRIES = 4096
"""Entries of a flushed cache freed in one turn of the loop: about 0.3 ms."""

_DEFERRED = int(WriteFlag.DEFERRED_SYNC)

StartWorker = Callable[[str], Worker]
"""Starts a worker of that name; called in the event loop."""

_Waiting = tuple[Sequence[AddRequest], AddDone, int, float]
"""Adds, who waits, their bytes, the loop's time at which they are given up."""

_ColdWanted = tuple[Sequence[tuple[int, int]], Callable[[Sequence[bytes | int]], None]]
"""Keys that no cache holds, and who gets the answers."""


def _thread_worker(name: str) -> Worker:
    return ThreadWorker(f"bookie-{name}", asyncio.get_running_loop())


class StorageEngine:
    """An EntryStore on disk."""

    def __init__(
        self,
        settings: StorageSettings,
        *,
        disk: Disk,
        open_kv: OpenKV,
        destroy_kv: Callable[[str], None],
        start_worker: StartWorker,
        wall_clock_ms: Callable[[], int],
        clock: Callable[[], float] | None = None,
        stats: StorageStats | None = None,
    ) -> None:
        """`destroy_kv` removes a store that `open_kv` finds damaged, before it is rebuilt.

        `clock`: monotonic seconds for measuring work; the loop's own if None. uvloop's stands still within a turn.
        """
        self.settings = settings
        self.stats = stats or StorageStats()
        self._disk = disk
        self._open_kv = open_kv
        self._destroy_kv = destroy_kv
        self._start_worker = start_worker
        self._wall_clock_ms = wall_clock_ms
        self._given_clock = clock
        self._journal_directory = f"{settings.journal_directory}/current"
        self._directory = f"{settings.ledger_directory}/current"
        self._index_path = f"{self._directory}/index"
        self._active = WriteCache(settings.write_cache_size_max)
        self._flushing: WriteCache | None = None
        self._read_cache = ReadCache(settings.read_cache_size_max)
        self._waiting: deque[_Waiting] = deque()
        self._waiting_timer: asyncio.TimerHandle | None = None
        self._age_timer: asyncio.TimerHandle | None = None
        self._flush_wanted = asyncio.Event()
        self._flush_task: asyncio.Task[None] | None = None
        self._next_flush: Flush | None = None
        self._flushes_done = 0
        self._flush_waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._cold_wanted: list[_ColdWanted] = []
        self._deleted_meanwhile: set[int] = set()
        self._cold_running = False
        self._watch_ids = count()
        self._workers: list[Worker] = []
        self._is_open = False

    @classmethod
    def on_real_disk(
        cls, settings: StorageSettings, *, wall_clock_ms: Callable[[], int], stats: StorageStats | None = None
    ) -> "StorageEngine":
        """The engine as a bookie runs it: real files, LevelDB, its own threads. Call `open` in the event loop."""
        return cls(
            settings,
            disk=RealDisk(),
            open_kv=LevelDbKV,
            destroy_kv=LevelDbKV.destroy,
            start_worker=_thread_worker,
            wall_clock_ms=wall_clock_ms,
            clock=time.monotonic,
            stats=stats,
        )

    # --- open and close

    async def open(self, *, on_progress: Callable[[ReplayProgress], None] | None = None) -> None:
        """See EntryStore. Raises DamagedStorage with the file and offset."""
        assert not self._is_open
        self._loop = asyncio.get_running_loop()
        self._clock = self._given_clock or self._loop.time
        self._journal_worker = self._worker("journal")
        self._flush_worker = self._worker("flush")
        self._read_worker = self._worker("read")
        try:
            await self._open(on_progress)
        except BaseException:
            self._stop_workers()
            raise
        self._is_open = True
        self._flush_task = self._loop.create_task(self._flush_forever(), name="bookie-flush")

    async def close(self) -> None:
        """Flush, advance LastLogMark, close. After it, a start replays nothing.

        What cannot be flushed stays in the journal for the next start. Adds still waiting get TOO_MANY_REQUESTS.
        """
        if not self._is_open:
            return
        self._is_open = False
        if self._flush_task is not None:
            self._flush_wanted.set()
            await self._flush_task
        for timer in (self._waiting_timer, self._age_timer):
            if timer is not None:
                timer.cancel()
        try:
            if not self._journal.failed and not self.stats.flush_failed:
                await self._flusher.close()
        except (OSError, BinderyError) as error:
            log.error("close_failed", error=str(error))
        finally:
            for adds, done, _, _ in self._waiting:
                done([Status.TOO_MANY_REQUESTS] * len(adds))
            self._waiting.clear()
            await run_in(self._journal_worker, self._journal_writer.close)
            await run_in(self._read_worker, self._reader.close)
            await run_in(self._flush_worker, self._index.close)
            self._stop_workers()

    def _worker(self, name: str) -> Worker:
        worker = self._start_worker(name)
        self._workers.append(worker)
        return worker

    def _stop_workers(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers.clear()

    async def _open(self, on_progress: Callable[[ReplayProgress], None] | None) -> None:
        started = self._clock()
        self._index, mark = await run_in(self._flush_worker, self._open_storage)
        settings = self.settings
        self._ledgers = LedgerTable(
            self._index, ledgers_max=settings.ledgers_max, tombstones_max=settings.tombstones_max
        )
        logs = EntryLogReader(self._disk, self._directory, open_logs_max=settings.open_logs_max)
        self._reader = ColdReader(self._index, logs, settings)
        self._journal_writer = JournalWriter(
            self._disk, self._journal_directory, file_size=settings.journal_file_size_max, clock=self._clock
        )
        self._flusher = Flusher(
            disk=self._disk,
            directory=self._directory,
            journal_directory=self._journal_directory,
            index=self._index,
            logs=EntryLogWriter(self._disk, self._directory, log_id=mark.log_id, offset=mark.log_offset),
            mark=mark,
            worker=self._flush_worker,
            clock=self._clock,
            settings=settings,
            stats=self.stats,
        )
        end = await self._replay(mark, on_progress)
        start = await run_in(self._journal_worker, lambda: self._start_journal(end))
        is_stored = await self._store_all(start)
        await self._flusher.advance_mark(start, is_stored=is_stored)
        self._journal = Journal(
            writer=self._journal_writer,
            worker=self._journal_worker,
            loop=self._loop,
            settings=settings,
            stats=self.stats,
            start=start,
        )
        self.stats.replay_s = self._clock() - started

    def _open_storage(self) -> tuple[Index, LastLogMark]:
        """Check what is there, make what is not; the index agrees with the mark on return."""
        disk = self._disk
        disk.make_directories(self._journal_directory)
        disk.make_directories(self._directory)
        mark = read_mark(disk, self._directory)
        try:
            index: Index | None = Index(self._open_kv(self._index_path))
            generation = index.generation() if index is not None else 0
        except DamagedStorage as error:
            if mark is None:
                raise
            log.error("index_damaged", error=str(error))
            index, generation = None, -1
        if mark is None:
            opening.check_new(disk, self._journal_directory, self._directory, index)
            mark = self._make_new()
        cut_logs(disk, self._directory, log_id=mark.log_id, offset=mark.log_offset)
        if index is not None and generation > mark.generation + 1:
            raise DamagedStorage(
                "LastLogMark is older than the index",
                path=self._directory,
                offset=0,
                mark=mark.generation,
                index=generation,
            )
        if index is None or generation < mark.generation:
            log.warning("index_rebuild", index_generation=generation, mark_generation=mark.generation)
            if index is not None:
                index.close()
            self._destroy_kv(self._index_path)
            index = Index(self._open_kv(self._index_path))
            opening.IndexRebuild(disk, self._directory, index, mark).run()
        if index.generation() != mark.generation:
            # The crash came between index and mark. Say so in the mark before another flush counts on.
            mark = replace(mark, generation=index.generation())
            write_mark(disk, self._directory, mark)
        return index, mark

    def _make_new(self) -> LastLogMark:
        for journal_id in opening.list_journals(
            self._disk, self._journal_directory
        ):  # empty: a first start that crashed
            self._disk.remove(f"{self._journal_directory}/{journal_format.file_name(journal_id)}")
        writer = JournalWriter(
            self._disk, self._journal_directory, file_size=journal_format.HEADER_SIZE, clock=lambda: 0.0
        )
        writer.create(1)
        writer.close()
        mark = LastLogMark(0, JournalPosition(1, journal_format.HEADER_SIZE, 1), log_id=0, log_offset=0)
        write_mark(self._disk, self._directory, mark)
        return mark

    def _start_journal(self, end: JournalPosition) -> JournalPosition:
        """Create the file that this run writes to. Files are never continued: a tear stays where it was."""
        existing = opening.list_journals(self._disk, self._journal_directory)
        journal_id = max([end.journal_id, *existing]) + 1
        self._journal_writer.create(journal_id)
        self.stats.journal_files_created += 1
        return JournalPosition(journal_id, journal_format.HEADER_SIZE, end.sequence)

    # --- replay

    async def _replay(self, mark: LastLogMark, on_progress: Callable[[ReplayProgress], None] | None) -> JournalPosition:
        """Put the journal behind `mark` into the write cache, flushing when it is full. Where the journal ends."""
        total = await run_in(
            self._flush_worker, lambda: opening.journals_size(self._disk, self._journal_directory, mark)
        )
        groups = opening.replay_groups(self._disk, self._journal_directory, mark.journal)
        end = mark.journal
        done = 0
        while (found := await run_in(self._flush_worker, lambda: next(groups, None))) is not None:
            journal_id, group = found
            self._replay_group(group)
            end = JournalPosition(journal_id, group.offset + group.size, group.sequence + 1)
            done += group.size
            if self._active.is_full:
                await self._store_all(end)
                await self._flusher.advance_mark(end)
            if on_progress is not None:
                on_progress(ReplayProgress(done, total, self.stats.replay_entries))
        if done:
            log.info("journal_replayed", bytes=done, entries=self.stats.replay_entries)
        return end

    def _replay_group(self, group: Group) -> None:
        for record in group.records:
            if len(record) < control.CONTROL_SIZE_MIN:
                raise DamagedStorage("journal record is short", offset=group.offset, size=len(record))
            ledger_id, entry_id = control.unpack_ids(record)
            state = self._ledgers.find(ledger_id)
            if entry_id == control.MASTER_KEY:
                if state is None:
                    state = self._ledgers.create(ledger_id, control.unpack_sized(record))
                # Its copy in the entry log may have been cut off with a flush that did not finish.
                state.has_new_key = True
                self._ledgers.changed[ledger_id] = state
            elif state is None or (entry_id not in (control.FENCE, control.EXPLICIT_LAC) and entry_id < 0):
                log.warning("journal_record_skipped", ledger_id=ledger_id, entry_id=entry_id)
            elif entry_id == control.FENCE:
                state.is_fenced = state.has_new_fence = True
                self._ledgers.changed[ledger_id] = state
            elif entry_id == control.EXPLICIT_LAC:
                self._set_explicit_lac(state, control.unpack_sized(record))
            else:
                lac = control.unpack_ids_and_lac(record)[2]
                state.lac = max(state.lac, lac)
                state.last_entry_id = max(state.last_entry_id, entry_id)
                self._active.put(ledger_id, entry_id, record)
                self.stats.replay_entries += 1

    async def _store_all(self, position: JournalPosition) -> bool:
        """While opening: flush everything; whether there was anything. The caller advances the mark."""
        flush = self._take_flush(position)
        if flush is None:
            return False
        await self._flusher.store(flush)
        self._flushing = None
        self._ledgers.forgotten()
        self._ledgers.evict(self._active.ledgers, ())
        return True

    # --- adds

    def add_many(self, adds: Sequence[AddRequest], done: AddDone) -> None:
        """See EntryStore. Answers in the order of the calls, unless an add was refused at once."""
        if not self._is_open or self._journal.failed:
            done([Status.IO_ERROR] * len(adds))
            return
        if self._waiting or (self._active.is_full and not self._swap()):
            self._wait(adds, done)
            return
        self._accept(adds, done)

    def _accept(self, adds: Sequence[AddRequest], done: AddDone) -> None:
        """Put adds into cache and journal. The hot loop: no call per entry that could be one per batch."""
        statuses = [int(Status.OK)] * len(adds)
        parts: list[bytes] = []
        append = parts.append
        cache = self._active
        cached = cache.ledgers
        states = self._ledgers.states
        unpack, pack_size = control.unpack_ids_and_lac, pack_record_size
        entry_size_min = control.ENTRY_SIZE_MIN
        size = 0
        flags_all = _DEFERRED
        advanced: dict[int, LedgerState] = {}
        ledger_id_before = -1
        state: LedgerState | None = None
        entries: dict[int, bytes] = {}
        for at, add in enumerate(adds):
            body = add.body
            body_size = len(body)
            if body_size < entry_size_min:
                statuses[at] = Status.BAD_REQUEST
                continue
            ledger_id, entry_id, lac = unpack(body)
            if entry_id < 0 or ledger_id < 0:  # negative entry ids are control records: nobody may forge one
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
            if state.master_key != add.master_key:
                statuses[at] = Status.UNAUTHORIZED
                continue
            if state.is_fenced and not add.recovery:
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
        if advanced:
            now_ms = self._wall_clock_ms()
            for state in advanced.values():
                state.lac_updated_ms = now_ms
                if state.watchers:
                    state.wake()

    def _find_for_add(
        self, add: AddRequest, ledger_id: int, parts: list[bytes], statuses: list[int], at: int
    ) -> LedgerState | None:
        """A ledger that is not in memory: from the index, or new, its key journaled. None: `statuses` says why."""
        if self._ledgers.is_tombstone(ledger_id):
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
            parts += _record(control.pack_master_key(ledger_id, add.master_key))
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
        """Count a batch and hand it to the journal."""
        stats = self.stats
        if not parts:
            self._count_refused(statuses)
            done(statuses)
            return
        records = len(parts) // 2
        accepted = statuses.count(Status.OK)
        if not self._active.entries:
            self._start_age_timer()
        self._active.size += size + ENTRY_OVERHEAD * accepted
        self._active.entries += accepted
        stats.adds_ok += accepted
        stats.add_bytes += size
        stats.active_cache_size = self._active.size
        if accepted != len(statuses):
            self._count_refused(statuses)
        journaled = sum(map(len, parts)) if records != accepted else size + journal_format.RECORD_OVERHEAD * records
        self._journal.append(parts, journaled, partial(self._answer, done, statuses), when_written=is_deferred)
        if self._active.is_full:
            self._swap()

    def _count_refused(self, statuses: Sequence[int]) -> None:
        self.stats.adds_fenced += statuses.count(Status.FENCED)
        self.stats.adds_unauthorized += statuses.count(Status.UNAUTHORIZED)
        self.stats.adds_bad += statuses.count(Status.BAD_REQUEST)

    @staticmethod
    def _answer(done: AddDone, statuses: list[int], is_durable: bool) -> None:
        if not is_durable:
            statuses = [Status.IO_ERROR if status == Status.OK else status for status in statuses]
        done(statuses)

    # --- waiting while both caches are full

    def _wait(self, adds: Sequence[AddRequest], done: AddDone) -> None:
        size = sum(len(add.body) + ENTRY_OVERHEAD for add in adds)
        if self.stats.waiting_size + size > self.settings.waiting_size_max:
            self.stats.adds_rejected += len(adds)
            done([Status.TOO_MANY_REQUESTS] * len(adds))
            return
        self.stats.waiting_size += size
        self.stats.adds_waited += len(adds)
        self._waiting.append((adds, done, size, self._loop.time() + self.settings.waiting_time_max_s))
        if self._waiting_timer is None:
            self._waiting_timer = self._loop.call_at(self._waiting[0][3], self._give_up_waiting)

    def _give_up_waiting(self) -> None:
        """Refuse what has waited too long."""
        self._waiting_timer = None
        now = self._loop.time()
        while self._waiting and self._waiting[0][3] <= now:
            adds, done, size, _ = self._waiting.popleft()
            self.stats.waiting_size -= size
            self.stats.adds_rejected += len(adds)
            done([Status.TOO_MANY_REQUESTS] * len(adds))
        if self._waiting:
            self._waiting_timer = self._loop.call_at(self._waiting[0][3], self._give_up_waiting)

    def _resume_waiting(self) -> None:
        """Take what waited, in order, as far as there is room."""
        while self._waiting and not (self._active.is_full and not self._swap()):
            adds, done, size, _ = self._waiting.popleft()
            self.stats.waiting_size -= size
            if self._journal.failed:
                done([Status.IO_ERROR] * len(adds))
            else:
                self._accept(adds, done)
        if not self._waiting and self._waiting_timer is not None:
            self._waiting_timer.cancel()
            self._waiting_timer = None

    # --- flush

    def _start_age_timer(self) -> None:
        if self._age_timer is None:
            self._age_timer = self._loop.call_later(self.settings.flush_interval_s, self._aged)

    def _aged(self) -> None:
        self._age_timer = None
        self._flush_wanted.set()

    def _swap(self) -> bool:
        """Ask for a flush. Whether the active cache has room now."""
        if self._flushing is None and self._next_flush is None:
            self._next_flush = self._take_flush(self._journal.position)
            self._flush_wanted.set()
        return not self._active.is_full

    def _take_flush(self, position: JournalPosition) -> Flush | None:
        """Swap the caches. None when there is nothing to flush. `position`: the end of what was journaled so far."""
        assert self._flushing is None
        if not (self._active.ledgers or self._ledgers.changed or self._ledgers.deleted):
            return None
        cache, self._active = self._active, WriteCache(self.settings.write_cache_size_max)
        self._flushing = cache
        states, deleted = self._ledgers.take_changes()
        for ledger_id in cache.ledgers:
            states[ledger_id] = self._ledgers.states[ledger_id]
        self.stats.active_cache_size, self.stats.flushing_cache_size = 0, cache.size
        return Flush(cache=cache, position=position, states=states, deleted=deleted)

    async def _flush_forever(self) -> None:
        """Owns flushing from open to close."""
        while self._is_open or self._next_flush is not None or self._has_unflushed():
            if self._is_open and (self._next_flush is None or self._journal.failed):
                await self._flush_wanted.wait()
            self._flush_wanted.clear()
            if self._journal.failed:  # nothing more is accepted; what is in memory is in the journal or was refused
                self._fail_flush_waiters()
                if not self._is_open:
                    return
                continue
            if self._next_flush is None:
                self._next_flush = self._take_flush(self._journal.position)
            if self._next_flush is not None and not await self._try_flush(self._next_flush):
                if not self._is_open:
                    return
                await self._pause(self.settings.flush_retry_s)

    async def _try_flush(self, flush: Flush) -> bool:
        start = self._clock()
        try:
            await self._flush(flush)
        except (OSError, BinderyError) as error:
            self.stats.flush_failed = True
            log.error("flush_failed", error=str(error), attempts=flush.attempts)
            self._fail_flush_waiters()
            return False
        self._next_flush = None
        self._flushed(flush, self._clock() - start)
        await self._release(flush.cache)
        return True

    async def _release(self, cache: WriteCache) -> None:
        is_left = True
        while is_left:
            is_left = cache.release(_RELEASE_ENTRIES)
            await asyncio.sleep(0)

    def _has_unflushed(self) -> bool:
        return bool(self._active.ledgers or self._ledgers.changed or self._ledgers.deleted)

    async def _pause(self, seconds: float) -> None:
        """Wait before trying again, or until close."""
        self._flush_wanted.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._flush_wanted.wait()
        except TimeoutError:
            pass

    async def _flush(self, flush: Flush) -> None:
        # The index must not point to what the journal could still lose: should the crash come before the mark is
        # written, the entry log is cut back, and only a replay of the very same entries mends such rows.
        await self._journaled(())
        if not flush.is_stored:
            await self._flusher.store(flush)
            flush.is_stored = True
        await self._flusher.advance_mark(flush.position)

    def _flushed(self, flush: Flush, seconds: float) -> None:
        """The index answers for these entries from now on."""
        self.stats.flush_failed = False
        self.stats.flush_s += seconds
        self.stats.observe_flush_s(seconds)
        self._read_cache.drop(flush.overwritten)
        self._flushing = None
        self._ledgers.forgotten()
        self._ledgers.evict(self._active.ledgers, ())
        self._flushes_done += 1
        ready = [waiter for needed, waiter in self._flush_waiters if needed <= self._flushes_done]
        self._flush_waiters = [item for item in self._flush_waiters if item[0] > self._flushes_done]
        for waiter in ready:
            if not waiter.done():
                waiter.set_result(None)
        if self._flush_waiters:
            self._flush_wanted.set()
        self.stats.flushing_cache_size = 0
        self.stats.ledgers_in_memory = len(self._ledgers.states)
        self._resume_waiting()
        if self._active.entries:
            self._start_age_timer()

    async def flush(self) -> None:
        """Return once what was accepted before this call is flushed. Raises OSError when that fails now."""
        needed = self._flushes_done + (self._next_flush is not None) + self._has_unflushed()
        if needed == self._flushes_done:
            return
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._flush_waiters.append((needed, waiter))
        self._flush_wanted.set()
        await waiter

    def _fail_flush_waiters(self) -> None:
        waiters, self._flush_waiters = self._flush_waiters, []
        for _, waiter in waiters:
            if not waiter.done():
                waiter.set_exception(OSError("flush failed"))

    # --- fence, explicit LAC, force

    async def fence(self, ledger_id: int, master_key: bytes) -> None:
        """See EntryStore. Raises Unauthorized, NoSuchLedger after a fenced ledger was deleted, JournalFailed."""
        parts: list[bytes] = []
        state = self._state_for(ledger_id, master_key, parts)
        if not state.is_fenced:
            state.is_fenced = state.has_new_fence = True
            self._ledgers.changed[ledger_id] = state
            parts += _record(control.pack_fence(ledger_id))
            state.wake()
        await self._journaled(parts)

    async def write_lac(self, ledger_id: int, master_key: bytes, lac: int, packet: bytes) -> None:
        """See EntryStore. The LAC that counts is the packet's own, which a replay sees too.

        Raises BadRequest for a packet that holds none, Unauthorized, NoSuchLedger as `fence`, JournalFailed.
        """
        if len(packet) < control.LAC_PACKET_SIZE_MIN:
            raise BadRequest("explicit LAC packet is short", ledger_id=ledger_id, lac=lac, size=len(packet))
        parts: list[bytes] = []
        state = self._state_for(ledger_id, master_key, parts)
        self._set_explicit_lac(state, packet)
        await self._journaled([*parts, *_record(control.pack_explicit_lac(ledger_id, packet))])

    def _set_explicit_lac(self, state: LedgerState, packet: bytes) -> None:
        state.explicit_lac = packet
        state.has_new_lac = True
        self._ledgers.changed[state.ledger_id] = state
        lac = control.lac_of_packet(packet)
        if lac > state.lac:
            state.lac = lac
            state.lac_updated_ms = self._wall_clock_ms()
        state.wake()

    def _state_for(self, ledger_id: int, master_key: bytes, parts: list[bytes]) -> LedgerState:
        """The ledger, created if unknown: then `parts` gets its key record."""
        if not self._is_open or self._journal.failed:
            raise JournalFailed("storage takes no writes", ledger_id=ledger_id)
        if self._ledgers.is_tombstone(ledger_id):
            raise NoSuchLedger(ledger_id=ledger_id)
        state = self._ledgers.find(ledger_id)
        if state is None:
            state = self._ledgers.create(ledger_id, master_key)
            parts += _record(control.pack_master_key(ledger_id, master_key))
        elif state.master_key != master_key:
            raise Unauthorized("another master key", ledger_id=ledger_id)
        return state

    async def _journaled(self, parts: Sequence[bytes]) -> None:
        """Return once `parts`, and all that was appended before, are durable."""
        synced: asyncio.Future[bool] = self._loop.create_future()

        def tell(is_durable: bool) -> None:
            if not synced.done():
                synced.set_result(is_durable)

        if parts:
            self._start_age_timer()
            self._journal.append(parts, sum(map(len, parts)), tell)
        else:
            self._journal.barrier(tell)
        if not await synced:
            raise JournalFailed

    async def force(self, ledger_id: int) -> None:
        """See EntryStore. Raises JournalFailed."""
        await self._journaled(())

    # --- reads

    def read_many(self, keys: Sequence[tuple[int, int]], done: ReadDone) -> None:
        """See EntryStore."""
        if not self._is_open:
            done([Status.IO_ERROR] * len(keys))
            return
        stats = self.stats
        states = self._ledgers.states
        active = self._active.ledgers
        flushing = self._flushing.ledgers if self._flushing is not None else _NOTHING
        cached = self._read_cache.ledgers
        answers: list[bytes | int] = []
        answer = answers.append
        missing: list[tuple[int, int]] = []
        places: list[int] = []
        hits_active = hits_flushing = hits_cached = 0
        for ledger_id, entry_id in keys:
            state = states.get(ledger_id)
            if entry_id < 0 and state is not None:
                entry_id = state.last_entry_id
            if (entries := active.get(ledger_id)) is not None and (body := entries.get(entry_id)) is not None:
                hits_active += 1
                answer(body)
            elif (entries := flushing.get(ledger_id)) is not None and (body := entries.get(entry_id)) is not None:
                hits_flushing += 1
                answer(body)
            elif (entries := cached.get(ledger_id)) is not None and (body := entries.get(entry_id)) is not None:
                hits_cached += 1
                answer(body)
            elif (state is not None and entry_id > state.indexed_entry_id) or (state is not None and entry_id < 0):
                stats.reads_absent += 1
                answer(Status.NO_ENTRY)  # all ids above the indexed ones are in the write caches
            elif self._ledgers.is_hidden(ledger_id):
                stats.reads_absent += 1
                answer(Status.NO_LEDGER if state is None else Status.NO_ENTRY)
            else:
                places.append(len(answers))
                missing.append((ledger_id, entry_id))
                answer(Status.IO_ERROR)
        stats.reads_active_cache += hits_active
        stats.reads_flushing_cache += hits_flushing
        stats.reads_read_cache += hits_cached
        if not missing:
            done(answers)
            return
        if stats.read_queue_entries + len(missing) > self.settings.read_queue_entries_max:
            for place in places:
                answers[place] = Status.TOO_MANY_REQUESTS
            done(answers)
            return
        stats.read_queue_entries += len(missing)
        self._cold_wanted.append((missing, partial(self._fill, answers, places, missing, done)))
        if not self._cold_running:
            self._read_cold()

    def _fill(
        self,
        answers: list[bytes | int],
        places: Sequence[int],
        keys: Sequence[tuple[int, int]],
        done: ReadDone,
        found: Sequence[bytes | int],
    ) -> None:
        """Complete one `read_many` with what the disk said."""
        for place, key, one in zip(places, keys, found, strict=True):
            if one == Status.NO_LEDGER and key[0] in self._ledgers.states:
                answers[place] = Status.NO_ENTRY  # nothing of it was flushed yet
            else:
                answers[place] = one
        done(answers)

    def _read_cold(self) -> None:
        """Send everything that waits for the disk to the reader, in one job."""
        wanted, self._cold_wanted = self._cold_wanted, []
        keys = [key for missing, _ in wanted for key in missing]
        self._cold_running = True
        self._deleted_meanwhile.clear()
        self.stats.read_jobs += 1
        self._read_worker.submit(lambda: self._reader.read(keys), partial(self._cold_done, wanted))

    def _cold_done(self, wanted: Sequence[_ColdWanted], result: ColdRead | None, error: BaseException | None) -> None:
        stats = self.stats
        self._cold_running = False
        asked = sum(len(missing) for missing, _ in wanted)
        stats.read_queue_entries -= asked
        if result is None:
            log.error("read_job_failed", error=repr(error))
            answers: Sequence[bytes | int] = [Status.IO_ERROR] * asked
        else:
            answers = result.answers
            stats.damage_found += result.damage
            ahead = result.ahead
            if self._deleted_meanwhile:
                ahead = [item for item in ahead if item[0][0] not in self._deleted_meanwhile]
            self._read_cache.put_many(ahead)
            stats.read_cache_size = self._read_cache.size
            found = sum(type(one) is bytes for one in answers)
            failed = answers.count(Status.IO_ERROR)
            stats.reads_disk += found
            stats.reads_failed += failed
            stats.reads_absent += asked - found - failed
            stats.read_ahead_entries += max(len(result.ahead) - found, 0)
        if self._cold_wanted:
            self._read_cold()
        at = 0
        for missing, fill in wanted:
            fill(answers[at : at + len(missing)])
            at += len(missing)

    # --- what is known of a ledger

    def _known(self, ledger_id: int) -> LedgerState:
        state = self._ledgers.find(ledger_id)
        if state is None:
            raise NoSuchLedger(ledger_id=ledger_id)
        return state

    async def read_lac(self, ledger_id: int) -> LacState:
        """See EntryStore. Raises NoSuchLedger, DamagedStorage when the last entry cannot be read."""
        state = self._known(ledger_id)
        if state.last_entry_id < 0:
            return LacState(state.explicit_lac, None)
        read: asyncio.Future[bytes | int] = self._loop.create_future()

        def done(answers: Sequence[bytes | int]) -> None:
            if not read.done():
                read.set_result(answers[0])

        self.read_many([(ledger_id, -1)], done)
        last = await read
        if isinstance(last, bytes):
            return LacState(state.explicit_lac, last)
        if last in (Status.NO_LEDGER, Status.NO_ENTRY):  # deleted meanwhile
            raise NoSuchLedger(ledger_id=ledger_id)
        raise DamagedStorage("last entry cannot be read", ledger_id=ledger_id, entry_id=state.last_entry_id)

    async def last_add_confirmed(self, ledger_id: int) -> int:
        """See EntryStore."""
        return self._known(ledger_id).lac

    def watch_lac(self, ledger_id: int, wake: Callable[[], None]) -> Callable[[], None]:
        """See EntryStore. Raises NoSuchLedger."""
        state = self._known(ledger_id)
        watch_id = next(self._watch_ids)
        state.watchers[watch_id] = wake
        return lambda: state.watchers.pop(watch_id, None) and None

    def lac_updated_at_ms(self, ledger_id: int) -> int:
        """See EntryStore."""
        state = self._ledgers.states.get(ledger_id)
        return 0 if state is None else state.lac_updated_ms

    async def entry_ids(self, ledger_id: int) -> Sequence[tuple[int, int]]:
        """See EntryStore. Raises DamagedStorage too."""
        self._known(ledger_id)
        recent: list[int] = list(self._active.ledgers.get(ledger_id, ()))
        if self._flushing is not None:
            recent += self._flushing.ledgers.get(ledger_id, ())
        is_hidden = self._ledgers.is_hidden(ledger_id)

        def list_runs() -> list[tuple[int, int]]:
            return _runs({*recent, *(() if is_hidden else self._reader.entry_ids(ledger_id))})

        return await run_in(self._read_worker, list_runs)

    def ledger_ids(self) -> Sequence[int]:
        """See EntryStore. Ascending."""
        return list(self._ledgers.all_ids())

    async def delete_ledger(self, ledger_id: int) -> None:
        """See EntryStore. Nothing happens if there is none."""
        state = self._ledgers.delete(ledger_id)
        if state is None:
            return
        self._active.drop_ledger(ledger_id)
        if self._flushing is not None:
            self._flushing.drop_ledger(ledger_id)
        self._read_cache.drop_ledger(ledger_id)
        self._deleted_meanwhile.add(ledger_id)
        self._start_age_timer()
        state.wake()

    def disk_usage(self) -> tuple[int, int]:
        """See EntryStore."""
        usage = self._disk.usage(self.settings.ledger_directory)
        return usage.total, usage.free


_NOTHING: dict[int, dict[int, bytes]] = {}


def _record(body: bytes) -> tuple[bytes, bytes]:
    """Journal parts of one record."""
    return pack_record_size(len(body)), body


def _runs(entry_ids: set[int]) -> list[tuple[int, int]]:
    """(first, count) of ids that follow one another, ascending."""
    runs: list[tuple[int, int]] = []
    first = last = -2
    for entry_id in sorted(entry_ids):
        if entry_id != last + 1:
            if last >= 0:
                runs.append((first, last - first + 1))
            first = entry_id
        last = entry_id
    if last >= 0:
        runs.append((first, last - first + 1))
    return runs
