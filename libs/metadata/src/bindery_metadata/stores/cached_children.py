"""Keep lists of children in memory while their watches have not fired.

A list that was read is returned again without a request until its watch fires. ZooKeeper sends the event of a watch
before the answer to any later request that reflects the change. After one read of its own (`catch_up`), a caller
therefore sees lists that are not older than that read, also of changes by other clients.

Invariants: there is at most one watch for each path and at most `lists_max` in all. A watch cannot be withdrawn, so a
kept list makes room only when its watch fires; without room, a list is read each time and not watched. While the store
is not CONNECTED, nothing is answered from memory.
"""

import asyncio
from typing import Final

from bindery_metadata.stores.store import MetadataStore, SessionState

LISTS_MAX: Final = 10_000
"""Default maximum number of lists that are kept, and of watches."""
NAMES_MAX: Final = 200_000
"""Default maximum number of names in all kept lists: some 16 MiB. A list that does not fit is read each time."""


class CachedChildren:
    def __init__(self, store: MetadataStore, *, lists_max: int = LISTS_MAX, names_max: int = NAMES_MAX) -> None:
        self.reads = 0
        """Number of lists that were read from the store."""
        self._store = store
        self._lists_max = lists_max
        self._names_max = names_max
        self._names = 0
        self._kept: dict[str, tuple[str, ...]] = {}
        self._watched: set[str] = set()
        """Paths whose watch has not fired, or is being set."""
        self._reading: dict[str, asyncio.Task[tuple[str, ...]]] = {}

    def __len__(self) -> int:
        """Number of kept lists."""
        return len(self._kept)

    @property
    def watches(self) -> int:
        return len(self._watched)

    async def catch_up(self, path: str) -> None:
        """Wait for the events of changes that happened before this call. `path`: any valid one, which is read."""
        await self._store.exists(path)

    async def children(self, path: str) -> tuple[str, ...]:
        """Return the names of the children, sorted. Raises NoSuchNode, MetadataUnavailable."""
        kept = self._kept.get(path)
        if kept is not None and self._store.session_state is SessionState.CONNECTED:
            return kept
        reading = self._reading.get(path)
        if reading is None:
            if path in self._watched or len(self._watched) >= self._lists_max:
                self.reads += 1
                return tuple(await self._store.children(path))
            reading = asyncio.get_running_loop().create_task(self._read(path))
            self._reading[path] = reading
            reading.add_done_callback(lambda done: self._read_ended(path, done))
        return await asyncio.shield(reading)  # a cancelled caller leaves no watch that is not counted

    async def _read(self, path: str) -> tuple[str, ...]:
        has_changed = False

        def changed() -> None:
            nonlocal has_changed
            has_changed = True
            self._watched.discard(path)
            self._names -= len(self._kept.pop(path, ()))

        self._watched.add(path)
        self.reads += 1
        try:
            names = tuple(await self._store.children(path, watch=changed))
        except BaseException:
            self._watched.discard(path)  # a read that raises sets no watch
            raise
        if not has_changed and self._names + len(names) <= self._names_max:
            self._kept[path] = names
            self._names += len(names)
        return names

    def _read_ended(self, path: str, task: "asyncio.Task[tuple[str, ...]]") -> None:
        self._reading.pop(path, None)
        if not task.cancelled():
            task.exception()  # was raised in each caller that still waits
