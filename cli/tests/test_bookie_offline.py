"""`bindery bookie` on directories: what it shows, what it finds, and that it leaves every byte as it was."""

import json
import multiprocessing
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bookie_directory
import pytest
from bindery.main import app
from bindery_bookie.offline import places
from bindery_bookie.storage.corruption.limbo import LimboPhase, read_marker, set_phase, write_marker
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
from typer.testing import CliRunner, Result

RECORDS = 116
"""In the entry log: 107 entries, a key for each of 6 ledgers, a fence, 2 deletions."""


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bookie_directory.make(tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def bookie(pristine: Path, tmp_path: Path) -> Path:
    """A crashed bookie of one's own, to be damaged."""
    return Path(shutil.copytree(pristine, tmp_path / "bookie"))


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["bookie", *map(str, arguments)])


def rows(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def check(bookie: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(damage found, summary). The exit code says the same as the summary, and nothing was changed."""
    before = bookie_directory.fingerprint(bookie)
    result = run("check", bookie, "--json")
    assert bookie_directory.fingerprint(bookie) == before
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    *findings, summary = rows(result)
    damage = [finding for finding in findings if finding["severity"] == "damage"]
    assert (result.exit_code, summary["verdict"]) == ((3, "damaged") if damage else (0, "sound"))
    assert all(finding["fix"] or "more" in finding for finding in damage), "whoever finds damage says what to do"
    return damage, summary


@pytest.fixture
def log(bookie: Path) -> Path:
    return bookie / "ledgers" / "current" / "1.log"


@pytest.fixture
def journal(bookie: Path) -> Path:
    (path,) = (bookie / "journal" / "current").glob("*.txn")
    return path


def location(log: Path, ledger_id: int, entry_id: int) -> int:
    """Offset of an entry's body."""
    for record in EntryLogScanner(RealDisk(), str(log.parent)).scan(1):
        if getattr(record, "ledger_id", None) == ledger_id and getattr(record, "entry_id", None) == entry_id:
            return record.offset
    raise AssertionError("no such record")


@pytest.fixture
def index(bookie: Path) -> Iterator[Index]:
    """The bookie's own index, to be spoilt."""
    index = Index(LevelDbKV(str(bookie / "ledgers" / "current" / "index")))
    yield index
    index.close()


# -- looking ----------------------------------------------------------------------------------------------------------


def test_no_verb_changes_a_byte(pristine: Path) -> None:
    before = bookie_directory.fingerprint(pristine)
    for arguments in (
        ("ledgers", pristine), ("entry", pristine, 1, 7), ("entry", pristine, 9, 1), ("journal", "dump", pristine),
        ("log", "dump", pristine), ("log", "dump", pristine, "--map"), ("index", "dump", pristine), ("check", pristine),
    ):  # fmt: skip
        result = run(*arguments)
        assert result.exit_code == 0, (arguments, result.output, result.exception)
    assert bookie_directory.fingerprint(pristine) == before


def test_no_verb_writes_over_a_table_of_an_index_whose_manifest_was_cut(bookie: Path) -> None:
    """LevelDB then takes the number of a table that is there for a new one."""
    index = bookie / "ledgers" / "current" / "index"
    shutil.rmtree(index)
    kv = LevelDbKV(str(index), write_buffer_size=64 * 1024)
    lots = random.Random(1)
    for _ in range(16):
        kv.write_batch([(lots.randbytes(8), lots.randbytes(400)) for _ in range(80)])
    kv.close()
    (manifest,) = index.glob("MANIFEST-*")
    data = manifest.read_bytes()
    tables = list(index.glob("*.ldb"))
    assert tables
    size = 0
    while size < len(data):  # at the end of each of its records: u32 digest, u16 size, u8 type
        size += 7 + int.from_bytes(data[size + 4 : size + 6], "little")
        manifest.write_bytes(data[:size])
        before = bookie_directory.fingerprint(bookie)
        for arguments in (("index", "dump", bookie), ("check", bookie), ("ledgers", bookie), ("salvage", bookie)):
            run(*arguments)
            assert bookie_directory.fingerprint(bookie) == before, (arguments, size)


def test_the_tools_disk_refuses_to_change_anything(tmp_path: Path) -> None:
    disk = places.ReadOnlyDisk()
    for change in (disk.create, disk.remove, disk.make_directories, disk.sync_directory):
        with pytest.raises(AssertionError, match="read-only tool"):
            change(str(tmp_path / "x"))
    with pytest.raises(AssertionError):
        disk.rename("a", "b")
    with pytest.raises(AssertionError):
        disk.truncate("a", 0)


def test_ledgers_counts_what_is_flushed_and_what_only_the_journal_has(pristine: Path) -> None:
    result = run("ledgers", pristine, "--json")
    found = {facts["ledger_id"]: facts for facts in rows(result)}
    assert {ledger: facts["entries"] for ledger, facts in found.items()} == {1: 64, 2: 24, 3: 5, 5: 3, 9: 2}
    assert {ledger: facts["last_entry_id"] for ledger, facts in found.items()} == {1: 63, 2: 63, 3: 4, 5: 2, 9: 1}
    assert [ledger for ledger, facts in found.items() if facts["fenced"]] == [3]
    assert found[1]["lac"] == 62
    assert found[9]["entries_in_journal_only"] == 2
    only_ledgers = rows(run("ledgers", pristine / "ledgers", "--json"))
    assert {facts["ledger_id"]: facts["entries"] for facts in only_ledgers} == {1: 60, 2: 24, 3: 5, 5: 3}


def test_ledgers_of_a_lost_index_are_read_from_the_logs(bookie: Path) -> None:
    whole = run("ledgers", bookie, "--json").stdout
    shutil.rmtree(bookie / "ledgers" / "current" / "index")
    result = run("ledgers", bookie, "--json")
    assert result.stdout == whole
    assert "there is no index; using the entry logs instead" in result.stderr


def test_an_entry_is_shown_from_the_log_and_from_the_journal(pristine: Path) -> None:
    (in_log,) = rows(run("entry", pristine, 1, 7, "--json"))
    assert (in_log["found_in"], in_log["bookie_verdict"]) == ("entry log", "good")
    assert (in_log["digest_type"], in_log["digest_verdict"], in_log["lac"]) == ("crc32c", "good", 6)
    (in_journal,) = rows(run("entry", pristine, 9, 1, "--json"))
    assert in_journal["found_in"] == "journal"
    raw = run("entry", pristine, 9, 1, "--raw")
    assert raw.stdout_bytes == bookie_directory.body(9, 1)
    assert run("entry", pristine, 1, 7, "--hex").stdout.strip() == bookie_directory.body(1, 7).hex()
    for forms in (("--raw", "--hex"), ("--raw", "--json"), ("--hex", "--decode")):
        assert run("entry", pristine, 1, 7, *forms).exit_code == 2
    text = run("entry", pristine / "ledgers", 1, 61, "--journal", pristine / "journal").stdout
    assert "payload 1/61" in text
    assert "writer's digest  crc32c good" in text


@pytest.mark.parametrize("key", [(1, 64), (4, 0), (5, 3), (77, 0)])
def test_an_entry_that_is_not_there_says_so(pristine: Path, key: tuple[int, int]) -> None:
    result = run("entry", pristine, *map(str, key))
    assert isinstance(result.exception, BinderyError)
    assert "no such entry in these directories" in str(result.exception)


def test_a_damaged_entry_is_shown_with_both_verdicts(bookie: Path, log: Path) -> None:
    bookie_directory.flip(log, location(log, 1, 7) + 100)
    result = run("entry", bookie, 1, 7, "--json")
    assert result.exit_code == 3
    (facts,) = rows(result)
    assert facts["bookie_verdict"] == "damaged"
    assert facts["problem"].startswith("entry digest mismatch")
    assert facts["digest_verdict"] == "unknown"
    assert facts["entry_id"] == 7, "what can be read of it is shown"


def test_a_journal_dump_has_groups_and_records_and_goes_on_behind_damage(bookie: Path, journal: Path) -> None:
    found = rows(run("journal", "dump", bookie, "--json"))
    groups = [facts for facts in found if facts["what"] == "group"]
    assert [group["sequence"] for group in groups] == list(range(1, len(groups) + 1))
    records = [facts for facts in found if facts["what"] == "record"]
    assert sum(group["records"] for group in groups) == len(records)
    assert {"kind": "fence", "ledger_id": 3, "size": 16, "what": "record"} in records
    assert not any("key" in name for facts in records for name in facts), "keys are secrets"
    bookie_directory.flip(journal, groups[1]["offset"] + 40)
    result = run("journal", "dump", journal, "--groups", "--json")
    assert result.exit_code == 3
    damage = [facts for facts in rows(result) if facts["what"] == "damage"]
    assert [(facts["offset"], facts["problem"]) for facts in damage] == [
        (groups[1]["offset"], "journal group is damaged")
    ]
    left = [facts["sequence"] for facts in rows(result) if facts["what"] == "group"]
    assert left == [group["sequence"] for group in groups if group["sequence"] != 2]


def test_a_journal_dump_tells_groups_that_were_zeroed(journal: Path) -> None:
    data = bytearray(journal.read_bytes())
    second = journal_format.find_group(RealDisk().open_read(str(journal)), journal_id=2, offset=1024)
    assert second is not None
    data[second : second + 512] = bytes(512)
    journal.write_bytes(data)
    damage = [facts for facts in rows(run("journal", "dump", journal, "--json")) if "problem" in facts]
    assert len(damage) == 1
    assert damage[0]["offset"] == second


def test_a_journal_that_goes_on_in_a_lost_file_is_told(bookie: Path, journal: Path) -> None:
    *_, last, _ = (facts for facts in rows(run("journal", "dump", journal, "--groups", "--json")))
    link = journal_format.pack_link(journal_id=2, sequence=last["sequence"] + 1, next_journal_id=3)
    data = bytearray(journal.read_bytes())
    end = last["offset"] + last["size"]
    data[end : end + len(link)] = link
    journal.write_bytes(data)
    assert {"what": "record", "kind": "continued", "next_journal_id": 3} in rows(
        run("journal", "dump", journal, "--json")
    )
    (finding,) = check(bookie)[0]
    assert "missing" in finding["text"]
    assert finding["path"].endswith("3.txn")


def test_a_journal_that_was_cut_is_told(journal: Path) -> None:
    journal.write_bytes(journal.read_bytes()[:-512])
    head = rows(run("journal", "dump", journal, "--json"))[0]
    assert "journal is short" in head["problem"]


def test_journals_alone_are_checked_as_strictly_as_by_a_start(bookie: Path, journal: Path) -> None:
    """Allocated size and link count with and without the ledgers' directory; what a crash leaves is no damage."""
    original = journal.read_bytes()
    facts = rows(run("journal", "dump", journal, "--groups", "--json"))
    sequence, end = facts[-2]["sequence"], facts[-1]["offset"]
    link = journal_format.pack_link(journal_id=2, sequence=sequence + 1, next_journal_id=3)
    linked = original[:end] + link + original[end + len(link) :]
    following = journal_format.pack_file_header(3, file_size=4096).ljust(4096, b"\0")
    for first, second, text, where in (
        (original, None, "", ""),
        (original, bytes(4096), "", ""),  # the power went while it was being made
        (original, b"", "", ""),
        (linked, following, "", ""),
        (linked, None, "journal is missing", "3.txn"),
        (linked, bytes(4096), "journal header is damaged", "3.txn"),
        (linked, b"", "journal header is damaged", "3.txn"),
        (linked, following[:1024], "journal is short", "3.txn"),
        (original[:-512], None, "journal is short", "2.txn"),
    ):
        journal.write_bytes(first)
        journal.with_name("3.txn").unlink(missing_ok=True)
        if second is not None:
            journal.with_name("3.txn").write_bytes(second)
        for place in (bookie, bookie / "journal"):
            damage, _ = check(place)
            found = [(finding["text"].partition(":")[0], Path(finding["path"]).name) for finding in damage]
            assert found == ([(text, where)] if text else []), place
    journal.write_bytes(original)
    shutil.copy(journal, journal.with_name("7.txn"))
    assert ("journal is missing", "3.txn") in [
        (finding["text"], Path(finding["path"]).name) for finding in check(bookie / "journal")[0]
    ]


def test_a_log_dump_filters_by_ledger_and_shows_damage(bookie: Path, log: Path) -> None:
    found = rows(run("log", "dump", bookie, "1", "--ledger", "3", "--json"))
    assert [facts["entry_id"] for facts in found if facts.get("kind") == "entry"] == [0, 1, 2, 3, 4]
    assert [facts["kind"] for facts in found if facts["what"] == "record"][:2] == ["master key", "fence"]
    offset = location(log, 3, 2)
    bookie_directory.flip(log, offset + 50)
    result = run("log", "dump", log, "--ledger", "3", "--json")
    assert result.exit_code == 3
    (region,) = [facts for facts in rows(result) if facts["what"] == "damage"]
    assert region["offset"] == offset - entry_log_format.RECORD_HEADER_SIZE
    assert [facts["entry_id"] for facts in rows(result) if facts.get("kind") == "entry"] == [0, 1, 3, 4]


def test_a_log_map_counts_bytes_by_ledger(bookie: Path) -> None:
    head, *ledgers = rows(run("log", "dump", bookie, "1", "--map", "--json"))
    assert head["sealed"] is False
    assert {facts["ledger_id"] for facts in ledgers} == {1, 2, 3, 4, 5}
    assert sum(facts["size"] for facts in ledgers) == head["size"] - entry_log_format.HEADER_SIZE


def test_an_index_dump_has_rows_and_runs(bookie: Path) -> None:
    assert "no such ledger in this index: ledger_id=77" in str(run("index", "dump", bookie, "--ledger", "77").exception)
    found = rows(run("index", "dump", bookie, "--ledger", "2", "--json"))
    assert [facts["what"] for facts in found] == ["index", "ledger", "run", "run"]
    assert [(run["first_entry_id"], run["entries"]) for run in found[2:]] == [(0, 20), (60, 4)]
    assert found[0]["generation"] == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("ledgers", "/nowhere"), ("check", "{empty}"), ("log", "dump", "{bookie}", "77"),
        ("log", "dump", "{bookie}", "xyz"), ("journal", "dump", "{log}"), ("ledgers", "{bookie}/journal"),
    ],
)  # fmt: skip
def test_wrong_directories_are_named(bookie: Path, log: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "empty").mkdir()
    filled = [word.format(empty=tmp_path / "empty", bookie=bookie, log=log) for word in arguments]
    result = run(*filled)
    assert isinstance(result.exception, BinderyError)
    assert type(result.exception).__name__ == "BadRequest", "wrong usage: exit code 2"


# -- check ------------------------------------------------------------------------------------------------------------


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


def test_an_entry_lost_by_the_index_behind_dead_bytes_is_not_taken_for_sound(bookie: Path, log: Path) -> None:
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


def test_a_lost_log_is_found_with_all_that_was_in_it(bookie: Path, log: Path) -> None:
    log.unlink()
    damage, _ = check(bookie)
    assert damage[0]["text"] == "entry log is missing"
    told = sum("entry cannot be read" in each["text"] for each in damage)
    assert told + sum(each.get("more", 0) for each in damage) == 92
    text = run("check", bookie).stdout
    assert text.count("fix: ") == len({each["fix"] for each in damage}), "one fix for many places is told once"


def test_a_bookie_without_its_journal_is_not_called_sound_as_a_whole(bookie: Path, journal: Path) -> None:
    assert run("check", bookie).stdout.splitlines()[-1].startswith("sound: ")
    shutil.rmtree(journal.parent)
    assert run("check", bookie).stdout.splitlines()[-1].startswith("sound, except the journal, which was not checked: ")


def test_what_a_flush_left_unfinished_is_a_note(bookie: Path, log: Path) -> None:
    log.write_bytes(log.read_bytes() + b"unfinished")
    (log.parent / "2.log").write_bytes(b"")
    assert check(bookie)[0] == []
    text = run("check", bookie).stdout
    assert "the next start cuts it off" in text
    assert "2.log: left by a flush or compaction that did not finish" in text


def test_a_lost_index_is_damage_that_a_rebuild_mends(bookie: Path) -> None:
    shutil.rmtree(bookie / "ledgers" / "current" / "index")
    damage, summary = check(bookie)
    assert [each["text"] for each in damage] == ["the index is lost"]
    assert "rebuild-index" in damage[0]["fix"]
    assert summary["records"] == RECORDS, "the rest is checked all the same"


def test_a_lost_index_beside_a_damaged_log_cannot_be_rebuilt_whole(bookie: Path, log: Path) -> None:
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
    """LevelDB finds that only when it reads the block, in the middle of the work."""
    path = bookie / "ledgers" / "current" / "index"
    LevelDbKV(str(path)).close()  # what was in its log is a table now
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


def test_an_entry_that_the_index_does_not_know_is_found(bookie: Path, index: Index) -> None:
    """Every digest is right, and the bookie would deny 20 entries: the worst kind of damage."""
    index._kv.write_batch([], [index_format.run_key(2, 0)])
    index.close()
    damage, _ = check(bookie)
    assert {each["text"] for each in damage} == {"this entry is missing in the index"}
    assert [each["entry_id"] for each in damage] == list(range(0, 60, 3))
    assert all("rebuild-index" in each["fix"] for each in damage)


def test_many_entries_that_the_index_does_not_know_are_counted(bookie: Path, index: Index) -> None:
    index._kv.write_batch([], [index_format.run_key(1, 0)])
    index.close()
    *told, rest = check(bookie)[0]
    assert len(told) == 20
    assert (rest["text"], rest["more"]) == ("more entries that are missing in the index", 40)


def test_a_location_that_holds_another_entry_is_found(bookie: Path, log: Path, index: Index) -> None:
    place = 1 << entry_log_format.OFFSET_BITS | location(log, 3, 2)
    index._kv.write_batch([(index_format.run_key(3, 0), index_format.pack_run(place, [276]))])
    index.close()
    damage, _ = check(bookie)
    by_text = {each["text"]: each for each in damage}
    assert by_text["entry cannot be read: another entry is there"]["entry_id"] == 0
    assert by_text["this entry is missing in the index"]["ledger_id"] == 3


def test_a_lost_fence_and_a_short_row_are_found(bookie: Path, index: Index) -> None:
    row = index.ledger_row(3)
    assert row is not None
    changed = index_format.LedgerRow(b"x" * 20, False, row.lac, 1, None)
    index.commit(runs=[], merges={}, ledgers={3: changed}, deleted=(), generation=None)
    index.close()
    assert {each["text"] for each in check(bookie)[0]} == {
        "the ledger row ends before its entries",
        "the ledger is fenced in the entry logs and not in the index",
        "entry logs and index have different keys",
    }


@pytest.mark.parametrize(("generation", "text"), [(0, "lost flushes"), (9, "newer than LastLogMark")])
def test_an_index_of_another_age_is_found(bookie: Path, index: Index, generation: int, text: str) -> None:
    index.commit(runs=[], merges={}, ledgers={}, deleted=(), generation=generation)
    index.close()
    damage, _ = check(bookie)
    assert text in damage[0]["text"]


def test_a_journal_damaged_in_the_middle_is_found(bookie: Path, journal: Path) -> None:
    mark = read_mark(RealDisk(), str(bookie / "ledgers" / "current"))
    assert mark is not None
    first = mark.journal.offset
    bookie_directory.flip(journal, first + 40)
    # A group behind it proves that it is no torn end.
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
    assert "missing beside entry logs" in check(bookie)[0][0]["text"]


def test_a_damaged_list_of_logs_is_made_anew_by_a_start(bookie: Path) -> None:
    write_manifest(RealDisk(), str(bookie / "ledgers" / "current"), LogManifest(absent=((2, 3),)))
    assert check(bookie)[0] == []
    bookie_directory.flip(bookie / "ledgers" / "current" / "entry-logs", 10)
    (finding,) = check(bookie)[0]
    assert finding["path"].endswith("entry-logs")


def test_an_absent_log_is_no_damage_but_one_that_the_index_needs_is(bookie: Path, log: Path) -> None:
    write_manifest(RealDisk(), str(log.parent), LogManifest(absent=((1, 1),)))
    damage, _ = check(bookie)
    assert any("points into an entry log that is not in use" in each["text"] for each in damage)
    assert "left by a flush or compaction that did not finish" in run("check", bookie).stdout


def test_a_log_that_was_closed_and_has_no_trailer_was_cut(tmp_path: Path) -> None:
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


def test_a_compaction_that_the_index_does_not_know_is_found(bookie: Path) -> None:
    write_manifest(RealDisk(), str(bookie / "ledgers" / "current"), LogManifest(switches=1))
    assert "the index lost a compaction" in check(bookie)[0][0]["text"]


def test_what_will_be_removed_or_rebuilt_is_noted(bookie: Path, log: Path) -> None:
    log.with_name("2.log.compacting").write_bytes(b"half")
    log.with_name("rebuild-index").write_bytes(b"somebody asks\n")
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


def test_limbo_is_told(bookie: Path) -> None:
    write_marker(RealDisk(), str(bookie / "ledgers" / "current"), "somebody wanted it", 1_000)
    assert "in limbo (listing): somebody wanted it" in run("check", bookie).stdout


# -- a bookie that runs -----------------------------------------------------------------------------------------------


def _hold(path: str, ready: Any, done: Any) -> None:
    kv = LevelDbKV(path)
    ready.set()
    done.wait(30)
    kv.close()


@pytest.fixture
def running(bookie: Path) -> Iterator[int]:
    """Another process holds the index; its id."""
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(str(bookie / "ledgers" / "current" / "index"), ready, done))
    process.start()
    try:
        assert ready.wait(30)
        assert process.pid is not None
        yield process.pid
    finally:
        done.set()
        process.join(30)


def test_a_bookie_that_runs_in_another_container_has_no_pid_here() -> None:
    assert places.bookie_of(7) == "a bookie (pid 7)"
    assert places.bookie_of(0) == "a bookie in another container"


def test_a_running_bookie_is_looked_at_with_a_warning_but_not_checked_nor_rebuilt(bookie: Path, running: int) -> None:
    looked = run("ledgers", bookie, "--json")
    assert len(rows(looked)) == 5
    assert f"a bookie (pid {running}) runs on" in looked.stderr
    for verb in ("check", "rebuild-index", "salvage"):
        result = run(verb, bookie)
        assert f"a bookie (pid {running}) runs on" in str(result.exception)
        assert "stop it" in str(result.exception)
    assert not list((bookie / "ledgers" / "current").glob("index.*"))


# -- rebuild-index ----------------------------------------------------------------------------------------------------


def test_a_rebuilt_index_says_what_the_old_one_said(bookie: Path, index: Index) -> None:
    before = run("index", "dump", bookie, "--json").stdout
    index.commit(runs=[], merges={}, ledgers={}, deleted=(), generation=0)
    index.close()
    (facts,) = rows(run("rebuild-index", bookie, "--json"))
    assert (facts["ledgers"], facts["entries"]) == (4, 107)
    assert run("index", "dump", bookie, "--json").stdout == before
    assert check(bookie)[0] == []
    assert Path(facts["kept"]).is_dir()
    assert Path(facts["kept"]).name.startswith("index.old-")
    (again,) = rows(run("rebuild-index", bookie, "--discard", "--json"))
    assert again["kept"] is None
    assert len(list((bookie / "ledgers" / "current").glob("index*"))) == 2, "the one in force and the one kept before"


def test_a_lost_index_is_rebuilt(bookie: Path) -> None:
    before = run("ledgers", bookie, "--json").stdout
    shutil.rmtree(bookie / "ledgers" / "current" / "index")
    assert run("rebuild-index", bookie / "ledgers").exit_code == 0
    assert run("ledgers", bookie, "--json").stdout == before
    assert check(bookie)[0] == []


def test_an_index_is_not_rebuilt_from_damaged_logs(bookie: Path, log: Path) -> None:
    """A partial index would deny what the damaged region held."""
    bookie_directory.flip(log, location(log, 1, 7) + 100)
    before = run("index", "dump", bookie).stdout
    result = run("rebuild-index", bookie)
    assert "goes into limbo" in str(result.exception)
    assert run("index", "dump", bookie).stdout == before, "the old one is still in force"


def test_a_rebuild_in_limbo_lists_again(bookie: Path) -> None:
    """Which ledgers are in limbo stands in the index alone."""
    current = str(bookie / "ledgers" / "current")
    write_marker(RealDisk(), current, "lost", 1_000)
    set_phase(RealDisk(), current, LimboPhase.REPAIRING)
    assert run("rebuild-index", bookie).exit_code == 0
    marker = read_marker(RealDisk(), current)
    assert marker is not None
    assert marker.phase is LimboPhase.LISTING


# -- salvage ----------------------------------------------------------------------------------------------------------


def test_there_is_nothing_to_salvage_of_a_sound_bookie(bookie: Path) -> None:
    before = bookie_directory.fingerprint(bookie)
    result = run("salvage", bookie, "--yes")
    assert result.exit_code == 0
    assert "nothing to salvage" in result.stdout
    assert bookie_directory.fingerprint(bookie) == before


def test_a_damaged_mark_is_put_aside_in_limbo_but_not_without_yes(bookie: Path) -> None:
    current = bookie / "ledgers" / "current"
    bookie_directory.flip(current / "LastLogMark", 20)
    (finding,) = check(bookie)[0]
    command = finding["fix"].partition("then: bindery bookie ")[2].split()
    assert command == ["salvage", str(bookie / "journal"), str(bookie / "ledgers")]
    before = bookie_directory.fingerprint(bookie)
    told = run(*command)
    assert told.exit_code == 1
    assert "LastLogMark is damaged" in told.stdout
    assert "to be moved to" in told.stdout
    assert bookie_directory.fingerprint(bookie) == before
    (step,) = rows(run(*command, "--yes", "--json"))
    assert step["done"]
    assert Path(step["moved_to"]).is_file()
    assert not (current / "LastLogMark").exists()
    marker = read_marker(RealDisk(), str(current))
    assert marker is not None
    assert "LastLogMark is damaged" in marker.reason
    damage, summary = check(bookie)
    assert (damage, summary["verdict"]) == ([], "sound"), "a start takes it: there is nothing more to mend"
    assert summary["journal_groups"] > 0
    notes = [row["text"] for row in rows(run("check", bookie, "--json")) if row.get("severity") == "note"]
    assert any("no LastLogMark, and in limbo: the next start writes it" in text for text in notes)


def test_what_needs_a_mark_that_is_damaged_names_what_does_not(bookie: Path) -> None:
    bookie_directory.flip(bookie / "ledgers" / "current" / "LastLogMark", 20)
    for arguments in (("ledgers", bookie), ("entry", bookie, 1, 7)):
        said = str(run(*arguments).exception)
        assert "LastLogMark is damaged" in said
        assert "`bindery bookie log dump` shows the entry logs, `bindery bookie check` what mends it" in said
    assert len(rows(run("log", "dump", bookie, "--json"))) >= RECORDS


def test_a_mark_older_than_the_index_is_salvaged_without_a_change_to_the_index(bookie: Path, index: Index) -> None:
    index.commit(runs=[], merges={}, ledgers={}, deleted=(), generation=9)
    index.close()
    files = bookie_directory.fingerprint(bookie / "ledgers" / "current" / "index")
    assert run("salvage", bookie, "--yes").exit_code == 0
    assert bookie_directory.fingerprint(bookie / "ledgers" / "current" / "index") == files
    assert list((bookie / "ledgers" / "quarantine").iterdir())


def test_salvage_wants_the_journal_too(bookie: Path) -> None:
    assert "name its directory too" in str(run("salvage", bookie / "ledgers").exception)


def test_shards_are_found_and_paired(bookie: Path, tmp_path: Path) -> None:
    """Two ledger directories with one journal directory: each shard's journal is in a place of its own."""
    root = tmp_path / "sharded"
    for shard in range(2):
        (root / f"l{shard}").mkdir(parents=True)
        shutil.copytree(bookie / "ledgers" / "current", root / f"l{shard}" / "current")
        shutil.copytree(bookie / "journal" / "current", root / "j" / f"shard-{shard}" / "current")
    pairs = places.pair_places(places.find_places([str(root)]))
    found = [(pair.ledgers, pair.journal) for pair in pairs if pair.ledgers is not None and pair.journal is not None]
    names = [(Path(ledgers.path).parent.name, Path(journal.path).parent.name) for ledgers, journal in found]
    assert names == [("l0", "shard-0"), ("l1", "shard-1")]
    damage, summary = check(root)
    assert damage == []
    assert summary["shards"] == 2


# -- shards -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bookie_directory.make_sharded(tmp_path_factory.mktemp("sharded"))


@pytest.fixture
def sharded(two_shards: Path, tmp_path: Path) -> Path:
    """A crashed bookie with journal directory `j` and ledger directories `l0` and `l1`, to be damaged."""
    return Path(shutil.copytree(two_shards, tmp_path / "sharded"))


def paired(*directories: Path) -> list[tuple[str | None, str | None]]:
    """Directories of ledgers and journals that were found to belong together."""
    return [
        tuple(None if place is None else Path(place.own_directory).name for place in (pair.ledgers, pair.journal))  # type: ignore[misc]
        for pair in places.pair_places(places.find_places([str(directory) for directory in directories]))
    ]


def test_ledgers_are_paired_with_the_journal_of_their_own_shard(sharded: Path) -> None:
    j, l0, l1 = sharded / "j", sharded / "l0", sharded / "l1"
    both = [("l0", "shard-0"), ("l1", "shard-1")]
    assert paired(sharded) == both
    assert paired(j, l0, l1) == both
    assert paired(l1, l0, j) == both[::-1]
    assert paired(j, l1) == [("l1", "shard-1"), (None, "shard-0")]
    assert paired(j / "shard-1", l1) == [("l1", "shard-1")]
    assert paired(j / "shard-0", l1) == [("l1", None), (None, "shard-0")]
    assert paired(l0, l1) == [("l0", None), ("l1", None)]
    shutil.rmtree(j / "shard-0")
    assert paired(sharded) == [("l0", None), ("l1", "shard-1")]
    assert paired(j, l0) == [("l0", None), (None, "shard-1")]


def test_a_copy_without_the_name_of_its_directory_is_paired_only_where_nothing_is_guessed(sharded: Path) -> None:
    copy = sharded / "saved"
    (sharded / "l1").rename(copy)
    assert paired(sharded / "j" / "shard-1", copy) == [("saved", "shard-1")]
    with pytest.raises(BinderyError, match="neither paths nor VERSION files say"):
        paired(sharded / "j", copy)
    for version in sharded.rglob("VERSION"):
        version.unlink()
    with pytest.raises(BinderyError, match="neither paths nor VERSION files say") as raised:
        paired(sharded / "j", sharded / "l0")
    assert f"such as {sharded}/j/shard-1" in str(raised.value)
    assert paired(sharded / "j", sharded / "l0", copy) == [("l0", "shard-0"), ("saved", "shard-1")]
    (sharded / "j" / "shard-0").rename(sharded / "j" / "shard-2")
    with pytest.raises(BinderyError, match="neither paths nor VERSION files say"):
        paired(sharded / "j", sharded / "l0", copy)


def test_a_directory_that_is_called_as_a_shard_is_no_shard_of_another(sharded: Path) -> None:
    made = bookie_directory.make_sharded(sharded / "odd", ledger_dirs=("shard-7", "shard-5"))
    assert paired(made) == [("shard-5", "shard-1"), ("shard-7", "shard-0")]
    assert {place.directory for place in places.find_places([str(made / "shard-7")])} == {str(made / "shard-7")}


def test_a_sound_shard_is_sound_beside_the_journals_of_others(sharded: Path) -> None:
    for only in ("l0", "l1"):
        before = bookie_directory.fingerprint(sharded)
        result = run("check", sharded / "j", sharded / only)
        assert result.exit_code == 0, result.output
        told = run("salvage", sharded / "j", sharded / only, "--yes")
        assert "nothing to salvage" in told.stdout
        assert bookie_directory.fingerprint(sharded) == before
    ledgers = {
        row["ledger_id"]: row["entries"] for row in rows(run("ledgers", sharded / "j", sharded / "l1", "--json"))
    }
    assert ledgers == {1: 20}, "some of them are in the journal only"
    shown = run("entry", sharded / "l1", 1, 19, "--journal", sharded / "j")
    assert (shown.exit_code, shown.exception) == (0, None)


def test_the_fix_of_a_damaged_shard_salvages_that_shard(sharded: Path) -> None:
    (journal,) = (sharded / "j" / "shard-1" / "current").glob("*.txn")
    bookie_directory.flip(journal, 15 * 512 + 100)  # in the middle of what was not flushed
    damage, _ = check(sharded)
    with pytest.raises(BinderyError, match="journal group is damaged"):
        bookie_directory.start_sharded(sharded)
    command = damage[0]["fix"].partition("then: bindery bookie ")[2].split()
    assert command == ["salvage", str(sharded / "j" / "shard-1"), str(sharded / "l1")]
    (step,) = rows(run(*command, "--yes", "--json"))
    assert step["path"] == str(journal)
    assert step["done"]
    assert read_marker(RealDisk(), str(sharded / "l1" / "current")) is not None
    assert read_marker(RealDisk(), str(sharded / "l0" / "current")) is None
    bookie_directory.start_sharded(sharded)
