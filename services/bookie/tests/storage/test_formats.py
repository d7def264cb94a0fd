"""Every file format: golden bytes that each later version must read, and detection of every flipped byte.

There is no option to rewrite the golden files: a new layout is a new version in addition to the old one.
"""

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.entry_log import entry_log_format as logs
from bindery_bookie.storage.entry_log.entry_log_scan import DamagedRegion, EntryLogScanner
from bindery_bookie.storage.index import index_format as index
from bindery_bookie.storage.io.disk import ReadableFile, RealDisk
from bindery_bookie.storage.journal import journal_format as journal
from bindery_bookie.storage.journal.journal_format import JournalPosition
from bindery_bookie.storage.journal.mark import LastLogMark
from bindery_core.errors import BadVersion, DamagedStorage
from bindery_simulation.disk import CrashableDisk

GOLDEN = Path(__file__).parent.parent / "golden"


def file_of(data: bytes) -> ReadableFile:
    disk = CrashableDisk()
    disk.create("/f").write_at(data, 0)
    return disk.open_read("/f")


def bodies(kit: Any) -> list[bytes]:
    lots = random.Random(7)
    payloads = [b"", b"bindery", bytes(lots.randrange(1, 256) for _ in range(700))]
    return [
        control.pack_master_key(5, kit.KEY),
        *(kit.entry(5, entry_id, payload, lac=entry_id - 1) for entry_id, payload in enumerate(payloads)),
        control.pack_fence(5),
        control.pack_explicit_lac(5, kit.lac_packet(5, 1)),
    ]


def journal_bytes(kit: Any) -> bytes:
    """Return two groups in file 10, sequences 3 and 4, then allocated zeros."""
    records = [journal.pack_record_size(len(body)) + body for body in bodies(kit)]
    groups = [b"".join(records[:4]), b"".join(records[4:])]
    packed = [journal.pack_group(group, journal_id=10, sequence=3 + at) for at, group in enumerate(groups)]
    body = b"".join(packed) + bytes(1024)
    return journal.pack_file_header(10, file_size=journal.HEADER_SIZE + len(body)) + body


def read_journal(data: bytes) -> list[bytes]:
    file = file_of(data)
    if not journal.is_file_header_valid(file, journal_id=10):
        raise DamagedStorage("header")
    groups = journal.read_groups(file, path="/f", journal_id=10, offset=journal.HEADER_SIZE, sequence=3)
    return [record for group in groups for record in group.records]


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


MARK = LastLogMark(9, JournalPosition(10, 4096, 77), 6, 1234)
ROW = index.LedgerRow(b"k" * 20, True, 41, 42, b"packet")


def golden(name: str) -> bytes:
    return (GOLDEN / name).read_bytes()


def test_the_golden_journals_are_read_and_the_newest_is_written_byte_for_byte(kit: Any) -> None:
    stored = golden("journal-v2.txn")
    assert stored == journal_bytes(kit)
    assert read_journal(stored) == bodies(kit)
    assert read_journal(golden("journal-v1.txn")) == bodies(kit)


def test_the_golden_journal_link_is_read_and_written_byte_for_byte() -> None:
    link = journal.pack_link(journal_id=10, sequence=5, next_journal_id=11)
    assert link == golden("journal-link-v2")
    (group,) = journal.read_groups(file_of(link), path="/f", journal_id=10, offset=0, sequence=5)
    assert journal.following(group) == 11


def test_a_truncated_journal_is_distinguished_from_a_short_one(kit: Any) -> None:
    data = journal_bytes(kit)
    journal.check_size(file_of(data), path="/f")
    journal.check_size(file_of(data + bytes(512)), path="/f")
    journal.check_size(file_of(golden("journal-v1.txn")[:-1]), path="/f")  # version 1 has no size
    for size in (512, 1024, len(data) - 1):
        with pytest.raises(DamagedStorage) as raised:
            journal.check_size(file_of(data[:size]), path="/f")
        assert raised.value.facts == {"path": "/f", "offset": size, "expected": len(data)}


def test_an_invalid_group_with_bytes_after_it_is_damage(kit: Any) -> None:
    data = bytearray(journal_bytes(kit))
    second = data.rindex(journal.GROUP_MAGIC)
    data[second + 40 : second + 512] = bytes(472)
    assert read_journal(bytes(data)) == bodies(kit)[:4]
    data[-1] = 1
    with pytest.raises(DamagedStorage, match="journal group is damaged"):
        read_journal(bytes(data))


def test_the_golden_entry_log_is_read_and_written_byte_for_byte(kit: Any) -> None:
    stored = golden("entry-log-v1.log")
    assert stored == log_bytes(kit)
    assert read_log(stored) == bodies(kit)
    size = sum(len(body) + logs.RECORD_HEADER_SIZE for body in bodies(kit))
    assert logs.read_ledgers_map(file_of(stored), path="/f") == {5: size}


def test_the_golden_mark_is_read_and_written_byte_for_byte() -> None:
    stored = golden("last-log-mark-v1")
    assert stored == MARK.pack()
    assert LastLogMark.unpack(stored, path="/m") == MARK


def test_the_golden_index_rows_are_read_and_written_byte_for_byte() -> None:
    run = index.pack_run(6 << 32 | 40, (16, 0, 700))
    rows = index.run_key(5, 0) + run + index.ledger_key(5) + index.pack_ledger_row(ROW) + index.pack_generation(9)
    stored = golden("index-rows-v1")
    assert stored == rows
    assert index.unpack_ledger_row(index.pack_ledger_row(ROW), ledger_id=5) == ROW
    decoded = index.unpack_run(index.run_key(5, 7), run)
    assert list(decoded.entries()) == [(7, 6 << 32 | 40, 16), (9, 6 << 32 | 64, 700)]
    assert decoded.find(8) is None
    assert decoded.find(9) == (6 << 32 | 64, 700)
    assert decoded.find(10) is None


def flips(data: bytes) -> Iterator[tuple[int, bytes]]:
    for at in range(len(data)):
        for mask in (0x01, 0x80, 0xFF):
            yield at, data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]


def test_every_flipped_byte_of_a_journal_is_detected_or_harmless(kit: Any) -> None:
    """No wrong record is returned, and none is skipped silently: this journal has no zero at the end of a sector.

    Flips in the allocated zeros after the last group are harmless.
    """
    data, expected = journal_bytes(kit), bodies(kit)
    used = len(data) - 1024
    silent = []
    for at, flipped in flips(data):
        try:
            found = read_journal(flipped)
        except (DamagedStorage, BadVersion):
            continue
        assert found == expected[: len(found)], f"wrong bytes came out: offset={at}"
        if found != expected or at < used:
            silent.append(at)
    assert silent == []


def test_every_flipped_byte_of_an_entry_log_is_detected(kit: Any) -> None:
    for _, flipped in flips(log_bytes(kit)):
        with pytest.raises((DamagedStorage, BadVersion)):
            read_log(flipped)


def test_every_flipped_byte_of_a_mark_is_detected() -> None:
    for _, flipped in flips(MARK.pack()):
        with pytest.raises((DamagedStorage, BadVersion)):
            LastLogMark.unpack(flipped, path="/m")


def test_every_truncation_of_a_mark_is_detected() -> None:
    for size in range(len(MARK.pack())):
        with pytest.raises(DamagedStorage):
            LastLogMark.unpack(MARK.pack()[:size], path="/m")


def test_a_journal_torn_at_any_byte_ends_before_the_torn_group(kit: Any) -> None:
    data, expected = journal_bytes(kit), bodies(kit)
    second = data.rindex(journal.GROUP_MAGIC)
    end_mark = data.rindex(journal.GROUP_END) + len(journal.GROUP_END)
    for cut in range(second, len(data)):
        torn = data[:cut].ljust(len(data), b"\0")
        assert read_journal(torn) == (expected if cut >= end_mark else expected[:4]), cut
        assert read_journal(data[:cut]) == expected[: 6 if cut >= len(data) - 1024 else 4], cut


def test_a_last_group_that_lost_any_sectors_is_skipped(kit: Any) -> None:
    records = journal.pack_record_size(3000) + bytes(range(1, 251)) * 12
    first = journal.pack_group(records, journal_id=10, sequence=3)
    second = journal.pack_group(records, journal_id=10, sequence=4)
    head = journal.pack_file_header(10, file_size=4096) + first
    for lost in range(1, 2 ** (len(second) // 512)):
        torn = bytearray(second)
        for sector in range(len(second) // 512):
            if lost >> sector & 1:
                torn[sector * 512 : sector * 512 + 512] = bytes(512)
        assert len(read_journal(head + bytes(torn) + bytes(512))) == 1, bin(lost)


def test_a_damaged_group_before_a_good_one_names_file_and_offset(kit: Any) -> None:
    data = bytearray(journal_bytes(kit))
    data[512:1024] = bytes(512)  # even if it looks like a tear
    with pytest.raises(DamagedStorage) as raised:
        read_journal(bytes(data))
    assert raised.value.facts["path"] == "/f"
    assert raised.value.facts["offset"] == 512


def test_groups_are_found_at_any_sector_and_unwritten_ranges_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = journal.pack_group(b"records", journal_id=10, sequence=3)
    file = RealDisk().create(f"{tmp_path}/f", allocate=16 * 2**20)
    file.write_at(
        b"G" * 512 + b"GRUP".ljust(512) + b"." + group, 1024
    )  # neither the magic alone nor a group off a sector boundary counts
    places = [5 * 2**20, 5 * 2**20 + 512, 9 * 2**20 - 512, 16 * 2**20 - 512]
    for place in places:
        file.write_at(group, place)
    file.datasync()
    file.close()
    reader = RealDisk().open_read(f"{tmp_path}/f")
    found, offset = [], 512
    while (at := journal.find_group(reader, journal_id=10, offset=offset)) is not None:
        found.append(at)
        offset = at + 512
    assert found == places
    assert journal.find_group(reader, journal_id=11, offset=512) is None
    reader.close()

    empty = RealDisk()
    empty.create(f"{tmp_path}/g", allocate=16 * 2**20).close()
    unwritten = empty.open_read(f"{tmp_path}/g")
    if not unwritten.data_ranges(512):  # empty if the file system can search for holes
        monkeypatch.setattr(type(unwritten), "read_at", lambda *_: pytest.fail("read"))
    assert journal.find_group(unwritten, journal_id=10, offset=512) is None
    unwritten.close()


def test_an_unknown_version_is_reported(kit: Any) -> None:
    from crc32c import crc32c

    head = b"BNDJ\0\0\0\3" + (10).to_bytes(8, "big") + (512).to_bytes(8, "big")
    data = (head + crc32c(head).to_bytes(4, "big")).ljust(512, b"\0")
    with pytest.raises(BadVersion):
        journal.is_file_header_valid(file_of(data), journal_id=10)


@pytest.mark.parametrize("name", ["1.txn", "ff.txn", "1.log", "lastId", "01.txn", "FF.txn", ".txn", "x.txn", "-1.txn"])
def test_only_canonical_file_names_are_accepted(name: str) -> None:
    assert journal.parse_file_name(name) == {"1.txn": 1, "ff.txn": 255}.get(name)


def test_runs_contain_every_entry_at_any_location() -> None:
    """Compared with a naive list, for random holes, gaps in the log and lengths."""
    lots = random.Random(1)
    for _ in range(200):
        entries, entry_id, location = [], 0, 1 << 32
        for _ in range(lots.randint(1, 400)):
            entry_id += lots.choice((1, 1, 1, 2, 8, 9, 10, 300))
            size = lots.randint(16, 50)
            location += lots.choice((0, 0, 0, 0, 1000))
            entries.append((entry_id, location, size))
            location += size + logs.RECORD_HEADER_SIZE
        rows = index.run_rows(5, entries)
        runs = [index.unpack_run(key, value) for key, value in rows]
        assert [entry for run in runs for entry in run.entries()] == entries
        for run, following in pairwise(runs):
            assert run.last_entry_id < following.first_entry_id
        for entry in entries:
            run = max((run for run in runs if run.first_entry_id <= entry[0]), key=lambda run: run.first_entry_id)
            assert run.find(entry[0]) == entry[1:]


def test_control_records_unpack_to_their_content() -> None:
    assert control.unpack_sized(control.pack_master_key(1, b"key")) == b"key"
    assert control.unpack_ids(control.pack_fence(9)) == (9, control.FENCE)
    with pytest.raises(DamagedStorage):
        control.unpack_sized(control.pack_master_key(1, b"key")[:-1])
    with pytest.raises(DamagedStorage):
        control.unpack_sized(b"short")
