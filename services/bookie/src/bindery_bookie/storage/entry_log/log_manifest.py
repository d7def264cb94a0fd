"""Log manifest: the file that determines which entry logs must exist, and their order.

Flushes and compaction take log ids from one ascending sequence (`LogIds`). Without this file, every id from 1 to that
of LastLogMark is a log that a flush wrote. The file `entry-logs` lists the differences. It is replaced atomically (new
file written, synced, renamed, directory synced), at each step of a compaction that must survive a crash.

| state of an id | meaning                                                                                            |
|----------------|----------------------------------------------------------------------------------------------------|
| not listed     | up to LastLogMark's id: a log of a flush, which must exist; above: left by an unfinished flush     |
| absent         | a missing file is no damage; a file of that id is unfinished or was replaced, and can be removed   |
| compacted      | a complete log, written by compaction: it must exist even if its id is above LastLogMark's         |

When the index is rebuilt, logs are read by their *order*, and later records replace earlier ones. The order of a log
that a flush wrote is its id; a compacted log has the order of the log that it replaced.

*Unsealed* logs have no ledgers map and trailer, because a crash left them open or a failed flush was truncated. The
file lists their sizes, so that a truncation is detected: the log of LastLogMark ends at the mark's offset, an unsealed
log at its listed size, and every other log with its trailer. Otherwise a log truncated between two records would look
like one that a crash left open, and the bookie would answer "no such entry" for the lost entries after an index
rebuild.

Integers are big-endian.

| offset   | size | type | field    | meaning                                                                      |
|---------:|-----:|------|----------|------------------------------------------------------------------------------|
|        0 |    4 | raw  | magic    | `BNDG`                                                                       |
|        4 |    4 | u32  | version  | 2                                                                            |
|        8 |    8 | u64  | switches | finished compactions; the index has the same number or one more              |
|       16 |    4 | u32  | count    | c                                                                            |
|       20 | 24 c | rows |          | u64 first id, u64 last id, u64 order (0: absent; else compacted, one id);    |
|          |      |      |          | ascending, not adjacent                                                      |
| 20 + 24c |    4 | u32  | unsealed | u                                                                            |
| 24 + 24c | 16 u | rows |          | u64 log id, u64 size in bytes; ids ascending                                 |
|          |    4 | u32  | digest   | CRC32C over all bytes before it                                              |

Version 1 has nothing between rows and digest, so the unsealed logs are unknown. It can still be read. The start then
treats each existing log without a trailer as unsealed, as it does if the file is lost.
"""

import heapq
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from bindery_core.errors import BadVersion, DamagedStorage
from crc32c import crc32c

from bindery_bookie.storage.entry_log import entry_log_format as fmt
from bindery_bookie.storage.entry_log.entry_log import list_logs
from bindery_bookie.storage.io.disk import Disk

MAGIC: Final = b"BNDG"
VERSION: Final = 2
FILE_NAME: Final = "entry-logs"
_TEMPORARY_NAME: Final = "entry-logs.new"
SIZE_MAX: Final = 64 * 1024 * 1024
"""Maximum size of the file in bytes: more than two million rows."""

_HEAD = struct.Struct(">4sIQI")
_ROW = struct.Struct(">QQQ")
_COUNT = struct.Struct(">I")
_UNSEALED_ROW = struct.Struct(">QQ")
_DIGEST = struct.Struct(">I")
_ABSENT: Final = 0

assert _HEAD.size == 20


@dataclass(frozen=True, slots=True)
class LogEnd:
    """The expected end of a log."""

    stop: int | None = None
    """End of its records in bytes; None: the end of the file."""
    is_sealed: bool = False
    """True if it must end with its trailer: a log without one was truncated."""


@dataclass(frozen=True, slots=True)
class LogManifest:
    """The content of the file. A missing file means an empty manifest.

    Invariants: the ranges of `absent` are ascending and not adjacent; no id is both absent and compacted; an unsealed
    id is neither.
    """

    absent: tuple[tuple[int, int], ...] = ()
    """Ranges (first id, last id), both inclusive."""
    compacted: Mapping[int, int] = field(default_factory=dict)
    """Log id -> order."""
    switches: int = 0
    """Number of compactions after which the index is known to refer to the new log."""
    unsealed: Mapping[int, int] | None = None
    """Log id -> size of logs without a trailer; None: unknown."""

    def is_absent(self, log_id: int) -> bool:
        return any(first <= log_id <= last for first, last in self.absent)

    def order(self, log_id: int) -> int:
        """Return the position of the log in an index rebuild."""
        return self.compacted.get(log_id, log_id)

    def lists(self, log_id: int) -> bool:
        """Return True if the manifest lists the id as compacted or absent."""
        return log_id in self.compacted or self.is_absent(log_id)

    def end(self, log_id: int, *, mark: tuple[int, int]) -> LogEnd:
        """Return the expected end of a log that must exist. `mark`: (log id, offset) of LastLogMark."""
        if log_id in self.compacted:
            return LogEnd(is_sealed=True)  # renamed only when complete
        if log_id == mark[0]:
            return LogEnd(stop=mark[1])
        if self.unsealed is None or log_id > mark[0]:
            return LogEnd()
        return LogEnd(stop=self.unsealed.get(log_id), is_sealed=log_id not in self.unsealed)

    def expected(self, mark_log_id: int) -> list[int]:
        """Return the logs that must exist if LastLogMark is in log `mark_log_id`, in the order of an index rebuild."""
        ids = set(range(1, mark_log_id + 1)) | self.compacted.keys()
        for first, last in self.absent:
            ids.difference_update(range(first, last + 1))
        return sorted(ids, key=lambda log_id: (self.order(log_id), log_id))

    def pairs(self, mark_log_id: int) -> list[tuple[int, int]]:
        """Return (source, target) of unfinished compactions: both are expected, with the same order.

        At most one, unless the manifest was lost.
        """
        found: list[tuple[int, int]] = []
        before = 0
        for log_id in self.expected(mark_log_id):
            if before and self.order(before) == self.order(log_id):
                found.append((before, log_id))
            before = log_id
        return found

    def unused(self, mark_log_id: int) -> list[int]:
        """Return the unused ids between that of LastLogMark and the greatest listed one. Flushes must use them next.

        Such an id remains if a flush lost its log in a crash after compaction had taken a later id. If the id were
        skipped, it would look like a lost log.
        """
        return [log_id for log_id in range(mark_log_id + 1, self._greatest()) if not self.lists(log_id)]

    def next_id(self, mark_log_id: int) -> int:
        """Return the lowest id above all used ones."""
        return max(mark_log_id, self._greatest()) + 1

    def with_absent(self, *log_ids: int) -> "LogManifest":
        """Return a manifest in which these ids are absent."""
        removed = set(log_ids)
        compacted = {log_id: order for log_id, order in self.compacted.items() if log_id not in removed}
        unsealed = self.unsealed
        if unsealed is not None:
            unsealed = {log_id: size for log_id, size in unsealed.items() if log_id not in removed}
        absent = _joined([*self.absent, *((log_id, log_id) for log_id in removed)])
        return replace(self, absent=absent, compacted=compacted, unsealed=unsealed)

    def with_compacted(self, log_id: int, order: int) -> "LogManifest":
        """Return a manifest in which this id, absent before, is a compacted log of this order."""
        assert order > 0
        absent = [part for found in self.absent for part in _without(found, log_id)]
        return replace(self, absent=tuple(absent), compacted={**self.compacted, log_id: order})

    def with_unsealed(self, sizes: Mapping[int, int]) -> "LogManifest":
        """Return a manifest in which these logs are unsealed, with these sizes, except logs that are absent."""
        present = {log_id: size for log_id, size in sizes.items() if not self.is_absent(log_id)}
        return replace(self, unsealed={**(self.unsealed or {}), **present})

    def pack(self) -> bytes:
        """Return the file's content; in version 1 if the unsealed logs are unknown."""
        rows = [(first, last, _ABSENT) for first, last in self.absent]
        rows += [(log_id, log_id, order) for log_id, order in self.compacted.items()]
        version = 1 if self.unsealed is None else VERSION
        parts = [_HEAD.pack(MAGIC, version, self.switches, len(rows)), *(_ROW.pack(*row) for row in sorted(rows))]
        if self.unsealed is not None:
            parts.append(_COUNT.pack(len(self.unsealed)))
            parts += (_UNSEALED_ROW.pack(*row) for row in sorted(self.unsealed.items()))
        data = b"".join(parts)
        return data + _DIGEST.pack(crc32c(data))

    @classmethod
    def unpack(cls, data: bytes, *, path: str) -> "LogManifest":
        """Return the manifest in `data`. Raises DamagedStorage, and BadVersion for an unknown version."""
        if len(data) < _HEAD.size + _DIGEST.size:
            raise DamagedStorage("list of entry logs is short", path=path, offset=0, size=len(data))
        body, (digest,) = data[: -_DIGEST.size], _DIGEST.unpack(data[-_DIGEST.size :])
        magic, version, switches, count = _HEAD.unpack_from(body)
        end = _HEAD.size + count * _ROW.size
        if magic != MAGIC or digest != crc32c(body) or (len(body) != end if version == 1 else len(body) < end):
            raise DamagedStorage("list of entry logs is damaged", path=path, offset=0)
        if version not in (1, VERSION):
            raise BadVersion("list of entry logs has an unknown version", path=path, version=version)
        absent: list[tuple[int, int]] = []
        compacted: dict[int, int] = {}
        before = 0
        for first, last, order in _ROW.iter_unpack(body[_HEAD.size : end]):
            if not before < first <= last or (order != _ABSENT and first != last):
                raise DamagedStorage("list of entry logs contradicts itself", path=path, offset=0, log_id=first)
            before = last
            if order == _ABSENT:
                absent.append((first, last))
            else:
                compacted[first] = order
        found = cls(_joined(absent), compacted, switches)
        return found if version == 1 else replace(found, unsealed=found._unpack_unsealed(body[end:], path))

    def _unpack_unsealed(self, data: bytes, path: str) -> Mapping[int, int]:
        if len(data) < _COUNT.size or len(data) != _COUNT.size + _COUNT.unpack_from(data)[0] * _UNSEALED_ROW.size:
            raise DamagedStorage("list of entry logs is damaged", path=path, offset=0)
        unsealed: dict[int, int] = {}
        before = 0
        for log_id, size in _UNSEALED_ROW.iter_unpack(data[_COUNT.size :]):
            if log_id <= before or self.lists(log_id):
                raise DamagedStorage("list of entry logs contradicts itself", path=path, offset=0, log_id=log_id)
            unsealed[log_id] = size
            before = log_id
        return unsealed

    def _greatest(self) -> int:
        return max([0, *self.compacted, *(last for _, last in self.absent)])


class LogIds:
    """Assigns log ids to flushes, ascending, and to compaction. Event loop only."""

    def __init__(self, next_id: int, unused: Iterable[int] = ()) -> None:
        """`next_id`: the lowest id above all used ones; `unused`: lower ids that flushes must use first."""
        self._next_id = next_id
        self._unused = list(unused)
        heapq.heapify(self._unused)

    @classmethod
    def after(cls, manifest: LogManifest, mark_log_id: int) -> "LogIds":
        return cls(manifest.next_id(mark_log_id), manifest.unused(mark_log_id))

    def for_flush(self) -> int:
        return heapq.heappop(self._unused) if self._unused else self._take()

    def for_compaction(self) -> int:
        return self._take()

    def _take(self) -> int:
        self._next_id += 1
        return self._next_id - 1


def read_manifest(disk: Disk, directory: str) -> LogManifest:
    """Return the manifest of a directory; an empty one if there is no file.

    Raises DamagedStorage, BadVersion, OSError.
    """
    path = f"{directory}/{FILE_NAME}"
    try:
        file = disk.open_read(path)
    except FileNotFoundError:
        return LogManifest()
    try:
        return LogManifest.unpack(file.read_at(0, SIZE_MAX), path=path)
    finally:
        file.close()


def write_manifest(disk: Disk, directory: str, manifest: LogManifest) -> None:
    """Replace the file; durable on return. After an OSError the file is either the old or the new one."""
    temporary = f"{directory}/{_TEMPORARY_NAME}"
    if _TEMPORARY_NAME in disk.list_names(directory):
        disk.remove(temporary)
    file = disk.create(temporary)
    try:
        file.write_at(manifest.pack(), 0)
        file.sync()
    finally:
        file.close()
    disk.rename(temporary, f"{directory}/{FILE_NAME}")
    disk.sync_directory(directory)


def unsealed_sizes(disk: Disk, directory: str, manifest: LogManifest, mark_log_id: int) -> dict[int, int]:
    """Return log id -> size of the logs without a trailer, for a directory whose manifest does not list them.

    This is the case after an upgrade, or if the manifest or the mark was lost. Logs that were truncated, or whose end
    cannot be read, are included. Raises OSError.
    """
    present = set(list_logs(disk, directory)).intersection(manifest.expected(mark_log_id))
    found: dict[int, int] = {}
    for log_id in sorted(present - manifest.compacted.keys() - {mark_log_id}):
        if not is_sealed(disk, directory, log_id):
            file = disk.open_read(f"{directory}/{fmt.file_name(log_id)}")
            found[log_id] = file.size()
            file.close()
    return found


def is_sealed(disk: Disk, directory: str, log_id: int) -> bool:
    """Return True if the log exists and certainly ends with ledgers map and trailer.

    If its end cannot be read, for example in an unreadable sector, the result is False. The caller then records the
    size, which fixes the log's end as well. Raises OSError if the file cannot be opened.
    """
    path = f"{directory}/{fmt.file_name(log_id)}"
    try:
        file = disk.open_read(path)
    except FileNotFoundError:
        return False
    try:
        return fmt.read_ledgers_map(file, path=path) is not None
    except (DamagedStorage, OSError):
        return False
    finally:
        file.close()


class ManifestFile:
    """The manifest and its file. `change` runs in the flush worker, one at a time; `manifest` is for any thread."""

    def __init__(self, disk: Disk, directory: str, manifest: LogManifest) -> None:
        """`manifest`: the current content of the file."""
        self._disk = disk
        self._directory = directory
        self.manifest = manifest

    def change(self, change: Callable[[LogManifest], LogManifest]) -> None:
        """Replace the manifest by `change(manifest)`; durable on return.

        After an OSError `manifest` is unchanged, and the file has either the old or the new one.
        """
        manifest = change(self.manifest)
        write_manifest(self._disk, self._directory, manifest)
        self.manifest = manifest


def _joined(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return tuple(joined)


def _without(found: tuple[int, int], log_id: int) -> Iterator[tuple[int, int]]:
    first, last = found
    if not first <= log_id <= last:
        yield found
        return
    if first < log_id:
        yield first, log_id - 1
    if log_id < last:
        yield log_id + 1, last
