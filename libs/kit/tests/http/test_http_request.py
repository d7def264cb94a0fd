"""The requests of this server: the end of their client, those that ask for another protocol, and late bodies."""

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


# --- requests that ask for another protocol ---------------------------------------------------------------------------

HTTP2 = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
"""Headers that curl with --http2, and Java's client by default, send with the first request of a connection."""
END = b"Connection: close\r\n"


def post(body: bytes, *headers: bytes) -> bytes:
    return b"POST /m HTTP/1.1\r\nHost: localhost\r\n%bContent-Length: %d\r\n\r\n%b" % (
        b"".join(headers),
        len(body),
        body,
    )


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with method, connection options and body."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    options = b"|".join(value for name, value in scope["headers"] if name in (b"connection", b"upgrade"))
    text = b"<%b %b %b>" % (scope["method"].encode(), options, body)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(text))]})
    await send({"type": "http.response.body", "body": text})


async def answers(*reads: bytes) -> list[bytes]:
    """Return the bodies of the responses to bytes that the server reads one after the other."""
    async with HttpServer(echo, port=0, lifespan="off") as server, asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for data in reads:
            writer.write(data)
            await asyncio.sleep(0.05)
        answer = await reader.read()
        writer.close()
    return [part.rpartition(b"\r\n\r\n")[2] for part in answer.split(b"HTTP/1.1 200 ")[1:]]


async def test_a_request_that_asks_for_another_protocol_keeps_its_body() -> None:
    assert await answers(post(b"hello", HTTP2, END)) == [b"<POST HTTP2-Settings|close hello>"]


async def test_the_body_of_such_a_request_may_arrive_later_and_is_no_request() -> None:
    inner = b"GET / HTTP/1.1 of nobody"
    head = post(inner, HTTP2).removesuffix(inner)
    assert await answers(head, inner[:9], inner[9:] + post(b"two", END)) == [
        b"<POST HTTP2-Settings %b>" % inner,
        b"<POST close two>",
    ]


async def test_requests_behind_such_a_request_are_answered_in_order() -> None:
    requests = [post(b"one", HTTP2), post(b"two", HTTP2), post(b"three"), post(b"four", HTTP2, END)]
    bodies = [answer.split()[-1] for answer in await answers(b"".join(requests))]
    assert bodies == [b"one>", b"two>", b"three>", b"four>"]


async def test_chunks_and_a_head_in_pieces_are_read_as_well() -> None:
    head = b"POST /m HTTP/1.1\r\nHost: localhost\r\n" + HTTP2 + END + b"Transfer-Encoding: chunked\r\n\r\n"
    assert await answers(head[:40], head[40:90], head[90:] + b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n") == [
        b"<POST HTTP2-Settings|close abcde>"
    ]


async def test_connect_is_refused() -> None:
    async with HttpServer(echo, port=0, lifespan="off") as server, asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n" + post(b"hidden"))
        assert (await reader.read()).startswith(b"HTTP/1.1 400 Bad Request\r\n")
        writer.close()


async def test_a_request_behind_a_late_body_is_not_ended_as_an_idle_connection() -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/slow":
            await asyncio.sleep(1.3)
        request = request_of(send)
        assert request is not None
        assert request.respond(200, [(b"content-length", b"2")], b"ok")

    async with HttpServer(slow, port=0, lifespan="off", timeout_keep_alive=1) as server, asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(post(b"hello")[:-5])
        await reader.readuntil(b"ok")
        writer.write(b"hello" + post(b"").replace(b"/m", b"/slow"))
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.close()


async def test_a_connection_whose_body_follows_its_response_is_closed_when_it_is_idle() -> None:
    async def at_once(scope: Any, receive: Any, send: Any) -> None:
        request = request_of(send)
        assert request is not None
        assert request.respond(200, [(b"content-length", b"2")], b"ok")

    async with HttpServer(at_once, port=0, lifespan="off", timeout_keep_alive=1) as server, asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(post(b"hello")[:-5])
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.write(b"hello")
        assert await reader.read() == b""
        writer.close()
