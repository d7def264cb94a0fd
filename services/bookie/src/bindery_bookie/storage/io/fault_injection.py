"""Fault injection ("drills"): delays and errors of disk and index operations, for tests and for running bookies.

`SlowDisk`, `FaultyDisk`, `SlowKV` and `FaultyKV` wrap any Disk or KV and call a function before each operation. A
bookie that was started with the setting `drills` puts `DrillControl` between its storage and its disk; rules are set,
listed and cleared while the bookie runs. Without that setting there is no overhead.

A rule selects operations and defines their fault. It is one line of text, and `str(rule)` is the line it was read from:

    OPERATIONS PATTERN [fail ERRNO] [delay SECONDS] [chance P] [after N] [times N] [seed N]

| word       | meaning                                                                                            |
|------------|----------------------------------------------------------------------------------------------------|
| OPERATIONS | names below separated by commas, or `*`                                                            |
| PATTERN    | shell pattern for the whole path; `*` matches `/` too; quoted if it contains a space               |
| fail       | raise this error, such as EIO or ENOSPC, instead of performing the operation                       |
| delay      | delay in seconds before the operation, at most 60                                                  |
| chance     | probability, 0 < P <= 1; pseudo-random from `seed`, so that a drill can be repeated                |
| after      | number of matching operations that are not affected first                                          |
| times      | maximum number of operations affected                                                              |

    datasync *.txn delay 0.2                    every acknowledgement is delayed by 0.2 s
    write_at,create */ledgers/* fail ENOSPC     the ledger disk is full
    read_at *.log fail EIO chance 0.01          one percent of the reads of entry logs fail

Source: BookKeeper's SlowBufferedChannel, SlowInterleavedLedgerStorage and SlowSortedLedgerStorage (delays in tests).
"""

import errno
import random
import shlex
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Final

from bindery_core.errors import BadRequest

from bindery_bookie.storage.io.disk import Disk, DiskUsage, ReadableFile, WritableFile
from bindery_bookie.storage.io.kv import KV, OpenKV

DISK_OPERATIONS: Final = (
    "create",
    "open_read",
    "list_names",
    "truncate",
    "rename",
    "remove",
    "make_directories",
    "sync_directory",
    "usage",
    "write_at",
    "datasync",
    "sync",
    "read_at",
    "size",
    "close",
)
"""Methods of Disk and of its files. The path of a rename is its source."""

KV_OPERATIONS: Final = ("kv_get", "kv_get_many", "kv_write_batch", "kv_scan", "kv_floor")
"""Methods of KV. Their path is the index's directory."""

OPERATIONS: Final = frozenset((*DISK_OPERATIONS, *KV_OPERATIONS))
"""Names that a rule may contain."""

RULES_MAX: Final = 32
"""Maximum number of rules of a bookie."""
DELAY_S_MAX: Final = 60.0
"""Maximum delay of a rule in seconds."""

Fault = Callable[[str, str], OSError | None]
"""Called with (operation, path); returns the error to raise, or None."""

Delay = Callable[[str, str], float]
"""Called with (operation, path); returns the delay in seconds."""

_Before = Callable[[str, str], None]


class _WrappedFile:
    """A file of a wrapped disk, for reading or writing."""

    __slots__ = ("_before", "_file", "_path")

    def __init__(self, file: "ReadableFile | WritableFile", path: str, before: _Before) -> None:
        self._file = file
        self._path = path
        self._before = before

    def close(self) -> None:
        try:
            self._before("close", self._path)
        finally:
            self._file.close()  # as in the kernel, a failed close still releases the descriptor


class _WrappedReadable(_WrappedFile):
    __slots__ = ()
    _file: ReadableFile

    def read_at(self, offset: int, size: int) -> bytes:
        self._before("read_at", self._path)
        return self._file.read_at(offset, size)

    def data_ranges(self, offset: int) -> Sequence[tuple[int, int]]:
        self._before("read_at", self._path)
        return self._file.data_ranges(offset)

    def size(self) -> int:
        self._before("size", self._path)
        return self._file.size()


class _WrappedWritable(_WrappedFile):
    __slots__ = ()
    _file: WritableFile

    def write_at(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        self._before("write_at", self._path)
        self._file.write_at(data, offset)

    def datasync(self) -> None:
        self._before("datasync", self._path)
        self._file.datasync()

    def sync(self) -> None:
        self._before("sync", self._path)
        self._file.sync()


class WrappedDisk:
    """A Disk that calls `before(operation, path)` before each operation of another Disk and its files."""

    def __init__(self, disk: Disk, before: _Before) -> None:
        self._disk = disk
        self._before = before

    def create(self, path: str, *, allocate: int = 0) -> WritableFile:
        """See Disk."""
        self._before("create", path)
        return _WrappedWritable(self._disk.create(path, allocate=allocate), path, self._before)

    def open_read(self, path: str) -> ReadableFile:
        """See Disk."""
        self._before("open_read", path)
        return _WrappedReadable(self._disk.open_read(path), path, self._before)

    def list_names(self, directory: str) -> Sequence[str]:
        """See Disk."""
        self._before("list_names", directory)
        return self._disk.list_names(directory)

    def truncate(self, path: str, size: int) -> None:
        """See Disk."""
        self._before("truncate", path)
        self._disk.truncate(path, size)

    def rename(self, source: str, target: str) -> None:
        """See Disk."""
        self._before("rename", source)
        self._disk.rename(source, target)

    def remove(self, path: str, *, is_unread: bool = False) -> None:
        """See Disk."""
        self._before("remove", path)
        self._disk.remove(path, is_unread=is_unread)

    def make_directories(self, path: str) -> None:
        """See Disk."""
        self._before("make_directories", path)
        self._disk.make_directories(path)

    def sync_directory(self, path: str) -> None:
        """See Disk."""
        self._before("sync_directory", path)
        self._disk.sync_directory(path)

    def usage(self, path: str) -> DiskUsage:
        """See Disk."""
        self._before("usage", path)
        return self._disk.usage(path)


class WrappedKV:
    """A KV that calls `before(operation, path)` before each read and write of another KV."""

    def __init__(self, kv: KV, path: str, before: _Before) -> None:
        self._kv = kv
        self._path = path
        self._before = before

    def get(self, key: bytes) -> bytes | None:
        """See KV."""
        self._before("kv_get", self._path)
        return self._kv.get(key)

    def get_many(self, keys: Iterable[bytes]) -> list[bytes | None]:
        """See KV."""
        self._before("kv_get_many", self._path)
        return self._kv.get_many(keys)

    def write_batch(
        self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = (), *, sync: bool = False
    ) -> None:
        """See KV."""
        self._before("kv_write_batch", self._path)
        self._kv.write_batch(puts, deletes, sync=sync)

    def scan(self, *, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """See KV."""
        self._before("kv_scan", self._path)
        return self._kv.scan(start=start, stop=stop)

    def floor(self, *, lowest: bytes, key: bytes) -> tuple[bytes, bytes] | None:
        """See KV."""
        self._before("kv_floor", self._path)
        return self._kv.floor(lowest=lowest, key=key)

    def approximate_size(self) -> int:
        """See KV."""
        return self._kv.approximate_size()

    def compact(self, *, start: bytes, stop: bytes) -> None:
        """See KV."""
        self._kv.compact(start=start, stop=stop)

    def close(self) -> None:
        """See KV."""
        self._kv.close()


def _raising(fault: Fault) -> _Before:
    def before(operation: str, path: str) -> None:
        error = fault(operation, path)
        if error is not None:
            raise error

    return before


def _waiting(delay_s: Delay, sleep: Callable[[float], None]) -> _Before:
    def before(operation: str, path: str) -> None:
        seconds = delay_s(operation, path)
        if seconds > 0:
            sleep(seconds)

    return before


class FaultyDisk(WrappedDisk):
    """Fails selected operations of another disk. `fault(operation, path)` returns the error to raise, or None."""

    def __init__(self, disk: Disk, fault: Fault) -> None:
        super().__init__(disk, _raising(fault))


class SlowDisk(WrappedDisk):
    """Delays selected operations of another disk by `delay_s(operation, path)` seconds. `sleep` blocks the thread."""

    def __init__(self, disk: Disk, delay_s: Delay, sleep: Callable[[float], None]) -> None:
        super().__init__(disk, _waiting(delay_s, sleep))


class FaultyKV(WrappedKV):
    """Fails selected operations of another store, as FaultyDisk does."""

    def __init__(self, kv: KV, path: str, fault: Fault) -> None:
        super().__init__(kv, path, _raising(fault))


class SlowKV(WrappedKV):
    """Delays selected operations of another store, as SlowDisk does."""

    def __init__(self, kv: KV, path: str, delay_s: Delay, sleep: Callable[[float], None]) -> None:
        super().__init__(kv, path, _waiting(delay_s, sleep))


@dataclass(frozen=True, slots=True)
class DrillRule:
    """One rule; see the module docstring."""

    operations: tuple[str, ...]
    """Empty: all operations."""
    pattern: str
    fail: str = ""
    """Name of an errno; empty: delay only."""
    delay: float = 0.0
    chance: float = 1.0
    after: int = 0
    times: int = 0
    """0: unlimited."""
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> "DrillRule":
        """Return the rule that `text` describes. Raises BadRequest, which names the wrong word."""
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise BadRequest("drill rule: " + str(error).lower(), rule=text) from error
        if len(words) < 2:
            raise BadRequest("drill rule: operations and a pattern are needed", rule=text)
        operations = () if words[0] == "*" else tuple(words[0].split(","))
        unknown = sorted(set(operations) - OPERATIONS)
        if unknown:
            raise BadRequest("drill rule: unknown operation", operation=unknown[0], known=" ".join(sorted(OPERATIONS)))
        if len(words) % 2:
            raise BadRequest("drill rule: a word has no value", word=words[-1], rule=text)
        values: dict[str, str | float | int] = {}
        for name, value in zip(words[2::2], words[3::2], strict=True):
            if name in values or name not in _READERS:
                raise BadRequest("drill rule: unknown or repeated word", word=name, known=" ".join(_READERS))
            try:
                values[name] = _READERS[name](value)
            except ValueError as error:
                raise BadRequest(f"drill rule: {error}", word=name, value=value) from error
        if not values.keys() & {"fail", "delay"}:
            raise BadRequest("drill rule: needs fail or delay", rule=text)
        return cls(operations, words[1], **values)  # type: ignore[arg-type]  # by name, each read by its reader

    def __str__(self) -> str:
        words = [
            ",".join(self.operations) or "*",
            shlex.quote(self.pattern) if _needs_quotes(self.pattern) else self.pattern,
        ]
        for option in fields(self)[2:]:
            value = getattr(self, option.name)
            if value != option.default:
                words += [option.name, f"{value:g}" if isinstance(value, float) else str(value)]
        return " ".join(words)

    def matches(self, operation: str, path: str) -> bool:
        """Return True if the rule selects this operation."""
        return (not self.operations or operation in self.operations) and fnmatchcase(path, self.pattern)


def _needs_quotes(pattern: str) -> bool:
    return shlex.split(f"* {pattern}") != ["*", pattern] if not set(pattern) & set("\"'\\") else True


def _read_errno(text: str) -> str:
    if text not in errno.errorcode.values():
        raise ValueError("unknown error name; use one such as EIO or ENOSPC")
    return text


def _read_number(lowest: float, highest: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = float(f"{float(text):g}")
        if not lowest < value <= highest:
            raise ValueError(f"must be above {lowest:g} and at most {highest:g}")
        return value

    return read


def _read_count(text: str) -> int:
    value = int(text)
    if not 0 < value < 2**63:
        raise ValueError("must be 1 or more")
    return value


_READERS: Final[dict[str, Callable[[str], str | float | int]]] = {
    "fail": _read_errno,
    "delay": _read_number(0, DELAY_S_MAX),
    "chance": _read_number(0, 1),
    "after": _read_count,
    "times": _read_count,
    "seed": _read_count,
}


@dataclass(frozen=True, slots=True)
class DrillState:
    """An active rule and its counters."""

    rule: str
    matched: int
    """Number of operations that matched the rule."""
    acted: int
    """Number of operations that the rule failed or delayed."""
    is_spent: bool
    """True if `acted` has reached `times`."""


class _Drill:
    """A rule with its counters and its random number generator."""

    def __init__(self, rule: DrillRule) -> None:
        self.rule = rule
        self.matched = 0
        self.acted = 0
        self._rng = random.Random(rule.seed)  # noqa: S311 - reproducible, not secret

    @property
    def is_spent(self) -> bool:
        return bool(self.rule.times) and self.acted >= self.rule.times

    def acts(self) -> bool:
        """Count a matching operation; return True if the rule affects it."""
        self.matched += 1
        if self.is_spent or self.matched <= self.rule.after or self._rng.random() >= self.rule.chance:
            return False
        self.acted += 1
        return True


class DrillControl:
    """The active rules of one bookie. Thread-safe: the event loop sets the rules, workers apply them.

    Invariant: without rules no operation is delayed or failed.
    """

    def __init__(self, *, sleep: Callable[[float], None]) -> None:
        """`sleep`: block the calling thread for this number of seconds."""
        self._sleep = sleep
        self._lock = threading.Lock()
        self._drills: tuple[_Drill, ...] = ()

    def set_rules(self, rules: Iterable[str]) -> list[DrillState]:
        """Replace all rules; counters begin at 0. If a rule is invalid, nothing changes. Raises BadRequest."""
        parsed = [_Drill(DrillRule.parse(text)) for text in rules]
        if len(parsed) > RULES_MAX:
            raise BadRequest("too many drill rules", rules=len(parsed), rules_max=RULES_MAX)
        with self._lock:
            self._drills = tuple(parsed)
        return self.states()

    def clear(self) -> None:
        """Remove all rules. A delay that has begun is not shortened."""
        self.set_rules(())

    def states(self) -> list[DrillState]:
        """Return the active rules, in the order of `set_rules`."""
        with self._lock:
            return [DrillState(str(drill.rule), drill.matched, drill.acted, drill.is_spent) for drill in self._drills]

    def wrap_disk(self, disk: Disk) -> Disk:
        """Return `disk` with these rules applied."""
        return WrappedDisk(disk, self._before)

    def wrap_open_kv(self, open_kv: OpenKV) -> OpenKV:
        """Return `open_kv` with these rules applied to its stores."""
        return lambda path: WrappedKV(open_kv(path), path, self._before)

    def _before(self, operation: str, path: str) -> None:
        if not self._drills:
            return
        with self._lock:
            acting = [drill.rule for drill in self._drills if drill.rule.matches(operation, path) and drill.acts()]
        delay_s = sum(rule.delay for rule in acting)
        if delay_s:
            self._sleep(delay_s)
        for rule in acting:
            if rule.fail:
                code: int = getattr(errno, rule.fail)
                raise OSError(code, f"drill: {rule.fail}", path)
