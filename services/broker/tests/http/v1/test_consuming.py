"""Subscriptions over HTTP: receive, acknowledge, return, and their errors."""

import asyncio
import json

import pytest
from bindery_core.errors import MetadataUnavailable
from bindery_pulsar.message_id import MessageId
from broker_harness import TOPIC, Harness, ids, payloads, problem

SUB = f"{TOPIC}/subscriptions/s"


async def test_messages_are_leased_acknowledged_and_gone(broker):
    await broker.produce("a", "b")
    messages = await broker.receive()
    assert payloads(messages) == ["a", "b"]
    assert all(message["lease"] for message in messages)
    assert (await broker.ack(ids(messages))).json() == {"acknowledged": 2}
    assert await broker.receive() == []
    stats = (await broker.client.get(TOPIC)).json()
    assert stats["subscriptions"]["s"]["backlog_entries"] == 0


async def test_shared_consumers_get_different_messages(broker):
    await broker.produce("a", "b", "c")
    first = await broker.receive("c1", max=2)
    second = await broker.receive("c2")
    assert (payloads(first), payloads(second)) == (["a", "b"], ["c"])


async def test_messages_of_one_batch_can_go_to_different_consumers_and_are_acknowledged_singly(broker):
    batch = await broker.produce_batch("a", "b", "c")
    first = await broker.receive("c1", max=1)
    second = await broker.receive("c2", max=1)
    assert ids(first + second) == batch[:2]
    await broker.ack(batch[:1])
    broker.clock.advance(31)
    again = await broker.receive("c1")
    assert sorted(payloads(again)) == ["b", "c"]


async def test_an_acknowledgement_is_whole_though_the_first_consumer_comes_while_its_batches_are_looked_up(
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


async def test_max_bytes_bounds_an_answer_but_not_below_one_message(broker):
    await broker.produce("x" * 500, "y" * 500)
    assert len(await broker.receive(max_bytes=1)) == 1


async def test_latest_begins_behind_what_is_there(broker):
    await broker.produce("old")
    assert await broker.receive(initial="latest") == []
    await broker.produce("new")
    assert payloads(await broker.receive()) == ["new"]


async def test_receiving_makes_topic_and_subscription(broker):
    assert await broker.receive() == []
    assert (await broker.client.get("/v1/topics")).json() == {"topics": ["public/default/t"]}
    listed = (await broker.client.get(f"{TOPIC}/subscriptions")).json()["subscriptions"]
    assert [row["subscription"] for row in listed] == ["s"]


async def test_a_waiting_call_gets_the_next_message(broker):
    await broker.receive()
    task = asyncio.create_task(broker.receive(wait_ms=30_000))
    await settle()
    assert not task.done()
    await broker.produce("now")
    async with asyncio.timeout(30):
        assert payloads(await task) == ["now"]


async def test_a_waiting_call_ends_empty_in_time(broker, monkeypatch):
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(broker.broker.topics, "_now", loop.time)
    began = loop.time()
    assert await broker.receive(wait_ms=50) == []
    assert 0.04 < loop.time() - began < 5


async def test_each_waiting_consumer_gets_its_share(broker):
    await broker.receive()
    tasks = [asyncio.create_task(broker.receive(f"c{n}", wait_ms=30_000, max=1)) for n in range(3)]
    await settle()
    await broker.produce("a", "b", "c")
    async with asyncio.timeout(30):
        got = await asyncio.gather(*tasks)
    assert sorted(payloads([message for messages in got for message in messages])) == ["a", "b", "c"]


async def test_a_client_that_went_away_is_leased_nothing(broker):
    await broker.receive()
    gone = asyncio.Event()
    body = json.dumps({"consumer": "c1", "wait_ms": 30_000}).encode()
    sent = []

    async def receive_asgi(parts=[{"type": "http.request", "body": body, "more_body": False}]):  # noqa: B006
        if parts:
            return parts.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": f"{SUB}/receive", "raw_path": f"{SUB}/receive".encode(),
             "query_string": b"", "headers": []}  # fmt: skip
    task = asyncio.create_task(broker.app(scope, receive_asgi, send))
    await settle()
    gone.set()
    async with asyncio.timeout(30):
        await task
    await broker.produce("a")
    assert payloads(await broker.receive("c2")) == ["a"]


async def test_ndjson_on_request(broker):
    await broker.produce("a", "b")
    answer = await broker.client.post(
        f"{SUB}/receive", json={"consumer": "c", "wait_ms": 0}, headers={"accept": "application/x-ndjson"}
    )
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line)["payload"] for line in answer.text.splitlines()] == ["a", "b"]


# -- redelivery


async def test_a_lease_that_runs_out_brings_the_message_back_counted(broker):
    await broker.produce("a")
    (first,) = await broker.receive("c1", ack_timeout_ms=1_000)
    broker.clock.advance(0.9)
    assert await broker.receive("c2") == []
    broker.clock.advance(0.2)
    (again,) = await broker.receive("c2")
    assert again["message_id"] == first["message_id"]
    assert (first["redelivery_count"], again["redelivery_count"]) == (0, 1)
    assert again["lease"] != first["lease"]


@pytest.mark.parametrize("kind", ["shared", "exclusive"])
async def test_a_late_acknowledgement_counts_for_what_is_being_read(broker, tree, ledgers, clock, monkeypatch, kind):
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


async def test_a_late_acknowledgement_still_counts(broker):
    (message_id,) = await broker.produce("a")
    await broker.receive("c1", ack_timeout_ms=1_000)
    broker.clock.advance(2)
    await broker.receive("c2")
    assert (await broker.ack([message_id])).status_code == 200
    broker.clock.advance(60)
    assert await broker.receive("c2") == []


async def test_a_returned_message_comes_back_at_once_or_after_its_delay(broker):
    message_ids = await broker.produce("a", "b")
    await broker.receive("c1")
    answer = await broker.post(f"{SUB}/nack", {"message_ids": message_ids[:1]})
    assert answer.json() == {"returned": message_ids[:1]}
    await broker.post(f"{SUB}/nack", {"message_ids": message_ids[1:], "delay_ms": 5_000})
    assert payloads(await broker.receive("c2")) == ["a"]
    broker.clock.advance(5)
    (late,) = await broker.receive("c2")
    assert (late["payload"], late["redelivery_count"]) == ("b", 1)


async def test_only_what_is_held_can_be_returned(broker):
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


async def test_a_consumer_that_leaves_gives_back_what_it_holds(broker):
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


@pytest.mark.parametrize("cumulative", [False, True])
async def test_a_repeated_acknowledgement_of_a_batch_leaves_nothing_behind(broker, cumulative):
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
    assert subscription._reader.batch_sizes == {}


async def test_acknowledgements_survive_the_broker(broker):
    message_ids = await broker.produce("a", "b", "c")
    await broker.receive()
    await broker.ack([message_ids[0], message_ids[2]])
    for topic in broker.broker.topics:
        topic.abandon("as kill -9 would")
    assert payloads(await broker.receive()) == ["b"]


async def test_an_acknowledgement_waits_for_the_cursors_record(broker):
    (message_id,) = await broker.produce("a")
    await broker.receive()
    broker.ledgers.hold_adds()
    task = asyncio.create_task(broker.ack([message_id]))
    await settle()
    assert not task.done()
    broker.clock.advance(60)
    assert await broker.receive() == []  # neither gone nor out again while nobody knows
    broker.ledgers.release_adds()
    async with asyncio.timeout(30):
        assert (await task).status_code == 200


# -- repeated requests


async def test_a_repeated_request_gets_the_same_messages(broker):
    await broker.produce("a", "b", "c")
    first = await broker.receive("c1", max=2, request_id="r1")
    broker.clock.advance(20)
    again = await broker.receive("c1", max=2, request_id="r1")
    assert ids(again) == ids(first)
    broker.clock.advance(20)  # the leases began anew with the repetition
    assert payloads(await broker.receive("c2")) == ["c"]


async def test_a_repetition_leaves_out_what_is_acknowledged_or_anothers(broker):
    message_ids = await broker.produce("a", "b", "c")
    await broker.receive("c1", request_id="r1", ack_timeout_ms=1_000)
    await broker.ack(message_ids[:1])
    broker.clock.advance(2)
    taken = await broker.receive("c2", max=1)
    assert payloads(taken) == ["b"]
    again = await broker.receive("c1", request_id="r1")
    assert ids(again) == message_ids[2:]


async def test_a_repetition_of_a_call_under_way_waits_for_it(broker):
    await broker.receive()
    tasks = [asyncio.create_task(broker.receive("c1", wait_ms=30_000, request_id="r1")) for _ in range(2)]
    await settle()
    await broker.produce("a", "b")
    async with asyncio.timeout(30):
        one, two = await asyncio.gather(*tasks)
    assert ids(one) == ids(two)
    assert one


# -- exclusive


async def test_exclusive_is_one_consumers_and_names_it(broker):
    await broker.produce("a")
    await broker.receive("c1", type="exclusive")
    refused = await broker.receive_raw("c2", type="exclusive")
    assert problem(refused, status=409, code="consumer_busy")["facts"]["consumer"] == "c1"
    assert (await broker.receive_raw("c1", type="exclusive")).status_code == 200


async def test_exclusive_passes_on_when_the_session_is_over(broker):
    await broker.produce("a", "b")
    await broker.receive("c1", type="exclusive", max=1, session_ttl_ms=5_000, ack_timeout_ms=1_000)
    broker.clock.advance(4.9)
    problem(await broker.receive_raw("c2", type="exclusive"), status=409, code="consumer_busy")
    broker.clock.advance(0.1)
    assert payloads(await broker.receive("c2", type="exclusive")) == ["a", "b"]


async def test_exclusive_keeps_the_order_after_a_return(broker):
    message_ids = await broker.produce("a", "b", "c", "d")
    await broker.receive(type="exclusive", max=3)
    await broker.ack(message_ids[1:2])
    await broker.post(f"{SUB}/nack", {"message_ids": message_ids[2:3]})
    again = await broker.receive(type="exclusive")
    assert payloads(again) == ["a", "c", "d"]
    assert [message["redelivery_count"] for message in again] == [0, 1, 0]


async def test_exclusive_begins_at_the_lowest_unacknowledged_after_a_timeout(broker):
    message_ids = await broker.produce("a", "b", "c")
    await broker.receive(type="exclusive", max=2, ack_timeout_ms=1_000)
    await broker.ack(message_ids[:1])
    broker.clock.advance(1)
    assert payloads(await broker.receive(type="exclusive")) == ["b", "c"]


async def test_a_consumer_that_begins_anew_gets_what_it_held(broker):
    await broker.produce("a", "b")
    await broker.receive(type="exclusive")
    assert await broker.receive(type="exclusive") == []
    assert payloads(await broker.receive(type="exclusive", redeliver=True)) == ["a", "b"]


async def test_cumulative_acknowledgement_needs_exclusive(broker):
    message_ids = await broker.produce("a", "b", "c")
    await broker.receive(type="exclusive", max=2)
    answer = await broker.post(f"{SUB}/ack", {"cumulative": message_ids[1]})
    assert answer.status_code == 200
    assert payloads(await broker.receive(type="exclusive", redeliver=True)) == ["c"]
    await broker.receive(sub="shared")
    answer = await broker.post(f"{TOPIC}/subscriptions/shared/ack", {"cumulative": message_ids[1]})
    problem(answer, status=400, code="bad_request")


async def test_cumulative_acknowledgement_can_point_into_a_batch(broker):
    batch = await broker.produce_batch("a", "b", "c")
    await broker.receive(type="exclusive")
    await broker.post(f"{SUB}/ack", {"cumulative": batch[1]})
    assert payloads(await broker.receive(type="exclusive", redeliver=True)) == ["c"]


async def test_the_type_changes_only_while_nobody_is_connected(broker):
    await broker.produce("a")
    await broker.receive("c1", type="shared", ack_timeout_ms=1_000)
    problem(await broker.receive_raw("c2", type="exclusive"), status=409, code="subscription_type_conflict")
    broker.clock.advance(60)
    assert payloads(await broker.receive("c2", type="exclusive")) == ["a"]


@pytest.mark.parametrize("kind", ["failover", "key_shared"])
async def test_types_to_come_are_refused_clearly(broker, kind):
    answer = await broker.receive_raw(type=kind)
    assert kind in problem(answer, status=400, code="not_supported")["detail"]
    assert (await broker.client.get("/v1/topics")).json() == {"topics": []}


# -- tags


async def test_a_subscription_with_tags_gets_those_and_the_untagged(broker):
    lines = [{"payload": "1", "tags": "a"}, {"payload": "2", "tags": "b"}, {"payload": "3"},
             {"payload": "4", "tags": "c||b"}]  # fmt: skip
    await broker.client.post(f"{TOPIC}/messages", json=lines)
    got = await broker.receive(tags="b||x")
    assert payloads(got) == ["2", "3", "4"]
    await broker.ack(ids(got))
    explained = (await broker.client.get(f"{SUB}/explain")).json()
    assert explained["subscription"]["tags"] == "b||x"
    assert explained["subscription"]["backlog_entries"] == 0  # what was filtered counts as consumed
    problem(await broker.receive_raw(tags="a"), status=409, code="conflict")


async def test_tags_filter_inside_foreign_batches_too(broker):
    from bindery_pulsar.message_codec import OutgoingMessage, encode_batch

    await broker.receive(tags="b")
    topic = next(iter(broker.broker.topics))
    messages = [OutgoingMessage(payload=tag.encode(), properties={tag: "TAGS"}) for tag in "abab"]
    entry = encode_batch(messages, producer_name="p", publish_time_ms=1, sequence_ids=range(4))
    await topic.ledger.add_many([entry])
    got = await broker.receive()
    assert [message["message_id"] for message in got] == ["0:0:-1:1", "0:0:-1:3"]
    await broker.ack(ids(got))
    assert (await broker.client.get(f"{SUB}/explain")).json()["subscription"]["backlog_entries"] == 0


# -- seek, explain, delete


async def test_seek_to_a_message_a_batch_index_and_the_ends(broker):
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


async def test_seek_to_a_trimmed_batch_goes_to_what_follows_it(broker):
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


@pytest.mark.parametrize("target", ["latest", "earliest", "batch"])
async def test_a_seek_that_was_refused_changes_nothing(broker, tree, ledgers, clock, monkeypatch, target):
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
async def test_an_acknowledgement_that_waits_for_a_seek_is_not_delivered_again(broker, ledgers, kind):
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


async def test_explain_says_who_holds_what_and_what_blocks(tree, ledgers, clock):
    harness = Harness(
        tree=tree, ledgers=ledgers, clock=clock, url="http://one", unacked_max=2, unacked_per_consumer_max=2
    )
    await harness.produce("a", "b", "c")
    await harness.receive("c1")
    clock.advance(3)
    told = (await harness.client.get(f"{SUB}/explain")).json()
    (consumer,) = told["subscription"]["consumers"]
    assert (consumer["consumer"], consumer["unacked"]) == ("c1", 2)
    assert (consumer["oldest_lease_age_ms"], consumer["next_timeout_in_ms"]) == (3_000, 27_000)
    assert told["states"] == {"leased": 2}
    assert any("the limit is 2" in reason for reason in told["blocked_by"])
    assert "blocked" in told["summary"]
    clock.advance(100)
    told = (await harness.client.get(f"{SUB}/explain")).json()
    assert told["blocked_by"][0] == "no consumer is connected"
    await harness.close()


async def test_an_acknowledgement_makes_room_for_a_blocked_consumer(tree, ledgers, clock):
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


async def test_a_subscription_with_consumers_is_deleted_only_by_force(broker):
    await broker.receive()
    problem(await broker.client.delete(SUB), status=409, code="conflict")
    assert (await broker.client.delete(f"{SUB}?force=true")).json() == {"deleted": "s"}
    problem(await broker.client.delete(SUB), status=404, code="no_such_subscription")


async def test_deleting_a_subscription_ends_waiting_calls(broker):
    await broker.receive()
    task = asyncio.create_task(broker.receive_raw(wait_ms=30_000))
    await settle()
    await broker.client.delete(f"{SUB}?force=true")
    async with asyncio.timeout(30):
        problem(await task, status=404, code="no_such_subscription")


async def test_subscribe_without_consuming(broker):
    answer = await broker.client.put(SUB, json={"initial": "latest", "subscription_properties": {"team": "x"}})
    assert (answer.status_code, answer.json()["created"]) == (201, True)
    assert (await broker.client.put(SUB, json={})).status_code == 200
    (listed,) = (await broker.client.get(f"{TOPIC}/subscriptions")).json()["subscriptions"]
    assert (listed["properties"], listed["type"]) == ({"team": "x"}, None)


# -- errors


@pytest.mark.parametrize("path", ["ack", "nack", "seek"])
async def test_unknown_topics_and_subscriptions_are_named(broker, path):
    body = {"message_id": "0:0"} if path == "seek" else {"message_ids": ["0:0"]}
    answer = await broker.post(f"/v1/topics/public/default/none/subscriptions/s/{path}", body)
    problem(answer, status=404, code="no_such_topic")
    await broker.produce("a")
    answer = await broker.post(f"{SUB}/{path}", body)
    problem(answer, status=404, code="no_such_subscription")


@pytest.mark.parametrize("message_id", ["0:99", "77:0", "0:0:3", "0:0:-1:0", "0:1:-1:5"])
async def test_an_id_that_names_no_message_refuses_the_whole_acknowledgement(broker, message_id):
    (first,) = await broker.produce("a")
    await broker.produce_batch("b", "c")
    await broker.receive()
    answer = await broker.ack([first, message_id])
    body = problem(answer, status=400, code="unknown_messages")
    assert len(body["facts"]["message_ids"]) == 1
    broker.clock.advance(31)
    assert len(await broker.receive()) == 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("receive", {}),
        ("receive", {"consumer": ""}),
        ("receive", {"consumer": "c", "max": 0}),
        ("receive", {"consumer": "c", "max": 1_001}),
        ("receive", {"consumer": "c", "wait_ms": -1}),
        ("receive", {"consumer": "c", "wait_ms": 30_001}),
        ("receive", {"consumer": "c", "ack_timeout_ms": 1}),
        ("receive", {"consumer": "c", "type": "many"}),
        ("receive", {"consumer": "c", "initial": "0:0"}),
        ("receive", {"consumer": "c", "tags": "||"}),
        ("receive", {"consumer": "c", "colour": "red"}),
        ("receive", [1]),
        ("ack", {}),
        ("ack", {"message_ids": []}),
        ("ack", {"message_ids": ["x"]}),
        ("ack", {"message_ids": ["-1:0"]}),
        ("ack", {"message_ids": ["99999999999999999999:0"]}),
        ("ack", {"message_ids": ["9999999999999999999:0"]}),
        ("ack", {"message_ids": ["0:0"], "cumulative": "0:0"}),
        ("nack", {"message_ids": ["0:0"], "delay_ms": -1}),
        ("seek", {}),
        ("seek", {"message_id": "0:0", "timestamp": 0}),
        ("seek", {"message_id": "soon"}),
    ],
)
async def test_wrong_bodies_are_refused(broker, path, body):
    await broker.produce("a")
    await broker.receive()
    answer = await broker.post(f"{SUB}/{path}", body)
    problem(answer, status=400, code="bad_request")


@pytest.mark.parametrize("path", ["receive", "ack", "nack", "seek"])
async def test_broken_and_oversized_and_foreign_bodies_are_refused(broker, path):
    await broker.receive()
    json_type = {"content-type": "application/json"}
    answer = await broker.client.post(f"{SUB}/{path}", content=b"{", headers=json_type)
    problem(answer, status=400, code="bad_request")
    answer = await broker.client.post(f"{SUB}/{path}", content=b"[" * 100_000, headers=json_type)
    problem(answer, status=400, code="bad_request")
    answer = await broker.client.post(f"{SUB}/{path}", content=b" " * (2**20 + 1), headers=json_type)
    problem(answer, status=413, code="too_large")
    answer = await broker.client.post(f"{SUB}/{path}", content=b"{}", headers={"content-type": "text/csv"})
    problem(answer, status=415, code="unsupported_media_type")


async def test_an_entry_that_cannot_be_decoded_is_named_and_can_be_passed(broker):
    await broker.produce("a")
    topic = next(iter(broker.broker.topics))
    (bad,) = await topic.ledger.add_many([b"\x0e\x01no message"])
    await broker.produce("c")
    assert payloads(await broker.receive()) == ["a"]
    answer = await broker.receive_raw()
    body = problem(answer, status=500, code="corrupt_message")
    assert body["facts"]["message_id"] == f"{bad}:-1:-1"
    explained = (await broker.client.get(f"{SUB}/explain")).json()
    assert f"{bad}:-1:-1" in explained["blocked_by"][0]
    assert (await broker.ack([f"{bad}"])).status_code == 200
    assert payloads(await broker.receive()) == ["c"]


# -- the stream


async def test_the_stream_sends_messages_as_events(broker):
    await broker.produce("a")
    parts = asyncio.Queue()
    gone = asyncio.Event()

    async def receive_asgi(first=[True]):  # noqa: B006
        if first:
            first.clear()
            return {"type": "http.request", "body": b"", "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    path = f"{SUB}/stream"
    scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(),
             "query_string": b"consumer=c1", "headers": []}  # fmt: skip
    task = asyncio.create_task(broker.app(scope, receive_asgi, parts.put))
    async with asyncio.timeout(30):
        start = await parts.get()
        assert (b"content-type", b"text/event-stream") in start["headers"]
        assert (await parts.get())["body"].startswith(b":")
        event = (await parts.get())["body"].decode()
        assert event.startswith("event: message\nid: 0:0:-1:-1\ndata: ")
        assert json.loads(event.splitlines()[2].removeprefix("data: "))["payload"] == "a"
        await broker.produce("b")
        assert b'"payload":"b"' in (await parts.get())["body"]
        gone.set()
        await task
    explained = (await broker.client.get(f"{SUB}/explain")).json()
    assert explained["subscription"]["consumers"][0]["unacked"] == 2


async def settle() -> None:
    """Let every task run until it waits for something outside."""
    for _ in range(100):
        await asyncio.sleep(0)
