"""Limit the bytes that all subscriptions of the process have read and not delivered yet.

No call waits for room. A read that fits may fetch more than its consumer requires. A read that does not fit fetches
only what is required, and nothing while the subscription still holds messages. What is left of it after the delivery is
put down if it does not fit either (`is_over`). Thus each subscription makes progress, regardless of the bytes that
other subscriptions hold.

Invariant: `used` is the sum of the bytes that the dispatchers hold and of the reservations of reads in progress.
"""


class ReadAhead:
    """The byte budget of all subscriptions. `total`: its size in bytes; `used`: the bytes in use."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._reserved = 0

    @property
    def is_over(self) -> bool:
        """Whether the messages that dispatchers hold exceed the budget. Reservations do not count: their reads fit."""
        return self.used - self._reserved > self.total

    def reserve(self, size: int) -> int:
        """Reserve `size` bytes for a read. Returns the number of reserved bytes, 0 if `size` does not fit.

        The caller passes them to `release` after the read.
        """
        if self.used + size > self.total:
            return 0
        self.used += size
        self._reserved += size
        return size

    def release(self, reserved: int) -> None:
        """End a reservation: the dispatchers have counted what was read."""
        self._reserved -= reserved
        self.change(-reserved)

    def change(self, by: int) -> None:
        """Add `by` bytes, which may be negative, to the bytes in use."""
        self.used += by
        assert self.used >= 0
