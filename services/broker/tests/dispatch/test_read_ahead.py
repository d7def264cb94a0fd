"""Reading ahead: limited for the whole broker, and dropped with the last consumer."""

import asyncio

import pytest
from bindery_broker.dispatch.read_ahead import ReadAhead
from broker_harness import TOPIC, Harness, ids, payloads

SUBSCRIPTIONS = [f"s{n}" for n in range(5)]
KINDS = pytest.mark.parametrize("kind", ["shared", "exclusive"])


def at_hand(broker: Harness) -> int:
    """Return the number of ready messages of all subscriptions."""
    return sum(s.dispatcher.ready_count for topic in broker.broker.topics for s in topic.subscriptions.values())


def test_a_reservation_may_fill_the_budget_exactly():
    ahead = ReadAhead(10)
    ahead.change(4)
    assert ahead.reserve(7) == 0
    assert ahead.used == 4
    assert ahead.reserve(6) == 6
    assert ahead.used == 10
    ahead.change(-6)
    assert ahead.used == 4


def test_a_reservation_does_not_exceed_the_number_of_messages():
    ahead = ReadAhead(100, messages_max=5)
    ahead.change(10, messages=2)
    assert ahead.reserve(10, messages=4) == 0
    assert ahead.reserve(10, messages=3) == 10
    assert ahead.reserve(10, messages=1) == 0
    ahead.release(10, messages=3)
    assert (ahead.used, ahead.reserve(10, messages=1)) == (10, 10)


def test_the_budget_is_exceeded_by_what_is_held_and_not_by_reservations():
    ahead = ReadAhead(10, messages_max=3)
    assert ahead.reserve(6) == 6
    ahead.change(6, messages=3)  # it was read, and the reservation is not released yet
    assert not ahead.is_over
    ahead.change(5)
    assert ahead.is_over
    ahead.change(-5, messages=1)
    assert ahead.is_over
    ahead.change(0, messages=-1)
    assert not ahead.is_over


async def drained(broker: Harness, sub: str, kind: str, **fields: object) -> list[str]:
    """Receive and acknowledge until there is nothing more."""
    got: list[str] = []
    while messages := await broker.receive("z", sub=sub, type=kind, **fields):
        got += payloads(messages)
        await broker.ack(ids(messages), sub=sub)
    return got


@KINDS
async def test_no_ready_message_is_kept_after_the_consumers_left(broker, kind):
    sent = [f"{n}" for n in range(10)]
    await broker.produce(*sent)
    for sub in SUBSCRIPTIONS:
        assert payloads(await broker.receive("c", sub=sub, type=kind, max=1)) == ["0"]
        assert at_hand(broker) == 9
        await broker.client.delete(f"{TOPIC}/subscriptions/{sub}/consumers/c")
        assert at_hand(broker) == 0
    assert broker.broker.topics.read_ahead.used == 0
    for sub in SUBSCRIPTIONS:
        assert await drained(broker, sub, kind, max=3) == sent


@KINDS
async def test_consumers_that_do_not_return_leave_no_ready_messages(broker, clock, kind):
    await broker.produce("a", "b", "c")
    for sub in SUBSCRIPTIONS:
        await broker.receive("c", sub=sub, type=kind, max=1)
    assert at_hand(broker) == 2 * len(SUBSCRIPTIONS)
    assert broker.broker.topics.read_ahead.used > 0
    clock.advance(100)
    await broker.broker.topics.maintain()
    assert at_hand(broker) == 0
    assert broker.broker.topics.read_ahead.used == 0
    for sub in SUBSCRIPTIONS:
        assert await drained(broker, sub, kind) == ["a", "b", "c"]


@KINDS
async def test_without_room_each_call_reads_only_what_it_requests_and_all_messages_are_delivered(broker, kind):
    broker.broker.topics.read_ahead.total = 0
    sent = [f"{n}" for n in range(10)]
    await broker.produce(*sent[:5])
    await broker.produce_batch(*sent[5:])
    for sub in SUBSCRIPTIONS:
        assert payloads(await broker.receive("c", sub=sub, type=kind, max=2)) == ["0", "1"]
        assert at_hand(broker) == 0
        await broker.client.delete(f"{TOPIC}/subscriptions/{sub}/consumers/c")
        waiting = asyncio.create_task(drained(broker, sub, kind, max=3))
        async with asyncio.timeout(30):
            assert await waiting == sent


async def test_a_message_that_times_out_repeatedly_is_delivered_again_without_room(broker, clock):
    broker.broker.topics.read_ahead.total = 0
    await broker.produce("a", "b", "c")
    for count in range(4):
        got = []
        for _ in range(3):
            got += await broker.receive("c", ack_timeout_ms=1_000)
        assert payloads(got) == ["a", "b", "c"]
        assert {message["redelivery_count"] for message in got} == {count}
        clock.advance(2)


async def test_ready_messages_of_a_closed_topic_no_longer_count(broker):
    await broker.produce("a", "b")
    await broker.receive("c", max=1)
    await broker.receive("c", sub="deleted", max=1)
    await broker.client.delete(f"{TOPIC}/subscriptions/deleted?force=true")
    used = broker.broker.topics.read_ahead.used
    assert used > 0
    await broker.broker.topics.close()
    assert broker.broker.topics.read_ahead.used == 0


async def test_a_call_that_waits_to_read_reads_nothing_of_a_deleted_subscription(broker, monkeypatch):
    await broker.produce(*["x" * 3_000] * 40)
    (topic,) = broker.broker.topics
    read_really = topic.ledger.read

    async def slowly(*args, **kwargs):
        await asyncio.sleep(0.05)
        return await read_really(*args, **kwargs)

    monkeypatch.setattr(topic.ledger, "read", slowly)
    body = {"max": 1, "wait_ms": 3_000, "initial": "earliest"}
    calls = [
        asyncio.create_task(broker.post(f"{TOPIC}/subscriptions/s/receive", {**body, "consumer": f"c{n}"}))
        for n in range(2)
    ]
    while not (subscription := topic.subscriptions.get("s")) or len(subscription.sessions) < 2:
        await asyncio.sleep(0.001)
    assert (await broker.client.delete(f"{TOPIC}/subscriptions/s?force=true")).status_code == 200
    await asyncio.gather(*calls)
    async with asyncio.timeout(5):  # the calls end at once, the read in progress a little later
        while broker.broker.topics.read_ahead.used:
            await asyncio.sleep(0.01)
