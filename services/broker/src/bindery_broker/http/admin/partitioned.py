"""Calls on partitioned topics as a whole: create, enlarge, delete, list and describe them.

Any broker runs them. The steps of a change are those of `/v1` (`http.v1.partitioned.lifecycle`), so that an interrupted
one can be completed over either API. Source: Pulsar PersistentTopicsBase.
"""

from typing import Any, Final

import msgspec
from bindery_core.errors import Conflict, NoSuchTopic
from bindery_pulsar.topic_name import TopicName
from fastapi import APIRouter
from starlette.responses import Response

from bindery_broker.errors import TopicInUse
from bindery_broker.http.admin import calls
from bindery_broker.http.admin.calls import ANY_TOPIC, ROOT, Refused, answer, call, done, flag, named, param
from bindery_broker.http.admin.on_partitions import ask_each, found_by_name, metadata_json
from bindery_broker.http.admin.partition_sums import join
from bindery_broker.http.admin.upkeep.properties import checked
from bindery_broker.http.exchange import Exchange
from bindery_broker.http.v1.partitioned import lifecycle
from bindery_broker.partitioned.record import PartitionedRecord

router: Final = APIRouter()
PARTITIONS: Final = ANY_TOPIC + "/partitions"


class _Metadata(msgspec.Struct):
    partitions: int
    properties: dict[str, str] | None = None


@call(router, "GET", ROOT + "/persistent/{tenant:form}/{namespace:form}/partitioned", "adminListPartitioned")
async def list_partitioned(exchange: Exchange) -> Response:
    await calls.check_namespace(exchange, reason="Namespace does not exist")
    space = (param(exchange, "tenant"), param(exchange, "namespace"))
    return answer([name.full for name in await exchange.broker.partitioned.list_names(*space)])


@call(router, "PUT", PARTITIONS, "adminCreatePartitioned")
async def create(exchange: Exchange) -> Response:
    """The body is the number of partitions, or an object that has it and properties of the topic."""
    name = named(exchange)
    wanted: int | _Metadata = await calls.body(exchange, int | _Metadata)
    found = _Metadata(wanted) if isinstance(wanted, int) else wanted
    checked(found.properties or {})
    if name.partition >= 0:
        raise Refused(412, "Partitioned Topic Name should not contain '-partition-'")
    await calls.check_namespace(exchange, reason="Namespace not found")
    if found.partitions <= 0:
        raise Refused(406, "Number of partitions should be more than 0")
    if found.partitions > (most := exchange.broker.partitioned.partitions_max):
        raise Refused(406, f"Number of partitions should be less than or equal to {most}")
    try:
        is_new = await lifecycle.create(exchange, name, found.partitions, properties=found.properties)
    except Conflict as error:  # an ordinary topic has this name
        raise Refused(409, "This topic already exists") from error
    if not is_new:
        raise Refused(409, "This topic already exists")
    return done()


@call(router, "POST", PARTITIONS, "adminUpdatePartitioned")
async def update(exchange: Exchange) -> Response:
    """The body is the new number of partitions. New partitions get the subscriptions of the topic."""
    name = named(exchange)
    wanted: int = await calls.body(exchange, int)
    record = await _record(exchange, name)
    if record is None:
        raise Refused(409, f"Topic {name.full} is not the partitioned topic.")
    if wanted < record.partitions:
        raise Refused(
            422, f"Desired partitions {wanted} can't be less than the current partitions {record.partitions}."
        )
    most = exchange.broker.partitioned.partitions_max
    if wanted > max(most, record.partitions):
        limit = f"the maximum partitions per topic {most}."
        raise Refused(422, f"Desired partitions {wanted} can't be greater than {limit}")
    await lifecycle.set_partitions(exchange, name, wanted)
    return done()


@call(router, "GET", PARTITIONS, "adminPartitionedMetadata")
async def metadata(exchange: Exchange) -> Response:
    """0 partitions: the topic is not partitioned. Raises Refused (404) for a missing topic, unless
    `checkAllowAutoCreation=true` and its policies let a client create it: with partitions, it is created here."""
    name = named(exchange)
    may_create = flag(exchange, "checkAllowAutoCreation")
    record = await _record(exchange, name)
    if record is not None:
        return answer(metadata_json(record))
    if name.partition < 0 and not await exchange.broker.topics.exists(name):
        if not may_create:
            raise NoSuchTopic("no such topic", topic=name.short)
        await calls.check_namespace(exchange, reason="Namespace not found")
        if not exchange.broker.policies.effective(name).auto_create_topics:
            raise NoSuchTopic("no such topic", topic=name.short)
        if partitions := await exchange.broker.topics.implicit_partitions(name):
            await lifecycle.create(exchange, name, partitions)
            return answer({"partitions": partitions, "deleted": False})
    return answer({"partitions": 0, "deleted": False})


@call(router, "DELETE", PARTITIONS, "adminDeletePartitioned")
async def delete(exchange: Exchange) -> Response:
    name, force = named(exchange), flag(exchange, "force")
    try:
        await lifecycle.delete(exchange, name, force=force)
    except TopicInUse as error:
        raise Refused(412, "Topic has active producers/subscriptions") from error
    except NoSuchTopic as error:
        if await exchange.broker.topics.exists(name):
            reason = "is a non-partitioned topic. Instead of calling delete-partitioned-topic please call delete."
            raise Refused(409, f"{name.full} {reason}") from error
        raise Refused(404, f"Topic {name.full} not found.") from error
    return done()


@call(router, "POST", ANY_TOPIC + "/createMissedPartitions", "adminCreateMissedPartitions")
async def create_missed(exchange: Exchange) -> Response:
    name = named(exchange)
    record = await _record(exchange, name)
    if record is None:
        raise Refused(404, f"Topic {name.full} does not exist")
    await lifecycle.set_partitions(exchange, name, record.partitions)
    return done()


@call(router, "GET", ANY_TOPIC + "/partitioned-stats", "adminPartitionedStats")
async def partitioned_stats(exchange: Exchange) -> Response:
    """The sums of the partitions, and with `perPartition=true` (the default) those of each partition."""
    name, per_partition = named(exchange), flag(exchange, "perPartition", default=True)
    record = await _existing(exchange, name)
    found: dict[str, dict[str, Any]] = found_by_name(await ask_each(exchange, record, "/stats"))
    parts = {"partitions": found if per_partition else {}}
    return answer({**join(list(found.values())), "metadata": metadata_json(record), **parts})


@call(router, "GET", ANY_TOPIC + "/partitioned-internalStats", "adminPartitionedInternalStats")
async def partitioned_internal_stats(exchange: Exchange) -> Response:
    name = named(exchange)
    record = await _existing(exchange, name)
    found = found_by_name(await ask_each(exchange, record, "/internalStats"))
    return answer({"metadata": metadata_json(record), "partitions": found})


async def _record(exchange: Exchange, name: TopicName) -> PartitionedRecord | None:
    """Return the record as it is stored; None: the topic is not partitioned."""
    stored = None if name.partition >= 0 else await exchange.broker.partitioned.read(name)
    return None if stored is None else stored.value


async def _existing(exchange: Exchange, name: TopicName) -> PartitionedRecord:
    record = await _record(exchange, name)
    if record is None:
        raise Refused(404, f"Partitioned Topic {name.full} not found")
    return record
