"""Failover subscriptions over HTTP: one active consumer, and others that take over from it."""

import asyncio

import pytest
from broker_harness import TOPIC, ids, payloads, problem, settle

SUB = f"{TOPIC}/subscriptions/s"


async def receive(broker, consumer, **fields):
    return await broker.receive(consumer, type="failover", **fields)


async def test_only_the_active_consumer_gets_messages(broker):
    await broker.produce("a", "b")
    assert payloads(await receive(broker, "preferred", priority=0, max=1)) == ["a"]
    assert await receive(broker, "standby", priority=1) == []
    assert payloads(await receive(broker, "preferred", priority=0)) == ["b"]


async def test_the_next_consumer_gets_everything_unacknowledged_in_order_when_the_active_one_leaves(broker):
    message_ids = await broker.produce("a", "b", "c", "d")
    await receive(broker, "preferred", priority=0, max=3)
    await broker.ack(message_ids[1:2])
    waiting = asyncio.create_task(receive(broker, "standby", priority=1, wait_ms=30_000))
    await settle()
    assert not waiting.done()
    assert (await broker.client.delete(f"{SUB}/consumers/preferred")).status_code == 200
    async with asyncio.timeout(30):
        taken_over = await waiting
    assert payloads(taken_over) == ["a", "c", "d"]
    assert {message["redelivery_count"] for message in taken_over} == {0}


async def test_a_preferred_consumer_that_joins_becomes_active_when_the_former_one_has_acknowledged(broker):
    message_ids = await broker.produce("a", "b")
    assert payloads(await receive(broker, "standby", priority=1, max=1)) == ["a"]
    waiting = asyncio.create_task(receive(broker, "preferred", priority=0, wait_ms=30_000))
    await settle()
    assert not waiting.done()
    await broker.ack(message_ids[:1])
    async with asyncio.timeout(30):
        assert payloads(await waiting) == ["b"]
    assert await receive(broker, "standby", priority=1) == []


async def test_a_preferred_consumer_that_joins_gets_what_is_not_acknowledged_within_a_second(broker):
    await broker.produce("a", "b")
    assert payloads(await receive(broker, "standby", priority=1, max=1)) == ["a"]
    assert await receive(broker, "preferred", priority=0) == []
    broker.clock.advance(0.9)
    assert await receive(broker, "preferred", priority=0) == []
    broker.clock.advance(0.1)
    assert payloads(await receive(broker, "preferred", priority=0)) == ["a", "b"]
    assert await receive(broker, "standby", priority=1) == []


async def test_changes_of_the_active_consumer_deliver_each_message_once_on_an_idle_topic(broker):
    """Consumers that acknowledge in the next call, while a preferred one joins and leaves again and again."""
    found = []
    for n in range(10):
        await broker.produce(f"{n}")
        standby = await receive(broker, "standby", priority=1)
        waiting = asyncio.create_task(receive(broker, "preferred", priority=0, wait_ms=30_000))
        await settle()
        await broker.produce(f"{n} later")
        await broker.ack(ids(standby))
        async with asyncio.timeout(30):
            preferred = await waiting
        await broker.ack(ids(preferred))
        found += [*payloads(standby), *payloads(preferred)]
        await broker.client.delete(f"{SUB}/consumers/preferred")
    assert found == [text for n in range(10) for text in (f"{n}", f"{n} later")]


async def test_a_standby_consumer_takes_over_when_the_session_of_the_active_one_has_ended(broker):
    await broker.produce("a")
    await receive(broker, "preferred", priority=0, ack_timeout_ms=1_000, session_ttl_ms=5_000)
    broker.clock.advance(4.9)
    assert await receive(broker, "standby", priority=1) == []
    broker.clock.advance(0.1)
    assert payloads(await receive(broker, "standby", priority=1)) == ["a"]


async def test_everything_up_to_a_message_can_be_acknowledged(broker):
    message_ids = await broker.produce("a", "b", "c")
    await receive(broker, "c")
    answer = await broker.post(f"{SUB}/ack", {"cumulative": message_ids[1]})
    assert answer.status_code == 200, answer.text
    left = await receive(broker, "c", redeliver=True)
    assert ids(left) == message_ids[2:]


async def test_a_consumer_of_another_type_is_refused(broker):
    await receive(broker, "c1")
    body = problem(await broker.receive_raw("c2", type="shared"), status=409, code="subscription_type_conflict")
    assert body["facts"]["type"] == "failover"


@pytest.mark.parametrize("priority", [-1, 1_001, "high"])
async def test_an_invalid_priority_is_refused(broker, priority):
    problem(await broker.receive_raw(type="failover", priority=priority), status=400, code="bad_request")
