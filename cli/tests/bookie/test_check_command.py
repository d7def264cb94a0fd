"""`bindery bookie check` finds each kind of damage, names the fix, and changes no byte."""

import shutil
from pathlib import Path

import bookie_directory
import pytest
from bindery_bookie.storage.corruption.limbo import read_marker, write_marker
from bindery_bookie.storage.entry_log import entry_log_format
from bindery_bookie.storage.entry_log.entry_log_scan import EntryLogScanner, LogRecord
from bindery_bookie.storage.entry_log.log_manifest import LogManifest, read_manifest, write_manifest
from bindery_bookie.storage.index import index_format
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.io.disk import RealDisk
from bindery_bookie.storage.io.kv import LevelDbKV
from bindery_bookie.storage.journal import journal_format
from bindery_bookie.storage.journal.mark import read_mark
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


def test_an_entry_lost_by_the_index_behind_dead_bytes_is_damage(bookie: Path, log: Path) -> None:
    bookie_directory.flip(log, location(log, 1, 7) + 100)
    bookie_directory.repair(bookie, {1: range(7, 8)})
    assert check(bookie)[0] == []
    kv = LevelDbKV(str(bookie / "ledgers" / "current" / "index"))
    kv.write_batch([], [index_format.run_key(2, 0)])
    kv.close()
    assert check(bookie)[0] != []


def test_damaged_bytes_of_a_deleted_ledger_are_dead(bookie: Path, log: Path) -> None:
    bookie_directory.flip(log, location(log, 4, 2) + 50)
    damage, summary = check(bookie)
    assert (damage, summary["dead"]) == ([], 1)


def test_damaged_bytes_count_as_damage_while_the_index_cannot_be_read(bookie: Path, log: Path) -> None:
    bookie_directory.flip(log, location(log, 4, 2) + 50)
    shutil.rmtree(bookie / "ledgers" / "current" / "index")
    assert "entry digest mismatch" in [each["text"] for each in check(bookie)[0]]


@pytest.mark.parametrize("size", [20_000, 60])
def test_a_short_log_is_found(bookie: Path, log: Path, size: int) -> None:
    data = log.read_bytes()
    log.write_bytes(data[:-size])
    damage, summary = check(bookie)
    assert any("short" in each["text"] for each in damage)
    lost = sum("entry cannot be read" in each["text"] for each in damage) + sum(each.get("more", 0) for each in damage)
    assert lost >= 1
    assert summary["entries"] == 92


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


def test_a_lost_index_is_damage_that_a_rebuild_repairs(bookie: Path) -> None:
    shutil.rmtree(bookie / "ledgers" / "current" / "index")
    damage, summary = check(bookie)
    assert [each["text"] for each in damage] == ["the index is lost"]
    assert "rebuild-index" in damage[0]["fix"]
    assert summary["records"] == RECORDS, "the rest is checked nevertheless"


def test_a_lost_index_beside_a_damaged_log_cannot_be_rebuilt_completely(bookie: Path, log: Path) -> None:
    shutil.rmtree(bookie / "ledgers" / "current" / "index")
    bookie_directory.flip(log, location(log, 1, 7) + 100)
    damage, _ = check(bookie)
    assert "limbo" in damage[-1]["fix"]
    assert "cannot be rebuilt completely" in damage[-1]["text"]


def test_a_damaged_index_is_found(bookie: Path) -> None:
    files = sorted((bookie / "ledgers" / "current" / "index").glob("*.log"))
    bookie_directory.flip(files[-1], 300)
    damage, summary = check(bookie)
    assert damage
    assert all("index" in each["path"] for each in damage)
    assert summary["records"] == RECORDS


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


def test_an_entry_missing_in_the_index_is_found(bookie: Path, index: Index) -> None:
    """Every digest is right, yet the bookie would report 20 entries as missing: the worst kind of damage."""
    index._kv.write_batch([], [index_format.run_key(2, 0)])
    index.close()
    damage, _ = check(bookie)
    assert {each["text"] for each in damage} == {"this entry is missing in the index"}
    assert [each["entry_id"] for each in damage] == list(range(0, 60, 3))
    assert all("rebuild-index" in each["fix"] for each in damage)


def test_many_entries_missing_in_the_index_are_counted(bookie: Path, index: Index) -> None:
    index._kv.write_batch([], [index_format.run_key(1, 0)])
    index.close()
    *reported, rest = check(bookie)[0]
    assert len(reported) == 20
    assert (rest["text"], rest["more"]) == ("more entries that are missing in the index", 40)


def test_a_location_that_holds_another_entry_is_found(bookie: Path, log: Path, index: Index) -> None:
    place = 1 << entry_log_format.OFFSET_BITS | location(log, 3, 2)
    index._kv.write_batch([(index_format.run_key(3, 0), index_format.pack_run(place, [276]))])
    index.close()
    damage, _ = check(bookie)
    by_text = {each["text"]: each for each in damage}
    assert by_text["entry cannot be read: the record's ledger id or entry id differs from the index"]["entry_id"] == 0
    assert by_text["this entry is missing in the index"]["ledger_id"] == 3


def test_a_lost_fence_and_a_short_row_are_found(bookie: Path, index: Index) -> None:
    row = index.ledger_row(3)
    assert row is not None
    changed = index_format.LedgerRow(b"x" * 20, False, row.lac, 1, None)
    index.commit(runs=[], merges={}, ledgers={3: changed}, deleted=(), generation=None)
    index.close()
    assert {each["text"] for each in check(bookie)[0]} == {
        "the last entry id in the ledger row is lower than that of the ledger's last run",
        "the ledger is fenced in the entry logs and not in the index",
        "entry logs and index have different keys",
    }


@pytest.mark.parametrize(("generation", "text"), [(0, "lost flushes"), (9, "newer than LastLogMark")])
def test_an_index_of_another_generation_is_found(bookie: Path, index: Index, generation: int, text: str) -> None:
    index.commit(runs=[], merges={}, ledgers={}, deleted=(), generation=generation)
    index.close()
    damage, _ = check(bookie)
    assert text in damage[0]["text"]


def test_a_journal_damaged_in_the_middle_is_found(bookie: Path, journal: Path) -> None:
    mark = read_mark(RealDisk(), str(bookie / "ledgers" / "current"))
    assert mark is not None
    first = mark.journal.offset
    bookie_directory.flip(journal, first + 40)
    # A group behind the damage proves that it is not a torn end.
    group = journal_format.pack_group(
        journal_format.pack_record_size(16) + b"r" * 16, journal_id=2, sequence=mark.journal.sequence + 1
    )
    file = RealDisk().open_read(str(journal))
    end = first + 2048
    assert journal_format.find_group(file, journal_id=2, offset=first + 512) is None
    data = bytearray(journal.read_bytes())
    data[end : end + len(group)] = group
    journal.write_bytes(data)
    (finding,) = check(bookie)[0]
    assert finding["text"].startswith("journal group is damaged")
    assert finding["offset"] == first
    assert "salvage" in finding["fix"]


def test_a_torn_journal_end_is_no_damage(bookie: Path, journal: Path) -> None:
    mark = read_mark(RealDisk(), str(bookie / "ledgers" / "current"))
    assert mark is not None
    data = bytearray(journal.read_bytes())
    data[mark.journal.offset + 1024 :] = bytes(len(data) - mark.journal.offset - 1024)
    journal.write_bytes(data)
    damage, summary = check(bookie)
    assert damage == []
    assert summary["journal_records"] == 0


def test_a_damaged_mark_and_a_lost_journal_are_found(bookie: Path, journal: Path) -> None:
    journal.rename(journal.with_name("77.txn"))
    assert "missing" in check(bookie)[0][0]["text"]
    bookie_directory.flip(bookie / "ledgers" / "current" / "LastLogMark", 20)
    (finding,) = check(bookie)[0]
    assert "LastLogMark is damaged" in finding["text"]
    (bookie / "ledgers" / "current" / "LastLogMark").unlink()
    assert "missing, although there are entry logs" in check(bookie)[0][0]["text"]


def test_a_damaged_list_of_logs_is_found(bookie: Path) -> None:
    write_manifest(RealDisk(), str(bookie / "ledgers" / "current"), LogManifest(absent=((2, 3),)))
    assert check(bookie)[0] == []
    bookie_directory.flip(bookie / "ledgers" / "current" / "entry-logs", 10)
    (finding,) = check(bookie)[0]
    assert finding["path"].endswith("entry-logs")


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


def test_a_compaction_missing_in_the_index_is_found(bookie: Path) -> None:
    write_manifest(RealDisk(), str(bookie / "ledgers" / "current"), LogManifest(switches=1))
    assert "the index lost a compaction" in check(bookie)[0][0]["text"]


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
