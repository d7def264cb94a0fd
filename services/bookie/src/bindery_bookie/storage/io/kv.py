"""KV: an ordered key-value store of bytes, and its two implementations: LevelDB and memory.

Keys are sorted by their bytes. A batch is atomic, also in a crash. A batch written with `sync`, and every batch before
it, survives a power loss.
Errors: OSError for input and output, DamagedIndex if the store finds its own files damaged.
"""

import bisect
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol

import plyvel

from bindery_bookie.storage.io.errors import DamagedIndex
from bindery_bookie.storage.io.leveldb_handle import LevelDbHandle


class KV(Protocol):
    """Thread-safe. An iterator must be used by one thread."""

    def get(self, key: bytes) -> bytes | None: ...

    def get_many(self, keys: Iterable[bytes]) -> list[bytes | None]: ...

    def write_batch(
        self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = (), *, sync: bool = False
    ) -> None:
        """Apply `deletes`, then `puts`."""
        ...

    def scan(self, *, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield pairs with start <= key < stop, ascending, as of this call. Exhaust or close the iterator."""
        ...

    def floor(self, *, lowest: bytes, key: bytes) -> tuple[bytes, bytes] | None:
        """Return the pair with the greatest key in [lowest, key]; None if there is none."""
        ...

    def approximate_size(self) -> int:
        """Return the approximate size in bytes."""
        ...

    def compact(self, *, start: bytes, stop: bytes) -> None:
        """Free the space of deleted and overwritten keys from `start` to `stop`. Reads and writes continue."""
        ...

    def close(self) -> None: ...


OpenKV = Callable[[str], KV]
"""Opens the store in a directory, and creates it if it is missing. Raises DamagedIndex, OSError."""

_LOWEST: Final = b""
_HIGHEST: Final = b"\xff" * 64
"""Two keys that LevelDbKV adds, below and above all other keys (which are neither empty nor that long).

LevelDB's iterators skip a block that they cannot read, and plyvel checks for errors only while the iterator has a
position: an iterator that reaches the end of the store seems to have found nothing. With these two pairs an iteration
over other keys never reaches the end of the store, unless there is damage.
"""

_KNOWN_NUMBERS: Final = {
    os.strerror(number): number
    for number in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.EAGAIN,
    )
}
"""Texts and numbers of system errors that do not mean damage. LevelDB reports system errors only as text."""
_SYSTEM_ERRORS: Final = ("/LOCK", *_KNOWN_NUMBERS)
"""Parts of LevelDB's messages that do not mean damage."""


class LevelDbKV:
    """KV on LevelDB, with LevelDB's checks enabled: damage causes an error and is never treated as a missing key."""

    def __init__(
        self,
        path: str,
        *,
        block_cache_size: int = 16 * 1024 * 1024,
        write_buffer_size: int = 8 * 1024 * 1024,
        has_room: Callable[[], bool] = lambda: True,
    ) -> None:
        """`has_room`: returns True if the disk has space for a log and a table. Checked before the store is reopened
        after a failed write (`leveldb_handle`).
        """
        self._path = path
        self._block_cache_size = block_cache_size
        self._write_buffer_size = write_buffer_size
        self._handle = LevelDbHandle(self._open, has_room=has_room)
        try:
            if self.get(_LOWEST) is None or self.get(_HIGHEST) is None:
                self.write_batch([(_LOWEST, b""), (_HIGHEST, b"")], sync=True)
        except BaseException:
            self._handle.close()
            raise

    def _open(self) -> Any:
        try:
            return plyvel.DB(
                self._path,
                create_if_missing=True,
                paranoid_checks=True,
                lru_cache_size=self._block_cache_size,
                write_buffer_size=self._write_buffer_size,
                bloom_filter_bits=10,
                compression=None,  # keys and sizes compress too little to be worth the time
            )
        except plyvel.CorruptionError as error:
            raise DamagedIndex("index cannot be opened", path=self._path, reason=str(error)) from error
        except plyvel.Error as error:
            if any(failure in str(error) for failure in _SYSTEM_ERRORS):
                raise self._os_error("index cannot be opened", error) from error
            raise DamagedIndex("index cannot be opened", path=self._path, reason=str(error)) from error

    @staticmethod
    def destroy(path: str) -> None:
        """Remove the store's files. Raises OSError."""
        try:
            plyvel.destroy_db(path)
        except plyvel.Error as error:
            raise OSError(f"index cannot be removed: {error}") from error

    def get(self, key: bytes) -> bytes | None:
        try:
            with self._handle.reading() as db:
                value: bytes | None = db.get(key, verify_checksums=True)
        except plyvel.Error as error:
            raise self._unreadable(error) from error
        return value

    def get_many(self, keys: Iterable[bytes]) -> list[bytes | None]:
        return [self.get(key) for key in keys]

    def write_batch(
        self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = (), *, sync: bool = False
    ) -> None:
        try:
            with self._handle.writing() as db:
                batch = db.write_batch(sync=sync)
                for key in deletes:
                    batch.delete(key)
                for key, value in puts:
                    batch.put(key, value)
                batch.write()
        except plyvel.Error as error:
            raise self._wrap(error) from error

    def scan(self, *, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        walk = self._walk(start, stop)
        next(walk)  # creates LevelDB's iterator now, so that it shows the state as of this call
        return walk

    def _walk(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield an empty pair, then the pairs of a scan."""
        try:
            # No `stop`: the iterator must reach a pair after it, at least _HIGHEST, to prove that nothing was skipped.
            with (
                self._handle.reading() as db,
                db.iterator(start=start, verify_checksums=True, fill_cache=False) as pairs,
            ):
                yield b"", b""
                for pair in pairs:
                    if pair[0] >= stop or pair[0] == _HIGHEST:
                        return
                    if pair[0] != _LOWEST:
                        yield pair
        except plyvel.Error as error:
            raise self._unreadable(error) from error
        raise DamagedIndex("the last key of the index is missing", path=self._path)

    def floor(self, *, lowest: bytes, key: bytes) -> tuple[bytes, bytes] | None:
        # No `start`: plyvel's reverse iterator misses a single pair whose key is `start`.
        try:
            with (
                self._handle.reading() as db,
                db.iterator(stop=key, include_stop=True, reverse=True, verify_checksums=True) as pairs,
            ):
                found: tuple[bytes, bytes] | None = next(pairs, None)
        except plyvel.Error as error:
            raise self._unreadable(error) from error
        if found is None:
            raise DamagedIndex("the first key of the index is missing", path=self._path)
        return found if found[0] >= lowest and found[0] != _LOWEST else None

    def approximate_size(self) -> int:
        with self._handle.reading() as db:
            size: int = db.approximate_size(b"\x00", b"\xff" * 32)
        return size

    def compact(self, *, start: bytes, stop: bytes) -> None:
        try:
            with self._handle.reading() as db:
                db.compact_range(start=start, stop=stop)
        except plyvel.Error as error:
            raise self._wrap(error) from error

    def close(self) -> None:
        self._handle.close()

    def _wrap(self, error: Exception) -> Exception:
        if isinstance(error, plyvel.CorruptionError):
            return DamagedIndex("index is damaged", path=self._path, reason=str(error))
        return self._os_error("index", error)

    def _unreadable(self, error: Exception) -> Exception:
        """Return the error of a failed read. Most are damage: LevelDB reports a truncated file as "IO error"."""
        if any(failure in str(error) for failure in _SYSTEM_ERRORS):
            return self._os_error("index", error)
        return DamagedIndex("index cannot be read", path=self._path, reason=str(error))

    def _os_error(self, what: str, error: Exception) -> OSError:
        """Return an OSError with the path and the error number that the text names; EIO if it names none."""
        message = error.args[0] if error.args else error
        text = message.decode(errors="replace") if isinstance(message, bytes) else str(message)
        number = next((number for words, number in _KNOWN_NUMBERS.items() if words in text), errno.EIO)
        return OSError(number, f"{what}: {text}", self._path)


class MemoryKV:
    """KV in memory, tested by the same contract suite. For tests and for tools without a disk."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._values: dict[bytes, bytes] = {}
        self.closed = False

    def get(self, key: bytes) -> bytes | None:
        self._check_open()
        return self._values.get(key)

    def get_many(self, keys: Iterable[bytes]) -> list[bytes | None]:
        return [self.get(key) for key in keys]

    def write_batch(
        self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = (), *, sync: bool = False
    ) -> None:
        self._check_open()
        for key in deletes:
            if self._values.pop(key, None) is not None:
                del self._keys[bisect.bisect_left(self._keys, key)]
        for key, value in puts:
            if key not in self._values:
                bisect.insort(self._keys, key)
            self._values[key] = value

    def scan(self, *, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        self._check_open()
        found: Sequence[bytes] = self._keys[
            bisect.bisect_left(self._keys, start) : bisect.bisect_left(self._keys, stop)
        ]
        return iter([(key, self._values[key]) for key in found])

    def floor(self, *, lowest: bytes, key: bytes) -> tuple[bytes, bytes] | None:
        self._check_open()
        at = bisect.bisect_right(self._keys, key) - 1
        if at < 0 or self._keys[at] < lowest:
            return None
        return self._keys[at], self._values[self._keys[at]]

    def approximate_size(self) -> int:
        return sum(len(key) + len(value) for key, value in self._values.items())

    def compact(self, *, start: bytes, stop: bytes) -> None:
        self._check_open()

    def close(self) -> None:
        self.closed = True

    def _check_open(self) -> None:
        if self.closed:
            raise OSError("index: closed")
