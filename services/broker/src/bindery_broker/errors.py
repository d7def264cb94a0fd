"""Errors of the broker, in addition to bindery_core.errors.

| error                    | code                       | status | when                                              |
|--------------------------|----------------------------|-------:|---------------------------------------------------|
| NotSupported             | not_supported              |    400 | a feature of Pulsar that is not supported         |
| ConsumerBusy             | consumer_busy              |    409 | another consumer holds the exclusive subscription |
| SubscriptionTypeConflict | subscription_type_conflict |    409 | consumers use the subscription as another type    |
| UnknownMessages          | unknown_messages           |    400 | an id in the request names no message of a topic  |
| DelayTooLong             | delay_too_long             |    400 | a message is delayed longer than a setting allows |
| TopicInUse               | topic_in_use               |    409 | a topic is deleted while consumers are connected  |
| TopicIsPartitioned       | topic_is_partitioned       |    409 | an operation that only a single partition has     |
| TopicTerminated          | topic_terminated           |    409 | the topic accepts no more messages, for good      |
| NotOwner                 | not_owner                  |    503 | the topic's owner is changing; retry              |
| OwnedByPulsar            | owned_by_pulsar            |    409 | a Pulsar broker serves the topic's bundle         |
| RetryTopicAway           | try_again                  |    503 | the owner of a retry topic does not answer; retry |
| NoSuchMessage            | no_such_message            |    404 | no such entry, or no such index in its batch      |
| NoSuchSchema             | no_such_schema             |    404 | the topic has no schema, or no such version       |
| InvalidSchema            | invalid_schema             |    400 | a definition does not fit its schema type         |
| IncompatibleSchema       | incompatible_schema        |    409 | a schema breaks the strategy of its namespace     |
| ProducerBusy             | producer_busy              |    409 | another producer has this name, or the topic      |
| ProducerFenced           | producer_fenced            |    409 | another producer has, or had, the topic           |
| TooManyProducers         | too_many_producers         |    429 | a topic has the producers that a policy allows    |
| IdempotencyKeyReused     | idempotency_key_reused     |    422 | the key belongs to a request with other content   |
| IdempotencyKeyInUse      | idempotency_key_in_use     |    409 | the first request with this key is in progress    |
| NoSuchNamespace          | no_such_namespace          |    404 | the namespace of a topic does not exist           |
| NoSuchBroker             | no_such_broker             |    404 | no broker of this name is live                    |
| NotCompactable           | not_compactable            |    422 | an entry whose keys are unknown prevents it       |
| NoSuchTenant             | no_such_tenant             |    404 | the tenant of a namespace does not exist          |
| NamespaceDeleted         | namespace_deleted          |    409 | the namespace of a new topic is being deleted     |
| NamespaceNotEmpty        | namespace_not_empty        |    409 | a namespace is deleted while it has topics        |
| TenantNotEmpty           | tenant_not_empty           |    409 | a tenant is deleted while it has namespaces       |
| TopicDeleted             | topic_deleted              |    409 | the topic was deleted by force just now; retry    |
| TooManyTopics            | too_many_topics            |    409 | the namespace has its maximum number of topics    |
| InvalidPolicy            | invalid_policy             |    400 | the value of a policy is not allowed              |
| ResponsesFull            | too_many_requests          |    429 | responses take too much memory; retry             |
| PolicyForbids            | policy_forbids             |    409 | a policy of the topic does not allow the request  |
| BacklogQuotaExceeded     | backlog_quota_exceeded     |    429 | a backlog exceeds its quota; retry                |
| BacklogQuotaRefused      | backlog_quota_refused      |    507 | a backlog exceeds its quota; do not retry at once |
| PublishRateExceeded      | publish_rate_exceeded      |    429 | messages come faster than a policy allows; retry  |
| SubscribeRateExceeded    | subscribe_rate_exceeded    |    429 | a consumer connects too often; retry              |
| LimitExceeded            | limit_exceeded             |    429 | a client, tenant or namespace is above its limit  |
"""

import math
from collections.abc import Sequence
from typing import ClassVar, Final, Self

from bindery_core.errors import BadRequest, BinderyError, Conflict, NotThere, TooManyRequests, TryAgain

UNKNOWN_SHOWN_MAX: Final = 20
"""Maximum number of unknown message ids listed in an error."""
RESPONSES_FULL = "messages in responses that clients have not read yet take too much memory; retry"


class _RetryLater(BinderyError):
    """The fact `retry_after_s` has the seconds after which to retry."""

    @property
    def retry_after_s(self) -> int:
        """Seconds in the header `Retry-After`."""
        seconds: float = self.facts.get("retry_after_s", 1)
        return max(1, math.ceil(seconds))


class NotSupported(BadRequest):
    code = "not_supported"


class ConsumerBusy(Conflict):
    code = "consumer_busy"


class SubscriptionTypeConflict(Conflict):
    code = "subscription_type_conflict"


class TopicInUse(Conflict):
    code = "topic_in_use"


class TopicIsPartitioned(Conflict):
    """The topic in the request is partitioned. Nothing was done."""

    code = "topic_is_partitioned"


class TopicTerminated(Conflict):
    """The topic was terminated: what is stored can be read, and nothing can be added. Nothing was stored."""

    code = "topic_terminated"

    @classmethod
    def of(cls, topic: str) -> Self:
        return cls("the topic is terminated: it accepts no more messages; use another topic", topic=topic)


class NotOwner(TryAgain):
    code = "not_owner"


class OwnedByPulsar(Conflict):
    """A broker of Apache Pulsar owns the bundle of the topic. Nothing was done."""

    code = "owned_by_pulsar"

    @classmethod
    def of(cls, bundle: object, *, http_url: str, native_url: str) -> Self:
        """`http_url`: its web service; `native_url`: the address for Pulsar's clients."""
        namespace, _, name = str(bundle).rpartition("/")
        return cls(
            "a Pulsar broker serves the topic's bundle. Use a client of Pulsar there, or stop its clients and move the "
            f"bundle to Bindery: bindery namespaces unload {namespace} --bundle {name}",
            bundle=str(bundle),
            owner=http_url,
            native_url=native_url,
        )

    @property
    def http_url(self) -> str:
        """Address of the web service of the owner."""
        return str(self.facts["owner"])


class RetryTopicAway(TryAgain):
    """The broker that owns the retry topic of a subscription does not answer, or its owner is changing."""


class NoSuchMessage(NotThere):
    code = "no_such_message"


class NoSuchSchema(NotThere):
    code = "no_such_schema"


class InvalidSchema(BadRequest):
    code = "invalid_schema"


class IncompatibleSchema(Conflict):
    """Data of one schema could not be read with the other one. Nothing was stored."""

    code = "incompatible_schema"


class NoSuchNamespace(NotThere):
    code = "no_such_namespace"

    @classmethod
    def of(cls, tenant: str, namespace: str) -> Self:
        name = f"{tenant}/{namespace}"
        return cls(f"no such namespace; `bindery namespaces create {name}` creates it", namespace=name)


class NoSuchBroker(NotThere):
    code = "no_such_broker"


class NotCompactable(BinderyError):
    """The topic has an entry whose messages cannot be told apart, so that compaction would lose some."""

    status = 422
    code = "not_compactable"


class NoSuchTenant(NotThere):
    code = "no_such_tenant"

    @classmethod
    def of(cls, tenant: str) -> Self:
        return cls(f"no such tenant; `bindery tenants create {tenant}` creates it", tenant=tenant)


class NamespaceDeleted(Conflict):
    code = "namespace_deleted"


class NamespaceNotEmpty(Conflict):
    code = "namespace_not_empty"


class TenantNotEmpty(Conflict):
    code = "tenant_not_empty"


class TopicDeleted(_RetryLater, Conflict):
    """The topic was deleted by force a short time ago, and is not created implicitly. The fact `retry_after_s` has the
    seconds left."""

    code = "topic_deleted"


class TooManyTopics(Conflict):
    code = "too_many_topics"


class InvalidPolicy(BadRequest):
    code = "invalid_policy"


class UnknownMessages(BadRequest):
    """Ids in a request name no message of the topic. The request changed nothing."""

    code = "unknown_messages"

    @classmethod
    def of(cls, unknown: Sequence[object], *, count: int, what: str = "message of this topic") -> Self:
        """Return the error for a request with `count` message ids, some of which are `unknown`: they name no `what`."""
        return cls(
            f"{len(unknown)} of {count} message ids name no {what}; nothing was done",
            message_ids=[str(message_id) for message_id in unknown[:UNKNOWN_SHOWN_MAX]],
        )


class DelayTooLong(BadRequest):
    """A message would be delivered later than `delayed_delivery_max_delay_s` allows. It was not stored."""

    code = "delay_too_long"


class ProducerBusy(Conflict):
    """A producer with this name is connected, or an exclusive producer has the topic, or waits for it."""

    code = "producer_busy"


class ProducerFenced(Conflict):
    """A producer cannot have the topic exclusively, or has lost it to another one."""

    code = "producer_fenced"


class TooManyProducers(_RetryLater, TooManyRequests):
    """The topic has as many producers as the policy `producers_max` allows. Nothing was stored. The fact
    `retry_after_s` has the seconds until a producer counts as idle at the earliest."""

    code = "too_many_producers"

    @classmethod
    def of(cls, producer: str, *, producers: int, limit: int, retry_after_s: float | None = None) -> Self:
        """`producers`: the number of those that are connected."""
        return cls(
            "the topic has the maximum number of producers by the policy producers_max; retry after one of them has "
            "ended, use one of their names, or raise it: `bindery topics set-policy TOPIC producers_max=N`",
            producer=producer,
            producers=producers,
            limit=limit,
            **({} if retry_after_s is None else {"retry_after_s": round(retry_after_s, 3)}),
        )


class IdempotencyKeyReused(BadRequest):
    """The idempotency key was used for a request with other content. Nothing was stored."""

    status = 422
    code = "idempotency_key_reused"


class IdempotencyKeyInUse(Conflict):
    """Another request with this idempotency key is in progress. Repeat the request later."""

    code = "idempotency_key_in_use"
    retry_after_s: ClassVar[int] = 1
    """Seconds in the header `Retry-After`."""


class ResponsesFull(TooManyRequests):
    """The messages in responses that clients have not read yet take too much memory. No message was leased."""


class PolicyForbids(Conflict):
    code = "policy_forbids"


class BacklogQuotaExceeded(TooManyRequests):
    """A quota of the backlog with `producer_request_hold` is exceeded. Nothing was stored."""

    code = "backlog_quota_exceeded"


class BacklogQuotaRefused(TooManyRequests):
    """A quota of the backlog with `producer_exception` is exceeded. Nothing was stored."""

    code = "backlog_quota_refused"
    status = 507


class PublishRateExceeded(_RetryLater, TooManyRequests):
    """Messages come faster than a policy allows. Nothing was stored. The fact `retry_after_s` has the seconds left."""

    code = "publish_rate_exceeded"


class SubscribeRateExceeded(_RetryLater, TooManyRequests):
    """A consumer connects more often than a policy allows. The fact `retry_after_s` has the seconds to wait."""

    code = "subscribe_rate_exceeded"


class LimitExceeded(_RetryLater, TooManyRequests):
    """A client, a tenant or a namespace is above its limit. Nothing was done. The facts: `limit`, whose (`kind`,
    `name`), its `rate`, and `retry_after_s`, the seconds until the request would be served."""

    code = "limit_exceeded"
