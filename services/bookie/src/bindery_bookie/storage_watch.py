"""StorageWatch: looks after the disks and the journal while the bookie runs.

- The ledger disk fuller than `disk_usage_max`: read-only. Emptier than `disk_usage_low`: writable again, by itself.
- Flushes go on failing (no space, a disk that refuses writes): read-only until one succeeds, for what is taken
  meanwhile piles up in memory and journal.
- The journal failed: nothing can be made durable any more, and after a failed fdatasync nobody knows what the disk
  holds. The process ends with an error; the next start replays what is really there.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from bindery_kit.health import Health
from bindery_kit.logs import get_logger

from bindery_bookie.settings import BookieSettings
from bindery_bookie.state import READ_ONLY_DISK, READ_ONLY_FLUSH, READ_ONLY_JOURNAL, BookieState
from bindery_bookie.storage.stats import StorageStats
from bindery_bookie.store import EntryStore

TICK_S: Final = 1.0
FLUSH_FAILED_TICKS_MAX: Final = 3
"""Looks that may find the last flush failed before that counts: one failure may pass."""

log = get_logger(__name__)


class StorageWatch:
    """`on_journal_failed(reason)` is called once."""

    def __init__(
        self,
        store: EntryStore,
        stats: StorageStats,
        state: BookieState,
        health: Health,
        settings: BookieSettings,
        *,
        on_journal_failed: Callable[[str], None],
    ) -> None:
        self._store = store
        self._stats = stats
        self._state = state
        self._health = health
        self._settings = settings
        self._on_journal_failed = on_journal_failed
        self._journal_failed = False
        self._flush_failed_ticks = 0
        self.usage = 0.0
        """Part of the ledger disk in use at the last look, 0 .. 1."""

    async def run(self) -> None:
        """Look until cancelled."""
        ticks = max(1, round(self._settings.disk_check_interval_s / TICK_S))
        pause_s = min(TICK_S, self._settings.disk_check_interval_s)
        while True:
            self.check_disk()
            for _ in range(ticks):
                self.check_journal()
                self.check_flush()
                await asyncio.sleep(pause_s)

    def check_disk(self) -> None:
        """Look once at the space left."""
        try:
            total, free = self._store.disk_usage()
        except OSError as error:
            self._turn_read_only(f"the ledger disk does not answer: {error.strerror or error}")
            return
        self.usage = (total - free) / total if total else 1.0
        self._state.high_priority_writes = free >= self._settings.high_priority_free_size_min
        full = READ_ONLY_DISK in self._state.reasons
        if not full and self.usage > self._settings.disk_usage_max:
            self._turn_read_only(f"the ledger disk is {self.usage:.1%} full")
        elif full and self.usage < self._settings.disk_usage_low:
            log.info("disk_has_room_again", usage=round(self.usage, 4))
            self._state.set_read_only(READ_ONLY_DISK, None)

    def check_journal(self) -> None:
        """Look once whether the journal still works."""
        if self._stats.journal_failed and not self._journal_failed:
            self._journal_failed = True
            reason = "the journal could not be written"
            self._health.fail("journal", reason)
            self._state.set_read_only(READ_ONLY_JOURNAL, reason)
            self._on_journal_failed(reason)

    def check_flush(self) -> None:
        """Look once whether what is in the journal can be moved to the ledger disk."""
        if not self._stats.flush_failed:
            self._flush_failed_ticks = 0
            if READ_ONLY_FLUSH in self._state.reasons:
                log.info("flushes_succeed_again")
                self._state.set_read_only(READ_ONLY_FLUSH, None)
            return
        self._flush_failed_ticks += 1
        if self._flush_failed_ticks == FLUSH_FAILED_TICKS_MAX:
            reason = "entries cannot be moved from the journal to the ledger disk"
            log.warning("bookie_turns_read_only", reason=reason)
            self._state.set_read_only(READ_ONLY_FLUSH, reason)

    def _turn_read_only(self, reason: str) -> None:
        if READ_ONLY_DISK not in self._state.reasons:
            log.warning("bookie_turns_read_only", reason=reason)
        self._state.set_read_only(READ_ONLY_DISK, reason)
