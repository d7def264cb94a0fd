"""Store the messages of a request in the partitions of a topic.

A request whose messages belong to one partition goes there as it is. Otherwise each partition gets a request with its
messages as the client wrote them, and with the query and the headers of the whole request: so each partition detects a
repeated part by itself. If the sequence ids count up from that of the query, each message gets its own.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec
from bindery_core.errors import BinderyError
from bindery_pulsar.message_codec import OutgoingMessage
from bindery_pulsar.topic_name import TopicName
from msgspec import UNSET
from starlette.responses import Response

from bindery_broker.http.exchange import Exchange, json_reply
from bindery_broker.http.v1.partitioned.calls import Answer, call, enter, first_failure, on_each
from bindery_broker.http.v1.produce_request import JSON, NDJSON, ProduceLimits, parse_produce
from bindery_broker.http.v1.schemas import MessageError, Produced, ProducedPartly, ProduceQuery, ProduceResult
from bindery_broker.partitioned.record import PartitionedRecord
from bindery_broker.partitioned.routing import route

IDEMPOTENCY_HEADER: Final = b"idempotency-key"
_array = msgspec.json.Decoder(list[msgspec.Raw])


async def produce(
    exchange: Exchange, whole: PartitionedRecord, operation: Callable[[Exchange], Awaitable[Response]]
) -> Response:
    """Everything is validated before anything is written. If parts fail, the answer has one result per message."""
    broker, name = exchange.broker, exchange.topic
    settings = broker.settings
    query = exchange.query(ProduceQuery)
    body = await exchange.read_body(size_max=settings.request_bytes_max)
    limits = ProduceLimits(
        messages_max=settings.messages_per_request_max, delay_s_max=settings.delayed_delivery_max_delay_s
    )
    content_type = exchange.media_type()
    messages = parse_produce(
        body,
        content_type=content_type,
        query=query,
        headers=exchange.scope["headers"],
        now_ms=broker.clock(),
        limits=limits,
    )
    identity, is_sequence = _identity(exchange, query, messages)
    parts = route(
        [message.key for message in messages],
        partitions=whole.partitions,
        turn=broker.partitioned.next_turn(name),
        identity=identity,
        sequence_ids=[message.sequence_id for message in messages] if is_sequence else None,
    )
    if len(parts) == 1:
        enter(exchange, name.with_partition(next(iter(parts))))
        return await exchange.at_owner.run(exchange, operation)
    texts = _texts(body, content_type)
    assert len(texts) == len(messages)
    if query.sequence_id is not UNSET:
        texts = [_numbered(text, message.sequence_id or 0) for text, message in zip(texts, messages, strict=True)]
    by_name = {name.with_partition(partition): indexes for partition, indexes in sorted(parts.items())}

    async def one(partition: TopicName) -> Answer:
        some = [texts[index] for index in by_name[partition]]
        is_lines = content_type == NDJSON
        return await call(
            exchange,
            "POST",
            partition,
            "/messages",
            query=exchange.scope["query_string"],
            body=b"\n".join(some) if is_lines else b"[" + b",".join(some) + b"]",
            content_type=content_type.encode(),
        )

    answers = await on_each(list(by_name), one)
    results: list[ProduceResult] = [ProduceResult()] * len(messages)
    for indexes, answer in zip(by_name.values(), answers, strict=True):
        for index, result in zip(indexes, _results(answer, len(indexes)), strict=True):
            results[index] = result
    failed = first_failure(answers)
    if failed is not None and not any(answer.is_success for answer in answers):
        return failed.reply()
    if all(isinstance(result.message_id, str) for result in results):
        return json_reply(Produced(message_ids=[str(result.message_id) for result in results]))
    return json_reply(ProducedPartly(results=results), status=207)


def _identity(exchange: Exchange, query: ProduceQuery, messages: Sequence[OutgoingMessage]) -> tuple[str | None, bool]:
    """Return what a repetition of the request has in common with it, and whether its messages have sequence ids, which
    each repeated message keeps. None: there will be no repetition."""
    key = exchange.header(IDEMPOTENCY_HEADER)
    if key:
        return key.decode("latin-1"), False
    if isinstance(query.producer, str) and messages[0].sequence_id is not None:
        return query.producer, True
    return None, False


def _texts(body: bytes, content_type: str) -> list[bytes]:
    """Return the messages of a valid request of several ones, as they were written."""
    if content_type == NDJSON:
        return [line for line in body.split(b"\n") if line and not line.isspace()]
    assert content_type == JSON
    return [bytes(raw) for raw in _array.decode(body)]


def _numbered(text: bytes, sequence_id: int) -> bytes:
    """Return a message object with its sequence id, which the partition could not count up from that of the query."""
    rest = text.lstrip()[1:].lstrip()
    return b'{"sequence_id":%d%s%s' % (sequence_id, b"" if rest.startswith(b"}") else b",", rest)


def _results(answer: Answer, count: int) -> list[ProduceResult]:
    """Return the result of each message of a part."""
    try:
        if answer.status == 200:
            stored = msgspec.json.decode(answer.body, type=Produced)
            return [ProduceResult(message_id=message_id) for message_id in stored.message_ids]
        if answer.status == 207:
            return msgspec.json.decode(answer.body, type=ProducedPartly).results
        error: BinderyError = answer.error()
    except BinderyError as raised:
        error = raised
    failure = MessageError(code=error.code, status=error.status, detail=str(error))
    return [ProduceResult(error=failure)] * count
