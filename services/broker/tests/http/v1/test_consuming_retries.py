"""Consuming a subscription that has a retry topic: its calls cover both topics."""

import asyncio
import json

import httpx
import pytest
from bindery_broker.http.peers import retries as remote_retries
from broker_harness import TOPIC, Harness, ids, payloads, problem, settle

RETRY = f"{TOPIC}-s-RETRY"
SUB = f"{TOPIC}/subscriptions/s"


async def make_retry_topic(broker) -> None:
    answer = await broker.client.put(f"{RETRY}/subscriptions/s", json={})
    assert answer.status_code == 201, answer.text


async def subscription_of(broker):
    (subscription,) = (await broker.client.get(f"{TOPIC}/subscriptions")).json()["subscriptions"]
    return subscription


@pytest.fixture
async def local(broker):
    """A broker with a subscription that has a retry topic there."""
    await broker.receive()
    await make_retry_topic(broker)
    return broker


@pytest.fixture(params=["local", "remote"])
async def both(request, broker, tree, ledgers, clock, monkeypatch):
    """A broker with a subscription that has a retry topic, there or in another broker."""
    if request.param == "local":
        await broker.receive()
        await make_retry_topic(broker)
        yield broker
        return
    monkeypatch.setattr(remote_retries, "QUIET_S", 0.0)
    other = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://two")
    await make_retry_topic(other)
    broker.peers["two"] = httpx.ASGITransport(app=other.app)
    await broker.receive()
    assert len(other.broker.topics) == len(broker.broker.topics) == 1
    broker.other = other
    yield broker
    await other.close()


@pytest.mark.parametrize("kind", ["shared", "key_shared"])
async def test_what_is_due_in_the_retry_topic_comes_first(both, kind):
    await both.produce("new")
    await both.produce("again", topic=RETRY)
    assert payloads(await both.receive(type=kind)) == ["again", "new"]


@pytest.mark.parametrize("kind", ["exclusive", "failover"])
async def test_other_types_do_not_receive_from_the_retry_topic(both, kind):
    await both.produce("new")
    await both.produce("again", topic=RETRY)
    assert payloads(await both.receive(type=kind)) == ["new"]


async def test_a_delayed_message_of_the_retry_topic_comes_when_it_is_due(both):
    await both.produce("again", topic=RETRY, params={"deliver_after_ms": 1_000})
    await both.produce("new")
    assert payloads(await both.receive()) == ["new"]
    both.clock.advance(1.1)
    assert payloads(await both.receive()) == ["again"]


async def test_both_topics_together_keep_the_limits_of_a_call(both):
    await both.produce("n1", "n2", "n3")
    await both.produce("r1", "r2", topic=RETRY)
    assert payloads(await both.receive(max=3)) == ["r1", "r2", "n1"]
    assert payloads(await both.receive(max=3)) == ["n2", "n3"]
    await both.produce("x" * 1_000)
    await both.produce("y" * 1_000, topic=RETRY)
    assert payloads(await both.receive(max_bytes=1_100)) == ["y" * 1_000]
    (message,) = await both.receive(max_bytes=1_100)
    assert (message["payload"], message["redelivery_count"]) == ("x" * 1_000, 0)


@pytest.mark.parametrize("where", [TOPIC, RETRY])
async def test_a_waiting_call_is_woken_by_either_topic(both, where):
    waiting = asyncio.create_task(both.receive(wait_ms=20_000))
    await settle()
    assert not waiting.done()
    await both.produce("x", topic=where)
    assert payloads(await asyncio.wait_for(waiting, 10)) == ["x"]  # not at the end of the other one's wait


async def test_messages_of_both_topics_at_once_are_delivered_once(both):
    """The two calls end in the same turn of the loop, or one hands back what it got."""
    for number in range(30):
        waiting = asyncio.create_task(both.receive(wait_ms=20_000, max=1))
        await settle()
        await asyncio.gather(both.produce(f"n{number}"), both.produce(f"r{number}", topic=RETRY))
        got = await waiting
        assert len(got) == 1
        got += await both.receive()
        assert sorted(payloads(got)) == [f"n{number}", f"r{number}"]
        assert [message["redelivery_count"] for message in got] == [0, 0]
        await both.ack(ids(got))
    assert await both.receive() == []


async def test_a_waiting_call_receives_from_a_retry_topic_that_is_created_meanwhile(broker):
    await broker.receive()
    waiting = asyncio.create_task(broker.receive(wait_ms=20_000))
    await settle()
    await make_retry_topic(broker)
    await settle()
    await broker.produce("again", topic=RETRY)
    assert payloads(await waiting) == ["again"]


async def test_a_waiting_call_outlasts_the_deletion_of_the_retry_topic_and_sees_the_next_one(local):
    waiting = asyncio.create_task(local.receive(wait_ms=20_000))
    await settle()
    assert (await local.client.delete(RETRY, params={"force": "true"})).status_code == 200
    await settle()
    assert not waiting.done()
    assert (await local.client.put(RETRY)).status_code == 201
    await make_retry_topic(local)
    await settle()
    await local.produce("again", topic=RETRY)
    assert payloads(await waiting) == ["again"]


async def test_a_waiting_call_ends_when_its_topic_is_deleted(both):
    waiting = asyncio.create_task(both.receive_raw(wait_ms=20_000))
    await settle()
    assert (await both.client.delete(TOPIC, params={"force": "true"})).status_code == 200
    problem(await waiting, status=404, code="no_such_topic")
    await both.produce("again", topic=RETRY)
    assert payloads(await both.receive(topic=RETRY)) == ["again"]


async def test_a_drain_ends_a_waiting_call(both):
    waiting = asyncio.create_task(both.receive(wait_ms=20_000))
    await settle()
    both.broker.finish()
    assert await waiting == []


async def test_a_cancelled_call_leaves_nothing_leased(both):
    for turns in range(12):
        waiting = asyncio.create_task(both.receive(wait_ms=20_000))
        await settle()
        sending = asyncio.gather(both.produce("n"), both.produce("r", topic=RETRY))
        for _ in range(turns * 4):
            await asyncio.sleep(0)
        waiting.cancel()
        await sending
        (outcome,) = await asyncio.gather(waiting, return_exceptions=True)
        got = outcome if isinstance(outcome, list) else []
        got += await both.receive("c2")
        assert sorted(payloads(got)) == ["n", "r"]
        assert {message["redelivery_count"] for message in got} == {0}
        await both.ack(ids(got))


async def test_an_error_of_the_retry_topic_does_not_hold_up_the_topic(local, monkeypatch):
    """A consumer of another type holds the retry topic."""
    await local.receive("other", topic=RETRY, type="exclusive")
    await local.produce("new")
    await local.produce("again", topic=RETRY)
    assert payloads(await local.receive()) == ["new"]
    problem(await local.receive_raw(), status=409, code="subscription_type_conflict")
    waiting = asyncio.create_task(local.receive(wait_ms=20_000))
    await settle()
    await local.produce("newer")
    assert payloads(await waiting) == ["newer"]


async def test_a_consumer_that_the_topic_refuses_gets_nothing_from_the_retry_topic(both):
    await both.client.delete(f"{SUB}/consumers/c1")
    await both.receive("holder", type="key_shared")
    await both.produce("again", topic=RETRY)
    problem(await both.receive_raw(type="shared"), status=409, code="subscription_type_conflict")


async def test_an_acknowledgement_may_mix_both_topics(both):
    (new,) = await both.produce("new")
    (again,) = await both.produce("again", topic=RETRY)
    await both.receive()
    assert (await both.ack([new, again])).json() == {"acknowledged": 2}
    both.clock.advance(3_600)
    assert await both.receive() == []


async def test_an_unknown_id_acknowledges_nothing_in_either_topic(both):
    (new,) = await both.produce("new")
    (again,) = await both.produce("again", topic=RETRY)
    await both.receive()
    for unknown in ("999999999:0", f"{again.split(':')[0]}:7:-1:-1", f"{new.split(':')[0]}:7:-1:-1"):
        body = problem(await both.ack([new, again, unknown]), status=400, code="unknown_messages")
        assert body["detail"].startswith("1 of 3 message ids name no message")
        assert len(body["facts"]["message_ids"]) == 1
    both.clock.advance(3_600)
    assert sorted(payloads(await both.receive("c2"))) == ["again", "new"]


async def test_ids_of_closed_and_trimmed_ledgers_of_the_retry_topic_are_known(local):
    (again,) = await local.produce("again", topic=RETRY)
    await local.receive()
    topic = next(topic for topic in local.broker.topics if topic.name.local.endswith("RETRY"))
    await topic.ledger.roll()
    assert (await local.ack([again])).json() == {"acknowledged": 1}
    await local.produce("next", topic=RETRY)
    await topic.ledger.trim()
    assert not topic.ledger.has_ledger(int(again.split(":")[0]))
    assert (await local.ack([again])).json() == {"acknowledged": 1}


async def test_a_cumulative_acknowledgement_of_a_message_of_the_retry_topic_is_refused(both):
    (again,) = await both.produce("again", topic=RETRY)
    await both.receive(type="exclusive")
    answer = await both.post(f"{SUB}/ack", {"cumulative": again})
    assert "singly" in problem(answer, status=400, code="bad_request")["detail"]


async def test_a_negative_acknowledgement_may_mix_both_topics(both):
    (new,) = await both.produce("new")
    (again,) = await both.produce("again", topic=RETRY)
    await both.receive()
    answer = await both.post(f"{SUB}/nack", {"message_ids": [again, new, "999:0"], "consumer": "c1"})
    assert answer.json() == {"returned": [new, again]}
    got = await both.receive("c2")
    assert [(one["payload"], one["redelivery_count"]) for one in got] == [("again", 1), ("new", 1)]


async def test_the_field_ack_of_a_receive_takes_ids_of_both_topics(both):
    sent = [*await both.produce("n1"), *await both.produce("r1", topic=RETRY)]
    assert payloads(await both.receive()) == ["r1", "n1"]
    await both.produce("n2")
    assert payloads(await both.receive(ack=sent)) == ["n2"]
    assert payloads(await both.receive(redeliver=True)) == ["n2"]


async def test_redeliver_returns_the_messages_of_both_topics(both):
    await both.produce("n1")
    await both.produce("r1", topic=RETRY)
    await both.receive()
    assert await both.receive() == []
    got = await both.receive(redeliver=True)
    assert [(one["payload"], one["redelivery_count"]) for one in got] == [("r1", 0), ("n1", 0)]


async def test_a_repeated_request_gets_the_messages_of_both_topics_again(both):
    await both.produce("n1")
    await both.produce("r1", topic=RETRY)
    first = await both.receive(request_id="a")
    await both.produce("n2")
    await both.produce("r2", topic=RETRY)
    again = await both.receive(request_id="a")
    assert payloads(first) == payloads(again) == ["r1", "n1"]
    await both.ack([first[0]["message_id"]])
    assert payloads(await both.receive(request_id="a")) == ["n1"]
    await both.ack([first[1]["message_id"]])
    assert payloads(await both.receive(request_id="a")) == ["r2", "n2"]


async def test_a_repeated_request_waits_for_the_one_in_progress(both):
    calls = [asyncio.create_task(both.receive(wait_ms=20_000, request_id="a")) for _ in range(3)]
    await settle()
    await both.produce("r1", topic=RETRY)
    assert [payloads(got) for got in await asyncio.gather(*calls)] == [["r1"]] * 3
    await both.produce("n1")
    assert payloads(await both.receive(request_id="b")) == ["n1"]


async def test_a_consumer_that_leaves_gives_back_messages_of_both_topics(both):
    await both.produce("n1")
    await both.produce("r1", topic=RETRY)
    await both.receive("c1")
    assert await both.receive("c2") == []
    assert (await both.client.delete(f"{SUB}/consumers/c1")).status_code == 200
    assert sorted(payloads(await both.receive("c2"))) == ["n1", "r1"]


async def test_a_consumer_that_leaves_ends_its_waiting_call(both):
    waiting = asyncio.create_task(both.receive(wait_ms=20_000))
    await settle()
    await both.client.delete(f"{SUB}/consumers/c1")
    async with asyncio.timeout(5):
        assert await waiting == []
    assert (await subscription_of(both))["consumers"] == []


async def test_a_session_goes_on_while_only_the_retry_topic_has_messages(both):
    for _ in range(4):
        await both.produce("again", topic=RETRY)
        assert len(await both.receive("c2", session_ttl_ms=10_000, max=1)) == 1
        both.clock.advance(6)
    assert {one["consumer"]: one["calls"] for one in (await subscription_of(both))["consumers"]} == {"c1": 1, "c2": 4}


async def test_statistics_cover_both_topics(local):
    await local.produce("n1")
    await local.produce("r1", "r2", topic=RETRY)
    await local.produce("late", topic=RETRY, params={"deliver_after_ms": 60_000})
    got = await local.receive()
    about = await subscription_of(local)
    (consumer,) = about["consumers"]
    assert (consumer["unacked"], consumer["messages"], consumer["bytes"]) == (3, 3, 6)
    assert about["retry"] == {
        "topic": "public/default/t-s-RETRY",
        "backlog_entries": 3,
        "backlog_messages": 3,
        "delayed": 1,
        "unacked": 2,
    }
    assert (about["backlog_entries"], about["messages_out"]) == (1, 1)
    await local.ack(ids(got))
    (consumer,) = (await subscription_of(local))["consumers"]
    assert (consumer["unacked"], consumer["acked"]) == (0, 3)


async def test_a_subscription_without_retry_topic_shows_none(broker):
    await broker.receive()
    assert not {"retry", "dead_letters"} & (await subscription_of(broker)).keys()


async def test_a_message_of_the_retry_topic_is_explained(both):
    (again,) = await both.produce("again", topic=RETRY)
    (late,) = await both.produce("late", topic=RETRY, params={"deliver_after_ms": 60_000})
    await both.receive()
    for message_id, code in ((again, "leased"), (late, "delayed")):
        answer = await both.client.get(f"{SUB}/explain", params={"message_id": message_id})
        assert answer.json()["message"]["code"] == code


async def test_a_stream_has_the_messages_of_both_topics(local):
    await local.produce("n1")
    await local.produce("r1", topic=RETRY)
    async with local.serve(), local.client.stream("GET", f"{SUB}/stream", params={"consumer": "c1"}) as events:
        found = []
        async for line in events.aiter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: "))["payload"])
            if len(found) == 2:
                await local.produce("r2", topic=RETRY)
            if len(found) == 3:
                break
    assert found == ["r1", "n1", "r2"]


@pytest.mark.parametrize("has_subscription", [True, False])
async def test_dead_letters_are_shown_and_an_explanation_warns_if_they_are_lost(broker, has_subscription):
    dead = f"{TOPIC}-s-DLQ"
    await broker.receive()
    if has_subscription:
        await broker.client.put(f"{dead}/subscriptions/dead-letters", json={})
    await broker.produce("bad", topic=dead)
    assert (await subscription_of(broker))["dead_letters"] == {
        "topic": "public/default/t-s-DLQ",
        "backlog_entries": 1,
        "subscriptions": int(has_subscription),
    }
    explanation = (await broker.client.get(f"{SUB}/explain")).json()
    assert [("no subscription" in warning) for warning in explanation.get("warnings", [])] == [True] * (
        not has_subscription
    )


async def test_ids_of_the_retry_topic_are_known_after_a_restart(local, tree, ledgers, clock):
    (again,) = await local.produce("again", topic=RETRY)
    await local.broker.close()
    await local.store.close()
    second = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://b2")
    assert (await second.ack([again])).json() == {"acknowledged": 1}
    await second.produce("more", topic=RETRY)
    assert payloads(await second.receive()) == ["more"]
    await second.close()


async def test_whether_the_retry_topic_exists_is_read_once(broker, monkeypatch):
    """Not for each call: a call of a loaded topic reads no metadata."""
    await broker.receive()
    reads = []
    exists = broker.store.exists

    async def counting(path, **options):
        reads.append(path)
        return await exists(path, **options)

    monkeypatch.setattr(broker.store, "exists", counting)
    for _ in range(3):
        await broker.receive()
        await broker.ack(await broker.produce("x"))
    assert reads == []


async def test_a_name_that_is_too_long_has_no_retry_topic(broker):
    long = "s" * 252
    await broker.produce("x")
    assert payloads(await broker.receive(sub=long)) == ["x"]


async def test_the_retry_topic_itself_can_be_consumed(both):
    await both.produce("again", topic=RETRY)
    assert payloads(await both.receive(topic=RETRY)) == ["again"]


async def test_a_message_that_is_too_large_with_new_properties_does_not_stop_those_of_the_other_topic(both):
    (large,) = await both.produce("a" * 5_000_000)
    (again,) = await both.produce("again", topic=RETRY)
    await both.receive(max_bytes=6_000_000)
    body = {"message_ids": [large, again], "properties": {f"p{number}": "v" * 48_000 for number in range(5)}}
    answer = (await both.post(f"{SUB}/retry", body)).json()
    assert [one["message_id"] for one in answer["moved"]] == [again]
    assert [(one["message_id"], one["error"]["code"]) for one in answer["failed"]] == [(large, "too_large")]
