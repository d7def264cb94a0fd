"""Enforce the policies of loaded topics. What is due is decided by pure functions; this module executes it."""

from typing import Final

from bindery_core.errors import BinderyError
from bindery_core.sources import MonotonicClock
from bindery_kit.observability.logs import error_fields, get_logger

from bindery_broker.limits.backlog_quota import evicted_before_ms, evicted_entries
from bindery_broker.limits.inactivity import TopicUse, is_inactive
from bindery_broker.managed_ledger import RetentionRule, WallClock
from bindery_broker.namespaces.policies import EffectivePolicies, QuotaAction, Retention
from bindery_broker.retries.names import DEAD_LETTER_SUFFIX, RETRY_SUFFIX
from bindery_broker.topics.admission import excesses
from bindery_broker.topics.topic import Topic

EXPIRY_READS_MAX: Final = 64
"""Maximum number of reads of one megabyte, in one round over all topics, that look for expired messages. What is left
expires in the next rounds."""
EVICTIONS_MAX: Final = 100
"""Maximum number of evictions of one topic in a round."""

log = get_logger(__name__)


def retention_rule(retention: Retention | None) -> RetentionRule | None:
    """Return the retention of a policy for the managed ledger. None: its settings apply."""
    return None if retention is None else RetentionRule(retention.time_s, retention.size_max)


async def roll_for_retention(topic: Topic) -> None:
    """Continue in a new ledger if the open one is older than the retention time, also without traffic.

    Only closed ledgers can be deleted. Without this, messages would be kept until the ledger is full or reaches the
    maximum age of a ledger, which is longer than many retention times.
    """
    retention = topic.policies.retention
    if retention is not None and retention.time_s:
        await topic.ledger.roll_if_older(retention.time_s)


async def expire_messages(topic: Topic, *, reads_max: int) -> int:
    """Acknowledge messages whose time to live is over. Returns the number of reads."""
    reads = 0
    if topic.policies.message_ttl_s:
        for subscription in list(topic.subscriptions.values()):
            if reads < reads_max:
                reads += await subscription.expire_due(reads_max=reads_max - reads)
    return reads


async def evict_backlog(topic: Topic, *, clock: WallClock) -> None:
    """Acknowledge the oldest messages of the subscriptions that exceed a quota with `consumer_backlog_eviction`."""
    for _ in range(EVICTIONS_MAX):
        found = [one for one in await excesses(topic, now_ms=clock()) if one.action is QuotaAction.EVICT]
        if not found:
            return
        excess = found[0]
        subscription = topic.subscriptions.get(excess.backlog.subscription)
        if subscription is None:
            continue
        if excess.quota == "size":
            await subscription.evict(evicted_entries(excess.backlog, excess.limit))
            topic.statistics.evictions_by_size += 1
        else:
            await subscription.evict_before(evicted_before_ms(excess.limit, clock()))
            topic.statistics.evictions_by_age += 1
        log.warning(
            "backlog_evicted",
            topic=topic.name.short,
            subscription=subscription.name,
            quota=excess.quota,
            limit=excess.limit,
            value=excess.value,
        )


async def expire_subscriptions(topic: Topic, *, now: MonotonicClock) -> None:
    """Delete the subscriptions that have had no consumer for the time of the policy. Those of retry and dead-letter
    topics are kept, because they keep messages without consumers on purpose."""
    seconds = topic.policies.subscription_expiration_s
    if not seconds or is_moved_to(topic):
        return
    for name, subscription in list(topic.subscriptions.items()):
        subscription.tick()
        if subscription.is_system or not subscription.is_durable or len(subscription.sessions):
            continue
        used_at = max(subscription.created_at, subscription.statistics.last_request_at or 0.0)
        if now() - used_at >= seconds:
            log.info("subscription_expired", topic=topic.name.short, subscription=name, idle_s=round(now() - used_at))
            await topic.unsubscribe(name)


def is_moved_to(topic: Topic) -> bool:
    """Return whether the topic is a retry or a dead-letter topic, by its name."""
    return topic.name.partitioned_topic.local.endswith((RETRY_SUFFIX, DEAD_LETTER_SUFFIX))


def topic_is_inactive(topic: Topic, *, now: float, is_in_use: bool) -> bool:
    """Return whether the policy of inactive topics deletes the topic. `is_in_use`: a request uses it."""
    policy = topic.policies.inactive_topics
    if policy is None:
        return False
    kept = {
        name: subscription.cursor.backlog_entries
        for name, subscription in topic.subscriptions.items()
        if not subscription.is_system and subscription.is_durable
    }
    idle_s = now - topic.last_use
    use = TopicUse(
        local=topic.name.partitioned_topic.local,
        partition=topic.partition,
        idle_s=idle_s,
        is_in_use=is_in_use or topic.is_consumed or topic.producers_count > 0,
        is_moved_to=is_moved_to(topic),
        entries=topic.ledger.entries_count,
        has_retained=topic.ledger.retains_entries(idle_s=idle_s),
        backlogs=kept,
    )
    return is_inactive(use, policy)


def acts_on_its_own(policies: EffectivePolicies) -> bool:
    """Return whether a policy is set that acts without a request. Most topics have none, and cost a round nothing."""
    return bool(
        policies.message_ttl_s
        or policies.subscription_expiration_s
        or policies.backlog_quota_size is not None
        or policies.backlog_quota_age is not None
        or policies.inactive_topics is not None
    )


async def enforce(topic: Topic, *, now: MonotonicClock, clock: WallClock, reads_max: int) -> int:
    """Run one round for one topic. Returns the number of reads; errors are logged, and the next round goes on."""
    try:
        reads = await expire_messages(topic, reads_max=reads_max)
        await evict_backlog(topic, clock=clock)
        await expire_subscriptions(topic, now=now)
    except BinderyError as error:
        if topic.is_open:
            log.warning("policies_not_enforced", topic=topic.name.short, **error_fields(error))
        return reads_max
    return reads
