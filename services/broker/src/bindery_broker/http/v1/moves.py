"""What brokers ask of one another: moves to topics of this broker (`topics.move_targets` has the protocol), and what
the broker of a topic needs to consume its retry topic here (`topics.retry_sides`)."""

from typing import Annotated

from bindery_pulsar.entry_size import ENTRY_SIZE_MAX
from bindery_pulsar.message_id import EARLIEST
from fastapi import APIRouter, Query
from msgspec import Meta
from starlette.responses import Response

from bindery_broker.http import openapi
from bindery_broker.http.exchange import Exchange, json_reply
from bindery_broker.http.route import JsonLine, OwnedRoute, hot
from bindery_broker.http.v1 import paths
from bindery_broker.http.v1.message_view import parse_ids
from bindery_broker.http.v1.messages import result_of
from bindery_broker.http.v1.models import (
    BeginMoveBody,
    Begun,
    Held,
    RequestBody,
    RoutingQuery,
    UnknownBody,
    UnknownIds,
)
from bindery_broker.http.v1.schemas import ProducedPartly, SourceName
from bindery_broker.http.v1.schemas import RoutingQuery as HotRoutingQuery
from bindery_broker.retries.copy_codec import decode_copies
from bindery_broker.retries.intents import MESSAGES_MAX

_COPIES: openapi.Json = {
    "description": "Frames: the size of an entry (4 bytes, big endian) and the entry, as Pulsar stores it.",
    "required": True,
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
}
router = APIRouter(route_class=OwnedRoute, default_response_class=JsonLine, tags=["between brokers"])


class CopiesQuery(HotRoutingQuery, kw_only=True):
    source: SourceName
    """The `source` of the call that began the move."""
    epoch: Annotated[str, Meta(max_length=256)]
    """The `epoch` in its answer."""


@router.post(
    paths.TOPIC + "/moves",
    operation_id="beginMove",
    summary="For brokers: begin to move messages of a subscription to this topic, and end what it began before",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(*openapi.OF_TOPICS, *openapi.BODY_ERRORS, 409),
)
async def begin_move(
    exchange: Exchange, name: paths.Topic, _query: Annotated[RoutingQuery, Query()], body: BeginMoveBody
) -> Begun:
    """On return, nothing is being stored that the same source began before, and none of it will be stored."""
    broker = exchange.broker
    topic = await broker.topic(name, create=body.create)
    if body.create:
        await topic.subscribe(body.subscription, initial=EARLIEST)
    begun = await broker.topics.targets.hosted.begin(topic, source=body.source)
    return Begun(epoch=begun.epoch, end=[begun.end.ledger_id, begun.end.entry_id])


@hot(
    router,
    "POST",
    paths.TOPIC + "/moves/copies",
    operation_id="storeCopies",
    summary="For brokers: store copies of messages that are moved to this topic",
    path_parameters=paths.TOPIC_PARAMETERS,
    query=CopiesQuery,
    body=_COPIES,
    answers={200: ProducedPartly},
    errors=(*openapi.OF_TOPICS, *openapi.BODY_ERRORS),
)
async def store_copies(exchange: Exchange) -> Response:
    """Each copy is an entry of its own. 503, with nothing stored, if the epoch is not that of the last `beginMove` of
    the source."""
    broker = exchange.broker
    query = exchange.query(CopiesQuery)
    body = await exchange.read_body(size_max=max(broker.settings.request_bytes_max, ENTRY_SIZE_MAX + 4))
    copies = decode_copies(body, count_max=MESSAGES_MAX)
    topic = await broker.topic(exchange.topic)
    results = await broker.topics.targets.hosted.publish(topic, copies, source=query.source, epoch=query.epoch)
    return json_reply(ProducedPartly(results=[result_of(result) for result in results]))


@router.post(
    paths.SUBSCRIPTION + "/unknown",
    operation_id="findUnknown",
    summary="For brokers: find ids that name no message of the topic, so that an acknowledgement would refuse them",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(*openapi.OF_TOPICS, *openapi.BODY_ERRORS),
)
async def find_unknown(
    exchange: Exchange,
    name: paths.Topic,
    subscription: paths.SubscriptionName,
    _query: Annotated[RoutingQuery, Query()],
    body: UnknownBody,
) -> UnknownIds:
    found = (await exchange.broker.topic(name)).subscription(subscription)
    return UnknownIds(unknown=list(map(str, await found.unknown(parse_ids(body.message_ids)))))


@router.post(
    paths.SUBSCRIPTION + "/hand-back",
    operation_id="handBack",
    summary="For brokers: return the messages of a receive that its client did not get; that is no redelivery",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(*openapi.OF_TOPICS, *openapi.BODY_ERRORS),
)
async def hand_back(
    exchange: Exchange,
    name: paths.Topic,
    subscription: paths.SubscriptionName,
    _query: Annotated[RoutingQuery, Query()],
    body: RequestBody,
) -> Held:
    found = (await exchange.broker.topic(name)).subscription(subscription)
    return Held(held=found.hand_back_request(body.consumer, body.request_id))


@router.post(
    paths.SUBSCRIPTION + "/held",
    operation_id="stillHolds",
    summary="For brokers: say whether a consumer holds messages of a receive, so that the same call would repeat them",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(*openapi.OF_TOPICS, *openapi.BODY_ERRORS),
)
async def still_holds(
    exchange: Exchange,
    name: paths.Topic,
    subscription: paths.SubscriptionName,
    _query: Annotated[RoutingQuery, Query()],
    body: RequestBody,
) -> Held:
    found = (await exchange.broker.topic(name)).subscription(subscription)
    return Held(held=found.still_holds(body.consumer, body.request_id))
