"""MemoryGroup: run processes in a control group of limited memory, and measure what they use.

    with memory_group(512 * MIB) as group:
        process = group.start([sys.executable, "-m", "bindery_bookie"])
        before = group.usage()
        ...
        assert not group.usage().killed

| control groups | parent of the new group                                         | limit                         |
|----------------|-----------------------------------------------------------------|-------------------------------|
| version 1      | the root of the memory controller, or this process's group      | `memory.limit_in_bytes`, and  |
|                |                                                                 | the same with swap            |
| version 2      | the nearest writable group, from this process's own to the      | `memory.max`, without swap    |
|                | root, that passes the memory controller on to its children      |                               |

Above the limit, the kernel reclaims the cache of files, and then kills a process of the group. Memory of the kernel's
socket buffers counts in version 2 only. Without a usable group `memory_group` raises NoMemoryGroup, unless the
environment variable WITHOUT_GROUP is 1; then there is no limit, and only the memory of the processes is measured.
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

WITHOUT_GROUP: Final = "BINDERY_ATTACKS_WITHOUT_CGROUP"
"""Environment variable that allows attacks without a control group, if it is 1."""
END_TIMEOUT_S: Final = 10.0
"""Maximum seconds that the kernel may take to empty a group whose processes were killed."""
_ROOT: Final = Path("/sys/fs/cgroup")
_ENTER: Final = 'echo $$ > "$0" && exec "$@"'
"""Shell script that enters a group before it becomes the program."""


class NoMemoryGroup(Exception):
    """This machine has no control group of memory that this user can create."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Sizes in bytes."""

    resident_size: int
    """Resident memory of the running processes that the group started (VmRSS)."""
    resident_size_max: int
    """Sum of the largest resident memory of each of them (VmHWM)."""
    group_size: int | None = None
    """Memory of the group without inactive pages of files, which the kernel can drop; None without a group."""
    group_size_max: int | None = None
    """Largest memory of the group, pages of files included; None if the kernel does not record it."""
    killed: int = 0
    """Number of processes that the kernel killed because the group had no memory left."""


class MemoryGroup:
    """`directory`: a new group; None: no limit, and no figures of a group. `size_max` in bytes."""

    def __init__(self, directory: Path | None, *, size_max: int) -> None:
        self.directory = directory
        self._is_v1 = directory is not None and (directory / "memory.limit_in_bytes").exists()
        self._processes: list[subprocess.Popen[bytes]] = []
        if directory is None:
            return
        if self._is_v1:
            _write(directory / "memory.limit_in_bytes", size_max)
            if (directory / "memory.memsw.limit_in_bytes").exists():  # missing if swap is not accounted
                _write(directory / "memory.memsw.limit_in_bytes", size_max)
        else:
            _write(directory / "memory.max", size_max)
            if (directory / "memory.swap.max").exists():
                _write(directory / "memory.swap.max", 0)

    def start(self, arguments: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
        """Start a program, which is in the group from its first instruction on. `options`: those of `Popen`."""
        entered = list(arguments)
        if self.directory is not None:
            entered = ["/bin/sh", "-c", _ENTER, str(self.directory / "cgroup.procs"), *arguments]
        process = subprocess.Popen(entered, **options)
        self._processes.append(process)
        return process

    def usage(self) -> Usage:
        resident = [_resident(process.pid) for process in self._processes if process.poll() is None]
        sizes = {"resident_size": sum(now for now, _ in resident), "resident_size_max": sum(top for _, top in resident)}
        if self.directory is None:
            return Usage(**sizes)
        stat = _fields(self.directory / "memory.stat")
        if self._is_v1:
            used, top, events = "memory.usage_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control"
            inactive = stat["total_inactive_file"]
        else:
            used, top, events = "memory.current", "memory.peak", "memory.events"
            inactive = stat["inactive_file"]
        top_file = self.directory / top
        return Usage(
            **sizes,
            group_size=max(0, int((self.directory / used).read_text()) - inactive),
            group_size_max=int(top_file.read_text()) if top_file.exists() else None,
            killed=_fields(self.directory / events).get("oom_kill", 0),
        )

    def close(self) -> None:
        """Kill the processes that the group started, and remove it. Idempotent."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes.clear()
        if self.directory is None:
            return
        until = time.monotonic() + END_TIMEOUT_S
        while self.directory.exists():
            try:
                self.directory.rmdir()
            except OSError:  # busy, also for a moment after its last process ended
                if time.monotonic() > until:
                    raise
                time.sleep(0.02)


@contextlib.contextmanager
def memory_group(size_max: int, *, root: Path = _ROOT, own: str | None = None) -> Iterator[MemoryGroup]:
    """A group of at most `size_max` bytes, whose processes are killed at the end of the block.

    `root`: where control groups are mounted. `own`: the groups of this process, as of /proc/self/cgroup. Raises
    NoMemoryGroup.
    """
    group = _create(size_max, root, Path("/proc/self/cgroup").read_text() if own is None else own)
    try:
        yield group
    finally:
        group.close()


def _create(size_max: int, root: Path, own: str) -> MemoryGroup:
    reasons = []
    for parent in _parents(root, own):
        directory = parent / f"bindery-attack-{os.getpid()}-{time.monotonic_ns()}"
        try:
            directory.mkdir()
        except OSError as error:
            reasons.append(f"{parent}: {error.strerror}")
            continue
        try:
            return MemoryGroup(directory, size_max=size_max)
        except OSError as error:
            reasons.append(f"{directory}: {error.strerror}")
            with contextlib.suppress(OSError):
                directory.rmdir()
    if os.environ.get(WITHOUT_GROUP) == "1":
        return MemoryGroup(None, size_max=size_max)
    why = "; ".join(reasons) or f"no memory controller below {root}"
    raise NoMemoryGroup(
        f"cannot limit the memory of processes: {why}. Run as a user who may create control groups, or set "
        f"{WITHOUT_GROUP}=1 to attack without a limit"
    )


def _parents(root: Path, own: str) -> list[Path]:
    """Return the groups below which a group can be tried, the best first."""
    own_groups = [line.split(":", 2) for line in own.splitlines() if line.count(":") >= 2]
    v1 = root / "memory"
    if (v1 / "memory.limit_in_bytes").exists():
        within = [path for _, controllers, path in own_groups if "memory" in controllers.split(",")]
        return [v1, *(v1 / path.lstrip("/") for path in within if path.strip("/"))]
    if not (root / "cgroup.controllers").exists():
        return []
    path = next((path for number, _, path in own_groups if number == "0"), "/")
    nearest = root / path.lstrip("/")
    groups = [group for group in (nearest, *nearest.parents) if group == root or root in group.parents]
    return [group for group in groups if _passes_memory_on(group)]


def _passes_memory_on(group: Path) -> bool:
    """Whether groups below `group` have the memory controller; try to enable it if they do not."""
    control = group / "cgroup.subtree_control"
    try:
        if "memory" not in control.read_text().split():
            control.write_text("+memory")
        return "memory" in control.read_text().split()
    except OSError:  # not writable, or the group has processes of its own
        return False


def _write(file: Path, value: int) -> None:
    file.write_text(str(value))


def _fields(file: Path) -> dict[str, int]:
    """Return a file of lines `name number`."""
    return {name: int(number) for name, number in (line.split() for line in file.read_text().splitlines())}


def _resident(pid: int) -> tuple[int, int]:
    """Return current and largest resident memory in bytes; 0 for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    fields = dict(line.split(":", 1) for line in lines)
    return tuple(int(fields.get(name, "0 kB").split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]
