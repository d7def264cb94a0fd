"""Calls on the policies of a topic.

Any broker answers. A policy is read (GET), set (POST or PUT) and removed (DELETE); the calls are made from a table, as
those of namespaces. With `applied=true`, the policy in force is answered: that of the topic, of its namespace, or of
the broker. A partition has the policies of its topic and none of its own. A policy that is not set is answered with 200
without a body. Source: Pulsar PersistentTopics, TopicPolicies.
"""

from collections.abc import Callable
from typing import Any, Final

from bindery_core.errors import Corrupt, NoSuchTopic
from bindery_pulsar.entry_size import ENTRY_SIZE_MAX
from bindery_pulsar.topic_name import TopicName
from fastapi import APIRouter
from starlette.responses import Response

from bindery_broker.http.admin import calls
from bindery_broker.http.admin.calls import ANY_TOPIC, Call, Refused, answer, call, done, flag, named
from bindery_broker.http.admin.policy_rules import (
    Policy,
    check_level,
    check_value,
    quota_json,
    quota_type,
    register_unsupported,
)
from bindery_broker.http.exchange import Exchange, Reply
from bindery_broker.namespaces.policies import Persistence, Retention
from bindery_broker.namespaces.policy_codec import change_topic, set_in_topic
from bindery_broker.namespaces.records import Json

router: Final = APIRouter()
_SIZE: Final = (
    "topic-level maxMessageSize must be greater than or equal to 0 and must be smaller than that in the broker-level"
)
_UNACKED: Final = "maxUnackedNum must be 0 or more"
_QUOTAS: Final = "backLogQuotaMap"
_DELAYS: Final = {
    "active": "delayedDeliveryEnabled",
    "tickTime": "delayedDeliveryTickTimeMillis",
    "maxDeliveryDelayInMillis": "delayedDeliveryMaxDelayInMillis",
}
"""Members of DelayedDeliveryPolicies, and of TopicPolicies."""
_TICK_MS: Final = 1000
"""Pulsar's default of `tickTime`, which has no effect here."""
TTL: Final = Policy(
    "messageTTL", "messageTTLInSeconds", int, reason="Invalid value for message TTL", field="message_ttl_s"
)
_POLICIES: Final = (
    Policy("retention", "retentionPolicies", dict[str, Any], field="retention"),
    Policy("deduplicationEnabled", "deduplicationEnabled", bool, field="deduplication"),
    Policy(
        "deduplicationSnapshotInterval",
        "deduplicationSnapshotIntervalSeconds",
        int,
        reason="interval must be 0 or more",
        field="deduplication_snapshot_s",
    ),
    Policy("inactiveTopicPolicies", "inactiveTopicPolicies", dict[str, Any], field="inactive_topics"),
    Policy("persistence", "persistence", dict[str, Any], field="persistence"),
    Policy("maxProducers", "maxProducerPerTopic", int, field="producers_max"),
    Policy("maxConsumers", "maxConsumerPerTopic", int, field="consumers_max"),
    Policy(
        "maxConsumersPerSubscription",
        "maxConsumersPerSubscription",
        int,
        reason="Invalid value for maxConsumersPerSubscription",
        field="consumers_per_subscription_max",
    ),
    Policy("maxSubscriptionsPerTopic", "maxSubscriptionsPerTopic", int, field="subscriptions_max"),
    Policy(
        "maxUnackedMessagesOnConsumer",
        "maxUnackedMessagesOnConsumer",
        int,
        reason=_UNACKED,
        field="unacked_per_consumer_max",
    ),
    Policy(
        "maxUnackedMessagesOnSubscription",
        "maxUnackedMessagesOnSubscription",
        int,
        reason=_UNACKED,
        field="unacked_per_subscription_max",
    ),
    Policy("maxMessageSize", "maxMessageSize", int, reason=_SIZE, most=ENTRY_SIZE_MAX, field="message_size_max"),
    Policy("publishRate", "publishRate", dict[str, Any], field="publish_rate"),
    Policy("dispatchRate", "dispatchRate", dict[str, Any], field="dispatch_rate"),
    Policy("subscriptionDispatchRate", "subscriptionDispatchRate", dict[str, Any], field="subscription_dispatch_rate"),
    Policy("subscribeRate", "subscribeRate", dict[str, Any], field="subscribe_rate"),
    Policy(
        "compactionThreshold",
        "compactionThreshold",
        int,
        reason="Invalid value for compactionThreshold",
        field="compaction_threshold",
    ),
    Policy("subscriptionTypesEnabled", "subscriptionTypesEnabled", list[str], field="subscription_types"),
    Policy("schemaCompatibilityStrategy", "schemaCompatibilityStrategy", str, "PUT", field="schema_compatibility"),
    Policy("schemaValidationEnforced", "schemaValidationEnforced", bool, default=False, field="schema_validation"),
    Policy(
        "autoSubscriptionCreation",
        "autoSubscriptionCreationOverride",
        dict[str, Any],
        field="auto_create_subscriptions",
    ),
)


@call(router, "GET", ANY_TOPIC + "/messageTTL", "adminGetTopicMessageTTL")
async def message_ttl(exchange: Exchange) -> Response:
    return await _read(exchange, TTL)


@call(router, "POST", ANY_TOPIC + "/messageTTL", "adminSetTopicMessageTTL")
async def set_message_ttl(exchange: Exchange) -> Response:
    """The seconds are in the query."""
    try:
        seconds = int(exchange.query_params.get("messageTTL", ""))
    except ValueError:
        raise Refused(412, TTL.reason) from None
    return await _set(exchange, TTL, seconds)


@call(router, "DELETE", ANY_TOPIC + "/messageTTL", "adminRemoveTopicMessageTTL")
async def remove_message_ttl(exchange: Exchange) -> Response:
    return await _change(exchange, TTL.name, lambda record: _without(record, TTL.member))


@call(router, "GET", ANY_TOPIC + "/backlogQuotaMap", "adminGetTopicBacklogQuotas")
async def quotas(exchange: Exchange) -> Response:
    name = await _existing(exchange)
    if not flag(exchange, "applied"):
        return answer((await exchange.broker.policies.read_topic(name)).get(_QUOTAS) or {})
    resolved = await exchange.broker.policies.resolve(name)
    fields = ("backlog_quota_size", "backlog_quota_age")
    found = {field: resolved[field].value for field in fields if resolved[field].value is not None}
    written = change_topic({}, found).get(_QUOTAS, {})
    return answer({kind: quota_json(one) for kind, one in written.items()})


@call(router, "POST", ANY_TOPIC + "/backlogQuota", "adminSetTopicBacklogQuota")
async def set_quota(exchange: Exchange) -> Response:
    kind, value = quota_type(exchange), quota_json(await calls.body(exchange, dict[str, Any]))
    return await _change(
        exchange, "backlogQuota", lambda record: {**record, _QUOTAS: {**(record.get(_QUOTAS) or {}), kind: value}}
    )


@call(router, "DELETE", ANY_TOPIC + "/backlogQuota", "adminRemoveTopicBacklogQuota")
async def remove_quota(exchange: Exchange) -> Response:
    kind = quota_type(exchange)

    def mutate(record: Json) -> Json:
        left = _without(record.get(_QUOTAS) or {}, kind)
        return {**record, _QUOTAS: left} if left else _without(record, _QUOTAS)

    return await _change(exchange, "backlogQuota", mutate)


@call(router, "GET", ANY_TOPIC + "/delayedDelivery", "adminGetTopicDelayedDelivery")
async def delays(exchange: Exchange) -> Response:
    name = await _existing(exchange)
    record = await exchange.broker.policies.read_topic(name)
    is_applied = flag(exchange, "applied")
    if is_applied:
        resolved = await exchange.broker.policies.resolve(name)
        record = change_topic(record, {field: resolved[field].value for field in ("delayed_delivery", "delay_s_max")})
    if record.get(_DELAYS["active"]) is None:
        return _nothing()
    defaults = {"active": True, "tickTime": _TICK_MS, "maxDeliveryDelayInMillis": 0}
    return answer({member: record.get(stored, defaults[member]) for member, stored in _DELAYS.items()})


@call(router, "POST", ANY_TOPIC + "/delayedDelivery", "adminSetTopicDelayedDelivery")
async def set_delays(exchange: Exchange) -> Response:
    value: Json = await calls.body(exchange, dict[str, Any])
    given = {stored: value[member] for member, stored in _DELAYS.items() if value.get(member) is not None}
    return await _change(exchange, "delayedDelivery", lambda record: {**_without(record, *_DELAYS.values()), **given})


@call(router, "DELETE", ANY_TOPIC + "/delayedDelivery", "adminRemoveTopicDelayedDelivery")
async def remove_delays(exchange: Exchange) -> Response:
    return await _change(exchange, "delayedDelivery", lambda record: _without(record, *_DELAYS.values()))


def _register(policy: Policy) -> None:
    title = policy.name[0].upper() + policy.name[1:]

    @call(router, "GET", f"{ANY_TOPIC}/{policy.name}", f"adminGetTopic{title}")
    async def read(exchange: Exchange) -> Response:
        return await _read(exchange, policy)

    @call(router, policy.method, f"{ANY_TOPIC}/{policy.name}", f"adminSetTopic{title}")
    async def write(exchange: Exchange) -> Response:
        return await _set(exchange, policy, await calls.body(exchange, policy.type))

    @call(router, "DELETE", f"{ANY_TOPIC}/{policy.name}", f"adminRemoveTopic{title}")
    async def remove(exchange: Exchange) -> Response:
        return await _change(exchange, policy.name, lambda record: _without(record, policy.member))

    _calls: tuple[Call, ...] = (read, write, remove)


for _policy in _POLICIES:
    _register(_policy)


async def _existing(exchange: Exchange) -> TopicName:
    """Return the topic in the path. Raises Refused (412) for a partition, NoSuchTopic."""
    name = named(exchange)
    if name.partition >= 0:
        raise Refused(412, "Not allowed to set/get topic policy for a partition")
    if not await exchange.broker.topics.exists(name) and await exchange.broker.partitioned.find_now(name) is None:
        raise NoSuchTopic("no such topic", topic=name.short)
    return name


async def _read(exchange: Exchange, policy: Policy) -> Response:
    name = await _existing(exchange)
    record = await exchange.broker.policies.read_topic(name)
    if flag(exchange, "applied"):
        record = await _applied(exchange, name, policy.field)
    value = record.get(policy.member, policy.default)
    return _nothing() if value is None else answer(value)


async def _applied(exchange: Exchange, name: TopicName, field: str) -> Json:
    """Return TopicPolicies that has only the policy in force."""
    settings = exchange.broker.settings.ledger
    broker = {
        "retention": Retention(time_s=settings.retention_acked_s, size_max=0),
        "persistence": Persistence(settings.ensemble_size, settings.write_quorum, settings.ack_quorum),
    }
    value = (await exchange.broker.policies.resolve(name))[field].value
    return change_topic({}, {field: broker.get(field) if value is None else value})


async def _set(exchange: Exchange, policy: Policy, value: Any) -> Response:
    check_value(policy, value)
    return await _change(exchange, policy.name, lambda record: {**record, policy.member: value})


async def _change(exchange: Exchange, name: str, mutate: Callable[[Json], Json]) -> Response:
    """Change TopicPolicies. Raises Refused (412) if it cannot have the value of the policy `name`."""
    topic = await _existing(exchange)

    def change(record: Json) -> Json:
        changed = mutate(record)
        check_level(set_in_topic(changed), name, level="topic")
        return changed

    try:
        await exchange.broker.policies.update_topic(topic, change)
    except Corrupt as error:
        raise Refused(412, str(error)) from error
    return done()


def _without(record: Json, *members: str) -> Json:
    return {name: value for name, value in record.items() if name not in members}


def _nothing() -> Response:
    """Return the answer of a policy that is not set."""
    return Reply(200, b"")


async def _check(exchange: Exchange) -> Response:
    await _existing(exchange)
    return _nothing()


register_unsupported(router, ANY_TOPIC, "Topic", _check)
