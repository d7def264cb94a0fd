"""ShardCheck checks the mark, the journal and the small files of a shard, and names the fix of each damage."""

import shutil
from pathlib import Path

import pytest
from bindery_bookie.offline.check import ShardCheck, work_size
from bindery_bookie.offline.findings import DAMAGE, NOTE, Finding, Totals
from bindery_bookie.offline.places import ShardPlaces, find_places, pair_places
from bindery_bookie.storage.corruption.limbo import write_marker
from bindery_bookie.storage.entry_log import entry_log_format
from bindery_bookie.storage.entry_log.log_manifest import LogManifest, write_manifest
from bindery_bookie.storage.io.disk import RealDisk
from bindery_bookie.storage.journal import journal_format
from bindery_bookie.storage.journal.mark import read_mark
from bindery_core.formats.cookie import Cookie
from bookie_directory import RECORDS, fingerprint, flip, location, make_compacted

NO_OWNER = "there is no VERSION file: the owner of this data is unknown"


def places_of(*directories: Path) -> ShardPlaces:
    (pair,) = pair_places(find_places([str(directory) for directory in directories]))
    return pair


def check(*directories: Path) -> tuple[list[Finding], Totals]:
    """Return the findings other than the one about the owner, and the totals. Assert that no file changes."""
    before = fingerprint(directories[0])
    made = ShardCheck(places_of(*directories))
    findings = [finding for finding in made.run() if finding.text != NO_OWNER]
    assert fingerprint(directories[0]) == before
    return findings, made.totals


def salvage_of(bookie: Path) -> str:
    return f"stop the bookie, then: bindery bookie salvage {bookie}/journal {bookie}/ledgers"


def last_group(journal: Path) -> tuple[int, int]:
    """Return (sequence after the last group, end of the last group)."""
    file = RealDisk().open_read(str(journal))
    groups = list(
        journal_format.read_groups(file, path=str(journal), journal_id=2, offset=512, sequence=first(journal))
    )
    file.close()
    return groups[-1].sequence + 1, groups[-1].offset + groups[-1].size


def first(journal: Path) -> int:
    file = RealDisk().open_read(str(journal))
    sequence = journal_format.sequence_at(file, journal_id=2, offset=512)
    file.close()
    assert sequence is not None
    return sequence


def test_a_crashed_bookies_directory_is_sound(pristine: Path) -> None:
    steps: list[int] = []
    made = ShardCheck(places_of(pristine), advance=steps.append)
    assert list(made.run()) == [Finding(NOTE, f"{pristine}/ledgers/current/VERSION", NO_OWNER)]
    log = pristine / "ledgers" / "current" / "1.log"
    assert made.totals == Totals(
        journal_groups=1,
        journal_records=7,
        logs=1,
        log_bytes=log.stat().st_size,
        records=RECORDS,
        ledgers=4,
        entries=92,
        dead_records=7,
    )
    assert work_size(places_of(pristine)) == log.stat().st_size
    groups = sum(steps) - (log.stat().st_size - entry_log_format.HEADER_SIZE)
    assert groups > 0
    assert groups % journal_format.SECTOR_SIZE == 0


# --- small files


def test_the_owner_is_read_from_the_version_file_of_the_configured_directory(bookie: Path, current: Path) -> None:
    cookie = Cookie(bookie_id="b-1:3181", journal_dirs=("/j",), ledger_dirs=("/l",))
    (current / "VERSION").write_bytes(cookie.text())
    assert list(ShardCheck(places_of(bookie)).run()) == []
    (current / "VERSION").write_bytes(b"\0" * 10)
    (finding,) = ShardCheck(places_of(bookie)).run()
    assert (finding.severity, finding.path, finding.fix) == (
        DAMAGE,
        f"{current}/VERSION",
        "bindery bookie cookie adopt",
    )


def test_limbo_is_a_note(bookie: Path, current: Path) -> None:
    write_marker(RealDisk(), str(current), "requested by a test", 1_000)
    assert check(bookie)[0] == [Finding(NOTE, f"{current}/LIMBO", "in limbo (listing): requested by a test")]


def test_damage_in_limbo_is_not_dead(bookie: Path, current: Path, log: Path) -> None:
    """The marker is passed on to the check of the logs, in which the bytes of the deleted ledger 4 are dead."""
    flip(log, location(log, 4, 2) + 50)
    assert [one.severity for one in check(bookie)[0]] == ["dead"]
    write_marker(RealDisk(), str(current), "lost", 1_000)
    assert [one.severity for one in check(bookie)[0]] == [NOTE, DAMAGE]


def test_a_damaged_list_of_logs_is_found(bookie: Path, current: Path) -> None:
    write_manifest(RealDisk(), str(current), LogManifest(absent=((2, 3),)))
    assert check(bookie)[0] == []
    flip(current / "entry-logs", 10)
    assert check(bookie)[0] == [
        Finding(
            DAMAGE,
            f"{current}/entry-logs",
            "list of entry logs is damaged",
            0,
            "none needed: the next start writes it again",
        )
    ]


def test_logs_that_compaction_wrote_are_known_without_the_list(tmp_path: Path) -> None:
    bookie = make_compacted(tmp_path / "bookie")
    assert check(bookie)[0] == []
    (bookie / "ledgers" / "current" / "entry-logs").unlink()
    findings, totals = check(bookie)
    assert totals.entries == 410
    assert [one.text for one in findings if "not in use" in one.text] == []


def test_files_that_a_start_removes_or_rebuilds_are_notes(bookie: Path, current: Path) -> None:
    (current / "2.log.compacting").write_bytes(b"half")
    (current / "rebuild-index").write_bytes(b"requested by a test\n")
    (current / "other").write_bytes(b"")
    assert sorted(check(bookie)[0], key=str) == [
        Finding(
            NOTE,
            f"{current}/2.log.compacting",
            "left by a compaction that did not finish; the next start removes it",
        ),
        Finding(NOTE, f"{current}/rebuild-index", "the next start rebuilds the index"),
    ]


def test_a_log_with_a_damaged_header_is_left_to_the_scan(bookie: Path, current: Path) -> None:
    (current / "2.log").write_bytes(b"no header")
    left = "left by a flush or compaction that did not finish; the next start removes it"
    assert check(bookie)[0] == [Finding(NOTE, f"{current}/2.log", left)]


# --- the mark


def test_a_damaged_mark_ends_the_check_with_the_command(bookie: Path, current: Path) -> None:
    flip(current / "LastLogMark", 20)
    findings, totals = check(bookie)
    assert findings == [Finding(DAMAGE, f"{current}/LastLogMark", "LastLogMark is damaged", 0, salvage_of(bookie))]
    assert totals == Totals()


def test_a_lost_mark_is_damage_if_there_are_logs(bookie: Path, current: Path) -> None:
    (current / "LastLogMark").unlink()
    findings, _ = check(bookie)
    assert findings[0] == Finding(
        DAMAGE,
        f"{current}/LastLogMark",
        "LastLogMark is missing, although there are entry logs",
        fix=salvage_of(bookie),
    )
    assert findings[1].text.startswith("LastLogMark is missing, but there are entry logs or an index")
    assert len(findings) == 2


def test_a_new_shard_has_no_mark(tmp_path: Path) -> None:
    for name in ("l/current/index/CURRENT", "j/current/1.txn"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    note = Finding(NOTE, f"{tmp_path}/l/current/LastLogMark", "no LastLogMark: nothing was ever stored here")
    assert check(tmp_path)[0] == [note]


def test_a_journal_with_records_needs_a_mark(bookie: Path, current: Path) -> None:
    (current / "LastLogMark").unlink()
    (current / "1.log").unlink()
    note, damage = check(bookie)[0]
    assert note.text == "no LastLogMark: nothing was ever stored here"
    assert (damage.severity, damage.fix) == (DAMAGE, salvage_of(bookie))
    assert damage.text.startswith("LastLogMark is missing, but a journal")


def test_in_limbo_without_a_mark_only_the_journals_are_checked(bookie: Path, current: Path, journal: Path) -> None:
    (current / "LastLogMark").unlink()
    write_marker(RealDisk(), str(current), "salvaged", 1_000)
    findings, totals = check(bookie)
    assert [(one.severity, one.path) for one in findings] == [
        (NOTE, f"{current}/LIMBO"),
        (NOTE, f"{current}/LastLogMark"),
    ]
    assert findings[1].text.startswith("no LastLogMark, and in limbo: the next start writes it")
    assert totals.journal_groups > 2, "from the beginning of the journal"
    assert totals.logs == 0
    flip(journal, 512 + 40)
    *_, damage = check(bookie)[0]
    assert (damage.severity, damage.path, damage.fix) == (DAMAGE, str(journal), salvage_of(bookie))
    shutil.rmtree(journal.parent)
    assert len(check(bookie)[0]) == 2, "there may be no journal"


def test_a_check_without_the_journal_reports_that_it_is_partial(pristine: Path) -> None:
    findings, totals = check(pristine / "ledgers")
    current = f"{pristine}/ledgers/current"
    assert findings == [Finding(NOTE, current, "journal directory not given: the journal is not checked")]
    assert (totals.journal_groups, totals.records) == (0, RECORDS)


# --- the journal


def test_a_journal_damaged_in_the_middle_is_found(bookie: Path, current: Path, journal: Path) -> None:
    mark = read_mark(RealDisk(), str(current))
    assert mark is not None
    flip(journal, mark.journal.offset + 40)
    (finding,) = check(bookie)[0]
    assert (finding.severity, finding.path, finding.text) == (DAMAGE, str(journal), "journal group is damaged")
    assert (finding.offset, finding.fix) == (mark.journal.offset, salvage_of(bookie))


def test_a_torn_journal_end_is_no_damage(bookie: Path, current: Path, journal: Path) -> None:
    mark = read_mark(RealDisk(), str(current))
    assert mark is not None
    data = bytearray(journal.read_bytes())
    data[mark.journal.offset + 1024 :] = bytes(len(data) - mark.journal.offset - 1024)
    journal.write_bytes(data)
    findings, totals = check(bookie)
    assert findings == []
    assert totals.journal_records == 0


def test_short_records_of_a_journal_are_damage(bookie: Path, journal: Path) -> None:
    sequence, end = last_group(journal)
    data = bytearray(journal.read_bytes())
    record = journal_format.pack_record_size(15) + b"x" * 15
    group = journal_format.pack_group(record, journal_id=2, sequence=sequence)
    data[end : end + len(group)] = group
    journal.write_bytes(data)
    findings, totals = check(bookie)
    assert findings == [Finding(DAMAGE, str(journal.parent), "journal record is short", end, salvage_of(bookie))]
    assert (totals.journal_groups, totals.journal_records) == (2, 8)


def test_a_lost_journal_is_found(bookie: Path, journal: Path) -> None:
    journal.rename(journal.with_name("77.txn"))
    (finding,) = check(bookie)[0]
    assert (finding.text, finding.path, finding.fix) == ("journal is missing", str(journal), salvage_of(bookie))


def test_journals_older_than_the_mark_are_notes(bookie: Path, journal: Path) -> None:
    old = journal.with_name("1.txn")
    old.write_bytes(b"")
    assert check(bookie)[0] == [Finding(NOTE, str(old), "older than LastLogMark: no longer needed")]


def test_journals_alone_are_checked_from_their_beginning(pristine: Path) -> None:
    findings, totals = check(pristine / "journal")
    path = f"{pristine}/journal/current"
    assert findings == [Finding(NOTE, path, "ledger directory not given: only the journal is checked")]
    assert (totals.logs, totals.entries) == (0, 0)
    assert totals.journal_groups > 2
    assert totals.journal_records > 107
    assert work_size(places_of(pristine / "journal")) == 0


def following(journal_id: int = 3) -> bytes:
    return journal_format.pack_file_header(journal_id, file_size=4096).ljust(4096, b"\0")


EMPTY_HEADER = "journal header is damaged, and it is empty: the bookie ended while it created the file"
EMPTY_SHORT = "journal is short"


@pytest.mark.parametrize(
    ("is_linked", "second", "severity", "text"),
    [
        (False, None, None, ""),
        (False, bytes(4096), NOTE, EMPTY_HEADER),  # a power loss during its creation
        (False, b"", NOTE, EMPTY_HEADER),
        (True, following(), None, ""),
        (True, None, DAMAGE, "journal is missing"),
        (True, bytes(4096), DAMAGE, "journal header is damaged"),
        (True, b"", DAMAGE, "journal header is damaged"),
        (True, following()[:1024], DAMAGE, EMPTY_SHORT),
    ],
)
def test_a_journal_that_another_continues_in_must_be_whole(
    bookie: Path, journal: Path, is_linked: bool, second: bytes | None, severity: str | None, text: str
) -> None:
    if is_linked:
        sequence, end = last_group(journal)
        link = journal_format.pack_link(journal_id=2, sequence=sequence, next_journal_id=3)
        data = bytearray(journal.read_bytes())
        data[end : end + len(link)] = link
        journal.write_bytes(data)
    path = journal.with_name("3.txn")
    if second is not None:
        path.write_bytes(second)
    findings, _ = check(bookie / "journal")
    found = [(one.severity, one.text.partition(": path=")[0], one.path) for one in findings[1:]]
    assert found == ([(severity, text, str(path))] if severity else [])
    if severity == DAMAGE:
        assert (findings[1].offset, findings[1].fix) == (0, "restore the file")
        assert [one.severity for one in check(bookie)[0]] == [DAMAGE], "with the ledgers, too"


def test_a_gap_between_journals_is_found(bookie: Path, journal: Path) -> None:
    shutil.copy(journal, journal.with_name("7.txn"))
    texts = [(one.text, one.path) for one in check(bookie / "journal")[0]]
    assert ("journal is missing", str(journal.with_name("3.txn"))) in texts


def test_journals_without_a_gap_are_sound(bookie: Path, journal: Path) -> None:
    journal.with_name("3.txn").write_bytes(following())
    journal.with_name("4.txn").write_bytes(following(4))
    assert len(check(bookie / "journal")[0]) == 1


def test_a_damaged_head_of_a_journal_with_groups_is_damage(bookie: Path, journal: Path) -> None:
    flip(journal, 10)
    _, finding = check(bookie / "journal")[0]
    assert finding == Finding(DAMAGE, str(journal), "journal header is damaged", 0, "restore the file")


# --- the fix


def test_the_fix_names_a_shared_directory_by_the_shard(bookie: Path, current: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared" / "j" / "shard-1" / "current"
    shutil.copytree(bookie / "journal" / "current", shared)
    flip(current / "LastLogMark", 20)
    (finding,) = check(tmp_path / "shared" / "j", bookie / "ledgers")[0]
    assert finding.fix.endswith(f"salvage {shared.parent} {bookie}/ledgers")


def test_the_fix_names_a_directory_with_both_once(bookie: Path, current: Path, journal: Path) -> None:
    shutil.copy(journal, current)
    flip(current / "LastLogMark", 20)
    (finding,) = check(bookie / "ledgers")[0]
    assert finding.fix == f"stop the bookie, then: bindery bookie salvage {bookie}/ledgers"
