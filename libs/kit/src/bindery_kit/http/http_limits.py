"""HttpLimits: limit what a client can send and hold before its request reaches the application.

| what                                                       | limit                    | above it                     |
|------------------------------------------------------------|--------------------------|------------------------------|
| bytes of request line and headers, or of trailers          | `HEAD_SIZE_MAX`          | 431, closed                  |
| requests that wait for the responses to earlier ones       | `PIPELINED_MAX`          | 400, closed                  |
| seconds until a head is complete, from the connection or   | `HEAD_TIMEOUT_S`         | 408, closed; without a       |
| from its first byte                                        |                          | response if no byte arrived  |
| connections                                                | `connections_max`        | the connection that has been |
|                                                            |                          | idle longest is closed; if   |
|                                                            |                          | none is idle: 503, except    |
|                                                            |                          | for `ALWAYS_ANSWERED`        |

uvicorn keeps headers and trailers of any size, waits forever for the rest of a head, and does not limit connections, so
a client could exhaust memory or file descriptors of a process that stores data. uvicorn queues requests that are sent
before earlier ones are answered, and continues to read after each response. This class reads nothing while requests
wait.
"""

import asyncio
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bindery_kit.http.problem import CONTENT_TYPE, RETRY_AFTER_S, problem_response
from bindery_kit.observability.logs import get_logger

HEAD_SIZE_MAX: Final = 256 * 1024
"""Maximum bytes of request line and headers, or of trailers, exceeded by at most one read of the socket."""
PIPELINED_MAX: Final = 64
"""Maximum number of requests of one connection that wait for the responses to earlier ones."""
HEAD_TIMEOUT_S: Final = 30.0
"""Maximum seconds until a head is complete, longer than any proxy takes. The pause between requests is limited by the
keep-alive timeout, which is longer."""

RESERVE: Final = 64
"""Number of connections above the limit whose head is read, because they may request one of ALWAYS_ANSWERED."""
ALWAYS_ANSWERED: Final = (b"/livez", b"/readyz", b"/startupz", b"/metrics")
"""Paths that are served above the limit: probes must not fail because a process is fully used."""

_REASONS: Final = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}

log = get_logger(__name__)


class HttpLimits(HttpToolsProtocol):
    """Mix-in for the protocol of a server: refuse requests, and close connections, that exceed a limit."""

    connections_max: ClassVar[int]
    idle: "ClassVar[dict[HttpLimits, None]]"
    """Connections of this server without a request in progress; the one idle longest comes first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unfinished_size = 0
        self._moved_on = False
        self._deadline: asyncio.TimerHandle | None = None
        self._is_extra = False
        """Whether the connection is above the limit."""
        self._is_refused = False

    # --- called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        if len(self.connections) > self.connections_max and not self._make_room():
            if len(self.connections) > self.connections_max + RESERVE:
                self._refuse_as_extra()
                return
            self._is_extra = True
        self.idle[self] = None
        self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self.idle.pop(self, None)
        self._drop_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():  # refused: later bytes get no response
            return
        self._moved_on = False
        super().data_received(data)
        if self._moved_on:
            self._unfinished_size = 0
            self._drop_deadline()
            return
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)
        self._unfinished_size += len(data)
        if self._unfinished_size > HEAD_SIZE_MAX and not self.transport.is_closing():
            self._refuse(431, "headers_too_large", "the request's headers are too large", {"size_max": HEAD_SIZE_MAX})

    # --- called by the parser and by responses

    def on_headers_complete(self) -> None:
        self._moved_on = True
        self.idle.pop(self, None)
        if self._is_refused:
            return
        self._is_extra = self._is_extra and len(self.connections) > self.connections_max
        if self._is_extra and self.url.partition(b"?")[0] not in ALWAYS_ANSWERED:
            self._refuse_as_extra()
            return
        if len(self.pipeline) >= PIPELINED_MAX:
            self.pipeline.clear()
            raise ValueError("too many requests are pipelined")  # the parser reports an invalid request: 400
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self.pipeline:
            self.flow.pause_reading()
        if self.cycle.response_complete:  # otherwise the last waiting request runs now
            self.idle[self] = None

    def on_body(self, body: bytes) -> None:
        self._moved_on = True
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._moved_on = True
        if not self._is_refused:
            super().on_message_complete()

    # --- limits

    def _make_room(self) -> bool:
        """Close the connection that has been idle longest. Return False if none is idle."""
        for other in self.idle:
            del self.idle[other]
            other.transport.abort()
            return True
        return False

    def _refuse_as_extra(self) -> None:
        self._is_refused = True
        log.warning("connection_refused", connections=len(self.connections) - 1)
        self._refuse(
            503, "too_many_connections", "too many clients are connected", {"connections_max": self.connections_max}
        )

    def _head_is_late(self) -> None:
        self._deadline = None
        if self.transport.is_closing() or not (self.cycle is None or self.cycle.response_complete):
            return
        if self._unfinished_size:
            self._refuse(
                408, "request_timeout", "the request's head did not arrive in time", {"timeout_s": HEAD_TIMEOUT_S}
            )
        else:
            self.transport.close()

    def _drop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, status: int, code: str, detail: str, facts: dict[str, Any]) -> None:
        self.headers = []
        hang_up(self.transport, status, code, detail, facts)


def hang_up(
    transport: asyncio.WriteTransport, status: int, code: str, detail: str, facts: dict[str, Any] | None = None
) -> None:
    """Send a problem for a request that does not reach the app, and close. `status`: 400, 408, 431 or 503."""
    body = bytes(problem_response(status=status, code=code, detail=detail, facts=facts).body)
    retry = f"Retry-After: {RETRY_AFTER_S}\r\n" if status == 503 else ""
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {CONTENT_TYPE}\r\n{retry}"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    transport.write(head.encode("ascii") + body)
    transport.close()


def with_limits(protocol: type[HttpToolsProtocol], *, connections_max: int) -> type[HttpToolsProtocol]:
    """Return `protocol` with the limits, for one server. `connections_max`: at least 1."""
    members = {"connections_max": connections_max, "idle": {}}
    return type(f"Limited{protocol.__name__}", (HttpLimits, protocol), members)
