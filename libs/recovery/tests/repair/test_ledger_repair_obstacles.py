"""Obstacles to a repair are recorded, and the repair continues when the obstacle is gone."""

import asyncio
from typing import Any

import pytest
from bindery_core.errors import Corrupt
from bindery_core.ids import BookieId, EntryId
from bindery_core.wire.messages import Status
from bindery_metadata.bookies.membership import Intent
from bindery_metadata.recovery.recovery_records import Obstacle, Reason, RecoveryState
from bindery_recovery.budget import MIB
from bindery_recovery.checks.bookie_audit import LedgerMarker
from healing_world import NAMES, World, clock_ms, payloads, play


def test_without_a_spare_the_obstacle_is_recorded_and_a_new_bookie_ends_it() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(30)
        lost = writer.metadata.last_segment.ensemble[1]
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        healer = here.healer().start()
        record = await here.until_tried(writer.ledger_id)
        assert (record.state, record.obstacle) == (RecoveryState.BLOCKED, Obstacle.NO_SPARE)
        assert record.detail == (
            f"no bookie can replace {lost}: none of 2 writable bookies can accept copies of this ledger;"
            f" add a bookie, or start {lost} again"
        )
        assert (record.attempts, record.missing_entries, record.missing_bytes) == (1, 30, 300)
        assert record.next_retry_ms is not None
        assert record.next_retry_ms - clock_ms() <= 6_250, "5 s and up to 25 % more after the first failure"
        again = await here.until_record(writer.ledger_id, lambda r: r.attempts >= 8, 3_000)
        assert again.next_retry_ms is not None
        assert 200_000 < again.next_retry_ms - clock_ms() <= 380_000, "the back-off has reached its maximum"
        joined_at = asyncio.get_running_loop().time()
        here.ledgers.bookies[BookieId("bookie-9:3181")] = True
        await here.until_healed(writer.ledger_id)
        assert asyncio.get_running_loop().time() - joined_at < 5, "it does not wait for its retry time"
        await here.assert_whole(writer.ledger_id, payloads(30))
        assert healer.worker.parked == 0

    play(scene, bookies=3)


def test_a_spare_that_joins_during_an_attempt_is_used_at_once() -> None:
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


def test_read_only_and_draining_bookies_are_no_spares_and_are_named_in_the_obstacle() -> None:
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


def test_a_bookie_in_maintenance_is_not_replaced_until_its_lease_ends() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(30)
        away = writer.metadata.last_segment.ensemble[0]
        here.lose(away)
        await here.memberships.set(away, Intent.MAINTENANCE, until_ms=clock_ms() + 300_000)
        await here.mark(writer.ledger_id, away)
        healer = here.healer().start()
        record = await here.until_tried(writer.ledger_id)
        assert (record.state, record.obstacle, record.attempts) == (RecoveryState.WAITING, Obstacle.NONE, 0)
        assert record.detail.startswith(f"{away} is in maintenance for another 5 min")
        await asyncio.sleep(280)
        assert healer.client.stored == []
        await here.until_healed(writer.ledger_id)
        assert asyncio.get_running_loop().time() < 320
        await here.assert_whole(writer.ledger_id, payloads(30))

    play(scene)


def test_a_bookie_that_refills_its_storage_is_neither_replaced_nor_a_source() -> None:
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
            f"{refilling} lost its storage and refills it from the other bookies: no action is needed"
        )
        await asyncio.sleep(100)
        assert healer.client.stored == []
        frames = await here.client.read_replicas(
            writer.ledger_id,
            writer.metadata,
            writer.metadata.last_segment.ensemble[1],
            [EntryId(n) for n in range(30)],
            lambda r: r.frame or b"",
        )
        copies.store(refilling, frames)  # it has refilled its storage
        del here.ledgers.read_answers[refilling]
        await here.until_healed(writer.ledger_id)
        assert healer.client.stored == []
        await here.assert_whole(writer.ledger_id, payloads(30))

    play(scene)


def test_an_entry_that_only_a_refilling_bookie_may_have_is_not_unrecoverable() -> None:
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
            f" {gone} was removed permanently"
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
        assert record.detail == f"entry 0 cannot be read from any bookie: {gone} was removed permanently"
        assert await here.is_marked(writer.ledger_id), "the mark is kept"
        assert await here.marks.locks() == {}, "the lock is released"
        (event,) = await here.records.history()
        assert event.kind == "unrecoverable"
        failed = healer.worker.stats.attempts_failed
        await asyncio.sleep(10_000)
        assert healer.worker.stats.attempts_failed == failed, "an unrecoverable ledger is not tried again"
        await here.memberships.clear(gone)
        here.ledgers.bookies[gone] = True
        await here.until_healed(writer.ledger_id)
        assert healer.client.stored == []

    play(scene)


@pytest.mark.parametrize("is_at_work", [False, True], ids=["at rest", "during an attempt"])
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
            await here.until_record(writer.ledger_id, lambda r: r.state is RecoveryState.UNRECOVERABLE)
            await lose_another()
        async with asyncio.timeout(60):
            while later in (await here.client.metadata(writer.ledger_id)).last_segment.ensemble:
                await asyncio.sleep(1)
        record = await here.until_record(writer.ledger_id, lambda r: r.state is RecoveryState.UNRECOVERABLE)
        assert record.bookies == tuple(sorted([first, later]))
        assert await here.is_marked(writer.ledger_id)
        stored, failed = healer.client.entries_stored, healer.worker.stats.attempts_failed
        await asyncio.sleep(10_000)
        assert (healer.client.entries_stored, healer.worker.stats.attempts_failed) == (stored, failed)

    play(scene, bookies=7)


def test_a_bookie_that_may_return_makes_no_ledger_unrecoverable() -> None:
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
        record = await here.until_record(writer.ledger_id, lambda r: r.state is RecoveryState.UNRECOVERABLE)
        assert record.obstacle is Obstacle.NO_COPY_LEFT

    play(scene)


def test_a_fragment_with_an_unreadable_entry_is_not_copied_up_to_it_at_every_attempt() -> None:
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
        record = await here.until_record(writer.ledger_id, lambda r: r.attempts >= 5, 3_000)
        assert record.obstacle is Obstacle.SOURCE_UNAVAILABLE
        assert "entry 250 cannot be read from any bookie" in record.detail
        assert healer.client.entries_stored == stored
        metadata = await here.client.metadata(writer.ledger_id)
        assert metadata.last_segment.ensemble == ensemble, "the lost bookie may return with the entry"
        ledger.copies.store(ensemble[0], [frame])
        healer.worker.retry_now()
        await here.until_healed(writer.ledger_id)
        await here.assert_whole(writer.ledger_id, payloads(500))

    play(scene, bookies=6)


def test_a_bookie_gets_its_readable_entries_back_although_one_entry_is_lost() -> None:
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
        record = await here.until_record(writer.ledger_id, lambda r: r.state is RecoveryState.UNRECOVERABLE)
        assert record.detail.startswith("entry 45 cannot be read from any bookie: ")
        assert {bookie_id for _, bookie_id, _ in healer.client.stored} == {holder}
        assert healer.client.entries_stored == 19
        assert record.missing_entries == 3
        assert await here.is_marked(writer.ledger_id)

    play(scene)


def test_a_ledger_is_unrecoverable_if_all_copies_are_absent_or_corrupt_but_not_after_an_error() -> None:
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
        record = await here.until_record(writer.ledger_id, lambda r: r.state is RecoveryState.UNRECOVERABLE)
        assert record.obstacle is Obstacle.NO_COPY_LEFT
        assert record.detail.startswith("entry 9 cannot be read from any bookie: ")
        assert healer.client.stored == []

    play(scene)


def test_a_bookie_that_answers_with_errors_is_read_again_and_finally_replaced() -> None:
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


def test_one_failed_read_does_not_replace_a_bookie_after_failures_for_other_reasons() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(30)
        _, silent, lost = writer.metadata.last_segment.ensemble
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        healer = here.healer().start()
        await here.until_record(writer.ledger_id, lambda r: r.attempts >= 5, 3_000)  # there is no spare
        here.ledgers.read_answers[silent] = Status.IO_ERROR
        here.ledgers.bookies[lost] = True
        here.ledgers.bookies[BookieId("bookie-9:3181")] = True
        record = await here.until_record(writer.ledger_id, lambda r: bool(r.unsure))
        assert record.unsure == ((silent, 1),)
        del here.ledgers.read_answers[silent]
        await here.until_healed(writer.ledger_id)
        metadata = await here.assert_whole(writer.ledger_id, payloads(30))
        assert metadata.last_segment.ensemble == writer.metadata.last_segment.ensemble
        assert healer.client.stored == []

    play(scene, bookies=3)


def test_a_target_that_refuses_is_skipped_and_is_named_if_there_is_no_other() -> None:
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


def test_unreadable_metadata_is_recorded_as_the_obstacle() -> None:
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


def test_while_recovery_is_disabled_no_repair_starts_and_a_long_copy_stops() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(2_000, size=10_000)
        lost = writer.metadata.last_segment.ensemble[1]
        here.lose(lost)
        await here.marks.disable()
        await here.mark(writer.ledger_id, lost)
        healer = here.healer(budget={"bytes_per_s_max": MIB, "bytes_per_s_min": MIB}).start()
        await asyncio.sleep(60)
        assert healer.client.stored == []
        assert healer.worker.report().state == "paused"
        await here.marks.enable()
        while healer.client.entries_stored < 200:
            await asyncio.sleep(0.1)
        await here.marks.disable()
        record = await here.until_record(writer.ledger_id, lambda r: r.obstacle is Obstacle.PAUSED)
        assert record.state is RecoveryState.WAITING
        stopped_at = healer.client.entries_stored
        assert stopped_at < 700
        await asyncio.sleep(60)
        assert healer.client.entries_stored == stopped_at
        await here.marks.enable()
        await here.until_healed(writer.ledger_id)
        await here.assert_whole(writer.ledger_id, payloads(2_000, 10_000))

    play(scene)
