"""The check of LevelDB's logs: an end after a crash is accepted, valid records after invalid bytes are damage."""

import struct

import pytest
from bindery_bookie.storage.io.errors import DamagedIndex
from bindery_bookie.storage.io.leveldb_check import check_files, check_log
from bindery_simulation.disk import CrashableDisk
from crc32c import crc32c

BLOCK_SIZE = 32768


def record(data: bytes, kind: int = 1) -> bytes:
    digest = crc32c(bytes([kind]) + data)
    masked = ((digest >> 15 | digest << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return struct.pack("<IHB", masked, len(data), kind) + data


def block(first: int = 1) -> bytes:
    """Return a whole block of two records."""
    return record(b"a" * 1000, first) + record(b"b" * (BLOCK_SIZE - 1000 - 14), 4)


def check(data: bytes) -> None:
    disk = CrashableDisk()
    disk.create("/f").write_at(data, 0)
    check_log(disk.open_read("/f"), path="/f")


def test_whole_blocks_and_a_part_of_one_are_accepted() -> None:
    check(block() + block() + record(b"end"))


@pytest.mark.parametrize("kind", [1, 2, 3, 4])
def test_records_of_every_type_are_valid(kind: int) -> None:
    data = record(b"x" * (BLOCK_SIZE - 7), kind)
    check(data + data)
    with pytest.raises(DamagedIndex):
        check(bytes(BLOCK_SIZE) + record(b"x", kind))


@pytest.mark.parametrize("size", range(1, 7))
def test_a_block_may_end_in_fewer_zeros_than_a_header(size: int) -> None:
    check(record(b"x" * (BLOCK_SIZE - 7 - size)) + bytes(size) + block())


@pytest.mark.parametrize("size", [7, 8, 100])
def test_more_zeros_at_the_end_of_a_block_before_a_valid_one_are_damage(size: int) -> None:
    with pytest.raises(DamagedIndex) as raised:
        check(record(b"x" * (BLOCK_SIZE - 7 - size)) + bytes(size) + block())
    assert raised.value.facts == {"path": "/f", "offset": BLOCK_SIZE - size, "valid_again": BLOCK_SIZE}


def test_other_bytes_than_zeros_at_the_end_of_a_block_are_damage() -> None:
    with pytest.raises(DamagedIndex):
        check(record(b"x" * (BLOCK_SIZE - 10)) + b"\0\1\0" + block())


def test_the_damage_is_named_with_the_first_bad_and_the_next_valid_offset() -> None:
    data = bytearray(block() * 4)
    data[BLOCK_SIZE + 1100] ^= 1
    data[2 * BLOCK_SIZE + 10] ^= 1
    with pytest.raises(DamagedIndex) as raised:
        check(bytes(data))
    assert raised.value.facts == {"path": "/f", "offset": BLOCK_SIZE + 1007, "valid_again": 3 * BLOCK_SIZE}


def test_a_log_that_ends_in_a_torn_record_or_zeros_is_accepted() -> None:
    check(block() + record(b"torn" * 100)[:-1])
    check(block() + record(b"last") + bytes(3 * BLOCK_SIZE))
    check(b"")


@pytest.mark.parametrize("kind", [0, 5])
def test_an_unknown_type_is_not_a_valid_record(kind: int) -> None:
    check(bytes(BLOCK_SIZE) + record(b"x", kind))


def store(*names: str, current: bytes | None = b"MANIFEST-000002\n") -> CrashableDisk:
    disk = CrashableDisk()
    for name in names:
        disk.create(f"/i/{name}").write_at(record(b"x"), 0)
    if current is not None:
        disk.create("/i/CURRENT").write_at(current, 0)
    return disk


def test_a_missing_and_an_intact_store_are_accepted() -> None:
    check_files(CrashableDisk(), "/i")
    check_files(store("LOG", current=None), "/i")
    check_files(store("MANIFEST-000002", "000003.log", "000004.ldb"), "/i")


def test_tables_without_current_are_damage() -> None:
    with pytest.raises(DamagedIndex) as raised:
        check_files(store("000004.ldb", current=None), "/i")
    assert raised.value.facts == {"path": "/i/CURRENT", "offset": 0}


@pytest.mark.parametrize("current", [b"", b"MANIFEST-000002", b"MANIFEST-000009\n", b"000003.log\n"])
def test_current_must_name_an_existing_manifest(current: bytes) -> None:
    with pytest.raises(DamagedIndex) as raised:
        check_files(store("MANIFEST-000002", "000003.log", current=current), "/i")
    assert raised.value.facts == {"path": "/i/CURRENT", "offset": 0}


@pytest.mark.parametrize(
    ("name", "is_checked"), [("MANIFEST-000002", True), ("000003.log", True), ("LOG", False), ("000004.ldb", False)]
)
def test_logs_and_manifests_are_checked_and_no_other_files(name: str, is_checked: bool) -> None:
    disk = store("MANIFEST-000002", "000003.log", "LOG", "000004.ldb")
    disk.truncate(f"/i/{name}", 0)
    disk.open_read(f"/i/{name}").write_at(bytes(BLOCK_SIZE) + record(b"x"), 0)
    if is_checked:
        with pytest.raises(DamagedIndex) as raised:
            check_files(disk, "/i")
        assert raised.value.facts == {"path": f"/i/{name}", "offset": 0, "valid_again": BLOCK_SIZE}
    else:
        check_files(disk, "/i")
