"""AckRanges: a set of entries, stored as ranges per ledger. Its size depends on the gaps, not on the entries. Pure.

Invariants: the ranges of a ledger are in ascending order, and neither overlap nor touch; no ledger is kept without a
range; `entries_count` is the number of entries in all ranges.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import islice
from typing import Self


class _Ranges:
    """Ranges of one ledger: range i is starts[i] .. ends[i], both included."""

    __slots__ = ("ends", "starts")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []


class AckRanges:
    """A set of (ledger id, entry id)."""

    __slots__ = ("_ledgers", "entries_count")

    def __init__(self) -> None:
        self._ledgers: dict[int, _Ranges] = {}
        self.entries_count = 0

    def add_range(self, ledger_id: int, first: int, last: int) -> int:
        """Add first..last (inclusive). Returns the number of new entries. Takes O(log n + number of joined ranges)."""
        assert 0 <= first <= last
        ranges = self._ledgers.get(ledger_id)
        if ranges is None:
            ranges = self._ledgers[ledger_id] = _Ranges()
        starts, ends = ranges.starts, ranges.ends
        low = bisect_left(ends, first - 1)  # first range that overlaps or touches from the left
        high = bisect_right(starts, last + 1)  # after the last range that overlaps or touches from the right
        known = sum(ends[i] - starts[i] + 1 for i in range(low, high))
        if low < high:
            first = min(first, starts[low])
            last = max(last, ends[high - 1])
        starts[low:high] = [first]
        ends[low:high] = [last]
        added = last - first + 1 - known
        self.entries_count += added
        return added

    def add(self, ledger_id: int, entry_id: int) -> bool:
        """Add an entry. Returns whether it was new."""
        return self.add_range(ledger_id, entry_id, entry_id) == 1

    def add_bits(self, ledger_id: int, bits: int) -> None:
        """Add each entry whose bit is set; bit i is entry i."""
        entry_id = 0
        while bits:
            zeros = (bits & -bits).bit_length() - 1
            bits >>= zeros
            ones = (bits ^ (bits + 1)).bit_length() - 1
            self.add_range(ledger_id, entry_id + zeros, entry_id + zeros + ones - 1)
            bits >>= ones
            entry_id += zeros + ones

    def contains(self, ledger_id: int, entry_id: int) -> bool:
        return self.end_of_range(ledger_id, entry_id) is not None

    def end_of_range(self, ledger_id: int, entry_id: int) -> int | None:
        """Return the last entry of the range that contains this entry; None: no range contains it."""
        ranges = self._ledgers.get(ledger_id)
        if ranges is None:
            return None
        index = bisect_right(ranges.starts, entry_id) - 1
        return ranges.ends[index] if index >= 0 and entry_id <= ranges.ends[index] else None

    def remove_upto(self, ledger_id: int, entry_id: int) -> None:
        """Remove all entries <= (ledger_id, entry_id)."""
        for old in [other for other in self._ledgers if other < ledger_id]:
            self.entries_count -= self._size(self._ledgers.pop(old))
        ranges = self._ledgers.get(ledger_id)
        if ranges is None:
            return
        before = self._size(ranges)
        gone = bisect_right(ranges.ends, entry_id)
        del ranges.starts[:gone], ranges.ends[:gone]
        if ranges.starts and ranges.starts[0] <= entry_id:
            ranges.starts[0] = entry_id + 1
        self.entries_count -= before - self._size(ranges)
        if not ranges.starts:
            del self._ledgers[ledger_id]

    @staticmethod
    def _size(ranges: _Ranges) -> int:
        return sum(ranges.ends) - sum(ranges.starts) + len(ranges.starts)

    def clear(self) -> None:
        self._ledgers.clear()
        self.entries_count = 0

    def copy(self) -> Self:
        twin = type(self)()
        for ledger_id, ranges in self._ledgers.items():
            copied = twin._ledgers[ledger_id] = _Ranges()
            copied.starts, copied.ends = ranges.starts.copy(), ranges.ends.copy()
        twin.entries_count = self.entries_count
        return twin

    @property
    def ranges_count(self) -> int:
        return sum(len(ranges.starts) for ranges in self._ledgers.values())

    def ledger_ids(self) -> list[int]:
        return sorted(self._ledgers)

    def last_entries(self) -> Iterator[int]:
        """Return the highest entry of each ledger."""
        return (ranges.ends[-1] for ranges in self._ledgers.values())

    def bits(self, ledger_id: int) -> int:
        """Return the entries of a ledger as a bit set."""
        ranges = self._ledgers[ledger_id]
        octets = bytearray(ranges.ends[-1] // 8 + 1)
        for first, last in zip(ranges.starts, ranges.ends, strict=True):
            low, high = first // 8, last // 8
            if low == high:
                octets[low] |= ((1 << (last - first + 1)) - 1) << (first % 8)
            else:
                octets[low] |= (0xFF << (first % 8)) & 0xFF
                octets[low + 1 : high] = b"\xff" * (high - low - 1)
                octets[high] |= (1 << (last % 8 + 1)) - 1
        return int.from_bytes(octets, "little")

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Iterate over the ranges (ledger id, first, last) in ascending order."""
        for ledger_id in sorted(self._ledgers):
            ranges = self._ledgers[ledger_id]
            for first, last in zip(ranges.starts, ranges.ends, strict=True):
                yield ledger_id, first, last

    def __bool__(self) -> bool:
        return bool(self._ledgers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AckRanges) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return self.text()

    def text(self, *, ranges_max: int | None = None) -> str:
        """Return the ranges as Pulsar prints them: lower end open, upper end closed.

        `ranges_max`: number of ranges after which `...` stands for the others; None: no limit.
        """
        shown = [f"({ledger}:{first - 1}..{ledger}:{last}]" for ledger, first, last in islice(self, ranges_max)]
        if ranges_max is not None and len(shown) == ranges_max < self.ranges_count:
            shown.append("...")
        return "[" + ",".join(shown) + "]"
