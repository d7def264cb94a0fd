"""Lock a run, so that only one process works on it: the holder locks the file LOCK in the run's directory.

The kernel releases the lock when the holder exits for any reason, so no stale lock has to be removed. The file names
the last holder. Two processes that write one run would remove each other's unfinished groups.
"""

import fcntl
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from bindery_core.errors import Conflict

LOCK: Final = "lock"
"""Name of the lock file."""


@contextmanager
def held(directory: Path, *, pid: int, warn: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a run, whose directory is created if it is missing.

    Raises Conflict, which names the holder, if another process works on the run. If the volume does not support locks,
    calls `warn` and continues without a lock. At the end, a directory that contains only the lock is removed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOCK
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(200).strip() or "unknown"
            raise Conflict(
                "another process is working on this run; wait until it ends, or stop it",
                run_id=directory.name,
                holder=holder,
            ) from None
        except OSError as error:
            warn(f"the run cannot be locked; make sure that no other process uses it: {error}")
        else:
            file.truncate(0)
            file.write(f"pid {pid} on {socket.gethostname()}\n")
            file.flush()
        try:
            yield
        finally:
            if [each.name for each in directory.iterdir()] == [LOCK]:
                with suppress(OSError):
                    path.unlink()
                    directory.rmdir()
