"""The simulated disk loses exactly the data that its fault model permits."""

import errno
from collections.abc import Callable

import pytest
from bindery_simulation.disk import SECTOR_SIZE, CrashableDisk, CrashableKV, LyingDisk


def outcomes(disk: CrashableDisk, look: Callable[[CrashableDisk], object], seeds: int = 200) -> set[object]:
    return {look(disk.after_power_cut(seed)) for seed in range(seeds)}


def synced_file(disk: CrashableDisk, path: str, data: bytes) -> None:
    file = disk.create(path)
    file.write_at(data, 0)
    file.sync()
    disk.sync_directory(path.rpartition("/")[0])


def test_synced_bytes_are_kept() -> None:
    disk = CrashableDisk()
    synced_file(disk, "/d/f", b"data")
    assert outcomes(disk, lambda found: found.contents("/d/f")) == {b"data"}


def test_a_new_file_may_be_lost_until_its_directory_is_synced() -> None:
    disk = CrashableDisk()
    file = disk.create("/d/f")
    file.write_at(b"data", 0)
    file.sync()
    assert outcomes(disk, lambda found: tuple(found.paths())) == {(), ("/d/f",)}
    disk.sync_directory("/other")
    assert outcomes(disk, lambda found: tuple(found.paths())) == {(), ("/d/f",)}
    disk.sync_directory("/d")
    assert outcomes(disk, lambda found: tuple(found.paths())) == {("/d/f",)}


def test_unsynced_bytes_are_kept_lost_or_torn_by_sector() -> None:
    disk = CrashableDisk()
    synced_file(disk, "/d/f", b"o" * 2 * SECTOR_SIZE)
    reader = disk.open_read("/d/f")
    reader.write_at(b"n" * 2 * SECTOR_SIZE, 0)
    found = outcomes(disk, lambda survivor: survivor.contents("/d/f"), seeds=2000)
    assert b"o" * 2 * SECTOR_SIZE in found
    assert b"n" * 2 * SECTOR_SIZE in found
    assert b"n" * SECTOR_SIZE + b"o" * SECTOR_SIZE in found
    assert b"o" * SECTOR_SIZE + b"n" * SECTOR_SIZE in found, "sectors may reach the disk in any order"
    assert any(0 < one[:SECTOR_SIZE].count(b"n") < SECTOR_SIZE for one in found), "a sector may be torn"
    for one in found:
        for start in (0, SECTOR_SIZE):
            assert b"on" not in one[start : start + SECTOR_SIZE], "a torn sector is new at its beginning"


def test_a_rename_is_done_or_not_and_never_loses_the_file() -> None:
    disk = CrashableDisk()
    synced_file(disk, "/d/mark", b"old")
    synced_file(disk, "/d/mark.new", b"new")
    disk.rename("/d/mark.new", "/d/mark")
    assert outcomes(disk, lambda found: found.contents("/d/mark")) == {b"old", b"new"}
    disk.sync_directory("/d")
    assert outcomes(disk, lambda found: (found.contents("/d/mark"), *found.paths())) == {(b"new", "/d/mark")}


def test_a_removal_may_be_undone_until_the_directory_is_synced() -> None:
    disk = CrashableDisk()
    synced_file(disk, "/d/f", b"data")
    disk.remove("/d/f")
    assert outcomes(disk, lambda found: tuple(found.paths())) == {(), ("/d/f",)}


def test_operations_fail_after_the_cut_and_equal_seeds_give_equal_disks() -> None:
    disk = CrashableDisk()
    file = disk.create("/d/f")
    disk.cut_after(1)
    file.write_at(b"x" * 5000, 0)
    for operation in (file.datasync, lambda: disk.create("/d/g"), lambda: disk.list_names("/d"), file.size):
        with pytest.raises(OSError, match="power"):
            operation()
    for seed in range(50):
        one, two = disk.after_power_cut(seed), disk.after_power_cut(seed)
        assert one.paths() == two.paths()
        assert [one.contents(path) for path in one.paths()] == [two.contents(path) for path in two.paths()]


def test_a_kv_loses_only_the_last_unsynced_batches() -> None:
    disk = CrashableDisk()
    kv = CrashableKV(disk)
    kv.write_batch([(b"a", b"1")])
    kv.write_batch([(b"b", b"2")], sync=True)
    kv.write_batch([(b"c", b"3")])
    kv.write_batch([(b"d", b"4")], [b"a"])
    found = set()
    for seed in range(100):
        after = kv.after_power_cut(seed, CrashableDisk())
        found.add("".join(key.decode() for key, _ in after.scan(start=b"", stop=b"z")))
    assert found == {"ab", "abc", "bcd"}


def test_a_disk_that_skips_syncs_skips_only_the_chosen_ones() -> None:
    disk = CrashableDisk()
    lying = LyingDisk(disk, lambda operation, path: operation in ("datasync", "sync_directory"))
    file = lying.create("/d/g")
    file.write_at(b"data", 0)
    file.datasync()
    lying.sync_directory("/d")
    assert () in outcomes(disk, lambda found: tuple(found.paths()))
    file.sync()
    lying.is_skipped = lambda operation, path: False
    lying.sync_directory("/d")
    assert outcomes(disk, lambda found: found.contents("/d/g")) == {b"data"}


def test_a_full_disk_rejects_only_growth() -> None:
    disk = CrashableDisk(capacity=1000)
    allocated = disk.create("/a", allocate=600)
    with pytest.raises(OSError, match="No space left") as refused:
        disk.create("/b", allocate=401)
    assert (refused.value.errno, refused.value.filename) == (errno.ENOSPC, "/b")
    small = disk.create("/c")
    small.write_at(b"x" * 400, 0)
    assert disk.usage("/").free == 0
    with pytest.raises(OSError, match="No space left"):
        small.write_at(b"y", 400)
    allocated.write_at(b"z" * 600, 0)
    kv = CrashableKV(disk)
    with pytest.raises(OSError, match="No space left"):
        kv.write_batch([(b"k", b"v")])
    assert kv.get(b"k") is None
    disk.remove("/c")
    kv.write_batch([(b"k", b"v")], sync=True)
    assert disk.usage("/").free == 398
    assert kv.after_power_cut(1, disk.after_power_cut(1)).get(b"k") == b"v"
