"""DirectoryLock: no two bookies use the same directories at once.

LevelDB's own lock comes too late for that: a start looks at the index's files, cuts entry logs and rebuilds the index
before it opens it, and journals have no lock at all. So a bookie holds a lock (`flock`) on `current` of each of its
directories from its identity until its process ends. It needs no file, and the kernel takes it back however the process
ends; a file system that has no such locks goes without.
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
_HELD: Final = frozenset((errno.EWOULDBLOCK, errno.EACCES))


class DirectoryInUse(Conflict):
    """Another process, a bookie most likely, uses this directory."""

    code = "directory_in_use"


class DirectoryLock:
    """Of one process. `release` is for tests and for a start that failed; else the end of the process does it."""

    def __init__(self, *, locks: Path = LOCKS) -> None:
        """`locks`: where the kernel lists who holds what."""
        self._locks = locks
        self._fds: list[int] = []

    def take(self, directories: Iterable[str]) -> None:
        """Lock `current` of each, which must be there. Raises DirectoryInUse, OSError; then none is locked."""
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
                    f"{self._holder(fd)} uses {directory}: is this bookie started twice? End one of the two, or name "
                    "directories of its own"
                ) from error
            # Some network file systems: better without than not at all.

    def _holder(self, fd: int) -> str:
        """Who it is, as far as this container can see."""
        inode = os.fstat(fd).st_ino
        with contextlib.suppress(OSError):
            for line in self._locks.read_text().splitlines():
                words = line.split()  # 1: FLOCK ADVISORY WRITE <pid> <major>:<minor>:<inode> 0 EOF
                if words[1:2] == ["FLOCK"] and words[5:6] and words[5].endswith(f":{inode}") and int(words[4]) > 0:
                    return f"another bookie (pid {words[4]})"
        return "another bookie"
