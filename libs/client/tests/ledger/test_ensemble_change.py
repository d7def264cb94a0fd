"""Bookies that fail during writes are replaced by a spare, or left out while an ack quorum remains."""

import asyncio

import pytest
from bindery_client.client import LedgerClient
from bindery_client.connection import pool
from bindery_client.ledger.writer import WriteHandle
from bindery_core.errors import AddTimeout, MetadataUnavailable, NotEnoughBookies
from bindery_core.formats.ledger_metadata import LedgerState
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.wire.messages import AddRequest, Status
from bindery_metadata.layout.layout import BinderyLayout
from bindery_metadata.ledgers.closing_records import ClosingCause, ClosingRecords
from fake_cluster import FakeCluster

LIMIT_S = 30.0


async def all_readable(client: LedgerClient, ledger_id: LedgerId, count: int) -> bool:
    reader = await client.open(ledger_id)
    assert reader.last_add_confirmed >= count - 1
    entries = await reader.read(EntryId(0), EntryId(count - 1))
    return [entry.payload for entry in entries] == [b"%d" % i for i in range(count)]


async def add_numbers(writer: WriteHandle, first: int, end: int) -> None:
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        for number in range(first, end):
            group.create_task(writer.add(b"%d" % number))


async def test_a_failed_bookie_is_replaced_and_adds_continue() -> None:
    async with FakeCluster(bookies=4) as cluster:
        client = await cluster.client()
        writer = await client.create()
        await add_numbers(writer, 0, 50)
        before = writer.metadata.last_segment.ensemble
        spare = cluster.spare(before)
        adding = asyncio.ensure_future(add_numbers(writer, 50, 300))
        await asyncio.sleep(0)
        await cluster.bookies[before[1]].stop()
        await adding
        await add_numbers(writer, 300, 310)
        segments = (await client.metadata(writer.ledger_id)).segments
        assert [s.ensemble for s in segments] == [before, (before[0], spare.bookie_id, before[2])]
        assert 50 <= segments[1].first_entry_id <= 300
        assert await all_readable(await cluster.client(), writer.ledger_id, 310)
        later = range(segments[1].first_entry_id, 310)
        assert set(later) <= spare.ledgers[writer.ledger_id].entries.keys(), "the new member has every entry"


async def test_a_bookie_that_stops_answering_is_replaced_after_the_add_timeout() -> None:
    async with FakeCluster(bookies=4) as cluster:
        client = await cluster.client()
        writer = await client.create(ack_quorum=3)
        await add_numbers(writer, 0, 5)
        before = writer.metadata.last_segment.ensemble
        cluster.bookies[before[0]].freeze()
        await add_numbers(writer, 5, 20)
        assert before[0] not in writer.metadata.last_segment.ensemble
        assert await all_readable(await cluster.client(), writer.ledger_id, 20)


async def test_a_bookie_that_turned_read_only_is_replaced() -> None:
    async with FakeCluster(bookies=4) as cluster:
        client = await cluster.client()
        writer = await client.create(ack_quorum=3)
        await add_numbers(writer, 0, 5)
        before = writer.metadata.last_segment.ensemble
        cluster.bookies[before[2]].refuse(AddRequest, Status.READ_ONLY)
        await add_numbers(writer, 5, 20)
        assert before[2] not in writer.metadata.last_segment.ensemble
        assert await all_readable(await cluster.client(), writer.ledger_id, 20)


async def test_without_a_spare_adds_continue_with_an_ack_quorum_and_then_fail_with_the_reason() -> None:
    async with FakeCluster(bookies=3) as cluster:
        degraded: list[BookieId] = []
        client = await cluster.client()
        client._on_degraded = lambda _ledger_id, bookie_id, _reason: degraded.append(bookie_id)
        writer = await client.create()
        first, second, _third = cluster.of(writer.metadata.last_segment.ensemble)
        await add_numbers(writer, 0, 10)
        await first.stop()
        await add_numbers(writer, 10, 30)
        assert writer.degraded == {first.bookie_id}
        assert set(degraded) == {first.bookie_id}
        await second.stop()
        with pytest.raises(NotEnoughBookies) as error:
            async with asyncio.timeout(LIMIT_S):
                await writer.add(b"30")
        assert first.bookie_id in str(error.value) or "refused" in error.value.facts
        with pytest.raises(NotEnoughBookies):
            await writer.add(b"again")
        sealed = await writer.close()
        assert (sealed.state, sealed.last_entry_id) == (LedgerState.CLOSED, 29)
        assert await all_readable(await cluster.client(), writer.ledger_id, 30)


async def test_a_ledger_with_missing_copies_gets_a_closing_record_before_it_is_closed() -> None:
    async with FakeCluster(bookies=3) as cluster:
        client = await cluster.client(metadata_timeout_s=0.0)
        notes = ClosingRecords(cluster.tree.connect())
        writer = await client.create()
        await add_numbers(writer, 0, 10)
        await cluster.of(writer.metadata.last_segment.ensemble)[0].stop()
        await add_numbers(writer, 10, 30)
        assert writer.degraded
        note = BinderyLayout().recovery_closing(writer.ledger_id)
        cluster.stores[client].fail_next(MetadataUnavailable("away"), matching=lambda _, path: path == note)
        with pytest.raises(MetadataUnavailable):
            await writer.close()
        assert (await client.metadata(writer.ledger_id)).state is LedgerState.OPEN
        assert await notes.ledger_ids() == []
        assert (await writer.close()).state is LedgerState.CLOSED
        found = await notes.get(writer.ledger_id)
        assert found is not None
        assert found.cause is ClosingCause.DEGRADED


async def test_a_delete_removes_the_closing_record_also_if_another_client_deleted_the_ledger() -> None:
    async with FakeCluster(bookies=3) as cluster:
        client = await cluster.client()
        notes = ClosingRecords(cluster.tree.connect())
        writer = await client.create()
        await writer.close()
        for ledger_id in (writer.ledger_id, LedgerId(123456)):
            await notes.add(ledger_id, ClosingCause.RECOVERED)
            await client.delete(ledger_id)
            assert await notes.ledger_ids() == []


async def test_a_ledger_sealed_after_an_error_gets_a_closing_record_if_copies_were_in_flight() -> None:
    async with FakeCluster(bookies=4) as cluster:
        client = await cluster.client(metadata_timeout_s=0.0)
        notes = ClosingRecords(cluster.tree.connect())
        writer = await client.create()
        first, _, slow = cluster.of(writer.metadata.last_segment.ensemble)
        slow.freeze()
        await add_numbers(writer, 0, 10)
        cluster.stores[client].fail_next(MetadataUnavailable("away"))
        await first.stop()
        with pytest.raises(MetadataUnavailable):
            await writer.add(b"not to be had")
        assert not writer.degraded
        assert (await writer.close()).last_entry_id == 9
        found = await notes.get(writer.ledger_id)
        assert found is not None
        assert found.cause is ClosingCause.IN_FLIGHT


async def test_copies_that_are_missing_when_the_ledger_is_closed_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three responses suffice to confirm and to close. The third copy would stay missing without the report."""
    monkeypatch.setattr("bindery_client.ledger.writer.LAST_COPIES_S", 0.2)
    monkeypatch.setattr("bindery_client.ledger.writer.LAST_COPIES_GRACE_S", 1.0)
    async with FakeCluster(bookies=3) as cluster:
        told: list[tuple[int, BookieId]] = []
        client = await cluster.client()
        notes = ClosingRecords(cluster.tree.connect())
        client._on_degraded = lambda ledger_id, bookie_id, _reason: told.append((ledger_id, bookie_id))
        whole = await client.create()
        await add_numbers(whole, 0, 10)
        await whole.close()
        assert await notes.ledger_ids() == []
        writer = await client.create()
        slow = cluster.of(writer.metadata.last_segment.ensemble)[2]
        slow.freeze()
        await add_numbers(writer, 0, 10)
        await writer.close()
        found = await notes.get(writer.ledger_id)
        assert found is not None, "the process may die before it reports the bookie"
        assert found.cause is ClosingCause.IN_FLIGHT
        async with asyncio.timeout(LIMIT_S):
            while not told:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert told == [(writer.ledger_id, slow.bookie_id)]


async def test_a_bookie_that_was_left_out_is_used_again_after_its_restart() -> None:
    async with FakeCluster(bookies=3) as cluster:
        client = await cluster.client()
        writer = await client.create()
        first = cluster.of(writer.metadata.last_segment.ensemble)[0]
        await add_numbers(writer, 0, 5)
        await first.stop()
        await add_numbers(writer, 5, 10)
        await first.start()
        number = 10
        async with asyncio.timeout(LIMIT_S):
            while max(first.ledgers[writer.ledger_id].entries) < 10:
                await writer.add(b"%d" % number)
                number += 1
                await asyncio.sleep(0.02)
        assert await all_readable(await cluster.client(), writer.ledger_id, number)


@pytest.mark.parametrize("status", [Status.IO_ERROR, Status.TOO_MANY_REQUESTS])
async def test_two_bookies_that_refuse_do_not_replace_each_other_for_ever(status: Status) -> None:
    async with FakeCluster(bookies=4) as cluster:
        client = await cluster.client(replacement_retry_s=1.0)
        writer = await client.create()
        await add_numbers(writer, 0, 5)
        before = writer.metadata.last_segment.ensemble
        unwell = [cluster.bookies[before[2]], cluster.spare(before)]
        for bookie in unwell:
            bookie.refuse(AddRequest, status)
        async with asyncio.timeout(LIMIT_S):
            for number in range(5, 200):
                await writer.add(b"%d" % number)
                await asyncio.sleep(0.002)
        node = await cluster.tree.connect().get(cluster.layout.ledger(writer.ledger_id))
        assert node.stat.version <= 16, "each is taken back at once only the first time"
        assert len((await client.metadata(writer.ledger_id)).segments) <= 17
        for bookie in unwell:
            bookie.refuse(AddRequest, None)
        number = 200
        async with asyncio.timeout(LIMIT_S):
            while not any(
                number - 1 in bookie.ledgers[writer.ledger_id].entries
                for bookie in unwell
                if writer.ledger_id in bookie.ledgers
            ):
                await writer.add(b"%d" % number)
                number += 1
                await asyncio.sleep(0.02)
        assert await all_readable(await cluster.client(), writer.ledger_id, number)


async def test_if_every_copy_is_needed_the_writer_waits_for_bookies_that_failed_briefly() -> None:
    async with FakeCluster(bookies=4) as cluster:
        client = await cluster.client(replacement_retry_s=0.5)
        writer = await client.create(ack_quorum=3)
        await add_numbers(writer, 0, 5)
        before = writer.metadata.last_segment.ensemble
        unwell = [cluster.bookies[before[2]], cluster.spare(before)]
        for bookie in unwell:
            bookie.refuse(AddRequest, Status.TOO_MANY_REQUESTS)
        adding = asyncio.ensure_future(writer.add(b"5"))
        done, _ = await asyncio.wait([adding], timeout=0.3)
        assert not done
        for bookie in unwell:
            bookie.refuse(AddRequest, None)
        await asyncio.wait_for(adding, LIMIT_S)
        node = await cluster.tree.connect().get(cluster.layout.ledger(writer.ledger_id))
        assert node.stat.version <= 16
        assert await all_readable(await cluster.client(), writer.ledger_id, 6)


async def test_closing_a_broken_writer_ends_its_wait_for_a_bookie() -> None:
    async with FakeCluster(bookies=4) as cluster:
        client = await cluster.client(replacement_retry_s=60.0, add_timeout_s=0.3, add_quorum_timeout_s=0.3)
        writer = await client.create(ack_quorum=3)
        await add_numbers(writer, 0, 5)
        before = writer.metadata.last_segment.ensemble
        for bookie in (cluster.bookies[before[2]], cluster.spare(before)):
            bookie.refuse(AddRequest, Status.IO_ERROR)
        with pytest.raises(AddTimeout):
            await asyncio.wait_for(writer.add(b"5"), LIMIT_S)
        waiting = writer._ensemble_change
        assert waiting is not None
        assert (await asyncio.wait_for(writer.close(), LIMIT_S)).last_entry_id == 4
        await asyncio.wait([waiting], timeout=LIMIT_S / 10)
        assert waiting.done()


async def test_a_new_bookie_is_chosen_while_the_failed_ones_are_excluded() -> None:
    async with FakeCluster(bookies=4) as cluster:
        client = await cluster.client(replacement_retry_s=60.0, add_timeout_s=LIMIT_S, add_quorum_timeout_s=LIMIT_S)
        writer = await client.create(ack_quorum=3)
        await add_numbers(writer, 0, 5)
        before = writer.metadata.last_segment.ensemble
        for bookie in (cluster.bookies[before[2]], cluster.spare(before)):
            bookie.refuse(AddRequest, Status.IO_ERROR)
        adding = asyncio.ensure_future(writer.add(b"5"))
        done, _ = await asyncio.wait([adding], timeout=0.5)
        assert not done
        await cluster.add_bookie("newcomer")
        assert await asyncio.wait_for(adding, LIMIT_S) == 5


async def test_nothing_is_acknowledged_on_a_new_ensemble_before_it_is_in_the_metadata() -> None:
    async with FakeCluster(bookies=4) as cluster:
        client = await cluster.client(add_quorum_timeout_s=30.0, metadata_timeout_s=30.0)
        writer = await client.create(ack_quorum=3)
        await add_numbers(writer, 0, 5)
        dead = cluster.of(writer.metadata.last_segment.ensemble)[0]
        cluster.tree.suspend(cluster.stores[client])
        await dead.stop()
        adding = asyncio.ensure_future(add_numbers(writer, 5, 10))
        done, _ = await asyncio.wait([adding], timeout=0.5)
        assert not done
        assert writer.last_add_confirmed == 4
        cluster.tree.resume(cluster.stores[client])
        await asyncio.wait_for(adding, LIMIT_S)
        assert await all_readable(await cluster.client(), writer.ledger_id, 10)


async def test_adds_continue_if_the_session_ends_during_an_ensemble_change() -> None:
    async with FakeCluster(bookies=4) as cluster:
        client = await cluster.client()
        writer = await client.create()
        await add_numbers(writer, 0, 5)
        dead = cluster.of(writer.metadata.last_segment.ensemble)[0]
        store = cluster.stores[client]
        cluster.tree.suspend(store)
        await dead.stop()
        adding = asyncio.ensure_future(add_numbers(writer, 5, 50))
        await asyncio.sleep(0.05)
        cluster.tree.expire(store)
        cluster.tree.resume(store)
        await asyncio.wait_for(adding, LIMIT_S)
        assert dead.bookie_id not in (await client.metadata(writer.ledger_id)).last_segment.ensemble
        assert await all_readable(await cluster.client(), writer.ledger_id, 50)


@pytest.mark.parametrize("applied", [True, False], ids=["written", "not written"])
async def test_an_ensemble_change_with_a_lost_response_is_made_once(applied: bool) -> None:
    async with FakeCluster(bookies=4) as cluster:
        client = await cluster.client()
        writer = await client.create()
        await add_numbers(writer, 0, 5)
        dead = cluster.of(writer.metadata.last_segment.ensemble)[0]
        cluster.stores[client].lose_next_write(applied=applied, matching=lambda operation, _path: operation == "set")
        await dead.stop()
        await add_numbers(writer, 5, 50)
        assert len(writer.metadata.segments) == 2
        assert (await client.metadata(writer.ledger_id)).segments == writer.metadata.segments
        assert await all_readable(await cluster.client(), writer.ledger_id, 50)


async def test_a_change_whose_response_was_lost_is_adopted_even_if_its_new_bookie_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The response is lost in an outage, and afterwards there is no spare. A writer that then assumed that nothing had
    changed would confirm entries on an ensemble that is not the published one. The next failure of a bookie would lose
    these entries."""
    monkeypatch.setattr("bindery_client.ledger.metadata_changes.METADATA_PAUSE_S", 0.5)
    async with FakeCluster(bookies=4) as cluster:
        client = await cluster.client(replacement_retry_s=0.2, quarantine_s=0.2)
        writer = await client.create()
        await add_numbers(writer, 0, 10)
        before = writer.metadata.last_segment.ensemble
        first, second, third = cluster.of(before)
        spare = cluster.spare(before)
        store, path = cluster.stores[client], cluster.layout.ledger(writer.ledger_id)
        store.lose_next_write(applied=True, matching=lambda _operation, at: at == path)
        store.fail_next(MetadataUnavailable("outage"), matching=lambda operation, _path: operation == "sync")
        await second.stop()
        adding = asyncio.ensure_future(writer.add(b"10"))
        changed = (first.bookie_id, spare.bookie_id, third.bookie_id)
        other = await cluster.client()
        async with asyncio.timeout(LIMIT_S):
            while (await other.metadata(writer.ledger_id)).last_segment.ensemble != changed:
                await asyncio.sleep(0.01)
        await cluster.unregister(spare)
        await spare.stop()
        await asyncio.wait_for(adding, LIMIT_S)
        assert writer.metadata.last_segment.ensemble == changed
        assert writer.metadata.segments == (await other.metadata(writer.ledger_id)).segments
        await second.start()  # restarted, but no longer in the published ensemble
        await asyncio.sleep(0.5)
        third.freeze()
        try:
            number = await asyncio.wait_for(writer.add(b"11"), 1.0)
        except (TimeoutError, NotEnoughBookies):
            number = EntryId(10)  # not acknowledged, so it may be missing
        await writer.abandon()
        await first.stop()
        third.drop_held()
        await spare.start()
        await cluster.register(spare)
        reader = await (await cluster.client()).open(writer.ledger_id)
        assert reader.last_add_confirmed >= number


async def test_unavailable_metadata_breaks_only_the_handle() -> None:
    async with FakeCluster(bookies=4) as cluster:
        client = await cluster.client(metadata_timeout_s=0.2)
        writer = await client.create()
        await add_numbers(writer, 0, 5)
        dead = cluster.of(writer.metadata.last_segment.ensemble)[0]
        cluster.stores[client].fail_next(MetadataUnavailable("down"), matching=lambda operation, _: operation == "set")
        cluster.stores[client].fail_next(MetadataUnavailable("down"), matching=lambda operation, _: operation == "set")
        await dead.stop()
        with pytest.raises(MetadataUnavailable):
            await asyncio.wait_for(writer.add(b"5"), LIMIT_S)
        assert (await writer.close()).last_entry_id == 4
        assert await all_readable(client, writer.ledger_id, 5)


async def test_all_bookies_of_the_ensemble_can_be_replaced_one_after_the_other() -> None:
    async with FakeCluster(bookies=6) as cluster:
        client = await cluster.client()
        writer = await client.create()
        number = 0
        first_ensemble = writer.metadata.last_segment.ensemble
        for dead in cluster.of(first_ensemble):
            await add_numbers(writer, number, number + 20)
            number += 20
            await dead.stop()
        await add_numbers(writer, number, number + 20)
        assert not set(first_ensemble) & set(writer.metadata.last_segment.ensemble)
        for bookie in cluster.of(first_ensemble):
            await bookie.start()
        assert await all_readable(await cluster.client(), writer.ledger_id, number + 20)


async def gone_from(client: LedgerClient) -> None:
    async with asyncio.timeout(LIMIT_S):
        while client._directory.bookies:
            await asyncio.sleep(0.01)


async def test_adds_continue_if_all_bookies_lose_their_registrations() -> None:
    """This happens after a long ZooKeeper outage: the bookies serve throughout, and register again later."""
    async with FakeCluster(bookies=3) as cluster:
        client = await cluster.client()
        writer = await client.create()
        await add_numbers(writer, 0, 5)
        for bookie in cluster.bookies.values():
            await cluster.unregister(bookie)
        await gone_from(client)
        await add_numbers(writer, 5, 10)
        async with asyncio.timeout(LIMIT_S):  # for the third copies
            while any(len(bookie.ledgers[writer.ledger_id].entries) < 10 for bookie in cluster.bookies.values()):
                await asyncio.sleep(0.01)
        for bookie in cluster.bookies.values():
            await cluster.register(bookie)
        await add_numbers(writer, 10, 15)
        await writer.close()
        assert len(writer.metadata.segments) == 1
        assert await all_readable(await cluster.client(), writer.ledger_id, 15)


async def test_connections_to_bookies_that_stay_unregistered_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "ABSENT_TIME_S", 0.2)
    async with FakeCluster(bookies=3) as cluster:
        client = await cluster.client()
        writer = await client.create()
        await add_numbers(writer, 0, 5)
        left, back, _ = cluster.bookies.values()
        for bookie in (left, back):
            await cluster.unregister(bookie)
        async with asyncio.timeout(LIMIT_S):  # for the client to see both leave; `back` has a connection to lose then
            while len(client._pool.directory.bookies) > 1:
                await asyncio.sleep(0.01)
        await cluster.register(back)
        async with asyncio.timeout(LIMIT_S):
            while left.connections:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert back.connections
