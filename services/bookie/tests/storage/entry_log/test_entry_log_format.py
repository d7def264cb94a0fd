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
