"""ShardedStorage: several engines as one EntryStore. Each engine has its own ledger directory and journal.

A ledger always belongs to shard `ledger_id mod n`. Only that shard's engine keeps the ledger's fence, master key and
last entry, and shards never share a lock, a file or a thread.

Invariants: a batch is answered once, in the order of its requests, after all shards answered their parts; a batch for
one shard is passed to it unchanged; every shard is closed, even if closing another one fails.
"""

import asyncio
import heapq
from array import array
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from bindery_core.wire.messages import AddRequest, Status

from bindery_bookie.storage.io.disk import DiskUsage
from bindery_bookie.storage.store import AddDone, EntryStore, LacState, ReadDone, ReplayProgress

T = TypeVar("T")


class Shard(EntryStore, Protocol):
    """One of the engines."""

    def ledger_disk_usage(self) -> DiskUsage:
        """Return the usage of the file system of the shard's ledger directory. Raises OSError."""
        ...


class ShardedStorage:
    """An EntryStore over `shards`, of which there is at least one."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        assert shards
        self.shards = tuple(shards)

    def shard_of(self, ledger_id: int) -> Shard:
        """Return the shard of a ledger. A negative id goes to some shard, which refuses it."""
        return self.shards[ledger_id % len(self.shards)]

    async def open(self, *, on_progress: Callable[[ReplayProgress], None] | None = None) -> None:
        """See EntryStore. Opens all shards concurrently and reports the sum of their progress.

        After an error or a cancellation, `open` waits for all shards, closes the open ones, and raises the error.
        """
        seen: dict[int, ReplayProgress] = {}

        def reporter(at: int) -> Callable[[ReplayProgress], None] | None:
            if on_progress is None:
                return None

            def report(progress: ReplayProgress) -> None:
                seen[at] = progress
                parts = seen.values()
                on_progress(
                    ReplayProgress(
                        sum(part.bytes_done for part in parts),
                        sum(part.bytes_total for part in parts),
                        sum(part.entries for part in parts),
                    )
                )

            return report

        tasks = [asyncio.create_task(shard.open(on_progress=reporter(at))) for at, shard in enumerate(self.shards)]
        errors: list[BaseException] = []
        try:
            results = await asyncio.gather(*tasks, return_exceptions=True)
            errors = [result for result in results if isinstance(result, BaseException)]
        except asyncio.CancelledError as error:  # `gather` cancelled all tasks, and all have ended
            errors = [error]
        if errors:
            opened = [
                shard
                for shard, task in zip(self.shards, tasks, strict=True)
                if not task.cancelled() and task.exception() is None
            ]
            await asyncio.gather(*(shard.close() for shard in opened), return_exceptions=True)
            raise errors[0]

    async def close(self) -> None:
        """See EntryStore. Raises the first error, after all shards were closed."""
        results = await asyncio.gather(*(shard.close() for shard in self.shards), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    # --- batches

    def add_many(self, adds: Sequence[AddRequest], done: AddDone) -> None:
        """See EntryStore. The shard is chosen by the ledger id in the body, which the shards use too."""
        if len(self.shards) == 1:
            self.shards[0].add_many(adds, done)
            return
        places = self._places([int.from_bytes(add.body[:8]) for add in adds])
        if len(places) <= 1:
            shard = next(iter(places), 0)
            self.shards[shard].add_many(adds, done)
            return
        gather = _Gather([int(Status.IO_ERROR)] * len(adds), len(places), done)
        for shard, at in places.items():
            self.shards[shard].add_many([adds[place] for place in at], gather.part(at))

    def read_many(self, keys: Sequence[tuple[int, int]], done: ReadDone) -> None:
        """See EntryStore."""
        if len(self.shards) == 1:
            self.shards[0].read_many(keys, done)
            return
        places = self._places([key[0] for key in keys])
        if len(places) <= 1:
            shard = next(iter(places), 0)
            self.shards[shard].read_many(keys, done)
            return
        answers: list[bytes | int] = [int(Status.IO_ERROR)] * len(keys)
        gather = _Gather(answers, len(places), done)
        for shard, at in places.items():
            self.shards[shard].read_many([keys[place] for place in at], gather.part(at))

    def _places(self, ledger_ids: Sequence[int]) -> dict[int, list[int]]:
        """Return shard -> places in the batch of the requests for that shard."""
        count = len(self.shards)
        places: dict[int, list[int]] = {}
        for place, ledger_id in enumerate(ledger_ids):
            places.setdefault(ledger_id % count, []).append(place)
        return places

    # --- one ledger

    async def fence(self, ledger_id: int, master_key: bytes) -> None:
        await self.shard_of(ledger_id).fence(ledger_id, master_key)

    async def write_lac(self, ledger_id: int, master_key: bytes, lac: int, packet: bytes) -> None:
        await self.shard_of(ledger_id).write_lac(ledger_id, master_key, lac, packet)

    async def read_lac(self, ledger_id: int) -> LacState:
        return await self.shard_of(ledger_id).read_lac(ledger_id)

    def last_add_confirmed(self, ledger_id: int) -> int:
        return self.shard_of(ledger_id).last_add_confirmed(ledger_id)

    def watch_lac(self, ledger_id: int, wake: Callable[[], None]) -> Callable[[], None]:
        return self.shard_of(ledger_id).watch_lac(ledger_id, wake)

    def lac_updated_at_ms(self, ledger_id: int) -> int:
        return self.shard_of(ledger_id).lac_updated_at_ms(ledger_id)

    async def force(self, ledger_id: int) -> None:
        await self.shard_of(ledger_id).force(ledger_id)

    async def entry_ids(self, ledger_id: int) -> Sequence[tuple[int, int]]:
        return await self.shard_of(ledger_id).entry_ids(ledger_id)

    async def delete_ledger(self, ledger_id: int) -> None:
        await self.shard_of(ledger_id).delete_ledger(ledger_id)

    # --- all shards

    async def list_ledger_ids(self) -> Sequence[int]:
        """See EntryStore."""
        listed = [await shard.list_ledger_ids() for shard in self.shards]
        if len(listed) == 1:
            return listed[0]
        return await asyncio.get_running_loop().run_in_executor(None, lambda: array("q", heapq.merge(*listed)))

    def disk_usage(self) -> tuple[int, int]:
        """See EntryStore. A file system with several ledger directories is counted once."""
        usages = {usage.file_system_id: usage for usage in (shard.ledger_disk_usage() for shard in self.shards)}
        return sum(usage.total for usage in usages.values()), sum(usage.free for usage in usages.values())


class _Gather(Generic[T]):
    """Joins the answers of several shards. Invariant: `done` is called once, after the last part."""

    __slots__ = ("_answers", "_done", "_missing")

    def __init__(self, answers: list[T], parts: int, done: Callable[[Sequence[T]], None]) -> None:
        self._answers = answers
        self._missing = parts
        self._done = done

    def part(self, places: Sequence[int]) -> Callable[[Sequence[T]], None]:
        """Return the callback for the answers that belong to `places`."""

        def answered(part: Sequence[T]) -> None:
            answers = self._answers
            for place, answer in zip(places, part, strict=True):
                answers[place] = answer
            self._missing -= 1
            if not self._missing:
                self._done(answers)

        return answered
