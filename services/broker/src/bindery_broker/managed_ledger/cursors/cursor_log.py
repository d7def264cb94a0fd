"""Read the subscription log of a cursor ledger: the last record, then everything from its snapshot on, in parts.

The first reads are of one record, because the records of a snapshot may have a megabyte each; the number doubles while
the records are small. So a read returns a few MiB at most, and a log of many small changes needs few reads.
"""

from typing import Final, NamedTuple

from bindery_client.ledger.api import Entry, ReadHandle
from bindery_core.errors import Corrupt, NoSuchEntry
from bindery_core.ids import EntryId
from bindery_pulsar.managed_ledger_codec import CursorState
from bindery_pulsar.subscription_log import LogReplay, find_extent

from bindery_broker.managed_ledger.topic_metadata import limited

READ_ENTRIES_MAX: Final = 256
"""Maximum number of records in one read."""
READ_SIZE: Final = 2**20
"""Bytes of records in one read above which the next read is of one record."""


class LoadedLog(NamedTuple):
    """The newest state in a cursor ledger."""

    state: CursorState
    is_snapshot: bool
    """Whether the last record completes a snapshot: a broker of Pulsar reads the same state from it."""


async def read_log(reader: ReadHandle, *, timeout_s: float) -> LoadedLog | None:
    """Return the newest state; None: the ledger is empty. `timeout_s`: limit of one read.

    Raises Corrupt if a record is missing or damaged, TryAgain if a record cannot be read now.
    """
    last = int(reader.last_add_confirmed)
    if last < 0:
        return None
    record = await _read(reader, last, last, timeout_s=timeout_s)
    extent = find_extent(last, record[0].payload)
    if not extent.is_known:
        record = await _read(reader, extent.last, extent.last, timeout_s=timeout_s)
        extent = find_extent(extent.last, record[0].payload)
        if not extent.is_known:
            raise Corrupt("the cursor ledger has two incomplete snapshots", entry_id=extent.last)
    replay = LogReplay()
    first, count = extent.first, 1
    while first <= extent.last:
        size = 0
        for entry in await _read(reader, first, min(first + count - 1, extent.last), timeout_s=timeout_s):
            replay.feed(int(entry.entry_id), entry.payload)
            size += len(entry.payload)
        first += count
        count = 1 if size > READ_SIZE else min(2 * count, READ_ENTRIES_MAX)
    return LoadedLog(replay.state(), replay.is_snapshot and extent.last == last)


async def _read(reader: ReadHandle, first: int, last: int, *, timeout_s: float) -> list[Entry]:
    try:
        async with limited(timeout_s, "read a cursor ledger"):
            return await reader.read(EntryId(first), EntryId(last))
    except NoSuchEntry as error:
        what = "its last record" if last == reader.last_add_confirmed else "a record"
        raise Corrupt("the cursor ledger lost " + what, first=first, last=last, cause=str(error)) from error
