"""Cache recent entries of all topics, limited in bytes; the oldest are evicted first.

Consumers at the end of a topic are served from the cache.

Invariant: size <= size_max after every call.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

ENTRY_OVERHEAD: Final = 200
"""Approximate bytes of memory per entry in addition to its payload: key tuple, dict slot, bytes object."""


class EntryCache:
    """Payloads by (ledger id, entry id); ledger ids are unique in a cluster, so topics share one cache."""

    def __init__(self, *, size_max: int) -> None:
        """`size_max`: maximum bytes of payloads and overhead; 0: cache nothing."""
        self._size_max = size_max
        self._entries: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self.size = 0
        self.hits = 0
        self.misses = 0

    def put_many(self, items: Iterable[tuple[tuple[int, int], bytes]]) -> None:
        entries = self._entries
        added = 0
        for key, payload in items:
            if key not in entries:
                entries[key] = payload
                added += len(payload) + ENTRY_OVERHEAD
        self.size += added
        while self.size > self._size_max:
            _, payload = entries.popitem(last=False)
            self.size -= len(payload) + ENTRY_OVERHEAD

    def run(self, ledger_id: int, first: int, last: int) -> list[bytes]:
        """Return the cached payloads of the entries from `first` to `last`, up to the first missing one."""
        found: list[bytes] = []
        for entry_id in range(first, last + 1):
            payload = self._entries.get((ledger_id, entry_id))
            if payload is None:
                break
            found.append(payload)
        self.hits += len(found)
        self.misses += len(found) <= last - first
        return found

    def __len__(self) -> int:
        return len(self._entries)
