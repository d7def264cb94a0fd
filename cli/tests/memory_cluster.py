"""A cluster with metadata in memory, for tests of commands: `invoke` runs one as the command line does."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest
from bindery.cluster import cluster_backup
from bindery.common import operator
from bindery.common.operator import Cluster
from bindery.main import app
from bindery.recovery import recovery_gate
from bindery_core.formats import replication_formats
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.stores.memory import MemoryStore, MemoryTree
from bindery_metadata.stores.versioned import Versioned
from typer.testing import CliRunner, Result

T = TypeVar("T")
LAYOUT = LedgersLayout()
NOW_MS = 1_800_000_000_000


class MemoryClient:
    """The part of a ledger client that the commands use, on metadata only, without bookies."""

    def __init__(self, store: MemoryStore, deleted: list[LedgerId]) -> None:
        self._store = store
        self._manager = LedgerManager(store, LAYOUT, randomness=random.Random(1))
        self._deleted = deleted

    def list_ledgers(self) -> AsyncIterator[LedgerId]:
        return self._manager.list()

    async def metadata(self, ledger_id: LedgerId) -> LedgerMetadata:
        return (await self._manager.read(ledger_id)).value

    async def metadata_versioned(self, ledger_id: LedgerId) -> Versioned[LedgerMetadata]:
        return await self._manager.read(ledger_id)

    async def list_bookies(self) -> Mapping[BookieId, bool]:
        writable = [BookieId(b) for b in await self._store.children(LAYOUT.available) if b != "readonly"]
        return dict.fromkeys(writable, True)

    def racks(self) -> Mapping[BookieId, str]:
        return {}

    async def delete(self, ledger_id: LedgerId) -> None:
        self._deleted.append(ledger_id)
        await self._manager.delete(ledger_id)


class MemoryCluster:
    """`now_ms` is the wall clock of all components."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms = NOW_MS
        self.tree = MemoryTree(now_ms=lambda: self.now_ms)
        self.deleted: list[LedgerId] = []
        monkeypatch.setattr(operator, "connected", self._connected)
        for module_of_store in (cluster_backup, recovery_gate):
            monkeypatch.setattr(module_of_store, "connected_store", self._connected_store)
        for module in (
            "recovery.commands",
            "bookie.membership_commands",
            "ledger.orphans",
            "cluster.accept_metadata",
            "cluster.cluster_backup",
            "recovery.recovery_gate",
        ):
            monkeypatch.setattr(f"bindery.{module}.now_ms", lambda: self.now_ms)
        self.do(self._prepare)

    def invoke(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, list(arguments))

    def do(self, work: Callable[[MemoryStore], Awaitable[T]]) -> T:
        """Run `work` in a session of its own."""

        async def main() -> T:
            store = self.tree.connect()
            try:
                return await work(store)
            finally:
                await store.close()

        return asyncio.run(main())

    def register(self, *bookies: str) -> None:
        """Register bookies that do not run. The znodes are persistent, because each session ends with its command."""

        async def work(store: MemoryStore) -> None:
            for bookie in bookies:
                await store.create(LAYOUT.bookie(BookieId(bookie), read_only=False), make_parents=True)
                if await store.exists(LAYOUT.cookie(BookieId(bookie))) is None:
                    await store.create(LAYOUT.cookie(BookieId(bookie)), b"cookie", make_parents=True)

        self.do(work)

    async def turn_read_only(self, bookie: str) -> None:
        """Make the bookie read-only, as a drained bookie does. One that is read-only or down stays so."""
        store = self.tree.connect()
        writable, read_only = (LAYOUT.bookie(BookieId(bookie), read_only=one) for one in (False, True))
        if await store.exists(writable) is not None:
            await store.create(read_only, make_parents=True)
            await store.delete(writable, version=None)

    def stop(self, bookie: str) -> None:
        self.do(lambda store: store.delete(LAYOUT.bookie(BookieId(bookie), read_only=False), version=None))

    def ledger(self, *ensemble: str, closed: bool = True, length: int = 2**20, **custom: bytes) -> LedgerId:
        metadata = LedgerMetadata(
            ensemble_size=len(ensemble),
            write_quorum=len(ensemble),
            ack_quorum=1,
            ctime_ms=self.now_ms,
            custom=custom,
            segments=(Segment(EntryId(0), tuple(map(BookieId, ensemble))),),
        )
        if closed:
            metadata = metadata.with_changes(state=LedgerState.CLOSED, last_entry_id=EntryId(9), length=length)

        async def work(store: MemoryStore) -> LedgerId:
            return (await LedgerManager(store, LAYOUT, randomness=random.Random(2)).create(metadata))[0]

        return self.do(work)

    def elect(self, *names: str) -> None:
        async def work(store: MemoryStore) -> None:
            for name in names:
                await store.create(
                    f"{LAYOUT.auditor_election}/V_",
                    replication_formats.encode_vote(name),
                    sequential=True,
                    make_parents=True,
                )

        self.do(work)

    async def _prepare(self, store: MemoryStore) -> None:
        await store.create(LAYOUT.available_readonly, make_parents=True)
        await store.create(LAYOUT.instance_id, b"00000000-0000-4000-8000-000000000000")
        await store.create(LAYOUT.layout, b"layout")

    @asynccontextmanager
    async def _connected(self, zookeeper: str, ledgers_root: str) -> AsyncIterator[Cluster]:
        assert ledgers_root == LAYOUT.root
        async with self._connected_store(zookeeper) as store:
            client: Any = MemoryClient(store, self.deleted)
            yield Cluster(store, LAYOUT, client)

    @asynccontextmanager
    async def _connected_store(self, zookeeper: str) -> AsyncIterator[MemoryStore]:
        store = self.tree.connect()
        try:
            yield store
        finally:
            await store.close()
