"""The data directory of a standalone cluster.

| path                   | content                                                                                    |
|------------------------|--------------------------------------------------------------------------------------------|
| zookeeper-0/, bookie-0/| data of a process; the supervisor does not read it                                         |
| logs/<name>.log        | output of a process; the previous part is <name>.log.1                                     |
| run/<name>.pid         | pid of a process, for operators and scripts                                                |
| run/state.json         | pids with their start times, and the names of processes stopped by name                    |
| run/lock               | locked with flock by the supervisor; the kernel releases the lock when the supervisor ends |
| run/control.sock       | the socket on which the supervisor listens for `status`, `stop` and `start`                |

The system reuses pids, so a process is identified by its pid and its start time.
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
"""Maximum size of a log in bytes. A larger log is moved to `.log.1`."""
_HAS_PROC: Final = Path("/proc/self/stat").exists()
SOCKET_PATH_SIZE_MAX: Final = 100
"""Maximum length of a socket path in bytes. The systems allow 108 (Linux) and 104 (macOS), with the final zero."""


class AlreadyRunning(Conflict):
    """Another supervisor holds the lock of the data directory."""

    code = "already_running"


class StandaloneError(BinderyError):
    """The cluster could not be started or reached. The message names the fix."""

    code = "standalone_failed"


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Identity of a process; a later process with the same pid has another."""

    pid: int
    started: str
    """Start time in the format of the operating system."""

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity | None":
        """Return the identity of the process with `pid`; None if there is none, or only a zombie."""
        started = _start_time(pid)
        return None if started is None else cls(pid, started)

    @property
    def is_alive(self) -> bool:
        return _start_time(self.pid) == self.started

    def kill(self, number: int) -> None:
        """Send the signal `number`, unless the process has ended."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _start_time(pid: int) -> str | None:
    if _HAS_PROC:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        # The name of the command, in parentheses, may contain any character; the fields follow the last parenthesis.
        fields = stat.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    found = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


class DataDirectory:
    """Paths, lock, logs and state file of one cluster."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.run = self.root / "run"
        self.logs = self.root / "logs"
        self._lock_fd: int | None = None

    def create(self) -> None:
        """Create the directories. Raises StandaloneError if that fails."""
        try:
            for folder in (self.root, self.run, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StandaloneError(f"cannot use the data directory: {error.strerror}", path=self.root) from error

    def command(self, *words: str) -> str:
        """Return the command line `bindery standalone <words>` for this data directory, to be pasted into a shell."""
        program = "bindery"
        if shutil.which(program) is None and Path(sys.argv[0]).name == program:
            program = os.path.relpath(sys.argv[0])  # the environment is not activated
        if (not words or words[0].startswith("--")) and (self.root / "secrets").is_dir():
            words = ("--secure", *words)
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
        """Path of the control socket: in `run/`, or in /tmp if that path is too long."""
        path = self.run / "control.sock"
        if len(os.fsencode(path)) <= SOCKET_PATH_SIZE_MAX:
            return path
        identity = os.stat(self.run)
        return Path("/tmp") / f"bindery-{os.getuid()}-{identity.st_dev:x}-{identity.st_ino:x}.sock"  # noqa: S108

    def acquire(self) -> None:
        """Take the lock of this directory until `release` or the end of the process. Raises AlreadyRunning."""
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
        """Whether a supervisor holds the lock of this directory."""
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
        """Return the saved state; an empty one if there is none or it cannot be read."""
        try:
            return State.from_json(json.loads((self.run / "state.json").read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            return State()

    def save_state(self, state: "State") -> None:
        """Replace the state file atomically."""
        temporary = self.run / "state.json.new"
        temporary.write_text(json.dumps(state.to_json(), indent=1) + "\n")
        temporary.replace(self.run / "state.json")

    def open_log(self, name: str) -> int:
        """Return a descriptor that appends to the log of `name`. The caller closes it."""
        return os.open(self.log_file(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def trim_log(self, name: str) -> None:
        """Copy a log larger than LOG_SIZE_MAX to `.log.1` and truncate it. The process then writes to the empty log."""
        path = self.log_file(name)
        with contextlib.suppress(OSError):
            if path.stat().st_size > LOG_SIZE_MAX:
                shutil.copyfile(path, path.with_suffix(".log.1"))
                os.truncate(path, 0)

    def log_tail(self, name: str, *, lines: int, since: int = 0) -> list[str]:
        """Return the last `lines` lines of a log, at most those written after the byte `since`."""
        try:
            with self.log_file(name).open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(since if since <= size else 0, size - 16384))
                return file.read().decode(errors="replace").splitlines()[-lines:]
        except OSError:
            return []


@dataclass(slots=True)
class State:
    """Content of run/state.json."""

    supervisor: ProcessIdentity | None = None
    children: dict[str, ProcessIdentity] | None = None
    held: frozenset[str] = frozenset()
    """Names of processes stopped by name. They stay down until started by name, even if the supervisor restarts."""

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
    """Whether a process can listen on 127.0.0.1:port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
            sock.listen(1)
        except OSError:
            return False
    return True
