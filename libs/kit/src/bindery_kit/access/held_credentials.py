"""End calls and connections whose credentials were accepted at their beginning, and are not accepted any more.

| event                                              | who notices it | when                                     |
|----------------------------------------------------|----------------|------------------------------------------|
| the credentials expire                             | ExpiryTimer    | at that time                             |
| a file of keys, passwords or CAs was replaced, and | Rechecks       | after the file was read: the owner calls |
| the credentials are refused now                    |                | `check_again`                            |

Both are used from one event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

CERTIFICATE: Final = "certificate"
"""Key of the client's PeerCertificate in the state of an HTTP connection, and of the scope of its requests."""
EXPIRY_CHECK_S_MAX: Final = 3_600.0
"""Maximum seconds between two checks of the expiry: timers measure another time than the clock that decides, which may
be set."""

T = TypeVar("T")


class ExpiryTimer:
    """Calls `on_expired` once, when `now_s` has reached `expires_at_s` (both in seconds since 1970).

    It refers to nothing of its owner after `cancel` or the call, so that the owner is freed without a collection of
    cyclic garbage.
    """

    __slots__ = ("_expires_at_s", "_now_s", "_on_expired", "_timer")

    def __init__(self, expires_at_s: float, *, now_s: Callable[[], float], on_expired: Callable[[], None]) -> None:
        self._expires_at_s = expires_at_s
        self._now_s = now_s
        self._on_expired: Callable[[], None] | None = on_expired
        self._timer: asyncio.TimerHandle | None = None
        self._check_later()

    def cancel(self) -> None:
        """End this. Idempotent."""
        self._on_expired = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self._timer = None
        if self._expires_at_s > self._now_s():
            self._check_later()
        elif (on_expired := self._on_expired) is not None:
            self._on_expired = None
            on_expired()

    def _check_later(self) -> None:
        left_s = max(0.0, min(self._expires_at_s - self._now_s(), EXPIRY_CHECK_S_MAX))
        self._timer = asyncio.get_running_loop().call_later(left_s, self._check)


class Rechecks(Generic[T]):
    """Verifies all watched credentials again after each change of what decides about them, one in a turn of the loop.

    `is_accepted`: returns whether credentials would be accepted now. `on_refused`: called for those that would not be.
    """

    def __init__(self, is_accepted: Callable[[T], Awaitable[bool]], on_refused: Callable[[T], None]) -> None:
        self._is_accepted = is_accepted
        self._on_refused = on_refused
        self.generation = 0
        """Number of changes."""
        self._watched: dict[T, int] = {}
        """By the credentials, the generation with which they were verified last."""
        self._checking: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Return the number of watched credentials."""
        return len(self._watched)

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The newest task that verifies; None before the first change."""
        return self._checking

    def check_again(self) -> None:
        """Verify all watched credentials, because a file was replaced."""
        self.generation += 1
        if self._watched:
            self._start()

    def watch(self, one: T, *, generation: int) -> None:
        """Verify `one` after each change from now on, and now if it was verified in an earlier `generation`."""
        self._watched[one] = generation
        if generation != self.generation:
            self._start()

    def forget(self, one: T) -> None:
        """End what `watch` began. Idempotent."""
        self._watched.pop(one, None)

    def _start(self) -> None:
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check(), name="credentials")

    async def _check(self) -> None:
        while stale := [one for one, generation in self._watched.items() if generation != self.generation]:
            for one in stale:
                if one not in self._watched:
                    continue
                generation = self.generation
                is_accepted = await self._is_accepted(one)
                if one in self._watched:
                    self._watched[one] = generation
                    if not is_accepted:
                        self._on_refused(one)
                await asyncio.sleep(0)
