"""Properties of topics and of partitioned topics."""

import json

import pytest
from bindery_broker.http.admin.upkeep.properties import OF_BROKERS, SIZE_MAX
from broker_harness import TOPIC as V1

P = "/admin/v2/persistent/public/default/t"
FULL = "persistent://public/default/t"
JSON = {"content-type": "application/json"}


async def put(broker, given, path=f"{P}/properties"):
    return await broker.client.put(path, content=json.dumps(given), headers=JSON)


async def properties(broker):
    return (await broker.client.get(f"{P}/properties")).json()


@pytest.fixture(params=["topic", "partitioned topic"])
async def made(broker, request):
    if request.param == "topic":
        await broker.client.put(P)
    else:
        await broker.client.put(f"{P}/partitions", content="2", headers=JSON)
    return broker


async def test_properties_are_added_replaced_and_removed(made):
    assert await properties(made) == {}
    assert (await put(made, {"a": "1", "b": "2"})).status_code == 204
    assert (await put(made, {"b": "3", "c": "4"})).status_code == 204
    assert await properties(made) == {"a": "1", "b": "3", "c": "4"}
    for _ in range(2):
        assert (await made.client.delete(f"{P}/properties?key=a")).status_code == 204
    assert await properties(made) == {"b": "3", "c": "4"}


async def test_they_survive_a_move(pair):
    one, two = pair
    await one.client.put(P)
    await put(two, {"a": "1"})
    await one.client.put("/admin/v2/namespaces/public/default/unload")
    assert await properties(two) == {"a": "1"}


async def test_a_topic_is_created_with_properties(broker):
    assert (await put(broker, {"a": "1"}, P)).status_code == 204
    assert await properties(broker) == {"a": "1"}
    assert (await put(broker, {"b": "2"}, P)).status_code == 409
    assert await properties(broker) == {"a": "1"}


async def test_a_topic_is_created_although_clients_may_not(broker):
    answer = await broker.client.post(
        "/admin/v2/namespaces/public/default/autoTopicCreation",
        json={"allowAutoTopicCreation": False, "topicType": "non-partitioned"},
    )
    assert answer.status_code == 204
    assert (await broker.client.post(f"{V1}/messages", content=b"x")).status_code == 404
    assert (await broker.client.put(P)).status_code == 204
    await broker.produce("x")


@pytest.mark.parametrize("name", sorted(OF_BROKERS))
async def test_those_of_brokers_are_kept(made, name):
    before = await properties(made)
    for answer in (await put(made, {name: "7"}), await made.client.delete(f"{P}/properties?key={name}")):
        assert answer.status_code == 412
        assert name in answer.json()["reason"]
    assert await properties(made) == before


async def test_an_exclusive_producer_keeps_the_topic(broker):
    await broker.client.put(P)
    await broker.client.put(f"{V1}/producers/p/access", json={"access_mode": "exclusive"})
    assert (await put(broker, {"a": "1"})).status_code == 204
    assert set(await properties(broker)) == {*OF_BROKERS, "a"}
    assert (await broker.client.post(f"{V1}/messages", content=b"x")).status_code == 409


@pytest.mark.parametrize("given", [{"a": "x" * SIZE_MAX}, {"a" * (SIZE_MAX + 1): ""}])
async def test_their_size_is_limited(made, given):
    assert (await put(made, given)).status_code == 412
    assert await properties(made) == {}


async def test_the_size_of_all_of_them_is_limited(made):
    assert (await put(made, {"a": "x" * (SIZE_MAX - 1)})).status_code == 204
    answer = await put(made, {"b": ""})
    assert (answer.status_code, set(answer.json())) == (412, {"reason"})
    assert set(await properties(made)) == {"a"}


@pytest.mark.parametrize("given", [["a"], {"a": 1}, {"a": None}, {"a": {}}, "a", {"a": "\ud800"}])
async def test_other_bodies_are_refused(made, given):
    answer = await put(made, given)
    assert (answer.status_code, set(answer.json())) == (400, {"reason"})


async def test_a_removal_names_the_property(made):
    for query in ("", "?key="):
        assert (await made.client.delete(f"{P}/properties{query}")).status_code == 412


async def test_a_missing_topic_has_none(broker):
    for answer in (await put(broker, {"a": "1"}), await broker.client.delete(f"{P}/properties?key=a")):
        assert (answer.status_code, answer.json()) == (404, {"reason": f"Topic {FULL} not found"})
