"""The writer: its window, its batches and its closing, with bookies that delay their answers."""

import asyncio

import pytest
from bindery_core.entry import PAYLOAD_SIZE_MAX
from bindery_core.errors import AddTimeout, BadRequest, LedgerClosed, LedgerFenced, TooLarge
from bindery_core.formats.ledger_metadata import LedgerState
from bindery_core.ids import EntryId
from fake_cluster import FakeCluster

LIMIT_S = 30.0


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0.005)


async def test_concurrent_adds_leave_as_one_batch_per_bookie() -> None:
    async with FakeCluster(bookies=3) as cluster:
        writer = await (await cluster.client()).create()
        await writer.add(b"connects")
        await asyncio.gather(*(writer.add(b"%d" % i) for i in range(200)))
        for bookie in cluster.bookies.values():
            assert bookie.add_batches == [1, 200]


async def test_entries_in_flight_are_limited_and_waiting_calls_keep_their_order() -> None:
    async with FakeCluster(bookies=3) as cluster:
        writer = await (await cluster.client(in_flight_entries_max=10, add_timeout_s=2.0)).create()
        for bookie in cluster.bookies.values():
            bookie.freeze()
        adds = [asyncio.ensure_future(writer.add_many([b"%d.%d" % (i, j) for j in range(4)])) for i in range(20)]
        await settle()
        assert writer.last_add_pushed == 7, "two calls of four fit into ten"
        for bookie in cluster.bookies.values():
            bookie.thaw()
        assert await asyncio.gather(*adds) == [4 * i for i in range(20)]
        entries = await writer.read(EntryId(0), EntryId(79))
        assert [e.payload for e in entries] == [b"%d.%d" % (i, j) for i in range(20) for j in range(4)]


async def test_bytes_in_flight_are_limited_over_all_ledgers_of_a_client() -> None:
    async with FakeCluster(bookies=3) as cluster:
        client = await cluster.client(in_flight_bytes_max=3000, client_bytes_max=5000, add_timeout_s=2.0)
        one, two = await client.create(), await client.create()
        for bookie in cluster.bookies.values():
            bookie.freeze()
        adds = [asyncio.ensure_future(w.add(b"x" * 1000)) for _ in range(6) for w in (one, two)]
        await settle()
        assert sorted([one.last_add_pushed, two.last_add_pushed]) == [1, 2], "five of a thousand bytes, three at most"
        assert client._budget.used == 5000
        for bookie in cluster.bookies.values():
            bookie.thaw()
        await asyncio.wait_for(asyncio.gather(*adds), LIMIT_S)
        assert client._budget.used == 0


async def test_a_call_larger_than_the_window_is_sent_alone() -> None:
    async with FakeCluster(bookies=3) as cluster:
        writer = await (await cluster.client(in_flight_entries_max=5)).create()
        results = await asyncio.gather(*(writer.add_many([b"x"] * 20) for _ in range(3)))
        assert results == [0, 20, 40]


async def test_a_call_cancelled_before_it_was_admitted_has_no_effect() -> None:
    async with FakeCluster(bookies=3) as cluster:
        writer = await (await cluster.client(in_flight_entries_max=1, add_timeout_s=2.0)).create()
        for bookie in cluster.bookies.values():
            bookie.freeze()
        first, second, third = (asyncio.ensure_future(writer.add(b"%d" % i)) for i in range(3))
        await settle()
        second.cancel()
        await settle()
        for bookie in cluster.bookies.values():
            bookie.thaw()
        assert (await first, await third) == (0, 1)
        assert [e.payload for e in await writer.read(EntryId(0), EntryId(1))] == [b"0", b"2"]


async def test_payloads_that_no_frame_can_hold_are_refused_and_the_handle_stays_usable() -> None:
    async with FakeCluster(bookies=3) as cluster:
        writer = await (await cluster.client()).create()
        with pytest.raises(TooLarge):
            await writer.add(bytes(PAYLOAD_SIZE_MAX + 1))
        with pytest.raises(BadRequest):
            await writer.add_many([])
        assert await writer.add(bytes(PAYLOAD_SIZE_MAX)) == 0
        assert len((await writer.read(EntryId(0), EntryId(0)))[0].payload) == PAYLOAD_SIZE_MAX


async def test_an_add_without_its_quorum_in_time_has_an_unknown_outcome() -> None:
    async with FakeCluster(bookies=3) as cluster:
        client = await cluster.client(add_timeout_s=0.3, add_quorum_timeout_s=0.3)
        writer = await client.create()
        await writer.add(b"0")
        for bookie in cluster.bookies.values():
            bookie.freeze()
        with pytest.raises(AddTimeout):
            await asyncio.wait_for(writer.add(b"1"), LIMIT_S)
        with pytest.raises(AddTimeout):
            await writer.add(b"2")
        sealed = await writer.close()
        assert (sealed.state, sealed.last_entry_id) == (LedgerState.CLOSED, 0)
        assert client._budget.used == 0


async def test_a_fenced_idle_writer_fails_at_the_next_add_and_its_close_does_not_overwrite() -> None:
    async with FakeCluster(bookies=3) as cluster:
        writer = await (await cluster.client()).create()
        await writer.add_many([b"a", b"b"])
        recovered = await (await cluster.client()).open(writer.ledger_id)
        assert recovered.last_add_confirmed == 1
        with pytest.raises(LedgerFenced):
            await writer.add(b"c")
        with pytest.raises(LedgerFenced):
            await writer.close()
        assert (await (await cluster.client()).metadata(writer.ledger_id)).last_entry_id == 1


async def test_close_seals_at_the_last_confirmed_entry_if_later_adds_fail() -> None:
    async with FakeCluster(bookies=3) as cluster:
        writer = await (await cluster.client(add_timeout_s=0.3, add_quorum_timeout_s=0.3)).create()
        await writer.add(b"0")
        for bookie in cluster.bookies.values():
            bookie.freeze()
        adding = asyncio.ensure_future(writer.add(b"1"))
        await settle()
        sealed = await asyncio.wait_for(writer.close(), LIMIT_S)
        assert sealed.last_entry_id == 0
        with pytest.raises(AddTimeout):
            await adding
        with pytest.raises(LedgerClosed):
            await writer.add(b"2")


async def test_a_cancelled_close_still_closes_the_ledger() -> None:
    async with FakeCluster(bookies=3) as cluster:
        client = await cluster.client()
        writer = await client.create()
        await writer.add(b"0")
        closing = asyncio.ensure_future(writer.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        assert (await writer.close()).last_entry_id == 0
        assert (await client.metadata(writer.ledger_id)).state is LedgerState.CLOSED


async def test_abandoning_leaves_the_ledger_open_and_releases_its_bytes() -> None:
    async with FakeCluster(bookies=3) as cluster:
        client = await cluster.client()
        writer = await client.create()
        for bookie in cluster.bookies.values():
            bookie.freeze()
        adds = [asyncio.ensure_future(writer.add(b"xyz")) for _ in range(3)]
        await settle()
        await writer.abandon()
        results = await asyncio.gather(*adds, return_exceptions=True)
        assert [type(result) for result in results] == [LedgerClosed] * 3
        with pytest.raises(LedgerClosed):
            await writer.close()
        assert client._budget.used == 0
        assert (await client.metadata(writer.ledger_id)).state is LedgerState.OPEN


async def test_a_waiting_close_fails_if_the_handle_is_abandoned() -> None:
    """The close raises an error of the ledger, not CancelledError, because its caller was not cancelled."""
    async with FakeCluster(bookies=3) as cluster:
        client = await cluster.client()
        writer = await client.create()
        await writer.add(b"x")
        cluster.tree.suspend(cluster.stores[client])
        closing = [asyncio.ensure_future(writer.close()) for _ in range(2)]
        await asyncio.sleep(0.1)
        closing[1].cancel()
        await writer.abandon()
        cluster.tree.resume(cluster.stores[client])
        with pytest.raises(LedgerClosed, match="abandoned"):
            await closing[0]
        with pytest.raises(asyncio.CancelledError):
            await closing[1]
        with pytest.raises(LedgerClosed, match="abandoned"):
            await writer.close()
