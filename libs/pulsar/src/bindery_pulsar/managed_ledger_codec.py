"""Encode and decode znode values and cursor records of topics.

A znode value is a protobuf message of managed_ledger.proto, or a compressed one:

| offset | size | type | field             | meaning                                       |
|-------:|-----:|------|-------------------|-----------------------------------------------|
|      0 |    2 | u16  | magic             | 0x4778                                        |
|      2 |    4 | u32  | head_size         |                                               |
|      6 |    n | raw  | head              | compression type and uncompressed size        |
|  6 + n |    m | raw  | body              | the message, compressed                       |

Values are written uncompressed, as Pulsar does by default; ZLIB and NONE are read. A protobuf message never begins
with 0x47.
Source: Pulsar MetaStoreImpl, MLDataFormats.proto.
"""

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from bindery_core.errors import Corrupt
from google.protobuf.message import DecodeError

from bindery_pulsar.ack_ranges import AckRanges
from bindery_pulsar.managed_ledger_pb2 import (
    BatchedEntryDeletionIndexInfo,
    LongListMap,
    ManagedCursorInfo,
    ManagedLedgerInfo,
    ManagedLedgerInfoMetadata,
    MessageRange,
    PositionInfo,
)
from bindery_pulsar.managed_ledger_records import LedgerRecord, Position

NO_LEDGER: Final = -1
"""`cursorsLedgerId` of a cursor whose znode holds its whole state."""
UNCOMPRESSED_SIZE_MAX: Final = 64 * 2**20
"""Maximum bytes of a decompressed znode value."""
_COMPRESSED: Final = struct.Struct(">HI")
_MAGIC: Final = 0x4778
_COMPRESSION_NONE, _COMPRESSION_ZLIB = 0, 2
_RANGE_SIZE: Final = 28
"""Approximate bytes of one stored range: two positions of about 11 bytes each, with their tags."""
_WORD_SIZE: Final = 10
"""Maximum bytes of one stored bit set word."""
_WORD_BITS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicInfo:
    """The content of a topic's znode."""

    ledgers: tuple[LedgerRecord, ...] = ()
    terminated: Position | None = None
    """Last entry of a topic that accepts no more entries; None: the topic accepts entries."""
    properties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CursorState:
    """The consumption state of a cursor."""

    mark_delete: Position
    acked: AckRanges = field(default_factory=AckRanges)
    """Acknowledged entries after `mark_delete`."""
    batches: Mapping[Position, int] = field(default_factory=dict)
    """Partly acknowledged batches by position. Bit i is set if message i is not acknowledged yet."""
    properties: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CursorInfo:
    """The content of a cursor's znode."""

    ledger_id: int
    """Id of the cursor ledger, whose last entry is newer than `state`; NO_LEDGER: `state` is complete."""
    state: CursorState | None
    """State in the znode; None only in znodes of Pulsar, which stores none there while a cursor ledger is in use."""
    cursor_properties: Mapping[str, str] = field(default_factory=dict)
    last_active_ms: int = 0


def encode_topic(info: TopicInfo) -> bytes:
    message = ManagedLedgerInfo()
    for record in info.ledgers:
        ledger = message.ledgerInfo.add()
        ledger.ledgerId = record.ledger_id
        if record.extension:
            ledger.MergeFromString(record.extension)
            ledger.ledgerId = record.ledger_id
        if record.closed_ms:
            ledger.entries = record.entries
            ledger.size = record.size
        ledger.timestamp = record.closed_ms
    if info.terminated is not None:
        message.terminatedPosition.ledgerId, message.terminatedPosition.entryId = info.terminated
    for key, value in info.properties.items():
        message.properties.add(key=key, value=value)
    return message.SerializeToString()


def decode_topic(data: bytes) -> TopicInfo:
    """Decode a topic's znode. Sorts the ledgers in ascending order, as Pulsar does. Raises Corrupt."""
    try:
        message = ManagedLedgerInfo.FromString(_plain(data))
    except DecodeError as error:
        raise Corrupt("topic metadata cannot be read", size=len(data)) from error
    records = [
        LedgerRecord(
            ledger_id=ledger.ledgerId,
            entries=ledger.entries,
            size=ledger.size,
            closed_ms=ledger.timestamp,
            extension=_extension(ledger),
        )
        for ledger in message.ledgerInfo
    ]
    records.sort(key=lambda record: record.ledger_id)
    if any(a.ledger_id == b.ledger_id for a, b in pairwise(records)):
        raise Corrupt("topic metadata names a ledger twice")
    terminated = None
    if message.HasField("terminatedPosition"):
        terminated = Position(message.terminatedPosition.ledgerId, message.terminatedPosition.entryId)
    return TopicInfo(
        ledgers=tuple(records),
        terminated=terminated,
        properties={item.key: item.value for item in message.properties},
    )


def encode_cursor(info: CursorInfo) -> bytes:
    message = ManagedCursorInfo(cursorsLedgerId=info.ledger_id, lastActive=info.last_active_ms)
    for name, value in sorted(info.cursor_properties.items()):
        message.cursorProperties.add(name=name, value=value)
    state = info.state
    if state is not None:
        message.markDeleteLedgerId, message.markDeleteEntryId = state.mark_delete
        message.individualDeletedMessages.extend(_ranges(state.acked))
        for name, number in sorted(state.properties.items()):
            message.properties.add(name=name, value=number)
        message.batchedEntryDeletionIndexInfo.extend(_batches(state.batches))
    return message.SerializeToString()


def decode_cursor(data: bytes) -> CursorInfo:
    """Decode a cursor's znode. Raises Corrupt."""
    try:
        message = ManagedCursorInfo.FromString(_plain(data))
    except DecodeError as error:
        raise Corrupt("cursor metadata cannot be read", size=len(data)) from error
    state = None
    if message.HasField("markDeleteLedgerId"):
        state = CursorState(
            mark_delete=Position(message.markDeleteLedgerId, message.markDeleteEntryId),
            acked=_read_acked(message.individualDeletedMessages, ()),
            batches=_read_batches(message.batchedEntryDeletionIndexInfo),
            properties={item.name: item.value for item in message.properties},
        )
    return CursorInfo(
        ledger_id=message.cursorsLedgerId,
        state=state,
        cursor_properties={item.name: item.value for item in message.cursorProperties},
        last_active_ms=message.lastActive,
    )


def encode_position(state: CursorState) -> bytes:
    """Return a record for the cursor ledger. Acknowledged ranges are stored as ranges or bits, whichever is shorter."""
    message = PositionInfo(ledgerId=state.mark_delete.ledger_id, entryId=state.mark_delete.entry_id)
    bits_size = sum((end // _WORD_BITS + 1) * _WORD_SIZE for end in state.acked.last_entries())
    if state.acked.ranges_count * _RANGE_SIZE <= bits_size:
        message.individualDeletedMessages.extend(_ranges(state.acked))
    else:
        for ledger_id in state.acked.ledger_ids():
            words = _words(state.acked.bits(ledger_id))
            message.individualDeletedMessageRanges.append(LongListMap(key=ledger_id, values=words))
    for name, number in sorted(state.properties.items()):
        message.properties.add(name=name, value=number)
    message.batchedEntryDeletionIndexInfo.extend(_batches(state.batches))
    return message.SerializeToString()


def decode_position(data: bytes) -> CursorState:
    """Decode a record of a cursor ledger. Raises Corrupt."""
    try:
        message = PositionInfo.FromString(data)
    except DecodeError as error:
        raise Corrupt("cursor record cannot be read", size=len(data)) from error
    return CursorState(
        mark_delete=Position(message.ledgerId, message.entryId),
        acked=_read_acked(message.individualDeletedMessages, message.individualDeletedMessageRanges),
        batches=_read_batches(message.batchedEntryDeletionIndexInfo),
        properties={item.name: item.value for item in message.properties},
    )


def _plain(data: bytes) -> bytes:
    if len(data) < _COMPRESSED.size or int.from_bytes(data[:2], "big") != _MAGIC:
        return data
    _, head_size = _COMPRESSED.unpack_from(data)
    body = data[_COMPRESSED.size + head_size :]
    head = ManagedLedgerInfoMetadata.FromString(data[_COMPRESSED.size : _COMPRESSED.size + head_size])
    if head.compressionType == _COMPRESSION_NONE:
        return body
    if head.compressionType != _COMPRESSION_ZLIB or not 0 <= head.uncompressedSize <= UNCOMPRESSED_SIZE_MAX:
        raise Corrupt("unsupported compression of metadata", compression=head.compressionType)
    decompressor = zlib.decompressobj()
    try:
        plain = decompressor.decompress(body, head.uncompressedSize + 1)
    except zlib.error as error:
        raise Corrupt("compressed metadata cannot be read") from error
    if len(plain) != head.uncompressedSize:
        raise Corrupt("the uncompressed size of metadata does not match", wanted=head.uncompressedSize)
    return plain


def _extension(ledger: ManagedLedgerInfo.LedgerInfo) -> bytes:
    """Return the fields that are not interpreted here, those of later versions included."""
    rest = ManagedLedgerInfo.LedgerInfo()
    rest.CopyFrom(ledger)
    for name in ("ledgerId", "entries", "size", "timestamp"):
        rest.ClearField(name)
    return rest.SerializePartialToString()


def _ranges(acked: AckRanges) -> Iterable[MessageRange]:
    for ledger_id, first, last in acked:
        message = MessageRange()
        message.lowerEndpoint.ledgerId, message.lowerEndpoint.entryId = ledger_id, first - 1
        message.upperEndpoint.ledgerId, message.upperEndpoint.entryId = ledger_id, last
        yield message


def _read_acked(ranges: Iterable[MessageRange], maps: Iterable[LongListMap]) -> AckRanges:
    """Decode acknowledged ranges and bit sets.

    Pulsar's ranges may begin in one ledger and end in another. Only the part in the last ledger can be decoded here;
    the messages of the other part are delivered again.
    """
    acked = AckRanges()
    for item in ranges:
        first = item.lowerEndpoint.entryId + 1 if item.lowerEndpoint.ledgerId == item.upperEndpoint.ledgerId else 0
        if item.upperEndpoint.entryId >= first >= 0:
            acked.add_range(item.upperEndpoint.ledgerId, first, item.upperEndpoint.entryId)
    for words in maps:
        acked.add_bits(words.key, _from_words(words.values))
    return acked


def _batches(batches: Mapping[Position, int]) -> Iterable[BatchedEntryDeletionIndexInfo]:
    for position, remaining in sorted(batches.items()):
        message = BatchedEntryDeletionIndexInfo(deleteSet=_words(remaining))
        message.position.ledgerId, message.position.entryId = position
        yield message


def _read_batches(items: Iterable[BatchedEntryDeletionIndexInfo]) -> dict[Position, int]:
    return {Position(item.position.ledgerId, item.position.entryId): _from_words(item.deleteSet) for item in items}


def _words(bits: int) -> Sequence[int]:
    """Return a bit set as signed 64-bit words, least significant first."""
    count = (bits.bit_length() + _WORD_BITS - 1) // _WORD_BITS
    return struct.unpack(f"<{count}q", bits.to_bytes(8 * count, "little"))


def _from_words(words: Sequence[int]) -> int:
    return int.from_bytes(struct.pack(f"<{len(words)}q", *words), "little")
