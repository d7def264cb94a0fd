"""Messages as server-sent events."""

import asyncio
import json

import pytest
from broker_harness import TOPIC, problem

SUB = f"{TOPIC}/subscriptions/s"


async def test_the_stream_sends_messages_as_events(broker):
    await broker.produce("a")
    await broker.client.put(SUB, json={})
    parts = asyncio.Queue()
    gone = asyncio.Event()

    async def receive_asgi(first=[True]):  # noqa: B006
        if first:
            first.clear()
            return {"type": "http.request", "body": b"", "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    path = f"{SUB}/stream"
    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"consumer=c1",
        "headers": [],
    }
    task = asyncio.create_task(broker.app(scope, receive_asgi, parts.put))
    async with asyncio.timeout(30):
        start = await parts.get()
        assert (b"content-type", b"text/event-stream") in start["headers"]
        assert (await parts.get())["body"].startswith(b":")
        event = (await parts.get())["body"].decode()
        assert event.startswith("event: message\nid: 0:0:-1:-1\ndata: ")
        assert json.loads(event.splitlines()[2].removeprefix("data: "))["payload"] == "a"
        assert (await parts.get())["body"] == b"", "the server has passed on the events before"
        await broker.produce("b")
        assert b'"payload":"b"' in (await parts.get())["body"]
        gone.set()
        await task
    explained = (await broker.client.get(f"{SUB}/explain")).json()
    assert explained["subscription"]["consumers"][0]["unacked"] == 2


async def test_a_stream_of_a_missing_topic_creates_nothing_and_names_what_does(broker):
    before = (broker.znodes(), dict(broker.ledgers.ledgers))
    answer = await broker.client.get(f"{SUB}/stream?consumer=c")
    found = problem(answer, status=404, code="no_such_topic")
    assert f"PUT {SUB} and POST {SUB}/receive create both" in found["detail"]
    assert (broker.znodes(), dict(broker.ledgers.ledgers)) == before
    assert broker.broker.ownership.held == []


async def test_a_stream_creates_no_subscription_and_names_what_does(broker):
    await broker.produce("a")
    sub = f"{TOPIC}/subscriptions/a%2Fb%20c"
    before = broker.znodes()
    answer = await broker.client.get(f"{sub}/stream?consumer=c")
    found = problem(answer, status=404, code="no_such_subscription")
    assert f"PUT {sub} and POST {sub}/receive create it" in found["detail"]
    assert broker.znodes() == before
    (topic,) = broker.broker.topics
    assert not topic.subscriptions


@pytest.mark.parametrize(("tags", "status"), [("a", 409), ("b||a||c", 409), ("b||a", None), ("", 400)])
async def test_the_tags_of_a_stream_must_be_those_of_the_subscription(broker, tags, status):
    await broker.produce("a")
    await broker.client.put(SUB, json={"tags": "a||b"})
    if status is not None:
        answer = await broker.client.get(f"{SUB}/stream", params={"consumer": "c", "tags": tags})
        problem(answer, status=status, code="conflict" if status == 409 else "bad_request")
    else:
        (topic,) = broker.broker.topics
        assert topic.subscription("s", tags=tags.split("||")).name == "s"
