"""LedgerClient: the contract with fake bookies, options, and the bookies that it considers."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
from bindery_client.client import LedgerClient as Client
from bindery_client.ledger.api import LedgerClient
from bindery_core.errors import NotEnoughBookies
from bindery_core.ids import BookieId, EntryId
from bindery_metadata.bookies.racks import RackStore
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


async def in_racks(cluster: FakeCluster, *racks: str) -> dict[BookieId, str]:
    """Write the racks of the bookies, in order, as bookies and operators do."""
    placed = dict(zip(cluster.bookies, racks, strict=True))
    for bookie_id, rack in placed.items():
        await RackStore(cluster.tree.connect()).set_rack(bookie_id, rack)
    return placed


async def test_new_ledgers_are_in_as_many_racks_as_there_are() -> None:
    """Goal: the record of racks reaches placement. Without it, an ensemble would often be in two racks."""
    async with FakeCluster(bookies=6) as cluster:
        racks = await in_racks(cluster, "/a", "/a", "/a", "/a", "/b", "/c")
        client = await cluster.client()
        assert client.racks() == racks
        for _ in range(20):
            ensemble = (await client.create()).metadata.last_segment.ensemble
            assert {racks[bookie_id] for bookie_id in ensemble} == {"/a", "/b", "/c"}


async def test_racks_are_followed() -> None:
    async with FakeCluster(bookies=3) as cluster:
        client = await cluster.client()
        assert set(client.racks().values()) == {"/default-rack"}
        racks = await in_racks(cluster, "/a", "/b", "/c")
        async with asyncio.timeout(30):
            while client.racks() != racks:
                await asyncio.sleep(0.01)


async def test_an_enforced_minimum_of_racks_refuses_a_new_ledger() -> None:
    async with FakeCluster(bookies=4) as cluster:
        await in_racks(cluster, "/a", "/a", "/a", "/a")
        preferring = await cluster.client()
        await preferring.create()
        client = await cluster.client(enforce_min_racks_per_write_quorum=True)
        with pytest.raises(NotEnoughBookies, match="not enough racks for a new ledger") as caught:
            await client.create()
        assert "/a:4" in str(caught.value)
        await cluster.add_bookie("late")
        await RackStore(cluster.tree.connect()).set_rack(next(reversed(cluster.bookies)), "/b")
        async with asyncio.timeout(30):
            while "/b" not in client.racks().values():
                await asyncio.sleep(0.01)
        await client.create()


async def test_a_replacement_respects_the_enforced_minimum_and_a_move_goes_to_another_rack() -> None:
    async with FakeCluster(bookies=4) as cluster:
        racks = await in_racks(cluster, "/a", "/a", "/b", "/a")
        one, two, three, four = cluster.bookies
        client = await cluster.client(enforce_min_racks_per_write_quorum=True)
        with pytest.raises(NotEnoughBookies, match="in the racks that are needed"):
            await client.choose_replacements((one, two, three), {2: three}, write_quorum=3)
        assert await client.choose_replacements((one, two, three), {1: two}, write_quorum=3) == {1: four}
        assert client.choose_move((one, two, four), write_quorum=3) is not None
        assert client.choose_move((one, two, three), write_quorum=3) is None
        move = client.choose_move((one, two, four), write_quorum=3, exclude={three: "draining"})
        assert move is None
        assert racks[three] == "/b"
