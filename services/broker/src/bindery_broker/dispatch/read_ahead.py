"""Limit what all subscriptions of the process have read and not delivered yet: its bytes, and the number of messages.

No call waits for room. A read that fits may fetch more than its consumer requires. A read that does not fit fetches
only what is required, and nothing while the subscription still holds messages. What is left of it after the delivery is
put down if it does not fit either (`is_over`). Thus each subscription makes progress, regardless of the bytes that
other subscriptions hold.

The number is limited because Python does not return the memory of small objects to the system as long as any object
near them is in use. After tens of thousands of small messages have gone, their memory is free for others of their kind
only.

Invariant: `used` is the sum of the bytes that the dispatchers hold and of the reservations of reads in progress.
"""

from typing import Final

MESSAGES_MAX: Final = 20_000
"""Maximum number of messages that all subscriptions together have read ahead: for each of hundreds of consumers what
one read returns if messages are entries of their own. They take about 10 MiB without their payloads."""


class ReadAhead:
    """The budget of all subscriptions. `total`: its size in bytes; `used`: the bytes in use."""

    def __init__(self, total: int, *, messages_max: int = MESSAGES_MAX) -> None:
        self.total = total
        self.used = 0
        self.messages_max = messages_max
        self.messages = 0
        """Number of messages that the dispatchers hold."""
        self.idle_size = 0
        """Bytes of messages that were put down because their subscriptions had no calls, in all."""
        self._reserved = 0
        self._reserved_messages = 0

    @property
    def is_over(self) -> bool:
        """Whether the messages that dispatchers hold exceed the budget. Reservations do not count: their reads fit."""
        return self.used - self._reserved > self.total or self.messages > self.messages_max

    def reserve(self, size: int, *, messages: int = 0) -> int:
        """Reserve `size` bytes and a number of messages for a read. Returns `size`, 0 if one of them does not fit.

        The caller passes both to `release` after the read.
        """
        if self.used + size > self.total or self.messages + self._reserved_messages + messages > self.messages_max:
            return 0
        self.used += size
        self._reserved += size
        self._reserved_messages += messages
        return size

    def release(self, size: int, *, messages: int = 0) -> None:
        """End a reservation: the dispatchers have counted what was read."""
        self._reserved -= size
        self._reserved_messages -= messages
        self.change(-size)

    def change(self, by: int, *, messages: int = 0) -> None:
        """Add `by` bytes and a number of messages, which may be negative, to what is in use."""
        self.used += by
        self.messages += messages
        assert self.used >= 0
        assert self.messages >= 0
