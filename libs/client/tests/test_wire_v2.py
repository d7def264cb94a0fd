"""The client in wire version 2: which requests use it, batch reads, equal responses."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from bindery_client.connection.connection import BookieConnection
from bindery_core.digest import Digester
from bindery_core.entry import pack
from bindery_core.errors import BookieUnavailable
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.ids import BookieId, EntryId
from bindery_core.wire import v2
from bindery_core.wire.messages import AddRequest, ReadRequest, Status
from fake_bookie import FakeBookie
from fake_cluster import QUICK, FakeCluster
from ledger_client_contract import LedgerClientContract, MakeClient, payloads_of
from sink import Sink


class TestTheContractInVersion2(LedgerClientContract):
    @pytest.fixture
    async def make_client(self) -> AsyncIterator[MakeClient]:
        async with FakeCluster() as cluster:

            async def make():  # type: ignore[no-untyped-def]
                return await cluster.client(wire_version=2)

            yield make


async def test_adds_and_reads_use_version_2_and_all_other_requests_version_3() -> None:
    async with FakeCluster() as cluster:
        writer = await (await cluster.client(wire_version=2)).create(ensemble_size=4, write_quorum=3, ack_quorum=2)
        await writer.add_many([b"%d" % n for n in range(12)])
        await writer.read(EntryId(0), EntryId(11))
        reader = await (await cluster.client(wire_version=2)).open(writer.ledger_id)
        assert payloads_of(await reader.read(EntryId(0), EntryId(11))) == [b"%d" % n for n in range(12)]
        first = cluster.of(writer.metadata.last_segment.ensemble)[0]
        assert first.wire_versions["AddRequest"] == {2, 3}, "recovery adds go in 3"
        assert first.wire_versions["ReadRequest"] >= {3}, "fencing reads do too"
        assert all(
            versions == {3}
            for name, versions in first.wire_versions.items()
            if name not in ("AddRequest", "ReadRequest", "BatchReadRequest")
        )
        plain = await (await cluster.client(wire_version=2)).create()
        await plain.add(b"x")
        for bookie in cluster.of(plain.metadata.last_segment.ensemble):
            bookie.wire_versions.clear()
        await plain.add(b"y")
        await plain.read(EntryId(0), EntryId(0))
        seen = [bookie.wire_versions for bookie in cluster.of(plain.metadata.last_segment.ensemble)]
        assert {version for versions in seen for version in versions.get("AddRequest", set())} == {2}
        assert {version for versions in seen for version in versions.get("ReadRequest", set())} == {2}


async def test_a_range_is_read_in_batches_if_every_bookie_stores_every_entry() -> None:
    async with FakeCluster() as cluster:
        client = await cluster.client(wire_version=2)
        writer = await client.create()
        await writer.add_many([b"%d" % n for n in range(10)])
        assert payloads_of(await writer.read(EntryId(0), EntryId(9))) == [b"%d" % n for n in range(10)]
        bookies = cluster.of(writer.metadata.last_segment.ensemble)
        assert sum(bookie.requests["BatchReadRequest"] for bookie in bookies) >= 4, "three entries at a time"
        for bookie in bookies:  # a request that follows the last entry arrives before this one's
            await writer.read(EntryId(0), EntryId(9))
            assert all(count > 0 for _, count in bookie.batch_reads)


async def test_a_corrupt_entry_of_a_batch_is_read_from_another_bookie() -> None:
    async with FakeCluster() as cluster:
        client = await cluster.client(wire_version=2)
        writer = await client.create()
        await writer.add_many([b"%d" % n for n in range(10)])
        first, second, _ = cluster.of(writer.metadata.last_segment.ensemble)
        async with asyncio.timeout(30):
            while any(len(bookie.ledgers[writer.ledger_id].entries) < 10 for bookie in (first, second)):
                await asyncio.sleep(0.005)
        first.corrupt(writer.ledger_id, 4)
        del second.ledgers[writer.ledger_id].entries[5]
        assert payloads_of(await writer.read(EntryId(0), EntryId(9))) == [b"%d" % n for n in range(10)]


async def test_a_bookie_without_batch_reads_is_read_entry_by_entry_from_then_on() -> None:
    async with FakeCluster() as cluster:
        client = await cluster.client(wire_version=2)
        writer = await client.create()
        await writer.add_many([b"%d" % n for n in range(10)])
        for bookie in cluster.bookies.values():
            bookie.batch_count_max = 0
        for _ in range(3):
            assert payloads_of(await writer.read(EntryId(0), EntryId(9))) == [b"%d" % n for n in range(10)]
        refused = [bookie.batch_reads_refused for bookie in cluster.bookies.values()]
        assert max(refused) <= 1
        assert sum(refused) >= 1


async def test_batch_reads_can_be_turned_off() -> None:
    async with FakeCluster() as cluster:
        client = await cluster.client(wire_version=2, batch_reads=False)
        writer = await client.create()
        await writer.add_many([b"x"] * 10)
        await writer.read(EntryId(0), EntryId(9))
        assert all(not bookie.requests["BatchReadRequest"] for bookie in cluster.bookies.values())


async def test_a_failed_bookie_is_replaced_in_version_2_too() -> None:
    async with FakeCluster() as cluster:
        writer = await (await cluster.client(wire_version=2)).create()
        await writer.add(b"0")
        before = writer.metadata.last_segment.ensemble
        await cluster.bookies[before[0]].stop()
        for n in range(1, 20):
            await asyncio.wait_for(writer.add(b"%d" % n), 30)
        assert before[0] not in writer.metadata.last_segment.ensemble
        assert payloads_of(await writer.read(EntryId(0), EntryId(19))) == [b"%d" % n for n in range(20)]


# --- deferred sync ----------------------------------------------------------------------------------------------------


async def test_deferred_adds_carry_their_flag_and_the_last_forced_lac() -> None:
    async with FakeCluster() as cluster:
        writer = await (await cluster.client(wire_version=2)).create(deferred_sync=True)
        await writer.add(b"a")
        await writer.force()
        await writer.add(b"b")
        await writer.add(b"c")
        bookies = cluster.of(writer.metadata.last_segment.ensemble)
        async with asyncio.timeout(30):
            while any(len(bookie.ledgers[writer.ledger_id].entries) < 3 for bookie in bookies):
                await asyncio.sleep(0.001)
        for bookie in bookies:
            assert bookie.write_flags == {1}
            assert bookie.wire_versions["AddRequest"] == {3}, "version 2 has no such flag"
            lacs = [
                int.from_bytes(body[16:24], "big", signed=True)
                for body in bookie.ledgers[writer.ledger_id].entries.values()
            ]
            assert lacs == [-1, 0, 0]


async def test_a_force_that_one_bookie_refuses_confirms_nothing_and_may_be_repeated() -> None:
    from bindery_core.wire.messages import ForceLedgerRequest

    async with FakeCluster() as cluster:
        writer = await (await cluster.client()).create(deferred_sync=True)
        await writer.add(b"a")
        last = cluster.of(writer.metadata.last_segment.ensemble)[2]
        last.refuse(ForceLedgerRequest, Status.IO_ERROR)
        with pytest.raises(BookieUnavailable):
            await writer.force()
        assert writer.last_add_confirmed == -1
        last.refuse(ForceLedgerRequest, None)
        assert await writer.force() == 0


async def test_entries_listed_as_durable_are_forced_after_they_are_listed() -> None:
    from bindery_core.wire.messages import ForceLedgerRequest

    async with FakeCluster() as cluster:
        client = await cluster.client()
        writer = await client.create()
        await writer.add_many([b"a", b"b"])
        name = writer.metadata.last_segment.ensemble[0]
        bookie = cluster.bookies[name]
        assert await client.entries_on(writer.ledger_id, name) == [(0, 2)]
        assert not bookie.requests["ForceLedgerRequest"]
        assert await client.entries_on(writer.ledger_id, name, durable=True) == [(0, 2)]
        assert bookie.requests["ForceLedgerRequest"] == 1
        bookie.refuse(ForceLedgerRequest, Status.IO_ERROR)
        with pytest.raises(BookieUnavailable):
            await client.entries_on(writer.ledger_id, name, durable=True)


async def test_a_bookie_that_fails_breaks_a_ledger_with_deferred_sync() -> None:
    async with FakeCluster() as cluster:
        writer = await (await cluster.client()).create(deferred_sync=True)
        await writer.add(b"a")
        await writer.force()
        before = writer.metadata.last_segment.ensemble
        await cluster.bookies[before[1]].stop()

        async def go_on() -> None:
            for _ in range(3):
                await writer.add(b"b")

        with pytest.raises(BookieUnavailable, match="deferred sync"):
            await go_on()
        sealed = await writer.close()
        assert (sealed.last_entry_id, sealed.length) == (0, 1), "entries that were not forced are not confirmed"
        assert sealed.last_segment.ensemble == before


# --- free space -------------------------------------------------------------------------------------------------------


async def test_new_ledgers_prefer_bookies_that_reported_more_free_space() -> None:
    async with FakeCluster(bookies=4) as cluster:
        for number, bookie in enumerate(cluster.bookies.values()):
            bookie.free_disk_space = 1 if number == 0 else 10**12
        client = await cluster.client(bookie_info_interval_s=60.0)
        await client.create()
        async with asyncio.timeout(30):
            while len(client._pool.free_bytes) < 4:
                await asyncio.sleep(0.001)
        full = BookieId("bookie-0")
        for _ in range(20):
            writer = await client.create(ensemble_size=1, write_quorum=1, ack_quorum=1)
            assert writer.metadata.last_segment.ensemble != (full,)


# --- one connection ---------------------------------------------------------------------------------------------------

DIGESTER = Digester(DigestType.CRC32C)


def frame(entry_id: int) -> bytes:
    return pack(DIGESTER, ledger_id=7, entry_id=entry_id, lac=-1, length=1, payload=b"x")


@pytest.fixture
async def pair() -> AsyncIterator[tuple[BookieConnection, FakeBookie]]:
    bookie = FakeBookie("b")
    await bookie.start()

    async def resolve(_bookie_id: BookieId) -> tuple[str, int]:
        return "127.0.0.1", bookie.port

    connection = BookieConnection(BookieId("b"), resolve=resolve, settings=QUICK, wire_version=2)
    yield connection, bookie
    await connection.close()
    await bookie.close()


async def test_equal_requests_of_several_sinks_are_all_answered(pair: tuple[BookieConnection, FakeBookie]) -> None:
    connection, _bookie = pair
    add = AddRequest(2, 7, 0, DIGESTER.master_key, frame(0))
    read = ReadRequest(2, 7, 0)
    sinks = [Sink() for _ in range(5)]
    connection.send(v2.encode_request(add), [v2.key_of(add)], sinks[0], timeout_s=30)
    await sinks[0].news()
    for sink in sinks[1:4]:
        connection.send(v2.encode_request(read), [v2.key_of(read)], sink, timeout_s=30)
    connection.send(v2.encode_requests([read, read]), [v2.key_of(read)] * 2, sinks[4], timeout_s=30)
    assert connection.requests_in_flight == 5
    for sink in sinks[1:4]:
        await sink.all_answered(1)
    await sinks[4].all_answered(2)
    assert connection.requests_in_flight == connection.bytes_in_flight == 0


async def test_equal_requests_all_fail_or_expire(pair: tuple[BookieConnection, FakeBookie]) -> None:
    connection, bookie = pair
    read = ReadRequest(2, 7, 0)
    bookie.freeze()
    patient, hasty, lost = Sink(), Sink(), Sink()
    connection.send(v2.encode_request(read), [v2.key_of(read)], patient, timeout_s=30)
    connection.send(v2.encode_request(read), [v2.key_of(read)], hasty, timeout_s=0.05)
    await hasty.news()
    assert len(hasty.expiries) == 1
    await patient.news()  # no response arrived, so the connection was closed
    assert len(patient.errors) == 1
    connection.send(v2.encode_request(read), [v2.key_of(read)], lost, timeout_s=30)
    await asyncio.sleep(0.05)
    await bookie.stop()
    await lost.news()
    assert connection.requests_in_flight == connection.bytes_in_flight == 0
