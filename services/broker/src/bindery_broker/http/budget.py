"""Limit the bytes of request bodies that the process holds at once.

A complete body counts until its request is answered. If complete bodies leave no room, a new body is refused. An
incomplete body counts as far as it has arrived, and yields to others: if there is no room, the body that has been
arriving longest is given up. Thus slow clients cannot keep others from sending.

Invariant: 0 <= used <= total.
"""

from bindery_core.errors import TooManyRequests
from bindery_kit.limits.held_bytes import HeldBytes, Holder

FULL = "the broker is at its limit of buffered request bytes; retry"


class ByteBudget:
    def __init__(self, total: int) -> None:
        self.total = total
        self.refused = 0
        """Number of bodies that were refused or given up."""
        self._complete = 0
        self._incomplete = HeldBytes("bodies", total)
        """Its limit is what complete bodies leave."""

    @property
    def used(self) -> int:
        return self._complete + self._incomplete.used

    def hold(self, holder: Holder, size: int) -> None:
        """Set the bytes of an incomplete body. Raises TooManyRequests if they do not fit; others are evicted first."""
        if self.used + size - self._incomplete.held_by(holder) <= self.total:
            self._incomplete.hold(holder, size)
        elif not self._incomplete.hold(holder, size):
            raise self._refusal(size)

    def release(self, holder: Holder) -> None:
        """The incomplete body is no longer held. Idempotent."""
        self._incomplete.release(holder)

    def take(self, size: int) -> None:
        """Count a complete body. Raises TooManyRequests, and takes nothing, if complete bodies leave no room."""
        if self.used + size > self.total:
            newcomer = _Newcomer()
            if not self._incomplete.hold(newcomer, size):
                raise self._refusal(size)
            self._incomplete.release(newcomer)
        self._complete += size
        self._incomplete.limit -= size

    def give(self, size: int) -> None:
        """Return the `size` bytes of a complete body."""
        self._complete -= size
        self._incomplete.limit += size
        assert self._complete >= 0

    def _refusal(self, size: int) -> TooManyRequests:
        self.refused += 1
        return TooManyRequests(FULL, wanted=size, used=self.used, limit=self.total)


class _Newcomer:
    """Holds the bytes of a complete body while there is made room for them."""

    def evict(self, kind: str, held_size: int) -> None:
        return
