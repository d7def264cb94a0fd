"""Answer reads from the caches at once, and from the disk in batches.

A read checks the active write cache, the flushing write cache and the read cache. Cold reads, which no cache can
answer, wait for the read worker (`cold_reads`). All cold reads that arrive during one job form the next job, except
those that the read cache can answer after the first job. Windows that a sequential reader will need soon are read while
no cold read waits.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, cast

import structlog
from bindery_core.wire.messages import Status
from bindery_kit.observability.logs import error_fields

from bindery_bookie.storage.corruption.damage import DamageRegister
from bindery_bookie.storage.corruption.limbo import LimboState
from bindery_bookie.storage.io.worker import Worker, run_in
from bindery_bookie.storage.memory.ledgers import LedgerTable
from bindery_bookie.storage.memory.read_cache import ReadCache
from bindery_bookie.storage.memory.write_cache import WriteCaches
from bindery_bookie.storage.reading.cold_reads import ColdRead, ColdReader
from bindery_bookie.storage.settings import StorageSettings
from bindery_bookie.storage.stats import StorageStats
from bindery_bookie.storage.store import ReadDone

log = structlog.get_logger(__name__)

_ColdBatch = tuple[Sequence[tuple[int, int]], Callable[[Sequence[bytes | int]], None]]
"""Keys that are in no cache, and the callback for their answers."""

_NOTHING: dict[int, dict[int, bytes]] = {}
_NEXT_WINDOWS_MAX: Final = 1024
"""Maximum number of ledgers whose next windows are recorded."""
_WINDOWS_PER_JOB: Final = 4
_READERS_MAX: Final = 16
"""Maximum number of next windows recorded per ledger."""
_WINDOWS_IN_CACHE_MIN: Final = 8
"""Minimum size of the read cache, in windows, to read windows in advance. In a smaller cache they would evict windows
that are in use."""


class Reads:
    """The read path of one shard. Event loop only.

    Invariants: at most one job runs in the read worker; a read of a ledger in limbo is never answered with NO_ENTRY or
    NO_LEDGER.
    """

    def __init__(
        self,
        *,
        ledgers: LedgerTable,
        caches: WriteCaches,
        reader: ColdReader,
        worker: Worker,
        settings: StorageSettings,
        stats: StorageStats,
        damage: DamageRegister,
        limbo: Callable[[], LimboState | None],
    ) -> None:
        """`limbo`: returns the limbo state of the shard; None if the shard is complete."""
        self._damage = damage
        self._limbo = limbo
        self._ledgers = ledgers
        self._caches = caches
        self.cache = ReadCache(settings.read_cache_size_max)
        self._reader = reader
        self._worker = worker
        self._queue_entries_max = settings.read_queue_entries_max
        self._has_room_ahead = settings.read_cache_size_max >= _WINDOWS_IN_CACHE_MIN * settings.read_ahead_size_max
        self._stats = stats
        self._cold_waiting: list[_ColdBatch] = []
        self._cold_running = False
        self._next_windows: dict[int, dict[int, int]] = {}
        """Ledger id -> start of a next window -> the entry id whose read triggers it, as in `ColdRead`."""
        self._ahead_waiting: list[tuple[int, int]] = []
        """(ledger id, entry id) of windows to read in advance."""
        self._deleted_meanwhile: set[int] = set()
        """Ledgers that were deleted after a running or waiting read of them was requested."""
        self._overwritten_meanwhile: set[tuple[int, int]] = set()

    def read_many(self, keys: Sequence[tuple[int, int]], done: ReadDone) -> None:
        """See EntryStore."""
        stats = self._stats
        states = self._ledgers.states
        active = self._caches.active.ledgers
        flushing = self._caches.flushing.ledgers if self._caches.flushing is not None else _NOTHING
        cached = self.cache.ledgers
        answers: list[bytes | int] = []
        answer = answers.append
        missing: list[tuple[int, int]] = []
        places: list[int] = []
        hits_active = hits_flushing = hits_cached = 0
        for ledger_id, entry_id in keys:
            state = states.get(ledger_id)
            if entry_id < 0:
                if self._is_listing or (state is not None and state.is_limbo):
                    stats.reads_absent += 1  # the last entry may have been lost
                    answer(Status.UNKNOWN_LEDGER_STATE)
                    continue
                if state is not None:
                    entry_id = state.last_entry_id
            if (entries := active.get(ledger_id)) is not None and (body := entries.get(entry_id)) is not None:
                hits_active += 1
                answer(body)
            elif (entries := flushing.get(ledger_id)) is not None and (body := entries.get(entry_id)) is not None:
                hits_flushing += 1
                answer(body)
            elif (entries := cached.get(ledger_id)) is not None and (body := entries.get(entry_id)) is not None:
                hits_cached += 1
                answer(body)
            elif (state is not None and entry_id > state.indexed_entry_id) or (state is not None and entry_id < 0):
                stats.reads_absent += 1
                # All ids above the indexed ones are in the write caches.
                answer(Status.UNKNOWN_LEDGER_STATE if state.is_limbo or self._is_listing else Status.NO_ENTRY)
            elif self._ledgers.is_hidden(ledger_id):
                stats.reads_absent += 1
                answer(Status.NO_LEDGER if state is None else Status.NO_ENTRY)
            else:
                places.append(len(answers))
                missing.append((ledger_id, entry_id))
                answer(Status.IO_ERROR)
        stats.reads_active_cache += hits_active
        stats.reads_flushing_cache += hits_flushing
        stats.reads_read_cache += hits_cached
        if hits_cached and ledger_id in self._next_windows:
            self._trigger_window(ledger_id, entry_id)  # most batches are of one reader, and in order
        if not missing:
            done(answers)
            return
        if stats.read_queue_entries + len(missing) > self._queue_entries_max:
            for place in places:
                answers[place] = Status.TOO_MANY_REQUESTS
            done(answers)
            return
        stats.read_queue_entries += len(missing)
        self._cold_waiting.append((missing, partial(self._fill, answers, places, missing, done)))
        if not self._cold_running:
            self._read_cold()

    def _fill(
        self,
        answers: list[bytes | int],
        places: Sequence[int],
        keys: Sequence[tuple[int, int]],
        done: ReadDone,
        found: Sequence[bytes | int],
    ) -> None:
        """Complete one `read_many` with the results from the disk."""
        for place, key, result in zip(places, keys, found, strict=True):
            is_absent = result in (Status.NO_LEDGER, Status.NO_ENTRY)
            answers[place] = self._absent_status(key[0], result) if is_absent else result
        done(answers)

    @property
    def _is_listing(self) -> bool:
        """True in phase listing: the ledgers in limbo are not known yet, so every ledger counts as in limbo."""
        limbo = self._limbo()
        return limbo is not None and limbo.is_listing

    def _absent_status(self, ledger_id: int, status: bytes | int) -> bytes | int:
        """Return the status for an entry that is not in the index; `status`: NO_LEDGER or NO_ENTRY."""
        state = self._ledgers.states.get(ledger_id)
        if self._is_listing or (state is not None and state.is_limbo):
            return Status.UNKNOWN_LEDGER_STATE
        if state is not None:
            return Status.NO_ENTRY  # also for NO_LEDGER: nothing of the ledger was flushed yet
        if status == Status.NO_LEDGER and self._limbo() is not None:
            # The ledger was not listed. It was probably never here, or its metadata was deleted; neither is certain.
            return Status.UNKNOWN_LEDGER_STATE
        return status

    def stop_reading_ahead(self) -> None:
        """Start no more read-ahead jobs. Called before the reader is closed."""
        self._has_room_ahead = False
        self._ahead_waiting.clear()

    def _trigger_window(self, ledger_id: int, entry_id: int) -> None:
        """Read the next window of a reader if its read of `entry_id`, from the cache, triggers it."""
        windows = self._next_windows[ledger_id]
        for start, due_at in windows.items():
            if due_at <= entry_id < start and self._has_room_ahead:
                del windows[start]
                if not windows:
                    del self._next_windows[ledger_id]
                if self.cache.get(ledger_id, start) is None:  # otherwise it was read for another reader
                    self._ahead_waiting.append((ledger_id, start))
                    if not self._cold_running:
                        self._read_ahead()
                return

    def _read_cold(self) -> None:
        """Submit all waiting cold reads in one job."""
        batches, self._cold_waiting = self._cold_waiting, []
        keys = [key for missing, _ in batches for key in missing]
        self._cold_running = True
        self._deleted_meanwhile.intersection_update(key[0] for key in keys)  # requested before the deletion
        self._overwritten_meanwhile.clear()
        self._stats.read_jobs += 1
        self._worker.submit(lambda: self._reader.read(keys), partial(self._cold_done, batches))

    def _read_ahead(self) -> None:
        """Submit some windows in one job. It is short, because cold reads may have to wait for it."""
        self._ahead_waiting = [key for key in self._ahead_waiting if not self._ledgers.is_hidden(key[0])]
        starts = self._ahead_waiting[:_WINDOWS_PER_JOB]
        del self._ahead_waiting[:_WINDOWS_PER_JOB]
        if starts:
            self._cold_running = True
            self._deleted_meanwhile.clear()
            self._overwritten_meanwhile.clear()
            self._worker.submit(lambda: self._reader.read_ahead(starts), self._ahead_done)

    def _ahead_done(self, result: ColdRead | None, error: BaseException | None) -> None:
        try:
            if result is None:
                log.error("read_ahead_job_failed", error=repr(error))
            else:
                self._keep(result)
                self._stats.read_ahead_entries += len(result.ahead)
                self._stats.observe_read_ahead(len(result.ahead))
        finally:
            self._start_next_job([])

    def _keep(self, result: ColdRead) -> None:
        """Add the entries of a job to the cache, except those that were deleted or overwritten meanwhile."""
        ahead = result.ahead
        if self._deleted_meanwhile:
            ahead = [item for item in ahead if item[0][0] not in self._deleted_meanwhile]
        if self._overwritten_meanwhile:
            ahead = [item for item in ahead if item[0] not in self._overwritten_meanwhile]
        self.cache.put_many(ahead)
        self._stats.read_cache_size = self.cache.size
        for (ledger_id, start), due_at in result.next_windows.items():
            windows = self._next_windows.pop(ledger_id, {})
            windows[start] = due_at
            if len(windows) > _READERS_MAX:
                del windows[next(iter(windows))]
            self._next_windows[ledger_id] = windows
        while len(self._next_windows) > _NEXT_WINDOWS_MAX:
            del self._next_windows[next(iter(self._next_windows))]

    def _start_next_job(self, callbacks: list[Callable[[], None]]) -> None:
        """Submit the next job, then run the callbacks of the finished one."""
        self._cold_running = False
        callbacks += self._callbacks_from_cache()
        if self._cold_waiting:
            self._read_cold()
        elif self._ahead_waiting:
            self._read_ahead()
        for callback in callbacks:
            try:
                callback()
            except Exception as error:  # one failing callback must not prevent the others
                log.error("read_callback_failed", **error_fields(error))

    def _callbacks_from_cache(self) -> list[Callable[[], None]]:
        """Return callbacks for waiting reads that the cache can answer by now; keep the rest waiting."""
        callbacks: list[Callable[[], None]] = []
        waiting: list[_ColdBatch] = []
        for missing, fill in self._cold_waiting:
            found: list[bytes | int | None] = [self.cache.get(*key) for key in missing]
            places = [place for place, body in enumerate(found) if body is None]
            count = len(missing) - len(places)
            self._stats.read_queue_entries -= count
            self._stats.reads_read_cache += count
            if not places:
                callbacks.append(partial(fill, cast(Sequence[bytes | int], found)))
            elif not count:
                waiting.append((missing, fill))
            else:
                waiting.append(([missing[place] for place in places], partial(_fill_rest, found, places, fill)))
        self._cold_waiting = waiting
        return callbacks

    def _cold_done(self, batches: Sequence[_ColdBatch], result: ColdRead | None, error: BaseException | None) -> None:
        requested = sum(len(missing) for missing, _ in batches)
        self._stats.read_queue_entries -= requested
        answers: Sequence[bytes | int] = [Status.IO_ERROR] * requested
        try:
            if result is None:
                log.error("read_job_failed", error=repr(error))
            else:
                self._use_result(result, requested)
                answers = result.answers
        finally:
            at = 0
            callbacks: list[Callable[[], None]] = []
            for missing, fill in batches:
                callbacks.append(partial(fill, answers[at : at + len(missing)]))
                at += len(missing)
            self._start_next_job(callbacks)

    def _use_result(self, result: ColdRead, requested: int) -> None:
        """Update cache and counters with the result of a job, and report its damage."""
        stats, answers = self._stats, result.answers
        stats.damage_found += len(result.damage)
        for damage in result.damage:
            self._damage.report(damage)
        self._keep(result)
        found = sum(type(answer) is bytes for answer in answers)
        failed = answers.count(Status.IO_ERROR)
        stats.reads_disk += found
        stats.reads_failed += failed
        stats.reads_absent += requested - found - failed - answers.count(Status.TOO_MANY_REQUESTS)
        ahead_count = max(len(result.ahead) - found, 0)
        stats.read_ahead_entries += ahead_count
        stats.observe_read_ahead(ahead_count)

    async def entry_ids(self, ledger_id: int) -> list[tuple[int, int]]:
        """Return runs (first, count) of entry ids in caches and index, ascending. Raises DamagedStorage, OSError."""
        recent: list[int] = list(self._caches.active.ledgers.get(ledger_id, ()))
        if self._caches.flushing is not None:
            recent += self._caches.flushing.ledgers.get(ledger_id, ())
        is_hidden = self._ledgers.is_hidden(ledger_id)

        def list_runs() -> list[tuple[int, int]]:
            return _runs({*recent, *(() if is_hidden else self._reader.entry_ids(ledger_id))})

        return await run_in(self._worker, list_runs)

    def drop_ledger(self, ledger_id: int) -> None:
        """Remove a deleted ledger's entries from the cache, including those of a running job."""
        self.cache.drop_ledger(ledger_id)
        self._next_windows.pop(ledger_id, None)
        if self._cold_running:
            self._deleted_meanwhile.add(ledger_id)

    def drop(self, keys: Sequence[tuple[int, int]]) -> None:
        """Remove overwritten entries from the cache, including those of a running job."""
        self.cache.drop(keys)
        if self._cold_running:
            self._overwritten_meanwhile.update(keys)


def _fill_rest(
    found: list[bytes | int | None],
    places: Sequence[int],
    fill: Callable[[Sequence[bytes | int]], None],
    answers: Sequence[bytes | int],
) -> None:
    """Complete a batch of which the cache had a part."""
    for place, answer in zip(places, answers, strict=True):
        found[place] = answer
    fill(cast(Sequence[bytes | int], found))


def _runs(entry_ids: set[int]) -> list[tuple[int, int]]:
    """Return (first, count) of consecutive ids, ascending."""
    runs: list[tuple[int, int]] = []
    first = last = -2
    for entry_id in sorted(entry_ids):
        if entry_id != last + 1:
            if last >= 0:
                runs.append((first, last - first + 1))
            first = entry_id
        last = entry_id
    if last >= 0:
        runs.append((first, last - first + 1))
    return runs
