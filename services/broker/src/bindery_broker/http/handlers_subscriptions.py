"""Consuming: receive, stream, ack, nack, seek, and what can be asked about a subscription."""

import asyncio
from collections.abc import Sequence

import msgspec
from bindery_core.errors import BadRequest, BinderyError
from bindery_kit.problem import problem_of
from msgspec import UNSET

from bindery_broker.broker import Broker
from bindery_broker.dispatch.item import Delivery
from bindery_broker.errors import NotSupported
from bindery_broker.http.exchange import Exchange, Reply, json_reply
from bindery_broker.http.message_view import parse_ids, parse_place, view
from bindery_broker.http.produce_request import NDJSON, split_tags
from bindery_broker.http.schemas import (
    AckBody,
    Acknowledged,
    Created,
    Deleted,
    Explanation,
    ForceQuery,
    MessageOut,
    NackBody,
    ReceiveBody,
    Received,
    Returned,
    RoutingQuery,
    SeekBody,
    Sought,
    StreamQuery,
    SubscribeBody,
    SubscriptionList,
)
from bindery_broker.http.subscription_view import explain, info
from bindery_broker.message_codec import Message
from bindery_broker.message_id import EARLIEST, LATEST, MessageId
from bindery_broker.subscription import ReceiveRequest, Subscription, SubscriptionType
from bindery_broker.topic import Topic

STREAM_COUNT_MAX = 100
STREAM_PING_S = 15.0
_line_encoder = msgspec.json.Encoder()


async def receive(broker: Broker, exchange: Exchange) -> Reply:
    exchange.query(RoutingQuery)
    body = await exchange.json_body(ReceiveBody, size_max=broker.settings.control_bytes_max)
    kind = _supported(body.type)
    tags = split_tags(body.tags) if isinstance(body.tags, str) else []
    topic = await broker.topic(exchange.name, create=True)
    properties = body.subscription_properties if isinstance(body.subscription_properties, dict) else {}
    subscription, _ = await topic.subscribe(
        exchange.params["subscription"],
        initial=EARLIEST if body.initial == "earliest" else LATEST,
        tags=tags,
        properties=properties,
    )
    request = ReceiveRequest(
        consumer=body.consumer,
        count_max=body.max,
        bytes_max=body.max_bytes,
        wait_s=0.0 if broker.draining else min(body.wait_ms, broker.settings.receive_wait_ms_max) / 1000,
        ack_timeout_s=body.ack_timeout_ms / 1000,
        session_ttl_s=body.session_ttl_ms / 1000,
        request_id=body.request_id if isinstance(body.request_id, str) else None,
        redeliver=body.redeliver,
    )
    deliveries = await _wait_for(subscription, request, kind, exchange)
    messages = _views(topic, deliveries)
    if exchange.accepts(NDJSON.encode()):
        return Reply(200, _line_encoder.encode_lines(messages), NDJSON.encode())
    return json_reply(Received(messages=messages))


async def stream(broker: Broker, exchange: Exchange) -> None:
    """Server-sent events: `event: message` with the JSON of one message each, comments while there is nothing."""
    query = exchange.query(StreamQuery)
    kind = _supported(query.type)
    tags = split_tags(query.tags) if isinstance(query.tags, str) else []
    topic = await broker.topic(exchange.name, create=True)
    subscription, _ = await topic.subscribe(
        exchange.params["subscription"], initial=EARLIEST if query.initial == "earliest" else LATEST, tags=tags
    )
    subscription.join(query.consumer, kind)
    await exchange.body(size_max=0)
    await exchange.start_stream(200, [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")])
    watcher = asyncio.create_task(exchange.watch_connection(subscription.wake_all))
    request = ReceiveRequest(
        consumer=query.consumer, count_max=STREAM_COUNT_MAX, bytes_max=4 * 2**20, wait_s=STREAM_PING_S,
        ack_timeout_s=query.ack_timeout_ms / 1000, session_ttl_s=query.session_ttl_ms / 1000,
    )  # fmt: skip
    try:
        await exchange.send_chunk(b": connected\n\n", more=True)
        while not (exchange.gone or broker.draining):
            deliveries, _ = await subscription.receive(request, kind=kind, gone=lambda: exchange.gone)
            events = b"".join(_event(message) for message in _views(topic, deliveries))
            if not exchange.gone:
                await exchange.send_chunk(events or b": waiting\n\n", more=True)
    except BinderyError as error:
        await exchange.send_chunk(b"event: error\ndata: " + bytes(problem_of(error).body).strip() + b"\n\n", more=True)
    finally:
        watcher.cancel()
    if not exchange.gone:
        await exchange.send_chunk(b"", more=False)


async def ack(broker: Broker, exchange: Exchange) -> Reply:
    exchange.query(RoutingQuery)
    body = await exchange.json_body(AckBody, size_max=broker.settings.control_bytes_max)
    if (body.message_ids is UNSET) == (body.cumulative is UNSET):
        raise BadRequest("want exactly one of message_ids and cumulative")
    consumer = body.consumer if isinstance(body.consumer, str) else None
    if isinstance(body.cumulative, str):
        last = MessageId.parse(body.cumulative)
        subscription = await _subscription(broker, exchange)
        await subscription.ack_cumulative(last, consumer=consumer)
        return json_reply(Acknowledged(acknowledged=1))
    assert isinstance(body.message_ids, list)
    ids = parse_ids(body.message_ids)
    subscription = await _subscription(broker, exchange)
    await subscription.ack(ids, consumer=consumer)
    return json_reply(Acknowledged(acknowledged=len(ids)))


async def nack(broker: Broker, exchange: Exchange) -> Reply:
    exchange.query(RoutingQuery)
    body = await exchange.json_body(NackBody, size_max=broker.settings.control_bytes_max)
    ids = parse_ids(body.message_ids)
    topic = await broker.topic(exchange.name)
    subscription = topic.subscription(exchange.params["subscription"])
    consumer = body.consumer if isinstance(body.consumer, str) else None
    returned = subscription.nack(ids, delay_s=body.delay_ms / 1000, consumer=consumer)
    return json_reply(Returned(returned=[str(MessageId(*key, topic.partition)) for key in returned]))


async def seek(broker: Broker, exchange: Exchange) -> Reply:
    exchange.query(RoutingQuery)
    body = await exchange.json_body(SeekBody, size_max=broker.settings.control_bytes_max)
    if (body.message_id is UNSET) == (body.timestamp is UNSET):
        raise BadRequest("want exactly one of message_id and timestamp")
    if isinstance(body.timestamp, int):
        subscription = await _subscription(broker, exchange)
        following = await subscription.seek(body.timestamp)
    else:
        assert isinstance(body.message_id, str)
        place = parse_place(body.message_id)
        subscription = await _subscription(broker, exchange)
        following = await subscription.seek(place)
    return json_reply(Sought(next=str(following)))


async def subscribe(broker: Broker, exchange: Exchange) -> Reply:
    exchange.query(RoutingQuery)
    body = await exchange.json_body(SubscribeBody, size_max=broker.settings.control_bytes_max)
    tags = split_tags(body.tags) if isinstance(body.tags, str) else []
    properties = body.subscription_properties if isinstance(body.subscription_properties, dict) else {}
    topic = await broker.topic(exchange.name, create=True)
    name = exchange.params["subscription"]
    _, created = await topic.subscribe(
        name, initial=EARLIEST if body.initial == "earliest" else LATEST, tags=tags, properties=properties
    )
    return json_reply(Created(topic=topic.name.short, created=created), status=201 if created else 200)


async def unsubscribe(broker: Broker, exchange: Exchange) -> Reply:
    query = exchange.query(ForceQuery)
    topic = await broker.topic(exchange.name)
    name = exchange.params["subscription"]
    await topic.unsubscribe(name, force=query.force)
    return json_reply(Deleted(deleted=name))


async def leave(broker: Broker, exchange: Exchange) -> Reply:
    exchange.query(RoutingQuery)
    subscription = await _subscription(broker, exchange)
    consumer = exchange.params["consumer"]
    subscription.leave(consumer)
    return json_reply(Deleted(deleted=consumer))


async def list_subscriptions(broker: Broker, exchange: Exchange) -> Reply:
    exchange.query(RoutingQuery)
    topic = await broker.topic(exchange.name)
    found = [info(subscription, now=broker.now()) for _, subscription in sorted(topic.subscriptions.items())]
    return json_reply(SubscriptionList(subscriptions=found))


async def explain_subscription(broker: Broker, exchange: Exchange) -> Reply:
    exchange.query(RoutingQuery)
    subscription = await _subscription(broker, exchange)
    answer: Explanation = explain(subscription, now=broker.now())
    return json_reply(answer)


async def _subscription(broker: Broker, exchange: Exchange) -> Subscription:
    topic = await broker.topic(exchange.name)
    return topic.subscription(exchange.params["subscription"])


async def _wait_for(
    subscription: Subscription, request: ReceiveRequest, kind: SubscriptionType, exchange: Exchange
) -> list[Delivery[Message]]:
    """Receive; give up when the client goes away, so that nothing is leased to nobody."""
    if request.wait_s == 0:
        return (await subscription.receive(request, kind=kind))[0]
    watcher = asyncio.create_task(exchange.watch_connection(subscription.wake_all))
    try:
        return (await subscription.receive(request, kind=kind, gone=lambda: exchange.gone))[0]
    finally:
        watcher.cancel()


def _supported(kind: str) -> SubscriptionType:
    if kind == "shared":
        return "shared"
    if kind == "exclusive":
        return "exclusive"
    raise NotSupported(f"{kind} subscriptions are not supported yet: use shared or exclusive", type=kind)


def _views(topic: Topic, deliveries: Sequence[Delivery[Message]]) -> list[MessageOut]:
    partition = topic.partition
    return [
        view(
            delivery.message,
            message_id=f"{delivery.key[0]}:{delivery.key[1]}:{partition}:{delivery.key[2]}",
            lease=delivery.lease,
            redelivery_count=delivery.redelivery_count,
        )
        for delivery in deliveries
    ]


def _event(message: MessageOut) -> bytes:
    return b"event: message\nid: %s\ndata: %s\n\n" % (message.message_id.encode(), _line_encoder.encode(message))
