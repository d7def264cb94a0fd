"""Audits of draining bookies: marks, and the report that a drain is finished."""

import asyncio

from auditor_world import LAYOUT, OF_B1, World, with_auditor
from bindery_core.ids import BookieId, LedgerId
from bindery_metadata.bookies.membership import Intent
from bindery_metadata.recovery.recovery_records import HistoryEvent, Reason
from scripted import ledger

B1 = BookieId("b1")


@with_auditor(drain_interval_s=30)
async def test_the_ledgers_of_a_draining_bookie_are_marked_until_none_names_it(world: World) -> None:
    await world.memberships.set(B1, Intent.DRAINING)
    await world.wait_for_marks(3, timeout_s=5)
    assert await world.marked() == OF_B1
    record = await world.records.get(LedgerId(1))
    assert record is not None
    assert record.reason is Reason.BOOKIE_DRAINING
    held = await world.marks.lock(LedgerId(1))
    await asyncio.sleep(200)
    assert [mark.version for mark in await world.mark_list()] == [0, 0, 0], (
        "the worker that holds the lock is not disturbed"
    )
    await world.manager.update(LedgerId(1), lambda _: ledger(("b4", "b2", "b3")))
    assert held is not None
    assert await world.marks.mark_replicated(held)
    await world.add_ledger(9, ledger(("b1", "b2", "b3")))
    await asyncio.sleep(40)
    assert set(await world.marked()) == {3, 9, 5_000_000_000}
    cursor = await world.records.get_cursor("draining")
    assert cursor is not None
    assert cursor["bookies"] == {"b1": {"bytes_left": 2000, "entries_left": 20, "ledgers_left": 3}}


@with_auditor(drain_interval_s=30)
async def test_the_end_of_a_drain_is_reported_once_across_leaders(world: World) -> None:
    async def told() -> list[str]:
        return [kind for kind in await world.kinds() if kind == "drain_finished"]

    await world.memberships.set(B1, Intent.DRAINING)
    await world.wait_for_marks(3, timeout_s=5)
    await asyncio.sleep(100)
    assert await told() == []
    for ledger_id in OF_B1:
        await world.manager.update(LedgerId(ledger_id), lambda _: ledger(("b4", "b2", "b3")))
    await asyncio.sleep(100)
    assert await told() == [], "a writable bookie may receive new ledgers"
    await world.move_bookie("b1", read_only=True)
    await asyncio.sleep(100)
    assert await told() == ["drain_finished"]
    (event,) = [event for event in await world.records.history() if event.kind == "drain_finished"]
    assert event.fields["bookie_id"] == "b1"

    for number in range(200):  # the end of the drain is not among the newest events any more
        await world.records.append_history(HistoryEvent(number, "healed", "", {}))
    await world.auditor.kill()
    world.auditor = await world.start_auditor("second", drain_interval_s=30)
    await asyncio.sleep(200)
    assert await told() == ["drain_finished"]

    await world.memberships.clear(B1)
    await asyncio.sleep(100)
    await world.memberships.set(B1, Intent.DRAINING)
    await asyncio.sleep(100)
    assert await told() == ["drain_finished"] * 2, "another drain"


@with_auditor(drain_interval_s=30)
async def test_a_finished_drain_goes_on_when_a_ledger_names_the_bookie_again(world: World) -> None:
    """A client with an outdated bookie list created a ledger on the bookie."""

    async def told() -> list[str]:
        return [kind for kind in await world.kinds() if kind.startswith("drain_")]

    await world.start_bookie("b8", read_only=True)
    await world.memberships.set(BookieId("b8"), Intent.DRAINING)
    await asyncio.sleep(100)
    assert await told() == ["drain_finished"]
    await world.add_ledger(9, ledger(("b8", "b2", "b3")))
    await asyncio.sleep(200)
    assert await told() == ["drain_finished", "drain_goes_on"]
    await world.manager.update(LedgerId(9), lambda _: ledger(("b1", "b2", "b3")))
    await asyncio.sleep(200)
    assert await told() == ["drain_finished", "drain_goes_on", "drain_finished"]


@with_auditor(drain_interval_s=30)
async def test_a_drain_end_that_a_client_reported_is_not_reported_again(world: World) -> None:
    await world.move_bookie("b4", read_only=True)
    await world.memberships.set(BookieId("b4"), Intent.DRAINING)
    fields = {"bookie_id": "b4"}
    await world.records.append_history(HistoryEvent(1, "drain_finished", "", fields))
    await asyncio.sleep(100)
    assert (await world.kinds()).count("drain_finished") == 1


@with_auditor(drain_interval_s=30)
async def test_a_drain_is_not_finished_while_metadata_cannot_be_read(world: World) -> None:
    await world.store.set(LAYOUT.ledger(LedgerId(2)), b"nonsense", version=None)
    await world.move_bookie("b4", read_only=True)
    await world.memberships.set(BookieId("b4"), Intent.DRAINING)
    await asyncio.sleep(100)
    assert "drain_finished" not in await world.kinds()
