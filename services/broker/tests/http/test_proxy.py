"""Requests forwarded between two brokers that listen on real sockets."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from bindery_broker.http.app import BrokerApp
from bindery_broker.http.v1 import consuming as subscriptions
from bindery_kit.http.http_server import HttpServer
from broker_harness import TOPIC, Clock, Harness, payloads

SUBSCRIPTION = f"{TOPIC}/subscriptions/s"


class RealClock(Clock):
    """A clock that advances by itself, so that timeouts of connections need no action of the test."""

    def now(self) -> float:
        return time.monotonic()

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000


class Listening:
    """A broker with a port; it reaches others over TCP."""

    def __init__(self, **parts: Any) -> None:
        self._parts = parts
        self._app: BrokerApp | None = None
        self.server = HttpServer(self._serve, port=0, lifespan="off", stop_timeout_s=1, interface="asgi3")

    async def start(self) -> None:
        await self.server.start()
        self.harness = Harness(clock=RealClock(), url=self.server.url, **self._parts)
        self._app = BrokerApp(self.harness.broker)

    async def stop(self) -> None:
        self.harness.broker.finish()
        await self.server.stop()
        assert self._app is not None
        await self._app.close()
        await self.harness.close()

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        assert self._app is not None
        await self._app(scope, receive, send)

    def consumers(self) -> dict[str, int]:
        """Return the number of calls in progress by consumer."""
        (topic,) = self.harness.broker.topics
        topic.subscription("s").tick()
        return {session.consumer.name: session.calls_open for session in topic.subscription("s").sessions}


@pytest.fixture
async def pair(tree, ledgers) -> AsyncIterator[tuple[Listening, Listening]]:
    """The topic's owner, which holds one message, and another broker."""
    owner, other = Listening(tree=tree, ledgers=ledgers), Listening(tree=tree, ledgers=ledgers)
    await owner.start()
    await other.start()
    async with httpx.AsyncClient() as client:
        assert (await client.post(owner.server.url + TOPIC + "/messages", content=b"a")).status_code == 200
    yield owner, other
    await other.stop()
    await owner.stop()


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("pings_s", [15.0, 0.05])
async def test_a_forwarded_stream_ends_when_its_client_disconnects(pair, monkeypatch, pings_s):
    """The disconnect is also detected between pings, which keep the connection between the brokers alive."""
    owner, other = pair
    monkeypatch.setattr(subscriptions, "STREAM_PING_S", pings_s)
    query = "consumer=c&type=exclusive&session_ttl_ms=1000&ack_timeout_ms=1000"
    async with httpx.AsyncClient(timeout=20) as client:
        (await client.put(owner.server.url + SUBSCRIPTION, json={})).raise_for_status()
    async with (
        httpx.AsyncClient(timeout=20) as client,
        client.stream("GET", f"{other.server.url}{SUBSCRIPTION}/stream?{query}") as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("data"):
                break
        assert owner.consumers() == {"c": 1}
    await until(lambda: owner.consumers().get("c", 0) == 0)
    await until(lambda: owner.consumers() == {})
    async with httpx.AsyncClient(timeout=20) as client:
        body = {"consumer": "next", "type": "exclusive", "wait_ms": 0}
        received = await client.post(owner.server.url + SUBSCRIPTION + "/receive", json=body)
        assert payloads(received.json()["messages"]) == ["a"]


async def test_a_forwarded_long_poll_leases_nothing_to_a_disconnected_client(pair):
    owner, other = pair
    body = {"consumer": "gone", "wait_ms": 30_000, "initial": "latest"}
    async with httpx.AsyncClient(timeout=0.5) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(other.server.url + SUBSCRIPTION + "/receive", json=body)
    await until(lambda: owner.consumers() == {"gone": 0})
    async with httpx.AsyncClient(timeout=20) as client:
        await client.post(owner.server.url + TOPIC + "/messages", content=b"b")
        body = {"consumer": "alive", "wait_ms": 0}
        received = await client.post(owner.server.url + SUBSCRIPTION + "/receive", json=body)
        assert payloads(received.json()["messages"]) == ["b"]


async def test_forwarded_requests_are_recorded_as_answered(pair):
    """The end of an answer does not count as a disconnect of the client."""
    _, other = pair
    seen = []
    answered = other.harness.broker.metrics.answered
    other.harness.broker.metrics.answered = lambda operation, status, s: seen.append((operation, status))
    async with httpx.AsyncClient(timeout=20) as client:
        for _ in range(20):
            assert (await client.get(other.server.url + TOPIC)).status_code == 200
            assert (await client.post(other.server.url + TOPIC + "/messages", content=b"x")).status_code == 200
    other.harness.broker.metrics.answered = answered
    assert seen == [("topicStats", 200), ("produce", 200)] * 20


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", TOPIC, 200), ("HEAD", TOPIC, 200), ("DELETE", SUBSCRIPTION, 404)]
)
async def test_a_body_is_ignored_where_it_has_no_meaning(pair, method, path, status):
    async with httpx.AsyncClient(timeout=20) as client:
        for broker in pair:
            answer = await client.request(method, broker.server.url + path, content=b"{}")
            assert answer.status_code == status, answer.text
