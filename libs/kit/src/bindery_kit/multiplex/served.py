"""The server's end of a connection: each stream is a request to the application of the port.

| limit of                                  | value                                  | above it                        |
|-------------------------------------------|----------------------------------------|---------------------------------|
| requests in progress of a connection      | `ServedRequests.of_connection_max`     | CANCEL, BUSY                    |
| requests in progress over all connections | `ServedRequests.limit`                 | CANCEL, BUSY                    |
| bytes of heads above FREE_HEAD_SIZE       | `http.heads_size_max`                  | 429 for the oldest, if nothing  |
|                                           |                                        | was done; else CANCEL, FAILED   |
| bytes of bodies above FREE_SIZE that the  | `http.bodies_size_max`                 | the same                        |
| application has not taken                 |                                        |                                 |
| seconds until a body is complete          | `http.transfer_grace_s`, and its bytes | 408 or CANCEL, FAILED           |
|                                           | at `http.transfer_rate_min`            |                                 |
| seconds that a response waits for credit  | `http.transfer_grace_s`                | CANCEL, FAILED                  |
| seconds without a byte of the other end   | SILENT_S                               | the connection is closed        |

A request counts until the application has ended, so that one that is cancelled at once makes room for no other before.
Unread bytes of the connection as a whole count and end as those of HTTP/1.1 connections (`http.http_limits`).
"""

import asyncio
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, Final
from urllib.parse import unquote

from bindery_identity.tls import PeerCertificate

from bindery_kit.access.held_credentials import CERTIFICATE
from bindery_kit.http.http_request import DirectRequest
from bindery_kit.http.problem import problem_response
from bindery_kit.http.upgrade import HttpConnection
from bindery_kit.limits.held_bytes import HeldBytes
from bindery_kit.multiplex.frames import (
    BODY_SIZE_MAX,
    NUMBER,
    TOKEN,
    Frame,
    FrameReader,
    Kind,
    ProtocolViolation,
    Reason,
    encode,
    encode_number,
)
from bindery_kit.multiplex.heads import RequestHead, decode_request, encode_response
from bindery_kit.multiplex.streams import Sending, Stream, StreamOver

FREE_HEAD_SIZE: Final = 4 * 1024
"""Bytes of a head up to which it does not count towards `http.heads_size_max`."""
SILENT_S: Final = 60.0
"""Seconds without a byte of the other end after which a connection is closed. The other end pings more often."""
SILENT_CHECKS: Final = 4
"""Number of checks in these seconds."""

_Message = MutableMapping[str, Any]


class ServedRequests:
    """The requests in progress over all connections. `limit`: their maximum number."""

    def __init__(self, limit: int, *, of_connection_max: int) -> None:
        self.limit = limit
        self.of_connection_max = of_connection_max
        self.count = 0
        self.connections = 0
        self.refused = 0
        """Requests that were refused because of a limit."""


class StreamRequest(DirectRequest, Stream):
    """One request, as the application sees it."""

    __slots__ = (
        "_disconnected",
        "_head_size",
        "_is_complete",
        "_left",
        "_on_gone",
        "_received_size",
        "_served",
        "_started",
        "_timer",
        "began_s",
        "is_taken",
        "scope",
    )

    def __init__(self, served: "ServedConnection", stream_id: int, head: RequestHead, *, size: int) -> None:
        """`size`: bytes of the head."""
        super().__init__(served, stream_id)
        self._served = served
        self._left = head.length
        """Bytes of the body that are missing by Content-Length; None: it is not announced."""
        self._disconnected = False
        self._started = False
        """Whether the head of the response is sent."""
        self._is_complete = False
        """Whether the response is."""
        self._on_gone: Callable[[], None] | None = None
        self.is_taken = False
        """Whether the application has received the end of the body."""
        self._received_size = 0
        self._timer: asyncio.TimerHandle | None = None
        self.began_s = 0.0
        self._head_size = size if size > FREE_HEAD_SIZE else 0
        self.scope = served.scope_of(head)

    # --- what the other end sends

    def begin_body(self, *, is_end: bool) -> None:
        """The head has arrived, perhaps with the end. Raises ProtocolViolation."""
        self.has_ended = is_end
        if is_end and self._left:
            raise ProtocolViolation("a request ends before its Content-Length")
        if self._head_size:
            self._served.heads.hold(_HeadHolder.of(self), self._head_size)

    def add(self, data: bytes, *, is_end: bool) -> None:
        self._received_size += len(data)
        if self._left is not None:
            self._left -= len(data)
            if self._left < 0 or (is_end and self._left):
                raise ProtocolViolation("the body of a request differs from its Content-Length")
        if self._is_complete or self._disconnected:  # not needed any more
            self.has_ended = self.has_ended or is_end
            return
        super().add(data, is_end=is_end)
        if is_end:
            self._stop_timer()

    def watch_body(self) -> None:
        """End the request unless its body arrives in time."""
        if not self.has_ended and self._timer is None:
            loop = self._served.loop
            self.began_s = loop.time()
            self._timer = loop.call_later(self._served.rate.grace_s, self._check_body)

    def _check_body(self) -> None:
        self._timer = None
        if self.has_ended or self._is_complete or self._disconnected:
            return
        loop, rate = self._served.loop, self._served.rate
        now = loop.time()
        due = rate.deadline_s(self.began_s, self._received_size)
        if self._unread:  # the application is not ready for more
            due = max(due, now + rate.grace_s)
        if now < due:
            self._timer = loop.call_later(due - now, self._check_body)
            return
        self._served.limits_refused("body_timeout")
        self.give_up(408, "request_timeout", "the request's body arrives too slowly")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def lose(self) -> None:
        """The client is gone, or must get no more."""
        self._disconnected = True
        self.drop()
        self._stop_timer()
        self.wake_reader()
        self.wake_writer()
        on_gone, self._on_gone = self._on_gone, None
        if on_gone is not None:
            on_gone()

    def evict(self, kind: str, held_size: int) -> None:
        """Give up the request, because all together hold too many bytes of heads or bodies."""
        self._served.limits_refused(f"{kind}_size")
        self.give_up(429, "too_many_requests", f"the {kind} of requests take too much memory; retry")

    def give_up(self, status: int, code: str, detail: str) -> None:
        """Answer with a problem if the application cannot have done anything; otherwise cancel the stream."""
        if self._is_complete or self._disconnected:
            return
        is_undone = not self._started and (self.scope["method"] in ("GET", "HEAD") or not self.is_taken)
        if is_undone:
            response = problem_response(status=status, code=code, detail=detail)
            self._write_all(status, response.raw_headers, bytes(response.body))
        else:
            self._served.cancel(self, Reason.FAILED)
        self.lose()

    # --- the application

    async def run(self, app: Any) -> None:
        """Run the application for this request."""
        served = self._served
        try:
            await app(self.scope, self.receive, self.send)
        except StreamOver:
            pass
        except BaseException as error:  # as for other requests, also when the server cancels those that do not end
            served.logger.error("Exception in ASGI application\n", exc_info=error)
        finally:
            if not self._is_complete and not self._disconnected:
                served.logger.error("ASGI callable returned without completing response.")
                if self._started:
                    served.cancel(self, Reason.FAILED)
                else:
                    response = problem_response(status=500, code="internal", detail="internal error; see the log")
                    self._write_all(500, response.raw_headers, bytes(response.body))
            self.finish()

    def finish(self) -> None:
        """The application has ended."""
        self._disconnected = True
        self._on_gone = None
        self.drop()
        self._stop_timer()
        if self._head_size:
            self._served.heads.release(_HeadHolder.of(self))
        self._served.ended(self)

    async def receive(self) -> _Message:
        while not self._disconnected and not self._is_complete:
            if self._unread or (self.has_ended and not self.is_taken):
                data = self.take()
                self.is_taken = self.has_ended
                return {"type": "http.request", "body": data, "more_body": not self.has_ended}
            await self.wait_for_more()
        return {"type": "http.disconnect"}

    async def send(self, message: _Message) -> None:
        if self._disconnected:
            await asyncio.sleep(0)  # others run, even if the application goes on to send
            return
        if message["type"] == "http.response.start":
            if self._started:
                raise RuntimeError("a response begins twice")
            self._started = True
            head = encode_response(message["status"], message.get("headers", ()))
            self.connection.sending.write(encode(Kind.RESPONSE, self.id, head))
            return
        if not self._started or self._is_complete:
            raise RuntimeError("a response has no head, or goes on after its end")
        is_end = not message.get("more_body", False)
        body: bytes = b"" if self.scope["method"] == "HEAD" else message.get("body", b"")
        if not body and not is_end:
            return
        try:
            await self.send_body(body, is_end=is_end, credit_timeout_s=self._served.rate.grace_s)
        except TimeoutError:
            self._served.limits_refused("unread_timeout")
            self._served.cancel(self, Reason.FAILED)
            self.lose()
        except StreamOver:
            return
        if is_end:
            self._complete()

    @property
    def may_send(self) -> bool:
        return not self._disconnected

    def watch(self, on_gone: Callable[[], None] | None) -> None:
        if on_gone is not None and self._disconnected:
            on_gone()
        else:
            self._on_gone = on_gone

    def respond(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bool:
        if self._disconnected or self._started or len(body) > self._credit or not self.connection.sending.is_free:
            return False
        if self.scope["method"] == "HEAD":
            return False
        self._write_all(status, headers, body)
        return True

    def _write_all(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
        """Send a complete response, for which there must be credit."""
        self._started = True
        self._credit -= len(body)
        head = encode(Kind.RESPONSE, self.id, encode_response(status, headers))
        self.connection.sending.write(b"".join((head, *body_frames(self.id, body))))
        self._complete()

    def _complete(self) -> None:
        self._is_complete = True
        self.wake_reader()
        self._stop_timer()
        self.drop()


class _HeadHolder:
    """Counts the head of a request, apart from its body."""

    __slots__ = ("_request",)

    def __init__(self, request: StreamRequest) -> None:
        self._request = request

    @classmethod
    def of(cls, request: StreamRequest) -> "_HeadHolder":
        return cls(request)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _HeadHolder) and other._request is self._request

    def __hash__(self) -> int:
        return hash(id(self._request))

    def evict(self, kind: str, held_size: int) -> None:
        self._request.evict(kind, held_size)


class ServedConnection:
    """One connection, after its upgrade: `http.upgrade.Upgraded`."""

    def __init__(self, connection: HttpConnection, requests: ServedRequests) -> None:
        self._connection = connection
        self._requests = requests
        self._frames = FrameReader()
        self._last_stream = 0
        self._streams: dict[int, StreamRequest] = {}
        """Requests whose application has not ended, by stream."""
        self._is_leaving = False
        self._is_lost = False
        self._is_silent = 0
        """Number of checks since the last byte of the other end."""
        self.loop = connection.loop
        self.sending = Sending(connection.transport)
        self.rate = connection.shared.rate
        self.logger = connection.logger
        self.heads: HeldBytes = connection.shared.heads
        requests.connections += 1
        self._timer = self.loop.call_later(SILENT_S / SILENT_CHECKS, self._check_silence)

    @property
    def held(self) -> HeldBytes:
        held: HeldBytes = self._connection.shared.bodies
        return held

    def scope_of(self, head: RequestHead) -> dict[str, Any]:
        """Return the ASGI scope of a request. Raises ProtocolViolation for a path that is not percent-encoded UTF-8."""
        connection = self._connection
        raw_path, _, query = head.target.partition(b"?")
        path = raw_path.decode("ascii")
        return {
            "type": "http",
            "asgi": {"version": connection.asgi_version, "spec_version": "2.3"},
            "http_version": "1.1",
            "server": connection.server,
            "client": connection.client,
            "scheme": connection.scheme,
            "method": head.method,
            "root_path": "",
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": head.headers,
            "state": connection.app_state.copy(),
        }

    def limits_refused(self, reason: str) -> None:
        self._connection.shared.refused(reason, peer=self._connection.group)

    def cancel(self, request: StreamRequest, reason: Reason) -> None:
        self._cancel(request.id, reason)

    def _cancel(self, stream: int, reason: Reason) -> None:
        self.sending.write(encode(Kind.CANCEL, stream, bytes((reason,))))

    # --- called by the connection

    def data_received(self, data: bytes) -> None:
        self._is_silent = 0
        begun: list[StreamRequest] = []
        try:
            for frame in self._frames.feed(data):
                self._received(frame, begun)
        except ProtocolViolation as error:
            self._connection.shared.stats.count("invalid_frame")
            self._connection.shared.log.warning(
                "http_refused_invalid_frame", peer=self._connection.group, error=str(error)
            )
            self._connection.transport.abort()
            return
        for request in begun:  # with what has arrived of their bodies
            request.watch_body()

    def _received(self, frame: Frame, begun: list[StreamRequest]) -> None:
        kind, stream, payload, is_end = frame
        if kind is Kind.REQUEST:
            if stream <= self._last_stream:
                raise ProtocolViolation(f"stream {stream} begins after stream {self._last_stream}")
            self._last_stream = stream
            self._begin(stream, payload, is_end, begun)
        elif kind is Kind.PING:
            self.sending.write(encode(Kind.PONG, 0, payload))
        elif kind is Kind.PONG:
            return
        elif kind in (Kind.RESPONSE, Kind.LEAVING):
            raise ProtocolViolation(f"{kind.name} from a client")
        elif stream > self._last_stream:
            raise ProtocolViolation(f"{kind.name} of stream {stream}, which has not begun")
        elif (request := self._streams.get(stream)) is None:
            return  # it has ended meanwhile
        elif kind is Kind.BODY:
            request.add(payload, is_end=is_end)
        elif kind is Kind.CREDIT:
            request.add_credit(NUMBER.unpack(payload)[0])
        else:
            request.lose()

    def _begin(self, stream: int, payload: bytes, is_end: bool, begun: list[StreamRequest]) -> None:
        head = decode_request(payload)
        requests = self._requests
        if self._is_leaving:
            self._cancel(stream, Reason.NOT_BEGUN)
            return
        if requests.count >= requests.limit or len(self._streams) >= requests.of_connection_max:
            requests.refused += 1
            self.limits_refused("peer_requests")
            self._cancel(stream, Reason.BUSY)
            return
        request = StreamRequest(self, stream, head, size=len(payload))
        if not self._streams:
            self._connection.be_idle(False)
        self._streams[stream] = request
        requests.count += 1
        task = self.loop.create_task(self._serve(request))
        self._connection.tasks.add(task)
        task.add_done_callback(self._connection.tasks.discard)
        request.begin_body(is_end=is_end)
        if not is_end:
            begun.append(request)

    async def _serve(self, request: StreamRequest) -> None:
        certificate: PeerCertificate | None = self._connection.app_state.get(CERTIFICATE)
        reason = None if certificate is None else certificate.refusal()
        if reason is None:
            await request.run(self._connection.app)
            return
        self.limits_refused("certificate")
        request.give_up(401, "unauthorized", reason)
        request.finish()
        self.shutdown()  # another connection has the newest certificate

    def ended(self, request: StreamRequest) -> None:
        """The application has ended."""
        if self._streams.pop(request.id, None) is None:
            return
        self._requests.count -= 1
        self._connection.server_state.total_requests += 1
        if not self._streams:
            if self._is_leaving and not self._is_lost:
                self._close()
            elif not self._is_lost:
                self._connection.be_idle(True)

    def pause_writing(self) -> None:
        self.sending.pause()

    def resume_writing(self) -> None:
        self.sending.resume()

    def connection_lost(self) -> None:
        self._is_lost = True
        self._requests.connections -= 1
        self._timer.cancel()
        self.sending.close()
        for request in list(self._streams.values()):
            request.lose()

    def shutdown(self) -> None:
        if self._is_leaving or self._is_lost:
            return
        self._is_leaving = True
        self.sending.write(encode_number(Kind.LEAVING, 0, self._last_stream))
        if not self._streams:
            self._close()

    def _close(self) -> None:
        self.sending.flush()
        self._connection.transport.close()

    def _check_silence(self) -> None:
        self._is_silent += 1
        if self._is_silent > SILENT_CHECKS:
            self.limits_refused("peer_silent")
            self._connection.transport.abort()
            return
        self._timer = self.loop.call_later(SILENT_S / SILENT_CHECKS, self._check_silence)


def body_frames(stream: int, body: bytes) -> list[bytes]:
    """Return the frames of a complete body, whose bytes are known."""
    if len(body) <= BODY_SIZE_MAX:
        return [encode(Kind.BODY, stream, body, is_end=True)]
    view = memoryview(body)
    return [
        encode(Kind.BODY, stream, view[at : at + BODY_SIZE_MAX], is_end=at + BODY_SIZE_MAX >= len(body))
        for at in range(0, len(body), BODY_SIZE_MAX)
    ]


class Multiplexing:
    """The protocol of a port: `http.upgrade.Upgrade`. `requests_max`: maximum number of requests in progress."""

    def __init__(self, *, requests_max: int, of_connection_max: int) -> None:
        self.token = TOKEN
        self.requests = ServedRequests(requests_max, of_connection_max=min(of_connection_max, requests_max))

    def connect(self, connection: HttpConnection) -> ServedConnection:
        return ServedConnection(connection, self.requests)
