"""HeldBytes: limit the bytes that all clients of a port together make a process hold.

Clients that need the bytes only briefly are not affected when others hold them for long: above the limit, the holder
that has held bytes longest is evicted, not the one that asks.

| kind of bytes                       | held                                           | an eviction           |
|-------------------------------------|------------------------------------------------|-----------------------|
| heads of HTTP requests              | from the first byte until the response is sent | closes the connection |
| bodies of HTTP requests             | from the first byte until the application has  | closes the connection |
|                                     | taken the last one                             |                       |
| responses that a client leaves      | while the transport's buffer is above its mark | closes the connection |
| unread                              |                                                |                       |
| incomplete frames of the ledger     | from the first byte until the last one arrives | closes the connection |
| port                                |                                                |                       |

An application that keeps bytes after its clients have sent them, such as a broker the bodies that it stores, counts
those itself, and makes room for them (`restrict`). So all are within one limit, and no byte counts twice.

Invariants: `used` is the sum over all holders; `used` <= `room` <= `limit` after every call.
"""

from typing import Protocol


class Holder(Protocol):
    def evict(self, kind: str, held_size: int) -> None:
        """Give up: the limit was exceeded, and this holder has held its bytes longest. It no longer counts."""


class HeldBytes:
    """`limit` in bytes, at least 1. `kind`: name of the bytes in logs and metrics."""

    def __init__(self, kind: str, limit: int) -> None:
        assert limit >= 1
        self.kind = kind
        self.limit = limit
        self.room = limit
        """What is left of the limit, in bytes."""
        self.used = 0
        self.peak = 0
        """Highest `used` since the last `take_peak`."""
        self.evicted = 0
        """Number of evictions until now."""
        self._holders: dict[Holder, int] = {}
        """In the order in which they began to hold bytes."""

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def oldest(self) -> Holder | None:
        """The holder that is evicted next; None if there is none."""
        return next(iter(self._holders), None)

    def defer(self, holder: Holder) -> None:
        """Let the bytes of `holder`, which must hold some, count as held since now: it is using them."""
        self._holders[holder] = self._holders.pop(holder)

    def held_by(self, holder: Holder) -> int:
        """Return the bytes of a holder; 0 if it holds none."""
        return self._holders.get(holder, 0)

    def hold(self, holder: Holder, size: int) -> bool:
        """Set the bytes that `holder` holds. Return whether it still holds them.

        Above `room`, holders are evicted, in the order in which they began, until the others fit. `holder` itself is
        evicted only if it began first or does not fit alone. Size 0 is the same as `release`.
        """
        assert size >= 0
        before = self._holders.get(holder, 0)
        if not size:
            self.release(holder)
            return True
        self._holders[holder] = size
        self.used += size - before
        if self.used > self.room:
            self._evict()
        if self.used > self.peak:
            self.peak = self.used
        return holder in self._holders

    def release(self, holder: Holder) -> None:
        """Give back all bytes of `holder`. Idempotent."""
        if holder in self._holders:
            self.used -= self._holders.pop(holder)

    def take_peak(self) -> int:
        """Return the highest `used` since the last call."""
        peak, self.peak = self.peak, self.used
        return peak

    def restrict(self, room: int) -> None:
        """Set what holders may hold until the next call: `room`, at least 0, or the limit if that is less."""
        assert room >= 0
        self.room = room if room < self.limit else self.limit
        if self.used > self.room:
            self._evict()

    def _evict(self) -> None:
        while self.used > self.room:
            oldest = next(iter(self._holders))
            held_size = self._holders.pop(oldest)
            self.used -= held_size
            self.evicted += 1
            oldest.evict(self.kind, held_size)
