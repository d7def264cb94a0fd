"""Which roles may use the retry and dead-letter topics of a subscription, whose names other subscriptions can have too.

`a-b` with `c` and `a` with `b-c` have the same retry topic, `a-b-c-RETRY`, and the same dead-letter topic.
"""

import asyncio
import json
from typing import Any

import httpx
import pytest
from access_parts import ROOT, brokers, headers
from broker_harness import Harness, ids, payloads, problem

OWNER = f"{ROOT}/a-b/subscriptions/c"
OTHER = f"{ROOT}/a/subscriptions/b-c"
RETRY, LETTERS = "a-b-c-RETRY", "a-b-c-DLQ"


async def ask(broker: Harness, method: str, path: str, body: Any = None, *, role: str) -> httpx.Response:
    if method == "GET":
        return await broker.client.get(path, headers=headers(role))
    sent = {**headers(role), "content-type": "application/json"}
    return await broker.client.request(method, path, content=json.dumps(body or {}), headers=sent)


async def grant(broker: Harness, topic: str, role: str, *actions: str) -> None:
    path = f"{ROOT}/{topic}/permissions/{role}"
    answer = await ask(broker, "PUT", path, {"actions": list(actions)}, role="admin")
    assert answer.status_code == 200, answer.text


async def receive(broker: Harness, subscription: str, *, role: str, consumer: str = "c") -> list[dict[str, Any]]:
    answer = await ask(broker, "POST", f"{subscription}/receive", {"consumer": consumer, "wait_ms": 0}, role=role)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["messages"])


async def retried(broker: Harness, subscription: str, payload: str, **fields: Any) -> None:
    """Store a message in the topic of the subscription, and move it out of it."""
    topic = subscription.partition("/subscriptions/")[0]
    sent = await broker.client.post(f"{topic}/messages", content=payload.encode(), headers=headers("super"))
    assert sent.status_code == 200, sent.text
    held = ids(await receive(broker, subscription, role="super", consumer="mover"))
    answer = await ask(broker, "POST", f"{subscription}/retry", {"message_ids": held, **fields}, role="super")
    assert len(answer.json()["moved"]) == 1, answer.text


@pytest.fixture
async def broker():
    """`reader` may consume from the topic `a` only, where the messages of `a-b` are not its own."""
    async with brokers() as (one,):
        await grant(one, "a", "reader", "consume")
        yield one


async def test_messages_of_another_topic_are_not_reached_through_a_retry_topic_of_the_same_name(broker):
    await retried(broker, OWNER, "secret")
    await retried(broker, OTHER, "retried")  # so that its subscription of the retry topic exists
    assert await receive(broker, OTHER, role="reader") == []
    shown = await ask(broker, "GET", f"{ROOT}/a/subscriptions", role="reader")
    assert "retry" not in shown.json()["subscriptions"][0]
    explained = (await ask(broker, "GET", f"{OTHER}/explain", role="reader")).json()
    assert "retry" not in explained["subscription"]
    assert payloads(await receive(broker, OTHER, role="consumer")) == ["retried"]
    assert payloads(await receive(broker, OWNER, role="consumer")) == ["secret"]


@pytest.mark.parametrize(
    ("method", "path", "body", "derived"),
    [
        ("POST", "/retry", {"message_ids": ["1:1"]}, RETRY),
        ("POST", "/receive", {"consumer": "c", "wait_ms": 0, "dead_letter": {"max_redeliver": 1}}, LETTERS),
        ("GET", "/dead-letters", None, LETTERS),
        ("POST", "/dead-letters/redrive", {}, RETRY),
        ("POST", "/dead-letters/purge", {}, LETTERS),
    ],
)
async def test_a_permission_of_one_topic_does_not_include_those_that_belong_to_it_by_name(
    broker, method, path, body, derived
):
    await retried(broker, OWNER, "secret", max_redeliver=0)
    assert await receive(broker, OTHER, role="reader") == []
    refused = problem(await ask(broker, method, OTHER + path, body, role="reader"), status=403, code="forbidden")
    assert f"`bindery permissions grant acme/shop/{derived} --role reader" in refused["detail"]
    assert refused["facts"]["resource"] == f"acme/shop/{derived}"
    for name in (RETRY, LETTERS):
        await grant(broker, name, "reader", "consume")
    assert (await ask(broker, method, OTHER + path, body, role="reader")).status_code == 403
    for name in (RETRY, LETTERS):
        await grant(broker, name, "reader", "produce", "consume")
    answer = await ask(broker, method, OTHER + path, body, role="reader")
    assert answer.status_code != 403, answer.text
    assert "secret" not in answer.text
    letters = (await ask(broker, "GET", f"{OWNER}/dead-letters", role="consumer")).json()["messages"]
    assert len(letters) == 1


async def test_a_granted_retry_topic_is_received_from_and_a_permission_of_the_namespace_includes_it(broker):
    for name in (RETRY, LETTERS):
        await grant(broker, name, "reader", "produce", "consume")
    for role in ("reader", "consumer"):
        await broker.client.post(f"{ROOT}/a/messages", content=role.encode(), headers=headers("super"))
        held = await receive(broker, OTHER, role=role)
        assert payloads(held) == [role]
        moved = await ask(broker, "POST", f"{OTHER}/retry", {"message_ids": ids(held)}, role=role)
        assert len(moved.json()["moved"]) == 1, moved.text
        again = await receive(broker, OTHER, role=role)
        assert payloads(again) == [role]
        acked = await ask(broker, "POST", f"{OTHER}/ack", {"message_ids": ids(again)}, role=role)
        assert acked.status_code == 200, acked.text


async def test_a_partitioned_topic_has_the_same_rule(broker):
    await ask(broker, "PUT", f"{ROOT}/p/partitions", {"partitions": 2}, role="admin")
    await grant(broker, "p", "reader", "consume")
    subscription = f"{ROOT}/p/subscriptions/b-c"
    await retried(broker, subscription, "x")
    assert await receive(broker, subscription, role="reader") == []
    refused = await ask(broker, "POST", f"{subscription}/retry", {"message_ids": ["1:1:0"]}, role="reader")
    assert refused.status_code == 403
    assert payloads(await receive(broker, subscription, role="consumer")) == ["x"]


async def test_a_stream_ends_when_the_permission_of_the_retry_topic_is_revoked(broker):
    await grant(broker, RETRY, "reader", "produce", "consume")
    assert (await ask(broker, "PUT", OTHER, role="reader")).status_code == 201
    path = f"{OTHER}/stream?consumer=c"
    stream = asyncio.create_task(broker.client.get(path, headers=headers("reader")))
    access = broker.broker.access
    async with asyncio.timeout(30):
        while not any(one.also for waiting in access._waiting.values() for one in waiting):
            await asyncio.sleep(0.01)
    await ask(broker, "DELETE", f"{ROOT}/{RETRY}/permissions/reader", role="admin")
    answer = await asyncio.wait_for(stream, 30)
    assert answer.status_code == 200


async def test_each_subscription_of_a_shared_retry_topic_gets_its_own_messages_and_loses_none(broker):
    await retried(broker, OWNER, "first")
    await retried(broker, OTHER, "second")
    assert payloads(await receive(broker, OTHER, role="consumer")) == ["second"]
    assert payloads(await receive(broker, OWNER, role="consumer")) == ["first"]
    topic = await broker.broker.topics.get(next(one.name for one in broker.broker.topics if RETRY in one.name.local))
    assert sorted(topic.subscriptions) == ["b-c", "c"]
    for name, subscription in topic.subscriptions.items():  # the other message is acknowledged
        assert subscription.cursor.backlog_entries == 1, name


async def test_a_delayed_message_of_another_subscription_is_not_given_either(broker):
    await retried(broker, OWNER, "first", delay_ms=5_000)
    await retried(broker, OTHER, "second", delay_ms=5_000)
    assert await receive(broker, OTHER, role="consumer") == []
    broker.clock.advance(6)
    assert payloads(await receive(broker, OTHER, role="consumer")) == ["second"]
    assert payloads(await receive(broker, OWNER, role="consumer")) == ["first"]


async def test_a_foreign_message_that_no_other_subscription_keeps_stays_in_the_backlog(broker):
    marks = {"REAL_TOPIC": "persistent://acme/shop/elsewhere", "REAL_SUBSCRIPTION": "nobody"}
    await retried(broker, OWNER, "own")
    line = json.dumps({"payload": "foreign", "properties": marks}).encode()
    sent = await broker.client.post(
        f"{ROOT}/{RETRY}/messages",
        content=line,
        headers={**headers("super"), "content-type": "application/x-ndjson"},
    )
    (foreign,) = sent.json()["message_ids"]
    held = await receive(broker, OWNER, role="consumer")
    assert payloads(held) == ["own"]
    await ask(broker, "POST", f"{OWNER}/ack", {"message_ids": ids(held)}, role="consumer")
    assert await receive(broker, OWNER, role="consumer") == []
    explained = (await ask(broker, "GET", f"{OWNER}/explain?message_id={foreign}", role="consumer")).json()
    assert explained["message"]["code"] == "filtered"
    assert "another subscription" in explained["message"]["detail"]
    assert explained["subscription"]["retry"]["backlog_entries"] == 1
