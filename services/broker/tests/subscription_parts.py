"""The modules of one subscription over a topic in memory, composed as `Subscription` composes them."""

import asyncio
import functools
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from bindery_broker.dispatch import dispatcher as dispatching
from bindery_broker.dispatch.consumers import Consumer
from bindery_broker.dispatch.failover import pick_active
from bindery_broker.dispatch.item import NOT_IN_BATCH, DispatchLimits, MessageRef, indexes_of
from bindery_broker.dispatch.key_ranges import KeyRange
from bindery_broker.dispatch.read_ahead import ReadAhead
from bindery_broker.dispatch.sessions import Sessions
from bindery_broker.managed_ledger import ManagedLedger, Redelivered
from bindery_broker.retries.targets import Destination
from bindery_broker.subscriptions.acknowledging import Acknowledger
from bindery_broker.subscriptions.consumer import ClientWatch, ReceiveCall, ReceiveRequest
from bindery_broker.subscriptions.decoding import EntryDecoder
from bindery_broker.subscriptions.dispatch_loop import Deliveries, DispatchLoop
from bindery_broker.subscriptions.reading import MessageReader, messages_of
from bindery_broker.subscriptions.redelivery import Redelivery
from bindery_broker.subscriptions.response_budget import ResponseBudget
from bindery_core.errors import Conflict
from bindery_pulsar.message_codec import OutgoingMessage, encode_batch, encode_message
from bindery_pulsar.message_id import EARLIEST, MessageId, Position
from bindery_pulsar.pulsar_messages_pb2 import ZLIB, MessageMetadata, SingleMessageMetadata
from managed_ledger_cluster import Cluster

PARTITION = -1
MessageKey = tuple[int, int, int]
"""Ledger, entry and batch index of a message."""


class Parts:
    """The modules of one subscription. Times are those of the running event loop."""

    def __init__(self, topic: ManagedLedger, cursor: Any, *, limits: DispatchLimits | None = None) -> None:
        self.topic = topic
        self.cursor = cursor
        self.now = asyncio.get_running_loop().time
        self.sessions = Sessions()
        self.decoder = EntryDecoder()
        self.reader = MessageReader(cursor, topic, partition=PARTITION, decoder=self.decoder)
        self.responses = ResponseBudget(64 * 2**20, now=self.now)
        limits = limits or DispatchLimits()
        self.read_ahead = ReadAhead(limits.ready_bytes_max)
        self.loop = DispatchLoop(
            self.reader,
            self.sessions,
            limits=limits,
            read_ahead=self.read_ahead,
            now=self.now,
            clock=lambda: round(self.now() * 1000),
            counts_of=cursor.counts_of,
            record=self._record,
            pick_active=functools.partial(pick_active, partition=PARTITION, topic="persistent://public/default/t"),
        )
        self.redelivery = Redelivery(self.loop, self.reader, now=self.now)
        self.acknowledger = Acknowledger(cursor, topic, self.loop, self.reader, partition=PARTITION)
        self.loop.change_type("shared")
        topic.on_new_entries(self.loop.wake)

    async def _record(self, changes: Sequence[dispatching.Redelivered]) -> None:
        await self.cursor.record_redeliveries([Redelivered(*change) for change in changes])

    @classmethod
    async def create(cls, cluster: Cluster, *entries: bytes, limits: DispatchLimits | None = None) -> "Parts":
        topic = await cluster.open()
        if entries:
            await topic.add_many(entries)
        return cls(topic, await topic.open_cursor("s", start=EARLIEST), limits=limits)

    def call(
        self,
        consumer: str = "c",
        *,
        count_max: int = 100,
        wait_s: float = 0.0,
        ack_timeout_s: float = 30.0,
        session_ttl_s: float = 3600.0,
        client: ClientWatch | None = None,
        priority: int = 0,
        key_ranges: tuple[KeyRange, ...] = (),
    ) -> ReceiveCall:
        """Begin a call. It stays open until `end`."""
        request = ReceiveRequest(
            consumer=consumer,
            count_max=count_max,
            bytes_max=2**20,
            wait_s=wait_s,
            ack_timeout_s=ack_timeout_s,
            session_ttl_s=session_ttl_s,
            priority=priority,
            key_ranges=key_ranges,
        )
        session = self.sessions.begin_call(consumer, ttl_s=session_ttl_s, now=self.now())
        session.consumer.priority = priority
        session.consumer.key_ranges = key_ranges
        return ReceiveCall(
            request=request,
            session=session,
            deadline=self.now() + wait_s,
            client=client,
            charge=self.responses.charge("a"),
        )

    async def take(self, consumer: str = "c", **fields: Any) -> list[bytes]:
        return texts(await self.loop.take(self.call(consumer, **fields)))

    async def ack(self, *ids: MessageId) -> None:
        await self.acknowledger.ack(*await self.acknowledger.resolve(ids))

    def release(self, consumer: str) -> bool:
        return self.redelivery.release(self.consumer(consumer))

    def nack(self, *ids: MessageId, consumer: str | None = None, delay_s: float = 0) -> list[MessageId]:
        holder = None if consumer is None else self.consumer(consumer)
        return self.redelivery.nack(ids, delay_s=delay_s, consumer=holder)

    def consumer(self, name: str) -> Consumer:
        session = self.sessions.get(name)
        assert session is not None
        return session.consumer

    def end(self, call: ReceiveCall) -> None:
        """The answer to the call was sent."""
        call.charge.release()
        self.sessions.end_call(call.session, now=self.now())


class NoTargets:
    """Topics to which messages are moved: there are none."""

    def open(self, to: Destination, *, create: bool) -> Any:
        raise Conflict("no topics in this test", topic=to.topic.short)


def texts(deliveries: Deliveries) -> list[bytes]:
    return [message.payload for delivery in deliveries for message in messages_of(delivery)]


def keys_of(deliveries: Deliveries) -> list[MessageKey]:
    return [(*delivery.position, message.batch_index) for delivery in deliveries for message in messages_of(delivery)]


def one(position: Position, index: int = NOT_IN_BATCH) -> MessageRef:
    """Return the reference to one message."""
    return MessageRef(position, 1 << max(index, 0))


def expand(refs: Iterable[MessageRef]) -> list[tuple[int, int]]:
    """Return entry ids and batch indexes; 0 for an entry that is no batch."""
    return [(position.entry_id, index) for position, bits in refs for index in indexes_of(bits)]


def single(payload: bytes, *tags: str) -> bytes:
    """Return an entry with one message that is not a batch."""
    message = OutgoingMessage(payload=payload, properties=dict.fromkeys(tags, "TAGS"))
    return encode_message(message, producer_name="p", publish_time_ms=1, sequence_id=0)


def batch(*payloads: bytes) -> bytes:
    """Return an entry with a batch of messages."""
    messages = [OutgoingMessage(payload=payload) for payload in payloads]
    return encode_batch(messages, producer_name="p", publish_time_ms=1, sequence_ids=range(len(messages)))


def zipped(size: int) -> bytes:
    """Return an entry that decompresses to `size` bytes."""
    return _zipped(bytes(size), MessageMetadata())


def zipped_batch(count: int, *, size: int = 0) -> bytes:
    """Return a compressed batch of `count` messages, the first of `size` bytes and the others empty."""
    head, empty = (SingleMessageMetadata(payload_size=n).SerializeToString() for n in (size, 0))
    first = len(head).to_bytes(4, "big") + head + bytes(size)
    return _zipped(
        first + (len(empty).to_bytes(4, "big") + empty) * (count - 1), MessageMetadata(num_messages_in_batch=count)
    )


def _zipped(payload: bytes, metadata: MessageMetadata) -> bytes:
    metadata.producer_name = "p"
    metadata.sequence_id, metadata.publish_time = 0, 1
    metadata.compression, metadata.uncompressed_size = ZLIB, len(payload)
    head = metadata.SerializeToString()
    return len(head).to_bytes(4, "big") + head + zlib.compress(payload)


def at(entry_id: int) -> Position:
    return Position(0, entry_id)
