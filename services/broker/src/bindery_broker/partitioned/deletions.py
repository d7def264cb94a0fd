"""Go on with deletions of partitioned topics that were interrupted.

The broker that deletes a topic stores the intent in one transaction: `deleted` in the topic's record, and a node with
the topic's name in `DELETIONS_ROOT`. Both are removed in one transaction, too, after the partitions. If the broker dies
or an owner does not answer in between, the nodes tell the other brokers.

Each round of maintenance looks at the names. The broker that owns the bundle of partition 0 goes on with a deletion
that it has seen in the round before, too: so one broker does, and not while the request is probably still running. An
owner that cannot be reached ends the attempt; the next round repeats it. The list of names is watched, so that rounds
without a change cost nothing.

Before each partition, the record is read again: if the deletion is complete, the name may belong to a new topic.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final

from bindery_core.errors import BinderyError, NoSuchTopic
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_pulsar.topic_name import TopicName

from bindery_broker.partitioned.catalog import PartitionedTopics

ROUND_MAX: Final = 100
"""Maximum number of deletions that one round goes on with."""

DeleteTopic = Callable[[TopicName], Awaitable[None]]
"""Delete a topic at its owner, also if it has consumers. Raises NoSuchTopic."""
log = get_logger(__name__)


class Deletions:
    def __init__(self, catalog: PartitionedTopics, *, is_mine: Callable[[TopicName], Awaitable[bool]]) -> None:
        """`is_mine`: whether this broker owns the bundle of a topic; it takes one without an owner."""
        self.delete_topic: DeleteTopic | None = None
        """None: this broker goes on with nothing."""
        self._catalog = catalog
        self._is_mine = is_mine
        self._seen: frozenset[TopicName] = frozenset()
        """Deletions that the last round has found."""
        self._running: dict[TopicName, asyncio.Task[None]] = {}

    async def maintain(self) -> None:
        """Run one round. Errors are logged, and the next round tries again."""
        try:
            found = frozenset(await self._catalog.deletions())
        except BinderyError as error:
            log.warning("partitioned_topic_deletions_not_read", **error_fields(error))
            return
        due, self._seen = sorted(found & self._seen, key=lambda name: name.short), found
        for name in due[:ROUND_MAX]:
            try:
                if await self._is_mine(name.with_partition(0)):
                    await self.go_on(name)
            except BinderyError as error:
                log.info("partitioned_topic_deletion_waits", topic=name.short, **error_fields(error))

    def go_on(self, name: TopicName) -> "asyncio.Task[None]":
        """Go on with a deletion now, in the background. It is not begun twice."""
        task = self._running.get(name)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._complete(name))
            self._running[name] = task
            task.add_done_callback(lambda _: self._running.pop(name, None))
        return task

    async def close(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _complete(self, name: TopicName) -> None:
        if self.delete_topic is None:
            return
        try:
            index = 0
            while True:
                stored = await self._catalog.read(name)
                if stored is None or not stored.value.is_deleted:
                    await self._catalog.drop_stale_deletion(name)
                    return
                if index == stored.value.partitions:
                    break
                with contextlib.suppress(NoSuchTopic):
                    await self.delete_topic(name.with_partition(index))
                index += 1
            await self._catalog.remove(name)
        except BinderyError as error:
            log.warning("partitioned_topic_deletion_waits", topic=name.short, **error_fields(error))
