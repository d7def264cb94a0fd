"""Limit the bytes of request bodies that the process holds at once."""

from bindery_core.errors import TooManyRequests


class ByteBudget:
    """Invariant: 0 <= used <= total."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self.refused = 0

    def take(self, size: int) -> None:
        """Take `size` bytes. Raises TooManyRequests, and takes nothing, if they do not fit."""
        if self.used + size > self.total:
            self.refused += 1
            raise TooManyRequests(
                "the broker is at its limit of buffered request bytes; retry",
                wanted=size,
                used=self.used,
                limit=self.total,
            )
        self.used += size

    def give(self, size: int) -> None:
        """Return `size` bytes to the budget."""
        self.used -= size
        assert self.used >= 0
