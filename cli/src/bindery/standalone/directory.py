"""The data directory of a standalone cluster.

| path                   | what                                                                                       |
|------------------------|--------------------------------------------------------------------------------------------|
| zookeeper-0/, bookie-0/| each process's own data; the supervisor never looks inside                                 |
| logs/<name>.log        | what the process wrote; the one before it is <name>.log.1                                  |
| run/<name>.pid         | its pid, for people and scripts                                                            |
| run/state.json         | pids with their start times, and what was stopped by name                                  |
| run/lock               | flocked by the supervisor while it lives: the kernel lets go when it dies, however it dies |
| run/control.sock       | the supervisor's ear                                                                       |

A pid alone proves nothing, since pids are used again; a process is recognised by pid *and* start time.
"""

import contextlib
import errno
import fcntl
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bindery_core.errors import BinderyError, Conflict

LOG_SIZE_MAX: Final = 64 * 1024 * 1024
"""Bytes; a longer log is moved to `.log.1` and begun again."""
_HAS_PROC: Final = Path("/proc/self/stat").exists()
SOCKET_PATH_SIZE_MAX: Final = 100
"""Bytes. Linux takes 108, macOS 104, with the final zero."""


class AlreadyRunning(Conflict):
    code = "already_running"


class StandaloneError(BinderyError):
    """The cluster could not be started or reached; the message says what to do."""

    code = "standalone_failed"


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process, told from any later one with the same pid."""

    pid: int
    started: str
    """When it was started, in the system's own words."""

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity | None":
        """The process with `pid`, None when there is none (a zombie is none)."""
        started = _start_time(pid)
        return None if started is None else cls(pid, started)

    @property
    def is_alive(self) -> bool:
        return _start_time(self.pid) == self.started

    def kill(self, number: int) -> None:
        """Signal it; nothing happens when it is gone."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _start_time(pid: int) -> str | None:
    if _HAS_PROC:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        # The command's name, in parentheses, may hold anything; what follows the last one is plain.
        fields = stat.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    found = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


class DataDirectory:
    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.run = self.root / "run"
        self.logs = self.root / "logs"
        self._lock_fd: int | None = None

    def create(self) -> None:
        """Make the folders. Raises StandaloneError when that is impossible."""
        try:
            for folder in (self.root, self.run, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StandaloneError(f"cannot use the data directory: {error.strerror}", path=self.root) from error

    def command(self, *words: str) -> str:
        """What to type here for `bindery standalone <words>` on these data: for hints that can be pasted."""
        program = "bindery"
        if shutil.which(program) is None and Path(sys.argv[0]).name == program:
            program = os.path.relpath(sys.argv[0])  # the environment is not activated
        data = [] if self.root == Path("data").resolve() else ["--data", str(self.root)]
        return shlex.join([program, "standalone", *words, *data])

    def of_process(self, name: str) -> Path:
        return self.root / name

    def pid_file(self, name: str) -> Path:
        return self.run / f"{name}.pid"

    def log_file(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    @property
    def control_socket(self) -> Path:
        """Where the supervisor listens: in `run/`, or under the system's temporary folder when that path is too
        long."""
        path = self.run / "control.sock"
        if len(os.fsencode(path)) <= SOCKET_PATH_SIZE_MAX:
            return path
        identity = os.stat(self.run)
        return Path("/tmp") / f"bindery-{os.getuid()}-{identity.st_dev:x}-{identity.st_ino:x}.sock"  # noqa: S108

    def acquire(self) -> None:
        """Become the one supervisor of this directory, until the process ends. Raises AlreadyRunning."""
        fd = os.open(self.run / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise AlreadyRunning(
                f"a cluster runs on this data already (supervisor pid {self._recorded_supervisor()}): "
                f"`{self.command('status')}` shows it, `{self.command('stop')}` ends it"
            ) from None
        self._lock_fd = fd

    def release(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    @property
    def is_held(self) -> bool:
        """Whether some supervisor lives on this directory."""
        try:
            fd = os.open(self.run / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
        return False

    def _recorded_supervisor(self) -> int | str:
        identity = self.load_state().supervisor
        return identity.pid if identity else "unknown"

    def load_state(self) -> "State":
        """The last state written; an empty one when there is none or it cannot be read."""
        try:
            return State.from_json(json.loads((self.run / "state.json").read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            return State()

    def save_state(self, state: "State") -> None:
        """Replace the state file in one step."""
        temporary = self.run / "state.json.new"
        temporary.write_text(json.dumps(state.to_json(), indent=1) + "\n")
        temporary.replace(self.run / "state.json")

    def open_log(self, name: str) -> int:
        """A descriptor that appends to the log of `name`; the caller closes it."""
        return os.open(self.log_file(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def trim_log(self, name: str) -> None:
        """Move an overlong log aside. Its writer keeps appending, at the new beginning."""
        path = self.log_file(name)
        with contextlib.suppress(OSError):
            if path.stat().st_size > LOG_SIZE_MAX:
                shutil.copyfile(path, path.with_suffix(".log.1"))
                os.truncate(path, 0)

    def log_tail(self, name: str, *, lines: int, since: int = 0) -> list[str]:
        """The last `lines` lines of a log, of what was written behind the byte `since`."""
        try:
            with self.log_file(name).open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(since if since <= size else 0, size - 16384))
                return file.read().decode(errors="replace").splitlines()[-lines:]
        except OSError:
            return []


@dataclass(slots=True)
class State:
    supervisor: ProcessIdentity | None = None
    children: dict[str, ProcessIdentity] | None = None
    held: frozenset[str] = frozenset()
    """Stopped by name: they stay down until started by name, over restarts of the supervisor too."""

    def to_json(self) -> dict[str, Any]:
        return {
            "supervisor": self.supervisor and [self.supervisor.pid, self.supervisor.started],
            "children": {name: [child.pid, child.started] for name, child in (self.children or {}).items()},
            "held": sorted(self.held),
        }

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> "State":
        supervisor = body["supervisor"]
        return cls(
            supervisor=ProcessIdentity(int(supervisor[0]), str(supervisor[1])) if supervisor else None,
            children={name: ProcessIdentity(int(pid), str(at)) for name, (pid, at) in body["children"].items()},
            held=frozenset(body["held"]),
        )


def is_port_free(port: int) -> bool:
    """Whether 127.0.0.1:port can be listened on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
            sock.listen(1)
        except OSError:
            return False
    return True
