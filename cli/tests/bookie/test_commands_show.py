"""`bindery bookie` prints the content of a stopped bookie: ledgers, entries, journals, entry logs, index."""

import random
import shutil
from pathlib import Path

import bookie_directory
import pytest
from bindery_bookie.storage.entry_log import entry_log_format
from bindery_bookie.storage.io.kv import LevelDbKV
from bindery_bookie.storage.journal import journal_format
from bindery_core.errors import BinderyError
from bookie_command import check, rows, run
from bookie_directory import location


def test_no_command_changes_a_byte(pristine: Path) -> None:
    before = bookie_directory.fingerprint(pristine)
    for arguments in (
        ("ledgers", pristine),
        ("entry", pristine, 1, 7),
        ("entry", pristine, 9, 1),
        ("journal", "dump", pristine),
        ("log", "dump", pristine),
        ("log", "dump", pristine, "--map"),
        ("index", "dump", pristine),
        ("check", pristine),
    ):
        result = run(*arguments)
        assert result.exit_code == 0, (arguments, result.output, result.exception)
    assert bookie_directory.fingerprint(pristine) == before


def test_no_command_overwrites_a_table_of_an_index_with_a_truncated_manifest(bookie: Path) -> None:
    """With a truncated manifest, LevelDB reuses the number of an existing table for a new one."""
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


def test_ledgers_counts_flushed_entries_and_those_only_in_the_journal(pristine: Path) -> None:
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
def test_a_missing_entry_is_reported(pristine: Path, key: tuple[int, int]) -> None:
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


def test_a_journal_dump_has_groups_and_records_and_continues_behind_damage(bookie: Path, journal: Path) -> None:
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


def test_a_journal_that_continues_in_a_lost_file_is_reported(bookie: Path, journal: Path) -> None:
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


def test_a_truncated_journal_is_reported(journal: Path) -> None:
    journal.write_bytes(journal.read_bytes()[:-512])
    head = rows(run("journal", "dump", journal, "--json"))[0]
    assert "journal is short" in head["problem"]


def test_journals_alone_are_checked_as_strictly_as_by_a_start(bookie: Path, journal: Path) -> None:
    """Truncated and missing journals are found with and without the ledger directory; a crash is not damage."""
    original = journal.read_bytes()
    facts = rows(run("journal", "dump", journal, "--groups", "--json"))
    sequence, end = facts[-2]["sequence"], facts[-1]["offset"]
    link = journal_format.pack_link(journal_id=2, sequence=sequence + 1, next_journal_id=3)
    linked = original[:end] + link + original[end + len(link) :]
    following = journal_format.pack_file_header(3, file_size=4096).ljust(4096, b"\0")
    for first, second, text, where in (
        (original, None, "", ""),
        (original, bytes(4096), "", ""),  # a power loss during its creation
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
        ("ledgers", "/nowhere"),
        ("check", "{empty}"),
        ("log", "dump", "{bookie}", "77"),
        ("log", "dump", "{bookie}", "xyz"),
        ("journal", "dump", "{log}"),
        ("ledgers", "{bookie}/journal"),
    ],
)
def test_wrong_directories_are_wrong_usage(bookie: Path, log: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "empty").mkdir()
    filled = [word.format(empty=tmp_path / "empty", bookie=bookie, log=log) for word in arguments]
    result = run(*filled)
    assert isinstance(result.exception, BinderyError)
    assert type(result.exception).__name__ == "BadRequest", "wrong usage: exit code 2"
