"""An idle topic costs no ledger, no task, no timer, and no round of maintenance."""

import asyncio
import gc

import pytest
from bindery_broker.managed_ledger.cursors.cursor import ManagedCursor
from bindery_broker.topics.upkeep.due import LOOK_AGAIN_S
from broker_harness import Harness

NAMESPACE = "/v1/topics/public/default"
COUNT = 30


async def make(broker: Harness, *, count: int = COUNT) -> list[str]:
    topics = [f"{NAMESPACE}/t{number}" for number in range(count)]
    for topic in topics:
        assert (await broker.client.put(topic)).status_code == 201
        answer = await broker.client.put(f"{topic}/subscriptions/s", json={})
        assert answer.status_code == 201, answer.text
    return topics


async def rounds(broker: Harness) -> tuple[int, int]:
    """Run a round of both. Returns how many topics they looked at."""
    counts = broker.broker.topics.rounds
    before = (counts.maintained, counts.enforced)
    await broker.broker.topics.enforce()
    await broker.broker.topics.maintain()
    return counts.maintained - before[0], counts.enforced - before[1]


@pytest.fixture
async def many(tree, ledgers, clock):
    harness = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://many", topic_idle_s=10**6)
    yield harness
    await harness.close()


async def test_topics_and_subscriptions_are_created_without_ledgers_and_tasks(many: Harness, ledgers):
    await make(many, count=1)  # the namespace is followed from now on
    await rounds(many)
    before = len(asyncio.all_tasks())
    await make_more(many)
    await rounds(many)
    assert len(asyncio.all_tasks()) == before
    assert not ledgers.ledgers


async def make_more(broker: Harness) -> None:
    for number in range(COUNT):
        assert (await broker.client.put(f"{NAMESPACE}/more{number}/subscriptions/s", json={})).status_code == 201


async def test_a_round_looks_only_at_topics_that_are_due(many: Harness, clock):
    topics = await make(many)
    assert await rounds(many) == (COUNT, COUNT)
    assert await rounds(many) == (0, 0)
    await many.client.get(topics[3])
    await many.produce("a", topic=topics[5])
    assert await rounds(many) == (2, 2)
    clock.advance(LOOK_AGAIN_S - 10)
    maintained, enforced = await rounds(many)
    assert maintained <= 2
    assert enforced == 0


async def test_every_topic_is_looked_at_from_time_to_time(many: Harness, clock):
    await make(many)
    await rounds(many)
    clock.advance(LOOK_AGAIN_S + 1)
    assert (await rounds(many))[0] == COUNT


async def test_a_consumer_makes_each_round_look_at_its_topic(many: Harness, clock):
    topics = await make(many)
    await many.receive(topic=topics[0], session_ttl_ms=60_000)
    await rounds(many)
    clock.advance(5)
    assert (await rounds(many))[0] == 1
    clock.advance(60)
    assert (await rounds(many))[0] == 1
    assert not len(many.broker.topics.loaded(name_of(many, topics[0])).subscriptions["s"].sessions)
    assert (await rounds(many))[0] == 0


def name_of(broker: Harness, path: str):
    (topic,) = [one for one in broker.broker.topics if one.name.short == path.removeprefix("/v1/topics/")]
    return topic.name


async def test_a_change_of_policies_makes_the_next_round_look_at_the_topics(many: Harness):
    await make(many)
    await rounds(many)
    answer = await many.client.put("/v1/namespaces/public/default/policies", json={"message_ttl_s": 60})
    assert answer.status_code == 200, answer.text
    assert (await rounds(many))[1] == COUNT


async def test_a_time_to_live_is_looked_at_when_a_message_expires(many: Harness, clock):
    topics = await make(many)
    await many.client.put("/v1/namespaces/public/default/policies", json={"message_ttl_s": 60})
    await many.produce("a", topic=topics[0])
    await rounds(many)
    clock.advance(30)
    assert (await rounds(many))[1] == 0
    clock.advance(31)
    assert (await rounds(many))[1] >= 1
    subscription = many.broker.topics.loaded(name_of(many, topics[0])).subscriptions["s"]
    assert subscription.cursor.backlog_entries == 0


async def test_a_closed_topic_is_not_scheduled(many: Harness):
    topics = await make(many)
    for topic in topics:
        assert (await many.client.delete(topic)).status_code == 200
    assert len(many.broker.topics) == 0
    assert await rounds(many) == (0, 0)


async def test_an_idle_topic_has_no_queues_and_events_of_its_own(many: Harness):
    """An empty deque takes 760 bytes, and an event has one: there would be ten of them in each topic."""
    await make(many, count=1)
    (topic,) = many.broker.topics
    cursor = topic.ledger.cursors["s"]
    assert isinstance(cursor, ManagedCursor)
    found: set[int] = set()
    waiting: list[object] = [topic, topic.ledger, cursor, *topic.subscriptions.values()]
    for _ in range(3):  # what they have, and what those have
        waiting = [
            one
            for parent in waiting
            for one in gc.get_referents(parent)
            if type(one).__module__.startswith("bindery_broker") or isinstance(one, dict | tuple)
        ]
        found |= {id(one) for one in waiting if isinstance(one, asyncio.Event)}
    assert not found


async def test_what_an_eviction_acknowledges_is_deleted_when_its_retention_ends(many: Harness, clock):
    """An eviction of whole entries needs no read. The topic is due for its trim all the same."""
    (topic,) = await make(many, count=1)
    policies = {
        "backlog_quota_size": {"limit": 100, "action": "consumer_backlog_eviction"},
        "retention": {"time_s": 300, "size_max": None},
    }
    answer = await many.client.put("/v1/namespaces/public/default/policies", json=policies)
    assert answer.status_code == 200, answer.text
    await many.produce("a" * 200, "b" * 200, topic=topic)
    found = many.broker.topics.loaded(name_of(many, topic))
    await found.ledger.roll()
    await many.broker.topics.maintain()
    assert found.ledger.entries_count == 2
    await many.broker.topics.enforce()
    assert found.subscriptions["s"].cursor.backlog_entries == 0
    await rounds(many)
    await rounds(many)
    assert found.ledger.entries_count == 2
    clock.advance(302)
    await rounds(many)
    assert found.ledger.entries_count == 0
