"""Decisions from permissions as data: no store, no HTTP."""

import pytest
from bindery_broker.access.decision import (
    Decision,
    Need,
    Rule,
    Rules,
    decide_by_permissions,
    decide_by_settings,
    decide_by_tenant,
    has_permission_of_a_topic,
)
from bindery_broker.namespaces.permissions import permissions_of
from bindery_pulsar.topic_name import TopicName

RULES = Rules(frozenset({"super"}))
WILD = Rules(frozenset({"super"}), allow_wildcards=True)
TOPIC = TopicName.parse("acme/shop/t")
POLICIES = {
    "auth_policies": {
        "namespace_auth": {"p": ["produce"], "c": ["consume"], "f": ["functions"],
                           "edge-*": ["produce"], "*-eu": ["consume"]},
        "destination_auth": {
            "persistent://acme/shop/t": {"tc": ["consume"], "tp": ["produce"], "dev-*": ["consume"]},
            "persistent://acme/shop/t-partition-1": {"part": ["consume"]},
        },
        "subscription_auth_roles": {"private": ["c"], "open": []},
    }
}  # fmt: skip


def decide(role, need, topic=TOPIC, subscription=None, rules=RULES, policies=POLICIES) -> Decision:
    permissions = permissions_of(policies, path="/x")
    return decide_by_permissions(role, need, permissions, rules, topic=topic, subscription=subscription)


@pytest.mark.parametrize(
    ("role", "need", "subscription", "rule"),
    [
        ("p", Need.PRODUCE, None, Rule.NAMESPACE),
        ("p", Need.CONSUME, "s", Rule.NO_PERMISSION),
        ("p", Need.LOOKUP, None, Rule.NAMESPACE),
        ("c", Need.PRODUCE, None, Rule.NO_PERMISSION),
        ("c", Need.CONSUME, "s", Rule.NAMESPACE),
        ("c", Need.CONSUME, "private", Rule.NAMESPACE),
        ("c", Need.LOOKUP, None, Rule.NAMESPACE),
        ("tc", Need.CONSUME, "s", Rule.TOPIC),
        ("tc", Need.CONSUME, "private", Rule.SUBSCRIPTION_ROLES),
        ("tc", Need.CONSUME, "open", Rule.TOPIC),
        ("tc", Need.PRODUCE, None, Rule.NO_PERMISSION),
        ("tp", Need.PRODUCE, None, Rule.TOPIC),
        ("f", Need.LOOKUP, None, Rule.NO_PERMISSION),
        ("nobody", Need.LOOKUP, None, Rule.NO_PERMISSION),
        ("edge-7", Need.PRODUCE, None, Rule.NO_PERMISSION),
        ("P", Need.PRODUCE, None, Rule.NO_PERMISSION),
    ],
)
def test_permissions_decide_by_action_level_and_subscription(role, need, subscription, rule):
    decision = decide(role, need, subscription=subscription)
    assert decision.rule is rule
    assert decision.is_allowed == (rule in (Rule.NAMESPACE, Rule.TOPIC))


def test_a_permission_of_a_topic_counts_for_its_partitions_and_not_the_reverse():
    assert decide("tc", Need.CONSUME, topic=TOPIC.with_partition(1)).rule is Rule.PARTITIONED_TOPIC
    assert decide("part", Need.CONSUME, topic=TOPIC.with_partition(1)).rule is Rule.TOPIC
    assert not decide("part", Need.CONSUME, topic=TOPIC.with_partition(2)).is_allowed
    assert not decide("part", Need.CONSUME).is_allowed
    assert not decide("tc", Need.CONSUME, topic=TopicName.parse("acme/shop/tt")).is_allowed


def test_permissions_of_topics_do_not_count_for_the_namespace():
    assert not decide("tc", Need.NAMESPACE_USE, topic=None).is_allowed
    assert not decide("tc", Need.NAMESPACE_CONSUME, topic=None).is_allowed
    assert decide("c", Need.NAMESPACE_CONSUME, topic=None, subscription="private").is_allowed
    assert decide("c", Need.NAMESPACE_USE, topic=None).is_allowed
    assert has_permission_of_a_topic("tc", permissions_of(POLICIES, path=""), RULES)
    assert not has_permission_of_a_topic("c", permissions_of(POLICIES, path=""), RULES)


@pytest.mark.parametrize(
    ("role", "need", "allowed"),
    [
        ("edge-7", Need.PRODUCE, True),
        ("edge-", Need.PRODUCE, True),
        ("edge", Need.PRODUCE, False),
        ("site-eu", Need.CONSUME, True),
        ("eu", Need.CONSUME, False),
        ("dev-1", Need.CONSUME, True),
        ("edge-7", Need.CONSUME, False),
    ],
)
def test_wildcards_count_if_they_are_switched_on(role, need, allowed):
    assert decide(role, need, rules=WILD).is_allowed is allowed
    assert not decide(role, need).is_allowed


def test_a_star_alone_stands_for_every_role():
    policies = {"auth_policies": {"namespace_auth": {"*": ["produce"]}}}
    assert decide("any", Need.PRODUCE, rules=WILD, policies=policies) == Decision(True, Rule.NAMESPACE, "*")
    assert not decide("any", Need.PRODUCE, policies=policies).is_allowed


def test_with_the_mode_prefix_a_subscription_begins_with_the_role():
    policies = {**POLICIES, "subscription_auth_mode": "Prefix"}
    assert decide("c", Need.CONSUME, subscription="c-1", policies=policies).is_allowed
    assert decide("c", Need.CONSUME, subscription="d-1", policies=policies).rule is Rule.SUBSCRIPTION_PREFIX
    assert decide("c", Need.CONSUME, policies=policies).is_allowed
    assert decide(
        "c", Need.CONSUME, subscription="d-1", policies={**POLICIES, "subscription_auth_mode": "None"}
    ).is_allowed


@pytest.mark.parametrize(
    ("role", "need", "rule"),
    [
        (None, Need.ANYONE, Rule.ANYONE),
        (None, Need.LOOKUP, Rule.NO_ROLE),
        (None, Need.SUPER_USER, Rule.NO_ROLE),
        ("super", Need.SUPER_USER, Rule.SUPER_USER),
        ("super", Need.PRODUCE, Rule.SUPER_USER),
        ("admin", Need.SUPER_USER, Rule.NEEDS_SUPER_USER),
        ("admin", Need.TENANT_ADMIN, None),
    ],
)
def test_settings_decide_first(role, need, rule):
    found = decide_by_settings(role, need, RULES)
    assert (found and found.rule) is rule


def test_administrators_of_the_tenant_may_do_everything_in_it():
    admins = frozenset({"admin"})
    for need in (Need.TENANT_ADMIN, Need.PRODUCE, Need.CONSUME, Need.NAMESPACE_USE):
        decision = decide_by_tenant("admin", need, admins)
        assert decision is not None
        assert decision.is_allowed
    assert decide_by_tenant("p", Need.PRODUCE, admins) is None
    refused = decide_by_tenant("p", Need.TENANT_ADMIN, admins)
    assert refused is not None
    assert refused.rule is Rule.NEEDS_TENANT_ADMIN
