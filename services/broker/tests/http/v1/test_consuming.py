"""Receive over HTTP: delivery to several consumers, waiting calls, formats, and errors of all operations."""

import asyncio
import json

import pytest
from broker_harness import TOPIC, ids, payloads, problem, settle

SUB = f"{TOPIC}/subscriptions/s"


async def test_an_acknowledged_message_is_not_delivered_again(broker):
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


async def test_max_bytes_limits_an_answer_that_has_at_least_one_message(broker):
    await broker.produce("x" * 500, "y" * 500)
    assert len(await broker.receive(max_bytes=1)) == 1


async def test_a_subscription_from_latest_gets_only_later_messages(broker):
    await broker.produce("old")
    assert await broker.receive(initial="latest") == []
    await broker.produce("new")
    assert payloads(await broker.receive()) == ["new"]


async def test_receive_creates_topic_and_subscription(broker):
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


async def test_a_waiting_call_ends_at_its_timeout(broker, monkeypatch):
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(broker.broker.topics, "_now", loop.time)
    began = loop.time()
    assert await broker.receive(wait_ms=50) == []
    assert 0.04 < loop.time() - began < 5


async def test_each_waiting_consumer_gets_a_message(broker):
    await broker.receive()
    tasks = [asyncio.create_task(broker.receive(f"c{n}", wait_ms=30_000, max=1)) for n in range(3)]
    await settle()
    await broker.produce("a", "b", "c")
    async with asyncio.timeout(30):
        got = await asyncio.gather(*tasks)
    assert sorted(payloads([message for messages in got for message in messages])) == ["a", "b", "c"]


async def test_a_disconnected_client_gets_no_lease(broker):
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

    scope = {
        "type": "http",
        "method": "POST",
        "path": f"{SUB}/receive",
        "raw_path": f"{SUB}/receive".encode(),
        "query_string": b"",
        "headers": [],
    }
    task = asyncio.create_task(broker.app(scope, receive_asgi, send))
    await settle()
    gone.set()
    async with asyncio.timeout(30):
        await task
    await broker.produce("a")
    assert payloads(await broker.receive("c2")) == ["a"]


async def test_messages_are_sent_as_ndjson_on_request(broker):
    await broker.produce("a", "b")
    answer = await broker.client.post(
        f"{SUB}/receive", json={"consumer": "c", "wait_ms": 0}, headers={"accept": "application/x-ndjson"}
    )
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line)["payload"] for line in answer.text.splitlines()] == ["a", "b"]


@pytest.mark.parametrize("path", ["ack", "nack", "seek"])
async def test_unknown_topics_and_subscriptions_are_refused(broker, path):
    body = {"message_id": "0:0"} if path == "seek" else {"message_ids": ["0:0"]}
    answer = await broker.post(f"/v1/topics/public/default/none/subscriptions/s/{path}", body)
    problem(answer, status=404, code="no_such_topic")
    await broker.produce("a")
    answer = await broker.post(f"{SUB}/{path}", body)
    problem(answer, status=404, code="no_such_subscription")


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
async def test_an_invalid_body_is_refused(broker, path, body):
    await broker.produce("a")
    await broker.receive()
    answer = await broker.post(f"{SUB}/{path}", body)
    problem(answer, status=400, code="bad_request")


@pytest.mark.parametrize("path", ["receive", "ack", "nack", "seek"])
async def test_a_body_that_is_broken_too_large_or_not_json_is_refused(broker, path):
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


async def test_an_entry_that_cannot_be_decoded_is_reported_and_can_be_acknowledged(broker):
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
