"""Reserve: space that is kept so that a full disk is no dead end.

A file `reserve` of allocated, unused bytes lies in each journal and each ledger directory of a shard. When the disk is
full, it is removed: what must go on then has room, that is moving what is in memory to the entry logs, writing the
records that were taken already, starting, and compaction, which wins space back. Once there is room again it is put
back, and only then are adds taken again.

Invariants: the file is whole or not there; a disk with less than FILE_SYSTEM_PARTS times the reserve keeps a smaller
one. Each method is a few calls of the file system that any number of threads may make at once; they may block.
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
"""A part set aside that only a start gives up: after all else went into a disk that then stayed full, the next start
still needs room for the index's log and manifest."""

START_SIZE_MAX: Final = 16 * 1024 * 1024
FILE_SYSTEM_PARTS: Final = 8
"""The reserve takes at most this part of the file system: an eighth."""


class Reserve:
    """Of one directory. Nothing is held until `restore` says so."""

    def __init__(self, disk: Disk, directory: str, *, size: int, name: str = FILE_NAME) -> None:
        """`directory`: where the file lies, `<dir>/current`. `size`: bytes wanted; 0: no reserve at all."""
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
        """Bytes held now; 0 after `release`."""
        return self._held

    def size(self) -> int:
        """Bytes to hold on this file system. Raises OSError."""
        if not self._wanted:
            return 0
        return min(self._wanted, self._disk.usage(self.directory).total // FILE_SYSTEM_PARTS)

    def release(self) -> int:
        """Give the space to whoever writes next. Bytes freed, 0 if none were held. Never raises."""
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
        """Take the space again. False: there is no room for it. Raises OSError for what is not want of space."""
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
    """The reserve of `directory`, and the part of it for starts: a quarter, at most START_SIZE_MAX."""
    for_start = min(size // 4, START_SIZE_MAX)
    return (
        Reserve(disk, directory, size=size - for_start),
        Reserve(disk, directory, size=for_start, name=START_FILE_NAME),
    )


def with_room(job: Callable[[], T], make_room: Callable[[], bool]) -> T:
    """What `job` returns, run again after each reserve that `make_room` gave up, until there are none."""
    while True:
        try:
            return job()
        except OSError as error:
            if not is_no_space(error) or not make_room():
                raise
