"""The damaged files of a stopped bookie are moved aside, for its shards only and while no bookie runs."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from bindery_bookie.offline.places import BookieMayRun
from bindery_bookie.offline.salvage import run_salvage
from bindery_bookie.storage.corruption.limbo import read_marker
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.io.disk import RealDisk
from bindery_core.errors import BadRequest
from bookie_directory import fingerprint, flip
from bookie_offline_locks import held


def run(*directories: Path, yes: bool = True) -> list[dict[str, Any]]:
    return list(run_salvage([str(directory) for directory in directories], yes=yes, now_ms=1_700_000_000_000))


def test_a_sound_bookie_needs_no_salvage(bookie: Path) -> None:
    before = fingerprint(bookie)
    assert run(bookie) == []
    assert fingerprint(bookie) == before


def test_a_damaged_mark_is_moved_only_with_yes(bookie: Path, current: Path) -> None:
    flip(current / "LastLogMark", 20)
    before = fingerprint(bookie)
    (planned,) = run(bookie, yes=False)
    assert fingerprint(bookie) == before
    (step,) = run(bookie)
    assert planned == {**step, "done": False}
    assert step["path"] == f"{current}/LastLogMark"
    assert (step["offset"], step["is_copy"], step["done"]) == (0, False, True)
    assert step["problem"].startswith("LastLogMark is damaged")
    assert Path(step["moved_to"]).is_file()
    assert not (current / "LastLogMark").exists()
    marker = read_marker(RealDisk(), str(current))
    assert marker is not None
    assert marker.since_ms == 1_700_000_000_000


def test_a_mark_older_than_the_index_is_salvaged_without_a_change_to_the_index(
    bookie: Path, current: Path, index: Index
) -> None:
    index.commit(runs=[], merges={}, ledgers={}, deleted=(), generation=9)
    index.close()
    files = fingerprint(current / "index")
    (step,) = run(bookie)
    assert step["path"] == f"{current}/LastLogMark"
    assert fingerprint(current / "index") == files


def test_a_lost_index_is_no_obstacle(bookie: Path, current: Path) -> None:
    shutil.rmtree(current / "index")
    flip(current / "LastLogMark", 20)
    assert [step["path"] for step in run(bookie)] == [f"{current}/LastLogMark"]


def test_ledgers_without_their_journal_are_refused(bookie: Path, current: Path) -> None:
    with pytest.raises(BadRequest, match="no journal was found for these ledgers: pass its directory, too") as raised:
        run(bookie / "ledgers")
    assert raised.value.facts == {"ledgers": str(current)}


def test_nothing_is_salvaged_while_a_bookie_runs(bookie: Path, current: Path) -> None:
    flip(current / "LastLogMark", 20)
    before = fingerprint(bookie)
    with held(current / "index" / "LOCK"), pytest.raises(BookieMayRun):
        run(bookie)
    assert fingerprint(bookie) == before
