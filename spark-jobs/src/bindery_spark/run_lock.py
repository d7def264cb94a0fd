"""One process at a time works on a run: the file LOCK in the run's directory is locked while its holder lives.

The kernel lets go of the lock when the holder ends, however it ends, so nothing that a killed run leaves has to be
removed. The file says who the holder is, or was. Two that write one run would take groups from under each other.
"""

import fcntl
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from bindery_core.errors import Conflict

LOCK: Final = "lock"


@contextmanager
def held(directory: Path, *, pid: int, warn: Callable[[str], None]) -> Iterator[None]:
    """Raises Conflict, naming the holder, when another process is at it. Where the volume knows no such locks `warn` is
    told, and nobody sees to it. A directory that is left with nothing but the lock is removed."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOCK
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(200).strip() or "unknown"
            raise Conflict(
                "another process is at this run; wait for its end, or end it", run_id=directory.name, holder=holder
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
