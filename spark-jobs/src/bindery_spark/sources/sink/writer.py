"""Write rows to topics: the writers that Spark calls, in the driver and in the tasks.

A task numbers the rows of its partition (`sequence`), assigns those of a partitioned topic to its partitions
(`routing`), collects them into requests by topic, and sends each request when all rows before it are stored. Nothing is
stored at the commit of a batch: rows are messages as soon as their request succeeds, so consumers see the beginning of
a batch that fails later. A repeated batch completes it.

Spark gives the number of the micro-batch and the id of the query, which is a part of the checkpoint, to the tasks as
local properties; the Python API of data sources does not have them.
"""

import random
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
from bindery_core.errors import BadRequest
from bindery_pulsar.topic_name import TopicName
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from bindery_spark.sources.sink.client import Brokers
from bindery_spark.sources.sink.messages import check_columns, messages_of, with_sequence_id
from bindery_spark.sources.sink.options import SinkOptions
from bindery_spark.sources.sink.routing import Router
from bindery_spark.sources.sink.sequence import PartitionRows, producer_name

BATCH_PROPERTY: Final = "streaming.sql.batchId"
"""Local property with the number of the micro-batch. Source: Spark's MicroBatchExecution."""
QUERY_PROPERTY: Final = "sql.streaming.queryId"
"""Local property with the id of the query, the same after a restart. Source: Spark's StreamExecution."""


@dataclass
class Written(WriterCommitMessage):
    """What a task has done."""

    partition: int
    rows: int
    stored: int
    """Rows that this attempt has sent; the others were stored by an earlier one."""


@dataclass
class _Request:
    """Messages for one topic that are sent together."""

    lines: list[bytes] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    size: int = 0


class TopicTableWriter(DataSourceArrowWriter):
    """Writes a table."""

    def __init__(self, options: SinkOptions, schema: StructType, *, overwrite: bool) -> None:
        _check(options, schema, overwrite=overwrite)
        self._options = options
        self._sink_id = options.sink_id or secrets.token_hex(8)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        context = _context()
        batch = context.getLocalProperty(BATCH_PROPERTY) if self._options.sink_id else None
        return write_rows(
            iterator, self._options, sink_id=self._sink_id, batch=int(batch or 0), partition=context.partitionId()
        )


class TopicStreamWriter(DataSourceStreamArrowWriter):
    """Writes a stream, micro-batch by micro-batch."""

    def __init__(self, options: SinkOptions, schema: StructType, *, overwrite: bool) -> None:
        _check(options, schema, overwrite=overwrite)
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        context = _context()
        batch = context.getLocalProperty(BATCH_PROPERTY)
        sink_id = self._options.sink_id or context.getLocalProperty(QUERY_PROPERTY)
        if batch is None or not sink_id:
            raise BadRequest("Spark does not give the number of the micro-batch to its tasks; is this a stream?")
        return write_rows(iterator, self._options, sink_id=sink_id, batch=int(batch), partition=context.partitionId())


def _check(options: SinkOptions, schema: StructType, *, overwrite: bool) -> None:
    if overwrite:
        raise BadRequest("messages of a topic cannot be replaced: use mode append")
    check_columns(schema, options.topic)


def _context() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "called in a task"
    return context


def write_rows(
    batches: Iterator[pa.RecordBatch],
    options: SinkOptions,
    *,
    sink_id: str,
    batch: int,
    partition: int,
    brokers: Brokers | None = None,
) -> Written:
    """Store the rows of one partition. Raises BadRequest, RowsChanged, SinkRefused or SinkUnavailable."""
    brokers = brokers or Brokers(
        options.urls,
        timeout_s=options.timeout_s,
        retry_s=options.retry_s,
        now=time.monotonic,
        sleep=time.sleep,
        randomness=random.SystemRandom(),
        ca_file=options.ca_file,
        token_file=options.token_file,
    )
    producer = producer_name(sink_id, partition)
    rows = PartitionRows(batch)
    router = Router(brokers.partitions, first=partition)
    requests: dict[TopicName, _Request] = {}
    stored = 0

    def flush(topic: TopicName) -> None:
        request = requests.pop(topic)
        brokers.send(topic, producer, request.lines, request.rows)

    try:
        for table in batches:
            for found in messages_of(table, options.topic):
                if isinstance(found, BadRequest):
                    raise BadRequest(f"row {rows.count} of partition {partition}: {found.message}", **found.facts)
                topic, line = router.route(*found, row=rows.count)
                if not rows.knows(topic.full):
                    rows.begin(topic.full, brokers.last_sequence_id(topic, producer))
                row = rows.count
                sequence_id = rows.add(topic.full, line)
                if sequence_id is None:
                    continue
                request = requests.setdefault(topic, _Request())
                request.lines.append(with_sequence_id(line, sequence_id))
                request.rows.append(row)
                request.size += len(request.lines[-1]) + 1
                stored += 1
                if len(request.lines) >= options.request_messages or request.size >= options.request_bytes:
                    flush(topic)
        rows.end()
        for topic in list(requests):
            flush(topic)
    finally:
        brokers.close()
    return Written(partition=partition, rows=rows.count, stored=stored)
