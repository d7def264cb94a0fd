"""Needed journals: recorded durably beside the journal, and removed once LastLogMark has reached it."""

import pytest
from bindery_bookie.storage.journal.journal_needed import drop_needed, needed_journals, parse_needed_name, write_needed
from bindery_simulation.disk import CrashableDisk


@pytest.mark.parametrize(
    ("name", "found"), [("ff.txn.needed", 255), ("ff.txn", None), ("FF.txn.needed", None), (".needed", None)]
)
def test_only_names_of_needed_files_are_parsed(name: str, found: int | None) -> None:
    assert parse_needed_name(name) == found


def test_a_needed_file_is_written_once_and_survives_a_power_cut() -> None:
    disk = CrashableDisk()
    write_needed(disk, "/j", 16)
    assert disk.log == ["create /j/10.txn.needed", "sync_directory /j"]
    write_needed(disk, "/j", 16)
    assert disk.log[2:] == ["sync_directory /j"]
    for seed in range(5):
        assert disk.after_power_cut(seed).paths() == ["/j/10.txn.needed"]


def test_needed_files_up_to_the_mark_are_removed() -> None:
    disk = CrashableDisk()
    disk.create("/j/5.txn")
    for journal_id in (4, 5, 6):
        write_needed(disk, "/j", journal_id)
    assert sorted(needed_journals(disk, "/j")) == [4, 5, 6]
    drop_needed(disk, "/j", 5)
    assert disk.paths() == ["/j/5.txn", "/j/6.txn.needed"]
