"""Budgets with a given clock, pressure from given latencies, and slots in the in-memory store."""

import asyncio

import pytest
from bindery_core.errors import MetadataOutcomeUnknown
from bindery_core.ids import BookieId
from bindery_metadata.layout.layout import BinderyLayout
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


def test_time_that_passes_fills_the_budget() -> None:
    budget = Budget(1000, now=50.0)
    assert budget.take(250, now=50.0) == 0, "a burst of a quarter of a second"
    assert budget.take(500, now=50.0) == pytest.approx(0.5)
    assert budget.take(0, now=50.25) == pytest.approx(0.25)
    assert budget.take(0, now=50.5) == 0
    assert budget.take(100, now=50.5) == pytest.approx(0.1)
    budget.set_rate(100, now=51.0)
    assert budget.take(500, now=51.0) == pytest.approx(4.75), "400 bytes were saved, 25 of them remain a burst"


def test_a_pressure_compares_sixteen_responses_with_the_earlier_ones() -> None:
    pressure = Pressure()
    for _ in range(16):
        pressure.observe(0.010, size=256)
    for _ in range(15):
        pressure.observe(1.0, size=256)
    assert pressure.pressure == 1
    pressure.observe(1.0, size=256)
    assert (pressure.pressure, pressure.pause()) == (2, 1.0)


def test_the_pressure_doubles_up_to_16_and_is_halved_down_to_1() -> None:
    pressure = Pressure()
    observe(pressure, 0.010)
    seen = []
    for latency_s in [1.0] * 6 + [0.010] * 6:
        observe(pressure, latency_s)
        seen.append(pressure.pressure)
    assert seen == [2, 4, 8, 16, 16, 16, 8, 4, 2, 1, 1, 1]


@pytest.mark.parametrize(
    ("first", "second", "is_compared"), [(8, 63, False), (64, 255, True), (256, 511, True), (4, 7, True)]
)
def test_responses_whose_sizes_differ_by_less_than_a_factor_of_8_are_compared(
    first: int, second: int, is_compared: bool
) -> None:
    """A class has three binary orders of sizes."""
    pressure = Pressure()
    observe(pressure, 0.010, size=first)
    observe(pressure, 1.0, size=second)
    assert (pressure.pressure == 2) is is_compared


async def test_a_released_slot_is_free_at_once_for_a_waiting_reader() -> None:
    tree = MemoryTree()
    ours, theirs = ReaderSlots(tree.connect(), slots=1), ReaderSlots(tree.connect(), slots=1)
    held = await ours.acquire(BOOKIE, reader="1", timeout_s=30)
    loop = asyncio.get_running_loop()
    waiting = asyncio.create_task(theirs.acquire(BOOKIE, reader="2", timeout_s=30))
    await asyncio.sleep(0.5)  # the clock is simulated
    assert not waiting.done()
    before = loop.time()
    await held.release()
    taken = await waiting
    assert loop.time() == before, "without a poll"
    assert taken.path == held.path


async def test_a_reader_without_a_slot_gives_up_after_its_timeout() -> None:
    tree = MemoryTree()
    await ReaderSlots(tree.connect(), slots=1).acquire(BOOKIE, reader="1", timeout_s=30)
    loop = asyncio.get_running_loop()
    for timeout_s in (0.0, 5.0):
        began = loop.time()
        with pytest.raises(NoReaderSlot):
            await ReaderSlots(tree.connect(), slots=1).acquire(BOOKIE, reader="2", timeout_s=timeout_s)
        assert loop.time() - began == pytest.approx(timeout_s)


async def test_the_node_of_a_slot_names_its_reader() -> None:
    store = MemoryTree().connect()
    slot = await ReaderSlots(store, slots=1).acquire(BOOKIE, reader="host pid 7", timeout_s=30)
    assert (await store.get(slot.path)).data == b"host pid 7"
    await slot.release()
    assert await store.exists(slot.path) is None


async def test_slots_are_below_the_given_layout() -> None:
    store = MemoryTree().connect()
    slots = ReaderSlots(store, slots=1, layout=BinderyLayout("/another"))
    slot = await slots.acquire(BOOKIE, reader="1", timeout_s=30)
    assert slot.path.startswith("/another/")


async def test_the_share_of_a_bookie_without_holders_is_its_whole_rate() -> None:
    store = MemoryTree().connect()
    slots, loop = ReaderSlots(store, slots=2), asyncio.get_running_loop()
    slot = await slots.acquire(BOOKIE, reader="1", timeout_s=30)
    await slot.release()
    budget = Budget(10, now=loop.time())
    sharing = asyncio.create_task(slots.share(BOOKIE, budget, rate=1000))
    await asyncio.sleep(0.5)
    assert budget.take(1250, now=loop.time()) == pytest.approx(1.0)
    sharing.cancel()


async def test_a_bookie_without_a_limit_is_not_watched() -> None:
    slots = ReaderSlots(MemoryTree().connect(), slots=2)
    await slots.share(BOOKIE, Budget(0, now=0.0), rate=0.0)


async def test_a_slot_whose_creation_has_an_unknown_outcome_is_looked_up() -> None:
    """The node may exist although the response was lost."""
    store = MemoryTree().connect()
    create, synced = store.create, []

    async def lost(path: str, data: bytes = b"", **settings: bool) -> None:
        await create(path, data, **settings)
        if "slot-" in path:
            raise MetadataOutcomeUnknown("no response")

    async def sync(path: str) -> None:
        synced.append(path)

    store.create, store.sync = lost, sync  # type: ignore[assignment, method-assign]
    slot = await ReaderSlots(store, slots=1).acquire(BOOKIE, reader="1", timeout_s=30)
    assert synced == [slot.path]


async def test_a_slot_that_was_not_created_or_is_another_readers_is_not_held() -> None:
    tree = MemoryTree()
    store, other = tree.connect(), tree.connect()
    create = store.create

    async def lost(path: str, data: bytes = b"", **settings: bool) -> None:
        if path.endswith("slot-0"):
            raise MetadataOutcomeUnknown("no response")
        if path.endswith("slot-1"):
            await other.create(path, b"other", **settings)
            raise MetadataOutcomeUnknown("no response")
        await create(path, data, **settings)

    store.create = lost  # type: ignore[assignment, method-assign]
    slot = await ReaderSlots(store, slots=3).acquire(BOOKIE, reader="1", timeout_s=30)
    assert slot.path.endswith("slot-2")
