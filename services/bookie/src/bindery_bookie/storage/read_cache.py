"""ReadCache: entries read from disk, and the ones read ahead of demand. Bounded in bytes; the oldest leave first.

First in, first out, as BookKeeper's: a catching-up reader uses each entry once, so tracking use would cost more than it
keeps. Entry bodies never change, so nothing but an overwritten duplicate or a deleted ledger is ever invalidated.
"""

from collections import deque
from collections.abc import Iterable

from bindery_bookie.storage.write_cache import ENTRY_OVERHEAD

_EMPTY: dict[int, bytes] = {}


class ReadCache:
    """Invariant: size <= size_max."""

    __slots__ = ("_order", "ledgers", "size", "size_max")

    def __init__(self, size_max: int) -> None:
        self.ledgers: dict[int, dict[int, bytes]] = {}
        """Bodies by ledger and entry id. Public for the read loop, which only looks."""
        self._order: deque[tuple[int, int]] = deque()
        self.size = 0
        self.size_max = size_max

    def __len__(self) -> int:
        return sum(map(len, self.ledgers.values()))

    def get(self, ledger_id: int, entry_id: int) -> bytes | None:
        return self.ledgers.get(ledger_id, _EMPTY).get(entry_id)

    def put_many(self, entries: Iterable[tuple[tuple[int, int], bytes]]) -> None:
        """`entries`: ((ledger id, entry id), body)."""
        for key, body in entries:
            bodies = self.ledgers.setdefault(key[0], {})
            old = bodies.get(key[1])
            if old is None:
                self.size += len(body) + ENTRY_OVERHEAD
                self._order.append(key)
            else:
                self.size += len(body) - len(old)
            bodies[key[1]] = body
        while self.size > self.size_max:
            self._remove(self._order.popleft())

    def drop(self, keys: Iterable[tuple[int, int]]) -> None:
        """Forget entries that were overwritten."""
        for key in keys:
            self._remove(key)

    def drop_ledger(self, ledger_id: int) -> None:
        """Forget a deleted ledger's entries."""
        self.drop([(ledger_id, entry_id) for entry_id in self.ledgers.get(ledger_id, _EMPTY)])

    def _remove(self, key: tuple[int, int]) -> None:
        bodies = self.ledgers.get(key[0], _EMPTY)
        body = bodies.pop(key[1], None)
        if body is not None:
            self.size -= len(body) + ENTRY_OVERHEAD
            if not bodies:
                del self.ledgers[key[0]]
