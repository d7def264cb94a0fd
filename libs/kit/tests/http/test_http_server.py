"""The HTTP server: its socket, stop, and cheap imports."""

import asyncio
import subprocess
import sys

import pytest
from bindery_kit.http.http_server import HttpServer
from bindery_kit.http.listening import BindRefused, bind_tcp
from bindery_kit.observability.health import Health, OpsApp
from bindery_kit.observability.metrics import Metrics
from fastapi import FastAPI


async def test_a_server_stops_in_time_even_if_clients_stay(health: Health, app: FastAPI) -> None:
    server = HttpServer(OpsApp(health, Metrics("kittest"), app=app), port=0, stop_timeout_s=0.3)
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


def test_a_service_without_fastapi_does_not_load_it() -> None:
    script = "import sys, bindery_kit.http.problem, bindery_kit.http.http_server; print('fastapi' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60).stdout
    assert out.strip() == "False"


async def test_a_server_listens_on_a_given_socket_and_closes_it(health: Health, app: FastAPI) -> None:
    sock = bind_tcp("127.0.0.1", 0)
    port = sock.getsockname()[1]
    async with HttpServer(OpsApp(health, Metrics("kittest"), app=app), sock=sock) as server:
        assert server.port == port
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
    assert sock.fileno() == -1


async def test_a_port_on_which_another_process_listens_first_is_refused_with_the_fix(
    health: Health, app: FastAPI
) -> None:
    """Both sockets were bound before either listened."""
    with bind_tcp("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        server = HttpServer(OpsApp(health, Metrics("kittest"), app=app), sock=bind_tcp("127.0.0.1", port))
        first.listen()
        with pytest.raises(BindRefused, match=f"cannot listen on 127.0.0.1:{port}: .*another process"):
            await server.start()
        await server.stop()


async def test_an_idle_connection_is_closed_some_time_after_its_last_response(health: Health, app: FastAPI) -> None:
    ops = OpsApp(health, Metrics("kittest"), app=app)
    request = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with HttpServer(ops, port=0, timeout_keep_alive=1) as server, asyncio.timeout(60):
        loop = asyncio.get_running_loop()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for _ in range(4):  # the timer that the first response started ends between two of them
            writer.write(request)
            await reader.readuntil(b"}\n")
            answered = loop.time()
            await asyncio.sleep(0.4)
        assert not reader.at_eof()
        assert await reader.read() == b""
        assert loop.time() - answered >= 0.95
        writer.close()


async def test_connections_end_with_the_next_response_before_the_server_stops(health: Health, app: FastAPI) -> None:
    request = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with HttpServer(OpsApp(health, Metrics("kittest"), app=app), port=0) as server, asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request)
        assert b"connection: close" not in (await reader.readuntil(b"\r\n\r\n")).lower()
        server.end_connections()
        left = asyncio.create_task(server.left())
        await asyncio.sleep(0.2)
        assert not left.done(), "an idle connection stays: its client may send a request at any time"
        writer.write(request)
        answer = await reader.read()
        assert answer.count(b"HTTP/1.1 200") == 1
        assert b"connection: close" in answer.lower()
        await left
        writer.close()


async def test_the_tasks_of_requests_are_forgotten_when_they_end(health: Health, app: FastAPI) -> None:
    """The server waits for those that it knows when it stops."""
    server = HttpServer(OpsApp(health, Metrics("kittest"), app=app), port=0)
    async with server:
        tasks = server._server.server_state.tasks
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(30):
            while not tasks:
                await asyncio.sleep(0.01)
            writer.transport.abort()
            [task] = tasks
            task.cancel()
            while tasks:
                await asyncio.sleep(0.01)
