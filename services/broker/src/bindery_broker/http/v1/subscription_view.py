"""Show a subscription as JSON: which messages its consumers hold, and why messages are not delivered."""

from collections.abc import Callable, Sequence
from typing import Final

from bindery_broker.dispatch.sessions import Session
from bindery_broker.dispatch.single_active import SingleActiveDispatcher
from bindery_broker.http.v1.models import (
    ConsumerInfo,
    DeadLettersInfo,
    Explanation,
    PolicyInForce,
    RetryInfo,
    SubscriptionInfo,
)
from bindery_broker.http.v1.statistics_view import Times, consumer_fields, delivery_fields
from bindery_broker.retries.names import DEAD_LETTERS
from bindery_broker.subscriptions.subscription import Subscription
from bindery_broker.topics.backlog import backlog_of
from bindery_broker.topics.retried import RetriedSubscription
from bindery_broker.topics.topic import Topic

SUBSCRIPTION_SIZE = 850
"""Approximate bytes of a subscription as JSON, without its properties, consumers, retry and dead-letter topics."""
ALL_ACKNOWLEDGED = "everything is acknowledged"
CONSUMER_SIZE = 450
"""Approximate bytes of a consumer as JSON, without its name."""


def info(topic: Topic, subscription: Subscription, retried: RetriedSubscription, times: Times) -> SubscriptionInfo:
    """Return the state of a subscription, with that of its retry and dead-letter topics if they are loaded."""
    subscription.tick()
    found, dead_letters = retried.loaded, retried.dead_letters
    consumers = [_consumer(subscription, session, times) for session in subscription.sessions]
    if found is not None:
        found.subscription.tick()
        others = [_consumer(found.subscription, session, times) for session in found.subscription.sessions]
        consumers = _merged(consumers, others)
    answer = SubscriptionInfo(
        subscription=subscription.name,
        type=subscription.type,
        mark_delete=str(subscription.cursor.mark_delete),
        read_position=str(subscription.read_position),
        consumers=consumers,
        properties=dict(subscription.cursor.properties),
        **delivery_fields(topic, subscription, times),
    )
    if subscription.tags:
        answer.tags = "||".join(sorted(subscription.tags))
    if found is not None:
        backlog = backlog_of(found.subscription.cursor, found.topic.ledger, found.topic.statistics)
        answer.retry = RetryInfo(
            topic=found.topic.name.short,
            backlog_entries=backlog.entries,
            backlog_messages=backlog.messages,
            delayed=found.subscription.delayed_count,
            unacked=len(found.subscription.dispatcher.leases),
        )
    if dead_letters is not None:
        answer.dead_letters = _dead_letters(dead_letters)
    return answer


def dead_letters_lost(topic: Topic | None) -> str | None:
    """Return a warning if a dead-letter topic does not keep its messages."""
    if topic is None or not topic.ledger.entries_count or topic.subscriptions:
        return None
    return (
        f"the dead-letter topic {topic.name.short} has {topic.ledger.entries_count} entries and no subscription, so "
        f"that they are deleted; create its subscription {DEAD_LETTERS}"
    )


def _dead_letters(topic: Topic) -> DeadLettersInfo:
    keeper = topic.subscriptions.get(DEAD_LETTERS)
    return DeadLettersInfo(
        topic=topic.name.short,
        backlog_entries=topic.ledger.entries_count if keeper is None else keeper.cursor.backlog_entries,
        subscriptions=len(topic.subscriptions),
    )


def _merged(consumers: list[ConsumerInfo], others: list[ConsumerInfo]) -> list[ConsumerInfo]:
    """Return consumers of a subscription with what they do in its retry topic, where they are `others`."""
    by_name = {one.consumer: one for one in others}
    merged = []
    for one in consumers:
        other = by_name.pop(one.consumer, None)
        if other is not None:
            for name in ("unacked", "messages", "bytes", "messages_per_s", "bytes_per_s", "redelivered", "acked"):
                setattr(one, name, getattr(one, name) + getattr(other, name))
            for name, choose in _CHOSEN.items():
                values = [value for value in (getattr(one, name), getattr(other, name)) if value is not None]
                if values:
                    setattr(one, name, choose(values))
        merged.append(one)
    return [*merged, *by_name.values()]


_CHOSEN: Final[dict[str, Callable[[list[int]], int]]] = {
    "oldest_lease_age_ms": max,
    "next_timeout_in_ms": min,
    "session_ends_in_ms": max,
    "last_delivered_at": max,
    "last_acked_at": max,
}
"""Which of the values of both topics counts for a consumer."""


def size_of(subscription: Subscription) -> int:
    """Return the approximate bytes of `info` as JSON."""
    size = SUBSCRIPTION_SIZE
    for name, value in subscription.cursor.properties.items():
        size += len(name) + len(value)
    for session in subscription.sessions:
        size += CONSUMER_SIZE + len(session.consumer.name)
    return size


def explain(
    topic: Topic,
    subscription: Subscription,
    retried: RetriedSubscription,
    times: Times,
    *,
    policies: Sequence[PolicyInForce] = (),
    retry_backlog: int | None = 0,
) -> Explanation:
    """`retry_backlog`: number of entries that wait in the retry topic; None: it is not known."""
    about = info(topic, subscription, retried, times)
    limits = subscription.dispatcher.limits
    blocked_by = _blocked_by(subscription, about, now=times.now)
    return Explanation(
        subscription=about,
        states=subscription.dispatcher.state_counts(),
        limits={
            "unacked_max": limits.unacked_max,
            "unacked_per_consumer_max": limits.unacked_per_consumer_max,
            "ready_max": limits.ready_max,
            "ready_bytes_max": limits.ready_bytes_max,
        },
        summary=_summary(
            about, blocked_by, due_ms=subscription.next_due_ms, now_ms=times.wall_ms, retry_backlog=retry_backlog
        ),
        blocked_by=blocked_by,
        policies=list(policies),
    )


def _blocked_by(subscription: Subscription, about: SubscriptionInfo, *, now: float) -> list[str]:
    reasons: list[str] = []
    dispatcher = subscription.dispatcher
    limits = dispatcher.limits
    if subscription.stuck is not None:
        reasons.append(subscription.stuck)
    if about.backlog_entries and not about.consumers:
        reasons.append("no consumer is connected")
    if subscription.is_blocked_on_unacked:
        reasons.append(f"{dispatcher.known_count} messages are not acknowledged, the limit is {limits.unacked_max}")
    for consumer in about.consumers:
        if consumer.unacked >= limits.unacked_per_consumer_max:
            reasons.append(
                f"consumer {consumer.consumer} holds {consumer.unacked} messages, the limit is "
                f"{limits.unacked_per_consumer_max}"
            )
    if (throttled := subscription.throttled) is not None:
        reasons.append(throttled.detail)
    if dispatcher.in_order:
        if dispatcher.paused_until is not None and dispatcher.paused_until > now:
            reasons.append(
                f"a negative acknowledgement holds delivery back for {_ms(dispatcher.paused_until - now)} ms more"
            )
        if isinstance(dispatcher, SingleActiveDispatcher) and (former := dispatcher.waits_for) is not None:
            reasons.append(
                f"the active consumer waits, for a second at most, until {former.name}, which was active before, has "
                f"acknowledged {former.held} messages"
            )
        elif dispatcher.leases and about.consumers and not about.consumers[0].calls_open:
            reasons.append(f"consumer {about.consumers[0].consumer} has not called again yet")
    return reasons


def _summary(
    about: SubscriptionInfo, blocked_by: list[str], *, due_ms: int | None, now_ms: int, retry_backlog: int | None
) -> str:
    """`due_ms`: when the first delayed message is due, in ms since 1970; None: no message waits for its time."""
    if retry_backlog is None:
        retried = ["whether messages wait in its retry topic is not known, because the owner does not answer"]
    else:
        retried = [f"{retry_backlog} entries in its retry topic are not acknowledged"] if retry_backlog else []
    if not about.backlog_entries:
        return "; ".join(["everything in the topic is acknowledged", *retried]) if retried else ALL_ACKNOWLEDGED
    parts = [
        f"{about.backlog_entries} entries are not acknowledged",
        f"{about.unacked} messages are with {sum(c.unacked > 0 for c in about.consumers)} consumers",
    ]
    delayed = 0
    if due_ms is not None:
        delayed = about.delayed
        parts.append(f"{delayed} are delayed, the first of them until {due_ms}, for {max(0, due_ms - now_ms)} ms more")
    if blocked_by:
        parts.append(f"blocked: {'; '.join(blocked_by)}")
    elif about.backlog_entries > delayed:
        parts.append("the other messages are delivered to later calls")
    return "; ".join([*parts, *retried])


def _consumer(subscription: Subscription, session: Session, times: Times) -> ConsumerInfo:
    now = times.now
    leases, consumer = subscription.dispatcher.leases, session.consumer
    grants = consumer.grants.values()
    answer = ConsumerInfo(
        consumer=consumer.name,
        type=subscription.type,
        unacked=consumer.held,
        calls_open=session.calls_open,
        calls=session.call_count,
        **consumer_fields(session.statistics, joined_at=session.joined_at, times=times),
    )
    if grants:
        answer.oldest_lease_age_ms = _ms(now - min(grant.granted_at for grant in grants))
        answer.next_timeout_in_ms = _ms(min(grant.deadline for grant in grants) - now)
    ends_at = subscription.sessions.ends_at(session, leases_end=leases.last_deadline_of(consumer))
    if ends_at is not None:
        answer.session_ends_in_ms = _ms(ends_at - now)
    return answer


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))
