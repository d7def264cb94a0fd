"""Frames of `bindery-requests/1`: the bytes between two processes after the upgrade of a connection.

    length of the payload: 4 bytes, stream: 4 bytes, type: 1 byte, flags: 1 byte, payload       (integers: big-endian)

| type     | sent by | stream  | payload                                                                      |
|----------|---------|---------|------------------------------------------------------------------------------|
| REQUEST  | client  | its own | head of a request (`heads`). Streams count up from 1                         |
| RESPONSE | server  | its own | head of the response                                                         |
| BODY     | both    | its own | at most BODY_SIZE_MAX bytes of a body; they use up credit                    |
| CREDIT   | both    | its own | 4 bytes: how many more bytes of the body the other end may send              |
| CANCEL   | both    | its own | 1 byte: a `Reason`. The stream ends at once                                  |
| PING     | both    | 0       | 8 bytes, which the answer repeats                                            |
| PONG     | both    | 0       | the bytes of the PING                                                        |
| LEAVING  | server  | 0       | 4 bytes: the highest stream that is served. The client opens no more of them |

Flag END, of REQUEST, RESPONSE and BODY: the sender's part of the stream is complete. Each end may send WINDOW_SIZE
bytes of the body of a stream before the first CREDIT.

Invariant: a reader keeps less than one frame, at most `HEAD_FRAME_SIZE_MAX` bytes of payload, between two calls.
"""

from collections.abc import Iterator
from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple

TOKEN: Final = b"bindery-requests/1"
"""Value of the `Upgrade` header. The number changes with every change that another version does not understand."""
BODY_SIZE_MAX: Final = 16 * 1024
"""Maximum bytes of a body in one frame, so that other requests are not delayed for long."""
HEAD_FRAME_SIZE_MAX: Final = 40 * 1024
"""Maximum bytes of the payload of a frame with a head."""
WINDOW_SIZE: Final = 64 * 1024
"""Bytes of a body that may be on their way, or unread at the other end."""
STREAM_MAX: Final = 2**31 - 1
"""Highest number of a stream. The client opens another connection then."""
END: Final = 1
"""Flag: the sender's part of the stream is complete."""
HEADER: Final = Struct(">IIBB")
NUMBER: Final = Struct(">I")


class Kind(IntEnum):
    REQUEST = 1
    RESPONSE = 2
    BODY = 3
    CREDIT = 4
    CANCEL = 5
    PING = 6
    PONG = 7
    LEAVING = 8


class Reason(IntEnum):
    """Why a stream is cancelled."""

    GONE = 1
    """By the client: nobody waits for the response any more."""
    FAILED = 2
    """By the server: the response cannot be completed. What the request did is not known."""
    NOT_BEGUN = 3
    """By the server: the application has not seen the request. It may be sent again."""
    BUSY = 4
    """By the server: the application has not seen the request, because too many are in progress."""


_SIZES: Final = {
    Kind.REQUEST: (1, HEAD_FRAME_SIZE_MAX),
    Kind.RESPONSE: (1, HEAD_FRAME_SIZE_MAX),
    Kind.BODY: (0, BODY_SIZE_MAX),
    Kind.CREDIT: (4, 4),
    Kind.CANCEL: (1, 1),
    Kind.PING: (8, 8),
    Kind.PONG: (8, 8),
    Kind.LEAVING: (4, 4),
}
"""Minimum and maximum bytes of the payload."""
_KINDS: Final = {int(kind): kind for kind in Kind}
_WITH_END: Final = frozenset((Kind.REQUEST, Kind.RESPONSE, Kind.BODY))
_OF_CONNECTION: Final = frozenset((Kind.PING, Kind.PONG, Kind.LEAVING))
"""Frames that belong to no stream."""


class ProtocolViolation(Exception):
    """The other end does not follow the protocol. The connection is closed."""


class Frame(NamedTuple):
    kind: Kind
    stream: int
    payload: bytes
    is_end: bool


def encode(kind: Kind, stream: int, payload: bytes | memoryview = b"", *, is_end: bool = False) -> bytes:
    """Return the bytes of a frame."""
    return HEADER.pack(len(payload), stream, kind, END if is_end else 0) + payload


def encode_number(kind: Kind, stream: int, number: int) -> bytes:
    """Return a CREDIT or LEAVING frame."""
    return encode(kind, stream, NUMBER.pack(number))


class FrameReader:
    """Divides the bytes of a connection into frames."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    @property
    def held_size(self) -> int:
        """Bytes of an incomplete frame."""
        return len(self._rest)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete. The caller must take all of them. Raises ProtocolViolation."""
        if self._rest:
            data = self._rest + data
            self._rest = b""
        at, end = 0, len(data)
        while end - at >= HEADER.size:
            size, stream, number, flags = HEADER.unpack_from(data, at)
            kind = _checked(size, stream, number, flags)
            following = at + HEADER.size + size
            if following > end:
                break
            yield Frame(kind, stream, data[at + HEADER.size : following], bool(flags))
            at = following
        if at < end:
            self._rest = data[at:]


def _checked(size: int, stream: int, number: int, flags: int) -> Kind:
    kind = _KINDS.get(number)
    if kind is None:
        raise ProtocolViolation(f"type {number} is not known")
    least, most = _SIZES[kind]
    if not least <= size <= most:
        raise ProtocolViolation(f"{kind.name} with {size} bytes")
    if (stream == 0) != (kind in _OF_CONNECTION) or stream > STREAM_MAX:
        raise ProtocolViolation(f"{kind.name} of stream {stream}")
    if flags & ~END or (flags and kind not in _WITH_END):
        raise ProtocolViolation(f"{kind.name} with the flags {flags}")
    return kind
