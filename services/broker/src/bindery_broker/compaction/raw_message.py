"""Entry of a compacted ledger: an entry of the topic, with its position in the topic.

Integers are big-endian. Offsets and sizes are in bytes.

| offset | size | type | field   | meaning                                                                             |
|-------:|-----:|------|---------|-------------------------------------------------------------------------------------|
|      0 |    4 | u32  | id_size |                                                                                     |
|      4 |    n | raw  | id      | MessageIdData (protobuf): ledger, entry and partition; batch index -1               |
|  4 + n |    4 | u32  | size    |                                                                                     |
|  8 + n | size | raw  | entry   | the entry as in the topic, without the metadata that a broker puts before it;       |
|        |      |      |         | or a batch of which messages were removed (`batches`)                               |

The entries of a compacted ledger ascend by position. The ledger has the digest CRC32, an empty password, and the custom
metadata `component=compacted-ledger`, `pulsar/compactedTopic` (full name) and `pulsar/compactedTo` (the MessageIdData
of the last entry that was read).
Source: Pulsar RawMessageImpl, LedgerMetadataUtils, AbstractTwoPhaseCompactor.
"""

import struct
from typing import Final

from bindery_core.errors import Corrupt
from bindery_pulsar.message_id import Position
from bindery_pulsar.pulsar_messages_pb2 import MessageIdData
from google.protobuf.message import DecodeError

_SIZE: Final = struct.Struct(">I")
_BROKER_METADATA: Final = struct.Struct(">HI")
_MAGIC_BROKER_METADATA: Final = 0x0E02
ID_SIZE_MAX: Final = 64
"""Maximum bytes of an id that is read; Bindery's take at most 24."""
OVERHEAD_MAX: Final = 2 * _SIZE.size + ID_SIZE_MAX
"""Maximum bytes that the frame adds to an entry."""

assert _SIZE.size == 4
assert _BROKER_METADATA.size == 6


def encode_id(position: Position, *, partition: int) -> bytes:
    """Return the MessageIdData of an entry. `partition`: -1 if the topic is no partition."""
    return MessageIdData(
        ledgerId=position.ledger_id, entryId=position.entry_id, partition=partition
    ).SerializeToString()


def encode(position: Position, entry: bytes, *, partition: int) -> bytes:
    message_id = encode_id(position, partition=partition)
    entry = entry[_broker_metadata_size(entry) :]
    return b"".join((_SIZE.pack(len(message_id)), message_id, _SIZE.pack(len(entry)), entry))


def decode(data: bytes) -> tuple[Position, bytes]:
    """Return the position and the entry. Raises Corrupt."""
    position, end = _position(data)
    try:
        (size,) = _SIZE.unpack_from(data, end)
    except struct.error as error:
        raise Corrupt("an entry of a compacted ledger is cut short", size=len(data)) from error
    entry = data[end + _SIZE.size :]
    if len(entry) != size:
        raise Corrupt("an entry of a compacted ledger has another size than it says", size=len(entry), wanted=size)
    return position, entry


def decode_position(data: bytes) -> Position:
    """Return the position only. Raises Corrupt."""
    return _position(data)[0]


def _position(data: bytes) -> tuple[Position, int]:
    """Return the position, and the offset after it."""
    try:
        (size,) = _SIZE.unpack_from(data)
        end = _SIZE.size + size
        if size > ID_SIZE_MAX or end > len(data):
            raise Corrupt("an entry of a compacted ledger has an impossible id", size=len(data), id_size=size)
        found = MessageIdData.FromString(data[_SIZE.size : end])
    except (struct.error, DecodeError) as error:
        raise Corrupt("the id of an entry of a compacted ledger cannot be read", size=len(data)) from error
    return Position(found.ledgerId, found.entryId), end


def _broker_metadata_size(entry: bytes) -> int:
    if len(entry) < _BROKER_METADATA.size:
        return 0
    magic, size = _BROKER_METADATA.unpack_from(entry)
    return _BROKER_METADATA.size + int(size) if magic == _MAGIC_BROKER_METADATA else 0
