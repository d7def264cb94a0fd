"""Entries: golden bytes, damage, and entries of other producers."""

import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import crc32c
import pytest
from bindery_core.errors import Corrupt, TooLarge
from bindery_pulsar import compression
from bindery_pulsar.entry_size import ENTRY_SIZE_MAX
from bindery_pulsar.message_codec import (
    MESSAGE_SIZE,
    NONE_KEY,
    PAYLOAD_SIZE_MAX,
    PROPERTY_SIZE,
    SMALL_COUNT_MAX,
    SMALL_SIZE_MAX,
    UNCOMPRESSED_SIZE_MAX,
    CorruptMessage,
    Message,
    OpaqueMessage,
    OutgoingMessage,
    PackedEntry,
    UnreadableMessage,
    decode_entry,
    encode_batch,
    encode_message,
    publish_time_ms,
    read_head,
)
from bindery_pulsar.message_encoding import Chunk, Encoding, Encryption, EncryptionKey, OpaqueReason
from bindery_pulsar.pulsar_messages_pb2 import (
    ZLIB,
    BrokerEntryMetadata,
    MessageMetadata,
    SingleMessageMetadata,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

GOLDEN = Path(__file__).parent / "golden"

SINGLE = OutgoingMessage(
    payload=b"hello",
    key="k\u00fc",
    ordering_key=b"\x00\xff",
    properties={"path": "a/b", "red": "TAGS"},
    event_time_ms=1_700_000_000_001,
    deliver_at_ms=1_700_000_100_000,
)
BATCH = [
    OutgoingMessage(payload=b"one", key=b"\x00\x01", properties={"n": "1", "red": "TAGS"}),
    OutgoingMessage(payload=b"", key=b"\x00\x01", null_value=True, properties={"red": "TAGS"}),
    OutgoingMessage(payload=b"three", key=b"\x00\x01", event_time_ms=5, properties={"red": "TAGS"}),
]


def golden_entries() -> dict[str, bytes]:
    return {
        "message_plain.bin": encode_message(
            OutgoingMessage(payload=b"hello"), producer_name="p-1", publish_time_ms=1_700_000_000_000, sequence_id=0
        ),
        "message_full.bin": encode_message(
            SINGLE, producer_name="p-1", publish_time_ms=1_700_000_000_000, sequence_id=7
        ),
        "message_batch.bin": encode_batch(
            BATCH, producer_name="p-1", publish_time_ms=1_700_000_000_000, sequence_ids=[7, 8, 9]
        ),
    }


@pytest.mark.parametrize("name", sorted(golden_entries()))
def test_messages_are_encoded_to_the_golden_bytes(name: str) -> None:
    assert golden_entries()[name] == (GOLDEN / name).read_bytes()


def test_the_plain_golden_entry_matches_the_specification() -> None:
    """Decoded by hand: magic, CRC32C, sizes, field numbers."""
    entry = (GOLDEN / "message_plain.bin").read_bytes()
    magic, checksum, metadata_size = struct.unpack_from(">HII", entry)
    assert magic == 0x0E01
    assert checksum == crc32c.crc32c(entry[6:])
    metadata = entry[10 : 10 + metadata_size]
    # 1 producer name, 2 sequence id, 3 publish time (varint), 9 uncompressed size
    assert metadata == b"\x0a\x03p-1" + b"\x10\x00" + b"\x18\x80\xd0\x95\xff\xbc\x31" + b"\x48\x05"
    assert entry[10 + metadata_size :] == b"hello"


def test_the_golden_batch_matches_the_specification() -> None:
    entry = (GOLDEN / "message_batch.bin").read_bytes()
    (size,) = struct.unpack_from(">I", entry, 6)
    metadata = MessageMetadata.FromString(entry[10 : 10 + size])
    assert metadata.num_messages_in_batch == 3
    assert (metadata.sequence_id, metadata.highest_sequence_id) == (7, 9)
    assert (metadata.partition_key, metadata.partition_key_b64_encoded) == ("AAE=", True)
    payload = entry[10 + size :]
    assert metadata.uncompressed_size == len(payload)
    (size,) = struct.unpack_from(">I", payload)
    single = SingleMessageMetadata.FromString(payload[4 : 4 + size])
    assert (single.payload_size, single.sequence_id) == (3, 7)
    assert payload[4 + size :].startswith(b"one")


def test_an_encoded_message_is_decoded_unchanged() -> None:
    (message,) = decode_entry((GOLDEN / "message_full.bin").read_bytes())
    assert (message.payload, message.key, message.ordering_key) == (b"hello", "kü", b"\x00\xff")
    assert message.properties == {"path": "a/b", "red": "TAGS"}
    assert (message.event_time_ms, message.deliver_at_ms) == (1_700_000_000_001, 1_700_000_100_000)
    assert (message.producer_name, message.sequence_id, message.publish_time_ms) == ("p-1", 7, 1_700_000_000_000)
    assert (message.batch_index, message.batch_size, message.null_value) == (-1, 1, False)
    assert message.tags == {"red"}


def test_a_batch_is_decoded_in_order() -> None:
    messages = decode_entry((GOLDEN / "message_batch.bin").read_bytes())
    assert [m.payload for m in messages] == [b"one", b"", b"three"]
    assert [m.batch_index for m in messages] == [0, 1, 2]
    assert [m.sequence_id for m in messages] == [7, 8, 9]
    assert [m.null_value for m in messages] == [False, True, False]
    assert {m.key for m in messages} == {b"\x00\x01"}
    assert {m.batch_size for m in messages} == {3}
    head = read_head((GOLDEN / "message_batch.bin").read_bytes())
    assert (head.messages_count, head.is_batch, head.key, head.tags) == (3, True, b"\x00\x01", {"red"})
    assert not head.is_marker


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.builds(
            OutgoingMessage,
            payload=st.binary(max_size=50),
            key=st.one_of(st.none(), st.text(max_size=5), st.binary(max_size=5)),
            ordering_key=st.one_of(st.none(), st.binary(max_size=5)),
            properties=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
            event_time_ms=st.integers(0, 2**63 - 1),
            null_value=st.booleans(),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_every_encoded_message_is_decoded(messages: list[OutgoingMessage]) -> None:
    entry = encode_batch(messages, producer_name="p", publish_time_ms=1, sequence_ids=range(len(messages)))
    single = encode_message(messages[0], producer_name="p", publish_time_ms=1, sequence_id=0)
    for found, sent in [*zip(decode_entry(entry), messages, strict=True), (decode_entry(single)[0], messages[0])]:
        for name in ("payload", "key", "ordering_key", "properties", "event_time_ms", "null_value"):
            assert getattr(found, name) == getattr(sent, name), name


@pytest.mark.parametrize("name", sorted(golden_entries()))
def test_every_flipped_bit_and_every_truncation_is_detected(name: str) -> None:
    entry = (GOLDEN / name).read_bytes()
    for size in range(len(entry)):
        with pytest.raises(Corrupt):
            decode_entry(entry[:size])
    for index in range(2, len(entry)):
        for bit in range(8):
            damaged = bytearray(entry)
            damaged[index] ^= 1 << bit
            with pytest.raises(Corrupt):
                decode_entry(bytes(damaged))


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_are_decoded_or_refused(data: bytes, framed: bool) -> None:
    entry = struct.pack(">HI", 0x0E01, crc32c.crc32c(data)) + data if framed else data
    for read in (decode_entry, read_head, publish_time_ms):
        with suppress(Corrupt, UnreadableMessage):
            read(entry)


@pytest.mark.parametrize("path", sorted((GOLDEN / "pulsar").glob("*.bin")), ids=lambda path: path.stem)
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_damage_that_no_checksum_shows_is_decoded_or_refused(path: Path, data: st.DataObject) -> None:
    entry = bytearray(path.read_bytes()[6:])  # without magic and checksum
    size = int.from_bytes(entry[:4], "big")
    for _ in range(data.draw(st.integers(1, 3))):
        last = data.draw(st.sampled_from([size + 3, min(size + 20, len(entry) - 1), len(entry) - 1]))
        entry[data.draw(st.integers(4, last))] = data.draw(st.integers(0, 255))
    with suppress(Corrupt, UnreadableMessage):
        packed = PackedEntry(bytes(entry), size_max=1_000_000)
        assert isinstance(packed.key_bytes, bytes)
        assert isinstance(packed.deliver_at_ms + packed.publish_time_ms + packed.messages_count, int)
        for message in packed.decode(size_max=1_000_000):
            assert len(message.payload) <= 1_000_000
            assert {type(text) for pair in message.properties.items() for text in pair} <= {str}
            assert isinstance(message.key_bytes, bytes)


def raw(payload: bytes = b"x", *, checksum: bool = True, **fields: object) -> bytes:
    """Return an entry as another producer may write it."""
    metadata = MessageMetadata(
        **{"producer_name": "q", "sequence_id": 1, "publish_time": 5} | fields
    ).SerializeToString()
    body = struct.pack(">I", len(metadata)) + metadata + payload
    return struct.pack(">HI", 0x0E01, crc32c.crc32c(body)) + body if checksum else body


def singles(*fields: dict[str, object]) -> bytes:
    parts = []
    for item in fields:
        head = SingleMessageMetadata(**({"payload_size": 1} | item)).SerializeToString()
        parts.append(struct.pack(">I", len(head)) + head + b"x")
    return b"".join(parts)


def test_an_entry_without_a_checksum_is_read() -> None:
    assert decode_entry(raw(b"hello", checksum=False))[0].payload == b"hello"


def test_broker_metadata_is_skipped_and_its_time_is_the_publish_time() -> None:
    note = BrokerEntryMetadata(broker_timestamp=99, index=3).SerializeToString()
    entry = struct.pack(">HI", 0x0E02, len(note)) + note + raw(b"hello")
    assert decode_entry(entry)[0].payload == b"hello"
    assert publish_time_ms(entry) == read_head(entry).publish_time_ms == 99
    assert publish_time_ms(raw()) == 5


def test_a_batch_of_one_is_a_batch() -> None:
    (message,) = decode_entry(raw(singles({}), num_messages_in_batch=1))
    assert (message.batch_index, message.batch_size, message.sequence_id) == (0, 1, 1)


def test_compacted_messages_are_left_out_and_the_others_keep_their_index() -> None:
    messages = decode_entry(raw(singles({}, {"compacted_out": True}, {}), num_messages_in_batch=3))
    assert [m.batch_index for m in messages] == [0, 2]


def test_a_marker_holds_no_message() -> None:
    assert decode_entry(raw(marker_type=10)) == []
    assert read_head(raw(marker_type=10)).is_marker


@pytest.mark.parametrize("batch", [False, True])
def test_zlib_payloads_are_decoded(batch: bool) -> None:
    plain = singles({}, {}) if batch else b"hello" * 100
    fields = {"num_messages_in_batch": 2} if batch else {}
    entry = raw(zlib.compress(plain), compression=ZLIB, uncompressed_size=len(plain), **fields)
    assert b"".join(m.payload for m in decode_entry(entry)) == (b"xx" if batch else plain)


@pytest.mark.parametrize("size", [0, 499, 501])
def test_a_wrong_uncompressed_size_is_corrupt(size: int) -> None:
    with pytest.raises(CorruptMessage):
        decode_entry(raw(zlib.compress(b"hello" * 100), compression=ZLIB, uncompressed_size=size))


def test_an_incomplete_compressed_payload_is_corrupt() -> None:
    with pytest.raises(CorruptMessage):
        decode_entry(raw(zlib.compress(b"hello" * 100)[:-6], compression=ZLIB, uncompressed_size=500))
    with pytest.raises(CorruptMessage):
        decode_entry(raw(b"no zlib", compression=ZLIB, uncompressed_size=500))


def opaque(entry: bytes, *, size_max: int = UNCOMPRESSED_SIZE_MAX) -> OpaqueMessage:
    (message,) = decode_entry(entry, size_max=size_max)
    assert isinstance(message, OpaqueMessage)
    return message


def test_a_payload_that_is_too_large_once_uncompressed_is_not_decompressed() -> None:
    message = opaque(raw(b"z", compression=ZLIB, uncompressed_size=2**31))
    assert message.payload == b"z"
    assert message.encoding == Encoding(reason=OpaqueReason.SIZE, compression="ZLIB", uncompressed_size=2**31)


class CountingZlib:
    """Records the bytes that decompression produced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.produced = 0
        make = zlib.decompressobj
        monkeypatch.setattr(compression.zlib, "decompressobj", lambda: self._watch(make()))

    def _watch(self, found: Any) -> Any:
        counting = self

        class Watched:
            @property
            def eof(self) -> bool:
                return bool(found.eof)

            def decompress(self, data: bytes, size_max: int) -> bytes:
                plain: bytes = found.decompress(data, size_max)
                counting.produced += len(plain)
                return plain

        return Watched()


@pytest.mark.parametrize("claim", [100, 1_000])
def test_a_bomb_stops_at_its_claim(monkeypatch: pytest.MonkeyPatch, claim: int) -> None:
    counting = CountingZlib(monkeypatch)
    bomb = raw(zlib.compress(bytes(50 * 2**20)), compression=ZLIB, uncompressed_size=claim)
    assert len(bomb) < 100_000
    with pytest.raises(CorruptMessage):
        decode_entry(bomb, size_max=1_000)
    assert counting.produced == claim + 1


def test_a_claim_above_the_limit_is_not_decompressed_even_if_the_payload_is_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counting = CountingZlib(monkeypatch)
    entry = raw(zlib.compress(b"a"), compression=ZLIB, uncompressed_size=1_001)
    assert opaque(entry, size_max=1_000).encoding.reason is OpaqueReason.SIZE
    assert counting.produced == 0
    with pytest.raises(UnreadableMessage, match="too large once decoded"):
        PackedEntry(entry).decode(size_max=1_000)  # a lower limit for this time only


def test_the_number_of_messages_counts_towards_the_limit() -> None:
    count = SMALL_COUNT_MAX + 1
    entry = raw(singles(*[{}] * count), num_messages_in_batch=count)
    assert len(decode_entry(entry)) == count
    message = opaque(entry, size_max=count * MESSAGE_SIZE)
    assert message.encoding == Encoding(reason=OpaqueReason.SIZE, batch_size=count)
    assert message.payload == singles(*[{}] * count)


def test_the_number_of_properties_counts_towards_the_limit() -> None:
    properties = [{"key": str(number), "value": ""} for number in range(11)]
    many = raw(properties=properties)
    batch = raw(singles({}, {"properties": properties}), num_messages_in_batch=2)
    for entry in (many, batch):
        decode_entry(entry, size_max=2_000)
        with pytest.raises(UnreadableMessage, match="properties"):
            decode_entry(entry, size_max=1_099)


@pytest.mark.parametrize(
    ("fields", "payload", "is_small"),
    [
        ({}, bytes(2**20), True),
        ({"compression": ZLIB, "uncompressed_size": SMALL_SIZE_MAX}, b"a", True),
        ({"compression": ZLIB, "uncompressed_size": SMALL_SIZE_MAX + 1}, b"a", False),
        ({"compression": ZLIB, "uncompressed_size": 1}, bytes(SMALL_SIZE_MAX + 1), False),
        ({"num_messages_in_batch": SMALL_COUNT_MAX}, bytes(2**20), True),
        ({"num_messages_in_batch": SMALL_COUNT_MAX + 1}, b"", False),
    ],
)
def test_entries_that_take_long_to_decode_are_recognized(
    fields: dict[str, Any], payload: bytes, is_small: bool
) -> None:
    assert PackedEntry(raw(payload, **fields)).is_small is is_small


def test_a_decoded_message_has_the_size_of_its_payload_and_metadata() -> None:
    (alone,) = decode_entry(raw(b"abc"))
    assert 3 < alone.size < 100
    (wide,) = decode_entry(raw(b"abc", properties=[{"key": "k", "value": "v" * 1_000}]))
    assert wide.size >= alone.size + 1_000 + PROPERTY_SIZE
    _, second = decode_entry(raw(singles({}, {"properties": [{"key": "k", "value": "v"}]}), num_messages_in_batch=2))
    assert second.size > PROPERTY_SIZE


def test_an_unknown_compression_is_not_decompressed() -> None:
    """Protobuf would read an unknown value of an enum as NONE, and the compressed bytes would be the payload."""
    for number in (5, -1):
        message = opaque(raw(compression=number, uncompressed_size=1))
        assert message.payload == b"x"
        assert message.encoding == Encoding(
            reason=OpaqueReason.COMPRESSION, compression=str(number), uncompressed_size=1
        )


ENCRYPTED: dict[str, Any] = {
    "encryption_keys": [
        {"key": "k", "value": b"v", "metadata": [{"key": "a", "value": "b"}]},
        {"key": "l", "value": b""},
    ],
    "encryption_param": b"iv",
}
CHUNK: dict[str, Any] = {"uuid": "q-1", "num_chunks_from_msg": 3, "chunk_id": 1, "total_chunk_msg_size": 7}


def test_an_encrypted_batch_is_one_message() -> None:
    entry = raw(
        b"secret",
        **ENCRYPTED,
        num_messages_in_batch=5,
        compression=ZLIB,
        uncompressed_size=50,
        partition_key="key",
        properties=[{"key": "red", "value": "TAGS"}],
        event_time=8,
        deliver_at_time=9,
    )
    packed = PackedEntry(entry)
    assert (packed.is_opaque, packed.is_batch, packed.count, packed.messages_count) == (True, False, 1, 5)
    assert (packed.key_bytes, packed.tags, packed.deliver_at_ms) == (b"key", {"red"}, 9)
    (message,) = packed.decode(first=0, count_max=1)
    assert isinstance(message, OpaqueMessage)
    assert (message.payload, message.batch_index, message.batch_size) == (b"secret", -1, 1)
    assert (message.producer_name, message.sequence_id, message.publish_time_ms) == ("q", 1, 5)
    assert (message.key, message.tags, message.event_time_ms, message.deliver_at_ms) == ("key", {"red"}, 8, 9)
    assert message.size + MESSAGE_SIZE == packed.claimed_size()
    assert message.metadata_size > 4 * PROPERTY_SIZE
    assert message.encoding == Encoding(
        reason=OpaqueReason.ENCRYPTED,
        batch_size=5,
        compression="ZLIB",
        uncompressed_size=50,
        encryption=Encryption(
            algorithm=None,
            param=b"iv",
            keys=(
                EncryptionKey(name="k", value=b"v", metadata={"a": "b"}),
                EncryptionKey(name="l", value=b"", metadata={}),
            ),
        ),
    )


def test_a_chunk_is_one_message() -> None:
    message = opaque(raw(b"part", **CHUNK))
    assert message.payload == b"part"
    chunk = Chunk(uuid="q-1", index=1, count=3, total_size=7)
    assert message.encoding == Encoding(reason=OpaqueReason.CHUNK, chunk=chunk)
    both = opaque(raw(b"part", **CHUNK, **ENCRYPTED, encryption_algo="AES"))
    assert (both.encoding.reason, both.encoding.chunk) == (OpaqueReason.ENCRYPTED, chunk)
    assert both.encoding.encryption is not None
    assert both.encoding.encryption.algorithm == "AES"
    (whole,) = decode_entry(raw(b"all", **CHUNK | {"num_chunks_from_msg": 1}))
    assert type(whole) is Message


def test_entries_that_are_not_decoded_take_no_time_and_no_more_than_their_bytes() -> None:
    entry = PackedEntry(raw(bytes(2**20), **CHUNK, compression=ZLIB, uncompressed_size=2**31))
    assert entry.is_small
    assert 2**20 < entry.claimed_size() < 2**20 + 1_000
    keys = [{"key": "", "value": b""} for _ in range(20)]
    many = raw(encryption_keys=keys, properties=[{"key": "", "value": ""}])
    assert opaque(many, size_max=2_100).metadata_size > 21 * PROPERTY_SIZE
    with pytest.raises(UnreadableMessage, match="properties"):
        decode_entry(many, size_max=2_099)


def test_a_marker_that_is_opaque_is_not_delivered() -> None:
    assert decode_entry(raw(marker_type=10, **ENCRYPTED)) == []
    assert PackedEntry(raw(marker_type=10)).is_marker
    assert not PackedEntry(raw()).is_marker


@pytest.mark.parametrize(
    "entry",
    [
        raw(singles({}), num_messages_in_batch=2),
        raw(singles({}, {}), num_messages_in_batch=1),
        raw(singles({}), num_messages_in_batch=0),
        raw(singles({}), num_messages_in_batch=-1),
        raw(compression=ZLIB, uncompressed_size=2**32 - 1, num_messages_in_batch=0),
        raw(compression=ZLIB, uncompressed_size=2**32 - 1, num_messages_in_batch=2**31 - 1),
        raw(singles({}), num_messages_in_batch=2**31 - 1),
        raw(singles({"payload_size": -1}), num_messages_in_batch=1),
        raw(singles({"payload_size": 2}), num_messages_in_batch=1),
        raw(partition_key="no base64!", partition_key_b64_encoded=True),
    ],
)
def test_contradictory_metadata_is_corrupt(entry: bytes) -> None:
    with pytest.raises(CorruptMessage):
        decode_entry(entry)


def test_sizes_are_limited() -> None:
    with pytest.raises(TooLarge, match=f"size_max={PAYLOAD_SIZE_MAX}"):
        encode_message(
            OutgoingMessage(payload=bytes(PAYLOAD_SIZE_MAX + 1)), producer_name="p", publish_time_ms=1, sequence_id=0
        )
    with pytest.raises(TooLarge, match=f"size_max={ENTRY_SIZE_MAX}"):
        encode_batch(
            [OutgoingMessage(payload=bytes(PAYLOAD_SIZE_MAX))] * 2,
            producer_name="p",
            publish_time_ms=1,
            sequence_ids=[0, 1],
        )


@pytest.mark.parametrize("compressed", [False, True])
def test_parts_of_a_batch_are_those_of_the_whole(compressed: bool) -> None:
    payload = singles(*({"compacted_out": n == 3, "partition_key": str(n)} for n in range(6)))
    fields = {"compression": ZLIB, "uncompressed_size": len(payload)} if compressed else {}
    entry = PackedEntry(raw(zlib.compress(payload) if compressed else payload, num_messages_in_batch=6, **fields))
    whole = entry.decode()
    assert (entry.count, entry.is_batch, [message.batch_index for message in whole]) == (6, True, [0, 1, 2, 4, 5])
    for first in range(8):
        for count in range(8):
            part = entry.decode(first=first, count_max=count)
            assert part == [message for message in whole if first <= message.batch_index < first + count]
        assert entry.decode(first=first) == [message for message in whole if first <= message.batch_index]


def test_an_entry_that_is_no_batch_is_decoded_whole() -> None:
    entry = PackedEntry(raw(b"hello"))
    assert (entry.count, entry.is_batch) == (1, False)
    assert entry.decode(first=0, count_max=1) == entry.decode(first=3, count_max=7) == entry.decode()


def test_what_follows_a_part_is_not_read() -> None:
    entry = PackedEntry(raw(singles({}, {}) + b"\xff", num_messages_in_batch=3))
    assert len(entry.decode(first=0, count_max=2)) == 2
    for limits in ({"first": 2}, {"first": 1, "count_max": 2}, {}):
        with pytest.raises(CorruptMessage):
            entry.decode(**limits)


def test_messages_before_a_part_are_checked() -> None:
    """A size that is skipped must not lead before the beginning, or past the end, of the batch."""
    for size in (-1, 2**31 - 1):
        entry = PackedEntry(raw(singles({"payload_size": size}, {}, {}), num_messages_in_batch=3))
        with pytest.raises(CorruptMessage):
            entry.decode(first=2, count_max=1)


def test_a_part_takes_what_its_messages_take() -> None:
    count = SMALL_COUNT_MAX + 1
    payload = singles(*[{}] * count)
    entry = PackedEntry(raw(payload, num_messages_in_batch=count))
    assert entry.claimed_size() == len(payload) + count * MESSAGE_SIZE
    size = entry.claimed_size(10)
    assert size == len(payload) + 10 * MESSAGE_SIZE
    assert len(entry.decode(first=5, count_max=10, size_max=size)) == 10
    with pytest.raises(UnreadableMessage, match="too large once decoded"):
        entry.decode(first=5, count_max=10, size_max=size - 1)


def test_what_exceeds_the_limit_by_its_claims_is_not_decompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = CountingZlib(monkeypatch)
    payload = singles(*[{}] * (SMALL_COUNT_MAX + 1))
    entry = raw(
        zlib.compress(payload),
        num_messages_in_batch=SMALL_COUNT_MAX + 1,
        compression=ZLIB,
        uncompressed_size=len(payload),
    )
    assert opaque(entry, size_max=len(payload) + SMALL_COUNT_MAX * MESSAGE_SIZE).payload == zlib.compress(payload)
    assert counting.produced == 0


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"ordering_key": b"\x00\xff", "partition_key": "k"}, b"\x00\xff"),
        ({"ordering_key": b"", "partition_key": "k"}, b""),
        ({"partition_key": "k\u00fc"}, b"k\xc3\xbc"),
        ({"partition_key": ""}, b""),
        ({"partition_key": "AAE=", "partition_key_b64_encoded": True}, b"\x00\x01"),
        ({"partition_key": "AAE", "partition_key_b64_encoded": True}, b"\x00\x01"),
        ({}, b"q-1"),
        ({"sequence_id": 2**64 - 1}, b"q--1"),
    ],
)
def test_the_key_for_dispatch_is_that_of_pulsar(fields: dict[str, Any], key: bytes) -> None:
    """The keys were printed by `Commands.resolveStickyKey` of Pulsar 4.0.7 for the same metadata."""
    entry = PackedEntry(raw(**fields))
    assert entry.key_bytes == key
    assert entry.decode()[0].key_bytes == key


def test_a_binary_key_that_is_not_base64_has_no_key_for_dispatch() -> None:
    for key in ("no base64!", "A", "\u00fc"):
        assert PackedEntry(raw(partition_key=key, partition_key_b64_encoded=True)).key_bytes == NONE_KEY


def test_text_that_is_not_utf_8_is_replaced_and_such_keys_are_binary() -> None:
    metadata = MessageMetadata(producer_name="q", sequence_id=1, publish_time=5).SerializeToString()
    metadata += b"\x0a\x01\xff" + b"\x32\x01\xfe"  # producer name and key
    metadata += b"\x22\x09\x0a\x01\xfd\x12\x04TAGS" + b"\x22\x06\x0a\x01a\x12\x01\xfc"  # properties
    entry = struct.pack(">I", len(metadata)) + metadata
    packed = PackedEntry(entry)
    assert (packed.key_bytes, packed.tags) == (b"\xfe", {"\ufffd"})
    (message,) = packed.decode()
    assert (message.producer_name, message.key) == ("\ufffd", b"\xfe")
    assert message.properties == {"\ufffd": "TAGS", "a": "\ufffd"}
    head = read_head(entry)
    assert (head.producer_name, head.key, head.tags) == ("\ufffd", b"\xfe", {"\ufffd"})
    inner = b"\x18\x00\x12\x01\xfe" + b"\x0a\x06\x0a\x01a\x12\x01\xfc"
    (message,) = decode_entry(raw(len(inner).to_bytes(4, "big") + inner, num_messages_in_batch=1))
    assert (message.key, message.properties) == (b"\xfe", {"a": "\ufffd"})


def test_messages_of_a_batch_have_keys_of_their_own() -> None:
    payload = singles({"ordering_key": b"o", "partition_key": "a"}, {"partition_key": "b"}, {}, {"sequence_id": 9})
    entry = PackedEntry(raw(payload, num_messages_in_batch=4, partition_key="a"))
    assert entry.key_bytes == b"a"
    assert [message.key_bytes for message in entry.decode()] == [b"o", b"b", b"q-3", b"q-9"]


def test_times_are_read_without_decoding() -> None:
    entry = PackedEntry(raw(b"no batch", num_messages_in_batch=2, deliver_at_time=77))
    assert (entry.deliver_at_ms, entry.publish_time_ms) == (77, 5)
    assert PackedEntry(raw()).deliver_at_ms == 0
    note = BrokerEntryMetadata(broker_timestamp=99).SerializeToString()
    assert PackedEntry(struct.pack(">HI", 0x0E02, len(note)) + note + raw()).publish_time_ms == 99
