"""Show a subscription as JSON: which messages its consumers hold, and why messages are not delivered."""

from bindery_broker.dispatch.sessions import Session
from bindery_broker.http.v1.models import ConsumerInfo, Explanation, SubscriptionInfo
from bindery_broker.http.v1.statistics_view import Times, consumer_fields, delivery_fields
from bindery_broker.subscriptions.subscription import Subscription
from bindery_broker.topics.topic import Topic

SUBSCRIPTION_SIZE = 850
"""Approximate bytes of a subscription as JSON, without its properties and consumers."""
CONSUMER_SIZE = 450
"""Approximate bytes of a consumer as JSON, without its name."""


def info(topic: Topic, subscription: Subscription, times: Times) -> SubscriptionInfo:
    """Return the state of a subscription."""
    subscription.tick()
    answer = SubscriptionInfo(
        subscription=subscription.name,
        type=subscription.type,
        mark_delete=str(subscription.cursor.mark_delete),
        read_position=str(subscription.read_position),
        consumers=[_consumer(subscription, session, times) for session in subscription.sessions],
        properties=dict(subscription.cursor.properties),
        **delivery_fields(topic, subscription, times),
    )
    if subscription.tags:
        answer.tags = "||".join(sorted(subscription.tags))
    return answer


def size_of(subscription: Subscription) -> int:
    """Return the approximate bytes of `info` as JSON."""
    size = SUBSCRIPTION_SIZE
    for name, value in subscription.cursor.properties.items():
        size += len(name) + len(value)
    for session in subscription.sessions:
        size += CONSUMER_SIZE + len(session.consumer.name)
    return size


def explain(topic: Topic, subscription: Subscription, times: Times) -> Explanation:
    about = info(topic, subscription, times)
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
        summary=_summary(about, blocked_by),
        blocked_by=blocked_by,
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
    if dispatcher.in_order:
        if dispatcher.paused_until is not None and dispatcher.paused_until > now:
            reasons.append(
                f"a negative acknowledgement holds delivery back for {_ms(dispatcher.paused_until - now)} ms more"
            )
        if dispatcher.leases and about.consumers and not about.consumers[0].calls_open:
            reasons.append(f"consumer {about.consumers[0].consumer} has not called again yet")
    return reasons


def _summary(about: SubscriptionInfo, blocked_by: list[str]) -> str:
    held = f"{about.unacked} messages are with {sum(c.unacked > 0 for c in about.consumers)} consumers"
    if not about.backlog_entries:
        return "everything is acknowledged"
    if blocked_by:
        return f"{about.backlog_entries} entries are not acknowledged; {held}; blocked: {'; '.join(blocked_by)}"
    return (
        f"{about.backlog_entries} entries are not acknowledged; {held}; the other messages are delivered to later calls"
    )


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
