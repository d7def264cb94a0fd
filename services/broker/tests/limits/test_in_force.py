"""Which policies of a topic stop or drop something: value, level, and whether they do so now."""

import dataclasses

import pytest
from bindery_broker.limits import in_force
from bindery_broker.limits.in_force import Facts, rules_in_force
from bindery_broker.namespaces.policies import (
    BacklogQuota,
    EffectivePolicies,
    InactiveMode,
    InactiveTopics,
    QuotaAction,
    Rate,
)
from bindery_broker.namespaces.resolution import explain

EVICT = BacklogQuota(1_000, QuotaAction.EVICT)
SET = {
    "message_ttl_s": 60,
    "backlog_quota_size": EVICT,
    "backlog_quota_age": BacklogQuota(30, QuotaAction.HOLD),
    "subscription_expiration_s": 120,
    "inactive_topics": InactiveTopics(InactiveMode.CAUGHT_UP, 300),
    "message_size_max": 10,
    "delay_s_max": 5.0,
    "encryption_required": True,
    "subscribe_rate": Rate(1, None, 30),
    "publish_rate": Rate(5, 100),
    "dispatch_rate": Rate(7, None),
    "subscription_dispatch_rate": Rate(None, 9),
    "unacked_per_subscription_max": 3,
    "unacked_per_consumer_max": 2,
    "subscription_types": frozenset({"shared"}),
    "producers_max": 4,
    "consumers_max": 5,
    "consumers_per_subscription_max": 6,
    "subscriptions_max": 7,
}


def test_policies_without_a_limit_are_left_out() -> None:
    assert rules_in_force(explain(EffectivePolicies(), {}, {}), Facts()) == []


def test_each_policy_has_an_effect_and_is_in_the_table() -> None:
    rules = rules_in_force(explain(EffectivePolicies(), SET, {}), Facts())
    assert {rule.policy for rule in rules} == set(SET)
    table = (in_force.__doc__ or "").replace("\n|         |", "")
    for rule in rules:
        row = next(line for line in table.splitlines() if line.startswith(f"| {rule.effect} "))
        assert rule.policy in row or "backlog quota" in row


def test_every_field_has_an_effect_or_is_none_that_stops_or_drops() -> None:
    without = {
        "retention", "deduplication", "deduplication_snapshot_s", "delayed_delivery", "auto_create_topics",
        "auto_create_partitions", "auto_create_subscriptions", "topics_per_namespace_max", "compaction_threshold",
        "schema_compatibility", "schema_auto_update", "schema_validation", "persistence",
    }  # fmt: skip
    assert {field.name for field in dataclasses.fields(EffectivePolicies)} == without | set(SET)


def test_the_level_and_the_value_are_said() -> None:
    policies = explain(
        EffectivePolicies(unacked_per_consumer_max=9), {"message_ttl_s": 60}, {"publish_rate": Rate(5, 100)}
    )
    assert [rule.detail for rule in rules_in_force(policies, Facts())] == [
        "messages are acknowledged 60 s after they were published, or became due "
        "(policy message_ttl_s of the namespace)",
        "a consumer with 9 unacknowledged messages gets no new ones (policy unacked_per_consumer_max of the broker)",
        "producers wait above 5 messages and 100 bytes in 1 s (policy publish_rate of the topic)",
    ]


@pytest.mark.parametrize(
    ("policy", "facts"),
    [
        ("message_ttl_s", Facts(expired=1)),
        ("backlog_quota_size", Facts(backlog_size=1_001)),
        ("backlog_quota_age", Facts(oldest_age_s=31)),
        ("dispatch_rate", Facts(throttled_by="dispatch_rate")),
        ("subscription_dispatch_rate", Facts(throttled_by="subscription_dispatch_rate")),
        ("unacked_per_subscription_max", Facts(is_blocked_on_unacked=True)),
        ("unacked_per_consumer_max", Facts(is_consumer_blocked=True)),
        ("producers_max", Facts(producers=4)),
        ("consumers_max", Facts(consumers=5)),
        ("consumers_per_subscription_max", Facts(consumers_per_subscription=6)),
        ("subscriptions_max", Facts(subscriptions=7)),
    ],
)
def test_a_policy_acts_exactly_if_its_limit_is_reached(policy: str, facts: Facts) -> None:
    rules = explain(EffectivePolicies(), SET, {})
    idle = {rule.policy: rule.acts for rule in rules_in_force(rules, Facts(oldest_age_s=1))}
    assert not any(idle.values())
    acting = [rule.policy for rule in rules_in_force(rules, facts) if rule.acts]
    assert acting == [policy]


def test_what_was_dropped_is_counted() -> None:
    rules = rules_in_force(explain(EffectivePolicies(), SET, {}), Facts(expired=3, evicted=5))
    assert {rule.policy: rule.dropped for rule in rules if rule.dropped is not None} == {
        "message_ttl_s": 3,
        "backlog_quota_size": 5,
    }
