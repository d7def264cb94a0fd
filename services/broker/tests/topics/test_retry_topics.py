"""What is known of retry topics, and how often it is looked up."""

import asyncio
from typing import Any

import httpx
import pytest
from bindery_broker.topics.retry_sides import LocalSide
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
    assert isinstance(found, LocalSide)
    assert (found.topic, found.subscription) == broker.broker.retry_topics.loaded(link)
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


async def two_brokers(tree: Any, ledgers: Any, clock: Any) -> tuple[Harness, Harness]:
    """The first one owns the topic, the other one its retry topic with a message."""
    first = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://b1")
    second = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://b2")
    first.peers["b2"] = httpx.ASGITransport(app=second.app)
    await second.client.put(f"{RETRY}/subscriptions/s", json={})
    await second.produce("again", topic=RETRY)
    await first.produce("new")
    return first, second


async def test_a_retry_topic_of_another_broker_is_taken_over_when_its_owner_is_gone(
    tree: Any, ledgers: Any, clock: Any
) -> None:
    first, second = await two_brokers(tree, ledgers, clock)
    link = await link_of(first)
    assert await first.broker.retry_topics.find(link) is not None
    assert link.state is State.ELSEWHERE
    await second.close()
    del first.peers["b2"]
    assert payloads(await first.receive()) == ["new"], "what the topic has does not wait for the other broker"
    assert payloads(await first.receive()) == ["again"]
    assert link.state is State.PRESENT
    await first.close()


async def test_a_retry_topic_of_another_broker_is_looked_for_again(tree: Any, ledgers: Any, clock: Any) -> None:
    first, second = await two_brokers(tree, ledgers, clock)
    assert payloads(await first.receive()) == ["again", "new"]
    link = await link_of(first)
    assert (await second.client.delete(f"{RETRY}/subscriptions/s", params={"force": "true"})).status_code == 200
    clock.advance(ELSEWHERE_S)
    assert await first.receive() == []
    assert link.state is State.ABSENT
    await first.close()
    await second.close()


async def test_an_owner_that_had_no_message_is_not_asked_by_each_call(tree: Any, ledgers: Any, clock: Any) -> None:
    first, second = await two_brokers(tree, ledgers, clock)
    assert payloads(await first.receive()) == ["again", "new"]
    calls = []
    transport = first.peers["b2"]

    class Counting(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            calls.append(request.url.path)
            return await transport.handle_async_request(request)

    first.peers["b2"] = Counting()  # type: ignore[assignment]
    for _ in range(20):
        assert await first.receive() == []
    assert len(calls) == 1
    await second.produce("more", topic=RETRY)
    clock.advance(1)
    assert payloads(await first.receive()) == ["more"]
    await first.close()
    await second.close()
