"""Topics and what they hold, without a subscription."""

from bindery_core.errors import BadRequest
from bindery_core.ids import EntryId, LedgerId
from bindery_core.ledger_metadata import LedgerState
from bindery_core.write_set import write_set

from bindery_broker.broker import Broker
from bindery_broker.http.exchange import Exchange, Reply, json_reply
from bindery_broker.http.message_view import parse_place, view
from bindery_broker.http.schemas import (
    Created,
    Deleted,
    ForceQuery,
    LedgerOfMessage,
    OneMessage,
    ReadAnswer,
    ReadQuery,
    RoutingQuery,
    SubscriptionStats,
    TopicList,
    TopicListQuery,
    TopicStats,
)
from bindery_broker.message_id import MessageId, Position


async def list_topics(broker: Broker, exchange: Exchange) -> Reply:
    query = exchange.query(TopicListQuery)
    namespace: tuple[str, str] | None = None
    if isinstance(query.namespace, str):
        tenant, _, space = query.namespace.partition("/")
        namespace = (tenant, space)
        if {tenant, space} & {".", ".."}:
            raise BadRequest("not a namespace", namespace=query.namespace)
    names = [name.short for name in await broker.topics.list_names(namespace=namespace)]
    if isinstance(query.after, str):
        names = [name for name in names if name > query.after]
    answer = TopicList(topics=names[: query.max])
    if len(names) > query.max:
        answer.next = names[query.max - 1]
    return json_reply(answer)


async def create_topic(broker: Broker, exchange: Exchange) -> Reply:
    exchange.query(RoutingQuery)
    created = not await broker.topics.exists(exchange.name)
    topic = await broker.topic(exchange.name, create=True)
    return json_reply(Created(topic=topic.name.short, created=created), status=201 if created else 200)


async def delete_topic(broker: Broker, exchange: Exchange) -> Reply:
    query = exchange.query(ForceQuery)
    await broker.topics.delete(exchange.name, force=query.force)
    return json_reply(Deleted(deleted=exchange.name.short))


async def topic_stats(broker: Broker, exchange: Exchange) -> Reply:
    exchange.query(RoutingQuery)
    topic = await broker.topic(exchange.name)
    ledger = topic.ledger
    subscriptions = {}
    messages_out = bytes_out = 0
    for name, subscription in topic.subscriptions.items():
        subscription.tick()
        messages_out += subscription.messages_out
        bytes_out += subscription.bytes_out
        subscriptions[name] = SubscriptionStats(
            type=subscription.type,
            backlog_entries=subscription.cursor.backlog_entries,
            unacked=len(subscription.dispatcher.leases),
            consumers=len(subscription.sessions),
            mark_delete=str(subscription.cursor.mark_delete),
        )
    ledgers = ledger.internal_stats().get("ledgers")
    return json_reply(
        TopicStats(
            topic=topic.name.short,
            owner=broker.url,
            entries=ledger.entries_count,
            size=ledger.size,
            ledgers=len(ledgers) if isinstance(ledgers, list) else 0,
            first=str(ledger.first_position),
            last=str(ledger.last_confirmed),
            messages_in=topic.messages_in,
            bytes_in=topic.bytes_in,
            messages_out=messages_out,
            bytes_out=bytes_out,
            subscriptions=subscriptions,
        )
    )


async def topic_internal_stats(broker: Broker, exchange: Exchange) -> Reply:
    exchange.query(RoutingQuery)
    topic = await broker.topic(exchange.name)
    return json_reply(topic.ledger.internal_stats())


async def read_messages(broker: Broker, exchange: Exchange) -> Reply:
    query = exchange.query(ReadQuery)
    start = parse_place(query.start)
    topic = await broker.topic(exchange.name)
    if isinstance(start, MessageId) and start.partition not in (-1, topic.partition):
        raise BadRequest("the id is of another partition", message_id=str(start))
    wait_ms = 0 if broker.draining else min(query.wait_ms, broker.settings.receive_wait_ms_max)
    found, following = await topic.read(start, count_max=query.max, bytes_max=query.max_bytes, wait_s=wait_ms / 1000)
    return json_reply(
        ReadAnswer(messages=[view(row.message, message_id=str(row.id)) for row in found], next=str(following))
    )


async def read_message(broker: Broker, exchange: Exchange) -> Reply:
    exchange.query(RoutingQuery)
    message_id = MessageId.parse(exchange.params["message_id"])
    topic = await broker.topic(exchange.name)
    found = await topic.read_one(message_id)
    return json_reply(
        OneMessage(
            message=view(found.message, message_id=str(found.id)),
            batch_size=found.message.batch_size,
            ledger=await _ledger_of(broker, found.id.position),
        )
    )


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
