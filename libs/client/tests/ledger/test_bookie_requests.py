"""Requests to single bookies: lists of entries and disk spaces, also of bookies that do not answer."""

import asyncio

import pytest
from bindery_core.errors import BookieUnavailable
from fake_cluster import FakeCluster

LIMIT_S = 30.0


async def test_a_bookie_that_is_down_cannot_list_its_entries() -> None:
    async with FakeCluster(bookies=3) as cluster:
        client = await cluster.client()
        writer = await client.create()
        await writer.add(b"0")
        bookie = cluster.of(writer.metadata.last_segment.ensemble)[0]
        await bookie.stop()
        with pytest.raises(BookieUnavailable):
            await asyncio.wait_for(client.entries_on(writer.ledger_id, bookie.bookie_id), LIMIT_S)


async def test_disk_spaces_contain_the_bookies_that_respond() -> None:
    async with FakeCluster(bookies=3) as cluster:
        client = await cluster.client()
        first, second, silent = cluster.bookies.values()
        first.total_disk_space, first.free_disk_space = 100, 40
        second.total_disk_space, second.free_disk_space = 200, 0
        await silent.stop()
        spaces = await asyncio.wait_for(client.disk_spaces(), LIMIT_S)
        assert spaces == {first.bookie_id: (100, 40), second.bookie_id: (200, 0)}


async def test_only_the_disk_spaces_that_are_used_are_requested() -> None:
    """Bit 0 requests the total space, bit 1 the free space."""
    async with FakeCluster(bookies=3) as cluster:
        client = await cluster.client(bookie_info_interval_s=60.0)
        bookie = next(iter(cluster.bookies.values()))
        for each in cluster.bookies.values():
            each.total_disk_space, each.free_disk_space = 100, 40
        await client.create()
        async with asyncio.timeout(LIMIT_S):
            while len(client._pool.free_bytes) < 3:
                await asyncio.sleep(0.01)
        await client.create()  # within the interval: no further request
        await asyncio.wait_for(client.disk_spaces(), LIMIT_S)
        assert bookie.info_requested == [0b10, 0b11]


async def test_free_space_is_not_requested_without_an_interval() -> None:
    async with FakeCluster(bookies=3) as cluster:
        client = await cluster.client(bookie_info_interval_s=0.0)
        bookie = next(iter(cluster.bookies.values()))
        await client.create()
        await asyncio.wait_for(client.disk_spaces(), LIMIT_S)  # later requests on the same connection
        assert bookie.info_requested == [0b11]
