"""ByteBudget: how many bytes may be under way at once, and who waits for some to come back.

Invariants: `used` >= 0; a waiter is called once, and only while the budget is at or below its low mark. What is under
way is never refused: who takes the last bytes may go over by one batch, and is asked to stop after that.
"""

import asyncio
from collections import deque
from collections.abc import Callable


class ByteBudget:
    """`limit` in bytes. Waiters go on when `used` fell to half of it, so that one answer does not wake a thousand."""

    __slots__ = ("_is_waking", "_until_empty", "_waiters", "limit", "low", "used")

    def __init__(self, limit: int) -> None:
        assert limit > 0
        self.limit = limit
        self.low = limit // 2
        self.used = 0
        self._waiters: deque[Callable[[], None]] = deque()
        self._is_waking = False
        self._until_empty: list[asyncio.Future[None]] = []

    @property
    def is_over(self) -> bool:
        return self.used >= self.limit

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiters)

    def take(self, size: int) -> None:
        """Count `size` bytes as under way."""
        assert size >= 0
        self.used += size

    def give(self, size: int) -> None:
        """They are no longer under way. May call waiters, in the order in which they came, one after the other: also
        when one takes and gives at once, for there may be thousands."""
        assert 0 <= size <= self.used
        self.used -= size
        if not self._is_waking:
            self._is_waking = True
            try:
                while self._waiters and self.used <= self.low:
                    self._waiters.popleft()()
            finally:
                self._is_waking = False
        if self._until_empty and not self.used:
            for future in self._until_empty:
                if not future.done():
                    future.set_result(None)
            self._until_empty.clear()

    def when_low(self, waiter: Callable[[], None]) -> None:
        """Call `waiter` once, when the budget is low again; only for use while it is over."""
        assert self.is_over
        self._waiters.append(waiter)

    def forget(self, waiter: Callable[[], None]) -> None:
        """It waits no longer; `when_low` was called with it, and it was not called yet."""
        self._waiters.remove(waiter)

    async def wait_empty(self) -> None:
        """Return once nothing is under way."""
        while self.used:
            future = asyncio.get_running_loop().create_future()
            self._until_empty.append(future)
            await future
