"""AckRanges against a plain set."""

from bindery_pulsar.ack_ranges import AckRanges
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
    rebuilt = AckRanges()
    for ledger in ranges.ledger_ids():
        assert ranges.bits(ledger) == sum(1 << e for other, e in naive if other == ledger)
        rebuilt.add_bits(ledger, ranges.bits(ledger))
    assert rebuilt == ranges
    assert ranges.copy() == ranges


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
