"""Exchange: one request and its answer over raw ASGI.

Why not a framework's request object: producing one message takes about as long as building one.

Bodies are read whole, within a limit and a budget for the whole process; the bytes are kept until the answer is out, so
that a request can be tried again on the topic's next owner.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl

import msgspec
from bindery_core.errors import BadRequest, BinderyError, TooLarge

from bindery_broker.http.budget import ByteBudget
from bindery_broker.http.schemas import StreamQuery
from bindery_broker.topic_name import TopicName

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
StructT = TypeVar("StructT", bound=msgspec.Struct)

JSON_TYPE: Final = b"application/json"
QUERY_SIZE_MAX: Final = 256 * 1024
BODY_TIMEOUT_S: Final = 60.0
"""Longest pause between two pieces of a body."""

_encoder = msgspec.json.Encoder()
_with_required: Final[set[type]] = {StreamQuery}
"""Query types that cannot be made from nothing."""
_decoders: dict[type, msgspec.json.Decoder[Any]] = {}


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes
    content_type: bytes = JSON_TYPE
    headers: tuple[tuple[bytes, bytes], ...] = ()


def json_reply(value: Any, *, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()) -> Reply:
    return Reply(status, _encoder.encode(value) + b"\n", JSON_TYPE, headers)


class ClientGone(Exception):
    """The client closed the connection before its request was complete: nobody waits for an answer."""


class Exchange:
    __slots__ = (
        "_answered", "_body", "_charged", "_receive", "_send", "budget", "gone", "params", "request_id",
        "scope", "topic_name",
    )  # fmt: skip

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, budget: ByteBudget, request_id: str) -> None:
        self.scope = scope
        self.budget = budget
        self.request_id = request_id
        self.params: dict[str, str] = {}
        self.gone = False
        """The client closed the connection."""
        self.topic_name: TopicName | None = None
        self._receive = receive
        self._send = send
        self._body: bytes | None = None
        self._charged = 0
        self._answered = False

    # -- what was asked -------------------------------------------------------------------------------------------

    @property
    def method(self) -> str:
        return str(self.scope["method"])

    @property
    def is_answered(self) -> bool:
        """Whether the answer's first bytes are out."""
        return self._answered

    @property
    def body_read(self) -> bytes | None:
        return self._body

    @property
    def name(self) -> TopicName:
        assert self.topic_name is not None
        return self.topic_name

    def header(self, name: bytes) -> bytes:
        """The first header called `name` (lower case), b"" when there is none."""
        for key, value in self.scope["headers"]:
            if key == name:
                return bytes(value)
        return b""

    def media_type(self) -> str:
        """The content type without its parameters, lower case."""
        return self.header(b"content-type").partition(b";")[0].strip().lower().decode("latin-1")

    def accepts(self, media_type: bytes) -> bool:
        """Whether `Accept` names exactly this type."""
        accept = self.header(b"accept")
        return media_type in accept and any(
            part.partition(b";")[0].strip().lower() == media_type for part in accept.split(b",")
        )

    def query(self, cls: type[StructT]) -> StructT:
        """The query parameters as `cls`. Raises BadRequest for unknown, repeated or wrong ones."""
        text = self.scope["query_string"]
        if not text and cls not in _with_required:
            return cls()
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
        try:
            return msgspec.convert(values, cls, strict=False)
        except (msgspec.ValidationError, ValueError) as error:
            raise BadRequest(f"query: {error}") from error

    async def body(self, *, size_max: int) -> bytes:
        """The whole body. Raises TooLarge beyond `size_max`, TooManyRequests beyond the budget, ClientGone."""
        if self._body is not None:
            return self._body
        announced = self.header(b"content-length")
        if announced:
            if not announced.isdigit():
                raise BadRequest("not a content length")
            if int(announced) > size_max:
                raise TooLarge("the body is too large", size=int(announced), size_max=size_max)
            self._charge(int(announced))
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await self._next_message()
            chunk = message.get("body", b"")
            if chunk:
                size += len(chunk)
                if size > size_max:
                    raise TooLarge("the body is too large", size=size, size_max=size_max)
                if size > self._charged:
                    self._charge(size - self._charged)
                chunks.append(chunk)
            if not message.get("more_body"):
                break
        self._body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        return self._body

    async def json_body(self, cls: type[StructT], *, size_max: int) -> StructT:
        """The body as `cls`; the content type may be left out or be JSON."""
        media_type = self.media_type()
        body = await self.body(size_max=size_max)
        if media_type not in ("", "application/json", "application/x-www-form-urlencoded"):
            # curl sends the last one unless told otherwise, and the body is JSON all the same
            raise UnsupportedMediaType("want application/json", content_type=media_type)
        decoder = _decoders.get(cls)
        if decoder is None:
            decoder = _decoders[cls] = msgspec.json.Decoder(cls)
        try:
            value: StructT = decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadRequest(f"body: {error}") from error
        return value

    async def stream_body(self, *, size_max: int) -> Any:
        """The body's pieces as they come, for passing on; charged to no budget, never kept."""
        if self._body is not None:
            yield self._body
            return
        size = 0
        while True:
            message = await self._next_message()
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > size_max:
                raise TooLarge("the body is too large", size=size, size_max=size_max)
            if chunk:
                yield chunk
            if not message.get("more_body"):
                return

    async def watch_connection(self, on_gone: Callable[[], None]) -> None:
        """Runs beside a waiting handler, the body being read: sets `gone` when the client closes the connection."""
        assert self._body is not None
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                on_gone()
                return

    # -- what is answered -------------------------------------------------------------------------------------------

    async def reply(self, reply: Reply) -> None:
        body = b"" if self.method == "HEAD" else reply.body
        await self._start(
            reply.status,
            [
                (b"content-type", reply.content_type),
                (b"content-length", str(len(reply.body)).encode()),
                *reply.headers,
            ],
        )
        await self._send({"type": "http.response.body", "body": body})

    async def start_stream(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        await self._start(status, headers)

    async def send_chunk(self, chunk: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": more})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        assert not self._answered
        self._answered = True
        headers.append((b"x-request-id", self.request_id.encode("latin-1")))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def finish(self) -> None:
        """Give the budget back."""
        if self._charged:
            self.budget.give(self._charged)
            self._charged = 0

    def _charge(self, size: int) -> None:
        self.budget.take(size)
        self._charged += size

    async def _next_message(self) -> MutableMapping[str, Any]:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                message = await self._receive()
        except TimeoutError as error:
            raise RequestTimeout("the body did not arrive in time", timeout_s=BODY_TIMEOUT_S) from error
        if message["type"] == "http.disconnect":
            self.gone = True
            raise ClientGone
        return message


class UnsupportedMediaType(BinderyError):
    status = 415
    code = "unsupported_media_type"


class RequestTimeout(BinderyError):
    status = 408
    code = "request_timeout"
