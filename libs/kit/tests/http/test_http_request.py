"""What an application does with the request of this server: it is told when the client disconnects."""

import asyncio
from typing import Any

from bindery_kit.http.http_request import request_of
from bindery_kit.http.http_server import HttpServer

REQUEST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"


class Waiting:
    """An application that waits until its client has gone, or until it may answer."""

    def __init__(self) -> None:
        self.gone: list[str] = []
        self.begun = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.ended = asyncio.Event()
        self.received: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        try:
            self.received.append(await receive())
            request = request_of(send)
            assert request is not None
            request.watch(self._lost)
            self.begun.set()
            await self.may_answer.wait()
            request.watch(None)
            assert request.respond(200, [(b"content-length", b"2")], b"ok") == (not self.gone)
        finally:
            self.ended.set()

    def _lost(self) -> None:
        self.gone.append("gone")
        self.may_answer.set()


async def test_the_application_is_told_that_its_client_has_gone() -> None:
    app = Waiting()
    async with HttpServer(app, port=0, lifespan="off") as server, asyncio.timeout(30):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(REQUEST)
        await app.begun.wait()
        assert app.gone == []
        writer.transport.abort()
        await app.ended.wait()
    assert app.gone == ["gone"]
    assert app.received == [{"type": "http.request", "body": b"{}", "more_body": False}]


async def test_a_client_that_closes_only_its_side_has_gone() -> None:
    app = Waiting()
    async with HttpServer(app, port=0, lifespan="off") as server, asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(REQUEST)
        await app.begun.wait()
        writer.write_eof()
        await app.ended.wait()
        assert await reader.read() == b""
        writer.close()
    assert app.gone == ["gone"]


async def test_nothing_is_told_after_the_response() -> None:
    app = Waiting()
    async with HttpServer(app, port=0, lifespan="off") as server, asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(REQUEST)
        await app.begun.wait()
        app.may_answer.set()
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.close()
        await app.ended.wait()
    assert app.gone == []


async def test_a_client_that_had_gone_before_is_told_at_once() -> None:
    gone: list[int] = []
    ended = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = request_of(send)
        assert request is not None
        while (await receive())["type"] != "http.disconnect":
            pass
        request.watch(lambda: gone.append(1))
        ended.set()

    async with HttpServer(app, port=0, lifespan="off") as server, asyncio.timeout(30):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(REQUEST)
        await asyncio.sleep(0.05)
        writer.transport.abort()
        await ended.wait()
    assert gone == [1]
