"""Replay: put the journal after LastLogMark back into the write cache, and flush whenever the cache is full.

A full disk does not stop a replay. Entries that cannot be flushed stay readable: one write cache waits for the flush
loop, the other takes the remaining entries. Both caches together can hold the journal after the mark.
"""

from collections.abc import Callable, Iterator

import structlog
from bindery_core.errors import DamagedStorage

from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.flushing.flush import Flush, Flusher
from bindery_bookie.storage.flushing.flush_loop import drop_flushed, take_flush
from bindery_bookie.storage.io.disk import Disk, is_no_space
from bindery_bookie.storage.io.worker import Worker, run_in
from bindery_bookie.storage.journal import journal_files
from bindery_bookie.storage.journal.journal_format import Group, JournalPosition
from bindery_bookie.storage.memory.ledgers import LedgerTable
from bindery_bookie.storage.memory.write_cache import WriteCaches
from bindery_bookie.storage.opening import opening
from bindery_bookie.storage.stats import StorageStats
from bindery_bookie.storage.store import ReplayProgress

log = structlog.get_logger(__name__)


class Replay:
    """One replay, run in the event loop; files are read in `worker`."""

    def __init__(
        self,
        *,
        disk: Disk,
        journal_directory: str,
        ledgers: LedgerTable,
        caches: WriteCaches,
        flusher: Flusher,
        worker: Worker,
        stats: StorageStats,
        make_room: Callable[[], bool] = lambda: False,
        is_lenient: bool = False,
    ) -> None:
        """`make_room` releases a reserve, in the worker; False if none is left.

        `is_lenient`: the shard is in limbo, so replay all readable groups of the existing journals.
        """
        self._is_lenient = is_lenient
        self._disk = disk
        self._directory = journal_directory
        self._ledgers = ledgers
        self._caches = caches
        self._flusher = flusher
        self._worker = worker
        self._stats = stats
        self._make_room = make_room
        self.unfinished: Flush | None = None
        """A flush that found no space. Its cache is the flushing cache."""

    async def run(self, on_progress: Callable[[ReplayProgress], None] | None) -> JournalPosition:
        """Replay, and return the end of the journal. Raises DamagedStorage with path and offset, OSError."""
        mark = self._flusher.mark
        total = await run_in(self._worker, lambda: journal_files.journals_size(self._disk, self._directory, mark))
        read_groups = journal_files.readable_groups if self._is_lenient else journal_files.replay_groups
        groups = read_groups(self._disk, self._directory, mark.journal)
        end = mark.journal
        done = 0
        while (found := await run_in(self._worker, lambda: _next(groups))) is not None:
            journal_id, group = found
            self._apply(group)
            end = JournalPosition(journal_id, group.offset + group.size, group.sequence + 1)
            done += group.size
            if self._caches.active.is_full:
                await self.flush(end)
            if on_progress is not None:
                on_progress(ReplayProgress(done, total, self._stats.replay_entries))
        if done:
            log.info("journal_replayed", bytes=done, entries=self._stats.replay_entries)
        return end

    async def flush(self, position: JournalPosition) -> None:
        """Flush the replayed entries, which are the journal up to `position`, and advance the mark to it.

        If there is no space, the flush becomes `unfinished` and the mark is not advanced. Raises OSError for other
        failures.
        """
        flush = self.unfinished
        if flush is None:
            flush = take_flush(self._caches, self._ledgers, self._stats, position)
        while True:
            try:
                await self._try(flush, position)
            except OSError as error:
                if not is_no_space(error):
                    raise
                log.warning("replay_no_space", error=str(error))
                self._stats.no_space(str(error))
                if not await run_in(self._worker, self._make_room):
                    self.unfinished = flush
                    return
            else:
                break
        if self.unfinished is not None:
            self.unfinished = None
            await self.flush(position)

    async def _try(self, flush: Flush | None, position: JournalPosition) -> None:
        if flush is None:
            await self._flusher.advance_mark(position, is_stored=False)
            return
        if not flush.is_stored:
            await self._flusher.store(flush)
            flush.is_stored = True
        await self._flusher.advance_mark(flush.position)
        drop_flushed(self._caches, self._ledgers, self._stats)

    def _apply(self, group: Group) -> None:
        for record in group.records:
            if len(record) < control.CONTROL_SIZE_MIN:
                raise DamagedStorage("journal record is short", offset=group.offset, size=len(record))
            ledger_id, entry_id = control.unpack_ids(record)
            if entry_id == control.CONTINUED:
                continue
            state = self._ledgers.find(ledger_id)
            if state is None and self._is_lenient and entry_id != control.MASTER_KEY:
                # The key is lost; it comes from metadata or with the first copy. Only a fenced ledger takes a key from
                # a copy, and limbo fences only ledgers that metadata lists.
                state = self._ledgers.create(ledger_id, b"")
                self._ledgers.fence(state)
            if entry_id == control.MASTER_KEY:
                if state is None:
                    state = self._ledgers.create(ledger_id, control.unpack_sized(record))
                elif not state.master_key:
                    state.master_key = control.unpack_sized(record)
                # Its record in the entry log may have been truncated with an unfinished flush.
                state.has_new_key = True
                self._ledgers.changed[ledger_id] = state
            elif state is None or (entry_id not in (control.FENCE, control.EXPLICIT_LAC) and entry_id < 0):
                log.warning("journal_record_skipped", ledger_id=ledger_id, entry_id=entry_id)
            elif entry_id == control.FENCE:
                state.is_fenced = state.has_new_fence = True
                self._ledgers.changed[ledger_id] = state
            elif entry_id == control.EXPLICIT_LAC:
                state.set_explicit_lac(control.unpack_sized(record))
                self._ledgers.changed[ledger_id] = state
            else:
                lac = control.unpack_ids_and_lac(record)[2]
                state.lac = max(state.lac, lac)
                state.last_entry_id = max(state.last_entry_id, entry_id)
                self._caches.active.put(ledger_id, entry_id, record)
                self._stats.replay_entries += 1


def _next(groups: Iterator[tuple[int, Group]]) -> tuple[int, Group] | None:
    try:
        return next(groups, None)
    except DamagedStorage as error:
        raise DamagedStorage(f"{error.message}; {opening.SALVAGE}", **error.facts) from error
