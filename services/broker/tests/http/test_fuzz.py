"""Valid and invalid requests generated from the OpenAPI document: never a 500, only documented statuses and bodies.

The broker runs in a thread of its own, behind a real HTTP server on loopback, over in-memory bookies and metadata.
"""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from bindery_broker.http.protocol import ProblemHttpProtocol
from bindery_client.memory.memory import MemoryLedgers
from bindery_kit.http.http_server import HttpServer
from bindery_metadata.stores.memory import MemoryTree
from broker_harness import ROUTES, TOPIC, Clock, Harness
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = 6
ENDLESS = {"stream"}
"""Operations whose successful answer never ends."""
ONE_REQUEST = "listBrokers"
"""An operation without parameters and body: it has one valid request and no invalid one."""


class BrokerThread:
    """A broker and its server in a thread. `url` is set once the server has started."""

    def __init__(self) -> None:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self.url = ""

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        harness = Harness(
            tree=MemoryTree(), ledgers=MemoryLedgers(), clock=Clock(), url="http://one", receive_wait_ms_max=0
        )
        async with HttpServer(harness.app, port=0, http=ProblemHttpProtocol) as server:
            self.url = server.url
            self._ready.set()
            await self._stop.wait()
        await harness.close()

    def __enter__(self) -> "BrokerThread":
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with BrokerThread() as broker:
        with httpx.Client(base_url=broker.url) as client:
            client.post(f"{TOPIC}/messages", content=b"a").raise_for_status()
            client.post(f"{TOPIC}/messages", json=[{"payload": "b"}, {"payload": "c"}]).raise_for_status()
            client.put(f"{TOPIC}/subscriptions/s", json={}).raise_for_status()
        yield broker.url


@pytest.mark.parametrize("path", ["/v1/topics", TOPIC, f"{TOPIC}/subscriptions/s/ack", "/docs", "/livez"])
def test_head_leaves_the_connection_usable(url: str, path: str) -> None:
    """The server must not miss the body, and close."""
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=10) as client:
        request = f"{{}} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        client.sendall(request.format("HEAD").encode() + request.format("OPTIONS").encode())
        found = b""
        while found.count(b"HTTP/1.1 ") < 2:
            data = client.recv(65536)
            assert data, found
            found += data


@pytest.fixture(scope="module")
def schema(url: str) -> Any:
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


def _cases() -> list[Any]:
    return [
        pytest.param(mode, route.operation_id, id=f"{name}-{route.operation_id}")
        for mode, name in ((GenerationMode.POSITIVE, "valid"), (GenerationMode.NEGATIVE, "invalid"))
        for route in ROUTES
        if route.operation_id not in ENDLESS and (name, route.operation_id) != ("invalid", ONE_REQUEST)
    ]


@pytest.mark.parametrize(("mode", "operation_id"), _cases())
def test_answers_conform_to_the_openapi_document(schema, operation_id, mode):
    operation = schema.find_operation_by_id(operation_id)
    count = 0

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Case) -> None:
        nonlocal count
        count += 1
        # Every second request names existing resources.
        if count % 2 and case.path_parameters and "topic" in case.path_parameters:
            known = {"tenant": "public", "namespace": "default", "topic": "t", "subscription": "s", "message_id": "0:0"}
            case.path_parameters.update({k: v for k, v in known.items() if k in case.path_parameters})
        case.call_and_validate(checks=CHECKS)

    check()
    assert count >= (1 if operation_id == ONE_REQUEST else EXAMPLES // 2)


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"FOO /v1/topics HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, "invalid_http"),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431, "headers_too_large"),
        (b"\x00\x01\x02\x03\r\n\r\n", 400, "invalid_http"),
        (b"POST /v1/topics/public/default/t/messages HTTP/1.1\r\nContent-Length: five\r\n\r\n", 400, "invalid_http"),
    ],
    ids=["method", "long", "bytes", "length"],
)
def test_invalid_http_is_answered_with_a_problem_and_the_broker_continues(url, sent, status, code):
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as line:
        line.sendall(sent)
        answer = b""
        with contextlib.suppress(
            ConnectionResetError
        ):  # the broker does not read the rest of a request that it refuses
            while piece := line.recv(65_536):
                answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"application/problem+json" in head.lower()
    assert json.loads(body)["code"] == code
    assert httpx.get(f"{url}/v1/topics").status_code == 200
