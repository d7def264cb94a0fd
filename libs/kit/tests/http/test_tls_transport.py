"""TLS on an HTTP port: the limits of connections and unread bytes hold, and certificates are replaced under load."""

import asyncio
import contextlib
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from bindery_identity.tls import ClientCertificates, PeerCertificate, TlsFiles, client_tls, server_tls
from bindery_kit.configuration.http_settings import HttpSettings
from bindery_kit.configuration.tls_settings import HttpTlsSettings
from bindery_kit.http.http_server import HttpServer
from bindery_kit.http.http_stats import HttpStats
from bindery_kit.observability.tls_metrics import TlsMetrics
from bindery_simulation.certificates.authority import Authority, replace

LARGE = b"x" * (8 * 2**20)


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> Any:
    return request.param()


class App:
    """Answers with the size of the body, or LARGE; keeps the certificate of the last client."""

    def __init__(self) -> None:
        self.certificate: PeerCertificate | None = None
        self.scheme = ""

    async def __call__(
        self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        if scope["type"] != "http":
            raise RuntimeError("http only")
        self.certificate = scope["state"].get("certificate")
        self.scheme = scope["scheme"]
        size, more = 0, True
        while more:
            event = await receive()
            size += len(event.get("body", b""))
            more = event.get("more_body", False)
        body = LARGE if scope["path"] == "/large" else b"%d" % size
        length = (b"content-length", b"%d" % len(body))
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body})


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def files(authority: Authority) -> TlsFiles:
    certificate, key = authority.issue("server")
    return server_tls(certificate_file=str(certificate), key_file=str(key), now_s=time.time)


def trusting(authority: Authority) -> ssl.SSLContext:
    return client_tls(ca_file=str(authority.ca_file)).context


def settings(**limits: Any) -> HttpSettings:
    timeout_s = limits.pop("handshake_timeout_s", 10.0)
    return HttpSettings(tls=HttpTlsSettings(handshake_timeout_s=timeout_s), **limits)


def http(authority: Authority, server: HttpServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, verify=trusting(authority), trust_env=False)


async def test_requests_and_large_bodies_pass_in_both_directions(authority: Authority, files: TlsFiles) -> None:
    app = App()
    async with HttpServer(app, tls=files) as server, http(authority, server) as client:
        assert server.url.startswith("https://")
        for size in (0, 1, 16_384, 16_385, 3_000_000):
            assert (await client.post("/", content=bytes(size))).content == b"%d" % size
        assert (await client.get("/large")).content == LARGE
        assert (app.scheme, app.certificate) == ("https", None)


async def test_a_client_in_clear_text_is_told_to_use_https(authority: Authority, files: TlsFiles) -> None:
    stats = HttpStats()
    async with HttpServer(App(), tls=files, stats=stats) as server:
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.get(f"http://127.0.0.1:{server.port}/")
        assert answer.status_code == 400
        assert answer.json()["code"] == "https_required"
        assert stats.refused["clear_text"] == 1


async def test_a_host_that_the_certificate_does_not_name_is_refused(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("server", hosts=["broker.example.com"])
    files = server_tls(certificate_file=str(certificate), key_file=str(key), now_s=time.time)
    async with HttpServer(App(), tls=files) as server, http(authority, server) as client:
        with pytest.raises(httpx.ConnectError, match=r"(?i)ip address mismatch|hostname mismatch"):
            await client.get("/")


async def test_the_certificate_of_a_client_is_required_and_passed_on(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("server")
    own, own_key = authority.issue("me", common_name="role", hosts=["me.test"])
    files = server_tls(
        certificate_file=str(certificate),
        key_file=str(key),
        ca_file=str(authority.ca_file),
        client_certificates=ClientCertificates.REQUIRED,
        now_s=time.time,
    )
    app, stats = App(), HttpStats()
    async with HttpServer(app, tls=files, stats=stats) as server:
        async with http(authority, server) as client:
            with pytest.raises((httpx.TransportError, ssl.SSLError)):  # TLS 1.3 refuses at the first read
                await client.get("/")
        assert stats.refused["tls_handshake"] == 1
        known = client_tls(ca_file=str(authority.ca_file), certificate_file=str(own), key_file=str(own_key))
        async with httpx.AsyncClient(base_url=server.url, verify=known.context, trust_env=False) as client:
            assert (await client.get("/")).status_code == 200
    assert app.certificate is not None
    assert (app.certificate.common_name, app.certificate.dns_names) == ("role", ("me.test",))


async def test_an_open_connection_does_not_outlive_the_certificate_of_its_client(tmp_path: Path) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    trusted = tmp_path / "trusted.pem"
    replace(trusted, old.pem + new.pem)
    certificate, key = new.issue("server")
    ahead_s = 0.0
    files = server_tls(
        certificate_file=str(certificate),
        key_file=str(key),
        ca_file=str(trusted),
        client_certificates=ClientCertificates.REQUIRED,
        now_s=lambda: time.time() + ahead_s,
    )
    app, stats, removed = App(), HttpStats(), asyncio.Event()

    def client(authority: Authority) -> httpx.AsyncClient:
        own, own_key = authority.issue(f"of-{authority.ca_file.stem}")
        context = client_tls(ca_file=str(new.ca_file), certificate_file=str(own), key_file=str(own_key)).context
        return httpx.AsyncClient(base_url=server.url, verify=context, trust_env=False)

    async def slow_body() -> Any:
        yield b"abc"
        await removed.wait()
        yield b"def"

    async with HttpServer(app, tls=files, stats=stats) as server, client(old) as first, client(new) as second:
        for one in (first, second):
            assert (await one.get("/")).status_code == 200
        app.certificate = None
        in_progress = asyncio.create_task(first.post("/", content=slow_body()))
        async with asyncio.timeout(30):
            while app.certificate is None:
                await asyncio.sleep(0.005)
        replace(trusted, new.pem)
        assert files.poll()
        removed.set()
        assert (await in_progress).content == b"6"
        refused = await first.get("/")
        assert (refused.status_code, refused.json()["code"]) == (401, "unauthorized")
        assert refused.headers["connection"] == "close"
        with pytest.raises((httpx.TransportError, ssl.SSLError)):
            await first.get("/")
        assert stats.refused["certificate"] == 1
        assert (await second.get("/")).status_code == 200
        ahead_s = 100 * 366 * 86_400.0
        assert "has expired" in (await second.get("/")).json()["detail"]


async def test_certificates_and_authorities_are_replaced_while_clients_call(tmp_path: Path) -> None:
    """Eight clients call with new connections all the time, while the server moves from one authority to another."""
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    trusted = tmp_path / "trusted.pem"
    replace(trusted, old.pem + new.pem)
    certificate, key = old.issue("server")
    files = server_tls(certificate_file=str(certificate), key_file=str(key), now_s=time.time)
    context = client_tls(ca_file=str(trusted)).context
    counts: list[int] = [0] * 8
    done = asyncio.Event()
    async with HttpServer(App(), tls=files) as server:

        async def call(number: int) -> None:
            while not done.is_set():
                async with httpx.AsyncClient(base_url=server.url, verify=context, trust_env=False) as client:
                    for _ in range(3):
                        assert (await client.post("/", content=b"abc")).content == b"3"
                        counts[number] += 1

        async def move() -> None:
            for authority in (new, old, new):
                before = list(counts)
                while any(now < then + 6 for now, then in zip(counts, before, strict=True)):
                    await asyncio.sleep(0.01)
                authority.issue("server")
                assert await asyncio.to_thread(files.poll)
            replace(trusted, new.pem)
            before = list(counts)
            while any(now < then + 6 for now, then in zip(counts, before, strict=True)):
                await asyncio.sleep(0.01)
            done.set()

        async with asyncio.timeout(120), asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(call(number))
            group.create_task(move())
        only_old = httpx.AsyncClient(base_url=server.url, verify=trusting(old), trust_env=False)
        async with only_old as client:
            with pytest.raises(httpx.ConnectError):
                await client.get("/")
    assert min(counts) >= 24


async def test_silent_and_slow_handshakes_end_in_time(authority: Authority, files: TlsFiles) -> None:
    stats = HttpStats()
    async with HttpServer(App(), tls=files, stats=stats, settings=settings(handshake_timeout_s=0.3)) as server:
        silent, silent_writer = await asyncio.open_connection("127.0.0.1", server.port)
        slow, slow_writer = await asyncio.open_connection("127.0.0.1", server.port)
        slow_writer.write(b"\x16\x03\x01\x02")
        async with asyncio.timeout(10):
            for reader in (silent, slow):
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
        assert stats.refused["tls_handshake_timeout"] == 2
        assert stats.connections == 0
        silent_writer.close()
        slow_writer.close()


async def test_handshakes_in_progress_are_limited_and_make_room_for_others(
    authority: Authority, files: TlsFiles
) -> None:
    """A flood of connections without a handshake takes no more places than an address may have."""
    stats = HttpStats()
    limits = settings(connections_max=20, connections_per_address_max=10)
    async with HttpServer(App(), tls=files, stats=stats, settings=limits) as server:
        silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(30)]
        async with asyncio.timeout(30):
            while stats.connections > 10:
                await asyncio.sleep(0.01)
            async with http(authority, server) as client:
                assert (await client.get("/")).status_code == 200
        assert stats.refused["idle_for_others"] >= 20
        for _, writer in silent:
            writer.close()


async def test_bytes_that_a_client_does_not_read_are_counted_and_end_the_connection(
    authority: Authority, files: TlsFiles
) -> None:
    stats = HttpStats()
    limits = settings(unread_size_max=2**20, transfer_grace_s=30.0)
    async with HttpServer(App(), tls=files, stats=stats, settings=limits) as server:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", server.port, ssl=trusting(authority), server_hostname="localhost", limit=2**10
        )
        writer.write(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(30):
            while not stats.refused["unread_size"]:
                await asyncio.sleep(0.01)
            while stats.connections:
                await asyncio.sleep(0.01)
        writer.transport.abort()
        assert reader is not None


async def test_every_way_to_cut_the_stream_of_a_request_gives_the_same_answer(
    authority: Authority, files: TlsFiles
) -> None:
    """The client's encrypted bytes arrive one by one."""
    async with HttpServer(App(), tls=files) as server:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = trusting(authority).wrap_bio(incoming, outgoing, server_hostname="localhost")
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)

        async def step(operation: Callable[[], Any]) -> Any:
            while True:
                try:
                    result = operation()
                    wants = False
                except ssl.SSLWantReadError:
                    wants = True
                for byte in outgoing.read():
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(0)
                if not wants:
                    return result
                incoming.write(await reader.read(1))

        async with asyncio.timeout(60):
            await step(tls.do_handshake)
            await step(lambda: tls.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nabcde"))
            answer = b""
            while not answer.endswith(b"\r\n\r\n5"):
                answer += await step(lambda: tls.read(100))
        assert answer.startswith(b"HTTP/1.1 200 OK")
        writer.close()


async def test_a_broken_record_ends_the_connection(authority: Authority, files: TlsFiles) -> None:
    stats = HttpStats()
    async with HttpServer(App(), tls=files, stats=stats) as server:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = trusting(authority).wrap_bio(incoming, outgoing, server_hostname="localhost")
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        async with asyncio.timeout(30):
            while True:
                try:
                    tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    writer.write(outgoing.read())
                    incoming.write(await reader.read(65_536))
            writer.write(outgoing.read())
            tls.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            record = bytearray(outgoing.read())
            record[-1] ^= 1
            writer.write(bytes(record))
            with contextlib.suppress(ConnectionError):
                while await reader.read(65_536):
                    pass
        assert stats.refused["tls_record"] == 1
        writer.close()


async def test_a_server_stops_while_handshakes_are_in_progress(files: TlsFiles) -> None:
    server = HttpServer(App(), tls=files, stop_timeout_s=40.0)
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"\x16")
    await asyncio.sleep(0.2)
    async with asyncio.timeout(20):
        await server.stop()
        with contextlib.suppress(ConnectionError):
            await reader.read()
    writer.close()


def test_the_metrics_show_the_expiry_and_a_reload_that_failed(authority: Authority, files: TlsFiles) -> None:
    metrics = TlsMetrics()
    assert metrics.render() == b""
    metrics.add("http", files)
    metrics.add("ledger", None)
    page = metrics.render().decode()
    assert f'bindery_tls_certificate_expiry_seconds{{port="http"}} {int(files.expires_at_s or 0)}\n' in page
    assert 'bindery_tls_reload_failed{port="http"} 0\n' in page
    replace(Path(files.paths[0]), b"nothing")
    files.poll()
    assert 'bindery_tls_reload_failed{port="http"} 1\n' in metrics.render().decode()
    assert "ledger" not in page
