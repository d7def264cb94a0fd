"""Find the parts of first-pass findings that the second pass leaves open, by its states of copies (COPY_STATES).

| a finding of           | depends on              | is still open in the entries for which                         |
|------------------------|-------------------------|----------------------------------------------------------------|
| a copy                 | that copy               | its bookie did not answer                                      |
| a difference, a length | all copies of the entry | some bookie did not answer, and the other copies do not differ |
| a loss                 | all copies of the entry | some bookie did not answer, and no copy was good               |
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, LongType, StructField, StructType

from bindery_spark.audit.checks.matching import without_overlapping
from bindery_spark.audit.findings.findings import Kind
from bindery_spark.reading.blocks import LISTED, READ, UNKNOWN
from bindery_spark.schemas import FINDINGS

COPY_KINDS: Final = (Kind.MISSING_REPLICA, Kind.DIGEST_MISMATCH)
"""Findings that are about one copy."""
_PART: Final = StructType([StructField("first", LongType(), False), StructField("last", LongType(), False)])
Cut = Callable[[int, int, list[Row]], list[tuple[int, int]]]
"""(first entry, last entry, states of copies) -> parts of this range."""
_NO_COPY, _WANTED, _OTHER = range(3)
"""An entry without a state, with the wanted state, or with another state."""
_PARTS: Final = re.compile(b"%c(?:%c*%c)*" % (_WANTED, _NO_COPY, _WANTED))


def still_open(first: DataFrame, second: DataFrame, states: DataFrame) -> DataFrame:
    """The parts of the findings `first` that the second pass could not answer, see the table.

    `second`: findings of the second pass; `states`: its COPY_STATES.
    """
    is_of_copy = F.col("kind").isin(*map(str, COPY_KINDS))
    of_copies = _cut(first.where(is_of_copy), states, F.lit(True), _unknown)
    of_entries = first.where(~is_of_copy)
    is_lost = F.col("kind") == str(Kind.ENTRY_LOST)
    lost = _cut(of_entries.where(is_lost), states, F.lit(False), _unknown_and_not_good)
    different = _cut(of_entries.where(~is_lost), states, F.lit(False), _unknown)
    return of_copies.unionByName(without_overlapping(lost.unionByName(different), second))


def read_well(first: DataFrame, states: DataFrame) -> DataFrame:
    """The parts of `first`, findings of one copy each, whose copies the second pass read with a valid digest."""
    return _cut(first, states, F.lit(True), _read)


def parts(
    first: int, last: int, states: Iterable[tuple[int, int, int, int]], *, wanted: int, unless: Collection[int] = ()
) -> Iterator[tuple[int, int]]:
    """Runs of entries in first..last that have a copy in state `wanted` and none in a state of `unless`.

    `states`: (first, last, step, state). Entries without any state do not end a run.
    """
    marks = bytearray(last - first + 1)
    # Later runs overwrite earlier ones: `wanted` overwrites all others, and `unless` overwrites `wanted`.
    for low, high, step, state in sorted(states, key=lambda run: (run[3] == wanted) + 2 * (run[3] in unless)):
        begin = max(low, low + -(-(first - low) // step) * step)
        among = range(begin - first, min(high, last) - first + 1, step)
        value = _WANTED if state == wanted else _OTHER
        if among:
            marks[among.start : among.stop : step] = bytes([value]) * len(among)
    for found in _PARTS.finditer(bytes(marks)):
        yield first + found.start(), first + found.end() - 1


def _unknown(first: int, last: int, states: list[Row]) -> list[tuple[int, int]]:
    """Parts that are UNKNOWN; without any state, all entries. Spark's Python workers call this and the next two."""
    return [*parts(first, last, states, wanted=UNKNOWN)] if states else [(first, last)]


def _unknown_and_not_good(first: int, last: int, states: list[Row]) -> list[tuple[int, int]]:
    return [*parts(first, last, states, wanted=UNKNOWN, unless=(READ, LISTED))] if states else [(first, last)]


def _read(first: int, last: int, states: list[Row]) -> list[tuple[int, int]]:
    return [*parts(first, last, states, wanted=READ)]


def _cut(first: DataFrame, states: DataFrame, is_same_bookie: Column, which: Cut) -> DataFrame:
    """Divide each finding into the parts that `which` returns for its range of entries and the states of their
    copies."""
    names = ("ledger_id", "segment", "bookie", "first", "last", "step", "state")
    others = states.select(*(F.col(name).alias(f"state_{name}") for name in names))
    fits = (
        (F.col("ledger_id") == F.col("state_ledger_id"))
        & (F.col("segment") == F.col("state_segment"))
        & (~is_same_bookie | F.col("bookie").eqNullSafe(F.col("state_bookie")))
        & (F.col("first_entry") <= F.col("state_last"))
        & (F.col("state_first") <= F.col("last_entry"))
    )
    run = F.struct(*(F.col(f"state_{name}").alias(name) for name in ("first", "last", "step", "state")))
    by_finding = (
        first.join(others, fits, "left")
        .groupBy(*FINDINGS.names)
        .agg(F.collect_list(F.when(F.col("state_step").isNotNull(), run)).alias("states"))
    )
    cut = F.udf(which, ArrayType(_PART, containsNull=False), useArrow=False)
    found = by_finding.withColumn("part", F.explode(cut("first_entry", "last_entry", "states")))
    placed = {"first_entry": F.col("part.first"), "last_entry": F.col("part.last")}
    return found.withColumns(placed).select(*FINDINGS.names)
