"""ReadCache: entries read from disk, and the ones read ahead of demand. Bounded in bytes; the oldest leave first.

First in, first out, as BookKeeper's: a catching-up reader uses each entry once, so tracking use would cost more than it
keeps. Entry bodies never change, so nothing but an overwritten duplicate or a deleted ledger is ever invalidated.
"""

from collections import deque
from collections.abc import Iterable
from typing import Final

from bindery_bookie.storage.memory.write_cache import ENTRY_OVERHEAD

_EMPTY: dict[int, bytes] = {}
_DROPPED_KEYS_MAX: Final = 4096


class ReadCache:
    """Invariants: size <= size_max; not many more keys are in `_order` than twice the entries."""

    __slots__ = ("_entries", "_order", "ledgers", "size", "size_max")

    def __init__(self, size_max: int) -> None:
        self.ledgers: dict[int, dict[int, bytes]] = {}
        """Bodies by ledger and entry id. Public for the read loop, which only looks."""
        self._order: deque[tuple[int, int]] = deque()
        """Keys as they came, and some that were dropped since."""
        self._entries = 0
        self.size = 0
        self.size_max = size_max

    def __len__(self) -> int:
        return self._entries

    def get(self, ledger_id: int, entry_id: int) -> bytes | None:
        return self.ledgers.get(ledger_id, _EMPTY).get(entry_id)

    def put_many(self, entries: Iterable[tuple[tuple[int, int], bytes]]) -> None:
        """`entries`: ((ledger id, entry id), body)."""
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
        """Forget entries that were overwritten."""
        for key in keys:
            self._remove(key)

    def drop_ledger(self, ledger_id: int) -> None:
        """Forget a deleted ledger's entries."""
        self.drop([(ledger_id, entry_id) for entry_id in self.ledgers.get(ledger_id, _EMPTY)])

    def _tidy(self, count: int) -> None:
        """Forget dropped keys among the first `count`, if they are many. What is there comes last then: as most are
        not, nobody is waiting for room."""
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
