"""Delayed messages over HTTP: never early, in no one's way, and gone when they are cancelled."""

import asyncio

from broker_harness import TOPIC, ids, payloads

SUB = f"{TOPIC}/subscriptions/s"


async def send(broker, payload: str, *, after_ms: int) -> str:
    (message_id,) = await broker.produce(payload, params={"deliver_after_ms": after_ms})
    return message_id


async def test_a_delayed_message_is_delivered_at_its_time_and_not_before(broker):
    await send(broker, "late", after_ms=5_000)
    await broker.produce("now")
    assert payloads(await broker.receive()) == ["now"]
    broker.clock.advance(4.99)
    assert await broker.receive() == []
    broker.clock.advance(0.11)  # the delay, and at most one tick
    assert payloads(await broker.receive()) == ["late"]


async def test_delayed_messages_are_delivered_by_time_and_with_the_type_key_shared_too(broker):
    await send(broker, "third", after_ms=3_000)
    await send(broker, "first", after_ms=1_000)
    await send(broker, "second", after_ms=2_000)
    for expected in ("first", "second", "third"):
        broker.clock.advance(1.1)
        assert payloads(await broker.receive(type="key_shared")) == [expected]


async def test_an_exclusive_subscription_delivers_delayed_messages_in_the_order_of_the_topic(broker):
    await send(broker, "late", after_ms=5_000)
    await broker.produce("now")
    assert payloads(await broker.receive(type="exclusive")) == ["late", "now"]


async def test_a_waiting_call_gets_a_delayed_message_when_it_is_due(broker):
    """The timer is one of the event loop, the delay one of the clock: the call looks again until both agree."""
    await send(broker, "late", after_ms=200)
    waiting = asyncio.create_task(broker.receive(wait_ms=20_000))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    broker.clock.advance(0.3)
    assert payloads(await waiting) == ["late"]


async def test_a_delayed_message_that_is_acknowledged_is_never_delivered(broker):
    message_id = await send(broker, "late", after_ms=1_000)
    assert await broker.receive() == []
    assert (await broker.ack([message_id])).json() == {"acknowledged": 1}
    broker.clock.advance(2)
    assert await broker.receive() == []
    stats = (await broker.client.get(f"{TOPIC}/subscriptions")).json()["subscriptions"][0]
    assert (stats["backlog_entries"], stats["delayed"]) == (0, 0)


async def test_a_seek_delays_messages_again(broker):
    await send(broker, "late", after_ms=1_000)
    await broker.produce("now")
    await broker.receive()
    assert (await broker.post(f"{SUB}/seek", {"message_id": "earliest"})).status_code == 200
    assert payloads(await broker.receive()) == ["now"]
    broker.clock.advance(1.1)
    assert payloads(await broker.receive()) == ["late"]


async def test_delayed_messages_do_not_count_as_unacknowledged(broker):
    await send(broker, "late", after_ms=1_000)
    await broker.receive()
    (stats,) = (await broker.client.get(f"{TOPIC}/subscriptions")).json()["subscriptions"]
    assert (stats["unacked"], stats["delayed"], stats["backlog_entries"]) == (0, 1, 1)


async def test_a_due_message_is_redelivered_like_any_other(broker):
    message_id = await send(broker, "late", after_ms=1_000)
    await broker.receive()
    broker.clock.advance(1.1)
    (first,) = await broker.receive("c1")
    assert (await broker.post(f"{SUB}/nack", {"message_ids": ids([first])})).json() == {"returned": [message_id]}
    (again,) = await broker.receive("c2")
    assert (again["message_id"], again["redelivery_count"]) == (message_id, 1)


async def test_a_type_that_keeps_no_delays_delivers_what_another_type_has_delayed(broker):
    await send(broker, "late", after_ms=60_000)
    assert await broker.receive("c", type="shared") == []
    assert payloads(await broker.receive("c", type="failover")) == ["late"]
