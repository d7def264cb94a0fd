"""Journal files: golden bytes, detection of every flipped byte, and tears distinguished from damage."""

from pathlib import Path
from typing import Any

import pytest
from bindery_bookie.storage.io.disk import RealDisk
from bindery_bookie.storage.journal import journal_format as journal
from bindery_core.errors import BadVersion, DamagedStorage
from storage_formats import bodies, file_of, flips, golden


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
