"""The reserve is complete or absent, on real files and on a full disk."""

import errno
from pathlib import Path

import pytest
from bindery_bookie.storage.io.disk import RealDisk, is_no_space
from bindery_bookie.storage.io.reserve import FILE_SYSTEM_PARTS, START_SIZE_MAX, Reserve, reserves_of, with_room
from bindery_bookie.storage.settings import KIB, MIB
from bindery_simulation.disk import CrashableDisk


def test_a_reserve_takes_and_releases_space(tmp_path: Path) -> None:
    reserve = Reserve(RealDisk(), str(tmp_path), size=256 * KIB)
    assert reserve.size_held == 0
    assert reserve.restore()
    assert reserve.size_held == (tmp_path / "reserve").stat().st_size == 256 * KIB
    assert (tmp_path / "reserve").stat().st_blocks * 512 >= 256 * KIB, "the space must be allocated"
    assert reserve.release() == 256 * KIB
    assert not (tmp_path / "reserve").exists()
    assert reserve.release() == reserve.size_held == 0


def test_a_reserve_of_an_earlier_run_is_used_unless_its_size_differs(tmp_path: Path) -> None:
    assert Reserve(RealDisk(), str(tmp_path), size=64 * KIB).restore()
    later = Reserve(RealDisk(), str(tmp_path), size=64 * KIB)
    assert later.release() == 64 * KIB, "a start on a full disk releases it without an earlier restore"
    assert later.restore()
    grown = Reserve(RealDisk(), str(tmp_path), size=128 * KIB)
    assert grown.restore()
    assert (tmp_path / "reserve").stat().st_size == 128 * KIB
    assert Reserve(RealDisk(), str(tmp_path), size=0).restore()


def test_a_reserve_needs_space_and_survives_a_power_loss() -> None:
    disk = CrashableDisk(capacity=1 * MIB)
    reserve = Reserve(disk, "/d", size=100 * KIB)
    disk.taken = 1 * MIB - 50 * KIB
    assert not reserve.restore()
    assert (reserve.size_held, disk.paths()) == (0, [])
    disk.taken = 0
    assert reserve.restore()
    for seed in range(20):
        assert len(disk.after_power_cut(seed).contents("/d/reserve")) == 100 * KIB


def test_the_reserve_is_at_most_an_eighth_of_the_file_system() -> None:
    reserve = Reserve(CrashableDisk(capacity=800 * KIB), "/d", size=64 * MIB)
    assert reserve.size() == 800 * KIB // FILE_SYSTEM_PARTS
    main, start = reserves_of(CrashableDisk(), "/d", size=1024 * MIB)
    assert (main.path, start.path) == ("/d/reserve", "/d/reserve.start")
    assert main.size() == 128 * MIB  # an eighth of the disk
    assert start.size() == START_SIZE_MAX


def test_a_job_is_repeated_after_each_released_reserve() -> None:
    calls: list[str] = []
    reserves = ["second", "first"]

    def job() -> str:
        calls.append("job")
        if len(calls) < 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return "done"

    def make_room() -> bool:
        calls.append(reserves.pop() if reserves else "none")
        return calls[-1] != "none"

    assert with_room(job, make_room) == "done"
    assert calls == ["job", "first", "job", "second", "job"]
    calls.clear()
    with pytest.raises(OSError, match="No space left"):
        with_room(job, make_room)
    assert calls == ["job", "none"]
    with pytest.raises(OSError, match="Input/output"):
        with_room(lambda: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")), lambda: True)


def test_file_errors_contain_the_path(tmp_path: Path) -> None:
    disk = RealDisk()
    file = disk.create(str(tmp_path / "f"))
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor") as raised:
        file.write_at(b"x", 0)
    assert raised.value.filename == str(tmp_path / "f")
    assert not is_no_space(raised.value)
    assert is_no_space(OSError(errno.EDQUOT, "Disk quota exceeded"))
