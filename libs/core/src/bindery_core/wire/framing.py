"""Framing: each message on a connection is preceded by its length.

| offset | size | type | field   | meaning                                                                     |
|-------:|-----:|------|---------|-----------------------------------------------------------------------------|
|      0 |    4 | i32  | length  | bytes that follow, 1 .. FRAME_SIZE_MAX - 4; big-endian                      |
|      4 |    n | raw  | message | v3: protobuf Request or Response                                            |

A length outside its range ends the connection without a response, because no later byte is known to start a frame.
Source: BookKeeper's use of Netty's LengthFieldBasedFrameDecoder (nettyMaxFrameSizeBytes counts the length field too).
"""

import struct
from typing import Final

from bindery_core.errors import BadRequest, TooLarge

_LENGTH = struct.Struct(">i")
LENGTH_SIZE: Final = 4
"""Bytes of the length field."""
FRAME_SIZE_MAX: Final = 5 * 1024 * 1024
"""Maximum bytes of a frame, including its length field: BookKeeper's default. Pulsar's configuration sets 5253120."""

_SMALL_SIZE: Final = 4096
"""Feeds of fewer bytes are joined in one buffer: as objects of their own, they would take many times their size."""

assert _LENGTH.size == LENGTH_SIZE


class FrameDecoder:
    """Splits a byte stream into messages.

    Invariants: bytes held back are less than one frame, so memory is bounded by `frame_size_max` plus one feed, however
    small the feeds are; the number of copies of a byte does not depend on their number; after an error no feed is
    accepted; nothing is kept of a frame that is complete.
    """

    __slots__ = ("_failed", "_frame_size_max", "_needed", "_pieces", "_size")

    def __init__(self, *, frame_size_max: int = FRAME_SIZE_MAX) -> None:
        assert frame_size_max > LENGTH_SIZE
        self._frame_size_max = frame_size_max
        self._pieces: list[bytes | bytearray] = []
        self._size = 0
        self._needed = LENGTH_SIZE
        """Total bytes required before a message can be split off."""
        self._failed = False

    def allow(self, frame_size_max: int) -> None:
        """Set the maximum frame size from the next feed on."""
        assert frame_size_max > LENGTH_SIZE
        self._frame_size_max = frame_size_max

    @property
    def buffered_size(self) -> int:
        """Bytes of an unfinished frame that are kept."""
        return self._size

    @property
    def needed_size(self) -> int:
        """Bytes of the unfinished frame once it is complete, as far as its length has arrived."""
        return self._needed

    def feed(self, data: bytes) -> list[bytes]:
        """Process the next bytes of the stream; return the complete messages, without their length field.

        Raises BadRequest (length < 1) or TooLarge (length + 4 > limit); messages before the bad one in the same feed
        are lost, because the connection must be closed.
        """
        assert not self._failed
        if self._size:
            if len(data) < _SMALL_SIZE:
                last = self._pieces[-1]
                if type(last) is bytearray:
                    last += data
                else:
                    self._pieces.append(bytearray(data))
            else:
                self._pieces.append(data)
            self._size += len(data)
            if self._size < self._needed:
                return []
            # Joined only when a frame's length or end has arrived, so the cost is linear for feeds of any size.
            data = b"".join(self._pieces)
            self._pieces.clear()
        size = len(data)
        at = 0
        messages = []
        unpack_length = _LENGTH.unpack_from
        needed = LENGTH_SIZE
        while at + LENGTH_SIZE <= size:
            (length,) = unpack_length(data, at)
            if length < 1 or length + LENGTH_SIZE > self._frame_size_max:
                self._failed = True
                self._size = 0
                if length < 1:
                    raise BadRequest("frame length is not positive", length=length)
                raise TooLarge(
                    "frame exceeds the size limit", frame_size=length + LENGTH_SIZE, frame_size_max=self._frame_size_max
                )
            end = at + LENGTH_SIZE + length
            if end > size:
                needed = LENGTH_SIZE + length
                break
            messages.append(data[at + LENGTH_SIZE : end])
            at = end
        self._size = size - at
        self._needed = needed
        if self._size:
            self._pieces.append(data[at:] if at else data)
        return messages
