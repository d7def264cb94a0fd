"""`bindery bookie check` finds each kind of damage, names the fix, and changes no byte."""

import shutil
from pathlib import Path

import bookie_directory
import pytest
from bindery_bookie.storage.corruption.limbo import read_marker, write_marker
from bindery_bookie.storage.entry_log import entry_log_format
from bindery_bookie.storage.entry_log.entry_log_scan import EntryLogScanner, LogRecord
from bindery_bookie.storage.entry_log.log_manifest import LogManifest, read_manifest, write_manifest
from bindery_bookie.storage.io.disk import RealDisk
from bindery_bookie.storage.io.kv import LevelDbKV
from bindery_core.errors import BinderyError
from bookie_command import check, rows, run
from bookie_directory import RECORDS, location


def test_a_crashed_bookies_directory_is_sound(bookie: Path) -> None:
    damage, summary = check(bookie)
    assert damage == []
    assert summary["entries"] == 92
    assert summary["journal_records"] == 7
    assert summary["dead_records"] == 7


def test_a_bad_entry_is_found_and_named(bookie: Path, log: Path) -> None:
    offset = location(log, 1, 7)
    bookie_directory.flip(log, offset + 100)
    damage, _ = check(bookie)
    assert [(each["text"], each["offset"]) for each in damage] == [
        ("entry digest mismatch", offset - entry_log_format.RECORD_HEADER_SIZE),
        ("entry cannot be read: entry digest mismatch", offset),
    ]
    assert (damage[1]["ledger_id"], damage[1]["entry_id"]) == (1, 7)


def test_damaged_bytes_without_live_entries_do_not_make_a_bookie_damaged(bookie: Path, log: Path) -> None:
    """Damage of an entry counts until the bookie stored the entry again; the old bytes stay damaged and are dead."""
    start = location(log, 1, 7)
    bookie_directory.flip(log, start + 100)
    damage, summary = check(bookie)
    assert (len(damage), summary["dead"]) == (2, 0)
    bookie_directory.repair(bookie, {1: range(7, 8)})
    damage, summary = check(bookie)
    assert (damage, summary["verdict"], summary["dead"]) == ([], "sound", 1)
    (dead,) = [row for row in rows(run("check", bookie, "--json")) if row.get("severity") == "dead"]
    assert (dead["path"], dead["offset"]) == (str(log), start - entry_log_format.RECORD_HEADER_SIZE)
    result = run("check", bookie)
    assert result.exit_code == 0
    *lines, verdict = result.stdout.splitlines()
    assert any(line.startswith("dead    ") for line in lines)
    assert verdict.startswith("sound: ")
    assert verdict.endswith(", 1 damaged places without live entries")

    bookie_directory.flip(log, location(log, 1, 20) + 100)
    damage, summary = check(bookie)
    assert (len(damage), summary["damage"], summary["dead"]) == (2, 2, 1)
    assert run("check", bookie).exit_code == 3


def test_damaged_bytes_of_a_shard_in_limbo_are_damage(bookie: Path, log: Path) -> None:
    """An index that was rebuilt without the damaged bytes does not prove that no entry is stored there."""
    bookie_directory.flip(log, location(log, 1, 7) + 100)
    shutil.rmtree(bookie / "ledgers" / "current" / "index")
    bookie_directory.start_and_stop(bookie)
    assert read_marker(RealDisk(), str(bookie / "ledgers" / "current")) is not None
    damage, summary = check(bookie)
    assert damage
    assert summary["dead"] == 0


def test_a_lost_log_is_found_with_all_its_entries(bookie: Path, log: Path) -> None:
    log.unlink()
    damage, _ = check(bookie)
    assert damage[0]["text"] == "entry log is missing"
    reported = sum("entry cannot be read" in each["text"] for each in damage)
    assert reported + sum(each.get("more", 0) for each in damage) == 92
    text = run("check", bookie).stdout
    assert text.count("fix: ") == len({each["fix"] for each in damage}), "a fix for many places is printed once"


def test_a_check_without_the_journal_reports_that_it_is_partial(bookie: Path, journal: Path) -> None:
    assert run("check", bookie).stdout.splitlines()[-1].startswith("sound: ")
    shutil.rmtree(journal.parent)
    assert run("check", bookie).stdout.splitlines()[-1].startswith("sound, except the journal, which was not checked: ")


def test_an_unfinished_flush_is_a_note(bookie: Path, log: Path) -> None:
    log.write_bytes(log.read_bytes() + b"unfinished")
    (log.parent / "2.log").write_bytes(b"")
    assert check(bookie)[0] == []
    text = run("check", bookie).stdout
    assert "a flush that did not finish; the next start removes it" in text
    assert "2.log: left by a flush or compaction that did not finish" in text


def test_a_damaged_table_of_the_index_is_found_and_named(bookie: Path) -> None:
    """LevelDB detects the damage only when it reads the block, in the middle of the check."""
    path = bookie / "ledgers" / "current" / "index"
    LevelDbKV(str(path)).close()  # opening it writes the content of its log to a table
    (table,) = path.glob("*.ldb")
    assert check(bookie)[0] == []
    bookie_directory.flip(table, 200)
    damage, summary = check(bookie)
    assert {each["path"] for each in damage} == {str(path)}, "not the copy in the temporary directory"
    assert summary["records"] == RECORDS
    result = run("ledgers", bookie)
    assert isinstance(result.exception, BinderyError) or "using the entry logs instead" in result.stderr
    assert "bindery-index-" not in str(result.exception)
    assert run("rebuild-index", bookie).exit_code == 0
    assert check(bookie)[0] == []


def test_an_absent_log_is_damage_only_if_the_index_needs_it(bookie: Path, log: Path) -> None:
    write_manifest(RealDisk(), str(log.parent), LogManifest(absent=((1, 1),)))
    damage, _ = check(bookie)
    assert any("points into an entry log that is not in use" in each["text"] for each in damage)
    assert "left by a flush or compaction that did not finish" in run("check", bookie).stdout


def test_a_closed_log_without_a_trailer_is_found(tmp_path: Path) -> None:
    bookie = bookie_directory.make_compacted(tmp_path / "bookie")
    current = bookie / "ledgers" / "current"
    compacted = next(iter(read_manifest(RealDisk(), str(current)).compacted))
    log = current / entry_log_format.file_name(compacted)
    shutil.rmtree(current / "index")
    records = list(EntryLogScanner(RealDisk(), str(current)).scan(compacted))
    assert isinstance(records[-1], LogRecord)
    with log.open("r+b") as file:
        file.truncate(records[-1].offset - entry_log_format.RECORD_HEADER_SIZE)
    assert any("entry log is cut" in each["text"] and each["path"] == str(log) for each in check(bookie)[0])
    result = run("rebuild-index", bookie)
    assert result.exit_code != 0
    assert "entry log is cut" in str(result.exception or result.output)


def test_files_that_a_start_removes_or_rebuilds_are_notes(bookie: Path, log: Path) -> None:
    log.with_name("2.log.compacting").write_bytes(b"half")
    log.with_name("rebuild-index").write_bytes(b"requested by a test\n")
    assert check(bookie)[0] == []
    text = run("check", bookie).stdout
    assert "left by a compaction that did not finish" in text
    assert "the next start rebuilds the index" in text
    assert run("rebuild-index", bookie).exit_code == 0
    assert not log.with_name("rebuild-index").exists()


@pytest.mark.parametrize("kind", ["sorted", "interleaved"])
def test_a_compacted_bookie_is_sound_and_its_index_can_be_rebuilt(tmp_path: Path, kind: str) -> None:
    bookie = bookie_directory.make_compacted(tmp_path / "bookie", ledger_storage=kind)
    damage, summary = check(bookie)
    assert damage == []
    assert (summary["ledgers"], summary["entries"]) == (2, 410)
    before = run("ledgers", bookie, "--json").stdout
    assert run("rebuild-index", bookie).exit_code == 0
    assert run("ledgers", bookie, "--json").stdout == before
    assert check(bookie)[0] == []


def test_limbo_is_reported(bookie: Path) -> None:
    write_marker(RealDisk(), str(bookie / "ledgers" / "current"), "requested by a test", 1_000)
    assert "in limbo (listing): requested by a test" in run("check", bookie).stdout
