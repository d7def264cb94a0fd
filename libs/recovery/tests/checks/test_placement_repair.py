"""Placement repair: an auditor marks ledgers that can be on more racks, few at a time, when the racks have changed."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from auditor_world import LAYOUT, World, clock_ms
from bindery_core.errors import MetadataUnavailable
from bindery_core.formats.ledger_metadata import Segment
from bindery_core.ids import BookieId, LedgerId
from bindery_metadata.recovery.recovery_records import Reason
from bindery_recovery.checks.placement_repair import CURSOR, MARK_TIMEOUT_S, MARKS_MAX, RERUN_WAITING_S
from scripted import ledger
from simulated import simulate

RACKS = {BookieId("b1"): "/a", BookieId("b2"): "/a", BookieId("b3"): "/a", BookieId("b4"): "/b"}
IN_ONE_RACK = ("b1", "b2", "b3")
IN_TWO_RACKS = ("b2", "b3", "b4")
DELAY_S = 60


async def start(world: World, racks: Mapping[BookieId, str] = RACKS, **settings: Any) -> Any:
    made: dict[str, Any] = {"placement_repair_delay_s": DELAY_S, **settings}
    return (await world.start_auditor(racks=lambda: racks, **made)).auditor.state.placement_repair


async def move(world: World, ledger_id: int, ensemble: tuple[str, ...] = IN_TWO_RACKS) -> None:
    """Do what a worker does: change the ensemble, then remove the mark."""
    await world.manager.update(
        LedgerId(ledger_id),
        lambda found: found.with_changes(segments=(Segment(found.segments[0].first_entry_id, bookies(ensemble)),)),
    )
    await world.store.delete(LAYOUT.mark(LedgerId(ledger_id)), version=None)


def bookies(names: tuple[str, ...]) -> tuple[BookieId, ...]:
    return tuple(map(BookieId, names))


def test_a_ledger_in_one_rack_is_marked_as_bookkeeper_marks_it() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers={1: ledger(IN_ONE_RACK), 2: ledger(IN_TWO_RACKS)})
        state = await start(world)
        await asyncio.sleep(DELAY_S / 2)
        assert await world.marked() == {}, "the racks may still change"
        await asyncio.sleep(2 * DELAY_S)
        assert await world.marked() == {1: ()}, "no bookie is missing a replica"
        record = await world.records.get(LedgerId(1))
        assert record is not None
        assert record.reason is Reason.PLACEMENT
        assert record.missing_bytes
        assert (state.is_running, state.racks, state.total, state.done) == (True, 2, 1, 0)
        await move(world, 1)
        await asyncio.sleep(10)
        assert (state.is_running, state.total, state.done, state.waiting, state.stuck) == (False, 1, 1, 0, 0)
        assert (await world.records.get_cursor(CURSOR) or {})["done"] == 1
        (event,) = [event for event in await world.records.history() if event.kind == "placement_repaired"]
        assert "1 ledgers were spread over more racks" in event.text

    simulate(scenario())


@pytest.mark.parametrize("setting", [{"placement_repair": False}, {}])
def test_nothing_is_read_without_racks_or_with_the_switch_off(setting: dict[str, Any]) -> None:
    async def scenario() -> None:
        world = await World.make(ledgers={1: ledger(IN_ONE_RACK)})
        racks = RACKS if setting else dict.fromkeys(RACKS, "/default-rack")
        state = await start(world, racks, **setting)
        await asyncio.sleep(3600)
        assert await world.marked() == {}
        assert (state.started_ms, state.total) == (0, 0)

    simulate(scenario())


def test_few_ledgers_are_marked_at_a_time() -> None:
    async def scenario() -> None:
        count = 3 * MARKS_MAX
        world = await World.make(ledgers={number: ledger(IN_ONE_RACK) for number in range(1, count + 1)})
        state = await start(world)
        moved = 0
        async with asyncio.timeout(3600):
            while moved < count:
                marked = await world.marked()
                assert len(marked) <= MARKS_MAX
                for ledger_id in marked:
                    await move(world, ledger_id)
                    moved += 1
                await asyncio.sleep(0.5)
            while state.is_running:
                await asyncio.sleep(1)
        assert (state.total, state.done) == (count, count)

    simulate(scenario())


def test_after_the_loss_of_a_rack_and_its_return_ledgers_are_spread_again() -> None:
    """Goal: while the rack is away nothing is moved; when it is back, the ledgers that were stored meanwhile are."""

    async def scenario() -> None:
        world = await World.make(ledgers={1: ledger(IN_TWO_RACKS)})
        state = await start(world)
        await asyncio.sleep(3 * DELAY_S)
        assert (state.racks, state.total) == (2, 0)
        await world.stop_bookie("b4")
        await world.add_ledger(2, ledger(IN_ONE_RACK))
        await asyncio.sleep(10)
        assert state.racks == 1
        await asyncio.sleep(10 * DELAY_S)
        assert 2 not in await world.marked()
        await world.start_bookie("b4")
        await asyncio.sleep(2 * DELAY_S)
        assert (await world.marked())[2] == ()

    simulate(scenario())


def test_a_bookie_that_is_away_for_a_moment_causes_no_further_read() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers={1: ledger(IN_TWO_RACKS)})
        state = await start(world)
        await asyncio.sleep(3 * DELAY_S)
        finished_ms = state.finished_ms
        assert 0 < finished_ms <= clock_ms()
        await world.stop_bookie("b3")
        await asyncio.sleep(20)
        await world.start_bookie("b3")
        await asyncio.sleep(5 * DELAY_S)
        assert state.finished_ms == finished_ms

    simulate(scenario())


def test_open_ledgers_and_ledgers_of_lost_bookies_wait_for_the_next_run() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers={1: ledger(IN_ONE_RACK, last=None), 2: ledger(("b1", "b2", "b9"))})
        state = await start(world, {**RACKS, BookieId("b3"): "/c"}, delay_s=7200)
        await asyncio.sleep(3 * DELAY_S)
        assert state.waiting == 2
        assert await world.marked() == {}
        first_ms = state.started_ms
        await asyncio.sleep(RERUN_WAITING_S)
        assert state.started_ms > first_ms

    simulate(scenario())


def test_a_ledger_that_no_move_helps_is_counted() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers={1: ledger(IN_ONE_RACK)})
        await world.move_bookie("b4", read_only=True)
        await world.start_bookie("b5", read_only=False)
        racks = {**RACKS, BookieId("b5"): "/a", BookieId("b6"): "/c"}
        await world.start_bookie("b6", read_only=True)
        state = await start(world, racks)
        await asyncio.sleep(3 * DELAY_S)
        assert state.racks == 1, "only racks with writable bookies count"
        assert await world.marked() == {}
        await world.start_bookie("b7")
        racks[BookieId("b7")] = "/c"
        await world.add_ledger(2, ledger(("b1", "b2", "b7")))
        await asyncio.sleep(3 * DELAY_S)
        assert (state.total, state.stuck) == (1, 1), "ledger 1 moves to b7; no writable bookie is in a third rack"

    simulate(scenario())


def test_a_ledger_marked_for_a_lost_bookie_is_left_to_that_repair() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers={1: ledger(IN_ONE_RACK)})
        await world.marks.mark(LedgerId(1), ("b1",))
        state = await start(world)
        await asyncio.sleep(3 * DELAY_S)
        assert await world.marked() == {1: ("b1",)}
        assert (state.total, state.waiting) == (0, 1)

    simulate(scenario())


def test_a_mark_that_stays_does_not_stop_the_others() -> None:
    async def scenario() -> None:
        count = MARKS_MAX + 1
        world = await World.make(ledgers={number: ledger(IN_ONE_RACK) for number in range(1, count + 1)})
        state = await start(world)
        await asyncio.sleep(3 * DELAY_S)
        assert len(await world.marked()) == MARKS_MAX
        await asyncio.sleep(MARK_TIMEOUT_S)
        assert len(await world.marked()) == count
        assert state.waiting == MARKS_MAX

    simulate(scenario())


def test_racks_that_cannot_be_read_postpone_the_run() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers={1: ledger(IN_ONE_RACK)})
        is_broken = True

        def racks() -> Mapping[BookieId, str]:
            if is_broken:
                raise MetadataUnavailable("no racks")
            return RACKS

        running = await world.start_auditor(racks=racks, placement_repair_delay_s=DELAY_S)
        await asyncio.sleep(3 * DELAY_S)
        assert "no racks" in running.auditor.state.placement_repair.last_error
        is_broken = False
        await asyncio.sleep(3 * DELAY_S)
        assert await world.marked() == {1: ()}

    simulate(scenario())
