"""FakeCluster: fake bookies registered in an in-memory metadata tree, and clients on it."""

import random
from dataclasses import replace
from typing import Any

from bindery_client.client import LedgerClient
from bindery_client.settings import ClientSettings
from bindery_core.formats.bookie_service_info import encode, of_bookie
from bindery_core.ids import BookieId
from bindery_metadata.bookies.registration import BookieRegistration
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.memory import MemoryStore, MemoryTree
from fake_bookie import FakeBookie

QUICK = ClientSettings(
    connect_timeout_s=5.0,
    reconnect_pause_s=0.02,
    reconnect_pause_s_max=0.2,
    add_timeout_s=2.0,
    add_quorum_timeout_s=10.0,
    read_timeout_s=3.0,
    speculative_read_s=0.1,
    fence_timeout_s=0.2,
    recovery_timeout_s=20.0,
    replacement_retry_s=0.1,
    metadata_timeout_s=10.0,
    explicit_lac_idle_s=0.01,
    long_poll_s=1.0,
    lac_refresh_s=0.02,
    quarantine_s=5.0,
    timer_tick_s=0.02,
)
"""Settings for tests on a slow machine. A test that waits for a timeout sets a shorter one."""


class FakeCluster:
    """`async with FakeCluster(bookies=4) as cluster:`. The end of the block stops all bookies and clients."""

    def __init__(self, *, bookies: int = 4) -> None:
        self.tree = MemoryTree()
        self.layout = LedgersLayout()
        self.bookies: dict[BookieId, FakeBookie] = {}
        self.clients: list[LedgerClient] = []
        self.stores: dict[LedgerClient, MemoryStore] = {}
        self._bookie_count = bookies
        self._store = self.tree.connect()
        self._registrations: dict[BookieId, BookieRegistration] = {}

    async def __aenter__(self) -> "FakeCluster":
        await initialize_cluster(self._store, self.layout, randomness=random.Random(1))
        for number in range(self._bookie_count):
            await self.add_bookie(f"bookie-{number}")
        return self

    async def __aexit__(self, *exc: object) -> None:
        for client in self.clients:
            await client.close()
        for registration in self._registrations.values():
            await registration.close()
        for bookie in self.bookies.values():
            await bookie.close()

    async def add_bookie(self, name: str, *, read_only: bool = False) -> FakeBookie:
        bookie = FakeBookie(name)
        await bookie.start()
        self.bookies[bookie.bookie_id] = bookie
        await self.register(bookie, read_only=read_only)
        return bookie

    async def register(self, bookie: FakeBookie, *, read_only: bool = False) -> None:
        registration = BookieRegistration(
            self._store, self.layout, bookie.bookie_id, encode(of_bookie(host="127.0.0.1", port=bookie.port))
        )
        await registration.register(read_only=read_only)
        self._registrations[bookie.bookie_id] = registration

    async def unregister(self, bookie: FakeBookie) -> None:
        await self._registrations.pop(bookie.bookie_id).close()

    async def client(self, **changes: Any) -> LedgerClient:
        """One more client; `changes` are settings that differ from QUICK."""
        store = self.tree.connect()
        client = await LedgerClient.connect(
            store, randomness=random.Random(len(self.clients)), layout=self.layout, settings=replace(QUICK, **changes)
        )
        self.clients.append(client)
        self.stores[client] = store
        return client

    def of(self, ensemble: tuple[BookieId, ...]) -> list[FakeBookie]:
        """The fake bookies of an ensemble, in its order."""
        return [self.bookies[bookie_id] for bookie_id in ensemble]

    def spare(self, ensemble: tuple[BookieId, ...]) -> FakeBookie:
        return next(bookie for bookie_id, bookie in self.bookies.items() if bookie_id not in ensemble)
