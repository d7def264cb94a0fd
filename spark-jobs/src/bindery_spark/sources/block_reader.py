"""Read replicas as blocks for audits: the driver plans, Spark's workers read, and a row describes hundreds of copies.

Each task is one partition. The driver plans, because it has the list of ledgers already; planning in Spark would start
another process. Blocks are few, so they are passed to the JVM as plain rows; Arrow would require pandas here.
"""

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import pyarrow as pa
from bindery_core.ids import LedgerId
from pyspark.sql import DataFrame, SparkSession

from bindery_spark.reading.blocks import Blocks, expand, span_of
from bindery_spark.reading.partitions import Task
from bindery_spark.schemas import BLOCKS, REPLICAS
from bindery_spark.sources import cluster
from bindery_spark.sources.filters import Wanted
from bindery_spark.sources.ledgers import connected_to, plan, read_task
from bindery_spark.sources.options import LedgersOptions


def read_blocks(
    spark: SparkSession,
    options: LedgersOptions,
    ids: Sequence[LedgerId],
    *,
    unexpected_in: tuple[int, int] | None,
    unexpected_on: str | None = None,
) -> DataFrame:
    """BLOCKS of the ledgers `ids`. `unexpected_in`: also list orphaned data of ledgers first..last (inclusive);
    `unexpected_on`: on this bookie only. This call plans the tasks; each evaluation of the result reads again. Raises
    MetadataUnavailable."""
    options = replace(options, include_unexpected=unexpected_in is not None)
    tasks = [
        task
        for task in plan_blocks(options, ids, unexpected_in)
        if task.unexpected_in is None or unexpected_on in (None, task.bookie_id)
    ]
    rows = spark.sparkContext.parallelize(tasks, max(1, len(tasks))).flatMap(partial(read_rows, options))
    return spark.createDataFrame(rows, BLOCKS, verifySchema=False)


def plan_blocks(
    options: LedgersOptions, ids: Sequence[LedgerId], unexpected_in: tuple[int, int] | None
) -> Sequence[Task]:
    """Return the tasks that read the ledgers `ids` as blocks. Arguments: see `read_blocks`."""

    async def planned() -> Sequence[Task]:
        async with connected_to(options) as here:
            wanted = Wanted() if unexpected_in is None else Wanted(*unexpected_in)
            return await plan(here, options, wanted, ids, span_of=span_of)

    return cluster.run(planned)


def read_rows(options: LedgersOptions, task: Task) -> Iterator[tuple[Any, ...]]:
    """Return the rows of one task. Spark's Python workers call this."""
    return chain.from_iterable(map(_tuples, cluster.iterate(partial(read_one, options, task))))


def _tuples(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    return zip(*(column.to_pylist() for column in batch.columns), strict=True)


async def read_one(options: LedgersOptions, task: Task) -> AsyncGenerator[pa.RecordBatch, None]:
    """Yield the blocks of one task over connections of its own."""
    async with connected_to(options) as here:
        blocks = Blocks(task.bookie_id, ends_only=options.entries == "ends")
        async for batch in read_task(here, options, task, blocks):
            yield batch


def entries_of(blocks: DataFrame) -> DataFrame:
    """REPLICAS of the copies in `blocks`."""
    rows = blocks.select(*BLOCKS.names).rdd.flatMap(expand)
    return blocks.sparkSession.createDataFrame(rows, REPLICAS, verifySchema=False)
