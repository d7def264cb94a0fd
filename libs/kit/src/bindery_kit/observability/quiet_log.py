"""QuietLog: rate-limit warnings and errors that any client can cause.

Each event is logged at most once per second, with the number of lines that were left out.
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
        left_out = self._admit(event)
        if left_out is not None:
            self._log.warning(event, **fields, **left_out)

    def error(self, event: str, **fields: Any) -> None:
        """The same for an error. `exc_info=error` adds the traceback."""
        left_out = self._admit(event)
        if left_out is not None:
            self._log.error(event, **fields, **left_out)

    def _admit(self, event: str) -> dict[str, int] | None:
        """Return the field of left-out lines, if there were any; None if this one is left out, too."""
        now = self._clock()
        if now < self._next.get(event, now):
            self._left_out[event] = self._left_out.get(event, 0) + 1
            return None
        self._next[event] = now + INTERVAL_S
        left_out = self._left_out.pop(event, 0)
        return {"left_out": left_out} if left_out else {}
