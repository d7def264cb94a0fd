"""Reads: answers from the caches at once, from the disk in batches.

Order of the tiers: active write cache, flushing write cache, read cache, then index and entry log in the reader's
worker (`cold_reads`), all cold reads that piled up in one job.
"""

from collections.abc import Callable, Sequence
from functools import partial

import structlog
from bindery_core.wire.messages import Status

from bindery_bookie.storage.cold_reads import ColdRead, ColdReader
from bindery_bookie.storage.ledgers import LedgerTable
from bindery_bookie.storage.read_cache import ReadCache
from bindery_bookie.storage.settings import StorageSettings
from bindery_bookie.storage.stats import StorageStats
from bindery_bookie.storage.worker import Worker, run_in
from bindery_bookie.storage.write_cache import WriteCaches
from bindery_bookie.store import ReadDone

log = structlog.get_logger(__name__)

_ColdWanted = tuple[Sequence[tuple[int, int]], Callable[[Sequence[bytes | int]], None]]
"""Keys that no cache holds, and who gets the answers."""

_NOTHING: dict[int, dict[int, bytes]] = {}


class Reads:
    """Event loop only. Invariant: one job at most is at the reader's worker."""

    def __init__(
        self,
        *,
        ledgers: LedgerTable,
        caches: WriteCaches,
        reader: ColdReader,
        worker: Worker,
        settings: StorageSettings,
        stats: StorageStats,
    ) -> None:
        self._ledgers = ledgers
        self._caches = caches
        self.cache = ReadCache(settings.read_cache_size_max)
        self._reader = reader
        self._worker = worker
        self._queue_entries_max = settings.read_queue_entries_max
        self._stats = stats
        self._cold_wanted: list[_ColdWanted] = []
        self._cold_running = False
        self._deleted_meanwhile: set[int] = set()
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
            if entry_id < 0 and state is not None:
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
                answer(Status.NO_ENTRY)  # all ids above the indexed ones are in the write caches
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
        if not missing:
            done(answers)
            return
        if stats.read_queue_entries + len(missing) > self._queue_entries_max:
            for place in places:
                answers[place] = Status.TOO_MANY_REQUESTS
            done(answers)
            return
        stats.read_queue_entries += len(missing)
        self._cold_wanted.append((missing, partial(self._fill, answers, places, missing, done)))
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
        """Complete one `read_many` with what the disk said."""
        for place, key, one in zip(places, keys, found, strict=True):
            if one == Status.NO_LEDGER and key[0] in self._ledgers.states:
                answers[place] = Status.NO_ENTRY  # nothing of it was flushed yet
            else:
                answers[place] = one
        done(answers)

    def _read_cold(self) -> None:
        """Send everything that waits for the disk to the reader, in one job."""
        wanted, self._cold_wanted = self._cold_wanted, []
        keys = [key for missing, _ in wanted for key in missing]
        self._cold_running = True
        self._deleted_meanwhile.clear()
        self._overwritten_meanwhile.clear()
        self._stats.read_jobs += 1
        self._worker.submit(lambda: self._reader.read(keys), partial(self._cold_done, wanted))

    def _cold_done(self, wanted: Sequence[_ColdWanted], result: ColdRead | None, error: BaseException | None) -> None:
        stats = self._stats
        self._cold_running = False
        asked = sum(len(missing) for missing, _ in wanted)
        stats.read_queue_entries -= asked
        if result is None:
            log.error("read_job_failed", error=repr(error))
            answers: Sequence[bytes | int] = [Status.IO_ERROR] * asked
        else:
            answers = result.answers
            stats.damage_found += result.damage
            ahead = result.ahead
            if self._deleted_meanwhile:
                ahead = [item for item in ahead if item[0][0] not in self._deleted_meanwhile]
            if self._overwritten_meanwhile:
                ahead = [item for item in ahead if item[0] not in self._overwritten_meanwhile]
            self.cache.put_many(ahead)
            stats.read_cache_size = self.cache.size
            found = sum(type(one) is bytes for one in answers)
            failed = answers.count(Status.IO_ERROR)
            stats.reads_disk += found
            stats.reads_failed += failed
            stats.reads_absent += asked - found - failed
            stats.read_ahead_entries += max(len(result.ahead) - found, 0)
        if self._cold_wanted:
            self._read_cold()
        at = 0
        for missing, fill in wanted:
            fill(answers[at : at + len(missing)])
            at += len(missing)

    async def entry_ids(self, ledger_id: int) -> list[tuple[int, int]]:
        """Runs (first, count) of entry ids in any tier, ascending. Raises DamagedStorage or OSError."""
        recent: list[int] = list(self._caches.active.ledgers.get(ledger_id, ()))
        if self._caches.flushing is not None:
            recent += self._caches.flushing.ledgers.get(ledger_id, ())
        is_hidden = self._ledgers.is_hidden(ledger_id)

        def list_runs() -> list[tuple[int, int]]:
            return _runs({*recent, *(() if is_hidden else self._reader.entry_ids(ledger_id))})

        return await run_in(self._worker, list_runs)

    def drop_ledger(self, ledger_id: int) -> None:
        """Forget a deleted ledger's entries, those of a job under way too."""
        self.cache.drop_ledger(ledger_id)
        if self._cold_running:
            self._deleted_meanwhile.add(ledger_id)

    def drop(self, keys: Sequence[tuple[int, int]]) -> None:
        """Forget entries that were overwritten, those of a job under way too."""
        self.cache.drop(keys)
        if self._cold_running:
            self._overwritten_meanwhile.update(keys)


def _runs(entry_ids: set[int]) -> list[tuple[int, int]]:
    """(first, count) of ids that follow one another, ascending."""
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
