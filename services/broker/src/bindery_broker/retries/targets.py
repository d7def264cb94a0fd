"""Where a `Mover` moves messages to: an interface, so that the mover knows no topics and no other brokers.

A mover opens a target before it moves messages, and again before it searches the target for copies whose fate it does
not know. So each `open` ends what the same source began before: no copy is stored by it any more.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol

from bindery_core.errors import BinderyError
from bindery_pulsar.message_codec import OutgoingMessage
from bindery_pulsar.message_id import MessageId, Position
from bindery_pulsar.topic_name import TopicName

from bindery_broker.retries.copies import Identity


class Destination(NamedTuple):
    """A topic that receives copies, and its subscription that keeps them."""

    topic: TopicName
    subscription: str


class Target(Protocol):
    """A topic that is open here, or in the broker that owns it."""

    @property
    def end(self) -> Position:
        """The last entry; what is stored later has a higher position."""
        ...

    async def publish(self, messages: Sequence[OutgoingMessage]) -> list[MessageId | BinderyError]:
        """Store each message as an entry of its own, in order. Errors as `Topic.publish`.

        No check of the caller precedes the write by more than one turn of the event loop.
        """
        ...

    async def decided(self) -> None:
        """Return once each `publish` that began before is either stored, or will never be stored.

        Raises TryAgain if that is not known in time.
        """
        ...

    def scan(self, after: Position) -> AsyncIterator[tuple[Position, Identity]]:
        """Yield position and identity of the entries after a position that are no batches, up to the present end."""
        ...


class Targets(Protocol):
    def open(self, to: Destination, *, create: bool, source: str) -> AbstractAsyncContextManager[Target]:
        """Open the topic, and keep it open during the context.

        `create`: create the topic and the subscription, from its first message on, if they are missing. Otherwise
        raises NoSuchTopic. `source`: the subscription whose messages are moved; what it began with an earlier `open`,
        in this process or another one, stores nothing from now on unless it has begun to write. Raises TryAgain if
        the owner of the topic does not answer, or is changing.
        """
        ...
