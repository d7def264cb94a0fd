"""Produce to and consume from a partitioned topic whose partitions belong to two brokers."""

import asyncio
import json
from collections import Counter

import pytest
from bindery_broker.http.peers import retries
from bindery_broker.ownership.bundles import Bundle
from bindery_broker.partitioned.routing import partition_of
from bindery_pulsar.topic_name import TopicName
from broker_harness import TOPIC, ids, payloads, problem, settle

PARTITIONS = 6
NAME = TopicName.parse("public/default/t")
SUB = f"{TOPIC}/subscriptions/s"
LONG_MS = 3_600_000
NDJSON = {"content-type": "application/x-ndjson"}


@pytest.fixture
async def brokers(pair, monkeypatch):
    """Two brokers that own partitions of the topic each."""
    monkeypatch.setattr(retries, "QUIET_S", 0.0)
    one, two = pair
    for k in range(PARTITIONS):
        bundle = Bundle.of(NAME.with_partition(k))
        await (one, two)[bundle.lower // 2**30 % 2].broker.ownership.locate(bundle)
    assert (await one.client.put(f"{TOPIC}/partitions", json={"partitions": PARTITIONS})).status_code == 201
    assert 0 < len(two.broker.topics) < PARTITIONS
    return pair


def owned_by(broker) -> list[int]:
    return sorted(topic.partition for topic in broker.broker.topics if topic.partition >= 0)


def partition(message_id: str) -> int:
    return int(message_id.split(":")[2])


async def send(broker, messages, *, status=200, **query):
    lines = "\n".join(map(json.dumps, messages))
    answer = await broker.client.post(f"{TOPIC}/messages", content=lines, headers=NDJSON, params=query)
    assert answer.status_code == status, answer.text
    return answer.json()


async def drain(broker, consumer="c1", **fields):
    got = []
    while some := await broker.receive(consumer, ack_timeout_ms=LONG_MS, **fields):
        got += some
    return got


async def test_a_key_has_its_partition_whichever_broker_gets_the_message(brokers):
    messages = [{"payload": str(number), "key": f"k{number}"} for number in range(40)]
    for broker in brokers:
        sent = (await send(broker, messages))["message_ids"]
        assert [partition(one) for one in sent] == [partition_of(one["key"], PARTITIONS) for one in messages]
    assert len(set(map(partition, sent))) == PARTITIONS
    (raw,) = await brokers[0].produce("x", params={"key": "k7"})
    assert partition(raw) == partition_of("k7", PARTITIONS)


async def test_json_arrays_and_single_objects_are_routed_too(brokers):
    body = json.dumps([{"payload": "a", "key": "k1"}, {"payload_json": {"b": [1]}, "key": "k2"}], indent=2)
    answer = await brokers[1].client.post(
        f"{TOPIC}/messages", content=body, headers={"content-type": "application/json"}
    )
    found = [partition(one) for one in answer.json()["message_ids"]]
    assert found == [partition_of("k1", PARTITIONS), partition_of("k2", PARTITIONS)]
    assert sorted(payloads(await drain(brokers[0]))) == ["a", '{\n      "b": [\n        1\n      ]\n    }']


async def test_requests_without_keys_take_turns_and_stay_whole(brokers):
    one, _ = brokers
    found = []
    for _ in range(PARTITIONS):
        sent = (await send(one, [{"payload": "a"}, {"payload": "b"}]))["message_ids"]
        assert len(set(map(partition, sent))) == 1
        found.append(partition(sent[0]))
    assert sorted(found) == list(range(PARTITIONS))


async def test_a_request_that_may_be_repeated_keeps_its_partition(brokers):
    headers = {"idempotency-key": "once"}
    sent = [await broker.produce("a", headers=headers) for broker in brokers for _ in range(5)]
    assert {partition(one) for (one,) in sent} == {partition_of("once", PARTITIONS)}


@pytest.mark.parametrize("keys", [False, True])
async def test_messages_with_sequence_ids_are_stored_once_whatever_the_requests(brokers, keys):
    """A producer repeats its messages at another broker and in other requests than before."""
    one, two = brokers
    messages = [{"payload": str(n)} | ({"key": f"k{n % 10}"} if keys else {}) for n in range(500)]
    sent = []
    for first in range(0, 500, 100):
        answer = await send(one, messages[first : first + 100], producer="p", sequence_id=first)
        sent += answer["message_ids"]
    assert len(set(map(partition, sent))) > 2
    for first, last in ((0, 250), (130, 131), (250, 500)):
        await send(two, messages[first:last], producer="p", sequence_id=first)
    own_ids = [message | {"sequence_id": number} for number, message in enumerate(messages)]
    await send(two, own_ids[77:303], producer="p")
    assert (await send(two, [{"payload": "500", "key": "k0"}], producer="p", sequence_id=500))["message_ids"]
    got = await drain(one, max=1000)
    assert Counter(payloads(got)) == Counter(str(n) for n in range(501))


async def test_nothing_is_written_if_a_message_is_invalid(brokers):
    await send(brokers[0], [{"payload": "a", "key": "k1"}, {"payload": "b", "key": "k2", "wrong": 1}], status=400)
    assert await drain(brokers[0]) == []


async def test_a_part_that_fails_is_reported_for_each_of_its_messages(brokers):
    one, _two = brokers
    one.peers.clear()
    messages = [{"payload": str(number), "key": f"k{number}"} for number in range(40)]
    results = (await send(one, messages, status=207))["results"]
    mine = set(owned_by(one))
    for message, result in zip(messages, results, strict=True):
        if partition_of(message["key"], PARTITIONS) in mine:
            assert "message_id" in result
        else:
            assert result["error"]["code"] == "try_again"
            assert result["error"]["status"] == 503
    lost = next(one for one in messages if partition_of(one["key"], PARTITIONS) not in mine)
    await send(one, [lost], status=503)


@pytest.mark.parametrize("kind", ["shared", "key_shared", "exclusive", "failover"])
async def test_one_call_receives_from_all_partitions_and_keeps_the_order_of_keys(brokers, kind):
    one, two = brokers
    for number in range(60):
        await send(brokers[number % 2], [{"payload": f"{number}", "key": f"k{number % 11}"}])
    got = await drain(two, type=kind)
    assert sorted(map(int, payloads(got))) == list(range(60))
    for key in {message["key"] for message in got}:
        numbers = [int(message["payload"]) for message in got if message["key"] == key]
        assert numbers == sorted(numbers)
    assert (await two.ack(ids(got))).json() == {"acknowledged": 60}
    await two.client.delete(f"{SUB}/consumers/c1")
    assert await drain(one, type=kind) == []


async def test_a_call_divides_its_messages_among_the_partitions(brokers):
    one, _ = brokers
    for number in range(PARTITIONS * 20):
        await one.produce(str(number))
    got = await one.receive(max=PARTITIONS * 2)
    assert len(got) == PARTITIONS * 2
    assert set(Counter(map(partition, ids(got))).values()) == {2}


async def test_a_call_fills_its_answer_from_one_partition_if_the_others_are_empty(brokers):
    one, _ = brokers
    await send(one, [{"payload": str(number), "key": "k"} for number in range(50)])
    got = await one.receive(max=20)
    assert 10 <= len(got) <= 20
    assert payloads(got) == [str(number) for number in range(len(got))]


async def test_a_call_for_one_message_gets_one_from_each_partition_in_turn(brokers):
    one, _ = brokers
    for number in range(PARTITIONS * 3):
        await one.produce(str(number))
    got = [(await one.receive(max=1))[0] for _ in range(PARTITIONS * 3)]
    assert set(Counter(map(partition, ids(got))).values()) == {3}


@pytest.mark.parametrize("receiver", [0, 1])
async def test_a_waiting_call_gets_the_next_message_of_any_partition(brokers, receiver):
    broker = brokers[receiver]
    for k in range(PARTITIONS):
        waiting = asyncio.create_task(broker.receive(wait_ms=20_000, ack_timeout_ms=LONG_MS))
        await settle()
        key = next(key for number in range(1_000) if partition_of(key := f"k{number}", PARTITIONS) == k)
        await send(brokers[k % 2], [{"payload": str(k), "key": key}])
        (found,) = await waiting
        assert (found["payload"], found["redelivery_count"], partition(found["message_id"])) == (str(k), 0, k)
        assert (await broker.ack(ids([found]))).status_code == 200


async def test_messages_that_a_race_leaves_over_come_again_without_a_redelivery(brokers):
    one, two = brokers
    keys = [next(key for n in range(1_000) if partition_of(key := f"k{n}", PARTITIONS) == k) for k in range(PARTITIONS)]
    for round_number in range(10):
        waiting = asyncio.create_task(one.receive(wait_ms=20_000, max=1, ack_timeout_ms=LONG_MS))
        await settle()
        await asyncio.gather(
            *(send(brokers[k % 2], [{"payload": f"{round_number}-{k}", "key": keys[k]}]) for k in range(PARTITIONS))
        )
        got = await waiting
        await settle()
        while len(got) < PARTITIONS:
            got += await one.receive(max=1, wait_ms=5_000, ack_timeout_ms=LONG_MS)
        assert sorted(payloads(got)) == [f"{round_number}-{k}" for k in range(PARTITIONS)]
        assert {message["redelivery_count"] for message in got} == {0}
        await one.ack(ids(got))
    assert one.broker.topics.responses.used == two.broker.topics.responses.used == 0


async def test_a_client_that_goes_away_gets_no_lease(brokers):
    one, two = brokers
    await one.client.put(SUB, json={})
    waiting = asyncio.create_task(one.receive(wait_ms=20_000, ack_timeout_ms=LONG_MS))
    await settle()
    waiting.cancel()
    await settle()
    await send(two, [{"payload": str(number), "key": f"k{number}"} for number in range(20)])
    got = await drain(two, "other")
    assert len(got) == 20
    assert {message["redelivery_count"] for message in got} == {0}


async def test_a_waiting_call_uses_partitions_that_are_added(brokers):
    one, two = brokers
    waiting = asyncio.create_task(one.receive(wait_ms=30_000, ack_timeout_ms=LONG_MS))
    await settle()
    assert (await two.client.put(f"{TOPIC}/partitions", json={"partitions": PARTITIONS + 3})).status_code == 200
    await settle()
    key = next(key for n in range(1_000) if partition_of(key := f"k{n}", PARTITIONS + 3) == PARTITIONS + 2)
    for broker in (one, two):
        (sent,) = (await send(broker, [{"payload": "new", "key": key}]))["message_ids"]
        assert partition(sent) == PARTITIONS + 2
    assert payloads(await waiting)[0] == "new"


async def test_messages_are_returned_and_retried_at_their_partitions(brokers):
    one, two = brokers
    await send(one, [{"payload": str(number), "key": f"k{number}"} for number in range(12)])
    got = await drain(two)
    answer = await one.post(f"{SUB}/nack", {"message_ids": ids(got), "delay_ms": 0})
    assert sorted(answer.json()["returned"]) == sorted(ids(got))
    again = await drain(one, "c2")
    assert {message["redelivery_count"] for message in again} == {1}
    moved = (await two.post(f"{SUB}/retry", {"message_ids": ids(again), "delay_ms": 0})).json()
    assert [one["message_id"] for one in moved["moved"]] == ids(again)
    retried = await drain(two, "c3")
    assert sorted(payloads(retried)) == sorted(payloads(got))
    assert {message["properties"]["RECONSUMETIMES"] for message in retried} == {"1"}
    assert {partition(message["message_id"]) for message in retried} == {-1}
    assert (await one.ack(ids(retried))).json() == {"acknowledged": 12}
    assert await drain(one, "c4") == []


async def test_a_waiting_call_sees_the_retry_topic_appear(brokers):
    one, _two = brokers
    await send(one, [{"payload": "a", "key": "k1"}])
    (message,) = await drain(one)
    waiting = asyncio.create_task(one.receive("c2", wait_ms=20_000))
    await settle()
    answer = await one.post(f"{SUB}/retry", {"message_ids": [message["message_id"]], "delay_ms": 0})
    assert answer.status_code == 200
    assert payloads(await waiting) == ["a"]


async def test_ids_that_name_no_partition_are_refused_before_anything_is_done(brokers):
    one, _ = brokers
    await send(one, [{"payload": "a", "key": "k1"}])
    (message,) = await drain(one)
    for wrong in ("0:0:6:-1", "0:0:-1:-1"):
        problem(await one.ack([message["message_id"], wrong]), status=400, code="unknown_messages")
    await one.client.delete(f"{SUB}/consumers/c1")
    assert payloads(await drain(one)) == ["a"]


async def test_cumulative_acknowledgements_and_seeks_by_id_are_those_of_a_partition(brokers):
    one, two = brokers
    sent = (await send(one, [{"payload": str(n), "key": f"k{n % 7}"} for n in range(28)], batch="false"))["message_ids"]
    got = await drain(two, type="exclusive")
    k = partition(sent[0])
    mine = [message_id for message_id in ids(got) if partition(message_id) == k]
    answer = await one.post(f"{SUB}/ack", {"cumulative": mine[-1]})
    assert answer.status_code == 200, answer.text
    await one.client.delete(f"{SUB}/consumers/c1")
    rest = await drain(one, type="exclusive")
    assert len(rest) == 28 - len(mine)
    await one.ack(ids(rest))
    assert (await two.post(f"{SUB}/seek", {"message_id": mine[1]})).json() == {"next": mine[1].rpartition(f":{k}:")[0]}
    assert ids(await drain(one, type="exclusive")) == mine[1:]
    problem(await one.post(f"{SUB}/ack", {"cumulative": "0:0:-1:-1"}), status=400, code="bad_request")
    problem(await one.post(f"{SUB}/seek", {"message_id": "0:0:17:-1"}), status=400, code="bad_request")


async def test_seeking_by_time_moves_the_subscription_in_all_partitions(brokers):
    one, two = brokers
    await send(one, [{"payload": f"old{n}", "key": f"k{n}"} for n in range(20)])
    one.clock.advance(60)
    await send(one, [{"payload": f"new{n}", "key": f"k{n}"} for n in range(20)])
    await one.ack(ids(await drain(two)))
    found = (await two.post(f"{SUB}/seek", {"timestamp": one.clock.now_ms()})).json()
    assert found["next"] is None
    assert sorted(map(int, found["partitions"])) == list(range(PARTITIONS))
    assert all(payload.startswith("new") for payload in payloads(await drain(one)))
    await one.post(f"{SUB}/seek", {"message_id": "earliest"})
    assert len(await drain(one, "c2")) == 40
    await one.post(f"{SUB}/clear", {})
    await one.client.delete(f"{SUB}/consumers/c2")
    assert await drain(one) == []


async def test_an_exclusive_consumer_has_all_partitions_or_none(brokers):
    one, two = brokers
    await one.receive("first", type="exclusive")
    for broker in brokers:
        problem(await broker.receive_raw("second", type="exclusive"), status=409, code="consumer_busy")
    await two.client.delete(f"{SUB}/consumers/first")
    await two.receive("second", type="exclusive")


async def test_failover_consumers_share_the_partitions(brokers):
    one, two = brokers
    for broker, consumer in ((one, "a"), (two, "b"), (one, "c")):
        await broker.receive(consumer, type="failover", session_ttl_ms=LONG_MS)
    await send(one, [{"payload": str(n), "key": f"k{n}"} for n in range(60)])
    one.clock.advance(5)
    found = {consumer: set(map(partition, ids(await drain(two, consumer, type="failover")))) for consumer in "abc"}
    assert found == {"a": {0, 3}, "b": {1, 4}, "c": {2, 5}}


async def test_a_request_id_repeats_the_messages_of_all_partitions(brokers):
    one, two = brokers
    await send(one, [{"payload": str(n), "key": f"k{n}"} for n in range(30)])
    got = await one.receive(request_id="r1", ack_timeout_ms=LONG_MS)
    assert sorted(ids(await two.receive(request_id="r1", ack_timeout_ms=LONG_MS))) == sorted(ids(got))
    assert len(got) == 30


async def test_the_owner_of_partitions_is_killed_while_a_call_waits(brokers):
    one, two = brokers
    theirs = owned_by(two)
    await one.client.put(SUB, json={})
    waiting = asyncio.create_task(one.receive(wait_ms=30_000, ack_timeout_ms=LONG_MS))
    await settle()
    del one.peers["two"]
    await two.die()
    one.tree.expire(two.store)
    await settle()
    key = next(key for n in range(1_000) if partition_of(key := f"k{n}", PARTITIONS) == theirs[0])
    await send(one, [{"payload": "after", "key": key}])
    assert payloads(await waiting) == ["after"]


async def test_messages_of_a_broker_that_does_not_answer_do_not_keep_the_others_back(brokers):
    one, _two = brokers
    await one.client.put(SUB, json={})
    await send(one, [{"payload": str(n), "key": f"k{n}"} for n in range(40)])
    one.peers.clear()
    got = await one.receive()
    assert got
    assert set(map(partition, ids(got))) <= set(owned_by(one))
    await one.ack(ids(got))
    while got := await _receive_or_none(one):
        await one.ack(ids(got))
    problem(await one.receive_raw(), status=503, code="try_again")


async def _receive_or_none(broker):
    answer = await broker.receive_raw()
    return answer.json()["messages"] if answer.status_code == 200 else []


async def test_reading_needs_a_partition(brokers):
    one, two = brokers
    (sent,) = await one.produce("a", params={"key": "k1"})
    k = partition(sent)
    problem(await one.client.get(f"{TOPIC}/messages"), status=409, code="topic_is_partitioned")
    for broker in brokers:
        found = (await broker.client.get(f"{TOPIC}/messages", params={"partition": k})).json()
        assert payloads(found["messages"]) == ["a"]
        assert (await broker.client.get(f"{TOPIC}/messages/{sent}")).json()["message"]["payload"] == "a"
    following = await two.client.get(f"{TOPIC}/messages", params={"start": found["next"]})
    assert following.json()["messages"] == []
    problem(await one.client.get(f"{TOPIC}/messages?partition=6"), status=400, code="bad_request")
    problem(await one.client.get(f"{TOPIC}/messages/0:0"), status=400, code="bad_request")


async def test_statistics_are_sums_with_those_of_the_partitions(brokers):
    one, two = brokers
    await one.client.put(SUB, json={})
    await send(one, [{"payload": str(n), "key": f"k{n}"} for n in range(40)], batch="false")
    found = (await two.client.get(TOPIC)).json()
    assert (found["topic"], found["entries"], found["messages_in"]) == ("public/default/t", 40, 40)
    assert sorted(found["partitions"]) == [str(k) for k in range(PARTITIONS)]
    assert sum(one["entries"] for one in found["partitions"].values()) == 40
    assert found["subscriptions"]["s"]["backlog_entries"] == 40
    assert "owner" not in found
    (listed,) = (await one.client.get(f"{TOPIC}/subscriptions")).json()["subscriptions"]
    assert (listed["subscription"], listed["backlog_entries"], listed["consumers"]) == ("s", 40, [])
    got = await one.receive("c", max=10, ack_timeout_ms=LONG_MS)
    explained = (await two.client.get(f"{SUB}/explain")).json()
    assert explained["subscription"]["unacked"] == len(got) == 10
    (consumer,) = explained["subscription"]["consumers"]
    assert (consumer["consumer"], consumer["unacked"]) == ("c", 10)
    reason = (await two.client.get(f"{SUB}/explain", params={"message_id": ids(got)[0]})).json()["message"]
    assert (reason["code"], reason["consumer"]) == ("leased", "c")
    internal = (await one.client.get(f"{TOPIC}/internal")).json()
    assert internal["metadata"] == {"partitions": PARTITIONS}
    assert f"persistent://public/default/t-partition-{PARTITIONS - 1}" in internal["partitions"]
    retention = (await one.client.get(f"{TOPIC}/retention")).json()
    assert (retention["topic"], retention["is_policy"]) == ("public/default/t", False)
    assert {ledger["partition"] for ledger in retention["ledgers"]} == set(range(PARTITIONS))
    assert sum(ledger["code"] == "open" for ledger in retention["ledgers"]) == PARTITIONS


async def test_a_subscription_is_deleted_in_all_partitions(brokers):
    one, two = brokers
    assert (await one.client.put(SUB, json={})).status_code == 201
    assert (await two.client.put(SUB, json={})).json()["created"] is False
    await one.receive()
    problem(await two.client.delete(SUB), status=409, code="conflict")
    await one.client.delete(f"{SUB}/consumers/c1")
    assert (await two.client.delete(SUB)).json() == {"deleted": "s"}
    assert (await one.client.get(f"{TOPIC}/subscriptions")).json() == {"subscriptions": []}
    problem(await one.client.delete(SUB), status=404, code="no_such_subscription")
    answer = await one.post(f"{TOPIC}/subscriptions/gone/receive?create=false", {"consumer": "c", "wait_ms": 0})
    problem(answer, status=404, code="no_such_subscription")


async def test_operations_of_a_single_partition_say_so(brokers):
    one, _ = brokers
    await one.client.put(SUB, json={})
    body = problem(await one.post(f"{SUB}/skip", {"entries": 1}), status=409, code="topic_is_partitioned")
    assert "t-partition-0" in body["detail"]
    problem(await one.receive_raw(durable=False), status=400, code="not_supported")


async def test_a_stream_delivers_from_all_partitions(broker):
    assert (await broker.client.put(f"{TOPIC}/partitions", json={"partitions": PARTITIONS})).status_code == 201
    problem(await broker.client.get(f"{SUB}/stream?consumer=c"), status=404, code="no_such_subscription")
    await broker.client.put(SUB, json={})
    found = set()
    async with broker.serve(), broker.client.stream("GET", f"{SUB}/stream?consumer=c", timeout=60) as answer:
        assert answer.status_code == 200
        lines = answer.aiter_lines()
        for number in range(PARTITIONS):
            await broker.produce(f"p{number}")
            async for line in lines:
                if line.startswith("data: "):
                    found.add(json.loads(line.removeprefix("data: "))["payload"])
                    break
    assert found == {f"p{number}" for number in range(PARTITIONS)}


async def test_a_request_that_is_repeated_at_another_broker_stores_nothing_twice(brokers):
    _, two = brokers
    messages = [{"payload": str(n), "key": f"k{n}"} for n in range(30)] + [{"payload": "no key"}]
    lines = "\n".join(map(json.dumps, messages))
    headers = {**NDJSON, "idempotency-key": "once"}
    first, again = [
        (await broker.client.post(f"{TOPIC}/messages", content=lines, headers=headers)).json() for broker in brokers
    ]
    assert first == again
    assert len(first["message_ids"]) == 31
    assert sorted(payloads(await drain(two))) == sorted(message["payload"] for message in messages)
