"""Control records: their content is read as it was written, and damaged ones are refused."""

import pytest
from bindery_bookie.storage import control_records as control
from bindery_core.errors import DamagedStorage


def test_control_records_unpack_to_their_content() -> None:
    assert control.unpack_sized(control.pack_master_key(1, b"key")) == b"key"
    assert control.unpack_ids(control.pack_fence(9)) == (9, control.FENCE)
    with pytest.raises(DamagedStorage):
        control.unpack_sized(control.pack_master_key(1, b"key")[:-1])
    with pytest.raises(DamagedStorage):
        control.unpack_sized(b"short")


def test_each_record_has_the_bytes_of_its_type() -> None:
    ledger = b"\0\0\0\0\0\0\0\x09"
    assert control.pack_master_key(9, b"key") == ledger + b"\xff\xff\xff\xff\xff\xff\xf0\0" + b"\0\0\0\x03key"
    assert control.pack_fence(9) == ledger + b"\xff\xff\xff\xff\xff\xff\xe0\0"
    assert control.pack_explicit_lac(9, b"lac") == ledger + b"\xff\xff\xff\xff\xff\xff\x80\0" + b"\0\0\0\x03lac"
    assert control.pack_deleted(9) == ledger + b"\xff\xff\xff\xff\xff\xff\0\0"
    assert control.pack_continued(7) == b"\xff" * 8 + b"\xff\xff\xff\xff\xff\xfe\0\0" + b"\0\0\0\0\0\0\0\x07"


def test_only_a_continued_record_names_the_next_journal() -> None:
    record = control.pack_continued(7)
    assert control.unpack_continued(record) == 7
    assert control.unpack_continued(record + b"x") is None
    assert control.unpack_continued(record[:-1]) is None
    assert control.unpack_continued(b"\0" * 8 + record[8:]) is None
    assert control.unpack_continued(record[:8] + b"\0" * 8 + record[16:]) is None


def test_damaged_sizes_are_named() -> None:
    with pytest.raises(DamagedStorage) as raised:
        control.unpack_sized(bytes(19))
    assert raised.value.facts == {"size": 19}
    with pytest.raises(DamagedStorage) as raised:
        control.unpack_sized(control.pack_master_key(1, b"key") + b"x")
    assert raised.value.facts == {"size": 24, "expected": 23}
    assert control.unpack_sized(control.pack_explicit_lac(1, b"")) == b""


def test_the_lac_of_a_packet_is_its_second_field() -> None:
    assert control.lac_of_packet(b"\0" * 7 + b"\x05" + b"\0" * 7 + b"\x29" + b"rest") == 41
