"""What the calls of a topic do on a partitioned one.

| calls                                                            | on a partitioned topic                           |
|------------------------------------------------------------------|--------------------------------------------------|
| subscriptions: list, create, delete, skip all, expire, reset to  | at each partition                                |
| a time, properties; unload, trim, truncate, compact              |                                                  |
| internal-info                                                    | that of each partition                           |
| properties, lookup                                               | those of the whole topic                         |
| stats, internalStats, lastMessageId, status of a compaction      | 404: no topic has this name                      |
| create, delete                                                   | 409                                              |
| calls that name a message or a place                             | 405                                              |

A call at each partition is one of a single partition to the same API, which its owner answers. It succeeds if all
partitions succeed; a subscription is created or deleted if that happened in at least one partition, so that a repeated
call completes an interrupted one. Source: Pulsar PersistentTopicsBase.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final
from urllib.parse import quote

from bindery_core.errors import NoSuchSubscription, NoSuchTopic
from bindery_pulsar.topic_name import TopicName
from starlette.responses import Response

from bindery_broker.http.admin.calls import ROOT, Refused, answer, done
from bindery_broker.http.admin.upkeep.properties import remove_of_partitioned, set_of_partitioned
from bindery_broker.http.exchange import Exchange, Reply
from bindery_broker.http.v1.partitioned.calls import Answer, first_failure, on_each, partitions_of
from bindery_broker.http.v1.partitioned.calls import call as call_partition
from bindery_broker.partitioned.record import PartitionedRecord

Operation = Callable[[Exchange], Awaitable[Response]]
Handler = Callable[[Exchange, PartitionedRecord, Operation], Awaitable[Response]]
_TOPIC_PARTS: Final = 6
"""Number of parts of the path up to the topic: admin, v2, persistent, tenant, namespace, topic."""


def metadata_json(record: PartitionedRecord) -> dict[str, Any]:
    """Return PartitionedTopicMetadata."""
    found: dict[str, Any] = {"partitions": record.partitions, "deleted": record.is_deleted}
    properties = record.members.get("properties")
    return found | ({"properties": properties} if properties else {})


async def ask_each(exchange: Exchange, record: PartitionedRecord, path: str) -> dict[TopicName, Answer]:
    """Return the answer of each partition to a GET. `path`: what follows the topic."""
    return await _each(exchange, record, "GET", path, query=b"", body=None)


def found_by_name(answers: Mapping[TopicName, Answer]) -> dict[str, Any]:
    """Return the JSON of the partitions that exist, by full name. Raises the error of another one that fails."""
    _raise_failure([one for one in answers.values() if one.status != NoSuchTopic.status])
    return {name.full: one.json() for name, one in answers.items() if one.is_success}


async def at_each(
    exchange: Exchange, record: PartitionedRecord, method: str, path: str, *, body: bytes | None = None
) -> dict[TopicName, Answer]:
    """Return the answer of each partition to a request, of which all succeed. Raises the error of one that fails."""
    answers = await _each(exchange, record, method, path, query=b"", body=body)
    _raise_failure(list(answers.values()))
    return answers


async def _each(
    exchange: Exchange, record: PartitionedRecord, method: str, path: str, *, query: bytes, body: bytes | None
) -> dict[TopicName, Answer]:
    async def one(partition: TopicName) -> Answer:
        parts = (partition.tenant, partition.namespace, partition.local)
        root = f"{ROOT}/persistent/" + "/".join(quote(part, safe="") for part in parts)
        return await call_partition(exchange, method, partition, path, query=query, body=body, root=root)

    names = partitions_of(exchange.topic, record.partitions)
    return dict(zip(names, await on_each(names, one), strict=True))


async def _repeat(exchange: Exchange, record: PartitionedRecord) -> dict[TopicName, Answer]:
    """Send the request to each partition."""
    rest = exchange.raw_path.decode("ascii").strip("/").split("/")[_TOPIC_PARTS:]
    path = "".join(f"/{part}" for part in rest)
    body = None if exchange.method == "GET" else await exchange.body()
    return await _each(exchange, record, exchange.method, path, query=exchange.scope["query_string"], body=body)


def _raise_failure(answers: list[Answer]) -> None:
    """Raise the first error as that of this call."""
    failed = first_failure(answers)
    if failed is not None:
        raise _Failed(failed)


class _Failed(Refused):
    def __init__(self, failed: Answer) -> None:
        found = failed.json()
        super().__init__(failed.status, str(found.get("reason") or found.get("detail")))


async def _at_each(exchange: Exchange, record: PartitionedRecord, _operation: Operation) -> Response:
    answers = await _repeat(exchange, record)
    failed = [one for one in answers.values() if not one.is_success]
    if (
        failed
        and all(one.status == NoSuchSubscription.status for one in failed)
        and "subscription" in exchange.path_params
    ):
        raise NoSuchSubscription("no such subscription", topic=exchange.topic.short)
    _raise_failure(failed)
    return done()


async def _create_subscription(exchange: Exchange, record: PartitionedRecord, _operation: Operation) -> Response:
    answers = list((await _repeat(exchange, record)).values())
    created = any(one.is_success for one in answers)
    _raise_failure([one for one in answers if one.status != 409] if created else answers)
    return done()


async def _delete_subscription(exchange: Exchange, record: PartitionedRecord, _operation: Operation) -> Response:
    answers = list((await _repeat(exchange, record)).values())
    if all(one.status == NoSuchSubscription.status for one in answers):
        raise Refused(404, "Subscription not found")
    _raise_failure([one for one in answers if one.status != NoSuchSubscription.status])
    return done()


async def _list_subscriptions(exchange: Exchange, record: PartitionedRecord, _operation: Operation) -> Response:
    found = found_by_name(await _repeat(exchange, record))
    return answer(sorted({name for names in found.values() for name in names}))


async def _first_found(exchange: Exchange, record: PartitionedRecord, _operation: Operation) -> Response:
    """Return the answer of the first partition that has the subscription."""
    answers = (await _repeat(exchange, record)).values()
    for one in answers:
        if one.is_success:
            return Reply(one.status, one.body)
    if all(one.status == NoSuchSubscription.status for one in answers):
        raise NoSuchSubscription("no such subscription", topic=exchange.topic.short)
    raise _Failed(next(iter(answers)))


async def _info(exchange: Exchange, record: PartitionedRecord, _operation: Operation) -> Response:
    return answer({"version": 0, "partitions": found_by_name(await _repeat(exchange, record))})


async def _properties(_exchange: Exchange, record: PartitionedRecord, _operation: Operation) -> Response:
    return answer(record.members.get("properties") or {})


async def _set_properties(exchange: Exchange, _record: PartitionedRecord, _operation: Operation) -> Response:
    return await set_of_partitioned(exchange)


async def _remove_property(exchange: Exchange, _record: PartitionedRecord, _operation: Operation) -> Response:
    return await remove_of_partitioned(exchange)


async def _here(exchange: Exchange, _record: PartitionedRecord, operation: Operation) -> Response:
    return await operation(exchange)


async def _missing(exchange: Exchange, _record: PartitionedRecord, _operation: Operation) -> Response:
    raise NoSuchTopic("a partitioned topic has no statistics of its own", topic=exchange.topic.short)


async def _create(_exchange: Exchange, _record: PartitionedRecord, _operation: Operation) -> Response:
    raise Refused(409, "This topic already exists")


async def _delete(exchange: Exchange, _record: PartitionedRecord, _operation: Operation) -> Response:
    reason = "is a partitioned topic, instead of calling delete topic, please call delete-partitioned-topic."
    raise Refused(409, f"{exchange.topic.full} {reason}")


def _refuse(reason: str) -> Handler:
    async def handler(_exchange: Exchange, _record: PartitionedRecord, _operation: Operation) -> Response:
        raise Refused(405, reason)

    return handler


_ONE_PARTITION: Final = "on a partitioned topic is not allowed, please try do it on specific topic partition"
_EXAMINE: Final = (
    "Examine messages on a partitioned topic is not allowed, please try examine message on specific topic partition"
)
ON_PARTITIONED: Final[Mapping[str, Handler]] = {
    "adminCreateTopic": _create,
    "adminDeleteTopic": _delete,
    "adminTopicStats": _missing,
    "adminInternalStats": _missing,
    "adminInternalInfo": _info,
    "adminTopicProperties": _properties,
    "adminSetTopicProperties": _set_properties,
    "adminRemoveTopicProperty": _remove_property,
    "adminTerminate": _refuse("Termination of a partitioned topic is not allowed"),
    "adminAnalyzeBacklog": _refuse(f"Analyze backlog {_ONE_PARTITION}"),
    "adminLastMessageId": _missing,
    "adminMessageIdAt": _refuse(f"Get message ID by timestamp {_ONE_PARTITION}"),
    "adminGetEntry": _refuse("GetMessageById is not allowed on partitioned-topic"),
    "adminExamineMessage": _refuse(_EXAMINE),
    "adminBacklogSize": _refuse("calculate backlog size is not allowed for partitioned-topic"),
    "adminUnloadTopic": _at_each,
    "adminTrimTopic": _at_each,
    "adminCompact": _at_each,
    "adminCompactionStatus": _missing,
    "adminTruncateTopic": _at_each,
    "adminListSubscriptions": _list_subscriptions,
    "adminCreateSubscription": _create_subscription,
    "adminDeleteSubscription": _delete_subscription,
    "adminSkipAll": _at_each,
    "adminSkip": _refuse("Skip messages on a partitioned topic is not allowed"),
    "adminExpire": _at_each,
    "adminExpireAll": _at_each,
    "adminResetToTime": _at_each,
    "adminResetToMessage": _refuse("Reset-cursor at position is not allowed for partitioned-topic"),
    "adminPeek": _refuse("Peek messages on a partitioned topic is not allowed"),
    "adminSubscriptionProperties": _first_found,
    "lookupTopic": _here,
    "lookupBundle": _here,
}
"""By the name of the call."""
