"""Directories of a bookie are found by their content, and their index is opened without a change to a byte."""

import os
import random
from contextlib import ExitStack
from pathlib import Path

import bookie_directory
import pytest
from bindery_bookie.offline import places
from bindery_bookie.offline.places import (
    BookieMayRun,
    Place,
    ReadOnlyDisk,
    ShardPlaces,
    bookie_of,
    copy_index,
    find_ledgers,
    find_places,
    locked,
    opened_index,
    pair_places,
    running_on,
    running_pid,
)
from bindery_bookie.storage.index import index_format
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.io.kv import LevelDbKV
from bindery_core.errors import BadRequest, DamagedStorage
from bindery_core.formats.cookie import Cookie
from bookie_offline_locks import held

AMBIGUOUS = "neither paths nor VERSION files show which journal belongs to which ledgers"


def put(root: Path, *names: str) -> Path:
    """Create empty files, with their directories."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


def cookie(root: Path, *directories: str, journals: tuple[str, ...] = ("/far/j",), ledgers: tuple[str, ...]) -> None:
    """Write a VERSION file into these directories."""
    made = Cookie(bookie_id="b-1:3181", journal_dirs=journals, ledger_dirs=ledgers)
    for directory in directories:
        (root / directory / "current").mkdir(parents=True, exist_ok=True)
        (root / directory / "current" / "VERSION").write_bytes(made.text())


def found(*directories: Path) -> list[Place]:
    return find_places([str(directory) for directory in directories])


def paired(*directories: Path) -> list[tuple[str | None, str | None]]:
    """Return the names of the ledger and journal directories of each pair."""
    return [
        tuple(None if place is None else Path(place.own_directory).name for place in (pair.ledgers, pair.journal))  # type: ignore[misc]
        for pair in pair_places(found(*directories))
    ]


def ledgers_at(path: Path) -> Place:
    return Place(str(path), None, has_journal=False, has_ledgers=True)


# --- places


@pytest.mark.parametrize("name", ["LastLogMark", "index/CURRENT", "1f.log"])
def test_a_directory_with_a_mark_an_index_or_a_log_has_ledgers(tmp_path: Path, name: str) -> None:
    put(tmp_path, f"current/{name}")
    assert found(tmp_path) == [Place(f"{tmp_path}/current", None, has_journal=False, has_ledgers=True)]


def test_a_directory_with_a_journal_has_no_ledgers(tmp_path: Path) -> None:
    put(tmp_path, "current/1f.txn")
    assert found(tmp_path) == [Place(f"{tmp_path}/current", None, has_journal=True, has_ledgers=False)]


def test_journal_and_ledgers_may_share_a_directory(tmp_path: Path) -> None:
    put(tmp_path, "current/1.txn", "current/1.log")
    (place,) = found(tmp_path)
    assert (place.has_journal, place.has_ledgers) == (True, True)
    assert pair_places([place]) == [ShardPlaces(place, place)]


def test_a_place_is_found_from_its_directory_its_parent_and_itself(tmp_path: Path) -> None:
    put(tmp_path, "b/l/current/1.log")
    expected = [Place(f"{tmp_path}/b/l/current", None, has_journal=False, has_ledgers=True)]
    for start in ("b", "b/l", "b/l/current"):
        assert found(tmp_path / start) == expected
    with pytest.raises(BadRequest, match="not a bookie's directory"):
        found(tmp_path)


def test_a_copy_may_have_any_name(tmp_path: Path) -> None:
    put(tmp_path, "saved/1.log")
    (place,) = found(tmp_path / "saved")
    assert place.path == place.directory == place.own_directory == f"{tmp_path}/saved"


def test_shards_of_a_shared_directory_are_numbered_by_their_names(tmp_path: Path) -> None:
    put(tmp_path, "j/shard-0/current/1.txn", "j/shard-12/current/1.txn")
    places_found = found(tmp_path / "j")
    assert [place.shard for place in places_found] == [0, 12]
    assert {place.directory for place in places_found} == {f"{tmp_path}/j"}
    assert [place.own_directory for place in places_found] == [f"{tmp_path}/j/shard-0", f"{tmp_path}/j/shard-12"]
    assert found(tmp_path) == places_found, "from the parent as well"


def test_a_directory_that_was_configured_with_such_a_name_is_not_shared(tmp_path: Path) -> None:
    put(tmp_path, "shard-7/current/1.log")
    cookie(tmp_path, "shard-7", ledgers=("/far/shard-7",))
    (place,) = found(tmp_path)
    assert (place.shard, place.directory) == (None, f"{tmp_path}/shard-7")


def test_a_place_given_twice_is_one_place(tmp_path: Path) -> None:
    put(tmp_path, "l/current/1.log")
    (tmp_path / "link").symlink_to(tmp_path / "l")
    assert len(found(tmp_path / "l", tmp_path / "l" / "current", tmp_path / "l", tmp_path / "link")) == 1


def test_directories_without_data_are_bad_requests(tmp_path: Path) -> None:
    put(tmp_path, "l/current/1.log", "empty/current/notes.txt")
    with pytest.raises(BadRequest, match="no such file or directory") as raised:
        found(tmp_path / "nowhere")
    assert raised.value.facts == {"path": f"{tmp_path}/nowhere"}
    with pytest.raises(BadRequest, match="not a bookie's directory") as raised:
        found(tmp_path / "l", tmp_path / "empty")
    assert raised.value.facts == {"path": f"{tmp_path}/empty"}


def test_a_directory_that_cannot_be_read_is_a_bad_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(places.os, "listdir", refuse)
    with pytest.raises(BadRequest, match=f"cannot read {tmp_path}: Permission denied"):
        found(tmp_path)


# --- pairs


def test_one_journal_and_one_ledger_directory_are_a_pair(tmp_path: Path) -> None:
    put(tmp_path, "j/current/1.txn", "l/current/1.log")
    assert paired(tmp_path) == [("l", "j")]
    assert paired(tmp_path / "j", tmp_path / "l") == [("l", "j")]
    assert paired(tmp_path / "l") == [("l", None)]
    assert paired(tmp_path / "j") == [(None, "j")]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A shared journal directory `j`, and `l0` and `l1`, copied from elsewhere."""
    put(tmp_path, "j/shard-0/current/1.txn", "j/shard-1/current/1.txn", "l0/current/1.log", "l1/current/1.log")
    cookie(tmp_path, "j", "l0", "l1", ledgers=("/far/l0", "/far/l1"))
    return tmp_path


def test_ledgers_are_paired_with_the_journal_of_their_own_shard(sharded: Path) -> None:
    j, l0, l1 = sharded / "j", sharded / "l0", sharded / "l1"
    both = [("l0", "shard-0"), ("l1", "shard-1")]
    assert paired(sharded) == both
    assert paired(l1, l0, j) == both[::-1]
    assert paired(j, l1) == [("l1", "shard-1"), (None, "shard-0")]
    assert paired(j / "shard-1", l1) == [("l1", "shard-1")]
    assert paired(j / "shard-0", l1) == [("l1", None), (None, "shard-0")]
    assert paired(l0, l1) == [("l0", None), ("l1", None)]


def test_more_ledgers_than_journals_are_paired_by_shard(sharded: Path) -> None:
    (sharded / "j/shard-0/current/1.txn").unlink()
    assert paired(sharded) == [("l0", None), ("l1", "shard-1")]


def test_a_copy_under_another_name_is_paired_only_if_unambiguous(sharded: Path) -> None:
    copy = sharded / "saved"
    (sharded / "l1").rename(copy)
    assert paired(sharded / "j" / "shard-1", copy) == [("saved", "shard-1")]
    with pytest.raises(BadRequest, match=AMBIGUOUS) as raised:
        paired(sharded / "j", copy)
    assert f"such as {sharded}/j/shard-1," in str(raised.value)
    assert raised.value.facts == {
        "ledgers": [f"{copy}/current"],
        "journals": [f"{sharded}/j/shard-0/current", f"{sharded}/j/shard-1/current"],
    }


def test_equal_numbers_without_cookies_are_paired_in_the_given_order(sharded: Path) -> None:
    for version in sharded.rglob("VERSION"):
        version.unlink()
    assert paired(sharded / "j", sharded / "l1", sharded / "l0") == [("l1", "shard-0"), ("l0", "shard-1")]
    with pytest.raises(BadRequest, match=AMBIGUOUS):
        paired(sharded / "j", sharded / "l0")
    (sharded / "j" / "shard-0").rename(sharded / "j" / "shard-2")
    with pytest.raises(BadRequest, match=AMBIGUOUS):
        paired(sharded)


def test_a_damaged_cookie_determines_no_shard(sharded: Path) -> None:
    (sharded / "l1" / "current" / "VERSION").write_bytes(b"\0")
    with pytest.raises(BadRequest, match=AMBIGUOUS):
        paired(sharded)
    for name in ("l0", "l1"):
        (sharded / name / "current" / "VERSION").write_bytes(b"\0")
    assert paired(sharded) == [("l0", "shard-0"), ("l1", "shard-1")]


def test_equal_numbers_with_missing_shards_are_not_paired_in_order(sharded: Path) -> None:
    """Three shards; l2 and the journal of shard 0 are not given."""
    cookie(sharded, "l0", "l1", ledgers=("/far/l0", "/far/l2", "/far/l1"))
    assert paired(sharded) == [("l0", "shard-0"), ("l1", None), (None, "shard-1")]


def test_two_copies_of_one_shard_are_ambiguous(sharded: Path) -> None:
    put(sharded, "copies/l0/current/1.log")
    cookie(sharded, "copies/l0", ledgers=("/far/l0", "/far/l1"))
    with pytest.raises(BadRequest, match=AMBIGUOUS):
        paired(sharded / "j", sharded / "l0", sharded / "copies" / "l0")


def test_two_journals_of_one_shard_are_ambiguous(sharded: Path) -> None:
    put(sharded, "copy/shard-0/current/1.txn")
    with pytest.raises(BadRequest, match=AMBIGUOUS):
        paired(sharded / "j" / "shard-0", sharded / "copy", sharded / "l0", sharded / "l1")


def test_directories_of_the_same_name_are_told_apart_by_their_path(tmp_path: Path) -> None:
    """The cookie names the directories where they still are."""
    put(tmp_path, "a/l/current/1.log", "b/l/current/1.log", "j/shard-0/current/1.txn", "j/shard-1/current/1.txn")
    both = (f"{tmp_path}/b/l", f"{tmp_path}/a/l")
    cookie(tmp_path, "a/l", "b/l", ledgers=both)
    pairs = pair_places(found(tmp_path / "a", tmp_path / "b", tmp_path / "j"))
    assert [(pair.ledgers and pair.ledgers.directory, pair.journal and pair.journal.shard) for pair in pairs] == [
        (both[1], 1),
        (both[0], 0),
    ]
    cookie(tmp_path, "a/l", "b/l", ledgers=("/far/x/l", "/far/y/l"))
    with pytest.raises(BadRequest, match=AMBIGUOUS):
        pair_places(found(tmp_path / "a", tmp_path / "j"))


def test_journals_of_their_own_are_paired_by_the_journal_directories_of_the_cookie(tmp_path: Path) -> None:
    put(tmp_path, "x/current/1.txn", "y/current/1.txn", "l/shard-0/current/1.log", "l/shard-1/current/1.log")
    cookie(tmp_path, "x", "y", journals=("/far/y", "/far/x"), ledgers=("/far/l",))
    assert paired(tmp_path) == [("shard-0", "y"), ("shard-1", "x")]


def test_a_place_with_both_is_its_own_pair_beside_others(tmp_path: Path) -> None:
    put(tmp_path, "both/current/1.txn", "both/current/1.log", "j/current/1.txn", "l/current/1.log")
    assert paired(tmp_path) == [("both", "both"), ("l", "j")]


def test_only_journals_are_no_ledgers(tmp_path: Path) -> None:
    put(tmp_path, "j/current/1.txn", "l/current/1.log")
    with pytest.raises(BadRequest, match="only journals here; pass a ledger directory") as raised:
        find_ledgers([str(tmp_path / "j")])
    assert raised.value.facts == {"path": f"{tmp_path}/j"}
    (pair,) = find_ledgers([str(tmp_path)])
    assert pair.ledgers is not None
    assert pair.journal is not None
    assert (pair.ledgers.path, pair.journal.path) == (f"{tmp_path}/l/current", f"{tmp_path}/j/current")


# --- locks


def test_a_bookie_in_another_container_has_no_pid() -> None:
    assert bookie_of(7) == "a bookie (pid 7)"
    assert bookie_of(0) == "a bookie in another container"
    assert bookie_of(None) == "a bookie in another container"


def test_a_process_that_holds_the_lock_is_found(tmp_path: Path) -> None:
    put(tmp_path, "index/LOCK")
    place = ledgers_at(tmp_path)
    journal = Place(str(tmp_path / "j"), None, has_journal=True, has_ledgers=False)
    shards = [ShardPlaces(None, journal), ShardPlaces(place, None)]
    assert running_pid(place) is None
    assert running_on(shards) == ""
    with held(tmp_path / "index" / "LOCK"):
        assert running_pid(place) == -1
        assert running_on(shards) == f"a bookie (pid -1) runs on {tmp_path}"
    assert running_pid(place) is None


def test_without_an_index_no_bookie_runs(tmp_path: Path) -> None:
    assert running_pid(ledgers_at(tmp_path)) is None


def test_the_lock_is_held_and_released(tmp_path: Path) -> None:
    put(tmp_path, "index/LOCK")
    before = set(os.listdir("/proc/self/fd"))
    with locked(ledgers_at(tmp_path)), pytest.raises(BlockingIOError), held(tmp_path / "index" / "LOCK"):
        pass
    with held(tmp_path / "index" / "LOCK"):
        pass
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_lock_held_by_a_bookie_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "index/LOCK")
    before = set(os.listdir("/proc/self/fd"))
    with (
        held(tmp_path / "index" / "LOCK"),
        pytest.raises(BookieMayRun, match=rf"a bookie \(pid -1\) runs on {tmp_path}: stop it first"),
        locked(ledgers_at(tmp_path)),
    ):
        raise AssertionError
    assert set(os.listdir("/proc/self/fd")) <= before
    assert BookieMayRun.code == "bookie_runs"


def test_an_index_that_does_not_exist_needs_no_lock(tmp_path: Path) -> None:
    with locked(ledgers_at(tmp_path)):
        assert list(tmp_path.iterdir()) == []


# --- the index


def test_an_index_is_read_without_a_change_to_a_byte(current: Path) -> None:
    before = bookie_directory.fingerprint(current)
    with opened_index(ledgers_at(current)) as index:
        assert index is not None
        assert list(index.ledger_ids()) == [1, 2, 3, 5]
        assert bookie_directory.fingerprint(current) == before
    assert bookie_directory.fingerprint(current) == before


def test_there_may_be_no_index(tmp_path: Path) -> None:
    put(tmp_path, "index/LOG")
    with opened_index(ledgers_at(tmp_path)) as index:
        assert index is None


def test_a_copy_links_tables_under_the_suffix_that_leveldb_never_writes(tmp_path: Path) -> None:
    source = put(tmp_path / "source", "000005.ldb", "000007.sst", "LOCK", "LOG")
    (source / "CURRENT").write_bytes(b"MANIFEST-000004\n")
    (source / "lost").mkdir()
    copy_index(source, tmp_path / "copy")
    assert sorted(os.listdir(tmp_path / "copy")) == ["000005.sst", "000007.sst", "CURRENT", "LOG"]
    assert (tmp_path / "copy" / "000005.sst").readlink() == source / "000005.ldb"
    assert (tmp_path / "copy" / "000007.sst").readlink() == source / "000007.sst"
    assert (tmp_path / "copy" / "CURRENT").read_bytes() == b"MANIFEST-000004\n"
    assert not (tmp_path / "copy" / "CURRENT").is_symlink()
    with pytest.raises(FileExistsError):
        copy_index(source, tmp_path / "copy")


def test_a_table_survives_a_truncated_manifest(tmp_path: Path) -> None:
    """With a truncated manifest, LevelDB reuses the number of an existing table for a new one."""
    kv = LevelDbKV(str(tmp_path / "index"), write_buffer_size=64 * 1024)
    lots = random.Random(1)
    for _ in range(16):
        kv.write_batch([(lots.randbytes(8), lots.randbytes(400)) for _ in range(80)])
    kv.close()
    (manifest,) = (tmp_path / "index").glob("MANIFEST-*")
    data = manifest.read_bytes()
    assert list((tmp_path / "index").glob("*.ldb"))
    size = 0
    while size < len(data):  # at the end of each of its records: u32 digest, u16 size, u8 type
        size += 7 + int.from_bytes(data[size + 4 : size + 6], "little")
        manifest.write_bytes(data[:size])
        before = bookie_directory.fingerprint(tmp_path)
        with ExitStack() as stack:
            try:
                stack.enter_context(opened_index(ledgers_at(tmp_path), verify=False))
            except (DamagedStorage, OSError):
                continue
            finally:
                assert bookie_directory.fingerprint(tmp_path) == before, size


def test_damage_found_while_opening_is_reported_with_the_path_of_the_index(current: Path) -> None:
    path = current / "index"
    LevelDbKV(str(path)).close()  # opening it writes the content of its log to a table
    (table,) = path.glob("*.ldb")
    bookie_directory.flip(table, 200)
    with pytest.raises(DamagedStorage, match="index cannot be read") as raised, opened_index(ledgers_at(current)):
        raise AssertionError
    assert raised.value.facts["path"] == str(path)


def test_damage_found_while_reading_is_reported_with_the_path_of_the_index(current: Path) -> None:
    with pytest.raises(DamagedStorage) as raised, opened_index(ledgers_at(current)) as index:
        raise DamagedStorage("bad", path=index._kv._path, offset=3)  # type: ignore[attr-defined, union-attr]
    assert raised.value.facts == {"path": f"{current}/index", "offset": 3}


def test_damage_elsewhere_keeps_its_path(current: Path) -> None:
    with pytest.raises(DamagedStorage) as raised, opened_index(ledgers_at(current)):
        raise DamagedStorage("bad", path="/elsewhere", offset=3)
    assert raised.value.facts == {"path": "/elsewhere", "offset": 3}


def test_a_batch_missing_in_the_index_is_refused_only_with_verify(current: Path, index: Index) -> None:
    index._kv.write_batch([], [index_format.batch_row_key(1)])
    index.close()
    with pytest.raises(DamagedStorage, match="batches are missing from the index"), opened_index(ledgers_at(current)):
        raise AssertionError
    with opened_index(ledgers_at(current), verify=False) as opened:
        assert opened is not None


def test_the_index_of_a_running_bookie_is_copied_again_if_it_changed_meanwhile(
    current: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[str] = []

    def change(source: Path, target: Path) -> None:
        copies.append(target.name)
        if len(copies) < 5:
            raise FileNotFoundError(2, "it was removed")
        copy_index(source, target)

    monkeypatch.setattr(places, "copy_index", change)
    with pytest.raises(FileNotFoundError), opened_index(ledgers_at(current)):
        raise AssertionError
    assert copies == ["0"], "the index of a stopped bookie does not change"
    copies.clear()
    with held(current / "index" / "LOCK"), opened_index(ledgers_at(current)) as index:
        assert index is not None
    assert copies == ["0", "1", "2", "3", "4"]


def test_a_copy_that_never_succeeds_is_given_up(current: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[str] = []

    def fail(source: Path, target: Path) -> None:
        copies.append(target.name)
        raise OSError(5, "input/output error")

    monkeypatch.setattr(places, "copy_index", fail)
    with (
        held(current / "index" / "LOCK"),
        pytest.raises(OSError, match="input/output error"),
        opened_index(ledgers_at(current)),
    ):
        raise AssertionError
    assert len(copies) == 5


def test_the_disk_of_the_tools_refuses_changes(tmp_path: Path) -> None:
    disk = ReadOnlyDisk()
    path = str(tmp_path / "x")
    for change in (disk.create, disk.remove, disk.make_directories, disk.sync_directory):
        with pytest.raises(AssertionError, match=f"a read-only tool tried to change {path}"):
            change(path)
    with pytest.raises(AssertionError, match="tried to change a"):
        disk.rename("a", "b")
    with pytest.raises(AssertionError, match="tried to change a"):
        disk.truncate("a", 0)
    assert list(tmp_path.iterdir()) == []
