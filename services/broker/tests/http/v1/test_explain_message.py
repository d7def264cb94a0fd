"""Why a message is not delivered: each reason, as the operation explain gives it for a message id."""

import tracemalloc
from typing import Any

import pytest
from bindery_broker.dispatch.item import WHOLE, DispatchLimits
from bindery_broker.dispatch.key_ranges import HashRing
from bindery_pulsar.message_codec import OutgoingMessage, encode_message
from bindery_pulsar.message_id import MessageId
from broker_harness import TOPIC, problem

SUB = f"{TOPIC}/subscriptions/s"


async def explain(broker, message_id: str, consumer: str | None = None) -> dict[str, Any]:
    params = {"message_id": message_id} | ({} if consumer is None else {"consumer": consumer})
    answer = await broker.client.get(f"{SUB}/explain", params=params)
    assert answer.status_code == 200, answer.text
    message = answer.json()["message"]
    assert message.pop("message_id") == message_id
    assert message["detail"]
    return message


async def test_an_acknowledged_message(broker):
    (message_id,) = await broker.produce("a")
    await broker.receive()
    await broker.ack([message_id])
    assert (await explain(broker, message_id))["code"] == "acknowledged"


async def test_a_message_of_a_batch_is_explained_by_itself(broker):
    first, second = await broker.produce_batch("a", "b")
    await broker.receive(max=1)
    await broker.ack([first])
    assert (await explain(broker, first))["code"] == "acknowledged"
    assert (await explain(broker, second))["code"] == "next"


async def test_a_message_that_a_consumer_holds(broker):
    (message_id,) = await broker.produce("a")
    await broker.receive("c1", ack_timeout_ms=10_000)
    broker.clock.advance(4)
    reason = await explain(broker, message_id, "c2")
    assert (reason["code"], reason["consumer"], reason["ends_in_ms"]) == ("leased", "c1", 6_000)
    assert "consumer c1 holds the message" in reason["detail"]


async def test_a_message_that_was_returned_with_a_delay(broker):
    (message_id,) = await broker.produce("a")
    await broker.receive("c1")
    await broker.post(f"{SUB}/nack", {"message_ids": [message_id], "delay_ms": 5_000})
    reason = await explain(broker, message_id)
    assert (reason["code"], reason["ends_in_ms"]) == ("returned", 5_000)


@pytest.mark.parametrize("is_read", [False, True])
async def test_a_delayed_message_whether_it_was_read_or_not(broker, is_read):
    await broker.receive()
    (message_id,) = await broker.produce("a", params={"deliver_after_ms": 5_000})
    if is_read:
        await broker.receive()
    reason = await explain(broker, message_id)
    assert (reason["code"], reason["ends_in_ms"]) == ("delayed", 5_000)


async def test_an_index_that_no_batch_has_takes_no_memory(broker):
    """A message that is due, and was not read, may have any number of messages as far as the dispatcher knows."""
    await broker.receive()
    (message_id,) = await broker.produce("a", params={"deliver_after_ms": 5_000})
    await broker.receive()
    (topic,) = broker.broker.topics
    subscription = topic.subscription("s")
    position = MessageId.parse(message_id).position
    subscription.dispatcher.replay_due([position])
    assert subscription.dispatcher.known_bits(position) == WHOLE
    tracemalloc.start()
    try:
        await explain(broker, f"{position.ledger_id}:{position.entry_id}:-1:{2**31 - 1}")
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()


async def test_a_message_whose_tags_nobody_wants(broker):
    await broker.receive(tags="red||green")
    (message_id,) = await broker.produce("a", params={"tags": "blue"})
    reason = await explain(broker, message_id)
    assert reason["code"] == "filtered"
    assert "green or red" in reason["detail"]


async def test_a_message_behind_a_limit_of_unacknowledged_messages(broker):
    ids = await broker.produce("a", "b")
    (topic,) = broker.broker.topics
    topic._limits = DispatchLimits(unacked_max=1, unacked_per_consumer_max=1)
    await broker.receive("c1")
    reason = await explain(broker, ids[1], "c1")
    assert reason["code"] == "unacked_max"
    assert "acknowledge some" in reason["detail"]


async def test_a_message_that_goes_to_the_active_consumer(broker):
    await broker.receive("c1", type="failover", priority=0)
    await broker.receive("c2", type="failover", priority=1)
    (message_id,) = await broker.produce("a")
    reason = await explain(broker, message_id, "c2")
    assert (reason["code"], reason["consumer"]) == ("not_active", "c1")
    assert (await explain(broker, message_id, "c1"))["code"] == "next"


async def test_a_message_whose_key_another_consumer_owns_or_still_holds(broker):
    ring: HashRing[str] = HashRing()
    for name in ("c1", "c2"):
        ring.add(name, name)
    key = next(key for key in map(str, range(100)) if ring.owner(ring.hash_of(key.encode())) == "c2")
    ids = await broker.produce("a", "b", params={"key": key})
    await broker.receive("c1", type="key_shared", max=1)
    await broker.receive("c2", type="key_shared", max=1)
    reason = await explain(broker, ids[1], "c2")
    assert (reason["code"], reason["consumer"]) == ("key_held", "c1")
    await broker.ack(ids[:1])
    reason = await explain(broker, ids[1], "c1")
    assert (reason["code"], reason["consumer"]) == ("key_of_other", "c2")


async def test_a_message_behind_others(broker):
    ids = await broker.produce("a", "b", "c")
    await broker.receive("c1", type="exclusive", max=1)
    reason = await explain(broker, ids[2])
    assert reason["code"] == "behind"
    assert "2 entries" in reason["detail"]


async def test_a_message_behind_an_entry_that_cannot_be_decoded(broker):
    await broker.receive()
    (topic,) = broker.broker.topics
    good = encode_message(OutgoingMessage(payload=b"a"), producer_name="p", publish_time_ms=1, sequence_id=0)
    (bad, later) = await topic.ledger.add_many([good[:-1] + b"?", good])
    answer = await broker.receive_raw()
    assert answer.status_code == 500
    for position in (bad, later):
        reason = await explain(broker, f"{position}:-1:-1")
        assert reason["code"] == "unreadable"
    assert f"{bad}" in (await explain(broker, f"{later}:-1:-1"))["detail"]


async def test_a_message_without_a_consumer(broker):
    await broker.client.put(SUB, json={})
    (message_id,) = await broker.produce("a")
    assert (await explain(broker, message_id))["code"] == "no_consumer"


async def test_an_id_that_names_no_message_and_a_consumer_without_a_message_are_refused(broker):
    await broker.receive()
    answer = await broker.client.get(f"{SUB}/explain", params={"message_id": "99:0"})
    problem(answer, status=404, code="no_such_message")
    answer = await broker.client.get(f"{SUB}/explain", params={"consumer": "c"})
    problem(answer, status=400, code="bad_request")


# --- what stops a consumer, in the answer of the call that got nothing -----------------------------------------------


async def blocked(broker, consumer: str, **fields: Any) -> dict[str, Any] | None:
    answer = (await broker.receive_raw(consumer, **fields)).json()
    assert answer["messages"] == []
    reason: dict[str, Any] | None = answer.get("blocked")
    assert reason is None or reason["detail"]
    return reason


async def test_a_consumer_without_messages_is_told_that_a_limit_is_reached(broker):
    first, *_ = await broker.produce("a", "b", "c")
    (topic,) = broker.broker.topics
    topic._limits = DispatchLimits(unacked_max=2, unacked_per_consumer_max=1)
    assert len(await broker.receive("c1", initial="earliest")) == 1
    reason = await blocked(broker, "c1")
    assert (reason["code"], reason["consumer"]) == ("unacked_max", "c1")
    assert len(await broker.receive("c2")) == 1
    reason = await blocked(broker, "c3")
    assert reason["code"] == "unacked_max"
    assert "consumer" not in reason
    await broker.ack([first])
    assert len(await broker.receive("c3")) == 1


async def test_a_consumer_without_messages_is_told_who_is_active(broker):
    await broker.receive("c1", type="failover")
    await broker.produce("a")
    reason = await blocked(broker, "c2", type="failover")
    assert (reason["code"], reason["consumer"]) == ("not_active", "c1")
    assert len(await broker.receive("c1", type="failover")) == 1


async def test_a_consumer_without_messages_is_told_how_long_a_returned_one_holds_up_the_others(broker):
    await broker.receive("c1", type="exclusive")
    first, _ = await broker.produce("a", "b")
    await broker.receive("c1", type="exclusive", max=1)
    await broker.post(f"{SUB}/nack", {"message_ids": [first], "delay_ms": 5_000})
    reason = await blocked(broker, "c1", type="exclusive")
    assert (reason["code"], reason["ends_in_ms"]) == ("returned", 5_000)


async def test_nothing_stops_a_consumer_if_there_is_nothing_to_deliver(broker):
    assert await blocked(broker, "c1") is None
    (message_id,) = await broker.produce("a")
    await broker.receive("c1")
    assert await blocked(broker, "c2") is None, "the message is leased, nothing else is there"
    await broker.ack([message_id])
    assert await blocked(broker, "c1") is None


async def test_a_consumer_without_messages_is_told_of_an_unreadable_entry_only_while_it_is_in_the_way(broker):
    await broker.receive()
    (topic,) = broker.broker.topics
    good = encode_message(OutgoingMessage(payload=b"a"), producer_name="p", publish_time_ms=1, sequence_id=0)
    (bad,) = await topic.ledger.add_many([good[:-1] + b"?"])
    assert (await broker.receive_raw()).status_code == 500
    await broker.ack([f"{bad}:-1:-1"])
    assert await blocked(broker, "c1") is None


async def test_a_waiting_consumer_is_told_who_is_active_although_that_one_has_reached_the_limit(broker):
    await broker.produce("a", "b")
    (topic,) = broker.broker.topics
    topic._limits = DispatchLimits(unacked_max=1, unacked_per_consumer_max=1)
    assert len(await broker.receive("c1", type="failover")) == 1
    assert (await blocked(broker, "c2", type="failover"))["code"] == "not_active"
    assert (await blocked(broker, "c1", type="failover"))["code"] == "unacked_max"


async def test_a_limit_does_not_stop_a_consumer_for_whom_there_is_nothing(broker):
    await broker.produce("a")
    (topic,) = broker.broker.topics
    topic._limits = DispatchLimits(unacked_max=1, unacked_per_consumer_max=1)
    assert len(await broker.receive("c1")) == 1
    assert await blocked(broker, "c2") is None
    await broker.produce("b")
    assert (await blocked(broker, "c2"))["code"] == "unacked_max"
