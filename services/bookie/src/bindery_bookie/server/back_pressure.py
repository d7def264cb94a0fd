"""BackPressureBudget: counts the bytes of requests in progress, and resumes waiters when few are left.

The budget refuses nothing: the caller that takes the last bytes may exceed the limit by one batch, and then stops
reading. (The broker's budget of request bodies refuses instead; see `bindery_broker.http`.)

Waiters are called by turns of their groups (the addresses of clients), so that one address with thousands of waiting
connections delays another by one of its connections only. If the budget serves idle groups, a group that has nothing
in progress need not wait while the limit is exceeded by less than half of it, so that clients of other addresses that
hold their bytes for long do not delay it at all.

Invariants: `used` >= 0, and is the sum over all groups; a waiter is called once, and only while the budget is at or
below its low mark, or its group is free.
"""

import asyncio
from collections.abc import Callable

from bindery_kit.limits.turns import Turns


class BackPressureBudget:
    """`limit` in bytes. Waiters resume when `used` has fallen to half of it, so that one response does not wake
    thousands. `serves_idle_groups`: a group that has nothing in progress need not wait."""

    __slots__ = (
        "_idle",
        "_is_waking",
        "_serves_idle_groups",
        "_until_empty",
        "_used_of",
        "_waiters",
        "limit",
        "low",
        "used",
        "waiting",
    )

    def __init__(self, limit: int, *, serves_idle_groups: bool = False) -> None:
        assert limit > 0
        self.limit = limit
        self._serves_idle_groups = serves_idle_groups
        self.low = limit // 2
        self.used = 0
        self._used_of: dict[str, int] = {}
        """By group; without groups that have nothing in progress."""
        self._waiters: Turns[Callable[[], None]] = Turns()
        self.waiting = 0
        """Number of waiters."""
        self._idle: dict[str, None] = {}
        """Groups that wait and have nothing in progress, in the order in which this began."""
        self._is_waking = False
        self._until_empty: list[asyncio.Future[None]] = []

    @property
    def is_over(self) -> bool:
        return self.used >= self.limit

    def is_free_for(self, group: str) -> bool:
        """Whether a group need not wait, whatever others have in progress."""
        return self._serves_idle_groups and group not in self._used_of and self.used < self.limit + self.limit // 2

    def take(self, size: int, *, group: str = "") -> None:
        """Count `size` bytes as in progress."""
        assert size >= 0
        self.used += size
        if size:
            self._used_of[group] = self._used_of.get(group, 0) + size
            if self._idle:
                self._idle.pop(group, None)

    def give(self, size: int, *, group: str = "") -> None:
        """Count `size` bytes as no longer in progress, and call waiters while the budget is low.

        Waiters of a group are called in the order of their arrival, and all without recursion, even if a waiter takes
        and gives at once, because there may be thousands of them.
        """
        used_of = self._used_of.get(group, 0)
        assert 0 <= size <= used_of
        self.used -= size
        if size:
            if size < used_of:
                self._used_of[group] = used_of - size
            else:
                del self._used_of[group]
                if self._waiters.waits(group):
                    self._idle[group] = None
        if self.waiting and not self._is_waking:
            self._is_waking = True
            try:
                while self.waiting:
                    if self.used <= self.low:
                        group = self._waiters.next_group
                    elif not self._idle or not self.is_free_for(group := next(iter(self._idle))):
                        break
                    waiter = self._waiters.next_of(group)
                    self.waiting -= 1
                    if not self._waiters.waits(group):
                        self._idle.pop(group, None)
                    waiter()
            finally:
                self._is_waking = False
        if self._until_empty and not self.used:
            for future in self._until_empty:
                if not future.done():
                    future.set_result(None)
            self._until_empty.clear()

    def when_low(self, waiter: Callable[[], None], *, group: str = "") -> None:
        """Call `waiter`, which does not wait yet, once when the budget is low again. Only while it is over, or others
        wait."""
        assert self.is_over or self.waiting
        self._waiters.add(waiter, group=group)
        self.waiting += 1
        if group not in self._used_of:
            self._idle[group] = None

    def forget(self, waiter: Callable[[], None], *, group: str = "") -> None:
        """Remove `waiter`, which was passed to `when_low` with `group` and was not called yet."""
        was_waiting = self._waiters.discard(waiter, group=group)
        assert was_waiting
        self.waiting -= 1
        if not self._waiters.waits(group):
            self._idle.pop(group, None)

    async def wait_empty(self) -> None:
        """Return once nothing is in progress."""
        while self.used:
            future = asyncio.get_running_loop().create_future()
            self._until_empty.append(future)
            await future
