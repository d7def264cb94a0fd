"""Opening with recovery, deleting and creating ledgers while bookies are unavailable."""

import asyncio

import pytest
from bindery_core.errors import (
    BookieUnavailable,
    LedgerClosed,
    MetadataUnavailable,
    NoSuchLedger,
    NotEnoughBookies,
    TryAgain,
)
from bindery_core.formats.ledger_metadata import LedgerState, Segment
from bindery_core.ids import EntryId
from bindery_metadata.layout.layout import BinderyLayout, LedgersLayout
from bindery_metadata.ledgers.closing_records import ClosingCause, ClosingRecords
from fake_cluster import FakeCluster

LIMIT_S = 30.0


async def test_recovery_finds_entries_acknowledged_by_two_of_three_if_one_of_them_is_down() -> None:
    async with FakeCluster(bookies=3) as cluster:
        writer = await (await cluster.client()).create()
        first, second, _third = cluster.of(writer.metadata.last_segment.ensemble)
        await writer.add_many([b"%d" % i for i in range(10)])
        second.freeze()
        await writer.add_many([b"%d" % i for i in range(10, 20)])
        await writer.abandon()
        second.drop_held()
        await first.stop()
        reader = await (await cluster.client()).open(writer.ledger_id)
        assert reader.last_add_confirmed == 19
        entries = await reader.read(EntryId(0), EntryId(19))
        assert [entry.payload for entry in entries] == [b"%d" % i for i in range(20)]
        assert set(range(20)) <= second.ledgers[writer.ledger_id].entries.keys(), "recovery filled the hole"


async def test_recovery_replaces_failed_bookies_by_spares() -> None:
    async with FakeCluster(bookies=4) as cluster:
        writer = await (await cluster.client()).create()
        dead = cluster.of(writer.metadata.last_segment.ensemble)[0]
        await writer.add_many([b"%d" % i for i in range(10)])
        await writer.abandon()
        await dead.stop()
        reader = await (await cluster.client()).open(writer.ledger_id)
        assert reader.last_add_confirmed == 9
        assert [e.payload for e in await reader.read(EntryId(0), EntryId(9))] == [b"%d" % i for i in range(10)]


async def test_with_too_few_bookies_recovery_changes_nothing_and_can_be_repeated() -> None:
    async with FakeCluster(bookies=3) as cluster:
        writer = await (await cluster.client()).create()
        first, second, _third = cluster.of(writer.metadata.last_segment.ensemble)
        await writer.add_many([b"%d" % i for i in range(10)])
        await writer.abandon()
        await first.stop()
        await second.stop()
        client = await cluster.client()
        with pytest.raises(TryAgain):
            await asyncio.wait_for(client.open(writer.ledger_id), LIMIT_S)
        assert (await client.metadata(writer.ledger_id)).state is LedgerState.IN_RECOVERY
        await first.start()
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    reader = await client.open(writer.ledger_id)
                    break
                except TryAgain:
                    await asyncio.sleep(0.02)
        assert reader.last_add_confirmed == 9


async def test_responses_after_the_timeout_of_a_recovery_are_ignored() -> None:
    async with FakeCluster(bookies=3) as cluster:
        client = await cluster.client()
        writer = await client.create()
        await writer.add_many([b"x"] * 5)
        other = await cluster.client(recovery_timeout_s=0.2)
        bookies = cluster.of(writer.metadata.last_segment.ensemble)
        for bookie in bookies:
            bookie.freeze()
        with pytest.raises(TryAgain, match="recovery did not finish in time"):
            await other.open(writer.ledger_id)
        before = [dict(bookie.requests) for bookie in bookies]
        for bookie in bookies:
            bookie.thaw()
        await asyncio.sleep(0.1)
        assert [dict(bookie.requests) for bookie in bookies] == before
        assert (await client.metadata(writer.ledger_id)).state is LedgerState.IN_RECOVERY


@pytest.mark.parametrize("breaks", ["note", "close"])
async def test_recovery_adds_a_closing_record_before_it_closes_the_ledger(breaks: str) -> None:
    """A failure in between leaves the ledger open: no ledger is closed without its record."""
    async with FakeCluster(bookies=3) as cluster:
        writer = await (await cluster.client()).create()
        ledger_id = writer.ledger_id
        await writer.add_many([b"%d" % i for i in range(10)])
        await writer.abandon()
        notes, client = ClosingRecords(cluster.tree.connect()), await cluster.client()
        note, metadata = BinderyLayout().recovery_closing(ledger_id), LedgersLayout().ledger(ledger_id)
        changes = 0

        def is_it(what: str, path: str) -> bool:
            """Whether this operation fails. The first change of the znode begins the recovery, the second closes it."""
            nonlocal changes
            changes += what == "set" and path == metadata
            return path == note if breaks == "note" else path == metadata and changes == 2

        cluster.stores[client].fail_next(MetadataUnavailable("away"), matching=is_it)
        with pytest.raises(MetadataUnavailable):
            await client.open(ledger_id)
        assert (await client.metadata(ledger_id)).state is LedgerState.IN_RECOVERY
        assert await notes.ledger_ids() == ([] if breaks == "note" else [ledger_id])
        reader = await (await cluster.client()).open(ledger_id)
        assert (reader.is_closed, reader.last_add_confirmed) == (True, 9)
        found = await notes.get(ledger_id)
        assert found is not None
        assert found.cause is ClosingCause.RECOVERED


async def test_concurrent_recoveries_close_the_ledger_at_the_same_entry() -> None:
    async with FakeCluster(bookies=4) as cluster:
        writer = await (await cluster.client()).create()
        await writer.add_many([b"%d" % i for i in range(50)])
        clients = [await cluster.client() for _ in range(4)]
        readers = await asyncio.gather(*(client.open(writer.ledger_id) for client in clients))
        assert {reader.last_add_confirmed for reader in readers} == {49}
        assert {reader.metadata.length for reader in readers} == {90}


async def test_a_ledger_without_entries_is_recovered_although_no_bookie_has_it() -> None:
    async with FakeCluster(bookies=3) as cluster:
        writer = await (await cluster.client()).create()
        reader = await (await cluster.client()).open(writer.ledger_id)
        assert (reader.is_closed, reader.last_add_confirmed) == (True, -1)
        assert await ClosingRecords(cluster.tree.connect()).ledger_ids() == [], (
            "an empty ledger is not under-replicated"
        )


async def test_failed_and_silent_bookies_do_not_block_a_delete() -> None:
    async with FakeCluster(bookies=3) as cluster:
        client = await cluster.client(fence_timeout_s=0.1, read_timeout_s=300.0)
        writer = await client.create()
        await writer.add(b"0")
        first, second, third = cluster.of(writer.metadata.last_segment.ensemble)
        await first.stop()
        second.freeze()
        await asyncio.wait_for(client.delete(writer.ledger_id), LIMIT_S)
        with pytest.raises(NoSuchLedger):
            await client.metadata(writer.ledger_id)
        assert third.ledgers[writer.ledger_id].fenced


async def test_a_delete_also_fences_a_bookie_that_joined_the_ensemble_meanwhile() -> None:
    """Found by simulation: otherwise the writer continues to confirm entries of a deleted ledger there."""
    async with FakeCluster(bookies=4) as cluster:
        client = await cluster.client(fence_timeout_s=0.3)
        writer = await client.create()
        await writer.add(b"0")
        ensemble = writer.metadata.last_segment.ensemble
        first, _second, third = cluster.of(ensemble)
        third.freeze()  # the delete waits for its fence
        deletion = asyncio.create_task(client.delete(writer.ledger_id))
        async with asyncio.timeout(LIMIT_S):
            while not first.ledgers[writer.ledger_id].fenced:
                await asyncio.sleep(0.005)
        (newcomer,) = set(await client.list_bookies()) - set(ensemble)
        changed = Segment(EntryId(1), (*ensemble[:2], newcomer))
        await client._manager.update(
            writer.ledger_id, lambda metadata: metadata.with_changes(segments=(*metadata.segments, changed))
        )
        await asyncio.wait_for(deletion, LIMIT_S)
        with pytest.raises(NoSuchLedger):
            await client.metadata(writer.ledger_id)
        assert cluster.of((newcomer,))[0].ledgers[writer.ledger_id].fenced


async def test_not_enough_bookies_reports_the_request_the_bookies_and_the_reasons() -> None:
    async with FakeCluster(bookies=2) as cluster:
        await cluster.add_bookie("full", read_only=True)
        client = await cluster.client()
        with pytest.raises(NotEnoughBookies) as refused:
            await client.create(ensemble_size=3)
        assert str(refused.value.facts["asked"]).startswith("3")
        assert "full" in str(refused.value)
        assert "read-only" in str(refused.value)
        assert await client.list_bookies() == {"bookie-0": True, "bookie-1": True, "full": False}


async def test_a_failed_bookie_is_avoided_temporarily_and_named_in_the_error() -> None:
    async with FakeCluster(bookies=4) as cluster:
        client = await cluster.client()
        writer = await client.create()
        failed = cluster.of(writer.metadata.last_segment.ensemble)[0]
        await writer.add(b"0")
        await failed.stop()
        await writer.add(b"1")
        async with asyncio.timeout(LIMIT_S):
            while len(writer.metadata.segments) == 1 and failed.bookie_id in writer.metadata.last_segment.ensemble:
                await writer.add(b"more")
        for _ in range(10):
            assert failed.bookie_id not in (await client.create()).metadata.last_segment.ensemble
        with pytest.raises(NotEnoughBookies) as refused:
            await client.create(ensemble_size=4)
        assert failed.bookie_id in str(refused.value)
        assert "failed recently" in str(refused.value)


async def test_a_bookie_that_registered_again_is_used_again() -> None:
    async with FakeCluster(bookies=4) as cluster:
        client = await cluster.client()
        failed = cluster.bookies[next(iter(cluster.bookies))]
        client._pool.quarantine(failed.bookie_id, "test")
        assert failed.bookie_id in client._pool.quarantined()
        await cluster.unregister(failed)
        async with asyncio.timeout(LIMIT_S):
            while failed.bookie_id in await client.list_bookies():
                await asyncio.sleep(0.01)
            while failed.bookie_id in client._directory.bookies:
                await asyncio.sleep(0.01)
        await cluster.register(failed)
        async with asyncio.timeout(LIMIT_S):
            while failed.bookie_id in client._pool.quarantined():
                await asyncio.sleep(0.01)
        assert failed.bookie_id in (await client.create(ensemble_size=4)).metadata.last_segment.ensemble


async def test_a_bookie_that_was_restarted_is_found_again_when_it_is_needed() -> None:
    """The bookie kept its session, so the directory does not change, and its quarantine is long."""
    async with FakeCluster(bookies=3) as cluster:
        client = await cluster.client(quarantine_s=60.0, reconnect_pause_s=30.0, reconnect_pause_s_max=30.0)
        writer = await client.create()
        failed = cluster.of(writer.metadata.last_segment.ensemble)[0]
        await failed.stop()
        await writer.add(b"0")
        async with asyncio.timeout(LIMIT_S):
            while failed.bookie_id not in writer.degraded:
                await asyncio.sleep(0.01)
        with pytest.raises(NotEnoughBookies):
            await client.create()
        await failed.start()
        assert failed.bookie_id in (await client.create()).metadata.last_segment.ensemble


async def test_new_bookies_are_found_without_a_restart() -> None:
    async with FakeCluster(bookies=2) as cluster:
        client = await cluster.client()
        with pytest.raises(NotEnoughBookies):
            await client.create()
        await cluster.add_bookie("late")
        assert await (await client.create()).add(b"0") == 0


async def test_a_closed_client_refuses_requests_and_its_writers_have_ended() -> None:
    async with FakeCluster(bookies=3) as cluster:
        client = await cluster.client()
        writer = await client.create()
        for bookie in cluster.bookies.values():
            bookie.freeze()
        adding = asyncio.ensure_future(writer.add(b"0"))
        await asyncio.sleep(0.01)
        await client.close()
        with pytest.raises(LedgerClosed):
            await adding
        with pytest.raises(BookieUnavailable):
            await client.create()
        await client.close()
