"""The index of a stopped bookie is rebuilt from its entry logs, and the old one is kept unless it is discarded."""

import shutil
from pathlib import Path
from typing import Any

import bookie_directory
import pytest
from bindery_bookie.offline.places import BookieMayRun, Place, opened_index
from bindery_bookie.offline.rebuild_index import rebuild
from bindery_bookie.storage.corruption.limbo import LimboPhase, read_marker, set_phase, write_marker
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.index.index_format import LedgerRow, Run
from bindery_bookie.storage.io.disk import RealDisk
from bindery_core.errors import DamagedStorage, NotThere
from bookie_directory import flip, location
from bookie_offline_locks import held

NOW_MS = 1_700_000_000_000
KEPT = "index.old-20231114T221320"


def run(directory: Path, *, discard: bool = False) -> list[dict[str, Any]]:
    return list(rebuild(str(directory), discard=discard, now_ms=NOW_MS))


def content(current: Path) -> list[tuple[int, LedgerRow | None, list[Run]]]:
    with opened_index(Place(str(current), None, has_journal=False, has_ledgers=True)) as index:
        assert index is not None
        return [(one, index.ledger_row(one), list(index.runs(one))) for one in index.ledger_ids()]


def names(current: Path) -> list[str]:
    return sorted(path.name for path in current.glob("index*"))


def test_a_rebuilt_index_equals_the_old_one_which_is_kept(bookie: Path, current: Path, index: Index) -> None:
    before = content(current)
    index.commit(runs=[], merges={}, ledgers={}, deleted=(1, 2), generation=0)
    index.close()
    assert content(current) != before
    assert run(bookie) == [{"path": f"{current}/index", "ledgers": 4, "entries": 107, "kept": f"{current}/{KEPT}"}]
    assert content(current) == before
    assert names(current) == ["index", KEPT]


def test_an_old_index_does_not_replace_another_kept_one(bookie: Path, current: Path) -> None:
    for suffix in ("", "-1", "-2"):
        assert run(bookie)[0]["kept"] == f"{current}/{KEPT}{suffix}"
    assert names(current) == ["index", KEPT, f"{KEPT}-1", f"{KEPT}-2"]


def test_a_discarded_index_is_removed(bookie: Path, current: Path) -> None:
    assert run(bookie, discard=True) == [{"path": f"{current}/index", "ledgers": 4, "entries": 107, "kept": None}]
    assert names(current) == ["index"]


@pytest.mark.parametrize("discard", [False, True])
def test_a_lost_index_is_rebuilt(bookie: Path, current: Path, discard: bool) -> None:
    before = content(current)
    shutil.rmtree(current / "index")
    assert run(bookie / "ledgers", discard=discard)[0]["kept"] is None
    assert content(current) == before


def test_the_remains_of_an_interrupted_rebuild_are_removed(bookie: Path, current: Path) -> None:
    before = content(current)
    shutil.copytree(current / "index", current / "index.new")
    (current / "index.new" / "CURRENT").write_bytes(b"damaged")
    run(bookie)
    assert content(current) == before


def test_a_request_to_rebuild_is_fulfilled(bookie: Path, current: Path) -> None:
    (current / "rebuild-index").write_bytes(b"requested by a test\n")
    run(bookie)
    assert not (current / "rebuild-index").exists()


def test_damaged_logs_leave_the_old_index_in_place(bookie: Path, current: Path, log: Path) -> None:
    """A bookie with a partial index would report the entries in the damaged region as missing."""
    before = content(current)
    flip(log, location(log, 1, 7) + 100)
    with pytest.raises(DamagedStorage, match="it rebuilds what can be read, goes into limbo") as raised:
        run(bookie)
    assert raised.value.facts["path"] == str(log)
    assert content(current) == before
    assert names(current) == ["index", "index.new"]


def test_in_limbo_what_can_be_read_is_rebuilt_and_the_listing_repeated(bookie: Path, current: Path, log: Path) -> None:
    """Only the index records which ledgers are in limbo."""
    flip(log, location(log, 1, 7) + 100)
    write_marker(RealDisk(), str(current), "lost", 1_000)
    set_phase(RealDisk(), str(current), LimboPhase.REPAIRING)
    assert run(bookie)[0]["entries"] == 7, "records behind the damage may be older than a lost deletion"
    marker = read_marker(RealDisk(), str(current))
    assert marker is not None
    assert (marker.phase, marker.since_ms, marker.reason) == (LimboPhase.LISTING, 1_000, "lost; the index was rebuilt")


def test_a_shard_that_is_not_in_limbo_stays_out_of_it(bookie: Path, current: Path) -> None:
    run(bookie)
    assert read_marker(RealDisk(), str(current)) is None


def test_without_a_mark_nothing_is_rebuilt(bookie: Path, current: Path) -> None:
    (current / "LastLogMark").unlink()
    with pytest.raises(NotThere, match="no LastLogMark here") as raised:
        run(bookie)
    assert raised.value.facts == {"path": str(current)}


def test_nothing_is_changed_while_a_bookie_runs_on_any_shard(bookie: Path, tmp_path: Path) -> None:
    both = tmp_path / "both"
    for name in ("a", "b"):
        shutil.copytree(bookie / "ledgers", both / name)
    before = bookie_directory.fingerprint(both)
    with held(both / "b" / "current" / "index" / "LOCK"), pytest.raises(BookieMayRun):
        run(both)
    assert bookie_directory.fingerprint(both) == before
    assert [step["path"] for step in run(both)] == [f"{both}/{name}/current/index" for name in ("a", "b")]
