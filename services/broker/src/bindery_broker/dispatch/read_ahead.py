"""Limit the bytes that all subscriptions of the process have read and not delivered yet.

No call waits for room. A read that fits may fetch more than its consumer requires. A read that does not fit fetches
only what is required, and nothing while the subscription still holds messages. Thus each subscription makes progress,
regardless of the bytes that other subscriptions hold.

Invariant: `used` is the sum of the bytes that the dispatchers hold and of the reservations of reads in progress.
"""


class ReadAhead:
    """The byte budget of all subscriptions. `total`: its size in bytes; `used`: the bytes in use."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0

    def reserve(self, size: int) -> int:
        """Reserve `size` bytes for a read. Returns the number of reserved bytes, 0 if `size` does not fit.

        The caller subtracts the reserved bytes with `change` after the read.
        """
        if self.used + size > self.total:
            return 0
        self.used += size
        return size

    def change(self, by: int) -> None:
        """Add `by` bytes, which may be negative, to the bytes in use."""
        self.used += by
        assert self.used >= 0
