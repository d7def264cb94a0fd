"""WriteCache: entries that are in the journal (or on their way) and not yet in an entry log.

The engine has two: the active one takes adds, the other is being flushed. Both answer reads.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

ENTRY_OVERHEAD: Final = 160
"""Bytes counted for an entry besides its body: object header, ids, slot in a dict. Measured on CPython 3.11, rounded
up."""


class WriteCache:
    """Bodies by ledger and entry id. `size` never exceeds `size_max` by more than one batch.

    `ledgers` is public for the add loop, which inserts by the thousand: after inserting, add to `size` and `entries`.
    An entry added twice counts twice until the flush.
    """

    __slots__ = ("entries", "ledgers", "size", "size_max")

    def __init__(self, size_max: int) -> None:
        self.ledgers: dict[int, dict[int, bytes]] = {}
        self.size = 0
        self.entries = 0
        self.size_max = size_max

    @property
    def is_full(self) -> bool:
        return self.size >= self.size_max

    def put(self, ledger_id: int, entry_id: int, body: bytes) -> None:
        self.ledgers.setdefault(ledger_id, {})[entry_id] = body
        self.size += len(body) + ENTRY_OVERHEAD
        self.entries += 1

    def get(self, ledger_id: int, entry_id: int) -> bytes | None:
        entries = self.ledgers.get(ledger_id)
        return None if entries is None else entries.get(entry_id)

    def drop_ledger(self, ledger_id: int) -> None:
        """Forget a deleted ledger's entries. Their bytes stay counted until the flush."""
        self.ledgers.pop(ledger_id, None)

    def sorted_ledgers(self) -> Iterator[tuple[int, Sequence[int], dict[int, bytes]]]:
        """(ledger id, its entry ids ascending, bodies by id), ascending. A ledger dropped meanwhile is left out."""
        for ledger_id in sorted(self.ledgers):
            entries = self.ledgers.get(ledger_id)
            if entries:
                yield ledger_id, sorted(entries), entries

    def release(self, count: int) -> bool:
        """Free up to `count` entries after the flush; whether any are left.

        Freeing a quarter of a million small objects at once stops the event loop for a good 15 ms.
        """
        while self.ledgers:
            ledger_id, entries = next(iter(self.ledgers.items()))
            while entries and count > 0:
                entries.popitem()
                count -= 1
            if entries:
                return True
            del self.ledgers[ledger_id]
        return False


class WriteCaches:
    """The two: `active` takes adds; `flushing`, if not None, is on its way to an entry log."""

    __slots__ = ("_make", "_size_max", "active", "flushing")

    def __init__(self, size_max: int, make: Callable[[int], WriteCache] = WriteCache) -> None:
        self._size_max = size_max
        self._make = make
        self.active = make(size_max)
        self.flushing: WriteCache | None = None

    def swap(self) -> WriteCache:
        """Make the active one the flushing one, which must be free, and return it."""
        assert self.flushing is None
        self.flushing, self.active = self.active, self._make(self._size_max)
        return self.flushing

    def holds(self, ledger_id: int, entry_id: int) -> bool:
        """Whether reads get this entry from here, and not from where the index points. From any thread.

        False for one that was here before says that it was flushed, and that the index knows its new place.
        """
        if self.active.get(ledger_id, entry_id) is not None:
            return True
        flushing = self.flushing  # looked at second: a swap moves entries from `active` to here
        return flushing is not None and flushing.get(ledger_id, entry_id) is not None

    def drop_ledger(self, ledger_id: int) -> None:
        """Forget a deleted ledger's entries."""
        self.active.drop_ledger(ledger_id)
        if self.flushing is not None:
            self.flushing.drop_ledger(ledger_id)
