"""Seek over HTTP: targets, refused seeks, and acknowledgements in progress."""

import asyncio

import pytest
from bindery_core.errors import MetadataUnavailable
from bindery_pulsar.message_id import MessageId
from broker_harness import TOPIC, Harness, ids, payloads, problem, settle

SUB = f"{TOPIC}/subscriptions/s"


async def test_seek_to_a_message_into_a_batch_and_to_both_ends(broker):
    single = await broker.produce("a", "b")
    batch = await broker.produce_batch("c", "d", "e")
    await broker.ack(ids(await broker.receive()))
    for target, expected in (
        (single[1], ["b", "c", "d", "e"]),
        (batch[1], ["d", "e"]),
        ("earliest", ["a", "b", "c", "d", "e"]),
        ("latest", []),
    ):
        answer = await broker.post(f"{SUB}/seek", {"message_id": target})
        assert answer.status_code == 200, answer.text
        assert payloads(await broker.receive()) == expected, target


async def test_seek_to_a_trimmed_batch_continues_after_it(broker):
    batch = await broker.produce_batch("a", "b", "c")
    await broker.ack(ids(await broker.receive()))
    topic = next(iter(broker.broker.topics))
    await topic.ledger.roll()
    await broker.produce("d")
    await broker.ack(ids(await broker.receive()))
    await topic.ledger.trim()
    assert not topic.ledger.contains(MessageId.parse(batch[0]).position)
    answer = await broker.post(f"{SUB}/seek", {"message_id": batch[2]})
    assert answer.status_code == 200, answer.text
    assert payloads(await broker.receive()) == ["d"]


async def test_seek_to_a_time(broker):
    await broker.produce("a")
    broker.clock.advance(10)
    at = broker.clock.wall_ms
    await broker.produce("b")
    broker.clock.advance(10)
    await broker.produce("c")
    await broker.receive()
    await broker.post(f"{SUB}/seek", {"timestamp": at})
    assert payloads(await broker.receive()) == ["b", "c"]


@pytest.mark.parametrize("target", ["latest", "earliest", "batch"])
async def test_a_refused_seek_changes_nothing(broker, tree, ledgers, clock, monkeypatch, target):
    batch = await broker.produce_batch("a", "b", "c")
    message_ids = await broker.produce("d", "e", "f")
    await broker.receive()
    await broker.ack([batch[0], message_ids[0]])
    topic = next(iter(broker.broker.topics))
    subscription = topic.subscription("s")

    async def refuse(state):
        raise MetadataUnavailable("made up")

    with monkeypatch.context() as patch:
        patch.setattr(subscription.cursor.store, "write", refuse)
        answer = await broker.post(f"{SUB}/seek", {"message_id": batch[2] if target == "batch" else target})
        problem(answer, status=503, code="metadata_unavailable")
    assert payloads(await broker.receive("c2")) == ["b", "c", "e", "f"]
    assert (await broker.ack(message_ids[2:])).status_code == 200
    await broker.die()
    successor = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://two")
    try:
        assert payloads(await successor.receive()) == ["b", "c", "e"]
    finally:
        await successor.close()


@pytest.mark.parametrize("kind", ["shared", "exclusive"])
async def test_a_message_acknowledged_during_a_seek_is_not_delivered_again(broker, ledgers, kind):
    message_ids = await broker.produce("a", "b", "c")
    await broker.receive(type=kind)
    await broker.ack(message_ids[:1])
    ledgers.hold_adds()
    seeking = asyncio.create_task(broker.post(f"{SUB}/seek", {"message_id": "earliest"}))
    await settle()
    acknowledging = asyncio.create_task(broker.ack(message_ids[1:2]))
    receiving = asyncio.create_task(broker.receive(type=kind, wait_ms=30_000))
    await settle()
    ledgers.release_adds()
    async with asyncio.timeout(30):
        assert (await seeking).status_code == (await acknowledging).status_code == 200
        first = payloads(await receiving)
    broker.clock.advance(31)
    assert payloads(await broker.receive(type=kind)) == ["a", "c"]
    assert first in (["a", "c"], ["a", "b", "c"])
