"""Readers that follow a writer."""

import asyncio

from bindery_client.ledger.api import Entry
from bindery_core.ids import EntryId
from fake_cluster import FakeCluster

LIMIT_S = 30.0


async def test_a_single_entry_is_readable_promptly_although_no_add_follows() -> None:
    """The next add would contain the LAC; without one, the explicit LAC confirms the entry."""
    async with FakeCluster(bookies=3) as cluster:
        writer = await (await cluster.client()).create()
        reader = await (await cluster.client(long_poll_s=300.0)).open(writer.ledger_id, recover=False)
        for number in range(5):
            await writer.add(b"%d" % number)
            assert await reader.wait_for_entry(EntryId(number), timeout_s=LIMIT_S)
            assert (await reader.read(EntryId(number), EntryId(number)))[0].payload == b"%d" % number


async def test_a_tail_continues_through_ensemble_changes_and_failures_of_bookies() -> None:
    async with FakeCluster(bookies=5) as cluster:
        writer = await (await cluster.client()).create()
        await writer.add(b"0")
        reader = await (await cluster.client()).open(writer.ledger_id, recover=False)
        seen: list[Entry] = []

        async def follow() -> None:
            async for batch in reader.tail(EntryId(0)):
                seen.extend(batch)

        following = asyncio.ensure_future(follow())
        number = 1
        for _ in range(2):
            for _ in range(20):
                await writer.add(b"%d" % number)
                number += 1
            await cluster.of(writer.metadata.last_segment.ensemble)[0].stop()
        for _ in range(20):
            await writer.add(b"%d" % number)
            number += 1
        async with asyncio.timeout(LIMIT_S):
            while len(seen) < number:
                await asyncio.sleep(0.01)
        await writer.close()
        await asyncio.wait_for(following, LIMIT_S)
        assert [entry.payload for entry in seen] == [b"%d" % i for i in range(number)]


async def test_there_is_one_long_poll_per_bookie_for_any_number_of_waiting_callers() -> None:
    async with FakeCluster(bookies=3) as cluster:
        writer = await (await cluster.client()).create()
        await writer.add(b"0")
        reader = await (await cluster.client(long_poll_s=30.0)).open(writer.ledger_id, recover=False)
        assert await reader.wait_for_entry(EntryId(0), timeout_s=LIMIT_S)
        waiting = [asyncio.ensure_future(reader.wait_for_entry(EntryId(1), timeout_s=LIMIT_S)) for _ in range(20)]
        await asyncio.sleep(0.05)
        assert all(len(b.ledgers[writer.ledger_id].polls) <= 1 for b in cluster.bookies.values())
        await writer.add(b"1")
        assert await asyncio.gather(*waiting) == [True] * 20


async def test_a_reader_without_waiting_callers_sends_no_long_poll() -> None:
    async with FakeCluster(bookies=3) as cluster:
        writer = await (await cluster.client()).create()
        await writer.add(b"0")
        reader = await (await cluster.client(long_poll_s=0.05)).open(writer.ledger_id, recover=False)
        assert not await reader.wait_for_entry(EntryId(1), timeout_s=0.02)
        await asyncio.sleep(0.1)
        polls = sum(bookie.requests["ReadRequest"] for bookie in cluster.bookies.values())
        await asyncio.sleep(0.2)
        assert sum(bookie.requests["ReadRequest"] for bookie in cluster.bookies.values()) == polls


async def test_waiting_ends_when_the_ledger_is_deleted_or_the_handle_released() -> None:
    async with FakeCluster(bookies=3) as cluster:
        client = await cluster.client()
        writer, kept = await client.create(), await client.create()
        reader = await client.open(writer.ledger_id, recover=False)
        other = await client.open(kept.ledger_id, recover=False)
        waiting = asyncio.ensure_future(reader.wait_for_entry(EntryId(0), timeout_s=10 * LIMIT_S))
        released = asyncio.ensure_future(other.wait_for_entry(EntryId(0), timeout_s=10 * LIMIT_S))
        await asyncio.sleep(0.02)
        await client.delete(writer.ledger_id)
        await other.release()
        assert not await asyncio.wait_for(waiting, LIMIT_S)
        assert not await asyncio.wait_for(released, LIMIT_S)


async def test_the_lac_never_decreases_if_bookies_lag_behind() -> None:
    async with FakeCluster(bookies=3) as cluster:
        writer = await (await cluster.client()).create()
        await writer.add_many([b"%d" % i for i in range(10)])
        reader = await (await cluster.client()).open(writer.ledger_id, recover=False)
        assert await reader.wait_for_entry(EntryId(9), timeout_s=LIMIT_S)
        for bookie in cluster.bookies.values():
            ledger = bookie.ledgers[writer.ledger_id]
            ledger.explicit_packet = None
            ledger.entries = {0: ledger.entries[0]}
        assert await reader.read_last_confirmed() == 9
        assert reader.last_add_confirmed == 9


async def test_a_bookie_is_polled_again_after_its_long_poll_failed() -> None:
    """The ensemble has one bookie, so only a new long poll to it can report the next entry."""
    async with FakeCluster(bookies=1) as cluster:
        writer = await (await cluster.client()).create(ensemble_size=1, write_quorum=1, ack_quorum=1)
        await writer.add(b"0")
        client = await cluster.client(long_poll_s=300.0)
        reader = await client.open(writer.ledger_id, recover=False)
        first = EntryId(reader.last_add_confirmed + 1)
        (bookie,) = cluster.bookies.values()
        waiting = asyncio.ensure_future(reader.wait_for_entry(EntryId(first + 1), timeout_s=LIMIT_S))
        async with asyncio.timeout(LIMIT_S):
            while not bookie.ledgers[writer.ledger_id].polls:
                await asyncio.sleep(0.01)
        client._pool.connection(bookie.bookie_id)._abort()
        while writer.last_add_confirmed < first + 1:
            await writer.add(b"more")
        assert await waiting
