"""Convert the policies in Pulsar's JSON to the fields of `EffectivePolicies`, and back. Pure.

A level (a namespace, a topic) sets some policies and leaves the others to the next level. `set_in_namespace` and
`set_in_topic` return those that are set, by field name; `change_namespace` and `change_topic` return a changed copy of
the JSON, in which all other members keep their values. None as a value means "no limit" or "off", explicitly set.

| field                         | Policies (namespace)                    | TopicPolicies                    |
|-------------------------------|-----------------------------------------|----------------------------------|
| retention                     | retention_policies                      | retentionPolicies                |
| message_ttl_s                 | message_ttl_in_seconds                  | messageTTLInSeconds              |
| backlog_quota_size            | backlog_quota_map.destination_storage   | backLogQuotaMap.destination_...  |
| backlog_quota_age             | backlog_quota_map.message_age           | backLogQuotaMap.message_age      |
| deduplication                 | deduplicationEnabled                    | deduplicationEnabled             |
| deduplication_snapshot_s      | deduplicationSnapshotIntervalSeconds    | the same                         |
| delayed_delivery              | delayed_delivery_policies.active        | delayedDeliveryEnabled           |
| delay_s_max                   | (same).maxDeliveryDelayInMillis         | delayedDeliveryMaxDelayInMillis  |
| inactive_topics               | inactive_topic_policies                 | inactiveTopicPolicies            |
| auto_create_topics            | autoTopicCreationOverride               | -                                |
| auto_create_partitions        | (same).defaultNumPartitions, .topicType | -                                |
| auto_create_subscriptions     | autoSubscriptionCreationOverride        | the same                         |
| producers_max                 | max_producers_per_topic                 | maxProducerPerTopic              |
| consumers_max                 | max_consumers_per_topic                 | maxConsumerPerTopic              |
| consumers_per_subscription_max| max_consumers_per_subscription          | maxConsumersPerSubscription      |
| subscriptions_max             | max_subscriptions_per_topic             | maxSubscriptionsPerTopic         |
| unacked_per_consumer_max      | max_unacked_messages_per_consumer       | maxUnackedMessagesOnConsumer     |
| unacked_per_subscription_max  | max_unacked_messages_per_subscription   | maxUnackedMessagesOnSubscription |
| message_size_max              | -                                       | maxMessageSize                   |
| topics_per_namespace_max      | max_topics_per_namespace                | -                                |
| publish_rate                  | publishMaxMessageRate.<cluster>         | publishRate                      |
| dispatch_rate                 | topicDispatchRate.<cluster>             | dispatchRate                     |
| subscription_dispatch_rate    | subscriptionDispatchRate.<cluster>      | subscriptionDispatchRate         |
| subscribe_rate                | clusterSubscribeRate.<cluster>          | subscribeRate                    |
| compaction_threshold          | compaction_threshold                    | compactionThreshold              |
| schema_compatibility          | schema_compatibility_strategy           | schemaCompatibilityStrategy      |
| schema_auto_update            | is_allow_auto_update_schema             | -                                |
| schema_validation             | schema_validation_enforced              | schemaValidationEnforced         |
| subscription_expiration_s     | subscription_expiration_time_minutes    | -                                |
| subscription_types            | subscription_types_enabled              | subscriptionTypesEnabled         |
| persistence                   | persistence                             | persistence                      |
| encryption_required           | encryption_required                     | -                                |

Two members of one object of Pulsar are set together: a namespace that has `delayed_delivery_policies` sets both
`delayed_delivery` and `delay_s_max`, and one that has `autoTopicCreationOverride` sets both of its policies.
Source: Pulsar 4.2, Policies and TopicPolicies, with the meaning of -1, 0 and absent values in its admin API.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeVar

from bindery_core.errors import Corrupt

from bindery_broker.namespaces.policies import (
    BacklogQuota,
    InactiveMode,
    InactiveTopics,
    Persistence,
    QuotaAction,
    Rate,
    Retention,
    SchemaCompatibility,
)
from bindery_broker.namespaces.records import Json

PolicySet = Mapping[str, Any]
"""Policies that one level sets: values by field of `EffectivePolicies`."""
MIB: Final = 2**20
_CLUSTER: Final = "<cluster>"
"""Stands for the name of the cluster in a path of the table."""
_NO_LIMIT: Final = -1
_E = TypeVar("_E", bound=Enum)


class _Unset(Enum):
    UNSET = "unset"


UNSET: Final = _Unset.UNSET
"""Value of a policy in a change that is removed from its level."""


@dataclass(frozen=True, slots=True)
class _Form:
    """How one value is written in JSON."""

    read: Callable[[Any], Any]
    """Return the value, or UNSET. Raises TypeError, ValueError or KeyError."""
    write: Callable[[Any, Any], Any]
    """Return the JSON of (value, former JSON or None)."""


def _same(value: Any, _former: Any) -> Any:
    return value


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("not an integer")
    return value


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("not a boolean")
    return value


def _mapping(value: Any) -> Json:
    if not isinstance(value, dict):
        raise TypeError("not an object")
    return value


def _positive(value: Any) -> int | None:
    """Return a limit; None for the values that stand for no limit."""
    number = _integer(value)
    return number if number > 0 else None


def _number(scale: int = 1) -> _Form:
    """Return the form of a number in units of `scale`. Negative numbers mean 0."""
    return _Form(lambda value: max(0, _integer(value)) * scale, lambda value, _former: round(value) // scale)


_BOOLEAN: Final = _Form(_boolean, _same)
_ONLY_TRUE: Final = _Form(lambda value: True if _boolean(value) else UNSET, _same)
"""A boolean that is false where it is not set."""
_NUMBER: Final = _number()
_SECONDS_IN_MS: Final = _Form(lambda value: max(0, _integer(value)) / 1000, lambda value, _former: round(value * 1000))
_MINUTES: Final = _number(60)
_SUBSCRIPTION_TYPES: Final = {
    "Exclusive": "exclusive",
    "Failover": "failover",
    "Shared": "shared",
    "Key_Shared": "key_shared",
}
_MODES: Final = {mode.value: mode for mode in InactiveMode}


def _read_retention(value: Any) -> Retention:
    members = _mapping(value)
    minutes, megabytes = _integer(members["retentionTimeInMinutes"]), _integer(members["retentionSizeInMB"])
    return Retention(time_s=None if minutes < 0 else minutes * 60, size_max=None if megabytes < 0 else megabytes * MIB)


def _write_retention(value: Retention, former: Any) -> Json:
    return {
        **(former or {}),
        "retentionTimeInMinutes": _NO_LIMIT if value.time_s is None else round(value.time_s) // 60,
        "retentionSizeInMB": _NO_LIMIT if value.size_max is None else value.size_max // MIB,
    }


def _quota(member: str) -> _Form:
    def read(value: Any) -> BacklogQuota | None:
        members = _mapping(value)
        limit = members.get(member)
        if limit is None and member == "limitSize":
            limit = members.get("limit")  # its name before Pulsar 2.8
        limit = None if limit is None else _positive(limit)
        action = members.get("policy")
        return None if limit is None else BacklogQuota(limit, QuotaAction(action or QuotaAction.HOLD))

    def write(value: BacklogQuota | None, former: Any) -> Json:
        members = {"limitSize": _NO_LIMIT, "limitTime": _NO_LIMIT, **(former or {})}
        members[member] = _NO_LIMIT if value is None else value.limit
        if "limit" in members and member == "limitSize":
            members["limit"] = members[member]
        members["policy"] = str(value.action if value is not None else QuotaAction.HOLD)
        return members

    return _Form(read, write)


def _read_inactive(value: Any) -> InactiveTopics | None:
    members = _mapping(value)
    if not _boolean(members.get("deleteWhileInactive", False)):
        return None
    mode = _MODES[members.get("inactiveTopicDeleteMode") or InactiveMode.NO_SUBSCRIPTIONS]
    return InactiveTopics(mode, max(1, _integer(members["maxInactiveDurationSeconds"])))


def _write_inactive(value: InactiveTopics | None, former: Any) -> Json:
    if value is None:
        defaults = {"inactiveTopicDeleteMode": str(InactiveMode.NO_SUBSCRIPTIONS), "maxInactiveDurationSeconds": 60}
        return {**defaults, **(former or {}), "deleteWhileInactive": False}
    return {
        **(former or {}),
        "inactiveTopicDeleteMode": str(value.mode),
        "maxInactiveDurationSeconds": value.seconds_max,
        "deleteWhileInactive": True,
    }


def _rate(messages: str, size: str | None, *, period_default: int, is_dispatch: bool) -> _Form:
    def read(value: Any) -> Rate | None:
        members = _mapping(value)
        count = _positive(members.get(messages, _NO_LIMIT))
        volume = _positive(members.get(size, _NO_LIMIT)) if size else None
        if count is None and volume is None:
            return None
        period = _positive(members.get("ratePeriodInSecond", period_default)) or period_default
        return Rate(count, volume, period, _boolean(members.get("relativeToPublishRate", False)))

    def write(value: Rate | None, former: Any) -> Json:
        members = dict(former or {})
        members[messages] = _NO_LIMIT if value is None or value.messages is None else value.messages
        if size:
            members[size] = _NO_LIMIT if value is None or value.size is None else value.size
        if is_dispatch:
            members["relativeToPublishRate"] = value is not None and value.is_relative_to_publish_rate
        if is_dispatch or not size:
            members["ratePeriodInSecond"] = period_default if value is None else value.period_s
        return members

    return _Form(read, write)


def _read_strategy(value: Any) -> Any:
    return UNSET if value == "UNDEFINED" else SchemaCompatibility(value)


def _read_types(value: Any) -> Any:
    if not isinstance(value, list):
        raise TypeError("not a list")
    return frozenset(_SUBSCRIPTION_TYPES[name] for name in value) if value else UNSET


def _write_types(value: frozenset[str], _former: Any) -> list[str]:
    return [name for name, ours in _SUBSCRIPTION_TYPES.items() if ours in value]


def _read_persistence(value: Any) -> Any:
    members = _mapping(value)
    numbers = [
        _integer(members.get(name, 0))
        for name in ("bookkeeperEnsemble", "bookkeeperWriteQuorum", "bookkeeperAckQuorum")
    ]
    return Persistence(*numbers) if all(number > 0 for number in numbers) else UNSET


def _write_persistence(value: Persistence, former: Any) -> Json:
    return {
        "managedLedgerMaxMarkDeleteRate": 1.0,  # Pulsar's default
        **(former or {}),
        "bookkeeperEnsemble": value.ensemble_size,
        "bookkeeperWriteQuorum": value.write_quorum,
        "bookkeeperAckQuorum": value.ack_quorum,
    }


_DISPATCH: Final = _rate(
    "dispatchThrottlingRateInMsg", "dispatchThrottlingRateInByte", period_default=1, is_dispatch=True
)
_RETENTION: Final = _Form(_read_retention, _write_retention)
_SIZE_QUOTA: Final = _quota("limitSize")
_AGE_QUOTA: Final = _quota("limitTime")
_INACTIVE: Final = _Form(_read_inactive, _write_inactive)
_PUBLISH: Final = _rate(
    "publishThrottlingRateInMsg", "publishThrottlingRateInByte", period_default=1, is_dispatch=False
)
_SUBSCRIBE: Final = _rate("subscribeThrottlingRatePerConsumer", None, period_default=30, is_dispatch=False)
_STRATEGY: Final = _Form(_read_strategy, lambda value, _former: str(value))
_TYPES: Final = _Form(_read_types, _write_types)
_PERSISTENCE: Final = _Form(_read_persistence, _write_persistence)
_ALLOWED_SUBSCRIPTIONS: Final = ("autoSubscriptionCreationOverride", "allowAutoSubscriptionCreation")
_QUOTA_MAP, _TOPIC_QUOTA_MAP = "backlog_quota_map", "backLogQuotaMap"
_SIZE, _AGE = "destination_storage", "message_age"

_Table = Mapping[str, tuple[tuple[str, ...], _Form]]

_NAMESPACE: Final[_Table] = {
    "retention": (("retention_policies",), _RETENTION),
    "message_ttl_s": (("message_ttl_in_seconds",), _NUMBER),
    "backlog_quota_size": ((_QUOTA_MAP, _SIZE), _SIZE_QUOTA),
    "backlog_quota_age": ((_QUOTA_MAP, _AGE), _AGE_QUOTA),
    "deduplication": (("deduplicationEnabled",), _BOOLEAN),
    "deduplication_snapshot_s": (("deduplicationSnapshotIntervalSeconds",), _NUMBER),
    "delayed_delivery": (("delayed_delivery_policies", "active"), _BOOLEAN),
    "delay_s_max": (("delayed_delivery_policies", "maxDeliveryDelayInMillis"), _SECONDS_IN_MS),
    "inactive_topics": (("inactive_topic_policies",), _INACTIVE),
    "auto_create_topics": (("autoTopicCreationOverride", "allowAutoTopicCreation"), _BOOLEAN),
    "auto_create_partitions": (("autoTopicCreationOverride", "defaultNumPartitions"), _NUMBER),
    "auto_create_subscriptions": (_ALLOWED_SUBSCRIPTIONS, _BOOLEAN),
    "producers_max": (("max_producers_per_topic",), _NUMBER),
    "consumers_max": (("max_consumers_per_topic",), _NUMBER),
    "consumers_per_subscription_max": (("max_consumers_per_subscription",), _NUMBER),
    "subscriptions_max": (("max_subscriptions_per_topic",), _NUMBER),
    "unacked_per_consumer_max": (("max_unacked_messages_per_consumer",), _NUMBER),
    "unacked_per_subscription_max": (("max_unacked_messages_per_subscription",), _NUMBER),
    "topics_per_namespace_max": (("max_topics_per_namespace",), _NUMBER),
    "publish_rate": (("publishMaxMessageRate", _CLUSTER), _PUBLISH),
    "dispatch_rate": (("topicDispatchRate", _CLUSTER), _DISPATCH),
    "subscription_dispatch_rate": (("subscriptionDispatchRate", _CLUSTER), _DISPATCH),
    "subscribe_rate": (("clusterSubscribeRate", _CLUSTER), _SUBSCRIBE),
    "compaction_threshold": (("compaction_threshold",), _NUMBER),
    "schema_compatibility": (("schema_compatibility_strategy",), _STRATEGY),
    "schema_auto_update": (("is_allow_auto_update_schema",), _BOOLEAN),
    "schema_validation": (("schema_validation_enforced",), _ONLY_TRUE),
    "subscription_expiration_s": (("subscription_expiration_time_minutes",), _MINUTES),
    "subscription_types": (("subscription_types_enabled",), _TYPES),
    "persistence": (("persistence",), _PERSISTENCE),
    "encryption_required": (("encryption_required",), _ONLY_TRUE),
}
_TOPIC: Final[_Table] = {
    "retention": (("retentionPolicies",), _RETENTION),
    "message_ttl_s": (("messageTTLInSeconds",), _NUMBER),
    "backlog_quota_size": ((_TOPIC_QUOTA_MAP, _SIZE), _SIZE_QUOTA),
    "backlog_quota_age": ((_TOPIC_QUOTA_MAP, _AGE), _AGE_QUOTA),
    "deduplication": (("deduplicationEnabled",), _BOOLEAN),
    "deduplication_snapshot_s": (("deduplicationSnapshotIntervalSeconds",), _NUMBER),
    "delayed_delivery": (("delayedDeliveryEnabled",), _BOOLEAN),
    "delay_s_max": (("delayedDeliveryMaxDelayInMillis",), _SECONDS_IN_MS),
    "inactive_topics": (("inactiveTopicPolicies",), _INACTIVE),
    "auto_create_subscriptions": (_ALLOWED_SUBSCRIPTIONS, _BOOLEAN),
    "producers_max": (("maxProducerPerTopic",), _NUMBER),
    "consumers_max": (("maxConsumerPerTopic",), _NUMBER),
    "consumers_per_subscription_max": (("maxConsumersPerSubscription",), _NUMBER),
    "subscriptions_max": (("maxSubscriptionsPerTopic",), _NUMBER),
    "unacked_per_consumer_max": (("maxUnackedMessagesOnConsumer",), _NUMBER),
    "unacked_per_subscription_max": (("maxUnackedMessagesOnSubscription",), _NUMBER),
    "message_size_max": (("maxMessageSize",), _NUMBER),
    "publish_rate": (("publishRate",), _PUBLISH),
    "dispatch_rate": (("dispatchRate",), _DISPATCH),
    "subscription_dispatch_rate": (("subscriptionDispatchRate",), _DISPATCH),
    "subscribe_rate": (("subscribeRate",), _SUBSCRIBE),
    "compaction_threshold": (("compactionThreshold",), _NUMBER),
    "schema_compatibility": (("schemaCompatibilityStrategy",), _STRATEGY),
    "schema_validation": (("schemaValidationEnforced",), _BOOLEAN),
    "subscription_types": (("subscriptionTypesEnabled",), _TYPES),
    "persistence": (("persistence",), _PERSISTENCE),
}
_SHARED_OBJECTS: Final[Mapping[str, Json]] = {
    "delayed_delivery_policies": {"active": True, "tickTime": 1000, "maxDeliveryDelayInMillis": 0},
    "autoTopicCreationOverride": {
        "allowAutoTopicCreation": True,
        "topicType": "non-partitioned",
        "defaultNumPartitions": 0,
    },
    "autoSubscriptionCreationOverride": {},
}
"""Objects whose members are policies, as they are written if the first of their policies is set."""

NAMESPACE_POLICIES: Final = frozenset(_NAMESPACE)
"""Fields of EffectivePolicies that a namespace can set."""
TOPIC_POLICIES: Final = frozenset(_TOPIC)
"""Fields of EffectivePolicies that a topic can set."""


def set_in_namespace(policies: Json, *, cluster: str) -> PolicySet:
    """Return the policies that a namespace sets. Raises Corrupt if one of them cannot be read."""
    found = _read(_NAMESPACE, policies, cluster)
    if "auto_create_partitions" in found and policies["autoTopicCreationOverride"].get("topicType") != "partitioned":
        found["auto_create_partitions"] = 0
    return found


def set_in_topic(policies: Json) -> PolicySet:
    """Return the policies that a topic sets. Raises Corrupt if one of them cannot be read."""
    return _read(_TOPIC, policies, "")


def change_namespace(policies: Json, changes: PolicySet, *, cluster: str) -> Json:
    """Return a copy with these policies set; UNSET removes one. The names must be in NAMESPACE_POLICIES."""
    changed = _change(_NAMESPACE, policies, changes, cluster)
    partitions = changes.get("auto_create_partitions", UNSET)
    if partitions is not UNSET:
        kind = "partitioned" if partitions else "non-partitioned"
        changed["autoTopicCreationOverride"]["topicType"] = kind
    return changed


def change_topic(policies: Json, changes: PolicySet) -> Json:
    """Return a copy with these policies set; UNSET removes one. The names must be in TOPIC_POLICIES."""
    return _change(_TOPIC, policies, changes, "")


def _read(table: _Table, policies: Json, cluster: str) -> dict[str, Any]:
    found = {}
    for name, (path, form) in table.items():
        value: Any = policies
        try:
            for part in path:
                value = None if value is None else _mapping(value).get(cluster if part is _CLUSTER else part)
            if value is not None and (read := form.read(value)) is not UNSET:
                found[name] = read
        except (TypeError, ValueError, KeyError) as error:
            raise Corrupt("a policy cannot be read", policy=name, field=".".join(path), reason=str(error)) from error
    return found


def _change(table: _Table, policies: Json, changes: PolicySet, cluster: str) -> Json:
    changed = copy.deepcopy(policies)
    for name, value in changes.items():
        path, form = table[name]
        *outer, last = [cluster if part is _CLUSTER else part for part in path]
        if value is UNSET:
            _remove(changed, outer, last)
            continue
        holder = changed
        for part in outer:
            if holder.get(part) is None:
                holder[part] = copy.deepcopy(_SHARED_OBJECTS.get(part, {}))
            holder = holder[part]
        holder[last] = form.write(value, holder.get(last))
    return changed


def _remove(policies: Json, outer: list[str], last: str) -> None:
    """Remove a member; an object of several policies is removed once all of them have their defaults."""
    if not outer:
        policies.pop(last, None)
        return
    (name,) = outer
    holder = policies.get(name)
    if holder is None:
        return
    defaults = _SHARED_OBJECTS.get(name, {})
    if last in defaults:
        holder[last] = defaults[last]
        if last == "defaultNumPartitions":
            holder["topicType"] = defaults["topicType"]
    else:
        holder.pop(last, None)
    if all(defaults.get(key) == value for key, value in holder.items()):
        policies.pop(name)
