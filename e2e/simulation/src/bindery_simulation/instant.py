"""Run asyncio's event loop with a simulated clock, for tests of code without sockets, processes or threads.

When no callback is ready, time jumps to the next timer. A test that sleeps takes no time, and `sleep(0.01)` ends only
after every task is blocked, even on a slow machine. The clock does not wait for sockets, processes or threads.
`SimLoop` simulates connections and processes too.
"""

import asyncio
import selectors
from collections.abc import Callable
from typing import Final

BEGINNING_S: Final = 1000.0
"""Time of the simulated clock at the start, in seconds."""


class _JumpingSelector(selectors.SelectSelector):
    """Advances the clock to the next timer instead of waiting for files."""

    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return ready files, or advance the clock by `timeout`. None: no timer is left; wait for a file."""
        if timeout is None:
            return super().select(None)
        ready = super().select(0)
        if not ready and timeout > 0:
            self._jump(timeout)
        return ready


class InstantLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer."""

    def __init__(self) -> None:
        self._now = BEGINNING_S
        super().__init__(_JumpingSelector(self._pass))

    def time(self) -> float:
        return self._now

    def _pass(self, seconds: float) -> None:
        self._now += seconds
