"""AckRanges: a set of entries per ledger. Adding, asking and removing from below take constant time. Pure.

The entries of a ledger are divided into blocks of BLOCK_BITS entries:

| block       | stored as                                             | bytes, about                       |
|-------------|-------------------------------------------------------|------------------------------------|
| empty       | nothing                                               | 0                                  |
| partly set  | one integer in a dictionary; bit i is entry i         | 100 to 700                         |
| full        | part of a range of blocks, in two lists               | 16 for each range of adjacent ones |

So a million entries of which every other one is acknowledged take 160 KiB, and a million acknowledged ones without a
gap take less than 1 KiB. A damaged or hostile record cannot make a short range large.

Invariants: a block is in the dictionary or in a range of full blocks or in neither; no ledger is kept without an entry;
`entries_count` is the number of entries in all ledgers.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final, Self

BLOCK_BITS: Final = 4096
"""Number of entries in a block."""
_SHIFT: Final = 12
_MASK: Final = BLOCK_BITS - 1
_FULL: Final = (1 << BLOCK_BITS) - 1
_BLOCK_BYTES: Final = BLOCK_BITS // 8

assert 1 << _SHIFT == BLOCK_BITS


class _Runs:
    """A set of block numbers as ranges starts[i] .. ends[i], both included, which neither overlap nor touch."""

    __slots__ = ("ends", "starts")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []

    def add(self, first: int, last: int) -> int:
        """Add first..last. Returns how many of them were known."""
        starts, ends = self.starts, self.ends
        low = bisect_left(ends, first - 1)  # first range that overlaps or touches from the left
        high = bisect_right(starts, last + 1)  # after the last range that overlaps or touches from the right
        known = sum(max(min(ends[i], last) - max(starts[i], first) + 1, 0) for i in range(low, high))
        if low < high:
            first = min(first, starts[low])
            last = max(last, ends[high - 1])
        starts[low:high] = [first]
        ends[low:high] = [last]
        return known

    def end(self, block: int) -> int | None:
        """Return the last block of the range that contains `block`; None: no range contains it."""
        index = bisect_right(self.starts, block) - 1
        return self.ends[index] if index >= 0 and block <= self.ends[index] else None

    def remove_below(self, block: int) -> int:
        """Remove all blocks < `block`. Returns their number."""
        gone = bisect_left(self.ends, block)
        removed = sum(self.ends[:gone]) - sum(self.starts[:gone]) + gone
        del self.starts[:gone], self.ends[:gone]
        if self.starts and self.starts[0] < block:
            removed += block - self.starts[0]
            self.starts[0] = block
        return removed

    def take_first(self) -> None:
        """Remove the lowest block."""
        if self.starts[0] == self.ends[0]:
            del self.starts[0], self.ends[0]
        else:
            self.starts[0] += 1


class _Ledger:
    """The entries of one ledger."""

    __slots__ = ("bottom", "parts", "runs")

    def __init__(self) -> None:
        self.parts: dict[int, int] = {}
        """The partly set blocks by number."""
        self.runs = _Runs()
        self.bottom = 0
        """No block with a lower number has an entry."""

    @property
    def is_empty(self) -> bool:
        return not self.parts and not self.runs.starts

    def copy(self) -> "_Ledger":
        twin = _Ledger()
        twin.parts = self.parts.copy()
        twin.runs.starts, twin.runs.ends = self.runs.starts.copy(), self.runs.ends.copy()
        twin.bottom = self.bottom
        return twin

    def set(self, block: int, bits: int) -> int:
        """Set bits of a block. Returns how many of them were not set."""
        before = self.parts.get(block, 0)
        after = before | bits
        if after == before or self.runs.end(block) is not None:
            return 0
        if after == _FULL:
            self.parts.pop(block, None)
            self.runs.add(block, block)
        else:
            self.parts[block] = after
        if block < self.bottom:
            self.bottom = block
        return after.bit_count() - before.bit_count()

    def fill(self, first: int, last: int) -> int:
        """Set all bits of the blocks first..last. Returns how many of them were not set."""
        added = 0
        if last - first < len(self.parts):
            inside: Iterable[int] = range(first, last + 1)
        else:
            inside = [block for block in self.parts if first <= block <= last]
        for block in inside:
            bits = self.parts.pop(block, 0)
            added -= bits.bit_count()
        known = self.runs.add(first, last)
        self.bottom = min(self.bottom, first)
        return added + (last - first + 1 - known) * BLOCK_BITS

    def remove_upto(self, entry_id: int) -> int:
        """Remove all entries <= `entry_id`. Returns their number."""
        block = (entry_id + 1) >> _SHIFT
        removed = self.runs.remove_below(block) * BLOCK_BITS
        if self.bottom < block:
            if block - self.bottom <= len(self.parts):
                below: Iterable[int] = range(self.bottom, block)
            else:
                below = [each for each in self.parts if each < block]
            for each in below:
                removed += self.parts.pop(each, 0).bit_count()
            self.bottom = block
        low = (1 << ((entry_id + 1) & _MASK)) - 1
        if not low:
            return removed
        if self.runs.starts and self.runs.starts[0] == block:
            self.runs.take_first()
            self.parts[block] = _FULL & ~low
            return removed + low.bit_count()
        bits = self.parts.get(block, 0)
        if bits & low:
            removed += (bits & low).bit_count()
            if bits & ~low:
                self.parts[block] = bits & ~low
            else:
                del self.parts[block]
        return removed

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Iterate over (first block, last block, bits of each of them) in ascending order."""
        parts, runs = sorted(self.parts), self.runs
        at = 0
        for first, last in zip(runs.starts, runs.ends, strict=True):
            while at < len(parts) and parts[at] < first:
                yield parts[at], parts[at], self.parts[parts[at]]
                at += 1
            yield first, last, _FULL
        for block in parts[at:]:
            yield block, block, self.parts[block]

    @property
    def last_entry(self) -> int:
        """The highest entry of a ledger that is not empty."""
        block = max(self.parts, default=-1)
        if self.runs.ends and self.runs.ends[-1] > block:
            return (self.runs.ends[-1] << _SHIFT) + _MASK
        return (block << _SHIFT) + self.parts[block].bit_length() - 1


class AckRanges:
    """A set of (ledger id, entry id)."""

    __slots__ = ("_ids", "_ledgers", "entries_count")

    def __init__(self) -> None:
        self._ledgers: dict[int, _Ledger] = {}
        self._ids: list[int] = []
        """The keys of `_ledgers` in ascending order."""
        self.entries_count = 0

    def _ledger(self, ledger_id: int) -> _Ledger:
        ledger = self._ledgers.get(ledger_id)
        if ledger is None:
            ledger = self._ledgers[ledger_id] = _Ledger()
            insort(self._ids, ledger_id)
        return ledger

    def add_range(self, ledger_id: int, first: int, last: int) -> int:
        """Add first..last (inclusive). Returns the number of new entries. Takes O(log n + number of blocks joined)."""
        assert 0 <= first <= last
        ledger = self._ledger(ledger_id)
        low, high = first >> _SHIFT, last >> _SHIFT
        if low == high:
            added = ledger.set(low, ((1 << (last - first + 1)) - 1) << (first & _MASK))
        else:
            added = ledger.set(low, _FULL & ~((1 << (first & _MASK)) - 1))
            if high - low > 1:
                added += ledger.fill(low + 1, high - 1)
            added += ledger.set(high, (1 << ((last & _MASK) + 1)) - 1)
        self.entries_count += added
        return added

    def add(self, ledger_id: int, entry_id: int) -> bool:
        """Add an entry. Returns whether it was new."""
        assert entry_id >= 0
        ledger = self._ledgers.get(ledger_id) or self._ledger(ledger_id)
        block, bit = entry_id >> _SHIFT, 1 << (entry_id & _MASK)
        before = ledger.parts.get(block)
        if before is not None and (before | bit) != _FULL:  # most calls
            if before & bit:
                return False
            ledger.parts[block] = before | bit
            self.entries_count += 1
            return True
        added = ledger.set(block, bit)
        self.entries_count += added
        return added == 1

    def add_bits(self, ledger_id: int, bits: int) -> None:
        """Add each entry whose bit is set; bit i is entry i."""
        if not bits:
            return
        ledger = self._ledger(ledger_id)
        octets = bits.to_bytes((bits.bit_length() + 7) // 8, "little")
        for block in range(-(-len(octets) // _BLOCK_BYTES)):
            part = int.from_bytes(octets[block * _BLOCK_BYTES : (block + 1) * _BLOCK_BYTES], "little")
            if part:
                self.entries_count += ledger.set(block, part)

    def update(self, other: "AckRanges") -> None:
        """Add all entries of `other`."""
        for ledger_id, more in other._ledgers.items():
            ledger = self._ledger(ledger_id)
            for first, last, bits in more.blocks():
                self.entries_count += ledger.fill(first, last) if bits == _FULL else ledger.set(first, bits)

    def contains(self, ledger_id: int, entry_id: int) -> bool:
        ledger = self._ledgers.get(ledger_id)
        if ledger is None or entry_id < 0:
            return False
        block = entry_id >> _SHIFT
        bits = ledger.parts.get(block)
        if bits is not None:
            return bool(bits >> (entry_id & _MASK) & 1)
        return ledger.runs.end(block) is not None

    def has_any(self, ledger_id: int, first: int, last: int) -> bool:
        """Whether any entry of first..last (inclusive) is in the set. Takes O(blocks of these entries)."""
        ledger = self._ledgers.get(ledger_id)
        if ledger is None:
            return False
        low, high = first >> _SHIFT, last >> _SHIFT
        runs = ledger.runs
        index = bisect_left(runs.ends, low)
        if index < len(runs.starts) and runs.starts[index] <= high:
            return True
        for block in range(low, high + 1):
            bits = ledger.parts.get(block, 0)
            if block == low:
                bits &= ~((1 << (first & _MASK)) - 1)
            if block == high:
                bits &= (2 << (last & _MASK)) - 1
            if bits:
                return True
        return False

    def end_of_range(self, ledger_id: int, entry_id: int) -> int | None:
        """Return the last entry of the range that contains this entry; None: no range contains it."""
        if not self.contains(ledger_id, entry_id):
            return None
        ledger = self._ledgers[ledger_id]
        block, at = entry_id >> _SHIFT, entry_id & _MASK
        while True:
            run_end = ledger.runs.end(block)
            if run_end is not None:
                block, at = run_end + 1, 0
                continue
            bits = ledger.parts.get(block, 0) >> at
            ones = (~bits & (bits + 1)).bit_length() - 1
            if at + ones < BLOCK_BITS:
                return (block << _SHIFT) + at + ones - 1
            block, at = block + 1, 0

    def remove_upto(self, ledger_id: int, entry_id: int) -> None:
        """Remove all entries <= (ledger_id, entry_id)."""
        if not self._ids or self._ids[0] > ledger_id:
            return
        old = bisect_left(self._ids, ledger_id)
        for each in self._ids[:old]:
            self.entries_count -= _size(self._ledgers.pop(each))
        del self._ids[:old]
        ledger = self._ledgers.get(ledger_id)
        if ledger is None:
            return
        self.entries_count -= ledger.remove_upto(entry_id)
        if ledger.is_empty:
            del self._ledgers[ledger_id]
            del self._ids[0]

    def clear(self) -> None:
        self._ledgers.clear()
        self._ids.clear()
        self.entries_count = 0

    def copy(self) -> Self:
        twin = type(self)()
        twin._ledgers = {ledger_id: ledger.copy() for ledger_id, ledger in self._ledgers.items()}
        twin._ids = self._ids.copy()
        twin.entries_count = self.entries_count
        return twin

    def slices(self, blocks_max: int) -> Iterator[Self]:
        """Divide the set into sets of at most `blocks_max` partly set blocks and ranges of full blocks. They share no
        entry, and are in ascending order. A small or empty set is its only slice."""
        if self.blocks_count <= blocks_max:
            yield self
            return
        part, count = type(self)(), 0
        for ledger_id in self._ids:
            for first, last, bits in self._ledgers[ledger_id].blocks():
                if count >= blocks_max:
                    yield part
                    part, count = type(self)(), 0
                ledger = part._ledger(ledger_id)
                part.entries_count += ledger.fill(first, last) if bits == _FULL else ledger.set(first, bits)
                count += 1
        yield part

    # --- questions that take time in proportion to the blocks

    @property
    def blocks_count(self) -> int:
        """Number of partly set blocks and ranges of full blocks, a measure of the memory."""
        return sum(len(ledger.parts) + len(ledger.runs.starts) for ledger in self._ledgers.values())

    @property
    def ranges_count(self) -> int:
        """Number of ranges. Takes O(blocks)."""
        count = 0
        for ledger in self._ledgers.values():
            last_end, last_bit = -2, 0
            for first, last, bits in ledger.blocks():
                carry = last_bit if last_end == first - 1 else 0
                count += (bits & ~((bits << 1) | carry)).bit_count()
                last_end, last_bit = last, bits >> _MASK
        return count

    def count_upto(self, ledger_id: int, entry_id: int) -> int:
        """Return the number of entries <= (ledger_id, entry_id). Takes O(blocks)."""
        count = 0
        for each in self._ids[: bisect_left(self._ids, ledger_id)]:
            count += _size(self._ledgers[each])
        ledger = self._ledgers.get(ledger_id)
        if ledger is None or entry_id < 0:
            return count
        block = entry_id >> _SHIFT
        for first, last, bits in ledger.blocks():
            if last < block:
                count += bits.bit_count() * (last - first + 1)
            elif first <= block:
                count += bits.bit_count() * (block - first) + (bits & ((2 << (entry_id & _MASK)) - 1)).bit_count()
        return count

    def ledger_ids(self) -> list[int]:
        return self._ids.copy()

    def last_entries(self) -> Iterator[int]:
        """Return the highest entry of each ledger."""
        return (ledger.last_entry for ledger in self._ledgers.values())

    def bits(self, ledger_id: int) -> int:
        """Return the entries of a ledger as a bit set."""
        ledger = self._ledgers[ledger_id]
        octets = bytearray(((ledger.last_entry >> _SHIFT) + 1) * _BLOCK_BYTES)
        for first, last, bits in ledger.blocks():
            octets[first * _BLOCK_BYTES : (last + 1) * _BLOCK_BYTES] = bits.to_bytes(_BLOCK_BYTES, "little") * (
                last - first + 1
            )
        return int.from_bytes(octets, "little")

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Iterate over the ranges (ledger id, first, last) in ascending order."""
        for ledger_id in self._ids:
            start = end = -2
            for first, last in _ranges(self._ledgers[ledger_id]):
                if first == end + 1:
                    end = last
                    continue
                if end >= 0:
                    yield ledger_id, start, end
                start, end = first, last
            if end >= 0:
                yield ledger_id, start, end

    def __bool__(self) -> bool:
        return bool(self._ids)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, AckRanges)
            and self._ids == other._ids
            and self.entries_count == other.entries_count
            and all(
                ledger.parts == other._ledgers[ledger_id].parts
                and ledger.runs.starts == other._ledgers[ledger_id].runs.starts
                and ledger.runs.ends == other._ledgers[ledger_id].runs.ends
                for ledger_id, ledger in self._ledgers.items()
            )
        )

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return self.text()

    def text(self, *, ranges_max: int | None = None) -> str:
        """Return the ranges as Pulsar prints them: lower end open, upper end closed.

        `ranges_max`: number of ranges after which `...` stands for the others; None: no limit.
        """
        found = list(islice(self, None if ranges_max is None else ranges_max + 1))
        shown = [f"({ledger}:{first - 1}..{ledger}:{last}]" for ledger, first, last in found[:ranges_max]]
        if len(shown) < len(found):
            shown.append("...")
        return "[" + ",".join(shown) + "]"


def _size(ledger: _Ledger) -> int:
    full = sum(ledger.runs.ends) - sum(ledger.runs.starts) + len(ledger.runs.starts)
    return full * BLOCK_BITS + sum(bits.bit_count() for bits in ledger.parts.values())


def _ranges(ledger: _Ledger) -> Iterator[tuple[int, int]]:
    """Iterate over the ranges of a ledger, divided at the ends of blocks."""
    for first, last, bits in ledger.blocks():
        base = first << _SHIFT
        if bits == _FULL:
            yield base, (last << _SHIFT) + _MASK
            continue
        while bits:
            zeros = (bits & -bits).bit_length() - 1
            bits >>= zeros
            ones = (bits ^ (bits + 1)).bit_length() - 1
            yield base + zeros, base + zeros + ones - 1
            bits >>= ones
            base += zeros + ones
