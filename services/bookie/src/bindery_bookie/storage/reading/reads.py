"""Reads: answers from the caches at once, from the disk in batches.

Order of the tiers: active write cache, flushing write cache, read cache, then index and entry log in the reader's
worker (`cold_reads`), all cold reads that piled up in one job; before that, what the job before it brought. Windows
that somebody reading in order will want soon are read while nobody waits for the disk.
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

_ColdWanted = tuple[Sequence[tuple[int, int]], Callable[[Sequence[bytes | int]], None]]
"""Keys that no cache holds, and who gets the answers."""

_NOTHING: dict[int, dict[int, bytes]] = {}
_NEXT_WINDOWS_MAX: Final = 1024
"""Ledgers of which the next windows to read ahead are remembered."""
_WINDOWS_A_JOB: Final = 4
_READERS_MAX: Final = 16
"""So many for each."""
_WINDOWS_IN_CACHE_MIN: Final = 8
"""Below so many, windows that nobody asked for yet would push out those that somebody reads."""


class Reads:
    """Event loop only.

    Invariants: one job at most is at the reader's worker; of a ledger in limbo nothing is denied, whatever finds it
    missing.
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
        """`limbo`: the shard's, None when it is whole."""
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
        self._cold_wanted: list[_ColdWanted] = []
        self._cold_running = False
        self._next_windows: dict[int, dict[int, int]] = {}
        """Ledger id -> where the next windows of its readers begin -> when they are due, as in `ColdRead`."""
        self._ahead_wanted: list[tuple[int, int]] = []
        """(ledger id, entry id): windows to read before they are asked for."""
        self._deleted_meanwhile: set[int] = set()
        """Ledgers that were deleted since a read under way, or waiting, was asked for."""
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
                    stats.reads_absent += 1  # the last one here need not be the last one there was
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
            self._look_ahead(ledger_id, entry_id)  # batches are mostly of one reader, and in order
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
            answers[place] = self._negative(key[0], one) if one in (Status.NO_LEDGER, Status.NO_ENTRY) else one
        done(answers)

    @property
    def _is_listing(self) -> bool:
        """Whether it is not known yet which ledgers are in limbo, so that all of them are."""
        limbo = self._limbo()
        return limbo is not None and limbo.is_listing

    def _negative(self, ledger_id: int, status: bytes | int) -> bytes | int:
        """What to say for NO_LEDGER or NO_ENTRY from the index, now that we know more."""
        state = self._ledgers.states.get(ledger_id)
        if self._is_listing or (state is not None and state.is_limbo):
            return Status.UNKNOWN_LEDGER_STATE
        if state is not None:
            return Status.NO_ENTRY  # for NO_LEDGER too: nothing of it was flushed yet
        if status == Status.NO_LEDGER and self._limbo() is not None:
            # Nobody listed it, so it was never here, or its metadata is gone. Saying so is never needed.
            return Status.UNKNOWN_LEDGER_STATE
        return status

    def stop_reading_ahead(self) -> None:
        """Before the reader is closed."""
        self._has_room_ahead = False
        self._ahead_wanted.clear()

    def _look_ahead(self, ledger_id: int, entry_id: int) -> None:
        """`entry_id` was read from the cache: the next window of its reader may be due."""
        windows = self._next_windows[ledger_id]
        for start, due_at in windows.items():
            if due_at <= entry_id < start and self._has_room_ahead:
                del windows[start]
                if not windows:
                    del self._next_windows[ledger_id]
                if self.cache.get(ledger_id, start) is None:  # else another reader was there before
                    self._ahead_wanted.append((ledger_id, start))
                    if not self._cold_running:
                        self._read_ahead()
                return

    def _read_cold(self) -> None:
        """Send everything that waits for the disk to the reader, in one job."""
        wanted, self._cold_wanted = self._cold_wanted, []
        keys = [key for missing, _ in wanted for key in missing]
        self._cold_running = True
        self._deleted_meanwhile.intersection_update(key[0] for key in keys)  # these were asked for before
        self._overwritten_meanwhile.clear()
        self._stats.read_jobs += 1
        self._worker.submit(lambda: self._reader.read(keys), partial(self._cold_done, wanted))

    def _read_ahead(self) -> None:
        """Send some windows that will be wanted to the reader, in one job, for which others may have to wait."""
        self._ahead_wanted = [one for one in self._ahead_wanted if not self._ledgers.is_hidden(one[0])]
        starts = self._ahead_wanted[:_WINDOWS_A_JOB]
        del self._ahead_wanted[:_WINDOWS_A_JOB]
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
            self._go_on([])

    def _keep(self, result: ColdRead) -> None:
        """Put into the cache what a job brought and nobody deleted or overwrote meanwhile."""
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

    def _go_on(self, answered: list[Callable[[], None]]) -> None:
        """A job is done: begin the next one, then answer those who waited for this one."""
        self._cold_running = False
        answered += self._answered_from_cache()
        if self._cold_wanted:
            self._read_cold()
        elif self._ahead_wanted:
            self._read_ahead()
        for answer in answered:
            try:
                answer()
            except Exception as error:  # one that breaks must not take the answers of others with it
                log.error("read_not_answered", **error_fields(error))

    def _answered_from_cache(self) -> list[Callable[[], None]]:
        """What tells those who waited for the disk what the cache holds by now; they wait for the rest only."""
        answered: list[Callable[[], None]] = []
        waiting: list[_ColdWanted] = []
        for missing, fill in self._cold_wanted:
            found: list[bytes | int | None] = [self.cache.get(*key) for key in missing]
            places = [place for place, body in enumerate(found) if body is None]
            count = len(missing) - len(places)
            self._stats.read_queue_entries -= count
            self._stats.reads_read_cache += count
            if not places:
                answered.append(partial(fill, cast(Sequence[bytes | int], found)))
            elif not count:
                waiting.append((missing, fill))
            else:
                waiting.append(([missing[place] for place in places], partial(_fill_rest, found, places, fill)))
        self._cold_wanted = waiting
        return answered

    def _cold_done(self, wanted: Sequence[_ColdWanted], result: ColdRead | None, error: BaseException | None) -> None:
        asked = sum(len(missing) for missing, _ in wanted)
        self._stats.read_queue_entries -= asked
        answers: Sequence[bytes | int] = [Status.IO_ERROR] * asked
        try:
            if result is None:
                log.error("read_job_failed", error=repr(error))
            else:
                self._take_in(result, asked)
                answers = result.answers
        finally:
            at = 0
            answered: list[Callable[[], None]] = []
            for missing, fill in wanted:
                answered.append(partial(fill, answers[at : at + len(missing)]))
                at += len(missing)
            self._go_on(answered)

    def _take_in(self, result: ColdRead, asked: int) -> None:
        """Keep and count what a job found, and tell of damage."""
        stats, answers = self._stats, result.answers
        stats.damage_found += len(result.damage)
        for damage in result.damage:
            self._damage.report(damage)
        self._keep(result)
        found = sum(type(one) is bytes for one in answers)
        failed = answers.count(Status.IO_ERROR)
        stats.reads_disk += found
        stats.reads_failed += failed
        stats.reads_absent += asked - found - failed - answers.count(Status.TOO_MANY_REQUESTS)
        ahead_count = max(len(result.ahead) - found, 0)
        stats.read_ahead_entries += ahead_count
        stats.observe_read_ahead(ahead_count)

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
        self._next_windows.pop(ledger_id, None)
        if self._cold_running:
            self._deleted_meanwhile.add(ledger_id)

    def drop(self, keys: Sequence[tuple[int, int]]) -> None:
        """Forget entries that were overwritten, those of a job under way too."""
        self.cache.drop(keys)
        if self._cold_running:
            self._overwritten_meanwhile.update(keys)


def _fill_rest(
    found: list[bytes | int | None],
    places: Sequence[int],
    fill: Callable[[Sequence[bytes | int]], None],
    answers: Sequence[bytes | int],
) -> None:
    """Complete what the cache held in part."""
    for place, answer in zip(places, answers, strict=True):
        found[place] = answer
    fill(cast(Sequence[bytes | int], found))


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
