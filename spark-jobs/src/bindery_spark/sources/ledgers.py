"""Data source `bindery-ledgers`: every replica of every entry, read from each bookie.

Options: `options`. Schema: `schemas.REPLICAS`. To plan, the driver reads the metadata of all selected ledgers, asks
the bookies for the last entries of open ledgers (`open_ledgers`), and cuts the fragments into tasks of one bookie each
(`partitions`). A task acquires a reader slot of its bookie (`throttle`) and reads (`reader`). Entries that the bookie
could not return become rows with an error. A task fails only if ZooKeeper is unavailable, or if no slot becomes free
within SLOT_WAIT_S.

Pushed down: ranges of ledger_id, and bookie. With include_unexpected Spark also applies filters on ledger_id itself,
because of rows with NO_LEDGER. Tasks contain the passwords of ledgers, which MAC digests require.
"""

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState
from bindery_core.ids import BookieId, LedgerId
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from bindery_spark.reading.fragments import Fragment, Ledger, fragments_of, ledger_of
from bindery_spark.reading.open_ledgers import read_tails
from bindery_spark.reading.orphaned_data import read_unexpected
from bindery_spark.reading.partitions import Task, tasks_of
from bindery_spark.reading.reader import BookieReader, Sink
from bindery_spark.reading.rows import EntryRows
from bindery_spark.reading.throttle import Budget, ReaderSlots
from bindery_spark.schemas import REPLICAS
from bindery_spark.sources import cluster
from bindery_spark.sources.cluster import Cluster, connected
from bindery_spark.sources.filters import Wanted
from bindery_spark.sources.listing import ledger_ids, read_ledgers
from bindery_spark.sources.options import LEDGERS_FORMAT, LedgersOptions

SLOT_WAIT_S: Final = 3_600.0
"""Maximum time in seconds that a task waits for a reader slot of its bookie."""
LISTED_BYTES_MAX: Final = 2**62
"""Maximum payload bytes per task with `entries=listed`: no limit, because listed entries are not read."""
LISTED_ENTRIES_MAX: Final = 2_000_000
"""Maximum number of entries per task with `entries=listed`."""


@dataclass
class TaskPartition(InputPartition):
    """One task in the form that Spark passes to its workers. `task` None: there is nothing to read."""

    task: Task | None

    def __init__(self, task: Task | None) -> None:
        super().__init__(None)
        self.task = task


class LedgersSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return LEDGERS_FORMAT

    def schema(self) -> StructType:
        LedgersOptions.parse(self.options, os.environ)
        return REPLICAS

    def reader(self, schema: StructType) -> "LedgersReader":
        return LedgersReader(LedgersOptions.parse(self.options, os.environ))


class LedgersReader(DataSourceReader):
    def __init__(self, options: LedgersOptions, wanted: Wanted | None = None) -> None:
        self._options = options
        self._wanted = wanted or (Wanted.with_ledgerless() if options.include_unexpected else Wanted())

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        return self._wanted.take(filters, columns=("bookie",))

    def partitions(self) -> Sequence[InputPartition]:
        tasks = cluster.run(self._plan)
        return [TaskPartition(task) for task in tasks] or [TaskPartition(None)]

    async def _plan(self) -> Sequence[Task]:
        async with self._connected() as here:
            ids = await ledger_ids(here.manager, self._wanted)
            return await plan(here, self._options, self._wanted, ids)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, TaskPartition)
        task = partition.task
        return iter(()) if task is None else cluster.iterate(lambda: self._read(task))

    async def _read(self, task: Task) -> AsyncGenerator[pa.RecordBatch, None]:
        async with self._connected() as here:
            async for batch in read_task(here, self._options, task):
                yield batch

    def _connected(self) -> AbstractAsyncContextManager[Cluster]:
        options = self._options
        return connected_to(options)


def connected_to(options: LedgersOptions) -> AbstractAsyncContextManager[Cluster]:
    return connected(
        options.zookeeper,
        options.ledgers_root,
        timeout_s=options.timeout_s,
        security=options.security,
        access=options.access,
    )


async def plan(
    here: Cluster,
    options: LedgersOptions,
    wanted: Wanted,
    ids: Sequence[LedgerId],
    *,
    span_of: Callable[[Ledger], int] | None = None,
) -> Sequence[Task]:
    """Return the tasks that read the ledgers `ids`. Ledgers with unreadable metadata are omitted; `bindery-metadata`
    reports them. `span_of`: for readers that make blocks; tasks then begin at a block and omit unconfirmed entries."""
    known: dict[LedgerId, LedgerMetadata] = {}
    async for each in read_ledgers(here.manager, ids):
        if each.found is not None:
            known[each.ledger_id] = each.found.value
    unfinished = {
        ledger_id: metadata for ledger_id, metadata in known.items() if metadata.state is not LedgerState.CLOSED
    }
    tails = await read_tails(here.pool, unfinished, timeout_s=options.timeout_s)
    fragments: list[Fragment] = []
    for ledger_id, metadata in known.items():
        ledger = ledger_of(ledger_id, metadata, tails.get(ledger_id))
        for whole in fragments_of(ledger, metadata, tails.get(ledger_id)):
            fragment = whole if span_of is None else whole.confirmed()
            if fragment is not None and wanted.allows("bookie", fragment.bookie_id):
                fragments.append(fragment)
    is_listed = options.entries == "listed"
    tasks = tasks_of(
        fragments,
        bytes_max=LISTED_BYTES_MAX if is_listed else options.partition_bytes,
        entries_max=LISTED_ENTRIES_MAX if is_listed else options.partition_entries,
        ends_only=options.entries == "ends",
        span_of=span_of or (lambda _: 1),
    )
    if not options.include_unexpected or wanted.is_empty:
        return tasks
    bookies = sorted({*here.directory.bookies, *(fragment.bookie_id for fragment in fragments)})
    ledgers = wanted.first_ledger, wanted.last_ledger
    return [*tasks, *(Task(BookieId(b), (), ledgers) for b in bookies if wanted.allows("bookie", b))]


async def read_task(
    here: Cluster, options: LedgersOptions, task: Task, rows: Sink | None = None
) -> AsyncGenerator[pa.RecordBatch, None]:
    """Yield the rows of one task while holding a slot of its bookie. `rows`: builds them; None: one row per entry.
    Raises NoReaderSlot, MetadataUnavailable."""
    rows = EntryRows(task.bookie_id) if rows is None else rows
    slots = ReaderSlots(here.store, slots=options.readers_per_bookie)
    slot = await slots.acquire(
        task.bookie_id, reader=f"{socket.gethostname()} pid {os.getpid()}", timeout_s=SLOT_WAIT_S
    )
    sharing: asyncio.Task[None] | None = None
    try:
        if task.unexpected_in is not None:
            async for batch in read_unexpected(
                here.pool,
                here,
                task.bookie_id,
                task.unexpected_in,
                timeout_s=options.timeout_s,
                rows=rows,
                ca_file=options.security.http_ca_file or options.security.ca_file,
            ):
                yield batch
            return
        budget = Budget(options.rate / options.readers_per_bookie, now=asyncio.get_running_loop().time())
        sharing = asyncio.create_task(slots.share(task.bookie_id, budget, rate=options.rate))
        reader = BookieReader(here.pool, here, task.bookie_id, budget=budget, timeout_s=options.timeout_s, rows=rows)
        async for batch in reader.read(task.fragments, entries=options.entries):
            yield batch
    finally:
        if sharing is not None:
            sharing.cancel()
        await slot.release()
