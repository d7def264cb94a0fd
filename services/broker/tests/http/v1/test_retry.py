"""POST .../retry, and the dead letters of POST .../receive, over HTTP."""

import json
from typing import Any

import pytest
from bindery_pulsar.message_id import MessageId
from bindery_pulsar.pulsar_messages_pb2 import MessageMetadata
from bindery_pulsar.topic_name import TopicName
from broker_harness import TOPIC, Harness, ids, payloads, problem

RETRY = f"{TOPIC}-s-RETRY"
DLQ = f"{TOPIC}-s-DLQ"


async def retry(broker: Harness, message_ids: list[str], *, topic: str = TOPIC, **fields: Any) -> dict[str, Any]:
    answer = await broker.post(f"{topic}/subscriptions/s/retry", {"message_ids": message_ids, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_messages_are_moved_to_the_retry_topic_in_the_order_of_the_call(broker):
    """The intent is stored in a cursor ledger; after that the first copy starts the ledger of the retry topic."""
    first, second, third = await broker.produce("a", "b", "c")
    await broker.receive(ack_timeout_ms=1_000)
    answer = await retry(broker, [third, first])
    assert answer == {
        "moved": [
            {"message_id": third, "topic": "public/default/t-s-RETRY", "copy_id": "2:0:-1:-1", "reconsume_times": 1},
            {"message_id": first, "topic": "public/default/t-s-RETRY", "copy_id": "2:1:-1:-1", "reconsume_times": 1},
        ],
        "acknowledged": [],
        "failed": [],
    }
    broker.clock.advance(2)
    *copies, left = await broker.receive()
    assert left["message_id"] == second
    assert payloads(copies) == ["c", "a"]
    assert copies[0]["properties"] == {
        "REAL_TOPIC": "persistent://public/default/t",
        "REAL_SUBSCRIPTION": "s",
        "ORIGIN_MESSAGE_ID": third.removesuffix(":-1"),
        "ORIGIN_MESSAGE_IDY_TIME": third.removesuffix(":-1"),
        "RECONSUMETIMES": "1",
        "DELAY_TIME": "0",
    }
    assert await retry(broker, [first]) == {"moved": [], "acknowledged": [first], "failed": []}
    assert await broker.receive(topic=RETRY, consumer="other") == []


async def test_origin_key_and_properties_survive_three_retries_and_the_dead_letter_topic(broker):
    line = {
        "payload": "x", "key": "k", "properties": {"p": "1"}, "tags": "red", "event_time": 7,
    }  # fmt: skip
    (origin,) = await _produce_lines(broker, line)
    topic, message_id = TOPIC, origin
    await broker.receive()
    for times in (1, 2, 3):
        (moved,) = (await retry(broker, [message_id], topic=topic, max_redeliver=3))["moved"]
        assert (moved["topic"], moved["reconsume_times"]) == ("public/default/t-s-RETRY", times)
        topic, message_id = RETRY, moved["copy_id"]
        (copy,) = await broker.receive(topic=RETRY)
        assert copy["message_id"] == message_id
        assert (copy["payload"], copy["key"], copy["tags"], copy["event_time"]) == ("x", "k", "red", 7)
        assert copy["properties"]["ORIGIN_MESSAGE_ID"] == origin.removesuffix(":-1")
        assert copy["properties"]["p"] == "1"
    (moved,) = (await retry(broker, [message_id], topic=RETRY, max_redeliver=3, delay_ms=60_000))["moved"]
    assert (moved["topic"], moved["reconsume_times"]) == ("public/default/t-s-DLQ", 4)
    (letter,) = await broker.receive(topic=DLQ, sub="dead-letters")
    assert letter["properties"]["REAL_TOPIC"] == "persistent://public/default/t"
    assert letter["properties"]["ORIGIN_MESSAGE_ID"] == origin.removesuffix(":-1")
    assert (await broker.client.get(RETRY)).json()["subscriptions"]["s"]["backlog_entries"] == 0
    assert (await broker.client.get("/v1/topics")).json()["topics"] == [
        "public/default/t", "public/default/t-s-DLQ", "public/default/t-s-RETRY",
    ]  # fmt: skip


async def _produce_lines(broker: Harness, *lines: dict[str, Any]) -> list[str]:
    content = "\n".join(json.dumps(line) for line in lines)
    headers = {"content-type": "application/x-ndjson"}
    answer = await broker.client.post(f"{TOPIC}/messages", content=content, headers=headers)
    return list(answer.json()["message_ids"])


async def test_a_retry_with_a_delay_is_delivered_when_it_is_due(broker):
    (message_id,) = await broker.produce("a")
    await broker.receive()
    await retry(broker, [message_id], delay_ms=60_000)
    assert await broker.receive(topic=RETRY) == []
    broker.clock.advance(59)
    assert await broker.receive(topic=RETRY) == []
    broker.clock.advance(2)
    (copy,) = await broker.receive(topic=RETRY)
    assert copy["properties"]["DELAY_TIME"] == "60000"


async def test_messages_of_one_batch_have_origins_of_their_own(broker):
    message_ids = await broker.produce_batch("a", "b", "c")
    await broker.receive(ack_timeout_ms=1_000)
    await retry(broker, [message_ids[2], message_ids[0]])
    copies = await broker.receive(topic=RETRY)
    assert [copy["properties"]["ORIGIN_MESSAGE_ID"] for copy in copies] == [message_ids[2], message_ids[0]]
    broker.clock.advance(2)
    assert payloads(await broker.receive()) == ["b"]
    assert len((await retry(broker, [message_ids[1].rsplit(":", 1)[0]]))["moved"]) == 1, "the rest of the entry"
    assert (await broker.client.get(TOPIC)).json()["subscriptions"]["s"]["backlog_entries"] == 0


async def test_more_messages_than_one_move_has_keep_their_order(broker):
    message_ids = [one for _ in range(3) for one in await broker.produce_batch(*map(str, range(900)))]
    await broker.client.put(f"{TOPIC}/subscriptions/s", json={})
    answer = await retry(broker, message_ids[::-1])
    assert [moved["message_id"] for moved in answer["moved"]] == message_ids[::-1]
    copies = [moved["copy_id"] for moved in answer["moved"]]
    assert copies == sorted(copies, key=MessageId.parse)
    assert (await broker.client.get(TOPIC)).json()["subscriptions"]["s"]["backlog_entries"] == 0


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"message_ids": []}, "bad_request"),
        ({"delay_ms": -1}, "bad_request"),
        ({"delay_ms": 100_000}, "delay_too_long"),
        ({"dead_letter_topic": "t"}, "bad_request"),
        ({"dead_letter_topic": "t-s-RETRY"}, "bad_request"),
        ({"dead_letter_topic": "a/b"}, "bad_request"),
        ({"properties": {"ORIGIN_MESSAGE_ID": "1:1:-1"}}, "bad_request"),
        ({"message_ids": ["77:0"]}, "unknown_messages"),
        ({"max_redeliver": -1}, "bad_request"),
    ],
)
async def test_a_wrong_retry_is_refused_and_changes_nothing(fields, code, tree, ledgers, clock):
    broker = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://one", delayed_delivery_max_delay_s=60)
    message_ids = await broker.produce("a")
    await broker.receive()
    body = {"message_ids": message_ids, **fields}
    problem(await broker.post(f"{TOPIC}/subscriptions/s/retry", body), status=400, code=code)
    assert (await broker.client.get("/v1/topics")).json()["topics"] == ["public/default/t"]
    assert (await broker.client.get(TOPIC)).json()["subscriptions"]["s"]["unacked"] == 1
    await broker.close()


async def test_a_message_that_is_too_large_with_the_properties_of_the_call_stays_with_its_consumer(broker):
    message_ids = await broker.produce("a" * 5_000_000, "b")
    await broker.receive(max_bytes=6_000_000)
    body = {"message_ids": message_ids[:1], "properties": {f"p{number}": "v" * 48_000 for number in range(5)}}
    answer = await broker.post(f"{TOPIC}/subscriptions/s/retry", body)
    assert "shorten properties" in problem(answer, status=413, code="too_large")["detail"]
    broker.clock.advance(2)
    assert (await broker.client.get(TOPIC)).json()["subscriptions"]["s"]["unacked"] == 2
    assert await broker.receive("other") == []
    (failed,) = (await retry(broker, message_ids, properties=body["properties"]))["failed"]
    assert (failed["message_id"], failed["error"]["status"]) == (message_ids[0], 413)
    assert len((await retry(broker, message_ids[:1]))["moved"]) == 1


async def test_a_subscription_that_is_not_stored_has_no_retries(broker):
    message_ids = await broker.produce("a")
    held = await broker.receive(durable=False)
    assert ids(held) == message_ids
    for path, body in (("retry", {"message_ids": message_ids}), ("dead-letters/redrive", {})):
        answer = await broker.post(f"{TOPIC}/subscriptions/s/{path}", body)
        assert "durable: true" in problem(answer, status=400, code="bad_request")["detail"]
    assert (await broker.client.get("/v1/topics")).json()["topics"] == ["public/default/t"]
    assert (await broker.client.get(TOPIC)).json()["subscriptions"]["s"]["unacked"] == 1


@pytest.mark.parametrize("kind", ["exclusive", "failover"])
async def test_a_subscription_whose_consumers_do_not_receive_retries_has_none(kind, broker):
    message_ids = await broker.produce("a", "b")
    await broker.receive(type=kind)
    for path, body in (("retry", {"message_ids": message_ids[:1]}), ("dead-letters/redrive", {"dry_run": True})):
        answer = await broker.post(f"{TOPIC}/subscriptions/s/{path}", body)
        assert "as shared or key_shared" in problem(answer, status=400, code="bad_request")["detail"]
    assert (await broker.client.get("/v1/topics")).json()["topics"] == ["public/default/t"]
    assert (await broker.client.get(TOPIC)).json()["subscriptions"]["s"]["unacked"] == 2
    await broker.client.delete(f"{TOPIC}/subscriptions/s/consumers/c1")
    await broker.receive(type="key_shared")
    assert len((await retry(broker, message_ids[:1]))["moved"]) == 1


async def test_a_subscription_whose_name_makes_no_topic_name_has_no_retries(broker):
    message_ids = await broker.produce("a")
    for name, advice in (("a%2Fb", "without a slash"), ("s" * 250, "a shorter subscription name")):
        await broker.client.put(f"{TOPIC}/subscriptions/{name}", json={})
        for path, body in (("retry", {"message_ids": message_ids}), ("dead-letters/redrive", {})):
            answer = await broker.post(f"{TOPIC}/subscriptions/{name}/{path}", body)
            detail = problem(answer, status=400, code="bad_request")["detail"]
            assert detail.startswith("this subscription can have no retry topic, because")
            assert advice in detail


async def test_an_entry_that_the_broker_cannot_decode_is_not_moved(broker):
    await broker.client.put(f"{TOPIC}/subscriptions/s", json={})
    topic = await broker.broker.topic(TopicName.parse("t"))
    (position,) = await topic.ledger.add_many([encrypted()])
    (message,) = await broker.receive(dead_letter={"max_redeliver": 0})
    answer = await broker.post(f"{TOPIC}/subscriptions/s/retry", {"message_ids": ids([message])})
    problem(answer, status=400, code="not_supported")
    broker.clock.advance(100)
    (again,) = await broker.receive(dead_letter={"max_redeliver": 0})
    assert (again["message_id"], again["redelivery_count"]) == (message["message_id"], 1)
    assert position.entry_id == 0


async def test_an_entry_that_is_damaged_does_not_prevent_the_others_from_being_moved(broker):
    await broker.client.put(f"{TOPIC}/subscriptions/s", json={})
    topic = await broker.broker.topic(TopicName.parse("t"))
    message_ids = await broker.produce("a")
    (damaged,) = await topic.ledger.add_many([b"x"])
    message_ids += [str(damaged), *await broker.produce("b", "c")]
    answer = await retry(broker, message_ids)
    assert [moved["message_id"] for moved in answer["moved"]] == [message_ids[0], *message_ids[2:]]
    assert [failed["error"]["code"] for failed in answer["failed"]] == ["corrupt_message"]


async def test_messages_that_do_not_fit_into_one_move_keep_their_order(broker):
    message_ids = await broker.produce("a" * 700_000, "b" * 900_000, "c" * 10, "d" * 600_000)
    await broker.client.put(f"{TOPIC}/subscriptions/s", json={})
    answer = await retry(broker, message_ids[::-1])
    assert [moved["message_id"] for moved in answer["moved"]] == message_ids[::-1]
    copies = [moved["copy_id"] for moved in answer["moved"]]
    assert copies == sorted(copies, key=MessageId.parse)


def encrypted() -> bytes:
    metadata = MessageMetadata(producer_name="p", sequence_id=0, publish_time=1)
    metadata.encryption_keys.add(key="k", value=b"v")
    head = metadata.SerializeToString()
    return len(head).to_bytes(4, "big") + head + b"secret"


LIMIT = {"max_redeliver": 2}


@pytest.mark.parametrize("kind", ["shared", "key_shared"])
async def test_one_poisonous_message_of_a_hundred_is_dead_lettered_alone(kind, broker):
    await broker.produce_batch(*map(str, range(50)))
    await broker.produce(*map(str, range(50, 100)))
    poison, done = "57", set[str]()
    for _ in range(400):
        messages = await broker.receive(type=kind, dead_letter=LIMIT, ack_timeout_ms=1_000)
        if not messages:
            break
        if poison in payloads(messages):
            broker.clock.advance(2)  # the consumer has died; its leases expire
            continue
        done |= set(payloads(messages))
        await broker.ack(ids(messages))
    assert done == set(map(str, range(100))) - {poison}
    (letter,) = await broker.receive(topic=DLQ, sub="dead-letters")
    assert letter["payload"] == poison
    assert "RECONSUMETIMES" not in letter["properties"]
    assert (await broker.client.get(TOPIC)).json()["subscriptions"]["s"]["backlog_entries"] == 0


async def test_counts_up_to_the_limit_are_delivered(broker):
    await broker.produce("a")
    counts = []
    for _ in range(4):
        messages = await broker.receive(dead_letter=LIMIT)
        counts += [message["redelivery_count"] for message in messages]
        if messages:
            await broker.post(f"{TOPIC}/subscriptions/s/nack", {"message_ids": ids(messages)})
    assert counts == [0, 1, 2]
    assert payloads(await broker.receive(topic=DLQ, sub="dead-letters")) == ["a"]


async def test_a_dead_letter_does_not_end_a_call_that_can_get_other_messages(broker):
    await broker.produce("a")
    (first,) = await broker.receive(dead_letter={"max_redeliver": 0, "topic": "letters", "initial_subscription": "x"})
    await broker.post(f"{TOPIC}/subscriptions/s/nack", {"message_ids": ids([first])})
    await broker.produce("b")
    policy = {"max_redeliver": 0, "topic": "letters", "initial_subscription": "x"}
    assert payloads(await broker.receive(dead_letter=policy)) == ["b"]
    assert payloads(await broker.receive(topic="/v1/topics/public/default/letters", sub="x")) == ["a"]


async def test_a_dead_letter_does_not_block_its_key(broker):
    await _produce_lines(broker, {"payload": "a", "key": "k"})
    await _produce_lines(broker, {"payload": "b", "key": "k"})
    policy = {"max_redeliver": 0}
    (first,) = await broker.receive(type="key_shared", dead_letter=policy)
    assert first["payload"] == "a"
    await broker.post(f"{TOPIC}/subscriptions/s/nack", {"message_ids": ids([first])})
    assert payloads(await broker.receive(type="key_shared", dead_letter=policy)) == ["b"]
    assert payloads(await broker.receive(topic=DLQ, sub="dead-letters")) == ["a"]


async def test_dead_letters_need_a_type_without_order_and_another_topic(broker):
    for fields in (
        {"type": "exclusive", "dead_letter": {}},
        {"type": "failover", "dead_letter": {}},
        {"dead_letter": {"topic": "t"}},
        {"dead_letter": {"topic": "t-s-RETRY"}},
        {"dead_letter": {"max_redeliver": -1}},
        {"dead_letter": {"initial_subscription": ""}},
    ):
        problem(await broker.receive_raw(**fields), status=400, code="bad_request")


async def test_the_answer_to_a_repeated_request_has_no_dead_letters(broker):
    await broker.produce("a", "b")
    policy = {"max_redeliver": 1}
    messages = await broker.receive(dead_letter=policy)
    for _ in range(2):
        await broker.post(f"{TOPIC}/subscriptions/s/nack", {"message_ids": ids(messages)[:1]})
        messages = await broker.receive(dead_letter=policy, request_id="r") or messages
    broker.clock.advance(100)
    assert payloads(await broker.receive(dead_letter=policy, request_id="r2")) == ["b"]
    assert payloads(await broker.receive(topic=DLQ, sub="dead-letters")) == ["a"]
