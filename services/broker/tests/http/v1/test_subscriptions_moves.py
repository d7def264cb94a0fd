"""Moving a subscription without delivering: skip, expire, clear, seek to a percentage; and cancelling by id."""

import asyncio

import pytest
from bindery_pulsar.message_codec import OutgoingMessage, encode_batch
from broker_harness import TOPIC, ids, payloads, problem

SUB = f"{TOPIC}/subscriptions/s"


async def post(broker, verb: str, **body) -> dict[str, object]:
    answer = await broker.post(f"{SUB}/{verb}", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_skip_acknowledges_the_next_entries_and_no_others(broker):
    sent = await broker.produce("a", "b", "c", "d")
    await broker.client.put(SUB, json={})
    await broker.ack(sent[1:2])
    assert await post(broker, "skip", entries=2) == {"next": sent[3].rsplit(":", 2)[0]}
    assert payloads(await broker.receive()) == ["d"]


async def test_a_held_message_stays_with_its_consumer_while_the_subscription_moves(broker):
    await broker.produce("a", "b", params={"key": "k"})
    held = await broker.receive("c1", type="key_shared", max=1)
    await post(broker, "clear")
    await broker.produce("c", params={"key": "k"})
    assert await broker.receive("c2", type="key_shared") == []  # c1 holds a message of the key
    assert (await broker.ack(ids(held))).json() == {"acknowledged": 1}
    await broker.client.delete(f"{SUB}/consumers/c1")
    assert payloads(await broker.receive("c2", type="key_shared")) == ["c"]


@pytest.mark.parametrize("kind", ["shared", "exclusive", "failover", "key_shared"])
async def test_clear_acknowledges_everything_and_later_messages_are_delivered(broker, kind):
    await broker.produce("a", "b", "c", params={"deliver_after_ms": 1_000} if kind == "shared" else None)
    await broker.receive(type=kind, max=1)
    await post(broker, "clear")
    await broker.client.delete(f"{SUB}/consumers/c1")
    await broker.produce("d")
    broker.clock.advance(2)
    assert payloads(await broker.receive("c2", type=kind)) == ["d"]
    (info,) = (await broker.client.get(f"{TOPIC}/subscriptions")).json()["subscriptions"]
    assert (info["backlog_entries"], info["delayed"]) == (1, 0)


async def test_expire_acknowledges_what_was_published_longer_ago(broker):
    await broker.produce("a", "b")
    broker.clock.advance(60)
    await broker.produce("c")
    await broker.client.put(SUB, json={})
    await post(broker, "expire", older_than_ms=30_000)
    assert payloads(await broker.receive()) == ["c"]


@pytest.mark.parametrize(("percent", "expected"), [(0, "abcd"), (50, "cd"), (75, "d"), (100, "")])
async def test_seek_to_a_percentage_of_the_entries(broker, percent, expected):
    await broker.produce(*"abcd")
    await broker.receive()
    await post(broker, "seek", percent=percent)
    assert "".join(payloads(await broker.receive("c2"))) == expected


async def test_a_seek_to_two_places_is_refused(broker):
    await broker.produce("a")
    await broker.client.put(SUB, json={})
    answer = await broker.post(f"{SUB}/seek", {"percent": 5, "timestamp": 1})
    problem(answer, status=400, code="bad_request")


async def test_a_delayed_message_is_cancelled_where_it_was_not_delivered(broker):
    await broker.client.put(f"{TOPIC}/subscriptions/ordered", json={})
    await broker.client.put(SUB, json={})
    (message_id,) = await broker.produce("a", params={"deliver_after_ms": 1_000})
    assert payloads(await broker.receive(sub="ordered", type="exclusive")) == ["a"]  # knows no delays
    answer = await broker.client.delete(f"{TOPIC}/messages/{message_id}")
    assert answer.json() == {"cancelled": {"ordered": "already_delivered", "s": "cancelled"}}
    broker.clock.advance(2)
    assert await broker.receive() == []


async def test_a_message_that_was_cancelled_before_is_still_cancelled(broker):
    """The answer to the first request may be lost; the second one must not say that the message was delivered."""
    await broker.client.put(f"{TOPIC}/subscriptions/ordered", json={})
    await broker.client.put(SUB, json={})
    assert await broker.receive(sub="ordered", type="exclusive") == []
    message_id, other = await broker.produce("a", "b", params={"deliver_after_ms": 1_000})
    one, two = f"{TOPIC}/messages/{message_id}", f"{TOPIC}/messages/{other}"
    answers = await asyncio.gather(*(broker.client.delete(one) for _ in range(3)))
    broker.clock.advance(2)
    answers.append(await broker.client.delete(one))
    assert [answer.json() for answer in answers] == [{"cancelled": {"ordered": "cancelled", "s": "cancelled"}}] * 4
    for sub in ("s", "ordered"):
        (found,) = await broker.receive(sub=sub, type="exclusive" if sub == "ordered" else "shared")
        await broker.ack(ids([found]), sub=sub)
    answer = await broker.client.delete(two)
    assert answer.json() == {"cancelled": {"ordered": "already_delivered", "s": "already_delivered"}}
    await post(broker, "seek", message_id="earliest")
    assert len(await broker.receive()) == 2
    assert (await broker.client.delete(one)).json()["cancelled"]["s"] == "already_delivered"


async def test_another_broker_recognizes_a_cancelled_message_that_is_not_due(broker):
    """Shared consumers cannot have got it. Exclusive ones may have."""
    await broker.client.put(SUB, json={})
    (message_id,) = await broker.produce("a", params={"deliver_after_ms": 1_000})
    await broker.client.delete(f"{TOPIC}/messages/{message_id}")
    (topic,) = broker.broker.topics
    for kind, expected in [("exclusive", "already_delivered"), ("shared", "cancelled")]:
        topic.subscription("s")._cancelled.clear()
        assert await broker.receive(type=kind) == []
        answer = await broker.client.delete(f"{TOPIC}/messages/{message_id}")
        assert answer.json() == {"cancelled": {"s": expected}}


async def test_only_delayed_messages_that_exist_can_be_cancelled(broker):
    (message_id,) = await broker.produce("a")
    problem(await broker.client.delete(f"{TOPIC}/messages/{message_id}"), status=409, code="conflict")
    problem(await broker.client.delete(f"{TOPIC}/messages/99:0"), status=404, code="no_such_message")


async def test_a_part_of_a_batch_is_not_cancelled_with_the_others(broker):
    """Bindery's producers store delayed messages as entries of their own; others may store batches of them."""
    await broker.produce("a")
    (topic,) = broker.broker.topics
    messages = [OutgoingMessage(payload=b"", deliver_at_ms=2**42) for _ in range(2)]
    entry = encode_batch(messages, producer_name="p", publish_time_ms=1, sequence_ids=range(2))
    (position,) = await topic.ledger.add_many([entry])
    await broker.client.put(SUB, json={})
    batch_id = f"{position.ledger_id}:{position.entry_id}"
    answer = await broker.client.delete(f"{TOPIC}/messages/{batch_id}:-1:1")
    problem(answer, status=409, code="conflict")
    assert not topic.subscription("s").cursor.is_acked(position)
    assert (await broker.client.delete(f"{TOPIC}/messages/{batch_id}")).json() == {"cancelled": {"s": "cancelled"}}


async def test_a_subscription_that_is_not_durable_ends_with_its_last_consumer(broker):
    await broker.produce("a")
    assert payloads(await broker.receive(durable=False)) == ["a"]
    answer = await broker.receive_raw("c2")
    assert "not durable" in problem(answer, status=409, code="conflict")["detail"]
    assert (await broker.client.delete(f"{SUB}/consumers/c1")).status_code == 200
    assert (await broker.client.get(f"{TOPIC}/subscriptions")).json()["subscriptions"] == []
    assert payloads(await broker.receive(durable=False)) == ["a"]
    broker.clock.advance(3_600)
    await broker.broker.topics.maintain()
    assert (await broker.client.get(f"{TOPIC}/subscriptions")).json()["subscriptions"] == []


async def test_what_a_subscription_delivered_still_counts_when_it_has_ended(broker):
    await broker.produce("a", "b")
    await broker.receive(durable=False)
    (topic,) = broker.broker.topics
    before = topic.volume
    assert before.messages_out == 2
    await broker.client.delete(f"{SUB}/consumers/c1")
    assert not topic.subscriptions
    assert topic.volume == before


async def test_a_durable_subscription_is_not_taken_for_another_kind(broker):
    await broker.receive()
    problem(await broker.receive_raw(durable=False), status=409, code="conflict")
    problem(await broker.receive_raw(sub="t", durable=False, tags="a"), status=400, code="bad_request")


async def test_delayed_messages_and_redelivery_counts_survive_an_unload(broker):
    await broker.produce("late", params={"deliver_after_ms": 5_000})
    (message_id,) = await broker.produce("now")
    await broker.receive()
    await broker.post(f"{SUB}/nack", {"message_ids": [message_id]})
    (again,) = await broker.receive()
    assert again["redelivery_count"] == 1
    (topic,) = broker.broker.topics
    await topic.close()
    await asyncio.sleep(0)
    (once_more,) = await broker.receive("c2")
    assert (once_more["payload"], once_more["redelivery_count"]) == ("now", 1)
    (info,) = (await broker.client.get(f"{TOPIC}/subscriptions")).json()["subscriptions"]
    assert info["delayed"] == 1
    broker.clock.advance(5.1)
    assert payloads(await broker.receive("c2")) == ["late"]
