"""The contract of `api.LedgerClient`: one suite, run on the in-memory client and on the real one.

A test class inherits `LedgerClientContract` and provides the fixture `make_client`: a coroutine function that returns
one more client of the same cluster (four writable bookies), closed by the fixture.
"""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from bindery_client.ledger.api import Entry, LedgerClient
from bindery_client.ledger.replica import ReplicaRead, Verdict
from bindery_core.errors import (
    BadRequest,
    BookieUnavailable,
    LedgerClosed,
    LedgerFenced,
    LostOwnership,
    NoSuchLedger,
    NotEnoughBookies,
    Unauthorized,
)
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.wire.messages import Status

MakeClient = Callable[[], Awaitable[LedgerClient]]
LIMIT_S = 30.0


def payloads_of(entries: list[Entry]) -> list[bytes]:
    return [entry.payload for entry in entries]


class LedgerClientContract:
    async def test_entries_are_read_back_in_order_with_ids_and_lengths(self, make_client: MakeClient) -> None:
        client = await make_client()
        writer = await client.create()
        assert await writer.add(b"zero") == 0
        assert await writer.add_many([b"one", b"", b"three"]) == 1
        assert (writer.last_add_confirmed, writer.last_add_pushed, writer.length) == (3, 3, 12)
        entries = await writer.read(EntryId(0), EntryId(3))
        assert entries == [(0, b"zero", 4), (1, b"one", 7), (2, b"", 7), (3, b"three", 12)]

    async def test_overlapping_adds_are_pipelined_and_complete_in_the_order_they_were_made(
        self, make_client: MakeClient
    ) -> None:
        client = await make_client()
        writer = await client.create(ensemble_size=4, write_quorum=3, ack_quorum=2)
        completed: list[int] = []

        async def add(number: int) -> None:
            first = await writer.add_many([b"%d.%d" % (number, i) for i in range(number % 5 + 1)])
            completed.append(number)
            assert (await writer.read(first, first))[0].payload == b"%d.0" % number

        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            for number in range(200):
                group.create_task(add(number))
        assert completed == list(range(200))
        entries = await writer.read(EntryId(0), EntryId(writer.last_add_confirmed))
        assert payloads_of(entries) == [b"%d.%d" % (n, i) for n in range(200) for i in range(n % 5 + 1)]

    async def test_a_closed_ledger_ends_at_its_last_entry_and_can_be_opened(self, make_client: MakeClient) -> None:
        client = await make_client()
        writer = await client.create(password=b"pw", custom={"k": b"v"})
        await writer.add_many([b"a", b"bc"])
        sealed = await writer.close()
        assert (sealed.state, sealed.last_entry_id, sealed.length) == (LedgerState.CLOSED, 1, 3)
        assert (await writer.close()).last_entry_id == 1
        assert writer.is_closed
        with pytest.raises(LedgerClosed):
            await writer.add(b"late")
        reader = await (await make_client()).open(writer.ledger_id, password=b"pw")
        assert reader.is_closed
        assert reader.last_add_confirmed == 1
        assert reader.metadata.custom == {"k": b"v"}
        assert payloads_of(await reader.read(EntryId(0), EntryId(1))) == [b"a", b"bc"]
        assert not await reader.wait_for_entry(EntryId(2), timeout_s=LIMIT_S)
        await reader.release()

    async def test_close_confirms_adds_that_are_in_flight(self, make_client: MakeClient) -> None:
        client = await make_client()
        writer = await client.create()
        adds = [asyncio.ensure_future(writer.add(b"%d" % i)) for i in range(50)]
        await asyncio.sleep(0)
        sealed = await writer.close()
        results = await asyncio.gather(*adds, return_exceptions=True)
        confirmed = [r for r in results if isinstance(r, int)]
        assert confirmed == list(range(len(confirmed)))
        assert sealed.last_entry_id == len(confirmed) - 1
        assert all(isinstance(r, LedgerClosed) for r in results[len(confirmed) :])

    async def test_an_empty_ledger_is_closed_without_entries(self, make_client: MakeClient) -> None:
        client = await make_client()
        writer = await client.create()
        sealed = await writer.close()
        assert (sealed.last_entry_id, sealed.length) == (-1, 0)
        reader = await client.open(writer.ledger_id)
        assert [batch async for batch in reader.tail(EntryId(0))] == []

    @pytest.mark.parametrize("digest_type", list(DigestType), ids=lambda d: d.name)
    async def test_entries_of_every_digest_type_are_read_back(
        self, make_client: MakeClient, digest_type: DigestType
    ) -> None:
        client = await make_client()
        writer = await client.create(digest_type=digest_type, password=b"secret")
        await writer.add_many([b"x" * 10, b"y" * 1000])
        await writer.close()
        reader = await client.open(writer.ledger_id, password=b"secret")
        assert payloads_of(await reader.read(EntryId(0), EntryId(1))) == [b"x" * 10, b"y" * 1000]

    async def test_single_entries_are_read_together_also_from_an_open_ledger(self, make_client: MakeClient) -> None:
        client = await make_client()
        writer = await client.create()
        await writer.add_many([b"%d" % number for number in range(700)])
        wanted = [0, 1, 7, 100, 101, 698]
        expected = [(number, b"%d" % number) for number in wanted]
        assert [entry[:2] for entry in await writer.read_some(wanted)] == expected
        await writer.close()
        reader = await client.open(writer.ledger_id)
        assert [entry[:2] for entry in await reader.read_some(wanted)] == expected
        assert payloads_of(await reader.read_some(range(0, 700, 1))) == [b"%d" % number for number in range(700)]
        for bad in ([], [-1, 2], [3, 700]):
            with pytest.raises(BadRequest):
                await reader.read_some(bad)

    async def test_ranges_outside_the_confirmed_entries_are_refused(self, make_client: MakeClient) -> None:
        client = await make_client()
        writer = await client.create()
        await writer.add_many([b"a", b"b"])
        for first, last in [(0, 2), (1, 0), (-1, 0)]:
            with pytest.raises(BadRequest):
                await writer.read(EntryId(first), EntryId(last))
        with pytest.raises(BadRequest):
            await writer.add_many([])

    async def test_entries_with_deferred_sync_are_acknowledged_first_and_readable_after_a_force(
        self, make_client: MakeClient
    ) -> None:
        client = await make_client()
        writer = await client.create(deferred_sync=True)
        assert await writer.add_many([b"a", b"bc"]) == 0
        assert await writer.add(b"def") == 2
        assert (writer.last_add_confirmed, writer.last_add_pushed) == (-1, 2)
        with pytest.raises(BadRequest):
            await writer.read(EntryId(0), EntryId(0))
        assert await writer.force() == writer.last_add_confirmed == 2
        assert payloads_of(await writer.read(EntryId(0), EntryId(2))) == [b"a", b"bc", b"def"]
        assert await writer.add(b"ghij") == 3
        assert writer.last_add_confirmed == 2
        sealed = await writer.close()
        assert (sealed.last_entry_id, sealed.length) == (3, 10), "closing forces what was acknowledged"
        reader = await (await make_client()).open(writer.ledger_id)
        assert payloads_of(await reader.read(EntryId(3), EntryId(3))) == [b"ghij"]

    async def test_forcing_an_ordinary_ledger_changes_nothing(self, make_client: MakeClient) -> None:
        client = await make_client()
        writer = await client.create()
        assert await writer.force() == -1
        await writer.add(b"a")
        assert await writer.force() == 0
        await writer.close()
        assert await writer.force() == 0

    async def test_a_bookie_lists_its_entries(self, make_client: MakeClient) -> None:
        client = await make_client()
        writer = await client.create(ensemble_size=4, write_quorum=3, ack_quorum=3)
        await writer.add_many([b"x"] * 8)
        ensemble = writer.metadata.last_segment.ensemble
        assert await client.entries_on(writer.ledger_id, ensemble[0]) == [(0, 1), (2, 3), (6, 2)]
        assert await client.entries_on(writer.ledger_id, ensemble[1]) == [(0, 2), (3, 3), (7, 1)]
        assert await client.entries_on(writer.ledger_id, ensemble[1], durable=True) == [(0, 2), (3, 3), (7, 1)]
        empty = await client.create(ensemble_size=1, write_quorum=1, ack_quorum=1)
        with pytest.raises(NoSuchLedger):
            await client.entries_on(empty.ledger_id, ensemble[0])

    async def test_recovery_fences_a_living_writer_and_keeps_every_acknowledged_entry(
        self, make_client: MakeClient
    ) -> None:
        writer = await (await make_client()).create()
        acknowledged: list[int] = []

        async def write_until_fenced() -> None:
            while True:
                acknowledged.append(await writer.add(b"%d" % len(acknowledged)))

        writing = asyncio.ensure_future(write_until_fenced())
        async with asyncio.timeout(LIMIT_S):
            while len(acknowledged) < 20:
                await asyncio.sleep(0)
        reader = await (await make_client()).open(writer.ledger_id)
        assert reader.is_closed
        with pytest.raises(LedgerFenced):
            async with asyncio.timeout(LIMIT_S):
                await writing
        with pytest.raises(LedgerFenced):
            await writer.add(b"after the fence")
        with pytest.raises(LostOwnership):
            await writer.close()
        assert reader.last_add_confirmed >= len(acknowledged) - 1
        entries = await reader.read(EntryId(0), EntryId(len(acknowledged) - 1))
        assert payloads_of(entries) == [b"%d" % i for i in range(len(acknowledged))]

    async def test_recovery_after_the_writers_death_keeps_every_acknowledged_entry(
        self, make_client: MakeClient
    ) -> None:
        writer = await (await make_client()).create(ensemble_size=4, write_quorum=3, ack_quorum=2)
        await writer.add_many([b"%d" % i for i in range(30)])
        in_flight = asyncio.ensure_future(writer.add(b"in flight"))
        await asyncio.sleep(0)
        await writer.abandon()
        await asyncio.gather(in_flight, return_exceptions=True)
        with pytest.raises(LedgerClosed):
            await writer.add(b"too late")
        reader = await (await make_client()).open(writer.ledger_id)
        assert reader.is_closed
        assert reader.last_add_confirmed in (29, 30)
        assert payloads_of(await reader.read(EntryId(0), EntryId(29))) == [b"%d" % i for i in range(30)]
        again = await (await make_client()).open(writer.ledger_id)
        assert again.last_add_confirmed == reader.last_add_confirmed
        assert again.metadata.length == reader.metadata.length

    async def test_recovery_closes_an_empty_ledger_without_entries(self, make_client: MakeClient) -> None:
        writer = await (await make_client()).create()
        reader = await (await make_client()).open(writer.ledger_id)
        assert reader.is_closed
        assert reader.last_add_confirmed == -1
        with pytest.raises(LedgerFenced):
            await writer.add(b"x")

    async def test_opening_without_recovery_does_not_fence(self, make_client: MakeClient) -> None:
        writer = await (await make_client()).create()
        await writer.add_many([b"a", b"b"])
        reader = await (await make_client()).open(writer.ledger_id, recover=False)
        assert not reader.is_closed
        assert await writer.add(b"c") == 2
        assert await reader.wait_for_entry(EntryId(2), timeout_s=LIMIT_S)
        assert await reader.read_last_confirmed() == 2
        assert payloads_of(await reader.read(EntryId(0), EntryId(2))) == [b"a", b"b", b"c"]
        await reader.release()

    async def test_a_waiting_reader_is_woken_by_an_add(self, make_client: MakeClient) -> None:
        writer = await (await make_client()).create()
        reader = await (await make_client()).open(writer.ledger_id, recover=False)
        waiting = asyncio.ensure_future(reader.wait_for_entry(EntryId(0), timeout_s=LIMIT_S))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await writer.add(b"wake up")
        assert await waiting
        assert reader.last_add_confirmed >= 0
        await reader.release()

    async def test_a_wait_ends_at_its_timeout_or_when_the_ledger_is_closed(self, make_client: MakeClient) -> None:
        writer = await (await make_client()).create()
        await writer.add(b"a")
        reader = await (await make_client()).open(writer.ledger_id, recover=False)
        assert not await reader.wait_for_entry(EntryId(1), timeout_s=0.05)
        waiting = asyncio.ensure_future(reader.wait_for_entry(EntryId(1), timeout_s=LIMIT_S))
        await asyncio.sleep(0.01)
        await writer.close()
        assert not await waiting
        assert reader.is_closed
        assert reader.last_add_confirmed == 0
        await reader.release()

    async def test_a_tail_follows_the_writer_and_ends_with_the_ledger(self, make_client: MakeClient) -> None:
        writer = await (await make_client()).create(ensemble_size=4, write_quorum=2, ack_quorum=2)
        reader = await (await make_client()).open(writer.ledger_id, recover=False)
        seen: list[Entry] = []

        async def follow() -> None:
            async for batch in reader.tail(EntryId(3)):
                assert batch
                seen.extend(batch)

        following = asyncio.ensure_future(follow())
        for i in range(20):
            await writer.add_many([b"%d.%d" % (i, j) for j in range(3)])
        await writer.close()
        await asyncio.wait_for(following, LIMIT_S)
        assert [entry.entry_id for entry in seen] == list(range(3, 60))
        assert payloads_of(seen) == [b"%d.%d" % (i, j) for i in range(1, 20) for j in range(3)]
        await reader.release()

    async def test_cancelling_the_caller_does_not_remove_its_entries(self, make_client: MakeClient) -> None:
        client = await make_client()
        writer = await client.create()
        cancelled = asyncio.ensure_future(writer.add_many([b"a", b"b"]))
        await asyncio.sleep(0)
        cancelled.cancel()
        assert await writer.add(b"c") == 2
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert payloads_of(await writer.read(EntryId(0), EntryId(2))) == [b"a", b"b", b"c"]

    async def test_a_wrong_password_is_refused(self, make_client: MakeClient) -> None:
        client = await make_client()
        writer = await client.create(password=b"right")
        await writer.add(b"a")
        with pytest.raises(Unauthorized):
            await client.open(writer.ledger_id, password=b"wrong")
        assert await writer.add(b"not fenced") == 1

    async def test_a_missing_ledger_raises_no_such_ledger(self, make_client: MakeClient) -> None:
        client = await make_client()
        with pytest.raises(NoSuchLedger):
            await client.open(LedgerId(123456))
        with pytest.raises(NoSuchLedger):
            await client.metadata(LedgerId(123456))
        await client.delete(LedgerId(123456))

    async def test_a_deleted_ledger_is_missing_and_its_writer_fenced(self, make_client: MakeClient) -> None:
        client = await make_client()
        kept, deleted = await client.create(), await client.create()
        await deleted.add(b"a")
        await client.delete(deleted.ledger_id)
        await client.delete(deleted.ledger_id)
        ledger_ids = [ledger_id async for ledger_id in client.list_ledgers()]
        assert ledger_ids == sorted(ledger_ids)
        assert kept.ledger_id in ledger_ids
        assert deleted.ledger_id not in ledger_ids
        with pytest.raises(NoSuchLedger):
            await client.metadata(deleted.ledger_id)
        with pytest.raises(LostOwnership):
            await deleted.add(b"b")

    async def test_impossible_quorums_are_refused(self, make_client: MakeClient) -> None:
        client = await make_client()
        for ensemble_size, write_quorum, ack_quorum in [(2, 3, 2), (3, 2, 3), (3, 3, 0), (0, 0, 0)]:
            with pytest.raises(BadRequest):
                await client.create(ensemble_size=ensemble_size, write_quorum=write_quorum, ack_quorum=ack_quorum)

    async def test_an_ensemble_larger_than_the_cluster_is_refused(self, make_client: MakeClient) -> None:
        client = await make_client()
        with pytest.raises(NotEnoughBookies):
            await client.create(ensemble_size=9)
        bookies = await client.list_bookies()
        assert len(bookies) == 4
        assert all(bookies.values())

    async def test_copies_are_stored_unchanged_on_a_bookie_without_them(self, make_client: MakeClient) -> None:
        client = await make_client()
        writer = await client.create(password=b"pw", digest_type=DigestType.MAC)
        await writer.add_many([b"one", b"", b"three"])
        metadata = await writer.close()
        ledger_id, ensemble = writer.ledger_id, metadata.last_segment.ensemble
        ids = [EntryId(0), EntryId(1), EntryId(2)]
        (spare,) = set(await client.list_bookies()) - set(ensemble)
        before = await client.read_replicas(ledger_id, metadata, spare, ids, lambda r: r.verdict)
        assert before == [Verdict.ABSENT] * 3
        originals = await client.read_replicas(ledger_id, metadata, ensemble[1], ids, _whole)
        frames = [replica.frame or b"" for replica in originals]
        for _again_is_harmless in range(2):
            assert await client.store_replicas(ledger_id, metadata, spare, frames[::-1]) == [Status.OK] * 3
        copies = await client.read_replicas(ledger_id, metadata, spare, ids, _whole)
        assert [copy.verdict for copy in copies] == [Verdict.GOOD] * 3
        assert [(copy.frame, copy.payload) for copy in copies] == [(r.frame, r.payload) for r in originals]
        assert await client.entries_on(ledger_id, spare) == [(0, 3)]
        with pytest.raises(BookieUnavailable):
            await client.store_replicas(ledger_id, metadata, BookieId("nowhere:3181"), frames)

    async def test_a_fenced_ledger_accepts_copies_unless_the_password_is_wrong(self, make_client: MakeClient) -> None:
        client = await make_client()
        writer = await client.create(password=b"pw")
        await writer.add(b"x")
        reader = await client.open(writer.ledger_id, password=b"pw")
        metadata, holder = reader.metadata, reader.metadata.last_segment.ensemble[0]
        (frame,) = await client.read_replicas(
            writer.ledger_id, metadata, holder, [EntryId(0)], lambda r: r.frame or b""
        )
        assert await client.store_replicas(writer.ledger_id, metadata, holder, [frame]) == [Status.OK]
        wrong = metadata.with_changes(password=b"wrong")
        assert await client.store_replicas(writer.ledger_id, wrong, holder, [frame]) == [Status.UNAUTHORIZED]

    async def test_replacements_are_neither_members_nor_excluded(self, make_client: MakeClient) -> None:
        client = await make_client()
        ensemble = (await client.create()).metadata.last_segment.ensemble
        (spare,) = set(await client.list_bookies()) - set(ensemble)
        failed = {1: ensemble[1]}
        assert await client.choose_replacements(ensemble, failed, write_quorum=3) == {1: spare}
        with pytest.raises(NotEnoughBookies, match="draining"):
            await client.choose_replacements(ensemble, failed, write_quorum=3, exclude={spare: "draining"})

    async def test_metadata_is_changed_by_a_function_that_may_return_none(self, make_client: MakeClient) -> None:
        client = await make_client()
        writer = await client.create()
        metadata = await writer.close()
        moved = (*metadata.last_segment.ensemble[:2], BookieId("another:3181"))

        def move(found: LedgerMetadata) -> LedgerMetadata | None:
            return (
                None
                if found.last_segment.ensemble == moved
                else found.with_changes(segments=(Segment(EntryId(0), moved),))
            )

        for _second_time_declined in range(2):
            assert (await client.update_metadata(writer.ledger_id, move)).last_segment.ensemble == moved
        assert (await client.metadata(writer.ledger_id)).last_segment.ensemble == moved
        with pytest.raises(NoSuchLedger):
            await client.update_metadata(LedgerId(123456), move)


def _whole(replica: ReplicaRead) -> ReplicaRead:
    return replica
