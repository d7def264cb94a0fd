"""Write a topic's znode and the znodes of its cursors. Each write proves that this broker still owns the topic.

A broker that opens a topic writes its znode, which changes the version, and remembers the version of its last write.
The topic's znode is written only at that version. A cursor's znode is written in one transaction with a check of that
version. Every write of a stale owner therefore fails with TopicFenced, permanently.

If the outcome of a write is unknown, the znode is read, and the write is repeated if it was not applied. If that cannot
be determined in time, the caller gets MetadataOutcomeUnknown, and the next write to that znode determines it first. A
write was applied if the version has grown by one and the value is there. That does not tell whose write it was if
another broker that opens the topic writes the same value: then the topic counts as lost. This can only be so for a
write that changes nothing but the end of the last ledger, as that of the open itself.

Invariant: at most one write is in progress, so the writes of one owner never conflict with each other.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final

from bindery_core.backoff import Backoff
from bindery_core.errors import (
    AlreadyExists,
    MetadataOutcomeUnknown,
    MetadataUnavailable,
    NoSuchNode,
    NoSuchTopic,
    TopicFenced,
    TryAgain,
    VersionConflict,
)
from bindery_metadata.stores.store import Check, Create, Delete, MetadataStore, Op, Set, Stat
from bindery_pulsar import znode_layout


class limited:
    """Limit the time of an asynchronous context. Raises TryAgain at the limit."""

    __slots__ = ("_timeout", "_timeout_s", "_what")

    def __init__(self, timeout_s: float, what: str) -> None:
        """`what`: the operation, for the message."""
        self._timeout_s = timeout_s
        self._what = what
        self._timeout = asyncio.timeout(timeout_s)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, traceback)
            if not isinstance(error, TimeoutError):
                return
        except TimeoutError:
            pass
        raise TryAgain(f"could not {self._what} in time", timeout_s=self._timeout_s) from None


PAUSE_S_MAX: Final = 1.0
"""Maximum pause in seconds between two attempts of one write."""


class OwnedNode:
    """A znode that only the topic's owner writes."""

    __slots__ = ("attempted", "is_unique", "path", "removing", "version")

    def __init__(self, path: str, version: int | None) -> None:
        self.path = path
        self.version = version
        """Version that this broker last read or wrote; None: the znode does not exist."""
        self.attempted: bytes | None = None
        """Value of a write whose outcome is unknown; None: there is no such write."""
        self.is_unique = True
        """Whether no other broker that opens the topic writes the value that was attempted last."""
        self.removing = False
        """Whether a deletion of the znode has an unknown outcome."""

    @property
    def is_absent(self) -> bool:
        """Whether the znode certainly does not exist."""
        return self.version is None and self.attempted is None


class TopicMetadata:
    """The znodes of one topic. Once another broker has written them, every write raises TopicFenced."""

    def __init__(self, store: MetadataStore, name: str, *, timeout_s: float, pause_s: float) -> None:
        """`name`: of the managed ledger. `timeout_s`: limit of a write with its retries. `pause_s`: the first pause."""
        self._store = store
        self._pause_s = pause_s
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self.name = name
        self.node = OwnedNode(f"{znode_layout.MANAGED_LEDGERS_ROOT}/{name}", None)

    def cursor_path(self, cursor: str) -> str:
        return f"{self.node.path}/{znode_layout.encode_name(cursor)}"

    async def load(self, *, create: bool) -> bytes:
        """Return the value of the topic's znode. A missing znode is created empty if `create`, else NoSuchTopic."""
        async with limited(self._timeout_s, "read the topic's metadata"):
            while True:
                try:
                    node = await self._store.get(self.node.path)
                except NoSuchNode:
                    if not create:
                        raise NoSuchTopic("no such topic", name=self.name) from None
                else:
                    self.node.version = node.stat.version
                    return node.data
                with suppress(AlreadyExists, MetadataOutcomeUnknown):
                    await self._store.create(self.node.path, make_parents=True)

    async def load_cursors(self) -> Mapping[str, tuple[OwnedNode, bytes]]:
        """Return the znode and value of each cursor, by name."""
        found: dict[str, tuple[OwnedNode, bytes]] = {}
        async with limited(self._timeout_s, "read the topic's cursors"):
            for part in await self._store.children(self.node.path):
                path = f"{self.node.path}/{part}"
                try:
                    node = await self._store.get(path)
                except NoSuchNode:
                    continue
                found[znode_layout.decode_name(part)] = (OwnedNode(path, node.stat.version), node.data)
        return found

    async def write_topic(self, data: bytes, *, is_unique: bool = True) -> None:
        """Replace the value of the topic's znode.

        `is_unique`: whether no other broker that opens the topic writes the same value. It writes the present one with
        its last ledger closed. Else an unknown outcome counts as a loss of the topic, even if the value is found: the
        write may be that of another broker, which then owns the topic.
        """
        async with self._lock:
            await self._write(self.node, data, is_unique=is_unique)

    async def write_cursor(self, cursor: OwnedNode, data: bytes) -> None:
        """Create or replace a cursor's znode."""
        async with self._lock:
            await self._settle(self.node)
            await self._write(cursor, data)

    async def delete_cursor(self, cursor: OwnedNode) -> None:
        async with self._lock:
            await self._settle(self.node)
            await self._settle(cursor)
            if cursor.version is not None:
                await self._remove([self._check(), Delete(cursor.path, cursor.version)], cursor)
                cursor.version = None

    async def delete_topic(self, cursors: Sequence[OwnedNode]) -> None:
        """Delete the znodes of the topic and its cursors, in one transaction."""
        async with self._lock:
            await self._settle(self.node)
            ops: list[Op] = []
            for cursor in cursors:
                await self._settle(cursor)
                if cursor.version is not None:
                    ops.append(Delete(cursor.path, cursor.version))
            assert self.node.version is not None
            ops.append(Delete(self.node.path, self.node.version))
            await self._remove(ops, self.node)

    def _check(self) -> Check:
        assert self.node.version is not None
        return Check(self.node.path, self.node.version)

    async def _write(self, node: OwnedNode, data: bytes, *, is_unique: bool = True) -> None:
        """Compare and set. The caller holds the lock."""
        error: Exception | None = None
        backoff = Backoff(min(self._pause_s, PAUSE_S_MAX), PAUSE_S_MAX)
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    try:
                        if await self._settle(node) == data:
                            return
                        await self._attempt(node, data, is_unique=is_unique)
                    except (MetadataOutcomeUnknown, MetadataUnavailable) as caught:
                        error = caught
                    else:
                        return
                    await asyncio.sleep(backoff.next_delay_s())
        except TimeoutError:
            if node.attempted is not None:
                raise MetadataOutcomeUnknown("whether metadata was written is not known", path=node.path) from error
            raise MetadataUnavailable("the metadata store does not answer", path=node.path) from error

    async def _attempt(self, node: OwnedNode, data: bytes, *, is_unique: bool) -> None:
        ops: list[Op] = [] if node is self.node else [self._check()]
        ops.append(Create(node.path, data) if node.version is None else Set(node.path, data, node.version))
        node.attempted, node.is_unique = data, is_unique
        try:
            results = await self._store.multi(ops)
        except MetadataUnavailable:
            node.attempted = None
            raise
        except (VersionConflict, NoSuchNode, AlreadyExists) as error:
            node.attempted = None
            raise TopicFenced("another broker has taken the topic over", topic=self.name, path=node.path) from error
        node.attempted = None
        result = results[-1]
        node.version = result.version if isinstance(result, Stat) else 0

    async def _settle(self, node: OwnedNode) -> bytes | None:
        """Determine whether a write to `node` of unknown outcome was applied. Returns the value if it was."""
        if node.removing and await self._is_removed(node):
            if node is self.node:
                raise TopicFenced("the topic was removed", topic=self.name, path=node.path)
            node.version = None
        attempted = node.attempted
        if attempted is None:
            return None
        await self._store.sync(node.path)
        try:
            current = await self._store.get(node.path)
        except NoSuchNode:
            if node.version is not None:
                raise TopicFenced("another broker has removed the topic", topic=self.name, path=node.path) from None
            node.attempted = None
            return None
        expected = 0 if node.version is None else node.version + 1
        node.attempted = None
        if current.stat.version == expected and current.data == attempted:
            if not node.is_unique:
                raise TopicFenced("another broker may have taken the topic over", topic=self.name, path=node.path)
            node.version = expected
            return attempted
        if current.stat.version != node.version:
            raise TopicFenced("another broker has taken the topic over", topic=self.name, path=node.path)
        return None

    async def _is_removed(self, node: OwnedNode) -> bool:
        """Return whether a deletion of `node` of unknown outcome was applied."""
        await self._store.sync(node.path)
        stat = await self._store.exists(node.path)
        if stat is not None and stat.version != node.version:
            raise TopicFenced("another broker has taken the topic over", topic=self.name, path=node.path)
        node.removing = False
        return stat is None

    async def _remove(self, ops: list[Op], node: OwnedNode) -> None:
        """Apply `ops`, which include the deletion of `node`. The caller holds the lock."""
        error: Exception | None = None
        backoff = Backoff(min(self._pause_s, PAUSE_S_MAX), PAUSE_S_MAX)
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    try:
                        if not (node.removing and await self._is_removed(node)):
                            await self._attempt_removal(ops, node)
                    except (MetadataOutcomeUnknown, MetadataUnavailable) as caught:
                        error = caught
                    else:
                        return
                    await asyncio.sleep(backoff.next_delay_s())
        except TimeoutError:
            if node.removing:
                raise MetadataOutcomeUnknown("whether metadata was deleted is not known", path=node.path) from error
            raise MetadataUnavailable("the metadata store does not answer", path=node.path) from error

    async def _attempt_removal(self, ops: list[Op], node: OwnedNode) -> None:
        node.removing = True
        try:
            await self._store.multi(ops)
        except MetadataUnavailable:
            node.removing = False
            raise
        except (VersionConflict, NoSuchNode) as error:
            node.removing = False
            raise TopicFenced("another broker has taken the topic over", topic=self.name) from error
        node.removing = False
