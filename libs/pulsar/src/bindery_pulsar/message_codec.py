"""Entries of a topic: one message, or a batch of them, with Pulsar's metadata.

Integers are big-endian. Sizes are in bytes.

| part                  | size | present                                       | meaning                              |
|-----------------------|-----:|-----------------------------------------------|--------------------------------------|
| magic 0x0e02          |    2 | if a broker added metadata; Bindery does not  |                                      |
| broker metadata size  |    4 | with magic 0x0e02                             | u32                                  |
| BrokerEntryMetadata   |    n | with magic 0x0e02                             | protobuf                             |
| magic 0x0e01          |    2 | always in Bindery, optional in Pulsar         |                                      |
| checksum              |    4 | with magic 0x0e01                             | CRC32C over all that follows, u32    |
| metadata size         |    4 | always                                        | u32                                  |
| MessageMetadata       |    n | always                                        | protobuf                             |
| payload               |    n | always                                        | to the end of the entry              |

The payload of a batch (`num_messages_in_batch` present) is, after decompression, for each message: u32 size,
SingleMessageMetadata, `payload_size` bytes. If an entry has neither magic, its first bytes are the metadata's size. The
size cannot be mistaken for a magic, because it is below 0x0e010000, as are the sizes of entries.

The metadata of a batch repeats the key of its first message. In batches of Bindery it also has the tags of the messages
as properties, so that dispatch need not decode the batch; Pulsar's clients ignore these properties.
Source: Pulsar Commands, PulsarApi.proto; tags as in TDMQ: a property with the value `TAGS`.
"""

import binascii
import struct
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import crc32c
from bindery_core.errors import BinderyError, Corrupt, TooLarge
from google.protobuf.message import DecodeError

from bindery_pulsar.compression import NAMES, decompress, name_of
from bindery_pulsar.entry_size import ENTRY_SIZE_MAX
from bindery_pulsar.message_encoding import Chunk, Encoding, Encryption, EncryptionKey, OpaqueReason
from bindery_pulsar.pulsar_messages_pb2 import (
    BrokerEntryMetadata,
    KeyValue,
    MessageMetadata,
    RequestMark,
    SingleMessageMetadata,
)

METADATA_SIZE_MAX: Final = 256 * 2**10
"""Maximum bytes of one message's key and properties together."""
PAYLOAD_SIZE_MAX: Final = ENTRY_SIZE_MAX - 64 * 2**10
"""Maximum bytes of one message's payload; the rest of its entry is for key and properties."""
METADATA_READ_SIZE_MAX: Final = METADATA_SIZE_MAX + 64 * 2**10
"""Maximum bytes of the metadata of an entry, and of a message of a batch, that a broker reads. Protobuf takes twelve
times as much memory for the smallest properties; this is what the messages of Bindery's producers need."""
ENTRY_OVERHEAD: Final = 2 * 2**10
"""Bytes of an entry reserved for frame, numbers and the producer's name."""
UNCOMPRESSED_SIZE_MAX: Final = 128 * 2**20
"""Default limit in bytes of a decoded entry, MESSAGE_SIZE for each message included: a limit on memory, not a rule of
Pulsar."""
MESSAGE_SIZE: Final = 400
"""Bytes of memory that a decoded message is assumed to take in addition to its bytes in the entry."""
PROPERTY_SIZE: Final = 100
"""Bytes of memory that a decoded property is assumed to take in addition to its bytes in the entry."""
BATCH_COUNT_MAX: Final = 1_000_000
"""Maximum number of messages in a batch that is read. Each takes at least six bytes."""
SMALL_SIZE_MAX: Final = 64 * 2**10
"""Maximum bytes, compressed and decompressed, of a payload that is decompressed in less than a millisecond."""
SMALL_COUNT_MAX: Final = 1_000
"""Maximum number of messages of a batch that is decoded in a few milliseconds: the usual size of Pulsar's clients."""
TAG_VALUE: Final = "TAGS"
"""Value of a property whose name is a tag."""
NONE_KEY: Final = b"NONE_KEY"
"""Key by which a message is dispatched whose binary key is not base64, as in Pulsar."""

_MAGIC_BROKER_METADATA: Final = 0x0E02
_MAGIC_CHECKSUM: Final = 0x0E01
_SIZE = struct.Struct(">I")
_MAGIC_AND_U32 = struct.Struct(">HI")
_HEAD = struct.Struct(">HII")
"""Magic number, checksum, and size of the metadata."""

assert _MAGIC_AND_U32.size == 6
assert _HEAD.size == 10


class CorruptMessage(Corrupt):
    """An entry contradicts its checksum or format. Its ledger digest matched, so it was stored with these bytes."""

    code = "corrupt_message"


class UnreadableMessage(BinderyError):
    """A valid entry cannot be decoded here: its metadata, or its properties, are too large."""

    status = 422
    code = "unreadable_message"


@dataclass(slots=True, kw_only=True)
class OutgoingMessage:
    """A message to be stored. Tags are properties whose value is TAG_VALUE."""

    payload: bytes
    key: str | bytes | None = None
    ordering_key: bytes | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    event_time_ms: int = 0
    """Event time in ms since 1970; 0: not set."""
    sequence_id: int | None = None
    """Sequence id; None: the caller of the encoder assigns one."""
    deliver_at_ms: int | None = None
    null_value: bool = False
    """Whether the message is a tombstone; its `payload` is empty."""

    @property
    def tags(self) -> frozenset[str]:
        return tags_of(self.properties)


@dataclass(slots=True, kw_only=True)
class Message:
    """A message as stored."""

    payload: bytes
    batch_index: int
    """Index in the batch; -1: the entry is not a batch."""
    batch_size: int
    """Number of messages in the entry, including those removed by compaction; 1 if the entry is not a batch."""
    producer_name: str
    sequence_id: int
    publish_time_ms: int
    key: str | bytes | None = None
    """Bytes if the producer used a binary key."""
    ordering_key: bytes | None = None
    properties: dict[str, str] = field(default_factory=dict)
    event_time_ms: int = 0
    deliver_at_ms: int | None = None
    null_value: bool = False
    metadata_size: int = 0
    """Bytes of the metadata in the entry, and PROPERTY_SIZE for each property."""

    @property
    def tags(self) -> frozenset[str]:
        return tags_of(self.properties)

    @property
    def key_bytes(self) -> bytes:
        """Key by which Key_Shared dispatches this message alone: `PackedEntry.key_bytes` has the rule.

        Pulsar dispatches the messages of a batch together, by the key of the entry.
        """
        if self.ordering_key is not None:
            return self.ordering_key
        key = self.key
        if key is None:
            return _key_of_its_own(self.producer_name, self.sequence_id)
        return key if isinstance(key, bytes) else key.encode()

    @property
    def size(self) -> int:
        """Bytes of payload and metadata."""
        return len(self.payload) + self.metadata_size


@dataclass(slots=True, kw_only=True)
class OpaqueMessage(Message):
    """An entry that is not decoded. Its payload is as stored; properties, key and times are those of the entry."""

    encoding: Encoding


@dataclass(slots=True, kw_only=True)
class EntryHead:
    """The data of an entry that dispatch needs, without its payload."""

    messages_count: int
    is_batch: bool
    is_marker: bool
    """Whether a broker wrote the entry for brokers; such entries are never delivered."""
    producer_name: str
    sequence_id: int
    """Sequence id of the first message."""
    publish_time_ms: int
    """Time as returned by `publish_time_ms`."""
    key: str | bytes | None
    """Key of the first message. All messages of a batch created by Bindery have the same key."""
    ordering_key: bytes | None
    deliver_at_ms: int | None
    tags: frozenset[str]
    """Tags of all messages, if the entry is a single message or a batch created by Bindery. The tags in other batches
    are known only after decoding."""


def tags_of(properties: Mapping[str, str]) -> frozenset[str]:
    """Return the tags among properties: the names whose value is TAG_VALUE."""
    if TAG_VALUE not in properties.values():
        return frozenset()
    return frozenset(name for name, value in properties.items() if value == TAG_VALUE)


@dataclass(slots=True, kw_only=True)
class EntryOrigin:
    """Who produced an entry, and by which request: what deduplication needs."""

    producer_name: str
    first_sequence_id: int
    """Sequence id of the first message."""
    last_sequence_id: int
    """Highest sequence id of the entry."""
    messages_count: int
    publish_time_ms: int
    """Time as returned by `publish_time_ms`."""
    is_marker: bool
    is_partial: bool
    """Whether the entry is a chunk of a message, and not its last one."""
    mark: RequestMark | None
    """None: the producer is no client of Bindery's HTTP API that can repeat its requests."""


def encode_message(
    message: OutgoingMessage,
    *,
    producer_name: str,
    publish_time_ms: int,
    sequence_id: int,
    mark: RequestMark | None = None,
) -> bytes:
    """Encode one entry with one message. `mark`: the request that it belongs to.

    Raises TooLarge if the message exceeds PAYLOAD_SIZE_MAX or METADATA_SIZE_MAX, or the entry ENTRY_SIZE_MAX.
    """
    check_size(message)
    metadata = MessageMetadata(
        producer_name=producer_name,
        sequence_id=sequence_id,
        publish_time=publish_time_ms,
        uncompressed_size=len(message.payload),
    )
    _set_properties_and_key(metadata, message)
    if message.event_time_ms:
        metadata.event_time = message.event_time_ms
    if message.deliver_at_ms is not None:
        metadata.deliver_at_time = message.deliver_at_ms
    if message.null_value:
        metadata.null_value = True
    if mark is not None:
        metadata.request_mark.CopyFrom(mark)
    return _frame(metadata, [message.payload])


def encode_batch(
    messages: Sequence[OutgoingMessage],
    *,
    producer_name: str,
    publish_time_ms: int,
    sequence_ids: Sequence[int],
    mark: RequestMark | None = None,
) -> bytes:
    """Encode at least one message as one batch entry. All messages should have the same key, delivery time and tags.

    `sequence_ids`: one per message. `mark`: the request that the entry belongs to. Raises TooLarge if the entry exceeds
    ENTRY_SIZE_MAX.
    """
    assert len(messages) == len(sequence_ids) >= 1
    parts: list[bytes] = []
    append = parts.append
    pack = _SIZE.pack
    for message, sequence_id in zip(messages, sequence_ids, strict=True):
        payload = message.payload
        single = SingleMessageMetadata(payload_size=len(payload), sequence_id=sequence_id)
        if message.properties:
            for name, value in message.properties.items():
                single.properties.add(key=name, value=value)
        if message.key is not None or message.ordering_key is not None:
            _set_key(single, message)
        if message.event_time_ms:
            single.event_time = message.event_time_ms
        if message.null_value:
            single.null_value = True
        head = single.SerializeToString()
        append(pack(len(head)))
        append(head)
        append(payload)
    first = messages[0]
    metadata = MessageMetadata(
        producer_name=producer_name,
        sequence_id=sequence_ids[0],
        publish_time=publish_time_ms,
        uncompressed_size=sum(map(len, parts)),
        num_messages_in_batch=len(messages),
        highest_sequence_id=max(sequence_ids),
    )
    for tag in sorted(first.tags):
        metadata.properties.add(key=tag, value=TAG_VALUE)
    _set_key(metadata, first)
    if first.deliver_at_ms is not None:
        metadata.deliver_at_time = first.deliver_at_ms
    if mark is not None:
        metadata.request_mark.CopyFrom(mark)
    return _frame(metadata, parts)


def check_size(message: OutgoingMessage) -> None:
    """Raise TooLarge if no entry can hold the message."""
    if len(message.payload) > PAYLOAD_SIZE_MAX:
        raise TooLarge("message is too large", size=len(message.payload), size_max=PAYLOAD_SIZE_MAX)
    if not (message.properties or message.key or message.ordering_key):
        return
    room = min(METADATA_SIZE_MAX, ENTRY_SIZE_MAX - ENTRY_OVERHEAD - len(message.payload))
    if metadata_size(message) > room and (size := _metadata_size_exact(message)) > room:
        raise TooLarge("key and properties are too large", size=size, size_max=room)


def metadata_size(message: OutgoingMessage) -> int:
    """Return an upper estimate of the bytes of key and properties."""
    size = 16 + 4 * len(message.key or b"") + 2 * len(message.ordering_key or b"")
    for name, value in message.properties.items():
        size += 16 + 4 * (len(name) + len(value))
    return size


def _metadata_size_exact(message: OutgoingMessage) -> int:
    metadata = MessageMetadata(producer_name="", sequence_id=0, publish_time=0)
    _set_properties_and_key(metadata, message)
    return metadata.ByteSize()


class PackedEntry:
    """An entry whose checksum and metadata were read, and whose messages are not decoded yet."""

    __slots__ = (
        "_broker_time_ms",
        "_compression",
        "_metadata",
        "_metadata_size",
        "_metadata_size_max",
        "_payload",
        "count",
        "is_batch",
        "opaque_reason",
    )

    def __init__(
        self, entry: bytes, *, metadata_size_max: int = UNCOMPRESSED_SIZE_MAX, size_max: int = UNCOMPRESSED_SIZE_MAX
    ) -> None:
        """`metadata_size_max`: maximum bytes of the metadata of the entry, and of each message of a batch. `size_max`:
        maximum bytes of the decoded entry, MESSAGE_SIZE for each message of a large batch included; an entry that
        exceeds it by its metadata is opaque.

        Raises CorruptMessage, or UnreadableMessage if the metadata is larger.
        """
        metadata, payload, self._broker_time_ms = _split(entry, verify=True, metadata_size_max=metadata_size_max)
        is_batch = metadata.HasField("num_messages_in_batch")
        self._metadata_size_max = metadata_size_max
        self._metadata, self._payload = metadata, payload
        self._metadata_size = len(entry) - len(payload)
        self._compression = compression = metadata.compression
        count = metadata.num_messages_in_batch if is_batch else 1
        reason: OpaqueReason | None = None
        if metadata.encryption_keys:
            reason = OpaqueReason.ENCRYPTED
        elif metadata.num_chunks_from_msg > 1:
            reason = OpaqueReason.CHUNK
        elif compression or is_batch:
            if compression not in NAMES:
                reason = OpaqueReason.COMPRESSION
            elif not 0 < count <= BATCH_COUNT_MAX:
                raise CorruptMessage("impossible number of messages in a batch", count=count)
            elif (compression or count > SMALL_COUNT_MAX) and self._limited_size(count, count) > size_max:
                reason = OpaqueReason.SIZE
        self.opaque_reason: Final = reason
        """Reason why the entry is one OpaqueMessage instead of its messages; None: it can be decoded."""
        self.is_batch: Final = is_batch and reason is None
        self.count: Final[int] = count if reason is None else 1
        """Number of messages in the batch as its metadata claims it; 1: the entry is opaque, or not a batch."""

    @property
    def is_opaque(self) -> bool:
        """Whether the entry is not decoded, and has one message."""
        return self.opaque_reason is not None

    @property
    def messages_count(self) -> int:
        """Number of messages by the metadata, also of an opaque entry; 1: it is not a batch. It may be any number."""
        return int(self._metadata.num_messages_in_batch)

    @property
    def is_marker(self) -> bool:
        """Whether a broker wrote the entry for brokers; such entries are never delivered."""
        return self._metadata.HasField("marker_type")

    @property
    def tags(self) -> frozenset[str]:
        """Tags of the entry, as in EntryHead."""
        return _tags_of_entry(self._metadata)

    @property
    def publish_time_ms(self) -> int:
        """Time at which a broker stored the entry, if recorded, else its publish time. In ms since 1970."""
        return self._broker_time_ms or int(self._metadata.publish_time)

    @property
    def deliver_at_ms(self) -> int:
        """Time before which the entry is not delivered, in ms since 1970; 0 or less: it is not delayed."""
        return int(self._metadata.deliver_at_time)

    @property
    def key_bytes(self) -> bytes:
        """Key by which Key_Shared dispatches the entry: its ordering key, else its key, else one of its own.

        Binary keys are decoded; if one is not base64, the key is NONE_KEY. An empty key counts as a key. If there is
        none, the key is `<producer name>-<sequence id>`, the id as a signed number. A batch has the key of its first
        message. Source: Pulsar Commands.resolveStickyKey.
        """
        metadata = self._metadata
        if metadata.HasField("ordering_key"):
            return metadata.ordering_key
        try:
            key = _key_of(metadata)
        except CorruptMessage:
            return NONE_KEY
        if key is None:
            return _key_of_its_own(_text(metadata.producer_name), metadata.sequence_id)
        return key if isinstance(key, bytes) else key.encode()

    @property
    def is_small(self) -> bool:
        """Whether the entry is decoded in a few milliseconds. Larger ones should not be decoded on an event loop."""
        if self.count > SMALL_COUNT_MAX:
            return False
        if not self._compression or max(self._metadata.uncompressed_size, len(self._payload)) <= SMALL_SIZE_MAX:
            return True
        return self.opaque_reason is not None

    def claimed_size(self, count_max: int | None = None) -> int:
        """Return the bytes that the decoded entry takes in memory by its metadata, without PROPERTY_SIZE in batches.

        `count_max`: number of messages that are decoded; None: all.
        """
        count = self.count if count_max is None else min(self.count, count_max)
        if self.opaque_reason is not None:
            return len(self._payload) + MESSAGE_SIZE + self._opaque_metadata_size
        size = self._plain_size + MESSAGE_SIZE * count
        return size if self.is_batch else size + self._metadata_size + PROPERTY_SIZE * len(self._metadata.properties)

    def decode(
        self, *, size_max: int = UNCOMPRESSED_SIZE_MAX, first: int = 0, count_max: int | None = None
    ) -> list[Message]:
        """Return the messages, in order, without those removed by compaction; none for a broker's marker.

        An opaque entry has one OpaqueMessage. `first` and `count_max`: index and number of the messages of a batch to
        return; None: all that follow. What follows those is not read. `size_max`: maximum bytes of the decoded entry,
        MESSAGE_SIZE for each of these messages of a large batch included. No more memory is used, whatever sizes the
        metadata claims. Raises CorruptMessage, or UnreadableMessage (too large).
        """
        metadata, payload = self._metadata, self._payload
        if metadata.HasField("marker_type"):
            return []
        if self.opaque_reason is not None:
            return [self._opaque_message(self.opaque_reason, size_max)]
        compression = self._compression
        plain: bytes | bytearray | None = None
        if self.is_batch or compression:
            part = self._part(first, count_max)
            size = self._limited_size(len(part), self.count)
            if size > size_max:  # before it is decompressed
                raise UnreadableMessage("the entry is too large once decoded", size=size, size_max=size_max)
            if compression:
                plain = _decompressed(compression, payload, metadata.uncompressed_size)
        if self.is_batch:
            return _decode_batch(
                metadata,
                payload if plain is None else memoryview(plain),
                part,
                properties_size_max=size_max - size,
                metadata_size_max=self._metadata_size_max,
            )
        found = metadata.properties
        if PROPERTY_SIZE * self._metadata_size > size_max and PROPERTY_SIZE * len(found) > size_max:
            raise UnreadableMessage("the message has too many properties", size_max=size_max)
        try:
            producer_name = metadata.producer_name + ""
            properties = {p.key + "": p.value + "" for p in found} if found else {}
        except TypeError:  # bytes, which are not UTF-8, cannot be added: the cheapest check of the types
            producer_name = _text(metadata.producer_name)
            properties = _properties_of(found)
        return [
            Message(
                payload=bytes(payload if plain is None else plain),
                batch_index=-1,
                batch_size=1,
                producer_name=producer_name,
                sequence_id=metadata.sequence_id,
                publish_time_ms=metadata.publish_time,
                key=_key_of(metadata),
                ordering_key=metadata.ordering_key if metadata.HasField("ordering_key") else None,
                properties=properties,
                event_time_ms=metadata.event_time,
                deliver_at_ms=metadata.deliver_at_time or None,
                null_value=metadata.null_value,
                metadata_size=self._metadata_size + PROPERTY_SIZE * len(properties),
            )
        ]

    @property
    def _opaque_metadata_size(self) -> int:
        metadata = self._metadata
        count = len(metadata.properties)
        for key in metadata.encryption_keys:
            count += 1 + len(key.metadata)
        return self._metadata_size + PROPERTY_SIZE * count

    def _opaque_message(self, reason: OpaqueReason, size_max: int) -> OpaqueMessage:
        metadata = self._metadata
        metadata_size = self._opaque_metadata_size
        if metadata_size - self._metadata_size > size_max:
            raise UnreadableMessage("the message has too many properties", size_max=size_max)
        return OpaqueMessage(
            payload=bytes(self._payload),
            batch_index=-1,
            batch_size=1,
            producer_name=_text(metadata.producer_name),
            sequence_id=metadata.sequence_id,
            publish_time_ms=metadata.publish_time,
            key=_key_of(metadata),
            ordering_key=metadata.ordering_key if metadata.HasField("ordering_key") else None,
            properties=_properties_of(metadata.properties),
            event_time_ms=metadata.event_time,
            deliver_at_ms=metadata.deliver_at_time or None,
            null_value=metadata.null_value,
            metadata_size=metadata_size,
            encoding=_encoding_of(metadata, reason),
        )

    def _part(self, first: int, count_max: int | None) -> range:
        count = self.count
        return range(first, count if count_max is None else min(first + count_max, count))

    @property
    def _plain_size(self) -> int:
        """Bytes of the payload once it is decompressed."""
        return self._metadata.uncompressed_size if self._compression else len(self._payload)

    def _limited_size(self, count: int, of_count: int) -> int:
        """Return the bytes of `count` messages that a limit applies to: MESSAGE_SIZE counts in large batches only."""
        return self._plain_size + (MESSAGE_SIZE * count if of_count > SMALL_COUNT_MAX else 0)


def decode_entry(entry: bytes, *, size_max: int = UNCOMPRESSED_SIZE_MAX) -> list[Message]:
    """Decode all messages of an entry: `PackedEntry.decode`."""
    return PackedEntry(entry, size_max=size_max).decode(size_max=size_max)


def read_raw(entry: bytes, *, size_max: int = UNCOMPRESSED_SIZE_MAX) -> tuple[MessageMetadata, bytes]:
    """Return the metadata and the payload, decompressed unless it is encrypted; of a batch, that of the whole batch.

    `size_max`: maximum bytes of the payload. Raises CorruptMessage, or UnreadableMessage if the payload is larger or
    has an unknown compression.
    """
    metadata, payload, _ = _split(entry, verify=True)
    compression, size = metadata.compression, metadata.uncompressed_size
    if not compression or metadata.encryption_keys:
        return metadata, bytes(payload)
    if compression not in NAMES or size > size_max:
        raise UnreadableMessage(
            "the payload cannot be decompressed here", compression=name_of(compression), size=size, size_max=size_max
        )
    return metadata, bytes(_decompressed(compression, payload, size))


def read_head(entry: bytes) -> EntryHead:
    """Read the head without verifying the checksum or reading the payload. Raises CorruptMessage."""
    metadata, _, broker_time_ms = _split(entry, verify=False)
    is_batch = metadata.HasField("num_messages_in_batch")
    return EntryHead(
        messages_count=metadata.num_messages_in_batch,
        is_batch=is_batch,
        is_marker=metadata.HasField("marker_type"),
        producer_name=_text(metadata.producer_name),
        sequence_id=metadata.sequence_id,
        publish_time_ms=broker_time_ms or metadata.publish_time,
        key=_key_of(metadata),
        ordering_key=metadata.ordering_key if metadata.HasField("ordering_key") else None,
        deliver_at_ms=metadata.deliver_at_time if metadata.HasField("deliver_at_time") else None,
        tags=_tags_of_entry(metadata),
    )


def read_origin(entry: bytes) -> EntryOrigin:
    """Read who produced an entry, without verifying the checksum or reading the payload. Raises CorruptMessage."""
    metadata, _, broker_time_ms = _split(entry, verify=False)
    first = metadata.sequence_id
    chunks = metadata.num_chunks_from_msg
    return EntryOrigin(
        producer_name=_text(metadata.producer_name),
        first_sequence_id=first,
        last_sequence_id=max(first, metadata.highest_sequence_id),
        messages_count=metadata.num_messages_in_batch,
        publish_time_ms=broker_time_ms or metadata.publish_time,
        is_marker=metadata.HasField("marker_type"),
        is_partial=chunks > 1 and metadata.chunk_id < chunks - 1,
        mark=metadata.request_mark if metadata.HasField("request_mark") else None,
    )


def publish_time_ms(entry: bytes) -> int:
    """Return the time at which a broker stored the entry, if recorded, else its publish time. In ms since 1970.

    Raises CorruptMessage.
    """
    metadata, _, broker_time_ms = _split(entry, verify=False)
    return broker_time_ms or int(metadata.publish_time)


def split_entry(entry: bytes) -> tuple[MessageMetadata, memoryview]:
    """Return the metadata of an entry whose checksum was verified, and its payload as stored: a view of `entry`.

    Raises CorruptMessage.
    """
    metadata, payload, _ = _split(entry, verify=False)
    return metadata, payload


def frame_entry(metadata: MessageMetadata, payload: bytes) -> bytes:
    """Return the entry with this metadata and payload, as stored. Raises TooLarge."""
    return _frame(metadata, [payload])


def _set_properties_and_key(metadata: MessageMetadata, message: OutgoingMessage) -> None:
    for name, value in message.properties.items():
        metadata.properties.add(key=name, value=value)
    _set_key(metadata, message)


def _set_key(target: MessageMetadata | SingleMessageMetadata, message: OutgoingMessage) -> None:
    if isinstance(message.key, bytes):
        target.partition_key = b64encode(message.key).decode("ascii")
        target.partition_key_b64_encoded = True
    elif message.key is not None:
        target.partition_key = message.key
    if message.ordering_key is not None:
        target.ordering_key = message.ordering_key


def _key_of(source: MessageMetadata | SingleMessageMetadata) -> str | bytes | None:
    key = source.partition_key
    if not key and not source.HasField("partition_key"):  # HasField takes longer than the field
        return None
    if not source.partition_key_b64_encoded:
        return key  # bytes, if it is not UTF-8
    try:
        return b64decode(key + "=" * (-len(key) % 4), validate=True)  # Java's decoder takes keys without padding, too
    except (binascii.Error, TypeError, ValueError) as error:
        raise CorruptMessage("the binary key is not base64") from error


def _text(value: str | bytes) -> str:
    """Return a protobuf string, of which protobuf returns the bytes if they are not UTF-8."""
    return value if isinstance(value, str) else value.decode(errors="replace")


def _properties_of(found: Iterable[KeyValue]) -> dict[str, str]:
    return {_text(p.key): _text(p.value) for p in found}


def _tags_of_entry(metadata: MessageMetadata) -> frozenset[str]:
    return frozenset(_text(p.key) for p in metadata.properties if p.value == TAG_VALUE)


def _encoding_of(metadata: MessageMetadata, reason: OpaqueReason) -> Encoding:
    compression = metadata.compression
    chunk = encryption = None
    if metadata.num_chunks_from_msg > 1:
        chunk = Chunk(
            uuid=_text(metadata.uuid),
            index=metadata.chunk_id,
            count=metadata.num_chunks_from_msg,
            total_size=metadata.total_chunk_msg_size,
        )
    if metadata.encryption_keys:
        encryption = Encryption(
            algorithm=_text(metadata.encryption_algo) if metadata.HasField("encryption_algo") else None,
            param=metadata.encryption_param,
            keys=tuple(
                EncryptionKey(name=_text(key.key), value=key.value, metadata=_properties_of(key.metadata))
                for key in metadata.encryption_keys
            ),
        )
    return Encoding(
        reason=reason,
        batch_size=metadata.num_messages_in_batch if metadata.HasField("num_messages_in_batch") else None,
        compression=name_of(compression) if compression else None,
        uncompressed_size=metadata.uncompressed_size if compression else None,
        chunk=chunk,
        encryption=encryption,
    )


def _key_of_its_own(producer_name: str, sequence_id: int) -> bytes:
    signed = sequence_id - 2**64 if sequence_id >= 2**63 else sequence_id
    return f"{producer_name}-{signed}".encode()


def _frame(metadata: MessageMetadata, payload: list[bytes]) -> bytes:
    encoded = metadata.SerializeToString()
    parts = [b"", _SIZE.pack(len(encoded)), encoded, *payload]
    if len(payload) > 1:  # many small parts: one copy is cheaper than a checksum call for each
        parts[1:] = [b"".join(parts)]
    checksum = 0
    for part in parts:
        checksum = crc32c.crc32c(part, checksum)
    parts[0] = _MAGIC_AND_U32.pack(_MAGIC_CHECKSUM, checksum)
    entry = b"".join(parts)
    if len(entry) > ENTRY_SIZE_MAX:
        raise TooLarge("entry is too large", size=len(entry), size_max=ENTRY_SIZE_MAX)
    return entry


def _split(
    entry: bytes, *, verify: bool, metadata_size_max: int = UNCOMPRESSED_SIZE_MAX
) -> tuple[MessageMetadata, memoryview, int]:
    """Return the metadata, the payload (a view of `entry`) and the broker's time stamp (0: none)."""
    view = memoryview(entry)
    offset = 0
    broker_time_ms = 0
    try:
        magic, number, size = _HEAD.unpack_from(entry)  # no entry is shorter: the metadata takes six bytes at least
        if magic == _MAGIC_BROKER_METADATA:
            offset = _MAGIC_AND_U32.size + number
            broker = BrokerEntryMetadata.FromString(_slice(view, _MAGIC_AND_U32.size, number))
            broker_time_ms = broker.broker_timestamp
            magic, number, size = _HEAD.unpack_from(entry, offset)
        if magic == _MAGIC_CHECKSUM:
            if verify and crc32c.crc32c(view[offset + _MAGIC_AND_U32.size :]) != number:
                raise CorruptMessage("message checksum mismatch", size=len(entry))
            offset += _HEAD.size
        else:
            (size,) = _SIZE.unpack_from(entry, offset)
            offset += _SIZE.size
        if metadata_size_max < size <= len(entry) - offset:
            raise UnreadableMessage("the metadata of the message is too large", size=size, size_max=metadata_size_max)
        end = offset + size
        part = entry[offset:end]
        if len(part) != size:
            raise CorruptMessage("entry is cut short", size=len(entry), wanted=end)
        metadata = MessageMetadata.FromString(part)
    except struct.error as error:
        raise CorruptMessage("entry is cut short", size=len(entry)) from error
    except DecodeError as error:
        raise CorruptMessage("entry metadata cannot be read", size=len(entry)) from error
    return metadata, view[end:], broker_time_ms


def _slice(view: memoryview, offset: int, size: int) -> bytes:
    part = bytes(view[offset : offset + size])
    if len(part) != size:
        raise CorruptMessage("entry is cut short", size=len(view), wanted=offset + size)
    return part


def _decode_batch(
    metadata: MessageMetadata, payload: memoryview, part: range, *, properties_size_max: int, metadata_size_max: int
) -> list[Message]:
    """Return the messages of a batch whose indexes are in `part`."""
    room = properties_size_max
    count = metadata.num_messages_in_batch
    producer_name = _text(metadata.producer_name)
    batch_time_ms = metadata.publish_time
    first_sequence_id = metadata.sequence_id
    deliver_at_ms = metadata.deliver_at_time or None
    messages: list[Message] = []
    offset = 0
    for index in range(part.stop):
        try:
            (size,) = _SIZE.unpack_from(payload, offset)
            offset += _SIZE.size
            if metadata_size_max < size <= len(payload) - offset:
                raise UnreadableMessage(
                    "the metadata of a message in a batch is too large",
                    index=index,
                    size=size,
                    size_max=metadata_size_max,
                )
            single = SingleMessageMetadata.FromString(_slice(payload, offset, size))
        except struct.error as error:
            raise CorruptMessage("batch is cut short", index=index, count=count) from error
        except DecodeError as error:
            raise CorruptMessage("batch metadata cannot be read", index=index, count=count) from error
        offset += size
        payload_size = single.payload_size
        if payload_size < 0:
            raise CorruptMessage("negative size in a batch", index=index, count=count)
        if index < part.start:
            offset += payload_size
            continue
        body = _slice(payload, offset, payload_size)
        offset += payload_size
        properties = single.properties
        properties_size = PROPERTY_SIZE * len(properties)
        room -= properties_size
        if room < 0:
            raise UnreadableMessage("the properties of a batch are too many", index=index, size_max=properties_size_max)
        if single.compacted_out:
            continue
        try:
            texts = {p.key + "": p.value + "" for p in properties} if properties_size else {}
        except TypeError:  # see PackedEntry.decode
            texts = _properties_of(properties)
        sequence_id = single.sequence_id
        if not sequence_id and not single.HasField("sequence_id"):  # HasField takes longer than the field
            sequence_id = first_sequence_id + index
        messages.append(
            Message(
                payload=body,
                batch_index=index,
                batch_size=count,
                producer_name=producer_name,
                sequence_id=sequence_id,
                publish_time_ms=batch_time_ms,
                key=_key_of(single),
                ordering_key=single.ordering_key if single.HasField("ordering_key") else None,
                properties=texts,
                event_time_ms=single.event_time,
                deliver_at_ms=deliver_at_ms,
                null_value=single.null_value,
                metadata_size=size + properties_size,
            )
        )
    if part.stop == count and offset != len(payload):
        raise CorruptMessage("bytes after the last message of a batch", count=count, rest=len(payload) - offset)
    return messages


def _decompressed(compression: int, payload: memoryview, size: int) -> bytes | bytearray:
    plain = decompress(compression, payload, size)
    if plain is None:
        raise CorruptMessage(
            "the compressed payload does not match its metadata",
            compression=name_of(compression),
            size=len(payload),
            uncompressed_size=size,
        )
    return plain
