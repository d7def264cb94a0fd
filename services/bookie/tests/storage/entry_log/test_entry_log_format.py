"""Entry log files: golden bytes, and detection of every flipped byte."""

from typing import Any

import pytest
from bindery_bookie.storage.entry_log import entry_log_format as logs
from bindery_bookie.storage.entry_log.entry_log_scan import DamagedRegion, EntryLogScanner
from bindery_core.errors import BadVersion, DamagedStorage
from bindery_simulation.disk import CrashableDisk
from storage_formats import bodies, file_of, flips, golden


def log_bytes(kit: Any) -> bytes:
    """Return log 6 with all bodies, closed."""
    records = b"".join(map(logs.pack_record, bodies(kit)))
    ledgers_map = logs.pack_record(logs.pack_ledgers_map({5: len(records)}))
    trailer = logs.pack_trailer(logs.HEADER_SIZE + len(records) + logs.RECORD_HEADER_SIZE)
    return logs.pack_file_header(6) + records + ledgers_map + trailer


def read_log(data: bytes) -> list[bytes]:
    disk = CrashableDisk()
    disk.create(f"/d/{logs.file_name(6)}").write_at(data, 0)
    found: list[bytes] = []
    for one in EntryLogScanner(disk, "/d").scan(6, is_sealed=True):
        if isinstance(one, DamagedRegion):
            raise DamagedStorage(one.reason, path=one.path, offset=one.offset)
        found.append(one.body)
    return found


def test_the_golden_entry_log_is_read_and_written_byte_for_byte(kit: Any) -> None:
    stored = golden("entry-log-v1.log")
    assert stored == log_bytes(kit)
    assert read_log(stored) == bodies(kit)
    size = sum(len(body) + logs.RECORD_HEADER_SIZE for body in bodies(kit))
    assert logs.read_ledgers_map(file_of(stored), path="/f") == {5: size}


def test_every_flipped_byte_of_an_entry_log_is_detected(kit: Any) -> None:
    for _, flipped in flips(log_bytes(kit)):
        with pytest.raises((DamagedStorage, BadVersion)):
            read_log(flipped)


@pytest.mark.parametrize("name", ["1.log", "ff.log", "1.txn", "01.log", "FF.log", "0.log", "-1.log", "x.log", "log"])
def test_only_canonical_file_names_are_accepted(name: str) -> None:
    assert logs.parse_file_name(name) == {"1.log": 1, "ff.log": 255}.get(name)


def test_the_header_of_a_compacted_log_has_its_order() -> None:
    assert logs.check_file_header(file_of(logs.pack_file_header(6, order=3)), path="/f", log_id=6) == 3
    assert logs.check_file_header(file_of(logs.pack_file_header(6)), path="/f", log_id=6) is None


@pytest.mark.parametrize("data", [logs.pack_file_header(7), logs.pack_file_header(6)[:-1], bytes(32)])
def test_a_header_of_another_log_or_a_short_one_is_damage(data: bytes) -> None:
    with pytest.raises(DamagedStorage) as raised:
        logs.check_file_header(file_of(data), path="/f", log_id=6)
    assert raised.value.facts == {"path": "/f", "offset": 0}


def test_an_entry_is_intact_only_with_its_size_ids_and_digest(kit: Any) -> None:
    body = kit.entry(5, 7, b"bindery")
    data = logs.pack_record(body)
    size = len(body)
    assert logs.intact_entry(data, 8, size, 5, 7) == body
    assert logs.intact_entry(data, 8, size, 5, 8) is None
    assert logs.intact_entry(data, 8, size, 6, 7) is None
    assert logs.intact_entry(data, 8, size - 1, 5, 7) is None
    assert logs.intact_entry(data, 8, size + 1, 5, 7) is None
    assert logs.intact_entry(data, 7, size, 5, 7) is None
    assert logs.intact_entry(data[:-1] + b"x", 8, size, 5, 7) is None


def test_a_record_that_does_not_match_its_header_is_damage() -> None:
    header = logs.pack_record(b"body")[:8]
    logs.check_record(header, b"body", path="/f", offset=40)
    for bad_header, body, reason in (
        (header[:-1], b"body", "is short"),
        (header, b"bod", "size differs"),
        (header, b"bode", "digest mismatch"),
    ):
        with pytest.raises(DamagedStorage, match=reason) as raised:
            logs.check_record(bad_header, body, path="/f", offset=40)
        assert raised.value.facts["offset"] == 40


def test_the_ledgers_map_keeps_sizes_and_deletions_apart() -> None:
    ledgers_map = logs.pack_record(logs.pack_ledgers_map({9: 100, 4: 200}, [9]))
    data = logs.pack_file_header(6) + ledgers_map + logs.pack_trailer(40)
    assert logs.read_ledgers_and_deletions(file_of(data), path="/f") == ({4: 200, 9: 100}, frozenset({9}))


@pytest.mark.parametrize("map_offset", [39, 10_000])
def test_a_trailer_that_points_outside_the_records_is_none(map_offset: int) -> None:
    ledgers_map = logs.pack_record(logs.pack_ledgers_map({9: 100}))
    data = logs.pack_file_header(6) + ledgers_map + logs.pack_trailer(map_offset)
    assert logs.read_ledgers_map(file_of(data), path="/f") is None
    assert logs.read_ledgers_map(file_of(b"short"), path="/f") is None
