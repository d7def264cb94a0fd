"""Requests and responses of the control socket, over streams in memory."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from bindery.standalone.control import REQUEST_SIZE_MAX, ControlServer, ask
from bindery_core.errors import BadRequest
from bindery_simulation.instant import InstantLoop

INVALID = {"error": "not a valid request: expected a line of JSON"}


class FakeWriter:
    def __init__(self) -> None:
        self.sent = b""
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.sent += data

    async def drain(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


class FakeServer:
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def answers(
    monkeypatch: pytest.MonkeyPatch, path: Path, line: bytes, handler: Callable[[Any], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    """Return the response to `line`; without a line end nothing more arrives."""
    written = FakeWriter()

    async def main() -> None:
        server, serve = FakeServer(), []

        async def start_unix_server(callback: Any, *, path: str, limit: int) -> FakeServer:
            assert limit == REQUEST_SIZE_MAX == 4096
            serve.append(callback)
            return server

        monkeypatch.setattr(asyncio, "start_unix_server", start_unix_server)
        control = ControlServer(path, handler)
        await control.start()
        assert not path.exists(), "a stale socket was removed"
        reader = asyncio.StreamReader(limit=REQUEST_SIZE_MAX)
        reader.feed_data(line)
        await serve[0](reader, written)
        path.touch()
        await control.stop()
        await control.stop()
        assert server.is_closed
        assert not path.exists()

    path.touch()
    with asyncio.Runner(loop_factory=InstantLoop) as runner:
        runner.run(main())
    assert written.is_closed
    assert written.sent.endswith(b"\n")
    return dict(json.loads(written.sent))


async def echo(request: dict[str, Any]) -> dict[str, Any]:
    return {"got": request}


async def refuse(request: dict[str, Any]) -> dict[str, Any]:
    raise BadRequest("no such process", name="x")


@pytest.mark.parametrize(
    ("line", "response"),
    [
        (b'{"verb":"status"}\n', {"got": {"verb": "status"}}),
        (b"[1]\n", {"got": {}}),
        (b"junk\n", INVALID),
        (b"\xff\n", INVALID),
        (b'{"verb":', INVALID),
        (b'"' + b"x" * 5000 + b'"\n', INVALID),
    ],
    ids=["object", "list", "no JSON", "no text", "late", "too long"],
)
def test_a_request_is_one_line_of_json(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: bytes, response: dict[str, Any]
) -> None:
    assert answers(monkeypatch, tmp_path / "socket", line, echo) == response


def test_a_refused_request_has_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert answers(monkeypatch, tmp_path / "socket", b"{}\n", refuse) == {"error": "no such process: name=x"}


class FakeSocket:
    """A socket that returns `chunks`, or raises the error among them."""

    def __init__(self, *chunks: bytes | Exception) -> None:
        self.chunks = list(chunks)
        self.sent = b""
        self.calls: list[object] = []

    def __enter__(self) -> "FakeSocket":
        return self

    def __exit__(self, *_: object) -> None:
        self.calls.append("closed")

    def settimeout(self, seconds: float) -> None:
        self.calls.append(seconds)

    def connect(self, path: str) -> None:
        self.calls.append(path)

    def sendall(self, data: bytes) -> None:
        self.sent += data

    def recv(self, size: int) -> bytes:
        chunk = self.chunks.pop(0)
        if isinstance(chunk, Exception):
            raise chunk
        return chunk


@pytest.mark.parametrize(
    ("chunks", "response"),
    [
        ([b'{"ok"', b": true}\n", b"unread"], {"ok": True}),
        ([b'{"ok": true}', b""], {"ok": True}),
        ([b""], None),
        ([b"[1]\n"], None),
        ([ConnectionResetError()], None),
    ],
)
def test_a_response_is_one_object(
    monkeypatch: pytest.MonkeyPatch, chunks: list[bytes | Exception], response: dict[str, Any] | None
) -> None:
    fake = FakeSocket(*chunks)
    monkeypatch.setattr(socket, "socket", lambda *_: fake)
    assert ask(Path("/run/control"), {"verb": "status"}, timeout_s=3.0) == response
    assert fake.sent == b'{"verb": "status"}\n'
    assert fake.calls == [3.0, "/run/control", "closed"]


def test_a_late_response_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", lambda *_: FakeSocket(TimeoutError()))
    with pytest.raises(TimeoutError):
        ask(Path("/run/control"), {}, timeout_s=3.0)
