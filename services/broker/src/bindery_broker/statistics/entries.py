"""What was written to and read from the ledgers of a topic, as Pulsar's metrics of storage count it.

| count    | of                                                                                            |
|----------|-----------------------------------------------------------------------------------------------|
| added    | durable entries                                                                               |
| read     | entries read from bookies, for consumers and for the broker itself                            |
| cached   | entries found in the cache instead                                                            |
| latency  | milliseconds from the call that adds entries until they are durable, the wait in the queue too |
| size     | bytes of the entries added                                                                    |
"""

from collections.abc import Callable, Sequence
from typing import Final

from bindery_core.sources import MonotonicClock

from bindery_broker.statistics.minute_counts import MinuteCounts
from bindery_broker.statistics.traffic import Traffic

LATENCY_BOUNDS_MS: Final = (0.5, 1, 5, 10, 20, 50, 100, 200, 1000)
"""Highest latencies of Pulsar's ranges. Source: ENTRY_LATENCY_BUCKETS_USEC."""
SIZE_BOUNDS: Final = (128, 512, 1024, 2048, 4096, 16_384, 102_400, 1_048_576)
"""Highest bytes of Pulsar's ranges. Source: ENTRY_SIZE_BUCKETS_BYTES."""


class EntryStatistics:
    """Of the ledgers of one topic, since it was loaded. Messages of its counts are entries."""

    __slots__ = ("_now", "_observe_ms", "added", "cached", "latency_ms", "read", "size")

    def __init__(self, now: MonotonicClock, *, observe_ms: Callable[[float, int], None] | None = None) -> None:
        """`observe_ms`: called with each latency, and with the number of entries that had it."""
        self._now = now
        self._observe_ms = observe_ms
        self.added = Traffic()
        self.read = Traffic()
        self.cached = Traffic()
        self.latency_ms = MinuteCounts(LATENCY_BOUNDS_MS)
        self.size = MinuteCounts(SIZE_BOUNDS)

    def add(self, entries: Sequence[bytes], size: int, *, latency_s: float) -> None:
        """Count entries of `size` bytes in total that became durable together."""
        now, count = self._now(), len(entries)
        self.added.add(count, size, now=now)
        self.latency_ms.add(latency_s * 1000, count, now=now)
        for entry in entries:
            self.size.add(len(entry), now=now)
        if self._observe_ms is not None:
            self._observe_ms(latency_s * 1000, count)

    def fetched(self, entries: int, size: int) -> None:
        """Count entries that were read from bookies, of `size` bytes in total."""
        self.read.add(entries, size, now=self._now())

    def found(self, entries: int, size: int) -> None:
        """Count entries that were found in the cache, of `size` bytes in total."""
        self.cached.add(entries, size, now=self._now())
