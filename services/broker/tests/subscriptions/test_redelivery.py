"""Repeated requests and returned messages."""

import asyncio

import pytest
from bindery_broker.subscriptions import reading
from bindery_pulsar.message_id import MessageId
from managed_ledger_cluster import Cluster
from subscription_parts import Parts, batch, single, texts


async def test_a_repeated_call_waits_for_the_first_one_no_longer_than_its_own_deadline(cluster: Cluster) -> None:
    parts = await Parts.create(cluster)
    began = parts.now()
    first = asyncio.ensure_future(parts.redelivery.take(parts.call(wait_s=60), "r"))
    await asyncio.sleep(0)
    assert await parts.redelivery.take(parts.call(wait_s=3), "r") == []
    assert parts.now() - began == pytest.approx(3, abs=0.1)
    await parts.topic.add_many([single(b"a")])
    assert texts(await first) == [b"a"]


async def test_a_repeated_call_takes_over_from_a_cancelled_one(cluster: Cluster) -> None:
    parts = await Parts.create(cluster)
    began = parts.now()
    first = asyncio.ensure_future(parts.redelivery.take(parts.call(wait_s=60), "r"))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(parts.redelivery.take(parts.call(wait_s=60), "r"))
    await asyncio.sleep(1)
    first.cancel()
    await asyncio.wait([first])
    await parts.topic.add_many([single(b"a")])
    assert texts(await second) == [b"a"]
    assert parts.now() - began < 2


async def test_an_answer_is_repeated_with_a_new_lease_only_under_its_own_request_id(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, batch(b"a", b"b"), single(b"c"))
    first = await parts.redelivery.take(parts.call(count_max=2), "r")
    again = await parts.redelivery.take(parts.call(count_max=2), "r")
    other = await parts.redelivery.take(parts.call(count_max=2), "other")
    assert (texts(first), texts(again), texts(other)) == ([b"a", b"b"], [b"a", b"b"], [b"c"])
    assert first[0].lease != again[0].lease


async def test_a_repeated_answer_has_each_message_once_if_its_batch_is_read_in_parts(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages that one read does not reach are left out, and their leases are not extended."""
    monkeypatch.setattr(reading, "READ_MESSAGES_MAX", 2)
    parts = await Parts.create(cluster, batch(b"a", b"b", b"c", b"d"))
    taken: list[bytes] = []
    while len(taken) < 4:
        taken += await parts.take()
    first, last = MessageId.parse("0:0:-1:0"), MessageId.parse("0:0:-1:3")
    parts.nack(first)
    parts.nack(last)
    dispatcher = parts.loop.dispatcher
    for _ in range(2):
        await parts.reader.read_again(dispatcher, dispatcher.replay(9), size_max=2**20, decoded_max=2**20)
    answer = await parts.redelivery.take(parts.call("r"), "id")
    assert texts(answer) == [b"a", b"d"]
    again = await parts.redelivery.take(parts.call("r"), "id")
    assert texts(again) == [b"a"]
    assert parts.consumer("r").held == 2


async def test_only_a_release_that_returns_messages_wakes_waiting_calls(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = await Parts.create(cluster, single(b"a"))
    await parts.take("c1")
    await parts.take("other")
    wakes: list[None] = []
    monkeypatch.setattr(parts.loop, "wake", lambda: wakes.append(None))
    assert parts.release("other") is False
    assert not wakes
    assert parts.release("c1") is True
    assert len(wakes) == 1
