"""Open one shard's storage: files, index, replay of the journal, then the parts that serve.

`open_storage` returns a `StorageParts` in which every part exists and is connected; there is no half-open storage. The
steps are:

1. open the files and the index, and rebuild the index if it is damaged or older than LastLogMark (`opening`)
2. replay the journal after LastLogMark and flush the replayed entries (`replay`)
3. create the journal file that this run writes to
4. connect the parts for reading, adding, flushing, scrubbing and compaction

If a step fails or the caller is cancelled, the index is closed and all workers have ended before the error is raised.
This includes an index that a worker opens while the caller is being cancelled. A rebuild of the index checks a flag
that a cancellation sets, and stops within a fraction of a second; other work in a worker may take some seconds to
finish.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from bindery_bookie.storage.collection.compaction import Compactor
from bindery_bookie.storage.collection.log_replacement import CollectionEnvironment
from bindery_bookie.storage.corruption.damage import DamageRegister
from bindery_bookie.storage.corruption.limbo import LimboState
from bindery_bookie.storage.engine.adds import Adds
from bindery_bookie.storage.engine.ledger_storage import FORMS
from bindery_bookie.storage.engine.storage_repair import StorageRepair
from bindery_bookie.storage.entry_log.entry_log import EntryLogReader, EntryLogWriter
from bindery_bookie.storage.entry_log.log_manifest import LogIds, ManifestFile, read_manifest
from bindery_bookie.storage.flushing.flush import Flush, Flusher
from bindery_bookie.storage.flushing.flush_loop import FlushLoop
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.io.disk import Disk
from bindery_bookie.storage.io.errors import JournalFailed, JournalFull
from bindery_bookie.storage.io.kv import OpenKV
from bindery_bookie.storage.io.kv_watch import WatchedKV
from bindery_bookie.storage.io.reserve import Reserve, with_room
from bindery_bookie.storage.io.worker import Worker, close_workers, run_in
from bindery_bookie.storage.journal import journal_files, journal_format
from bindery_bookie.storage.journal.journal import Journal, JournalStart
from bindery_bookie.storage.journal.journal_format import JournalPosition
from bindery_bookie.storage.journal.journal_needed import needed_journals
from bindery_bookie.storage.journal.journal_writer import JournalWriter
from bindery_bookie.storage.memory.ledgers import LedgerTable
from bindery_bookie.storage.memory.write_cache import WriteCaches
from bindery_bookie.storage.opening import opening
from bindery_bookie.storage.opening.replay import Replay
from bindery_bookie.storage.reading.cold_reads import ColdReader
from bindery_bookie.storage.reading.reads import Reads
from bindery_bookie.storage.scrub.scrub import Scrubber, load_scrub_record
from bindery_bookie.storage.scrub.scrub_state import ScrubRecord
from bindery_bookie.storage.settings import LostStorage, StorageSettings
from bindery_bookie.storage.stats import StorageStats
from bindery_bookie.storage.store import ReplayProgress

log = structlog.get_logger(__name__)

StartWorker = Callable[[str], Worker]
"""Starts a worker with the given name. Called in the event loop."""


@dataclass(frozen=True, slots=True)
class StorageEnvironment:
    """Settings, disk, clocks and reserves of a shard. The same environment can be opened several times in a row."""

    settings: StorageSettings
    stats: StorageStats
    damage: DamageRegister
    """May be shared by the engines of a bookie."""
    disk: Disk
    open_kv: OpenKV
    destroy_kv: Callable[[str], None]
    """Removes a store that `open_kv` found damaged, before it is rebuilt."""
    start_worker: StartWorker
    wall_clock_ms: Callable[[], int]
    clock: Callable[[], float] | None
    """Returns monotonic seconds; called from any thread. None: the event loop's clock."""
    journal_reserve: Reserve
    ledger_reserve: Reserve
    start_reserve: Reserve

    @property
    def journal_directory(self) -> str:
        return f"{self.settings.journal_directory}/current"

    @property
    def directory(self) -> str:
        """The ledger directory."""
        return f"{self.settings.ledger_directory}/current"

    def make_room(self) -> bool:
        """Release one more reserve of the ledger directory; return False if none was left. Runs in the flush worker."""
        return any(reserve.release() for reserve in (self.ledger_reserve, self.start_reserve))


class StorageWorkers:
    """The workers of one open storage, started and stopped together."""

    def __init__(self, start_worker: StartWorker) -> None:
        self._start_worker = start_worker
        self._started: list[Worker] = []
        self.journal = self.start("journal")
        self.flush = self.start("flush")
        self.read = self.start("read")
        self.compaction = self.start("compaction")

    def start(self, name: str) -> Worker:
        """Start one more worker, which `stop` stops too."""
        worker = self._start_worker(name)
        self._started.append(worker)
        return worker

    async def stop(self) -> None:
        """Return once all workers have ended. May be called again."""
        workers, self._started = self._started, []
        await close_workers(workers)


@dataclass(frozen=True, slots=True)
class StorageParts:
    """The connected parts of an open storage. Background tasks run only after `start`."""

    workers: StorageWorkers
    index: Index
    ledgers: LedgerTable
    caches: WriteCaches
    journal_writer: JournalWriter
    journal: Journal
    flusher: Flusher
    flush_loop: FlushLoop
    adds: Adds
    reader: ColdReader
    """Used by the read worker only."""
    reads: Reads
    scrubber: Scrubber
    compactor: Compactor
    repair: StorageRepair
    scrub_record: ScrubRecord
    """The result of the last scrub before this start."""

    def start(self) -> None:
        """Start the background tasks: flushing, compaction, scrubbing. Does not wait and cannot be cancelled."""
        self.flush_loop.start()
        self.ledgers.start_count(self.workers.compaction)
        self.compactor.start()
        self.scrubber.start(self.scrub_record)


async def open_storage(
    environment: StorageEnvironment,
    *,
    index_damaged: Callable[[str], None],
    on_progress: Callable[[ReplayProgress], None] | None = None,
) -> StorageParts:
    """Open one shard's storage. Raises DamagedStorage with the file and offset, OSError.

    `index_damaged` is called from any thread with the reason if a read or write finds the index damaged.
    """
    workers = StorageWorkers(environment.start_worker)
    opener = _Opener(environment, workers, index_damaged)
    try:
        return await opener.open(on_progress)
    except BaseException:
        opener.is_cancelled.set()
        try:
            await run_in(workers.flush, opener.close_index)  # runs after the job that opens it
        finally:
            await workers.stop()
        raise


async def synced(journal: Journal, parts: Sequence[bytes] = ()) -> None:
    """Append `parts`, if any, and return once they and all records before them are durable. Raises JournalFailed."""
    result: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def set_result(is_durable: bool) -> None:
        if not result.done():
            result.set_result(is_durable)

    if parts:
        journal.append(parts, sum(map(len, parts)), set_result)
    else:
        journal.barrier(set_result)
    if not await result:
        raise JournalFailed


@dataclass(frozen=True, slots=True)
class _Replayed:
    """The parts that a replay uses, and the position where this run's journal begins."""

    ledgers: LedgerTable
    caches: WriteCaches
    journal_writer: JournalWriter
    flusher: Flusher
    unfinished: Flush | None
    start: JournalStart


class _Opener:
    """The steps of one `open_storage`."""

    def __init__(
        self, environment: StorageEnvironment, workers: StorageWorkers, index_damaged: Callable[[str], None]
    ) -> None:
        self._environment = environment
        self._workers = workers
        self._index_damaged = index_damaged
        self._loop = asyncio.get_running_loop()
        self._clock = environment.clock or self._loop.time
        self._form = FORMS[environment.settings.ledger_storage]
        self._index: Index | None = None
        """The open index. Flush worker only."""
        self.is_cancelled = threading.Event()
        """Set when the start failed or was cancelled. Read by workers."""

    async def open(self, on_progress: Callable[[ReplayProgress], None] | None) -> StorageParts:
        environment, workers = self._environment, self._workers
        started = self._clock()
        now_ms = environment.wall_clock_ms()
        opened = await run_in(workers.flush, lambda: with_room(lambda: self._open_files(now_ms), environment.make_room))
        limbo = None if opened.limbo is None else LimboState.of_marker(opened.limbo)
        listed = await run_in(workers.flush, lambda: read_manifest(environment.disk, environment.directory))
        manifest = ManifestFile(environment.disk, environment.directory, listed)
        log_ids = LogIds.after(listed, opened.mark.log_id)
        replayed = await self._bring_up_to_date(opened, manifest, log_ids, limbo, on_progress)
        scrub_record = await load_scrub_record(environment.disk, environment.directory, workers.read)
        parts = self._connect(opened.index, replayed, manifest, log_ids, limbo, scrub_record)
        for damage in opened.damage:
            environment.damage.report(damage)
        environment.stats.replay_s = self._clock() - started
        return parts

    def _open_files(self, now_ms: int) -> opening.Opened:
        """Open the files and the index. Runs in the flush worker. Raises StartCancelled."""
        environment = self._environment
        opened = opening.open_storage(
            environment.disk,
            lambda path: WatchedKV(environment.open_kv(path), self._index_damaged),
            environment.destroy_kv,
            journal_directory=environment.journal_directory,
            ledger_directory=environment.directory,
            now_ms=now_ms,
            refuse_lost=environment.settings.on_lost_storage is LostStorage.REFUSE,
            is_cancelled=self.is_cancelled.is_set,
        )
        self._index = opened.index
        return opened

    def close_index(self) -> None:
        """Close the index if it is open. Runs in the flush worker."""
        if self._index is not None:
            self._index.close()

    async def _bring_up_to_date(
        self,
        opened: opening.Opened,
        manifest: ManifestFile,
        log_ids: LogIds,
        limbo: LimboState | None,
        on_progress: Callable[[ReplayProgress], None] | None,
    ) -> _Replayed:
        """Replay the journal, create this run's journal file, and flush the replayed entries."""
        environment, workers = self._environment, self._workers
        settings, mark = environment.settings, opened.mark
        ledgers = LedgerTable(opened.index, ledgers_max=settings.ledgers_max, tombstones_max=settings.tombstones_max)
        caches = WriteCaches(settings.write_cache_size_max, self._form.make_cache)
        journal_writer = JournalWriter(
            environment.disk,
            environment.journal_directory,
            file_size=settings.journal_file_size_max,
            clock=self._clock,
            reserve=environment.journal_reserve,
        )
        flusher = Flusher(
            disk=environment.disk,
            directory=environment.directory,
            journal_directory=environment.journal_directory,
            index=opened.index,
            logs=EntryLogWriter(
                environment.disk,
                environment.directory,
                log_id=mark.log_id,
                offset=mark.log_offset,
                sync_size=settings.flush_sync_size,
                new_id=log_ids.for_flush,
            ),
            manifest=manifest,
            mark=mark,
            worker=workers.flush,
            clock=self._clock,
            settings=settings,
            stats=environment.stats,
            encoder=self._form.encoder,
        )
        replay = Replay(
            disk=environment.disk,
            journal_directory=environment.journal_directory,
            ledgers=ledgers,
            caches=caches,
            flusher=flusher,
            worker=workers.flush,
            stats=environment.stats,
            is_lenient=limbo is not None and limbo.is_listing,
            make_room=environment.make_room,
        )
        end = await replay.run(on_progress)
        start = await run_in(workers.journal, lambda: self._start_journal(journal_writer, end))
        await replay.flush(start.position)
        if start.next_journal_id is None and flusher.mark.journal.journal_id < start.position.journal_id:
            journal_writer.require_needed_file()
        return _Replayed(ledgers, caches, journal_writer, flusher, replay.unfinished, start)

    def _start_journal(self, writer: JournalWriter, end: JournalPosition) -> JournalStart:
        """Create the file that this run writes to. An existing file is never continued, so a torn end is kept."""
        environment = self._environment
        existing = journal_files.list_journals(environment.disk, environment.journal_directory)
        # A needed file may be lost. The new id must exceed its id too, or the next start would report it missing again.
        needed = needed_journals(environment.disk, environment.journal_directory)
        journal_id = max([end.journal_id, *existing, *needed]) + 1
        try:
            writer.create(journal_id)
        except JournalFull as error:  # start anyway, to serve reads
            log.error("journal_full", error=str(error))
            self._loop.call_soon_threadsafe(environment.stats.no_space, str(error))
            return JournalStart(end, next_journal_id=journal_id)
        environment.stats.journal_files_created += 1
        return JournalStart(JournalPosition(journal_id, journal_format.HEADER_SIZE, end.sequence))

    def _connect(
        self,
        index: Index,
        replayed: _Replayed,
        manifest: ManifestFile,
        log_ids: LogIds,
        limbo: LimboState | None,
        scrub_record: ScrubRecord,
    ) -> StorageParts:
        """Build the remaining parts. Does not wait."""
        environment, workers = self._environment, self._workers
        settings, stats = environment.settings, environment.stats
        ledgers, caches, flusher = replayed.ledgers, replayed.caches, replayed.flusher
        logs = EntryLogReader(environment.disk, environment.directory, open_logs_max=settings.open_logs_max)
        reader = ColdReader(index, logs, settings)
        reads = Reads(
            ledgers=ledgers,
            caches=caches,
            reader=reader,
            worker=workers.read,
            settings=settings,
            stats=stats,
            damage=environment.damage,
            limbo=lambda: repair.limbo,
        )
        journal = Journal(
            writer=replayed.journal_writer,
            worker=workers.journal,
            loop=self._loop,
            settings=settings,
            stats=stats,
            start=replayed.start,
            full=lambda reason: stats.no_space(reason),
        )

        def flushed(flush: Flush) -> None:
            reads.drop(flush.overwritten)
            adds.resume()

        flush_loop = FlushLoop(
            caches=caches,
            ledgers=ledgers,
            journal=journal,
            journal_synced=lambda: synced(journal),
            flusher=flusher,
            clock=self._clock,
            settings=settings,
            stats=stats,
            flushed=flushed,
            unfinished=replayed.unfinished,
        )
        adds = self._form.adds(
            ledgers=ledgers,
            caches=caches,
            journal=journal,
            flush_loop=flush_loop,
            wall_clock_ms=environment.wall_clock_ms,
            settings=settings,
            stats=stats,
        )
        scrubber = Scrubber(
            disk=environment.disk,
            directory=environment.directory,
            index=index,
            durable_log_id=lambda: flusher.mark.log_id,
            log_end=flusher.log_end,
            is_cached=caches.holds,
            damage=environment.damage,
            start_worker=lambda: workers.start("scrub"),
            clock=self._clock,
            wall_clock_ms=environment.wall_clock_ms,
            settings=settings,
        )

        async def flush_deletions() -> None:
            """Return once the rows of all ledgers deleted so far are removed from the index. Raises OSError."""
            if ledgers.has_deletions:
                await flush_loop.flush()

        compactor = Compactor(
            CollectionEnvironment(
                disk=environment.disk,
                directory=environment.directory,
                index=index,
                closed_below=lambda: flusher.closed_below,
                log_end=flusher.log_end,
                open_ledgers=flusher.open_ledgers,
                flush_deletions=flush_deletions,
                roll=flush_loop.roll,
                forget_log=lambda log_id: run_in(workers.read, lambda: logs.forget(log_id)),
                make_room=lambda: bool(environment.ledger_reserve.release()),  # the start reserve is for the next start
                damaged=environment.damage.report,
                flush_worker=workers.flush,
                worker=workers.compaction,
                clock=self._clock,
                wall_clock_ms=environment.wall_clock_ms,
            ),
            manifest=manifest,
            ids=log_ids,
            settings=settings,
            stats=stats,
        )
        repair = StorageRepair(
            disk=environment.disk,
            directory=environment.directory,
            damage=environment.damage,
            limbo=limbo,
            index=index,
            ledgers=ledgers,
            adds=adds,
            reads=reads,
            flush_loop=flush_loop,
            flush_worker=workers.flush,
        )
        return StorageParts(
            workers=workers,
            index=index,
            ledgers=ledgers,
            caches=caches,
            journal_writer=replayed.journal_writer,
            journal=journal,
            flusher=flusher,
            flush_loop=flush_loop,
            adds=adds,
            reader=reader,
            reads=reads,
            scrubber=scrubber,
            compactor=compactor,
            repair=repair,
            scrub_record=scrub_record,
        )
