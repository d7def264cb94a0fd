"""The search for a publish time, compared with a scan of all entries; its cost; unreadable entries."""

import math
from collections.abc import Collection, Mapping, Sequence

import pytest
from bindery_broker.managed_ledger.ledger_list import LedgerList, LedgerRecord
from bindery_broker.managed_ledger.time_search import BEFORE_ENTRIES_MAX, TimeSearch
from bindery_pulsar.message_id import Position
from hypothesis import given, settings
from hypothesis import strategies as st


class World:
    """Ledgers 0, 2, 4, ... with the publish times of their entries. The last one is open."""

    def __init__(self, times: Sequence[Sequence[int]], closes: Sequence[int] | None = None) -> None:
        closes = closes or [max(each, default=0) for each in times[:-1]]
        self.times: Mapping[Position, int] = {
            Position(2 * i, entry): time for i, each in enumerate(times) for entry, time in enumerate(each)
        }
        self.ledgers = LedgerList(
            [
                LedgerRecord(
                    ledger_id=2 * i, entries=len(each), size=len(each), closed_ms=[*closes, 0][i] if each else 0
                )
                for i, each in enumerate(times)
            ]
        )
        self.requested: list[Position] = []

    def search(
        self, at_ms: int, *, unreadable: Collection[Position] = (), lost: Collection[int] = ()
    ) -> tuple[Position, TimeSearch]:
        self.requested = []
        search = TimeSearch(self.ledgers, at_ms)
        while (position := search.wanted()) is not None:
            self.requested.append(position)
            assert len(self.requested) <= 1_000, "the search does not end"
            if position.ledger_id in lost:
                search.lost_ledger(position)
            elif position in unreadable:
                search.unreadable(position)
            else:
                search.found(position, self.times[position])
        return search.position, search

    def scan(self, at_ms: int) -> Position:
        return next((position for position, time in self.times.items() if time >= at_ms), self.ledgers.end)


def split(times: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    parts, first = [], 0
    for size in sizes:
        parts.append(list(times[first : first + size]))
        first += size
    return [*[part for part in parts if part], list(times[first:])]


ordered = st.lists(st.integers(1, 40), max_size=40).map(sorted)
sizes = st.lists(st.integers(0, 12), max_size=5)


@settings(deadline=None, max_examples=300)
@given(ordered, sizes, st.integers(0, 42), st.lists(st.integers(0, 60), min_size=6, max_size=6))
def test_times_in_order_give_what_a_scan_gives_whatever_the_close_times_are(
    times: list[int], sizes: list[int], at_ms: int, closes: list[int]
) -> None:
    parts = split(times, sizes)
    for world in (World(parts), World(parts, closes[: len(parts) - 1])):
        assert world.search(at_ms)[0] == world.scan(at_ms)
        assert len(set(world.requested)) == len(world.requested)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(1, 40), max_size=40), sizes, st.integers(0, 42))
def test_without_order_the_result_is_at_a_boundary_and_few_earlier_entries_are_checked(
    times: list[int], sizes: list[int], at_ms: int
) -> None:
    world = World(split(times, sizes))
    found, search = world.search(at_ms)
    assert found == world.ledgers.end or world.times[found] >= at_ms
    before = search.before()
    everything = list(world.times)
    earlier = [position for position in everything if position < found]
    assert before == earlier[-BEFORE_ENTRIES_MAX:]
    assert not before or world.times[before[-1]] < at_ms


@settings(deadline=None, max_examples=300)
@given(
    ordered, sizes, st.integers(0, 42), st.sets(st.integers(0, 39), max_size=20), st.sets(st.integers(0, 5), max_size=2)
)
def test_unreadable_entries_never_move_the_result_behind_an_entry_that_matches(
    times: list[int], sizes: list[int], at_ms: int, damaged: set[int], lost: set[int]
) -> None:
    world = World(split(times, sizes))
    everything = list(world.times)
    unreadable = {everything[i] for i in damaged if i < len(everything)}
    lost = {2 * i for i in lost}
    found, _ = world.search(at_ms, unreadable=unreadable, lost=lost)
    assert found <= world.scan(at_ms)
    assert len(set(world.requested)) == len(world.requested), "an entry that cannot be read is requested again"


def test_one_damaged_entry_costs_no_precision() -> None:
    world = World([list(range(100, 200)), list(range(200, 300))])
    for damaged in world.times:
        for at_ms in (100, 150, 199, 200, 250, 299):
            expected = world.scan(at_ms)
            found, _ = world.search(at_ms, unreadable={damaged})
            assert found in (expected, damaged), (damaged, at_ms)
            assert found == expected or world.ledgers.next(damaged) == expected


def test_a_lost_ledger_is_passed_over() -> None:
    world = World([list(range(100, 200)), list(range(200, 300)), list(range(300, 400))])
    assert world.search(150, lost={2})[0] == Position(0, 50)
    assert world.search(350, lost={2})[0] == Position(4, 50)
    assert world.search(250, lost={2})[0] == Position(2, 0)  # it may have the time: nothing is left out
    assert world.search(350, lost={0, 2, 4})[0] == Position(0, 0)
    assert len(world.requested) <= 4


@pytest.mark.parametrize("entries", [1, 100, 50_000])
def test_the_number_of_requests_is_logarithmic_in_the_entries_of_one_ledger(entries: int) -> None:
    ledgers = 20
    world = World([list(range(10_000 * (i + 1), 10_000 * (i + 1) + entries)) for i in range(ledgers)])
    if entries == 50_000:  # the ranges of the ledgers must not overlap
        world = World([list(range(100_000 * (i + 1), 100_000 * (i + 1) + entries)) for i in range(ledgers)])
    times = list(world.times.values())
    most = math.ceil(math.log2(entries)) + 3
    for at_ms in (*times[:: max(1, len(times) // 50)], times[-1] + 1, 0):
        assert world.search(at_ms)[0] == world.scan(at_ms)
        assert len(world.requested) <= most
        assert len({position.ledger_id for position in world.requested}) <= 2


def test_a_time_after_the_last_entry_and_a_time_before_the_first_need_few_requests() -> None:
    world = World([[1, 2, 3]] * 4, closes=[3, 3, 3])
    world = World([[10, 20, 30], [40, 50], [60, 70]])
    assert world.search(71)[0] == Position(4, 2) == world.ledgers.end
    assert len(world.requested) <= 2
    assert world.search(5)[0] == Position(0, 0)
    assert world.requested == [Position(0, 0)]
    assert World([[]]).search(5)[0] == Position(0, 0)


def test_a_time_between_two_ledgers_gives_the_first_entry_of_the_second() -> None:
    world = World([[10, 20, 30], [40, 50]], closes=[35])
    for at_ms in (31, 35, 36, 40):
        assert world.search(at_ms)[0] == Position(2, 0)
        assert len(world.requested) <= 3


def test_the_search_goes_on_when_ledgers_are_added_and_deleted() -> None:
    world = World([list(range(10, 20)), list(range(20, 30)), list(range(30, 40))])
    for after in range(6):
        ledgers = LedgerList(list(world.ledgers))
        search = TimeSearch(ledgers, 15)
        for step in range(100):
            position = search.wanted()
            if position is None:
                break
            search.found(position, world.times[position])
            if step == after:
                ledgers.drop_first(1)
                ledgers.grow(entries=5, size=5)
        assert search.position in (Position(0, 5), Position(2, 0))
        assert ledgers.clamp(search.position) == Position(2, 0) or after > 4


def test_few_large_entries_before_the_result_are_checked() -> None:
    records = [LedgerRecord(ledger_id=0, entries=1_000, size=1_000 * 2**19)]
    search = TimeSearch(LedgerList(records), 5)
    while (position := search.wanted()) is not None:
        search.found(position, 5 if position.entry_id >= 500 else 4)
    assert search.before() == [Position(0, 498), Position(0, 499)]
