"""Answers in pieces are the same JSON as answers at once, and no piece is large."""

import asyncio
import base64
import contextlib
import gc
import json
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from bindery_broker.http.v1.message_pieces import (
    AT_ONCE_SIZE_MAX,
    PIECE_SIZE,
    SLICE_SIZE,
    MessageSource,
    event_pieces,
    message_parts,
    messages_reply,
)
from bindery_kit.http.http_server import HttpServer
from bindery_pulsar.message_codec import Message
from broker_harness import TOPIC, Clock, Harness


def source(payload: bytes, **fields: Any) -> MessageSource:
    message = Message(
        payload=payload, batch_index=-1, batch_size=1, producer_name="p", sequence_id=7, publish_time_ms=1, **fields
    )
    return MessageSource(message, "1:2:-1:-1", "5", 3)


PAYLOADS = {
    "empty": b"",
    "ascii": b"a" * (3 * SLICE_SIZE + 1),
    "escaped": b'"\\\n\x00' * SLICE_SIZE,
    "wide": "añ€𝄞".encode() * SLICE_SIZE,
    "split": b"a" * (SLICE_SIZE - 1) + "𝄞€ñ".encode() * 20_000,
    "binary": b"\xff\x00a" * SLICE_SIZE + b"x",
    "cut": "añ€𝄞".encode() * SLICE_SIZE + "𝄞".encode()[:3],
    "surrogate": b"a" * (2 * SLICE_SIZE) + b"\xed\xa0\x80",
    "at the limit": b"a" * SLICE_SIZE,
}


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_a_message_in_slices_is_the_same_json(payload: bytes) -> None:
    found = json.loads(b"".join(message_parts(source(payload, key="k", properties={"a": "b", "t": "TAGS"}))))
    if "payload" in found:
        assert found.pop("payload") == payload.decode()
    else:
        with pytest.raises(UnicodeDecodeError):
            payload.decode()
        assert base64.b64decode(found.pop("payload_base64")) == payload
    assert found == {
        "message_id": "1:2:-1:-1",
        "lease": "5",
        "key": "k",
        "properties": {"a": "b"},
        "tags": "t",
        "publish_time": 1,
        "redelivery_count": 3,
        "producer": "p",
        "sequence_id": 7,
    }


def test_the_parts_of_a_large_message_are_small() -> None:
    parts = list(message_parts(source(PAYLOADS["escaped"])))
    assert len(parts) > 3
    assert max(map(len, parts)) <= 6 * SLICE_SIZE


def test_events_are_joined_to_pieces_and_cut_into_pieces() -> None:
    sources = [source(b"a" * 100) for _ in range(2_000)] + [source(PAYLOADS["escaped"])]
    pieces = list(event_pieces(sources))
    assert not sources, "each message can be freed once it is sent"
    assert max(map(len, pieces)) <= PIECE_SIZE
    assert sum(len(piece) < PIECE_SIZE // 2 for piece in pieces) < len(pieces) // 2
    events = b"".join(pieces).split(b"\n\n")
    assert len(events) == 2_002
    assert json.loads(events[0].partition(b"data: ")[2])["payload"] == "a" * 100


@pytest.mark.parametrize("size", [10, AT_ONCE_SIZE_MAX // 10, AT_ONCE_SIZE_MAX])
@pytest.mark.parametrize("lines", [False, True])
async def test_small_and_large_answers_are_alike(broker, size, lines):
    await broker.produce(*("x" * size for _ in range(3)))
    headers = {"accept": "application/x-ndjson"} if lines else {}
    answer = await broker.client.post(
        "/v1/topics/public/default/t/subscriptions/s/receive",
        json={"consumer": "c", "wait_ms": 0, "max_bytes": 16 * 2**20},
        headers=headers,
    )
    assert answer.headers["content-type"] == ("application/x-ndjson" if lines else "application/json")
    assert ("content-length" in answer.headers) is (3 * size < AT_ONCE_SIZE_MAX)
    found = [json.loads(line) for line in answer.text.splitlines()] if lines else answer.json()["messages"]
    assert [message["payload"] for message in found] == ["x" * size] * 3
    assert answer.content.endswith(b"\n")
    assert broker.broker.topics.responses.used == 0


@pytest.mark.parametrize("size", [10, AT_ONCE_SIZE_MAX])
async def test_a_read_without_a_subscription_has_the_next_position(broker, size):
    await broker.produce("x" * size, "y" * size)
    answer = await broker.client.get("/v1/topics/public/default/t/messages?max=2&max_bytes=16000000")
    assert [message["payload"][0] for message in answer.json()["messages"]] == ["x", "y"]
    assert answer.json()["next"] == "0:2:-1:-1"
    head = await broker.client.head("/v1/topics/public/default/t/messages?max=2&max_bytes=16000000")
    assert (head.status_code, head.content) == (200, b"")
    assert broker.broker.topics.responses.used == 0


def test_an_answer_without_messages_has_an_empty_list() -> None:
    class FakeCharge:
        size = 0

        def keep(self, size: int) -> None:
            self.size = size

    class FakeExchange:
        charge = FakeCharge()

    assert bytes(messages_reply(FakeExchange(), []).body) == b'{"messages":[]}\n'  # type: ignore[arg-type]
    assert bytes(messages_reply(FakeExchange(), [], lines=True).body) == b""  # type: ignore[arg-type]
    assert bytes(messages_reply(FakeExchange(), [], following="1:2").body) == (  # type: ignore[arg-type]
        b'{"messages":[],"next":"1:2"}\n'
    )


# -- clients that do not read, over TCP


MESSAGES = 12
SIZE = 2**20


class Crowd:
    """A broker with little room for responses, and raw connections to it."""

    def __init__(self, tree: Any, ledgers: Any) -> None:
        self._parts = {"tree": tree, "ledgers": ledgers}
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> "Crowd":
        self.server = HttpServer(self._serve, port=0, lifespan="off", stop_timeout_s=1, interface="asgi3")
        await self.server.start()
        clock = Clock()
        clock.now = asyncio.get_running_loop().time  # type: ignore[method-assign]
        self.harness = Harness(clock=clock, url=self.server.url, response_bytes_max=8 * 2**20, **self._parts)
        await self.harness.produce(*("x" * SIZE for _ in range(MESSAGES)))
        self.budget = self.harness.broker.topics.responses
        return self

    async def __aexit__(self, *_: object) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self.harness.broker.finish()
        await self.server.stop()
        await self.harness.close()

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        await self.harness.app(scope, receive, send)

    async def request(self, method: str, path: str, body: bytes = b"") -> asyncio.StreamReader:
        """Send a request on a connection of its own, whose client reads only what is read from the result."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port, limit=2**16)
        self._writers.append(writer)
        head = f"{method} {TOPIC}{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        return reader

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.01)


@pytest.fixture
async def crowd(tree, ledgers):
    async with Crowd(tree, ledgers) as found:
        yield found


RECEIVE = b'{"consumer":"slow","max":6,"max_bytes":7000000,"wait_ms":0}'
RESPONSES = pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/subscriptions/slow/receive", RECEIVE),
        ("GET", "/messages?max=6&max_bytes=7000000", b""),
        ("GET", "/subscriptions/slow/stream?consumer=slow", b""),
    ],
    ids=["receive", "read", "stream"],
)


@RESPONSES
async def test_a_client_that_does_not_read_is_given_up_for_others(crowd, method, path, body):
    await crowd.harness.client.put(f"{TOPIC}/subscriptions/slow", json={})
    await crowd.request(method, path, body)
    await crowd.until(lambda: len(crowd.budget.sending) == 1 and crowd.budget.used > 2 * SIZE)
    began = asyncio.get_running_loop().time()
    async with httpx.AsyncClient(base_url=crowd.server.url, timeout=20) as client:
        while (answer := await client.get(f"{TOPIC}/messages?max=6&max_bytes=7000000")).status_code == 429:
            assert asyncio.get_running_loop().time() - began < 15, "a read waits 3 s, less than a busy machine may need"
        assert answer.status_code == 200
        assert len(answer.json()["messages"]) == 6
    assert crowd.budget.given_up == 1


@RESPONSES
async def test_the_messages_of_a_response_that_is_given_up_are_freed_at_once(crowd, method, path, body):
    """Not only by the next collection of cyclic garbage, because their room is used for other messages."""
    await crowd.harness.client.put(f"{TOPIC}/subscriptions/slow", json={})
    with uncollected():
        await crowd.request(method, path, body)
        await crowd.until(lambda: len(crowd.budget.sending) == 1 and crowd.budget.used > 2 * SIZE)
        assert tracemalloc.get_traced_memory()[0] > 2 * SIZE
        crowd.budget.now = lambda: asyncio.get_running_loop().time() + 3600
        crowd.budget._give_up_slow()
        assert (crowd.budget.given_up, crowd.budget.used) == (1, 0)
        await crowd.until(lambda: tracemalloc.get_traced_memory()[0] < SIZE)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Measure memory, and do not collect cyclic garbage."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        gc.enable()


async def test_a_client_that_reads_gets_everything(crowd):
    reader = await crowd.request("GET", "/messages?max=6&max_bytes=7000000")
    await crowd.until(lambda: len(crowd.budget.sending) == 1)
    received = 0
    while received < 6 * SIZE:
        received += len(await reader.read(2**16))
    await crowd.until(lambda: crowd.budget.used == 0)
    assert crowd.budget.given_up == 0


async def test_the_room_of_a_client_that_disconnects_is_returned(crowd):
    for path in ("/messages?max=6&max_bytes=7000000", "/subscriptions/s/stream?consumer=c"):
        await crowd.harness.client.put(f"{TOPIC}/subscriptions/s", json={})
        await crowd.request("GET", path)
        await crowd.until(lambda: len(crowd.budget.sending) == 1)
        crowd._writers.pop().transport.abort()
        await crowd.until(lambda: crowd.budget.used == 0 and not crowd.budget.sending)


async def test_a_stream_waits_for_room_and_goes_on(crowd):
    await crowd.harness.client.put(f"{TOPIC}/subscriptions/s", json={})
    other = crowd.budget.charge("a")
    assert other.take(least=8 * 2**20, most=8 * 2**20)
    reader = await crowd.request("GET", "/subscriptions/s/stream?consumer=c")
    head = await reader.readuntil(b": connected")
    assert b"200 OK" in head
    other.release()
    async with asyncio.timeout(10):
        while b"event: message" not in await reader.read(2**16):
            pass


async def test_a_read_is_refused_at_once_if_too_many_requests_wait_for_room(crowd, monkeypatch):
    monkeypatch.setattr("bindery_broker.subscriptions.response_budget.WAITING_MAX", 2)
    other = crowd.budget.charge("a")
    assert other.take(least=8 * 2**20, most=8 * 2**20)
    for count in (1, 2):
        await crowd.request("GET", "/messages")
        await crowd.until(lambda count=count: crowd.budget.waiting == count)
    for path in ("/messages", "/messages/0:0"):
        reader = await crowd.request("GET", path)
        async with asyncio.timeout(1):
            assert b"429 Too Many Requests" in await reader.readuntil(b"\r\n\r\n")
    assert crowd.budget.waiting == 2


async def test_without_room_a_receive_and_a_read_are_refused_with_429(crowd):
    other = crowd.budget.charge("a")
    assert other.take(least=8 * 2**20, most=8 * 2**20)
    for method, path, body in (
        ("POST", "/subscriptions/s/receive", RECEIVE),
        ("GET", "/messages", b""),
        ("GET", "/messages/0:0", b""),
    ):
        reader = await crowd.request(method, path, body)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"429 Too Many Requests" in head
        assert b"retry-after: 1" in head.lower()
    (topic,) = crowd.harness.broker.topics
    assert len(topic.subscription("s").dispatcher.leases) == 0
