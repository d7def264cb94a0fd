"""The order in which topics are opened. At most `count_max` of them are opened at a time.

After a broker has died, requests for thousands of its topics arrive at once. If topics were opened in the order of
their first requests, those of a busy topic would wait behind all others. So the topic for which most requests wait is
opened first. Every FAIR_EACH-th turn goes to the topic that has been waiting longest, so that none waits for ever.

Invariants: at most `count_max` turns are held; a turn that ends goes to a topic that waits, if there is one.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import islice
from typing import Final, Generic, TypeVar

K = TypeVar("K")
FAIR_EACH: Final = 4
"""One turn of so many goes to the topic that has been waiting longest."""
COMPARED_MAX: Final = 1_000
"""Maximum number of waiting topics of which the numbers of requests are compared, those that wait longest."""


class Turns(Generic[K]):
    """Turns to open topics. `hold` is called by one task for each topic at a time."""

    def __init__(self, count_max: int, *, weight_of: Callable[[K], int]) -> None:
        """`weight_of`: returns the number of requests that wait for a topic."""
        self._free = count_max
        self._weight_of = weight_of
        self._waiting: dict[K, asyncio.Future[None]] = {}
        """In the order of their calls."""
        self._given = 0

    @property
    def waiting_count(self) -> int:
        """Number of topics that wait for their turn."""
        return len(self._waiting)

    @asynccontextmanager
    async def hold(self, key: K) -> AsyncIterator[None]:
        """Return when it is the turn of a topic, which ends with the context."""
        if self._free:
            self._free -= 1
        else:
            turn = self._waiting[key] = asyncio.get_running_loop().create_future()
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                elif self._waiting.get(key) is turn:
                    del self._waiting[key]
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            key = next(iter(self._waiting))
            if (self._given + 1) % FAIR_EACH:
                key = max(islice(self._waiting, COMPARED_MAX), key=self._weight_of)  # of equal ones, the first
            turn = self._waiting.pop(key)
            if not turn.done():  # else its task was cancelled just now
                self._given += 1
                turn.set_result(None)
                return
        self._free += 1
