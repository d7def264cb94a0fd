"""Opening and closing of topics: one task at a time, also after errors."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from bindery_broker.errors import NotOwner
from bindery_broker.ownership.bundles import Bundle
from bindery_broker.topics import topics as topics_module
from bindery_broker.topics.topic import Topic
from bindery_broker.topics.topics import LOOK_FOR_IDLE_S_MIN
from bindery_core.errors import MetadataUnavailable, NoSuchTopic
from bindery_pulsar.topic_name import TopicName
from broker_harness import TOPIC, Harness, ids, payloads, problem

NAME = TopicName.parse("public/default/t")
NAMESPACE = "/v1/topics/public/default"


@pytest.fixture
async def small(tree, ledgers, clock) -> AsyncIterator[Harness]:
    """A broker that may have two topics loaded."""
    harness = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://small", topics_max=2)
    yield harness
    await harness.close()


def loaded(broker: Harness) -> list[str]:
    return sorted(topic.name.local for topic in broker.broker.topics)


async def steps(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_topic_is_opened_by_one_task_at_a_time(broker: Harness, monkeypatch):
    """This also holds if the first task fails while another one arrives."""
    await broker.produce("a")
    topics = broker.broker.topics
    (topic,) = topics
    await topic.close()
    open_really = topics_module.ManagedLedger.open
    inside = most = calls = 0

    async def opened(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside, most, calls
        calls += 1
        fails = calls == 1
        inside += 1
        most = max(most, inside)
        try:
            await asyncio.sleep(0.01)
            if fails:
                raise MetadataUnavailable("made up")
            return await open_really(*args, **kwargs)
        finally:
            inside -= 1

    monkeypatch.setattr(topics_module.ManagedLedger, "open", opened)
    tasks = [asyncio.create_task(topics.get(NAME)) for _ in range(2)]
    await asyncio.wait(tasks[:1])
    tasks.append(asyncio.create_task(topics.get(NAME)))
    failed, second, third = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(failed, MetadataUnavailable)
    assert second is third
    assert topics.loaded(NAME) is second
    assert most == 1
    assert topics.loads_failed == 1


async def test_a_cursor_has_one_subscription(broker: Harness, monkeypatch):
    await broker.produce("a")
    (topic,) = broker.broker.topics
    open_really = topic.ledger.open_cursor
    calls = 0

    async def opened(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        fails = calls == 1
        await asyncio.sleep(0.01)
        if fails:
            raise MetadataUnavailable("made up")
        return await open_really(*args, **kwargs)

    monkeypatch.setattr(topic.ledger, "open_cursor", opened)
    tasks = [asyncio.create_task(topic.subscribe("s")) for _ in range(2)]
    await asyncio.wait(tasks[:1])
    tasks.append(asyncio.create_task(topic.subscribe("s")))
    failed, second, third = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(failed, MetadataUnavailable)
    assert isinstance(second, tuple)
    assert isinstance(third, tuple)
    assert second[0] is third[0]
    assert [second[1], third[1]] == [True, False]


async def test_an_empty_unused_topic_is_closed_and_reopened_with_its_subscriptions(broker: Harness, clock):
    await broker.receive(session_ttl_ms=1_000)
    clock.advance(200)
    await broker.broker.topics.maintain()
    assert loaded(broker) == ["t"]
    clock.advance(200)
    await broker.broker.topics.maintain()
    assert loaded(broker) == []
    await broker.produce("b", "c")
    assert payloads(await broker.receive()) == ["b", "c"], "its subscription was there before"


async def test_rounds_of_maintenance_let_requests_run(broker: Harness, monkeypatch):
    monkeypatch.setattr(topics_module, "TURN_TOPICS", 1)
    for number in range(10):
        await broker.client.put(f"{NAMESPACE}/t{number}")
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await asyncio.sleep(0)
    for work in (broker.broker.topics.enforce, broker.broker.topics.maintain):
        turns = 0
        await work()
        assert turns >= 9
    counting.cancel()


async def test_a_topic_with_a_consumer_or_with_entries_stays_open(broker: Harness, clock):
    await broker.produce("kept", topic=f"{NAMESPACE}/retained")
    await broker.produce("a", topic=f"{NAMESPACE}/delayed")
    got = await broker.receive(topic=f"{NAMESPACE}/delayed", session_ttl_ms=1_000)
    body = {"message_ids": ids(got), "delay_ms": 1_000_000}
    await broker.post(f"{NAMESPACE}/delayed/subscriptions/s/nack", body)
    await broker.receive(topic=f"{NAMESPACE}/consumed", session_ttl_ms=600_000)
    clock.advance(500)
    await broker.broker.topics.maintain()
    assert loaded(broker) == ["consumed", "delayed", "retained"]
    clock.advance(1_000)
    await broker.broker.topics.maintain()
    assert loaded(broker) == ["delayed", "retained"]


async def test_at_the_limit_the_topic_that_was_idle_longest_is_closed(small: Harness, clock):
    for name in ("a", "b", "a"):
        await small.produce("x", topic=f"{NAMESPACE}/{name}")
        clock.advance(1)
    await small.produce("x", topic=f"{NAMESPACE}/c")
    assert loaded(small) == ["a", "c"]
    answer = await small.client.get(f"{NAMESPACE}/b/messages")
    assert payloads(answer.json()["messages"]) == ["x"]
    assert loaded(small) == ["b", "c"]


async def test_topics_in_use_are_not_closed_at_the_limit(small: Harness, clock):
    """A consumer uses one topic, and a waiting read the other one."""
    await small.receive(topic=f"{NAMESPACE}/a")
    await small.produce("x", topic=f"{NAMESPACE}/b")
    reading = asyncio.create_task(small.client.get(f"{NAMESPACE}/b/messages?start=latest&wait_ms=30000"))
    await steps()
    problem(await small.client.put(f"{NAMESPACE}/c"), status=429, code="too_many_requests")
    await small.produce("y", topic=f"{NAMESPACE}/b")
    async with asyncio.timeout(10):
        assert payloads((await reading).json()["messages"]) == ["y"]
    clock.advance(LOOK_FOR_IDLE_S_MIN / 2)
    problem(await small.client.put(f"{NAMESPACE}/c"), status=429, code="too_many_requests")  # no second search yet
    clock.advance(LOOK_FOR_IDLE_S_MIN / 2)
    assert (await small.client.put(f"{NAMESPACE}/c")).status_code == 201
    assert loaded(small) == ["a", "c"]


async def test_a_request_that_arrives_while_its_topic_is_closed_waits_and_opens_it_again(
    broker: Harness, clock, monkeypatch
):
    await broker.receive(session_ttl_ms=1_000)
    (topic,) = broker.broker.topics
    close_really = topic.ledger.close

    async def close() -> None:
        await asyncio.sleep(0.05)
        await close_really()

    monkeypatch.setattr(topic.ledger, "close", close)
    clock.advance(400)
    closing = asyncio.create_task(broker.broker.topics.maintain())
    await steps(10)
    assert not topic.is_open
    assert not closing.done()
    async with asyncio.timeout(10):
        await asyncio.gather(broker.produce("b"), broker.produce("c"))
        await closing
    answer = await broker.client.get(f"{TOPIC}/messages")
    assert sorted(payloads(answer.json()["messages"])) == ["b", "c"]
    assert loaded(broker) == ["t"]


@pytest.mark.parametrize("seed", range(5))
async def test_with_more_topics_than_the_limit_no_request_fails_and_no_message_is_lost(tree, ledgers, clock, seed):
    chance = random.Random(seed)
    broker = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://few", topics_max=4)
    sent: dict[str, list[str]] = {f"{NAMESPACE}/t{n}": [] for n in range(8)}

    async def produce(worker: int) -> None:
        for n in range(20):
            topic = chance.choice(list(sent))
            payload = f"{worker}-{n}"
            await broker.produce(payload, topic=topic)
            sent[topic].append(payload)
            clock.advance(chance.choice([0, 0, 400]))
            if chance.random() < 0.2:
                await broker.broker.topics.maintain()

    async with asyncio.timeout(30):
        await asyncio.gather(*(produce(worker) for worker in range(3)))
    assert len(broker.broker.topics) <= 4
    for topic, expected in sent.items():
        if expected:
            answer = await broker.client.get(f"{topic}/messages?max=1000")
            assert sorted(payloads(answer.json()["messages"])) == sorted(expected)
    assert not broker.broker.topics._users
    await broker.close()


async def test_idle_topics_are_closed_in_parallel(broker: Harness, clock, monkeypatch):
    for name in ("a", "b", "c"):
        await broker.receive(topic=f"{NAMESPACE}/{name}", session_ttl_ms=1_000)
    at_once = most = 0

    def slowly(close_really: Any) -> Any:
        async def close() -> None:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0.01)
            at_once -= 1
            await close_really()

        return close

    for topic in broker.broker.topics:
        monkeypatch.setattr(topic.ledger, "close", slowly(topic.ledger.close))
    clock.advance(400)
    await broker.broker.topics.maintain()
    assert loaded(broker) == []
    assert most == 3


async def test_topics_that_are_being_opened_count_for_the_limit(small: Harness, monkeypatch):
    open_really = topics_module.ManagedLedger.open

    async def opened(*args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0.01)
        return await open_really(*args, **kwargs)

    monkeypatch.setattr(topics_module.ManagedLedger, "open", opened)
    answers = await asyncio.gather(*(small.client.put(f"{NAMESPACE}/{name}") for name in "abc"))
    assert sorted(answer.status_code for answer in answers) == [201, 201, 429]
    assert len(loaded(small)) == 2


async def test_a_missing_topic_is_created_only_on_request(broker: Harness):
    await broker.produce("a")
    other = next(
        name
        for name in (TopicName.parse(f"public/default/t{n}") for n in range(10_000))
        if Bundle.of(name) == Bundle.of(NAME)
    )
    with pytest.raises(NoSuchTopic):
        await broker.broker.topics.get(other)
    assert (await broker.broker.topics.get(other, create=True)).name == other


async def test_a_topic_is_opened_only_by_the_owner_of_its_bundle(broker: Harness, tree):
    with pytest.raises(NotOwner):
        await broker.broker.topics.get(NAME, create=True)
    assert await tree.connect().children("/") == [] or not await broker.broker.topics.exists(NAME)


async def test_a_topic_whose_bundle_is_lost_while_it_is_opened_is_not_served(broker: Harness, tree, monkeypatch):
    open_really = topics_module.ManagedLedger.open
    opened_ledgers = []

    async def opened(*args: Any, **kwargs: Any) -> Any:
        opened_ledgers.append(await open_really(*args, **kwargs))
        await tree.connect().delete(Bundle.of(NAME).owner_path, version=None)
        await steps()
        return opened_ledgers[-1]

    monkeypatch.setattr(topics_module.ManagedLedger, "open", opened)
    assert await broker.broker.locate(NAME, create=True) is None
    with pytest.raises(NotOwner):
        await broker.broker.topics.get(NAME, create=True)
    assert loaded(broker) == []
    assert not opened_ledgers[0].is_open


async def test_maintenance_deletes_ledgers_whose_retention_has_ended(broker: Harness, clock):
    await broker.produce("a")
    (topic,) = broker.broker.topics
    await topic.ledger.roll()
    await broker.produce("b")
    await broker.broker.topics.maintain()
    assert topic.ledger.entries_count == 2
    clock.advance(broker.settings.ledger.retention_unsubscribed_s + 1)
    await broker.broker.topics.maintain()
    assert topic.ledger.entries_count == 1


async def test_an_idle_topic_that_is_used_again_before_its_close_stays_open(broker: Harness, clock, monkeypatch):
    for name in ("a", "b"):
        await broker.client.put(f"{NAMESPACE}/{name}")
    first, second = broker.broker.topics
    close_really = first.close

    async def close(why: str) -> None:
        broker.broker.topics.begin_use(second.name)
        await close_really(why)

    monkeypatch.setattr(first, "close", close)
    clock.advance(400)
    await broker.broker.topics.maintain()
    assert (first.is_open, second.is_open) == (False, True)
    broker.broker.topics.end_use(second.name)
    assert second.used_at == clock.now()


async def test_a_topic_is_in_use_until_all_its_requests_have_ended(broker: Harness, clock):
    await broker.client.put(TOPIC)
    topics = broker.broker.topics
    topics.begin_use(NAME)
    topics.begin_use(NAME)
    topics.end_use(NAME)
    clock.advance(400)
    await topics.maintain()
    assert loaded(broker) == ["t"]
    topics.end_use(NAME)
    clock.advance(299)
    await topics.maintain()
    assert loaded(broker) == ["t"]
    clock.advance(1)
    await topics.maintain()
    assert loaded(broker) == []


async def test_the_topics_close_even_if_one_of_them_fails_and_wait_for_abandoned_ones(broker: Harness, monkeypatch):
    for name in ("a", "b", "c"):
        await broker.produce("x", topic=f"{NAMESPACE}/{name}")
    failing, abandoned, other = broker.broker.topics
    crash_really = abandoned.ledger.crash

    async def refuse() -> None:
        raise MetadataUnavailable("made up")

    async def crash() -> None:
        await asyncio.sleep(0.02)
        await crash_really()

    with monkeypatch.context() as patch:
        patch.setattr(failing.ledger, "close", refuse)
        patch.setattr(abandoned.ledger, "crash", crash)
        abandoned.abandon("made up")
        await broker.broker.topics.close()
    assert [topic.ledger.is_open for topic in (failing, abandoned, other)] == [False, False, False]
    assert [topic.is_abandoned for topic in (failing, abandoned, other)] == [False, True, False]
    with pytest.raises(NotOwner):
        await broker.broker.topics.get(other.name)


async def test_topics_close_in_parallel_but_not_all_at_once(broker: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics_module, "STOP_CLOSES_MAX", 3)
    for number in range(10):
        await broker.produce("x", topic=f"{NAMESPACE}/t{number}")
    topics = list(broker.broker.topics)
    running = most = 0

    async def close(topic: Topic, why: str) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        await close_really(topic, why)
        running -= 1

    close_really = Topic.close
    monkeypatch.setattr(Topic, "close", close)
    await broker.broker.topics.close()
    assert most == 3
    assert len(broker.broker.topics) == 0
    assert not any(topic.is_open or topic.ledger.is_open for topic in topics)


async def test_maintenance_replaces_the_old_cursor_ledger_of_an_idle_subscription(broker):
    await broker.produce("a", "b")
    got = await broker.receive(max=1)
    assert (await broker.ack(ids(got))).json() == {"acknowledged": 1}
    (topic,) = broker.broker.topics
    (cursor,) = topic.ledger.cursors.values()
    first = cursor.store.ledger_id
    await broker.broker.topics.maintain()
    assert cursor.store.ledger_id == first
    cursor.store._log.opened_at -= 14_400
    await broker.broker.topics.maintain()
    assert cursor.store.ledger_id not in (first, -1)
    assert len(payloads(await broker.receive())) == 1


@pytest.mark.parametrize("name", ["a%C2%85b", "a%E2%80%A8", "%C2%9Ba"])
async def test_no_topic_is_created_with_a_control_character_in_its_name(broker, name):
    path = f"/v1/topics/public/default/{name}"
    for method, tail in (("PUT", ""), ("POST", "/messages")):
        problem(await broker.client.request(method, path + tail), status=400, code="bad_request")
    assert len(broker.broker.topics) == 0
    assert (await broker.client.get("/v1/topics")).json()["topics"] == []


async def test_maintenance_finds_out_how_old_the_oldest_messages_are(broker: Harness, monkeypatch):
    """It reads a limited number of entries per round, and no more in a round in which one cannot be read."""
    monkeypatch.setattr(topics_module, "OLDEST_READS_MAX", 2)
    for name in "abc":
        await broker.produce("x", topic=f"{NAMESPACE}/{name}")
        await broker.client.put(f"{NAMESPACE}/{name}/subscriptions/s", json={})
    oldest = [topic.subscription("s").oldest for topic in broker.broker.topics]

    async def failing() -> None:
        pass

    monkeypatch.setattr(oldest[0], "read", failing)
    await broker.broker.topics.maintain()
    assert [one.publish_time_ms for one in oldest] == [None, None, None]
    monkeypatch.undo()
    monkeypatch.setattr(topics_module, "OLDEST_READS_MAX", 2)
    await broker.broker.topics.maintain()
    assert [one.publish_time_ms for one in oldest] == [broker.clock.now_ms()] * 2 + [None]
    await broker.broker.topics.maintain()
    assert [one.publish_time_ms for one in oldest] == [broker.clock.now_ms()] * 3
