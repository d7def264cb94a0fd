"""Filters that the data sources apply, and those that they leave to Spark."""

from bindery_core.ids import ID_MAX
from bindery_spark.schemas import NO_LEDGER
from bindery_spark.sources.filters import Wanted
from bindery_spark.sources.ledgers import LedgersReader
from bindery_spark.sources.options import LedgersOptions
from pyspark.sql.datasource import (
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
