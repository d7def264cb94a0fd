"""LogCheck compares the entry logs of a stopped bookie with its index, and judges each damaged region."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import bookie_directory
import pytest
from bindery_bookie.offline.findings import DAMAGE, DEAD, NOTE, Finding, Totals
from bindery_bookie.offline.log_check import FIX_DEAD, FIX_HEAL, FIX_REGION, LogCheck
from bindery_bookie.offline.places import Place, ReadOnlyDisk
from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.entry_log import entry_log_format
from bindery_bookie.storage.entry_log.entry_log_scan import EntryLogScanner, LogRecord
from bindery_bookie.storage.entry_log.log_manifest import LogManifest, read_manifest
from bindery_bookie.storage.index import index_format
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.index.index_format import LedgerRow
from bindery_bookie.storage.io.kv import LevelDbKV
from bindery_bookie.storage.journal.journal_format import JournalPosition
from bindery_bookie.storage.journal.mark import LastLogMark, read_mark
from bookie_directory import KEY, RECORDS, body, flip, location

HEADER = entry_log_format.RECORD_HEADER_SIZE
DISK = ReadOnlyDisk()


@dataclass
class Result:
    findings: list[Finding]
    totals: Totals
    read: int
    """Bytes of progress."""

    @property
    def texts(self) -> list[tuple[str, str]]:
        return [(finding.severity, finding.text) for finding in self.findings]


def check(
    current: Path,
    *,
    mark: LastLogMark | None = None,
    manifest: LogManifest | None = None,
    is_in_limbo: bool = False,
) -> Result:
    """Check a directory, by default with its own mark and manifest."""
    if mark is None:
        mark = read_mark(DISK, str(current))
        assert mark is not None
    totals, steps = Totals(), list[int]()
    place = Place(str(current), None, has_journal=False, has_ledgers=True)
    made = LogCheck(
        DISK,
        place,
        mark,
        manifest or read_manifest(DISK, str(current)),
        totals,
        is_in_limbo=is_in_limbo,
        advance=steps.append,
    )
    return Result(list(made.run()), totals, sum(steps))


def own_mark(current: Path) -> LastLogMark:
    mark = read_mark(DISK, str(current))
    assert mark is not None
    return mark


def hand_made(
    current: Path,
    records: Sequence[bytes],
    *,
    indexed: Mapping[tuple[int, int], int],
    rows: Mapping[int, LedgerRow],
) -> LastLogMark:
    """Write log 1 with these records and an index, and return the mark. `indexed`: (ledger, entry) -> record."""
    current.mkdir(parents=True)
    data = entry_log_format.pack_file_header(1)
    offsets = []
    for record in records:
        offsets.append(len(data) + HEADER)
        data += entry_log_format.pack_record(record)
    (current / "1.log").write_bytes(data)
    index = Index(LevelDbKV(str(current / "index")))
    place = 1 << entry_log_format.OFFSET_BITS
    index.commit(
        runs=[
            (
                index_format.run_key(ledger, entry),
                index_format.pack_run(place | offsets[number], [len(records[number])]),
            )
            for (ledger, entry), number in indexed.items()
        ],
        merges={},
        ledgers=rows,
        deleted=(),
        generation=1,
    )
    index.close()
    return LastLogMark(1, JournalPosition(1, 512, 1), 1, len(data))


def row(key: bytes = KEY, *, fenced: bool = False, last: int = 0) -> LedgerRow:
    return LedgerRow(key, fenced, -1, last, None)


def change(index: Index, *, ledgers: Mapping[int, LedgerRow] | None = None, generation: int | None = None) -> None:
    index.commit(runs=[], merges={}, ledgers=ledgers or {}, deleted=(), generation=generation)
    index.close()


def records_of(log: Path) -> list[LogRecord]:
    return [item for item in EntryLogScanner(DISK, str(log.parent)).scan(1) if isinstance(item, LogRecord)]


def next_to(log: Path, ledger_id: int, entry_id: int, step: int) -> LogRecord:
    """Return the record that many records after the first one with these ids."""
    records = records_of(log)
    at = next(at for at, one in enumerate(records) if (one.ledger_id, one.entry_id) == (ledger_id, entry_id))
    return records[at + step]


# --- sound logs


def test_logs_and_index_of_a_crashed_bookie_agree(current: Path, log: Path) -> None:
    result = check(current)
    assert result.findings == []
    size = log.stat().st_size
    assert result.totals == Totals(logs=1, log_bytes=size, records=RECORDS, ledgers=4, entries=92, dead_records=7), (
        "the dead records are those of the deleted ledger 4"
    )
    assert result.read == size - entry_log_format.HEADER_SIZE


def test_bytes_after_the_mark_are_neither_read_nor_damage(current: Path, log: Path) -> None:
    size = log.stat().st_size
    log.write_bytes(log.read_bytes() + b"unfinished")
    (log.parent / "2.log").write_bytes(b"")
    result = check(current)
    unfinished = "left by a flush or compaction that did not finish; the next start removes it"
    assert result.findings == [
        Finding(NOTE, f"{current}/2.log", unfinished),
        Finding(NOTE, str(log), "written by a flush that did not finish; the next start removes it", size),
    ]
    assert result.totals.log_bytes == size
    assert result.totals.logs == 1


def test_records_after_the_mark_belong_to_a_flush_whose_index_was_written(current: Path, log: Path) -> None:
    """The crash was between the writes of index and mark."""
    size = log.stat().st_size
    record = body(1, 60)
    log.write_bytes(log.read_bytes() + entry_log_format.pack_record(record))
    second = entry_log_format.pack_file_header(2) + entry_log_format.pack_record(body(1, 61))
    (current / "2.log").write_bytes(second)
    index = Index(LevelDbKV(str(current / "index")))
    old = index.ledger_row(1)
    assert old is not None
    bits = entry_log_format.OFFSET_BITS
    places = {60: 1 << bits | size + HEADER, 61: 2 << bits | entry_log_format.HEADER_SIZE + HEADER}
    index.commit(
        runs=[(index_format.run_key(1, at), index_format.pack_run(place, [296])) for at, place in places.items()],
        merges={},
        ledgers={1: replace(old, last_entry_id=61)},
        deleted=(),
        generation=3,
    )
    index.close()
    result = check(current)
    assert result.findings == []
    assert (result.totals.logs, result.totals.entries, result.totals.records) == (2, 94, RECORDS + 2)
    assert result.totals.log_bytes == size + HEADER + 296 + len(second)


def test_a_compacted_bookie_is_sound(tmp_path: Path) -> None:
    made = bookie_directory.make_compacted(tmp_path / "bookie")
    result = check(made / "ledgers" / "current")
    assert result.findings == []
    assert (result.totals.ledgers, result.totals.entries) == (2, 410)


# --- damaged regions


def test_a_bad_entry_is_found_and_named(current: Path, log: Path) -> None:
    offset = location(log, 1, 7)
    flip(log, offset + 100)
    assert check(current).findings == [
        Finding(DAMAGE, str(log), "entry digest mismatch", offset - HEADER, FIX_REGION, {"size": 284}),
        Finding(
            DAMAGE,
            str(log),
            "entry cannot be read: entry digest mismatch",
            offset,
            FIX_HEAL,
            {"ledger_id": 1, "entry_id": 7},
        ),
    ]


def test_two_bad_entries_of_one_run_are_both_damage(current: Path, log: Path) -> None:
    offsets = [location(log, 1, entry_id) for entry_id in (7, 9)]
    for offset in offsets:
        flip(log, offset + 100)
    found = [finding for finding in check(current).findings if finding.text == "entry digest mismatch"]
    assert [(one.severity, one.offset) for one in found] == [(DAMAGE, offset - HEADER) for offset in offsets]


def test_bytes_of_an_entry_that_was_stored_again_are_dead(bookie: Path, current: Path, log: Path) -> None:
    """Damage of an entry counts until the bookie stored the entry again."""
    start = location(log, 1, 7)
    flip(log, start + 100)
    bookie_directory.repair(bookie, {1: range(7, 8)})
    assert [one for one in check(current).findings if one.severity != NOTE] == [
        Finding(DEAD, str(log), "entry digest mismatch", start - HEADER, FIX_DEAD, {"size": 284})
    ]


def test_bytes_of_a_deleted_ledger_are_dead(current: Path, log: Path) -> None:
    flip(log, location(log, 4, 2) + 50)
    assert check(current).texts == [(DEAD, "entry digest mismatch")]


@pytest.mark.parametrize(("ledger_id", "entry_id", "step"), [(3, 4, 1), (2, 60, -1)], ids=["behind", "before"])
def test_dead_bytes_next_to_a_live_entry_are_dead(
    current: Path, log: Path, ledger_id: int, entry_id: int, step: int
) -> None:
    """An entry of the deleted ledger 4 follows the last one of ledger 3; the key of ledger 5 is before ledger 2's."""
    record = next_to(log, ledger_id, entry_id, step)
    assert (record.ledger_id, record.entry_id) in ((4, 0), (5, control.MASTER_KEY))
    flip(log, record.offset + len(record.body) - 1)
    assert check(current).texts == [(DEAD, "entry digest mismatch")]


def test_entries_behind_damage_that_were_deleted_later_leave_it_dead(current: Path, log: Path) -> None:
    """Entries 3 .. 9 of the old ledger 5 are not in the index, and its deletion is recorded after them."""
    flip(log, location(log, 5, 2) + 50)
    assert check(current).texts == [(DEAD, "entry digest mismatch")]


def test_in_limbo_no_damage_is_dead(current: Path, log: Path) -> None:
    """An index that was rebuilt without the damaged bytes does not prove that no entry is stored there."""
    flip(log, location(log, 4, 2) + 50)
    (finding,) = check(current, is_in_limbo=True).findings
    assert (finding.severity, finding.fix) == (DAMAGE, FIX_REGION)


def test_an_entry_lost_by_the_index_behind_damage_makes_it_damage(current: Path, log: Path, index: Index) -> None:
    flip(log, location(log, 1, 7) + 100)
    index._kv.write_batch([], [index_format.run_key(2, 0), index_format.run_key(1, 0)])
    index.close()
    result = check(current)
    assert (DAMAGE, "entry digest mismatch") in result.texts
    missing = [one.facts["entry_id"] for one in result.findings if one.text == "this entry is missing in the index"]
    assert missing == list(range(7)), "records behind the damage are not reported one by one"


def test_a_damaged_header_is_never_dead(current: Path, log: Path) -> None:
    flip(log, 5)
    assert check(current).findings == [
        Finding(DAMAGE, str(log), "entry log header is damaged", 0, FIX_REGION, {"size": 32})
    ]


def test_a_log_truncated_between_two_records_is_damage(current: Path, log: Path) -> None:
    mark = replace(own_mark(current), log_id=2, log_offset=32)
    size = log.stat().st_size
    (finding, absent) = sorted(check(current, mark=mark, manifest=LogManifest(unsealed={})).findings, key=str)
    assert (finding.severity, finding.offset, finding.facts) == (DAMAGE, size, {"size": 0})
    assert finding.text.startswith("entry log is cut")
    assert absent == Finding(NOTE, f"{current}/2.log", "entry log is missing, and nothing in it is needed")


@pytest.mark.parametrize("size", [20_000, 60])
def test_a_short_log_is_found(current: Path, log: Path, size: int) -> None:
    log.write_bytes(log.read_bytes()[:-size])
    result = check(current)
    assert (DAMAGE, "entry log is short") in result.texts
    lost = [one for one in result.findings if one.text.startswith("entry cannot be read") or "more" in one.facts]
    assert lost
    assert result.totals.entries == 92


# --- missing logs


def test_a_lost_log_is_found_with_all_its_entries(current: Path, log: Path) -> None:
    log.unlink()
    result = check(current)
    assert result.findings[0] == Finding(DAMAGE, str(log), "entry log is missing", fix=FIX_HEAL)
    counts: dict[int, int] = {}
    for one in result.findings[1:]:
        if "more" not in one.facts:
            counts[one.facts["ledger_id"]] = counts.get(one.facts["ledger_id"], 0) + 1
    assert counts == {1: 20, 2: 20, 3: 5, 5: 3}
    assert [one for one in result.findings if "more" in one.facts] == [
        Finding(DAMAGE, str(current), "more entries that cannot be read", None, FIX_HEAL, {"ledger_id": 1, "more": 40}),
        Finding(DAMAGE, str(current), "more entries that cannot be read", None, FIX_HEAL, {"ledger_id": 2, "more": 4}),
    ]
    assert result.totals.logs == 0


def test_a_log_in_which_the_index_has_nothing_may_be_missing(current: Path) -> None:
    mark = replace(own_mark(current), log_id=3, log_offset=32)
    assert check(current, mark=mark, manifest=LogManifest()).findings == [
        Finding(NOTE, f"{current}/{log_id}.log", "entry log is missing, and nothing in it is needed")
        for log_id in (2, 3)
    ]


def test_a_log_outside_the_manifest_is_damage_if_the_index_points_into_it(current: Path) -> None:
    result = check(current, manifest=LogManifest(absent=((1, 1),)))
    wrong = [one for one in result.findings if one.text == "the index points into an entry log that is not in use"]
    assert [one.facts for one in wrong] == [{"ledger_id": ledger_id, "log": "1.log"} for ledger_id in (1, 2, 3, 5)]
    assert {one.severity for one in wrong} == {DAMAGE}
    assert {one.fix.partition(" ")[0] for one in wrong} == {"stop"}
    assert (NOTE, "left by a flush or compaction that did not finish; the next start removes it") in result.texts


def test_a_log_beyond_the_mark_is_not_in_use_although_the_index_points_into_it(current: Path, index: Index) -> None:
    """Each log is reported once for each ledger, although two runs of ledger 2 point into log 7."""
    bits = entry_log_format.OFFSET_BITS
    rows = [
        (index_format.run_key(2, first), index_format.pack_run(log_id << bits | 40, [276]))
        for first, log_id in ((70, 7), (80, 7), (90, 8))
    ]
    index._kv.write_batch(rows, [])
    index.close()
    wrong = [
        one for one in check(current).findings if one.text == "the index points into an entry log that is not in use"
    ]
    assert [one.facts for one in wrong] == [{"ledger_id": 2, "log": "7.log"}, {"ledger_id": 2, "log": "8.log"}]


# --- the index


def rebuild_of(current: Path) -> str:
    return f"stop the bookie, then: bindery bookie rebuild-index {current.parent}; a start does it too"


def test_a_lost_index_is_damage_that_a_rebuild_repairs(current: Path) -> None:
    shutil.rmtree(current / "index")
    result = check(current)
    assert result.findings == [Finding(DAMAGE, f"{current}/index", "the index is lost", fix=rebuild_of(current))]
    assert result.totals.records == RECORDS, "the rest is checked nevertheless"
    assert result.totals.dead_records == 0
    assert result.totals.ledgers == 0


def test_a_lost_index_beside_a_damaged_log_cannot_be_rebuilt_completely(current: Path, log: Path) -> None:
    shutil.rmtree(current / "index")
    flip(log, location(log, 4, 2) + 50)
    result = check(current)
    assert result.texts == [
        (DAMAGE, "the index is lost"),
        (DAMAGE, "entry digest mismatch"),
        (DAMAGE, "the index and parts of the entry logs are lost: the index cannot be rebuilt completely"),
    ]
    assert result.findings[-1].path == str(current)
    assert "goes into limbo" in result.findings[-1].fix


def test_a_lost_index_beside_a_lost_log_cannot_be_rebuilt_completely(current: Path, log: Path) -> None:
    shutil.rmtree(current / "index")
    log.unlink()
    assert [text for _, text in check(current).texts] == [
        "the index is lost",
        "entry log is missing",
        "the index and parts of the entry logs are lost: the index cannot be rebuilt completely",
    ]


def test_a_damaged_table_is_found_in_the_middle_of_the_check(current: Path, log: Path) -> None:
    """LevelDB detects the damage only when it reads the block. The logs are then checked again without the index."""
    path = current / "index"
    LevelDbKV(str(path)).close()  # opening it writes the content of its log to a table
    (table,) = path.glob("*.ldb")
    assert check(current).findings == []
    flip(table, 200)
    flip(log, location(log, 4, 2) + 50)
    result = check(current)
    assert result.texts[1:] == [
        (DAMAGE, "entry digest mismatch"),
        (DAMAGE, "the index and parts of the entry logs are lost: the index cannot be rebuilt completely"),
    ]
    result.findings = result.findings[:1]
    assert {(one.severity, one.path, one.fix) for one in result.findings} == {
        (DAMAGE, str(path), rebuild_of(current))
    }, "not the copy in the temporary directory"
    assert (result.totals.logs, result.totals.records) == (1, RECORDS - 1)
    assert result.totals.log_bytes == log.stat().st_size
    assert result.totals.dead_records == 0


def test_a_damaged_log_of_leveldb_is_found(current: Path) -> None:
    path = sorted((current / "index").glob("*.log"))[-1]
    flip(path, 300)
    result = check(current)
    assert {(one.severity, one.path, one.fix) for one in result.findings} == {
        (DAMAGE, f"{current}/index", rebuild_of(current))
    }
    assert result.totals.records == RECORDS


def test_a_log_that_cannot_be_opened_ends_the_check(current: Path, log: Path) -> None:
    log.unlink()
    log.mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        check(current)


def test_an_entry_missing_in_the_index_is_found(current: Path, log: Path, index: Index) -> None:
    """Every digest is right, yet the bookie would report 20 entries as missing: the worst kind of damage."""
    index._kv.write_batch([], [index_format.run_key(2, 0)])
    index.close()
    assert check(current).findings == [
        Finding(
            DAMAGE,
            str(log),
            "this entry is missing in the index",
            location(log, 2, entry_id),
            rebuild_of(current),
            {"ledger_id": 2, "entry_id": entry_id},
        )
        for entry_id in range(0, 60, 3)
    ]


def test_many_entries_missing_in_the_index_are_counted(current: Path, index: Index) -> None:
    index._kv.write_batch([], [index_format.run_key(1, 0)])
    index.close()
    *reported, rest = check(current).findings
    assert [one.facts["entry_id"] for one in reported] == list(range(20))
    text = "more entries that are missing in the index"
    assert rest == Finding(DAMAGE, f"{current}/index", text, facts={"ledger_id": 1, "more": 40})


def test_a_location_that_holds_another_entry_is_found(current: Path, log: Path, index: Index) -> None:
    place = 1 << entry_log_format.OFFSET_BITS | location(log, 3, 2)
    index._kv.write_batch([(index_format.run_key(3, 0), index_format.pack_run(place, [276]))], [])
    index.close()
    found = {(one.text, one.facts.get("entry_id")): one for one in check(current).findings}
    wrong = found["entry cannot be read: the record's ledger id or entry id differs from the index", 0]
    assert (wrong.path, wrong.offset) == (str(log), location(log, 3, 2))
    assert {entry for text, entry in found if text == "this entry is missing in the index"} == {1, 2, 3, 4}


def test_overlapping_runs_are_found(current: Path, log: Path, index: Index) -> None:
    place = 1 << entry_log_format.OFFSET_BITS | location(log, 1, 59)
    index._kv.write_batch([(index_format.run_key(1, 59), index_format.pack_run(place, [296]))], [])
    index.close()
    assert check(current).findings == [
        Finding(
            DAMAGE,
            f"{current}/index",
            "runs overlap",
            fix=rebuild_of(current),
            facts={"ledger_id": 1, "first_entry_id": 59},
        )
    ]


def test_a_lost_fence_another_key_and_a_short_row_are_found(current: Path, index: Index) -> None:
    changed = index.ledger_row(3)
    assert changed is not None
    change(index, ledgers={3: LedgerRow(b"x" * 20, False, changed.lac, 1, None)})
    path, fix = f"{current}/index", rebuild_of(current)
    assert check(current).findings == [
        Finding(
            DAMAGE,
            path,
            "the last entry id in the ledger row is lower than that of the ledger's last run",
            fix=fix,
            facts={"ledger_id": 3, "row": 1, "indexed": 4},
        ),
        Finding(
            DAMAGE,
            path,
            "the ledger is fenced in the entry logs and not in the index",
            fix=fix,
            facts={"ledger_id": 3},
        ),
        Finding(DAMAGE, path, "entry logs and index have different keys", fix=fix, facts={"ledger_id": 3}),
    ]


def test_a_ledger_in_limbo_is_a_note(current: Path, index: Index) -> None:
    old = index.ledger_row(3)
    assert old is not None
    change(index, ledgers={3: replace(old, is_limbo=True)})
    assert check(current).findings == [
        Finding(NOTE, f"{current}/index", "a ledger is in limbo", facts={"ledger_id": 3})
    ]


@pytest.mark.parametrize("generation", [0, 1])
def test_an_index_older_than_the_mark_is_not_compared(current: Path, index: Index, generation: int) -> None:
    change(index, generation=generation)
    result = check(current)
    assert result.findings == [
        Finding(
            DAMAGE,
            f"{current}/index",
            "the index lost flushes",
            fix=rebuild_of(current),
            facts={"index_generation": generation, "mark_generation": 2},
        )
    ]
    assert (result.totals.ledgers, result.totals.records) == (0, RECORDS)


def test_an_index_newer_than_the_mark_is_damage_and_is_compared(current: Path, index: Index) -> None:
    change(index, generation=4)
    result = check(current)
    assert result.findings == [
        Finding(
            DAMAGE,
            f"{current}/index",
            "the index is newer than LastLogMark",
            fix=rebuild_of(current),
            facts={"index_generation": 4, "mark_generation": 2},
        )
    ]
    assert result.totals.ledgers == 4


def test_an_index_one_flush_ahead_is_sound(current: Path, index: Index) -> None:
    change(index, generation=3)
    assert check(current).findings == []


def test_a_compaction_missing_in_the_index_is_found(current: Path) -> None:
    result = check(current, manifest=LogManifest(switches=1))
    assert result.findings == [
        Finding(
            DAMAGE,
            f"{current}/index",
            "the index lost a compaction",
            fix=rebuild_of(current),
            facts={"index_switches": 0, "switches": 1},
        )
    ]
    assert result.totals.ledgers == 4, "the rest is compared"


def test_an_index_one_compaction_ahead_is_sound(current: Path, index: Index) -> None:
    index.set_switches(1)
    index.close()
    assert check(current).findings == []


# --- control records


def test_a_deletion_voids_the_key_and_the_fence_before_it(tmp_path: Path) -> None:
    records = [
        control.pack_master_key(1, b"old"),
        control.pack_fence(1),
        control.pack_deleted(1),
        control.pack_master_key(1, b"new"),
        body(1, 0),
    ]
    mark = hand_made(tmp_path / "current", records, indexed={(1, 0): 4}, rows={1: row(b"new")})
    assert check(tmp_path / "current", mark=mark).findings == []


def test_the_first_key_of_a_ledger_counts(tmp_path: Path) -> None:
    records = [control.pack_master_key(1, b"a"), control.pack_master_key(1, b"b"), body(1, 0)]
    mark = hand_made(tmp_path / "a", records, indexed={(1, 0): 2}, rows={1: row(b"a")})
    assert check(tmp_path / "a", mark=mark).findings == []
    mark = hand_made(tmp_path / "b", records, indexed={(1, 0): 2}, rows={1: row(b"b")})
    assert check(tmp_path / "b", mark=mark).texts == [(DAMAGE, "entry logs and index have different keys")]


def test_a_row_without_a_key_matches_any(tmp_path: Path) -> None:
    records = [control.pack_master_key(1, b"a"), body(1, 0)]
    mark = hand_made(tmp_path / "current", records, indexed={(1, 0): 1}, rows={1: row(b"")})
    assert check(tmp_path / "current", mark=mark).findings == []


def test_a_ledger_fenced_in_logs_and_index_is_sound(tmp_path: Path) -> None:
    records = [control.pack_master_key(1, KEY), control.pack_fence(1), body(1, 0)]
    mark = hand_made(tmp_path / "current", records, indexed={(1, 0): 2}, rows={1: row(fenced=True)})
    assert check(tmp_path / "current", mark=mark).findings == []


def test_entries_of_several_ledgers_in_any_order_are_matched(tmp_path: Path) -> None:
    """An index of an older copy of an entry points at it; the copy that the index does not name is dead."""
    keys = [(1, 0), (2, 0), (1, 5), (2, 1), (1, 0)]
    records = [body(*key) for key in keys]
    indexed = {(2, 0): 1, (1, 5): 2, (2, 1): 3, (1, 0): 4}
    mark = hand_made(tmp_path / "current", records, indexed=indexed, rows={1: row(last=5), 2: row(last=1)})
    result = check(tmp_path / "current", mark=mark)
    assert result.findings == []
    assert (result.totals.entries, result.totals.records, result.totals.dead_records) == (4, 5, 0)
