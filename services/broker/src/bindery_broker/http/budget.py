"""ByteBudget: bytes of request bodies that the process holds at once."""

from bindery_core.errors import TooManyRequests


class ByteBudget:
    """Invariant: 0 <= used <= total."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self.refused = 0

    def take(self, size: int) -> None:
        """Raises TooManyRequests when `size` more bytes do not fit; nothing is taken then."""
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
        self.used -= size
        assert self.used >= 0
