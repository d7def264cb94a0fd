"""Which parts of a finding stand after a second reading, entry by entry."""

from bindery_spark.audit.second_pass.open_parts import parts
from bindery_spark.reading.blocks import CORRUPT, LISTED, READ, UNKNOWN


def test_a_run_is_cut_to_what_nobody_said() -> None:
    told = [(0, 1, 1, UNKNOWN), (2, 2, 1, READ), (3, 7, 1, UNKNOWN), (8, 9, 1, CORRUPT)]
    assert [*parts(1, 8, told, wanted=UNKNOWN)] == [(1, 1), (3, 7)]
    assert [*parts(0, 9, told, wanted=READ)] == [(2, 2)]
    assert [*parts(8, 9, told, wanted=UNKNOWN)] == []


def test_entries_of_other_bookies_do_not_end_a_run() -> None:
    """Of five bookies this one has the first and the second entry of each five."""
    told = [(0, 10, 5, UNKNOWN), (1, 11, 5, UNKNOWN), (15, 25, 5, UNKNOWN), (16, 26, 5, READ)]
    assert [*parts(0, 26, told, wanted=UNKNOWN)] == [(0, 15), (20, 20), (25, 25)]
    assert [*parts(6, 11, told, wanted=UNKNOWN)] == [(6, 11)]
    assert [*parts(16, 16, told, wanted=UNKNOWN)] == [], "a silent stripe around it is another's"


def test_an_entry_of_which_somebody_has_a_good_copy_is_not_wanted() -> None:
    told = [(0, 3, 1, UNKNOWN), (0, 0, 1, CORRUPT), (1, 1, 1, READ), (2, 2, 1, LISTED), (3, 3, 1, CORRUPT)]
    assert [*parts(0, 3, told, wanted=UNKNOWN, unless=(READ, LISTED))] == [(0, 0), (3, 3)]
