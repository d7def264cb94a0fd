"""Entries of compacted ledgers have the bytes of Pulsar's RawMessage."""

import pytest
from bindery_broker.compaction import raw_message
from bindery_core.errors import Corrupt
from bindery_pulsar.message_codec import OutgoingMessage, encode_message
from bindery_pulsar.message_id import Position

ENTRY = encode_message(OutgoingMessage(payload=b"x", key="k"), producer_name="p", publish_time_ms=1, sequence_id=0)
AT = Position(7, 300)


def test_an_entry_has_the_bytes_of_pulsar():
    found = raw_message.encode(AT, ENTRY, partition=2)
    message_id = b"\x08\x07\x10\xac\x02\x18\x02"
    assert found == b"\0\0\0\x07" + message_id + len(ENTRY).to_bytes(4, "big") + ENTRY
    assert raw_message.decode(found) == (AT, ENTRY)
    assert raw_message.decode_position(found) == AT
    assert len(found) <= len(ENTRY) + raw_message.OVERHEAD_MAX


def test_a_topic_that_is_no_partition_has_the_partition_minus_1():
    assert raw_message.encode_id(AT, partition=-1) == b"\x08\x07\x10\xac\x02\x18" + b"\xff" * 9 + b"\x01"


def test_the_metadata_of_a_broker_is_left_out():
    with_metadata = b"\x0e\x02\0\0\0\x02\x08\x01" + ENTRY
    assert raw_message.decode(raw_message.encode(AT, with_metadata, partition=-1)) == (AT, ENTRY)


def test_damaged_bytes_are_refused():
    whole = raw_message.encode(AT, ENTRY, partition=-1)
    for size in range(len(whole)):
        with pytest.raises(Corrupt):
            raw_message.decode(whole[:size])
    with pytest.raises(Corrupt):
        raw_message.decode(whole + b"x")
    with pytest.raises(Corrupt):
        raw_message.decode_position(b"\0\0\0\xff" + whole[4:])
    with pytest.raises(Corrupt):
        raw_message.decode_position(b"\0\0\0\x02\xff\xff" + whole)
