"""LastLogMark: golden bytes, detection of every damage, and a replacement that keeps the old mark if it fails."""

from dataclasses import replace

import pytest
from bindery_bookie.storage.journal.journal_format import JournalPosition
from bindery_bookie.storage.journal.mark import LastLogMark, read_mark, write_mark
from bindery_core.errors import BadVersion, DamagedStorage
from bindery_simulation.disk import CrashableDisk
from crc32c import crc32c
from storage_formats import flips, golden

MARK = LastLogMark(9, JournalPosition(10, 4096, 77), 6, 1234)


def test_the_golden_mark_is_read_and_written_byte_for_byte() -> None:
    stored = golden("last-log-mark-v1")
    assert stored == MARK.pack()
    assert LastLogMark.unpack(stored, path="/m") == MARK


def test_every_flipped_byte_of_a_mark_is_detected() -> None:
    for _, flipped in flips(MARK.pack()):
        with pytest.raises((DamagedStorage, BadVersion)):
            LastLogMark.unpack(flipped, path="/m")


def test_every_truncation_of_a_mark_is_detected() -> None:
    for size in range(len(MARK.pack())):
        with pytest.raises(DamagedStorage):
            LastLogMark.unpack(MARK.pack()[:size], path="/m")


def test_a_longer_file_and_an_unknown_version_are_refused() -> None:
    with pytest.raises(DamagedStorage) as raised:
        LastLogMark.unpack(MARK.pack() + b"x", path="/m")
    assert raised.value.facts == {"path": "/m", "offset": 0, "size": 61, "expected": 60}
    fields = MARK.pack()[:4] + b"\0\0\0\2" + MARK.pack()[8:56]
    with pytest.raises(BadVersion) as refused:
        LastLogMark.unpack(fields + crc32c(fields).to_bytes(4, "big"), path="/m")
    assert refused.value.facts == {"path": "/m", "version": 2}


def test_a_damaged_mark_names_its_file() -> None:
    with pytest.raises(DamagedStorage) as raised:
        LastLogMark.unpack(bytes(60), path="/m")
    assert raised.value.facts == {"path": "/m", "offset": 0}


def test_no_mark_is_read_from_an_empty_directory() -> None:
    assert read_mark(CrashableDisk(), "/d") is None


def test_bytes_after_a_mark_in_its_file_are_damage() -> None:
    disk = CrashableDisk()
    disk.create("/d/LastLogMark").write_at(MARK.pack() + b"x", 0)
    with pytest.raises(DamagedStorage) as raised:
        read_mark(disk, "/d")
    assert raised.value.facts["path"] == "/d/LastLogMark"


def test_a_mark_is_replaced_and_durable() -> None:
    disk = CrashableDisk()
    write_mark(disk, "/d", MARK)
    later = replace(MARK, generation=10)
    write_mark(disk, "/d", later)
    assert disk.paths() == ["/d/LastLogMark"]
    for seed in range(10):
        assert read_mark(disk.after_power_cut(seed), "/d") == later


def test_a_power_cut_at_any_operation_keeps_the_old_or_the_new_mark() -> None:
    later = replace(MARK, generation=10)
    for operations in range(5):
        for seed in range(10):
            disk = CrashableDisk()
            write_mark(disk, "/d", MARK)
            disk.cut_after(operations)
            with pytest.raises(OSError, match="the power is lost"):
                write_mark(disk, "/d", later)
            found = disk.after_power_cut(seed)
            assert read_mark(found, "/d") in (MARK, later)
            write_mark(found, "/d", later)  # also over a temporary file that the cut left
            assert read_mark(found, "/d") == later
