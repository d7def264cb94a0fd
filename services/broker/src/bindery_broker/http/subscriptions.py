"""Consuming: receive, stream, ack, nack, seek, and what can be asked about a subscription."""

import asyncio
from collections.abc import Sequence
from typing import Annotated

import msgspec
from bindery_core.errors import BadRequest, BinderyError
from bindery_kit.http.problem import problem_of
from bindery_pulsar.message_codec import Message
from bindery_pulsar.message_id import EARLIEST, LATEST, MessageId
from fastapi import APIRouter, Query
from fastapi import Response as Status
from msgspec import UNSET
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bindery_broker.dispatch.item import Delivery
from bindery_broker.errors import NotSupported
from bindery_broker.http import openapi, paths
from bindery_broker.http.exchange import Exchange, Reply, json_reply
from bindery_broker.http.message_view import parse_ids, parse_place, view
from bindery_broker.http.models import (
    Created,
    Deleted,
    Explanation,
    ForceQuery,
    RoutingQuery,
    SeekBody,
    Sought,
    SubscribeBody,
    SubscriptionList,
)
from bindery_broker.http.produce_request import NDJSON, split_tags
from bindery_broker.http.route import JsonLine, OwnedRoute, hot
from bindery_broker.http.schemas import (
    AckBody,
    Acknowledged,
    MessageOut,
    NackBody,
    ReceiveBody,
    Received,
    Returned,
    StreamQuery,
)
from bindery_broker.http.schemas import RoutingQuery as HotRoutingQuery
from bindery_broker.http.subscription_view import explain, info
from bindery_broker.subscriptions.subscription import ReceiveRequest, Subscription, SubscriptionType
from bindery_broker.topics.topic import Topic

STREAM_COUNT_MAX = 100
STREAM_PING_S = 15.0
STRUCTS = (ReceiveBody, Received, AckBody, Acknowledged, NackBody, Returned)
router = APIRouter(route_class=OwnedRoute, default_response_class=JsonLine, tags=["subscriptions"])
Routing = Annotated[RoutingQuery, Query()]
_line_encoder = msgspec.json.Encoder()
_ERRORS = (*openapi.OF_TOPICS, 409)
_DONE = openapi.TITLES[200]


class EventStream(Response):
    """Server-sent events until the client or the broker goes away."""

    media_type = "text/event-stream"

    def __init__(self, exchange: Exchange, topic: Topic, subscription: Subscription, query: StreamQuery) -> None:
        super().__init__()
        self.raw_headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        self._exchange, self._topic, self._subscription, self._query = exchange, topic, subscription, query

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        topics, name = self._exchange.broker.topics, self._topic.name
        topics.begin_use(name)
        try:
            await self._stream(send)
        finally:
            topics.end_use(name)

    async def _stream(self, send: Send) -> None:
        exchange, subscription, query = self._exchange, self._subscription, self._query

        async def push(events: bytes) -> None:
            await send({"type": "http.response.body", "body": events, "more_body": True})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        watcher = asyncio.create_task(exchange.watch_connection(subscription.wake_all))
        request = ReceiveRequest(
            consumer=query.consumer, count_max=STREAM_COUNT_MAX, bytes_max=4 * 2**20, wait_s=STREAM_PING_S,
            ack_timeout_s=query.ack_timeout_ms / 1000, session_ttl_s=query.session_ttl_ms / 1000,
        )  # fmt: skip
        kind = _supported(query.type)
        try:
            await push(b": connected\n\n")
            while not (exchange.gone or exchange.broker.draining):
                deliveries, _ = await subscription.receive(request, kind=kind, gone=lambda: exchange.gone)
                events = b"".join(_event(message) for message in _views(self._topic, deliveries))
                if not exchange.gone:
                    await push(events or b": waiting\n\n")
        except BinderyError as error:
            await push(b"event: error\ndata: " + bytes(problem_of(error).body).strip() + b"\n\n")
        finally:
            watcher.cancel()
        if not exchange.gone:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


@hot(
    router,
    "POST",
    paths.SUBSCRIPTION + "/receive",
    operation_id="receive",
    summary="Lease messages to a consumer, waiting for them if need be; makes the subscription",
    query=HotRoutingQuery,
    body=ReceiveBody,
    answers={200: Received},
    media_types=("application/json", NDJSON),
    errors=(*_ERRORS, *openapi.BODY_ERRORS, 422),
)
async def receive(exchange: Exchange) -> Response:
    broker = exchange.broker
    exchange.query(HotRoutingQuery)
    body = await exchange.json_body(ReceiveBody)
    kind = _supported(body.type)
    tags = split_tags(body.tags) if isinstance(body.tags, str) else []
    topic = await broker.topic(exchange.topic, create=True)
    properties = body.subscription_properties if isinstance(body.subscription_properties, dict) else {}
    subscription, _ = await topic.subscribe(
        exchange.path_params["subscription"],
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


@hot(
    router,
    "GET",
    paths.SUBSCRIPTION + "/stream",
    operation_id="stream",
    summary="The same as server-sent events, for shells and browsers; acknowledge with POST .../ack",
    query=StreamQuery,
    answers={200: None},
    media_types=(str(EventStream.media_type),),
    response_class=EventStream,
    errors=(*_ERRORS, 422, 429),
)
async def stream(exchange: Exchange) -> Response:
    """Server-sent events: `event: message` with the JSON of one message each, comments while there is nothing."""
    query = exchange.query(StreamQuery)
    kind = _supported(query.type)
    tags = split_tags(query.tags) if isinstance(query.tags, str) else []
    topic = await exchange.broker.topic(exchange.topic, create=True)
    subscription, _ = await topic.subscribe(
        exchange.path_params["subscription"], initial=EARLIEST if query.initial == "earliest" else LATEST, tags=tags
    )
    subscription.join(query.consumer, kind)
    await exchange.read_body(size_max=0)
    return EventStream(exchange, topic, subscription, query)


@hot(
    router,
    "POST",
    paths.SUBSCRIPTION + "/ack",
    operation_id="ack",
    summary="Acknowledge messages; durable once answered",
    query=HotRoutingQuery,
    body=AckBody,
    answers={200: Acknowledged},
    errors=(*_ERRORS, *openapi.BODY_ERRORS, 422),
)
async def ack(exchange: Exchange) -> Response:
    exchange.query(HotRoutingQuery)
    body = await exchange.json_body(AckBody)
    if (body.message_ids is UNSET) == (body.cumulative is UNSET):
        raise BadRequest("want exactly one of message_ids and cumulative")
    consumer = body.consumer if isinstance(body.consumer, str) else None
    if isinstance(body.cumulative, str):
        last = MessageId.parse(body.cumulative)
        subscription = await _subscription(exchange)
        await subscription.ack_cumulative(last, consumer=consumer)
        return json_reply(Acknowledged(acknowledged=1))
    assert isinstance(body.message_ids, list)
    ids = parse_ids(body.message_ids)
    subscription = await _subscription(exchange)
    await subscription.ack(ids, consumer=consumer)
    return json_reply(Acknowledged(acknowledged=len(ids)))


@hot(
    router,
    "POST",
    paths.SUBSCRIPTION + "/nack",
    operation_id="nack",
    summary="Return messages for redelivery",
    query=HotRoutingQuery,
    body=NackBody,
    answers={200: Returned},
    errors=(*_ERRORS, *openapi.BODY_ERRORS),
)
async def nack(exchange: Exchange) -> Response:
    exchange.query(HotRoutingQuery)
    body = await exchange.json_body(NackBody)
    ids = parse_ids(body.message_ids)
    topic = await exchange.broker.topic(exchange.topic)
    subscription = topic.subscription(exchange.path_params["subscription"])
    consumer = body.consumer if isinstance(body.consumer, str) else None
    returned = subscription.nack(ids, delay_s=body.delay_ms / 1000, consumer=consumer)
    return json_reply(Returned(returned=[str(MessageId(*key, topic.partition)) for key in returned]))


@router.get(
    paths.TOPIC + "/subscriptions",
    operation_id="listSubscriptions",
    summary="The topic's subscriptions",
    response_model_exclude_unset=True,
    response_description=_DONE,
    responses=openapi.problems(*_ERRORS),
)
async def list_subscriptions(exchange: Exchange, name: paths.Topic, _query: Routing) -> SubscriptionList:
    topic = await exchange.broker.topic(name)
    now = exchange.broker.now()
    return SubscriptionList(
        subscriptions=[info(subscription, now=now) for _, subscription in sorted(topic.subscriptions.items())]
    )


@router.put(
    paths.SUBSCRIPTION,
    operation_id="subscribe",
    summary="Make a subscription without consuming; repeating is harmless",
    response_description=_DONE,
    responses={
        201: {"model": Created, "description": openapi.TITLES[201]},
        **openapi.problems(*_ERRORS, *openapi.BODY_ERRORS),
    },
)
async def subscribe(
    exchange: Exchange,
    name: paths.Topic,
    subscription: paths.SubscriptionName,
    _query: Routing,
    body: SubscribeBody,
    status: Status,
) -> Created:
    tags = split_tags(body.tags) if body.tags is not None else []
    topic = await exchange.broker.topic(name, create=True)
    _, created = await topic.subscribe(
        subscription,
        initial=EARLIEST if body.initial == "earliest" else LATEST,
        tags=tags,
        properties=body.subscription_properties or {},
    )
    status.status_code = 201 if created else 200
    return Created(topic=topic.name.short, created=created)


@router.delete(
    paths.SUBSCRIPTION,
    operation_id="unsubscribe",
    summary="Delete a subscription",
    response_description=_DONE,
    responses=openapi.problems(*_ERRORS),
)
async def unsubscribe(
    exchange: Exchange,
    name: paths.Topic,
    subscription: paths.SubscriptionName,
    query: Annotated[ForceQuery, Query()],
) -> Deleted:
    topic = await exchange.broker.topic(name)
    await topic.unsubscribe(subscription, force=query.force)
    return Deleted(deleted=subscription)


@router.post(
    paths.SUBSCRIPTION + "/seek",
    operation_id="seek",
    summary="Go to a message or a time; all acknowledgements are forgotten",
    response_description=_DONE,
    responses=openapi.problems(*_ERRORS, *openapi.BODY_ERRORS, 422),
)
async def seek(
    exchange: Exchange, _name: paths.Topic, _subscription_name: paths.Subscription, _query: Routing, body: SeekBody
) -> Sought:
    if (body.message_id is None) == (body.timestamp is None):
        raise BadRequest("want exactly one of message_id and timestamp")
    if body.timestamp is not None:
        following = await (await _subscription(exchange)).seek(body.timestamp)
    else:
        assert body.message_id is not None
        place = parse_place(body.message_id)
        following = await (await _subscription(exchange)).seek(place)
    return Sought(next=str(following))


@router.get(
    paths.SUBSCRIPTION + "/explain",
    operation_id="explainSubscription",
    summary="Who holds what, and what keeps messages back",
    response_model_exclude_unset=True,
    response_description=_DONE,
    responses=openapi.problems(*_ERRORS),
)
async def explain_subscription(
    exchange: Exchange, _name: paths.Topic, _subscription_name: paths.Subscription, _query: Routing
) -> Explanation:
    return explain(await _subscription(exchange), now=exchange.broker.now())


@router.delete(
    paths.SUBSCRIPTION + "/consumers/{consumer:segment}",
    operation_id="leave",
    summary="End a consumer's session: what it holds goes to others at once",
    response_description=_DONE,
    responses=openapi.problems(*_ERRORS),
)
async def leave(
    exchange: Exchange,
    _name: paths.Topic,
    _subscription_name: paths.Subscription,
    consumer: paths.Consumer,
    _query: Routing,
) -> Deleted:
    (await _subscription(exchange)).leave(consumer)
    return Deleted(deleted=consumer)


async def _subscription(exchange: Exchange) -> Subscription:
    topic = await exchange.broker.topic(exchange.topic)
    return topic.subscription(exchange.path_params["subscription"])


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
