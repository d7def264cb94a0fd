"""DirectoryLock: keep two bookies from using the same directories at the same time.

LevelDB's own lock comes too late: before a start opens the index, it reads the index's files, truncates entry logs and
may rebuild the index; journals have no lock at all. A bookie therefore holds a `flock` on `current` of each of its
directories, from the check of its identity until its process ends. The lock needs no file, and the kernel releases it
however the process ends. On a file system without such locks the bookie runs without it.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from bindery_core.errors import Conflict

LOCKS: Final = Path("/proc/locks")
"""The kernel's list of file locks."""
_HELD: Final = frozenset((errno.EWOULDBLOCK, errno.EACCES))


class DirectoryInUse(Conflict):
    """Another process, probably a bookie, uses this directory."""

    code = "directory_in_use"


class DirectoryLock:
    """The locks of one process. Its end releases them; `release` is for tests and for a start that failed."""

    def __init__(self, *, locks: Path = LOCKS) -> None:
        """`locks`: the kernel's list of file locks."""
        self._locks = locks
        self._fds: list[int] = []

    def take(self, directories: Iterable[str]) -> None:
        """Lock `current` of each directory; it must exist. Raises DirectoryInUse, OSError; none is locked then."""
        try:
            for directory in directories:
                self._take(directory)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def _take(self, directory: str) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        fd = os.open(f"{directory}/current", flags)  # noqa: TID251 - nothing is read from or written to it
        self._fds.append(fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                raise DirectoryInUse(
                    f"{self._holder(fd)} uses {directory}: is this bookie started twice? Stop one of the two, or set "
                    "other directories"
                ) from error
            # Some network file systems have no locks: run without.

    def _holder(self, fd: int) -> str:
        """Describe the process that holds the lock, as far as this container can see it."""
        inode = os.fstat(fd).st_ino
        with contextlib.suppress(OSError):
            for line in self._locks.read_text().splitlines():
                words = line.split()  # 1: FLOCK ADVISORY WRITE <pid> <major>:<minor>:<inode> 0 EOF
                if words[1:2] == ["FLOCK"] and words[5:6] and words[5].endswith(f":{inode}") and int(words[4]) > 0:
                    return f"another bookie (pid {words[4]})"
        return "another bookie"
