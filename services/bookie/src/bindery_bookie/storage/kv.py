"""KV: an ordered store of bytes, and its two implementations: LevelDB and memory.

Keys sort by their bytes. A batch is applied whole or not at all, also across a crash; a batch written with `sync` (and
every batch before it) survives a power cut.
Errors: OSError for input and output, DamagedStorage when the store finds its own files contradicting their checksums.
"""

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import plyvel
from bindery_core.errors import DamagedStorage


class KV(Protocol):
    """Safe for several threads; an iterator belongs to one."""

    def get(self, key: bytes) -> bytes | None: ...

    def get_many(self, keys: Iterable[bytes]) -> list[bytes | None]: ...

    def write_batch(
        self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = (), *, sync: bool = False
    ) -> None:
        """Apply `deletes`, then `puts`."""
        ...

    def scan(self, *, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Pairs with start <= key < stop, ascending, as of this call. Close it (or exhaust it) when done."""
        ...

    def floor(self, *, lowest: bytes, key: bytes) -> tuple[bytes, bytes] | None:
        """The pair with the greatest key in [lowest, key]; None if there is none."""
        ...

    def approximate_size(self) -> int:
        """Bytes, roughly."""
        ...

    def close(self) -> None: ...


OpenKV = Callable[[str], KV]
"""Opens the store in a directory, creating it when missing. Raises DamagedStorage or OSError."""


class LevelDbKV:
    """KV on LevelDB, with its own checks switched on: damage becomes an error, never absence."""

    def __init__(
        self, path: str, *, block_cache_size: int = 16 * 1024 * 1024, write_buffer_size: int = 8 * 1024 * 1024
    ) -> None:
        self._path = path
        try:
            self._db = plyvel.DB(
                path,
                create_if_missing=True,
                paranoid_checks=True,
                lru_cache_size=block_cache_size,
                write_buffer_size=write_buffer_size,
                bloom_filter_bits=10,
                compression=None,  # keys and sizes hardly compress; the time is worth more
            )
        except plyvel.CorruptionError as error:
            raise DamagedStorage("index does not open", path=path, reason=str(error)) from error
        except plyvel.Error as error:
            raise OSError(f"index does not open: {error}") from error

    @staticmethod
    def destroy(path: str) -> None:
        """Remove the store's files. Raises OSError."""
        try:
            plyvel.destroy_db(path)
        except plyvel.Error as error:
            raise OSError(f"index cannot be removed: {error}") from error

    def get(self, key: bytes) -> bytes | None:
        try:
            value: bytes | None = self._db.get(key, verify_checksums=True)
        except plyvel.Error as error:
            raise self._wrap(error) from error
        return value

    def get_many(self, keys: Iterable[bytes]) -> list[bytes | None]:
        return [self.get(key) for key in keys]

    def write_batch(
        self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = (), *, sync: bool = False
    ) -> None:
        try:
            batch = self._db.write_batch(sync=sync)
            for key in deletes:
                batch.delete(key)
            for key, value in puts:
                batch.put(key, value)
            batch.write()
        except plyvel.Error as error:
            raise self._wrap(error) from error

    def scan(self, *, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        try:
            return self._drain(self._db.iterator(start=start, stop=stop, verify_checksums=True, fill_cache=False))
        except plyvel.Error as error:
            raise self._wrap(error) from error

    def _drain(self, iterator: Any) -> Iterator[tuple[bytes, bytes]]:
        try:
            with iterator as pairs:
                yield from pairs
        except plyvel.Error as error:
            raise self._wrap(error) from error

    def floor(self, *, lowest: bytes, key: bytes) -> tuple[bytes, bytes] | None:
        # No `start`: plyvel's reverse iterator misses a lone pair that stands exactly there.
        try:
            with self._db.iterator(stop=key, include_stop=True, reverse=True, verify_checksums=True) as pairs:
                found: tuple[bytes, bytes] | None = next(pairs, None)
        except plyvel.Error as error:
            raise self._wrap(error) from error
        return found if found is not None and found[0] >= lowest else None

    def approximate_size(self) -> int:
        size: int = self._db.approximate_size(b"\x00", b"\xff" * 32)
        return size

    def close(self) -> None:
        self._db.close()

    def _wrap(self, error: Exception) -> Exception:
        if isinstance(error, plyvel.CorruptionError):
            return DamagedStorage("index is damaged", path=self._path, reason=str(error))
        return OSError(f"index: {error}")


class MemoryKV:
    """KV in memory, under the same contract suite: for tests and for tools that need no disk."""

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

    def close(self) -> None:
        self.closed = True

    def _check_open(self) -> None:
        if self.closed:
            raise OSError("index: closed")
