"""Consuming: receive, stream, ack and nack."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Protocol

from bindery_core.errors import BadRequest, BinderyError, TopicFenced, Unauthorized
from bindery_kit.http.problem import problem_of
from bindery_pulsar.message_id import EARLIEST, LATEST, MessageId
from bindery_pulsar.topic_name import TopicName, validate_subscription
from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bindery_broker.access.decision import Need
from bindery_broker.dispatch.key_ranges import KeyRange, checked_ranges
from bindery_broker.dispatch.key_shared import KeySharedMode
from bindery_broker.errors import NotOwner, ResponsesFull, RetryTopicAway
from bindery_broker.http import openapi
from bindery_broker.http.authorization import check_derived, check_topic, may_use_retries
from bindery_broker.http.exchange import MOVED_EVENT, PARTITION_HEADER, Exchange, json_reply
from bindery_broker.http.route import JsonLine, OwnedRoute, hot
from bindery_broker.http.v1 import paths
from bindery_broker.http.v1.message_pieces import MessageSource, event_pieces, messages_reply
from bindery_broker.http.v1.message_view import parse_ids
from bindery_broker.http.v1.produce_request import NDJSON, split_tags
from bindery_broker.http.v1.schemas import (
    AckBody,
    Acknowledged,
    Blocked,
    DeadLetterPolicy,
    KeyShared,
    MessageError,
    MovedOut,
    NackBody,
    NotMoved,
    ReceiveBody,
    Received,
    ReceiveQuery,
    Retried,
    RetryBody,
    Returned,
    RoutingQuery,
    StreamQuery,
)
from bindery_broker.retries.names import DEAD_LETTERS, chosen_dead_letter_topic, dead_letter_topic, retry_topic
from bindery_broker.retries.targets import Destination
from bindery_broker.subscriptions.consumer import ClientWatch, DeadLetters, ReceiveRequest, SubscriptionType
from bindery_broker.subscriptions.explaining import Reason
from bindery_broker.subscriptions.moving import MoveResult, RetryTo
from bindery_broker.subscriptions.reading import messages_of
from bindery_broker.subscriptions.response_budget import Charge
from bindery_broker.subscriptions.subscription import Subscription
from bindery_broker.topics.delivery_time import check_delay
from bindery_broker.topics.retried import Part, RetriedSubscription
from bindery_broker.topics.topic import Topic

STREAM_COUNT_MAX = 100
"""Maximum number of messages that a stream receives at once."""
STREAM_PING_S = 15.0
"""Seconds after which a stream without messages sends a comment."""
RETRY_AWAY_S = 0.5
"""Seconds after which a stream goes on that could not receive from the retry topic."""
LIMIT_WAIT_S = 0.25
"""Seconds after which a stream that waits for a limit looks whether its client is still there."""
STRUCTS = (ReceiveBody, Received, AckBody, Acknowledged, NackBody, Returned, RetryBody, Retried)
router = APIRouter(route_class=OwnedRoute, default_response_class=JsonLine, tags=["subscriptions"])
_LINES = NDJSON.encode()
_ERRORS = (*openapi.OF_TOPICS, 409)


class Consumable(Protocol):
    """A subscription with its retry topic, or that of a partitioned topic."""

    async def receive(
        self, request: ReceiveRequest, *, kind: SubscriptionType, charge: Charge, client: ClientWatch | None = None
    ) -> list[Part]: ...

    async def retry(
        self, ids: Sequence[MessageId], to: RetryTo, *, charge: Charge, consumer: str | None = None
    ) -> MoveResult: ...

    def blocked(self, consumer: str) -> Reason | None: ...


class EventStream(Response):
    """Server-sent events until the client disconnects, its credentials expire, the topic moves, or the broker stops."""

    media_type = "text/event-stream"

    def __init__(self, exchange: Exchange, topic: TopicName, subscription: Consumable, query: StreamQuery) -> None:
        super().__init__()
        self.raw_headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        self._exchange, self._topic, self._subscription, self._query = exchange, topic, subscription, query
        self._limited_s = 0.0
        """About the seconds of waiting for a limit since the last comment."""

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        topics, name = self._exchange.broker.topics, self._topic
        topics.begin_use(name)
        try:
            await self._stream(send)
        finally:
            topics.end_use(name)

    async def _stream(self, send: Send) -> None:
        exchange, subscription, query = self._exchange, self._subscription, self._query

        async def push(events: bytes) -> None:
            await send({"type": "http.response.body", "body": events, "more_body": True})
            exchange.charge.sent(len(events))

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        client = ClientWatch()
        if exchange.waiting is not None:
            exchange.waiting.begin()
        request = ReceiveRequest(
            consumer=query.consumer,
            count_max=STREAM_COUNT_MAX,
            bytes_max=4 * 2**20,
            wait_s=STREAM_PING_S,
            ack_timeout_s=query.ack_timeout_ms / 1000,
            session_ttl_s=query.session_ttl_ms / 1000,
            priority=query.priority,
            address=exchange.client_address,
        )
        with exchange.watched(client.set_gone):
            try:
                await push(b": connected\n\n")
                while not (exchange.gone or exchange.is_expired or exchange.broker.stopping):
                    try:
                        if await self._may_not_send(push):
                            continue
                        parts = await subscription.receive(
                            request, kind=query.type, charge=exchange.charge, client=client
                        )
                    except (ResponsesFull, RetryTopicAway) as error:
                        parts = []
                        if isinstance(error, RetryTopicAway):
                            await asyncio.sleep(RETRY_AWAY_S)
                    if not exchange.gone:
                        await self._push(push, sources_of(parts))
                if exchange.broker.stopping:
                    await push(MOVED_EVENT)
                if exchange.is_expired:
                    raise Unauthorized("the credentials of the client have expired, or were taken back")
            except (NotOwner, TopicFenced):
                await push(MOVED_EVENT)
            except BinderyError as error:
                await push(b"event: error\ndata: " + bytes(problem_of(error).body).strip() + b"\n\n")
        if not exchange.gone:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _may_not_send(self, push: Callable[[bytes], Awaitable[None]]) -> bool:
        """Wait for the limits of bytes, a moment at most. Return whether they do not allow messages yet."""
        allowance = self._exchange.allowance
        debt_s = 0.0 if allowance is None else allowance.sending_debt_s()
        if not debt_s:
            return False
        await asyncio.sleep(min(debt_s, LIMIT_WAIT_S))
        self._limited_s += LIMIT_WAIT_S
        if self._limited_s >= STREAM_PING_S:
            self._limited_s = 0.0
            await push(b": waiting\n\n")
        return True

    async def _push(self, push: Callable[[bytes], Awaitable[None]], sources: list[MessageSource]) -> None:
        """Send the messages, or a comment if there are none."""
        if not sources:
            await push(b": waiting\n\n")
            return
        async with self._exchange.paced():
            for piece in event_pieces(sources):
                await push(piece)
            await push(b"")  # returns when the server has passed on the pieces before it


@hot(
    router,
    "POST",
    paths.SUBSCRIPTION + "/receive",
    operation_id="receive",
    summary="Lease messages to a consumer, waiting if there are none; creates a missing subscription",
    path_parameters=paths.SUBSCRIPTION_PARAMETERS,
    query=ReceiveQuery,
    body=ReceiveBody,
    answers={200: Received},
    media_types=("application/json", NDJSON),
    errors=(*_ERRORS, *openapi.BODY_ERRORS, 422),
)
async def receive(exchange: Exchange) -> Response:
    broker = exchange.broker
    query = exchange.query(ReceiveQuery)
    body = await exchange.json_body(ReceiveBody)
    tags = split_tags(body.tags) if isinstance(body.tags, str) else []
    request = await receive_request(exchange, body)
    topic = await broker.topic(exchange.topic, create=query.create)
    if query.create and topic.policies.auto_create_subscriptions:
        subscribed, _ = await topic.subscribe(
            exchange.path_params["subscription"],
            initial=EARLIEST if body.initial == "earliest" else LATEST,
            tags=tags,
            properties=body.subscription_properties if isinstance(body.subscription_properties, dict) else {},
            durable=body.durable,
        )
    else:
        subscribed = topic.subscription(exchange.path_params["subscription"], tags=tags)
    subscription = await _retried(exchange, topic, subscribed)
    if isinstance(body.ack, list):
        await subscription.ack(parse_ids(body.ack), consumer=body.consumer)
    is_end = partial(_is_end, topic, subscribed)
    return await received(exchange, subscription, request, body.type, is_end=is_end)


@hot(
    router,
    "GET",
    paths.SUBSCRIPTION + "/stream",
    operation_id="stream",
    summary="Receive messages as server-sent events; acknowledge them with POST .../ack",
    path_parameters=paths.SUBSCRIPTION_PARAMETERS,
    query=StreamQuery,
    answers={200: None},
    media_types=(str(EventStream.media_type),),
    response_class=EventStream,
    errors=(*_ERRORS, 422, 429),
)
async def stream(exchange: Exchange) -> Response:
    """Each `event: message` holds the JSON of one message. Comments are sent while there is none. `event: moved` is the
    last one if the topic moves to another broker: connect again, and the stream continues there.

    A missing topic or subscription is not created: `PUT .../subscriptions/{subscription}` and `POST .../receive` do.
    """
    query = exchange.query(StreamQuery)
    tags = split_tags(query.tags) if isinstance(query.tags, str) else []
    topic = await exchange.broker.topic(exchange.topic)
    subscription = topic.subscription(exchange.path_params["subscription"], tags=tags)
    subscription.join(query.consumer, query.type)
    await exchange.read_body(size_max=0)
    return EventStream(exchange, topic.name, await _retried(exchange, topic, subscription), query)


@hot(
    router,
    "POST",
    paths.SUBSCRIPTION + "/ack",
    operation_id="ack",
    summary="Acknowledge messages; the answer means that this is durable",
    path_parameters=paths.SUBSCRIPTION_PARAMETERS,
    query=RoutingQuery,
    body=AckBody,
    answers={200: Acknowledged},
    errors=(*_ERRORS, *openapi.BODY_ERRORS, 422),
)
async def ack(exchange: Exchange) -> Response:
    exchange.query(RoutingQuery)
    body = await exchange.json_body(AckBody)
    if (body.message_ids is UNSET) == (body.cumulative is UNSET):
        raise BadRequest("exactly one of message_ids and cumulative is required")
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
    path_parameters=paths.SUBSCRIPTION_PARAMETERS,
    query=RoutingQuery,
    body=NackBody,
    answers={200: Returned},
    errors=(*_ERRORS, *openapi.BODY_ERRORS),
)
async def nack(exchange: Exchange) -> Response:
    exchange.query(RoutingQuery)
    body = await exchange.json_body(NackBody)
    ids = parse_ids(body.message_ids)
    subscription = await _subscription(exchange)
    consumer = body.consumer if isinstance(body.consumer, str) else None
    returned = await subscription.nack(ids, delay_s=body.delay_ms / 1000, consumer=consumer)
    return json_reply(Returned(returned=[str(message_id) for message_id in returned]))


@hot(
    router,
    "POST",
    paths.SUBSCRIPTION + "/retry",
    operation_id="retry",
    summary="Move messages to the retry topic, or to the dead-letter topic if they were retried too often",
    path_parameters=paths.SUBSCRIPTION_PARAMETERS,
    query=RoutingQuery,
    body=RetryBody,
    answers={200: Retried},
    errors=(*_ERRORS, *openapi.BODY_ERRORS, 422, 429, 503, 504),
)
async def retry(exchange: Exchange) -> Response:
    """Each message is copied exactly once, also if brokers stop meanwhile, and then acknowledged.

    The copies have the order of `message_ids`. If no message was moved, the answer is the first error.
    """
    exchange.query(RoutingQuery)
    body = await exchange.json_body(RetryBody)
    ids = parse_ids(body.message_ids)
    to = await retry_to(exchange, body)
    return await moved(exchange, await _subscription(exchange), ids, to, body)


async def moved(
    exchange: Exchange, subscription: Consumable, ids: Sequence[MessageId], to: RetryTo, body: RetryBody
) -> Response:
    """Move messages, and return the answer."""
    consumer = body.consumer if isinstance(body.consumer, str) else None
    result = await subscription.retry(ids, to, charge=exchange.charge, consumer=consumer)
    exchange.charge.release()
    return json_reply(retried(result))


def _is_end(topic: Topic, subscription: Subscription) -> bool:
    return topic.is_terminated and not subscription.cursor.backlog[0]


async def received(
    exchange: Exchange,
    subscription: Consumable,
    request: ReceiveRequest,
    kind: SubscriptionType,
    *,
    is_end: Callable[[], bool] = lambda: False,
) -> Response:
    """Receive, and return the answer. `is_end`: whether the subscription gets no more messages, ever."""
    if request.wait_s == 0:
        parts = await subscription.receive(request, kind=kind, charge=exchange.charge)
    else:
        parts = await _wait_for(subscription, request, kind, exchange)
    sources = sources_of(parts)
    blocked = UNSET if sources else _blocked(subscription, request.consumer)
    ended = not sources and is_end()
    return messages_reply(exchange, sources, lines=exchange.accepts(_LINES), blocked=blocked, is_end=ended)


def retried(result: MoveResult) -> Retried:
    """Return the answer. Raises the first error if no message was moved, and none was acknowledged before."""
    if result.failed and not result.moved and not result.acknowledged:
        raise result.failed[0][1]
    return Retried(
        moved=[
            MovedOut(
                message_id=str(one.message_id),
                topic=one.topic.short,
                copy_id=str(one.copy_id),
                reconsume_times=one.reconsume_times,
            )
            for one in result.moved
        ],
        acknowledged=list(map(str, result.acknowledged)),
        failed=[
            NotMoved(
                message_id=str(message_id), error=MessageError(code=error.code, status=error.status, detail=str(error))
            )
            for message_id, error in result.failed
        ],
    )


async def retry_to(exchange: Exchange, body: RetryBody) -> RetryTo:
    """Return where messages are moved to. Raises DelayTooLong, BadRequest, Forbidden."""
    name, subscription_name = exchange.topic, exchange.path_params["subscription"]
    settings = exchange.broker.settings
    check_delay(body.delay_ms, now_ms=0, delay_s_max=settings.delayed_delivery_max_delay_s)
    topic_text = body.dead_letter_topic if isinstance(body.dead_letter_topic, str) else None
    retry = Destination(retry_topic(name, subscription_name), subscription_name)
    dead_letters = Destination(chosen_dead_letter_topic(topic_text, name, subscription_name), DEAD_LETTERS)
    await check_derived(exchange, subscription_name, retry.topic)
    await _check_target(exchange, dead_letters)
    return RetryTo(
        retry=retry,
        dead_letters=dead_letters,
        max_redeliver=body.max_redeliver,
        delay_ms=body.delay_ms,
        properties=body.properties,
    )


async def receive_request(exchange: Exchange, body: ReceiveBody) -> ReceiveRequest:
    """Return the call that a body describes. Raises BadRequest, Forbidden."""
    key_shared, key_ranges = _key_shared(body)
    dead_letters = _dead_letters(body, exchange)
    if dead_letters is not None:
        await _check_target(exchange, dead_letters.to)
    return ReceiveRequest(
        consumer=body.consumer,
        count_max=body.max,
        bytes_max=exchange.room(body.max_bytes),
        wait_s=exchange.wait_ms(body.wait_ms) / 1000,
        ack_timeout_s=body.ack_timeout_ms / 1000,
        session_ttl_s=body.session_ttl_ms / 1000,
        request_id=body.request_id if isinstance(body.request_id, str) else exchange.passed_on_id,
        redeliver=body.redeliver,
        priority=body.priority,
        key_shared=key_shared,
        key_ranges=key_ranges,
        dead_letters=dead_letters,
        address=exchange.client_address,
    )


async def _check_target(exchange: Exchange, to: Destination) -> None:
    """Raise Forbidden unless the request may produce to the dead-letter topic that it names.

    The topic with the default name belongs to the subscription: see `check_derived`. So does the subscription with the
    default name; another one needs that for consuming from it.
    """
    if exchange.broker.access is None:
        return
    subscription = exchange.path_params["subscription"]
    if to.topic == dead_letter_topic(exchange.topic, subscription):
        await check_derived(exchange, subscription, to.topic)
    else:
        await check_topic(exchange, Need.PRODUCE, to.topic)
        if to.subscription != DEAD_LETTERS:
            await check_topic(exchange, Need.CONSUME, to.topic, subscription=to.subscription)


async def _subscription(exchange: Exchange) -> RetriedSubscription:
    topic = await exchange.broker.topic(exchange.topic)
    return await _retried(exchange, topic, topic.subscription(exchange.path_params["subscription"]))


async def _retried(exchange: Exchange, topic: Topic, subscription: Subscription) -> RetriedSubscription:
    """Return the subscription with its retry topic. It is alone if it is that of a partition that is used as a part of
    its topic, or if the request may not use the retry topic."""
    is_alone = bool(exchange.header(PARTITION_HEADER)) or not await may_use_retries(exchange)
    return RetriedSubscription(topic, subscription, exchange.broker.retry_topics, is_alone=is_alone)


async def _wait_for(
    subscription: Consumable, request: ReceiveRequest, kind: SubscriptionType, exchange: Exchange
) -> list[Part]:
    """Receive; stop when the client disconnects, so that nothing is leased to a client that is gone."""
    client = ClientWatch()
    watching = exchange.watching(client.set_gone)
    client.on_wait = watching.begin
    try:
        return await subscription.receive(request, kind=kind, charge=exchange.charge, client=client)
    finally:
        client.on_wait = None  # no cyclic garbage
        watching.end()


def _blocked(subscription: Consumable, consumer: str) -> Blocked | UnsetType:
    reason = subscription.blocked(consumer)
    if reason is None:
        return UNSET
    return Blocked(
        code=reason.code,
        detail=reason.detail,
        ends_in_ms=UNSET if reason.until_ms is None else reason.until_ms,
        consumer=UNSET if reason.consumer is None else reason.consumer,
    )


def _key_shared(body: ReceiveBody) -> tuple[KeySharedMode, tuple[KeyRange, ...]]:
    """Return the mode, and the ranges of the consumer. Raises BadRequest for fields that contradict each other."""
    wanted = body.key_shared
    if not isinstance(wanted, KeyShared):
        return KeySharedMode(), ()
    if body.type != "key_shared":
        raise BadRequest("the field key_shared needs the type key_shared", type=body.type)
    sticky = wanted.mode == "sticky"
    if wanted.ranges and not sticky:
        raise BadRequest("ranges need the mode sticky", mode=wanted.mode)
    ranges = tuple(checked_ranges(wanted.ranges)) if sticky else ()
    return KeySharedMode(sticky=sticky, allow_out_of_order=wanted.allow_out_of_order), ranges


def _dead_letters(body: ReceiveBody, exchange: Exchange) -> DeadLetters | None:
    """Return the limit of redeliveries. Raises BadRequest if the type does not allow one, or for its topic."""
    policy = body.dead_letter
    if not isinstance(policy, DeadLetterPolicy):
        return None
    if body.type not in ("shared", "key_shared"):
        raise BadRequest("the field dead_letter needs the type shared or key_shared", type=body.type)
    name, subscription = exchange.topic, exchange.path_params["subscription"]
    topic = chosen_dead_letter_topic(policy.topic if isinstance(policy.topic, str) else None, name, subscription)
    initial = policy.initial_subscription if isinstance(policy.initial_subscription, str) else DEAD_LETTERS
    return DeadLetters(policy.max_redeliver, Destination(topic, validate_subscription(initial)))


def sources_of(parts: list[Part]) -> list[MessageSource]:
    """Return the messages of each topic in its order: those of one entry may be in several deliveries."""
    sources: list[MessageSource] = []
    for partition, deliveries in parts:
        pairs = [(delivery, message) for delivery in deliveries for message in messages_of(delivery)]
        if any(following.position <= delivery.position for delivery, following in pairwise(deliveries)):
            pairs.sort(key=lambda pair: (pair[0].position, pair[1].batch_index))
        sources += [
            MessageSource(
                message,
                f"{delivery.position.ledger_id}:{delivery.position.entry_id}:{partition}:{message.batch_index}",
                delivery.lease,
                delivery.redelivery_count,
            )
            for delivery, message in pairs
        ]
    return sources
