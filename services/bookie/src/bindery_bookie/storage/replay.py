"""Replay: puts the journal behind LastLogMark back into the write cache, flushing whenever that is full."""

from collections.abc import Callable

import structlog
from bindery_core.errors import DamagedStorage

from bindery_bookie.storage import control_records as control
from bindery_bookie.storage import opening
from bindery_bookie.storage.disk import Disk
from bindery_bookie.storage.flush import Flusher
from bindery_bookie.storage.flush_loop import drop_flushed, take_flush
from bindery_bookie.storage.journal_format import Group, JournalPosition
from bindery_bookie.storage.ledgers import LedgerTable
from bindery_bookie.storage.stats import StorageStats
from bindery_bookie.storage.worker import Worker, run_in
from bindery_bookie.storage.write_cache import WriteCaches
from bindery_bookie.store import ReplayProgress

log = structlog.get_logger(__name__)


class Replay:
    """Runs once, in the event loop; files are read in `worker`."""

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
    ) -> None:
        self._disk = disk
        self._directory = journal_directory
        self._ledgers = ledgers
        self._caches = caches
        self._flusher = flusher
        self._worker = worker
        self._stats = stats

    async def run(self, on_progress: Callable[[ReplayProgress], None] | None) -> JournalPosition:
        """Where the journal ends. Raises DamagedStorage with path and offset, or OSError."""
        mark = self._flusher.mark
        total = await run_in(self._worker, lambda: opening.journals_size(self._disk, self._directory, mark))
        groups = opening.replay_groups(self._disk, self._directory, mark.journal)
        end = mark.journal
        done = 0
        while (found := await run_in(self._worker, lambda: next(groups, None))) is not None:
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
        """Flush what was replayed, which is the journal up to `position`, and let the mark say so."""
        flush = take_flush(self._caches, self._ledgers, self._stats, position)
        if flush is not None:
            await self._flusher.store(flush)
            drop_flushed(self._caches, self._ledgers, self._stats)
        await self._flusher.advance_mark(position, is_stored=flush is not None)

    def _apply(self, group: Group) -> None:
        for record in group.records:
            if len(record) < control.CONTROL_SIZE_MIN:
                raise DamagedStorage("journal record is short", offset=group.offset, size=len(record))
            ledger_id, entry_id = control.unpack_ids(record)
            state = self._ledgers.find(ledger_id)
            if entry_id == control.MASTER_KEY:
                if state is None:
                    state = self._ledgers.create(ledger_id, control.unpack_sized(record))
                # Its copy in the entry log may have been cut off with a flush that did not finish.
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
