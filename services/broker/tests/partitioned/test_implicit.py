"""Topics that a request creates get the partitions that the policies of the namespace ask for."""

import asyncio
import json

import pytest
from broker_harness import TOPIC, Harness, problem

ZNODE = "/admin/partitioned-topics/public/default/persistent/t"
POLICIES = "/v1/namespaces/public/default/policies"


async def partitions(broker: Harness, count: int | None) -> None:
    answer = await broker.client.put(POLICIES, json={"auto_create_partitions": count})
    assert answer.status_code == 200, answer.text


async def test_the_first_message_creates_the_partitions(pair: tuple[Harness, Harness]) -> None:
    one, two = pair
    await partitions(one, 4)
    await two.produce("a", "b", "c")
    assert json.loads(one.znodes()[ZNODE][0]) == {"partitions": 4}
    assert (await one.client.get("/v1/topics?namespace=public/default")).json()["partitioned"] == {
        "public/default/t": 4
    }
    got = await one.client.post(f"{TOPIC}/subscriptions/s/receive", json={"consumer": "c", "initial": "earliest"})
    assert sorted(message["payload"] for message in got.json()["messages"]) == ["a", "b", "c"]


@pytest.mark.parametrize("call", ["receive", "subscribe"])
async def test_the_first_consumer_creates_the_partitions(pair: tuple[Harness, Harness], call: str) -> None:
    one, two = pair
    await partitions(one, 2)
    if call == "receive":
        answer = await two.client.post(f"{TOPIC}/subscriptions/s/receive", json={"consumer": "c", "wait_ms": 0})
    else:
        answer = await two.client.put(f"{TOPIC}/subscriptions/s", json={})
    assert answer.status_code in (200, 201), answer.text
    assert json.loads(one.znodes()[ZNODE][0]) == {"partitions": 2}


async def test_requests_at_the_same_time_create_one_topic(pair: tuple[Harness, Harness]) -> None:
    one, two = pair
    await partitions(one, 4)
    await asyncio.gather(*(broker.produce(str(number)) for number in range(4) for broker in (one, two)))
    assert json.loads(one.znodes()[ZNODE][0]) == {"partitions": 4}
    assert "/managed-ledgers/public/default/persistent/t" not in one.znodes()
    got = await one.client.post(f"{TOPIC}/subscriptions/s/receive", json={"consumer": "c", "initial": "earliest"})
    assert len(got.json()["messages"]) == 8


async def test_explicit_and_existing_topics_stay_ordinary(broker: Harness) -> None:
    await broker.produce("before")
    await partitions(broker, 4)
    await broker.produce("after")
    assert (await broker.client.put(f"{TOPIC}-explicit")).status_code == 201
    await broker.produce("x", topic=f"{TOPIC}-explicit")
    assert not [path for path in broker.znodes() if path.startswith("/admin/partitioned-topics/public/default/p")]


async def test_nothing_is_created_where_topics_are_not_created(broker: Harness) -> None:
    await broker.client.put(POLICIES, json={"auto_create_partitions": 4, "auto_create_topics": False})
    problem(await broker.client.post(f"{TOPIC}/messages", content="x"), status=404, code="no_such_topic")
    missing = "/v1/topics/public/missing/t/messages"
    problem(await broker.client.post(missing, content="x"), status=404, code="no_such_namespace")
