"""The add path of a shard with a scripted journal. Tests can import this module."""

import struct
from collections.abc import Callable, Sequence
from typing import Any, cast

from bindery_bookie.storage.engine.adds import Adds
from bindery_bookie.storage.flushing.flush_loop import FlushLoop
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.index.index_format import LedgerRow
from bindery_bookie.storage.io.kv import MemoryKV
from bindery_bookie.storage.journal.journal import Journal
from bindery_bookie.storage.memory.ledgers import LedgerTable
from bindery_bookie.storage.memory.write_cache import WriteCache, WriteCaches
from bindery_bookie.storage.settings import StorageSettings
from bindery_bookie.storage.stats import StorageStats
from bindery_core.wire.messages import AddRequest


class ScriptedJournal:
    """Keeps records, and calls back when a test says so."""

    def __init__(self) -> None:
        self.failed = self.is_full = False
        self.appended: list[tuple[list[bytes], int, bool]] = []
        """Record parts, their bytes, whether the callback waits for the write only."""
        self.waiting: list[Callable[[bool], None]] = []

    def append(
        self, parts: Sequence[bytes], size: int, synced: Callable[[bool], None], *, when_written: bool = False
    ) -> None:
        assert sum(map(len, parts)) == size
        self.appended.append((list(parts), size, when_written))
        self.waiting.append(synced)

    def sync(self, is_durable: bool = True) -> None:
        waiting, self.waiting = self.waiting, []
        for synced in waiting:
            synced(is_durable)

    @property
    def records(self) -> list[bytes]:
        """The bodies of all records, whose size words must match."""
        bodies: list[bytes] = []
        for parts, _, _ in self.appended:
            for word, body in zip(parts[::2], parts[1::2], strict=True):
                assert word == struct.pack(">I", len(body))
                bodies.append(body)
        return bodies


class ScriptedFlushLoop:
    """A flush loop whose caches have room when a test says so."""

    def __init__(self) -> None:
        self.has_room = True
        self.asked = 0
        self.timers = 0

    def make_room(self) -> bool:
        self.asked += 1
        return self.has_room

    def start_age_timer(self) -> None:
        self.timers += 1


class AddScene:
    """The add path with a scripted journal and flush loop. Create it in an event loop."""

    def __init__(
        self,
        *,
        cache_size: int = 100_000,
        adds: type[Adds] = Adds,
        make_cache: Callable[[int], WriteCache] = WriteCache,
        **settings: Any,
    ) -> None:
        self.kv = MemoryKV()
        self.index = Index(self.kv)
        self.ledgers = LedgerTable(self.index, ledgers_max=16, tombstones_max=16)
        self.caches = WriteCaches(cache_size, make_cache)
        self.journal, self.flush_loop = ScriptedJournal(), ScriptedFlushLoop()
        self.stats = StorageStats()
        self.now_ms = 5_000
        self.answers: list[list[int]] = []
        self.adds = adds(
            ledgers=self.ledgers,
            caches=self.caches,
            journal=cast(Journal, self.journal),
            flush_loop=cast(FlushLoop, self.flush_loop),
            wall_clock_ms=lambda: self.now_ms,
            settings=StorageSettings(**{"waiting_size_max": 1000, "waiting_time_max_s": 10.0, **settings}),
            stats=self.stats,
        )

    def send(self, *requests: AddRequest) -> None:
        self.adds.add_many(requests, lambda statuses: self.answers.append(list(statuses)))

    def add(self, *requests: AddRequest) -> list[int]:
        """Send a batch, make it durable, and return its statuses."""
        self.send(*requests)
        self.journal.sync()
        return self.answers.pop()

    def store(self, ledger_id: int, row: LedgerRow) -> None:
        self.index.commit(runs=[], merges={}, ledgers={ledger_id: row}, deleted=(), generation=1)

    def fenced(self, ledger_id: int, key: bytes) -> None:
        self.ledgers.fence(self.ledgers.create(ledger_id, key))
        self.ledgers.take_changes()


def request_of(kit: Any, ledger_id: int, entry_id: int, size: int = 50, **others: Any) -> AddRequest:
    """Return an add with a body of `size` bytes."""
    lac = others.pop("lac", -1)
    made: AddRequest = kit.add_request(kit.entry(ledger_id, entry_id, bytes(size - 32), lac=lac), **others)
    return made
