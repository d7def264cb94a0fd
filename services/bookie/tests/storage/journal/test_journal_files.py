"""Journal files in order: a crash's tear ends the replay, and a missing file is damage with its name."""

import pytest
from bindery_bookie.storage.journal import journal_format as fmt
from bindery_bookie.storage.journal.journal_files import journals_size, list_journals, readable_groups, replay_groups
from bindery_bookie.storage.journal.journal_format import JournalPosition
from bindery_bookie.storage.journal.journal_needed import write_needed
from bindery_bookie.storage.journal.mark import LastLogMark
from bindery_core.errors import DamagedStorage
from bindery_simulation.disk import CrashableDisk

START = JournalPosition(9, 512, 1)


def record(number: int) -> bytes:
    return b"%08d" % number


def journal_of(disk: CrashableDisk, journal_id: int, *sequences: int, link: bool = False) -> None:
    """Write a file with one group per sequence, and a link to the next file if `link`."""
    groups = [
        fmt.pack_group(b"".join(fmt.record_parts(record(sequence))), journal_id=journal_id, sequence=sequence)
        for sequence in sequences
    ]
    if link:
        groups.append(fmt.pack_link(journal_id=journal_id, sequence=sequences[-1] + 1, next_journal_id=journal_id + 1))
    header = fmt.pack_file_header(journal_id, file_size=4096)
    file = disk.create(f"/j/{fmt.file_name(journal_id)}", allocate=4096)
    file.write_at(header + b"".join(groups), 0)


def replayed(disk: CrashableDisk, start: JournalPosition = START) -> list[tuple[int, int]]:
    return [(journal_id, group.sequence) for journal_id, group in replay_groups(disk, "/j", start)]


def missing(disk: CrashableDisk, start: JournalPosition = START) -> dict[str, object]:
    with pytest.raises(DamagedStorage, match="journal is missing") as raised:
        replayed(disk, start)
    return dict(raised.value.facts)


def three_files() -> CrashableDisk:
    disk = CrashableDisk()
    journal_of(disk, 11, 6)
    journal_of(disk, 9, 1, 2, link=True)
    journal_of(disk, 10, 4, link=True)
    return disk


def test_journals_are_listed_by_id_and_sized_from_the_mark_on() -> None:
    disk = three_files()
    disk.create("/j/lastId")
    assert list_journals(disk, "/j") == [9, 10, 11]
    assert journals_size(disk, "/j", LastLogMark(0, JournalPosition(10, 512, 4), 0, 0)) == 8192


def test_all_groups_from_the_start_on_are_replayed() -> None:
    assert replayed(three_files()) == [(9, 1), (9, 2), (9, 3), (10, 4), (10, 5), (11, 6)]
    assert replayed(three_files(), JournalPosition(9, 1024, 2))[0] == (9, 2)
    assert replayed(three_files(), JournalPosition(10, 1024, 5)) == [(10, 5), (11, 6)]


@pytest.mark.parametrize(("name", "offset"), [("9.txn", 512), ("a.txn", 0), ("b.txn", 0)])
def test_a_missing_file_is_damage(name: str, offset: int) -> None:
    disk = three_files()
    disk.remove(f"/j/{name}")
    assert missing(disk) == {"path": f"/j/{name}", "offset": offset}


def test_a_missing_needed_file_is_damage() -> None:
    disk = three_files()
    write_needed(disk, "/j", 12)
    assert missing(disk) == {"path": "/j/c.txn", "offset": 0}


def test_an_unfinished_last_file_is_skipped_unless_it_is_linked_or_needed() -> None:
    disk = three_files()
    disk.create("/j/c.txn", allocate=4096)
    assert replayed(disk)[-1] == (11, 6)
    write_needed(disk, "/j", 12)
    with pytest.raises(DamagedStorage, match="journal header is damaged") as raised:
        replayed(disk)
    assert raised.value.facts == {"path": "/j/c.txn", "offset": 0}


def test_a_damaged_journal_is_read_around_its_damage() -> None:
    disk = three_files()
    disk.corrupt("/j/9.txn", 1024 + 34)
    with pytest.raises(DamagedStorage):
        replayed(disk)
    found = [(journal_id, group.sequence) for journal_id, group in readable_groups(disk, "/j", START)]
    assert found == [(9, 1), (9, 3), (10, 4), (10, 5), (11, 6)]
    later = readable_groups(disk, "/j", JournalPosition(10, 512, 4))
    assert [(journal_id, group.sequence) for journal_id, group in later] == [(10, 4), (10, 5), (11, 6)]
