"""`bindery bookie` on several shards: which journal belongs to which ledgers, and the fix of each shard."""

import shutil
from pathlib import Path

import bookie_directory
import pytest
from bindery_bookie.offline import places
from bindery_bookie.storage.corruption.limbo import read_marker
from bindery_bookie.storage.io.disk import RealDisk
from bindery_core.errors import BinderyError
from bookie_command import check, rows, run


@pytest.fixture(scope="module")
def two_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bookie_directory.make_sharded(tmp_path_factory.mktemp("sharded"))


@pytest.fixture
def sharded(two_shards: Path, tmp_path: Path) -> Path:
    """A crashed bookie with journal directory `j` and ledger directories `l0` and `l1`, which a test may damage."""
    return Path(shutil.copytree(two_shards, tmp_path / "sharded"))


def test_a_sound_shard_is_sound_beside_the_journals_of_others(sharded: Path) -> None:
    for only in ("l0", "l1"):
        before = bookie_directory.fingerprint(sharded)
        result = run("check", sharded / "j", sharded / only)
        assert result.exit_code == 0, result.output
        result = run("salvage", sharded / "j", sharded / only, "--yes")
        assert "nothing to salvage" in result.stdout
        assert bookie_directory.fingerprint(sharded) == before
    ledgers = {
        row["ledger_id"]: row["entries"] for row in rows(run("ledgers", sharded / "j", sharded / "l1", "--json"))
    }
    assert ledgers == {1: 20}, "some of them are in the journal only"
    shown = run("entry", sharded / "l1", 1, 19, "--journal", sharded / "j")
    assert (shown.exit_code, shown.exception) == (0, None)


def test_the_fix_of_a_damaged_shard_salvages_that_shard(sharded: Path) -> None:
    (journal,) = (sharded / "j" / "shard-1" / "current").glob("*.txn")
    bookie_directory.flip(journal, 15 * 512 + 100)  # in the middle of the entries that were not flushed
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


def test_shards_are_found_and_paired(bookie: Path, tmp_path: Path) -> None:
    """Two ledger directories with one journal directory: each shard has its own journal in a subdirectory."""
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
