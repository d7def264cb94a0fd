"""Match findings of two readings of one run, or of two runs, by what they are about. DataFrames of FINDINGS.

Two findings have the same subject if kind, ledger, segment and bookie are equal (null equals null). Some functions also
require that their ranges of entries overlap.
"""

from collections.abc import Iterable
from functools import reduce
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from bindery_spark.schemas import FINDINGS

SUBJECT: Final = ("kind", "ledger_id", "segment", "bookie")
"""Columns that are equal in two findings with the same subject."""
_RANGE: Final = ("first_entry", "last_entry")


def reported_twice(first: DataFrame, second: DataFrame) -> DataFrame:
    """The findings in `second` that `first` reports too, with the same first entry and the same expectation."""
    keys = (*SUBJECT, "first_entry", "expected")
    return second.join(_other(first, keys).distinct(), _equal(keys), "left_semi")


def overlapping(first: DataFrame, second: DataFrame) -> DataFrame:
    """The findings in `first`, cut to the entries that findings in `second` report too."""
    both = first.join(_other(second, (*SUBJECT, *_RANGE)).distinct(), _equal(SUBJECT) & _overlaps())
    cut = {
        "first_entry": F.greatest("first_entry", "other_first_entry"),
        "last_entry": F.least("last_entry", "other_last_entry"),
    }
    return both.withColumns(cut).select(*FINDINGS.names)


def without_overlapping(first: DataFrame, second: DataFrame) -> DataFrame:
    """The findings in `first` that share no entry with a finding in `second` of the same subject."""
    return first.join(_other(second, (*SUBJECT, *_RANGE)), _equal(SUBJECT) & _overlaps(), "left_anti")


def with_first_seen(findings: DataFrame, earlier: DataFrame | None) -> DataFrame:
    """`findings` with the time at which each was first seen. `earlier`: findings of an earlier run, if there is one."""
    if earlier is None:
        return findings
    keys = (*SUBJECT, "first_entry")
    before = earlier.groupBy(*keys).agg(F.min("first_seen_ms").alias("first_seen_ms"))
    return (
        findings.join(_other(before, (*keys, "first_seen_ms")), _equal(keys), "left")
        .withColumn("first_seen_ms", F.least("first_seen_ms", "other_first_seen_ms"))
        .select(*FINDINGS.names)
    )


def _other(frame: DataFrame, columns: Iterable[str]) -> DataFrame:
    return frame.select(*(F.col(name).alias(f"other_{name}") for name in columns))


def _equal(columns: Iterable[str]) -> Column:
    """Condition that all columns are equal; null equals null."""
    return reduce(Column.__and__, (F.col(name).eqNullSafe(F.col(f"other_{name}")) for name in columns))


def _overlaps() -> Column:
    return (F.col("first_entry") <= F.col("other_last_entry")) & (F.col("other_first_entry") <= F.col("last_entry"))
