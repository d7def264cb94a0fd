"""DelayIndex: the delayed messages of a subscription, by delivery time and by position. Pure; time is an argument.

A new message goes into the *open* part, a dict. When that holds OPEN_MAX messages, it becomes a *bucket*, which takes
11 bytes for each message (`bucket`). Small buckets are merged into larger ones. Thus a message is written to a blob two
or three times, and the index has at most BUCKETS_MAX buckets.

Time is divided into ticks. A message is due at the end of the tick that contains its delivery time: never early, late
by less than a tick. `due` returns messages by tick, and by position within a tick.

**Storage.** Each bucket is stored as one blob that never changes; its name is never used again. `changes` compares the
buckets with the names that are stored and returns the difference, which the owner stores atomically. Nothing is
written when a message becomes due or is acknowledged.

**After a crash** the owner calls `restore` with the stored blobs. The acknowledgements are authoritative: acknowledged
messages are dropped, and messages that had become due are due again. The owner then reads each message that is neither
acknowledged nor in the index (`delayed_in`), and adds those that are delayed. This includes the messages of the open
part and of damaged blobs, so a lost blob costs reads but never a message. Messages in the index are not read.

**The limit.** If BUCKETS_MAX buckets exist and no two of them fit into one, the index is full: `room` is 0 and `add`
returns False. The owner then stops reading at this message, and reads on from it when there is room. Such messages are
delivered later but in order; none is lost or early. The index always has room for 2,000,000 messages (900,000 if each
is in a ledger of its own), and at most for 4,067,080.

Invariants: a position is in the open part or a row of one bucket, live or not, but never in two places; `len` is the
number of messages in the open part and of live rows; `_heads` has one entry for each bucket, and it is not after the
head of the bucket; `_heap` has an entry for each message of the open part. A bucket has at least one live row.
Source: the idea of buckets with snapshots is Pulsar's BucketDelayedDeliveryTracker (PIP-195).
"""

import heapq
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, NamedTuple

from bindery_core.errors import BinderyError
from bindery_pulsar.message_id import EARLIEST, Position

from bindery_broker.dispatch.delays.bucket import Bucket, HasAcked, Head, joined, ranges_of
from bindery_broker.dispatch.delays.bucket_codec import (
    DELIVER_AT_MAX,
    ROWS_MAX,
    WEIGHT_MAX,
    Columns,
    build,
    decode_bucket,
    encode_bucket,
)

TICK_MS: Final = 100
"""Default tick in milliseconds. Pulsar's is 1,000."""
OPEN_MAX: Final = 4_096
"""Maximum number of messages in the open part. They take about 350 bytes each, and are read again after a crash."""
SMALL_MAX: Final = 15
"""Maximum number of buckets that are less than half full; above it, the smallest ones are merged."""
BUCKETS_MAX: Final = 62
"""Maximum number of buckets, and of blobs. Source: a cursor stores 64 blobs."""
_HEAP_SLACK: Final = 64
_NAME: Final = re.compile(r"delays-([1-9][0-9]{0,17})", re.ASCII)


class Changes(NamedTuple):
    """What the owner stores, atomically. The names removed may include some that are not stored any more."""

    put: dict[str, bytes]
    """Blobs by name, each at most 1 MiB."""
    remove: list[str]


class DelayIndex:
    """See the module. `tick_ms`: length of a tick in milliseconds, from 1."""

    def __init__(self, *, tick_ms: int = TICK_MS) -> None:
        assert tick_ms >= 1
        self.tick_ms: Final = tick_ms
        self._serial = 0
        self.clear()

    def clear(self, stored: Iterable[str] = ()) -> None:
        """Forget all messages: the cursor was moved. The next `changes` removes their blobs.

        `stored`: the names of all blobs that are stored, of which some may not have been restored. No bucket gets one
        of these names: it would count as stored with the messages of the former one.
        """
        for name in stored:
            if (matched := _NAME.fullmatch(name)) is not None:
                self._serial = max(self._serial, int(matched[1]))
        self._open: dict[Position, int] = {}
        self._open_first: Position | None = None
        """Not after any message of the open part."""
        self._heap: list[Head] = []
        self._buckets: dict[int, Bucket] = {}
        self._heads: list[tuple[int, Position, int]] = []
        self._last = EARLIEST
        """Last position of any bucket that existed: a later position is not in a bucket."""
        self._live = 0
        """Number of live rows."""
        self._rows = 0
        """Number of rows, live or not."""
        self.covered_upto = EARLIEST
        """Last position that was ever added, or was covered by a restored blob. A later one is not in the index."""

    def __len__(self) -> int:
        return len(self._open) + self._live

    # -- adding

    def add(self, position: Position, deliver_at_ms: int) -> bool:
        """Add a message. Returns False, without any change, only if it is new and the index is full.

        A known message is left as it is. Positions may come in any order; ascending ones cost least. `deliver_at_ms`:
        milliseconds since 1970, 0 to 2^63 - 1.
        """
        assert 0 <= deliver_at_ms <= DELIVER_AT_MAX
        if position in self._open:
            return True
        if position <= self._last:
            found = self._find(position)
            if found is not None:
                serial, bucket, row = found
                if bucket.is_live(row):
                    return True
                if self._is_open_full():
                    return False
                # It was due by a clock that was set back. A position has only one row, so remove the old one.
                self._replace([serial])
        if len(self._open) >= OPEN_MAX and not self._seal_if_possible():
            return False
        if self._open_first is None or position < self._open_first:
            self._open_first = position
        self.covered_upto = max(self.covered_upto, position)
        self._open[position] = deliver_at_ms
        heapq.heappush(self._heap, (-(-deliver_at_ms // self.tick_ms), position))
        if len(self._heap) > 2 * len(self._open) + _HEAP_SLACK:  # many were removed before they were due
            self._rebuild_heap()
        if len(self._open) >= OPEN_MAX:
            self._seal_if_possible()
        return True

    def room(self) -> int:
        """Return how many new messages can be added now; there may be room for more. 0: read no further."""
        return OPEN_MAX - len(self._open) if self._is_full() else OPEN_MAX

    def seal(self) -> bool:
        """Make a bucket of the open part, so that `changes` stores all messages: before a close.

        Each call that is followed by more messages costs a merge later. Returns False if the index is full: then the
        messages of the open part are read again after a restart.
        """
        return not self._open or self._seal_if_possible()

    # -- delivering

    def due(self, now_ms: int, count_max: int) -> list[Position]:
        """Remove and return messages that are due at `now_ms`, at most `count_max`: by tick, then by position.

        `count_max`: number of messages that the owner has room for. A message that is returned is not delayed any more,
        even if the clock is set back.
        """
        slot_max = now_ms // self.tick_ms
        found: list[Position] = []
        while len(found) < count_max:
            head = self._bucket_head()
            other = self._open_head()
            if head is None and other is None:
                break
            if head is None or (other is not None and other < head[:2]):
                assert other is not None
                if other[0] > slot_max:
                    break
                heapq.heappop(self._heap)
                del self._open[other[1]]
                found.append(other[1])
                continue
            if head[0] > slot_max:
                break
            rivals = [row[:2] for row in self._heads[1:3]]
            if other is not None:
                rivals.append(other)
            bucket = self._buckets[head[2]]
            taken = bucket.take(slot_max=slot_max, before=min(rivals, default=None), count_max=count_max - len(found))
            assert taken
            assert taken[0] == head[1]
            found += taken
            self._live -= len(taken)
            self._drop_if_empty(head[2])
        if not self._open:
            self._open_first = None
        if self._rows > 2 * self._live + ROWS_MAX:
            self._merge_smallest()
        return found

    def next_due_ms(self) -> int | None:
        """Return when the next message is due, in milliseconds since 1970; None: the index is empty."""
        heads = [head[0] for head in (self._bucket_head(), self._open_head()) if head is not None]
        return min(heads) * self.tick_ms if heads else None

    # -- by position

    def deliver_at(self, position: Position) -> int | None:
        """Return the delivery time of a message, in milliseconds since 1970; None: it is not in the index."""
        at = self._open.get(position)
        if at is None and (found := self._find(position)) is not None:
            _, bucket, row = found
            return bucket.deliver_at(row) if bucket.is_live(row) else None
        return at

    def delayed_in(self, ledger_id: int, first: int, last: int) -> list[tuple[int, int]]:
        """Return the entries of a ledger that are in the index and need not be read, as ranges first..last (included).

        Takes memory in proportion to `last - first`, so that the caller asks for one read at a time.
        """
        ids = sorted(entry_id for owner, entry_id in self._open if owner == ledger_id and first <= entry_id <= last)
        ranges = ranges_of(ids)
        for bucket in self._buckets.values():
            if bucket.first <= (ledger_id, last) and bucket.last >= (ledger_id, first):
                ranges += bucket.live_ranges(ledger_id, first, last)
        ranges.sort()
        return joined(ranges)

    def cancel(self, position: Position) -> bool:
        """Remove a message: it is acknowledged. Returns whether it was in the index."""
        if self._open.pop(position, None) is not None:
            return True
        found = self._find(position)
        if found is None or not found[1].is_live(found[2]):
            return False
        serial, bucket, row = found
        bucket.remove(row)
        self._live -= 1
        self._drop_if_empty(serial)
        return True

    def forget(self, positions: Iterable[Position]) -> int:
        """Remove messages that were acknowledged while they were delayed. Returns how many were in the index.

        Most acknowledged messages were delivered, so that they are not in the index: those of a ledger are looked up
        together.
        """
        before = len(self)
        for ledger_id, entry_ids in _by_ledger(positions).items():
            if self._open_first is not None and self._open_first <= (ledger_id, entry_ids[-1]):
                for entry_id in entry_ids:
                    self._open.pop(Position(ledger_id, entry_id), None)
            for serial, bucket in list(self._buckets.items()):
                removed = bucket.remove_some(ledger_id, entry_ids)
                if removed:
                    self._live -= removed
                    self._drop_if_empty(serial)
        return before - len(self)

    def forget_upto(self, position: Position) -> int:
        """Remove all messages <= `position`: the mark-delete position moved. Returns how many were in the index."""
        before = len(self)
        if self._open_first is not None and self._open_first <= position:
            self._open = {other: at for other, at in self._open.items() if other > position}
            self._open_first = min(self._open, default=None)
            self._rebuild_heap()
        for serial, bucket in list(self._buckets.items()):
            if bucket.first <= position:
                self._live -= bucket.remove_upto(position)
                self._drop_if_empty(serial)
        return before - len(self)

    # -- storing

    def changes(self, stored: Collection[str], *, puts_max: int = BUCKETS_MAX) -> Changes:
        """Return what to store and to remove so that the stored blobs are those of the buckets.

        `stored`: the names of all blobs that are stored, those of others included. Call it again after the changes are
        durable, or after they failed. `puts_max`: maximum number of blobs to store in one call.
        """
        names = {f"delays-{serial}": bucket for serial, bucket in self._buckets.items()}
        missing = [name for name in names if name not in stored][:puts_max]
        return Changes(
            put={name: encode_bucket(names[name].columns) for name in missing},
            remove=sorted(name for name in stored if name not in names and _NAME.fullmatch(name)),
        )

    def restore(
        self,
        blobs: Mapping[str, bytes],
        is_acked: Callable[[Position], bool],
        has_acked: HasAcked = lambda _ledger_id, _first, _last: True,
    ) -> dict[str, BinderyError]:
        """Add the messages of stored blobs, without those that are acknowledged.

        `has_acked`: see `Bucket.remove_acked`. May be called with a few blobs at a time, before the first `add`; a blob
        takes about 10 ms, or 30 if many are acknowledged. Returns the blobs that cannot be read, by name; their
        messages are read again, and the next `changes` removes them. Blobs with other names are ignored.
        """
        assert not self._open
        damaged: dict[str, BinderyError] = {}
        for name, blob in blobs.items():
            matched = _NAME.fullmatch(name)
            if matched is None:
                continue
            serial = int(matched[1])
            self._serial = max(self._serial, serial)
            try:
                columns = decode_bucket(blob)
            except BinderyError as error:
                damaged[name] = error
                continue
            self.covered_upto = max(self.covered_upto, columns.covered_upto)
            bucket = Bucket(columns, tick_ms=self.tick_ms)
            bucket.remove_acked(is_acked, has_acked)
            if bucket.live and len(self._buckets) < BUCKETS_MAX:
                self._insert(serial, bucket)
        return damaged

    # -- buckets

    def _find(self, position: Position) -> tuple[int, Bucket, int] | None:
        """Return the bucket that has a row for `position`, its serial number, and the row, which may be marked."""
        for serial, bucket in self._buckets.items():
            row = bucket.find(position)
            if row is not None:
                return serial, bucket, row
        return None

    def _insert(self, serial: int, bucket: Bucket) -> None:
        head = bucket.head()
        assert head is not None
        assert serial not in self._buckets
        self._buckets[serial] = bucket
        if len(self._heads) > 2 * len(self._buckets) + _HEAP_SLACK:  # most are of buckets that were merged
            self._heads = [row for row in self._heads if row[2] in self._buckets]
            heapq.heapify(self._heads)
        heapq.heappush(self._heads, (*head, serial))
        self._last = max(self._last, bucket.last)
        self._live += bucket.live
        self._rows += len(bucket)

    def _remove(self, serial: int) -> Bucket:
        """Remove a bucket. Its entry in `_heads` is dropped when it reaches the front."""
        bucket = self._buckets.pop(serial)
        self._live -= bucket.live
        self._rows -= len(bucket)
        return bucket

    def _drop_if_empty(self, serial: int) -> None:
        if not self._buckets[serial].live:
            self._remove(serial)

    def _bucket_head(self) -> tuple[int, Position, int] | None:
        """Return the first live message of all buckets, with the serial number of its bucket."""
        heads = self._heads
        while heads:
            serial = heads[0][2]
            bucket = self._buckets.get(serial)
            head = None if bucket is None else bucket.head()
            if head is None:
                heapq.heappop(heads)
            elif head == heads[0][:2]:
                return heads[0]
            else:
                heapq.heapreplace(heads, (*head, serial))
        return None

    def _is_full(self) -> bool:
        if len(self._buckets) < BUCKETS_MAX:
            return False
        return sum(heapq.nsmallest(2, (bucket.weight for bucket in self._buckets.values()))) > WEIGHT_MAX

    def _is_open_full(self) -> bool:
        return len(self._open) >= OPEN_MAX and self._is_full()

    def _seal_if_possible(self) -> bool:
        """Make a bucket of the open part, and merge the smallest buckets if there are too many. False: full."""
        if self._is_full():
            return False
        rows: dict[int, tuple[list[int], list[int]]] = {}
        for (ledger_id, entry_id), at in sorted(self._open.items()):
            entries, times = rows.setdefault(ledger_id, ([], []))
            entries.append(entry_id)
            times.append(at)
        self._open.clear()
        self._open_first = None
        self._heap.clear()
        self._create(build(rows, covered_upto=self.covered_upto))
        small = sum(bucket.weight < WEIGHT_MAX // 2 for bucket in self._buckets.values())
        if small > SMALL_MAX or len(self._buckets) > BUCKETS_MAX:
            self._merge_smallest()
        assert len(self._buckets) <= BUCKETS_MAX
        return True

    def _create(self, columns: Columns) -> None:
        self._serial += 1
        self._insert(self._serial, Bucket(columns, tick_ms=self.tick_ms))

    def _merge_smallest(self) -> None:
        """Merge as many of the smallest buckets as fit into one; none, if two do not fit."""
        chosen: list[int] = []
        total = 0
        for serial, bucket in sorted(self._buckets.items(), key=lambda row: row[1].weight):
            total += bucket.weight
            if total > WEIGHT_MAX:
                break
            chosen.append(serial)
        if len(chosen) > 1:
            self._replace(chosen)

    def _replace(self, serials: list[int]) -> None:
        """Replace buckets by one with their live rows."""
        rows: dict[int, tuple[list[int], list[int]]] = {}
        covered_upto = EARLIEST
        for bucket in sorted(map(self._remove, serials), key=lambda bucket: bucket.first):
            covered_upto = max(covered_upto, bucket.columns.covered_upto)
            for ledger_id, entries, times in bucket.live_rows():
                if ledger_id not in rows:
                    rows[ledger_id] = entries, times
                    continue
                known, known_times = rows[ledger_id]
                is_after = entries[0] > known[-1]
                known += entries
                known_times += times
                if not is_after:
                    order = sorted(range(len(known)), key=known.__getitem__)
                    rows[ledger_id] = [known[i] for i in order], [known_times[i] for i in order]
        self._create(build(rows, covered_upto=covered_upto))

    # -- the open part

    def _open_head(self) -> Head | None:
        heap = self._heap
        while heap:
            slot, position = heap[0]
            at = self._open.get(position)
            if at is not None and -(-at // self.tick_ms) == slot:
                return heap[0]
            heapq.heappop(heap)
        return None

    def _rebuild_heap(self) -> None:
        self._heap = [(-(-at // self.tick_ms), position) for position, at in self._open.items()]
        heapq.heapify(self._heap)

    def check(self) -> None:
        """Assert the invariants of the index. Takes O(n); for tests."""
        positions = list(self._open)
        for serial, bucket in self._buckets.items():
            bucket.check()
            assert bucket.live
            assert bucket.last <= self._last
            head = bucket.head()
            entries = [row for row in self._heads if row[2] == serial]
            assert len(entries) == 1
            assert head is not None
            assert entries[0][:2] <= head
            columns = bucket.columns
            for index, ledger_id in enumerate(columns.ledgers):
                ids = columns.entries[columns.starts[index] : columns.end(index)]
                positions += [Position(ledger_id, columns.firsts[index] + offset) for offset in ids]
        assert len(positions) == len(set(positions))
        assert self._live == sum(bucket.live for bucket in self._buckets.values())
        assert self._rows == sum(map(len, self._buckets.values()))
        assert len(self._buckets) <= BUCKETS_MAX
        assert len(self._open) <= OPEN_MAX
        assert {(-(-at // self.tick_ms), position) for position, at in self._open.items()} <= set(self._heap)
        assert all(self._open_first is not None and self._open_first <= position for position in self._open)


def _by_ledger(positions: Iterable[Position]) -> dict[int, list[int]]:
    """Return the entries of each ledger, ascending and each once."""
    entries: dict[int, set[int]] = {}
    for ledger_id, entry_id in positions:
        entries.setdefault(ledger_id, set()).add(entry_id)
    return {ledger_id: sorted(ids) for ledger_id, ids in entries.items()}
