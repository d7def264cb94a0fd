"""Budgets with a given clock, pressure from given latencies, and slots in the in-memory store."""

import asyncio

import pytest
from bindery_core.ids import BookieId
from bindery_metadata.stores.memory import MemoryTree
from bindery_spark.reading.throttle import (
    BURST_S,
    PRESSURE_MAX,
    SLOW_FACTOR,
    SLOW_MARGIN_S,
    WINDOW,
    Budget,
    NoReaderSlot,
    Pressure,
    ReaderSlots,
)

BOOKIE = BookieId("bookie-1")


def read_for(budget: Budget, seconds: float, *, size: int) -> float:
    """Bytes that a reader without pauses gets in that time."""
    now, total = 0.0, 0.0
    while now < seconds:
        now += budget.take(size, now=now)
        total += size
    return total


@pytest.mark.parametrize("size", [100, 70_000, 3_000_000])
def test_a_reader_without_pauses_gets_its_rate(size: int) -> None:
    rate = 1_000_000
    total = read_for(Budget(rate, now=0.0), 60.0, size=size)
    assert 59 * rate <= total <= (60 + BURST_S) * rate + 2 * size


def test_a_pause_allows_at_most_one_burst() -> None:
    budget = Budget(1000, now=0.0)
    assert budget.take(0, now=100.0) == 0
    assert budget.take(1000 * BURST_S, now=100.0) == 0
    assert budget.take(500, now=100.0) == pytest.approx(0.5)


def test_a_new_rate_applies_from_the_time_of_the_change() -> None:
    budget = Budget(1000, now=0.0)
    assert budget.take(1250, now=0.0) == pytest.approx(1.0)
    budget.set_rate(4000, now=0.5)
    assert budget.take(0, now=0.5) == pytest.approx(0.5 / 4)


async def test_holders_of_slots_share_the_rate() -> None:
    store = MemoryTree().connect()
    slots = ReaderSlots(store, slots=2)
    first = await slots.acquire(BOOKIE, reader="one", timeout_s=30)
    loop = asyncio.get_running_loop()
    budget = Budget(500, now=loop.time())
    sharing = asyncio.create_task(slots.share(BOOKIE, budget, rate=1000))

    async def becomes(rate: float) -> None:
        async with asyncio.timeout(30):
            while budget._rate != rate:
                await asyncio.sleep(0)

    await becomes(1000)
    second = await slots.acquire(BOOKIE, reader="two", timeout_s=30)
    await becomes(500)
    await second.release()
    await becomes(1000)
    sharing.cancel()
    await first.release()


def test_without_a_rate_no_reader_waits() -> None:
    assert read_for(Budget(0, now=0.0), 0.0, size=1) == 0
    assert Budget(0, now=0.0).take(10**12, now=0.0) == 0


def observe(pressure: Pressure, latency_s: float, *, size: int = 256_000, windows: int = 1) -> None:
    for _ in range(WINDOW * windows):
        pressure.observe(latency_s, size=size)


def test_pauses_begin_when_a_bookie_gets_slow_and_end_when_it_recovers() -> None:
    pressure = Pressure()
    observe(pressure, 0.010)
    assert (pressure.pressure, pressure.pause()) == (1, 0)
    observe(pressure, 0.050)
    assert pressure.pause() == pytest.approx(0.050)
    observe(pressure, 0.050, windows=10)
    assert pressure.pressure == PRESSURE_MAX
    observe(pressure, 0.010, windows=4)
    assert pressure.pressure == 1


def test_latency_is_compared_with_the_lowest_median() -> None:
    pressure = Pressure()
    observe(pressure, 0.010)
    observe(pressure, SLOW_FACTOR * 0.010 + SLOW_MARGIN_S)
    assert pressure.pressure == 1
    observe(pressure, SLOW_FACTOR * 0.010 + SLOW_MARGIN_S + 0.001)
    assert pressure.pressure == 2


def test_latencies_of_large_responses_are_compared_among_themselves() -> None:
    pressure = Pressure()
    observe(pressure, 0.0005, size=100)
    observe(pressure, 0.020, size=256_000, windows=3)
    observe(pressure, 0.0005, size=100)
    assert pressure.pressure == 1


# --- slots ------------------------------------------------------------------------------------------------------------


async def test_readers_are_limited_to_the_slots_and_a_released_slot_is_reused() -> None:
    tree = MemoryTree()
    ours, theirs = ReaderSlots(tree.connect(), slots=2), ReaderSlots(tree.connect(), slots=2)
    first = await ours.acquire(BOOKIE, reader="1", timeout_s=30)
    second = await theirs.acquire(BOOKIE, reader="2", timeout_s=30)
    assert {first.path, second.path} == {f"/bindery/audit/readers/bookie-1/slot-{n}" for n in (0, 1)}
    with pytest.raises(NoReaderSlot, match="slots=2"):
        await ours.acquire(BOOKIE, reader="3", timeout_s=0.05)
    assert (await ours.acquire(BookieId("bookie-2"), reader="3", timeout_s=30)).path.endswith("bookie-2/slot-0")
    await second.release()
    assert (await ours.acquire(BOOKIE, reader="3", timeout_s=30)).path == second.path


async def test_the_slot_of_a_reader_that_died_goes_to_a_waiting_reader() -> None:
    tree = MemoryTree()
    dying = tree.connect()
    await ReaderSlots(dying, slots=1).acquire(BOOKIE, reader="1", timeout_s=30)
    tree.expire(dying)
    taken = await ReaderSlots(tree.connect(), slots=1).acquire(BOOKIE, reader="2", timeout_s=30)
    assert taken.path.endswith("slot-0")


async def test_releasing_never_takes_another_readers_slot() -> None:
    tree = MemoryTree()
    dying, other = tree.connect(), tree.connect()
    lost = await ReaderSlots(dying, slots=1).acquire(BOOKIE, reader="1", timeout_s=30)
    tree.expire(dying)
    held = await ReaderSlots(other, slots=1).acquire(BOOKIE, reader="2", timeout_s=30)
    await lost.release()
    assert await other.exists(held.path) is not None
