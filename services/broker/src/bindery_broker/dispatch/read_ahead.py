"""Limit the bytes that all subscriptions of the process have read and not delivered yet.

No call waits for room. A read that fits may fetch more than its consumer requires. A read that does not fit fetches
only what is required, and nothing while the subscription still holds messages. So each subscription makes progress,
whatever the others hold.

Invariant: `used` is the sum of the bytes that the dispatchers hold and of the reservations of reads in progress.
"""


class ReadAhead:
    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0

    def reserve(self, size: int) -> int:
        """Reserve `size` for a read. Returns the reserved bytes, 0 if they do not fit; return them after the read."""
        if self.used + size > self.total:
            return 0
        self.used += size
        return size

    def change(self, by: int) -> None:
        """Add `by`, which may be negative."""
        self.used += by
        assert self.used >= 0
