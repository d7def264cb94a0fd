"""The reserve: whole or not there, on real files and on a disk that is full."""

import errno
from pathlib import Path

import pytest
from bindery_bookie.storage.io.disk import RealDisk, is_no_space
from bindery_bookie.storage.io.reserve import FILE_SYSTEM_PARTS, START_SIZE_MAX, Reserve, reserves_of, with_room
from bindery_bookie.storage.settings import KIB, MIB
from bindery_simulation.disk import CrashableDisk


def test_it_takes_space_and_gives_it_back(tmp_path: Path) -> None:
    reserve = Reserve(RealDisk(), str(tmp_path), size=256 * KIB)
    assert reserve.size_held == 0
    assert reserve.restore()
    assert reserve.size_held == (tmp_path / "reserve").stat().st_size == 256 * KIB
    assert (tmp_path / "reserve").stat().st_blocks * 512 >= 256 * KIB, "allocated, not only named"
    assert reserve.release() == 256 * KIB
    assert not (tmp_path / "reserve").exists()
    assert reserve.release() == reserve.size_held == 0


def test_what_an_earlier_life_left_counts_and_another_size_is_made_anew(tmp_path: Path) -> None:
    assert Reserve(RealDisk(), str(tmp_path), size=64 * KIB).restore()
    later = Reserve(RealDisk(), str(tmp_path), size=64 * KIB)
    assert later.release() == 64 * KIB, "a start that finds the disk full has not looked at it before"
    assert later.restore()
    grown = Reserve(RealDisk(), str(tmp_path), size=128 * KIB)
    assert grown.restore()
    assert (tmp_path / "reserve").stat().st_size == 128 * KIB
    assert Reserve(RealDisk(), str(tmp_path), size=0).restore()


def test_without_room_nothing_is_held_and_it_survives_a_power_cut_once_it_is() -> None:
    disk = CrashableDisk(capacity=1 * MIB)
    reserve = Reserve(disk, "/d", size=100 * KIB)
    disk.taken = 1 * MIB - 50 * KIB
    assert not reserve.restore()
    assert (reserve.size_held, disk.paths()) == (0, [])
    disk.taken = 0
    assert reserve.restore()
    for seed in range(20):
        assert len(disk.after_power_cut(seed).contents("/d/reserve")) == 100 * KIB


def test_a_small_file_system_keeps_a_part_for_entries() -> None:
    reserve = Reserve(CrashableDisk(capacity=800 * KIB), "/d", size=64 * MIB)
    assert reserve.size() == 800 * KIB // FILE_SYSTEM_PARTS
    main, start = reserves_of(CrashableDisk(), "/d", size=1024 * MIB)
    assert (main.path, start.path) == ("/d/reserve", "/d/reserve.start")
    assert main.size() == 128 * MIB  # an eighth of the disk
    assert start.size() == START_SIZE_MAX


def test_work_is_tried_again_after_each_reserve_and_no_longer() -> None:
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


def test_errors_of_real_files_name_them(tmp_path: Path) -> None:
    disk = RealDisk()
    file = disk.create(str(tmp_path / "f"))
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor") as raised:
        file.write_at(b"x", 0)
    assert raised.value.filename == str(tmp_path / "f")
    assert not is_no_space(raised.value)
    assert is_no_space(OSError(errno.EDQUOT, "Disk quota exceeded"))
