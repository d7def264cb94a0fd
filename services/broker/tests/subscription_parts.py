"""The modules of one subscription over a topic in memory, composed as `Subscription` composes them."""

import asyncio
import zlib
from typing import Any

from bindery_broker.dispatch.item import Delivery, DispatchLimits
from bindery_broker.dispatch.read_ahead import ReadAhead
from bindery_broker.dispatch.sessions import Sessions
from bindery_broker.managed_ledger import ManagedLedger
from bindery_broker.subscriptions.acknowledging import Acknowledger
from bindery_broker.subscriptions.consumer import ClientWatch, ReceiveCall, ReceiveRequest
from bindery_broker.subscriptions.decoding import EntryDecoder
from bindery_broker.subscriptions.dispatch_loop import DispatchLoop
from bindery_broker.subscriptions.reading import MessageReader
from bindery_broker.subscriptions.redelivery import Redelivery
from bindery_broker.subscriptions.response_budget import ResponseBudget
from bindery_pulsar.message_codec import Message, OutgoingMessage, encode_batch, encode_message
from bindery_pulsar.message_id import EARLIEST, Position
from bindery_pulsar.pulsar_messages_pb2 import ZLIB, MessageMetadata
from managed_ledger_cluster import Cluster

PARTITION = -1


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
        self.loop = DispatchLoop(
            self.reader, self.sessions, limits=limits, read_ahead=ReadAhead(limits.ready_bytes_max), now=self.now
        )
        self.redelivery = Redelivery(self.loop, self.reader, now=self.now)
        self.acknowledger = Acknowledger(cursor, topic, self.loop, self.reader.batch_sizes, partition=PARTITION)
        self.loop.change_type("shared")
        topic.on_new_entries(self.loop.wake)

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
    ) -> ReceiveCall:
        request = ReceiveRequest(
            consumer=consumer,
            count_max=count_max,
            bytes_max=2**20,
            wait_s=wait_s,
            ack_timeout_s=ack_timeout_s,
            session_ttl_s=session_ttl_s,
        )
        session = self.sessions.begin_call(consumer, ttl_s=session_ttl_s, now=self.now())
        return ReceiveCall(
            request=request,
            session=session,
            deadline=self.now() + wait_s,
            client=client,
            charge=self.responses.charge("a"),
        )

    async def take(self, consumer: str = "c", **fields: Any) -> list[bytes]:
        return texts(await self.loop.take(self.call(consumer, **fields)))


def texts(deliveries: list[Delivery[Message]]) -> list[bytes]:
    return [delivery.message.payload for delivery in deliveries]


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
    metadata = MessageMetadata(
        producer_name="p", sequence_id=0, publish_time=1, compression=ZLIB, uncompressed_size=size
    ).SerializeToString()
    return len(metadata).to_bytes(4, "big") + metadata + zlib.compress(bytes(size))


def at(entry_id: int) -> Position:
    return Position(0, entry_id)
