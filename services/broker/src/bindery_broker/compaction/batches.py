"""Remove messages from a batch: the others keep their indexes, so that message ids do not change. Pure.

A removed message is SingleMessageMetadata with `compacted_out` and a payload of 0 bytes. The batch is compressed as
before.
Source: Pulsar RawBatchConverter.rebatchMessage.
"""

import struct
import zlib
from collections.abc import Callable, Collection
from typing import Final

import cramjam
from bindery_pulsar.compression import decompress
from bindery_pulsar.message_codec import CorruptMessage, frame_entry, split_entry
from bindery_pulsar.pulsar_messages_pb2 import LZ4, NONE, SNAPPY, ZLIB, ZSTD, SingleMessageMetadata

_SIZE: Final = struct.Struct(">I")
_REMOVED: Final = SingleMessageMetadata(payload_size=0, compacted_out=True).SerializeToString()
_REMOVED_MESSAGE: Final = _SIZE.pack(len(_REMOVED)) + _REMOVED

_COMPRESS: Final[dict[int, Callable[[bytes], bytes]]] = {
    NONE: bytes,
    LZ4: lambda plain: bytes(cramjam.lz4.compress_block(plain, store_size=False)),
    ZLIB: zlib.compress,
    ZSTD: lambda plain: bytes(cramjam.zstd.compress(plain)),
    SNAPPY: lambda plain: bytes(cramjam.snappy.compress_raw(plain)),
}


def keep_messages(entry: bytes, kept: Collection[int]) -> bytes:
    """Return the entry, a batch that was decoded before, with the messages at the indexes `kept` only.

    Raises CorruptMessage, and TooLarge if the rest does not compress as well as the whole did.
    """
    metadata, payload = split_entry(entry)
    plain: bytes | bytearray | memoryview | None = payload
    if metadata.compression:
        plain = decompress(metadata.compression, payload, metadata.uncompressed_size)
    if plain is None:
        raise CorruptMessage("the compressed payload does not match its metadata")
    parts: list[bytes] = []
    view = memoryview(plain)
    offset = 0
    for index in range(metadata.num_messages_in_batch):
        start = offset
        try:
            (size,) = _SIZE.unpack_from(view, offset)
        except struct.error as error:
            raise CorruptMessage("batch is cut short", index=index) from error
        offset += _SIZE.size + size
        single = SingleMessageMetadata.FromString(bytes(view[start + _SIZE.size : offset]))
        offset += single.payload_size
        parts.append(bytes(view[start:offset]) if index in kept else _REMOVED_MESSAGE)
    rest = b"".join(parts)
    metadata.uncompressed_size = len(rest)
    return frame_entry(metadata, _COMPRESS[metadata.compression](rest))
