"""Turns: a queue in which the groups of waiters (the addresses of clients) take turns.

With thousands of waiters, a group delays another one by one of its own only. Each operation takes constant time.

| waiting (groups a, b, c)   | operation     | returns | waiting afterwards         |
|----------------------------|---------------|---------|----------------------------|
| a: a1, a2; b: b1           | `next`        | a1      | b: b1; a: a2               |
| b: b1; a: a2               | `next`        | b1      | a: a2                      |
| a: a2                      | `add` c1 of c |         | a: a2; c: c1               |
| a: a2; c: c1               | `next_of` c   | c1      | a: a2                      |

Invariants: a group waits only while it has a waiter; waiters of a group have the order of their arrival.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Turns(Generic[T]):
    """A waiter is any hashable object that is in the queue at most once."""

    __slots__ = ("_count", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[str, dict[T, None]] = {}
        """By group, the one whose turn is next first."""
        self._count = 0

    def __len__(self) -> int:
        """Number of waiters."""
        return self._count

    def waits(self, group: str) -> bool:
        """Whether a group has a waiter."""
        return group in self._waiting

    def add(self, waiter: T, *, group: str) -> None:
        waiters = self._waiting.setdefault(group, {})
        assert waiter not in waiters
        waiters[waiter] = None
        self._count += 1

    def discard(self, waiter: T, *, group: str) -> bool:
        """Remove a waiter. Return whether it was waiting."""
        waiters = self._waiting.get(group)
        if waiters is None or waiter not in waiters:
            return False
        del waiters[waiter]
        self._count -= 1
        if not waiters:
            del self._waiting[group]
        return True

    @property
    def next_group(self) -> str:
        """The group whose turn it is. There must be one."""
        return next(iter(self._waiting))

    def next(self) -> T:
        """Remove and return the waiter whose turn it is. There must be one."""
        return self.next_of(self.next_group)

    def next_of(self, group: str) -> T:
        """Remove and return the first waiter of a group, which must have one; then it is the turn of all others."""
        waiters = self._waiting.pop(group)
        waiter = next(iter(waiters))
        del waiters[waiter]
        self._count -= 1
        if waiters:
            self._waiting[group] = waiters
        return waiter
