"""DeadlineTimer: one timer of the event loop that calls a state machine at its next deadline."""

import asyncio
from collections.abc import Callable


class DeadlineTimer:
    """Calls `wake` at or before each deadline that was set with `arm`. It is cheap to call `arm` after every batch.

    If a timer for an earlier time is running, a later deadline changes nothing: `wake` is called early, and the caller
    sets the deadline again.
    """

    __slots__ = ("_at", "_handle", "_loop", "_wake")

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake: Callable[[], None] | None = wake
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self._at = 0.0

    def arm(self, deadline: float | None) -> None:
        """Have `wake` called at `deadline` (loop time) or earlier; None: change nothing, as after `cancel`."""
        if deadline is None or self._wake is None or (self._handle is not None and self._at <= deadline):
            return
        if self._handle is not None:
            self._handle.cancel()
        self._at = deadline
        self._handle = self._loop.call_at(deadline, self._fire)

    def cancel(self) -> None:
        """Stop for good. Without a reference to `wake`, which belongs to the owner of the timer, the owner is freed as
        soon as nobody uses it, and not at the next collection of cyclic garbage."""
        self._wake = None
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        if self._wake is not None:
            self._wake()
