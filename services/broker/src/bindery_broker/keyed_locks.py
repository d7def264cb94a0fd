"""KeyedLocks: one lock for each key, there only while somebody holds it or waits for it.

Invariants: at most one task holds a key; a lock stays in its place until the last of its users is done. A lock that is
not locked may still have users: between a release and the wake-up of who waits it is free, and whoever finds it gone
then would make another one.
"""

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class _Counted:
    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0


class KeyedLocks(Generic[K]):
    def __init__(self) -> None:
        self._locks: dict[K, _Counted] = {}

    def __contains__(self, key: K) -> bool:
        """Whether anybody holds `key` or waits for it."""
        return key in self._locks

    def __len__(self) -> int:
        return len(self._locks)

    @asynccontextmanager
    async def hold(self, key: K) -> AsyncIterator[None]:
        """Hold `key` alone, after those who asked before."""
        counted = self._locks.get(key)
        if counted is None:
            counted = self._locks[key] = _Counted()
        counted.users += 1
        try:
            async with counted.lock:
                yield
        finally:
            counted.users -= 1
            if not counted.users:
                del self._locks[key]
