"""Cache entries of all topics in two segments that never evict each other.

| segment  | entries                    | bytes           | first to leave                                      |
|----------|----------------------------|-----------------|-----------------------------------------------------|
| tail     | those that were written    | the rest        | see `tail`                                          |
| catch-up | those read from bookies    | 1/CATCH_UP_PART | the one that was read first                         |

Consumers at the end of a topic are served from the tail, whatever others read. A consumer that catches up reads each
entry once; the catch-up segment lets several subscriptions that catch up together, and redeliveries, share these reads.

Invariants: the bytes of each segment are within its limit after every call; no entry is in both, unless it was read
from bookies before this broker wrote the ones after it; reading never removes an entry of the tail.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from bindery_broker.managed_ledger.caching.tail import ENTRY_OVERHEAD, TailReader, TailSegment, TopicTail

CATCH_UP_PART: Final = 4
"""The catch-up segment has this part of the bytes: a quarter. With 64 MiB, these are four reads of 4 MiB, so that four
groups of subscriptions can share what they read. Live readers rarely need more than the last megabyte of a topic."""

SLACK_PART: Final = 256
"""At its limit, the tail evicts this part of its bytes at once."""


class EntryCache:
    """The cache of a broker. Ledger ids are unique in a cluster, so topics share the catch-up segment."""

    def __init__(self, *, size_max: int) -> None:
        """`size_max`: maximum bytes of payloads and overhead; 0: cache nothing."""
        self._catch_up_size_max = size_max // CATCH_UP_PART
        tail_size_max = size_max - self._catch_up_size_max
        self._tail = TailSegment(size_max=tail_size_max, slack=tail_size_max // SLACK_PART)
        self._catch_up: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._catch_up_evicted = 0
        self.catch_up_size = 0
        """Bytes of the catch-up segment."""
        self.hits = 0
        """Number of entries found."""
        self.misses = 0
        """Number of reads that found only a part."""
        self.inserted = 0
        """Number of entries added."""

    def topic(self) -> "TopicCache":
        """Return the cache of another topic; close it with the topic."""
        return TopicCache(self, self._tail.topic())

    @property
    def size(self) -> int:
        """Bytes of payloads and overhead."""
        return self._tail.size + self.catch_up_size

    @property
    def tail_size(self) -> int:
        """Bytes of the tail."""
        return self._tail.size

    @property
    def evicted(self) -> int:
        """Number of entries that left because of a limit."""
        return self._tail.evicted + self._catch_up_evicted

    def __len__(self) -> int:
        return self._tail.count + len(self._catch_up)

    def add_read(self, ledger_id: int, first: int, payloads: Sequence[bytes]) -> None:
        """Add consecutive entries that were read from bookies, and that are not in the tail."""
        self.add_some(ledger_id, range(first, first + len(payloads)), payloads)

    def add_some(self, ledger_id: int, ids: Sequence[int], payloads: Sequence[bytes]) -> None:
        """Add entries that were read from bookies, and that are not in the tail."""
        entries = self._catch_up
        for entry_id, payload in zip(ids, payloads, strict=True):
            if (ledger_id, entry_id) not in entries:
                entries[ledger_id, entry_id] = payload
                self.catch_up_size += len(payload) + ENTRY_OVERHEAD
                self.inserted += 1
        while self.catch_up_size > self._catch_up_size_max:
            _, payload = entries.popitem(last=False)
            self.catch_up_size -= len(payload) + ENTRY_OVERHEAD
            self._catch_up_evicted += 1

    def run(self, ledger_id: int, first: int, last: int) -> list[bytes]:
        """Return the entries of the catch-up segment from `first` to `last`, up to the first missing one."""
        found: list[bytes] = []
        entries = self._catch_up
        for entry_id in range(first, last + 1):
            payload = entries.get((ledger_id, entry_id))
            if payload is None:
                break
            found.append(payload)
        return found

    def some(self, ledger_id: int, ids: Sequence[int]) -> dict[int, bytes]:
        """Return those of the entries `ids` that are in the catch-up segment."""
        entries = self._catch_up
        if not entries:
            return {}
        found = {entry_id: entries.get((ledger_id, entry_id)) for entry_id in ids}
        return {entry_id: payload for entry_id, payload in found.items() if payload is not None}


class TopicCache:
    """The cache as seen by one topic."""

    def __init__(self, cache: EntryCache, tail: TopicTail) -> None:
        self.shared = cache
        self._tail = tail

    def add_written(self, ledger_id: int, first: int, payloads: Sequence[bytes], *, size: int) -> None:
        """Add the entries that were written after all others of the topic. `size`: bytes of `payloads`."""
        self.shared.inserted += len(payloads)
        self._tail.add(ledger_id, first, payloads, size=size)

    def add_read(self, ledger_id: int, first: int, payloads: Sequence[bytes]) -> None:
        """Add consecutive entries that were read from bookies."""
        self.add_some(ledger_id, range(first, first + len(payloads)), payloads)

    def run(self, ledger_id: int, first: int, last: int) -> list[bytes]:
        """Return the cached payloads of the entries from `first` to `last`, up to the first missing one."""
        run = self._tail.run_of(ledger_id)
        if run is None:
            found = self.shared.run(ledger_id, first, last)
        else:
            found = self.shared.run(ledger_id, first, min(last, run.first - 1)) if first < run.first else []
            following = first + len(found)
            if run.first <= following < run.end:
                payloads = run.payloads
                found += [payloads[entry_id] for entry_id in range(following, min(last + 1, run.end))]
        self.shared.hits += len(found)
        self.shared.misses += len(found) <= last - first
        return found

    def add_some(self, ledger_id: int, ids: Sequence[int], payloads: Sequence[bytes]) -> None:
        """Add the entries `ids`, which ascend and were read from bookies."""
        run = self._tail.run_of(ledger_id)  # the last entries of a read may be in the tail
        count = len(ids) if run is None else bisect_left(ids, run.first)
        self.shared.add_some(ledger_id, ids[:count], payloads[:count])

    def some(self, ledger_id: int, ids: Sequence[int]) -> dict[int, bytes]:
        """Return the cached payloads of the entries `ids`, which ascend."""
        run = self._tail.run_of(ledger_id)
        found: dict[int, bytes] = {}
        first = len(ids)
        if run is not None:
            first = bisect_left(ids, run.first)
            payloads = run.payloads
            found = {entry_id: payloads[entry_id] for entry_id in ids[first : bisect_left(ids, run.end)]}
        if first:
            found.update(self.shared.some(ledger_id, ids[:first]))
        self.shared.hits += len(found)
        self.shared.misses += len(found) < len(ids)
        return found

    def reader(self) -> TailReader:
        """Return the position of another reader, which keeps the entries after it in memory while they fit."""
        return self._tail.reader()

    @property
    def needs_round(self) -> bool:
        """Whether `next_round` may change anything, also if nothing is read."""
        return self._tail.needs_round

    def next_round(self) -> None:
        """Let readers that make no progress keep nothing in memory. Call it periodically, such as once a minute."""
        self._tail.next_round()

    def close(self) -> None:
        """Drop the tail of the topic. Idempotent."""
        self._tail.close()
