"""Receive, stream, acknowledge, return and retry messages of a partitioned topic (`partitioned.consumers`)."""

from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import quote

import msgspec
from bindery_core.errors import BadRequest, BinderyError
from bindery_kit.observability.logs import get_logger
from bindery_pulsar.message_id import MessageId
from bindery_pulsar.topic_name import TopicName, validate_subscription
from msgspec import UNSET
from starlette.responses import Response

from bindery_broker.errors import NotSupported
from bindery_broker.http.authorization import may_use_retries
from bindery_broker.http.exchange import Exchange, json_reply
from bindery_broker.http.v1.consuming import (
    EventStream,
    moved,
    receive_request,
    received,
    retry_to,
)
from bindery_broker.http.v1.message_view import parse_ids
from bindery_broker.http.v1.partitioned.calls import call, enter, raise_failure
from bindery_broker.http.v1.produce_request import split_tags
from bindery_broker.http.v1.schemas import (
    AckBody,
    Acknowledged,
    NackBody,
    ReceiveBody,
    ReceiveQuery,
    RetryBody,
    Returned,
    RoutingQuery,
    StreamQuery,
)
from bindery_broker.partitioned.consumers import PartitionedSubscription
from bindery_broker.partitioned.record import PartitionedRecord

Operation = Callable[[Exchange], Awaitable[Response]]

log = get_logger(__name__)


async def receive(exchange: Exchange, whole: PartitionedRecord, _operation: Operation) -> Response:
    query = exchange.query(ReceiveQuery)
    body = await exchange.json_body(ReceiveBody)
    if not body.durable:
        raise NotSupported(
            "a subscription that is not durable belongs to a single partition; name one", topic=exchange.topic.short
        )
    tags = split_tags(body.tags) if isinstance(body.tags, str) else []
    request = await receive_request(exchange, body)
    subscription = await _subscription(exchange, whole, tags=tags)
    if query.create:
        validate_subscription(exchange.path_params["subscription"])
        subscription.make = _maker(exchange, body)
    if isinstance(body.ack, list):
        await subscription.ack(parse_ids(body.ack), consumer=body.consumer)
    return await received(exchange, subscription, request, body.type)


async def stream(exchange: Exchange, whole: PartitionedRecord, _operation: Operation) -> Response:
    query = exchange.query(StreamQuery)
    tags = split_tags(query.tags) if isinstance(query.tags, str) else []
    subscription = await _subscription(exchange, whole, tags=tags)
    await subscription.check()
    await exchange.read_body(size_max=0)
    return EventStream(exchange, exchange.topic, subscription, query)


async def ack(exchange: Exchange, whole: PartitionedRecord, operation: Operation) -> Response:
    exchange.query(RoutingQuery)
    body = await exchange.json_body(AckBody)
    if isinstance(body.cumulative, str) and body.message_ids is UNSET:
        last = MessageId.parse(body.cumulative)
        if not 0 <= last.partition < whole.partitions:
            raise BadRequest("a cumulative acknowledgement names a message of a partition", message_id=str(last))
        enter(exchange, exchange.topic.with_partition(last.partition))
        return await exchange.at_owner.run(exchange, operation)
    if body.message_ids is UNSET or body.cumulative is not UNSET:
        raise BadRequest("exactly one of message_ids and cumulative is required")
    assert isinstance(body.message_ids, list)
    ids = parse_ids(body.message_ids)
    await (await _subscription(exchange, whole)).ack(ids, consumer=_text(body.consumer))
    return json_reply(Acknowledged(acknowledged=len(ids)))


async def nack(exchange: Exchange, whole: PartitionedRecord, _operation: Operation) -> Response:
    exchange.query(RoutingQuery)
    body = await exchange.json_body(NackBody)
    ids = parse_ids(body.message_ids)
    subscription = await _subscription(exchange, whole)
    returned = await subscription.nack(ids, delay_s=body.delay_ms / 1000, consumer=_text(body.consumer))
    return json_reply(Returned(returned=list(map(str, returned))))


async def retry(exchange: Exchange, whole: PartitionedRecord, _operation: Operation) -> Response:
    exchange.query(RoutingQuery)
    body = await exchange.json_body(RetryBody)
    ids = parse_ids(body.message_ids)
    to = await retry_to(exchange, body)
    return await moved(exchange, await _subscription(exchange, whole), ids, to, body)


async def leave(exchange: Exchange) -> None:
    """End the session of a consumer in the retry topic. If its broker does not answer, the session ends later, as if
    the consumer had died."""
    name, consumer = exchange.topic, exchange.path_params["consumer"]
    whole = await exchange.broker.partitioned.find(name)
    if whole is None:
        return
    try:
        await (await _subscription(exchange, whole)).leave_retry_topic(consumer)
    except BinderyError as error:
        log.warning("consumer_stays_in_retry_topic", topic=name.short, error=str(error))


async def _subscription(
    exchange: Exchange, whole: PartitionedRecord, *, tags: Sequence[str] = ()
) -> PartitionedSubscription:
    """Return the subscription, without its retry topic if the request may not use that."""
    name = exchange.path_params["subscription"]
    has_retries = await may_use_retries(exchange)
    return exchange.broker.partitioned_consumers.subscription(
        exchange.topic, whole, name, tags=tags, has_retries=has_retries
    )


def _maker(exchange: Exchange, body: ReceiveBody) -> Callable[[TopicName], Awaitable[None]]:
    """Return a function that creates the subscription in a partition."""
    path = f"/subscriptions/{quote(exchange.path_params['subscription'], safe='')}"
    fields = {"initial": body.initial}
    wanted = {**fields, "tags": body.tags, "subscription_properties": body.subscription_properties}
    content = msgspec.json.encode({name: value for name, value in wanted.items() if value is not UNSET})

    async def make(partition: TopicName) -> None:
        raise_failure([await call(exchange, "PUT", partition, path, body=content)])

    return make


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
