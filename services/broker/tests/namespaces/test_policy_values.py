"""Policies as users write them: what is refused, and how the error names it."""

from typing import Any

import pytest
from bindery_broker.errors import InvalidPolicy
from bindery_broker.namespaces.policies import BacklogQuota, EffectivePolicies, QuotaAction, Rate, Retention
from bindery_broker.namespaces.policy_codec import NAMESPACE_POLICIES, TOPIC_POLICIES, UNSET
from bindery_broker.namespaces.policy_values import check_level, parse, render, render_set

ALL = NAMESPACE_POLICIES | TOPIC_POLICIES
HOLD = "producer_request_hold"


def parsed(**members: Any) -> dict[str, Any]:
    return parse(members, allowed=ALL, level="namespace")


def persistence(ensemble_size: int, write_quorum: int, ack_quorum: int) -> dict[str, Any]:
    return {"persistence": {"ensemble_size": ensemble_size, "write_quorum": write_quorum, "ack_quorum": ack_quorum}}


def test_values_have_the_types_of_the_fields() -> None:
    assert parsed(
        retention={"time_s": 60, "size_max": None},
        backlog_quota_size={"limit": 5, "action": HOLD},
        publish_rate={"messages": 5, "size": None},
        message_ttl_s=None,
        inactive_topics="none",
        subscription_types=["shared"],
        delay_s_max=0.5,
    ) == {
        "retention": Retention(60, None),
        "backlog_quota_size": BacklogQuota(5, QuotaAction.HOLD),
        "publish_rate": Rate(5, None),
        "message_ttl_s": UNSET,
        "inactive_topics": None,
        "subscription_types": frozenset({"shared"}),
        "delay_s_max": 0.5,
    }


def test_rendered_values_are_parsed_back() -> None:
    policies = parsed(
        retention={"time_s": 0, "size_max": 0},
        backlog_quota_age={"limit": 5, "action": "consumer_backlog_eviction"},
        dispatch_rate={"messages": None, "size": 9, "period_s": 2, "is_relative_to_publish_rate": True},
        inactive_topics={"mode": "delete_when_subscriptions_caught_up", "seconds_max": 60},
        persistence={"ensemble_size": 3, "write_quorum": 3, "ack_quorum": 2},
        schema_compatibility="BACKWARD",
        subscribe_rate="none",
        subscription_types=["shared", "failover"],
    )
    assert parsed(**render_set(policies)) == policies
    assert render(EffectivePolicies().subscription_types) == ["exclusive", "failover", "key_shared", "shared"]


@pytest.mark.parametrize(
    ("members", "field", "reason"),
    [
        ({"producers": 1}, "producers", "no such policy"),
        ({"message_ttl_s": "5"}, "message_ttl_s", "Expected `int`"),
        ({"message_ttl_s": -1}, "message_ttl_s", "from 0 to 2147483647"),
        ({"message_ttl_s": 2**31}, "message_ttl_s", "from 0 to 2147483647"),
        ({"message_ttl_s": "none"}, "message_ttl_s", "Expected `int`"),
        ({"deduplication": 1}, "deduplication", "Expected `bool`"),
        ({"retention": {"time_s": 0, "size_max": 2**20}}, "retention", "both 0"),
        ({"retention": {"time_s": 60, "size_max": 0}}, "retention", "both 0"),
        ({"retention": {"time_s": None, "size_max": 0}}, "retention", "both 0"),
        ({"retention": {"time_s": 61, "size_max": None}}, "retention.time_s", "multiple of 60"),
        ({"retention": {"time_s": None, "size_max": 1000}}, "retention.size_max", "multiple of 1048576"),
        ({"retention": {"time_s": 60}}, "retention", "missing required field `size_max`"),
        ({"retention": {"time_s": 60, "size_max": None, "x": 1}}, "retention.x", "no such member"),
        ({"retention": "none"}, "retention", "Expected `object"),
        ({"backlog_quota_size": {"limit": 0, "action": HOLD}}, "backlog_quota_size.limit", "from 1"),
        ({"backlog_quota_size": {"limit": 1, "action": "x"}}, "backlog_quota_size", "Invalid enum value 'x'"),
        ({"backlog_quota_age": {"limit": 2**31, "action": HOLD}}, "backlog_quota_age.limit", "from 1"),
        (
            {"inactive_topics": {"mode": "delete_when_no_subscriptions", "seconds_max": 0}},
            "inactive_topics.seconds_max",
            "from 1",
        ),
        ({"publish_rate": {"messages": None, "size": None}}, "publish_rate", "messages or size is required"),
        ({"publish_rate": {"messages": 0, "size": None}}, "publish_rate.messages", "from 1"),
        ({"publish_rate": {"messages": 1, "size": None, "period_s": 2}}, "publish_rate.period_s", "1 second"),
        ({"subscribe_rate": {"messages": 1, "size": 1}}, "subscribe_rate.size", "no size"),
        (
            {"publish_rate": {"messages": 1, "size": None, "is_relative_to_publish_rate": True}},
            "publish_rate.is_relative_to_publish_rate",
            "only dispatch rates",
        ),
        ({"subscription_types": []}, "subscription_types", "at least one"),
        ({"subscription_types": ["private"]}, "subscription_types", "known: exclusive"),
        ({"subscription_expiration_s": 61}, "subscription_expiration_s", "multiple of 60"),
        (persistence(2, 3, 2), "persistence.write_quorum", "from 1 to 2"),
        (persistence(3, 3, 0), "persistence.ack_quorum", "from 1 to 3"),
        ({"schema_compatibility": "SIDEWAYS"}, "schema_compatibility", "Invalid enum value"),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_field_and_what_is_allowed(members: dict[str, Any], field: str, reason: str) -> None:
    with pytest.raises(InvalidPolicy) as caught:
        parsed(**members)
    assert caught.value.facts["field"] == field
    assert reason in str(caught.value)


def test_a_policy_of_the_other_level_is_refused() -> None:
    with pytest.raises(InvalidPolicy, match="a topic cannot set this policy"):
        parse({"topics_per_namespace_max": 1}, allowed=TOPIC_POLICIES, level="topic")


def test_retention_must_be_larger_than_the_quotas() -> None:
    quota = BacklogQuota(2**20, QuotaAction.HOLD)
    with pytest.raises(InvalidPolicy, match="larger than backlog_quota_size"):
        check_level({"retention": Retention(60, 2**20), "backlog_quota_size": quota})
    with pytest.raises(InvalidPolicy, match="larger than backlog_quota_age"):
        check_level({"retention": Retention(60, None), "backlog_quota_age": BacklogQuota(60, QuotaAction.HOLD)})
    check_level({"retention": Retention(60, 2**21), "backlog_quota_size": quota})
    check_level({"retention": Retention(0, 0), "backlog_quota_size": quota})
    check_level({"backlog_quota_size": quota, "backlog_quota_age": None})
