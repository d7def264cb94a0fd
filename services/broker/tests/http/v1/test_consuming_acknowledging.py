"""Acknowledgements over HTTP: durable, complete or refused, and counted once."""

import asyncio

import pytest
from bindery_pulsar.message_id import MessageId
from broker_harness import TOPIC, Harness, ids, payloads, problem, settle

SUB = f"{TOPIC}/subscriptions/s"


async def test_messages_of_one_batch_are_delivered_and_acknowledged_one_by_one(broker):
    batch = await broker.produce_batch("a", "b", "c")
    first = await broker.receive("c1", max=1)
    second = await broker.receive("c2", max=1)
    assert ids(first + second) == batch[:2]
    await broker.ack(batch[:1])
    broker.clock.advance(31)
    again = await broker.receive("c1")
    assert sorted(payloads(again)) == ["b", "c"]


async def test_an_acknowledgement_is_complete_if_a_consumer_connects_while_batch_sizes_are_read(
    broker, tree, ledgers, clock, monkeypatch
):
    first, second = await broker.produce_batch("a", "b"), await broker.produce_batch("c", "d")
    await broker.receive()
    await broker.die()
    successor = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://two")
    try:
        await successor.client.get(TOPIC)
        topic = next(iter(successor.broker.topics))
        subscription, read = topic.subscription("s"), topic.ledger.read
        is_reading, may_read = asyncio.Event(), asyncio.Event()

        async def slow_second(position, **limits):
            if position == MessageId.parse(second[0]).position:
                is_reading.set()
                await may_read.wait()
            return await read(position, **limits)

        monkeypatch.setattr(topic.ledger, "read", slow_second)
        acknowledging = asyncio.create_task(successor.ack([first[0], second[0]]))
        async with asyncio.timeout(30):
            await is_reading.wait()
            subscription.join("c2", "exclusive")
            may_read.set()
            assert (await acknowledging).status_code == 200
        assert payloads(await successor.receive("c2", type="exclusive")) == ["b", "d"]
    finally:
        await successor.close()


async def test_acknowledgements_survive_a_broker_crash(broker):
    message_ids = await broker.produce("a", "b", "c")
    await broker.receive()
    await broker.ack([message_ids[0], message_ids[2]])
    for topic in broker.broker.topics:
        topic.abandon("as kill -9 would")
    assert payloads(await broker.receive()) == ["b"]


async def test_an_acknowledgement_is_answered_after_the_cursor_is_written(broker):
    (message_id,) = await broker.produce("a")
    await broker.receive()
    broker.ledgers.hold_adds()
    task = asyncio.create_task(broker.ack([message_id]))
    await settle()
    assert not task.done()
    broker.clock.advance(60)
    assert await broker.receive() == []  # not delivered again while the outcome is open
    broker.ledgers.release_adds()
    async with asyncio.timeout(30):
        assert (await task).status_code == 200


async def test_an_acknowledgement_after_the_lease_expired_is_valid(broker):
    (message_id,) = await broker.produce("a")
    await broker.receive("c1", ack_timeout_ms=1_000)
    broker.clock.advance(2)
    await broker.receive("c2")
    assert (await broker.ack([message_id])).status_code == 200
    broker.clock.advance(60)
    assert await broker.receive("c2") == []


@pytest.mark.parametrize("kind", ["shared", "exclusive"])
async def test_a_message_acknowledged_while_it_is_read_is_not_delivered(
    broker, tree, ledgers, clock, monkeypatch, kind
):
    message_ids = await broker.produce(*map(str, range(20)))
    await broker.receive(type=kind)
    await broker.ack(message_ids[1::2])
    await broker.die()
    successor = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://two")
    try:
        await successor.client.get(TOPIC)
        ledger = next(iter(successor.broker.topics)).ledger
        read, reads = ledger.read, 0

        async def slow_second(position, **limits):
            nonlocal reads
            reads += 1
            if reads == 2:
                assert (await successor.ack(message_ids[0:6:2])).status_code == 200
            return await read(position, **limits)

        monkeypatch.setattr(ledger, "read", slow_second)
        got = await successor.receive("c2", type=kind, max=3)
        assert payloads(got) == ["6", "8", "10"]
    finally:
        await successor.close()


@pytest.mark.parametrize("cumulative", [False, True])
async def test_a_repeated_acknowledgement_of_a_batch_keeps_no_batch_size(broker, cumulative):
    for _ in range(3):
        batch = await broker.produce_batch("a", "b")
        await broker.receive(type="exclusive")
        for _ in range(2):
            if cumulative:
                await broker.post(f"{SUB}/ack", {"cumulative": batch[1]})
            else:
                await broker.ack(batch)
    subscription = next(iter(broker.broker.topics)).subscription("s")
    assert subscription.cursor.backlog_entries == 0
    assert len(subscription._reader.batch_sizes) == 0


async def test_an_acknowledgement_wakes_a_consumer_blocked_by_a_limit(tree, ledgers, clock):
    harness = Harness(
        tree=tree, ledgers=ledgers, clock=clock, url="http://one", unacked_max=2, unacked_per_consumer_max=2
    )
    message_ids = await harness.produce("a", "b", "c")
    await harness.receive("c1")
    task = asyncio.create_task(harness.receive("c1", wait_ms=30_000))
    await settle()
    assert not task.done()
    await harness.ack(message_ids[:1])
    async with asyncio.timeout(30):
        assert payloads(await task) == ["c"]
    await harness.close()


@pytest.mark.parametrize("message_id", ["0:99", "77:0", "0:0:3", "0:0:-1:0", "0:1:-1:5"])
async def test_an_acknowledgement_with_an_unknown_id_acknowledges_nothing(broker, message_id):
    (first,) = await broker.produce("a")
    await broker.produce_batch("b", "c")
    await broker.receive()
    answer = await broker.ack([first, message_id])
    body = problem(answer, status=400, code="unknown_messages")
    assert len(body["facts"]["message_ids"]) == 1
    broker.clock.advance(31)
    assert len(await broker.receive()) == 3


async def test_a_call_acknowledges_before_it_receives(broker):
    first, second = await broker.produce("a", "b")
    assert payloads(await broker.receive(max=1)) == ["a"]
    assert payloads(await broker.receive(max=1, ack=[first])) == ["b"]
    assert await broker.receive("c2", max=1, ack=[second]) == []
    broker.clock.advance(60)
    assert await broker.receive("c2") == []


async def test_a_call_whose_acknowledgement_fails_delivers_nothing(broker):
    await broker.produce("a")
    problem(await broker.receive_raw(ack=["99:0"]), status=400, code="unknown_messages")
    assert payloads(await broker.receive("c2")) == ["a"]
