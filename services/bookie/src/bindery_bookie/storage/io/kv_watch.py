"""WatchedKV: a KV that reports damage of its files to a callback."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from bindery_bookie.storage.io.errors import DamagedIndex
from bindery_bookie.storage.io.kv import KV


class WatchedKV:
    """Passes all calls to another KV. `damaged` is called in the calling thread before a DamagedIndex is raised."""

    def __init__(self, kv: KV, damaged: Callable[[str], None]) -> None:
        self._kv = kv
        self._damaged = damaged

    @contextmanager
    def _watch(self) -> Iterator[None]:
        try:
            yield
        except DamagedIndex as error:
            self._damaged(str(error))
            raise

    def get(self, key: bytes) -> bytes | None:
        try:  # hot path: without the context manager, which is slower
            return self._kv.get(key)
        except DamagedIndex as error:
            self._damaged(str(error))
            raise

    def get_many(self, keys: Iterable[bytes]) -> list[bytes | None]:
        with self._watch():
            return self._kv.get_many(keys)

    def write_batch(
        self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = (), *, sync: bool = False
    ) -> None:
        with self._watch():
            self._kv.write_batch(puts, deletes, sync=sync)

    def scan(self, *, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        with self._watch():
            return self._drain(self._kv.scan(start=start, stop=stop))

    def _drain(self, pairs: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
        try:
            yield from pairs
        except DamagedIndex as error:
            self._damaged(str(error))
            raise

    def floor(self, *, lowest: bytes, key: bytes) -> tuple[bytes, bytes] | None:
        try:
            return self._kv.floor(lowest=lowest, key=key)
        except DamagedIndex as error:
            self._damaged(str(error))
            raise

    def approximate_size(self) -> int:
        return self._kv.approximate_size()

    def compact(self, *, start: bytes, stop: bytes) -> None:
        with self._watch():
            self._kv.compact(start=start, stop=stop)

    def close(self) -> None:
        self._kv.close()
