"""ReadTurns: limit the reads that connections issue in one turn of the event loop, by their number and bytes.

Reads served from a cache do not yield. Without a limit, one turn of the event loop could last as long as clients send
reads, and adds and other connections would be delayed. All connections together issue at most READ_TURN_COUNT_MAX reads
per turn, and one connection at most READ_SHARE_COUNT_MAX at a time, where each READ_UNIT_SIZE bytes of their entries
count as a read: 4 MiB and 1 MiB, or little more. A connection with more reads joins the end of a queue; the next turn
begins with the connection that has waited longest.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

READ_TURN_COUNT_MAX: Final = 1024
"""Maximum number of reads that all connections together issue in one turn of the event loop."""
READ_SHARE_COUNT_MAX: Final = 256
"""Maximum number of reads that one connection issues before the next one is served."""
READ_UNIT_SIZE: Final = 4096
"""Bytes of entries that count as one read: it takes as long to send them."""


class ReadTurns:
    """Invariants: a queued connection is called once, in a later turn. While a connection is queued, no other
    connection may issue reads."""

    __slots__ = ("_is_scheduled", "_left", "_waiting")

    def __init__(self) -> None:
        self._left = READ_TURN_COUNT_MAX
        self._waiting: deque[Callable[[int], None]] = deque()
        self._is_scheduled = False

    def share(self) -> int:
        """Return the number of reads that a connection may issue in this turn. 0: none; call `queue`."""
        return 0 if self._waiting else min(self._left, READ_SHARE_COUNT_MAX)

    def spend(self, count: int) -> None:
        """Subtract `count` issued reads from the limit of this turn."""
        self._left -= count
        if self._left <= READ_TURN_COUNT_MAX // 2:  # not after each single read: a callback costs an extra turn
            self._schedule()

    def queue(self, issue: Callable[[int], None]) -> None:
        """Call `issue` once in a later turn, with the number of reads that it may issue."""
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
