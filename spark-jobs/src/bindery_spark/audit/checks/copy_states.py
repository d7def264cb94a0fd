"""Convert blocks (`reading.blocks`) to COPY_STATES. One row describes consecutive copies with the same state."""

from itertools import groupby
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, IntegerType, StructField, StructType

from bindery_spark.reading.blocks import READ, UNREPORTED

COPY_STATES: Final = "ledger_id long, segment int, bookie string, first long, last long, step int, state int"
"""Schema: the copies of the entries `first`, `first` + `step`, ... `last` on one bookie have this `state`."""
_RUN: Final = StructType([StructField(name, IntegerType(), False) for name in ("at", "end", "state")])
"""Slots `at` to `end` (inclusive) of a block."""


def copy_states(blocks: DataFrame) -> DataFrame:
    """COPY_STATES of the expected blocks."""
    slots = F.udf(_runs, ArrayType(_RUN, containsNull=False), useArrow=False)
    size = ((F.col("last_entry") - F.col("first_entry")) / F.col("step")).cast("int") + 1
    runs = blocks.where("expected").select(
        "ledger_id",
        "segment",
        "bookie",
        "first_entry",
        "step",
        F.explode(slots(F.col("states"), size)).alias("run"),
    )
    first, last = (F.col("first_entry") + F.col(f"run.{end}") * F.col("step") for end in ("at", "end"))
    state = F.col("run.state").alias("state")
    return runs.select("ledger_id", "segment", "bookie", first.alias("first"), last.alias("last"), "step", state)


def _runs(states: bytes | None, size: int) -> list[tuple[int, int, int]]:
    """Return the runs of slots with the same state; `states` None: all READ. Spark's Python workers call this."""
    if states is None:
        return [(0, size - 1, READ)]
    runs = ([*each] for _, each in groupby(enumerate(states), key=lambda slot: slot[1]))
    return [(run[0][0], run[-1][0], run[0][1]) for run in runs if run[0][1] != UNREPORTED]
