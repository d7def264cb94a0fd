"""A topic that was deleted by force is not created again by the clients that still use it.

A client that is connected repeats its request when its topic is deleted. If that created the topic again, a deletion
could never succeed while clients run.

| request, in the HOLD_S after the deletion | answer                                     |
|-------------------------------------------|--------------------------------------------|
| creates the topic explicitly              | the topic is created                       |
| would create it by its first message or   | 409 `topic_deleted`, with `Retry-After`    |
| subscription                              |                                            |

A deletion without `force` is refused while consumers are connected, and holds nothing: the next message creates the
topic. Neither does the deletion of a namespace, because no topic is created in a namespace that does not exist. The
partitions of a topic are held with the topic, and a partition that is deleted alone is not held.

The record of a deletion is a znode below ROOT, so that it holds at the next owner of the topic, too. It is written
before the topic is deleted, and removed by the broker that wrote it, or by the next broker that starts.
"""

import contextlib
import heapq
from typing import Final
from urllib.parse import quote

import msgspec
from bindery_core.errors import AlreadyExists, BinderyError, NoSuchNode
from bindery_kit.observability.logs import get_logger
from bindery_metadata.layout.layout import BINDERY_ROOT
from bindery_metadata.stores.store import MetadataStore
from bindery_pulsar.topic_name import TopicName

from bindery_broker.errors import TopicDeleted
from bindery_broker.managed_ledger import WallClock

ROOT: Final = f"{BINDERY_ROOT}/deleted-topics"
HOLD_S: Final = 60
"""Seconds for which a topic that was deleted by force is not created implicitly."""
REMOVED_MAX: Final = 1_000
"""Maximum number of records that a round of maintenance removes."""
log = get_logger(__name__)


class _Record(msgspec.Struct):
    until_ms: int
    """End of the hold, in ms since 1970."""


class ForcedDeletions:
    def __init__(self, store: MetadataStore, *, clock: WallClock) -> None:
        self._store = store
        self._clock = clock
        self._ends: list[tuple[int, str]] = []
        """Heap of the end of each hold, in ms since 1970, and its path."""
        self._has_listed = False

    async def record(self, name: TopicName) -> None:
        """Hold the name from now on, and those of its partitions. Raises MetadataUnavailable."""
        path, until_ms = _path(name), self._clock() + HOLD_S * 1000
        data = msgspec.json.encode(_Record(until_ms))
        while True:  # another deletion may create the record, or another broker remove it, between the two calls
            try:
                await self._store.set(path, data, version=None)
                break
            except NoSuchNode:
                pass
            try:
                await self._store.create(path, data, make_parents=True)
                break
            except AlreadyExists:
                pass
        heapq.heappush(self._ends, (until_ms, path))

    async def check(self, name: TopicName) -> None:
        """Raise TopicDeleted if the topic, or that of the partition, was deleted by force a short time ago."""
        try:
            left_ms = await self._until_ms(_path(name.partitioned_topic)) - self._clock()
        except NoSuchNode:
            return
        if left_ms > 0:
            raise TopicDeleted(
                "the topic was deleted by force; `bindery topics create` (PUT) creates it now, the first message later",
                topic=name.short,
                retry_after_s=round(left_ms / 1000, 3),
            )

    async def clean(self) -> None:
        """Remove the records of holds that have ended. Errors are for the log: a later call tries again."""
        try:
            if not self._has_listed:
                await self._list()
            for _ in range(REMOVED_MAX):
                if not self._ends or self._ends[0][0] > self._clock():
                    return
                await self._remove(self._ends[0][1])
                heapq.heappop(self._ends)
        except BinderyError as error:
            log.warning("forced_deletions_not_cleaned", error=str(error))

    async def _list(self) -> None:
        """Take over the records that other brokers have left."""
        with contextlib.suppress(NoSuchNode):
            for child in await self._store.children(ROOT):
                heapq.heappush(self._ends, (self._clock() + HOLD_S * 1000, f"{ROOT}/{child}"))
        self._has_listed = True

    async def _remove(self, path: str) -> None:
        with contextlib.suppress(NoSuchNode):
            if await self._until_ms(path) <= self._clock():  # the topic may have been deleted again
                await self._store.delete(path, version=None)

    async def _until_ms(self, path: str) -> int:
        """Return the end of a hold; 0 if the record cannot be decoded. Raises NoSuchNode."""
        try:
            return msgspec.json.decode((await self._store.get(path)).data, type=_Record).until_ms
        except msgspec.DecodeError:
            return 0


def _path(name: TopicName) -> str:
    return f"{ROOT}/{quote(name.short, safe='')}"
