"""Ledgers that recently received copies; unknown ones count as seen."""

import asyncio
from typing import Any

from bindery_bookie.storage.memory.copies_seen import CopiesSeen
from bindery_core.wire.messages import Status


def test_copies_are_recorded_and_copies_before_the_start_are_unknown() -> None:
    seen = CopiesSeen(100.0)
    seen.record([1, 2], 110.0)
    seen.record([1], 120.0)
    assert seen.since(1, 120.0)
    assert not seen.since(1, 120.5)
    assert seen.since(2, 110.0)
    assert not seen.since(2, 110.5)
    assert not seen.since(3, 100.5)
    assert seen.since(3, 100.0)
    assert seen.since(3, 50.0)


def test_dropped_records_count_as_seen() -> None:
    seen = CopiesSeen(0.0, kept_max=2)
    seen.record([1], 10.0)
    seen.record([2], 20.0)
    seen.record([1], 30.0)
    seen.record([3], 40.0)
    assert seen.since(2, 20.0)
    assert seen.since(9, 20.0), "it may be the dropped record"
    assert not seen.since(9, 20.5)
    assert seen.since(1, 30.0)


async def test_copies_are_recovery_adds_and_a_deleted_closed_ledger_stays_fenced(world: Any, kit: Any) -> None:
    engine = await world.opened()
    start = asyncio.get_running_loop().time()
    await kit.add(engine, kit.add_request(kit.entry(1, 0)), kit.add_request(kit.entry(2, 0), recovery=True))
    assert engine.was_given_copies(2, since_s=start + 1e-9)
    assert not engine.was_given_copies(1, since_s=start + 1e-9)
    await engine.delete_ledger(1, is_closed=True)
    assert await kit.add(engine, kit.add_request(kit.entry(1, 1))) == [Status.FENCED]
    await engine.close()
