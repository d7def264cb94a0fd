"""FirstReads: handle the first bytes of new connections by turns of their addresses.

A thousand clients that connect and send many requests at once take seconds of processor time. Connections are accepted
in the order of their arrival, so without turns a client of another address would wait for all of them. In each turn of
the event loop, those of FIRST_READS_MAX connections at most are handled.

Invariant: a connection is called once, unless it is forgotten.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from bindery_kit.limits.turns import Turns

FIRST_READS_MAX: Final = 4
"""Maximum number of connections whose first bytes are handled in one turn of the event loop."""


class FirstReads:
    """Shared by all connections of a bookie."""

    def __init__(self) -> None:
        self._waiting: Turns[Callable[[], None]] = Turns()
        self._is_scheduled = False

    def __len__(self) -> int:
        return len(self._waiting)

    def queue(self, begin: Callable[[], None], *, group: str) -> None:
        """Call `begin` in a later turn of the event loop."""
        self._waiting.add(begin, group=group)
        self._schedule()

    def forget(self, begin: Callable[[], None], *, group: str) -> None:
        """Do not call `begin`. Idempotent."""
        self._waiting.discard(begin, group=group)

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._is_scheduled = False
        for _ in range(min(FIRST_READS_MAX, len(self._waiting))):
            if self._waiting:  # a call may forget another one
                self._waiting.next()()
        if self._waiting:
            self._schedule()
