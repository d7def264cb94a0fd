"""Producing: POST .../messages."""

from bindery_core.errors import BinderyError

from bindery_broker.broker import Broker
from bindery_broker.http.exchange import Exchange, Reply, json_reply
from bindery_broker.http.produce_request import ProduceLimits, parse_produce
from bindery_broker.http.schemas import MessageError, Produced, ProducedPartly, ProduceQuery, ProduceResult
from bindery_broker.message_id import MessageId


async def produce(broker: Broker, exchange: Exchange) -> Reply:
    """Parse everything, then write everything, then answer."""
    settings = broker.settings
    query = exchange.query(ProduceQuery)
    body = await exchange.body(size_max=settings.request_bytes_max)
    messages = parse_produce(
        body,
        content_type=exchange.media_type(),
        query=query,
        headers=exchange.scope["headers"],
        now_ms=broker.clock(),
        limits=ProduceLimits(messages_max=settings.messages_per_request_max),
    )
    broker.metrics.produce_bytes.observe(len(body))
    topic = await broker.topic(exchange.name, create=True)
    producer = query.producer if isinstance(query.producer, str) else None
    results = await topic.publish(messages, producer=producer, batch=query.batch)
    ids = [str(result) for result in results if isinstance(result, MessageId)]
    if len(ids) == len(results):
        return json_reply(Produced(message_ids=ids))
    return json_reply(ProducedPartly(results=[_result(result) for result in results]), status=207)


def _result(result: MessageId | BinderyError) -> ProduceResult:
    if isinstance(result, BinderyError):
        return ProduceResult(error=MessageError(code=result.code, status=result.status, detail=str(result)))
    return ProduceResult(message_id=str(result))
