"""Key-shared subscriptions over HTTP: the messages of each key in order, and the errors of their fields."""

import asyncio

import pytest
from bindery_broker.dispatch.key_ranges import StickyRanges
from bindery_broker.subscriptions.dispatch_loop import KEYS_KEPT_S
from broker_harness import TOPIC, ids, payloads, problem, settle

SUB = f"{TOPIC}/subscriptions/s"
KEYS = [f"k{number}" for number in range(20)]
LOW, HIGH = [[0, 32_767]], [[32_768, 65_535]]


async def produce(broker, *keys, round_="1"):
    found = []
    for key in keys:
        found += await broker.produce(f"{key}-{round_}", params={"key": key})
    return found


async def receive(broker, consumer, key_shared=None, **fields):
    about = {} if key_shared is None else {"key_shared": key_shared}
    return await broker.receive(consumer, type="key_shared", **about, **fields)


def sticky(ranges, **fields):
    return {"mode": "sticky", "ranges": ranges, **fields}


async def test_each_key_goes_to_one_consumer(broker):
    await receive(broker, "c1")
    await receive(broker, "c2")
    await produce(broker, *KEYS)
    await produce(broker, *KEYS, round_="2")
    got = {consumer: payloads(await receive(broker, consumer)) for consumer in ("c1", "c2")}
    assert sorted(got["c1"] + got["c2"]) == sorted(f"{key}-{n}" for key in KEYS for n in "12")
    owned = {consumer: {text.partition("-")[0] for text in texts} for consumer, texts in got.items()}
    assert owned["c1"]
    assert owned["c2"]
    assert not owned["c1"] & owned["c2"]
    for texts in got.values():
        for key in {text.partition("-")[0] for text in texts}:
            assert [text for text in texts if text.startswith(f"{key}-")] == [f"{key}-1", f"{key}-2"]


async def test_a_consumer_that_joins_waits_only_for_keys_that_are_in_flight_elsewhere(broker):
    held = await produce(broker, *KEYS)
    assert len(await receive(broker, "c1")) == len(KEYS)
    await produce(broker, *KEYS, round_="2")
    assert await receive(broker, "c2") == []
    later = payloads(await receive(broker, "c1"))
    assert 0 < len(later) < len(KEYS), "its own keys follow at once"
    await broker.ack(held)
    assert sorted(later + payloads(await receive(broker, "c2"))) == sorted(f"{key}-2" for key in KEYS)


async def test_a_consumer_that_leaves_gives_back_all_its_messages_and_keys_at_once(broker):
    await produce(broker, *KEYS)
    await receive(broker, "c1")
    await produce(broker, *KEYS, round_="2")
    waiting = asyncio.create_task(receive(broker, "c2", wait_ms=30_000))
    await settle()
    assert not waiting.done()
    assert (await broker.client.delete(f"{SUB}/consumers/c1")).status_code == 200
    async with asyncio.timeout(30):
        got = await waiting
    rest = await receive(broker, "c2")
    assert len(payloads(got) + payloads(rest)) == 2 * len(KEYS)
    for key in KEYS:
        texts = [text for text in payloads(got) + payloads(rest) if text.startswith(f"{key}-")]
        assert texts == [f"{key}-1", f"{key}-2"]


async def test_an_idle_consumer_loses_its_keys_until_its_next_call(broker):
    await receive(broker, "c1")
    await receive(broker, "c2")
    await produce(broker, *KEYS)
    first = await receive(broker, "c2")
    assert 0 < len(first) < len(KEYS)
    broker.clock.advance(KEYS_KEPT_S)
    rest = await receive(broker, "c2")
    assert len(first) + len(rest) == len(KEYS)
    await broker.ack(ids(first + rest))
    await receive(broker, "c1")
    await produce(broker, *KEYS)
    assert 0 < len(await receive(broker, "c2")) < len(KEYS)


async def test_sticky_consumers_get_the_keys_of_their_ranges(broker):
    await receive(broker, "low", sticky(LOW))
    await receive(broker, "high", sticky(HIGH))
    await produce(broker, *KEYS)
    hash_of = StickyRanges().hash_of
    expected = [f"{key}-1" for key in KEYS if hash_of(key.encode()) <= LOW[0][1]]
    assert 0 < len(expected) < len(KEYS)
    assert payloads(await receive(broker, "low", sticky(LOW))) == expected
    assert len(await receive(broker, "high", sticky(HIGH))) == len(KEYS) - len(expected)


async def test_an_idle_sticky_consumer_keeps_its_ranges(broker):
    await receive(broker, "low", sticky(LOW))
    broker.clock.advance(2 * KEYS_KEPT_S)
    problem(
        await broker.receive_raw("other", type="key_shared", key_shared=sticky([[0, 1]])), status=409, code="conflict"
    )


async def test_a_consumer_with_a_range_of_another_one_is_refused_and_leaves_no_session(broker):
    await receive(broker, "low", sticky(LOW))
    for _ in range(2):
        refused = await broker.receive_raw("other", type="key_shared", key_shared=sticky([[32_767, 40_000]]))
        facts = problem(refused, status=409, code="conflict")["facts"]
        assert (facts["holder"], facts["overlap"]) == ("low", [32_767, 32_767])
    (topic,) = broker.broker.topics
    assert [session.consumer.name for session in topic.subscription("s").sessions] == ["low"]
    assert await receive(broker, "other", sticky(HIGH)) == []


async def test_a_consumer_that_names_other_ranges_than_before_is_refused_until_its_session_ends(broker):
    await receive(broker, "c", sticky(LOW))
    refused = await broker.receive_raw("c", type="key_shared", key_shared=sticky(HIGH))
    assert "DELETE" in problem(refused, status=409, code="conflict")["detail"]
    await broker.client.delete(f"{SUB}/consumers/c")
    assert await receive(broker, "c", sticky(HIGH)) == []


@pytest.mark.parametrize("other", [{"mode": "sticky", "ranges": LOW}, {"allow_out_of_order": True}])
async def test_a_consumer_with_another_mode_is_refused(broker, other):
    await receive(broker, "c1")
    refused = await broker.receive_raw("c2", type="key_shared", key_shared=other)
    assert "mode" in problem(refused, status=409, code="subscription_type_conflict")["detail"]


@pytest.mark.parametrize(
    ("kind", "key_shared"),
    [
        ("key_shared", {"ranges": LOW}),
        ("key_shared", {"mode": "auto_split", "ranges": LOW}),
        ("key_shared", {"mode": "sticky"}),
        ("key_shared", {"mode": "sticky", "ranges": [[5, 4]]}),
        ("key_shared", {"mode": "sticky", "ranges": [[0, 9], [9, 20]]}),
        ("key_shared", {"mode": "sticky", "ranges": [[0, 65_536]]}),
        ("key_shared", {"mode": "sticky", "ranges": [[0]]}),
        ("key_shared", {"mode": "sideways"}),
        ("key_shared", {"colour": "red"}),
        ("shared", {}),
        ("failover", {"mode": "auto_split"}),
    ],
)
async def test_fields_that_contradict_each_other_are_refused(broker, kind, key_shared):
    problem(await broker.receive_raw(type=kind, key_shared=key_shared), status=400, code="bad_request")


async def test_out_of_order_delivery_does_not_wait_for_messages_that_are_held_elsewhere(broker):
    await produce(broker, *KEYS)
    await receive(broker, "c1", {"allow_out_of_order": True})
    await produce(broker, *KEYS, round_="2")
    assert 0 < len(await receive(broker, "c2", {"allow_out_of_order": True})) < len(KEYS)


async def test_messages_of_a_key_that_were_returned_come_before_later_ones(broker):
    message_ids = await produce(broker, "k", "k", "k")
    await receive(broker, "c", max=2)
    await broker.post(f"{SUB}/nack", {"message_ids": message_ids[:2]})
    again = await receive(broker, "c")
    assert ids(again) == message_ids
    assert [message["redelivery_count"] for message in again] == [1, 1, 0]
