"""Retention by policy: ledgers go when it is over, also without traffic, and every other ledger has a reason."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from bindery_broker.managed_ledger import ManagedLedgerSettings
from bindery_broker.namespaces.policies import Retention
from bindery_client.memory.memory import MemoryLedgers
from bindery_metadata.stores.memory import MemoryTree
from bindery_pulsar.topic_name import TopicName
from broker_harness import TOPIC, Clock, Harness
from policy_parts import set_policies

NAME = TopicName.parse("public/default/t")


async def codes(broker: Harness) -> list[str]:
    """Return the codes of the reasons."""
    answer = await broker.client.get(f"{TOPIC}/retention")
    assert answer.status_code == 200, answer.text
    return [one["code"] for one in answer.json()["ledgers"]]


async def roll(broker: Harness) -> None:
    await (await broker.broker.topic(NAME)).ledger.roll()


async def maintain(broker: Harness) -> None:
    await broker.broker.topics.maintain()


async def test_acknowledged_ledgers_are_kept_for_the_time_of_the_policy(broker: Harness) -> None:
    set_policies(broker, retention=Retention(time_s=60, size_max=None))
    await broker.receive()
    await broker.produce("a")
    await roll(broker)
    (one,) = await broker.receive()
    await maintain(broker)
    assert await codes(broker) == ["subscription", "open"]
    await broker.ack([one["message_id"]])
    assert await codes(broker) == ["retention", "open"]
    body = (await broker.client.get(f"{TOPIC}/retention")).json()
    assert (body["time_s"], body["size_max"], body["is_policy"]) == (60, None, True)
    assert body["ledgers"][0]["until"] == body["ledgers"][0]["closed_at"] + 60_000
    broker.clock.advance(59.9)
    await maintain(broker)
    assert await codes(broker) == ["retention", "open"]
    assert len((await broker.client.get(f"{TOPIC}/messages", params={"start": "earliest"})).json()["messages"]) == 1
    broker.clock.advance(0.1)
    assert await codes(broker) == ["deletable", "open"]
    await maintain(broker)
    assert await codes(broker) == ["open"]


async def test_a_size_deletes_acknowledged_ledgers_only(broker: Harness) -> None:
    set_policies(broker, retention=Retention(time_s=None, size_max=1_000))
    await broker.receive()
    for _ in range(3):
        await broker.produce("x" * 600)
        await roll(broker)
    await maintain(broker)
    assert await codes(broker) == ["subscription"] * 3 + ["open"]
    messages = await broker.receive()
    await broker.ack([messages[0]["message_id"], messages[1]["message_id"], messages[2]["message_id"]])
    await maintain(broker)
    assert await codes(broker) == ["retention", "open"]


async def test_a_topic_without_subscriptions_has_the_same_policy(broker: Harness) -> None:
    set_policies(broker, retention=Retention(time_s=60, size_max=None))
    await broker.produce("a")
    await roll(broker)
    broker.clock.advance(60)
    await maintain(broker)
    assert await codes(broker) == ["open"]


async def test_without_a_policy_the_settings_apply(broker: Harness) -> None:
    await broker.produce("a")
    await roll(broker)
    body = (await broker.client.get(f"{TOPIC}/retention")).json()
    assert (body["time_s"], body["is_policy"]) == (7 * 24 * 3600, False)
    await broker.receive(initial="latest")
    await maintain(broker)
    body = (await broker.client.get(f"{TOPIC}/retention")).json()
    assert (body["time_s"], body["size_max"], len(body["ledgers"])) == (0, None, 1)


@pytest.fixture
async def young(tree: MemoryTree, ledgers: MemoryLedgers, clock: Clock) -> AsyncIterator[Harness]:
    """A broker whose ledgers may be replaced after 5 seconds."""
    settings = ManagedLedgerSettings(age_s_min=5)
    harness = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://young", ledger=settings)
    yield harness
    await harness.close()


async def test_an_old_ledger_is_rolled_without_traffic(young: Harness) -> None:
    broker = young
    set_policies(broker, retention=Retention(time_s=30, size_max=None))
    await broker.receive()
    ids = await broker.produce("a")
    await broker.ack(ids)
    await asyncio.sleep(29)
    await maintain(broker)
    assert await codes(broker) == ["open"]
    await asyncio.sleep(1)
    await maintain(broker)
    assert await codes(broker) == ["retention", "open"]
    broker.clock.advance(30)
    await maintain(broker)
    assert await codes(broker) == ["open"]


async def test_a_policy_that_is_removed_ends_at_once(broker: Harness) -> None:
    set_policies(broker, retention=Retention(time_s=None, size_max=None))
    await broker.receive(initial="latest")
    ids = await broker.produce("a")
    await broker.ack(ids)
    await roll(broker)
    broker.clock.advance(10**9)
    await maintain(broker)
    assert await codes(broker) == ["retention", "open"]
    set_policies(broker)
    await maintain(broker)
    assert await codes(broker) == ["open"]
