"""InstantLoop: asyncio's own event loop on a clock of its own, for tests of code that talks to nothing outside.

When nothing is left to do now, time jumps to the next timer. So a test that sleeps costs nothing; and `sleep(0.01)`
ends when every task has come as far as it can, however slow the machine is.

Not for code with sockets, processes or threads: time would not wait for them. `SimLoop` simulates those too.
"""

import asyncio
import selectors
from collections.abc import Callable
from typing import Final

BEGINNING_S: Final = 1000.0


class _JumpingSelector(selectors.SelectSelector):
    """Instead of waiting for files until a timer is due, has the clock jump there."""

    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """`timeout` None: no timer is left, and only a file can wake the loop."""
        if timeout is None:
            return super().select(None)
        ready = super().select(0)
        if not ready and timeout > 0:
            self._jump(timeout)
        return ready


class InstantLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now = BEGINNING_S
        super().__init__(_JumpingSelector(self._pass))

    def time(self) -> float:
        return self._now

    def _pass(self, seconds: float) -> None:
        self._now += seconds
