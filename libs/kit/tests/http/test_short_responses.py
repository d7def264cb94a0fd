"""Responses whose head and body are written together, and those that uvicorn writes."""

import asyncio
from typing import Any

import pytest
from bindery_kit.http.http_limits import HttpLimits
from bindery_kit.http.http_request import JOINED_SIZE_MAX, request_of
from bindery_kit.http.http_server import HttpServer

Messages = list[dict[str, Any]]
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n%b\r\n"
END = b"Connection: close\r\n"


def start(*headers: tuple[bytes, bytes], status: int = 200) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(data: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def length(size: int) -> tuple[bytes, bytes]:
    return (b"Content-Length", b"%d" % size)


async def respond(
    messages: Messages, monkeypatch: pytest.MonkeyPatch, *, requests: bytes = GET % END, whole: list[bool] | None = None
) -> tuple[bytes, list[bytes]]:
    """Return what the client reads until the end of the connection, and the single writes of the server.

    `whole`: call `HttpRequest.respond` with the two messages first, add its results here; send them if it is False.
    """
    writes: list[bytes] = []
    made = HttpLimits.connection_made

    class Recorder:
        def __init__(self, transport: Any) -> None:
            self._transport = transport

        def write(self, data: bytes) -> None:
            writes.append(bytes(data))
            self._transport.write(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._transport, name)

    monkeypatch.setattr(HttpLimits, "connection_made", lambda self, transport: made(self, Recorder(transport)))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        if whole is not None:
            head, content = messages
            request = request_of(send)
            assert request is not None
            whole.append(request.respond(head["status"], head["headers"], content["body"]))
            if whole[-1]:
                return
        for message in messages:
            await send(dict(message))

    async with HttpServer(app, port=0) as server, asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(requests)
        answer = await reader.read()
        writer.close()
    return answer, writes


async def test_head_and_body_of_a_short_response_are_one_write(monkeypatch):
    answer, writes = await respond(
        [start((b"X-A", b"1"), length(2), status=201), body(b"ok")], monkeypatch, requests=GET % b"" + GET % END
    )
    assert answer == b"".join(writes)
    first, second = writes
    assert first.startswith(b"HTTP/1.1 201 Created\r\n")
    assert first.endswith(b"\r\nx-a: 1\r\ncontent-length: 2\r\n\r\nok")
    assert b"\r\ndate: " in first, "the headers of all responses"
    assert second.endswith(b"\r\nx-a: 1\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok")


@pytest.mark.parametrize(
    ("messages", "requests", "want"),
    [
        pytest.param([start(), body(b"ok")], GET % END, b"transfer-encoding: chunked", id="no length"),
        pytest.param([start(length(0)), body(b"")], GET % END, b"content-length: 0\r\n", id="no body"),
        pytest.param([start(length(2)), body(b"")], b"HEAD" + (GET % END)[3:], b"content-length: 2\r\n", id="HEAD"),
        pytest.param(
            [start(length(JOINED_SIZE_MAX + 1)), body(b"x" * (JOINED_SIZE_MAX + 1))], GET % END, b"xxx", id="long"
        ),
        pytest.param(
            [start(length(2), (b"connection", b"close")), body(b"ok")], GET % b"", b"connection: close", id="close"
        ),
    ],
)
async def test_uvicorn_writes_other_heads(messages, requests, want, monkeypatch):
    answer, writes = await respond(messages, monkeypatch, requests=requests)
    assert want in answer
    assert writes[0].endswith(b"\r\n\r\n"), "the head alone"
    assert writes[0].count(b"\r\n\r\n") == 1


async def test_a_response_is_sent_as_a_whole(monkeypatch):
    whole: list[bool] = []
    messages = [start((b"X-A", b"1"), length(2), status=201), body(b"ok")]
    with monkeypatch.context() as patch:
        answer, writes = await respond(messages, patch, requests=GET % b"" + GET % END, whole=whole)
    assert whole == [True, True]
    with monkeypatch.context() as patch:
        want, wanted_writes = await respond(messages, patch, requests=GET % b"" + GET % END)
    assert (without_date(answer), len(writes)) == (without_date(want), len(wanted_writes))


def without_date(answer: bytes) -> list[bytes]:
    return [line for line in answer.split(b"\r\n") if not line.startswith(b"date: ")]


@pytest.mark.parametrize(
    ("messages", "requests"),
    [
        pytest.param([start(), body(b"ok")], GET % END, id="no length"),
        pytest.param([start(length(2)), body(b"")], b"HEAD" + (GET % END)[3:], id="HEAD"),
        pytest.param([start(length(2), (b"connection", b"close")), body(b"ok")], GET % b"", id="close"),
        pytest.param([start(length(JOINED_SIZE_MAX + 1)), body(b"x" * (JOINED_SIZE_MAX + 1))], GET % END, id="long"),
    ],
)
async def test_other_responses_are_not_sent_as_a_whole(messages, requests, monkeypatch):
    whole: list[bool] = []
    answer, _ = await respond(messages, monkeypatch, requests=requests, whole=whole)
    assert whole == [False]
    assert answer.count(b"HTTP/1.1 200 OK") == 1


async def test_a_whole_response_of_another_length_ends_the_connection(monkeypatch):
    whole: list[bool] = []
    answer, writes = await respond([start(length(2)), body(b"okay")], monkeypatch, requests=GET % b"", whole=whole)
    assert (answer, writes, whole) == (b"", [], [])


def test_only_a_request_of_this_server_is_answered_as_a_whole() -> None:
    async def send(message: Any) -> None:
        raise AssertionError

    assert request_of(send) is None
    assert request_of([].append) is None


async def test_a_body_in_pieces_follows_its_head(monkeypatch):
    answer, writes = await respond([start(length(4)), body(b"ab", more=True), body(b"cd")], monkeypatch)
    assert answer.endswith(b"\r\n\r\nabcd")
    assert [len(data) for data in writes[1:]] == [2, 2]


@pytest.mark.parametrize("data", [b"o", b"okay"], ids=["short", "long"])
async def test_a_body_of_another_length_ends_the_connection(data, monkeypatch):
    """The client must not take the next response for the rest of this one."""
    answer, _ = await respond([start(length(2)), body(data)], monkeypatch, requests=GET % b"" + GET % END)
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    "header",
    [(b"x-a", b"1\r\nx-b: 2"), (b"x-a", b"1\n"), (b"x-a\r\nx-b", b"1"), (b"x-a", b"\0")],
)
async def test_a_response_with_an_invalid_header_is_not_sent(header, monkeypatch):
    answer, _ = await respond([start(header, length(2)), body(b"ok")], monkeypatch)
    assert answer == b""


async def test_a_length_that_is_given_twice_is_left_to_uvicorn(monkeypatch):
    _, writes = await respond([start(length(2), length(2)), body(b"ok")], monkeypatch)
    assert len(writes) == 2


async def test_nothing_is_sent_if_the_application_ends_before_the_body(monkeypatch):
    answer, writes = await respond([start(length(2))], monkeypatch, requests=GET % b"")
    assert (answer, writes) == (b"", [])
