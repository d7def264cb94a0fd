"""A cluster in memory, on any event loop: ledgers, metadata, and workers that repair them.

Nothing here depends on how a repair works: replicas are counted when they are stored, and verified on their bookies.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from bindery_client.ledger.replica import Verdict
from bindery_client.memory.memory import MemoryLedgerClient, MemoryLedgers, MemoryWriteHandle
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.placement.write_set import write_set
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.bookies.membership import MembershipStore
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.recovery.recovery_records import Reason, RecoveryRecord, RecoveryRecords, RecoveryState
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.memory import MemoryStore, MemoryTree
from bindery_recovery.budget import MIB, RepairBudget
from bindery_recovery.cluster.cluster_view import ClusterReader
from bindery_recovery.records.reasons import stronger
from bindery_recovery.repair.worker import ReplicationWorker
from bindery_recovery.settings import RecoverySettings
from simulated import simulate

LAYOUT = LedgersLayout()
NAMES = tuple(BookieId(f"bookie-{n}:3181") for n in range(4))
START_MS = 1_700_000_000_000


def clock_ms() -> int:
    """The wall clock of this world follows the clock of the loop."""
    return START_MS + int(asyncio.get_running_loop().time() * 1000)


class CountingClient(MemoryLedgerClient):
    """Counts stored replicas, and may delay them."""

    def __init__(self, ledgers: MemoryLedgers) -> None:
        super().__init__(ledgers)
        self.stored: list[tuple[LedgerId, BookieId, int]] = []
        """(ledger, bookie, entries) of each call."""
        self.before_store: Callable[[], Any] = lambda: None
        """Called first; a coroutine is awaited."""
        self.opened: list[LedgerId] = []

    async def store_replicas(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        bookie_id: BookieId,
        frames: Sequence[bytes],
        *,
        timeout_s: float | None = None,
    ) -> list[int]:
        waiting = self.before_store()
        if asyncio.iscoroutine(waiting):
            await waiting
        statuses = await super().store_replicas(ledger_id, metadata, bookie_id, frames)
        self.stored.append((ledger_id, bookie_id, len(frames)))
        return statuses

    async def open(self, ledger_id: LedgerId, *, password: bytes = b"", recover: bool = True) -> Any:
        self.opened.append(ledger_id)
        return await super().open(ledger_id, password=password, recover=recover)

    @property
    def entries_stored(self) -> int:
        return sum(count for _, _, count in self.stored)


class Healer:
    """A worker with a session of its own."""

    def __init__(self, world: "World", name: str, seed: int, settings: RecoverySettings, budget: RepairBudget) -> None:
        self.store: MemoryStore = world.tree.connect()
        self.client = CountingClient(world.ledgers)
        self.marks = UnderreplicationManager(
            self.store, LAYOUT, randomness=random.Random(seed), clock_ms=clock_ms, worker_name=name
        )
        self.read_cluster = ClusterReader(
            self.client,
            MembershipStore(self.store, clock_ms=clock_ms),
            CookieStore(self.store, LAYOUT),
            clock_ms=clock_ms,
        ).read
        """How the worker reads the cluster. Tests may replace it."""
        self.worker = ReplicationWorker(
            name=name,
            store=self.store,
            client=self.client,
            marks=self.marks,
            records=RecoveryRecords(self.store),
            read_cluster=lambda: self.read_cluster(),
            budget=budget,
            settings=settings,
            clock_ms=clock_ms,
            randomness=random.Random(seed),
        )
        self.task: asyncio.Task[None] | None = None

    def start(self) -> "Healer":
        self.task = asyncio.create_task(self.worker.run())
        return self

    async def stop(self) -> None:
        """Stop the worker as an orderly end of its process does."""
        await self._end()
        await self.store.close()

    async def kill(self) -> None:
        """End the session first, as after a crash, so that later writes of the worker fail."""
        await self.store.close()
        await self._end()

    async def _end(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
            self.task = None


class World:
    """Ledgers, metadata and workers in memory."""

    def __init__(self, ledgers: MemoryLedgers, tree: MemoryTree, store: MemoryStore) -> None:
        self.ledgers = ledgers
        self.tree = tree
        self.store = store
        self.client = MemoryLedgerClient(ledgers)
        self.marks = UnderreplicationManager(store, LAYOUT, randomness=random.Random(0), clock_ms=clock_ms)
        self.records = RecoveryRecords(store)
        self.memberships = MembershipStore(store, clock_ms=clock_ms)
        self.cookies = CookieStore(store, LAYOUT)
        self.healers: list[Healer] = []

    def healer(self, name: str = "", *, budget: Mapping[str, Any] | None = None, **settings: Any) -> Healer:
        """Add a worker. `settings`: of RecoverySettings; `budget`: of RepairBudget."""
        name = name or f"worker-{len(self.healers)}"
        made = Healer(
            self,
            name,
            len(self.healers),
            RecoverySettings(**settings),
            RepairBudget(**{"bytes_per_s_max": 64 * MIB, "bytes_per_s_min": MIB, **(budget or {})}),
        )
        self.healers.append(made)
        return made

    async def write(self, count: int, *, is_closed: bool = True, size: int = 10, **quorums: int) -> MemoryWriteHandle:
        writer = await self.client.create(**quorums, password=b"pw")
        if count:
            await writer.add_many([b"%0*d" % (size, n) for n in range(count)])
        if is_closed:
            await writer.close()
        return writer

    async def mark(self, ledger_id: LedgerId, *bookies: str, reason: Reason = Reason.BOOKIE_LOST) -> None:
        """Mark a ledger as an auditor does."""

        def change(found: RecoveryRecord | None) -> RecoveryRecord:
            if found is None:
                return RecoveryRecord(ledger_id, reason=reason, first_marked_ms=clock_ms(), bookies=bookies)
            return found.with_changes(reason=stronger(found.reason, reason))

        await self.records.update(ledger_id, change)
        await self.marks.mark(ledger_id, bookies)

    def lose(self, bookie_id: BookieId) -> None:
        """Remove the registration of a bookie; its data stays on its disks."""
        del self.ledgers.bookies[bookie_id]

    async def add_cookies(self, *bookies: BookieId) -> None:
        for bookie_id in bookies:
            await self.cookies.write(bookie_id, b"4\n", version=None)

    async def is_marked(self, ledger_id: LedgerId) -> bool:
        return await self.marks.get(ledger_id) is not None

    async def until_healed(self, *ledger_ids: LedgerId, limit_s: float = 600.0) -> None:
        async with asyncio.timeout(limit_s):
            for ledger_id in ledger_ids:
                while await self.is_marked(ledger_id):
                    await asyncio.sleep(0.05)
                while await self.records.get(ledger_id) is not None:
                    await asyncio.sleep(0.05)

    async def until_record(
        self, ledger_id: LedgerId, is_it: Callable[[RecoveryRecord], bool], limit_s: float = 600.0
    ) -> RecoveryRecord:
        """Wait until the record fulfils the condition, and return it."""
        async with asyncio.timeout(limit_s):
            while True:
                record = await self.records.get(ledger_id)
                if record is not None and is_it(record):
                    return record
                await asyncio.sleep(0.05)

    async def until_tried(self, ledger_id: LedgerId, limit_s: float = 600.0) -> RecoveryRecord:
        return await self.until_record(
            ledger_id, lambda r: bool(r.detail) and r.state is not RecoveryState.COPYING, limit_s
        )

    async def assert_whole(self, ledger_id: LedgerId, payloads: Sequence[bytes]) -> LedgerMetadata:
        """Read every replica that the metadata names from its bookie and check it."""
        metadata = await self.client.metadata(ledger_id)
        assert metadata.last_entry_id == len(payloads) - 1
        length = 0
        for number, payload in enumerate(payloads):
            length += len(payload)
            ensemble = metadata.segment_of(EntryId(number)).ensemble
            for index in write_set(
                entry_id=number, ensemble_size=metadata.ensemble_size, write_quorum=metadata.write_quorum
            ):
                (replica,) = await self.client.read_replicas(
                    ledger_id, metadata, ensemble[index], [EntryId(number)], lambda r: r
                )
                assert (replica.verdict, replica.payload, replica.length) == (Verdict.GOOD, payload, length)
        for segment in metadata.segments:
            assert len(set(segment.ensemble)) == len(segment.ensemble)
            assert all(bookie_id in self.ledgers.bookies for bookie_id in segment.ensemble)
        return metadata


def payloads(count: int, size: int = 10) -> list[bytes]:
    return [b"%0*d" % (size, n) for n in range(count)]


@asynccontextmanager
async def world(*, bookies: Sequence[BookieId] = NAMES) -> AsyncIterator[World]:
    tree = MemoryTree()
    store = tree.connect()
    await initialize_cluster(store, LAYOUT, randomness=random.Random(1))
    here = World(MemoryLedgers(bookies=bookies), tree, store)
    await here.marks.prepare()
    try:
        yield here
    finally:
        for healer in here.healers:
            await healer.stop()


Scene = Callable[[World], Awaitable[None]]


def play(scene: Scene, *, bookies: int = 4) -> None:
    """Run a scene on simulated time."""

    async def run() -> None:
        async with world(bookies=[BookieId(f"bookie-{n}:3181") for n in range(bookies)]) as here:
            await scene(here)

    simulate(run())
