"""The server's end of a connection, by bytes on a real socket: what an honest and a hostile client get."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from bindery_kit.configuration.http_settings import HttpSettings
from bindery_kit.http.http_request import request_of
from bindery_kit.http.http_server import HttpServer
from bindery_kit.http.upgrade import UPGRADE
from bindery_kit.multiplex import peers
from bindery_kit.multiplex.frames import BODY_SIZE_MAX, TOKEN, WINDOW_SIZE, Frame, FrameReader, Kind, Reason, encode
from bindery_kit.multiplex.heads import encode_request
from bindery_kit.multiplex.link import LinkBroken, NotBegun, NotMultiplexed, PeerRequest, TooBusy
from bindery_kit.multiplex.peers import PeerLinks, Unreachable
from bindery_kit.multiplex.served import Multiplexing

HOST = [(b"host", b"localhost")]


class App:
    """/echo and /take answer with the body; /wait does not answer before `go`; /flood sends without an end."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.running = 0
        self.gone = 0
        self.accepts = True
        self.flooded = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if UPGRADE in scope.get("extensions", ()) and self.accepts:
            assert scope["extensions"][UPGRADE]()
            return
        self.running += 1
        try:
            await self._answer(scope, receive, send)
        finally:
            self.running -= 1

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        body = b""
        if path in ("/echo", "/take"):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    self.gone += 1
                    return
                body += message["body"]
                more = message["more_body"]
        if path == "/wait":
            assert (await receive())["type"] == "http.request"
            waits = {asyncio.create_task(self.go.wait()), asyncio.create_task(receive())}
            _, left = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in left:
                task.cancel()
            if not self.go.is_set():
                self.gone += 1
                return
        if path == "/hold":  # takes nothing of the body
            gone = asyncio.Event()
            request = request_of(send)
            assert request is not None
            request.watch(gone.set)
            await gone.wait()
            return
        if path == "/fail":
            raise ValueError("a defect")
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        gone = asyncio.create_task(self._until_gone(receive)) if path == "/flood" else None
        while gone is not None and not gone.done():
            await send({"type": "http.response.body", "body": bytes(1000), "more_body": True})
            self.flooded += 1000
        await send({"type": "http.response.body", "body": body})

    async def _until_gone(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


@contextlib.asynccontextmanager
async def served(
    app: App, *, requests_max: int = 100, of_connection_max: int = 100, **settings: Any
) -> AsyncIterator[tuple[HttpServer, Multiplexing]]:
    multiplexing = Multiplexing(requests_max=requests_max, of_connection_max=of_connection_max)
    async with HttpServer(
        app, port=0, lifespan="off", stop_timeout_s=1, settings=HttpSettings(**settings), upgrade=multiplexing
    ) as server:
        yield server, multiplexing


@contextlib.asynccontextmanager
async def links_to(_server: HttpServer, **options: Any) -> AsyncIterator[PeerLinks]:
    loop = asyncio.get_running_loop()
    options = {"links_max": 2, "unread_size_max": 2**20, **options}
    links = PeerLinks(path="/", headers=list, tls=None, now=loop.time, **options)
    yield links
    await links.close()


async def begin(links: PeerLinks, server: HttpServer, path: str, *, has_body: bool = False) -> PeerRequest:
    method = "POST" if has_body else "GET"
    return await links.begin(server.url, encode_request(method, path, HOST), has_body=has_body)


async def whole(request: PeerRequest) -> tuple[int, bytes]:
    status, _ = await request.response()
    body = b""
    while data := await request.read():
        body += data
    request.cancel()
    return status, body


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


class Raw:
    """A client that sends any bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self._frames = FrameReader()

    async def frames(self) -> list[Frame] | None:
        """Return the next frames; None: the connection has ended."""
        try:
            data = await asyncio.wait_for(self._reader.read(2**16), 20)
        except ConnectionError:
            return None
        return list(self._frames.feed(data)) if data else None

    async def ended(self) -> bool:
        while await self.frames() is not None:
            pass
        return True


@contextlib.asynccontextmanager
async def raw(server: HttpServer, *, after: bytes = b"") -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: " + TOKEN + b"\r\n\r\n" + after)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101"), head
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()


@pytest.mark.parametrize("size", [0, 1, BODY_SIZE_MAX, BODY_SIZE_MAX + 1, WINDOW_SIZE, WINDOW_SIZE + 1, 3 * 2**20])
async def test_bodies_pass_both_ways(size):
    app = App()
    async with served(app) as (server, multiplexing), links_to(server) as links:
        request = await begin(links, server, "/take", has_body=True)
        sent = bytes(range(256)) * (size // 256) + bytes(size % 256)
        answer = asyncio.create_task(whole(request))
        await request.send_body(sent, is_end=True)
        assert await answer == (200, b"" if not size else sent)
        await until(lambda: multiplexing.requests.count == 0)
        assert server.bodies.used == 0
        assert links.held.used == 0


async def test_requests_share_a_connection_and_answers_come_in_any_order():
    app = App()
    async with served(app) as (server, multiplexing), links_to(server) as links:
        waiting = [await begin(links, server, "/wait") for _ in range(20)]
        assert await whole(await begin(links, server, "/echo")) == (200, b"")
        app.go.set()
        assert await asyncio.gather(*map(whole, waiting)) == [(200, b"")] * 20
        assert multiplexing.requests.connections == 1


async def test_a_cancelled_request_is_noticed_at_once():
    app = App()
    async with served(app) as (server, _), links_to(server) as links:
        request = await begin(links, server, "/wait")
        await until(lambda: app.running == 1)
        request.cancel()
        await until(lambda: app.gone == 1)


async def test_a_slow_reader_stops_the_sender_and_nobody_else():
    app = App()
    async with served(app) as (server, _), links_to(server) as links:
        flood = await begin(links, server, "/flood")
        await flood.response()
        await until(lambda: links.held.used > WINDOW_SIZE - BODY_SIZE_MAX)
        assert await whole(await begin(links, server, "/echo")) == (200, b"")
        assert links.held.used <= WINDOW_SIZE
        assert app.flooded <= 2 * WINDOW_SIZE
        flood.cancel()
        assert links.held.used == 0


async def test_the_response_unread_for_longest_is_ended_if_all_take_too_much_memory():
    app = App()
    async with served(app) as (server, _), links_to(server, unread_size_max=3 * WINDOW_SIZE) as links:
        floods = []
        for _ in range(4):
            flood = await begin(links, server, "/flood")
            await flood.response()
            floods.append(flood)
            await asyncio.sleep(0.3)
        await until(lambda: floods[0]._error is not None)
        assert links.held.used <= 3 * WINDOW_SIZE
        with pytest.raises(LinkBroken):
            await whole(floods[0])
        for flood in floods[1:]:
            assert await flood.read()
            flood.cancel()


async def test_above_the_limits_requests_are_refused_with_nothing_done():
    app = App()
    async with served(app, requests_max=5) as (server, multiplexing), links_to(server) as links:
        waiting = [await begin(links, server, "/wait") for _ in range(5)]
        with pytest.raises(TooBusy):
            await whole(await begin(links, server, "/wait"))
        assert multiplexing.requests.refused == 1
        app.go.set()
        await asyncio.gather(*map(whole, waiting))
        assert await whole(await begin(links, server, "/echo")) == (200, b"")


async def test_requests_that_are_cancelled_at_once_make_no_room():
    """The application of a cancelled request may still run, so that it counts."""
    app = App()
    async with served(app, requests_max=5) as (server, multiplexing), raw(server) as client:
        for stream in range(1, 1001):
            client.writer.write(encode(Kind.REQUEST, stream, encode_request("GET", "/flood", HOST), is_end=True))
            client.writer.write(encode(Kind.CANCEL, stream, bytes((Reason.GONE,))))
        frames: list[Frame] = []
        while len(frames) < 900 and (some := await client.frames()) is not None:
            frames += [frame for frame in some if frame.kind is Kind.CANCEL]
        assert multiplexing.requests.count <= 5
        assert {frame.payload for frame in frames} == {bytes((Reason.BUSY,))}


async def test_a_server_that_stops_finishes_what_it_has_begun_and_begins_nothing_else():
    app = App()
    async with served(app) as (server, _), links_to(server) as links:
        waiting = await begin(links, server, "/wait")
        await until(lambda: app.running == 1)
        stopping = asyncio.create_task(server.stop())
        await until(lambda: not links.links[0].is_usable)
        with pytest.raises(NotBegun):
            await whole(await begin(links, server, "/echo"))
        app.go.set()
        assert await whole(waiting) == (200, b"")
        await stopping


async def test_a_connection_that_breaks_leaves_the_outcome_unknown():
    app = App()
    async with served(app) as (server, _), links_to(server) as links:
        waiting = await begin(links, server, "/wait")
        await until(lambda: app.running == 1)
        for connection in list(server._server.server_state.connections):
            connection.transport.abort()
        with pytest.raises(LinkBroken):
            await whole(waiting)
        assert await whole(await begin(links, server, "/echo")) == (200, b"")


async def test_a_server_that_does_not_answer_pings_is_given_up(monkeypatch):
    """It accepts the upgrade, and then says nothing: its machine has lost its network."""
    monkeypatch.setattr("bindery_kit.multiplex.link.TICK_S", 0.05)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: " + TOKEN + b"\r\n\r\n")
        await asyncio.sleep(60)

    dumb = await asyncio.start_server(accept, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{dumb.sockets[0].getsockname()[1]}"
    loop = asyncio.get_running_loop()
    links = PeerLinks(path="/", headers=list, tls=None, now=loop.time, links_max=1, unread_size_max=2**20)
    request = await links.begin(url, encode_request("GET", "/", HOST), has_body=False)
    async with asyncio.timeout(20):
        with pytest.raises(LinkBroken):
            await request.response()
    assert links.links == []
    dumb.close()


async def test_a_server_without_the_protocol_is_asked_again_later(monkeypatch):
    app = App()
    app.accepts = False
    async with served(app) as (server, _), links_to(server) as links:
        for _ in range(3):
            with pytest.raises(NotMultiplexed):
                await begin(links, server, "/echo")
        app.accepts = True
        peer = next(iter(links._peers.values()))
        assert peer.fallback_until_s > asyncio.get_running_loop().time() + peers.FALLBACK_S / 2
        peer.fallback_until_s = 0.0
        assert await whole(await begin(links, server, "/echo")) == (200, b"")


async def test_nobody_listens():
    async with links_to(None) as links:
        with pytest.raises(Unreachable):
            await links.begin("http://127.0.0.1:1", encode_request("GET", "/", HOST), has_body=False)
        assert links._peers == {}


async def test_a_defect_of_the_application_is_an_answer():
    async with served(App()) as (server, _), links_to(server) as links:
        assert (await whole(await begin(links, server, "/fail")))[0] == 500


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        bytes(100),
        b"\xff" * 100,
        encode(Kind.RESPONSE, 1, b"200"),
        encode(Kind.LEAVING, 0, bytes(4)),
        encode(Kind.BODY, 1, b"x"),
        encode(Kind.CREDIT, 1, bytes(4)),
        encode(Kind.REQUEST, 1, b"GET / HTTP/1.1\nhost:localhost"),
        encode(Kind.REQUEST, 1, encode_request("GET", "/wait", HOST)) * 2,
        encode(Kind.REQUEST, 1, encode_request("POST", "/none", [*HOST, (b"content-length", b"5")]), is_end=True),
        encode(Kind.REQUEST, 1, encode_request("POST", "/wait", [*HOST, (b"content-length", b"5")]))
        + encode(Kind.BODY, 1, b"123456"),
        encode(Kind.REQUEST, 1, encode_request("GET", "/wait", HOST), is_end=True) + encode(Kind.BODY, 1, b"x"),
        encode(Kind.REQUEST, 1, encode_request("POST", "/hold", HOST))
        + encode(Kind.BODY, 1, bytes(BODY_SIZE_MAX)) * (WINDOW_SIZE // BODY_SIZE_MAX + 1),
        encode(Kind.REQUEST, 1, encode_request("GET", "/flood", HOST))
        + encode(Kind.CREDIT, 1, b"\x7f\xff\xff\xff") * 2,
    ],
)
async def test_a_client_that_breaks_the_protocol_loses_its_connection(data):
    app = App()
    async with served(app) as (server, multiplexing):
        async with raw(server) as client:
            client.writer.write(data)
            assert await client.ended()
        await until(lambda: multiplexing.requests.count == 0 and app.running == 0)
        assert multiplexing.requests.connections == 0
        assert server.bodies.used == 0


async def test_a_body_that_does_not_arrive_is_ended():
    async with served(App(), transfer_grace_s=0.3) as (server, multiplexing), links_to(server) as links:
        request = await begin(links, server, "/take", has_body=True)
        assert (await whole(request))[0] == 408
        await until(lambda: multiplexing.requests.count == 0)


async def test_bodies_of_all_streams_have_one_limit():
    """A client without a need for answers sends bodies that nobody reads: they take what the port allows at most."""
    app = App()
    async with (
        served(app, bodies_size_max=4 * WINDOW_SIZE, requests_max=1_000, of_connection_max=1_000) as (server, _),
        raw(server) as client,
    ):
        for stream in range(1, 101):
            client.writer.write(encode(Kind.REQUEST, stream, encode_request("POST", "/hold", HOST)))
            client.writer.write(encode(Kind.BODY, stream, bytes(BODY_SIZE_MAX)) * (WINDOW_SIZE // BODY_SIZE_MAX))
        frames: list[Frame] = []
        async with asyncio.timeout(30):
            while sum(frame.kind in (Kind.RESPONSE, Kind.CANCEL) for frame in frames) < 50:
                frames += await client.frames() or []
        assert server.bodies.used <= 4 * WINDOW_SIZE


async def test_a_client_that_reads_nothing_loses_its_connection():
    """Answers and pongs that are not read take the memory of one connection, and end it."""
    app = App()
    async with served(app, transfer_grace_s=0.5) as (server, multiplexing), raw(server) as client:
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                client.writer.write(encode(Kind.PING, 0, bytes(8)) * 10_000)
                await asyncio.wait_for(client.writer.drain(), 20)
        await until(lambda: multiplexing.requests.connections == 0)


async def test_a_request_before_the_answer_to_the_upgrade_prevents_it():
    """Bytes that a proxy in between would take for another request are not taken for frames."""
    app = App()
    app.accepts = True
    async with served(app) as (server, multiplexing):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        upgrade = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: " + TOKEN + b"\r\n\r\n"
        writer.write(upgrade + encode(Kind.PING, 0, bytes(8)))
        answer = await asyncio.wait_for(reader.read(), 20)
        assert b" 101 " not in answer
        assert multiplexing.requests.connections == 0
        writer.close()
