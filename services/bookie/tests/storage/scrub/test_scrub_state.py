"""Scrub state: golden bytes, a damaged file counts as missing, and a replacement that is atomic."""

import random
from dataclasses import replace

import pytest
from bindery_bookie.storage.scrub.scrub_state import Region, ScrubRecord, read_scrub_record, write_scrub_record
from bindery_bookie.storage.scrub.scrub_walk import ScrubCursor, ScrubPhase
from bindery_simulation.disk import CrashableDisk
from crc32c import crc32c

RECORD = ScrubRecord(
    rounds=3,
    last_start_ms=1000,
    last_end_ms=2000,
    start_ms=3000,
    cursor=ScrubCursor(ScrubPhase.ENTRIES, 7, 8),
    entries=9,
    size=10,
    total_size=11,
    regions=(
        Region("/d/1.log", 32, 100, "entry digest mismatch", 5, 6, 1, 1500),
        Region("", 0, 0, "", None, None, 0, 1),
    ),
)
LINE = (
    b'{"cursor": {"entry_id": 8, "first": 7, "phase": "entries"}, "entries": 9, "last_end_ms": 2000, '
    b'"last_start_ms": 1000, "regions": [["/d/1.log", 32, 100, "entry digest mismatch", 5, 6, 1, 1500], '
    b'["", 0, 0, "", null, null, 0, 1]], "rounds": 3, "size": 10, "start_ms": 3000, "total_size": 11}'
)


def signed(line: bytes) -> bytes:
    return b"BNDS 1 %08x\n" % crc32c(line) + line + b"\n"


def test_a_record_has_these_bytes_and_is_read_back() -> None:
    assert RECORD.pack() == signed(LINE)
    assert ScrubRecord.unpack(signed(LINE)) == RECORD
    assert ScrubRecord.unpack(ScrubRecord().pack()) == ScrubRecord()


def test_every_flipped_or_missing_byte_is_detected() -> None:
    data = RECORD.pack()
    lots = random.Random(1)
    for at in range(len(data)):
        flipped = data[:at] + bytes([data[at] ^ lots.randrange(1, 256)]) + data[at + 1 :]
        for damaged in (flipped, data[:at]):
            with pytest.raises(ValueError, match="scrub state"):
                ScrubRecord.unpack(damaged)


@pytest.mark.parametrize("line", [b"{}", b"[]", LINE.replace(b'"rounds": 3, ', b""), LINE.replace(b'"", 0, 0, ', b"")])
def test_a_missing_field_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match="field is missing in scrub state"):
        ScrubRecord.unpack(signed(line))


def test_a_missing_or_damaged_file_counts_as_an_empty_record() -> None:
    disk = CrashableDisk()
    assert read_scrub_record(disk, "/d") == ScrubRecord()
    write_scrub_record(disk, "/d", RECORD)
    assert read_scrub_record(disk, "/d") == RECORD
    disk.corrupt("/d/scrub", 40)
    assert read_scrub_record(disk, "/d") == ScrubRecord()


def test_a_power_cut_at_any_operation_keeps_the_old_or_the_new_record() -> None:
    later = replace(RECORD, rounds=4)
    for operations in range(5):
        for seed in range(10):
            disk = CrashableDisk()
            write_scrub_record(disk, "/d", RECORD)
            disk.cut_after(operations)
            with pytest.raises(OSError, match="the power is lost"):
                write_scrub_record(disk, "/d", later)
            found = disk.after_power_cut(seed)
            assert read_scrub_record(found, "/d") in (RECORD, later)
            write_scrub_record(found, "/d", later)
            assert found.paths() == ["/d/scrub"]
            assert all(read_scrub_record(found.after_power_cut(cut), "/d") == later for cut in range(3))
