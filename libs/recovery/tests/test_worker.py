"""Workers heal marked ledgers: in memory, on simulated time, with every copy counted and every replica judged."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from bindery_client.ledger.replica import Verdict
from bindery_core.errors import BookieUnavailable, Corrupt, LedgerFenced, TryAgain
from bindery_core.formats.ledger_metadata import LedgerState, Segment
from bindery_core.ids import BookieId, EntryId
from bindery_core.wire.messages import Status
from bindery_metadata.bookies.membership import Intent
from bindery_metadata.recovery.recovery_records import Obstacle, Reason, RecoveryRecord, RecoveryState
from bindery_recovery.checks.bookie_audit import LedgerMarker
from healing_world import LAYOUT, NAMES, World, clock_ms, payloads, world
from simulated import simulate

Scene = Callable[[World], Awaitable[None]]


def play(scene: Scene, *, bookies: int = 4) -> None:
    """On simulated time."""

    async def run() -> None:
        names = [BookieId(f"bookie-{n}:3181") for n in range(bookies)]
        async with world(bookies=names) as here:
            await scene(here)

    simulate(run())


# --- copying ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quorums", [(3, 3, 2), (3, 2, 2), (4, 2, 2), (2, 2, 1), (5, 3, 2)])
def test_what_a_lost_bookie_held_is_on_a_spare_and_every_replica_is_right(quorums: tuple[int, int, int]) -> None:
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
        assert healer.client.entries_stored == held, "what others hold is not copied"
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


def test_two_lost_bookies_are_replaced_by_two_and_each_entry_is_read_once() -> None:
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


def test_a_bookie_that_is_back_before_the_copying_gets_nothing_copied() -> None:
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


def test_membership_is_asked_again_between_the_check_and_the_copy() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(200)
        lost = writer.metadata.last_segment.ensemble[1]
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        healer = here.healer()
        look = healer.look
        was_checked = False
        read = healer.client.read_replicas

        async def noted(*args: object, **kwargs: object) -> object:
            nonlocal was_checked
            was_checked = True
            return await read(*args, **kwargs)  # type: ignore[arg-type]

        async def back_after_the_check() -> object:
            if was_checked:
                here.ledgers.bookies[lost] = True
            return await look()

        healer.client.read_replicas = noted  # type: ignore[assignment, method-assign]
        healer.look = back_after_the_check  # type: ignore[assignment]
        healer.start()
        await here.until_healed(writer.ledger_id)
        assert lost in here.ledgers.bookies
        assert healer.client.stored == []

    play(scene)


def test_a_bookie_that_comes_back_during_a_long_copy_ends_it() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(2_000, size=10_000)
        lost = writer.metadata.last_segment.ensemble[1]
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        healer = here.healer(budget={"bytes_per_s_max": MIB_PER_S, "bytes_per_s_min": MIB_PER_S}).start()
        while healer.client.entries_stored < 300:
            await asyncio.sleep(0.1)
        here.ledgers.bookies[lost] = True
        await here.until_healed(writer.ledger_id)
        assert healer.client.entries_stored < 800
        assert lost in (await here.assert_whole(writer.ledger_id, payloads(2_000, 10_000))).last_segment.ensemble

    play(scene)


MIB_PER_S = 2**20


def test_a_hole_is_filled_where_it_is_and_nothing_else_is_copied() -> None:
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


def test_a_bookie_that_denies_first_and_last_is_asked_for_all_the_rest() -> None:
    async def scene(here: World) -> None:
        """It was emptied while it was away: what is looked at by default is only a sample of what it lacks."""
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


def test_who_lacks_a_first_entry_is_asked_for_every_entry() -> None:
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


def test_a_hole_whose_ends_were_filled_by_an_attempt_that_failed_is_not_forgotten() -> None:
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
        await here.until_said(writer.ledger_id, lambda record: record.obstacle is not Obstacle.NONE)
        await first.kill()
        second = here.healer().start()
        await here.until_healed(writer.ledger_id)
        assert second.client.stored
        await here.assert_whole(writer.ledger_id, payloads(300))

    play(scene, bookies=3)


def test_a_bookie_that_comes_back_empty_before_the_copy_gets_all_of_it() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(200)
        lost = writer.metadata.last_segment.ensemble[1]
        here.lose(lost)
        here.ledgers.find(writer.ledger_id).copies.lose(lost)
        await here.mark(writer.ledger_id, lost)
        healer = here.healer()
        look = healer.look
        looks = 0

        async def back_after_the_check() -> object:
            nonlocal looks
            looks += 1
            if looks == 3:  # the worker's start, the check, the copy
                here.ledgers.bookies[lost] = True
            return await look()

        healer.look = back_after_the_check  # type: ignore[assignment]
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


def test_a_corrupt_copy_is_not_copied_on() -> None:
    async def scene(here: World) -> None:
        """Nobody knew of it: the copy comes from the third bookie."""
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


def test_a_draining_bookie_is_a_source_and_then_holds_nothing_also_of_a_single_copy() -> None:
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


def test_a_mark_without_a_record_is_healed_and_one_that_says_nothing_too() -> None:
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


# --- what keeps a ledger from being healed ----------------------------------------------------------------------------


def test_without_a_spare_it_says_so_and_heals_when_one_joins() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(30)
        lost = writer.metadata.last_segment.ensemble[1]
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        healer = here.healer().start()
        record = await here.until_tried(writer.ledger_id)
        assert (record.state, record.obstacle) == (RecoveryState.BLOCKED, Obstacle.NO_SPARE)
        assert record.detail == (
            f"no bookie can take the place of {lost}: of 2 writable bookies none is free of this ledger;"
            f" add a bookie, or bring {lost} back"
        )
        assert (record.attempts, record.missing_entries, record.missing_bytes) == (1, 30, 300)
        assert record.next_retry_ms is not None
        again = await here.until_said(writer.ledger_id, lambda r: r.attempts >= 8, 3_000)
        assert again.next_retry_ms is not None
        assert 200_000 < again.next_retry_ms - clock_ms() <= 380_000, "the back-off has grown, and no further"
        joined_at = asyncio.get_running_loop().time()
        here.ledgers.bookies[BookieId("bookie-9:3181")] = True
        await here.until_healed(writer.ledger_id)
        assert asyncio.get_running_loop().time() - joined_at < 5, "it does not wait for its next turn"
        await here.assert_whole(writer.ledger_id, payloads(30))
        assert healer.worker.parked == 0

    play(scene, bookies=3)


def test_a_spare_that_joins_while_the_ledger_is_looked_at_is_not_overlooked() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(30)
        lost = writer.metadata.last_segment.ensemble[1]
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        await here.records.update(writer.ledger_id, lambda r: r.with_changes(attempts=7) if r else None)
        healer = here.healer()
        choose = healer.client.choose_replacements

        async def slowly(*args: object, **kwargs: object) -> object:
            try:
                return await choose(*args, **kwargs)  # type: ignore[arg-type]
            finally:
                here.ledgers.bookies[BookieId("bookie-9:3181")] = True
                await asyncio.sleep(10)

        healer.client.choose_replacements = slowly  # type: ignore[assignment, method-assign]
        healer.start()
        await here.until_healed(writer.ledger_id)
        assert asyncio.get_running_loop().time() < 25, "the back-off would be 5 min"
        await here.assert_whole(writer.ledger_id, payloads(30))

    play(scene, bookies=3)


def test_a_spare_that_is_read_only_or_leaving_is_none_and_is_named() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(30)
        ensemble = writer.metadata.last_segment.ensemble
        read_only, draining = (b for b in here.ledgers.bookies if b not in ensemble)
        here.ledgers.bookies[read_only] = False
        await here.memberships.set(draining, Intent.DRAINING)
        here.lose(ensemble[0])
        await here.mark(writer.ledger_id, ensemble[0])
        here.healer().start()
        record = await here.until_tried(writer.ledger_id)
        assert record.obstacle is Obstacle.NO_SPARE
        assert f"({read_only} is read-only; {draining} is draining)" in record.detail
        await here.memberships.clear(draining)
        await here.until_healed(writer.ledger_id)
        assert draining in (await here.assert_whole(writer.ledger_id, payloads(30))).last_segment.ensemble

    play(scene, bookies=5)


def test_who_is_away_for_maintenance_is_not_replaced_until_the_lease_ends() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(30)
        away = writer.metadata.last_segment.ensemble[0]
        here.lose(away)
        await here.memberships.set(away, Intent.MAINTENANCE, until_ms=clock_ms() + 300_000)
        await here.mark(writer.ledger_id, away)
        healer = here.healer().start()
        record = await here.until_tried(writer.ledger_id)
        assert (record.state, record.obstacle, record.attempts) == (RecoveryState.WAITING, Obstacle.NONE, 0)
        assert record.detail.startswith(f"{away} is away for maintenance for 5 min more")
        await asyncio.sleep(280)
        assert healer.client.stored == []
        await here.until_healed(writer.ledger_id)
        assert asyncio.get_running_loop().time() < 320
        await here.assert_whole(writer.ledger_id, payloads(30))

    play(scene)


def test_who_refills_its_own_storage_is_neither_replaced_nor_a_source() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(30)
        refilling = writer.metadata.last_segment.ensemble[0]
        copies = here.ledgers.find(writer.ledger_id).copies
        copies.lose(refilling)
        here.ledgers.read_answers[refilling] = Status.UNKNOWN_LEDGER_STATE
        await here.mark(writer.ledger_id, refilling)
        healer = here.healer().start()
        record = await here.until_tried(writer.ledger_id)
        assert (record.state, record.obstacle) == (RecoveryState.WAITING, Obstacle.NONE)
        assert record.detail == (
            f"{refilling} lost its storage and refills it from the other bookies: nothing is to be done"
        )
        await asyncio.sleep(100)
        assert healer.client.stored == []
        frames = await here.client.read_replicas(
            writer.ledger_id, writer.metadata, writer.metadata.last_segment.ensemble[1],
            [EntryId(n) for n in range(30)], lambda r: r.frame or b"",
        )  # fmt: skip
        copies.store(refilling, frames)  # it has healed itself
        del here.ledgers.read_answers[refilling]
        await here.until_healed(writer.ledger_id)
        assert healer.client.stored == []
        await here.assert_whole(writer.ledger_id, payloads(30))

    play(scene)


def test_what_only_a_refilling_bookie_may_have_is_not_lost() -> None:
    async def scene(here: World) -> None:
        await here.add_cookies(*NAMES)
        writer = await here.write(30, ensemble_size=2, write_quorum=2, ack_quorum=1)
        gone, refilling = writer.metadata.last_segment.ensemble
        here.lose(gone)
        await here.memberships.set(gone, Intent.REMOVED)
        here.ledgers.read_answers[refilling] = Status.UNKNOWN_LEDGER_STATE
        await here.mark(writer.ledger_id, gone)
        healer = here.healer().start()
        record = await here.until_tried(writer.ledger_id)
        assert (record.state, record.obstacle) == (RecoveryState.BLOCKED, Obstacle.SOURCE_IN_LIMBO)
        assert record.detail == (
            f"entry 0 cannot be read from any bookie: {refilling} is refilling its lost storage,"
            f" {gone} is gone for good"
        )
        assert healer.client.stored == []
        del here.ledgers.read_answers[refilling]
        await here.until_healed(writer.ledger_id)
        await here.assert_whole(writer.ledger_id, payloads(30))

    play(scene)


def test_a_single_copy_on_a_bookie_that_is_gone_is_unrecoverable_until_that_bookie_returns() -> None:
    async def scene(here: World) -> None:
        await here.add_cookies(*NAMES)
        writer = await here.write(30, ensemble_size=1, write_quorum=1, ack_quorum=1)
        (gone,) = writer.metadata.last_segment.ensemble
        here.lose(gone)
        await here.memberships.set(gone, Intent.REMOVED)
        await here.mark(writer.ledger_id, gone)
        healer = here.healer().start()
        record = await here.until_tried(writer.ledger_id)
        assert (record.state, record.obstacle) == (RecoveryState.UNRECOVERABLE, Obstacle.NO_COPY_LEFT)
        assert record.next_retry_ms is None
        assert record.detail == f"entry 0 cannot be read from any bookie: {gone} is gone for good"
        assert await here.is_marked(writer.ledger_id), "the mark is kept"
        assert await here.marks.locks() == {}, "and its lock released"
        (event,) = await here.records.history()
        assert event.kind == "unrecoverable"
        failed = healer.worker.stats.attempts_failed
        await asyncio.sleep(10_000)
        assert healer.worker.stats.attempts_failed == failed, "terminal: it is not tried again and again"
        await here.memberships.clear(gone)
        here.ledgers.bookies[gone] = True
        await here.until_healed(writer.ledger_id)
        assert healer.client.stored == []

    play(scene)


@pytest.mark.parametrize("is_at_work", [False, True], ids=["at rest", "while it is looked at"])
def test_a_ledger_that_cannot_be_healed_for_one_bookie_is_healed_for_another_that_is_lost_later(
    is_at_work: bool,
) -> None:
    async def scene(here: World) -> None:
        writer = await here.write(40, ensemble_size=4, write_quorum=2, ack_quorum=2)
        ledger = here.ledgers.find(writer.ledger_id)
        first, second, later, _ = ledger.metadata.last_segment.ensemble
        ledger.copies.lose(first, 0)
        ledger.copies.lose(second, 0)
        marker = LedgerMarker(here.marks, here.records, leadership=None, clock_ms=clock_ms)
        await here.mark(writer.ledger_id, first)
        healer = here.healer()

        async def lose_another() -> None:
            here.lose(later)
            await marker.mark(writer.ledger_id, [later], Reason.BOOKIE_LOST, missing_entries=20, missing_bytes=200)

        if is_at_work:
            outcome_of = healer.worker._not_healed

            async def just_before(*args: Any) -> None:
                healer.worker._not_healed = outcome_of  # type: ignore[method-assign]
                await lose_another()
                await outcome_of(*args)

            healer.worker._not_healed = just_before  # type: ignore[method-assign]
            healer.start()
        else:
            healer.start()
            await here.until_said(writer.ledger_id, lambda r: r.state is RecoveryState.UNRECOVERABLE)
            await lose_another()
        async with asyncio.timeout(60):
            while later in (await here.client.metadata(writer.ledger_id)).last_segment.ensemble:
                await asyncio.sleep(1)
        record = await here.until_said(writer.ledger_id, lambda r: r.state is RecoveryState.UNRECOVERABLE)
        assert record.bookies == tuple(sorted([first, later]))
        assert await here.is_marked(writer.ledger_id)
        stored, failed = healer.client.entries_stored, healer.worker.stats.attempts_failed
        await asyncio.sleep(10_000)
        assert (healer.client.entries_stored, healer.worker.stats.attempts_failed) == (stored, failed)

    play(scene, bookies=7)


def test_a_bookie_that_may_come_back_leaves_nothing_unrecoverable() -> None:
    async def scene(here: World) -> None:
        await here.add_cookies(*NAMES)
        writer = await here.write(30, ensemble_size=1, write_quorum=1, ack_quorum=1)
        (away,) = writer.metadata.last_segment.ensemble
        here.lose(away)
        await here.mark(writer.ledger_id, away)
        here.healer().start()
        record = await here.until_tried(writer.ledger_id)
        assert (record.state, record.obstacle) == (RecoveryState.BLOCKED, Obstacle.SOURCE_UNAVAILABLE)
        cookie = await here.cookies.read(away)
        assert cookie is not None
        await here.cookies.delete(away, version=cookie.version)
        record = await here.until_said(writer.ledger_id, lambda r: r.state is RecoveryState.UNRECOVERABLE)
        assert record.obstacle is Obstacle.NO_COPY_LEFT

    play(scene)


def test_a_fragment_with_a_hole_is_not_copied_up_to_there_again_and_again() -> None:
    async def scene(here: World) -> None:
        await here.add_cookies(*(BookieId(f"bookie-{n}:3181") for n in range(6)))
        writer = await here.write(500)
        ledger = here.ledgers.find(writer.ledger_id)
        ensemble = ledger.metadata.last_segment.ensemble
        (frame,) = await here.client.read_replicas(
            writer.ledger_id, ledger.metadata, ensemble[0], [EntryId(250)], lambda replica: replica.frame
        )
        assert frame is not None
        for bookie_id in ensemble:
            ledger.copies.lose(bookie_id, 250)
        lost = ensemble[2]
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        healer = here.healer(check_depth_percent=100).start()
        await here.until_tried(writer.ledger_id)
        stored = healer.client.entries_stored
        assert 0 < stored <= 250
        record = await here.until_said(writer.ledger_id, lambda r: r.attempts >= 5, 3_000)
        assert record.obstacle is Obstacle.SOURCE_UNAVAILABLE
        assert "entry 250 cannot be read from any bookie" in record.detail
        assert healer.client.entries_stored == stored
        metadata = await here.client.metadata(writer.ledger_id)
        assert metadata.last_segment.ensemble == ensemble, "who is lost may come back with the entry"
        ledger.copies.store(ensemble[0], [frame])
        healer.worker.retry_now()
        await here.until_healed(writer.ledger_id)
        await here.assert_whole(writer.ledger_id, payloads(500))

    play(scene, bookies=6)


def test_a_bookie_gets_back_what_there_is_though_an_entry_among_it_is_lost() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(100)
        ledger = here.ledgers.find(writer.ledger_id)
        holder, *others = ledger.metadata.last_segment.ensemble
        for entry_id in range(40, 60):
            ledger.copies.lose(holder, entry_id)
        for other in others:
            ledger.copies.lose(other, 45)
        await here.mark(writer.ledger_id, holder, reason=Reason.ENTRY_MISSING)
        healer = here.healer().start()
        record = await here.until_said(writer.ledger_id, lambda r: r.state is RecoveryState.UNRECOVERABLE)
        assert record.detail.startswith("entry 45 cannot be read from any bookie: ")
        assert {bookie_id for _, bookie_id, _ in healer.client.stored} == {holder}
        assert healer.client.entries_stored == 19
        assert record.missing_entries == 3
        assert await here.is_marked(writer.ledger_id)

    play(scene)


def test_copies_that_are_all_absent_or_corrupt_are_unrecoverable_and_an_error_is_not() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(10, ensemble_size=2, write_quorum=2, ack_quorum=2)
        ledger = here.ledgers.find(writer.ledger_id)
        first, second = ledger.metadata.last_segment.ensemble
        ledger.copies.lose(first, 9)
        ledger.copies.damage(ledger.metadata, ledger.entries, second, 9)
        here.ledgers.read_answers[first] = Status.IO_ERROR
        await here.mark(writer.ledger_id, second)
        healer = here.healer().start()
        record = await here.until_tried(writer.ledger_id)
        assert record.obstacle is Obstacle.SOURCE_UNAVAILABLE
        del here.ledgers.read_answers[first]
        record = await here.until_said(writer.ledger_id, lambda r: r.state is RecoveryState.UNRECOVERABLE)
        assert record.obstacle is Obstacle.NO_COPY_LEFT
        assert record.detail.startswith("entry 9 cannot be read from any bookie: ")
        assert healer.client.stored == []

    play(scene)


def test_a_bookie_that_cannot_say_is_asked_again_and_replaced_in_the_end() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(30)
        holder = writer.metadata.last_segment.ensemble[0]
        here.ledgers.read_answers[holder] = Status.IO_ERROR
        await here.mark(writer.ledger_id, holder)
        healer = here.healer().start()
        record = await here.until_tried(writer.ledger_id)
        assert (record.state, record.obstacle) == (RecoveryState.BACKING_OFF, Obstacle.ERROR)
        assert "IO_ERROR" in record.detail
        assert healer.client.stored == []
        await here.until_healed(writer.ledger_id)
        del here.ledgers.read_answers[holder]
        metadata = await here.assert_whole(writer.ledger_id, payloads(30))
        assert holder not in metadata.last_segment.ensemble

    play(scene)


def test_a_bookie_that_is_silent_once_is_not_replaced_for_what_failed_before() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(30)
        _, silent, lost = writer.metadata.last_segment.ensemble
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        healer = here.healer().start()
        await here.until_said(writer.ledger_id, lambda r: r.attempts >= 5, 3_000)  # for want of a spare
        here.ledgers.read_answers[silent] = Status.IO_ERROR
        here.ledgers.bookies[lost] = True
        here.ledgers.bookies[BookieId("bookie-9:3181")] = True
        record = await here.until_said(writer.ledger_id, lambda r: bool(r.unsure))
        assert record.unsure == ((silent, 1),)
        del here.ledgers.read_answers[silent]
        await here.until_healed(writer.ledger_id)
        metadata = await here.assert_whole(writer.ledger_id, payloads(30))
        assert metadata.last_segment.ensemble == writer.metadata.last_segment.ensemble
        assert healer.client.stored == []

    play(scene, bookies=3)


def test_a_target_that_refuses_is_passed_over_and_named_when_there_is_no_other() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(30)
        ensemble = writer.metadata.last_segment.ensemble
        refusing, other = (b for b in here.ledgers.bookies if b not in ensemble)
        here.lose(ensemble[0])
        here.ledgers.store_answers[refusing] = Status.READ_ONLY
        here.ledgers.store_answers[other] = Status.IO_ERROR
        await here.mark(writer.ledger_id, ensemble[0])
        healer = here.healer().start()
        record = await here.until_tried(writer.ledger_id)
        assert record.obstacle is Obstacle.NO_SPARE
        assert f"{refusing} did not accept copies of this ledger" in record.detail
        assert f"{other} did not accept copies of this ledger" in record.detail
        assert {b for _, b, _ in healer.client.stored} == {refusing, other}
        del here.ledgers.store_answers[other]
        await here.until_healed(writer.ledger_id)
        assert other in (await here.assert_whole(writer.ledger_id, payloads(30))).last_segment.ensemble

    play(scene, bookies=5)


def test_metadata_that_cannot_be_read_are_said_to_be_so() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(5)
        await here.mark(writer.ledger_id, NAMES[0])
        here.ledgers.fail_next("metadata", Corrupt("ledger metadata cannot be read", cause="half a line"))
        here.healer().start()
        record = await here.until_tried(writer.ledger_id)
        assert (record.state, record.obstacle) == (RecoveryState.BLOCKED, Obstacle.METADATA_UNREADABLE)
        assert "half a line" in record.detail
        await here.until_healed(writer.ledger_id)

    play(scene)


def test_nothing_is_taken_up_while_recovery_is_switched_off_and_a_long_copy_stops() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(2_000, size=10_000)
        lost = writer.metadata.last_segment.ensemble[1]
        here.lose(lost)
        await here.marks.disable()
        await here.mark(writer.ledger_id, lost)
        healer = here.healer(budget={"bytes_per_s_max": MIB_PER_S, "bytes_per_s_min": MIB_PER_S}).start()
        await asyncio.sleep(60)
        assert healer.client.stored == []
        assert healer.worker.report().state == "paused"
        await here.marks.enable()
        while healer.client.entries_stored < 200:
            await asyncio.sleep(0.1)
        await here.marks.disable()
        record = await here.until_said(writer.ledger_id, lambda r: r.obstacle is Obstacle.PAUSED)
        assert record.state is RecoveryState.WAITING
        stopped_at = healer.client.entries_stored
        assert stopped_at < 700
        await asyncio.sleep(60)
        assert healer.client.entries_stored == stopped_at
        await here.marks.enable()
        await here.until_healed(writer.ledger_id)
        await here.assert_whole(writer.ledger_id, payloads(2_000, 10_000))

    play(scene)


# --- open ledgers -----------------------------------------------------------------------------------------------------


def test_an_idle_open_ledger_is_recovered_after_the_grace_and_not_before() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(30, is_closed=False)
        lost = writer.metadata.last_segment.ensemble[2]
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        healer = here.healer(open_ledger_grace_s=30).start()
        record = await here.until_tried(writer.ledger_id)
        assert (record.state, record.obstacle) == (RecoveryState.WAITING, Obstacle.LEDGER_OPEN)
        assert record.detail == (
            f"ledger {writer.ledger_id} is open and its writer has 30 s more to replace {lost} itself: then it is"
            " closed and healed"
        )
        await asyncio.sleep(25)
        assert healer.client.opened == []
        await here.until_healed(writer.ledger_id)
        assert asyncio.get_running_loop().time() < 40
        assert healer.client.opened == [writer.ledger_id]
        assert healer.worker.stats.ledgers_fenced == 1
        metadata = await here.assert_whole(writer.ledger_id, payloads(30))
        assert metadata.state is LedgerState.CLOSED
        with pytest.raises(LedgerFenced):
            await writer.add(b"late")

    play(scene)


def test_a_writer_that_replaces_the_bookie_itself_is_not_fenced_and_its_closed_segment_is_healed() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(30, is_closed=False)
        ledger = here.ledgers.find(writer.ledger_id)
        first = ledger.metadata.last_segment.ensemble
        (spare,) = set(here.ledgers.bookies) - set(first)
        here.lose(first[0])
        here.ledgers.bookies[BookieId("bookie-9:3181")] = True
        await here.mark(writer.ledger_id, first[0])
        healer = here.healer(open_ledger_grace_s=30).start()
        await here.until_tried(writer.ledger_id)
        await asyncio.sleep(20)
        ledger.metadata = ledger.metadata.with_changes(
            segments=(*ledger.metadata.segments, Segment(EntryId(30), (spare, *first[1:])))
        )
        await here.until_healed(writer.ledger_id)
        assert healer.client.opened == []
        await writer.add_many([b"%010d" % n for n in range(30, 40)])
        await writer.close()
        metadata = await here.assert_whole(writer.ledger_id, payloads(40))
        assert len(metadata.segments) == 2
        assert healer.client.entries_stored == 30

    play(scene)


def test_a_second_loss_begins_the_grace_anew() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(30, is_closed=False)
        ledger = here.ledgers.find(writer.ledger_id)
        first = ledger.metadata.last_segment.ensemble
        (spare,) = set(here.ledgers.bookies) - set(first)
        for name in ("bookie-8:3181", "bookie-9:3181"):
            here.ledgers.bookies[BookieId(name)] = True
        here.lose(first[0])
        await here.mark(writer.ledger_id, first[0])
        healer = here.healer(open_ledger_grace_s=30).start()
        await here.until_tried(writer.ledger_id)
        await asyncio.sleep(25)
        here.lose(spare)
        ledger.metadata = ledger.metadata.with_changes(segments=(Segment(EntryId(0), (spare, *first[1:])),))
        await asyncio.sleep(25)
        assert healer.client.opened == [], "25 s of the new ensemble's 30 are over"
        async with asyncio.timeout(60):
            while not healer.client.opened:
                await asyncio.sleep(0.1)

    play(scene)


def test_an_open_ledger_is_not_fenced_where_no_spare_would_help() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(30, is_closed=False)
        lost = writer.metadata.last_segment.ensemble[2]
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        healer = here.healer(open_ledger_grace_s=30).start()
        record = await here.until_tried(writer.ledger_id)
        assert record.obstacle is Obstacle.NO_SPARE
        assert "it stays open and its writer goes on with the others" in record.detail
        await asyncio.sleep(1_000)
        assert healer.client.opened == []
        assert await writer.add(b"still alive") == 30

    play(scene, bookies=3)


def test_an_open_ledger_whose_writer_reported_a_hole_is_waited_for() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(30, is_closed=False)
        holder = writer.metadata.last_segment.ensemble[1]
        here.ledgers.find(writer.ledger_id).copies.lose(holder, 11, 12)
        await here.mark(writer.ledger_id, holder, reason=Reason.REPORTED_BY_WRITER)
        healer = here.healer().start()
        record = await here.until_tried(writer.ledger_id)
        assert (record.state, record.obstacle) == (RecoveryState.BLOCKED, Obstacle.LEDGER_OPEN)
        assert holder in record.detail
        await asyncio.sleep(300)
        assert healer.client.opened == []
        await writer.close()
        await here.until_healed(writer.ledger_id)
        assert healer.client.stored == [(writer.ledger_id, holder, 2)]
        await here.assert_whole(writer.ledger_id, payloads(30))

    play(scene)


def test_a_recovery_that_is_impossible_now_is_tried_again() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(30, is_closed=False)
        lost = writer.metadata.last_segment.ensemble[2]
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        here.ledgers.fail_next("open", TryAgain("too few bookies answered", answered=1), count=2)
        here.healer(open_ledger_grace_s=0).start()
        record = await here.until_tried(writer.ledger_id)
        assert (record.state, record.obstacle) == (RecoveryState.BLOCKED, Obstacle.RECOVERY_IMPOSSIBLE)
        assert "too few bookies answered: answered=1" in record.detail
        await here.until_healed(writer.ledger_id)
        await here.assert_whole(writer.ledger_id, payloads(30))

    play(scene)


# --- marks, locks and workers that die --------------------------------------------------------------------------------


def test_two_workers_heal_many_ledgers_and_copy_none_twice() -> None:
    async def scene(here: World) -> None:
        writers = [await here.write(40) for _ in range(30)]
        lost = NAMES[1]
        here.lose(lost)
        concerned = [w.ledger_id for w in writers if lost in w.metadata.last_segment.ensemble]
        healers = [here.healer(workers=2), here.healer(workers=2)]
        for healer in healers:

            async def take_a_while() -> None:
                await asyncio.sleep(0.5)

            healer.client.before_store = take_a_while
            healer.start()
        for ledger_id in concerned:
            await here.mark(ledger_id, lost)
        await here.until_healed(*concerned)
        stored = [one for healer in healers for one in healer.client.stored]
        per_ledger = {
            ledger_id: sum(count for stored_id, _, count in stored if stored_id == ledger_id) for ledger_id in concerned
        }
        assert per_ledger == dict.fromkeys(concerned, 40)
        assert all(healer.worker.stats.ledgers_healed for healer in healers), "both took part"
        assert await here.marks.locks() == {}

    play(scene, bookies=5)


def test_a_ledger_that_is_marked_again_during_its_repair_stays_marked() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(50)
        ledger = here.ledgers.find(writer.ledger_id)
        first, second, _ = ledger.metadata.last_segment.ensemble
        here.lose(first)
        await here.mark(writer.ledger_id, first)
        healer = here.healer()
        marked_again = False

        async def once_more() -> None:
            nonlocal marked_again
            if not marked_again:
                marked_again = True
                ledger.copies.lose(second, 25)  # the check that follows looks at first and last entries only
                await here.mark(writer.ledger_id, second, reason=Reason.ENTRY_MISSING)
            else:
                await asyncio.sleep(1)

        healer.client.before_store = once_more
        healer.start()
        while not healer.worker.stats.locks_lost:
            await asyncio.sleep(0.01)
        assert await here.is_marked(writer.ledger_id)
        await here.until_healed(writer.ledger_id)
        await here.assert_whole(writer.ledger_id, payloads(50))
        assert (writer.ledger_id, second, 1) in healer.client.stored

    play(scene)


def test_a_worker_killed_in_the_middle_is_followed_by_another_that_completes() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(2_000, size=10_000)
        lost = writer.metadata.last_segment.ensemble[1]
        before = await here.client.metadata(writer.ledger_id)
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        slow = {"bytes_per_s_max": MIB_PER_S, "bytes_per_s_min": MIB_PER_S}
        first = here.healer("first", budget=slow).start()
        record = await here.until_said(writer.ledger_id, lambda r: r.state is RecoveryState.COPYING)
        assert record.worker == "first"
        while first.client.entries_stored < 500:
            await asyncio.sleep(0.1)
        record = await here.until_said(writer.ledger_id, lambda r: (r.missing_entries or 0) < 2_000)
        assert record.missing_bytes is not None
        assert record.missing_bytes < 2_000 * 10_000
        await first.kill()
        assert await here.client.metadata(writer.ledger_id) == before, "nothing points to half of a copy"
        assert await here.is_marked(writer.ledger_id)
        here.healer("second").start()
        await here.until_healed(writer.ledger_id)
        await here.assert_whole(writer.ledger_id, payloads(2_000, 10_000))

    play(scene)


def test_a_worker_that_is_stopped_releases_its_locks_at_once() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(2_000, size=10_000)
        lost = writer.metadata.last_segment.ensemble[1]
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        healer = here.healer(budget={"bytes_per_s_max": MIB_PER_S, "bytes_per_s_min": MIB_PER_S}).start()
        while not healer.client.stored:
            await asyncio.sleep(0.1)
        assert await here.marks.locks() == {writer.ledger_id: "worker-0"}
        await healer._end()
        assert await here.marks.locks() == {}

    play(scene)


def test_a_lost_session_keeps_the_mark_and_another_attempt_removes_it() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(50)
        lost = writer.metadata.last_segment.ensemble[1]
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        healer = here.healer()
        expired = False

        async def expire() -> None:
            nonlocal expired
            if not expired:
                expired = True
                here.tree.expire(healer.store)

        healer.client.before_store = expire
        healer.start()
        await here.until_healed(writer.ledger_id)
        assert expired
        assert healer.worker.stats.locks_lost == 1
        await here.assert_whole(writer.ledger_id, payloads(50))
        assert healer.client.entries_stored == 50, "the copies made before count"

    play(scene)


def test_a_worker_rides_out_an_outage_of_the_metadata() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(50)
        lost = writer.metadata.last_segment.ensemble[1]
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        healer = here.healer()
        here.tree.suspend(healer.store)
        healer.start()
        await asyncio.sleep(30)
        assert await here.is_marked(writer.ledger_id)
        here.tree.resume(healer.store)
        await here.until_healed(writer.ledger_id)
        await here.assert_whole(writer.ledger_id, payloads(50))

    play(scene)


def test_an_operator_who_asks_again_is_heard_and_a_new_worker_tries_the_hopeless_once() -> None:
    async def scene(here: World) -> None:
        await here.add_cookies(*NAMES[1:])
        writer = await here.write(30, ensemble_size=1, write_quorum=1, ack_quorum=1)
        (gone,) = writer.metadata.last_segment.ensemble
        assert gone == NAMES[0]
        here.lose(gone)
        await here.mark(writer.ledger_id, gone)
        healer = here.healer().start()
        await here.until_said(writer.ledger_id, lambda r: r.state is RecoveryState.UNRECOVERABLE)
        assert healer.worker.stats.attempts_failed == 1
        await here.records.update(
            writer.ledger_id,
            lambda r: r.with_changes(state=RecoveryState.WAITING, next_retry_ms=None) if r else None,
        )
        record = await here.until_said(
            writer.ledger_id, lambda r: r.state is RecoveryState.UNRECOVERABLE and r.attempts == 2, 30
        )
        assert record.obstacle is Obstacle.NO_COPY_LEFT
        another = here.healer().start()
        await asyncio.sleep(1_000)
        assert (healer.worker.stats.attempts_failed, another.worker.stats.attempts_failed) == (2, 1)

    play(scene)


def test_records_that_a_dead_worker_left_behind_go_and_those_of_marks_stay() -> None:
    async def scene(here: World) -> None:
        left, marked = await here.write(5), await here.write(5)
        for writer in (left, marked):
            await here.records.put(RecoveryRecord(writer.ledger_id, first_marked_ms=clock_ms()))
        here.lose(marked.metadata.last_segment.ensemble[0])
        await here.mark(marked.ledger_id, marked.metadata.last_segment.ensemble[0])
        here.healer().start()
        async with asyncio.timeout(60):
            while await here.records.get(left.ledger_id) is not None:
                await asyncio.sleep(0.5)
        await asyncio.sleep(700)
        assert await here.is_marked(marked.ledger_id)
        assert await here.records.get(marked.ledger_id) is not None

    play(scene, bookies=3)


@pytest.mark.parametrize("why", ["paused", "locked"])
def test_a_ledger_that_is_due_and_cannot_be_taken_is_not_searched_for_without_a_break(why: str) -> None:
    async def scene(here: World) -> None:
        writer = await here.write(10, ensemble_size=3)
        here.lose(writer.metadata.last_segment.ensemble[0])
        await here.mark(writer.ledger_id, writer.metadata.last_segment.ensemble[0])
        healer = here.healer().start()
        await here.until_tried(writer.ledger_id)  # without a spare it waits for its time
        if why == "paused":
            await here.marks.disable()
        else:
            while (await here.marks.lock(writer.ledger_id)) is None:
                await asyncio.sleep(0.01)
        searches = 0
        take = healer.marks.take

        async def counted(**others: object) -> object:
            nonlocal searches
            searches += 1
            return await take(**others)  # type: ignore[arg-type]

        healer.marks.take = counted  # type: ignore[assignment, method-assign]
        await asyncio.sleep(600)
        assert searches < 60
        here.ledgers.bookies[BookieId("spare:3181")] = True
        if why == "paused":
            await here.marks.enable()
        else:
            await here.store.delete(LAYOUT.mark_lock(writer.ledger_id), version=None)
        await here.until_healed(writer.ledger_id, limit_s=40)

    play(scene, bookies=3)


def test_a_back_off_holds_for_all_workers() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(30)
        lost = writer.metadata.last_segment.ensemble[1]
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        healers = [here.healer().start() for _ in range(3)]
        await asyncio.sleep(1_000)
        record = await here.records.get(writer.ledger_id)
        assert record is not None
        assert record.attempts == sum(healer.worker.stats.attempts_failed for healer in healers)
        assert record.attempts <= 10, "5, 10, 20 ... 300 s and then each 300 s, between all of them"

    play(scene, bookies=3)


def test_the_record_tells_who_copies_and_the_report_how_fast() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(2_000, size=10_000)
        lost = writer.metadata.last_segment.ensemble[1]
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        here.healer("copier-1", budget={"bytes_per_s_max": MIB_PER_S, "bytes_per_s_min": MIB_PER_S}).start()
        await asyncio.sleep(12)
        (report,) = await here.records.reports()
        assert (report.name, report.state, report.ledger_id) == ("copier-1", "copying", writer.ledger_id)
        assert report.bytes_per_s == pytest.approx(MIB_PER_S, rel=0.3)
        assert report.bytes_done_total == pytest.approx(12 * MIB_PER_S, rel=0.3)
        assert report.budget_bytes_per_s == MIB_PER_S
        record = await here.records.get(writer.ledger_id)
        assert record is not None
        assert (record.state, record.worker) == (RecoveryState.COPYING, "copier-1")
        await here.until_healed(writer.ledger_id)
        await asyncio.sleep(12)
        (report,) = await here.records.reports()
        assert (report.state, report.ledger_id) == ("idle", None)

    play(scene)


def test_copying_keeps_to_the_rate_within_a_fifth() -> None:
    async def scene(here: World) -> None:
        writers = [await here.write(300, size=20_000) for _ in range(6)]
        lost = NAMES[1]
        here.lose(lost)
        concerned = [w.ledger_id for w in writers if lost in w.metadata.last_segment.ensemble]
        for ledger_id in concerned:
            await here.mark(ledger_id, lost)
        began = asyncio.get_running_loop().time()
        rate = 2 * MIB_PER_S
        healer = here.healer(workers=3, budget={"bytes_per_s_max": rate, "bytes_per_s_min": rate}).start()
        await here.until_healed(*concerned)
        seconds = asyncio.get_running_loop().time() - began
        assert len(concerned) >= 3
        assert healer.worker.stats.bytes_copied / seconds == pytest.approx(rate, rel=0.2)

    play(scene, bookies=5)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_the_ledgers_are_whole_in_the_end(seed: int) -> None:
    """Bookies come and go, copies vanish and rot, workers die, while marks are made as an auditor and readers would."""

    async def scene(here: World) -> None:
        chance = random.Random(seed)
        sizes = [(3, 3, 2), (3, 2, 2), (4, 3, 2), (2, 2, 2)]
        written = []
        for _ in range(12):
            ensemble_size, write_quorum, ack_quorum = chance.choice(sizes)
            count = chance.randrange(1, 60)
            writer = await here.write(
                count, is_closed=chance.random() < 0.8,
                ensemble_size=ensemble_size, write_quorum=write_quorum, ack_quorum=ack_quorum,
            )  # fmt: skip
            written.append((writer.ledger_id, count))
        healers = [here.healer(workers=2).start() for _ in range(2)]
        everybody = list(here.ledgers.bookies)
        for _ in range(25):
            match chance.choice(["leave", "return", "rot", "kill", "wait", "wait"]):
                case "leave" if len(here.ledgers.bookies) > len(everybody) - 1:
                    lost = chance.choice(sorted(here.ledgers.bookies))
                    here.lose(lost)
                    for ledger_id, _ in written:
                        metadata = await here.client.metadata(ledger_id)
                        if any(lost in segment.ensemble for segment in metadata.segments):
                            await here.mark(ledger_id, lost)
                case "return":
                    for bookie_id in everybody:
                        here.ledgers.bookies[bookie_id] = True
                case "rot" if len(here.ledgers.bookies) == len(everybody):
                    ledger_id, count = chance.choice(written)
                    if not await here.is_marked(ledger_id):
                        ledger = here.ledgers.find(ledger_id)
                        entry_id = chance.randrange(count)
                        ensemble = ledger.metadata.segment_of(EntryId(entry_id)).ensemble
                        holder = ensemble[entry_id % len(ensemble)]
                        (verdict,) = await here.client.read_replicas(
                            ledger_id, ledger.metadata, holder, [EntryId(entry_id)], lambda r: r.verdict
                        )
                        if verdict is Verdict.GOOD:
                            if chance.random() < 0.5:
                                ledger.copies.lose(holder, entry_id)
                            else:
                                ledger.copies.damage(ledger.metadata, ledger.entries, holder, entry_id)
                            await here.mark(ledger_id, holder, reason=Reason.ENTRY_MISSING)
                case "kill":
                    place = chance.randrange(2)
                    await healers[place].kill()
                    healers[place] = here.healer(workers=2).start()
                case _:
                    await asyncio.sleep(chance.choice([0.1, 3, 40]))
        for bookie_id in everybody:
            here.ledgers.bookies[bookie_id] = True
        for ledger_id, _ in written:
            if not here.ledgers.find(ledger_id).is_closed:
                writer = here.ledgers.find(ledger_id).writer
                assert writer is not None
                await writer.close()
        await here.until_healed(*(ledger_id for ledger_id, _ in written), limit_s=5_000)
        for ledger_id, count in written:
            await here.assert_whole(ledger_id, payloads(count))

    play(scene, bookies=6)
