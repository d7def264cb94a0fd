"""Calls on topics: create, list, delete and describe them, read single entries, look up their owner."""

from typing import Any, Final
from urllib.parse import urlsplit

from bindery_core.errors import BinderyError
from bindery_pulsar.entry_size import ENTRY_SIZE_MAX
from bindery_pulsar.message_id import Position
from fastapi import APIRouter
from starlette.responses import Response

from bindery_broker.errors import RESPONSES_FULL, ResponsesFull, TopicInUse
from bindery_broker.http.admin import calls
from bindery_broker.http.admin.calls import ROOT, TOPIC, Refused, answer, call, done, number, param, text, topic_of
from bindery_broker.http.admin.stored_entry import entry_reply
from bindery_broker.http.admin.topic_json import internal_info, internal_stats, topic_stats
from bindery_broker.http.admin.upkeep.properties import given_properties
from bindery_broker.http.authorization import of_visible_subscriptions
from bindery_broker.http.exchange import Exchange
from bindery_broker.http.v1.statistics_view import read_oldest
from bindery_broker.topics.topic import Topic

router: Final = APIRouter()
ID_MAX: Final = 2**63 - 1
"""Largest ledger or entry id."""
NON_PERSISTENT: Final = ROOT + "/non-persistent/{tenant:form}/{namespace:form}"
LOOKUP: Final = "/lookup/v2/topic/persistent/{tenant:form}/{namespace:form}/{topic:form}"


@call(router, "GET", ROOT + "/persistent/{tenant:form}/{namespace:form}", "adminListTopics")
async def list_topics(exchange: Exchange) -> Response:
    """List the topics of a namespace; each partition is a topic."""
    space = (param(exchange, "tenant"), param(exchange, "namespace"))
    prefix = f"persistent://{'/'.join(space)}/"
    return answer([prefix + name for name in await exchange.broker.names.local_names(*space)])


@call(router, "GET", NON_PERSISTENT, "adminListNonPersistent")
async def list_non_persistent(_exchange: Exchange) -> Response:
    """There are no topics that are not persistent."""
    return answer([])


@call(router, "GET", NON_PERSISTENT + "/partitioned", "adminListNonPersistentPartitioned")
async def list_non_persistent_partitioned(_exchange: Exchange) -> Response:
    return answer([])


@call(router, "PUT", TOPIC, "adminCreateTopic")
async def create_topic(exchange: Exchange) -> Response:
    """The body, a map of properties, may be empty."""
    properties = await given_properties(exchange)
    if await exchange.broker.topics.exists(exchange.topic):
        raise Refused(409, "This topic already exists")
    topic = await exchange.broker.topic(exchange.topic, create=True, is_explicit=True)
    if properties:
        await topic.ledger.set_properties(properties)
    return done()


@call(router, "DELETE", TOPIC, "adminDeleteTopic")
async def delete_topic(exchange: Exchange) -> Response:
    force = calls.flag(exchange, "force")
    try:
        await exchange.broker.topics.delete(exchange.topic, force=force)
    except TopicInUse as error:
        raise Refused(412, "Topic has active producers/subscriptions") from error
    return done()


@call(router, "GET", TOPIC + "/stats", "adminTopicStats")
async def stats(exchange: Exchange) -> Response:
    topic = await topic_of(exchange)
    await read_oldest(list(topic.subscriptions.values()))
    found = topic_stats(topic, exchange.broker, owner=urlsplit(exchange.broker.url).netloc)
    found["subscriptions"] = await of_visible_subscriptions(exchange, topic.name, found["subscriptions"])
    if found["oldestBacklogMessageSubscriptionName"] not in found["subscriptions"]:
        found["oldestBacklogMessageSubscriptionName"] = None
    return answer(found)


@call(router, "GET", TOPIC + "/internalStats", "adminInternalStats")
async def stats_internal(exchange: Exchange) -> Response:
    topic = await topic_of(exchange)
    found = internal_stats(topic)
    return answer({**found, "cursors": await of_visible_subscriptions(exchange, topic.name, found["cursors"])})


@call(router, "GET", TOPIC + "/internal-info", "adminInternalInfo")
async def info_internal(exchange: Exchange) -> Response:
    topic = await topic_of(exchange)
    found = internal_info(topic)
    return answer({**found, "cursors": await of_visible_subscriptions(exchange, topic.name, found["cursors"])})


@call(router, "GET", TOPIC + "/lastMessageId", "adminLastMessageId")
async def last_message_id(exchange: Exchange) -> Response:
    topic = await topic_of(exchange)
    found = calls.id_json(topic.ledger.last_confirmed, topic.name)
    return answer({**found, "batchIndex": -1, "batchSize": 0})


@call(router, "GET", TOPIC + "/messageid/{timestamp:form}", "adminMessageIdAt")
async def message_id_at(exchange: Exchange) -> Response:
    """The first entry that was published at a time (ms since 1970) or later; the next one if there is none."""
    at_ms = number(param(exchange, "timestamp"), "the time", least=0, most=ID_MAX)
    topic = await topic_of(exchange)
    return answer(calls.id_json(await topic.ledger.find_published(at_ms), topic.name))


@call(router, "GET", TOPIC + "/ledger/{ledger:form}/entry/{entry:form}", "adminGetEntry")
async def get_entry(exchange: Exchange) -> Response:
    ids = [number(param(exchange, name), f"the {name} id", least=0, most=ID_MAX) for name in ("ledger", "entry")]
    topic = await topic_of(exchange)
    return await reply_with(exchange, topic, Position(*ids), missing="Message id not found")


@call(router, "GET", TOPIC + "/examinemessage", "adminExamineMessage")
async def examine(exchange: Exchange) -> Response:
    """The n-th entry from the beginning or from the end of the topic."""
    query = exchange.query_params
    nth = number(query.get("messagePosition", "1"), "messagePosition", least=1, most=ID_MAX)
    initial = query.get("initialPosition", "latest")
    if initial not in ("earliest", "latest"):
        raise Refused(412, "initialPosition must be earliest or latest")
    topic = await topic_of(exchange)
    count = topic.ledger.entries_count
    if not count:
        raise Refused(412, "Could not examine messages due to the total message is zero")
    index = nth - 1 if initial == "earliest" else count - nth
    position = topic.ledger.position_at(min(max(index, 0), count - 1))
    return await reply_with(exchange, topic, position, missing="Message not found")


@call(router, "PUT", TOPIC + "/backlogSize", "adminBacklogSize")
async def backlog_size(exchange: Exchange) -> Response:
    """Bytes that are stored after a message, estimated within its ledger."""
    wanted = await calls.body(exchange, dict[str, Any])
    position = position_of(wanted)
    topic = await topic_of(exchange)
    return answer(topic.ledger.size_after(position))


@call(router, "PUT", TOPIC + "/unload", "adminUnloadTopic")
async def unload(exchange: Exchange) -> Response:
    """Close the topic. The next request opens it again; consumers then begin new sessions."""
    await exchange.broker.topics.unload_topic(exchange.topic)
    return done()


@call(router, "POST", TOPIC + "/trim", "adminTrimTopic")
async def trim(exchange: Exchange) -> Response:
    """Delete the ledgers that no subscription and no retention setting needs."""
    await (await topic_of(exchange)).ledger.trim()
    return done()


@call(router, "DELETE", TOPIC + "/truncate", "adminTruncateTopic")
async def truncate(exchange: Exchange) -> Response:
    """Acknowledge everything in all subscriptions, begin a new ledger, and delete what retention does not keep."""
    topic = await topic_of(exchange)
    for subscription in list(topic.subscriptions.values()):
        await subscription.clear()
    await topic.ledger.roll()
    await topic.ledger.trim()
    return done()


@call(router, "PUT", TOPIC + "/compaction", "adminCompact")
async def compact(exchange: Exchange) -> Response:
    """Start a compaction. Raises Conflict while one runs."""
    (await topic_of(exchange)).compaction.start()
    return done()


@call(router, "GET", TOPIC + "/compaction", "adminCompactionStatus")
async def compaction_status(exchange: Exchange) -> Response:
    """The compaction that runs, or the last one since the topic was loaded."""
    run = (await topic_of(exchange)).compaction.last_run
    return answer({"status": run.status.value, "lastError": "" if run.error is None else str(run.error)})


@call(router, "GET", LOOKUP, "lookupTopic")
async def lookup(exchange: Exchange) -> Response:
    """Refuse to name a broker for the binary protocol, with the address of the topic's owner, which answers.

    An answer with an empty address would be accepted by clients of Pulsar, and fail there with `port out of range:-1`.
    """
    served = f"a broker of Bindery at {exchange.broker.url} serves the topic over HTTP"
    raise Refused(
        501, f"{served}; it has no port for Pulsar's clients. They can use the topic after an unload to Pulsar"
    )


@call(router, "GET", LOOKUP + "/bundle", "lookupBundle")
async def bundle(exchange: Exchange) -> Response:
    return text((await exchange.broker.ownership.divisions.find(exchange.topic)).name)


def position_of(value: dict[str, Any]) -> Position:
    """Return the position of a message id. Raises Refused if it is none."""
    ids = [value.get("ledgerId"), value.get("entryId")]
    if not all(isinstance(one, int) and -1 <= one <= ID_MAX for one in ids):
        raise Refused(400, "a message id has ledgerId and entryId")
    return Position(*ids)  # type: ignore[arg-type]


async def reply_with(exchange: Exchange, topic: Topic, position: Position, *, missing: str) -> Response:
    """Return an entry. Raises Refused (404) with the reason `missing` if there is none at this position."""
    size = ENTRY_SIZE_MAX + exchange.broker.topics.limits.decoded_bytes_max
    if not topic.ledger.contains(position):
        raise Refused(404, missing)
    if not exchange.charge.take(least=ENTRY_SIZE_MAX, most=size):
        raise ResponsesFull(RESPONSES_FULL)
    found = await topic.ledger.read(position, entries_max=1, size_max=1)
    if not found or found[0][0] != position:  # trimmed meanwhile
        raise Refused(404, missing)
    try:
        return entry_reply(*found[0], size_max=exchange.broker.topics.limits.decoded_bytes_max)
    except BinderyError as error:
        raise Refused(500, str(error)) from error
