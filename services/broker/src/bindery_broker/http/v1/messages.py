"""Messages: produce them, and read them without a subscription."""

from functools import partial
from typing import Annotated, Final

from bindery_core.errors import BadRequest, BinderyError
from bindery_core.formats.ledger_metadata import LedgerState
from bindery_core.ids import EntryId, LedgerId
from bindery_core.placement.write_set import write_set
from bindery_pulsar.message_id import MessageId, Position
from fastapi import APIRouter, Query
from starlette.responses import Response

from bindery_broker.broker import Broker
from bindery_broker.errors import ProducerBusy
from bindery_broker.http import openapi
from bindery_broker.http.exchange import Exchange, json_reply
from bindery_broker.http.route import JsonLine, OwnedRoute, hot
from bindery_broker.http.v1 import paths
from bindery_broker.http.v1.message_pieces import MessageSource, messages_reply
from bindery_broker.http.v1.message_view import parse_start, view
from bindery_broker.http.v1.models import (
    AccessAnswer,
    AccessBody,
    AccessQuery,
    Cancelled,
    ProducerAnswer,
    ReadQuery,
    Released,
    RoutingQuery,
)
from bindery_broker.http.v1.produce_request import (
    IDEMPOTENCY_KEY,
    NDJSON,
    PROPERTY_HEADER,
    ProduceLimits,
    parse_idempotency_key,
    parse_produce,
    request_key,
)
from bindery_broker.http.v1.schemas import (
    MESSAGES_PER_REQUEST_MAX,
    LedgerOfMessage,
    MessageError,
    MessageLine,
    OneMessage,
    Produced,
    ProducedPartly,
    ProduceQuery,
    ProduceResult,
    ReadAnswer,
)
from bindery_broker.producers.access import AccessMode
from bindery_broker.producers.keys import RequestKey

STRUCTS = (MessageLine, Produced, ProducedPartly, ReadAnswer, OneMessage)
_PRODUCE_BODY: Final[openapi.Json] = {
    "description": "One raw message of any type, or MessageLine objects: NDJSON, one JSON object, or a JSON array.",
    "required": True,
    "content": {
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        "text/plain": {"schema": {"type": "string"}},
        "application/json": {
            "schema": {
                "anyOf": [
                    {"$ref": "#/components/schemas/MessageLine"},
                    {
                        "type": "array",
                        "minItems": 1,
                        "maxItems": MESSAGES_PER_REQUEST_MAX,
                        "items": {"$ref": "#/components/schemas/MessageLine"},
                    },
                ]
            }
        },
        NDJSON: {
            "schema": {"type": "string"},
            "example": '{"payload": "a", "key": "k"}\n{"payload_json": {"b": 1}}\n',
        },
    },
}
_MODES: Final = {"exclusive": AccessMode.EXCLUSIVE, "exclusive_with_fencing": AccessMode.EXCLUSIVE_FENCING}
router = APIRouter(route_class=OwnedRoute, default_response_class=JsonLine, tags=["messages"])


@hot(
    router,
    "POST",
    paths.TOPIC + "/messages",
    operation_id="produce",
    summary="Store one message (any body) or many (NDJSON, JSON array); the answer means that they are durable",
    path_parameters=paths.TOPIC_PARAMETERS,
    query=ProduceQuery,
    body=_PRODUCE_BODY,
    answers={200: Produced, 207: ProducedPartly},
    errors=(*openapi.OF_TOPICS, *openapi.BODY_ERRORS, 409, 422, 507),
)
async def produce(exchange: Exchange) -> Response:
    """Headers `Bindery-Property-<name>` set properties (percent-encoded UTF-8).

    Everything is validated before anything is written.

    Header `Idempotency-Key`: a repeated request with the same key and content gets the same message ids, and stores
    only what is not stored yet, for five minutes by default (`idempotency_window_s`). 422: the key belongs to a request
    with other content. 409: the first request with the key is still in progress; retry after `Retry-After` seconds.
    """
    broker = exchange.broker
    settings = broker.settings
    query = exchange.query(ProduceQuery)
    body = await exchange.read_body(size_max=settings.request_bytes_max)
    messages = parse_produce(
        body,
        content_type=exchange.media_type(),
        query=query,
        headers=exchange.scope["headers"],
        now_ms=broker.clock(),
        limits=ProduceLimits(
            messages_max=settings.messages_per_request_max, delay_s_max=settings.delayed_delivery_max_delay_s
        ),
    )
    broker.metrics.produce_bytes.observe(len(body))
    producer = query.producer if isinstance(query.producer, str) else None
    epoch = query.producer_epoch if isinstance(query.producer_epoch, int) else None
    if epoch is not None and producer is None:
        raise BadRequest("producer_epoch needs producer")
    topic = await broker.topic(exchange.topic, create=True)
    check = partial(topic.hold.check, producer, epoch)
    admit = partial(broker.topics.admission(topic).admit, producer=producer, may_wait=not broker.stopping)
    has_key = exchange.has_header(IDEMPOTENCY_KEY)
    if has_key or (producer is not None and topic.counts_sequences(messages)):
        request = _request_key(exchange, query, body) if has_key else None
        results = await topic.publish_once(
            messages, producer=producer, request=request, batch=query.batch, admit=admit, check=check
        )
    else:
        check()
        await admit(messages)
        results = await topic.publish(messages, producer=producer, batch=query.batch, check=check)
    ids = [str(result) for result in results if isinstance(result, MessageId)]
    if len(ids) == len(results):
        return json_reply(Produced(message_ids=ids))
    return json_reply(ProducedPartly(results=[result_of(result) for result in results]), status=207)


def _request_key(exchange: Exchange, query: ProduceQuery, body: bytes) -> RequestKey:
    headers = exchange.scope["headers"]
    principal = exchange.principal
    return request_key(
        parse_idempotency_key([value for name, value in headers if name == IDEMPOTENCY_KEY]),
        client="" if principal is None else principal.original_role or principal.role,
        operation="produce",
        topic=exchange.topic.full,
        content_type=exchange.media_type(),
        query=query,
        headers=headers,
        body=body,
    )


assert produce.__doc__ is not None
assert PROPERTY_HEADER.decode().title() in produce.__doc__


def result_of(result: MessageId | BinderyError) -> ProduceResult:
    if isinstance(result, BinderyError):
        return ProduceResult(error=MessageError(code=result.code, status=result.status, detail=str(result)))
    return ProduceResult(message_id=str(result))


@router.get(
    paths.TOPIC + "/messages",
    operation_id="readMessages",
    summary="Read messages without a subscription",
    responses={**openapi.answers({200: ReadAnswer}), **openapi.problems(*openapi.OF_TOPICS, 409, 422, 429)},
)
async def read_messages(exchange: Exchange, name: paths.Topic, query: Annotated[ReadQuery, Query()]) -> Response:
    broker = exchange.broker
    start = parse_start(query.start)
    topic = await broker.topic(name)
    if isinstance(start, int):
        if query.compacted:
            raise BadRequest("a compacted topic is read from a message id, not from a time")
        start = await topic.ledger.find_published(start)
    if query.partition is not None and query.partition != topic.partition:
        raise BadRequest("the topic has no such partition", topic=name.short, partition=query.partition)
    if isinstance(start, MessageId) and start.partition not in (-1, topic.partition):
        raise BadRequest("the message id names another partition", message_id=str(start))
    wait_ms = exchange.wait_ms(query.wait_ms)
    found, following = await topic.read(
        start,
        charge=exchange.charge,
        count_max=query.max,
        bytes_max=query.max_bytes,
        wait_s=wait_ms / 1000,
        compacted=query.compacted,
    )
    sources = [MessageSource(row.message, str(row.id)) for row in found]
    is_end = topic.is_terminated and not found
    return messages_reply(exchange, sources, following=str(following), is_end=is_end)


@router.get(
    paths.TOPIC + "/messages/{message_id:segment}",
    operation_id="readMessage",
    summary="Show one message, with its ledger and the bookies that store it",
    responses={**openapi.answers({200: OneMessage}), **openapi.problems(*openapi.OF_TOPICS, 409, 422, 429)},
)
async def read_message(
    exchange: Exchange, name: paths.Topic, message_id: paths.MessageIdPath, _query: Annotated[RoutingQuery, Query()]
) -> Response:
    wanted = MessageId.parse(message_id)
    topic = await exchange.broker.topic(name)
    found = await topic.read_one(wanted, charge=exchange.charge)
    return json_reply(
        OneMessage(
            message=view(found.message, message_id=str(found.id)),
            batch_size=found.message.batch_size,
            ledger=await _ledger_of(exchange.broker, found.id.position),
        )
    )


@router.delete(
    paths.TOPIC + "/messages/{message_id:segment}",
    operation_id="cancelMessage",
    summary="Cancel a delayed message in every subscription that has not delivered it",
    responses=openapi.problems(*openapi.OF_TOPICS, 409),
)
async def cancel_message(
    exchange: Exchange, name: paths.Topic, message_id: paths.MessageIdPath, _query: Annotated[RoutingQuery, Query()]
) -> Cancelled:
    """The message is acknowledged durably in each existing subscription. It stays stored, and can be read by its id.

    A repeated request gets the same answer.

    409: the message was published without a delay.
    """
    topic = await exchange.broker.topic(name)
    done = await topic.cancel(MessageId.parse(message_id))
    return Cancelled(cancelled={one: "cancelled" if was else "already_delivered" for one, was in done.items()})


@router.get(
    paths.TOPIC + "/producers/{producer:segment}",
    operation_id="getProducer",
    summary="Show the highest sequence id that is stored of a producer",
    responses=openapi.problems(*openapi.OF_TOPICS),
)
async def get_producer(
    exchange: Exchange, name: paths.Topic, producer: paths.Producer, _query: Annotated[RoutingQuery, Query()]
) -> ProducerAnswer:
    """A producer that was restarted continues behind it: messages up to it are not stored again."""
    topic = await exchange.broker.topic(name)
    answer = ProducerAnswer(producer=producer, last_sequence_id=await topic.deduplication.last_sequence_id(producer))
    if topic.hold.holder == producer:
        answer.producer_epoch = topic.hold.epoch
    return answer


@router.put(
    paths.TOPIC + "/producers/{producer:segment}/access",
    operation_id="takeTopic",
    summary="Give the topic to a producer exclusively",
    responses=openapi.problems(*openapi.OF_TOPICS, *openapi.BODY_ERRORS, 409),
)
async def take_topic(
    exchange: Exchange,
    name: paths.Topic,
    producer: paths.Producer,
    body: AccessBody,
    _query: Annotated[RoutingQuery, Query()],
) -> AccessAnswer:
    """With `wait_for_exclusive`, the answer comes once the topic is free, in the order of the requests.

    Only requests with `producer` and `producer_epoch` of the answer are stored from then on, until the producer
    releases the topic or another one fences it. Earlier requests of the same producer are fenced. This outlives
    restarts and moves of the topic.

    409: `producer_fenced`, if another producer has the topic and `access_mode` is `exclusive`, or if one took it with
    fencing during the wait; `producer_busy`, if it was not free within `wait_ms`.
    """
    broker = exchange.broker
    hold = (await broker.topic(name)).hold
    if body.access_mode == "wait_for_exclusive":
        wait_ms = exchange.wait_ms(body.wait_ms)
        gone = ProducerBusy("the client does not wait for the topic any more", producer=producer)
        with exchange.watched(partial(hold.end_waiting, gone, producer=producer)):
            epoch = await hold.take_in_turn(producer, wait_s=wait_ms / 1000)
        if exchange.gone:  # nobody has got the epoch
            await hold.release(producer, epoch=epoch)
    else:
        epoch = await hold.take(producer, _MODES[body.access_mode])
    return AccessAnswer(producer=producer, producer_epoch=epoch)


@router.delete(
    paths.TOPIC + "/producers/{producer:segment}/access",
    operation_id="releaseTopic",
    summary="End the exclusive access of a producer",
    responses=openapi.problems(*openapi.OF_TOPICS, 409),
)
async def release_topic(
    exchange: Exchange, name: paths.Topic, producer: paths.Producer, query: Annotated[AccessQuery, Query()]
) -> Released:
    """Idempotent: `released` is false if the producer does not have the topic. With `producer_epoch`, 409
    `producer_fenced` if it has the topic in another epoch."""
    topic = await exchange.broker.topic(name)
    return Released(released=await topic.hold.release(producer, epoch=query.producer_epoch))


async def _ledger_of(broker: Broker, position: Position) -> LedgerOfMessage:
    metadata = await broker.topics.client.metadata(LedgerId(position.ledger_id))
    entry_id = EntryId(position.entry_id)
    ensemble = metadata.segment_of(entry_id).ensemble
    indexes = write_set(entry_id=entry_id, ensemble_size=metadata.ensemble_size, write_quorum=metadata.write_quorum)
    return LedgerOfMessage(
        ledger_id=position.ledger_id,
        entry_id=position.entry_id,
        state=LedgerState(metadata.state).name.lower(),
        ensemble_size=metadata.ensemble_size,
        write_quorum=metadata.write_quorum,
        ack_quorum=metadata.ack_quorum,
        ensemble=[str(bookie) for bookie in ensemble],
        write_set=[str(ensemble[index]) for index in indexes],
    )
