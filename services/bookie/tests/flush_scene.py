"""A Flusher on a disk in memory, with the cache and ledgers that it flushes. Tests can import this module."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.entry_log import entry_log_format as fmt
from bindery_bookie.storage.entry_log.entry_log import EntryLogWriter
from bindery_bookie.storage.entry_log.log_manifest import LogManifest, ManifestFile
from bindery_bookie.storage.flushing.flush import Encoder, Flush, Flusher
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.io.fault_injection import FaultyDisk
from bindery_bookie.storage.io.kv import MemoryKV
from bindery_bookie.storage.journal.journal_format import JournalPosition
from bindery_bookie.storage.journal.mark import LastLogMark
from bindery_bookie.storage.memory.ledgers import LedgerTable
from bindery_bookie.storage.memory.write_cache import WriteCache
from bindery_bookie.storage.settings import StorageSettings
from bindery_bookie.storage.stats import StorageStats
from bindery_simulation.disk import CrashableDisk
from direct_worker import DirectWorker

DIRECTORY, JOURNAL = "/d", "/j"
HEADER, KEY_RECORD = 32, 8 + 20 + 20
"""Bytes in an entry log: the file header, and the record of a ledger's key."""
CHUNK_SIZE, LOG_SIZE_MAX = 4096, 64 * 1024
SLICE_S = 1 / 16


class NotedKV(MemoryKV):
    """Notes its batches in the log of a disk."""

    def __init__(self, disk: CrashableDisk) -> None:
        super().__init__()
        self._disk = disk
        self.errors: list[Exception] = []

    def write_batch(
        self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = (), *, sync: bool = False
    ) -> None:
        self._disk.log.append("index sync" if sync else "index")
        super().write_batch(puts, deletes, sync=sync)
        if self.errors:
            raise self.errors.pop()


class FlushScene:
    """A shard after three flushes, whose next entry log is 5."""

    def __init__(
        self,
        kit: Any,
        *,
        encoder: type[Encoder] | None = None,
        make_cache: Callable[[int], WriteCache] = WriteCache,
        mark: LastLogMark | None = None,
        chunk_size: int = CHUNK_SIZE,
    ) -> None:
        self.kit = kit
        self.disk = CrashableDisk()
        self.faults: Callable[[str, str], OSError | None] = lambda operation, path: None
        disk = FaultyDisk(self.disk, lambda operation, path: self.faults(operation, path))
        self.kv = NotedKV(self.disk)
        self.index = Index(self.kv)
        self.worker = DirectWorker()
        self.stats = StorageStats()
        self.ledgers = LedgerTable(self.index, ledgers_max=1000, tombstones_max=16)
        self._make_cache = make_cache
        self.cache = make_cache(2**30)
        self.now = 0.0
        self.tick = 0.0
        """Seconds that pass at each look at the clock."""
        mark = mark or LastLogMark(3, JournalPosition(2, 512, 7), 4, 900)
        self.manifest = ManifestFile(disk, DIRECTORY, LogManifest(unsealed={}))
        self.logs = EntryLogWriter(
            disk,
            DIRECTORY,
            log_id=mark.log_id,
            offset=mark.log_offset,
            sync_size=2**30,
            new_id=iter(range(5, 99)).__next__,
        )
        self.flusher = Flusher(
            disk=disk,
            directory=DIRECTORY,
            journal_directory=JOURNAL,
            index=self.index,
            logs=self.logs,
            manifest=self.manifest,
            mark=mark,
            worker=self.worker,
            clock=self._clock,
            settings=StorageSettings(
                flush_chunk_size=chunk_size, entry_log_size_max=LOG_SIZE_MAX, flush_slice_s=SLICE_S
            ),
            stats=self.stats,
            encoder=encoder,
        )

    def _clock(self) -> float:
        self.now += self.tick
        return self.now

    def add(self, ledger_id: int, entry_id: int, *, size: int = 92) -> bytes:
        """Put an entry with a body of `size` bytes into the cache, and return its record in an entry log."""
        if self.ledgers.find(ledger_id) is None:
            self.ledgers.create(ledger_id, self.kit.KEY)
        body: bytes = self.kit.entry(ledger_id, entry_id, bytes([entry_id % 251]) * (size - 32))
        self.cache.put(ledger_id, entry_id, body)
        return fmt.pack_record(body)

    def add_many(self, ledger_id: int, entry_ids: Iterable[int], *, size: int = 92) -> bytes:
        return b"".join([self.add(ledger_id, entry_id, size=size) for entry_id in entry_ids])

    def taken(self, position: JournalPosition | None = None) -> Flush:
        """Return a flush of everything so far, and begin with an empty cache."""
        cache, self.cache = self.cache, self._make_cache(2**30)
        states, deleted = self.ledgers.take_changes()
        states.update({ledger_id: self.ledgers.states[ledger_id] for ledger_id in cache.ledgers})
        return Flush(cache=cache, position=position or JournalPosition(3, 512, 9), states=states, deleted=deleted)

    async def flush(self, position: JournalPosition | None = None) -> Flush:
        """Store everything so far, and advance the mark."""
        flush = self.taken(position)
        await self.flusher.store(flush)
        await self.flusher.advance_mark(flush.position)
        self.ledgers.deletions_flushed()
        return flush

    def log(self, log_id: int) -> bytes:
        return self.disk.contents(f"{DIRECTORY}/{log_id:x}.log")

    def key_record(self, ledger_id: int) -> bytes:
        return fmt.pack_record(control.pack_master_key(ledger_id, self.kit.KEY))

    def located(self, ledger_id: int) -> dict[int, tuple[int, int]]:
        """Return entry id -> (log id, offset of its record) as in the index, whose locations must hold the entries."""
        found: dict[int, tuple[int, int]] = {}
        for run in self.index.runs(ledger_id):
            for entry_id, location, size in run.entries():
                log_id, offset = location >> 32, location & (2**32 - 1)
                body = self.log(log_id)[offset : offset + size]
                assert control.unpack_ids(body) == (ledger_id, entry_id)
                assert self.log(log_id)[offset - 8 :].startswith(fmt.pack_record(body))
                assert entry_id not in found
                found[entry_id] = (log_id, offset - 8)
        return found


def sealed(data: bytes, sizes: Mapping[int, int], deletions: Iterable[int] = ()) -> bytes:
    """Return the content of a log after it was closed. `data`: header and records."""
    ledgers_map = fmt.pack_record(fmt.pack_ledgers_map(sizes, frozenset(deletions)))
    return data + ledgers_map + fmt.pack_trailer(len(data) + 8)
