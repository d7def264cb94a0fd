"""What is known of retry topics, and how often it is looked up."""

import asyncio
from typing import Any

import pytest
from bindery_broker.topics.retry_topics import ELSEWHERE_S, State
from bindery_pulsar.message_id import EARLIEST
from bindery_pulsar.topic_name import TopicName
from broker_harness import TOPIC, Harness, payloads

RETRY = f"{TOPIC}-s-RETRY"


async def link_of(broker: Harness, topic: str = "t", subscription: str = "s") -> Any:
    name = TopicName.parse(topic)
    assert await broker.broker.locate(name, create=True) is None
    found = await broker.broker.topic(name, create=True)
    subscribed, _ = await found.subscribe(subscription, initial=EARLIEST)
    return broker.broker.retry_topics.link(found, subscribed)


async def test_a_link_is_made_once_and_looked_up_when_it_is_used(broker: Harness) -> None:
    link = await link_of(broker)
    assert (link.state, link.name.local, link.dead_letters.local) == (State.UNKNOWN, "t-s-RETRY", "t-s-DLQ")
    assert await link_of(broker) is link
    assert await broker.broker.retry_topics.find(link) is None
    assert link.state is State.ABSENT
    await broker.client.put(f"{RETRY}/subscriptions/other", json={})
    assert link.state is State.ABSENT
    await broker.client.put(f"{RETRY}/subscriptions/s", json={})
    assert link.state is State.PRESENT
    found = await broker.broker.retry_topics.find(link)
    assert found is not None
    assert found == broker.broker.retry_topics.loaded(link)
    assert (found.topic.name.local, found.subscription.name) == ("t-s-RETRY", "s")


async def test_calls_that_begin_together_look_once(broker: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    link = await link_of(broker)
    looks = []
    exists = broker.broker.topics.exists

    async def counted(name: TopicName) -> bool:
        looks.append(name)
        return await exists(name)

    monkeypatch.setattr(broker.broker.topics, "exists", counted)
    find = broker.broker.retry_topics.find
    assert await asyncio.gather(*(find(link) for _ in range(20))) == [None] * 20
    assert looks == [link.name]


async def test_partitions_share_the_retry_topic_of_their_topic(broker: Harness) -> None:
    first, second = await link_of(broker, "t-partition-0"), await link_of(broker, "t-partition-1")
    assert first is second
    assert first.name.local == "t-s-RETRY"


@pytest.mark.parametrize("topic", ["t-s-RETRY", "t" * 250])
async def test_a_retry_topic_and_a_topic_with_a_long_name_have_none(broker: Harness, topic: str) -> None:
    link = await link_of(broker, topic)
    assert (link.name, link.state) == (None, State.ABSENT)
    assert await broker.broker.retry_topics.find(link) is None


async def test_two_subscriptions_whose_retry_topics_have_one_name_do_not_mix(broker: Harness) -> None:
    """`a-b` and `c`, and `a` and `b-c`: the topic is the same, the subscriptions in it are not."""
    first, second = await link_of(broker, "a-b", "c"), await link_of(broker, "a", "b-c")
    assert first.name == second.name
    await broker.client.put("/v1/topics/public/default/a-b-c-RETRY/subscriptions/c", json={})
    assert first.state is State.PRESENT
    assert await broker.broker.retry_topics.find(second) is None


async def test_a_deleted_subscription_and_a_deleted_topic_are_noticed(broker: Harness) -> None:
    link = await link_of(broker)
    find = broker.broker.retry_topics.find
    await broker.client.put(f"{RETRY}/subscriptions/s", json={})
    assert await find(link) is not None
    await broker.client.delete(f"{RETRY}/subscriptions/s")
    assert await find(link) is None
    await broker.client.put(f"{RETRY}/subscriptions/s", json={})
    assert await find(link) is not None
    await broker.client.delete(RETRY)
    assert await find(link) is None
    assert link.state is State.ABSENT


async def test_an_idle_retry_topic_is_opened_again(broker: Harness) -> None:
    link = await link_of(broker)
    await broker.client.put(f"{RETRY}/subscriptions/s", json={})
    broker.clock.advance(3_600)
    await broker.broker.topics.maintain()
    assert broker.broker.retry_topics.loaded(link) is None
    assert await broker.broker.retry_topics.find(await link_of(broker)) is not None


async def test_a_retry_topic_of_another_broker_is_looked_for_again(tree: Any, ledgers: Any, clock: Any) -> None:
    first = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://b1")
    second = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://b2")
    await second.client.put(f"{RETRY}/subscriptions/s", json={})
    await second.produce("again", topic=RETRY)
    await first.produce("new")
    assert payloads(await first.receive()) == ["new"]
    link = await link_of(first)
    assert link.state is State.ELSEWHERE
    await second.close()
    assert await first.receive() == []
    clock.advance(ELSEWHERE_S)
    assert payloads(await first.receive()) == ["again"]
    await first.close()
