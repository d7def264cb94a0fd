"""Notify readers of a topic when its last confirmed entry advances."""

import asyncio
from collections.abc import Callable


class Listeners:
    """Callbacks that are called in the event loop. They must not raise."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[], None]] = []

    def add(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Add a listener. Returns a function that removes it."""
        self._listeners.append(listener)

        def remove() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return remove

    def call(self) -> None:
        for listener in list(self._listeners):
            listener()


class NewEntries:
    """Owns the listeners for new entries and the calls that wait for one."""

    def __init__(self) -> None:
        self.listeners = Listeners()
        self._waiters: dict[asyncio.Future[None], None] = {}

    def announce(self) -> None:
        self.wake()
        self.listeners.call()

    def wake(self) -> None:
        """Let each waiting call evaluate its condition again."""
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_until(self, condition: Callable[[], bool], *, timeout_s: float) -> bool:
        """Return whether `condition` holds before the timeout. Raises what the condition raises."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    waiter = asyncio.get_running_loop().create_future()
                    self._waiters[waiter] = None
                    try:
                        await waiter
                    finally:
                        self._waiters.pop(waiter, None)
                return True
        except TimeoutError:
            return False
