"""The policies that are in force for a topic, whatever level they were set on. Pure.

A policy is set on a topic, on its namespace, or by the settings of the broker; the first of these three that has it
decides. None and 0 have the meaning that each field names.
Source: Pulsar's Policies, TopicPolicies and HierarchyTopicPolicies.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol

from bindery_pulsar.topic_name import TopicName

SUBSCRIPTION_TYPES: Final = frozenset({"exclusive", "failover", "shared", "key_shared"})


class QuotaAction(StrEnum):
    """What happens at a backlog quota."""

    HOLD = "producer_request_hold"
    """Producers are refused, and clients that can do so wait and try again."""
    REFUSE = "producer_exception"
    """Producers are refused."""
    EVICT = "consumer_backlog_eviction"
    """The oldest messages are acknowledged for the subscriptions that have most of them to read."""


class InactiveMode(StrEnum):
    """When a topic without producers and consumers counts as inactive."""

    NO_SUBSCRIPTIONS = "delete_when_no_subscriptions"
    CAUGHT_UP = "delete_when_subscriptions_caught_up"


class SchemaCompatibility(StrEnum):
    """Which schemas may follow the present ones of a topic. Names as in Pulsar's SchemaCompatibilityStrategy."""

    ALWAYS_INCOMPATIBLE = "ALWAYS_INCOMPATIBLE"
    ALWAYS_COMPATIBLE = "ALWAYS_COMPATIBLE"
    BACKWARD = "BACKWARD"
    FORWARD = "FORWARD"
    FULL = "FULL"
    BACKWARD_TRANSITIVE = "BACKWARD_TRANSITIVE"
    FORWARD_TRANSITIVE = "FORWARD_TRANSITIVE"
    FULL_TRANSITIVE = "FULL_TRANSITIVE"


@dataclass(frozen=True, slots=True)
class Retention:
    """How long closed ledgers are kept that every subscription has acknowledged.

    The oldest of them is deleted once it is older than `time_s`, or if the topic takes more than `size_max` bytes. Both
    0: at once. None: without limit.
    """

    time_s: float | None
    size_max: int | None


@dataclass(frozen=True, slots=True)
class BacklogQuota:
    limit: int
    """Bytes for the quota of size, seconds for the quota of age; above it, `action` applies."""
    action: QuotaAction


@dataclass(frozen=True, slots=True)
class InactiveTopics:
    mode: InactiveMode
    seconds_max: int
    """Seconds without producers and consumers after which the topic is deleted."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A limit of a rate; None: without limit."""

    messages: int | None
    """Messages in `period_s`."""
    size: int | None
    """Bytes in `period_s`."""
    period_s: int = 1
    is_relative_to_publish_rate: bool = False
    """Whether the rate at which the topic is published is added to the limit."""


@dataclass(frozen=True, slots=True)
class Persistence:
    ensemble_size: int
    write_quorum: int
    ack_quorum: int


@dataclass(frozen=True, slots=True)
class EffectivePolicies:
    retention: Retention | None = None
    """None: the settings `retention_acked_s` and `retention_unsubscribed_s` of the broker."""
    message_ttl_s: int = 0
    """Seconds after its publishing, or after its delivery time, at which a message is acknowledged for all
    subscriptions. 0: never."""
    backlog_quota_size: BacklogQuota | None = None
    backlog_quota_age: BacklogQuota | None = None
    deduplication: bool = False
    deduplication_snapshot_s: int = 120
    """Seconds between snapshots of the producers' sequence ids."""
    delayed_delivery: bool = True
    """Whether delays are respected; if not, delayed messages are delivered at once."""
    delay_s_max: float = 0
    """Maximum delay of a message in seconds; 0: no limit."""
    inactive_topics: InactiveTopics | None = None
    """None: inactive topics are kept."""
    auto_create_topics: bool = True
    auto_create_partitions: int = 0
    """Number of partitions of a topic that is created on demand; 0: a topic without partitions."""
    auto_create_subscriptions: bool = True
    producers_max: int = 0
    """Maximum producers of the topic; 0: no limit. So are the other maxima."""
    consumers_max: int = 0
    consumers_per_subscription_max: int = 0
    subscriptions_max: int = 0
    unacked_per_consumer_max: int = 0
    unacked_per_subscription_max: int = 0
    message_size_max: int = 0
    """Maximum bytes of the payload of a message; 0: the size of an entry."""
    topics_per_namespace_max: int = 0
    publish_rate: Rate | None = None
    dispatch_rate: Rate | None = None
    """Limit of all subscriptions of the topic together."""
    subscription_dispatch_rate: Rate | None = None
    """Limit of each subscription."""
    subscribe_rate: Rate | None = None
    """Limit of the subscribe requests of one consumer."""
    compaction_threshold: int = 0
    """Bytes written since the last compaction at which the next one begins; 0: never by itself."""
    schema_compatibility: SchemaCompatibility = SchemaCompatibility.FULL
    schema_auto_update: bool = True
    """Whether producers may add compatible schemas."""
    schema_validation: bool = False
    """Whether producers without a schema are refused once the topic has one."""
    subscription_expiration_s: int = 0
    """Seconds without consumers after which a subscription is deleted; 0: never."""
    subscription_types: frozenset[str] = field(default=SUBSCRIPTION_TYPES)
    """Types of subscriptions that consumers may use: `exclusive`, `failover`, `shared`, `key_shared`."""
    persistence: Persistence | None = None
    """Quorums of new ledgers. None: the settings of the broker."""
    encryption_required: bool = False


DEFAULTS: Final = EffectivePolicies()
"""What applies where no level sets anything."""


class PolicySource(Protocol):
    def effective(self, name: TopicName) -> EffectivePolicies:
        """Return the policies in force for a topic, from memory. Never waits, never fails."""


class FollowedPolicies(PolicySource, Protocol):
    """Policies that are read before a topic opens, and that change while it is open."""

    async def follow(self, name: TopicName) -> None:
        """Get the policies of a topic before it opens, and keep them current. Undone by `forget`, also if it raises."""

    def forget(self, name: TopicName) -> None:
        """End following a topic that was closed. Idempotent."""

    def on_change(self, listener: Callable[[TopicName], None]) -> None:
        """Call `listener` after the policies in force for a followed topic have changed."""

    async def remove_topic(self, name: TopicName) -> None:
        """Remove the policies of a topic that is deleted."""

    async def namespace(self, tenant: str, namespace: str) -> dict[str, Any] | None:
        """Return the record of a namespace; None: it does not exist."""


class FixedPolicies:
    """The same policies for every topic."""

    def __init__(self, policies: EffectivePolicies = DEFAULTS) -> None:
        self._policies = policies

    def effective(self, name: TopicName) -> EffectivePolicies:
        return self._policies

    async def follow(self, name: TopicName) -> None:
        pass

    def forget(self, name: TopicName) -> None:
        pass

    def on_change(self, listener: Callable[[TopicName], None]) -> None:
        pass

    async def remove_topic(self, name: TopicName) -> None:
        pass

    async def namespace(self, tenant: str, namespace: str) -> dict[str, Any] | None:
        return {}
