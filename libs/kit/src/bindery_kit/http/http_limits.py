"""HttpLimits: limit what a client can send, hold and leave unread on an HTTP port, whatever the application does.

| what                                                   | limit                         | above it                    |
|--------------------------------------------------------|-------------------------------|-----------------------------|
| bytes of request line and headers, or of trailers      | `HEAD_SIZE_MAX`               | 431, closed                 |
| headers of a request, or trailers                      | `HEADERS_MAX`                 | 431, closed                 |
| requests that wait for the responses to earlier ones   | `PIPELINED_MAX`               | 400, closed                 |
| seconds until a head is complete, from the connection  | `head_timeout_s`              | 408, closed; without a      |
| or from its first byte                                 |                               | response if no byte arrived |
| seconds until a body is complete                       | `transfer_grace_s`, and its   | 408, closed                 |
|                                                        | bytes at `transfer_rate_min`  |                             |
| seconds that a response is not read                    | the same                      | closed                      |
| connections: in all, and of one address                | `connections_max`,            | the one that has been idle  |
|                                                        | `connections_per_address_max` | longest is closed, first of |
|                                                        |                               | the same address if it has  |
|                                                        |                               | more than its share; if     |
|                                                        |                               | none is idle: 503, except   |
|                                                        |                               | for `ALWAYS_ANSWERED`       |
| bytes over all connections: heads, bodies that the     | `heads_size_max`,             | the one that has held bytes |
| application has not taken completely, and unread       | `bodies_size_max`,            | longest is closed, with 429 |
| responses                                              | `unread_size_max`             | if nothing was done         |

A request of a client whose certificate has expired since the handshake, or whose CA was removed since then, is refused
with 401, and the connection is closed; requests in progress are answered first.

uvicorn keeps headers and trailers of any size, waits forever for the rest of a head or body and for a client that does
not read, and does not limit connections, so a client could exhaust memory or file descriptors of a process that stores
data. uvicorn queues requests that are sent before earlier ones are answered, and continues to read after each response.
This class reads nothing while requests wait.

Each refusal is counted by its reason (`http_stats`), and logged at most once per second.
"""

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, Final, Protocol, cast
from urllib.parse import unquote

import httptools
from bindery_identity.tls import PeerCertificate
from uvicorn._types import HTTPScope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from bindery_kit.access.held_credentials import CERTIFICATE
from bindery_kit.configuration.http_settings import HttpSettings
from bindery_kit.http.http_request import HttpRequest
from bindery_kit.http.http_stats import HttpStats
from bindery_kit.http.problem import CONTENT_TYPE, RETRY_AFTER_S, problem_response
from bindery_kit.http.upgrade import UPGRADE, Upgrade, Upgraded, asks_for
from bindery_kit.limits.address_counts import AddressCounts, group_of
from bindery_kit.limits.held_bytes import HeldBytes
from bindery_kit.limits.minimum_rate import MinimumRate
from bindery_kit.observability.quiet_log import QuietLog

HEAD_SIZE_MAX: Final = 32 * 1024
"""Maximum bytes of request line and headers, or of trailers."""
HEADERS_MAX: Final = 100
"""Maximum number of headers of a request, and of its trailers."""
PIPELINED_MAX: Final = 16
"""Maximum number of requests of one connection that wait for the responses to earlier ones."""
PARSERS_KEPT: Final = 256
"""Number of connections up to which idle ones keep their parsers: a new one takes about a microsecond per request."""
FREE_HEAD_SIZE: Final = 4 * 1024
"""A head of at most this many bytes does not count towards `heads_size_max`, unless it waits for other responses."""
HEADER_OVERHEAD: Final = 200
"""Bytes of memory that a header takes in addition to its name and value."""
FREE_BODY_SIZE: Final = 4 * 1024
"""Complete bodies of a connection of at most this many bytes do not count while the application has not taken them."""
REQUEST_OVERHEAD: Final = 3 * 1024
"""Bytes of memory that a waiting request takes in addition to its head."""
UNREAD_MARK: Final = 32 * 1024
"""Bytes of responses in the transport's buffer above which they count as unread. Fewer count towards no limit."""
KERNEL_UNREAD_SIZE: Final = 64 * 1024
"""Bytes of unsent responses that the kernel keeps per connection (TCP_NOTSENT_LOWAT); they count as unread, too."""
LINGER_S: Final = 5.0
"""Seconds after which a connection that is being closed is cut off, and for which a body is read and dropped whose
request was answered before it arrived."""
TARGETS_KEPT: Final = 1024
"""Number of request targets whose parts are cached, because clients repeat them."""
KEPT_TARGET_SIZE_MAX: Final = 512
"""Maximum bytes of a request target whose parts are cached."""

RESERVE: Final = 64
"""Number of connections above the limit whose head is read, because they may request one of ALWAYS_ANSWERED."""
ALWAYS_ANSWERED: Final = (b"/livez", b"/readyz", b"/startupz", b"/metrics")
"""Paths that are served above the limit: probes must not fail because a process is fully used."""

_REASONS: Final = {
    400: "Bad Request",
    401: "Unauthorized",
    408: "Request Timeout",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


class IdleConnection(Protocol):
    """A connection without a request in progress. `group`: the address that it counts for."""

    group: str
    transport: asyncio.Transport

    def __hash__(self) -> int: ...


class ServerLimits:
    """What all connections of one server share. `connections_max`: at least 1. `clock`: monotonic seconds."""

    def __init__(
        self, settings: HttpSettings, *, connections_max: int, stats: HttpStats, clock: Callable[[], float]
    ) -> None:
        self.connections_max = connections_max
        self.per_address_max = settings.connections_per_address_max or max(1, connections_max // 2)
        self.head_timeout_s = settings.head_timeout_s
        self.handshake_timeout_s = settings.tls.handshake_timeout_s
        self.rate = MinimumRate(grace_s=settings.transfer_grace_s, bytes_per_s=settings.transfer_rate_min)
        self.heads = HeldBytes("heads", settings.heads_size_max)
        self.bodies = HeldBytes("bodies", settings.bodies_size_max)
        self.unread = HeldBytes("unread", settings.unread_size_max)
        self.idle: dict[IdleConnection, None] = {}
        """Connections without a request in progress; the one idle longest comes first."""
        self.addresses = AddressCounts()
        self.stats = stats
        self.upgrade: Upgrade | None = None
        """Another protocol with which connections may continue; None: there is none."""
        self.log = QuietLog(__name__, clock=clock)
        self.uvicorn_log = _UvicornLog(self.log, stats)
        self.keeps_alive = True
        """Whether connections stay open after a response. Otherwise each response has `Connection: close`."""
        stats.watch(self.heads, self.bodies, self.unread)

    def is_above(self, group: str, count: int) -> bool:
        """Return whether `count` connections, or those of an address, are more than allowed."""
        return count > self.connections_max or self.addresses.count(group) > self.per_address_max

    def make_room(self, group: str) -> bool:
        """Close the connection that has been idle longest. Return False if none is idle.

        If `group`, the address of a new connection, has more than its share of all, one of the same address is closed
        first, so that a flood from few addresses does not end the idle connections of others, or new ones before their
        request is read. If it has more than an address may have, only one of the same address is closed.
        """
        count = self.addresses.count(group)
        other: IdleConnection | None = None
        if count > self.per_address_max or count * len(self.addresses) > self.connections_max:
            other = next((one for one in self.idle if one.group == group), None)
        if other is None and count <= self.per_address_max:
            other = next(iter(self.idle), None)
        if other is None:
            return False
        del self.idle[other]
        self.stats.count("idle_for_others")
        other.transport.abort()
        return True

    def begin_handshake(self, connection: "IdleConnection", count: int) -> bool:
        """Count a connection that has no protocol yet. `count`: connections of the server, this one included.

        Return False if there is no place for it. `end_handshake` must be called in both cases.
        """
        self.stats.connected()
        self.addresses.add(connection.group)
        has_room = not self.is_above(connection.group, count) or self.make_room(connection.group)
        if not has_room and count > self.connections_max + RESERVE:
            return False
        self.idle[connection] = None
        return True

    def end_handshake(self, connection: "IdleConnection") -> None:
        """Give back what `begin_handshake` counted, because the connection has ended or has a protocol now."""
        self.idle.pop(connection, None)
        self.addresses.remove(connection.group)
        self.stats.connections -= 1

    def refused(self, reason: str, **fields: Any) -> None:
        """Count and log that a request or a connection was refused. `reason`: a constant of the code."""
        self.stats.count(reason)
        self.log.warning("http_refused_" + reason, **fields)


class _UvicornLog:
    """Stands for uvicorn's logger. Clients can cause its warnings, and its errors too (a response that is given up, a
    defect of the application), therefore they are counted and rate-limited."""

    level = logging.WARNING

    def __init__(self, log: QuietLog, stats: HttpStats) -> None:
        self._log = log
        self._stats = stats

    def warning(self, message: str, *args: Any) -> None:
        self._stats.count("invalid_http")
        self._log.warning("http_refused_invalid_http", message=message % args if args else message)

    def error(self, message: str, *args: Any, exc_info: Any = None) -> None:
        text = (message % args if args else message).strip()
        if exc_info is None:
            self._stats.count("response_incomplete")
            self._log.warning("http_response_incomplete", message=text)
        else:
            self._stats.count("application_failed")
            self._log.error("http_application_failed", message=text, exc_info=exc_info)


@functools.lru_cache(TARGETS_KEPT)
def _kept_target(url: bytes) -> tuple[str, bytes, bytes]:
    return _target(url)


def _target(url: bytes) -> tuple[str, bytes, bytes]:
    """Return (path, path as it was sent, query). Raises HttpParserInvalidURLError, ValueError."""
    parsed = httptools.parse_url(url)
    path = parsed.path.decode("ascii")
    return unquote(path) if "%" in path else path, parsed.path, parsed.query or b""


class HttpLimits(HttpToolsProtocol):
    """Mix-in for the protocol of a server: refuse requests, and close connections, that exceed a limit."""

    shared: ClassVar[ServerLimits]

    __slots__ = (
        "_answered_s",
        "_bodies_size",
        "_body_began_s",
        "_body_open",
        "_body_size",
        "_charged",
        "_charges",
        "_deadline",
        "_holds_bodies",
        "_idle_s",
        "_in_head",
        "_is_extra",
        "_is_lost",
        "_is_refused",
        "_is_upgrade",
        "_linger_timer",
        "_moved_on",
        "_offers_upgrade",
        "_paused_s",
        "_paused_size",
        "_read_size",
        "_running",
        "_trailers",
        "_unfinished_size",
        "_upgraded",
        "_write_timer",
        "group",
    )  # small, because there are thousands of connections

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = self.shared.uvicorn_log  # type: ignore[assignment]
        self.parser = None  # type: ignore[assignment]  # until bytes arrive
        self.group = ""
        self._unfinished_size = 0
        """Bytes since the last progress of the parser: an incomplete head, chunk header or trailer."""
        self._read_size = 0
        """Bytes of the current read of the socket."""
        self._moved_on = False
        self._in_head = True
        """Whether the parser is before the end of a head; otherwise headers are trailers."""
        self._trailers = 0
        self._charges: deque[int] | None = None
        """Bytes charged for the heads of the requests in progress, the oldest first; None if nothing is charged."""
        self._charged = 0
        """Sum of `_charges`."""
        self._body_open = False
        """Whether a head is complete and its body is not."""
        self._bodies_size = 0
        """Bytes of bodies that have arrived and that the application has not taken completely."""
        self._holds_bodies = False
        """Whether these bytes count."""
        self._body_size = 0
        """Bytes of the newest body that have arrived."""
        self._body_began_s: float | None = None
        """Set when a read of the socket ends within a body."""
        self._answered_s: float | None = None
        """When the response to the request was complete whose body is open."""
        self._idle_s: float | None = None
        """Since when the connection waits for a request, after an earlier one; None: it does not."""
        self._deadline: asyncio.TimerHandle | None = None
        """Ends a head or a body that is late."""
        self._paused_s: float | None = None
        """Since when responses are unread."""
        self._paused_size = 0
        self._write_timer: asyncio.TimerHandle | None = None
        """Runs until it finds no unread responses, because there are thousands of pauses."""
        self._linger_timer: asyncio.TimerHandle | None = None
        self._is_extra = False
        """Whether the connection is above a limit of connections."""
        self._is_refused = False
        self._is_upgrade = False
        """Whether the head that was parsed last asks for another protocol (`_parse`)."""
        self._offers_upgrade = False
        """Whether the newest request may continue with `ServerLimits.upgrade`, and is not answered."""
        self._upgraded: Upgraded | None = None
        """The protocol with which the connection continues."""
        self._is_lost = False
        self._running: HttpRequest | None = None
        """The request in progress that the application runs; `cycle` is the newest one that was received."""

    # --- called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        shared = self.shared
        self.transport.set_write_buffer_limits(high=UNREAD_MARK)
        self.group = group_of(transport.get_extra_info("peername"))
        shared.stats.connected()
        shared.addresses.add(self.group)
        if self._is_above() and not shared.make_room(self.group):
            if len(self.connections) > shared.connections_max + RESERVE:
                self._refuse_as_extra()
                return
            self._is_extra = True
        shared.idle[self] = None
        self._set_deadline(shared.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        shared = self.shared
        self._is_lost = True
        shared.idle.pop(self, None)
        shared.addresses.remove(self.group)
        shared.stats.connections -= 1
        shared.heads.release(self)
        shared.bodies.release(self)
        shared.unread.release(self)
        self._paused_s = None
        for timer in (self._deadline, self._write_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        self._deadline = self._write_timer = self._linger_timer = None
        if self._running is not None and not self._running.response_complete:  # uvicorn tells only the newest request
            self._running.lose()
        self.pipeline.clear()
        self._unset_keepalive_if_required()  # uvicorn would keep a connection that was reset until this timer ends
        super().connection_lost(exc)
        if self._upgraded is not None:
            self._upgraded.connection_lost()
            self._upgraded = None
        self.cycle = self._running = None  # type: ignore[assignment]  # they refer to this object: no cyclic garbage

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():  # refused: later bytes get no response
            return
        if self._upgraded is not None:
            self._upgraded.data_received(data)
            return
        self._offers_upgrade = False  # the client does not wait for the answer
        self._moved_on = False
        self._read_size = len(data)
        if self.parser is None:
            self._create_parser()  # type: ignore[unreachable]  # uvicorn always has one
        self._idle_s = None
        try:
            self._parse(data)
        except httptools.HttpParserError:
            reason = "Invalid HTTP request received."
            self.logger.warning(reason)
            self.send_400_response(reason)
        if self.transport.is_closing():
            self.linger()
            return
        if self._body_open and self._body_began_s is None:
            self._body_began_s = self.loop.time()
            self._set_deadline(self.shared.rate.grace_s)
        if self._bodies_size > FREE_BODY_SIZE or self._holds_bodies or (self._body_open and self._bodies_size):
            self._hold_bodies()
        if self._moved_on:
            if self._unfinished_size:
                self._unfinished_size = 0
                self._hold_heads()
            if not self._body_open:
                self._drop_deadline()
            return
        self._unfinished_size += len(data)
        if self._unfinished_size > HEAD_SIZE_MAX:
            self._refuse_head()
            return
        self._hold_heads()
        if self._deadline is None:
            self._set_deadline(self.shared.head_timeout_s)

    def _parse(self, data: bytes) -> None:
        """Pass bytes to the parser. Raises httptools.HttpParserError.

        The parser drops the body of a request that asks for another protocol (`Upgrade`) and ends there, but a server
        may answer such a request as if it did not ask. So its head is parsed once more, without that.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as end:
                if self._is_refused:
                    return
                again = b"" if self._offers_upgrade else self._head_without_upgrade()
                data = again + data[end.args[0] :]
            self._create_parser()
            if not data:
                return
            self._offers_upgrade = False

    def _head_without_upgrade(self) -> bytes:
        method, version = self.parser.get_method(), self.parser.get_http_version()
        lines = [b"%b %b HTTP/%b\r\n" % (method, self.url, version.encode())]
        for name, value in self.headers:
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                value = b", ".join(option for option in options if option.lower() != b"upgrade")
            if name != b"upgrade":
                lines.append(b"%b: %b\r\n" % (name, value))
        return b"".join([*lines, b"\r\n"])

    def shutdown(self) -> None:
        if self._upgraded is None:
            super().shutdown()
        else:
            self._upgraded.shutdown()

    def end_soon(self) -> None:
        """Let the response in progress end the connection. One that continues with another protocol ends as that
        allows."""
        if self._upgraded is not None:
            self._upgraded.shutdown()
        elif self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False

    def be_idle(self, is_idle: bool) -> None:
        """Let the connection, which continues with another protocol, be closed if others need its place, or not."""
        if is_idle and not self._is_lost:
            self.shared.idle[self] = None
        else:
            self.shared.idle.pop(self, None)

    def _accept_upgrade(self) -> bool:
        """Continue with the other protocol (`upgrade.Accept`)."""
        request = self._running
        upgrade = self.shared.upgrade
        if not self._offers_upgrade or self.transport.is_closing() or upgrade is None or request is None:
            return False
        self._offers_upgrade = False
        if request.response_started or request is not self.cycle:
            return False
        request.switch()
        self._drop_deadline()
        self._unset_keepalive_if_required()
        self.transport.write(
            b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %b\r\n\r\n" % upgrade.token
        )
        self._upgraded = upgrade.connect(self)
        self.be_idle(True)
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._upgraded is not None:
            self._upgraded.pause_writing()
        self._paused_s = self.loop.time()
        self._paused_size = self.transport.get_write_buffer_size()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.shared.rate.grace_s, self._check_unread)
        self.shared.unread.hold(self, self._paused_size + KERNEL_UNREAD_SIZE)

    def resume_writing(self) -> None:
        self._paused_s = None
        self.shared.unread.release(self)
        super().resume_writing()
        if self._upgraded is not None:
            self._upgraded.resume_writing()

    # --- called by the parser and by responses

    def on_message_begin(self) -> None:
        self._in_head = True
        self._is_upgrade = False
        self._trailers = 0
        self.url = b""
        self.headers = []
        self.expect_100_continue = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_refused:
            return
        if not self._in_head:  # dropped, so that a trailer cannot pose as a header
            self._trailers += 1
            if self._trailers > HEADERS_MAX:
                self._refuse_head()
        elif len(self.headers) >= HEADERS_MAX:
            self._refuse_head()
        else:
            name = name.lower()
            if name == b"expect" and value.lower() == b"100-continue":
                self.expect_100_continue = True
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._moved_on = True
        self._in_head = False
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("CONNECT is for proxies")  # the parser reports an invalid request: 400
            upgrade = self.shared.upgrade
            self._offers_upgrade = upgrade is not None and not self.pipeline and asks_for(self.headers, upgrade.token)
            if not self._offers_upgrade:
                self._is_upgrade = True
                return
        else:
            self._offers_upgrade = False
        shared = self.shared
        shared.idle.pop(self, None)
        if self._is_refused:
            return
        self._is_extra = self._is_extra and self._is_above()
        if self._is_extra and self.url.partition(b"?")[0] not in ALWAYS_ANSWERED:
            self._refuse_as_extra()
            return
        if len(self.pipeline) >= PIPELINED_MAX:
            self.pipeline.clear()
            raise ValueError("too many requests are pipelined")  # the parser reports an invalid request: 400
        charge = 0
        is_waiting = self.cycle is not None and not self.cycle.response_complete
        if not is_waiting and self._refuse_certificate():
            return
        if is_waiting or self._unfinished_size + self._read_size > FREE_HEAD_SIZE:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > HEAD_SIZE_MAX:
                self._refuse_head()
                return
            if is_waiting or size > FREE_HEAD_SIZE:
                charge = size + HEADER_OVERHEAD * len(self.headers) + REQUEST_OVERHEAD
        self._body_open = True
        self._body_size = 0
        self._answered_s = None
        self._idle_s = None  # the end of an earlier body may have set it in the same read
        self.cycle = self._new_request()
        if is_waiting:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))
        else:
            self._start_asgi_task(self.cycle, self.app)
        if charge or self._charges is not None:
            self._charge(charge)

    def _new_request(self) -> HttpRequest:
        """Return the request whose head is complete. Raises an error for its target, which is answered with 400."""
        url, version = self.url, self.parser.get_http_version()
        path, raw_path, query = _kept_target(url) if len(url) <= KEPT_TARGET_SIZE_MAX else _target(url)
        scope: HTTPScope = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": version,
            "server": self.server,
            "client": self.client,
            "scheme": cast(Any, self.scheme),
            "method": self.parser.get_method().decode("ascii"),
            "root_path": "",
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": self.headers,
            "state": self.app_state.copy(),
        }
        if self._offers_upgrade:
            scope["extensions"] = {UPGRADE: cast(Any, self._accept_upgrade)}
        keep_alive = self.shared.keeps_alive and version != "1.0" and self.parser.should_keep_alive()
        return HttpRequest(self, scope, keep_alive=keep_alive, expects_100=self.expect_100_continue)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = request = cast(HttpRequest, cycle)
        task = request.task = self.loop.create_task(cycle.run_asgi(app))
        self.tasks.add(task)  # until `run_asgi` ends

    def on_response_complete(self) -> None:
        if self._charges is not None:
            self._discharge(self._charges)
        if self._running is not None:
            self.release_body(self._running)
        self.server_state.total_requests += 1
        if self._is_lost:
            return
        if self.transport.is_closing():
            self.linger()
            return
        if self.pipeline and self._refuse_certificate():
            self.pipeline.clear()
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            if self.pipeline:
                self.flow.pause_reading()
        else:
            self._begin_idle()
        if self.cycle.response_complete:  # otherwise the last waiting request runs now
            self.shared.idle[self] = None
            if not self._in_head:
                self._forget_request()
            if self._body_open:  # its bytes are dropped from now on
                self._answered_s = self.loop.time()
                self._set_deadline(LINGER_S)

    def _begin_idle(self) -> None:
        self._idle_s = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_body(self, body: bytes) -> None:
        self._moved_on = True
        if self._is_refused:
            return
        size = len(body)
        self._body_size += size
        request = cast(HttpRequest, self.cycle)
        if request.response_complete:  # the bytes are dropped
            return
        request.body_size += size
        self._bodies_size += size
        request.add_body(body)
        if len(request.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        self._moved_on = True
        self._body_open = False
        self._body_began_s = None
        if self._is_refused or self._is_upgrade:
            return
        if self.cycle.response_complete:
            self._begin_idle()
        else:
            cast(HttpRequest, self.cycle).end_body()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection if it has been idle long enough. The timer is not set anew for each request."""
        self.timeout_keep_alive_task = None
        if self._idle_s is None or self.transport.is_closing():
            return
        left_s = self._idle_s + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self.timeout_keep_alive_task = self.loop.call_later(left_s, self.timeout_keep_alive_handler)
        elif self.transport.get_write_buffer_size():  # otherwise closing waits until the client reads
            self.transport.abort()
        else:
            self.transport.close()

    # --- bytes that the connection holds

    def evict(self, kind: str, held_size: int) -> None:
        """Close the connection, with 429 if nothing was done for the request that its client waits for.

        Otherwise the client must not conclude that it may repeat the request.
        """
        self.shared.refused(f"{kind}_size", peer=self.group, held_size=held_size)
        is_answerable = kind != "unread" and not self.pipeline and self._is_undone()
        self._is_refused = True
        if self._running is not None and not self._running.response_complete:  # it gets no more of its body
            self._running.lose()
        self.loop.call_soon(self._end_evicted, kind, is_answerable)  # not within a call of the transport

    def _end_evicted(self, kind: str, is_answerable: bool) -> None:
        if self.transport.is_closing() or not is_answerable:
            self.transport.abort()
        else:
            self._hang_up(
                429, "too_many_requests", f"the {kind} of requests take too much memory; retry", {"kind": kind}
            )

    def _is_unanswered(self) -> bool:
        """Whether no response is being sent."""
        return self.cycle is None or self.cycle.response_complete or not self.cycle.response_started

    def _is_undone(self) -> bool:
        """Whether no response is being sent, and the application cannot have changed anything."""
        if self.cycle is None or self.cycle.response_complete:
            return True
        is_safe = self.cycle.scope["method"] in ("GET", "HEAD")
        is_taken = cast(HttpRequest, self.cycle).body_size == 0 and not self._body_open
        return not self.cycle.response_started and (is_safe or not is_taken)

    def _hold_heads(self) -> None:
        if not self._is_lost:  # otherwise the response was completed after the connection was lost
            self.shared.heads.hold(self, self._unfinished_size + self._charged)

    def _charge(self, size: int) -> None:
        """Charge the head of the newest request in progress."""
        if self._charges is None:  # nothing is charged for the earlier ones
            self._charges = deque([0] * len(self.pipeline))
        self._charges.append(size)
        self._charged += size
        self._hold_heads()

    def _discharge(self, charges: deque[int]) -> None:
        """The oldest request in progress is answered."""
        self._charged -= charges.popleft()
        if not charges:
            self._charges = None
        self._hold_heads()

    def _create_parser(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does

    def _forget_request(self) -> None:
        """Free the last request, which uvicorn keeps while the connection is idle, and of many connections the parser.

        They are small objects. If thousands of idle connections kept them, some memory would remain in use after the
        connections have ended: Python returns memory of small objects in blocks of 1 MiB, of which no object is in use.
        """
        self.headers = []
        self.url = b""
        self.scope = None  # type: ignore[assignment]
        self._running = None
        if self._body_open:  # uvicorn asks `cycle` whether to drop the rest of the body
            self.cycle.scope = None  # type: ignore[assignment]
            return
        self.cycle = None  # type: ignore[assignment]
        if not self._unfinished_size and self.shared.stats.connections > PARSERS_KEPT:
            self.parser = None  # type: ignore[assignment]

    def _hold_bodies(self) -> None:
        if self._is_lost or self._is_refused:
            return
        is_free = not self._body_open and self._bodies_size <= FREE_BODY_SIZE
        self._holds_bodies = not is_free
        self.shared.bodies.hold(self, 0 if is_free else self._bodies_size)

    def release_body(self, request: HttpRequest) -> None:
        """The application has taken the complete body, or the request is answered. Idempotent."""
        if request.body_size:
            self._bodies_size -= request.body_size
            request.body_size = 0
            if self._holds_bodies:
                self._hold_bodies()

    # --- deadlines

    def _set_deadline(self, after_s: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(after_s, self._is_late)

    def _drop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _is_late(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        if self._body_open:
            self._check_body()
        elif self.cycle is not None and not self.cycle.response_complete:
            return
        elif self._unfinished_size:
            self._refuse(
                "head_timeout",
                408,
                "request_timeout",
                "the request's head did not arrive in time",
                {"timeout_s": self.shared.head_timeout_s},
            )
        else:
            self.transport.close()

    def _check_body(self) -> None:
        now = self.loop.time()
        rate = self.shared.rate
        if self._answered_s is not None:
            due = self._answered_s + LINGER_S
        elif self.flow.read_paused:  # the application is not ready for more
            due = now + rate.grace_s
        else:
            began_s = now if self._body_began_s is None else self._body_began_s
            due = rate.deadline_s(began_s, self._body_size)
        if now < due:
            self._set_deadline(due - now)
        elif self._is_unanswered() and self._answered_s is None:
            facts = {"grace_s": rate.grace_s, "bytes_per_s_min": rate.bytes_per_s}
            self._refuse("body_timeout", 408, "request_timeout", "the request's body arrives too slowly", facts)
        else:
            self.shared.refused("body_timeout", peer=self.group)
            self.transport.abort()

    def _check_unread(self) -> None:
        self._write_timer = None
        if self._paused_s is None:
            return
        now = self.loop.time()
        read_size = max(0, self._paused_size - self.transport.get_write_buffer_size())
        due = self.shared.rate.deadline_s(self._paused_s, read_size)
        if now < due:
            self._write_timer = self.loop.call_later(due - now, self._check_unread)
        else:
            self.shared.refused("unread_timeout", peer=self.group)
            self.transport.abort()

    def linger(self) -> None:
        """Cut the connection off if its last bytes are not read soon."""
        if self._linger_timer is None and not self._is_lost:
            self._linger_timer = self.loop.call_later(LINGER_S, self.transport.abort)

    # --- limits of connections

    def _is_above(self) -> bool:
        return self.shared.is_above(self.group, len(self.connections))

    def _refuse_as_extra(self) -> None:
        shared = self.shared
        facts = {"connections_max": shared.connections_max, "per_address_max": shared.per_address_max}
        self._refuse("connections", 503, "too_many_connections", "too many clients are connected", facts)

    def _refuse_certificate(self) -> bool:
        """Refuse the next request if the certificate of the client is not accepted any more. Return whether it is."""
        certificate: PeerCertificate | None = self.app_state.get(CERTIFICATE)
        reason = None if certificate is None else certificate.refusal()
        if reason is not None:
            self._refuse("certificate", 401, "unauthorized", reason, {})
        return reason is not None

    def _refuse_head(self) -> None:
        facts = {"size_max": HEAD_SIZE_MAX, "headers_max": HEADERS_MAX}
        self._refuse("head_size", 431, "headers_too_large", "the request's headers are too large", facts)

    def _refuse(self, reason: str, status: int, code: str, detail: str, facts: dict[str, Any]) -> None:
        if self._is_refused:
            return
        self.shared.refused(reason, peer=self.group)
        self._is_refused = True
        self._hang_up(status, code, detail, facts)

    def _hang_up(self, status: int, code: str, detail: str, facts: dict[str, Any]) -> None:
        self.headers = []
        hang_up(self.transport, status, code, detail, facts)
        self.linger()


def hang_up(
    transport: asyncio.WriteTransport, status: int, code: str, detail: str, facts: dict[str, Any] | None = None
) -> None:
    """Send a problem for a request that does not reach the app, and close. `status`: 400, 401, 408, 429, 431 or
    503."""
    body = bytes(problem_response(status=status, code=code, detail=detail, facts=facts).body)
    retry = f"Retry-After: {RETRY_AFTER_S}\r\n" if status in (429, 503) else ""
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {CONTENT_TYPE}\r\n{retry}"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    transport.write(head.encode("ascii") + body)
    transport.close()


def with_limits(protocol: type[HttpToolsProtocol], shared: ServerLimits) -> type[HttpToolsProtocol]:
    """Return `protocol` with the limits, for one server."""
    return type(f"Limited{protocol.__name__}", (HttpLimits, protocol), {"shared": shared})
