"""A bucket: many delayed messages that are read in the order of their delivery, and found by position.

The messages are columns in the order of their positions (`bucket_codec`). `_order` lists the rows by slot, then by row.
The slot of a message is its delivery time divided by the tick, rounded up. A message that leaves the bucket is marked
in `_gone`; its row stays until the bucket is merged or dropped. A row takes 11 bytes: 4 for the entry, 4 for the time,
2 for the order, 1 for the mark. It takes 15 or 19 bytes if the entries or times of the bucket need 8 bytes.

Invariants: `live` is the number of rows that are not marked; every row before `_head` in `_order` is marked; every row
before `_low` is marked.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress, islice
from operator import le

from bindery_pulsar.message_id import Position

from bindery_broker.dispatch.delays.bucket_codec import Columns, weight

HasAcked = Callable[[int, int, int], bool]
"""(ledger id, first entry id, last entry id) -> whether any of the entries may be acknowledged."""
ACKED_ROWS = 1_024
"""Number of rows for which `has_acked` is asked together."""
Head = tuple[int, Position]
"""The slot and the position of a message. The order of delivery is the order of these."""


class Bucket:
    """The rows of `columns`, which must not change afterwards. `tick_ms`: milliseconds of a slot."""

    __slots__ = ("_gone", "_head", "_low", "_order", "_tick_ms", "columns", "first", "last", "live")

    def __init__(self, columns: Columns, *, tick_ms: int) -> None:
        self.columns = columns
        self._tick_ms = tick_ms
        base_ms, times, count = columns.base_ms, columns.times, len(columns)
        if all(map(le, times, islice(times, 1, None))):  # the messages of one delay are in order
            self._order = array("H", range(count))
        else:
            slots = [-(-(base_ms + offset) // tick_ms) for offset in times]
            self._order = array("H", sorted(range(count), key=slots.__getitem__))
        self._gone = bytearray(count)
        self._head = 0
        self._low = 0
        self.live = count
        self.first = self._position(0)
        """Position of the first row, whether it is marked or not."""
        self.last = self._position(count - 1)

    def __len__(self) -> int:
        """Return the number of rows, marked ones included."""
        return len(self._gone)

    @property
    def weight(self) -> int:
        """Upper bound of the bytes that the live rows take in a blob."""
        return weight(self.live, min(self.live, len(self.columns.ledgers)))

    # -- by time

    def head(self) -> Head | None:
        """Return the first live message in the order of delivery."""
        order, gone, head = self._order, self._gone, self._head
        end = len(order)
        while head < end and gone[order[head]]:
            head += 1
        self._head = head
        if head == end:
            return None
        row = order[head]
        return self._slot(row), self._position(row)

    def take(self, *, slot_max: int, before: tuple[int, Position] | None, count_max: int) -> list[Position]:
        """Remove messages in the order of delivery: those up to `slot_max` that come before `before`, if it is set."""
        found: list[Position] = []
        columns, order, gone, head = self.columns, self._order, self._gone, self._head
        times, base_ms, tick_ms = columns.times, columns.base_ms, self._tick_ms
        end = len(order)
        while head < end and len(found) < count_max:
            row = order[head]
            if not gone[row]:
                slot = -(-(base_ms + times[row]) // tick_ms)
                if slot > slot_max:
                    break
                position = self._position(row)
                if before is not None and (slot, position) > before:
                    break
                gone[row] = 1
                found.append(position)
            head += 1
        self._head = head
        self.live -= len(found)
        return found

    # -- by position

    def find(self, position: Position) -> int | None:
        """Return the row of `position`, which may be marked; None: the bucket has no such row."""
        if not self.first <= position <= self.last:
            return None
        ledger_id, entry_id = position
        columns = self.columns
        index = bisect_left(columns.ledgers, ledger_id)
        if columns.ledgers[index] != ledger_id:
            return None
        offset, end = entry_id - columns.firsts[index], columns.end(index)
        row = bisect_left(columns.entries, offset, columns.starts[index], end)
        return row if row < end and columns.entries[row] == offset else None

    def is_live(self, row: int) -> bool:
        return not self._gone[row]

    def deliver_at(self, row: int) -> int:
        return self.columns.base_ms + self.columns.times[row]

    def remove(self, row: int) -> None:
        """Mark a live row."""
        assert not self._gone[row]
        self._gone[row] = 1
        self.live -= 1

    def remove_upto(self, position: Position) -> int:
        """Mark all rows <= `position`. Returns how many were live."""
        if position < self.first:
            return 0
        columns = self.columns
        index = bisect_right(columns.ledgers, position.ledger_id) - 1
        end = columns.end(index)
        if columns.ledgers[index] == position.ledger_id:
            end = bisect_right(columns.entries, position.entry_id - columns.firsts[index], columns.starts[index], end)
        low = self._low
        if end <= low:
            return 0
        count = self._gone.count(0, low, end)
        if count:
            self._gone[low:end] = b"\1" * (end - low)
            self.live -= count
        self._low = end
        return count

    def remove_acked(self, is_acked: Callable[[Position], bool], has_acked: HasAcked) -> int:
        """Mark the live rows for which `is_acked` is true. Returns their number.

        `has_acked`: whether it may be true for an entry from first to last of a ledger. The rows of other ranges are
        not looked at: of a million delayed messages, most lie side by side, and none is acknowledged.
        """
        count = 0
        columns = self.columns
        for index, ledger_id in enumerate(columns.ledgers):
            first, end = columns.firsts[index], columns.end(index)
            for low in range(columns.starts[index], end, ACKED_ROWS):
                high = min(low + ACKED_ROWS, end)
                if not has_acked(ledger_id, first + columns.entries[low], first + columns.entries[high - 1]):
                    continue
                for row in range(low, high):
                    if not self._gone[row] and is_acked(Position(ledger_id, first + columns.entries[row])):
                        self._gone[row] = 1
                        count += 1
        self.live -= count
        return count

    def remove_some(self, ledger_id: int, ids: Sequence[int]) -> int:
        """Mark the rows of the entries `ids` of a ledger, which ascend. Returns how many were live."""
        row, end = self._rows_in(ledger_id, ids[0], ids[-1])
        gone = self._gone
        if row == end or gone.find(0, row, end) < 0:
            return 0
        columns = self.columns
        base, entries = columns.firsts[bisect_left(columns.ledgers, ledger_id)], columns.entries
        count = 0
        for entry_id in ids:
            row = bisect_left(entries, entry_id - base, row, end)
            if row == end:
                break
            if entries[row] == entry_id - base and not gone[row]:
                gone[row] = 1
                count += 1
        self.live -= count
        return count

    def _rows_in(self, ledger_id: int, first: int, last: int) -> tuple[int, int]:
        """Return the rows of the entries of a ledger from `first` to `last`: the first one, and one after the last."""
        if self.last < (ledger_id, first) or self.first > (ledger_id, last):
            return 0, 0
        columns = self.columns
        index = bisect_left(columns.ledgers, ledger_id)
        if index == len(columns.ledgers) or columns.ledgers[index] != ledger_id:
            return 0, 0
        base, end, entries = columns.firsts[index], columns.end(index), columns.entries
        low = bisect_left(entries, first - base, columns.starts[index], end)
        return low, bisect_right(entries, last - base, low, end)

    def live_ranges(self, ledger_id: int, first: int, last: int) -> list[tuple[int, int]]:
        """Return the live entries of a ledger from `first` to `last`, as ascending ranges; all ends are included."""
        low, high = self._rows_in(ledger_id, first, last)
        if low == high:
            return []
        columns = self.columns
        base, entries = columns.firsts[bisect_left(columns.ledgers, ledger_id)], columns.entries
        gone = self._gone
        if entries[high - 1] - entries[low] == high - 1 - low and not gone.count(1, low, high):  # often
            return [(base + entries[low], base + entries[high - 1])]
        return ranges_of([base + entries[row] for row in range(low, high) if not gone[row]])

    def live_rows(self) -> Iterator[tuple[int, list[int], list[int]]]:
        """Yield ledger id, entry ids and delivery times of the live rows of each ledger, ascending, none empty."""
        columns, gone, base_ms = self.columns, self._gone, self.columns.base_ms
        live = gone.translate(_INVERTED)
        for index, ledger_id in enumerate(columns.ledgers):
            first, start, end = columns.firsts[index], columns.starts[index], columns.end(index)
            chosen = live[start:end]
            entries = [first + offset for offset in compress(columns.entries[start:end], chosen)]
            if entries:
                yield ledger_id, entries, [base_ms + at for at in compress(columns.times[start:end], chosen)]

    def check(self) -> None:
        """Assert the invariants. Takes O(n); for tests."""
        assert self.live == self._gone.count(0)
        assert all(self._gone[row] for row in self._order[: self._head])
        assert self._gone.count(0, 0, self._low) == 0
        assert sorted(self._order) == list(range(len(self)))

    def _slot(self, row: int) -> int:
        return -(-(self.columns.base_ms + self.columns.times[row]) // self._tick_ms)

    def _position(self, row: int) -> Position:
        columns = self.columns
        index = 0 if len(columns.starts) == 1 else bisect_right(columns.starts, row) - 1
        return Position(columns.ledgers[index], columns.firsts[index] + columns.entries[row])


_INVERTED = bytes([1, 0]) + bytes(254)


def ranges_of(ids: Iterable[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as ranges first..last, both included."""
    return joined((number, number) for number in ids)


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join adjacent ranges. They ascend and do not overlap."""
    found: list[tuple[int, int]] = []
    for first, last in ranges:
        if found and found[-1][1] + 1 == first:
            found[-1] = found[-1][0], last
        else:
            found.append((first, last))
    return found
