"""Read a compacted ledger: find the first entry at or after a position, and read on from there.

Entries ascend by position, so that they are found by binary search. Positions that were read are kept, for calls that
continue where the last one ended.
"""

import asyncio
from collections import OrderedDict
from typing import Final

from bindery_client.ledger.api import Entry, LedgerClient, ReadHandle
from bindery_core.ids import EntryId, LedgerId
from bindery_pulsar.message_id import Position

from bindery_broker.compaction import raw_message
from bindery_broker.managed_ledger.topic_metadata import limited

POSITIONS_KEPT_MAX: Final = 1_000
"""Maximum number of entries of which the position is kept. A binary search over a million entries reads twenty."""
ENTRIES_READ_MAX: Final = 100
"""Maximum number of entries of one read."""


class CompactedLedger:
    """One compacted ledger, which is closed. Errors of the calls: NoSuchLedger, NoSuchEntry (lost), Corrupt, TryAgain.

    Call `release` in the end.
    """

    def __init__(self, client: LedgerClient, ledger_id: int, *, timeout_s: float) -> None:
        self.ledger_id = ledger_id
        self._client = client
        self._timeout_s = timeout_s
        self._handle: ReadHandle | None = None
        self._opening = asyncio.Lock()
        self._positions: OrderedDict[int, Position] = OrderedDict()
        self._following: tuple[Position, int] | None = None
        """The position after the last entry that was read, and the entry id after it."""

    async def count(self) -> int:
        """Return the number of entries."""
        return (await self._open()).last_add_confirmed + 1

    async def size(self) -> int:
        """Return the bytes of all entries."""
        return (await self._open()).metadata.length

    async def find(self, position: Position) -> int | None:
        """Return the id of the first entry whose position is at least `position`; None: there is none."""
        if self._following is not None and self._following[0] == position:
            entry_id = self._following[1]
            return entry_id if entry_id < await self.count() else None
        low, high = 0, await self.count()
        while low < high:
            middle = (low + high) // 2
            if await self._position_of(middle) < position:
                low = middle + 1
            else:
                high = middle
        return low if low < await self.count() else None

    async def read(self, first: int, *, entries_max: int, size_max: int) -> list[tuple[Position, bytes]]:
        """Return entries from id `first` on, with their positions: at most `entries_max`, of about `size_max` bytes,
        but at least one."""
        last = min(first + min(entries_max, ENTRIES_READ_MAX), await self.count()) - 1
        found = await self._read(first, first)
        if last > first:
            (end,) = await self._read(last, last)
            while last > first and end.length - found[0].length > size_max - len(found[0].payload):
                last = first + (last - first) // 2  # an entry has the bytes of its ledger up to itself
                if last > first:
                    (end,) = await self._read(last, last)
            if last > first + 1:
                found += await self._read(first + 1, last - 1)
            if last > first:
                found.append(end)
        entries = [raw_message.decode(entry.payload) for entry in found]
        at = entries[-1][0]
        self._following = Position(at.ledger_id, at.entry_id + 1), last + 1
        return entries

    async def release(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            await handle.release()

    async def _position_of(self, entry_id: int) -> Position:
        position = self._positions.get(entry_id)
        if position is None:
            (entry,) = await self._read(entry_id, entry_id)
            position = self._positions[entry_id] = raw_message.decode_position(entry.payload)
            if len(self._positions) > POSITIONS_KEPT_MAX:
                self._positions.popitem(last=False)
        return position

    async def _read(self, first: int, last: int) -> list[Entry]:
        handle = await self._open()
        async with limited(self._timeout_s, "read from a compacted ledger"):
            return await handle.read(EntryId(first), EntryId(last))

    async def _open(self) -> ReadHandle:
        async with self._opening:
            if self._handle is None:
                async with limited(self._timeout_s, "open a compacted ledger"):
                    self._handle = await self._client.open(LedgerId(self.ledger_id), recover=False)
            return self._handle
