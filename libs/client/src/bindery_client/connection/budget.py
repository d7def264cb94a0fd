"""ByteBudget: how many bytes all ledgers of a client may have in flight together."""

from collections.abc import Callable
from typing import Final


class ByteBudget:
    """Invariants: used <= limit, but for one request larger than the limit, let through alone; used >= 0.

    Whoever was refused is called back, in the order of the refusals, when bytes were given back.
    """

    def __init__(self, limit: int) -> None:
        self.limit: Final = limit
        self.used = 0
        self._refused: dict[Callable[[], None], None] = {}

    def take(self, size: int, retry: Callable[[], None]) -> bool:
        """Whether `size` bytes are the caller's now; if not, `retry` is called once, later."""
        if self.used and self.used + size > self.limit:
            self._refused[retry] = None
            return False
        self.used += size
        return True

    def give_back(self, size: int) -> None:
        self.used -= size
        assert self.used >= 0
        if self._refused:
            refused, self._refused = self._refused, {}
            for retry in refused:
                retry()

    def forget(self, retry: Callable[[], None]) -> None:
        """The one refused is not interested any more."""
        self._refused.pop(retry, None)
