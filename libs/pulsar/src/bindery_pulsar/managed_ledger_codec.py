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
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from bindery_core.errors import Corrupt
from google.protobuf.message import DecodeError

from bindery_pulsar.cursor_fields import (
    CursorState,
    batches_of,
    put_acked,
    put_extra,
    ranges_of,
    read_acked,
    read_batches,
    read_blobs,
    read_counts,
)
from bindery_pulsar.managed_ledger_pb2 import (
    ManagedCursorInfo,
    ManagedLedgerInfo,
    ManagedLedgerInfoMetadata,
    PositionInfo,
)
from bindery_pulsar.managed_ledger_records import LedgerRecord, Position

__all__ = [
    "NO_LEDGER",
    "UNCOMPRESSED_SIZE_MAX",
    "CursorInfo",
    "CursorState",
    "TopicInfo",
    "decode_cursor",
    "decode_position",
    "decode_topic",
    "encode_cursor",
    "encode_position",
    "encode_topic",
]

NO_LEDGER: Final = -1
"""`cursorsLedgerId` of a cursor whose znode holds its whole state."""
UNCOMPRESSED_SIZE_MAX: Final = 64 * 2**20
"""Maximum bytes of a decompressed znode value."""
_COMPRESSED: Final = struct.Struct(">HI")
_MAGIC: Final = 0x4778
_COMPRESSION_NONE, _COMPRESSION_ZLIB = 0, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicInfo:
    """The content of a topic's znode."""

    ledgers: tuple[LedgerRecord, ...] = ()
    terminated: Position | None = None
    """Last entry of a topic that accepts no more entries; None: the topic accepts entries."""
    properties: Mapping[str, str] = field(default_factory=dict)


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
        message.individualDeletedMessages.extend(ranges_of(state.acked))
        for name, number in sorted(state.properties.items()):
            message.properties.add(name=name, value=number)
        message.batchedEntryDeletionIndexInfo.extend(batches_of(state.batches))
        if state.redelivery_counts or state.blobs:
            put_extra(message.extra, state)
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
            acked=read_acked(message.individualDeletedMessages),
            batches=read_batches(message.batchedEntryDeletionIndexInfo),
            properties={item.name: item.value for item in message.properties},
            redelivery_counts=dict(read_counts(message.extra.redelivery_counts)),
            blobs=read_blobs(message.extra),
        )
    return CursorInfo(
        ledger_id=message.cursorsLedgerId,
        state=state,
        cursor_properties={item.name: item.value for item in message.cursorProperties},
        last_active_ms=message.lastActive,
    )


def encode_position(state: CursorState) -> bytes:
    """Return a record for the cursor ledger in Pulsar's form, which lacks redelivery counts and blobs."""
    message = PositionInfo(ledgerId=state.mark_delete.ledger_id, entryId=state.mark_delete.entry_id)
    put_acked(message, state.acked)
    for name, number in sorted(state.properties.items()):
        message.properties.add(name=name, value=number)
    message.batchedEntryDeletionIndexInfo.extend(batches_of(state.batches))
    return message.SerializeToString()


def decode_position(data: bytes) -> CursorState:
    """Decode a record of a cursor ledger as Pulsar does: for a change, what it adds. Raises Corrupt.

    `subscription_log` decodes the complete state.
    """
    try:
        message = PositionInfo.FromString(data)
    except DecodeError as error:
        raise Corrupt("cursor record cannot be read", size=len(data)) from error
    return CursorState(
        mark_delete=Position(message.ledgerId, message.entryId),
        acked=read_acked(message.individualDeletedMessages, message.individualDeletedMessageRanges),
        batches=read_batches(message.batchedEntryDeletionIndexInfo),
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
