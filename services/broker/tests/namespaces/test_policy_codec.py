"""Policies in Pulsar's JSON: what a level sets, and how a change keeps everything else."""

import dataclasses
from typing import Any

import pytest
from bindery_broker.namespaces import policy_codec
from bindery_broker.namespaces.policies import (
    BacklogQuota,
    EffectivePolicies,
    InactiveMode,
    InactiveTopics,
    Persistence,
    QuotaAction,
    Rate,
    Retention,
    SchemaCompatibility,
)
from bindery_broker.namespaces.policy_codec import (
    UNSET,
    change_namespace,
    change_topic,
    set_in_namespace,
    set_in_topic,
)
from bindery_core.errors import Corrupt

# As a Pulsar 4.2 broker writes it: every policy that is not set is null, empty, or false.
EMPTY = {
    "auth_policies": {"namespace_auth": {}, "destination_auth": {}, "subscription_auth_roles": {}},
    "replication_clusters": ["c"],
    "bundles": {"boundaries": ["0x00000000", "0xffffffff"], "numBundles": 1},
    "backlog_quota_map": {},
    "clusterDispatchRate": {},
    "topicDispatchRate": {},
    "subscriptionDispatchRate": {},
    "replicatorDispatchRate": {},
    "clusterSubscribeRate": {},
    "publishMaxMessageRate": {},
    "latency_stats_sample_rate": {},
    "persistence": None,
    "deduplicationEnabled": None,
    "autoTopicCreationOverride": None,
    "message_ttl_in_seconds": None,
    "retention_policies": None,
    "deleted": False,
    "encryption_required": False,
    "subscription_auth_mode": "None",
    "offload_threshold": -1,
    "schema_compatibility_strategy": "UNDEFINED",
    "is_allow_auto_update_schema": None,
    "schema_validation_enforced": False,
    "subscription_types_enabled": [],
    "properties": {},
}
VALUES: dict[str, list[Any]] = {
    "retention": [Retention(0, 0), Retention(None, None), Retention(3600, 2**20), Retention(60, None)],
    "message_ttl_s": [0, 5],
    "backlog_quota_size": [BacklogQuota(1000, QuotaAction.HOLD), BacklogQuota(1, QuotaAction.EVICT), None],
    "backlog_quota_age": [BacklogQuota(3600, QuotaAction.REFUSE), None],
    "deduplication": [True, False],
    "deduplication_snapshot_s": [30],
    "delayed_delivery": [True, False],
    "delay_s_max": [0, 1.5],
    "inactive_topics": [InactiveTopics(InactiveMode.CAUGHT_UP, 60), None],
    "auto_create_topics": [True, False],
    "auto_create_partitions": [0, 7],
    "auto_create_subscriptions": [True, False],
    "producers_max": [0, 3],
    "consumers_max": [0, 3],
    "consumers_per_subscription_max": [0, 3],
    "subscriptions_max": [0, 3],
    "unacked_per_consumer_max": [0, 3],
    "unacked_per_subscription_max": [0, 3],
    "message_size_max": [0, 1024],
    "topics_per_namespace_max": [0, 3],
    "publish_rate": [Rate(10, None), Rate(None, 1000), Rate(1, 2), None],
    "dispatch_rate": [Rate(10, 5, 2, True), None],
    "subscription_dispatch_rate": [Rate(None, 5, 1, False), None],
    "subscribe_rate": [Rate(10, None, 30), None],
    "compaction_threshold": [0, 2**30],
    "schema_compatibility": list(SchemaCompatibility),
    "schema_auto_update": [True, False],
    "schema_validation": [True],
    "subscription_expiration_s": [0, 120],
    "subscription_types": [frozenset({"exclusive"}), frozenset({"shared", "key_shared"})],
    "persistence": [Persistence(3, 3, 2)],
    "encryption_required": [True],
}
CASES = [(name, value) for name, values in VALUES.items() for value in values]


def test_every_policy_has_a_place_in_at_least_one_level() -> None:
    fields = {field.name for field in dataclasses.fields(EffectivePolicies)}
    assert set(VALUES) == fields == policy_codec.NAMESPACE_POLICIES | policy_codec.TOPIC_POLICIES


def test_policies_as_pulsar_writes_them_set_nothing() -> None:
    assert set_in_namespace(EMPTY, cluster="c") == {}
    assert set_in_namespace({}, cluster="c") == {}
    assert set_in_topic({"backLogQuotaMap": {}, "subscriptionTypesEnabled": [], "isGlobal": False}) == {}


@pytest.mark.parametrize(("name", "value"), CASES)
def test_a_policy_that_is_set_is_read_back_and_can_be_removed(name: str, value: Any) -> None:
    if name in policy_codec.NAMESPACE_POLICIES:
        changed = change_namespace(EMPTY, {name: value}, cluster="c")
        assert set_in_namespace(changed, cluster="c")[name] == value
        unset = change_namespace(changed, {name: UNSET}, cluster="c")
        assert set_in_namespace(unset, cluster="c") == {}
        kept = {key: value for key, value in EMPTY.items() if value and key != "schema_compatibility_strategy"}
        assert {key: unset[key] for key in kept} == kept
    if name in policy_codec.TOPIC_POLICIES:
        changed = change_topic({}, {name: value})
        assert set_in_topic(changed) == {name: value}
        assert change_topic(changed, {name: UNSET}) == {}


def test_a_change_does_not_touch_its_argument_and_keeps_unknown_members() -> None:
    before = {
        "future": {"a": [1, 2.5, None]},
        "retention_policies": {"retentionTimeInMinutes": 1, "retentionSizeInMB": 1, "new": "x"},
        "publishMaxMessageRate": {"other": {"publishThrottlingRateInMsg": 9}},
    }
    changes = {"retention": Retention(120, None), "publish_rate": Rate(5, None)}
    changed = change_namespace(before, changes, cluster="c")
    assert changed["future"] == before["future"]
    assert changed["retention_policies"] == {"retentionTimeInMinutes": 2, "retentionSizeInMB": -1, "new": "x"}
    assert changed["publishMaxMessageRate"]["other"] == {"publishThrottlingRateInMsg": 9}
    assert before["retention_policies"]["retentionTimeInMinutes"] == 1
    assert "c" not in before["publishMaxMessageRate"]


def test_names_in_the_json_are_those_of_pulsar() -> None:
    changes = {
        "backlog_quota_size": BacklogQuota(10, QuotaAction.EVICT),
        "inactive_topics": InactiveTopics(InactiveMode.CAUGHT_UP, 60),
        "auto_create_partitions": 3,
        "delay_s_max": 2,
        "dispatch_rate": Rate(1, None, 5, True),
        "subscription_types": frozenset({"key_shared"}),
    }
    assert change_namespace({}, changes, cluster="c") == {
        "backlog_quota_map": {
            "destination_storage": {"limitSize": 10, "limitTime": -1, "policy": "consumer_backlog_eviction"}
        },
        "inactive_topic_policies": {
            "inactiveTopicDeleteMode": "delete_when_subscriptions_caught_up",
            "maxInactiveDurationSeconds": 60,
            "deleteWhileInactive": True,
        },
        "autoTopicCreationOverride": {
            "allowAutoTopicCreation": True,
            "topicType": "partitioned",
            "defaultNumPartitions": 3,
        },
        "delayed_delivery_policies": {"active": True, "tickTime": 1000, "maxDeliveryDelayInMillis": 2000},
        "topicDispatchRate": {
            "c": {
                "dispatchThrottlingRateInMsg": 1,
                "dispatchThrottlingRateInByte": -1,
                "relativeToPublishRate": True,
                "ratePeriodInSecond": 5,
            }
        },
        "subscription_types_enabled": ["Key_Shared"],
    }


def test_rates_are_those_of_the_own_cluster() -> None:
    policies = {"topicDispatchRate": {"a": {"dispatchThrottlingRateInMsg": 1}}}
    assert set_in_namespace(policies, cluster="b") == {}
    assert set_in_namespace(policies, cluster="a") == {"dispatch_rate": Rate(1, None)}


def test_the_size_of_a_quota_has_a_former_name() -> None:
    policies = {"backlog_quota_map": {"destination_storage": {"limit": 7, "policy": "producer_exception"}}}
    assert set_in_namespace(policies, cluster="c") == {"backlog_quota_size": BacklogQuota(7, QuotaAction.REFUSE)}


@pytest.mark.parametrize(
    ("policies", "policy"),
    [
        ({"message_ttl_in_seconds": "5"}, "message_ttl_s"),
        ({"message_ttl_in_seconds": True}, "message_ttl_s"),
        ({"retention_policies": {"retentionTimeInMinutes": 1}}, "retention"),
        ({"retention_policies": []}, "retention"),
        ({"backlog_quota_map": []}, "backlog_quota_size"),
        ({"deduplicationEnabled": 1}, "deduplication"),
        ({"schema_compatibility_strategy": "SIDEWAYS"}, "schema_compatibility"),
        ({"subscription_types_enabled": ["Private"]}, "subscription_types"),
        ({"inactive_topic_policies": {"deleteWhileInactive": True}}, "inactive_topics"),
    ],
)
def test_a_policy_of_the_wrong_type_is_named(policies: dict[str, Any], policy: str) -> None:
    with pytest.raises(Corrupt) as caught:
        set_in_namespace(policies, cluster="c")
    assert caught.value.facts["policy"] == policy
