"""A cluster in memory: ledgers and a metadata tree that brokers share, and a clock that tests turn."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from bindery_broker.managed_ledger import ManagedLedger, ManagedLedgerSettings
from bindery_broker.managed_ledger.ownership_proof import OwnershipCheck
from bindery_client.memory.memory import MemoryLedgerClient, MemoryLedgers
from bindery_metadata.stores.memory import MemoryTree
from bindery_simulation.instant import InstantLoop

TOPIC = "public/default/persistent/orders"
QUICK = {
    "age_s_min": 0,
    "retry_pause_s": 0.001,
    "retry_pause_s_max": 0.01,
    "operation_timeout_s": 2,
    "add_timeout_s": 2,
}


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Nothing here is outside the process: time need not pass, and a slow machine changes nothing."""
    if item.path.name == "test_crashes.py":  # its consumers ask without a pause: there is always something to do
        return {"asyncio": asyncio.new_event_loop}
    return {"instant": InstantLoop}


class Cluster:
    """`open` is a broker that takes the topic over."""

    def __init__(self) -> None:
        self.ledgers = MemoryLedgers()
        self.tree = MemoryTree()
        self.now_ms = 1_700_000_000_000
        self.stores: list[Any] = []
        """Of the brokers, in the order of their coming."""
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

    def ledgers_client(self) -> MemoryLedgerClient:
        return MemoryLedgerClient(self.ledgers)

    def forget(self, topic: ManagedLedger) -> None:
        self._opened.remove(topic)

    async def end(self) -> None:
        for topic in self._opened:
            await topic.crash()


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    await cluster.end()


async def read_all(topic: ManagedLedger) -> dict[tuple[int, int], bytes]:
    """Every entry, by position; in order."""
    found: dict[tuple[int, int], bytes] = {}
    position = topic.first_position
    while entries := await topic.read(position, entries_max=7, size_max=10**9):
        found.update(entries)
        position = topic.next_position(entries[-1][0])
    return found
