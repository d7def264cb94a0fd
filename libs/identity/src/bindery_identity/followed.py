"""Files that may change while a process runs: keys, certificates, passwords, lists of exceptions.

`poll` compares the state of each file with the state at the last read, and reads all of them again if one differs:

| state of the files                              | value              | failure                    |
|-------------------------------------------------|--------------------|----------------------------|
| not changed                                     | kept               | kept                       |
| changed, and `load` accepts them                | replaced           | None                       |
| changed, and `load` refuses them, or fails with | kept               | the reason                 |
| any other exception                             |                    |                            |
| one is missing, unreadable, or above SIZE_MAX   | kept               | the reason                 |

The state of a file is its time of change in nanoseconds, its size, its inode and its device, after symbolic links:
files that are replaced by rename, and volumes of Kubernetes that exchange a link, are noticed. The state is taken
before the content, so that a change in between causes another read. Files that belong together, such as a certificate
and its key, are one FollowedFiles: between the replacement of the first and that of the second, `load` refuses the
pair, and the last good pair stays.

Several threads may poll the same files: one of them reads, and the others return at once with the value before, so that
an event loop never waits for a file system that delays another thread.

A file that is not a regular one, such as a pipe, can be read only once: it is read by the constructor and not followed.
`bindery_kit.process.followed_files` polls the files of a process.
"""

import os
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

from bindery_core.errors import BadRequest, BinderyError

SIZE_MAX: Final = 4 * 2**20
"""Maximum bytes of a followed file."""

T = TypeVar("T")
_State = tuple[int, ...] | None


class FollowedFiles(Generic[T]):
    """The last good value of one or more files. `load` gets their contents in the order of `paths`.

    `load` raises BadRequest or ValueError if it refuses them, without any part of their contents in the message.
    `what`: the files in words, for errors. The constructor raises BadRequest if a file cannot be read, and what `load`
    raises.
    """

    def __init__(self, paths: Sequence[str], load: Callable[[Sequence[bytes]], T], *, what: str = "the file") -> None:
        self.paths = tuple(paths)
        self._load = load
        self._what = what
        self._states = self._look()
        self._value = self._read()
        self._failure: str | None = None
        self._replacements = 0
        self._polling = threading.Lock()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.paths)})"  # the value may be a secret

    @property
    def value(self) -> T:
        return self._value

    @property
    def failure(self) -> str | None:
        """Why the files as they are now are not in use; None if they are."""
        return self._failure

    @property
    def replacements(self) -> int:
        """How often the value was replaced, by whichever thread polled."""
        return self._replacements

    def poll(self) -> bool:
        """Return whether this call replaced the value; False at once while another thread polls. Never raises.

        Blocks for the time of the file system's calls.
        """
        if not self._polling.acquire(blocking=False):
            return False
        try:
            states = self._look()
            if states == self._states:
                return False
            self._states = states
            self._value = self._read()
        except (BinderyError, ValueError, OSError) as error:
            self._failure = str(error) or type(error).__name__
            return False
        except Exception as error:  # of a library that `load` calls; its message may contain a part of the contents
            self._failure = f"{self._what} cannot be used: {type(error).__name__}"
            return False
        else:
            self._failure = None
            self._replacements += 1
            return True
        finally:
            self._polling.release()

    def _read(self) -> T:
        """Raises what the constructor raises; BadRequest has the paths as a fact."""
        contents = [_read(path, self._what) for path in self.paths]
        try:
            return self._load(contents)
        except BadRequest as error:
            raise BadRequest(error.message, **{"path": ",".join(self.paths), **error.facts}) from None

    def _look(self) -> tuple[_State, ...]:
        return tuple(_state(path) for path in self.paths)


class FollowedFile(FollowedFiles[T]):
    """The last good value of one file."""

    def __init__(self, path: str, load: Callable[[bytes], T], *, what: str = "the file") -> None:
        super().__init__([path], lambda contents: load(contents[0]), what=what)


def _state(path: str) -> _State:
    """Return what changes with the file; None if there is none."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return None
    if not stat.S_ISREG(found.st_mode):
        return ()
    return (found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev)


def _read(path: str, what: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            content = file.read(SIZE_MAX + 1)
    except (OSError, ValueError) as error:
        raise BadRequest(f"cannot read {what}: {getattr(error, 'strerror', error)}", path=path) from error
    if len(content) > SIZE_MAX:
        raise BadRequest(f"{what} is too large", path=path, size_max=SIZE_MAX)
    return content
