"""Data source `bindery-metadata`: ledgers, bookies, marks, topics, cursors and verified ledgers in ZooKeeper.

Options: `options`. Schemas: `schemas.TABLES`. The driver lists the ledgers, and each task reads
`ledgers_per_part` of them; one task reads each other table. Pushed down: ranges of ledger_id, and state (ledgers). An
error of ZooKeeper fails the job, because an incomplete table must not be used.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from bindery_client.client import DIGEST_TYPE_UNTOLD
from bindery_client.ledger.bookie_requests import DiskSpaces
from bindery_core.errors import Corrupt, NoSuchNode
from bindery_core.formats.ledger_metadata import LedgerState
from bindery_core.ids import LedgerId
from bindery_core.placement.placement import DEFAULT_RACK
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.bookies.membership import Intent, MembershipStore
from bindery_metadata.ledgers.verified_records import VerifiedRecords
from bindery_metadata.recovery.recovery_records import RecoveryRecords
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_pulsar import znode_layout
from bindery_pulsar.managed_ledger_codec import decode_cursor, decode_topic
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from bindery_spark.schemas import TABLES
from bindery_spark.sources import cluster
from bindery_spark.sources.cluster import Cluster, connected
from bindery_spark.sources.filters import Wanted
from bindery_spark.sources.listing import ReadLedger, ledger_ids, read_ledgers
from bindery_spark.sources.options import METADATA_FORMAT, MetadataOptions

BATCH_ROWS: Final = 4_096
"""Number of rows of a full batch."""
TIMEOUT_S: Final = 5.0
"""Maximum time in seconds that a bookie may take to report its free space."""
READS_IN_FLIGHT: Final = 64
"""Maximum number of concurrent reads of cursors."""

Row = dict[str, Any]


@dataclass
class _Part(InputPartition):
    """The ledgers of one task; None for the other tables."""

    ledger_ids: tuple[LedgerId, ...] | None

    def __init__(self, ledger_ids: tuple[LedgerId, ...] | None) -> None:
        super().__init__(None)
        self.ledger_ids = ledger_ids


class MetadataSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return METADATA_FORMAT

    def schema(self) -> StructType:
        return TABLES[MetadataOptions.parse(self.options, os.environ).table]

    def reader(self, schema: StructType) -> "MetadataReader":
        return MetadataReader(MetadataOptions.parse(self.options, os.environ), schema)


class MetadataReader(DataSourceReader):
    def __init__(self, options: MetadataOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._wanted = Wanted()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        columns = {"ledgers": ("state",)}.get(self._options.table, ())
        if self._options.table not in ("ledgers", "marks", "verified"):
            return filters
        return self._wanted.take(filters, columns=columns)

    def partitions(self) -> Sequence[InputPartition]:
        if self._options.table != "ledgers":
            return [_Part(None)]
        ids = cluster.run(self._list)
        step = self._options.ledgers_per_part
        return [_Part(tuple(ids[start : start + step])) for start in range(0, len(ids), step)] or [_Part(())]

    async def _list(self) -> list[LedgerId]:
        async with self._connected() as here:
            return await ledger_ids(here.manager, self._wanted)

    def _connected(self) -> AbstractAsyncContextManager[Cluster]:
        options = self._options
        return connected(
            options.zookeeper,
            options.ledgers_root,
            timeout_s=TIMEOUT_S,
            security=options.security,
            access=options.access,
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Part)
        return cluster.iterate(lambda: self._read(partition))

    async def _read(self, part: _Part) -> AsyncGenerator[pa.RecordBatch, None]:
        schema = to_arrow_schema(self._schema, timezone="UTC")
        rows: list[Row] = []
        async with self._connected() as here:
            async for row in self._rows(here, part):
                rows.append(row)
                if len(rows) >= BATCH_ROWS:
                    yield pa.RecordBatch.from_pylist(rows, schema=schema)
                    rows = []
        if rows:
            yield pa.RecordBatch.from_pylist(rows, schema=schema)

    async def _rows(self, here: Cluster, part: _Part) -> AsyncIterator[Row]:
        table = self._options.table
        if table == "ledgers":
            async for each in read_ledgers(here.manager, part.ledger_ids or ()):
                row = ledger_row(each)
                if self._wanted.allows("state", row["state"]):
                    yield row
        else:
            async for row in _TABLES[table](here):
                if "ledger_id" not in row or self._wanted.has(row["ledger_id"]):
                    yield row


# --- rows -------------------------------------------------------------------------------------------------------------


def ledger_row(each: ReadLedger) -> Row:
    """Row of LEDGERS. A ledger with unreadable metadata has the state `open`, because it may be open, and no
    segments."""
    if each.found is None:
        nothing = {"ensemble_size": 0, "write_quorum": 0, "ack_quorum": 0, "metadata_version": 0}
        return {
            "ledger_id": each.ledger_id,
            "state": "open",
            "digest_type": "",
            "custom": {},
            "segments": [],
            "problem": each.problem,
            "last_entry_id": None,
            "length": None,
            "created_ms": None,
            **nothing,
        }
    metadata, version = each.found.value, each.found.version
    is_closed = metadata.state is LedgerState.CLOSED
    firsts = [int(segment.first_entry_id) for segment in metadata.segments]
    lasts = [*(first - 1 for first in firsts[1:]), int(metadata.last_entry_id) if is_closed else None]
    return {
        "ledger_id": each.ledger_id,
        "state": metadata.state.name.lower(),
        "ensemble_size": metadata.ensemble_size,
        "write_quorum": metadata.write_quorum,
        "ack_quorum": metadata.ack_quorum,
        "digest_type": (metadata.digest_type or DIGEST_TYPE_UNTOLD).name.lower(),
        "last_entry_id": int(metadata.last_entry_id) if is_closed else None,
        "length": metadata.length if is_closed else None,
        "created_ms": metadata.ctime_ms or each.found.created_ms or None,
        "custom": dict(metadata.custom),
        "segments": [
            {"first_entry": first, "last_entry": last, "ensemble": list(segment.ensemble)}
            for segment, first, last in zip(metadata.segments, firsts, lasts, strict=True)
        ],
        "metadata_version": version,
        "problem": None,
    }


async def _bookies(here: Cluster) -> AsyncIterator[Row]:
    """Bookies that are registered, have a cookie, or are in the membership."""
    registered = await here.directory.refresh()
    cookies = set(await CookieStore(here.store, here.layout).bookies())
    members = await MembershipStore(here.store, clock_ms=cluster.now_ms).all()
    spaces = await DiskSpaces(here.pool).run(list(registered), timeout_s=TIMEOUT_S)
    now_ms = cluster.now_ms()
    for bookie_id in sorted({*registered, *cookies, *members}):
        record, member = registered.get(bookie_id), members.get(bookie_id)
        total, free = spaces.get(bookie_id, (None, None))
        yield {
            "bookie": bookie_id,
            "registration": "absent" if record is None else "read_only" if record.read_only else "writable",
            "intent": (member.effective(now_ms) if member else Intent.ACTIVE).value,
            "cookie": bookie_id in cookies,
            "rack": DEFAULT_RACK,  # the cluster stores no racks
            "free_bytes": free,
            "total_bytes": total,
        }


async def _marks(here: Cluster) -> AsyncIterator[Row]:
    manager = UnderreplicationManager(here.store, here.layout, randomness=cluster.RANDOMNESS, clock_ms=cluster.now_ms)
    records = RecoveryRecords(here.store)
    locked = set(await manager.locks())
    async for mark in manager.list():
        record = await records.get(mark.ledger_id)
        yield {
            "ledger_id": mark.ledger_id,
            "bookies": list(mark.replicas),
            "reason": record.reason.value if record else None,
            "marked_at_ms": mark.ctime_ms,
            "attempts": record.attempts if record else 0,
            "locked": mark.ledger_id in locked,
        }


async def _topics(here: Cluster) -> AsyncIterator[Row]:
    async for path, name in _topic_paths(here):
        row: Row = {"topic": name, "ledgers": [], "problem": None}
        try:
            info = decode_topic((await here.store.get(path)).data)
        except NoSuchNode:
            continue
        except Corrupt as error:
            row["problem"] = str(error)
        else:
            row["ledgers"] = [
                {
                    "ledger_id": each.ledger_id,
                    "entries": each.entries,
                    "bytes": each.size,
                    "closed_ms": each.closed_ms or None,
                }
                for each in info.ledgers
            ]
        yield row


async def _cursors(here: Cluster) -> AsyncIterator[Row]:
    async for path, topic in _topic_paths(here):
        names = await _children(here, path)
        for start in range(0, len(names), READS_IN_FLIGHT):
            batch = names[start : start + READS_IN_FLIGHT]
            for row in await asyncio.gather(*(_cursor(here, f"{path}/{name}", topic, name) for name in batch)):
                if row is not None:
                    yield row


async def _cursor(here: Cluster, path: str, topic: str, name: str) -> Row | None:
    row: Row = {
        "topic": topic,
        "subscription": _decoded(name),
        "mark_delete_ledger": None,
        "mark_delete_entry": None,
        "cursor_ledger_id": None,
        "problem": None,
    }
    try:
        info = decode_cursor((await here.store.get(path)).data)
    except NoSuchNode:
        return None
    except Corrupt as error:
        return {**row, "problem": str(error)}
    if info.state is not None:
        row["mark_delete_ledger"], row["mark_delete_entry"] = info.state.mark_delete
    row["cursor_ledger_id"] = info.ledger_id if info.ledger_id >= 0 else None
    return row


async def _verified(here: Cluster) -> AsyncIterator[Row]:
    async for each in VerifiedRecords(here.store).list():
        yield {
            "ledger_id": each.ledger_id,
            "level": each.level,
            "verified_at_ms": each.verified_at_ms,
            "run_id": each.run_id,
        }


async def _topic_paths(here: Cluster) -> AsyncIterator[tuple[str, str]]:
    """Yield znode and `tenant/namespace/name` of each persistent topic."""
    root = znode_layout.MANAGED_LEDGERS_ROOT
    for tenant in await _children(here, root):
        for namespace in await _children(here, f"{root}/{tenant}"):
            parent = f"{root}/{tenant}/{namespace}/persistent"
            for name in await _children(here, parent):
                yield f"{parent}/{name}", f"{tenant}/{namespace}/{_decoded(name)}"


async def _children(here: Cluster, path: str) -> list[str]:
    try:
        return await here.store.children(path)
    except NoSuchNode:
        return []


def _decoded(part: str) -> str:
    try:
        return znode_layout.decode_name(part)
    except UnicodeDecodeError:
        return part


_TABLES: Final = {"bookies": _bookies, "marks": _marks, "topics": _topics, "cursors": _cursors, "verified": _verified}
