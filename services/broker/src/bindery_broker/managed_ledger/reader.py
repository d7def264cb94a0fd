"""Read acknowledged entries of a topic by position, across its ledgers, from the cache or from bookies."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final

from bindery_client.ledger.api import Entry, WriteHandle
from bindery_core.errors import Corrupt, LostOwnership, NoSuchEntry, NoSuchLedger, NotThere, TryAgain
from bindery_pulsar.entry_size import ENTRY_SIZE_MAX
from bindery_pulsar.message_codec import publish_time_ms
from bindery_pulsar.message_id import Position

from bindery_broker.managed_ledger.caching.entry_cache import TopicCache
from bindery_broker.managed_ledger.ledger_list import LedgerList, LedgerRecord
from bindery_broker.managed_ledger.read_handles import ReadHandles
from bindery_broker.managed_ledger.time_search import BEFORE_BYTES_MAX, TimeSearch
from bindery_broker.managed_ledger.topic_metadata import limited
from bindery_broker.statistics.entries import EntryStatistics

READ_ENTRIES_MAX: Final = 1_000
"""Maximum number of entries of one read from bookies."""
UNSIZED_ENTRIES_MAX: Final = 12
"""Maximum number of entries of a read whose size is not known: 60 MiB at most."""
UNSIZED_BYTES_MAX: Final = UNSIZED_ENTRIES_MAX * ENTRY_SIZE_MAX
"""Bytes of such a read at most. Any entries of a ledger that is smaller may be read together."""
EXCESS_MAX: Final = 4
"""A read may be larger than requested by this factor, because the sizes of entries vary."""


class EntryReader:
    """Reads only entries that are acknowledged according to `ledgers`."""

    def __init__(
        self,
        *,
        ledgers: LedgerList,
        handles: ReadHandles,
        cache: TopicCache,
        write_handle: Callable[[], WriteHandle | None],
        timeout_s: float,
        statistics: EntryStatistics,
    ) -> None:
        """`write_handle`: returns the writer of the current ledger, if it has one."""
        self._ledgers = ledgers
        self._handles = handles
        self._cache = cache
        self._write_handle = write_handle
        self._timeout_s = timeout_s
        self._statistics = statistics
        self._read_upto: tuple[int, int, int] | None = None
        """Ledger, next entry and bytes of the ledger before it, after the last read from bookies."""

    async def read(self, position: Position, *, entries_max: int, size_max: int) -> list[tuple[Position, bytes]]:
        """See `ManagedLedger.read`."""
        found: list[tuple[Position, bytes]] = []
        room = size_max
        while len(found) < entries_max:
            ledger_id, first = self._ledgers.clamp(position)
            record = self._ledgers.get(ledger_id)
            if record is None or first >= record.entries:
                break
            last = min(record.entries, first + entries_max - len(found)) - 1
            payloads = self._cache.run(ledger_id, first, last)
            if payloads:
                self._statistics.found(len(payloads), sum(map(len, payloads)))
            else:
                payloads = await self._fetch(record, first=first, last=last, room=room)
            for entry_id, payload in enumerate(payloads, first):
                if len(payload) > room and found:
                    return found
                room -= len(payload)
                found.append((Position(ledger_id, entry_id), payload))
            position = Position(ledger_id, first + len(payloads))
            if room <= 0:
                break
        return found

    async def read_some(
        self, positions: Sequence[Position], *, size_max: int
    ) -> tuple[list[tuple[Position, bytes]], Sequence[Position]]:
        """See `ManagedLedger.read_some`."""
        found: list[tuple[Position, bytes]] = []
        room, done = size_max, 0
        while done < len(positions) and (room > 0 or not found):
            ledger_id = positions[done].ledger_id
            record = self._ledgers.get(ledger_id)
            ids: list[int] = []
            for position in positions[done : done + READ_ENTRIES_MAX]:
                if position.ledger_id != ledger_id:
                    break
                ids.append(position.entry_id)
            existing = [] if record is None else ids[: bisect_left(ids, record.entries)]
            if record is None or not existing:
                done += len(ids)
                continue
            payloads = await self._some(record, existing, room=room)
            for entry_id, payload in zip(existing, payloads, strict=False):
                if len(payload) > room and found:
                    return found, positions[done:]
                room -= len(payload)
                found.append((Position(ledger_id, entry_id), payload))
                done += 1
            if len(payloads) == len(existing):
                done += len(ids) - len(existing)
        return found, positions[done:]

    async def find_published(self, at_ms: int, *, check_open: Callable[[], None]) -> Position:
        """See `ManagedLedger.find_published`. `check_open` raises once the topic is closed, fenced or deleted."""
        search = TimeSearch(self._ledgers, at_ms)
        while (position := search.wanted()) is not None:
            check_open()
            try:
                search.found(position, publish_time_ms(await self._read_alone(position)))
            except NoSuchLedger:
                search.lost_ledger(position)
            except (NoSuchEntry, Corrupt):
                search.unreadable(position)
        positions = search.before()
        check_open()
        try:
            entries, _ = await self.read_some(positions, size_max=BEFORE_BYTES_MAX)
            earlier = (position for position, entry in entries if publish_time_ms(entry) >= at_ms)
            return self._ledgers.clamp(next(earlier, search.position))
        except (NotThere, Corrupt):  # no reason to fail: in order, these entries are older
            return self._ledgers.clamp(search.position)

    async def _read_alone(self, position: Position) -> bytes:
        """Return one existing entry. It is not added to the cache: a search reads entries that nobody needs next."""
        ledger_id, entry_id = position
        cached = self._cache.run(ledger_id, entry_id, entry_id)
        if cached:
            return cached[0]
        async with limited(self._timeout_s, "read from a ledger"):
            entries = await self._read(ledger_id, [entry_id])
        if not entries:
            raise NoSuchEntry("the read returned no entry", ledger_id=ledger_id, entry_id=entry_id)
        return entries[0].payload

    async def _fetch(self, record: LedgerRecord, *, first: int, last: int, room: int) -> list[bytes]:
        """Return entries from `first` on: at least one, about as many as fit into `room` bytes.

        The mean of the ledger says nothing about these entries: after a million small ones there may be a hundred of
        5 MiB. Therefore the size of a larger range is found first.
        """
        count = room * record.entries // max(record.size, 1)
        last = min(last, first + max(1, min(count, READ_ENTRIES_MAX)) - 1)
        async with limited(self._timeout_s, "read from a ledger"):
            if last - first >= UNSIZED_ENTRIES_MAX:
                size = await self._size_of(record.ledger_id, first=first, last=last)
                if size > EXCESS_MAX * room:
                    last = first + UNSIZED_ENTRIES_MAX - 1
            entries = await self._read(record.ledger_id, range(first, last + 1))
        if entries:
            self._read_upto = (record.ledger_id, entries[-1].entry_id + 1, entries[-1].length)
        payloads = [entry.payload for entry in entries]
        if len(payloads) != last - first + 1:
            raise NoSuchEntry(
                "the read returned fewer entries than requested", ledger_id=record.ledger_id, first=first, last=last
            )
        self._cache.add_read(record.ledger_id, first, payloads)
        return payloads

    async def _some(self, record: LedgerRecord, ids: Sequence[int], *, room: int) -> list[bytes]:
        """Return the first of the entries `ids`, which ascend: at least one, about as many as fit into `room` bytes.

        Those that are not cached are read in one request. As in `_fetch`, they may be larger than the mean.
        """
        ledger_id = record.ledger_id
        count = room * record.entries // max(record.size, 1)
        ids = ids[: max(1, min(count, len(ids)))]
        cached = self._cache.some(ledger_id, ids)
        if cached:
            self._statistics.found(len(cached), sum(map(len, cached.values())))
        missing = [entry_id for entry_id in ids if entry_id not in cached] if cached else ids
        if not missing:
            return [cached[entry_id] for entry_id in ids]
        async with limited(self._timeout_s, "read from a ledger"):
            if len(missing) > UNSIZED_ENTRIES_MAX and record.size > UNSIZED_BYTES_MAX:
                span = missing[-1] - missing[0] + 1
                expected = span * record.size // record.entries
                is_known = expected <= EXCESS_MAX * room and (
                    await self._size_of(ledger_id, first=missing[0], last=missing[-1]) <= EXCESS_MAX * room
                )
                if not is_known:
                    missing = missing[:UNSIZED_ENTRIES_MAX]
            entries = await self._read(ledger_id, missing)
        if len(entries) != len(missing):
            raise NoSuchEntry(
                "the read returned fewer entries than requested",
                ledger_id=ledger_id,
                first=missing[0],
                last=missing[-1],
            )
        self._cache.add_some(ledger_id, missing, [entry.payload for entry in entries])
        for entry in entries:
            cached[entry.entry_id] = entry.payload
        payloads: list[bytes] = []
        for entry_id in ids:
            payload = cached.get(entry_id)
            if payload is None:
                break
            payloads.append(payload)
        return payloads

    async def _size_of(self, ledger_id: int, *, first: int, last: int) -> int:
        """Return the bytes of the entries first..last. Reads the last one, and the first one if it does not continue.

        An entry has the bytes of its ledger up to itself.
        """
        (end,) = await self._read(ledger_id, [last])
        if self._read_upto is not None and self._read_upto[:2] == (ledger_id, first):
            return end.length - self._read_upto[2]
        (begin,) = await self._read(ledger_id, [first])
        return end.length - begin.length + len(begin.payload)

    async def _read(self, ledger_id: int, ids: Sequence[int]) -> list[Entry]:
        entries = await self._read_stored(ledger_id, ids)
        self._statistics.fetched(len(entries), sum(len(entry.payload) for entry in entries))
        return entries

    async def _read_stored(self, ledger_id: int, ids: Sequence[int]) -> list[Entry]:
        last = ids[-1]
        writer = self._write_handle()
        if writer is not None and writer.ledger_id == ledger_id:
            try:
                return await writer.read_some(ids)
            except LostOwnership:
                pass  # closed or fenced just now; its entries can be read without the writer
        reader = await self._handles.get(ledger_id)
        if reader.last_add_confirmed < last and await reader.read_last_confirmed() < last:
            # Bookies receive a confirmation with the next entry; the last one is known once the ledger is closed.
            raise TryAgain("the entries cannot be read until their ledger is closed", ledger_id=ledger_id)
        return await reader.read_some(ids)
