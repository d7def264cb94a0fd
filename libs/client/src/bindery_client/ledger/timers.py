"""DeadlineTimer: one loop timer that wakes a state machine when it next wants to be."""

import asyncio
from collections.abc import Callable


class DeadlineTimer:
    """Calls `wake` at or before each deadline armed, and does not mind being armed after every batch.

    A deadline later than the timer that runs already costs nothing: `wake` is then early, and arms again.
    """

    __slots__ = ("_at", "_handle", "_loop", "_wake")

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self._at = 0.0

    def arm(self, deadline: float | None) -> None:
        if deadline is None or (self._handle is not None and self._at <= deadline):
            return
        if self._handle is not None:
            self._handle.cancel()
        self._at = deadline
        self._handle = self._loop.call_at(deadline, self._fire)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._wake()
