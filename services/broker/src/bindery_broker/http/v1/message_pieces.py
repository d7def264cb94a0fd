"""Answers that hold messages: encoded at once if they are small, else piece by piece while the client reads.

JSON can be several times larger than the bytes of a message, and a Python string too. Thus of a large answer only the
messages themselves are in memory, and the piece that is being sent; a large payload is encoded in slices.
"""

import codecs
from binascii import b2a_base64
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import msgspec
from bindery_kit.admin.content_types import JSON_TYPE
from bindery_pulsar.message_codec import Message
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bindery_broker.http.exchange import Exchange, Reply
from bindery_broker.http.v1.message_view import view
from bindery_broker.http.v1.produce_request import NDJSON
from bindery_broker.http.v1.schemas import Blocked, ReadAnswer, Received

AT_ONCE_SIZE_MAX: Final = 256 * 2**10
"""Maximum bytes of messages that are encoded at once."""
SLICE_SIZE: Final = 48 * 2**10
"""Bytes of a large payload that are encoded at a time; a multiple of 3, so that slices of base64 can be joined."""
PIECE_SIZE: Final = 64 * 2**10
"""Small messages are joined to pieces of about this size."""

_encoder = msgspec.json.Encoder()
_encode = _encoder.encode

assert SLICE_SIZE % 3 == 0


class MessageSource(NamedTuple):
    """A message of an answer, not encoded yet."""

    message: Message
    message_id: str
    lease: str | None = None
    redelivery_count: int = 0


class _Pieces(Response):
    """An answer that is encoded while it is sent."""

    def __init__(self, exchange: Exchange, pieces: Iterator[bytes], content_type: bytes) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = [(b"content-type", content_type)]
        self._exchange, self._pieces, self._content_type = exchange, pieces, content_type

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await self._exchange.send_pieces(send, self._pieces, status=200, content_type=self._content_type)


def messages_reply(
    exchange: Exchange,
    sources: list[MessageSource],
    *,
    following: str | None = None,
    lines: bool = False,
    blocked: Blocked | msgspec.UnsetType = msgspec.UNSET,
    is_end: bool = False,
) -> Response:
    """Return the answer with `sources`, whose bytes are charged to the exchange; the answer takes over the list.

    `following`: the member `next`. `lines`: NDJSON instead of one JSON object. `blocked`: why there are no messages.
    `is_end`: whether there will be none, because the topic is terminated.
    """
    content_type = NDJSON.encode() if lines else JSON_TYPE
    charge = exchange.charge
    if charge.size > AT_ONCE_SIZE_MAX:
        pieces = _line_pieces(sources) if lines else _object_pieces(sources, following)
        return _Pieces(exchange, _joined(pieces), content_type)
    messages = [
        view(message, message_id=message_id, lease=lease, redelivery_count=redelivery_count)
        for message, message_id, lease, redelivery_count in sources
    ]
    if lines:
        body = _encoder.encode_lines(messages)
    elif following is None:
        body = _encode(Received(messages=messages, blocked=blocked, end_of_topic=is_end)) + b"\n"
    else:
        body = _encode(ReadAnswer(messages=messages, next=following, end_of_topic=is_end)) + b"\n"
    if len(body) > charge.size:
        charge.keep(len(body))
    return Reply(200, body, content_type)


def event_pieces(sources: list[MessageSource]) -> Iterator[bytes]:
    """Yield the messages as server-sent events. Takes over the list."""
    return _joined(_event_parts(sources))


def message_parts(source: MessageSource) -> Iterator[bytes]:
    """Yield the JSON of a message. A large payload comes first, in slices."""
    message = source.message
    payload = message.payload
    is_large = len(payload) > SLICE_SIZE
    if is_large:
        message.payload = b""
    out = view(message, message_id=source.message_id, lease=source.lease, redelivery_count=source.redelivery_count)
    if not is_large:
        yield _encode(out)
        return
    out.payload = out.payload_base64 = msgspec.UNSET
    if out.encoding is msgspec.UNSET and _is_utf8(payload):
        yield b'{"payload":"'
        for text in _texts(payload):
            yield _encode(text)[1:-1]
    else:
        yield b'{"payload_base64":"'
        for start in range(0, len(payload), SLICE_SIZE):
            yield b2a_base64(payload[start : start + SLICE_SIZE], newline=False)
    yield b'",' + _encode(out)[1:]


def _object_pieces(sources: list[MessageSource], following: str | None) -> Iterator[bytes]:
    separator = b'{"messages":['
    for source in _consumed(sources):
        yield separator
        yield from message_parts(source)
        separator = b","
    end = b"]" if separator == b"," else separator + b"]"
    yield end + (b"}\n" if following is None else b',"next":' + _encode(following) + b"}\n")


def _line_pieces(sources: list[MessageSource]) -> Iterator[bytes]:
    for source in _consumed(sources):
        yield from message_parts(source)
        yield b"\n"


def _event_parts(sources: list[MessageSource]) -> Iterator[bytes]:
    for source in _consumed(sources):
        yield b"event: message\nid: %s\ndata: " % source.message_id.encode()
        yield from message_parts(source)
        yield b"\n\n"


def _consumed(sources: list[MessageSource]) -> Iterator[MessageSource]:
    """Yield the sources. Each can be freed once its successor is requested."""
    left = deque(sources)
    sources.clear()
    while left:
        yield left.popleft()


def _joined(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Join small parts to pieces of about PIECE_SIZE, and cut larger ones."""
    held: list[bytes] = []
    size = 0
    for part in parts:
        held.append(part)
        size += len(part)
        if size < PIECE_SIZE:
            continue
        whole = b"".join(held)
        held, size = [], 0
        for start in range(0, len(whole), PIECE_SIZE):
            yield whole[start : start + PIECE_SIZE]
    if held:
        yield b"".join(held)


def _is_utf8(payload: bytes) -> bool:
    """Return whether `payload` is UTF-8. Takes only little memory."""
    if payload.isascii():
        return True
    try:
        for _ in _texts(payload):
            pass
    except UnicodeDecodeError:
        return False
    return True


def _texts(payload: bytes) -> Iterator[str]:
    """Yield the text in slices. Raises UnicodeDecodeError."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(payload), SLICE_SIZE):
        yield decoder.decode(payload[start : start + SLICE_SIZE], final=start + SLICE_SIZE >= len(payload))
