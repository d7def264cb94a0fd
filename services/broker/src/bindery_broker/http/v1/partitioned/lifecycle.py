"""Create, enlarge and delete partitioned topics.

| operation | steps                                                                                                  |
|-----------|--------------------------------------------------------------------------------------------------------|
| create    | store the record; create the partitions                                                                |
| enlarge   | create the new partitions with the subscriptions of partition 0, from their first message on; then     |
|           | store the larger number, so that no message is stored in a partition before it has its subscriptions   |
| delete    | store in the record that the topic is deleted; delete the partitions; delete the record                |

Each can be interrupted after any step, and is completed by a repetition of the same request, at any broker. A deletion
that was interrupted also goes on when something asks for the topic, and by itself (`partitioned.deletions`). Until it
is complete the topic cannot be used, and nothing can create a topic with its name or that of one of its partitions.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
from bindery_core.errors import Conflict, NoSuchTopic
from bindery_pulsar.topic_name import TopicName

from bindery_broker.errors import TopicInUse
from bindery_broker.http.exchange import Exchange
from bindery_broker.http.v1.partitioned.calls import Answer, call, on_each, partitions_of, raise_failure
from bindery_broker.partitioned.record import PartitionedRecord


async def create(
    exchange: Exchange, name: TopicName, partitions: int, *, properties: Mapping[str, str] | None = None
) -> bool:
    """Create the topic. Returns whether it was created; an existing one is not changed."""
    created = await exchange.broker.partitioned.create(name, partitions, properties=properties)
    if created:
        await _create(exchange, partitions_of(name, partitions))
    return created


async def set_partitions(exchange: Exchange, name: TopicName, partitions: int) -> bool:
    """Create the topic, or enlarge it; create partitions that are missing. Returns whether it was created."""
    catalog = exchange.broker.partitioned
    stored = await catalog.read(name)
    if stored is None:
        if await create(exchange, name, partitions):
            return True
        stored = await catalog.read(name)
        if stored is None:
            raise Conflict("the topic is being deleted", topic=name.short)
    if stored.value.is_deleted:
        raise Conflict("the topic is being deleted; repeat the deletion to complete it", topic=name.short)
    catalog.check_grows(name, stored.value, partitions)
    before = stored.value.partitions
    if partitions > before and catalog.admit_new is not None:
        await catalog.admit_new(name, partitions - before)
    await _create(exchange, partitions_of(name, partitions))
    if partitions > before:
        await _subscribe_as_first(exchange, name, partitions_of(name, partitions, start=before))
        await catalog.enlarge(name, partitions)
    return False


async def delete(exchange: Exchange, name: TopicName, *, force: bool) -> None:
    """Delete the topic with its partitions. Raises TopicInUse if one has consumers, unless `force`; NoSuchTopic."""
    catalog = exchange.broker.partitioned
    stored = await catalog.read(name)
    if stored is None:
        raise NoSuchTopic("no such partitioned topic", topic=name.short)
    if not force and not stored.value.is_deleted:
        await _check_unused(exchange, name, stored.value)
    if force:
        await exchange.broker.topics.forced_deletions.record(name)
    record = await catalog.mark_deleted(name)

    async def one(partition: TopicName) -> Answer:
        return await call(exchange, "DELETE", partition, query=b"force=true")

    answers = await on_each(partitions_of(name, record.partitions), one)
    raise_failure([answer for answer in answers if answer.status != NoSuchTopic.status])
    await catalog.remove(name)


async def _check_unused(exchange: Exchange, name: TopicName, record: PartitionedRecord) -> None:
    async def one(partition: TopicName) -> Answer:
        return await call(exchange, "GET", partition)

    answers = await on_each(partitions_of(name, record.partitions), one)
    raise_failure([answer for answer in answers if answer.status != NoSuchTopic.status])
    for index, answer in enumerate(answers):
        if answer.is_success and any(sub["consumers"] for sub in answer.json()["subscriptions"].values()):
            raise TopicInUse("the topic has consumers; pass force=true to delete it", topic=name.short, partition=index)


async def _create(exchange: Exchange, names: list[TopicName]) -> None:
    async def one(partition: TopicName) -> Answer:
        return await call(exchange, "PUT", partition)

    raise_failure(await on_each(names, one))


async def _subscribe_as_first(exchange: Exchange, name: TopicName, partitions: list[TopicName]) -> None:
    """Create the subscriptions of partition 0 on other partitions."""
    after: str | None = None
    while True:
        query = b"" if after is None else urlencode({"after": after}).encode()
        answer = await call(exchange, "GET", name.with_partition(0), "/subscriptions", query=query)
        raise_failure([answer])
        found = answer.json()
        for subscription in found["subscriptions"]:
            if subscription.get("properties") is not None and subscription.get("durable", True):
                await _subscribe(exchange, subscription, partitions)
        after = found.get("next")
        if after is None:
            return


async def _subscribe(exchange: Exchange, subscription: dict[str, Any], partitions: list[TopicName]) -> None:
    body: dict[str, Any] = {"initial": "earliest", "subscription_properties": subscription["properties"]}
    if "tags" in subscription:
        body["tags"] = subscription["tags"]
    path = f"/subscriptions/{quote(subscription['subscription'], safe='')}"

    async def one(partition: TopicName) -> Answer:
        return await call(exchange, "PUT", partition, path, body=msgspec.json.encode(body))

    raise_failure(await on_each(partitions, one))
