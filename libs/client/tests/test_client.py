"""LedgerClient: the contract with fake bookies, options, and the bookies that it considers."""

import random
from collections.abc import AsyncIterator

import pytest
from bindery_client.client import LedgerClient as Client
from bindery_client.ledger.api import LedgerClient
from bindery_core.ids import EntryId
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from fake_cluster import QUICK, FakeCluster
from ledger_client_contract import LedgerClientContract, MakeClient


class TestLedgerClient(LedgerClientContract):
    @pytest.fixture
    async def make_client(self) -> AsyncIterator[MakeClient]:
        async with FakeCluster(bookies=4) as cluster:

            async def make() -> LedgerClient:
                return await cluster.client()

            yield make


async def test_a_client_uses_the_layout_that_it_was_given() -> None:
    """Two clusters may share one ZooKeeper under different roots."""
    async with FakeCluster(bookies=0) as cluster:
        cluster.layout = LedgersLayout("/other/ledgers")
        await initialize_cluster(cluster.tree.connect(), cluster.layout, randomness=random.Random(1))
        for number in range(3):
            await cluster.add_bookie(f"bookie-{number}")
        store = cluster.tree.connect()
        client = await Client.connect(store, randomness=random.Random(7), layout=cluster.layout, settings=QUICK)
        try:
            writer = await client.create()
            assert await writer.add(b"0") == EntryId(0)
            assert [ledger_id async for ledger_id in client.list_ledgers()] == [writer.ledger_id]
        finally:
            await client.close()
        default = await Client.connect(store, randomness=random.Random(7), settings=QUICK)
        try:
            assert [ledger_id async for ledger_id in default.list_ledgers()] == []
            assert await default.list_bookies() == {}
        finally:
            await default.close()


async def test_replacements_include_a_bookie_that_registered_after_the_directory_was_read() -> None:
    """The directory is read again before the client gives up; this does not depend on its watch."""
    async with FakeCluster(bookies=3) as cluster:
        client = await cluster.client()
        ensemble = tuple(sorted(await client.list_bookies()))
        await client._directory.close()  # no watch from now on
        late = await cluster.add_bookie("late")
        assert await client.choose_replacements(ensemble, {0: ensemble[0]}, write_quorum=3) == {0: late.bookie_id}


async def test_a_new_ledger_includes_a_bookie_that_registered_after_the_directory_was_read() -> None:
    async with FakeCluster(bookies=2) as cluster:
        client = await cluster.client()
        await client._directory.close()  # no watch from now on
        late = await cluster.add_bookie("late")
        assert late.bookie_id in (await client.create()).metadata.last_segment.ensemble
