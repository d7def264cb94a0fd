"""StorageEngine: journal, write caches, entry logs and index joined into an EntryStore.

An add goes to the journal and to the active write cache at once, and is answered when its journal group was synced
(`adds`, `journal`). When the active cache is full or old, it becomes the flushing one and a fresh one takes its place
(`flush_loop`, `flush`). A read looks into active cache, flushing cache and read cache, and then goes to the reader's
worker (`reads`, `cold_reads`). `opening` says what a start accepts, `replay` brings it up to date.

Invariant: what was answered OK is in the journal behind LastLogMark, or in entry log and index. Everything here runs in
the event loop; workers own what they write.
"""

import asyncio
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, pairwise
from typing import TypeVar

import structlog
from bindery_core.errors import (
    BadRequest,
    BinderyError,
    DamagedStorage,
    LedgerStateUnknown,
    NoSuchLedger,
    Unauthorized,
)
from bindery_core.wire.messages import AddRequest, Status

from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.collection.compaction import Compactor
from bindery_bookie.storage.collection.log_keeper import Surroundings
from bindery_bookie.storage.corruption.damage import DamageRegister
from bindery_bookie.storage.corruption.limbo import LimboState
from bindery_bookie.storage.engine.ledger_storage import FORMS
from bindery_bookie.storage.engine.storage_repair import StorageRepair
from bindery_bookie.storage.entry_log.entry_log import EntryLogReader, EntryLogWriter
from bindery_bookie.storage.entry_log.log_manifest import LogIds, ManifestFile, read_manifest
from bindery_bookie.storage.flushing.flush import Flush, Flusher
from bindery_bookie.storage.flushing.flush_loop import FlushLoop
from bindery_bookie.storage.io.disk import Disk, DiskUsage, RealDisk
from bindery_bookie.storage.io.errors import JournalFailed, JournalFull, StartGivenUp
from bindery_bookie.storage.io.fault_injection import DrillControl
from bindery_bookie.storage.io.kv import LevelDbKV, OpenKV
from bindery_bookie.storage.io.kv_watch import WatchedKV
from bindery_bookie.storage.io.reserve import Reserve, reserves_of, with_room
from bindery_bookie.storage.io.worker import ThreadWorker, Worker, close_worker, close_workers, run_in
from bindery_bookie.storage.journal import journal_format
from bindery_bookie.storage.journal.journal import Journal, JournalStart, JournalWriter, record_parts
from bindery_bookie.storage.journal.journal_format import JournalPosition
from bindery_bookie.storage.journal.journal_needed import needed_journals
from bindery_bookie.storage.journal.mark import LastLogMark
from bindery_bookie.storage.memory.ledgers import DELETIONS_MAX, LedgerState, LedgerTable
from bindery_bookie.storage.memory.write_cache import WriteCaches
from bindery_bookie.storage.opening import opening
from bindery_bookie.storage.opening.replay import Replay
from bindery_bookie.storage.reading.cold_reads import ColdReader
from bindery_bookie.storage.reading.reads import Reads
from bindery_bookie.storage.scrub.scrub import Scrubber, load_scrub_record
from bindery_bookie.storage.scrub.scrub_state import ScrubRecord
from bindery_bookie.storage.settings import LostStorage, StorageSettings
from bindery_bookie.storage.stats import StorageStats
from bindery_bookie.storage.store import AddDone, LacState, ReadDone, ReplayProgress

log = structlog.get_logger(__name__)

T = TypeVar("T")

StartWorker = Callable[[str], Worker]
"""Starts a worker of that name; called in the event loop."""


def _thread_worker(name: str) -> Worker:
    return ThreadWorker(f"bookie-{name}", asyncio.get_running_loop())


def _has_room(disk: Disk, settings: StorageSettings) -> bool:
    """Whether the index can be opened: it writes a log, a manifest, and the old log's content as a table."""
    usage = disk.usage(settings.ledger_directory)
    return usage.free >= min(2 * settings.index_write_buffer_size, usage.total // 32)


class StorageEngine(StorageRepair):
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
        damage: DamageRegister | None = None,
    ) -> None:
        """`destroy_kv` removes a store that `open_kv` finds damaged, before it is rebuilt.

        `clock`: monotonic seconds for measuring work; the loop's own if None. uvloop's stands still within a turn.
        """
        self.settings = settings
        self.stats = stats or StorageStats()
        self.damage = DamageRegister() if damage is None else damage
        """May be shared by the engines of a bookie."""
        self.is_index_damaged = False
        """A read or write met damage of the index; the next start rebuilds it."""
        self.limbo: LimboState | None = None
        """None: what is not here never was. Known once `open` returned."""
        self._disk = disk
        self._open_kv = open_kv
        self._destroy_kv = destroy_kv
        self._start_worker = start_worker
        self._wall_clock_ms = wall_clock_ms
        self._given_clock = clock
        self._journal_directory = f"{settings.journal_directory}/current"
        self._directory = f"{settings.ledger_directory}/current"
        self.journal_reserve = Reserve(disk, self._journal_directory, size=settings.reserve_size)
        self.ledger_reserve, self.start_reserve = reserves_of(disk, self._directory, size=settings.reserve_size)
        self._form = FORMS[settings.ledger_storage]
        self._caches = WriteCaches(settings.write_cache_size_max, self._form.make_cache)
        self._limbo_ids, self._limbo_left = None, set()
        self._watch_ids = count()
        self._workers: list[Worker] = []
        self._is_open = False
        self._is_given_up = threading.Event()
        """Nobody waits for this start any more; each has its own. Asked by workers."""
        self._index_in_use = asyncio.Lock()
        self._ledgers_at_start: int | None = None

    @classmethod
    def on_real_disk(
        cls,
        settings: StorageSettings,
        *,
        wall_clock_ms: Callable[[], int],
        stats: StorageStats | None = None,
        damage: DamageRegister | None = None,
        drills: DrillControl | None = None,
    ) -> "StorageEngine":
        """The engine as a bookie runs it: real files, LevelDB, its own threads. Call `open` in the event loop.

        `drills` stands between it and its disk; None: nothing does.
        """
        disk: Disk = RealDisk(past_cache=settings.journal_past_cache)
        open_kv: OpenKV = partial(
            LevelDbKV,
            block_cache_size=settings.index_block_cache_size,
            write_buffer_size=settings.index_write_buffer_size,
            has_room=partial(_has_room, disk, settings),
        )
        if drills is not None:
            disk, open_kv = drills.wrap_disk(disk), drills.wrap_open_kv(open_kv)
        return cls(
            settings,
            disk=disk,
            open_kv=open_kv,
            destroy_kv=LevelDbKV.destroy,
            start_worker=_thread_worker,
            wall_clock_ms=wall_clock_ms,
            clock=time.monotonic,  # noqa: TID251 - this is where the real parts are put together
            stats=stats,
            damage=damage,
        )

    # --- open and close

    async def open(self, *, on_progress: Callable[[ReplayProgress], None] | None = None) -> None:
        """See EntryStore. Raises DamagedStorage with the file and offset.

        Cancelled, it returns once its workers have ended: a rebuild of the index stops soon, what else they do may take
        some seconds.
        """
        assert not self._is_open
        self._loop = asyncio.get_running_loop()
        self._clock = self._given_clock or self._loop.time
        self._is_given_up = threading.Event()
        self._journal_worker = self._worker("journal")
        self._flush_worker = self._worker("flush")
        self._read_worker = self._worker("read")
        self._compaction_worker = self._worker("compaction")
        try:
            scrub_record = await self._open(on_progress)
        except BaseException:
            self._is_given_up.set()
            await self._stop_workers()
            raise
        # From here on nothing is waited for: whoever is cancelled has an open storage, or none.
        self._is_open = True
        self._flush_loop.start()
        try:
            self._compaction_worker.submit(self._ledgers.count_job(), self._counted)
        except (OSError, BinderyError) as error:
            self._counted(None, error)
        self.compactor.start()
        self.scrubber.start(scrub_record)

    async def close(self) -> None:
        """Flush, advance LastLogMark, close. After it, a start replays nothing.

        What cannot be flushed stays in the journal for the next start. Adds still waiting get TOO_MANY_REQUESTS.
        """
        if not self._is_open:
            return
        self._is_open = False
        await self.scrubber.stop()
        await self.compactor.stop()
        await self._flush_loop.stop()
        self._adds.close()
        self._journal.stop()
        try:
            if self._flush_loop.is_done and not self._journal.failed:
                await self._journaled(())
                await self._flusher.close(self._journal.position)
        except (OSError, BinderyError) as error:
            log.error("close_failed", error=str(error))
        finally:
            await run_in(self._journal_worker, self._journal_writer.close)
            self._reads.stop_reading_ahead()
            await run_in(self._read_worker, self._reader.close)
            async with self._index_in_use:  # by a step of its compaction
                await run_in(self._flush_worker, self._index.close)
            await self._stop_workers()

    def _worker(self, name: str) -> Worker:
        worker = self._start_worker(name)
        self._workers.append(worker)
        return worker

    async def _stop_workers(self) -> None:
        workers, self._workers = self._workers, []
        await close_workers(workers)

    async def _open(self, on_progress: Callable[[ReplayProgress], None] | None) -> ScrubRecord:
        """What the scrub begins with."""
        started = self._clock()
        now_ms = self._wall_clock_ms()
        opened = await run_in(self._flush_worker, lambda: with_room(lambda: self._open_files(now_ms), self._make_room))
        self._index = opened.index
        self.limbo = None if opened.limbo is None else LimboState.of_marker(opened.limbo)
        try:
            manifest = await run_in(self._flush_worker, lambda: read_manifest(self._disk, self._directory))
            self._manifest = ManifestFile(self._disk, self._directory, manifest)
            self._log_ids = LogIds.after(manifest, opened.mark.log_id)
            start = await self._bring_up_to_date(opened.mark, on_progress)
            scrub_record = await load_scrub_record(self._disk, self._directory, self._read_worker)
        except BaseException:
            await run_in(self._flush_worker, self._index.close)
            raise
        self._join(start)
        for damage in opened.damage:
            self.damage.report(damage)
        self.stats.replay_s = self._clock() - started
        return scrub_record

    def _open_files(self, now_ms: int) -> opening.Opened:
        """In the flush's worker. Raises StartGivenUp."""
        is_given_up = self._is_given_up.is_set
        opened = opening.open_storage(
            self._disk,
            lambda path: WatchedKV(self._open_kv(path), self._index_damaged),
            self._destroy_kv,
            journal_directory=self._journal_directory,
            ledger_directory=self._directory,
            now_ms=now_ms,
            refuse_lost=self.settings.on_lost_storage is LostStorage.REFUSE,
            is_given_up=is_given_up,
        )
        if is_given_up():
            opened.index.close()
            raise StartGivenUp
        return opened

    def _make_room(self) -> bool:
        """Give up one more reserve of the ledger directory; False when none was left. In the flush's worker."""
        return any(reserve.release() for reserve in (self.ledger_reserve, self.start_reserve))

    async def _bring_up_to_date(
        self, mark: LastLogMark, on_progress: Callable[[ReplayProgress], None] | None
    ) -> JournalStart:
        """Replay and flush. Where this run's journal begins."""
        settings = self.settings
        self._ledgers = LedgerTable(
            self._index, ledgers_max=settings.ledgers_max, tombstones_max=settings.tombstones_max
        )
        self._journal_writer = JournalWriter(
            self._disk,
            self._journal_directory,
            file_size=settings.journal_file_size_max,
            clock=self._clock,
            reserve=self.journal_reserve,
        )
        self._flusher = Flusher(
            disk=self._disk,
            directory=self._directory,
            journal_directory=self._journal_directory,
            index=self._index,
            logs=EntryLogWriter(
                self._disk,
                self._directory,
                log_id=mark.log_id,
                offset=mark.log_offset,
                sync_size=settings.flush_sync_size,
                new_id=self._log_ids.for_flush,
            ),
            manifest=self._manifest,
            mark=mark,
            worker=self._flush_worker,
            clock=self._clock,
            settings=settings,
            stats=self.stats,
            encoder=self._form.encoder,
        )
        replay = Replay(
            disk=self._disk,
            journal_directory=self._journal_directory,
            ledgers=self._ledgers,
            caches=self._caches,
            flusher=self._flusher,
            worker=self._flush_worker,
            stats=self.stats,
            is_lenient=self.limbo is not None and self.limbo.is_listing,
            make_room=self._make_room,
        )
        end = await replay.run(on_progress)
        start = await run_in(self._journal_worker, lambda: self._start_journal(end))
        await replay.flush(start.position)
        self._unfinished = replay.unfinished
        if start.next_journal_id is None and self._flusher.mark.journal.journal_id < start.position.journal_id:
            self._journal_writer.say_needed()
        return start

    def _join(self, start: JournalStart) -> None:
        """Put the parts together that serve from now on."""
        settings, stats = self.settings, self.stats
        logs = EntryLogReader(self._disk, self._directory, open_logs_max=settings.open_logs_max)
        self._reader = ColdReader(self._index, logs, settings)
        self._reads = Reads(
            ledgers=self._ledgers,
            caches=self._caches,
            reader=self._reader,
            worker=self._read_worker,
            settings=settings,
            stats=stats,
            damage=self.damage,
            limbo=lambda: self.limbo,
        )
        self._journal = Journal(
            writer=self._journal_writer,
            worker=self._journal_worker,
            loop=self._loop,
            settings=settings,
            stats=stats,
            start=start,
            full=lambda reason: stats.no_space(reason),
        )
        self._flush_loop = FlushLoop(
            caches=self._caches,
            ledgers=self._ledgers,
            journal=self._journal,
            journal_synced=lambda: self._journaled(()),
            flusher=self._flusher,
            clock=self._clock,
            settings=settings,
            stats=stats,
            flushed=self._flushed,
            unfinished=self._unfinished,
        )
        self._adds = self._form.adds(
            ledgers=self._ledgers,
            caches=self._caches,
            journal=self._journal,
            flush_loop=self._flush_loop,
            wall_clock_ms=self._wall_clock_ms,
            settings=settings,
            stats=stats,
        )
        self.scrubber = Scrubber(
            disk=self._disk,
            directory=self._directory,
            index=self._index,
            durable_log_id=lambda: self._flusher.mark.log_id,
            log_end=self._flusher.log_end,
            is_cached=self._caches.holds,
            damage=self.damage,
            start_worker=lambda: self._worker("scrub"),
            clock=self._clock,
            wall_clock_ms=self._wall_clock_ms,
            settings=settings,
        )

        self.compactor = Compactor(
            Surroundings(
                disk=self._disk,
                directory=self._directory,
                index=self._index,
                closed_below=lambda: self._flusher.closed_below,
                log_end=self._flusher.log_end,
                open_ledgers=self._flusher.open_ledgers,
                flush_deletions=self._flush_deletions,
                roll=self._flush_loop.roll,
                forget_log=lambda log_id: run_in(self._read_worker, lambda: logs.forget(log_id)),
                make_room=lambda: bool(self.ledger_reserve.release()),  # what is kept for a start stays
                damaged=self.damage.report,
                flush_worker=self._flush_worker,
                worker=self._compaction_worker,
                clock=self._clock,
                wall_clock_ms=self._wall_clock_ms,
            ),
            manifest=self._manifest,
            ids=self._log_ids,
            settings=settings,
            stats=stats,
        )

    def _start_journal(self, end: JournalPosition) -> JournalStart:
        """Create the file that this run writes to. Files are never continued: a tear stays where it was."""
        existing = opening.list_journals(self._disk, self._journal_directory)
        # One that was needed and is lost: were the new file below it, the next start would miss it again.
        needed = needed_journals(self._disk, self._journal_directory)
        journal_id = max([end.journal_id, *existing, *needed]) + 1
        try:
            self._journal_writer.create(journal_id)
        except JournalFull as error:  # reads can be served all the same
            log.error("journal_full", error=str(error))
            self._loop.call_soon_threadsafe(self.stats.no_space, str(error))
            return JournalStart(end, next_journal_id=journal_id)
        self.stats.journal_files_created += 1
        return JournalStart(JournalPosition(journal_id, journal_format.HEADER_SIZE, end.sequence))

    # --- adds and reads

    def add_many(self, adds: Sequence[AddRequest], done: AddDone) -> None:
        """See EntryStore. Answers in the order of the calls, unless an add was refused at once."""
        if self._is_open:
            self._adds.add_many(adds, done)
        else:
            done([Status.IO_ERROR] * len(adds))

    def read_many(self, keys: Sequence[tuple[int, int]], done: ReadDone) -> None:
        """See EntryStore."""
        if self._is_open:
            self._reads.read_many(keys, done)
        else:
            done([Status.IO_ERROR] * len(keys))

    async def flush(self) -> None:
        """Return once what was accepted before this call is flushed. Raises OSError when that fails now."""
        await self._flush_loop.flush()

    async def _flush_deletions(self) -> None:
        """Return once the rows of all ledgers deleted so far are gone from the index. Raises OSError."""
        if self._ledgers.has_deletions:
            await self.flush()

    def _flushed(self, flush: Flush) -> None:
        self._reads.drop(flush.overwritten)
        self._adds.resume()

    # --- fence, explicit LAC, force

    async def fence(self, ledger_id: int, master_key: bytes) -> None:
        """See EntryStore. Raises Unauthorized, NoSuchLedger if fenced and deleted, JournalFull, JournalFailed."""
        parts: list[bytes] = []
        state = self._state_for(ledger_id, master_key, parts)
        if not state.is_fenced:
            self._ledgers.fence(state)
            parts += record_parts(control.pack_fence(ledger_id))
            state.wake()
        await self._journaled(parts)

    async def write_lac(self, ledger_id: int, master_key: bytes, lac: int, packet: bytes) -> None:
        """See EntryStore. The LAC that counts is the packet's own, which a replay sees too.

        Raises BadRequest for a packet that holds none, else as `fence`.
        """
        if len(packet) < control.LAC_PACKET_SIZE_MIN:
            raise BadRequest("explicit LAC packet is short", ledger_id=ledger_id, lac=lac, size=len(packet))
        parts: list[bytes] = []
        state = self._state_for(ledger_id, master_key, parts)
        if state.set_explicit_lac(packet):
            state.lac_updated_ms = self._wall_clock_ms()
        self._ledgers.changed[ledger_id] = state
        state.wake()
        await self._journaled([*parts, *record_parts(control.pack_explicit_lac(ledger_id, packet))])

    def _state_for(self, ledger_id: int, master_key: bytes, parts: list[bytes]) -> LedgerState:
        """The ledger, created if unknown: then `parts` gets its key record."""
        if not self._is_open or self._journal.failed:
            raise JournalFailed("storage takes no writes", ledger_id=ledger_id)
        if self._journal.is_full:  # before anything is kept: ledgers without end may be asked for meanwhile
            raise JournalFull("there is no room in the journal", ledger_id=ledger_id)
        if self._ledgers.is_tombstone(ledger_id):
            raise NoSuchLedger(ledger_id=ledger_id)
        state = self._ledgers.find(ledger_id)
        if state is None:
            state = self._ledgers.create(ledger_id, master_key)
            parts += record_parts(control.pack_master_key(ledger_id, master_key))
        elif state.master_key != master_key and not self._ledgers.learn_key(state, master_key, parts):
            raise Unauthorized("another master key", ledger_id=ledger_id)
        return state

    async def _journaled(self, parts: Sequence[bytes]) -> None:
        """Return once `parts`, and all that was appended before, are durable."""
        synced: asyncio.Future[bool] = self._loop.create_future()

        def tell(is_durable: bool) -> None:
            if not synced.done():
                synced.set_result(is_durable)

        if parts:
            self._flush_loop.start_age_timer()
            self._journal.append(parts, sum(map(len, parts)), tell)
        else:
            self._journal.barrier(tell)
        if not await synced:
            raise JournalFailed

    async def force(self, ledger_id: int) -> None:
        """See EntryStore. Raises JournalFailed."""
        await self._journaled(())

    # --- what is known of a ledger

    def _known(self, ledger_id: int) -> LedgerState:
        state = self._ledgers.find(ledger_id)
        is_denied = state is None and self.limbo is None
        if not is_denied and (state is None or state.is_limbo or (self.limbo is not None and self.limbo.is_listing)):
            raise LedgerStateUnknown("storage was lost and is not repaired yet", ledger_id=ledger_id)
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

    def last_add_confirmed(self, ledger_id: int) -> int:
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
        return await self._reads.entry_ids(ledger_id)

    async def list_ledger_ids(self) -> Sequence[int]:
        """See EntryStore."""
        if not self._is_open:
            return ()
        in_memory, hidden = list(self._ledgers.states), self._ledgers.hidden_ids()
        return await run_in(
            self._compaction_worker,
            lambda: array("q", sorted({*self._index.ledger_ids(), *in_memory} - hidden)),
        )

    async def delete_ledger(self, ledger_id: int, *, is_closed: bool = False) -> None:
        """See EntryStore. `is_closed`: its former writers are kept out even if it was never fenced here.

        Nothing happens if there is none. Raises OSError when many wait and no flush succeeds.
        """
        if len(self._ledgers.deleted) >= DELETIONS_MAX:  # their rows are one batch in memory
            await self.flush()
        state = self._ledgers.delete(ledger_id, is_closed=is_closed)
        if state is None:
            return
        self.damage.ledger_gone(ledger_id)
        if state.is_limbo:
            self._limbo_left.add(ledger_id)
        self._caches.drop_ledger(ledger_id)
        self._reads.drop_ledger(ledger_id)
        self._flush_loop.start_age_timer()
        state.wake()

    def was_given_copies(self, ledger_id: int, *, since_s: float) -> bool:
        """Whether copies of its entries came at `since_s` (the loop's clock) or later, as far as that is known."""
        return self._adds.copies_seen.since(ledger_id, since_s)

    async def compact_index(self) -> None:
        """Have the index rewrite itself without what was deleted, in a thread of its own.

        Raises OSError (also when storage is closed meanwhile), DamagedIndex.
        """
        worker = self._start_worker("index-compaction")
        try:
            bounds = await self._compaction_step(worker, lambda: self._index.compaction_bounds())
            for start, stop in pairwise(bounds):
                await self._compaction_step(worker, partial(self._index.compact, start=start, stop=stop))
        finally:
            await close_worker(worker)

    async def _compaction_step(self, worker: Worker, step: Callable[[], T]) -> T:
        async with self._index_in_use:
            if not self._is_open:
                raise OSError("storage is not open")
            return await run_in(worker, step)

    def disk_usage(self) -> tuple[int, int]:
        """See EntryStore."""
        usage = self.ledger_disk_usage()
        return usage.total, usage.free

    def ledger_disk_usage(self) -> DiskUsage:
        """Of the file system of the ledger directory. Raises OSError."""
        return self._disk.usage(self.settings.ledger_directory)
