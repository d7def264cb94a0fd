"""What every service's HTTP looks like: problems, health, metrics, a server that its owner starts and stops."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator

import httpx
import pytest
from bindery_core.errors import BinderyError, DamagedStorage, NoSuchTopic, TooManyRequests
from bindery_kit.http import http_limits
from bindery_kit.http.http_limits import PIPELINED_MAX
from bindery_kit.http.http_server import BindRefused, HttpServer, bind_tcp
from bindery_kit.http.problem import CONTENT_TYPE, problem_of
from bindery_kit.http.problem_fastapi import install_refusals
from bindery_kit.observability.health import Health, OpsApp
from bindery_kit.observability.metrics import Metrics
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel


class Body(BaseModel):
    count: int


def make_app() -> FastAPI:
    app = FastAPI()
    install_refusals(app)

    @app.exception_handler(BinderyError)
    async def on_error(_: Request, error: BinderyError) -> Response:
        return problem_of(error)

    @app.get("/fail/{kind}")
    async def fail(kind: str) -> None:
        raise {
            "missing": NoSuchTopic("no such topic", topic="a/b/c"),
            "busy": TooManyRequests("too many requests", bytes_in_flight=7),
            "damaged": DamagedStorage("bad file", path="x"),
        }[kind]

    @app.post("/count")
    async def count(body: Body) -> int:
        return body.count

    @app.get("/slow")
    async def slow() -> str:
        await asyncio.sleep(60)
        return "late"

    return app


@pytest.fixture
def health() -> Health:
    return Health()


@pytest.fixture
async def client(health: Health) -> AsyncIterator[httpx.AsyncClient]:
    metrics = Metrics("kittest")
    metrics.counter("adds_total", "adds").inc(3)
    metrics.histogram("add_seconds", "latency").observe(0.003)
    app = OpsApp(health, metrics, app=make_app())
    async with HttpServer(app, port=0) as server, httpx.AsyncClient(base_url=server.url, trust_env=False) as http:
        yield http


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [("missing", 404, "no_such_topic"), ("busy", 429, "too_many_requests"), ("damaged", 500, "damaged_storage")],
)
async def test_a_bindery_error_becomes_a_problem(client: httpx.AsyncClient, kind: str, status: int, code: str) -> None:
    answer = await client.get(f"/fail/{kind}")
    assert answer.status_code == status
    assert answer.headers["content-type"] == CONTENT_TYPE
    body = answer.json()
    assert (body["code"], body["status"], body["type"]) == (code, status, f"urn:bindery:problem:{code}")
    assert ("retry-after" in answer.headers) == (status == 429)


async def test_the_facts_of_an_error_are_fields(client: httpx.AsyncClient) -> None:
    body = (await client.get("/fail/missing")).json()
    assert body["facts"] == {"topic": "a/b/c"}
    assert body["detail"] == "no such topic: topic=a/b/c"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("DELETE", "/count", 405, "method_not_allowed"),
        ("POST", "/count", 400, "validation_failed"),
        ("POST", "/metrics", 405, None),
    ],
)
async def test_what_the_framework_refuses_is_a_problem_too(
    client: httpx.AsyncClient, method: str, path: str, status: int, code: str | None
) -> None:
    answer = await client.request(method, path, content=b'{"count": "many"}')
    assert answer.status_code == status
    if code:
        assert answer.json()["code"] == code


async def test_a_wrong_field_is_named(client: httpx.AsyncClient) -> None:
    body = (await client.post("/count", json={"count": "many"})).json()
    assert body["errors"][0]["where"] == "body.count"


async def test_metrics_are_served_with_fixed_buckets(client: httpx.AsyncClient) -> None:
    text = (await client.get("/metrics")).text
    assert "bindery_kittest_adds_total 3.0" in text
    assert 'bindery_kittest_add_seconds_bucket{le="0.0025"} 0.0' in text
    assert 'bindery_kittest_add_seconds_bucket{le="0.005"} 1.0' in text


async def test_readiness_lists_its_obstacles_until_there_are_none(client: httpx.AsyncClient, health: Health) -> None:
    health.progress("replaying the journal", done=3, total=10, unit="MB")
    answer = await client.get("/startupz")
    assert answer.status_code == 503
    assert answer.json()["progress"] == {"step": "replaying the journal", "done": 3, "total": 10, "unit": "MB"}
    assert (await client.get("/livez")).status_code == 200

    health.started()
    health.block("metadata", "session lost")
    health.block("disk", "full")
    health.clear("disk")
    answer = await client.get("/readyz")
    assert (answer.status_code, answer.json()["reasons"]) == (503, {"metadata": "session lost"})
    text = (await client.get("/metrics")).text
    assert "\nbindery_ready 0\n" in text
    assert '\nbindery_not_ready{part="metadata"} 1\nbindery_not_ready{part="startup"} 0\n' in text

    health.clear("metadata")
    text = (await client.get("/metrics")).text
    assert "\nbindery_ready 1\n" in text
    assert '\nbindery_not_ready{part="metadata"} 0\n' in text
    assert (await client.get("/readyz")).json() == {"status": "ready"}

    health.fail("journal", "its thread died")
    assert (await client.get("/readyz")).status_code == 503
    assert (await client.get("/livez")).json()["reasons"] == {"journal": "its thread died"}


async def test_without_an_app_only_the_four_pages_are_there(health: Health) -> None:
    async with (
        HttpServer(OpsApp(health, Metrics("kittest")), port=0) as server,
        httpx.AsyncClient(base_url=server.url, trust_env=False) as http,
    ):
        assert (await http.get("/livez")).status_code == 200
        assert (await http.head("/livez")).content == b""
        answer = await http.get("/other")
        assert (answer.status_code, answer.headers["content-type"]) == (404, CONTENT_TYPE)


async def test_a_server_stops_in_time_whatever_its_clients_do(health: Health) -> None:
    server = HttpServer(OpsApp(health, Metrics("kittest"), app=make_app()), port=0, stop_timeout_s=0.3)
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
    await writer.drain()
    async with asyncio.timeout(30):
        await server.stop()
        await reader.read()
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", server.port)
    writer.close()


def test_only_loopback_is_bound_unless_told_otherwise() -> None:
    with pytest.raises(BindRefused, match="--insecure"):
        bind_tcp("0.0.0.0", 0)
    bind_tcp("0.0.0.0", 0, insecure=True).close()


def test_a_service_without_fastapi_does_not_load_it() -> None:
    script = "import sys, bindery_kit.http.problem, bindery_kit.http.http_server; print('fastapi' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60).stdout
    assert out.strip() == "False"


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(BindRefused, match=str(other.getsockname()[1])):
            bind_tcp("127.0.0.1", other.getsockname()[1])


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"GET /livez HTTP/1.1\r\nHost: x\r\n", b"X-Filler: " + b"a" * 65_000 + b"\r\n"),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nX-Endless: ", b"a" * 65_000),
        (
            b"POST /count HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n1\r\n0\r\n",
            b"X-Trailer: " + b"a" * 65_000 + b"\r\n",
        ),
    ],
    ids=["many headers", "one header", "trailers"],
)
async def test_headers_without_end_are_refused_before_they_fill_the_memory(health, begin, more):
    async with HttpServer(OpsApp(health, Metrics("kittest"), app=make_app()), port=0) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        sent = 0
        async with asyncio.timeout(30):
            writer.write(begin)
            answer = asyncio.create_task(reader.read())
            while not answer.done() and sent < 64 * 2**20:
                writer.write(more)
                sent += len(more)
                try:
                    await writer.drain()
                except ConnectionError:
                    break
                await asyncio.sleep(0)
            with contextlib.suppress(ConnectionError):  # a reset may take the answer along
                assert (await answer).startswith(b"HTTP/1.1 431 ")
        writer.close()
        assert sent < 16 * 2**20
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as http:
            assert (await http.get("/livez")).status_code == 200


async def test_pipelined_requests_are_answered_and_endless_ones_end_the_connection(health):
    """uvicorn would keep as many as a client sends while it answers the first: gigabytes, from anybody."""
    request = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
    async with HttpServer(OpsApp(health, Metrics("kittest"), app=make_app()), port=0) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        async with asyncio.timeout(30):
            writer.write(request * PIPELINED_MAX)
            for _ in range(PIPELINED_MAX):
                assert b"HTTP/1.1 200 " in await reader.readuntil(b"}")
            writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n" + request * (PIPELINED_MAX + 1))
            assert b"HTTP/1.1 400 " in await reader.read()
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        async with asyncio.timeout(30):
            writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n" + request)
            sent = 0
            with contextlib.suppress(ConnectionError, TimeoutError):
                while sent < 32 * 2**20:  # more than sockets hold: nothing is read while one waits
                    writer.write(request * 1000)
                    sent += 1000 * len(request)
                    await asyncio.wait_for(writer.drain(), timeout=1)
            assert sent < 32 * 2**20
        writer.transport.abort()
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as http:
            assert (await http.get("/livez")).status_code == 200


async def test_a_head_that_does_not_end_is_given_up(health, monkeypatch):
    monkeypatch.setattr(http_limits, "HEAD_TIMEOUT_S", 0.2)
    async with HttpServer(OpsApp(health, Metrics("kittest"), app=make_app()), port=0) as server, asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert await reader.read() == b"", "nothing was sent, so nothing is answered"
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for beginning in (b"", b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"):
            if beginning:
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(beginning)
                assert b" 200 OK" in await reader.readuntil(b"}\n")
            writer.write(b"GET /livez HTTP/1.1\r\nX-Slow: ")
            answer = asyncio.create_task(reader.read())
            while not answer.done():  # a byte now and then is no progress
                with contextlib.suppress(ConnectionError):
                    writer.write(b"s")
                await asyncio.sleep(0.05)
            head, _, body = (await answer).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408 ")
            assert json.loads(body)["code"] == "request_timeout"
            writer.close()


async def test_a_request_that_takes_longer_than_a_head_may_is_answered(health, monkeypatch):
    monkeypatch.setattr(http_limits, "HEAD_TIMEOUT_S", 0.05)

    async def pieces():
        yield b'{"count": '
        for _ in range(5):
            await asyncio.sleep(0.05)
            yield b" "
        yield b"7}"

    async with (
        HttpServer(OpsApp(health, Metrics("kittest"), app=make_app()), port=0) as server,
        httpx.AsyncClient(base_url=server.url, trust_env=False) as http,
    ):
        answer = await http.post("/count", content=pieces(), headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()) == (200, 7)
        await asyncio.sleep(0.2)  # kept alive: no head has begun
        assert (await http.get("/livez")).status_code == 200


async def test_a_new_client_gets_the_place_of_the_idlest_and_none_of_a_busy_one(health):
    app = OpsApp(health, Metrics("kittest"), app=make_app())
    async with HttpServer(app, port=0, connections_max=2) as server, asyncio.timeout(30):

        async def connect(request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request)
            if b"livez" in request:
                assert b" 200 OK" in await reader.readuntil(b"}\n")
            return reader, writer

        live, slow = (b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n" % path for path in (b"livez", b"slow"))
        idlest, _ = await connect(live)
        idle, idle_writer = await connect(live)
        _, third_writer = await connect(live)
        with contextlib.suppress(ConnectionError):
            assert await idlest.read() == b""
        idle_writer.write(live)
        assert b" 200 OK" in await idle.readuntil(b"}\n"), "the other one was left alone"
        for writer in (idle_writer, third_writer):
            writer.write(slow)
        await asyncio.sleep(0.2)
        for path in (b"livez", b"readyz", b"metrics"):  # a process that is fully used is not to be taken for dead
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET /%s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % path)
            assert b" 503 Service Unavailable\r\nContent-Type" not in await reader.read()
            writer.close()
        refused, refused_writer = await asyncio.open_connection("127.0.0.1", server.port)
        refused_writer.write(slow)
        head, _, body = (await refused.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1" in head
        assert json.loads(body)["code"] == "too_many_connections"
        idle_writer.transport.abort()
        await asyncio.sleep(0.2)
        _, last = await connect(live)
        last.close()
        third_writer.transport.abort()


async def test_a_connection_on_which_a_waiting_request_runs_makes_no_room(health):
    release = asyncio.Event()

    async def app(scope, receive, send):
        if scope["type"] != "http":
            return
        if scope["path"] == "/slow":
            await release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    one, two = (b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n" % path for path in (b"fast", b"slow"))
    app = OpsApp(health, Metrics("kittest"), app=app)
    async with HttpServer(app, port=0, connections_max=1) as server, asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(one + two)
        assert b" 200 OK" in await reader.readuntil(b"ok")
        late, late_writer = await asyncio.open_connection("127.0.0.1", server.port)
        late_writer.write(one)
        assert b" 503 " in await late.read()
        release.set()
        assert b" 200 OK" in await reader.readuntil(b"ok")
        writer.close()


async def test_a_long_body_in_small_pieces_is_no_header_without_end(health):
    seen = 0

    async def app(scope, receive, send):
        nonlocal seen
        if scope["type"] != "http":
            return
        is_more = True
        while is_more:
            message = await receive()
            seen += len(message.get("body", b""))
            is_more = message.get("more_body", False)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def pieces():
        for _ in range(600):
            yield b"x" * 1000

    async with (
        HttpServer(OpsApp(health, Metrics("kittest"), app=app), port=0) as server,
        httpx.AsyncClient(base_url=server.url, trust_env=False) as http,
    ):
        assert (await http.post("/any", content=pieces())).status_code == 204
        assert seen == 600_000
