"""Topics over ledgers and metadata in memory, opened by one broker after another."""

from typing import Any

from bindery_broker.managed_ledger import ManagedCursor, ManagedLedger, ManagedLedgerSettings
from bindery_broker.managed_ledger.ownership_proof import OwnershipCheck
from bindery_client.memory.memory import MemoryLedgerClient, MemoryLedgers
from bindery_metadata.stores.memory import MemoryTree
from bindery_pulsar.message_id import EARLIEST, Position

TOPIC = "public/default/persistent/orders"
SUB = f"/managed-ledgers/{TOPIC}/s"
"""Path of the znode of the subscription `s`."""
QUICK = {
    "age_s_min": 0,
    "retry_pause_s": 0.001,
    "retry_pause_s_max": 0.01,
    "operation_timeout_s": 2,
    "add_timeout_s": 2,
}


class Cluster:
    """Each `open` acts as another broker, which takes the topic over."""

    def __init__(self) -> None:
        self.ledgers = MemoryLedgers()
        self.tree = MemoryTree()
        self.now_ms = 1_700_000_000_000
        self.stores: list[Any] = []
        """The metadata sessions of the brokers, in the order of their opening."""
        self._opened: list[ManagedLedger] = []

    async def open(
        self,
        *,
        client: Any = None,
        store: Any = None,
        create: bool = True,
        is_owner: OwnershipCheck | None = None,
        **settings: Any,
    ) -> ManagedLedger:
        self.stores.append(store if store is not None else self.tree.connect())
        topic = await ManagedLedger.open(
            TOPIC,
            client=client if client is not None else MemoryLedgerClient(self.ledgers),
            store=self.stores[-1],
            clock=lambda: self.now_ms,
            settings=ManagedLedgerSettings(**(QUICK | settings)),
            create=create,
            is_owner=is_owner,
        )
        self._opened.append(topic)
        return topic

    async def open_with_ledger(self, **settings: Any) -> ManagedLedger:
        """Open the topic, and start its first ledger without an add."""
        topic = await self.open(**settings)
        assert topic._writer is not None
        await topic._writer.start()
        return topic

    def ledgers_client(self) -> MemoryLedgerClient:
        return MemoryLedgerClient(self.ledgers)

    def forget(self, topic: ManagedLedger) -> None:
        self._opened.remove(topic)

    async def end(self) -> None:
        for topic in self._opened:
            await topic.crash()


async def read_all(topic: ManagedLedger) -> dict[tuple[int, int], bytes]:
    """Return every entry by position, in order."""
    found: dict[tuple[int, int], bytes] = {}
    position = topic.first_position
    while entries := await topic.read(position, entries_max=7, size_max=10**9):
        found.update(entries)
        position = topic.next_position(entries[-1][0])
    return found


async def topic_of(cluster: Cluster, entries: int = 10, **settings: object) -> tuple[ManagedLedger, ManagedCursor]:
    topic = await cluster.open(**settings)
    if entries and not topic.entries_count:
        await topic.add_many([b"%d" % i for i in range(entries)])
    return topic, await topic.open_cursor("s", start=EARLIEST)


def at(*entries: int, ledger: int = 0) -> list[Position]:
    return [Position(ledger, entry) for entry in entries]


async def unacked(cursor: ManagedCursor) -> list[int]:
    found = await cursor.read_unacked(EARLIEST, entries_max=1000, size_max=10**9)
    return [int(entry.payload) for entry in found.entries]
