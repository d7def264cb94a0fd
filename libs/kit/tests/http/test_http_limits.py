"""Limits on request heads, pipelined requests and connections, against hostile clients."""

import asyncio
import contextlib
import json

import httpx
import pytest
from bindery_kit.configuration.http_settings import HttpSettings
from bindery_kit.http.http_limits import PIPELINED_MAX
from bindery_kit.http.http_server import HttpServer
from bindery_kit.observability.health import OpsApp
from bindery_kit.observability.metrics import Metrics


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"GET /livez HTTP/1.1\r\nHost: localhost\r\n", b"X-Filler: " + b"a" * 65_000 + b"\r\n"),
        (b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-Endless: ", b"a" * 65_000),
        (
            b"POST /count HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n1\r\n0\r\n",
            b"X-Trailer: " + b"a" * 65_000 + b"\r\n",
        ),
    ],
    ids=["many headers", "one header", "trailers"],
)
async def test_endless_headers_are_refused_before_they_fill_the_memory(health, app, begin, more):
    async with HttpServer(OpsApp(health, Metrics("kittest"), app=app), port=0) as server:
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
            with contextlib.suppress(ConnectionError):  # a reset may discard the response
                assert (await answer).startswith(b"HTTP/1.1 431 ")
        writer.close()
        assert sent < 16 * 2**20
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as http:
            assert (await http.get("/livez")).status_code == 200


async def test_pipelined_requests_are_answered_up_to_a_limit(health, app):
    """uvicorn alone would queue all requests that a client sends while the first is answered, up to gigabytes."""
    request = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with HttpServer(OpsApp(health, Metrics("kittest"), app=app), port=0) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        async with asyncio.timeout(30):
            writer.write(request * PIPELINED_MAX)
            for _ in range(PIPELINED_MAX):
                assert b"HTTP/1.1 200 " in await reader.readuntil(b"}")
            writer.write(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n" + request * (PIPELINED_MAX + 1))
            assert b"HTTP/1.1 400 " in await reader.read()
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        async with asyncio.timeout(30):
            writer.write(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n" + request)
            sent = 0
            with contextlib.suppress(ConnectionError, TimeoutError):
                while sent < 32 * 2**20:  # more than the sockets buffer: the server must not read
                    writer.write(request * 1000)
                    sent += 1000 * len(request)
                    await asyncio.wait_for(writer.drain(), timeout=1)
            assert sent < 32 * 2**20
        writer.transport.abort()
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as http:
            assert (await http.get("/livez")).status_code == 200


async def test_an_incomplete_head_times_out(health, app):
    settings = HttpSettings(head_timeout_s=0.2)
    async with (
        HttpServer(OpsApp(health, Metrics("kittest"), app=app), settings=settings) as server,
        asyncio.timeout(30),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert await reader.read() == b"", "nothing was sent, so nothing is answered"
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for beginning in (b"", b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            if beginning:
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(beginning)
                assert b" 200 OK" in await reader.readuntil(b"}\n")
            writer.write(b"GET /livez HTTP/1.1\r\nX-Slow: ")
            answer = asyncio.create_task(reader.read())
            while not answer.done():  # single bytes do not extend the timeout
                with contextlib.suppress(ConnectionError):
                    writer.write(b"s")
                await asyncio.sleep(0.05)
            head, _, body = (await answer).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408 ")
            assert json.loads(body)["code"] == "request_timeout"
            writer.close()


async def test_the_timeout_of_a_head_does_not_apply_to_the_body(health, app):
    settings = HttpSettings(head_timeout_s=0.05)

    async def pieces():
        yield b'{"count": '
        for _ in range(5):
            await asyncio.sleep(0.05)
            yield b" "
        yield b"7}"

    async with (
        HttpServer(OpsApp(health, Metrics("kittest"), app=app), settings=settings) as server,
        httpx.AsyncClient(base_url=server.url, trust_env=False) as http,
    ):
        answer = await http.post("/count", content=pieces(), headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()) == (200, 7)
        await asyncio.sleep(0.2)  # kept alive: no head has begun
        assert (await http.get("/livez")).status_code == 200


async def test_a_new_client_replaces_the_longest_idle_connection_and_no_busy_one(health, app):
    app = OpsApp(health, Metrics("kittest"), app=app)
    async with (
        HttpServer(app, settings=HttpSettings(connections_max=2, connections_per_address_max=2)) as server,
        asyncio.timeout(30),
    ):

        async def connect(request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request)
            if b"livez" in request:
                assert b" 200 OK" in await reader.readuntil(b"}\n")
            return reader, writer

        live, slow = (b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path for path in (b"livez", b"slow"))
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
        for path in (b"livez", b"readyz", b"metrics"):  # probes succeed in a process that is fully used
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET /%s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % path)
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


async def test_a_connection_with_a_pipelined_request_is_not_idle(health):
    release = asyncio.Event()

    async def app(scope, receive, send):
        if scope["type"] != "http":
            return
        if scope["path"] == "/slow":
            await release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    one, two = (b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path for path in (b"fast", b"slow"))
    app = OpsApp(health, Metrics("kittest"), app=app)
    async with (
        HttpServer(app, settings=HttpSettings(connections_max=1, connections_per_address_max=1)) as server,
        asyncio.timeout(30),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(one + two)
        assert b" 200 OK" in await reader.readuntil(b"ok")
        late, late_writer = await asyncio.open_connection("127.0.0.1", server.port)
        late_writer.write(one)
        assert b" 503 " in await late.read()
        release.set()
        assert b" 200 OK" in await reader.readuntil(b"ok")
        writer.close()


async def test_a_long_body_in_small_pieces_does_not_count_as_headers(health):
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
