"""StorageEngine: an EntryStore made of a journal, write caches, entry logs and an index.

An add goes to the journal and to the active write cache at once, and is answered after its journal group is synced
(`adds`, `journal`). When the active cache is full or old, it becomes the flushing cache, and an empty cache replaces it
(`flush_loop`, `flush`). A read checks the active cache, the flushing cache and the read cache, and then goes to the
read worker (`reads`, `cold_reads`). `open_storage` builds these parts; the engine holds them while the storage is open.

Invariant: every entry whose add was answered OK is in the journal after LastLogMark, or in an entry log and the index.
Everything here runs in the event loop. Each file is written by one worker only.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, pairwise
from typing import TYPE_CHECKING, TypeVar

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
from bindery_bookie.storage.corruption.damage import DamageRegister
from bindery_bookie.storage.corruption.limbo import LimboState
from bindery_bookie.storage.engine.ledger_storage import LedgerStorage
from bindery_bookie.storage.engine.open_storage import (
    StartWorker,
    StorageEnvironment,
    StorageParts,
    open_storage,
    synced,
)
from bindery_bookie.storage.engine.storage_repair import StorageRepair
from bindery_bookie.storage.io.disk import Disk, DiskUsage, RealDisk
from bindery_bookie.storage.io.errors import JournalFailed, JournalFull
from bindery_bookie.storage.io.fault_injection import DrillControl
from bindery_bookie.storage.io.kv import LevelDbKV, OpenKV
from bindery_bookie.storage.io.reserve import Reserve, reserves_of
from bindery_bookie.storage.io.worker import ThreadWorker, Worker, close_worker, run_in
from bindery_bookie.storage.journal.journal_format import record_parts
from bindery_bookie.storage.memory.ledgers import DELETIONS_MAX, LedgerState
from bindery_bookie.storage.scrub.scrub import Scrubber
from bindery_bookie.storage.settings import StorageSettings
from bindery_bookie.storage.stats import StorageStats
from bindery_bookie.storage.store import AddDone, LacState, ReadDone, ReplayProgress

log = structlog.get_logger(__name__)

T = TypeVar("T")


def _thread_worker(name: str) -> Worker:
    return ThreadWorker(f"bookie-{name}", asyncio.get_running_loop())


def _has_room(disk: Disk, settings: StorageSettings) -> bool:
    """Return True if there is space to open the index. LevelDB writes a log, a manifest, and the old log as a table."""
    usage = disk.usage(settings.ledger_directory)
    return usage.free >= min(2 * settings.index_write_buffer_size, usage.total // 32)


class StorageEngine:
    """An EntryStore on disk. Before `open` returns and after `close` it answers IO_ERROR."""

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
        """`destroy_kv` removes a store that `open_kv` found damaged, before it is rebuilt.

        `clock`: monotonic seconds for measuring work, called from any thread; None: the loop's clock. uvloop's clock
        does not advance within one iteration of the loop.
        """
        self.settings = settings
        self.stats = stats or StorageStats()
        self.damage = DamageRegister() if damage is None else damage
        journal_directory, directory = f"{settings.journal_directory}/current", f"{settings.ledger_directory}/current"
        self.journal_reserve = Reserve(disk, journal_directory, size=settings.reserve_size)
        self.ledger_reserve, self.start_reserve = reserves_of(disk, directory, size=settings.reserve_size)
        self._environment = StorageEnvironment(
            settings=settings,
            stats=self.stats,
            damage=self.damage,
            disk=disk,
            open_kv=open_kv,
            destroy_kv=destroy_kv,
            start_worker=start_worker,
            wall_clock_ms=wall_clock_ms,
            clock=clock,
            journal_reserve=self.journal_reserve,
            ledger_reserve=self.ledger_reserve,
            start_reserve=self.start_reserve,
        )
        self._parts: StorageParts | None = None
        """None before the first `open` returns. Kept after `close`, when `is_open` is False."""
        self._is_open = False
        self._watch_ids = count()
        self._index_in_use = asyncio.Lock()

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
        """Return the engine that a bookie runs: real files, LevelDB, threads. Call `open` in the event loop.

        `drills` injects faults between the engine and its disk; None: no fault injection.
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
            clock=time.monotonic,  # noqa: TID251 - the real components are chosen here
            stats=stats,
            damage=damage,
        )

    # --- open and close

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def parts(self) -> StorageParts:
        """The parts of the open storage. Valid once `open` returned."""
        assert self._parts is not None, "the storage was never opened"
        return self._parts

    @property
    def scrubber(self) -> Scrubber:
        """Verifies stored entries in the background. Valid once `open` returned."""
        return self.parts.scrubber

    @property
    def compactor(self) -> Compactor:
        """Frees space in entry logs. Valid once `open` returned."""
        return self.parts.compactor

    @property
    def repair(self) -> StorageRepair:
        """Restores lost or damaged entries. Valid once `open` returned."""
        return self.parts.repair

    @property
    def limbo(self) -> LimboState | None:
        """The limbo of the shard. None: the shard is complete, so a missing entry was never stored here. Valid once
        `open` returned."""
        return None if self._parts is None else self._parts.repair.limbo

    @property
    def ledgers_count(self) -> int | None:
        """Number of ledgers stored here; None: not counted yet."""
        return None if self._parts is None else self._parts.ledgers.count

    async def open(self, *, on_progress: Callable[[ReplayProgress], None] | None = None) -> None:
        """See EntryStore. Raises DamagedStorage with the file and offset.

        If cancelled, it returns once its workers have ended. An index rebuild stops soon; other work may take some
        seconds to finish.
        """
        assert not self._is_open
        loop = asyncio.get_running_loop()

        def index_damaged(reason: str) -> None:
            if self._is_open:
                loop.call_soon_threadsafe(self._index_damaged, reason)

        parts = await open_storage(self._environment, index_damaged=index_damaged, on_progress=on_progress)
        # No await from here on: after a cancellation the storage is either open or not, never in between.
        self._parts = parts
        self._is_open = True
        parts.start()

    async def close(self) -> None:
        """Flush, advance LastLogMark, close. The next start then has nothing to replay.

        Entries that cannot be flushed stay in the journal for the next start. Waiting adds get TOO_MANY_REQUESTS.
        """
        if not self._is_open:
            return
        self._is_open = False
        parts = self.parts
        workers = parts.workers
        await parts.scrubber.stop()
        await parts.compactor.stop()
        await parts.flush_loop.stop()
        parts.adds.close()
        parts.journal.stop()
        try:
            if parts.flush_loop.is_done and not parts.journal.failed:
                await synced(parts.journal)
                await parts.flusher.close(parts.journal.position)
        except (OSError, BinderyError) as error:
            log.error("close_failed", error=str(error))
        finally:
            await run_in(workers.journal, parts.journal_writer.close)
            parts.reads.stop_reading_ahead()
            await run_in(workers.read, parts.reader.close)
            async with self._index_in_use:  # wait for the current step of an index compaction
                await run_in(workers.flush, parts.index.close)
            await workers.stop()

    def _index_damaged(self, reason: str) -> None:
        if self._is_open:
            self.parts.repair.index_damaged(reason)

    # --- adds and reads

    def add_many(self, adds: Sequence[AddRequest], done: AddDone) -> None:
        """See EntryStore. Answers in the order of the calls, except for adds that are refused at once."""
        if self._is_open:
            self.parts.adds.add_many(adds, done)
        else:
            done([Status.IO_ERROR] * len(adds))

    def read_many(self, keys: Sequence[tuple[int, int]], done: ReadDone) -> None:
        """See EntryStore."""
        if self._is_open:
            self.parts.reads.read_many(keys, done)
        else:
            done([Status.IO_ERROR] * len(keys))

    async def flush(self) -> None:
        """Return once everything accepted before this call is flushed. Raises OSError if the flush fails."""
        await self.parts.flush_loop.flush()

    # --- fence, explicit LAC, force

    async def fence(self, ledger_id: int, master_key: bytes) -> None:
        """See EntryStore. Raises Unauthorized, NoSuchLedger if fenced and deleted, JournalFull, JournalFailed."""
        parts: list[bytes] = []
        state = self._state_for(ledger_id, master_key, parts)
        if not state.is_fenced:
            self.parts.ledgers.fence(state)
            parts += record_parts(control.pack_fence(ledger_id))
            state.wake()
        await self._journaled(parts)

    async def write_lac(self, ledger_id: int, master_key: bytes, lac: int, packet: bytes) -> None:
        """See EntryStore. The LAC in the packet is used, not `lac`, because a replay has only the packet.

        Raises BadRequest for a packet without a LAC, and the errors of `fence`.
        """
        if len(packet) < control.LAC_PACKET_SIZE_MIN:
            raise BadRequest("explicit LAC packet is too short", ledger_id=ledger_id, lac=lac, size=len(packet))
        parts: list[bytes] = []
        state = self._state_for(ledger_id, master_key, parts)
        if state.set_explicit_lac(packet):
            state.lac_updated_ms = self._environment.wall_clock_ms()
        self.parts.ledgers.changed[ledger_id] = state
        state.wake()
        await self._journaled([*parts, *record_parts(control.pack_explicit_lac(ledger_id, packet))])

    def _state_for(self, ledger_id: int, master_key: bytes, parts: list[bytes]) -> LedgerState:
        """Return the ledger's state. A new ledger is created, and its key record is appended to `parts`."""
        if not self._is_open or self.parts.journal.failed:
            raise JournalFailed("storage takes no writes", ledger_id=ledger_id)
        if self.parts.journal.is_full:  # checked before a ledger is created: requests could name any number of ledgers
            raise JournalFull("there is no room in the journal", ledger_id=ledger_id)
        if self.parts.ledgers.is_tombstone(ledger_id):
            raise NoSuchLedger(ledger_id=ledger_id)
        state = self.parts.ledgers.find(ledger_id)
        if state is None:
            state = self.parts.ledgers.create(ledger_id, master_key)
            parts += record_parts(control.pack_master_key(ledger_id, master_key))
        elif state.master_key != master_key and not self.parts.ledgers.learn_key(state, master_key, parts):
            raise Unauthorized("another master key", ledger_id=ledger_id)
        return state

    async def _journaled(self, parts: Sequence[bytes]) -> None:
        """Return once `parts` and all records appended before are durable."""
        if parts:
            self.parts.flush_loop.start_age_timer()
        await synced(self.parts.journal, parts)

    async def force(self, ledger_id: int) -> None:
        """See EntryStore. Raises JournalFailed."""
        await self._journaled(())

    # --- queries about a ledger

    def _known(self, ledger_id: int) -> LedgerState:
        state = self.parts.ledgers.find(ledger_id)
        is_absent = state is None and self.limbo is None
        if not is_absent and (state is None or state.is_limbo or (self.limbo is not None and self.limbo.is_listing)):
            raise LedgerStateUnknown("storage was lost and is not repaired yet", ledger_id=ledger_id)
        if state is None:
            raise NoSuchLedger(ledger_id=ledger_id)
        return state

    async def read_lac(self, ledger_id: int) -> LacState:
        """See EntryStore. Raises NoSuchLedger, and DamagedStorage if the last entry cannot be read."""
        state = self._known(ledger_id)
        if state.last_entry_id < 0:
            return LacState(state.explicit_lac, None)
        read: asyncio.Future[bytes | int] = asyncio.get_running_loop().create_future()

        def done(answers: Sequence[bytes | int]) -> None:
            if not read.done():
                read.set_result(answers[0])

        self.read_many([(ledger_id, -1)], done)
        last = await read
        if isinstance(last, bytes):
            return LacState(state.explicit_lac, last)
        if last in (Status.NO_LEDGER, Status.NO_ENTRY):  # deleted in the meantime
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
        state = self.parts.ledgers.states.get(ledger_id)
        return 0 if state is None else state.lac_updated_ms

    async def entry_ids(self, ledger_id: int) -> Sequence[tuple[int, int]]:
        """See EntryStore. Raises DamagedStorage too."""
        self._known(ledger_id)
        return await self.parts.reads.entry_ids(ledger_id)

    async def list_ledger_ids(self) -> Sequence[int]:
        """See EntryStore."""
        if not self._is_open:
            return ()
        in_memory, hidden = list(self.parts.ledgers.states), self.parts.ledgers.hidden_ids()
        return await run_in(
            self.parts.workers.compaction,
            lambda: array("q", sorted({*self.parts.index.ledger_ids(), *in_memory} - hidden)),
        )

    def active_ledger_ids(self) -> Sequence[int]:
        """Return the ledgers in memory, in any order: those that were used last."""
        return list(self.parts.ledgers.states) if self._is_open else ()

    async def delete_ledger(self, ledger_id: int, *, is_closed: bool = False) -> None:
        """See EntryStore. `is_closed`: reject adds of its former writers even if it was never fenced here.

        Does nothing for an unknown ledger. Raises OSError if too many deletions are pending and the flush fails.
        """
        if len(self.parts.ledgers.deleted) >= DELETIONS_MAX:  # a flush deletes their rows in one batch in memory
            await self.flush()
        state = self.parts.ledgers.delete(ledger_id, is_closed=is_closed)
        if state is None:
            return
        self.damage.ledger_deleted(ledger_id)
        if state.is_limbo:
            self.repair.ledger_deleted(ledger_id)
        self.parts.caches.drop_ledger(ledger_id)
        self.parts.reads.drop_ledger(ledger_id)
        self.parts.flush_loop.start_age_timer()
        state.wake()

    def was_given_copies(self, ledger_id: int, *, since_s: float) -> bool:
        """Return True if the ledger may have received copies of entries at `since_s` (the loop's clock) or later."""
        return self.parts.adds.copies_seen.since(ledger_id, since_s)

    async def compact_index(self) -> None:
        """Compact the index, which frees the space of deleted rows, in a separate thread.

        Raises OSError (also if the storage is closed in the meantime), DamagedIndex.
        """
        worker = self._environment.start_worker("index-compaction")
        try:
            bounds = await self._compaction_step(worker, lambda: self.parts.index.compaction_bounds())
            for start, stop in pairwise(bounds):
                await self._compaction_step(worker, partial(self.parts.index.compact, start=start, stop=stop))
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
        """Return the usage of the file system of the ledger directory. Raises OSError."""
        return self._environment.disk.usage(self.settings.ledger_directory)


if TYPE_CHECKING:

    def _is_ledger_storage(engine: StorageEngine) -> LedgerStorage:
        return engine
