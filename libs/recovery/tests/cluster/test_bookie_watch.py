"""When an auditor counts a bookie as lost: delays, leases, registration lists and outages of the metadata store."""

import asyncio

import pytest
from auditor_world import LAYOUT, LEDGERS, World, clock_ms, with_auditor
from bindery_core.ids import BookieId
from bindery_metadata.bookies.membership import Intent
from simulated import simulate

B1 = BookieId("b1")


@with_auditor()
async def test_a_bookie_that_returns_within_the_delay_causes_no_marks(world: World) -> None:
    for _ in range(4):
        await world.stop_bookie("b1")
        await asyncio.sleep(100)
        await world.start_bookie("b1")
        await asyncio.sleep(30)
    await asyncio.sleep(300)
    assert await world.marked() == {}
    assert await world.kinds() == ["leader", *["bookie_absent", "bookie_back"] * 4]
    assert (await world.records.history(1))[0].fields["returns_in_time"] == 4, "the count shows a flapping bookie"


@with_auditor()
async def test_the_delay_applies_to_each_of_several_absent_bookies(world: World) -> None:
    for name in ("b1", "b2", "b3"):
        await world.stop_bookie(name)
    await asyncio.sleep(100)
    for name in ("b1", "b2"):
        await world.start_bookie(name)
    await asyncio.sleep(30)
    assert await world.marked() == dict.fromkeys(LEDGERS, ("b3",))


@with_auditor()
async def test_read_only_bookies_and_bookies_that_change_lists_are_not_lost(world: World) -> None:
    await world.marks.set_lost_bookie_delay_s(0)
    for round_ in range(200):
        await world.move_bookie("b1", read_only=round_ % 2 == 0)
        await asyncio.sleep(0.0013 * (round_ % 7))
    await world.move_bookie("b1", read_only=True)
    await asyncio.sleep(600)
    assert await world.marked() == {}
    assert await world.kinds() == ["leader"]


@with_auditor()
async def test_the_delay_is_initialized_and_a_changed_delay_applies_at_once(world: World) -> None:
    assert await world.marks.lost_bookie_delay_s() == 120
    await world.marks.set_lost_bookie_delay_s(1000)
    await world.stop_bookie("b1")
    await asyncio.sleep(500)
    assert await world.marked() == {}
    await world.marks.set_lost_bookie_delay_s(510)
    assert await world.wait_for_marks(3, timeout_s=20) > 5


@with_auditor()
async def test_watches_that_fire_after_a_lost_connection_request_no_audit(world: World) -> None:
    await world.stop_bookie("b1")
    await asyncio.sleep(20)
    store = world.auditor.store
    world.tree.suspend(store)
    await asyncio.sleep(1)
    world.tree.resume(store)
    await asyncio.sleep(60)
    assert await world.marked() == {}
    await world.wait_for_marks(3, timeout_s=60)


@with_auditor()
async def test_a_rolling_restart_under_leases_marks_nothing_but_an_expired_lease_does(world: World) -> None:
    for name in ("b1", "b2", "b3", "b4"):
        await world.memberships.set(BookieId(name), Intent.MAINTENANCE, until_ms=clock_ms() + 900_000)
        await world.stop_bookie(name)
        await asyncio.sleep(400)
        await world.start_bookie(name)
        await world.memberships.clear(BookieId(name))
        await asyncio.sleep(10)
    assert await world.marked() == {}
    await world.memberships.set(B1, Intent.MAINTENANCE, until_ms=clock_ms() + 300_000)
    await world.stop_bookie("b1")
    assert 410 < await world.wait_for_marks(3, timeout_s=440) < 430


@with_auditor()
async def test_history_states_why_an_absent_bookie_no_longer_waits_for_the_delay(world: World) -> None:
    for name, intent in (("b1", Intent.MAINTENANCE), ("b2", Intent.REMOVED)):
        await world.stop_bookie(name)
        await asyncio.sleep(50)
        until_ms = clock_ms() + 900_000 if intent is Intent.MAINTENANCE else None
        await world.memberships.set(BookieId(name), intent, until_ms=until_ms)
        await asyncio.sleep(10)
    texts = [event.text for event in await world.records.history() if event.kind == "bookie_excused"]
    assert texts == [
        "b2 was declared permanently lost after 50 s; the lost-bookie delay no longer applies to it",
        "b1 is absent under a maintenance lease, after 50 s; it does not count as lost",
    ]


def test_a_bookie_that_changes_lists_between_two_reads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        world = await World.make(ledgers=LEDGERS)
        await world.move_bookie("b1", read_only=True)
        running = await world.start_auditor(delay_s=0)
        await asyncio.sleep(60)
        children = running.store.children
        moves = 0

        async def move_after_the_first_reading(path, *, watch=None):  # type: ignore[no-untyped-def]
            nonlocal moves
            names = await children(path, watch=watch)
            if path == LAYOUT.available and moves == 0:
                moves += 1
                await world.move_bookie("b1", read_only=False)
            return names

        monkeypatch.setattr(running.store, "children", move_after_the_first_reading)
        await asyncio.sleep(60)
        assert moves == 1
        assert await world.kinds() == ["leader"]

    simulate(scenario())


async def outage(world: World, *, settle_s: float) -> dict[int, tuple[str, ...]]:
    """Return the marks after an outage of two minutes that ends all sessions. The bookies register again 2.5 to 10 s
    after it."""
    first = await world.start_auditor(delay_s=0, settle_s=settle_s)
    await asyncio.sleep(60)
    world.tree.suspend(first.store)
    await asyncio.sleep(120)
    for name in ("b1", "b2", "b3", "b4"):
        world.tree.expire(world.bookies[name])
    world.tree.resume(first.store)
    for name in ("b1", "b2", "b3", "b4"):
        await asyncio.sleep(2.5)
        await world.start_bookie(name)
    await asyncio.sleep(120)
    assert not first.task.done()
    return await world.marked()


def test_an_outage_of_the_metadata_store_makes_no_bookie_lost() -> None:
    async def scenario(settle_s: float) -> dict[int, tuple[str, ...]]:
        return await outage(await World.make(ledgers=LEDGERS), settle_s=settle_s)

    assert simulate(scenario(15.0)) == {}
    assert simulate(scenario(0.0)) != {}, "without the quiet time, bookies count as lost"


def test_absence_counts_up_to_the_moment_of_a_lost_connection_and_not_beyond() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers=LEDGERS)
        running = await world.start_auditor(limits={"poll_interval_s": 60})
        await asyncio.sleep(100)
        await world.stop_bookie("b1")
        await asyncio.sleep(20)
        world.tree.suspend(running.store)
        await asyncio.sleep(1)
        assert running.auditor.watch is not None
        absence = running.auditor.watch.lost.absences[B1]
        assert 19 <= absence.absent_s <= 20, "no poll has run since the absence was found"
        await asyncio.sleep(50)
        assert 19 <= absence.absent_s <= 20

    simulate(scenario())


@with_auditor()
async def test_the_report_of_an_absent_bookie_states_the_rest_of_its_delay(world: World) -> None:
    await world.stop_bookie("b1")
    await asyncio.sleep(10)
    (absent,) = [event for event in await world.records.history() if event.kind == "bookie_absent"]
    assert absent.text == "b1 is not registered; it counts as lost in 120 s"
