"""Schemas are stored in the bytes of Pulsar."""

import pytest
from bindery_broker.schemas.codec import (
    IndexEntry,
    Locator,
    Schema,
    SchemaPosition,
    SchemaType,
    StoredSchema,
    decode_locator,
    decode_record,
    encode_locator,
    encode_record,
    parse_version,
    version_bytes,
)
from bindery_core.errors import BadRequest, Corrupt

FIRST = IndexEntry(0, SchemaPosition(7, 0), b"\x11" * 32)
DELETED = IndexEntry(1, SchemaPosition(8, 0), b"")
SECOND = IndexEntry(2, SchemaPosition(9, 0), b"\x22" * 32)


def entry_bytes(version: int, ledger_id: int, hashed: bytes) -> bytes:
    """An IndexEntry by the field numbers of SchemaStorageFormat.proto."""
    return bytes([0x08, version, 0x12, 4, 0x08, ledger_id, 0x10, 0, 0x1A, len(hashed)]) + hashed


def test_a_locator_has_the_bytes_of_pulsar():
    one, two = entry_bytes(0, 7, b"\x11" * 32), entry_bytes(1, 8, b"")
    golden = bytes([0x0A, len(two)]) + two + bytes([0x12, len(one)]) + one + bytes([0x12, len(two)]) + two
    assert encode_locator(Locator((FIRST, DELETED))) == golden
    assert decode_locator(golden) == Locator((FIRST, DELETED))


def test_a_record_has_the_bytes_of_pulsar():
    stored = StoredSchema(0, Schema(SchemaType.JSON, b"{}", {"a": "b"}), 5)
    info = b"\x0a\x05t/n/x" + b"\x12\x00" + b"\x18\x03" + b"\x22\x02{}" + b"\x28\x05" + b"\x30\x00"
    info += b"\x3a\x06\x0a\x01a\x12\x01b"
    nowhere = b"\x08" + b"\xff" * 9 + b"\x01" + b"\x10" + b"\xff" * 9 + b"\x01"
    index = b"\x08\x00\x12" + bytes([len(nowhere)]) + nowhere + b"\x1a\x20" + stored.schema.hash
    golden = b"\x12" + bytes([len(info)]) + info + b"\x2a" + bytes([len(index)]) + index
    assert encode_record("t/n/x", stored, ()) == golden
    assert decode_record(golden, version=0) == stored


@pytest.mark.parametrize("kind", SchemaType)
def test_every_type_is_read_as_it_was_written(kind):
    stored = StoredSchema(3, Schema(kind, b"\x00\xff", {}), 1_700_000_000_000, kind is SchemaType.NONE)
    assert decode_record(encode_record("t/n/x", stored, (FIRST,)), version=3) == stored


def test_versions_before_the_last_deletion_do_not_count():
    assert Locator((FIRST,)).live == (FIRST,)
    assert Locator((FIRST, DELETED)).live == ()
    assert Locator((FIRST, DELETED, SECOND)).live == (SECOND,)
    assert Locator((DELETED, SECOND)).live == (SECOND,)


def test_damaged_bytes_are_refused():
    good = encode_locator(Locator((FIRST, DELETED)))
    for size in range(len(good)):
        with pytest.raises(Corrupt):
            decode_locator(good[:size])
    with pytest.raises(Corrupt):
        decode_locator(encode_locator(Locator((SECOND, FIRST))))
    record = encode_record("t/n/x", StoredSchema(0, Schema(SchemaType.AVRO, b"x" * 40), 5), ())
    for size in range(50):
        with pytest.raises(Corrupt):
            decode_record(record[:size], version=0)
    with pytest.raises(Corrupt):
        decode_record(record.replace(b"\x18\x05", b"\x18\x7f"), version=0)


def test_a_version_is_eight_bytes_big_endian():
    assert version_bytes(258) == b"\0\0\0\0\0\0\x01\x02"
    assert parse_version(version_bytes(258)) == 258
    assert parse_version(version_bytes(3) + bytes(56)) == 3
    with pytest.raises(BadRequest):
        parse_version(b"\0" * 7)
