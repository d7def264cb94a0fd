"""One lock per key. A lock exists only while a task holds it or waits for it.

Invariants: at most one task holds a key; a lock is removed when its last user is done. Users are counted because a lock
that is not locked may still have waiters: it is free between a release and the wake-up of the next task. If it were
removed then, another task would create a second lock for the key.
"""

import asyncio
from collections.abc import AsyncIterator, Hashable, Iterator
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
        """Whether a task holds `key` or waits for it."""
        return key in self._locks

    def __len__(self) -> int:
        return len(self._locks)

    def __iter__(self) -> Iterator[K]:
        """Iterate over the keys that tasks hold or wait for now."""
        return iter(list(self._locks))

    @asynccontextmanager
    async def hold(self, key: K) -> AsyncIterator[None]:
        """Hold `key` exclusively, in the order of the calls."""
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
