"""The parts of a finding that the second pass leaves open, entry by entry."""

from bindery_spark.audit.second_pass.open_parts import parts
from bindery_spark.reading.blocks import CORRUPT, LISTED, MISSING, READ, UNKNOWN


def test_a_finding_is_cut_to_its_unknown_entries() -> None:
    states = [(0, 1, 1, UNKNOWN), (2, 2, 1, READ), (3, 7, 1, UNKNOWN), (8, 9, 1, CORRUPT)]
    assert [*parts(1, 8, states, wanted=UNKNOWN)] == [(1, 1), (3, 7)]
    assert [*parts(0, 9, states, wanted=READ)] == [(2, 2)]
    assert [*parts(8, 9, states, wanted=UNKNOWN)] == []


def test_entries_of_other_bookies_do_not_end_a_part() -> None:
    """This bookie stores the first two of every five entries."""
    states = [(0, 10, 5, UNKNOWN), (1, 11, 5, UNKNOWN), (15, 25, 5, UNKNOWN), (16, 26, 5, READ)]
    assert [*parts(0, 26, states, wanted=UNKNOWN)] == [(0, 15), (20, 20), (25, 25)]
    assert [*parts(6, 11, states, wanted=UNKNOWN)] == [(6, 11)]
    assert [*parts(16, 16, states, wanted=UNKNOWN)] == [], "the silent stripe around it is of other entries"


def test_an_entry_with_a_good_copy_is_excluded() -> None:
    states = [(0, 3, 1, UNKNOWN), (0, 0, 1, CORRUPT), (1, 1, 1, READ), (2, 2, 1, LISTED), (3, 3, 1, CORRUPT)]
    assert [*parts(0, 3, states, wanted=UNKNOWN, unless=(READ, LISTED))] == [(0, 0), (3, 3)]


def test_parts_are_relative_to_the_first_entry_and_follow_the_steps() -> None:
    assert cut(10, 19, [(0, 30, 1, UNKNOWN)]) == [(10, 19)]
    assert cut(10, 10, [(10, 10, 1, UNKNOWN)]) == [(10, 10)]
    assert cut(10, 19, [(0, 30, 3, UNKNOWN)]) == [(12, 18)], "0, 3, 6 ..."
    assert cut(10, 19, [(1, 40, 3, UNKNOWN)]) == [(10, 19)]
    assert cut(10, 19, [(12, 15, 1, UNKNOWN)]) == [(12, 15)]
    assert cut(10, 19, [(20, 25, 1, UNKNOWN), (0, 9, 1, UNKNOWN)]) == []
    assert cut(10, 19, [(0, 30, 1, UNKNOWN), (13, 14, 1, READ)]) == [(10, 19)], "an entry with any unknown copy"
    assert cut(10, 19, [(13, 14, 1, READ), (0, 30, 1, UNKNOWN)], unless=(READ,)) == [(10, 12), (15, 19)]
    assert cut(10, 19, [(0, 30, 1, UNKNOWN), (13, 14, 1, READ)], unless=(READ,)) == [(10, 12), (15, 19)]
    assert cut(10, 19, [(10, 12, 1, UNKNOWN), (14, 19, 1, MISSING)]) == [(10, 12)]
    assert cut(10, 19, []) == []


def cut(first: int, last: int, states: list[tuple[int, int, int, int]], *, unless: tuple[int, ...] = ()) -> list:
    return list(parts(first, last, states, wanted=UNKNOWN, unless=unless))
