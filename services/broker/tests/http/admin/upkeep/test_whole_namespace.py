"""Calls on all topics of a namespace."""

import json

import pytest
from broker_harness import problem

NS = "/admin/v2/namespaces/public/default"
JSON = {"content-type": "application/json"}
TOPICS = ["a", "b", "p-partition-0", "p-partition-1"]


def path(topic):
    return f"/admin/v2/persistent/public/default/{topic}"


@pytest.fixture
async def brokers(pair):
    """Topics at two owners, each with a message that the subscriptions `s/1` and `other` have not acknowledged."""
    one, two = pair
    await one.client.put(f"{path('p')}/partitions", content="2", headers=JSON)
    for number, topic in enumerate(TOPICS):
        harness = pair[number % 2]
        await harness.client.put(path(topic))
        for name in ("s%252F1", "other"):
            assert (await harness.client.put(f"{path(topic)}/subscription/{name}")).status_code == 204
        await harness.produce("x", topic=f"/v1/topics/public/default/{topic}")
    return one, two


async def backlogs(broker):
    found = {}
    for topic in TOPICS:
        stats = (await broker.client.get(f"{path(topic)}/stats")).json()["subscriptions"]
        found |= {(topic, name): one["msgBacklog"] for name, one in stats.items()}
    return found


async def post(broker, rest):
    return await broker.client.post(f"{NS}/{rest}", headers=JSON)


async def test_backlogs_are_cleared_at_each_owner(brokers):
    one, two = brokers
    assert set((await backlogs(one)).values()) == {1}
    assert (await post(two, "clearBacklog")).status_code == 204
    assert set((await backlogs(one)).values()) == {0}


async def test_the_backlogs_of_one_subscription_are_cleared(brokers):
    one, two = brokers
    await one.client.delete(f"{path('a')}/subscription/s%252F1")
    assert (await post(two, "clearBacklog/s%252F1")).status_code == 204
    expected = {(topic, name): int(name == "other") for topic in TOPICS for name in ("s/1", "other")}
    del expected["a", "s/1"]
    assert await backlogs(one) == expected


async def test_a_subscription_is_deleted_everywhere(brokers):
    one, two = brokers
    assert (await post(one, "unsubscribe/s%252F1")).status_code == 204
    assert set(await backlogs(two)) == {(topic, "other") for topic in TOPICS}
    assert (await post(one, "unsubscribe/s%252F1")).status_code == 204


async def test_one_with_consumers_is_kept_and_named(brokers):
    one, _ = brokers
    await one.receive("c", sub="other", topic="/v1/topics/public/default/b")
    answer = await post(one, "unsubscribe/other")
    assert answer.json() == {"reason": "Subscription has active connected consumers"}
    assert answer.status_code == 412
    assert {(topic, name) for topic, name in await backlogs(one) if name == "other"} == {("b", "other")}


async def test_only_topics_of_the_bundle_are_called(brokers):
    one, _ = brokers
    name = (await one.client.get("/lookup/v2/topic/persistent/public/default/a/bundle")).text
    inside = set()
    for topic in TOPICS:
        found = await one.client.get(f"/lookup/v2/topic/persistent/public/default/{topic}/bundle")
        inside |= {topic} if found.text == name else set()
    assert (await post(one, f"{name}/clearBacklog")).status_code == 204
    assert {topic for (topic, _), count in (await backlogs(one)).items() if not count} == inside
    assert (await post(one, f"{name}/clearBacklog/other")).status_code == 204
    assert (await post(one, f"{name}/unsubscribe/other")).status_code == 204
    assert {topic for topic, name in await backlogs(one) if name == "other"} == set(TOPICS) - inside


@pytest.mark.parametrize("rest", ["clearBacklog", "clearBacklog/s", "unsubscribe/s"])
async def test_other_bundles_and_namespaces_are_refused(broker, rest):
    answer = await post(broker, f"0x1_0x2/{rest}")
    assert (answer.status_code, answer.json()) == (412, {"reason": "Invalid bundle range: 0x1_0x2"})
    answer = await broker.client.post(f"/admin/v2/namespaces/public/none/{rest}", headers=JSON)
    assert (answer.status_code, answer.json()) == (404, {"reason": "Namespace does not exist"})
    assert (await broker.client.post(f"{NS}/{rest}", content=json.dumps({}))).status_code == 415


async def test_topics_keep_their_messages(brokers):
    one, _ = brokers
    await post(one, "clearBacklog")
    found = (await one.client.get("/v1/topics/public/default/a/messages?start=earliest")).json()
    assert [message["payload"] for message in found["messages"]] == ["x"]
    problem(await one.client.get("/v1/topics/public/default/none"), status=404, code="no_such_topic")
