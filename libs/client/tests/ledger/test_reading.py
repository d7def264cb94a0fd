"""Reads of damaged, silent, dead and moved replicas."""

import asyncio

import pytest
from bindery_client.ledger.writer import WriteHandle
from bindery_core.errors import BookieUnavailable, DigestMismatch, NoSuchEntry, TryAgain
from bindery_core.formats.ledger_metadata import Segment
from bindery_core.ids import EntryId
from bindery_core.wire.messages import ReadRequest, Status
from fake_bookie import FakeBookie, Ledger
from fake_cluster import FakeCluster


async def written(cluster: FakeCluster, count: int = 9) -> tuple[WriteHandle, list[FakeBookie]]:
    """Return a closed ledger with copies on all three bookies."""
    writer = await (await cluster.client()).create()
    await writer.add_many([b"%d" % i for i in range(count)])
    await writer.close()
    return writer, cluster.of(writer.metadata.last_segment.ensemble)


NUMBERS = [b"%d" % i for i in range(9)]


async def read_all(cluster: FakeCluster, writer: WriteHandle) -> list[bytes]:
    reader = await (await cluster.client()).open(writer.ledger_id)
    return [entry.payload for entry in await reader.read(EntryId(0), EntryId(reader.last_add_confirmed))]


async def test_damaged_replicas_are_skipped() -> None:
    async with FakeCluster(bookies=3) as cluster:
        writer, (first, second, _third) = await written(cluster)
        for entry_id in range(9):
            first.corrupt(writer.ledger_id, entry_id)
        second.corrupt(writer.ledger_id, 4)
        assert await read_all(cluster, writer) == NUMBERS


async def test_an_entry_without_an_intact_replica_is_reported_as_damaged() -> None:
    async with FakeCluster(bookies=3) as cluster:
        writer, bookies = await written(cluster)
        for bookie in bookies[:2]:
            bookie.corrupt(writer.ledger_id, 4)
        del bookies[2].ledgers[writer.ledger_id].entries[4]
        with pytest.raises(DigestMismatch):
            await read_all(cluster, writer)


async def test_an_entry_is_absent_only_if_every_bookie_denies_it() -> None:
    async with FakeCluster(bookies=3) as cluster:
        writer, bookies = await written(cluster)
        for bookie in bookies[:2]:
            del bookie.ledgers[writer.ledger_id].entries[4]
        assert await read_all(cluster, writer) == NUMBERS
        await bookies[2].stop()
        with pytest.raises(BookieUnavailable):
            await read_all(cluster, writer)
        await bookies[2].start()
        del bookies[2].ledgers[writer.ledger_id].entries[4]
        with pytest.raises(NoSuchEntry):
            await read_all(cluster, writer)


async def test_an_unknown_ledger_state_is_not_a_denial() -> None:
    async with FakeCluster(bookies=3) as cluster:
        writer, bookies = await written(cluster)
        for bookie in bookies[:2]:
            del bookie.ledgers[writer.ledger_id].entries[4]
        bookies[2].refuse(ReadRequest, Status.UNKNOWN_LEDGER_STATE)
        with pytest.raises(TryAgain):
            await read_all(cluster, writer)


async def test_failed_bookies_are_skipped() -> None:
    async with FakeCluster(bookies=3) as cluster:
        writer, bookies = await written(cluster)
        await bookies[0].stop()
        await bookies[1].stop()
        assert await read_all(cluster, writer) == NUMBERS


async def test_a_speculative_read_replaces_a_silent_replica() -> None:
    async with FakeCluster(bookies=3) as cluster:
        writer, bookies = await written(cluster)
        reader = await (await cluster.client(read_timeout_s=300.0, speculative_read_s=0.05)).open(writer.ledger_id)
        bookies[0].freeze()
        entries = await asyncio.wait_for(reader.read(EntryId(0), EntryId(8)), 30)
        assert [entry.payload for entry in entries] == NUMBERS


async def test_reads_are_spread_over_the_replicas() -> None:
    async with FakeCluster(bookies=3) as cluster:
        writer, bookies = await written(cluster)
        assert await read_all(cluster, writer) == NUMBERS
        assert [bookie.requests["ReadRequest"] for bookie in bookies] == [3, 3, 3]


async def test_copies_that_moved_since_the_ledger_was_opened_are_found() -> None:
    """The bookies that the reader knows are stopped, and other bookies store the copies, as after re-replication."""
    async with FakeCluster(bookies=3) as cluster:
        writer, bookies = await written(cluster)
        client = await cluster.client()
        reader = await client.open(writer.ledger_id)
        newcomers = [await cluster.add_bookie(f"new-{i}") for i in range(3)]
        for old, new in zip(bookies, newcomers, strict=True):
            new.ledgers = old.ledgers
            await old.stop()
        ensemble = tuple(bookie.bookie_id for bookie in newcomers)
        await client._manager.update(
            writer.ledger_id, lambda m: m.with_changes(segments=(Segment(EntryId(0), ensemble),))
        )
        entries = await reader.read(EntryId(0), EntryId(8))
        assert [entry.payload for entry in entries] == NUMBERS


async def test_the_writer_reads_moved_copies_and_continues_to_write() -> None:
    async with FakeCluster(bookies=4) as cluster:
        client = await cluster.client()
        writer = await client.create()
        await writer.add_many([b"%d" % i for i in range(5)])
        old = writer.metadata.last_segment.ensemble
        await cluster.bookies[old[0]].stop()
        async with asyncio.timeout(30):
            while len((await client.metadata(writer.ledger_id)).segments) == 1:
                await writer.add(b"x")
        newcomers = [await cluster.add_bookie(f"new-{i}") for i in range(3)]
        copied = dict(cluster.of(old)[1].ledgers[writer.ledger_id].entries)
        moved = tuple(bookie.bookie_id for bookie in newcomers)
        await (await cluster.client())._manager.update(
            writer.ledger_id,
            lambda m: m.with_changes(segments=(Segment(EntryId(0), moved), *m.segments[1:])),
        )
        for bookie in cluster.of(old)[1:]:
            for entry_id in range(5):
                del bookie.ledgers[writer.ledger_id].entries[entry_id]
        for new in newcomers:
            new.ledgers[writer.ledger_id] = Ledger(b"")
            new.ledgers[writer.ledger_id].entries = copied
        assert [e.payload for e in await writer.read(EntryId(0), EntryId(4))] == NUMBERS[:5]
        await writer.add(b"more")
        assert (await writer.close()).segments[0].ensemble == moved


async def test_a_long_range_is_read_in_steps_that_fit_the_limits() -> None:
    async with FakeCluster(bookies=3) as cluster:
        writer = await (await cluster.client()).create()
        payloads = [bytes([i % 251]) * (i * 7 % 3000) for i in range(1000)]
        await writer.add_many(payloads)
        await writer.close()
        reader = await (await cluster.client(read_batch_bytes_max=64 * 1024)).open(writer.ledger_id)
        entries = await reader.read(EntryId(0), EntryId(999))
        assert [entry.payload for entry in entries] == payloads
        assert entries[-1].length == sum(map(len, payloads))


async def test_a_cancelled_read_leaves_the_handle_usable() -> None:
    async with FakeCluster(bookies=3) as cluster:
        writer, bookies = await written(cluster)
        reader = await (await cluster.client(speculative_read_s=0)).open(writer.ledger_id)
        for bookie in bookies:
            bookie.freeze()
        reading = asyncio.ensure_future(reader.read(EntryId(0), EntryId(8)))
        await asyncio.sleep(0.02)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        for bookie in bookies:
            bookie.thaw()
        assert [entry.payload for entry in await reader.read(EntryId(0), EntryId(8))] == NUMBERS
