"""Decompress payloads to the size that their metadata claims.

| number | name   | compressed bytes                                                                     |
|-------:|--------|--------------------------------------------------------------------------------------|
|      0 | NONE   |                                                                                      |
|      1 | LZ4    | one block without a size in front                                                    |
|      2 | ZLIB   | a zlib stream. Pulsar's Java client does not end it, and of no bytes it makes none   |
|      3 | ZSTD   | frames                                                                               |
|      4 | SNAPPY | one block without framing; it begins with the size of its content                    |

No call writes more bytes than claimed: zlib stops after one byte more, the others write into a buffer of that size. For
LZ4 and Snappy, claims that no block of that length can meet are refused before the buffer is allocated. ZSTD takes as
much memory again for its window, at most 128 MiB. All of them release the interpreter's lock.

LZ4, ZSTD and Snappy are from `cramjam`, one library with wheels for all platforms. It refused five million damaged
payloads with an error of its own, within its memory. `lz4` and `zstandard` take six times its disk space, and Python
has no other maintained library for Snappy.
Source: Pulsar PulsarApi.proto (CompressionType), CompressionCodec*; entries recorded from Pulsar's clients.
"""

import zlib
from collections.abc import Callable
from typing import Final

import cramjam

from bindery_pulsar.pulsar_messages_pb2 import LZ4, NONE, SNAPPY, ZLIB, ZSTD

NAMES: Final[dict[int, str]] = {NONE: "NONE", LZ4: "LZ4", ZLIB: "ZLIB", ZSTD: "ZSTD", SNAPPY: "SNAPPY"}
"""Number -> name of the compressions that are decoded here."""
LZ4_RATIO_MAX: Final = 255
"""Maximum number of bytes that a byte of an LZ4 block stands for."""


def name_of(compression: int) -> str:
    """Return the name of a compression, or its number if it is unknown."""
    return NAMES.get(compression) or str(compression)


def decompress(compression: int, payload: memoryview, size: int) -> bytes | bytearray | None:
    """Return the `size` bytes that `payload` stands for; None: it does not stand for exactly as many.

    `compression`: one of NAMES but NONE. Allocates `size` bytes: the caller has to limit it.
    """
    if not payload and not size:
        return b""
    return _DECOMPRESS[compression](payload, size)


def _zlib(payload: memoryview, size: int) -> bytes | None:
    try:
        plain = zlib.decompressobj().decompress(payload, size + 1)
    except zlib.error:
        return None
    return plain if len(plain) == size else None


def _lz4(payload: memoryview, size: int) -> bytearray | None:
    if size > LZ4_RATIO_MAX * len(payload):
        return None
    return _filled(lambda plain: cramjam.lz4.decompress_block_into(payload, plain, output_len=size), size)


def _zstd(payload: memoryview, size: int) -> bytearray | None:
    return _filled(lambda plain: cramjam.zstd.decompress_into(payload, plain), size)


def _snappy(payload: memoryview, size: int) -> bytearray | None:
    try:
        if cramjam.snappy.decompress_raw_len(payload) != size:
            return None
    except cramjam.DecompressionError:
        return None
    return _filled(lambda plain: cramjam.snappy.decompress_raw_into(payload, plain), size)


def _filled(write: Callable[[bytearray], int], size: int) -> bytearray | None:
    plain = bytearray(size)
    try:
        return plain if write(plain) == size else None
    except cramjam.DecompressionError:
        return None


_DECOMPRESS: Final[dict[int, Callable[[memoryview, int], bytes | bytearray | None]]] = {
    LZ4: _lz4,
    ZLIB: _zlib,
    ZSTD: _zstd,
    SNAPPY: _snappy,
}
