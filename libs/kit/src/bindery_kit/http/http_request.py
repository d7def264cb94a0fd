"""HttpRequest: one request, between the protocol of its connection (`http_limits`) and the application.

uvicorn's class writes the head and the body of a response separately. Each write is a call of the system, which takes
longer than most of what is done for a short response, and wakes the client. This class writes a short response at once,
whether the application sends it as two ASGI messages or as a whole (`respond`); uvicorn's class writes all others.
"""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final, Protocol, cast

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent, HTTPScope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HEADER_RE, HEADER_VALUE_RE, STATUS_LINE, RequestResponseCycle
from uvicorn.server import ServerState

JOINED_SIZE_MAX: Final = 64 * 1024
"""Maximum bytes of a body that is copied to be sent with its head. For larger ones, the copy takes longer."""

_CONTENT_LENGTH: Final = b"content-length: "
_NOT_IN_SHORT: Final = frozenset((_CONTENT_LENGTH, b"connection: ", b"transfer-encoding: ", b""))
"""Headers, as returned by `_header_start`, with which uvicorn writes the head, except for one length."""


@functools.lru_cache(256)
def _header_start(name: bytes) -> bytes:
    """Return a name as it begins a line of a head; empty if it is no valid name."""
    return b"" if not name or HEADER_RE.search(name) else name.lower() + b": "


_defaults: tuple[Sequence[tuple[bytes, bytes]], bytes | None] = ((), b"")
"""The headers for which `_default_lines` was called last, and its result."""


def _default_lines(headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
    """Return the lines of headers that all responses have; None if one is not valid.

    uvicorn makes another list every second, and nothing changes it.
    """
    global _defaults
    if headers is not _defaults[0]:
        are_valid = not any(HEADER_RE.search(name) or HEADER_VALUE_RE.search(value) for name, value in headers)
        lines = b"".join(b"%b: %b\r\n" % (name.lower(), value) for name, value in headers)
        _defaults = (headers, lines if are_valid else None)
    return _defaults[1]


class Connection(Protocol):
    """What a request uses of its connection."""

    transport: asyncio.Transport
    flow: FlowControl
    server_state: ServerState
    logger: Any
    access_logger: Any
    access_log: bool
    tasks: set[asyncio.Task[None]]

    def on_response_complete(self) -> None: ...
    def release_body(self, request: "HttpRequest") -> None: ...
    def linger(self) -> None: ...


class DirectRequest:
    """A request of whose server an application may use more than ASGI offers. Found by `request_of`."""

    def watch(self, on_gone: Callable[[], None] | None) -> None:
        """Call `on_gone` if the client disconnects before the response is complete, or now if it has. None: do not."""
        raise NotImplementedError

    def respond(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bool:
        """Write a short response at once. Return False, with nothing done, if it must be sent as ASGI messages."""
        raise NotImplementedError


class HttpRequest(DirectRequest, RequestResponseCycle):
    """A request that tells its connection when the application has taken its body, or given up the response.

    Values that most requests do not change are attributes of the class, because an object is created per request.
    """

    disconnected = False
    response_started = False
    response_complete = False
    chunked_encoding = None
    expected_content_length = 0
    more_body = True
    body: bytes | bytearray = b""  # type: ignore[assignment]
    body_size = 0
    """Bytes of the body that count for the connection."""
    task: "asyncio.Task[None] | None" = None
    """Runs the application, until it has ended."""
    _on_gone: Callable[[], None] | None = None
    """Called when the client disconnects."""
    _is_taken = False
    """Whether the application has received the end of the body."""
    _head = b""
    """The head of the response until its body is written; empty: nothing waits."""

    def __init__(self, connection: Connection, scope: HTTPScope, *, keep_alive: bool, expects_100: bool) -> None:
        self.scope = scope
        self.transport = connection.transport
        self.flow = connection.flow
        self.keep_alive = keep_alive
        self.waiting_for_100_continue = expects_100
        self.message_event = asyncio.Event()
        self._connection: Connection | None = connection
        """None once the application has ended: then nothing of the request concerns its connection."""

    async def run_asgi(self, app: Any) -> None:
        connection = self._connection
        assert connection is not None
        try:
            if self.transport.is_closing():  # refused in the same read, with a response to this request
                return
            try:
                await app(self.scope, self.receive, self.send)
            except BaseException as error:  # as uvicorn does, also when it cancels requests that do not end
                await self._fail("Exception in ASGI application\n", error)
            if not self.response_complete:
                if not self.disconnected and not self.transport.is_closing():
                    begun = "completing" if self.response_started else "starting"
                    await self._fail(f"ASGI callable returned without {begun} response.")
                if self.transport.is_closing():  # given up
                    connection.linger()
        finally:
            self._connection = None
            if self.task is not None:
                connection.tasks.discard(self.task)
                self.task = None

    async def _fail(self, reason: str, error: BaseException | None = None) -> None:
        assert self._connection is not None
        self._connection.logger.error(reason, exc_info=error)
        if self.response_started:
            self.transport.close()
        else:
            await self.send_500_response()

    def switch(self) -> None:
        """The connection continues with another protocol, which is the response."""
        self.response_started = self.response_complete = True
        self.message_event.set()

    # --- the client

    def watch(self, on_gone: Callable[[], None] | None) -> None:
        self._on_gone = on_gone
        if on_gone is not None:
            if self.disconnected:
                on_gone()
            else:
                self.flow.resume_reading()  # until another request waits, nothing else shows that it disconnects

    def lose(self) -> None:
        """The client has disconnected, or must get no more."""
        self.disconnected = True
        self.message_event.set()
        if self._on_gone is not None:
            self._on_gone()

    # --- the response

    def respond(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bool:
        if self.disconnected or self.response_started or self.flow.write_paused:
            return False
        head = self._short_head(status, headers)
        if not head:
            return False
        if len(body) != self.expected_content_length:
            raise RuntimeError("the response does not have its Content-Length")
        self._finish(head + body)
        return True

    async def send(self, message: ASGISendEvent) -> None:
        if self.disconnected or self.flow.write_paused:
            self._write_head()
            await super().send(message)
        elif message["type"] == "http.response.start":
            self._head = b"" if self.response_started else self._short_head(message["status"], message.get("headers"))
            if not self._head:
                await super().send(message)
        elif self._head:
            body = cast(bytes, message.get("body", b""))
            if message.get("more_body") or len(body) != self.expected_content_length:
                self._write_head()
                await super().send(message)
                return
            head, self._head = self._head, b""
            self._finish(head + body)
        else:
            await super().send(message)

    def _finish(self, data: bytes) -> None:
        """Write the complete response."""
        self.transport.write(data)
        self.expected_content_length = 0
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()

    def _write_head(self) -> None:
        if self._head and not self.disconnected:
            self.transport.write(self._head)
        self._head = b""

    def _short_head(self, status: int, headers: Iterable[tuple[bytes, bytes]] | None) -> bytes:
        """Begin a response with a body of 1 to JOINED_SIZE_MAX bytes, and return its head.

        Returns nothing, and changes nothing, if uvicorn must write the head: for other responses, and for headers that
        say more than the content or are not valid.
        """
        if self.access_log or self.scope["method"] == "HEAD":
            return b""
        defaults = _default_lines(self.default_headers)
        if defaults is None:
            return b""
        parts = [STATUS_LINE[status], defaults]
        values = b""
        size = 0
        for name, value in headers or ():
            start = _header_start(name)
            if start in _NOT_IN_SHORT:
                if start != _CONTENT_LENGTH or size or not value.isdigit():
                    return b""
                size = int(value)
            values += value
            parts += (start, value, b"\r\n")
        if not 0 < size <= JOINED_SIZE_MAX or HEADER_VALUE_RE.search(values):
            return b""
        parts.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        self.response_started = True
        self.waiting_for_100_continue = False
        self.chunked_encoding = False
        self.expected_content_length = size
        return b"".join(parts)

    # --- the body

    def add_body(self, data: bytes) -> None:
        """Keep a piece of the body until the application takes it. The first one is not copied."""
        if not self.body:
            self.body = data
        else:
            if type(self.body) is bytes:
                self.body = bytearray(self.body)
            self.body += data
        self.message_event.set()

    def end_body(self) -> None:
        """The body is complete."""
        self.more_body = False
        self.message_event.set()

    def receive(self) -> Coroutine[Any, Any, ASGIReceiveEvent]:
        if self.more_body or self._is_taken or self.waiting_for_100_continue:
            return self._receive_part()
        return self._receive_rest()

    async def _receive_rest(self) -> ASGIReceiveEvent:
        """Return what is left of a complete body, without waiting."""
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        self.flow.resume_reading()
        self._take()
        self.message_event.clear()
        body, self.body = self.body, b""
        return {"type": "http.request", "body": bytes(body), "more_body": False}

    async def _receive_part(self) -> ASGIReceiveEvent:
        message = await super().receive()
        if message["type"] == "http.request" and not message["more_body"]:
            self._take()
        return message

    def _take(self) -> None:
        """The application has the complete body."""
        self._is_taken = True
        if self.body_size and self._connection is not None:
            self._connection.release_body(self)

    # --- attributes that uvicorn's class expects

    def on_response(self) -> None:
        if self._connection is not None:
            self._connection.on_response_complete()

    @property
    def access_log(self) -> bool:  # type: ignore[override]
        return self._connection is not None and self._connection.access_log

    @property
    def access_logger(self) -> Any:  # type: ignore[override]
        return None if self._connection is None else self._connection.access_logger

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:  # type: ignore[override]
        return [] if self._connection is None else self._connection.server_state.default_headers


def request_of(send: object) -> DirectRequest | None:
    """Return the request whose ASGI `send` this is; None if it belongs to something else."""
    request = getattr(send, "__self__", None)
    return request if isinstance(request, DirectRequest) else None
