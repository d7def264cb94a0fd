"""ReadTurns: how many reads are issued in one turn of the event loop, by whom.

Caches answer at once, so that nothing else would end a turn while clients ask for more: adds, and other connections,
wait meanwhile. All connections together issue READ_TURN_COUNT_MAX reads a turn, one of them READ_SHARE_COUNT_MAX at a
time. Who has more to issue goes to the end of the queue; the next turn begins with those who wait longest.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

READ_TURN_COUNT_MAX: Final = 1024
READ_SHARE_COUNT_MAX: Final = 256


class ReadTurns:
    """Invariants: who queues is called once, in a later turn; who does not queue goes first only if nobody waits."""

    __slots__ = ("_is_scheduled", "_left", "_waiting")

    def __init__(self) -> None:
        self._left = READ_TURN_COUNT_MAX
        self._waiting: deque[Callable[[int], None]] = deque()
        self._is_scheduled = False

    def share(self) -> int:
        """Reads that somebody who did not queue may issue now; 0: queue."""
        return 0 if self._waiting else min(self._left, READ_SHARE_COUNT_MAX)

    def spend(self, count: int) -> None:
        """So many were issued."""
        self._left -= count
        if self._left <= READ_TURN_COUNT_MAX // 2:  # not for each lone read: a callback costs a turn of its own
            self._schedule()

    def queue(self, issue: Callable[[int], None]) -> None:
        """Call `issue` once, with the reads that it may issue."""
        self._waiting.append(issue)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._is_scheduled = False
        self._left = READ_TURN_COUNT_MAX
        try:
            for _ in range(len(self._waiting)):
                if self._left <= 0:
                    break
                self._waiting.popleft()(min(self._left, READ_SHARE_COUNT_MAX))
        finally:
            if self._waiting:
                self._schedule()
