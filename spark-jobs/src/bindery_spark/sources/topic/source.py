"""Data source `bindery-topic`: the messages of a topic, as a table or as a stream. `sources.sink` writes topics.

Options: `options`. Schema: `schemas.MESSAGES`. The ledger client reads and verifies one intact copy of each entry; a
task fails if an entry has none. No ledger is fenced, and entries beyond the last add confirmed are not read. Tasks are
ranges of entries (`positions`): several tasks read a large ledger, and one task reads several small ones.

Pushed down: ranges of ledger_id; and ranges of publish_time, by omitting ledgers and messages, which Spark filters
again. `positions` describes the offsets of a stream, and why each entry is read exactly once.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

import pyarrow as pa
from bindery_client.client import LedgerClient
from bindery_client.settings import ClientSettings
from bindery_core.errors import BadRequest, BookieUnavailable
from bindery_core.ids import EntryId, LedgerId
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.zookeeper import ZooKeeperStore
from bindery_pulsar.managed_ledger_records import Position
from bindery_pulsar.message_id import EARLIEST, LATEST
from bindery_pulsar.topic_name import TopicName
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from bindery_spark.reading import zookeeper as zookeeper_connection
from bindery_spark.reading.throttle import Budget
from bindery_spark.schemas import MESSAGES
from bindery_spark.sources import cluster
from bindery_spark.sources.bookie_access import explained
from bindery_spark.sources.filters import Wanted
from bindery_spark.sources.sink.options import SinkOptions
from bindery_spark.sources.sink.writer import TopicStreamWriter, TopicTableWriter
from bindery_spark.sources.topic.ledgers import extents_of, partitions_of
from bindery_spark.sources.topic.options import TOPIC_FORMAT, TopicOptions
from bindery_spark.sources.topic.positions import (
    ALL,
    ENTRY_SIZE_UNKNOWN,
    TIME_MS_MAX,
    Bounds,
    Extent,
    Slice,
    advance,
    check_not_trimmed,
    from_offset,
    initial,
    settled,
    slices_of,
    tasks_of,
    to_ms,
    to_offset,
)
from bindery_spark.sources.topic.rows import MessageRows

STEP_BYTES: Final = 8 * 2**20
"""Target size of one read in bytes, estimated from the average of the previous entries."""
STEP_ENTRIES_FIRST: Final = 16
"""Number of entries of the first read of a slice."""
STEP_ENTRIES_MAX: Final = 4_096
"""Maximum number of entries of one read."""


@dataclass
class TopicPart(InputPartition):
    """The input of one task."""

    slices: tuple[Slice, ...]
    bounds: Bounds
    """Bounds of which only the times are used: the slices are within the positions already."""

    def __init__(self, slices: tuple[Slice, ...], bounds: Bounds) -> None:
        super().__init__(None)
        self.slices = slices
        self.bounds = bounds


@dataclass(frozen=True, slots=True)
class _Access:
    store: ZooKeeperStore
    client: LedgerClient


class TopicSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return TOPIC_FORMAT

    def schema(self) -> StructType:
        TopicOptions.parse(self.options, os.environ)
        return MESSAGES

    def reader(self, schema: StructType) -> "TopicReader":
        options = TopicOptions.parse(self.options, os.environ)
        if options.bounds.after == LATEST:
            raise BadRequest("option start=latest is for streams; a table with start=latest would be empty")
        return TopicReader(options)

    def streamReader(self, schema: StructType) -> "TopicStreamReader":
        options = TopicOptions.parse(self.options, os.environ)
        if options.bounds.upto != LATEST or options.bounds.to_ms < TIME_MS_MAX:
            raise BadRequest("option end is for tables; a stream has none")
        return TopicStreamReader(options)

    def writer(self, schema: StructType, overwrite: bool) -> TopicTableWriter:
        return TopicTableWriter(SinkOptions.parse(self.options, os.environ), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> TopicStreamWriter:
        return TopicStreamWriter(SinkOptions.parse(self.options, os.environ), schema, overwrite=overwrite)


class TopicReader(DataSourceReader):
    def __init__(self, options: TopicOptions) -> None:
        self._options = options
        self._bounds = options.bounds
        self._wanted = Wanted()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        rest = list(self._wanted.take(filters, columns=()))
        for each in rest:
            self._bounds = narrowed(self._bounds, each)
        return rest

    def partitions(self) -> Sequence[InputPartition]:
        return self.planned() or [TopicPart((), self._bounds)]

    def planned(self) -> Sequence["TopicPart"]:
        """Return the tasks; empty if there is nothing to read."""
        return [TopicPart(task, self._bounds) for task in cluster.run(self._plan)]

    async def _plan(self) -> list[tuple[Slice, ...]]:
        options = self._options
        if self._wanted.is_empty:
            return []
        found: list[Slice] = []
        async with _connected(options) as here:
            for topic, extents in (await _topic(here, options)).items():
                wanted = [extent for extent in extents if self._wanted.has(extent.ledger_id)]
                found += slices_of(topic, wanted, self._bounds)
        return tasks_of(found, entries_max=options.partition_entries, bytes_max=options.partition_bytes)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, TopicPart)
        return cluster.iterate(lambda: _read(self._options, partition))


class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: TopicOptions) -> None:
        self._options = options
        self._target: Mapping[str, Position] | None = None
        """Last positions of a query with the trigger AvailableNow; None for other triggers."""

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the maximum number of entries of a micro-batch, as a limit of rows: Spark has no limit of entries."""
        count = self._options.max_entries_per_trigger
        return ReadMaxRows(count) if count else ReadAllAvailable()

    def initialOffset(self) -> dict[str, Any]:
        """Return the offset before the first micro-batch, the same on every call; empty for start=latest. The stream
        begins at the end of that micro-batch."""
        topics = cluster.run(self._topics)
        if self._options.bounds.has_positions and len(topics) > 1:
            raise BadRequest(
                "a position belongs to one partition; set option topic to that partition", partitions=", ".join(topics)
            )
        if self._options.bounds.after == LATEST:
            return {}
        return to_offset(dict.fromkeys(topics, self._options.bounds.after))

    def prepareForTriggerAvailableNow(self) -> None:
        topics = cluster.run(self._topics)
        self._target = {topic: advance(settled(extents), EARLIEST, None) for topic, extents in topics.items()}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        at = from_offset(start)
        topics = cluster.run(self._topics)
        counts: Iterator[int | None] = iter([None] * len(topics))
        if isinstance(limit, ReadMaxRows):
            counts = iter(_shares(limit.max_rows, [self._ahead(t, e, at) for t, e in topics.items()]))
        is_new = not at
        for topic, extents in topics.items():
            begin = at.get(topic, EARLIEST)
            if self._options.fail_on_data_loss:
                check_not_trimmed(topic, extents, begin)
            limit_of_topic = next(counts)
            if begin == EARLIEST:
                # Partitions that are added later are read from their beginning, also with start=latest.
                bounds = self._options.bounds
                end = initial(extents, bounds if is_new or bounds.after != LATEST else ALL)
            else:
                end = advance(settled(extents), begin, limit_of_topic)
            if self._target is not None:
                end = min(end, self._target.get(topic, begin))
            at[topic] = max(begin, end)
        return to_offset(at)

    def _ahead(self, topic: str, extents: Sequence[Extent], at: Mapping[str, Position]) -> int:
        bounds = Bounds(after=at.get(topic, EARLIEST), upto=(self._target or {}).get(topic, LATEST))
        return sum(each.count for each in slices_of(topic, settled(extents), bounds))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        begin, upto = from_offset(start), from_offset(end)
        options = self._options
        if not begin and options.bounds.after == LATEST:
            return []
        found: list[Slice] = []
        for topic, extents in cluster.run(self._topics).items():
            after, last = begin.get(topic, EARLIEST), upto.get(topic, EARLIEST)
            if last <= after:
                continue
            if options.fail_on_data_loss:
                check_not_trimmed(topic, extents, after)
            found += slices_of(topic, extents, replace(options.bounds, after=after, upto=last))
        # An open ledger gets its mean size of entries when it is closed. A micro-batch that is planned again must be
        # divided as before: a sink that stores each row once counts rows by partition.
        found = [replace(each, entry_size=ENTRY_SIZE_UNKNOWN) for each in found]
        tasks = tasks_of(found, entries_max=options.partition_entries, bytes_max=options.partition_bytes)
        return [TopicPart(task, options.bounds) for task in tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, TopicPart)
        return cluster.iterate(lambda: _read(self._options, partition))

    async def _topics(self) -> dict[str, list[Extent]]:
        async with _connected(self._options) as here:
            return await _topic(here, self._options)


def narrowed(bounds: Bounds, wanted: Filter) -> Bounds:
    """Return `bounds` without the publish times that the filter `wanted` excludes, rounded outwards to ms."""
    value = getattr(wanted, "value", None)
    if getattr(wanted, "attribute", ()) != ("publish_time",) or not isinstance(value, datetime) or value.tzinfo is None:
        return bounds
    just_after = to_ms(value) + 1
    match wanted:
        case EqualTo():
            return bounds.from_time(to_ms(value)).to_time(just_after)
        case GreaterThan() | GreaterThanOrEqual():
            return bounds.from_time(to_ms(value))
        case LessThan() | LessThanOrEqual():
            return bounds.to_time(just_after)
    return bounds


def _shares(total: int, ahead: Sequence[int]) -> list[int]:
    """Divide `total` entries evenly. `ahead`: maximum of each share; what a share does not use is given to the
    others."""
    shares = [0] * len(ahead)
    for rank, index in enumerate(sorted(range(len(ahead)), key=ahead.__getitem__)):
        shares[index] = min(ahead[index], -(-total // (len(ahead) - rank)))
        total -= shares[index]
    return shares


@asynccontextmanager
async def _connected(options: TopicOptions) -> AsyncIterator[_Access]:
    settings = ClientSettings(
        wire_version=2, read_timeout_s=options.timeout_s, connect_timeout_s=min(5.0, options.timeout_s)
    )
    store = await zookeeper_connection.connect(options.zookeeper, options.access)
    try:
        client = await LedgerClient.connect(
            store,
            randomness=cluster.RANDOMNESS,
            layout=LedgersLayout(options.ledgers_root),
            settings=settings,
            security=options.security.load(),
        )
        try:
            async with explained(options.security):
                yield _Access(store, client)
        finally:
            await client.close()
    finally:
        await store.close()


async def _topic(here: _Access, options: TopicOptions) -> dict[str, list[Extent]]:
    """Return the ledgers of each partition, by its name."""
    topics = await partitions_of(here.store, options.topic)
    skip = not options.fail_on_data_loss
    return {topic.short: await extents_of(here.store, here.client, topic, skip_missing=skip) for topic in topics}


async def _read(options: TopicOptions, part: TopicPart) -> AsyncGenerator[pa.RecordBatch, None]:
    rows = MessageRows(part.bounds)
    budget = Budget(options.rate, now=asyncio.get_running_loop().time())
    async with _connected(options) as here:
        for each in part.slices:
            async for batch in _read_slice(here.client, each, rows, budget, timeout_s=options.timeout_s):
                yield batch
    if not rows.is_empty:
        yield rows.take()


async def _read_slice(
    client: LedgerClient, part: Slice, rows: MessageRows, budget: Budget, *, timeout_s: float
) -> AsyncGenerator[pa.RecordBatch, None]:
    """Yield full batches. Raises the ledger client's error if no bookie returns an entry."""
    loop = asyncio.get_running_loop()
    ledger_id = LedgerId(part.ledger_id)
    partition = TopicName.parse(part.topic).partition
    password = (await client.metadata(ledger_id)).password or b""
    handle = await client.open(ledger_id, password=password, recover=False)
    try:
        # The entry was confirmed during planning, but the bookies that answer now may have an older LAC.
        if not await handle.wait_for_entry(EntryId(part.last), timeout_s=timeout_s):
            raise BookieUnavailable(
                "too few bookies reported the last add confirmed of the ledger", ledger_id=ledger_id, wanted=part.last
            )
        first, step = part.first, STEP_ENTRIES_FIRST
        while first <= part.last:
            entries = await handle.read(EntryId(first), EntryId(min(part.last, first + step - 1)))
            size = sum(len(entry.payload) for entry in entries)
            await asyncio.sleep(budget.take(size, now=loop.time()))
            for entry in entries:
                rows.add(entry.payload, ledger_id=ledger_id, entry_id=entry.entry_id, partition=partition)
                if rows.is_full:
                    yield rows.take()
            first += len(entries)
            step = max(1, min(STEP_ENTRIES_MAX, 2 * step, STEP_BYTES * len(entries) // max(1, size)))
    finally:
        await handle.release()
