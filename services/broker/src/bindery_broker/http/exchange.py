"""Read one HTTP request within limits, and send its answer.

`Exchange` is a Starlette request, so FastAPI accepts it as its own. A body is read completely, within a limit per body
and a budget of the process. Its bytes are kept until the answer is sent, so that the request can be repeated at the
next owner of the topic.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any, Final, Protocol, TypeVar, cast
from urllib.parse import parse_qsl, unquote

import msgspec
import msgspec.structs
from bindery_core.errors import BadRequest, TooLarge
from bindery_identity.principal import Principal
from bindery_kit.access.audit_trail import DENIED
from bindery_kit.access.authenticate import CREDENTIALS, PRINCIPAL, Credentials
from bindery_kit.access.held_credentials import ExpiryTimer
from bindery_kit.admin.content_types import (
    JSON_TYPE,
    check_codings,
    check_json_type,
)
from bindery_kit.http.http_request import DirectRequest, request_of
from bindery_kit.limits.address_counts import group_of
from bindery_pulsar.topic_name import TopicName
from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bindery_broker.access.access import Waiting
from bindery_broker.access.audited import PROXIED_HEADER as PROXIED_HEADER
from bindery_broker.access.records import ListReads
from bindery_broker.broker import Broker
from bindery_broker.http.budget import ByteBudget
from bindery_broker.http.charging.allowance import Allowance, Limiter, announced_size
from bindery_broker.http.charging.passed_on import PASSED_ON_HEADER
from bindery_broker.http.json_errors import JSON_ERRORS, describe
from bindery_broker.ownership.bundles import Bundle
from bindery_broker.ownership.ownership import Unloaded
from bindery_broker.ownership.running import DrainStatus
from bindery_broker.ownership.splits import Split
from bindery_broker.subscriptions.response_budget import Charge

ROUTED_BY_HEADER: Final = b"bindery-routed-by"
"""Name of a topic, percent-encoded: the owner of the topic in the path has sent the request to the owner of this."""
PARTITION_HEADER: Final = b"bindery-partition"
"""Set in requests that a broker sends to a partition on behalf of a request to the whole topic."""
ROOM_HEADER: Final = b"bindery-room"
"""Maximum bytes of messages in the answer to a receive that a broker passes on: what the limits of its client leave."""
WAITED_HEADER: Final = b"bindery-waited"
"""Milliseconds that a request has waited at other brokers: it waits that much less for messages."""
REQUEST_ID_HEADER: Final = b"bindery-request"
"""Id of a receive that a broker passes on, if the client gave it none: sent again, it gets the same messages."""
LAST_WAIT_MS: Final = 1_000
"""Maximum milliseconds that a call waits which a broker that stops sends again."""
WAITED_ENOUGH_MS: Final = 86_400_000
"""More than any request waits."""
MOVED_EVENT: Final = (
    b"retry: 100\nevent: moved\n"
    b'data: {"code":"moved","detail":"the topic has moved to another broker; connect again to continue"}\n\n'
)
"""Last event of a stream whose topic has moved, or whose broker stops. Browsers connect again by themselves."""
NOT_OWNER_HEADER: Final = b"bindery-not-owner"
"""In an answer to another broker: this broker does not own the topic, and nothing was done."""
StructT = TypeVar("StructT", bound=msgspec.Struct)

ROOM_DIGITS_MAX: Final = 18
REQUEST_ID_SIZE_MAX: Final = 64
SCOPE_KEY: Final = "bindery.exchange"
"""Key of the exchange in the ASGI scope."""
PIECES_PER_TURN: Final = 16
"""Number of pieces of an answer after which other tasks run, even if the client reads at once."""
_PULSAR_PATHS: Final = (b"/admin/", b"/lookup/")
QUERY_SIZE_MAX: Final = 256 * 1024
"""Maximum bytes of a query string."""

_encoder = msgspec.json.Encoder()
_decoders: dict[type, msgspec.json.Decoder[Any]] = {}


class Reply(Response):
    """An answer whose bytes are known. `Exchange.respond` sends it at once; called, it sends two ASGI messages."""

    def __init__(
        self,
        status: int,
        body: bytes,
        content_type: bytes = JSON_TYPE,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        self.status_code = status
        self.body = body
        self.background = None
        self.raw_headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *headers]

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body})


class Answered(Response):
    """Represents an answer that is already sent."""

    async def __call__(self, _scope: Scope, _receive: Receive, _send: Send) -> None:
        return


def json_reply(value: Any, *, status: int = 200) -> Reply:
    return Reply(status, _encoder.encode(value) + b"\n")


def reason_reply(status: int, reason: str) -> Reply:
    """Return an error in the form of Pulsar's admin API."""
    return json_reply({"reason": reason}, status=status)


def has_reasons(raw_path: bytes) -> bool:
    """Return whether errors of this path have the form of Pulsar's admin API; those of others are problems."""
    return raw_path.startswith(_PULSAR_PATHS)


class ClientGone(Exception):
    """The client closed the connection before its request was complete: no answer is sent."""


class DrainControl(Protocol):
    """The drain of this broker: `peers.drains.Drain`."""

    @property
    def name(self) -> str: ...

    @property
    def status(self) -> DrainStatus: ...

    async def start(self) -> None: ...

    async def cancel(self) -> bool: ...

    async def ask(self, exchange: "Exchange", broker: str, /) -> tuple[int, bytes]: ...


class OperationRunner(Protocol):
    """Runs an operation on the broker that owns its topic: `AtOwner`."""

    @property
    def broker(self) -> Broker: ...

    @property
    def app(self) -> ASGIApp:
        """Serves requests of this broker to itself."""
        ...

    async def run(
        self,
        exchange: "Exchange",
        operation: Callable[["Exchange"], Awaitable[Response]],
        *,
        begin: Callable[[], Awaitable[None]] | None = None,
    ) -> Response: ...

    @property
    def drain(self) -> "DrainControl":
        """Hands over all bundles of this broker."""
        ...

    async def pass_on(self, exchange: "Exchange", url: str, *, routed_by: TopicName) -> Response: ...

    async def delete_topic(self, name: TopicName) -> None: ...

    async def unload(
        self, bundles: Sequence[Bundle], *, hold_s: float | None, only_here: bool = False, destination: str = ""
    ) -> list[Unloaded]: ...

    async def split(self, bundle: Bundle, how: Split, *, unload: bool, only_here: bool = False) -> list[Bundle]: ...


class _CredentialsEnd:
    """Calls `on_expired` once if the credentials of a request expire or are taken back.

    The request is freed with the last reference to it, without a collection of cyclic garbage: nothing of this refers
    to it after `forget`.
    """

    __slots__ = ("_exchange", "_on_expired", "_release", "_timer")

    def __init__(self, exchange: "Exchange", on_expired: Callable[[], None]) -> None:
        self._exchange = exchange
        self._on_expired = on_expired
        self._timer: ExpiryTimer | None = None
        self._release: Callable[[], None] | None = None

    def watch(self) -> None:
        exchange = self._exchange
        credentials: Credentials | None = exchange.scope.get("state", {}).get(CREDENTIALS)
        if credentials is not None:
            self._release = credentials.watch(self._expire)
        if exchange.principal is not None and exchange.principal.expires_at_s is not None:
            self._timer = ExpiryTimer(
                exchange.principal.expires_at_s,
                now_s=lambda: exchange.broker.clock() / 1000,
                on_expired=self._expire,
            )

    def forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._release is not None:
            self._release()
            self._release = None

    def _expire(self) -> None:
        if not self._exchange.is_expired:
            self._exchange.is_expired = True
            self._on_expired()


class Watching:
    """Watches the client of a request that waits; see `Exchange.watched`. Most calls do not wait, and never begin."""

    __slots__ = ("_credentials", "_exchange", "_on_gone", "_request", "_watcher")

    def __init__(self, exchange: "Exchange", on_gone: Callable[[], None], request: DirectRequest | None) -> None:
        self._exchange = exchange
        self._on_gone = on_gone
        self._request = request
        self._credentials: _CredentialsEnd | None = None
        self._watcher: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Watch from now on; `on_gone` is called at once if the client has disconnected. Idempotent.

        From now on the request also ends if its roles lose their permission.
        """
        if self._credentials is not None:
            return
        exchange = self._exchange
        if exchange.waiting is not None:
            exchange.waiting.begin()
        self._credentials = _CredentialsEnd(exchange, self._on_gone)
        self._credentials.watch()
        if self._request is not None:
            self._request.watch(self._lost)
        else:
            self._watcher = asyncio.create_task(exchange.watch_connection(self._on_gone))

    def end(self) -> None:
        if self._credentials is None:
            return
        self._credentials.forget()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._request is not None:
            self._request.watch(None)

    def _lost(self) -> None:
        self._exchange.gone = True
        self._on_gone()


class Exchange(Request):
    """One request and its answer."""

    topic_name: TopicName | None = None
    operation: str = "none"
    """The operation's id, for logs and metrics."""
    status: int = 0
    """Status of the answer, once its first bytes are sent."""
    failure: Exception | None = None
    """The error that ended an ordinary operation without an answer."""
    gone: bool = False
    """Whether the client closed the connection."""
    is_expired: bool = False
    """Whether the client's credentials expired, or were taken back, while the request waited."""
    _read: bytes | None = None
    _passed_on: bool = False
    """Whether the complete body was streamed to another consumer (the proxy)."""
    _charged: int = 0
    """Bytes of the complete body that are charged to the budget."""
    _charge: Charge | None = None
    allowance: Allowance | None = None
    """What the request may use by the limits of its client, tenant and namespace; None: nothing is limited."""
    _is_counted: bool = False
    """Whether the body was counted by its announced size."""
    waiting: Waiting | None = None
    """The check of a call that waits, while it runs; None: the call does not wait, or nothing is checked."""
    began: float | None = None
    """When the request arrived; monotonic seconds. None: unknown."""
    sent_id: bytes = b""
    """Id of this request at the broker to which it is passed on; empty: none."""
    is_repeated: bool = False
    """Whether the operation runs again, because its topic has moved: what it has waited until then counts."""
    _named: dict[bytes, bytes] | None = None
    _list_reads: ListReads | None = None

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        at_owner: OperationRunner,
        budget: ByteBudget,
        request_id: str,
    ) -> None:
        super().__init__(scope, receive, send)
        self.at_owner = at_owner
        self.budget = budget
        self.request_id = request_id
        self.path: str = scope["path"]
        self.asked_method: str = scope["method"]

    # -- request --------------------------------------------------------------------------------------------------

    @property
    def method(self) -> str:
        """The method that the client sent. The scope has GET instead of HEAD, so that routes match."""
        return self.asked_method

    @property
    def broker(self) -> Broker:
        return self.at_owner.broker

    @property
    def raw_path(self) -> bytes:
        return cast(bytes, self.scope.get("raw_path") or self.path.encode())

    @property
    def is_answered(self) -> bool:
        """Whether the first bytes of the answer are sent."""
        return self.status != 0

    @property
    def topic(self) -> TopicName:
        assert self.topic_name is not None
        return self.topic_name

    @property
    def routed_by(self) -> TopicName | None:
        """The topic whose owner another broker has sent the request to; None: it goes to the topic in its path."""
        if not self.header(PROXIED_HEADER) or not (text := self.header(ROUTED_BY_HEADER)):
            return None
        return TopicName.parse(unquote(text.decode("ascii", errors="replace")))

    def room(self, wanted: int) -> int:
        """Return how many of the `wanted` bytes of messages the limits of the client leave, here and at the broker that
        passed the request on; at least 1."""
        if self.allowance is not None:
            wanted = self.allowance.sending_room(wanted)
        text = self.header(ROOM_HEADER)
        return max(1, min(wanted, int(text))) if text.isdigit() and len(text) <= ROOM_DIGITS_MAX else wanted

    @property
    def waited_ms(self) -> int:
        """Milliseconds that the request has waited before: at other brokers, and here for a topic that has moved."""
        text = self.header(WAITED_HEADER)
        before = int(text) if text.isdigit() and len(text) <= ROOM_DIGITS_MAX and self.header(PROXIED_HEADER) else 0
        if self.broker.stopping:
            return WAITED_ENOUGH_MS
        if self.began is None or not self.is_repeated:
            return before
        return before + round((self.broker.now() - self.began) * 1000)

    def wait_ms(self, wanted: int) -> int:
        """Return how long the request may wait, of the milliseconds that it asks for."""
        if self.broker.stopping:
            return 0
        if self.waited_ms >= WAITED_ENOUGH_MS:
            return min(wanted, LAST_WAIT_MS)
        return max(0, min(wanted, self.broker.settings.receive_wait_ms_max) - self.waited_ms)

    @property
    def passed_on_id(self) -> str | None:
        """The id that the broker which has passed the request on gave it; None: none has."""
        text = self.header(REQUEST_ID_HEADER) if self.header(PROXIED_HEADER) else b""
        return text.decode("ascii", errors="replace")[:REQUEST_ID_SIZE_MAX] or None

    @property
    def principal(self) -> Principal | None:
        """The client; None without authentication."""
        principal = self.scope.get("state", {}).get(PRINCIPAL)
        return principal if isinstance(principal, Principal) else None

    @property
    def list_reads(self) -> ListReads:
        """The permissions that this request has read for a list."""
        if self._list_reads is None:
            self._list_reads = ListReads()
        return self._list_reads

    def header(self, name: bytes) -> bytes:
        """Return the first header `name` (lower case), or b"" if there is none."""
        return self._first_headers().get(name, b"")

    def has_header(self, name: bytes) -> bool:
        """Return whether there is a header `name` (lower case), also an empty one."""
        return name in self._first_headers()

    def _first_headers(self) -> dict[bytes, bytes]:
        """The headers by name, of repeated ones the first."""
        if self._named is None:
            self._named = dict(reversed(self.scope["headers"]))
        return self._named

    def forget_headers(self) -> None:
        """Read the headers of the scope again, which were changed."""
        self._named = None

    @property
    def client_address(self) -> str:
        """Address of the client, or `via` that of the broker that passed the request on; empty: unknown."""
        host = (self.scope.get("client") or ("",))[0]
        return f"via {host}" if host and self.header(PROXIED_HEADER) else str(host)

    def media_type(self) -> str:
        """Return the content type in lower case, without its parameters."""
        return self.header(b"content-type").partition(b";")[0].strip().lower().decode("latin-1")

    def accepts(self, media_type: bytes) -> bool:
        """Return whether `Accept` names exactly this type."""
        accept = self.header(b"accept")
        return media_type in accept and any(
            part.partition(b";")[0].strip().lower() == media_type for part in accept.split(b",")
        )

    @property
    def query_params(self) -> QueryParams:
        """The query for FastAPI. Raises BadRequest if it is not UTF-8 or repeats a parameter."""
        if not hasattr(self, "_query_params"):
            self._query_params = QueryParams(self._query_values())
        return self._query_params

    def query(self, cls: type[StructT]) -> StructT:
        """Return the query parameters as `cls`. Raises BadRequest for unknown, repeated or invalid ones."""
        if not self.scope["query_string"] and not _has_required(cls):
            return cls()
        try:
            return msgspec.convert(self._query_values(), cls, strict=False)
        except (msgspec.ValidationError, ValueError) as error:
            raise BadRequest(f"query: {error}") from error

    def _query_values(self) -> dict[str, str]:
        text = self.scope["query_string"]
        if len(text) > QUERY_SIZE_MAX:
            raise TooLarge("the query is too long", size=len(text), size_max=QUERY_SIZE_MAX)
        values: dict[str, str] = {}
        try:
            pairs = parse_qsl(text.decode(), keep_blank_values=True, errors="strict")
        except UnicodeError as error:
            raise BadRequest("the query is not percent-encoded UTF-8") from error
        for name, value in pairs:
            if name in values:
                raise BadRequest("a query parameter is given twice", parameter=name[:100])
            values[name] = value
        return values

    async def body(self) -> bytes:
        """Return the body of an ordinary operation."""
        return await self.read_body(size_max=self.broker.settings.control_bytes_max)

    async def admit(self, limiter: Limiter) -> None:
        """Return when it is the request's turn by the limits of its client. Raises LimitExceeded."""
        announced = announced_size(self.header(b"content-length"), size_max=self.broker.settings.request_bytes_max)
        self._is_counted = announced > 0
        self.allowance = limiter.allowance(self.scope, self.raw_path, self.header(PASSED_ON_HEADER))
        await self.allowance.begin(body_size=announced)

    async def charge_resource(self) -> None:
        """The request is allowed: return when it is its turn by the limits of the tenant and the namespace in its path.
        Raises LimitExceeded."""
        if self.allowance is not None:
            await self.allowance.allow()

    async def read_body(self, *, size_max: int) -> bytes:
        """Return the complete body. Raises TooLarge beyond `size_max`, TooManyRequests beyond the budget, ClientGone,
        and UnsupportedMediaType for an encoded body.

        The budget is charged for the complete body. Until then, the server counts the bytes that have arrived, and ends
        bodies that arrive too slowly. Nothing counts for Content-Length alone, because a client can announce any number
        of bytes without sending them.
        """
        if self._read is not None:
            return self._read
        named = self._first_headers()
        if b"content-encoding" in named or b"transfer-encoding" in named:
            check_codings(self.scope["headers"])
        length = named.get(b"content-length")  # the server refuses requests with several
        if length is not None:
            if not length.isdigit():
                raise BadRequest("not a content length")
            if int(length) > size_max:
                raise TooLarge("the body is too large", size=int(length), size_max=size_max)
        message = await self._next_message()
        body: bytes = message.get("body", b"")
        if message.get("more_body"):
            body = await self._read_rest(body, size_max=size_max)
        elif len(body) > size_max:
            raise TooLarge("the body is too large", size=len(body), size_max=size_max)
        if self.allowance is not None and not self._is_counted:
            await self.allowance.received(len(body))
        self.budget.take(len(body))
        self._charged = len(body)
        self._read = body
        return body

    async def _read_rest(self, first: bytes, *, size_max: int) -> bytes:
        """Return the body that begins with `first`."""
        body, more = bytearray(first), True  # one buffer: each of the pieces may have one byte only
        while more and len(body) <= size_max:
            message = await self._next_message()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if len(body) > size_max:
            raise TooLarge("the body is too large", size=len(body), size_max=size_max)
        return bytes(body)

    async def json_body(self, cls: type[StructT]) -> StructT:
        """Return the body as `cls`. Raises UnsupportedMediaType, without reading it, unless its type is JSON."""
        check_json_type(self.scope["headers"])
        body = await self.read_body(size_max=self.broker.settings.control_bytes_max)
        value: StructT = _decoded(body, cls)
        return value

    async def load_json(self, *, may_be_empty: bool = False) -> None:
        """Read and parse the body for FastAPI. `may_be_empty`: no body and no content type stand for `{}`.

        FastAPI itself would answer every error with 400, and does not read every form of the content type.
        """
        if hasattr(self, "_json"):
            return
        if may_be_empty and not self.has_header(b"content-type") and not await self.body():
            self._read, self._json = b"{}", {}
        else:
            check_json_type(self.scope["headers"])
            self._json = _decoded(await self.body(), object)
        headers = [(k, v) for k, v in self.scope["headers"] if k != b"content-type"]
        self._headers = Headers(raw=[*headers, (b"content-type", JSON_TYPE)])

    def is_body_kept(self, *, size_max: int) -> bool:
        """Return whether the body shall be read before it is passed on: its size is announced and at most `size_max`,
        and the budget has room for it."""
        length = self.header(b"content-length")
        return (
            length.isdigit()
            and len(length) <= ROOM_DIGITS_MAX
            and int(length) <= min(size_max, self.budget.total - self.budget.used)
        )

    @property
    def may_send_body_again(self) -> bool:
        """Whether the complete body is kept, or none of it was passed on."""
        return self._read is not None or not self._passed_on

    async def stream_body(self, *, size_max: int) -> AsyncIterator[bytes]:
        """Yield the pieces of the body as they arrive, for forwarding. They are not kept, and not charged here."""
        if self._read is not None:
            yield self._read
            return
        size = 0
        while True:
            message = await self._next_message()
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > size_max:
                raise TooLarge("the body is too large", size=size, size_max=size_max)
            if chunk:
                if self.allowance is not None and not self._is_counted:
                    await self.allowance.received(len(chunk))
                yield chunk
            if not message.get("more_body"):
                self._passed_on = True
                return

    async def watch_connection(self, on_gone: Callable[[], None]) -> None:
        """Set `gone` and call `on_gone` when the client closes the connection. The body must have been read.

        Runs as a task of its own while the operation waits; `watched` needs none.
        """
        assert self._read is not None or self._passed_on
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                on_gone()
                return

    @contextlib.contextmanager
    def watched(self, on_gone: Callable[[], None]) -> Iterator[None]:
        """Set `gone` and call `on_gone` if the client closes the connection within the block. Set `is_expired` and call
        `on_gone` if its credentials expire: the answer still reaches it. The body must have been read."""
        watching = self.watching(on_gone)
        watching.begin()
        try:
            yield
        finally:
            watching.end()

    def watching(self, on_gone: Callable[[], None]) -> "Watching":
        """As `watched`, from `Watching.begin` to `Watching.end`, which must be called."""
        assert self._read is not None or self._passed_on
        return Watching(self, on_gone, request_of(self._send))

    @contextlib.contextmanager
    def until_expiry(self, on_expired: Callable[[], None]) -> Iterator[None]:
        """Set `is_expired` and call `on_expired` once if the credentials of the client expire within the block, or are
        not accepted any more because a file of keys or passwords was replaced."""
        end = _CredentialsEnd(self, on_expired)
        end.watch()
        try:
            yield
        finally:
            end.forget()

    # -- answer ---------------------------------------------------------------------------------------------------

    def answer(self, message: Message) -> Awaitable[None]:
        """Send an ASGI message. Adds the request id to the headers, and removes the body in answers to HEAD."""
        if message["type"] == "http.response.start":
            assert not self.status, "answered twice"
            self.status = message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", self.request_id.encode("latin-1"))]
        elif self.asked_method == "HEAD":
            message["body"] = b""
        elif self.allowance is not None:
            self.allowance.sent(len(message.get("body", b"")))
        return self._send(message)

    def respond(self, response: Response) -> bool:
        """Send the answer at once. Return False, with nothing done, if it must be called as an ASGI application.

        Refusals are not sent at once, because the audit log records them on their way.
        """
        if type(response) is not Reply or response.status_code in DENIED:
            return False
        request = request_of(self._send)
        if request is None:
            return False
        assert not self.status, "answered twice"
        headers = (*response.raw_headers, (b"x-request-id", self.request_id.encode("latin-1")))
        if not request.respond(response.status_code, headers, cast(bytes, response.body)):
            return False
        self.status = response.status_code
        if self.allowance is not None:
            self.allowance.sent(len(response.body))
        return True

    async def start_stream(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        await self.answer({"type": "http.response.start", "status": status, "headers": headers})

    async def send_chunk(self, chunk: bytes, *, more: bool) -> None:
        await self.answer({"type": "http.response.body", "body": chunk, "more_body": more})

    async def send_pieces(self, send: Send, pieces: Iterable[bytes], *, status: int, content_type: bytes) -> None:
        """Send an answer piece by piece, as fast as the client reads. Its bytes count as long as they are in memory.

        Raises ClientGone if the client reads too slowly while others wait for room.
        """
        headers = [(b"content-type", content_type)]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        if self.asked_method != "HEAD":
            async with self.paced():
                for count, piece in enumerate(pieces, 1):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                    self.charge.sent(len(piece))
                    if count % PIECES_PER_TURN == 0:
                        await asyncio.sleep(0)
                # The server waits until it has passed on the pieces before it sends the end.
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    @contextlib.asynccontextmanager
    async def paced(self) -> AsyncIterator[None]:
        """The block sends messages. It ends with ClientGone if the client reads too slowly while others wait."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as sending:
                self.charge.begin_sending(lambda: sending.reschedule(loop.time()))
                yield
        except TimeoutError:
            self.gone = True
            raise ClientGone from None
        finally:
            self.charge.release()

    @property
    def charge(self) -> Charge:
        """The bytes of the messages in the answer. They are released at the end of the exchange at the latest."""
        if self._charge is None:
            self._charge = self.broker.topics.responses.charge(group_of(self.scope.get("client")))
        return self._charge

    def finish(self) -> None:
        """Return the charged bytes to the budgets, and free them.

        A failure refers to the frames that it passed, and thus to this exchange: without this, body and messages would
        stay until the next collection of cyclic garbage, which is rare here, while others use their room.
        """
        self.failure = None
        self._read = None
        if self.allowance is not None:
            self.allowance.close()
        if self._charge is not None:
            self._charge.release()
        if self._charged:
            self.budget.give(self._charged)
            self._charged = 0

    async def _next_message(self) -> MutableMapping[str, Any]:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.gone = True
            raise ClientGone
        return message


def _decoded(body: bytes, cls: type) -> Any:
    decoder = _decoders.get(cls)
    if decoder is None:
        decoder = _decoders[cls] = msgspec.json.Decoder(cls)
    try:
        return decoder.decode(body)
    except JSON_ERRORS as error:
        found = describe(error, body)
        raise BadRequest(f"body: {found}", **found.facts) from error


@functools.cache
def _has_required(cls: type[msgspec.Struct]) -> bool:
    return any(field.required for field in msgspec.structs.fields(cls))
