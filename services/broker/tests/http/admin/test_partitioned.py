"""Pulsar's admin calls on partitioned topics, at a broker that owns none or some of the partitions."""

import httpx
import pytest
from bindery_pulsar.topic_name import TopicName
from broker_harness import Harness

ROOT = "/admin/v2/persistent/public/default"
P = f"{ROOT}/t"
V1 = "/v1/topics/public/default/t"
FULL = "persistent://public/default/t"
JSON = {"content-type": "application/json"}


@pytest.fixture
async def two(tree, ledgers, clock):
    one, other = (Harness(tree=tree, ledgers=ledgers, clock=clock, url=f"http://{name}") for name in ("one", "two"))
    for here, there in ((one, other), (other, one)):
        here.peers[there.client.base_url.host] = httpx.ASGITransport(app=there.app)
    yield one, other
    await one.close()
    await other.close()


async def made(harness, partitions=3):
    answer = await harness.client.put(f"{P}/partitions", content=str(partitions), headers=JSON)
    assert answer.status_code == 204, answer.text
    return harness


def refused(answer, status, reason):
    assert (answer.status_code, answer.json()) == (status, {"reason": reason})


async def test_a_partitioned_topic_is_created_listed_enlarged_and_deleted(two):
    one, other = two
    missing = await one.client.get(f"{P}/partitions")
    refused(missing, 404, f"Topic {FULL} not found")
    await made(one)
    assert (await other.client.get(f"{P}/partitions")).json() == {"partitions": 3, "deleted": False}
    assert (await other.client.get(f"{P}-partition-0/partitions")).json() == {"partitions": 0, "deleted": False}
    assert (await other.client.get(f"{ROOT}/partitioned")).json() == [FULL]
    assert (await one.client.get("/admin/v2/non-persistent/public/default/partitioned")).json() == []
    assert (await one.client.get(ROOT)).json() == [f"{FULL}-partition-{index}" for index in range(3)]
    refused(await other.client.put(f"{P}/partitions", content="3"), 409, "This topic already exists")
    refused(await other.client.put(P), 409, "This topic already exists")

    missing = await other.client.put(f"{P}-partition-3")
    assert missing.status_code == 412
    assert missing.json()["reason"].startswith("Can't create topic t-partition-3 with")

    assert (await one.client.put(f"{P}/subscription/s", content='"earliest"')).status_code == 204
    assert (await other.client.post(f"{P}/partitions", content="5", headers=JSON)).status_code == 204
    assert (await one.client.get(f"{P}-partition-4/subscriptions")).json() == ["s"]
    smaller = await other.client.post(f"{P}/partitions", content="2", headers=JSON)
    refused(smaller, 422, "Desired partitions 2 can't be less than the current partitions 5.")

    assert (await other.client.delete(f"{P}-partition-1")).status_code == 204
    assert (await other.client.post(f"{P}/createMissedPartitions", headers=JSON)).status_code == 204
    assert len((await one.client.get(ROOT)).json()) == 5

    reason = "is a partitioned topic, instead of calling delete topic, please call delete-partitioned-topic."
    refused(await one.client.delete(P), 409, f"{FULL} {reason}")
    assert (await other.client.delete(f"{P}/partitions")).status_code == 204
    assert (await one.client.get(ROOT)).json() == []
    assert (await one.client.get(f"{ROOT}/partitioned")).json() == []
    refused(await one.client.delete(f"{P}/partitions"), 404, f"Topic {FULL} not found.")


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("public/default/x", "0", 406, "Number of partitions should be more than 0"),
        ("public/default/x", "-1", 406, "Number of partitions should be more than 0"),
        ("public/default/x", "257", 406, "Number of partitions should be less than or equal to 256"),
        ("public/none/x", "2", 404, "Namespace not found"),
        ("public/default/x-partition-0", "2", 412, "Partitioned Topic Name should not contain '-partition-'"),
        ("public/default/plain", "2", 409, "This topic already exists"),
    ],
)
async def test_a_wrong_creation_is_refused_and_leaves_nothing(broker, path, body, status, reason):
    await broker.client.put(f"{ROOT}/plain")
    before = broker.znodes()
    refused(await broker.client.put(f"/admin/v2/persistent/{path}/partitions", content=body), status, reason)
    assert broker.znodes().keys() == before.keys()


@pytest.mark.parametrize("body", ["", "x", '"2"', "2.5", "[]", "{}", "true"])
async def test_a_body_that_is_no_number_is_refused(broker, body):
    answer = await broker.client.put(f"{P}/partitions", content=body)
    assert answer.status_code == 400
    assert answer.json()["reason"].startswith("body: ")


async def test_properties_are_kept(broker):
    body = {"partitions": 2, "properties": {"team": "a"}}
    assert (await broker.client.put(f"{P}/partitions", json=body)).status_code == 204
    assert (await broker.client.get(f"{P}/partitions")).json() == {**body, "deleted": False}
    assert (await broker.client.get(f"{P}/properties")).json() == {"team": "a"}
    assert (await broker.client.post(f"{P}/partitions", content="3", headers=JSON)).status_code == 204
    assert (await broker.client.get(f"{P}/properties")).json() == {"team": "a"}


async def test_an_ordinary_topic_is_refused(broker):
    await broker.client.put(P)
    assert (await broker.client.get(f"{P}/partitions")).json() == {"partitions": 0, "deleted": False}
    answer = await broker.client.post(f"{P}/partitions", content="3", headers=JSON)
    refused(answer, 409, f"Topic {FULL} is not the partitioned topic.")
    answer = await broker.client.delete(f"{P}/partitions")
    reason = "is a non-partitioned topic. Instead of calling delete-partitioned-topic please call delete."
    refused(answer, 409, f"{FULL} {reason}")
    refused(await broker.client.get(f"{P}/partitioned-stats"), 404, f"Partitioned Topic {FULL} not found")
    answer = await broker.client.get(f"{P}/partitioned-internalStats")
    refused(answer, 404, f"Partitioned Topic {FULL} not found")
    answer = await broker.client.post(f"{P}/createMissedPartitions", headers=JSON)
    refused(answer, 404, f"Topic {FULL} does not exist")


async def test_statistics_are_sums_and_those_of_each_partition(two):
    one, other = two
    await made(one, 2)
    await one.client.put(f"{P}/subscription/s", content='"earliest"')
    for payload in ("a", "bb", "ccc"):
        await other.produce(payload, topic=V1)
    found = (await other.client.get(f"{P}/partitioned-stats")).json()
    parts = list(found["partitions"].values())
    assert sorted(found["partitions"]) == [f"{FULL}-partition-{index}" for index in range(2)]
    assert found["msgInCounter"] == sum(part["msgInCounter"] for part in parts) == 3
    assert all(part["msgInCounter"] for part in parts)
    assert found["subscriptions"]["s"]["msgBacklog"] == 3
    assert found["metadata"] == {"partitions": 2, "deleted": False}
    assert "ownerBroker" not in found
    summed = (await one.client.get(f"{P}/partitioned-stats?perPartition=false")).json()
    assert (summed["partitions"], summed["msgInCounter"]) == ({}, 3)
    internal = (await other.client.get(f"{P}/partitioned-internalStats")).json()
    assert sum(part["numberOfEntries"] for part in internal["partitions"].values()) == 3
    refused(await other.client.get(f"{P}/stats"), 404, f"Topic {FULL} not found")
    assert len((await other.client.get(f"{P}/internal-info")).json()["partitions"]) == 2


async def test_calls_on_subscriptions_reach_each_partition(two):
    one, other = two
    await made(one, 2)
    for index, harness in enumerate(two):
        await harness.client.put(f"{P}-partition-{index}/subscription/only{index}", content='"earliest"')
    assert (await other.client.put(f"{P}/subscription/only0", content='"earliest"')).status_code == 204
    again = await other.client.put(f"{P}/subscription/only0", content='"earliest"')
    refused(again, 409, "Subscription already exists for topic")
    assert (await one.client.get(f"{P}/subscriptions")).json() == ["only0", "only1"]
    for payload in ("a", "b", "c"):
        await one.produce(payload, topic=V1)

    async def backlog():
        stats = (await one.client.get(f"{P}/partitioned-stats")).json()
        return stats["subscriptions"]["only0"]["msgBacklog"]

    assert await backlog() == 3
    assert (await other.client.post(f"{P}/subscription/only0/skip_all", headers=JSON)).status_code == 204
    assert await backlog() == 0
    assert (await other.client.post(f"{P}/subscription/only0/resetcursor/0", headers=JSON)).status_code == 204
    assert await backlog() == 3
    one.clock.advance(100)
    assert (await other.client.post(f"{P}/subscription/only0/expireMessages/50", headers=JSON)).status_code == 204
    assert await backlog() == 0
    answer = await other.client.post(f"{P}/subscription/none/skip_all", headers=JSON)
    refused(answer, 404, f"Subscription none not found for topic {FULL}")
    assert (await other.client.get(f"{P}/subscription/only1/properties")).json() == {}
    refused(await other.client.delete(f"{P}/subscription/none"), 404, "Subscription not found")
    assert (await other.client.delete(f"{P}/subscription/only1")).status_code == 204
    assert (await one.client.get(f"{P}/subscriptions")).json() == ["only0"]


async def test_a_subscription_with_a_consumer_is_not_deleted(broker):
    await made(broker, 2)
    await broker.produce("a", topic=V1)
    await broker.client.put(f"{P}/subscription/s", content='"earliest"')
    assert await broker.receive("c", topic=V1)
    answer = await broker.client.delete(f"{P}/subscription/s")
    refused(answer, 412, "Subscription has active connected consumers")
    refused(await broker.client.delete(f"{P}/partitions"), 412, "Topic has active producers/subscriptions")
    assert (await broker.client.delete(f"{P}/partitions?force=true")).status_code == 204


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "subscription/s/position/1", None),
        ("POST", "subscription/s/skip/1", ""),
        ("POST", "subscription/s/resetcursor", '{"ledgerId":1,"entryId":0}'),
        ("GET", "examinemessage", None),
        ("GET", "ledger/1/entry/0", None),
        ("GET", "messageid/0", None),
        ("PUT", "backlogSize", '{"ledgerId":1,"entryId":0}'),
    ],
)
async def test_calls_of_a_single_partition_are_refused(broker, method, path, body):
    await made(broker, 2)
    answer = await broker.client.request(method, f"{P}/{path}", content=body, headers=JSON)
    assert answer.status_code == 405
    assert "partitioned" in answer.json()["reason"]


async def test_a_deletion_that_was_interrupted_can_be_completed(two):
    one, other = two
    await made(one, 2)
    await one.broker.partitioned.mark_deleted(TopicName.parse(FULL))
    assert (await other.client.get(f"{P}/partitions")).json() == {"partitions": 2, "deleted": True}
    assert (await other.client.put(f"{P}/partitions", content="2")).status_code == 409
    assert (await other.client.get(f"{P}/subscriptions")).status_code == 409
    assert (await other.client.delete(f"{P}/partitions")).status_code == 204
    assert (await one.client.get(ROOT)).json() == []


async def test_a_client_that_asks_creates_a_topic_with_the_partitions_of_the_policy(broker):
    wanted = f"{P}/partitions?checkAllowAutoCreation=true"
    assert (await broker.client.get(wanted)).json() == {"partitions": 0, "deleted": False}
    policy = {"allowAutoTopicCreation": True, "topicType": "partitioned", "defaultNumPartitions": 2}
    answer = await broker.post("/admin/v2/namespaces/public/default/autoTopicCreation", policy)
    assert answer.status_code == 204
    refused(await broker.client.get(f"{P}/partitions"), 404, f"Topic {FULL} not found")
    assert (await broker.client.get(wanted)).json() == {"partitions": 2, "deleted": False}
    assert len((await broker.client.get(ROOT)).json()) == 2
    missing = wanted.replace("default", "none")
    refused(await broker.client.get(missing), 404, "Namespace not found")
