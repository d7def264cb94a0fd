"""QuietLog: warnings that strangers can cause, at most one a second of each kind; the next counts those left out."""

from collections.abc import Callable
from typing import Any, Final

from bindery_kit.observability.logs import get_logger

INTERVAL_S: Final = 1.0


class QuietLog:
    """`clock`: monotonic seconds."""

    def __init__(self, name: str, *, clock: Callable[[], float]) -> None:
        self._log = get_logger(name)
        self._clock = clock
        self._next: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warning(self, event: str, **fields: Any) -> None:
        """`event` is one of our fixed names, so the memory is bounded by our own vocabulary."""
        now = self._clock()
        if now < self._next.get(event, now):
            self._left_out[event] = self._left_out.get(event, 0) + 1
            return
        self._next[event] = now + INTERVAL_S
        left_out = self._left_out.pop(event, 0)
        if left_out:
            fields["left_out"] = left_out
        self._log.warning(event, **fields)
