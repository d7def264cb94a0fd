"""`bindery bookie rebuild-index` and `salvage`, and their refusal while the bookie runs."""

import multiprocessing
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bookie_directory
import pytest
from bindery_bookie.storage.corruption.limbo import LimboPhase, read_marker, set_phase, write_marker
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.io.disk import RealDisk
from bindery_bookie.storage.io.kv import LevelDbKV
from bookie_command import check, rows, run
from bookie_directory import RECORDS, location


def _hold(path: str, ready: Any, done: Any) -> None:
    kv = LevelDbKV(path)
    ready.set()
    done.wait(30)
    kv.close()


@pytest.fixture
def running(bookie: Path) -> Iterator[int]:
    """Return the pid of another process that holds the lock of the index."""
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


def test_files_of_a_running_bookie_are_shown_with_a_warning_but_neither_checked_nor_rebuilt(
    bookie: Path, running: int
) -> None:
    looked = run("ledgers", bookie, "--json")
    assert len(rows(looked)) == 5
    assert f"a bookie (pid {running}) runs on" in looked.stderr
    for verb in ("check", "rebuild-index", "salvage"):
        result = run(verb, bookie)
        assert f"a bookie (pid {running}) runs on" in str(result.exception)
        assert "stop it" in str(result.exception)
    assert not list((bookie / "ledgers" / "current").glob("index.*"))


def test_a_rebuilt_index_equals_the_old_one(bookie: Path, index: Index) -> None:
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
    assert len(list((bookie / "ledgers" / "current").glob("index*"))) == 2, "the active index and the kept one"


def test_a_lost_index_is_rebuilt(bookie: Path) -> None:
    before = run("ledgers", bookie, "--json").stdout
    shutil.rmtree(bookie / "ledgers" / "current" / "index")
    assert run("rebuild-index", bookie / "ledgers").exit_code == 0
    assert run("ledgers", bookie, "--json").stdout == before
    assert check(bookie)[0] == []


def test_an_index_is_not_rebuilt_from_damaged_logs(bookie: Path, log: Path) -> None:
    """A bookie with a partial index would report the entries in the damaged region as missing."""
    bookie_directory.flip(log, location(log, 1, 7) + 100)
    before = run("index", "dump", bookie).stdout
    result = run("rebuild-index", bookie)
    assert "goes into limbo" in str(result.exception)
    assert run("index", "dump", bookie).stdout == before, "the old index is still active"


def test_a_rebuild_in_limbo_repeats_the_listing(bookie: Path) -> None:
    """Only the index records which ledgers are in limbo."""
    current = str(bookie / "ledgers" / "current")
    write_marker(RealDisk(), current, "lost", 1_000)
    set_phase(RealDisk(), current, LimboPhase.REPAIRING)
    assert run("rebuild-index", bookie).exit_code == 0
    marker = read_marker(RealDisk(), current)
    assert marker is not None
    assert marker.phase is LimboPhase.LISTING


def test_a_sound_bookie_needs_no_salvage(bookie: Path) -> None:
    before = bookie_directory.fingerprint(bookie)
    result = run("salvage", bookie, "--yes")
    assert result.exit_code == 0
    assert "nothing to salvage" in result.stdout
    assert bookie_directory.fingerprint(bookie) == before


def test_salvage_moves_a_damaged_mark_aside_only_with_yes(bookie: Path) -> None:
    current = bookie / "ledgers" / "current"
    bookie_directory.flip(current / "LastLogMark", 20)
    (finding,) = check(bookie)[0]
    command = finding["fix"].partition("then: bindery bookie ")[2].split()
    assert command == ["salvage", str(bookie / "journal"), str(bookie / "ledgers")]
    before = bookie_directory.fingerprint(bookie)
    result = run(*command)
    assert result.exit_code == 1
    assert "LastLogMark is damaged" in result.stdout
    assert "to be moved to" in result.stdout
    assert bookie_directory.fingerprint(bookie) == before
    (step,) = rows(run(*command, "--yes", "--json"))
    assert step["done"]
    assert Path(step["moved_to"]).is_file()
    assert not (current / "LastLogMark").exists()
    marker = read_marker(RealDisk(), str(current))
    assert marker is not None
    assert "LastLogMark is damaged" in marker.reason
    damage, summary = check(bookie)
    assert (damage, summary["verdict"]) == ([], "sound"), "the next start accepts the files"
    assert summary["journal_groups"] > 0
    notes = [row["text"] for row in rows(run("check", bookie, "--json")) if row.get("severity") == "note"]
    assert any("no LastLogMark, and in limbo: the next start writes it" in text for text in notes)


def test_commands_that_need_the_damaged_mark_name_those_that_do_not(bookie: Path) -> None:
    bookie_directory.flip(bookie / "ledgers" / "current" / "LastLogMark", 20)
    for arguments in (("ledgers", bookie), ("entry", bookie, 1, 7)):
        message = str(run(*arguments).exception)
        assert "LastLogMark is damaged" in message
        assert "`bindery bookie log dump` shows the entry logs, `bindery bookie check` how to repair it" in message
    assert len(rows(run("log", "dump", bookie, "--json"))) >= RECORDS


def test_a_mark_older_than_the_index_is_salvaged_without_a_change_to_the_index(bookie: Path, index: Index) -> None:
    index.commit(runs=[], merges={}, ledgers={}, deleted=(), generation=9)
    index.close()
    files = bookie_directory.fingerprint(bookie / "ledgers" / "current" / "index")
    assert run("salvage", bookie, "--yes").exit_code == 0
    assert bookie_directory.fingerprint(bookie / "ledgers" / "current" / "index") == files
    assert list((bookie / "ledgers" / "quarantine").iterdir())


def test_salvage_needs_the_journal_too(bookie: Path) -> None:
    assert "pass its directory, too" in str(run("salvage", bookie / "ledgers").exception)
