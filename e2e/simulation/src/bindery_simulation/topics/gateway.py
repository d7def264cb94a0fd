"""Carry out requests of clients at one broker: no other module but `peers` calls its topics and subscriptions.

It does what the broker's HTTP port does, without HTTP: it locates the owner, opens the topic, calls it, and sorts
errors into outcomes. If the signatures of `Topic` or `Subscription` change, only this module changes.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from bindery_broker.broker import Broker
from bindery_broker.retries.copies import ORIGIN_MESSAGE_ID
from bindery_broker.retries.names import dead_letter_topic, retry_topic
from bindery_broker.retries.targets import Destination
from bindery_broker.subscriptions.consumer import ClientWatch, ReceiveRequest
from bindery_broker.subscriptions.moving import RetryTo
from bindery_broker.subscriptions.reading import messages_of
from bindery_broker.subscriptions.subscription import Subscription
from bindery_broker.topics.topic import Topic
from bindery_core.errors import BadRequest, BinderyError, Conflict, NoSuchTopic, NotThere, OutcomeUnknown, TryAgain
from bindery_pulsar.message_codec import OutgoingMessage, PackedEntry, publish_time_ms
from bindery_pulsar.message_id import EARLIEST, LATEST, MessageId, Position
from bindery_pulsar.topic_name import TopicName

from bindery_simulation.service.machine import WALL_CLOCK_START_MS
from bindery_simulation.topics.judging.history import (
    WHOLE_ENTRY,
    Acknowledge,
    Call,
    Copied,
    Delivered,
    Drain,
    Inspect,
    Key,
    Kind,
    Leave,
    Outcome,
    Produce,
    ReadCopies,
    Receive,
    Request,
    Retry,
    Return,
    Rules,
    Seek,
    Subscribe,
    Unsubscribe,
)

SUPPORTED: Final = tuple(Kind)
"""Types of subscriptions that this version of the broker has."""
CLOCKS_APART_MS: Final = 60
"""Maximum error of the clocks of brokers in ms. A delayed message may be early by this time."""
RULES: Final = Rules(durable_counts=True, early_s_max=CLOCKS_APART_MS / 1000)
"""What this version of the broker promises."""
BYTES_MAX: Final = 4 * 2**20
"""Maximum bytes of the messages of one call."""


RETRIES_MAX: Final = 16
"""Number of retries of a message before it goes to the dead-letter topic."""
CREATING: Final = (Produce, Subscribe)
"""Requests that create a missing topic."""
READ_ENTRIES_MAX: Final = 100
"""Maximum number of entries of one read of a retry topic."""


class Redirected(Exception):
    """Another broker owns the topic."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.url = url


@dataclass(frozen=True, slots=True)
class Settled:
    """The result of a request at the broker."""

    outcome: Outcome
    result: object = None
    error: str = ""


def outcome_of(error: BinderyError, request: Request) -> Outcome:
    """Return what an error says about the request.

    After a failed acknowledgement or seek, a later record may include the change (`ManagedCursor.ack_many`, `seek`).
    """
    if isinstance(error, BadRequest | NotThere):
        return Outcome.REFUSED
    may_be_carried_out = isinstance(request, Acknowledge | Seek) and not isinstance(request, Retry)
    if isinstance(error, TryAgain | Conflict) and not may_be_carried_out:
        return Outcome.REFUSED
    return Outcome.UNKNOWN


class Gateway:
    """The requests to one broker process. `on_opened(topic, incarnation)` is called when a topic is first used."""

    def __init__(self, broker: Broker, on_opened: Callable[[str, int], None]) -> None:
        self.broker = broker
        self._on_opened = on_opened
        self._incarnations: dict[Topic, int] = {}

    async def handle(self, call: Call, client: ClientWatch) -> Settled:
        """Carry out a request. Raises Redirected."""
        request = call.request
        name = _name(request)
        with self._use(name, request):
            try:
                await self._check_owner(name, request)
                with self._running(name):
                    topic = await self.broker.topic(name, create=isinstance(request, CREATING))
                    call.incarnation = self._incarnation(topic)
                    return Settled(Outcome.DONE, await self._carry_out(topic, request, client))
            except BinderyError as error:
                if isinstance(request, ReadCopies) and isinstance(error, NoSuchTopic):
                    return Settled(Outcome.DONE, ())
                return Settled(outcome_of(error, request), error=f"{type(error).__name__}: {error}")

    @contextlib.contextmanager
    def _use(self, name: TopicName, request: Request) -> Iterator[None]:
        """The block uses the topic, as each request of the HTTP port does. What only looks, for the judge, does not."""
        if isinstance(request, Inspect | Drain | ReadCopies):
            yield
            return
        self.broker.topics.begin_use(name)
        try:
            yield
        finally:
            self.broker.topics.end_use(name)

    @contextlib.contextmanager
    def _running(self, name: TopicName) -> Iterator[None]:
        """The block is an operation on the topic: its bundle is released after it."""
        self.broker.running.begin(name)
        try:
            yield
        finally:
            self.broker.running.end(name)

    async def _check_owner(self, name: TopicName, request: Request) -> None:
        owner = await self.broker.locate(name, create=isinstance(request, CREATING))
        if owner is not None:
            raise Redirected(owner.http_url)

    def _incarnation(self, topic: Topic) -> int:
        """Return a number of this opening of the topic, which is higher than those of earlier ones.

        An owner reads the topic's znode, and then writes it at the version that it has read. Hence a later owner has
        higher versions than those that an earlier owner has written. Topics are not deleted in these runs.
        """
        number = self._incarnations.get(topic)
        if number is None:
            number = self._incarnations[topic] = topic.ledger.metadata_version
            self._on_opened(topic.name.short, number)
        return number

    async def _carry_out(self, topic: Topic, request: Request, client: ClientWatch) -> object:
        if isinstance(request, Produce):
            return await self._produce(topic, request)
        if isinstance(request, ReadCopies):
            return await _read_copies(topic)
        name = request.subscription.name
        if isinstance(request, Subscribe):
            _, is_created = await topic.subscribe(name, initial=EARLIEST if request.earliest else LATEST)
            return is_created
        if isinstance(request, Unsubscribe):
            await topic.unsubscribe(name, force=True)
            return None
        subscription = topic.subscription(name)
        if isinstance(request, Receive):
            return await self._receive(subscription, request, client)
        if isinstance(request, Retry):
            return await self._retry(topic, subscription, request)
        if isinstance(request, Acknowledge):
            await _acknowledge(subscription, request)
            return None
        if isinstance(request, Return):
            returned = subscription.nack([_message_id(key) for key in request.keys], delay_s=request.delay_s)
            return tuple((one.ledger_id, one.entry_id, one.batch_index) for one in returned)
        if isinstance(request, Leave):
            return subscription.leave(request.consumer)
        if isinstance(request, Seek):
            return await _seek(subscription, request)
        if isinstance(request, Inspect):
            return _unacked(topic, subscription)
        assert isinstance(request, Drain)
        return subscription.cursor.backlog_entries

    async def _produce(self, topic: Topic, request: Produce) -> tuple[Key, ...]:
        messages = [
            OutgoingMessage(payload=one.text.encode(), key=one.key, deliver_at_ms=_wall_clock_ms(one.deliver_at_s))
            for one in request.messages
        ]
        await self.broker.topics.admission(topic).admit(messages, may_wait=not self.broker.draining)
        results = await topic.publish(messages, producer=None, batch=request.batch)
        keys: list[Key] = []
        for result in results:
            if isinstance(result, BinderyError):
                raise result
            keys.append((result.ledger_id, result.entry_id, result.batch_index))
        return tuple(keys)

    async def _receive(
        self, subscription: Subscription, request: Receive, client: ClientWatch
    ) -> tuple[Delivered, ...]:
        charge = self.broker.topics.responses.charge(request.consumer)
        wanted = ReceiveRequest(
            consumer=request.consumer,
            count_max=request.count_max,
            bytes_max=BYTES_MAX,
            wait_s=request.wait_s,
            ack_timeout_s=request.ack_timeout_s,
            session_ttl_s=request.session_ttl_s,
            request_id=request.request_id,
            redeliver=request.redeliver,
        )
        try:
            deliveries, _ = await subscription.receive(wanted, kind=request.kind.value, charge=charge, client=client)
        finally:
            charge.release()
        return tuple(
            Delivered((*one.position, message.batch_index), message.payload.decode(), one.redelivery_count)
            for one in deliveries
            for message in messages_of(one)
        )

    async def _retry(self, topic: Topic, subscription: Subscription, request: Retry) -> tuple[Key, ...]:
        name = subscription.name
        to = RetryTo(
            retry=Destination(retry_topic(topic.name, name), name),
            dead_letters=Destination(dead_letter_topic(topic.name, name), name),
            max_redeliver=0 if request.is_dead else RETRIES_MAX,
            delay_ms=round(request.delay_s * 1000),
        )
        charge = self.broker.topics.responses.charge("retry")
        try:
            result = await subscription.retry([_message_id(key) for key in request.keys], to, charge=charge)
        finally:
            charge.release()
        for _, error in result.failed:
            if result.moved:
                raise OutcomeUnknown("only a part was moved", cause=str(error))
            raise error
        return tuple(
            (one.message_id.ledger_id, one.message_id.entry_id, one.message_id.batch_index) for one in result.moved
        )


def _name(request: Request) -> TopicName:
    """Return the topic that a request is for."""
    name = TopicName.parse(request.topic if isinstance(request, Produce) else request.subscription.topic)
    if isinstance(request, ReadCopies):
        derived = dead_letter_topic if request.is_dead else retry_topic
        name = derived(name, request.subscription.name)
    return name


async def _read_copies(topic: Topic) -> tuple[Copied, ...]:
    """Read a retry topic, or a dead-letter topic, from its first entry on."""
    ledger = topic.ledger
    found: list[Copied] = []
    position = ledger.first_position
    while entries := await ledger.read(position, entries_max=READ_ENTRIES_MAX, size_max=BYTES_MAX):
        for at, payload in entries:
            stored_at_s = (publish_time_ms(payload) - WALL_CLOCK_START_MS) / 1000
            for message in PackedEntry(payload).decode():
                text = message.payload.decode()
                found.append(Copied(_origin(message.properties[ORIGIN_MESSAGE_ID]), text, stored_at_s))
            position = ledger.next_position(at)
    return tuple(found)


def _origin(text: str) -> Key:
    """Return the key of a message from its id as a property: ledger, entry, partition, and index in the batch."""
    found = re.fullmatch(r"(\d+):(\d+):-1(?::(\d+))?", text)
    assert found is not None, text
    return int(found[1]), int(found[2]), WHOLE_ENTRY if found[3] is None else int(found[3])


async def _acknowledge(subscription: Subscription, request: Acknowledge) -> None:
    if request.cumulative:
        await subscription.ack_cumulative(_message_id(request.keys[0]))
    else:
        await subscription.ack([_message_id(key) for key in request.keys])


def _unacked(topic: Topic, subscription: Subscription) -> tuple[Key, ...]:
    cursor, ledger = subscription.cursor, topic.ledger
    found: list[Key] = []
    position = cursor.next_unacked(cursor.mark_delete)
    while ledger.contains(position):
        found.append((position.ledger_id, position.entry_id, WHOLE_ENTRY))
        position = cursor.next_unacked(ledger.next_position(position))
    return tuple(found)


async def _seek(subscription: Subscription, request: Seek) -> tuple[int, int]:
    target: MessageId | Position = EARLIEST if request.earliest else LATEST
    if request.to is not None:
        target = _message_id(request.to)
    position = await subscription.seek(target)
    return position.ledger_id, position.entry_id


def _wall_clock_ms(time_s: float | None) -> int | None:
    """Return a time of the simulation as ms since 1970, not earlier; None: none."""
    return None if time_s is None else WALL_CLOCK_START_MS + math.ceil(time_s * 1000)


def _message_id(key: Key) -> MessageId:
    return MessageId(key[0], key[1], key[2], -1)
