"""QuietLog: rate-limit warnings that any client can cause.

Each event is logged at most once per second, with the number of warnings that were left out.
"""

from collections.abc import Callable
from typing import Any, Final

from bindery_kit.observability.logs import get_logger

INTERVAL_S: Final = 1.0
"""Minimum time in seconds between two lines of one event."""


class QuietLog:
    """`clock`: monotonic seconds."""

    def __init__(self, name: str, *, clock: Callable[[], float]) -> None:
        self._log = get_logger(name)
        self._clock = clock
        self._next: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warning(self, event: str, **fields: Any) -> None:
        """Log `event`, or count it. Event names are constants of the code, so their number bounds the memory."""
        now = self._clock()
        if now < self._next.get(event, now):
            self._left_out[event] = self._left_out.get(event, 0) + 1
            return
        self._next[event] = now + INTERVAL_S
        left_out = self._left_out.pop(event, 0)
        if left_out:
            fields["left_out"] = left_out
        self._log.warning(event, **fields)
