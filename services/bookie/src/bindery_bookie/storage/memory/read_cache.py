"""ReadCache: entries read from disk, including those read ahead. Limited in bytes; the oldest are evicted first.

First in, first out, as in BookKeeper: a catching-up reader uses each entry once, so tracking use would cost more than
it saves. Entry bodies never change, so only overwritten duplicates and entries of deleted ledgers are invalidated.
"""

from collections import deque
from collections.abc import Iterable
from typing import Final

from bindery_bookie.storage.memory.write_cache import ENTRY_OVERHEAD

_EMPTY: dict[int, bytes] = {}
_DROPPED_KEYS_MAX: Final = 4096


class ReadCache:
    """Invariants: size <= size_max; `_order` has at most about twice as many keys as there are entries."""

    __slots__ = ("_entries", "_order", "ledgers", "size", "size_max")

    def __init__(self, size_max: int) -> None:
        self.ledgers: dict[int, dict[int, bytes]] = {}
        """Bodies by ledger and entry id. Public for the read loop, which does not change it."""
        self._order: deque[tuple[int, int]] = deque()
        """Keys in order of insertion, including some that were dropped since."""
        self._entries = 0
        self.size = 0
        self.size_max = size_max

    def __len__(self) -> int:
        return self._entries

    def get(self, ledger_id: int, entry_id: int) -> bytes | None:
        return self.ledgers.get(ledger_id, _EMPTY).get(entry_id)

    def put_many(self, entries: Iterable[tuple[tuple[int, int], bytes]]) -> None:
        """Add or replace entries, given as ((ledger id, entry id), body)."""
        before = self._entries
        for key, body in entries:
            bodies = self.ledgers.setdefault(key[0], {})
            old = bodies.get(key[1])
            if old is None:
                self.size += len(body) + ENTRY_OVERHEAD
                self._order.append(key)
                self._entries += 1
            else:
                self.size += len(body) - len(old)
            bodies[key[1]] = body
        while self.size > self.size_max:
            self._remove(self._order.popleft())
        self._tidy(2 * (self._entries - before))

    def drop(self, keys: Iterable[tuple[int, int]]) -> None:
        """Remove entries that were overwritten."""
        for key in keys:
            self._remove(key)

    def drop_ledger(self, ledger_id: int) -> None:
        """Remove the entries of a deleted ledger."""
        self.drop([(ledger_id, entry_id) for entry_id in self.ledgers.get(ledger_id, _EMPTY)])

    def _tidy(self, count: int) -> None:
        """Remove dropped keys among the first `count` keys, if there are many of them.

        Other keys move to the end of the order. This changes their eviction order, which does not matter, because the
        cache is far from full if most keys were dropped.
        """
        while count > 0 and len(self._order) > 2 * self._entries + _DROPPED_KEYS_MAX:
            key = self._order.popleft()
            if self.get(*key) is not None:
                self._order.append(key)
            count -= 1

    def _remove(self, key: tuple[int, int]) -> None:
        bodies = self.ledgers.get(key[0], _EMPTY)
        body = bodies.pop(key[1], None)
        if body is not None:
            self.size -= len(body) + ENTRY_OVERHEAD
            self._entries -= 1
            if not bodies:
                del self.ledgers[key[0]]
