"""The ledgers of a topic in order, and arithmetic with positions over them. Pure.

A topic to which nothing was ever added has no ledger. A placeholder with the id 0 then stands for the first one, so
that positions exist: it is empty, and no position in it is after the first entry of the topic, whatever its ledger is.

Invariants: ids ascend; only the last ledger may be empty or growing; `entries` counts acknowledged entries only.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from bindery_pulsar.managed_ledger_records import LedgerRecord, Position

__all__ = ["LedgerList", "LedgerRecord"]


NO_LEDGERS: Final = (LedgerRecord(ledger_id=0),)
"""The placeholder. Its id is no larger than that of any ledger."""


class LedgerList:
    """Every returned position is an existing entry or the position of the next add."""

    __slots__ = ("_ids", "_records", "is_empty")

    def __init__(self, records: Sequence[LedgerRecord]) -> None:
        self.is_empty = not records
        """Whether the topic has no ledger, and the list only the placeholder."""
        self._records = list(records or NO_LEDGERS)
        self._ids = [record.ledger_id for record in self._records]
        assert all(a < b for a, b in zip(self._ids, self._ids[1:], strict=False)), "ledger ids must ascend"

    def __iter__(self) -> Iterator[LedgerRecord]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def stored(self) -> list[LedgerRecord]:
        """The ledgers without the placeholder: what metadata names, and what can be deleted."""
        return [] if self.is_empty else list(self._records)

    @property
    def first(self) -> LedgerRecord:
        return self._records[0]

    @property
    def current(self) -> LedgerRecord:
        return self._records[-1]

    @property
    def entries_count(self) -> int:
        return sum(record.entries for record in self._records)

    @property
    def size(self) -> int:
        return sum(record.size for record in self._records)

    def holds(self, ledger_id: int) -> bool:
        """Whether a ledger of the topic has this id. The placeholder is none; ledger 0 may be of another topic."""
        return not self.is_empty and self.get(ledger_id) is not None

    def get(self, ledger_id: int) -> LedgerRecord | None:
        """Return the record with this id, also the placeholder; None: there is none."""
        if ledger_id == self._ids[-1]:
            return self._records[-1]
        index = bisect_left(self._ids, ledger_id)
        return self._records[index] if index < len(self._ids) and self._ids[index] == ledger_id else None

    # --- changes

    def grow(self, *, entries: int, size: int) -> None:
        """Add acknowledged entries and payload bytes to the current ledger."""
        assert not self.is_empty
        current = self._records[-1]
        self._records[-1] = replace(current, entries=current.entries + entries, size=current.size + size)

    def drop_first(self, count: int) -> None:
        """Remove the `count` oldest ledgers."""
        assert count < len(self._records)
        del self._records[:count], self._ids[:count]

    def assign(self, records: Sequence[LedgerRecord]) -> None:
        """Replace the list by one that was stored."""
        LedgerList.__init__(self, records)

    # --- positions

    @property
    def first_position(self) -> Position:
        return Position(self._ids[0], 0)

    @property
    def end(self) -> Position:
        """The position of the next add, unless the ledger is rolled before."""
        return Position(self._ids[-1], self._records[-1].entries)

    @property
    def last_confirmed(self) -> Position:
        """The last entry; entry -1 of the first ledger when there is none."""
        return self.previous(self.end)

    def contains(self, position: Position) -> bool:
        record = self.get(position.ledger_id)
        return record is not None and 0 <= position.entry_id < record.entries

    def clamp(self, position: Position) -> Position:
        """Return the first entry >= `position`, else the end."""
        ledger_id, entry_id = position
        if ledger_id == self._ids[-1] and 0 <= entry_id < self._records[-1].entries:
            return position
        index = bisect_left(self._ids, ledger_id)
        if index == len(self._ids):
            return self.end
        if self._ids[index] != ledger_id:
            return Position(self._ids[index], 0)
        if entry_id < self._records[index].entries:
            return Position(ledger_id, max(entry_id, 0))
        if index + 1 < len(self._ids):
            return Position(self._ids[index + 1], 0)
        return self.end

    def next(self, position: Position) -> Position:
        return self.clamp(Position(position.ledger_id, position.entry_id + 1))

    def previous(self, position: Position) -> Position:
        """Return the last entry < `position`; entry -1 of the first ledger if there is none."""
        ledger_id, entry_id = position
        index = bisect_left(self._ids, ledger_id)
        if index < len(self._ids) and self._ids[index] == ledger_id:
            last = min(entry_id, self._records[index].entries) - 1
            if last >= 0:
                return Position(ledger_id, last)
        for record in reversed(self._records[:index]):
            if record.entries:
                return Position(record.ledger_id, record.entries - 1)
        return Position(self._ids[0], -1)

    def entries_between(self, *, after: Position, upto: Position) -> int:
        """Return the number of entries in (after, upto]."""
        if upto <= after:
            return 0
        count = 0
        first = bisect_left(self._ids, after.ledger_id)
        for record in self._records[first:]:
            if record.ledger_id > upto.ledger_id:
                break
            low = after.entry_id + 1 if record.ledger_id == after.ledger_id else 0
            high = record.entries if record.ledger_id < upto.ledger_id else min(record.entries, upto.entry_id + 1)
            count += max(high - max(low, 0), 0)
        return count

    def after(self, position: Position) -> tuple[int, int]:
        """Return the number of entries after `position`, and their payload bytes.

        The bytes are an estimate within the ledger of `position`: its entries count as if they had the same size.
        """
        count = size = 0
        for record in self._records[bisect_left(self._ids, position.ledger_id) :]:
            if record.ledger_id == position.ledger_id:
                left = min(max(record.entries - position.entry_id - 1, 0), record.entries)
                count += left
                size += record.size * left // max(record.entries, 1)
            else:
                count += record.entries
                size += record.size
        return count, size

    def forward(self, position: Position, count: int) -> Position:
        """Return the entry that is `count` entries after an existing one; the end if there are fewer."""
        index = bisect_left(self._ids, position.ledger_id)
        count += position.entry_id
        for record in self._records[index:]:
            if count < record.entries:
                return Position(record.ledger_id, count)
            count -= record.entries
        return self.end

    def nth(self, index: int) -> Position:
        """Return the entry that has `index` existing entries before it; the end if there are fewer entries."""
        for record in self._records:
            if index < record.entries:
                return Position(record.ledger_id, index)
            index -= record.entries
        return self.end
