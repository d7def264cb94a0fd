"""What bookies said of each copy in a second reading, and which parts of the first one's findings stand after it.

What was said is kept as SAID: runs of copies of one state, some for each block (`bindery_spark.reading.blocks`).

| a finding of           | is about                     | stands in those entries of which                          |
|------------------------|------------------------------|-----------------------------------------------------------|
| a copy                 | what its bookie said of it   | the bookie says nothing                                   |
| a difference, a length | all copies of the entry      | some bookie says nothing, and the others do not differ    |
| a loss                 | all copies of the entry      | some bookie says nothing, and nobody has a good copy      |
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import groupby
from typing import Final

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, IntegerType, LongType, StructField, StructType

from bindery_spark.audit.checks.again import SAME
from bindery_spark.audit.findings.findings import Kind
from bindery_spark.reading.blocks import LISTED, READ, UNKNOWN, UNTOLD
from bindery_spark.schemas import FINDINGS

SAID: Final = "ledger_id long, segment int, bookie string, first long, last long, step int, state int"
OF_COPIES: Final = (Kind.MISSING_REPLICA, Kind.DIGEST_MISMATCH)
_PLACES: Final = StructType([StructField("first", LongType(), False), StructField("last", LongType(), False)])
_RUN: Final = StructType([StructField(name, IntegerType(), False) for name in ("at", "end", "state")])
"""Slots `at` to `end` of a block."""
Places = Callable[[int, int, list[Row]], list[tuple[int, int]]]
_OTHERS, _WANTED, _ASKED = range(3)
"""An entry is not of these copies, is wanted, or is of them and not wanted."""
_PARTS: Final = re.compile(b"%c(?:%c*%c)*" % (_WANTED, _OTHERS, _WANTED))


def said(blocks: DataFrame) -> DataFrame:
    """SAID of the expected blocks."""
    slots = F.udf(_runs, ArrayType(_RUN, containsNull=False), useArrow=False)
    size = ((F.col("last_entry") - F.col("first_entry")) / F.col("step")).cast("int") + 1
    told = blocks.where("expected").select(
        "ledger_id", "segment", "bookie", "first_entry", "step",
        F.explode(slots(F.col("states"), size)).alias("run"),
    )  # fmt: skip
    first, last = (F.col("first_entry") + F.col(f"run.{end}") * F.col("step") for end in ("at", "end"))
    state = F.col("run.state").alias("state")
    return told.select("ledger_id", "segment", "bookie", first.alias("first"), last.alias("last"), "step", state)


def _runs(states: bytes | None, size: int) -> list[tuple[int, int, int]]:
    """Runs in Spark's Python workers."""
    if states is None:
        return [(0, size - 1, READ)]
    runs = ([*each] for _, each in groupby(enumerate(states), key=lambda slot: slot[1]))
    return [(run[0][0], run[-1][0], run[0][1]) for run in runs if run[0][1] != UNTOLD]


def unsaid(first: DataFrame, second: DataFrame, told: DataFrame) -> DataFrame:
    """The parts of `first`, findings of copies, that stand. `second`: what the second reading found; `told`: SAID."""
    is_of_copies = F.col("kind").isin(*map(str, OF_COPIES))
    of_copies = _cut(first.where(is_of_copies), told, F.lit(True), _unknown)
    of_entries = first.where(~is_of_copies)
    is_lost = F.col("kind") == str(Kind.ENTRY_LOST)
    lost = _cut(of_entries.where(is_lost), told, F.lit(False), _unknown_and_not_good)
    unlike = _cut(of_entries.where(~is_lost), told, F.lit(False), _unknown)
    return of_copies.unionByName(_without(lost.unionByName(unlike), second))


def read_well(first: DataFrame, told: DataFrame) -> DataFrame:
    """The parts of `first`, findings of one copy each, whose copies were read, and their digests hold."""
    return _cut(first, told, F.lit(True), _read)


def parts(
    first: int, last: int, told: Iterable[tuple[int, int, int, int]], *, wanted: int, unless: Collection[int] = ()
) -> Iterator[tuple[int, int]]:
    """Runs of entries from `first` to `last` of which something `told` (first, last, step, state) has the state
    `wanted`, and nothing has one of `unless`. Entries that nobody was asked for do not end a run."""
    asked = bytearray(last - first + 1)
    # Later ones overrule: what is wanted, and last what must not be.
    for low, high, step, state in sorted(told, key=lambda run: (run[3] == wanted) + 2 * (run[3] in unless)):
        begin = max(low, low + -(-(first - low) // step) * step)
        among = range(begin - first, min(high, last) - first + 1, step)
        value = _WANTED if state == wanted else _ASKED
        if among:
            asked[among.start : among.stop : step] = bytes([value]) * len(among)
    for found in _PARTS.finditer(bytes(asked)):
        yield first + found.start(), first + found.end() - 1


def _unknown(first: int, last: int, told: list[Row]) -> list[tuple[int, int]]:
    """Of what nobody told anything nothing is known, either. This and what follows runs in Spark's Python workers."""
    return [*parts(first, last, told, wanted=UNKNOWN)] if told else [(first, last)]


def _unknown_and_not_good(first: int, last: int, told: list[Row]) -> list[tuple[int, int]]:
    return [*parts(first, last, told, wanted=UNKNOWN, unless=(READ, LISTED))] if told else [(first, last)]


def _read(first: int, last: int, told: list[Row]) -> list[tuple[int, int]]:
    return [*parts(first, last, told, wanted=READ)]


def _cut(first: DataFrame, told: DataFrame, is_same_bookie: Column, which: Places) -> DataFrame:
    """Parts of each finding: `which` of its first and last entry and of what was told of the copies it is about."""
    names = ("ledger_id", "segment", "bookie", "first", "last", "step", "state")
    others = told.select(*(F.col(name).alias(f"told_{name}") for name in names))
    fits = (
        (F.col("ledger_id") == F.col("told_ledger_id"))
        & (F.col("segment") == F.col("told_segment"))
        & (~is_same_bookie | F.col("bookie").eqNullSafe(F.col("told_bookie")))
        & (F.col("first_entry") <= F.col("told_last"))
        & (F.col("told_first") <= F.col("last_entry"))
    )
    run = F.struct(*(F.col(f"told_{name}").alias(name) for name in ("first", "last", "step", "state")))
    by_finding = (
        first.join(others, fits, "left")
        .groupBy(*FINDINGS.names)
        .agg(F.collect_list(F.when(F.col("told_step").isNotNull(), run)).alias("told"))
    )
    cut = F.udf(which, ArrayType(_PLACES, containsNull=False), useArrow=False)
    found = by_finding.withColumn("part", F.explode(cut("first_entry", "last_entry", "told")))
    placed = {"first_entry": F.col("part.first"), "last_entry": F.col("part.last")}
    return found.withColumns(placed).select(*FINDINGS.names)


def _without(first: DataFrame, second: DataFrame) -> DataFrame:
    """Those of `first` that `second` does not tell, too."""
    others = second.select(*(F.col(key).alias(f"again_{key}") for key in (*SAME, "first_entry", "last_entry")))
    is_same = (F.col("first_entry") <= F.col("again_last_entry")) & (F.col("again_first_entry") <= F.col("last_entry"))
    for key in SAME:
        is_same = is_same & F.col(key).eqNullSafe(F.col(f"again_{key}"))
    return first.join(others, is_same, "left_anti")
