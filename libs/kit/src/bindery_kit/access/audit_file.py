"""AuditFile: append lines to a file that others rotate. Its methods block: call them in a thread.

| what happened to the file since the last write          | the next write                                       |
|---------------------------------------------------------|------------------------------------------------------|
| nothing                                                 | appends                                              |
| it was renamed or removed                               | creates it again, mode 0600, and appends             |
| it was truncated (`copytruncate`)                       | appends at its new end                               |
| a write failed within a line, for example a full disk   | ends that line first, so that no other one is damaged|
| the process or the machine failed within a line         | ends that line first, as the file does not end so    |

The file is opened with O_APPEND and each call is one write, so that processes that share a file do not mix their lines.
"""

import os
import stat
from typing import Final

from bindery_core.errors import BadRequest

STDERR: Final = "-"
"""Path that stands for standard error."""
MODE: Final = 0o600
"""Permissions of a file that is created: lines name clients and what they did."""
_STDERR_FD: Final = 2


class AuditFile:
    """`path`: `-` is standard error. `is_synced`: call fsync after each write. Invariant: one thread uses it at a
    time."""

    def __init__(self, path: str, *, is_synced: bool) -> None:
        self.path = path
        self._is_synced = is_synced and path != STDERR
        self._fd: int | None = None
        self._is_torn = False
        """Whether the file may end within a line."""

    def open(self) -> None:
        """Open the file, or create it. Raises BadRequest if that is not possible."""
        try:
            self._open()
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise BadRequest(
                f"cannot open the audit log: {getattr(error, 'strerror', None) or error}. Set audit_log.file to a file "
                "that this process may create in an existing directory, or to - for standard error",
                path=self.path,
            ) from error

    def append(self, lines: bytes) -> None:
        """Write complete lines. Raises OSError; then some of them may be in the file, the last one incomplete."""
        if self.path != STDERR and self._is_moved():
            self.close()
        if self._fd is None:
            self._open()
        assert self._fd is not None
        data = memoryview(b"\n" + lines if self._is_torn else lines)
        self._is_torn = True
        while data:
            data = data[os.write(self._fd, data) :]
        self._is_torn = False
        if self._is_synced:
            os.fsync(self._fd)

    def close(self) -> None:
        """Idempotent; the next `append` opens the file again."""
        fd, self._fd = self._fd, None
        if fd is not None and fd != _STDERR_FD:
            os.close(fd)

    def _open(self) -> None:
        if self.path == STDERR:
            self._fd = _STDERR_FD
            return
        # O_NONBLOCK until it is open: a FIFO without a reader fails instead of blocking for ever.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        self._fd = os.open(self.path, flags, MODE)  # noqa: TID251 - a log of the process, not its storage
        os.set_blocking(self._fd, True)
        self._is_torn = _ends_within_a_line(self._fd)

    def _is_moved(self) -> bool:
        """Whether the path no longer leads to the open file."""
        if self._fd is None:
            return False
        try:
            at_path = os.stat(self.path)
        except FileNotFoundError:
            return True
        opened = os.fstat(self._fd)
        return (at_path.st_ino, at_path.st_dev) != (opened.st_ino, opened.st_dev)


def _ends_within_a_line(fd: int) -> bool:
    """Whether the file is not empty and its last byte is not a newline. Also if it cannot be read: a blank line is
    harmless."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or not found.st_size:
        return False
    try:
        with open(f"/proc/self/fd/{fd}", "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:
        return True
