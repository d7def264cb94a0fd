"""Filters that the data sources apply, and those that they leave to Spark."""

from bindery_core.ids import ID_MAX
from bindery_spark.schemas import NO_LEDGER
from bindery_spark.sources.filters import Wanted
from bindery_spark.sources.ledgers import LedgersReader
from bindery_spark.sources.options import LedgersOptions
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
)

ZOOKEEPER = {"zookeeper": "h:1"}


def taken(*filters: Filter) -> tuple[Wanted, list[Filter]]:
    wanted = Wanted()
    return wanted, list(wanted.take(filters, columns=("bookie",)))


def test_ranges_of_ledgers_are_intersected() -> None:
    ledger = ("ledger_id",)
    wanted, left = taken(
        GreaterThan(ledger, 4),
        LessThanOrEqual(ledger, 90),
        GreaterThanOrEqual(ledger, 3),
        LessThan(ledger, 80),
        IsNotNull(ledger),
    )
    assert (wanted.first_ledger, wanted.last_ledger, left) == (5, 79, [])
    assert wanted.has(5)
    assert not wanted.has(4)


def test_rows_without_a_ledger_are_filtered_by_spark() -> None:
    """A bookie that cannot list has a row with NO_LEDGER, for any range of ledgers."""
    ledger = ("ledger_id",)
    for wanted_by, first, last in [
        (GreaterThanOrEqual(ledger, 5), 5, ID_MAX),
        (EqualTo(ledger, NO_LEDGER), NO_LEDGER, NO_LEDGER),
        (LessThan(ledger, 0), NO_LEDGER, NO_LEDGER),
        (LessThanOrEqual(ledger, 5), NO_LEDGER, 5),
        (In(ledger, (NO_LEDGER, 3)), NO_LEDGER, 3),
    ]:
        reader = LedgersReader(LedgersOptions.parse({**ZOOKEEPER, "include_unexpected": "true"}))
        assert list(reader.pushFilters([wanted_by])) == [wanted_by]
        wanted = reader._wanted
        assert (wanted.first_ledger, wanted.last_ledger, wanted.is_empty) == (first, last, False)
    reader = LedgersReader(LedgersOptions.parse(ZOOKEEPER))
    assert list(reader.pushFilters([EqualTo(ledger, NO_LEDGER)])) == []
    assert reader._wanted.is_empty, "without include_unexpected there are no such rows"


def test_a_list_of_ledgers_limits_the_range_and_is_left_to_spark() -> None:
    wanted, left = taken(In(("ledger_id",), (7, 3, 5)))
    assert (wanted.first_ledger, wanted.last_ledger, len(left)) == (3, 7, 1)


def test_filters_on_bookies_are_combined_and_contradictions_leave_no_rows() -> None:
    wanted, left = taken(In(("bookie",), ("a", "b")), EqualTo(("bookie",), "b"))
    assert left == []
    assert [wanted.allows("bookie", name) for name in "abc"] == [False, True, False]
    assert taken(EqualTo(("bookie",), "a"), EqualTo(("bookie",), "b"))[0].is_empty
    assert taken(EqualTo(("ledger_id",), 1), GreaterThan(("ledger_id",), 1))[0].is_empty


def test_unsupported_filters_are_left_to_spark() -> None:
    filters = [
        Not(EqualTo(("bookie",), "a")),
        EqualTo(("present",), True),
        LessThan(("bookie",), "b"),
        EqualTo(("segments", "first_entry"), 1),
        EqualTo(("ledger_id",), 1.5),
        Not(EqualTo(("ledger_id",), 1)),
    ]
    wanted, left = taken(*filters)
    assert left == filters
    assert (wanted.first_ledger, wanted.last_ledger, wanted.is_empty) == (0, ID_MAX, False)


def test_a_single_ledger_is_an_exact_range() -> None:
    for same in (EqualTo(("ledger_id",), 7), EqualNullSafe(("ledger_id",), 7)):
        wanted, left = taken(same)
        assert (wanted.first_ledger, wanted.last_ledger, wanted.is_empty, left) == (7, 7, False, [])
        assert [wanted.has(ledger_id) for ledger_id in (6, 7, 8)] == [False, True, False]
    for wider in (GreaterThanOrEqual(("ledger_id",), 7), LessThanOrEqual(("ledger_id",), 7)):
        wanted, left = taken(wider)
        assert (wanted.has(7), wanted.is_empty, left) == (True, False, [])


def test_without_filters_every_ledger_from_0_on_is_read() -> None:
    wanted, left = taken()
    assert (wanted.first_ledger, wanted.last_ledger, wanted.is_empty, wanted.has_ledgerless, left) == (
        0,
        ID_MAX,
        False,
        False,
        [],
    )
    assert (wanted.has(0), wanted.has(ID_MAX), wanted.has(NO_LEDGER)) == (True, True, False)
    assert wanted.allows("bookie", "any")


def test_a_list_without_a_ledger_leaves_no_rows() -> None:
    for values in ((), (None,), ("x",)):
        wanted, left = taken(In(("ledger_id",), values))
        assert wanted.is_empty
        assert not wanted.has(0)
        assert not wanted.allows("bookie", "a")
        assert len(left) == 1, "Spark evaluates it"


def test_a_contradiction_remains_one_with_further_filters() -> None:
    ledgers = taken(EqualTo(("ledger_id",), 1), EqualTo(("ledger_id",), 2), IsNotNull(("ledger_id",)))[0]
    assert ledgers.is_empty
    wanted = taken(EqualTo(("ledger_id",), 1), EqualTo(("ledger_id",), 2), EqualTo(("bookie",), "a"))[0]
    assert wanted.is_empty
    wanted = taken(EqualTo(("bookie",), "a"), EqualTo(("bookie",), "b"), EqualTo(("ledger_id",), 1))[0]
    assert wanted.is_empty
    assert not wanted.has(1)


def test_filters_of_one_text_column_do_not_restrict_another() -> None:
    wanted = Wanted()
    filters = [EqualTo(("bookie",), "a"), IsNotNull(("bookie",)), EqualNullSafe(("state",), "open")]
    assert list(wanted.take(filters, columns=("bookie", "state"))) == []
    assert [wanted.allows(*each) for each in (("bookie", "a"), ("bookie", "b"), ("state", "open"), ("rack", "r"))] == [
        True,
        False,
        True,
        True,
    ]
    assert not wanted.allows("state", "closed")


def test_a_filter_on_a_column_that_another_source_filters_by_is_left_to_spark() -> None:
    wanted = Wanted()
    filters = [EqualTo(("state",), "open"), IsNotNull(("state",))]
    assert list(wanted.take(filters, columns=("bookie",))) == filters
    assert wanted.allows("state", "closed")
