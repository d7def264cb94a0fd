"""Workers repair marked ledgers in memory and on simulated time: every copy is counted and every replica checked."""

import asyncio

import pytest
from bindery_client.ledger.replica import Verdict
from bindery_core.errors import BookieUnavailable
from bindery_core.formats.ledger_metadata import Segment
from bindery_core.ids import EntryId
from bindery_metadata.bookies.membership import Intent
from bindery_metadata.recovery.recovery_records import Obstacle, Reason
from bindery_recovery.budget import MIB
from healing_world import NAMES, World, payloads, play


@pytest.mark.parametrize("quorums", [(3, 3, 2), (3, 2, 2), (4, 2, 2), (2, 2, 1), (5, 3, 2)])
def test_the_entries_of_a_lost_bookie_are_copied_to_a_spare(quorums: tuple[int, int, int]) -> None:
    async def scene(here: World) -> None:
        ensemble_size, write_quorum, ack_quorum = quorums
        writer = await here.write(
            500, ensemble_size=ensemble_size, write_quorum=write_quorum, ack_quorum=ack_quorum, size=2000
        )
        lost = writer.metadata.last_segment.ensemble[1]
        held = sum((1 - entry_id) % ensemble_size < write_quorum for entry_id in range(500))
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        healer = here.healer().start()
        await here.until_healed(writer.ledger_id)
        metadata = await here.assert_whole(writer.ledger_id, payloads(500, 2000))
        assert lost not in metadata.last_segment.ensemble
        assert healer.client.entries_stored == held, "entries of other bookies are not copied"
        assert healer.worker.stats.entries_copied == held
        assert (healer.worker.stats.ledgers_healed, healer.worker.stats.ledgers_without_need) == (1, 0)
        (event,) = await here.records.history()
        assert (event.kind, event.fields["entries"]) == ("healed", held)
        assert f"ledger {writer.ledger_id} is whole again: {held} copies" in event.text

    play(scene, bookies=6)


def test_an_empty_ledger_gets_another_bookie_and_no_copies() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(0)
        lost = writer.metadata.last_segment.ensemble[0]
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        healer = here.healer().start()
        await here.until_healed(writer.ledger_id)
        assert lost not in (await here.client.metadata(writer.ledger_id)).last_segment.ensemble
        assert healer.client.stored == []

    play(scene)


def test_two_lost_bookies_are_replaced_by_two_others() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(100)
        lost = writer.metadata.last_segment.ensemble[:2]
        for bookie_id in lost:
            here.lose(bookie_id)
        await here.mark(writer.ledger_id, *lost)
        here.healer().start()
        await here.until_healed(writer.ledger_id)
        metadata = await here.assert_whole(writer.ledger_id, payloads(100))
        assert set(lost).isdisjoint(metadata.last_segment.ensemble)

    play(scene, bookies=5)


def test_a_bookie_that_returns_before_the_copy_receives_no_copies() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(200)
        lost = writer.metadata.last_segment.ensemble[1]
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        here.ledgers.bookies[lost] = True
        healer = here.healer().start()
        await here.until_healed(writer.ledger_id)
        assert healer.client.stored == []
        assert healer.worker.stats.ledgers_without_need == 1
        assert lost in (await here.assert_whole(writer.ledger_id, payloads(200))).last_segment.ensemble

    play(scene)


def test_registrations_are_read_again_between_the_check_and_the_copy() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(200)
        lost = writer.metadata.last_segment.ensemble[1]
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        healer = here.healer()
        read_cluster = healer.read_cluster
        was_checked = False
        read = healer.client.read_replicas

        async def noted(*args: object, **kwargs: object) -> object:
            nonlocal was_checked
            was_checked = True
            return await read(*args, **kwargs)  # type: ignore[arg-type]

        async def back_after_the_check() -> object:
            if was_checked:
                here.ledgers.bookies[lost] = True
            return await read_cluster()

        healer.client.read_replicas = noted  # type: ignore[assignment, method-assign]
        healer.read_cluster = back_after_the_check  # type: ignore[assignment]
        healer.start()
        await here.until_healed(writer.ledger_id)
        assert lost in here.ledgers.bookies
        assert healer.client.stored == []

    play(scene)


def test_a_bookie_that_returns_during_a_long_copy_ends_it() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(2_000, size=10_000)
        lost = writer.metadata.last_segment.ensemble[1]
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        healer = here.healer(budget={"bytes_per_s_max": MIB, "bytes_per_s_min": MIB}).start()
        while healer.client.entries_stored < 300:
            await asyncio.sleep(0.1)
        here.ledgers.bookies[lost] = True
        await here.until_healed(writer.ledger_id)
        assert healer.client.entries_stored < 800
        assert lost in (await here.assert_whole(writer.ledger_id, payloads(2_000, 10_000))).last_segment.ensemble

    play(scene)


def test_a_hole_is_filled_in_place_and_nothing_else_is_copied() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(300)
        holder = writer.metadata.last_segment.ensemble[2]
        here.ledgers.find(writer.ledger_id).copies.lose(holder, 17, 18, 250)
        before = await here.client.metadata(writer.ledger_id)
        await here.mark(writer.ledger_id, holder, reason=Reason.REPORTED_BY_WRITER)
        healer = here.healer().start()
        await here.until_healed(writer.ledger_id)
        assert healer.client.stored == [(writer.ledger_id, holder, 3)]
        assert await here.assert_whole(writer.ledger_id, payloads(300)) == before

    play(scene, bookies=3)


def test_all_entries_are_read_from_a_bookie_that_lacks_the_first_and_the_last() -> None:
    async def scene(here: World) -> None:
        """The bookie lost its entries while it was absent. The default check reads only a sample of them."""
        writer = await here.write(300)
        emptied = writer.metadata.last_segment.ensemble[1]
        here.ledgers.find(writer.ledger_id).copies.lose(emptied)
        before = await here.client.metadata(writer.ledger_id)
        await here.mark(writer.ledger_id, emptied)
        healer = here.healer().start()
        await here.until_healed(writer.ledger_id)
        assert healer.client.entries_stored == 300
        assert await here.assert_whole(writer.ledger_id, payloads(300)) == before

    play(scene, bookies=3)


def test_a_bookie_that_lacks_a_first_entry_is_asked_for_every_entry() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(300)
        holder = writer.metadata.last_segment.ensemble[2]
        here.ledgers.find(writer.ledger_id).copies.lose(holder, 0, 17, 18)
        await here.mark(writer.ledger_id, holder)
        healer = here.healer().start()
        await here.until_healed(writer.ledger_id)
        assert healer.client.entries_stored == 3
        await here.assert_whole(writer.ledger_id, payloads(300))

    play(scene, bookies=3)


def test_a_hole_is_filled_although_a_failed_attempt_restored_the_first_entry() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(300)
        holder = writer.metadata.last_segment.ensemble[2]
        here.ledgers.find(writer.ledger_id).copies.lose(holder, 0, *range(100, 200))
        await here.mark(writer.ledger_id, holder)
        first = here.healer()

        def breaks() -> None:
            if first.client.stored:
                raise BookieUnavailable("gone for a moment", bookie_id=holder)

        first.client.before_store = breaks
        first.start()
        await here.until_record(writer.ledger_id, lambda record: record.obstacle is not Obstacle.NONE)
        await first.kill()
        second = here.healer().start()
        await here.until_healed(writer.ledger_id)
        assert second.client.stored
        await here.assert_whole(writer.ledger_id, payloads(300))

    play(scene, bookies=3)


def test_a_bookie_that_returns_empty_before_the_copy_receives_all_entries() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(200)
        lost = writer.metadata.last_segment.ensemble[1]
        here.lose(lost)
        here.ledgers.find(writer.ledger_id).copies.lose(lost)
        await here.mark(writer.ledger_id, lost)
        healer = here.healer()
        read = healer.read_cluster
        reads = 0

        async def back_after_the_check() -> object:
            nonlocal reads
            reads += 1
            if reads == 3:  # the worker's start, the check, the copy
                here.ledgers.bookies[lost] = True
            return await read()

        healer.read_cluster = back_after_the_check  # type: ignore[assignment]
        healer.start()
        await here.until_healed(writer.ledger_id)
        assert lost in (await here.assert_whole(writer.ledger_id, payloads(200))).last_segment.ensemble
        assert healer.client.entries_stored == 200

    play(scene, bookies=3)


@pytest.mark.parametrize("reason", [Reason.REPORTED_BY_WRITER, Reason.ENTRY_MISSING])
def test_a_corrupt_copy_is_replaced_from_a_good_one(reason: Reason) -> None:
    async def scene(here: World) -> None:
        writer = await here.write(50)
        ledger = here.ledgers.find(writer.ledger_id)
        holder = ledger.metadata.last_segment.ensemble[0]
        ledger.copies.damage(ledger.metadata, ledger.entries, holder, 20)
        await here.mark(writer.ledger_id, holder, reason=reason)
        healer = here.healer().start()
        await here.until_healed(writer.ledger_id)
        assert healer.client.stored == [(writer.ledger_id, holder, 1)]
        await here.assert_whole(writer.ledger_id, payloads(50))

    play(scene)


def test_a_corrupt_copy_is_not_a_source() -> None:
    async def scene(here: World) -> None:
        """The corruption was not known: the copy comes from the third bookie."""
        writer = await here.write(50)
        ledger = here.ledgers.find(writer.ledger_id)
        lost, corrupt, _ = ledger.metadata.last_segment.ensemble
        for entry_id in (10, 11, 30):
            ledger.copies.damage(ledger.metadata, ledger.entries, corrupt, entry_id)
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        here.healer().start()
        await here.until_healed(writer.ledger_id)
        metadata = await here.client.metadata(writer.ledger_id)
        spare = metadata.last_segment.ensemble[0]
        found = await here.client.read_replicas(
            writer.ledger_id, metadata, spare, [EntryId(n) for n in range(50)], lambda r: (r.verdict, r.payload)
        )
        assert found == [(Verdict.GOOD, payload) for payload in payloads(50)]

    play(scene)


def test_a_read_only_bookie_with_a_hole_is_replaced_and_serves_as_a_source() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(60)
        ensemble = writer.metadata.last_segment.ensemble
        here.ledgers.find(writer.ledger_id).copies.lose(ensemble[0], 0)
        for bookie_id in ensemble:
            here.ledgers.bookies[bookie_id] = False
        await here.mark(writer.ledger_id, ensemble[0])
        here.healer().start()
        await here.until_healed(writer.ledger_id)
        metadata = await here.assert_whole(writer.ledger_id, payloads(60))
        assert ensemble[0] not in metadata.last_segment.ensemble

    play(scene)


def test_a_draining_bookie_is_a_source_and_no_ledger_names_it_after_the_repair() -> None:
    async def scene(here: World) -> None:
        single = await here.write(80, ensemble_size=1, write_quorum=1, ack_quorum=1)
        (leaving,) = single.metadata.last_segment.ensemble
        others = [await here.write(40, ensemble_size=2, write_quorum=2, ack_quorum=1) for _ in range(6)]
        await here.memberships.set(leaving, Intent.DRAINING)
        here.ledgers.bookies[leaving] = False
        for writer in [single, *others]:
            await here.mark(writer.ledger_id, leaving, reason=Reason.BOOKIE_DRAINING)
        here.healer(workers=3).start()
        await here.until_healed(*(writer.ledger_id for writer in [single, *others]))
        for writer, count in [(single, 80), *((other, 40) for other in others)]:
            metadata = await here.assert_whole(writer.ledger_id, payloads(count))
            assert leaving not in metadata.last_segment.ensemble

    play(scene)


def test_a_deleted_ledger_loses_its_mark_and_its_record() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(10)
        await here.mark(writer.ledger_id, NAMES[0])
        await here.client.delete(writer.ledger_id)
        healer = here.healer().start()
        await here.until_healed(writer.ledger_id)
        assert healer.worker.stats.ledgers_deleted == 1

    play(scene)


def test_marks_without_a_record_or_without_a_replica_are_processed() -> None:
    async def scene(here: World) -> None:
        """Apache's auditor and shell keep no records; a placement repair names no replica."""
        lost, nothing_wrong = await here.write(10), await here.write(10)
        bookie_id = lost.metadata.last_segment.ensemble[0]
        here.lose(bookie_id)
        await here.marks.mark(lost.ledger_id, [bookie_id])
        for writer in (nothing_wrong,):
            metadata = await here.client.metadata(writer.ledger_id)
            if bookie_id in metadata.last_segment.ensemble:
                members = [b for b in here.ledgers.bookies if b != bookie_id][:3]
                ledger = here.ledgers.find(writer.ledger_id)
                frames = await here.client.read_replicas(
                    writer.ledger_id, metadata, members[0], [EntryId(n) for n in range(10)], lambda r: r.frame or b""
                )
                for member in members:
                    ledger.copies.store(member, [frame for frame in frames if frame])
                ledger.metadata = metadata.with_changes(segments=(Segment(EntryId(0), tuple(members)),))
        await here.marks.mark(nothing_wrong.ledger_id)
        here.healer().start()
        await here.until_healed(lost.ledger_id, nothing_wrong.ledger_id)
        await here.assert_whole(lost.ledger_id, payloads(10))

    play(scene)
