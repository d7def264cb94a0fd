"""Show the policies that stop or drop something in a topic, with their values and levels."""

from bindery_broker.broker import Broker
from bindery_broker.http.v1.models import PolicyInForce
from bindery_broker.limits.in_force import Facts, rules_in_force
from bindery_broker.namespaces.policy_values import render
from bindery_broker.subscriptions.subscription import Subscription
from bindery_broker.topics.topic import Topic

MS = 1000


def policies_of(broker: Broker, topic: Topic, subscriptions: list[Subscription]) -> list[PolicyInForce]:
    """Return the policies in force for a topic. `subscriptions`: those whose state and counts are looked at."""
    kept = [one for one in subscriptions if one.is_durable and not one.is_system]
    times = [one.oldest.publish_time_ms for one in kept if one.oldest.publish_time_ms is not None]
    consumers = [len(one.sessions) for one in topic.subscriptions.values()]
    facts = Facts(
        backlog_size=max((one.cursor.backlog[1] for one in kept), default=0),
        oldest_age_s=(broker.clock() - min(times)) / MS if times else None,
        consumers=sum(consumers),
        consumers_per_subscription=max((len(one.sessions) for one in subscriptions), default=0),
        subscriptions=len(consumers),
        producers=topic.producers_count,
        is_blocked_on_unacked=any(one.is_blocked_on_unacked for one in subscriptions),
        is_consumer_blocked=any(one.has_full_consumer for one in subscriptions),
        throttled_by=next((by for one in subscriptions if (by := one.throttled_by) is not None), None),
        expired=sum(one.statistics.expired.messages for one in subscriptions),
        evicted=sum(one.statistics.evicted for one in subscriptions),
    )
    shown = []
    for rule in rules_in_force(broker.policies.explain(topic.name), facts):
        answer = PolicyInForce(
            policy=rule.policy,
            value=render(rule.resolved.value),
            source=rule.resolved.source.value,
            effect=rule.effect,
            detail=rule.detail,
        )
        if rule.acts is not None:
            answer.acts = rule.acts
        if rule.dropped is not None:
            answer.dropped = rule.dropped
        shown.append(answer)
    return shown
