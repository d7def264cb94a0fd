"""The topics that messages are moved to, of this broker and of others.

The owner of a target writes the copies; if that is another broker than the owner of the source, it is asked to
(`Peers`, `HostedMoves`). Each source has at most one **epoch** in a target: opening the target begins another one, and
writes of earlier epochs are refused from then on. So a request that arrives late, even from a broker that has lost the
source meanwhile, stores no copy after its fate was decided:

| step                                      | what it guarantees                                                      |
|-------------------------------------------|-------------------------------------------------------------------------|
| 1 begin an epoch at the owner             | no write of an earlier epoch begins                                     |
| 2 the owner waits for those in progress   | every write of an earlier epoch is stored, or will never be (`decided`) |
| 3 a move: store the intent, then write    | the write is refused if another epoch has begun                         |
| 3 a settlement: search the target         | what is not found will never be stored                                  |

Epochs are in the memory of the owner and end with the topic there. The next owner knows none of them, so it refuses all
writes that began before it opened the topic.

A write to a target continues if its mover ends, for example because the source was closed. So the writes in progress
are remembered here by target.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from bindery_core.errors import BinderyError, Conflict, NoSuchTopic, TopicFenced, TryAgain
from bindery_pulsar.message_codec import METADATA_READ_SIZE_MAX, OutgoingMessage, PackedEntry
from bindery_pulsar.message_id import EARLIEST, MessageId, Position
from bindery_pulsar.topic_name import TopicName

from bindery_broker.errors import NotOwner, ProducerBusy
from bindery_broker.ownership.ownership import Ownership
from bindery_broker.retries.copies import Identity, identity_of
from bindery_broker.retries.targets import Destination, Target
from bindery_broker.topics.topic import Topic

SCAN_ENTRIES_MAX: Final = 100
SCAN_SIZE_MAX: Final = 2**20
"""Maximum number of entries, and bytes unless the first is larger, of one read of a scan."""
DECIDED_S: Final = 5.0
"""Maximum seconds to wait for the end of writes in progress."""
EPOCHS_MAX: Final = 10_000
"""Maximum number of sources with an epoch in one topic. Beyond it, the oldest one has to begin again."""

Results = list[MessageId | BinderyError]


class Begun(NamedTuple):
    """An epoch in a topic of another broker."""

    epoch: str
    end: Position
    """See `Target.end`."""


class OpenTopics(Protocol):
    """The topics of a broker: `Topics`."""

    def loaded(self, name: TopicName) -> Topic | None: ...
    def begin_use(self, name: TopicName) -> None: ...
    def end_use(self, name: TopicName) -> None: ...
    def on_subscription(self, topic: TopicName, subscription: str, /) -> None: ...
    async def exists(self, name: TopicName) -> bool: ...
    async def get(self, name: TopicName, *, create: bool = False) -> Topic: ...


class Peers(Protocol):
    """The other brokers: `http.peers.moves.Peers`. The broker at `url` owns the topic.

    Every method raises NoSuchTopic; NotOwner, if nothing was done because that broker does not answer or does not own
    the topic; other TryAgain.
    """

    async def begin_move(self, url: str, to: Destination, *, create: bool, source: str) -> Begun:
        """See `HostedMoves.begin`. Raises Conflict if the topic or the subscription cannot be created."""
        ...

    async def publish_copies(
        self, url: str, topic: TopicName, messages: Sequence[OutgoingMessage], *, source: str, epoch: str
    ) -> Results:
        """See `HostedMoves.publish`. Outcomes that are not known are OutcomeUnknown."""
        ...

    def scan(self, url: str, topic: TopicName, after: Position) -> AsyncIterator[tuple[Position, Identity]]:
        """Yield what `Target.scan` yields."""
        ...


class HostedMoves:
    """Moves to the topics of this broker. `prefix`: what the epochs of no other process begin with."""

    def __init__(self, prefix: str) -> None:
        self.writes: dict[TopicName, set[asyncio.Future[Results]]] = {}
        """Writes in progress by target."""
        self._prefix = prefix
        self._begun = 0
        self._epochs: WeakKeyDictionary[Topic, dict[str, str]] = WeakKeyDictionary()

    def target(self, topic: Topic, *, source: str) -> "TopicTarget":
        """Return the topic for a move of this process. It ends the epoch of the source in the topic."""
        self._epochs.get(topic, {}).pop(source, None)
        return TopicTarget(topic, self.writes)

    async def begin(self, topic: Topic, *, source: str) -> Begun:
        """Begin an epoch of a source. On return, no write of an earlier one is in progress. Raises TryAgain."""
        self._begun += 1
        epoch = f"{self._prefix}-{self._begun}"
        epochs = self._epochs.setdefault(topic, {})
        epochs.pop(source, None)
        if len(epochs) >= EPOCHS_MAX:
            del epochs[next(iter(epochs))]
        epochs[source] = epoch
        target = TopicTarget(topic, self.writes)
        await target.decided()
        return Begun(epoch, target.end)

    async def publish(self, topic: Topic, messages: Sequence[OutgoingMessage], *, source: str, epoch: str) -> Results:
        """Store copies. Errors as `Target.publish`; TryAgain, with nothing stored, if the epoch is not the present."""
        if self._epochs.get(topic, {}).get(source) != epoch:
            raise TryAgain("the move was given up, or its topic was opened again; retry", topic=topic.name.short)
        return await TopicTarget(topic, self.writes).publish(messages)


class TopicTargets:
    """`retries.targets.Targets` over the topics of a broker, and of others."""

    def __init__(self, topics: OpenTopics, hosted: HostedMoves) -> None:
        self.hosted: Final = hosted
        self._topics = topics
        self._ownership: Ownership | None = None
        self.peers: Peers | None = None
        """None: topics of other brokers are no targets."""

    def bind(self, ownership: Ownership) -> None:
        self._ownership = ownership

    @asynccontextmanager
    async def open(self, to: Destination, *, create: bool, source: str) -> AsyncIterator[Target]:
        """See `Targets.open`. Raises Conflict if the topic is missing and topics are not created automatically."""
        self._topics.begin_use(to.topic)
        try:
            yield await self._open(to, create=create, source=source)
        finally:
            self._topics.end_use(to.topic)

    async def _open(self, to: Destination, *, create: bool, source: str) -> Target:
        name = to.topic
        topic = self._topics.loaded(name)
        try:
            if topic is None:
                # First the owner, which knows its topics. A server of ZooKeeper that lags may not know a new one, but
                # it knows all that came before this broker became the owner.
                remote = None
                if self._ownership is not None:
                    remote = await self._ownership.locate(await self._ownership.divisions.find(name))
                if remote is not None:
                    return await self._open_remote(to, remote.http_url, create=create, source=source)
                if not create and not await self._topics.exists(name):
                    raise NoSuchTopic("no such topic", topic=name.short)
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
        return self.hosted.target(topic, source=source)

    async def _open_remote(self, to: Destination, url: str, *, create: bool, source: str) -> "RemoteTarget":
        if self.peers is None:
            raise NotOwner("another broker owns the topic", owner=url)
        target = RemoteTarget(to.topic, url, self.peers, self._ownership, source=source)
        await target.begin(to, create=create)
        if create:
            self._topics.on_subscription(to.topic, to.subscription)
        return target


class RemoteTarget:
    """`retries.targets.Target` over a topic that the broker at `url` owns."""

    def __init__(self, name: TopicName, url: str, peers: Peers, ownership: Ownership | None, *, source: str) -> None:
        self._name = name
        self._url = url
        self._peers = peers
        self._ownership = ownership
        self._source = source
        self._begun: Begun | None = None

    async def begin(self, to: Destination, *, create: bool) -> None:
        try:
            self._begun = await self._peers.begin_move(self._url, to, create=create, source=self._source)
        except NotOwner:
            self._forget_owner()
            raise

    @property
    def end(self) -> Position:
        assert self._begun is not None
        return self._begun.end

    async def publish(self, messages: Sequence[OutgoingMessage]) -> Results:
        assert self._begun is not None
        try:
            return await self._peers.publish_copies(
                self._url, self._name, messages, source=self._source, epoch=self._begun.epoch
            )
        except NotOwner as error:
            self._forget_owner()
            raise TryAgain(
                "messages cannot be moved, because the owner of the topic they are moved to is changing; retry",
                topic=self._name.short,
                owner=self._url,
            ) from error

    async def decided(self) -> None:
        """Return at once: `begin` has waited for the writes before."""

    async def scan(self, after: Position) -> AsyncIterator[tuple[Position, Identity]]:
        try:
            async for found in self._peers.scan(self._url, self._name, after):
                yield found
        except NotOwner as error:
            self._forget_owner()
            raise TryAgain(
                "whether messages were moved is not known, because the owner of their topic does not answer; retry",
                topic=self._name.short,
                owner=self._url,
            ) from error

    def _forget_owner(self) -> None:
        if self._ownership is not None:
            self._ownership.forget_remote(self._ownership.divisions.known(self._name))


class TopicTarget:
    """`retries.targets.Target` over an open topic."""

    def __init__(self, topic: Topic, writes: dict[TopicName, set[asyncio.Future[Results]]]) -> None:
        self._topic = topic
        self._writes = writes

    @property
    def end(self) -> Position:
        return self._topic.ledger.last_confirmed

    async def publish(self, messages: Sequence[OutgoingMessage]) -> Results:
        if not self._topic.is_open:
            raise TryAgain("the topic to which messages are moved was closed; retry", topic=self._topic.name.short)
        name = self._topic.name
        write = asyncio.ensure_future(
            self._topic.publish(messages, producer=None, batch=False, check=self._check_producers)
        )
        self._writes.setdefault(name, set()).add(write)
        write.add_done_callback(self._written)
        return await asyncio.shield(write)

    def _check_producers(self) -> None:
        """Raise ProducerBusy while a producer has the topic exclusively, as it is for a client that moves messages."""
        try:
            self._topic.hold.check(None, None)
        except ProducerBusy as error:
            raise ProducerBusy(
                "a producer has the topic to which messages are moved exclusively, or waits for it; they can be moved "
                "after it has released the topic",
                topic=self._topic.name.short,
                holder=self._topic.hold.holder,
            ) from error

    def _written(self, write: "asyncio.Future[Results]") -> None:
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
