"""Requests that two brokers pass on over few connections."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from bindery_broker.http.app import BrokerApp
from bindery_broker.http.proxy import Proxy
from bindery_kit.http.http_server import HttpServer
from bindery_kit.multiplex.served import Multiplexing
from broker_harness import TOPIC, Harness, payloads

from .test_proxy import RealClock, until

RECEIVES = 300
"""Number of receives that wait at the same time, for 30 s at most: all of them must begin within that time."""
SUBSCRIPTION = f"{TOPIC}/subscriptions/s"


class Node:
    """A broker with a port that serves both protocols."""

    def __init__(self, *, links_max: int = 2, requests_max: int = 10_000, serves_both: bool = True, **parts: Any):
        self._parts = parts
        self._app: BrokerApp | None = None
        self.multiplexing = Multiplexing(requests_max=requests_max, of_connection_max=4096)
        self.proxy = Proxy(links_max=links_max)
        self.server = HttpServer(
            self._serve,
            port=0,
            lifespan="off",
            stop_timeout_s=1,
            interface="asgi3",
            upgrade=self.multiplexing if serves_both else None,
        )

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def sockets(self) -> int:
        """Number of connections to the port."""
        return len(self.server._server.server_state.connections)

    @property
    def waiting(self) -> int:
        """Number of receives that wait."""
        return sum(
            session.calls_open
            for topic in self.harness.broker.topics
            for subscription in topic.subscriptions
            for session in topic.subscription(subscription).sessions
        )

    async def start(self) -> None:
        await self.server.start()
        self.harness = Harness(clock=RealClock(), url=self.server.url, **self._parts)
        self._app = BrokerApp(
            self.harness.broker, proxy=self.proxy, arriving=self.server.bodies, served=self.multiplexing.requests
        )

    async def stop(self) -> None:
        self.harness.broker.finish()
        await self.server.stop()
        assert self._app is not None
        await self._app.close()
        await self.harness.close()

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        assert self._app is not None
        await self._app(scope, receive, send)


@pytest.fixture
async def pair(tree, ledgers) -> AsyncIterator[tuple[Node, Node]]:
    """The owner of the topic, which holds one message, and another broker."""
    owner, other = Node(tree=tree, ledgers=ledgers), Node(tree=tree, ledgers=ledgers)
    await owner.start()
    await other.start()
    async with httpx.AsyncClient() as client:
        assert (await client.post(owner.url + TOPIC + "/messages", content=b"a")).status_code == 200
    yield owner, other
    await other.stop()
    await owner.stop()


def receiving(wait_ms: int, consumer: str = "c") -> dict[str, Any]:
    return {"consumer": consumer, "wait_ms": wait_ms, "initial": "latest"}


async def test_requests_run_over_one_connection(pair):
    owner, other = pair
    async with httpx.AsyncClient(base_url=other.url) as client:
        answers = await asyncio.gather(
            *(client.post(TOPIC + "/messages", content=b"%d" % number) for number in range(50))
        )
        assert [answer.status_code for answer in answers] == [200] * 50
        received = await client.post(
            SUBSCRIPTION + "/receive", json={"consumer": "c", "max": 100, "initial": "earliest"}
        )
        assert sorted(payloads(received.json()["messages"])) == sorted(["a", *map(str, range(50))])
    assert owner.multiplexing.requests.connections == 1
    await until(lambda: owner.sockets == 1)


async def test_large_bodies_pass_both_ways(pair):
    owner, other = pair
    body = os.urandom(4 * 2**20)
    async with httpx.AsyncClient(base_url=other.url, timeout=60) as client:
        (await client.put(SUBSCRIPTION, json={"initial": "latest"})).raise_for_status()
        sent = await client.post(
            TOPIC + "/messages", content=body, headers={"content-type": "application/octet-stream"}
        )
        assert sent.status_code == 200, sent.text
        received = await client.post(
            SUBSCRIPTION + "/receive", json={"consumer": "c", "max": 10, "initial": "earliest", "wait_ms": 0}
        )
        assert received.status_code == 200
        assert len(received.content) > len(body)
    assert owner.multiplexing.requests.connections == 1
    assert other.proxy.links.held.used == 0


@pytest.mark.timeout(400)
async def test_hundreds_of_waiting_receives_take_four_connections_at_most(tree, ledgers):
    """They wait at the owner, and all of them end there when their clients disconnect."""
    owner, other = (Node(links_max=4, tree=tree, ledgers=ledgers) for _ in range(2))
    await owner.start()
    await other.start()
    writers = []
    try:
        async with httpx.AsyncClient(base_url=owner.url) as client:
            (await client.put(TOPIC)).raise_for_status()
            (await client.put(SUBSCRIPTION, json={"initial": "latest"})).raise_for_status()
        for number in range(RECEIVES):
            _, writer = await asyncio.open_connection("127.0.0.1", other.server.port)
            body = json.dumps(receiving(30_000, f"c{number % 50}")).encode()
            head = f"POST {SUBSCRIPTION}/receive HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            writers.append(writer)
        waited = sockets = 0
        async with asyncio.timeout(200):
            while waited < RECEIVES:
                await asyncio.sleep(0.1)
                waited, sockets = max(waited, owner.multiplexing.requests.count), max(sockets, owner.sockets)
        assert 1 <= owner.multiplexing.requests.connections <= 4
        assert sockets <= 5, "those of the other broker, and that of the client of this test"
        for writer in writers:
            writer.close()
        async with asyncio.timeout(100):
            while owner.multiplexing.requests.count or owner.waiting:
                await asyncio.sleep(0.1)
    finally:
        for writer in writers:
            writer.close()
        await other.stop()
        await owner.stop()


async def test_a_cancelled_receive_is_cancelled_at_the_owner(pair):
    owner, other = pair
    async with httpx.AsyncClient(base_url=other.url, timeout=30) as client:
        call = asyncio.create_task(client.post(SUBSCRIPTION + "/receive", json=receiving(30_000)))
        await until(lambda: owner.waiting == 1)
        call.cancel()
        await until(lambda: owner.waiting == 0)
        assert owner.multiplexing.requests.connections == 1
        assert (await client.get(TOPIC)).status_code == 200
    await until(lambda: owner.multiplexing.requests.count == 0)
    assert other.proxy.links.requests == 0


async def test_a_lost_owner_ends_what_is_in_progress_with_an_unknown_outcome_and_refuses_the_rest(pair):
    owner, other = pair
    async with httpx.AsyncClient(base_url=other.url, timeout=30) as client:
        call = asyncio.create_task(client.post(SUBSCRIPTION + "/receive", json=receiving(30_000)))
        await until(lambda: owner.waiting == 1)
        for server in owner.server._server.servers:  # as when its machine is gone: nobody listens
            server.close()
        for connection in list(owner.server._server.server_state.connections):
            connection.transport.abort()
        broken = await call
        assert (broken.status_code, broken.json()["code"]) == (504, "outcome_unknown")
        refused = await client.post(TOPIC + "/messages", content=b"x")
        assert (refused.status_code, refused.json()["code"]) == (503, "not_owner")


async def test_a_slow_reader_does_not_delay_others_and_holds_a_window_at_most(pair):
    owner, other = pair
    size = 4 * 2**20
    async with httpx.AsyncClient(base_url=other.url, timeout=60) as client:
        (await client.put(SUBSCRIPTION, json={"initial": "latest"})).raise_for_status()
        sent = await client.post(TOPIC + "/messages", content=os.urandom(size))
        assert sent.status_code == 200, sent.text
        body = json.dumps({"consumer": "slow", "wait_ms": 0, "max": 10}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", other.server.port, limit=2**16)
        head = f"POST {SUBSCRIPTION}/receive HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert (await reader.readexactly(12)) == b"HTTP/1.1 200"
        for number in range(20):
            answer = await client.post(TOPIC + "/messages", content=b"%d" % number)
            assert answer.status_code == 200
        assert other.proxy.links.requests == 1, "the answer to the slow reader is not complete"
        assert other.proxy.links.held.used <= 64 * 1024
        writer.close()
    await until(lambda: other.proxy.links.requests == 0)
    await until(lambda: owner.multiplexing.requests.count == 0)
    assert other.proxy.links.held.used == 0


async def test_a_broker_of_an_earlier_version_is_reached_over_http_1_1(tree, ledgers):
    owner = Node(tree=tree, ledgers=ledgers, serves_both=False)
    other = Node(tree=tree, ledgers=ledgers)
    await owner.start()
    await other.start()
    try:
        async with httpx.AsyncClient(base_url=owner.url) as client:
            (await client.post(TOPIC + "/messages", content=b"a")).raise_for_status()
        async with httpx.AsyncClient(base_url=other.url) as client:
            for _ in range(3):
                assert (await client.post(TOPIC + "/messages", content=b"b")).status_code == 200
        assert other.proxy.links.links == []
    finally:
        await other.stop()
        await owner.stop()


async def test_a_broker_that_has_too_many_requests_in_progress_answers_429(tree, ledgers):
    owner, other = (Node(tree=tree, ledgers=ledgers, requests_max=16) for _ in range(2))
    await owner.start()
    await other.start()
    try:
        async with httpx.AsyncClient(base_url=owner.url) as client:
            (await client.post(TOPIC + "/messages", content=b"a")).raise_for_status()
        async with httpx.AsyncClient(base_url=other.url, timeout=60) as client:
            calls = [
                asyncio.create_task(client.post(SUBSCRIPTION + "/receive", json=receiving(30_000))) for _ in range(16)
            ]
            await until(lambda: owner.waiting == 16)
            refused = await client.post(TOPIC + "/messages", content=b"x")
            assert (refused.status_code, refused.json()["code"]) == (429, "too_many_requests")
            for call in calls:
                call.cancel()
            await until(lambda: owner.multiplexing.requests.count == 0)
            assert (await client.post(TOPIC + "/messages", content=b"x")).status_code == 200
    finally:
        await other.stop()
        await owner.stop()


async def test_a_broker_that_stops_finishes_what_it_has_begun(pair):
    """Waiting calls are answered, and the next requests find no owner."""
    owner, other = pair
    async with httpx.AsyncClient(base_url=other.url, timeout=60) as client:
        call = asyncio.create_task(client.post(SUBSCRIPTION + "/receive", json=receiving(30_000)))
        await until(lambda: owner.waiting == 1)
        owner.harness.broker.finish()
        await owner.server.stop()
        answer = await call
        assert answer.status_code == 200, answer.text
        assert answer.json()["messages"] == []
        assert (await client.post(TOPIC + "/messages", content=b"x")).json()["code"] == "not_owner"
