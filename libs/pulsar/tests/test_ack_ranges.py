"""AckRanges against a plain set."""

import random
import sys

import pytest
from bindery_pulsar.ack_ranges import BLOCK_BITS, AckRanges
from hypothesis import given, settings
from hypothesis import strategies as st

LEDGERS = st.integers(0, 2)
ENTRIES = st.integers(0, 70)
ADD = st.tuples(st.just("add"), LEDGERS, ENTRIES, st.integers(0, 9))
REMOVE = st.tuples(st.just("remove"), LEDGERS, st.integers(-1, 70), st.just(0))


def as_set(ranges: AckRanges) -> set[tuple[int, int]]:
    return {(ledger, entry) for ledger, first, last in ranges for entry in range(first, last + 1)}


@settings(deadline=None, max_examples=150)
@given(st.lists(st.one_of(ADD, ADD, ADD, REMOVE), max_size=60))
def test_ranges_equal_a_set_of_entries_and_are_as_few_as_possible(steps: list[tuple[str, int, int, int]]) -> None:
    ranges, naive = AckRanges(), set[tuple[int, int]]()
    for kind, ledger, entry, length in steps:
        if kind == "add":
            added = {(ledger, e) for e in range(entry, entry + length + 1)}
            assert ranges.add_range(ledger, entry, entry + length) == len(added - naive)
            naive |= added
        else:
            ranges.remove_upto(ledger, entry)
            naive = {item for item in naive if item > (ledger, entry)}
        assert as_set(ranges) == naive
        assert ranges.entries_count == len(naive)
        starts = [(ledger, e) for ledger, e in naive if (ledger, e - 1) not in naive]
        assert ranges.ranges_count == len(starts)
        assert list(ranges) == sorted(ranges)
    for ledger in range(3):
        for entry in range(85):
            assert ranges.contains(ledger, entry) == ((ledger, entry) in naive)
        for first in range(0, 85, 3):
            for last in range(first, 85, 5):
                expected = any((ledger, entry) in naive for entry in range(first, last + 1))
                assert ranges.has_any(ledger, first, last) == expected
    rebuilt = AckRanges()
    for ledger in ranges.ledger_ids():
        assert ranges.bits(ledger) == sum(1 << e for other, e in naive if other == ledger)
        rebuilt.add_bits(ledger, ranges.bits(ledger))
    assert rebuilt == ranges
    assert ranges.copy() == ranges


@pytest.mark.parametrize("seed", range(20))
def test_ranges_of_many_blocks_equal_a_set_of_entries(seed: int) -> None:
    """Ranges that begin, end or touch at the limits of blocks, and full blocks between partly set ones."""
    chance = random.Random(seed)
    ranges, naive = AckRanges(), set[tuple[int, int]]()
    for _ in range(40):
        ledger, entry = chance.randrange(3), chance.randrange(24_000)
        to_limit = BLOCK_BITS - entry % BLOCK_BITS
        kind = chance.random()
        if kind < 0.7:
            length = chance.choice([1, 1, 3, 5000, 9000, to_limit, to_limit + 1, BLOCK_BITS])
            added = {(ledger, e) for e in range(entry, entry + length)}
            assert ranges.add_range(ledger, entry, entry + length - 1) == len(added - naive)
            naive |= added
        elif kind < 0.8:
            assert ranges.add(ledger, entry) == ((ledger, entry) not in naive)
            naive.add((ledger, entry))
        elif kind < 0.9:
            upto = chance.choice([entry, entry + to_limit - 1, entry + to_limit])
            ranges.remove_upto(ledger, upto)
            naive = {item for item in naive if item > (ledger, upto)}
        else:
            other = AckRanges()
            for _ in range(5):
                first, length = chance.randrange(24_000), chance.randrange(9000)
                other.add_range(ledger, first, first + length)
                naive |= {(ledger, e) for e in range(first, first + length + 1)}
            ranges.update(other)
        assert ranges.entries_count == len(naive)
    found = list(ranges)
    assert as_set(ranges) == naive
    assert len(found) == ranges.ranges_count == sum((ledger, e - 1) not in naive for ledger, e in naive)
    for ledger, first, last in chance.sample(found, min(len(found), 20)):
        assert {ranges.end_of_range(ledger, e) for e in (first, (first + last) // 2, last)} == {last}
        assert ranges.end_of_range(ledger, last + 1) is None
        assert not ranges.contains(ledger, first - 1)
    rebuilt, joined = AckRanges(), AckRanges()
    for ledger in ranges.ledger_ids():
        rebuilt.add_bits(ledger, ranges.bits(ledger))
    slices = list(ranges.slices(3))
    for part in slices:
        assert part.blocks_count <= 3
        joined.update(part)
    assert rebuilt == joined == ranges.copy() == ranges
    assert sum(part.entries_count for part in slices) == len(naive)
    at = (chance.randrange(3), chance.randrange(24_000))
    assert ranges.count_upto(*at) == sum(item <= at for item in naive)
    assert sorted(ranges.last_entries()) == sorted(
        max(e for each, e in naive if each == ledger) for ledger in ranges.ledger_ids()
    )


def test_a_copy_is_independent() -> None:
    ranges = AckRanges()
    ranges.add_range(0, 1, 3 * BLOCK_BITS)
    twin = ranges.copy()
    twin.add(0, 0)
    twin.remove_upto(0, BLOCK_BITS)
    twin.add(1, 1)
    assert list(ranges) == [(0, 1, 3 * BLOCK_BITS)]
    assert ranges != twin


def test_a_range_of_any_length_takes_no_memory() -> None:
    """A damaged record may name any entry id."""
    ranges = AckRanges()
    ranges.add_range(0, 5, 2**62)
    assert ranges.end_of_range(0, 6) == 2**62
    assert ranges.blocks_count == 3
    ranges.remove_upto(0, 2**61)
    assert list(ranges) == [(0, 2**61 + 1, 2**62)]
    assert ranges.count_upto(0, 2**61 + 10) == 10


def test_a_million_entries_with_a_gap_after_each_take_little_memory() -> None:
    ranges = AckRanges()
    for entry in range(1, 10**6, 2):
        ranges.add(7, entry)
    assert ranges.blocks_count == 245
    assert sum(map(sys.getsizeof, ranges._ledgers[7].parts.values())) < 200_000


def test_memory_depends_on_the_gaps_and_not_on_the_entries() -> None:
    ranges = AckRanges()
    for entry in range(100_000):
        if entry % 50_000:
            ranges.add(7, entry)
    assert ranges.ranges_count == 2
    assert ranges.entries_count == 99_998


def test_ranges_are_printed_as_by_pulsar() -> None:
    ranges = AckRanges()
    ranges.add_range(1, 3, 5)
    ranges.add(2, 0)
    assert str(ranges) == "[(1:2..1:5],(2:-1..2:0]]"
    assert not AckRanges()
    assert str(AckRanges()) == "[]"


def test_a_text_may_show_the_first_ranges_only() -> None:
    ranges = AckRanges()
    for entry_id in (1, 3, 5):
        ranges.add(0, entry_id)
    whole = "[(0:0..0:1],(0:2..0:3],(0:4..0:5]]"
    assert str(ranges) == ranges.text() == ranges.text(ranges_max=3) == ranges.text(ranges_max=4) == whole
    assert ranges.text(ranges_max=2) == "[(0:0..0:1],(0:2..0:3],...]"
    assert AckRanges().text(ranges_max=2) == "[]"
