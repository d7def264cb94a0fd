"""InFlightBudget: limit the bytes that all writers of a client have in flight together."""

from collections.abc import Callable
from typing import Final


class InFlightBudget:
    """Invariants: used >= 0; used <= limit, except that a single request larger than the limit is allowed alone.

    When bytes are given back, the `retry` functions of refused calls are called in the order of the refusals.
    """

    def __init__(self, limit: int) -> None:
        self.limit: Final = limit
        self.used = 0
        self._refused: dict[Callable[[], None], None] = {}

    def take(self, size: int, retry: Callable[[], None]) -> bool:
        """Take `size` bytes and return True; or return False, and call `retry` once when bytes are given back."""
        if self.used and self.used + size > self.limit:
            self._refused[retry] = None
            return False
        self.used += size
        return True

    def give_back(self, size: int) -> None:
        """Return `size` bytes that were taken."""
        self.used -= size
        assert self.used >= 0
        if self._refused:
            refused, self._refused = self._refused, {}
            for retry in refused:
                retry()

    def forget(self, retry: Callable[[], None]) -> None:
        """Do not call `retry`: its owner does not wait any more."""
        self._refused.pop(retry, None)
