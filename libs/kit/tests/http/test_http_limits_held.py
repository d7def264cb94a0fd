"""Limits of an HTTP port on what all clients together hold, and on slow ones: each attack ends, and others go on."""

import asyncio
import contextlib
import gc
import json
import socket
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from bindery_kit.configuration.http_settings import HttpSettings
from bindery_kit.http import http_limits
from bindery_kit.http.http_limits import (
    FREE_BODY_SIZE,
    HEAD_SIZE_MAX,
    HEADERS_MAX,
    PIPELINED_MAX,
    UNREAD_MARK,
    HttpLimits,
)
from bindery_kit.http.http_server import HttpServer
from bindery_kit.http.http_stats import HttpStats

KIB = 1024


class App:
    """Sums up bodies at /body, sends `size` bytes at /big?size, refuses bodies unread at /no. Waits at /wait, at /late
    before it takes the body, and at /taken after that."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.send_timeout_s: float | None = None
        """Seconds after which a response that is not read is given up."""
        self.headers: list[list[tuple[bytes, bytes]]] = []
        self.running = 0
        self.sizes: list[int] = []
        """Sizes of the bodies that were taken."""
        self.keep: Callable[[int], None] = lambda _size: None
        """Called with the size of each body at the moment in which it was taken."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self.running += 1
        try:
            answer = await self._answer(scope, receive)
            if answer is None:
                return
            length = (b"content-length", b"%d" % len(answer))
            await send({"type": "http.response.start", "status": 200, "headers": [length]})
            for start in range(0, len(answer), 64 * KIB):
                piece = answer[start : start + 64 * KIB]
                try:
                    async with asyncio.timeout(self.send_timeout_s):
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                except TimeoutError:
                    return
            await send({"type": "http.response.body", "body": b""})
        finally:
            self.running -= 1
            self.headers.append(scope["headers"])

    async def _answer(self, scope: Any, receive: Any) -> bytes | None:
        path = scope["path"]
        if path == "/big":
            return b"x" * int(scope["query_string"])
        if path in ("/wait", "/late"):
            await self.release.wait()
        if path in ("/body", "/late", "/taken"):
            size, is_more = 0, True
            while is_more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                size += len(message["body"])
                is_more = message["more_body"]
            self.keep(size)
            self.sizes.append(size)
            if path == "/taken":
                await self.release.wait()
            return b"%d" % size
        return b"ok"


class Client:
    """A connection that sends raw bytes. `small_buffer`: the kernel takes few bytes that are not read."""

    def __init__(self, port: int, *, source: str = "127.0.0.1", small_buffer: bool = False) -> None:
        self._port, self._source, self._small_buffer = port, source, small_buffer
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def connect(self) -> "Client":
        sock = socket.socket()
        if self._small_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * KIB)
        sock.setblocking(False)
        sock.bind((self._source, 0))
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self._port))
        # without a reader that takes everything: the limit is far below what the tests send
        self.reader, self.writer = await asyncio.open_connection(sock=sock, limit=4 * KIB)
        return self

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def status(self) -> int:
        """Return the status of the response; 0 if the connection ends without one."""
        try:
            line = await self.reader.readline()
        except ConnectionError:
            return 0
        return int(line.split()[1]) if line else 0

    async def problem(self) -> tuple[int, str]:
        """Return status and code of an error response, after which the connection ends."""
        head, _, body = (await self.reader.read()).partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body)["code"]

    async def ok(self) -> None:
        self.send(get("/ok"))
        assert (await self.reader.readuntil(b"\r\n\r\nok")).startswith(b"HTTP/1.1 200 ")

    def close(self) -> None:
        self.writer.transport.abort()


class Port:
    """A server with its application and its clients."""

    def __init__(self, server: HttpServer, app: App, stats: HttpStats) -> None:
        self.server, self.app, self.stats = server, app, stats
        self._clients: list[Client] = []

    async def client(self, **options: Any) -> Client:
        client = await Client(self.server.port, **options).connect()
        self._clients.append(client)
        return client

    def held(self, kind: str) -> int:
        for line in self.stats.render().decode().splitlines():
            if line.startswith(f'bindery_http_held_bytes{{kind="{kind}"}} '):
                return int(line.split()[-1])
        raise AssertionError(kind)

    def protocols(self) -> list[HttpLimits]:
        """Return the server's objects of connections that exist in the process."""
        protocols = [one for one in gc.get_objects() if isinstance(one, HttpLimits)]
        return [one for one in protocols if one.shared.stats is self.stats]

    async def until(self, kind: str, size: int) -> None:
        """Return when exactly `size` bytes are held."""
        while self.held(kind) != size:
            await asyncio.sleep(0.01)

    def close(self) -> None:
        self.app.release.set()
        for client in self._clients:
            client.close()


@contextlib.asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[Port]:
    app, stats = App(), HttpStats()
    settings = {"connections_per_address_max": 1000, **settings}
    async with (
        HttpServer(app, settings=HttpSettings(**settings), stats=stats, stop_timeout_s=1) as server,
        asyncio.timeout(60),
    ):
        port = Port(server, app, stats)
        try:
            yield port
        finally:
            port.close()


def get(path: str, *, filler: int = 0) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nX-Filler: {'f' * filler}\r\n\r\n".encode()


def post(path: str, size: int) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n".encode()


# --- heads


@pytest.mark.parametrize("pieces", [1, 3])
async def test_the_number_of_headers_is_limited(pieces: int) -> None:
    def request(count: int) -> bytes:
        return b"GET /ok HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * (count - 1) + b"\r\n"

    async with serving() as port:
        for count, expected in ((HEADERS_MAX, 200), (HEADERS_MAX + 1, 431)):
            client, data = await port.client(), request(count)
            for part in range(pieces):
                client.send(data[len(data) * part // pieces : len(data) * (part + 1) // pieces])
                await asyncio.sleep(0.05)
            assert await client.status() == expected
        assert port.stats.refused == {"head_size": 1}


async def test_the_size_of_a_head_that_arrives_at_once_is_limited() -> None:
    async with serving() as port:
        for filler, expected in ((HEAD_SIZE_MAX - 200, 200), (HEAD_SIZE_MAX, 431)):
            client = await port.client()
            client.send(get("/ok", filler=filler))
            assert await client.status() == expected
        client = await port.client()
        client.send(f"GET /{'a' * HEAD_SIZE_MAX} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert await client.problem() == (431, "headers_too_large")


async def test_trailers_are_limited_and_never_become_headers() -> None:
    chunked = b"POST /body HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
    async with serving() as port:
        client = await port.client()
        client.send(chunked + b"Authorization: Bearer stolen\r\n\r\n")
        assert await client.status() == 200
        assert [name for name, _ in port.app.headers[0]] == [b"host", b"transfer-encoding"]
        client = await port.client()
        client.send(chunked + b"A: b\r\n" * (HEADERS_MAX + 1) + b"\r\n")
        assert await client.problem() == (431, "headers_too_large")


async def test_incomplete_heads_are_limited_in_all_and_the_oldest_pays() -> None:
    async with serving(heads_size_max=64 * KIB) as port:
        attackers = [await port.client() for _ in range(3)]
        for number, attacker in enumerate(attackers):
            attacker.send(b"GET / HTTP/1.1\r\nA: " + b"a" * (28 * KIB))
            await port.until("heads", min(number + 1, 2) * (28 * KIB + 19))
        assert await attackers[0].problem() == (429, "too_many_requests")
        assert port.stats.refused == {"heads_size": 1}
        await (await port.client()).ok()
        for attacker in attackers:
            attacker.close()
        await port.until("heads", 0)


async def test_large_heads_of_waiting_requests_count_until_they_are_answered() -> None:
    async with serving(heads_size_max=64 * KIB) as port:
        clients = [await port.client() for _ in range(2)]
        for client in clients:
            client.send(get("/wait", filler=20 * KIB))
            await asyncio.sleep(0.05)
        held = port.held("heads")
        assert 2 * 20 * KIB < held < 2 * 25 * KIB
        small = await port.client()
        small.send(get("/wait"))
        await asyncio.sleep(0.05)
        assert port.held("heads") == held, "a small head is free"
        late = await port.client()
        late.send(get("/wait", filler=20 * KIB))
        assert await clients[0].problem() == (429, "too_many_requests")
        port.app.release.set()
        for client in (clients[1], small, late):
            assert await client.status() == 200
        await port.until("heads", 0)


async def test_pipelined_requests_count_while_they_wait() -> None:
    async with serving() as port:
        client = await port.client()
        client.send(get("/wait") + get("/ok") * 10)
        while port.held("heads") < 10 * 3 * KIB:
            await asyncio.sleep(0.01)
        port.app.release.set()
        for _ in range(11):
            assert (await client.reader.readuntil(b"\r\n\r\nok")).startswith(b"HTTP/1.1 200 ")
        await port.until("heads", 0)


async def test_the_head_of_an_answered_request_is_freed_while_its_connection_is_idle() -> None:
    async with serving() as port:
        client = await port.client()
        client.send(get("/ok", filler=20 * KIB))
        await client.reader.readuntil(b"\r\n\r\nok")
        port.app.headers.clear()
        await asyncio.sleep(0.05)
        assert not large_texts()
        await client.ok()


async def test_an_idle_connection_keeps_neither_its_request_nor_a_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of idle connections would keep so many small objects that Python could not return their memory."""
    monkeypatch.setattr(http_limits, "PARSERS_KEPT", 0)
    async with serving() as port:
        client = await port.client()
        await asyncio.sleep(0.05)
        [protocol] = port.protocols()
        assert protocol.parser is None, "nothing arrived yet"
        for begin, rest in ((b"", get("/ok")), (post("/body", 4)[:20], post("/body", 4)[20:] + b"1234")):
            client.send(begin)
            await asyncio.sleep(0.05)
            client.send(rest)
            await client.reader.readuntil(b"\r\n\r\n")
            await client.reader.readexactly(2 if rest == get("/ok") else 1)
            await asyncio.sleep(0.05)
            assert (protocol.parser, protocol.cycle, protocol.scope) == (None, None, None)
        client.send(get("/ok") + get("/ok")[:10])  # the next head has begun
        await client.reader.readuntil(b"\r\n\r\nok")
        await asyncio.sleep(0.05)
        client.send(get("/ok")[10:])
        await client.reader.readuntil(b"\r\n\r\nok")


async def test_the_rest_of_a_body_is_no_request_if_its_request_was_answered_before() -> None:
    async with serving() as port:
        client = await port.client()
        client.send(post("/ok", 100) + b"x")
        await client.reader.readuntil(b"\r\n\r\nok")
        await asyncio.sleep(0.05)
        client.send(b"\r\n" + get("/wait").ljust(97) + get("/body"))
        await client.reader.readuntil(b"\r\n\r\n0")
        assert port.app.running == 0


async def test_a_connection_that_ends_leaves_no_cyclic_garbage() -> None:
    """The next collection may be far away, and each connection may have had large requests."""
    gc.collect()
    gc.disable()
    try:
        async with serving() as port:
            waiting = get("/big?3000000") + get("/ok") * 3
            for request in (b"", get("/ok"), waiting, get("/ok") * (PIPELINED_MAX + 2), get("/ok") + b"garbage"):
                client = await port.client(small_buffer=True)
                await asyncio.sleep(0.05)
                [protocol] = port.protocols()
                gone = weakref.ref(protocol.flow)
                del protocol
                client.send(request)
                await asyncio.sleep(0.05)
                client.close()
                async with asyncio.timeout(5):
                    while port.stats.connections:
                        await asyncio.sleep(0.01)
                await asyncio.sleep(0.05)
                assert gone() is None, request
    finally:
        gc.enable()


async def test_a_request_is_not_run_if_its_client_takes_a_refusal_for_the_response() -> None:
    async with serving() as port:
        for garbage in (b"garbage\r\n\r\n", get("/ok") * (PIPELINED_MAX + 1), get("/ok", filler=40 * KIB)):
            client = await port.client()
            client.send(post("/body", 4) + b"1234" + garbage)
            assert await client.status() in (400, 431)
        assert port.app.sizes == []


async def test_nothing_of_a_connection_that_was_reset_is_kept() -> None:
    async with serving() as port:
        client = await port.client(small_buffer=True)
        client.send(get("/big?3000000", filler=20 * KIB))
        client.send(get("/ok"))
        await asyncio.sleep(0.1)
        client = await port.client()
        client.send(get("/ok", filler=20 * KIB))
        await asyncio.sleep(0.1)
        port.close()  # with a reset, because there are bytes that were not read
        while port.stats.connections:
            await asyncio.sleep(0.01)
        port.app.headers.clear()
        await asyncio.sleep(0.05)
        assert not large_texts()
        assert port.protocols() == []
        assert [port.held(kind) for kind in ("heads", "bodies", "unread")] == [0, 0, 0]


async def test_a_request_with_pipelined_ones_behind_it_learns_that_its_client_has_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as port:
        client = await port.client()
        client.send(post("/body", 1000) + b"x" * 1000 + post("/body", 1000))
        await client.reader.readuntil(b"\r\n\r\n1000")
        client.send(b"x" * 1000 + get("/wait") + get("/ok") * 5)
        await client.reader.readuntil(b"\r\n\r\n1000")
        big = await port.client(small_buffer=True)
        big.send(get("/big?30000000") + get("/ok") * 5)
        while port.held("unread") <= UNREAD_MARK:
            await asyncio.sleep(0.01)
        assert port.app.running == 2
        client.close()
        big.close()
        port.app.release.set()
        async with asyncio.timeout(5):
            while port.app.running:
                await asyncio.sleep(0.01)
        assert len(port.app.headers) == 4, "the requests that waited were not run"
    assert "Exception in ASGI application" not in caplog.text


def large_texts() -> list[int]:
    """Return the sizes of the fillers of requests (`get`) above 10 KiB that exist in the process."""
    gc.collect()
    pairs = (one for one in gc.get_objects() if type(one) is list and one and type(one[0]) is tuple)
    values = (pair[1] for one in pairs for pair in one if type(pair) is tuple and len(pair) == 2)
    return [len(value) for value in values if type(value) is bytes and value[: 10 * KIB] == b"f" * 10 * KIB]


# --- bodies


async def test_a_body_that_trickles_is_ended() -> None:
    async with serving(transfer_grace_s=0.3, transfer_rate_min=1000.0) as port:
        client = await port.client()
        client.send(post("/body", 100))

        async def trickle() -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    client.send(b"x")
                    await asyncio.sleep(0.05)

        task = asyncio.create_task(trickle())
        with contextlib.suppress(ConnectionError):  # a reset, caused by the last bytes, may discard the response
            assert await client.problem() == (408, "request_timeout")
        task.cancel()
        assert port.stats.refused == {"body_timeout": 1}
        while port.app.running:
            await asyncio.sleep(0.01)
        await port.until("bodies", 0)


async def test_a_body_that_keeps_the_rate_may_take_longer_than_the_grace() -> None:
    async with serving(transfer_grace_s=0.2, transfer_rate_min=1000.0) as port:
        client = await port.client()
        client.send(post("/body", 8 * 500))
        for _ in range(8):
            client.send(b"x" * 500)
            await asyncio.sleep(0.1)
        assert (await client.reader.readuntil(b"\r\n\r\n4000")).startswith(b"HTTP/1.1 200 ")


async def test_each_pipelined_body_has_its_own_time() -> None:
    """Every read of the socket ends within the next body, and no body is late."""
    async with serving(transfer_grace_s=0.4, transfer_rate_min=1000.0) as port:
        client = await port.client()
        client.send(post("/body", 200) + b"x" * 100)
        for _ in range(12):
            await asyncio.sleep(0.1)
            client.send(b"x" * 100 + post("/body", 200) + b"x" * 100)
            assert (await client.reader.readuntil(b"\r\n\r\n200")).startswith(b"HTTP/1.1 200 ")
        assert port.stats.refused == {}


async def test_a_body_that_trickles_behind_another_one_is_ended() -> None:
    async with serving(transfer_grace_s=0.3, transfer_rate_min=1000.0) as port:
        client = await port.client()
        client.send(post("/body", 200) + b"x" * 100)
        await asyncio.sleep(0.1)
        client.send(b"x" * 100 + post("/body", 200) + b"x")
        await client.reader.readuntil(b"\r\n\r\n200")
        assert await client.problem() == (408, "request_timeout")


async def test_complete_bodies_count_until_the_application_has_taken_them() -> None:
    async with serving(bodies_size_max=64 * KIB) as port:
        clients = [await port.client() for _ in range(3)]
        for number, client in enumerate(clients):
            client.send(post("/late", 30 * KIB) + b"x" * (30 * KIB))
            await port.until("bodies", min(number + 1, 2) * 30 * KIB)
        assert await clients[0].problem() == (429, "too_many_requests")
        small = await port.client()
        small.send(post("/late", FREE_BODY_SIZE) + b"x" * FREE_BODY_SIZE)
        await asyncio.sleep(0.05)
        assert port.held("bodies") == 60 * KIB, "a small complete body is free"
        port.app.release.set()
        for client, size in ((clients[1], 30 * KIB), (clients[2], 30 * KIB), (small, FREE_BODY_SIZE)):
            assert (await client.reader.readuntil(b"\r\n\r\n%d" % size)).startswith(b"HTTP/1.1 200 ")
        await port.until("bodies", 0)
        assert port.app.sizes == [30 * KIB, 30 * KIB, FREE_BODY_SIZE], "nothing was done for the body that was evicted"


async def test_a_body_counts_once_when_the_application_keeps_it() -> None:
    """The application counts a body from the moment on in which it has taken it."""
    async with serving(bodies_size_max=64 * KIB) as port:
        room, seen = port.server.bodies, []

        def keep(size: int) -> None:
            seen.append(room.used)
            room.restrict(room.limit - size)

        port.app.keep = keep
        slow, client = await port.client(), await port.client()
        slow.send(post("/body", 1_000_000) + b"x" * (20 * KIB))
        await port.until("bodies", 20 * KIB)
        client.send(post("/body", 44 * KIB) + b"x" * (40 * KIB))
        await port.until("bodies", 60 * KIB)
        client.send(b"x" * (4 * KIB))
        assert await client.status() == 200
        assert (seen, room.used, port.stats.refused) == ([20 * KIB], 20 * KIB, {}), "both fit exactly"
        room.restrict(room.limit)
        client = await port.client()
        client.send(post("/body", 45 * KIB) + b"x" * (45 * KIB))
        assert await client.status() == 200
        assert await slow.problem() == (429, "too_many_requests")


async def test_nobody_is_told_to_repeat_a_request_that_may_have_been_run() -> None:
    """The connection ends without a response, because the application may have changed something."""
    async with serving(heads_size_max=64 * KIB) as port:
        changed = await port.client()
        head = post("/wait", 1).removesuffix(b"\r\n") + b"X: " + b"x" * (20 * KIB) + b"\r\n\r\n"
        changed.send(head.replace(b"/wait", b"/taken") + b"x")
        while not port.app.sizes:
            await asyncio.sleep(0.01)
        unread = await port.client()
        unread.send(head + b"x")
        await asyncio.sleep(0.05)
        for expected, client in ((0, changed), (429, unread)):
            late = await port.client()
            late.send(get("/wait", filler=20 * KIB))
            assert await client.status() == expected


async def test_incomplete_bodies_are_limited_in_all_and_the_oldest_pays() -> None:
    async with serving(bodies_size_max=64 * KIB) as port:
        attackers = [await port.client() for _ in range(3)]
        for number, attacker in enumerate(attackers):
            attacker.send(post("/body", 1_000_000) + b"x" * (30 * KIB))
            await port.until("bodies", min(number + 1, 2) * 30 * KIB)
        assert await attackers[0].problem() == (429, "too_many_requests")
        healthy = await port.client()
        healthy.send(post("/body", 20 * KIB) + b"x" * (20 * KIB))
        assert await healthy.status() == 200
        for attacker in attackers:
            attacker.close()
        await port.until("bodies", 0)


async def test_a_body_whose_request_was_answered_is_read_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bindery_kit.http.http_limits.LINGER_S", 0.2)
    async with serving() as port:
        client = await port.client()
        client.send(post("/no", 1_000_000) + b"x" * KIB)
        assert (await client.reader.readuntil(b"\r\n\r\nok")).startswith(b"HTTP/1.1 200 ")
        with contextlib.suppress(ConnectionError):
            while True:
                client.send(b"x" * 100)
                await client.writer.drain()
                await asyncio.sleep(0.02)
        assert port.stats.refused == {"body_timeout": 1}

        client = await port.client()
        client.send(post("/no", 2000) + b"x" * KIB)
        await client.reader.readuntil(b"\r\n\r\nok")
        client.send(b"x" * (2000 - KIB))
        await client.ok()


# --- responses


async def test_a_client_that_does_not_read_is_disconnected() -> None:
    async with serving(transfer_grace_s=0.3) as port:
        client = await port.client(small_buffer=True)
        client.send(get("/big?30000000"))
        while port.held("unread") <= UNREAD_MARK:
            await asyncio.sleep(0.01)
        while port.app.running:
            await asyncio.sleep(0.01)
        assert port.stats.refused == {"unread_timeout": 1}
        await port.until("unread", 0)


async def test_a_connection_whose_response_is_given_up_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although its client does not read, and the time to read responses has not passed."""
    monkeypatch.setattr("bindery_kit.http.http_limits.LINGER_S", 0.2)
    async with serving() as port:
        port.app.send_timeout_s = 0.2
        client = await port.client(small_buffer=True)
        client.send(get("/big?3000000"))
        while port.held("unread") <= UNREAD_MARK:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(5):
            while port.stats.connections:
                await asyncio.sleep(0.01)
        assert port.held("unread") == 0


async def test_a_client_that_reads_slowly_enough_to_pause_is_not() -> None:
    async with serving(transfer_grace_s=0.3, transfer_rate_min=10_000.0) as port:
        client = await port.client(small_buffer=True)
        client.send(get("/big?3000000"))
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        size, paused = 0, 0
        while size < 3_000_000:
            size += len(await client.reader.read(64 * KIB))
            paused += port.held("unread") > 0
            if size % 8 == 0:
                await asyncio.sleep(0.01)
        assert size == 3_000_000
        assert paused > 0
        assert port.stats.refused == {}


async def test_unread_responses_are_limited_in_all_and_the_oldest_pays() -> None:
    async with serving(unread_size_max=600 * KIB) as port:
        attackers = []
        for _ in range(12):
            attacker = await port.client(small_buffer=True)
            attacker.send(get("/big?30000000"))
            attackers.append(attacker)
            await asyncio.sleep(0.05)
        while port.stats.refused["unread_size"] < 5:
            await asyncio.sleep(0.01)
        assert port.held("unread") <= 600 * KIB
        await (await port.client()).ok()
        for attacker in attackers:
            attacker.close()
        await port.until("unread", 0)


async def test_closing_does_not_wait_for_a_client_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bindery_kit.http.http_limits.LINGER_S", 0.2)
    async with serving() as port:
        client = await port.client(small_buffer=True)
        client.send(get("/big?30000000"))
        while port.held("unread") <= UNREAD_MARK:
            await asyncio.sleep(0.01)
        client.send(b"\x00not http\r\n\r\n")
        async with asyncio.timeout(5):
            while port.stats.connections:
                await asyncio.sleep(0.01)
        assert port.stats.refused == {"invalid_http": 1}


# --- connections


async def test_connections_of_one_address_are_limited() -> None:
    async with serving(connections_max=10, connections_per_address_max=3) as port:
        mine = [await port.client() for _ in range(3)]
        for client in mine:
            client.send(get("/wait"))
        await asyncio.sleep(0.1)
        fourth = await port.client()
        fourth.send(get("/ok"))
        assert await fourth.problem() == (503, "too_many_connections")
        probe = await port.client()
        probe.send(get("/livez"))
        assert await probe.status() == 200, "probes are answered"
        others = [await port.client(source="127.0.0.2") for _ in range(3)]
        for client in others:
            await client.ok()
        fourth = await port.client(source="127.0.0.2")
        await fourth.ok()
        assert await others[0].status() == 0, "the one of the same address that was idle longest made room"
        await others[1].ok()
        assert port.stats.refused["idle_for_others"] == 1


async def test_a_flood_from_few_addresses_does_not_end_idle_connections_of_others() -> None:
    async with serving(connections_max=9) as port:
        others = [await port.client(), await port.client()]
        for number in range(30):
            await port.client(source=f"127.0.0.{2 + number % 3}")
        await asyncio.sleep(0.1)
        for client in others:
            await client.ok()
        assert port.stats.connections <= 9
        assert port.stats.refused["idle_for_others"] == 23


async def test_a_client_with_more_than_its_share_replaces_idle_connections_of_others_at_last() -> None:
    async with serving(connections_max=4) as port:
        other = await port.client(source="127.0.0.2")
        await other.ok()
        for _ in range(3):
            client = await port.client()
            client.send(get("/wait"))
        await asyncio.sleep(0.1)
        await (await port.client()).ok()
        assert await other.status() == 0


async def test_half_of_the_connections_is_the_default_of_one_address() -> None:
    async with serving(connections_max=4, connections_per_address_max=0) as port:
        for _ in range(2):
            (await port.client()).send(get("/wait"))
        await asyncio.sleep(0.1)
        third = await port.client()
        third.send(get("/ok"))
        assert await third.status() == 503
        await (await port.client(source="127.0.0.3")).ok()


# --- counters and logs


async def test_refusals_are_counted_and_logged_once_per_second(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as port:
        for _ in range(20):
            client = await port.client()
            client.send(b"\x16\x03\x01 not http\r\n\r\n")
            assert await client.status() == 400
        assert port.stats.refused == {"invalid_http": 20}
        assert capsys.readouterr().err.count("invalid_http") <= 2


async def test_failures_of_the_application_are_counted_and_logged_once_per_second(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving() as port:

        async def broken(path: str) -> bytes | None:
            raise RuntimeError("a defect")

        monkeypatch.setattr(port.app, "_answer", lambda scope, receive: broken(scope["path"]))
        for _ in range(10):
            client = await port.client()
            client.send(get("/ok"))
            assert await client.status() == 500
        monkeypatch.undo()
        for _ in range(10):
            client = await port.client()
            client.send(post("/body", 10))
            client.close()
        await asyncio.sleep(0.1)
        assert port.stats.refused == {"application_failed": 10}
    text = "".join(capsys.readouterr())
    assert 1 <= text.count("http_application_failed") <= 3
    assert "RuntimeError: a defect" in text


async def test_counters_of_connections_return_to_zero() -> None:
    async with serving() as port:
        clients = [await port.client() for _ in range(5)]
        for client in clients:
            await client.ok()
        assert port.stats.connections == 5
        for client in clients:
            client.close()
        while port.stats.connections:
            await asyncio.sleep(0.01)
