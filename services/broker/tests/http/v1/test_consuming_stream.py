"""Messages as server-sent events."""

import asyncio
import json

from broker_harness import TOPIC

SUB = f"{TOPIC}/subscriptions/s"


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
        await broker.produce("b")
        assert b'"payload":"b"' in (await parts.get())["body"]
        gone.set()
        await task
    explained = (await broker.client.get(f"{SUB}/explain")).json()
    assert explained["subscription"]["consumers"][0]["unacked"] == 2
