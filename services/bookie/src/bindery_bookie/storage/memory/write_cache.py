"""WriteCache: entries that are in the journal, or being written to it, and not yet in an entry log.

The engine has two write caches: the active cache takes adds, the other is being flushed. Both serve reads.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

ENTRY_OVERHEAD: Final = 160
"""Bytes counted per entry in addition to its body: object header, ids, slot in a dict. Measured on CPython 3.11 and
rounded up."""


class WriteCache:
    """Bodies by ledger and entry id. `size` exceeds `size_max` by at most one batch.

    `ledgers` is public for the add loop, which inserts directly and then adds to `size` and `entries`. An entry added
    twice counts twice until the flush.
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
        """Remove the entries of a deleted ledger. Their bytes stay counted until the flush."""
        self.ledgers.pop(ledger_id, None)

    def sorted_ledgers(self) -> Iterator[tuple[int, Sequence[int], dict[int, bytes]]]:
        """Yield (ledger id, its entry ids ascending, bodies by id), ascending, without ledgers dropped meanwhile."""
        for ledger_id in sorted(self.ledgers):
            entries = self.ledgers.get(ledger_id)
            if entries:
                yield ledger_id, sorted(entries), entries

    def release(self, count: int) -> bool:
        """Free up to `count` entries after the flush; return True if any are left.

        Freeing a quarter of a million small objects at once would block the event loop for more than 15 ms.
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
    """The two write caches: `active` takes adds; `flushing`, if not None, is being flushed."""

    __slots__ = ("_make", "_size_max", "active", "flushing")

    def __init__(self, size_max: int, make: Callable[[int], WriteCache] = WriteCache) -> None:
        self._size_max = size_max
        self._make = make
        self.active = make(size_max)
        self.flushing: WriteCache | None = None

    def swap(self) -> WriteCache:
        """Make the active cache the flushing one, which must be None, and return it."""
        assert self.flushing is None
        self.flushing, self.active = self.active, self._make(self._size_max)
        return self.flushing

    def holds(self, ledger_id: int, entry_id: int) -> bool:
        """Return True if reads get this entry from a write cache, not from the location in the index. Any thread.


        If the result was True before, False means that the entry was flushed and the index has its new location.
        """
        if self.active.get(ledger_id, entry_id) is not None:
            return True
        flushing = self.flushing  # checked second, because a swap moves entries from `active` to `flushing`
        return flushing is not None and flushing.get(ledger_id, entry_id) is not None

    def drop_ledger(self, ledger_id: int) -> None:
        """Remove the entries of a deleted ledger from both caches."""
        self.active.drop_ledger(ledger_id)
        if self.flushing is not None:
            self.flushing.drop_ledger(ledger_id)
