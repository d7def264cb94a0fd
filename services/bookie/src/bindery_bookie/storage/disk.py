"""Disk: all that the storage engine asks of a file system, so that tests can hand in one that crashes.

A new file survives a power cut only once it was synced *and* its directory was; a rename once the directory was.
All paths are absolute or relative to the process; they use `/`. Every method may raise OSError.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """Bytes of one file system."""

    total: int
    free: int
    file_system_id: int
    """Equal for two directories on the same file system."""


class WritableFile(Protocol):
    """A file its one owner writes. Not for several threads."""

    def write_at(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Write all of `data` or raise."""
        ...

    def datasync(self) -> None:
        """Return once the data, and a size needed to read it, are on the disk."""
        ...

    def sync(self) -> None:
        """As `datasync`, with all of the file's metadata."""
        ...

    def close(self) -> None: ...


class ReadableFile(Protocol):
    """A file open for reading; several threads may read at once."""

    def read_at(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes; fewer only at the end of the file."""
        ...

    def size(self) -> int: ...

    def close(self) -> None: ...


class Disk(Protocol):
    """Files and directories."""

    def create(self, path: str, *, allocate: int = 0) -> WritableFile:
        """A new file; FileExistsError if there is one. `allocate` bytes are reserved and read as zeros."""
        ...

    def open_read(self, path: str) -> ReadableFile:
        """FileNotFoundError if there is none."""
        ...

    def list_names(self, directory: str) -> Sequence[str]:
        """Names in `directory`, sorted; none when it does not exist."""
        ...

    def truncate(self, path: str, size: int) -> None:
        """Cut to `size` bytes and sync."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Atomic; replaces `target`."""
        ...

    def remove(self, path: str) -> None: ...

    def make_directories(self, path: str) -> None:
        """With parents, each synced into its own parent; no error if there already."""
        ...

    def sync_directory(self, path: str) -> None:
        """Makes creates, renames and removals in `path` durable."""
        ...

    def usage(self, path: str) -> DiskUsage: ...


class _RealWritableFile:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write_at(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        written = os.pwrite(self._fd, data, offset)
        while written < len(data):  # a signal or a nearly full disk can cut a write short
            with memoryview(data) as view:
                written += os.pwrite(self._fd, view[written:], offset + written)

    def datasync(self) -> None:
        os.fdatasync(self._fd)

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _RealReadableFile:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read_at(self, offset: int, size: int) -> bytes:
        data = os.pread(self._fd, size, offset)
        while len(data) < size:
            more = os.pread(self._fd, size - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class RealDisk:
    """The operating system's files: the only place in the bookie that opens one."""

    def create(self, path: str, *, allocate: int = 0) -> WritableFile:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        try:
            if allocate:
                os.posix_fallocate(fd, 0, allocate)
        except OSError:
            os.close(fd)
            os.unlink(path)
            raise
        return _RealWritableFile(fd)

    def open_read(self, path: str) -> ReadableFile:
        return _RealReadableFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    def list_names(self, directory: str) -> Sequence[str]:
        try:
            return sorted(os.listdir(directory))
        except FileNotFoundError:
            return []

    def truncate(self, path: str, size: int) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def make_directories(self, path: str) -> None:
        if os.path.isdir(path):
            return
        parent = os.path.dirname(os.path.abspath(path))
        self.make_directories(parent)
        os.makedirs(path, mode=0o750, exist_ok=True)
        self.sync_directory(parent)

    def sync_directory(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def usage(self, path: str) -> DiskUsage:
        found = os.statvfs(path)
        return DiskUsage(
            total=found.f_frsize * found.f_blocks, free=found.f_frsize * found.f_bavail, file_system_id=found.f_fsid
        )
