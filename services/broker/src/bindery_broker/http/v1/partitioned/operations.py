"""What each operation does on a partitioned topic.

| operations                                                   | on a partitioned topic                               |
|--------------------------------------------------------------|------------------------------------------------------|
| produce                                                      | `producing`                                          |
| receive, stream, ack, nack, retry                            | `consuming`                                          |
| those with a message id; reading with `partition`            | at the partition of the id                           |
| subscribe, unsubscribe, leave, seek, expire, clear, reset    | at each partition                                    |
| statistics, lists and explanations                           | joined from all partitions                           |
| dead letters                                                 | once: the partitions share the dead-letter topic     |
| create, delete                                               | the whole topic                                      |
| others                                                       | refused (TopicIsPartitioned): name a partition       |
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final
from urllib.parse import quote

import msgspec
from bindery_core.errors import BadRequest, Conflict, NoSuchTopic, NotThere
from bindery_pulsar.message_id import MessageId
from bindery_pulsar.topic_name import TopicName
from starlette.responses import Response

from bindery_broker.errors import TopicIsPartitioned
from bindery_broker.http.exchange import Exchange, json_reply
from bindery_broker.http.v1.models import Created, Deleted
from bindery_broker.http.v1.partitioned import consuming, lifecycle, producing
from bindery_broker.http.v1.partitioned.calls import (
    Answer,
    call,
    enter,
    on_each,
    partitions_of,
    raise_failure,
)
from bindery_broker.partitioned.merging import merge
from bindery_broker.partitioned.record import PartitionedRecord

Operation = Callable[[Exchange], Awaitable[Response]]
Handler = Callable[[Exchange, PartitionedRecord, Operation], Awaitable[Response]]


class PartitionedOperations:
    """`at_owner.PartitionedOperation`."""

    def __init__(self, handlers: Mapping[str, Handler] | None = None) -> None:
        """`handlers`: those of operations of other APIs, by the operation's id."""
        self._handlers = {**_HANDLERS, **(handlers or {})}

    async def __call__(self, exchange: Exchange, whole: PartitionedRecord, operation: Operation) -> Response:
        name = exchange.topic
        if whole.is_deleted and exchange.operation != "deleteTopic":
            exchange.broker.deletions.go_on(name)
            raise Conflict("the topic is being deleted; retry when that is complete", topic=name.short)
        handler = self._handlers.get(exchange.operation)
        if handler is None:
            raise TopicIsPartitioned(
                "the topic is partitioned, and this operation is one of a single partition; name one, such as "
                f"{name.local}-partition-0",
                topic=name.short,
                partitions=whole.partitions,
            )
        return await handler(exchange, whole, operation)

    async def create(self, exchange: Exchange, name: TopicName, partitions: int) -> bool:
        return await lifecycle.set_partitions(exchange, name, partitions)


def partition_of_id(exchange: Exchange, whole: PartitionedRecord, message_id: MessageId) -> TopicName:
    """Return the partition of a message. Raises BadRequest if the id names none."""
    if not 0 <= message_id.partition < whole.partitions:
        raise BadRequest(
            "the message id names no partition of the topic; it has the form ledger:entry:partition:batch",
            message_id=str(message_id),
            partitions=whole.partitions,
        )
    return exchange.topic.with_partition(message_id.partition)


async def _at(exchange: Exchange, partition: TopicName, operation: Operation) -> Response:
    enter(exchange, partition)
    return await exchange.at_owner.run(exchange, operation)


async def _at_message(exchange: Exchange, whole: PartitionedRecord, operation: Operation) -> Response:
    message_id = MessageId.parse(exchange.path_params["message_id"])
    return await _at(exchange, partition_of_id(exchange, whole, message_id), operation)


async def _at_first(exchange: Exchange, _whole: PartitionedRecord, operation: Operation) -> Response:
    return await _at(exchange, exchange.topic.with_partition(0), operation)


async def _read(exchange: Exchange, whole: PartitionedRecord, operation: Operation) -> Response:
    start, text = exchange.query_params.get("start", ""), exchange.query_params.get("partition")
    if text is None and ":" in start:
        return await _at(exchange, partition_of_id(exchange, whole, MessageId.parse(start)), operation)
    if text is None:
        raise TopicIsPartitioned(
            "the topic is partitioned; name the partition to read: ?partition=0",
            topic=exchange.topic.short,
            partitions=whole.partitions,
        )
    if not text.isascii() or not text.isdecimal() or int(text[:10]) >= whole.partitions:
        raise BadRequest("the topic has no such partition", partition=text[:20], partitions=whole.partitions)
    return await _at(exchange, exchange.topic.with_partition(int(text[:10])), operation)


async def _each(exchange: Exchange, whole: PartitionedRecord) -> list[Answer]:
    """Send the request to each partition."""
    body = await exchange.body() or None
    path = _rest(exchange)

    async def one(partition: TopicName) -> Answer:
        return await call(exchange, exchange.method, partition, path, query=exchange.scope["query_string"], body=body)

    return await on_each(partitions_of(exchange.topic, whole.partitions), one)


def _rest(exchange: Exchange) -> str:
    """Return what follows the topic in the path, as the client wrote it."""
    rest = exchange.raw_path.decode("ascii").strip("/").split("/")[5:]
    return "".join(f"/{part}" for part in rest)


async def _create(exchange: Exchange, _whole: PartitionedRecord, _operation: Operation) -> Response:
    return _model(Created(topic=exchange.topic.short, created=False))


async def _delete(exchange: Exchange, _whole: PartitionedRecord, _operation: Operation) -> Response:
    force = exchange.query_params.get("force", "false") == "true"
    await lifecycle.delete(exchange, exchange.topic, force=force)
    return _model(Deleted(deleted=exchange.topic.short))


async def _subscribe(exchange: Exchange, whole: PartitionedRecord, _operation: Operation) -> Response:
    answers = await _each(exchange, whole)
    raise_failure(answers)
    created = any(answer.json()["created"] for answer in answers)
    return _model(Created(topic=exchange.topic.short, created=created), status=201 if created else 200)


async def _unsubscribe(exchange: Exchange, whole: PartitionedRecord, _operation: Operation) -> Response:
    subscription = exchange.path_params["subscription"]
    if exchange.query_params.get("force", "false") != "true":
        answers = await on_each(
            partitions_of(exchange.topic, whole.partitions), lambda one: _explanation(exchange, one)
        )
        for answer in answers:
            consumers = answer.json()["subscription"]["consumers"] if answer.is_success else ()
            if consumers:
                raise Conflict("the subscription has consumers", subscription=subscription, consumers=len(consumers))
    _check_any(await _each(exchange, whole))
    return _model(Deleted(deleted=subscription))


async def _leave(exchange: Exchange, whole: PartitionedRecord, _operation: Operation) -> Response:
    _check_any(await _each(exchange, whole))
    await consuming.leave(exchange)
    return _model(Deleted(deleted=exchange.path_params["consumer"]))


def _check_any(answers: list[Answer]) -> None:
    """Raise an error if a partition reports one, except that something is missing in some of them: a repeated request
    completes what an interrupted one has begun."""
    if any(answer.is_success for answer in answers):
        answers = [answer for answer in answers if answer.status != NotThere.status]
    raise_failure(answers)


async def _explanation(exchange: Exchange, partition: TopicName) -> Answer:
    path = f"/subscriptions/{quote(exchange.path_params['subscription'], safe='')}/explain"
    return await call(exchange, "GET", partition, path)


async def _move(exchange: Exchange, whole: PartitionedRecord, operation: Operation) -> Response:
    """Move the subscription in each partition, or in the partition of a message id."""
    await exchange.load_json()
    body = msgspec.json.decode(await exchange.body())
    message_id = body.get("message_id") if isinstance(body, dict) else None
    if isinstance(message_id, str) and ":" in message_id:
        place = MessageId.parse(message_id)
        return await _at(exchange, partition_of_id(exchange, whole, place), operation)
    answers = dict(enumerate(await _each(exchange, whole)))
    if exchange.operation == "resetSubscription" and any(answer.is_success for answer in answers.values()):
        answers = {index: one for index, one in answers.items() if one.status != Conflict.status}  # not damaged there
    raise_failure(list(answers.values()))
    return json_reply(
        {"next": None, "partitions": {str(index): answer.json()["next"] for index, answer in answers.items()}}
    )


def _members(answers: list[Answer]) -> list[dict[str, Any]]:
    return [answer.json() for answer in answers]


async def _stats(exchange: Exchange, whole: PartitionedRecord, _operation: Operation) -> Response:
    answers = await _each(exchange, whole)
    _check_any(answers)
    found = {str(index): answer.json() for index, answer in enumerate(answers) if answer.is_success}
    if not found:
        raise NoSuchTopic("the topic has no partitions; PUT .../partitions creates them", topic=exchange.topic.short)
    merged = merge(list(found.values()))
    return json_reply({**merged, "topic": exchange.topic.short, "partitions": found})


async def _internal(exchange: Exchange, whole: PartitionedRecord, _operation: Operation) -> Response:
    answers = await _each(exchange, whole)
    _check_any(answers)
    names = partitions_of(exchange.topic, whole.partitions)
    found = {name.full: one.json() for name, one in zip(names, answers, strict=True) if one.is_success}
    return json_reply({"metadata": {**whole.members, "partitions": whole.partitions}, "partitions": found})


async def _retention(exchange: Exchange, whole: PartitionedRecord, _operation: Operation) -> Response:
    """Join the ledgers of all partitions. The partitions have the policies of the topic, so the limits are the same."""
    answers = await _each(exchange, whole)
    _check_any(answers)
    found = {str(index): answer.json() for index, answer in enumerate(answers) if answer.is_success}
    if not found:
        raise NoSuchTopic("the topic has no partitions; PUT .../partitions creates them", topic=exchange.topic.short)
    ledgers = [{**ledger, "partition": int(index)} for index, one in found.items() for ledger in one["ledgers"]]
    first = next(iter(found.values()))
    return json_reply({**first, "topic": exchange.topic.short, "ledgers": ledgers})


async def _subscriptions(exchange: Exchange, whole: PartitionedRecord, _operation: Operation) -> Response:
    answers = await _each(exchange, whole)
    raise_failure(answers)
    pages = _members(answers)
    rows: dict[str, list[dict[str, Any]]] = {}
    damaged: dict[str, str] = {}
    for index, page in enumerate(pages):
        for one in page["subscriptions"]:
            rows.setdefault(one["subscription"], []).append(one)
        for subscription, reason in page.get("damaged", {}).items():
            damaged[subscription] = f"partition {index}: {reason}"
    ends = [page["next"] for page in pages if page.get("next") is not None]
    listed = sorted(one for one in rows if not ends or one <= min(ends))
    answer: dict[str, Any] = {"subscriptions": [merge(rows[one]) for one in listed]}
    if damaged:
        answer["damaged"] = damaged
    if ends:
        answer["next"] = min(ends)
    return json_reply(answer)


async def _explain(exchange: Exchange, whole: PartitionedRecord, operation: Operation) -> Response:
    message_id = exchange.query_params.get("message_id")
    if message_id is not None:
        return await _at(exchange, partition_of_id(exchange, whole, MessageId.parse(message_id)), operation)
    answers = await _each(exchange, whole)
    raise_failure(answers)
    pages = _members(answers)
    reasons = [f"partition {index}: {reason}" for index, page in enumerate(pages) for reason in page["blocked_by"]]
    return json_reply(
        {
            "subscription": merge([page["subscription"] for page in pages]),
            "states": merge([page["states"] for page in pages]),
            "limits": pages[0]["limits"],
            "summary": "; ".join(f"partition {index}: {page['summary']}" for index, page in enumerate(pages)),
            "blocked_by": reasons,
            **merge([{"policies": page["policies"]} for page in pages]),
            **({"warnings": warnings} if (warnings := _distinct(pages, "warnings")) else {}),
            "partitions": {str(index): page for index, page in enumerate(pages)},
        }
    )


def _distinct(pages: list[dict[str, Any]], member: str) -> list[str]:
    return list(dict.fromkeys(text for page in pages for text in page.get(member, ())))


def _model(answer: Created | Deleted, *, status: int = 200) -> Response:
    return json_reply(answer.model_dump(exclude_unset=True), status=status)


_HANDLERS: Final[Mapping[str, Handler]] = {
    "produce": producing.produce,
    "receive": consuming.receive,
    "stream": consuming.stream,
    "ack": consuming.ack,
    "nack": consuming.nack,
    "retry": consuming.retry,
    "readMessages": _read,
    "readMessage": _at_message,
    "cancelMessage": _at_message,
    "createTopic": _create,
    "deleteTopic": _delete,
    "topicStats": _stats,
    "topicInternalStats": _internal,
    "topicRetention": _retention,
    "subscribe": _subscribe,
    "unsubscribe": _unsubscribe,
    "listSubscriptions": _subscriptions,
    "seek": _move,
    "expire": _move,
    "clearBacklog": _move,
    "resetSubscription": _move,
    "explainSubscription": _explain,
    "leave": _leave,
    "listDeadLetters": _at_first,
    "redriveDeadLetters": _at_first,
    "purgeDeadLetters": _at_first,
}
