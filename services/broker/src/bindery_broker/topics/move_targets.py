"""The topics of this broker as targets of moves. Nothing is moved to a target that another broker owns.

But if a broker is stopped during a move, the next owner of the source may be another one than that of the target. So a
target of another broker can be searched, by requests to its owner (`Peers`).

A write to a target continues if its mover ends, for example because the source was closed. So the writes in progress
are remembered here by target: a mover that settles them waits for their end before it searches the target (`decided`).
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, Protocol

from bindery_core.errors import BinderyError, Conflict, NoSuchTopic, TopicFenced, TryAgain
from bindery_pulsar.message_codec import METADATA_READ_SIZE_MAX, OutgoingMessage, PackedEntry
from bindery_pulsar.message_id import EARLIEST, MessageId, Position
from bindery_pulsar.topic_name import TopicName

from bindery_broker.errors import NotOwner, TargetElsewhere
from bindery_broker.ownership.bundles import Bundle
from bindery_broker.ownership.ownership import Ownership
from bindery_broker.retries.copies import Identity, identity_of
from bindery_broker.retries.targets import Destination, Target
from bindery_broker.topics.topic import Topic

SCAN_ENTRIES_MAX: Final = 100
SCAN_SIZE_MAX: Final = 2**20
"""Maximum number of entries, and bytes unless the first is larger, of one read of a scan."""
DECIDED_S: Final = 5.0
"""Maximum seconds to wait for the end of writes in progress."""


class OpenTopics(Protocol):
    """The topics of a broker: `Topics`."""

    def loaded(self, name: TopicName) -> Topic | None: ...
    def begin_use(self, name: TopicName) -> None: ...
    def end_use(self, name: TopicName) -> None: ...
    async def exists(self, name: TopicName) -> bool: ...
    async def get(self, name: TopicName, *, create: bool = False) -> Topic: ...


class Peers(Protocol):
    """The other brokers: `http.peers.Peers`."""

    def scan(self, url: str, topic: TopicName, after: Position) -> AsyncIterator[tuple[Position, Identity]]:
        """Yield what `Target.scan` yields, of a topic that the broker at `url` owns. Raises NoSuchTopic, TryAgain."""
        ...


class TopicTargets:
    """`retries.targets.Targets` over the topics of a broker."""

    def __init__(self, topics: OpenTopics) -> None:
        self._topics = topics
        self._ownership: Ownership | None = None
        self.peers: Peers | None = None
        """None: targets of other brokers cannot be searched."""
        self.writes: dict[TopicName, set[asyncio.Future[list[MessageId | BinderyError]]]] = {}
        """Writes in progress by target."""

    def bind(self, ownership: Ownership) -> None:
        self._ownership = ownership

    @asynccontextmanager
    async def open(self, to: Destination, *, create: bool) -> AsyncIterator[Target]:
        """See `Targets.open`. Raises Conflict if the topic is missing and topics are not created automatically.

        Without `create`, a topic of another broker can be searched.
        """
        self._topics.begin_use(to.topic)
        try:
            yield await self._open(to, create=create)
        finally:
            self._topics.end_use(to.topic)

    async def _open(self, to: Destination, *, create: bool) -> Target:
        name = to.topic
        topic = self._topics.loaded(name)
        try:
            if topic is None:
                if not create and not await self._topics.exists(name):
                    raise NoSuchTopic("no such topic", topic=name.short)
                remote = None if self._ownership is None else await self._ownership.locate(Bundle.of(name))
                if remote is not None and self.peers is not None and not create:
                    return RemoteTarget(name, remote.http_url, self.peers, self._ownership)
                if remote is not None:
                    raise _elsewhere(name, remote.http_url)
                topic = await self._topics.get(name, create=create)
            if create:
                await topic.subscribe(to.subscription, initial=EARLIEST)
        except (NotOwner, TopicFenced) as error:  # of the target: the source must not look for another owner of its own
            raise TryAgain(
                "messages cannot be moved, because the owner of the topic they are moved to is changing; retry",
                topic=name.short,
                cause=error.message,
            ) from error
        except NoSuchTopic as error:
            if not create:
                raise
            raise Conflict(
                "the topic to which messages are moved does not exist, and topics are not created automatically; "
                "create it",
                topic=name.short,
            ) from error
        return TopicTarget(topic, self.writes)


def _elsewhere(name: TopicName, url: str) -> TargetElsewhere:
    return TargetElsewhere(
        "messages cannot be moved, because another broker owns the topic they are moved to; retry",
        topic=name.short,
        owner=url,
    )


class RemoteTarget:
    """`retries.targets.Target` over a topic that another broker owns: it can only be searched."""

    def __init__(self, name: TopicName, url: str, peers: Peers, ownership: Ownership | None) -> None:
        self._name = name
        self._url = url
        self._peers = peers
        self._ownership = ownership

    @property
    def end(self) -> Position:
        raise _elsewhere(self._name, self._url)

    async def publish(self, _messages: Sequence[OutgoingMessage]) -> list[MessageId | BinderyError]:
        raise _elsewhere(self._name, self._url)

    async def decided(self) -> None:
        """Return at once: a broker writes copies only while it owns both topics.

        The present owner of the target has opened it after that, which decided all writes before: they are stored, or
        their ledger is fenced.
        """

    async def scan(self, after: Position) -> AsyncIterator[tuple[Position, Identity]]:
        try:
            async for found in self._peers.scan(self._url, self._name, after):
                yield found
        except NotOwner as error:
            if self._ownership is not None:
                self._ownership.forget_remote(Bundle.of(self._name))
            raise TryAgain(
                "whether messages were moved is not known, because the owner of their topic does not answer; retry",
                topic=self._name.short,
                owner=self._url,
            ) from error


class TopicTarget:
    """`retries.targets.Target` over an open topic."""

    def __init__(
        self, topic: Topic, writes: dict[TopicName, set[asyncio.Future[list[MessageId | BinderyError]]]]
    ) -> None:
        self._topic = topic
        self._writes = writes

    @property
    def end(self) -> Position:
        return self._topic.ledger.last_confirmed

    async def publish(self, messages: Sequence[OutgoingMessage]) -> list[MessageId | BinderyError]:
        if not self._topic.is_open:
            raise TryAgain("the topic to which messages are moved was closed; retry", topic=self._topic.name.short)
        name = self._topic.name
        write = asyncio.ensure_future(self._topic.publish(messages, producer=None, batch=False))
        self._writes.setdefault(name, set()).add(write)
        write.add_done_callback(self._written)
        return await asyncio.shield(write)

    def _written(self, write: "asyncio.Future[list[MessageId | BinderyError]]") -> None:
        left = self._writes[self._topic.name]
        left.discard(write)
        if not left:
            del self._writes[self._topic.name]
        if not write.cancelled():
            write.exception()  # the mover may have ended

    async def decided(self) -> None:
        writes = self._writes.get(self._topic.name)
        if writes:
            _, pending = await asyncio.wait(set(writes), timeout=DECIDED_S)
            if pending:
                raise TryAgain("a write to the topic is in progress; retry", topic=self._topic.name.short)
        await self._topic.ledger.decided()

    async def scan(self, after: Position) -> AsyncIterator[tuple[Position, Identity]]:
        ledger = self._topic.ledger
        end = ledger.last_confirmed
        position = ledger.next_position(after)
        while position <= end:
            entries = await ledger.read(position, entries_max=SCAN_ENTRIES_MAX, size_max=SCAN_SIZE_MAX)
            if not entries:
                return
            for at, payload in entries:
                if at > end:
                    return
                identity = _identity(payload)
                if identity is not None:
                    yield at, identity
            position = ledger.next_position(entries[-1][0])


def _identity(payload: bytes) -> Identity | None:
    """Return the identity of a copy; None: the entry is none, because it is a batch, compressed, or not readable."""
    try:
        entry = PackedEntry(payload, metadata_size_max=METADATA_READ_SIZE_MAX)
        if entry.is_batch or entry.is_opaque or not entry.is_small:
            return None
        messages = entry.decode()
    except BinderyError:
        return None
    return identity_of(messages[0].properties) if messages else None
