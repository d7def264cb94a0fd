"""Redelivery over HTTP: expired leases, returned messages, consumers that leave, and repeated requests."""

import asyncio

import pytest
from broker_harness import TOPIC, ids, payloads, settle

SUB = f"{TOPIC}/subscriptions/s"


async def test_a_message_with_an_expired_lease_is_delivered_again_and_counted(broker):
    await broker.produce("a")
    (first,) = await broker.receive("c1", ack_timeout_ms=1_000)
    broker.clock.advance(0.9)
    assert await broker.receive("c2") == []
    broker.clock.advance(0.2)
    (again,) = await broker.receive("c2")
    assert again["message_id"] == first["message_id"]
    assert (first["redelivery_count"], again["redelivery_count"]) == (0, 1)
    assert again["lease"] != first["lease"]


async def test_a_returned_message_is_delivered_again_at_once_or_after_its_delay(broker):
    message_ids = await broker.produce("a", "b")
    await broker.receive("c1")
    answer = await broker.post(f"{SUB}/nack", {"message_ids": message_ids[:1]})
    assert answer.json() == {"returned": message_ids[:1]}
    await broker.post(f"{SUB}/nack", {"message_ids": message_ids[1:], "delay_ms": 5_000})
    assert payloads(await broker.receive("c2")) == ["a"]
    broker.clock.advance(5)
    (late,) = await broker.receive("c2")
    assert (late["payload"], late["redelivery_count"]) == ("b", 1)


async def test_only_held_messages_can_be_returned(broker):
    (message_id,) = await broker.produce("a")
    await broker.receive("c1")
    answer = await broker.post(f"{SUB}/nack", {"message_ids": [message_id], "consumer": "c2"})
    assert answer.json() == {"returned": []}
    await broker.ack([message_id])
    answer = await broker.post(f"{SUB}/nack", {"message_ids": [message_id]})
    assert answer.json() == {"returned": []}


async def test_a_returned_message_wakes_a_waiting_consumer(broker):
    (message_id,) = await broker.produce("a")
    await broker.receive("c1")
    task = asyncio.create_task(broker.receive("c2", wait_ms=30_000))
    await settle()
    await broker.post(f"{SUB}/nack", {"message_ids": [message_id]})
    async with asyncio.timeout(30):
        assert payloads(await task) == ["a"]


async def test_messages_of_a_consumer_that_leaves_are_delivered_to_others(broker):
    await broker.produce("a")
    await broker.receive("c1")
    assert (await broker.client.delete(f"{SUB}/consumers/c1")).status_code == 200
    (again,) = await broker.receive("c2")
    assert again["redelivery_count"] == 0


@pytest.mark.parametrize("kind", ["shared", "exclusive"])
async def test_a_waiting_call_ends_when_its_consumer_leaves(broker, kind):
    await broker.receive("c1", type=kind)
    waiting = asyncio.create_task(broker.receive("c1", type=kind, wait_ms=30_000))
    await settle()
    assert (await broker.client.delete(f"{SUB}/consumers/c1")).status_code == 200
    async with asyncio.timeout(30):
        assert await waiting == []
    await broker.produce("a")
    assert payloads(await broker.receive("c2", type=kind)) == ["a"]


async def test_a_call_that_reads_while_its_consumer_leaves_takes_nothing(broker, monkeypatch):
    await broker.produce("a")
    await broker.receive("c1", max=1, sub="other")
    ledger = next(iter(broker.broker.topics)).ledger
    await broker.client.put(SUB, json={"initial": "earliest"})
    read = ledger.read

    async def leave_meanwhile(position, **limits):
        assert (await broker.client.delete(f"{SUB}/consumers/c1")).status_code == 200
        monkeypatch.setattr(ledger, "read", read)
        return await read(position, **limits)

    monkeypatch.setattr(ledger, "read", leave_meanwhile)
    assert await broker.receive("c1") == []
    assert payloads(await broker.receive("c2")) == ["a"]


async def test_a_repeated_request_gets_the_same_messages(broker):
    await broker.produce("a", "b", "c")
    first = await broker.receive("c1", max=2, request_id="r1")
    broker.clock.advance(20)
    again = await broker.receive("c1", max=2, request_id="r1")
    assert ids(again) == ids(first)
    broker.clock.advance(20)  # the repetition restarted the leases
    assert payloads(await broker.receive("c2")) == ["c"]


async def test_a_repeated_request_omits_messages_that_the_consumer_no_longer_holds(broker):
    message_ids = await broker.produce("a", "b", "c")
    await broker.receive("c1", request_id="r1", ack_timeout_ms=1_000)
    await broker.ack(message_ids[:1])
    broker.clock.advance(2)
    taken = await broker.receive("c2", max=1)
    assert payloads(taken) == ["b"]
    again = await broker.receive("c1", request_id="r1")
    assert ids(again) == message_ids[2:]


async def test_a_repeated_request_waits_for_the_call_in_progress(broker):
    await broker.receive()
    tasks = [asyncio.create_task(broker.receive("c1", wait_ms=30_000, request_id="r1")) for _ in range(2)]
    await settle()
    await broker.produce("a", "b")
    async with asyncio.timeout(30):
        one, two = await asyncio.gather(*tasks)
    assert ids(one) == ids(two)
    assert one
