"""Pulsar's admin calls on the policies of topics, and the checks that they share with those of namespaces."""

import pytest

P = "/admin/v2/persistent/public/default/t"
N = "/admin/v2/namespaces/public/default"
V1 = "/v1/topics/public/default/t"
JSON = {"content-type": "application/json"}
RATE = {
    "dispatchThrottlingRateInMsg": 100,
    "dispatchThrottlingRateInByte": 1000,
    "relativeToPublishRate": False,
    "ratePeriodInSecond": 2,
}
QUOTA = {"limitSize": 1000, "limitTime": -1, "policy": "producer_exception"}
NUMBERS = (
    "deduplicationSnapshotInterval", "maxProducers", "maxConsumers", "maxConsumersPerSubscription",
    "maxSubscriptionsPerTopic", "maxUnackedMessagesOnConsumer", "maxUnackedMessagesOnSubscription", "maxMessageSize",
    "compactionThreshold",
)  # fmt: skip


@pytest.fixture
async def topic(broker):
    assert (await broker.client.put(P)).status_code == 204
    return broker


async def in_force(broker, field):
    answer = await broker.client.get(f"{V1}/policies?effective=true")
    return answer.json()["effective"][field]


@pytest.mark.parametrize(
    ("name", "value", "field", "found"),
    [
        ("retention", {"retentionTimeInMinutes": 60, "retentionSizeInMB": 100}, "retention", None),
        ("deduplicationEnabled", True, "deduplication", True),
        ("deduplicationSnapshotInterval", 30, "deduplication_snapshot_s", 30),
        ("maxProducers", 3, "producers_max", 3),
        ("maxConsumers", 3, "consumers_max", 3),
        ("maxConsumersPerSubscription", 3, "consumers_per_subscription_max", 3),
        ("maxSubscriptionsPerTopic", 3, "subscriptions_max", 3),
        ("maxUnackedMessagesOnConsumer", 3, "unacked_per_consumer_max", 3),
        ("maxUnackedMessagesOnSubscription", 3, "unacked_per_subscription_max", 3),
        ("maxMessageSize", 1000, "message_size_max", 1000),
        ("dispatchRate", RATE, "dispatch_rate", None),
        ("subscriptionDispatchRate", RATE, "subscription_dispatch_rate", None),
        ("compactionThreshold", 2**40, "compaction_threshold", 2**40),
        ("subscriptionTypesEnabled", ["Shared"], "subscription_types", ["shared"]),
        ("schemaCompatibilityStrategy", "FORWARD", "schema_compatibility", "FORWARD"),
        ("schemaValidationEnforced", True, "schema_validation", True),
        ("autoSubscriptionCreation", {"allowAutoSubscriptionCreation": False}, "auto_create_subscriptions", False),
    ],
)
async def test_a_policy_is_set_read_and_removed(topic, name, value, field, found):
    before = await topic.client.get(f"{P}/{name}")
    method = "PUT" if name == "schemaCompatibilityStrategy" else "POST"
    assert (await topic.client.request(method, f"{P}/{name}", json=value)).status_code == 204
    assert (await topic.client.get(f"{P}/{name}")).json() == value
    assert (await topic.client.get(f"{P}/{name}?applied=true")).json() == value
    stored = await in_force(topic, field)
    assert stored["source"] == "topic"
    assert found is None or stored["value"] == found
    assert (await topic.client.delete(f"{P}/{name}")).status_code == 204
    after = await topic.client.get(f"{P}/{name}")
    assert (after.status_code, after.content) == (200, before.content)
    assert (await in_force(topic, field))["source"] == "broker"


async def test_the_policy_in_force_is_that_of_the_namespace(topic):
    assert (await topic.client.get(f"{P}/maxConsumers")).content == b""
    assert (await topic.client.get(f"{P}/maxConsumers?applied=true")).json() == 0
    assert (await topic.post(f"{N}/maxConsumersPerTopic", 7)).status_code == 204
    assert (await topic.client.get(f"{P}/maxConsumers?applied=true")).json() == 7
    assert (await topic.post(f"{P}/maxConsumers", 2)).status_code == 204
    assert (await topic.client.get(f"{P}/maxConsumers?applied=true")).json() == 2
    retention = (await topic.client.get(f"{P}/retention?applied=true")).json()
    assert retention == {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0}


async def test_time_to_live_is_in_the_query(topic):
    assert (await topic.client.post(f"{P}/messageTTL?messageTTL=100", headers=JSON)).status_code == 204
    assert (await topic.client.get(f"{P}/messageTTL")).json() == 100
    assert (await in_force(topic, "message_ttl_s"))["value"] == 100
    for wrong in ("?messageTTL=-5", "?messageTTL=x", "?messageTTL=99999999999", ""):
        answer = await topic.client.post(f"{P}/messageTTL{wrong}", headers=JSON)
        assert (answer.status_code, answer.json()) == (412, {"reason": "Invalid value for message TTL"})
    assert (await topic.client.delete(f"{P}/messageTTL")).status_code == 204
    assert (await topic.client.get(f"{P}/messageTTL")).content == b""


async def test_delayed_delivery_is_one_object(topic):
    assert (await topic.client.get(f"{P}/delayedDelivery")).content == b""
    default = {"active": True, "tickTime": 1000, "maxDeliveryDelayInMillis": 0}
    assert (await topic.client.get(f"{P}/delayedDelivery?applied=true")).json() == default
    value = {"active": False, "tickTime": 2000, "maxDeliveryDelayInMillis": 5000}
    assert (await topic.post(f"{P}/delayedDelivery", value)).status_code == 204
    assert (await topic.client.get(f"{P}/delayedDelivery")).json() == value
    assert (await in_force(topic, "delay_s_max"))["value"] == 5
    assert (await topic.client.delete(f"{P}/delayedDelivery")).status_code == 204
    assert (await topic.client.get(f"{P}/delayedDelivery")).content == b""


@pytest.mark.parametrize(("path", "level"), [(P, "topic"), (N, "namespace")])
async def test_quotas_and_retention_must_fit(topic, path, level):
    assert (await topic.client.get(f"{path}/backlogQuotaMap")).json() == {}
    assert (await topic.post(f"{path}/backlogQuota", QUOTA)).status_code == 204
    age = {"limitSize": -1, "limitTime": 60, "policy": "consumer_backlog_eviction"}
    assert (await topic.post(f"{path}/backlogQuota?backlogQuotaType=message_age", age)).status_code == 204
    found = (await topic.client.get(f"{path}/backlogQuotaMap")).json()
    assert found == {"destination_storage": {**QUOTA, "limit": 1000}, "message_age": {**age, "limit": -1}}
    assert (await topic.client.get(f"{P}/backlogQuotaMap?applied=true")).json() == found
    small = {"retentionTimeInMinutes": 1, "retentionSizeInMB": 100}
    answer = await topic.post(f"{path}/retention", small)
    assert answer.status_code == 412
    assert answer.json()["reason"].startswith(f"Retention Quota must exceed configured backlog quota for {level}.")
    assert (await topic.client.delete(f"{path}/backlogQuota?backlogQuotaType=message_age")).status_code == 204
    assert (await topic.post(f"{path}/retention", small)).status_code == 204
    answer = await topic.post(f"{path}/backlogQuota", {**QUOTA, "limitSize": 2**40})
    assert answer.status_code == 412
    assert answer.json()["reason"].startswith(f"Backlog Quota exceeds configured retention quota for {level}.")
    assert (await topic.client.delete(f"{path}/backlogQuota")).status_code == 204
    assert (await topic.client.get(f"{path}/backlogQuotaMap")).json() == {}
    assert (await topic.client.delete(f"{path}/backlogQuota?backlogQuotaType=odd")).status_code == 400


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(("value", "status"), [(-1, 412), (2**63, 412), (1.5, 400), (True, 400), ("3", 400)])
async def test_a_wrong_number_is_refused(topic, name, value, status):
    answer = await topic.post(f"{P}/{name}", value)
    assert answer.status_code == status, answer.text
    assert answer.json()["reason"]
    assert (await topic.client.get(f"{P}/{name}")).content == b""


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("retention", {"retentionTimeInMinutes": 0, "retentionSizeInMB": 5}, 400),
        ("retention", {"retentionTimeInMinutes": 1}, 412),
        ("persistence", {"bookkeeperEnsemble": 1, "bookkeeperWriteQuorum": 2, "bookkeeperAckQuorum": 1}, 400),
        ("dispatchRate", {"dispatchThrottlingRateInMsg": "x"}, 412),
        ("inactiveTopicPolicies", {"inactiveTopicDeleteMode": "odd", "deleteWhileInactive": True}, 412),
        ("subscriptionTypesEnabled", ["Odd"], 412),
        ("backlogQuota", {"limitSize": "x"}, 412),
        ("backlogQuota", {"limitSize": 5, "policy": "odd"}, 412),
        ("deduplication", "x", 400),
    ],
)
async def test_a_wrong_value_is_refused_at_both_levels(topic, name, value, status):
    before = topic.znodes()
    paths = {"deduplication": (N,)}.get(name, (P, N))
    for path in paths:
        answer = await topic.post(f"{path}/{name}", value)
        assert answer.status_code == status, answer.text
        assert answer.json()["reason"]
    assert topic.znodes() == before


async def test_a_partition_has_no_policies_of_its_own(broker):
    await broker.client.put(f"{P}/partitions", content="2")
    assert (await broker.post(f"{P}/maxConsumers", 3)).status_code == 204
    assert (await broker.client.get(f"{P}/maxConsumers")).json() == 3
    for answer in (
        await broker.client.get(f"{P}-partition-0/maxConsumers"),
        await broker.post(f"{P}-partition-0/maxConsumers", 5),
    ):
        reason = "Not allowed to set/get topic policy for a partition"
        assert (answer.status_code, answer.json()) == (412, {"reason": reason})
    partition = await broker.client.get(f"{V1}-partition-1/policies?effective=true")
    assert partition.json()["effective"]["consumers_max"] == {"value": 3, "source": "topic"}


async def test_policies_go_with_the_topic(topic):
    await topic.post(f"{P}/maxConsumers", 3)
    assert (await topic.client.delete(P)).status_code == 204
    for answer in (await topic.client.get(f"{P}/maxConsumers"), await topic.post(f"{P}/maxConsumers", 3)):
        reason = "Topic persistent://public/default/t not found"
        assert (answer.status_code, answer.json()) == (404, {"reason": reason})
    await topic.client.put(P)
    assert (await topic.client.get(f"{P}/maxConsumers")).content == b""


@pytest.mark.parametrize("name", ["replicatorDispatchRate", "offloadPolicies", "entryFilters", "shadowTopics"])
async def test_what_nothing_would_follow_is_refused(topic, name):
    assert (await topic.client.get(f"{P}/{name}")).content == b""
    answer = await topic.post(f"{P}/{name}", {})
    assert answer.status_code == 501
    assert answer.json()["reason"].startswith("Bindery does not support")


async def test_rates_of_a_namespace_are_those_of_the_cluster(topic):
    assert (await topic.client.get(f"{N}/dispatchRate")).status_code == 204
    assert (await topic.post(f"{N}/dispatchRate", RATE)).status_code == 204
    assert (await topic.client.get(f"{N}/dispatchRate")).json() == RATE
    assert (await topic.client.get(N)).json()["topicDispatchRate"] == {"bindery": RATE}
    assert (await in_force(topic, "dispatch_rate"))["value"]["messages"] == 100
    assert (await topic.client.delete(f"{N}/dispatchRate")).status_code == 204
    assert (await in_force(topic, "dispatch_rate"))["source"] == "broker"


async def test_properties_of_a_namespace(topic):
    assert (await topic.client.put(f"{N}/property/a/b%20c")).status_code == 204
    assert (await topic.client.put(f"{N}/properties", json={"d": "e"})).status_code == 204
    assert (await topic.client.get(f"{N}/properties")).json() == {"a": "b c", "d": "e"}
    assert (await topic.client.get(f"{N}/property/a")).text == "b c"
    assert (await topic.client.get(f"{N}/property/none")).text == ""
    assert (await topic.client.delete(f"{N}/property/a")).text == "b c"
    assert (await topic.client.delete(f"{N}/properties")).status_code == 204
    assert (await topic.client.get(f"{N}/properties")).json() == {}


async def test_an_interval_is_removed_by_null(topic):
    assert (await topic.post(f"{N}/deduplicationSnapshotInterval", 30)).status_code == 204
    assert (await topic.client.get(f"{N}/deduplicationSnapshotInterval")).json() == 30
    assert (await topic.post(f"{N}/deduplicationSnapshotInterval")).status_code == 415
    answer = await topic.client.post(f"{N}/deduplicationSnapshotInterval", content="null", headers=JSON)
    assert answer.status_code == 204
    assert (await topic.client.get(f"{N}/deduplicationSnapshotInterval")).status_code == 204
