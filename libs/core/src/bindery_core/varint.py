"""Base-128 varints as in protobuf: seven bits per byte, low bits first, bit 7 set on all but the last byte.

A negative int64 is its 64-bit two's complement, so it takes ten bytes. Source: protobuf's wire format.
"""

from typing import Final

ONE_BYTE: Final = tuple(bytes((value,)) for value in range(128))
"""Encodings of 0 .. 127, which include most lengths, statuses and small ids."""
NEGATIVE_ONE: Final = b"\xff" * 9 + b"\x01"
"""Encoding of -1."""
SIZE_MAX: Final = 10
"""Maximum bytes of a varint."""

_U64 = 1 << 64
_I64_MAX = (1 << 63) - 1


class NotAVarint(ValueError):
    """A varint is truncated, or has more than ten bytes or 64 bits. The codecs convert it to their own error."""


def encode(value: int) -> bytes:
    """Encode `value`, which is in -2^63 .. 2^64 - 1."""
    if 0 <= value < 0x80:
        return ONE_BYTE[value]
    if 0 <= value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    if 0 <= value < 0x20_0000:
        return bytes((value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14))
    if value < 0:
        if value == -1:
            return NEGATIVE_ONE
        value += _U64
    assert 0 <= value < _U64
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode(data: bytes, at: int) -> tuple[int, int]:
    """Return the unsigned value that starts at offset `at`, and the offset after it. Raises NotAVarint."""
    value = shift = 0
    try:
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift == 70:
                raise NotAVarint
    except IndexError:
        raise NotAVarint from None
    if value >= _U64:
        raise NotAVarint
    return value, at


def to_signed(value: int) -> int:
    """Return an unsigned 64-bit value as int64."""
    return value if value <= _I64_MAX else value - _U64
