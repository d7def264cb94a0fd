"""SecretDirectory: a directory of keys, tokens and passwords that only its owner can read.

| what            | rule                                                                                        |
|-----------------|---------------------------------------------------------------------------------------------|
| the directory   | mode 0700; one that other users can read or change is refused                               |
| a secret file   | mode 0600, from its first byte on                                                           |
| a public file   | mode 0644                                                                                   |
| a change        | a complete, synced file that is renamed: readers see the old content or the new one         |
| several writers | take turns by a lock of the directory, which ends with its holder                           |
"""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from bindery_core.errors import BadRequest

DIRECTORY_MODE: Final = 0o700
SECRET_MODE: Final = 0o600
PUBLIC_MODE: Final = 0o644
_OTHERS: Final = 0o077
"""Permissions of the group and of other users."""


class SecretDirectory:
    """The constructor creates the directory if it does not exist. Raises BadRequest if it cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _explained(path):
            path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            found = path.stat()
        if not stat.S_ISDIR(found.st_mode) or found.st_mode & _OTHERS or found.st_uid != os.geteuid():
            raise BadRequest(
                "the directory of secrets must belong to this user and have the mode 0700, because other users could "
                "read the secrets or replace them; run `chmod 700` on it, or choose a directory that does not exist",
                directory=str(path),
                mode=f"{stat.S_IMODE(found.st_mode):04o}",
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Wait until no other process changes the directory, and keep others waiting."""
        with _explained(self.path):
            opened = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX)
            yield
        finally:
            os.close(opened)

    def file(self, name: str) -> Path:
        return self.path / name

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if it does not exist. Raises BadRequest if it cannot be read."""
        path = self.path / name
        with _explained(path), suppress(FileNotFoundError):
            return path.read_bytes()
        return None

    def write(self, name: str, content: bytes, *, secret: bool) -> None:
        """Create or replace a file, while the directory is `locked`. Raises BadRequest."""
        path = self.path / name
        new = self.path / f".{name}.new"
        mode = SECRET_MODE if secret else PUBLIC_MODE
        with _explained(path):
            new.unlink(missing_ok=True)  # of a process that was killed
            try:
                with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
                    os.fchmod(stream.fileno(), mode)
                    stream.write(content)
                    stream.flush()
                    os.fsync(stream.fileno())
                os.replace(new, path)
            except BaseException:
                new.unlink(missing_ok=True)
                raise
            opened = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(opened)
            finally:
                os.close(opened)

    def restrict(self, name: str) -> None:
        """Give a secret file that was copied into the directory its mode. Raises BadRequest."""
        path = self.path / name
        with _explained(path):
            if stat.S_IMODE(path.stat().st_mode) & _OTHERS:
                path.chmod(SECRET_MODE)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadRequest(f"cannot use the file or directory: {error.strerror or error}", path=str(path)) from error
