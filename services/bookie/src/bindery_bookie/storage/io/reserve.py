"""Reserve: disk space that is kept so that a bookie can recover from a full disk.

Each journal directory and each ledger directory of a shard has a file `reserve` of allocated, unused bytes. When the
disk is full, the file is removed. Its space is used for flushes of entries in memory, for journal records that were
already accepted, for a start, and for compaction, which frees space. Once there is space again, the file is restored;
only then are adds accepted again.

Invariants: the file has its full size or does not exist; a disk smaller than FILE_SYSTEM_PARTS times the reserve has a
smaller reserve. Each method makes a few file system calls, may block, and may be called by several threads.
"""

import contextlib
import errno
from collections.abc import Callable
from typing import Final, TypeVar

import structlog

from bindery_bookie.storage.io.disk import Disk, is_no_space

T = TypeVar("T")

log = structlog.get_logger(__name__)

FILE_NAME: Final = "reserve"
START_FILE_NAME: Final = "reserve.start"
"""Name of a second reserve that only a start releases. If the disk stays full after the first reserve was used, a start
still needs space for the log and manifest of the index."""

START_SIZE_MAX: Final = 16 * 1024 * 1024
"""Maximum size of the second reserve in bytes."""
FILE_SYSTEM_PARTS: Final = 8
"""Divisor of the size of the file system: a reserve takes at most an eighth of it."""


class Reserve:
    """The reserve of one directory. No space is reserved before `restore` returned True."""

    def __init__(self, disk: Disk, directory: str, *, size: int, name: str = FILE_NAME) -> None:
        """`directory`: `<dir>/current`, which has the file. `size`: bytes to reserve; 0: none."""
        self._disk = disk
        self.directory = directory
        self._name = name
        self._wanted = size
        self._held = 0

    @property
    def path(self) -> str:
        return f"{self.directory}/{self._name}"

    @property
    def size_held(self) -> int:
        """Bytes currently reserved; 0 after `release`."""
        return self._held

    def size(self) -> int:
        """Return the bytes to reserve on this file system. Raises OSError."""
        if not self._wanted:
            return 0
        return min(self._wanted, self._disk.usage(self.directory).total // FILE_SYSTEM_PARTS)

    def release(self) -> int:
        """Free the space; return the bytes freed, 0 if none were reserved. Never raises."""
        try:
            self._held = self._found_size() or 0
            self._disk.remove(self.path)
        except FileNotFoundError:
            freed = 0
        except OSError as error:
            log.error("reserve_not_released", path=self.path, error=str(error))
            return 0
        else:
            freed = self._held
            log.warning("reserve_released", path=self.path, bytes=freed)
        self._held = 0
        return freed

    def restore(self) -> bool:
        """Reserve the space again. False: there is not enough space. Raises OSError for other errors."""
        size = self.size()
        if not size:
            self._held = 0
            return True
        found = self._found_size()
        if found == size:
            self._held = size
            return True
        if found is not None:
            with contextlib.suppress(FileNotFoundError):
                self._disk.remove(self.path)
        self._held = 0
        try:
            file = self._disk.create(self.path, allocate=size)
            try:
                file.sync()
            finally:
                file.close()
            self._disk.sync_directory(self.directory)
        except FileExistsError:
            return False
        except OSError as error:
            if is_no_space(error):
                return False
            raise
        self._held = size
        return True

    def _found_size(self) -> int | None:
        try:
            file = self._disk.open_read(self.path)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return None
            raise
        try:
            return file.size()
        finally:
            file.close()


def reserves_of(disk: Disk, directory: str, *, size: int) -> tuple[Reserve, Reserve]:
    """Return the two reserves of `directory`. That for starts is a quarter of `size`, at most START_SIZE_MAX."""
    for_start = min(size // 4, START_SIZE_MAX)
    return (
        Reserve(disk, directory, size=size - for_start),
        Reserve(disk, directory, size=for_start, name=START_FILE_NAME),
    )


def with_room(job: Callable[[], T], make_room: Callable[[], bool]) -> T:
    """Run `job` and return its result. If there is no space, release a reserve with `make_room` and run it again.

    Raises the error of `job` once `make_room` returns False.
    """
    while True:
        try:
            return job()
        except OSError as error:
            if not is_no_space(error) or not make_room():
                raise
