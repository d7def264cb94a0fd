"""Arithmetic of positions, compared with a list of all positions."""

import pytest
from bindery_broker.managed_ledger.ledger_list import LedgerList, LedgerRecord
from bindery_pulsar.message_id import EARLIEST, LATEST, Position
from hypothesis import given, settings
from hypothesis import strategies as st


def listing(*entries: int) -> LedgerList:
    """Return ledgers 2, 5, 8, ... with these numbers of entries."""
    return LedgerList(
        [LedgerRecord(ledger_id=2 + 3 * i, entries=count, size=10 * count) for i, count in enumerate(entries)]
    )


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(1, 5), max_size=4),
    st.integers(0, 5),
    st.tuples(st.integers(0, 16), st.integers(-1, 7)),
    st.tuples(st.integers(0, 16), st.integers(-1, 7)),
)
def test_every_result_matches_a_list_of_positions(
    closed: list[int], current: int, a: tuple[int, int], b: tuple[int, int]
) -> None:
    ledgers = listing(*closed, current)
    everything = [Position(record.ledger_id, entry) for record in ledgers for entry in range(record.entries)]
    here, there = Position(*a), Position(*b)
    before = Position(2, -1)
    assert ledgers.entries_count == len(everything)
    assert ledgers.last_confirmed == (everything[-1] if everything else before)
    assert ledgers.contains(here) == (here in everything)
    assert ledgers.clamp(here) == next((p for p in everything if p >= here), ledgers.end)
    assert ledgers.next(here) == next((p for p in everything if p > here), ledgers.end)
    assert ledgers.previous(here) == next((p for p in reversed(everything) if p < here), before)
    assert ledgers.entries_between(after=here, upto=there) == sum(here < p <= there for p in everything)
    after = [p for p in everything if p > here]
    assert ledgers.after(here) == (len(after), 10 * len(after))
    assert [ledgers.nth(i) for i in range(len(everything))] == everything
    assert ledgers.nth(len(everything)) == ledgers.end
    for i, position in enumerate([*everything, ledgers.end]):
        for count in range(len(everything) + 2):
            assert ledgers.forward(position, count) == ledgers.nth(i + count)


def test_earliest_and_latest_are_the_ends() -> None:
    ledgers = listing(2, 3)
    assert ledgers.clamp(EARLIEST) == Position(2, 0)
    assert ledgers.clamp(LATEST) == Position(5, 3) == ledgers.end
    assert ledgers.entries_between(after=EARLIEST, upto=LATEST) == 5


def test_the_oldest_ledgers_can_be_dropped() -> None:
    ledgers = listing(2, 3, 1)
    ledgers.drop_first(2)
    assert ledgers.first_position == Position(8, 0)
    assert ledgers.next(Position(2, 1)) == Position(8, 0)
    assert (ledgers.size, len(ledgers), ledgers.get(5)) == (10, 1, None)


def test_only_the_last_ledger_grows() -> None:
    ledgers = listing(2, 3)
    ledgers.grow(entries=2, size=7)
    assert [(record.entries, record.size) for record in ledgers] == [(2, 20), (5, 37)]
    assert (ledgers.entries_count, ledgers.size) == (7, 57)


def test_bytes_within_a_ledger_are_estimated_by_its_mean() -> None:
    ledgers = LedgerList([LedgerRecord(ledger_id=1, entries=3, size=100), LedgerRecord(ledger_id=2, entries=2, size=9)])
    assert [ledgers.after(Position(1, entry)) for entry in (-1, 0, 1, 2)] == [(5, 109), (4, 75), (3, 42), (2, 9)]
    assert [ledgers.after(Position(2, entry)) for entry in (0, 1, 7)] == [(1, 4), (0, 0), (0, 0)]


def test_ids_must_ascend() -> None:
    with pytest.raises(AssertionError, match="ascend"):
        LedgerList([LedgerRecord(ledger_id=2), LedgerRecord(ledger_id=2)])


def test_the_placeholder_is_no_ledger_of_the_topic():
    assert not LedgerList([]).holds(0)
    assert LedgerList([LedgerRecord(ledger_id=0)]).holds(0)
    assert not LedgerList([LedgerRecord(ledger_id=0)]).holds(1)
