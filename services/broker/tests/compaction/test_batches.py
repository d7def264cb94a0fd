"""Messages are removed from batches of Pulsar's clients; the others keep indexes, metadata and compression."""

import struct
import zlib
from typing import Any

import cramjam
import pytest
from bindery_broker.compaction.batches import keep_messages
from bindery_pulsar.message_codec import CorruptMessage, decode_entry, frame_entry, split_entry
from bindery_pulsar.pulsar_messages_pb2 import LZ4, NONE, SNAPPY, ZLIB, ZSTD, MessageMetadata, SingleMessageMetadata

COMPRESS: dict[int, Any] = {
    NONE: bytes,
    LZ4: lambda plain: bytes(cramjam.lz4.compress_block(plain, store_size=False)),
    ZLIB: zlib.compress,
    ZSTD: lambda plain: bytes(cramjam.zstd.compress(plain)),
    SNAPPY: lambda plain: bytes(cramjam.snappy.compress_raw(plain)),
}


def batch_of(*messages: tuple[str, bytes], compression: int = NONE) -> bytes:
    """A batch as Pulsar's clients make it: of any keys, with the first one in its metadata."""
    parts = []
    for index, (key, payload) in enumerate(messages):
        single = SingleMessageMetadata(partition_key=key, payload_size=len(payload), sequence_id=10 + index)
        single.properties.add(key="n", value=str(index))
        head = single.SerializeToString()
        parts.append(struct.pack(">I", len(head)) + head + payload)
    plain = b"".join(parts)
    metadata = MessageMetadata(
        producer_name="p",
        sequence_id=10,
        publish_time=5,
        num_messages_in_batch=len(messages),
        partition_key=messages[0][0],
        compression=compression,
        uncompressed_size=len(plain),
        schema_version=b"\0" * 7 + b"\1",
    )
    return frame_entry(metadata, COMPRESS[compression](plain))


@pytest.mark.parametrize("compression", COMPRESS, ids=["none", "lz4", "zlib", "zstd", "snappy"])
def test_the_other_messages_are_removed_and_keep_their_place(compression):
    entry = batch_of(("a", b"1" * 50), ("b", b"2" * 50), ("a", b"3" * 50), ("c", b"4" * 50), compression=compression)
    found = keep_messages(entry, {1, 2})
    before = {one.batch_index: one for one in decode_entry(entry)}
    after = {one.batch_index: one for one in decode_entry(found)}
    assert after == {1: before[1], 2: before[2]}
    metadata, _ = split_entry(found)
    assert (metadata.num_messages_in_batch, metadata.compression) == (4, compression)
    assert metadata.schema_version == b"\0" * 7 + b"\1"
    assert keep_messages(found, {2}) == keep_messages(entry, {2})


def test_a_removed_message_is_compacted_out_and_has_no_payload():
    _, payload = split_entry(keep_messages(batch_of(("a", b"1"), ("a", b"2")), {1}))
    (size,) = struct.unpack_from(">I", payload)
    single = SingleMessageMetadata.FromString(bytes(payload[4 : 4 + size]))
    assert (single.compacted_out, single.payload_size, single.partition_key) == (True, 0, "")


def test_the_rest_of_a_batch_at_the_limit_fits():
    filler = bytes(range(256)) * 4_000
    entry = batch_of(*(("a", filler) for _ in range(5)))
    assert len(keep_messages(entry, {4})) < len(entry)
    assert len(keep_messages(entry, range(5))) == len(entry)


def test_damaged_batches_are_refused():
    entry = batch_of(("a", b"1" * 50), ("b", b"2" * 50), compression=ZLIB)
    metadata, payload = split_entry(entry)
    with pytest.raises(CorruptMessage):
        keep_messages(frame_entry(metadata, bytes(payload[:-9])), {1})
    metadata.compression, metadata.num_messages_in_batch = NONE, 1
    with pytest.raises(CorruptMessage):
        keep_messages(frame_entry(metadata, b"\0"), {0})
