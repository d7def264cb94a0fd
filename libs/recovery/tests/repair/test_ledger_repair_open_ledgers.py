"""Open ledgers that miss a bookie: their writer replaces it, or they are closed after a grace period."""

import asyncio

import pytest
from bindery_core.errors import LedgerFenced, TryAgain
from bindery_core.formats.ledger_metadata import LedgerState, Segment
from bindery_core.ids import BookieId, EntryId
from bindery_metadata.bookies.membership import Intent
from bindery_metadata.recovery.recovery_records import Obstacle, Reason, RecoveryState
from healing_world import World, payloads, play


def test_an_idle_open_ledger_is_recovered_after_the_grace_period_and_not_before() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(30, is_closed=False)
        lost = writer.metadata.last_segment.ensemble[2]
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        healer = here.healer(open_ledger_grace_s=30).start()
        record = await here.until_tried(writer.ledger_id)
        assert (record.state, record.obstacle) == (RecoveryState.WAITING, Obstacle.LEDGER_OPEN)
        assert record.detail == (
            f"ledger {writer.ledger_id} is open and its writer has 30 s left to replace {lost} itself: after that, the"
            " ledger is closed and repaired"
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


def test_a_grace_period_shorter_than_a_second_is_kept() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(30, is_closed=False)
        lost = writer.metadata.last_segment.ensemble[2]
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        healer = here.healer(open_ledger_grace_s=0.5).start()
        await here.until_tried(writer.ledger_id)
        assert healer.client.opened == []
        await here.until_healed(writer.ledger_id)
        assert healer.client.opened == [writer.ledger_id]

    play(scene)


@pytest.mark.parametrize("intent", [Intent.DRAINING, Intent.REMOVED])
def test_an_open_ledger_on_a_leaving_bookie_that_is_still_registered_is_closed_and_moved(intent: Intent) -> None:
    """Draining bookies stay registered. An idle writer never replaces one, so the ledger has to be closed."""

    async def scene(here: World) -> None:
        writer = await here.write(30, is_closed=False)
        leaving = writer.metadata.last_segment.ensemble[1]
        await here.memberships.set(leaving, intent)
        await here.mark(writer.ledger_id, leaving, reason=Reason.BOOKIE_DRAINING)
        healer = here.healer(open_ledger_grace_s=30).start()
        record = await here.until_tried(writer.ledger_id)
        assert (record.state, record.obstacle) == (RecoveryState.WAITING, Obstacle.LEDGER_OPEN)
        await here.until_healed(writer.ledger_id, limit_s=60)
        assert leaving in here.ledgers.bookies
        assert healer.client.opened == [writer.ledger_id]
        metadata = await here.assert_whole(writer.ledger_id, payloads(30))
        assert metadata.state is LedgerState.CLOSED
        assert leaving not in metadata.last_segment.ensemble

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


def test_a_second_loss_restarts_the_grace_period() -> None:
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
        assert healer.client.opened == [], "the new ensemble has 5 s of its grace period left"
        async with asyncio.timeout(60):
            while not healer.client.opened:
                await asyncio.sleep(0.1)

    play(scene)


def test_an_open_ledger_is_not_fenced_if_there_is_no_spare() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(30, is_closed=False)
        lost = writer.metadata.last_segment.ensemble[2]
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        healer = here.healer(open_ledger_grace_s=30).start()
        record = await here.until_tried(writer.ledger_id)
        assert record.obstacle is Obstacle.NO_SPARE
        assert "the ledger stays open and its writer continues with the other bookies" in record.detail
        await asyncio.sleep(1_000)
        assert healer.client.opened == []
        assert await writer.add(b"still alive") == 30

    play(scene, bookies=3)


def test_an_open_ledger_with_a_reported_hole_is_repaired_after_its_writer_closes_it() -> None:
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


def test_an_impossible_recovery_is_tried_again() -> None:
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
