"""One contract for every Disk: real, with fault injection but without faults, and of crash tests."""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from bindery_bookie.storage.io.disk import DIRECT_BUFFER_SIZE, REMOVE_STEP, Disk, RealDisk
from bindery_bookie.storage.io.fault_injection import DrillControl, FaultyDisk, SlowDisk
from bindery_simulation.disk import CrashableDisk


@pytest.fixture(params=["real", "crashable", "faulty", "slow", "drilled"])
def disk(request: pytest.FixtureRequest) -> Disk:
    makers: dict[str, Callable[[], Disk]] = {
        "real": RealDisk,
        "crashable": CrashableDisk,
        "faulty": lambda: FaultyDisk(RealDisk(), lambda operation, path: None),
        "slow": lambda: SlowDisk(RealDisk(), lambda operation, path: 0.001, lambda seconds: None),
        "drilled": lambda: DrillControl(sleep=lambda seconds: None).wrap_disk(RealDisk()),
    }
    return makers[request.param]()


@pytest.fixture
def root(disk: Disk, tmp_path: Path) -> str:
    path = f"{tmp_path}/a/b"
    disk.make_directories(path)
    disk.make_directories(path)
    return path


def write(disk: Disk, path: str, data: bytes) -> None:
    file = disk.create(path)
    file.write_at(data, 0)
    file.sync()
    file.close()


def read(disk: Disk, path: str) -> bytes:
    file = disk.open_read(path)
    try:
        return file.read_at(0, file.size())
    finally:
        file.close()


def test_written_bytes_are_read_at_their_offsets(disk: Disk, root: str) -> None:
    file = disk.create(f"{root}/f")
    file.write_at(b"head", 0)
    file.write_at(memoryview(b"tail"), 10)
    file.write_at(bytearray(b"H"), 0)
    file.datasync()
    file.close()
    file.close()
    assert read(disk, f"{root}/f") == b"Head" + bytes(6) + b"tail"
    reader = disk.open_read(f"{root}/f")
    assert [reader.read_at(12, 100), reader.read_at(14, 1), reader.read_at(99, 1), reader.read_at(0, 0)] == [
        b"il",
        b"",
        b"",
        b"",
    ]
    reader.close()


def test_data_ranges_skip_allocated_bytes(disk: Disk, root: str) -> None:
    """A file system that cannot search for holes reports the whole file."""
    file = disk.create(f"{root}/f", allocate=8 * 2**20)
    file.write_at(b"head", 0)
    file.write_at(b"tail", 6 * 2**20 + 100)
    file.datasync()
    file.close()
    reader = disk.open_read(f"{root}/f")
    content = b"head".ljust(6 * 2**20 + 100, b"\0") + b"tail".ljust(2 * 2**20 - 100, b"\0")
    for offset in (0, 2, 2**20, 6 * 2**20 + 102, 7 * 2**20, 8 * 2**20, 9 * 2**20):
        found = bytearray(len(content))
        last = offset
        for start, end in reader.data_ranges(offset):
            assert last <= start < end <= len(content)
            found[start:end] = content[start:end]
            last = end
        assert found[offset:] == content[offset:]
    reader.close()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS])
def test_data_ranges_cover_the_whole_file_on_a_file_system_without_hole_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    disk = RealDisk()
    file = disk.create(f"{tmp_path}/f", allocate=10_000)
    file.write_at(b"head", 0)
    file.close()

    def refuse(fd: int, offset: int, how: int) -> int:
        raise OSError(number, "refused")

    monkeypatch.setattr(os, "lseek", refuse)
    reader = disk.open_read(f"{tmp_path}/f")
    assert list(reader.data_ranges(100)) == [(100, 10_000)]
    assert list(reader.data_ranges(10_000)) == []
    reader.close()


def test_allocated_space_reads_as_zeros(disk: Disk, root: str) -> None:
    file = disk.create(f"{root}/f", allocate=1000)
    file.write_at(b"x", 0)
    file.close()
    assert read(disk, f"{root}/f") == b"x" + bytes(999)


def test_writes_of_all_sizes_are_read_at_their_offsets(disk: Disk, root: str) -> None:
    """On a real disk whole units use direct I/O, large ones in several writes; other writes use the page cache."""
    size = 3 * DIRECT_BUFFER_SIZE
    expected = bytearray(size)
    file = disk.create(f"{root}/f", allocate=size)
    for offset, length in (
        (0, 512),
        (512, 1536),
        (2048, 100 * 512),
        (DIRECT_BUFFER_SIZE - 512, 2 * DIRECT_BUFFER_SIZE),
        (4096, 512),
        (5000, 10),
        (8192, 512),
        (9000, 9000),
    ):
        data = os.urandom(length)
        expected[offset : offset + length] = data
        file.write_at(memoryview(data) if length > 512 else bytearray(data), offset)
    file.datasync()
    file.close()
    file.close()
    assert read(disk, f"{root}/f") == expected


def flags_of(path: str) -> int:
    """Return the flags of the descriptor that this process has open for `path`."""
    (fd,) = [fd for fd in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{fd}") == path]
    text = Path(f"/proc/self/fdinfo/{fd}").read_text()
    return int(text.split("flags:")[1].split()[0], 8)


def test_preallocated_files_use_direct_io_until_a_write_is_not_aligned(tmp_path: Path) -> None:
    path = os.path.realpath(tmp_path / "f")
    file = RealDisk().create(path, allocate=64 * 1024)
    probe = os.open(path, os.O_WRONLY)
    try:
        fcntl.fcntl(probe, fcntl.F_SETFL, os.O_DIRECT)
        is_offered = True
    except OSError:
        is_offered = False
    os.close(probe)
    assert bool(flags_of(path) & os.O_DIRECT) == is_offered
    file.write_at(bytes(512), 512)
    file.write_at(b"x", 100)
    assert not flags_of(path) & os.O_DIRECT
    file.write_at(b"y" * 512, 512)
    file.datasync()
    file.close()
    assert read(RealDisk(), path)[:1024] == bytes(100) + b"x" + bytes(411) + b"y" * 512


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_writes_fall_back_to_the_page_cache_if_the_disk_needs_larger_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A disk with sectors of 4 KiB refuses the direct write, and writes nothing."""
    path = os.path.realpath(tmp_path / "f")
    write_really = os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if flags_of(path) & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        return write_really(fd, data, offset)

    file = RealDisk().create(path, allocate=64 * 1024)
    monkeypatch.setattr(os, "pwrite", pwrite)
    file.write_at(b"a" * 512, 512)
    file.write_at(b"b" * 512, 1024)
    file.datasync()
    file.close()
    assert read(RealDisk(), path)[512:1536] == b"a" * 512 + b"b" * 512


def test_a_file_system_without_direct_io_is_written_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, command: int, argument: int = 0) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    file = RealDisk().create(f"{tmp_path}/f", allocate=64 * 1024)
    file.write_at(b"a" * 512, 512)
    file.write_at(b"b", 7)
    file.datasync()
    file.close()
    assert read(RealDisk(), f"{tmp_path}/f")[:1024] == bytes(7) + b"b" + bytes(504) + b"a" * 512


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_disk_error_names_the_file_and_is_not_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    calls: list[int] = []

    def fail(fd: int, *rest: object) -> int:
        calls.append(fd)
        raise OSError(number, os.strerror(number))

    path = f"{tmp_path}/f"
    file = RealDisk().create(path, allocate=64 * 1024)
    monkeypatch.setattr(os, "pwrite", fail)
    monkeypatch.setattr(os, "fdatasync", fail)
    operations: list[Callable[[], None]] = [lambda: file.write_at(bytes(512), 0), file.datasync]
    for count, operation in enumerate(operations, 1):
        with pytest.raises(OSError) as failed:
            operation()
        assert (failed.value.errno, failed.value.filename, len(calls)) == (number, path, count)
    file.close()


def test_a_partial_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_really = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write_really(fd, data[:512], offset))
    data = os.urandom(4 * 512)
    file = RealDisk().create(f"{tmp_path}/f", allocate=64 * 1024)
    file.write_at(data, 1024)
    file.close()
    assert read(RealDisk(), f"{tmp_path}/f")[1024 : 1024 + len(data)] == data


def test_creating_an_existing_file_fails(disk: Disk, root: str) -> None:
    write(disk, f"{root}/f", b"first")
    with pytest.raises(FileExistsError):
        disk.create(f"{root}/f")
    assert read(disk, f"{root}/f") == b"first"


def test_names_are_sorted_and_a_missing_directory_has_none(disk: Disk, root: str) -> None:
    for name in ("c", "a", "b"):
        write(disk, f"{root}/{name}", b"")
    assert list(disk.list_names(root)) == ["a", "b", "c"]
    assert list(disk.list_names(f"{root}/none")) == []


def test_a_rename_replaces_a_file_and_a_removal_deletes_it(disk: Disk, root: str) -> None:
    write(disk, f"{root}/old", b"old")
    write(disk, f"{root}/new", b"new")
    disk.rename(f"{root}/new", f"{root}/old")
    disk.sync_directory(root)
    assert read(disk, f"{root}/old") == b"new"
    disk.remove(f"{root}/old")
    assert list(disk.list_names(root)) == []


def test_an_unread_file_is_freed_in_steps_unless_it_has_another_name(tmp_path: Path) -> None:
    disk, size = RealDisk(), 5 * REMOVE_STEP + 1
    for name in ("lone", "linked"):
        write(disk, f"{tmp_path}/{name}", bytes(size))
    (tmp_path / "backup").hardlink_to(tmp_path / "linked")
    held = disk.open_read(f"{tmp_path}/lone")
    for name in ("lone", "linked"):
        disk.remove(f"{tmp_path}/{name}", is_unread=True)
    assert list(disk.list_names(str(tmp_path))) == ["backup"]
    assert (tmp_path / "backup").stat().st_size == size
    assert held.size() == 1  # the last step is done by the close
    held.close()


def test_a_file_that_cannot_be_freed_in_steps_is_removed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full copy-on-write file system has no space for the step; the flush that removes the file must not fail."""

    def refuse(_fd: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk = RealDisk()
    write(disk, f"{tmp_path}/f", bytes(5 * REMOVE_STEP))
    monkeypatch.setattr(os, "ftruncate", refuse)
    disk.remove(f"{tmp_path}/f", is_unread=True)
    assert list(disk.list_names(str(tmp_path))) == []


def test_a_truncated_file_is_short(disk: Disk, root: str) -> None:
    write(disk, f"{root}/f", b"0123456789")
    disk.truncate(f"{root}/f", 4)
    assert read(disk, f"{root}/f") == b"0123"


def test_operations_on_a_missing_file_raise_file_not_found(disk: Disk, root: str) -> None:
    path = f"{root}/none"
    operations: list[Callable[[], object]] = [
        lambda: disk.open_read(path),
        lambda: disk.truncate(path, 0),
        lambda: disk.remove(path),
        lambda: disk.rename(path, f"{root}/other"),
    ]
    for operation in operations:
        with pytest.raises(FileNotFoundError) as failed:
            operation()
        assert failed.value.filename == path


def test_the_usage_of_the_file_system_is_reported(disk: Disk, root: str) -> None:
    usage = disk.usage(root)
    assert 0 < usage.free <= usage.total
    assert usage.file_system_id == disk.usage(root).file_system_id
