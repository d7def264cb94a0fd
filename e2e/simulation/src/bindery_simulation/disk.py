"""Simulate disks in memory for tests: one that loses power, and one that skips syncs.

`bindery_bookie.storage.io.fault_injection` simulates disks that fail or are slow. `CrashableDisk` records which bytes
were synced; `after_power_cut(seed)` returns the disk of the next start. A store must survive these faults:

| data                                   | after the power cut                                                      |
|----------------------------------------|--------------------------------------------------------------------------|
| bytes written, then file synced        | kept                                                                     |
| bytes written, not synced              | each sector of 512 bytes is kept, lost (its old content), or torn at any |
|                                        | byte: the beginning is new, the rest is old                              |
| a size that grew, not synced           | any size between the synced and the new one                              |
| a file created, directory not synced   | present or not                                                           |
| a rename or removal, not synced        | done or not: the changes of a directory are kept in order up to a point  |
| directories                            | present (`make_directories` syncs)                                       |

A write or an allocation that needs more than `capacity` bytes fails with ENOSPC and changes nothing. A write within
allocated space never fails with ENOSPC. Failed syncs make nothing durable. Allocated space reads as zeros.
`CrashableKV` is a `KV` on the same disk.
"""

import errno
import random
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bindery_bookie.storage.io.disk import DiskUsage

SECTOR_SIZE: Final = 512
"""Size in bytes of the unit that a power cut keeps, loses or tears."""


@dataclass(slots=True)
class _Inode:
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    """The content as of the last sync."""
    dirty: set[int] = field(default_factory=set)
    """Numbers of the sectors written since the last sync."""
    was_synced: bool = False

    def sync(self) -> None:
        if self.dirty or len(self.synced) != len(self.data) or not self.was_synced:
            self.synced = bytes(self.data)
            self.dirty.clear()
            self.was_synced = True


class CrashableDisk:
    """A Disk in memory that can lose power. It counts its operations; after a power cut they fail."""

    def __init__(self, *, capacity: int = 1 << 30) -> None:
        self.capacity = capacity
        self.taken = 0
        """Number of bytes that other programs use. May be set at any time."""
        self.kv_size = 0
        """Number of bytes that a CrashableKV on this disk uses."""
        self.operations = 0
        """Number of changing operations so far."""
        self.log: list[str] = []
        """The changing operations as `name path`, so that tests can check the order of creations, syncs and renames."""
        self.before_change: Callable[[str, str], None] | None = None
        """Called with (name, path) before each changing operation, unless power is lost."""
        self._cut_after: int | None = None
        self._files: dict[str, _Inode] = {}
        self._durable: dict[str, _Inode] = {}
        self._pending: list[tuple[str, str, str | None, _Inode | None]] = []
        """Directory changes that are not synced yet, in order: (directory, kind, path, inode)."""

    def cut_after(self, operations: int | None) -> None:
        """Lose power after this number of changing operations: all later operations fail."""
        self._cut_after = None if operations is None else self.operations + operations

    @property
    def is_cut(self) -> bool:
        return self._cut_after is not None and self.operations >= self._cut_after

    @property
    def is_cutting(self) -> bool:
        """Whether `cut_after` was called, before or after the power cut."""
        return self._cut_after is not None

    def after_power_cut(self, seed: int) -> "CrashableDisk":
        """Return the disk of the next start. Equal seeds give equal disks. This disk is not changed."""
        rng = random.Random(seed)
        found = dict(self._durable)
        cut_at: dict[str, int] = {}
        for directory in sorted({change[0] for change in self._pending}):
            count = sum(change[0] == directory for change in self._pending)
            cut_at[directory] = rng.choice((0, count, rng.randint(0, count)))
        for directory, kind, path, inode in self._pending:
            if cut_at[directory] == 0:
                continue
            cut_at[directory] -= 1
            assert path is not None
            if kind == "remove":
                found.pop(path, None)
            elif inode is not None:
                found[path] = inode
        survivor = type(self)(capacity=self.capacity)
        survivor.taken = self.taken
        for path, inode in sorted(found.items(), key=lambda item: item[0]):
            data = _crashed(inode, rng)
            survivor._files[path] = survivor._durable[path] = _Inode(bytearray(data), data, set(), True)
        return survivor

    def corrupt(self, path: str, offset: int, mask: int = 0xFF) -> None:
        """Flip the bits `mask` of one byte, as if the disk had stored the damaged byte."""
        inode = self._files[path]
        inode.data[offset] ^= mask
        inode.synced = bytes(inode.data)

    def contents(self, path: str) -> bytes:
        return bytes(self._files[path].data)

    def paths(self) -> list[str]:
        return sorted(self._files)

    # --- the Disk protocol (`bindery_bookie.storage.io.disk`)

    def create(self, path: str, *, allocate: int = 0) -> "_File":
        self._change("create", path)
        if path in self._files:
            raise FileExistsError(17, "File exists", path)
        self.need(allocate, path)
        inode = self._files[path] = _Inode(bytearray(allocate))
        self._pending.append((_directory(path), "create", path, inode))
        return _File(self, path, inode)

    def open_read(self, path: str) -> "_File":
        self._check_power()
        return _File(self, path, self._find(path))

    def list_names(self, directory: str) -> Sequence[str]:
        self._check_power()
        return sorted(path[len(directory) + 1 :] for path in self._files if _directory(path) == directory)

    def truncate(self, path: str, size: int) -> None:
        self._change("truncate", path)
        inode = self._find(path)
        del inode.data[size:]
        inode.sync()

    def rename(self, source: str, target: str) -> None:
        self._change("rename", f"{source} {target}")
        inode = self._find(source)
        del self._files[source]
        self._files[target] = inode
        # Worse than a real rename: after a crash both names may exist.
        self._pending.append((_directory(target), "create", target, inode))
        self._pending.append((_directory(source), "remove", source, None))

    def remove(self, path: str, *, is_unread: bool = False) -> None:
        self._change("remove", path)
        self._find(path)
        del self._files[path]
        self._pending.append((_directory(path), "remove", path, None))

    def make_directories(self, path: str) -> None:
        self._check_power()

    def sync_directory(self, path: str) -> None:
        self._change("sync_directory", path)
        for directory, kind, changed, inode in self._pending:
            if directory == path and changed is not None:
                if kind == "remove":
                    self._durable.pop(changed, None)
                elif inode is not None:
                    self._durable[changed] = inode
        self._pending = [change for change in self._pending if change[0] != path]

    def usage(self, path: str) -> DiskUsage:
        return DiskUsage(total=self.capacity, free=max(self.capacity - self.used, 0), file_system_id=1)

    def _find(self, path: str) -> _Inode:
        if path not in self._files:
            raise FileNotFoundError(2, "No such file or directory", path)
        return self._files[path]

    @property
    def used(self) -> int:
        """Number of bytes in use."""
        return self.taken + self.kv_size + sum(len(inode.data) for inode in self._files.values())

    def fill(self) -> None:
        """Let other programs use all free space."""
        self.taken += max(self.capacity - self.used, 0)

    def need(self, size: int, path: str) -> None:
        """Raise ENOSPC unless `size` bytes are free."""
        if size and self.used + size > self.capacity:
            raise OSError(errno.ENOSPC, "No space left on device", path)

    def _check_power(self) -> None:
        if self.is_cut:
            raise OSError(5, "the power is lost")

    def _change(self, name: str, path: str) -> None:
        self._check_power()
        if self.before_change is not None:
            self.before_change(name, path)
        self.operations += 1
        self.log.append(f"{name} {path}")


class _File:
    """A file open for reading and writing."""

    def __init__(self, disk: CrashableDisk, path: str, inode: _Inode) -> None:
        self._disk = disk
        self._path = path
        self._inode = inode

    def write_at(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        self._disk._change("write", self._path)
        content = self._inode.data
        end = offset + len(data)
        if end > len(content):
            self._disk.need(end - len(content), self._path)
            content.extend(bytes(end - len(content)))
        content[offset:end] = data
        self._inode.dirty.update(range(offset // SECTOR_SIZE, (end - 1) // SECTOR_SIZE + 1))

    def datasync(self) -> None:
        self._disk._change("datasync", self._path)
        self._inode.sync()

    def sync(self) -> None:
        self._disk._change("sync", self._path)
        self._inode.sync()

    def read_at(self, offset: int, size: int) -> bytes:
        self._disk._check_power()
        return bytes(self._inode.data[offset : offset + size])

    def data_ranges(self, offset: int) -> Sequence[tuple[int, int]]:
        self._disk._check_power()
        end = len(self._inode.data.rstrip(b"\0"))
        start = len(self._inode.data) - len(self._inode.data[offset:].lstrip(b"\0"))
        return [(start, end)] if start < end else []

    def size(self) -> int:
        self._disk._check_power()
        return len(self._inode.data)

    def close(self) -> None:
        return None


def _directory(path: str) -> str:
    return path.rpartition("/")[0]


def _crashed(inode: _Inode, rng: random.Random) -> bytes:
    """Return the content after a power cut: synced sectors are kept, the others are kept, lost or torn at random."""
    low, high = sorted((len(inode.synced), len(inode.data)))
    size = rng.choice((low, high, rng.randint(low, high)))
    if len(inode.data) < len(inode.synced):
        size = len(inode.data)  # truncation syncs
    content = bytearray(inode.synced[:size].ljust(size, b"\0"))
    fate = rng.choice(("keep", "lose", "prefix", "mixed"))
    dirty = sorted(inode.dirty)
    kept_until = rng.randint(0, len(dirty))
    for number, sector in enumerate(dirty):
        start, end = sector * SECTOR_SIZE, (sector + 1) * SECTOR_SIZE
        if fate == "prefix":
            keep = SECTOR_SIZE if number < kept_until else 0
            if number == kept_until:
                keep = rng.randint(0, SECTOR_SIZE)
        elif fate == "mixed":
            keep = rng.choice((0, SECTOR_SIZE, rng.randint(0, SECTOR_SIZE)))
        else:
            keep = SECTOR_SIZE if fate == "keep" else 0
        content[start : start + keep] = inode.data[start : min(start + keep, end)]
    return bytes(content[:size])


def _changes_size(changes: Iterable[tuple[bytes, bytes | None]]) -> int:
    return sum(len(key) + len(value or b"") for key, value in changes)


class CrashableKV:
    """An ordered store whose synced batches survive a power cut. Later batches may be lost, the last one first.

    After a power cut of `disk`, reads and writes fail.
    """

    def __init__(
        self, disk: CrashableDisk, batches: Iterable[tuple[tuple[tuple[bytes, bytes | None], ...], bool]] = ()
    ) -> None:
        self._disk = disk
        self._batches = list(batches)
        self._values: dict[bytes, bytes] = {}
        self._keys: list[bytes] = []
        """Keys of `_values`, ascending."""
        for changes, _ in self._batches:
            self._apply(changes)
            disk.kv_size += _changes_size(changes)

    def after_power_cut(self, seed: int, disk: CrashableDisk) -> "CrashableKV":
        """Return the store of the next start on `disk`. This store is not changed."""
        rng = random.Random(seed)
        last_synced = max((number for number, batch in enumerate(self._batches) if batch[1]), default=-1)
        kept = rng.randint(last_synced + 1, len(self._batches))
        return CrashableKV(disk, self._batches[:kept])

    def forget(self, batches: int) -> None:
        """Lose the last batches although they were synced, like a disk that skips syncs."""
        del self._batches[len(self._batches) - batches :]
        self._values, self._keys = {}, []
        for changes, _ in self._batches:
            self._apply(changes)

    def clear(self) -> None:
        self._disk.kv_size -= sum(_changes_size(changes) for changes, _ in self._batches)
        self._batches.clear()
        self._values.clear()
        self._keys.clear()

    def get(self, key: bytes) -> bytes | None:
        self._disk._check_power()
        return self._values.get(key)

    def get_many(self, keys: Iterable[bytes]) -> list[bytes | None]:
        return [self.get(key) for key in keys]

    def write_batch(
        self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = (), *, sync: bool = False
    ) -> None:
        self._disk._change("kv", "sync" if sync else "batch")
        changes: tuple[tuple[bytes, bytes | None], ...] = (*((key, None) for key in deletes), *puts)
        self._disk.need(_changes_size(changes), "kv")
        self._disk.kv_size += _changes_size(changes)
        self._batches.append((changes, sync))
        self._apply(changes)

    def scan(self, *, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        self._disk._check_power()
        found = self._keys[bisect_left(self._keys, start) : bisect_left(self._keys, stop)]
        return iter([(key, self._values[key]) for key in found])

    def floor(self, *, lowest: bytes, key: bytes) -> tuple[bytes, bytes] | None:
        self._disk._check_power()
        at = bisect_right(self._keys, key) - 1
        if at < 0 or self._keys[at] < lowest:
            return None
        return self._keys[at], self._values[self._keys[at]]

    def approximate_size(self) -> int:
        return sum(len(key) + len(value) for key, value in self._values.items())

    def compact(self, *, start: bytes, stop: bytes) -> None:
        self._disk._check_power()

    def close(self) -> None:
        return None

    def _apply(self, changes: Iterable[tuple[bytes, bytes | None]]) -> None:
        for key, value in changes:
            if value is None:
                if self._values.pop(key, None) is not None:
                    del self._keys[bisect_left(self._keys, key)]
            else:
                if key not in self._values:
                    insort(self._keys, key)
                self._values[key] = value


class LyingDisk:
    """A disk that skips chosen syncs of another disk and reports success. Crash tests must detect the loss."""

    def __init__(self, disk: Any, is_skipped: Callable[[str, str], bool]) -> None:
        self._disk = disk
        self.is_skipped = is_skipped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)

    def sync_directory(self, path: str) -> None:
        if not self.is_skipped("sync_directory", path):
            self._disk.sync_directory(path)

    def create(self, path: str, *, allocate: int = 0) -> "_LyingFile":
        return _LyingFile(self._disk.create(path, allocate=allocate), path, self.is_skipped)


class _LyingFile:
    def __init__(self, file: Any, path: str, is_skipped: Callable[[str, str], bool]) -> None:
        self._file = file
        self._path = path
        self._is_skipped = is_skipped

    def __getattr__(self, name: str) -> Any:
        if name in ("datasync", "sync") and self._is_skipped(name, self._path):
            return lambda: None
        return getattr(self._file, name)
