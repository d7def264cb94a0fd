"""FlushLoop: decides when to flush, tries again what failed, and lets go of what was flushed.

A flush begins when the active write cache is full or its oldest entry is `flush_interval_s` old, on request, and at the
end. While one fails, its cache stays readable and the other fills up; then adds wait (`adds`).
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog
from bindery_core.errors import BinderyError

from bindery_bookie.storage.flushing.flush import Flush, Flusher
from bindery_bookie.storage.io.disk import is_no_space
from bindery_bookie.storage.journal.journal import Journal
from bindery_bookie.storage.journal.journal_format import JournalPosition
from bindery_bookie.storage.memory.ledgers import LedgerTable
from bindery_bookie.storage.memory.write_cache import WriteCache, WriteCaches
from bindery_bookie.storage.settings import StorageSettings
from bindery_bookie.storage.stats import StorageStats

log = structlog.get_logger(__name__)

_RELEASE_ENTRIES: Final = 4096
"""Entries of a flushed cache freed in one turn of the loop: about 0.3 ms."""


def take_flush(
    caches: WriteCaches, ledgers: LedgerTable, stats: StorageStats, position: JournalPosition
) -> Flush | None:
    """Swap the caches. None when there is nothing to flush. `position`: the end of what was journaled so far."""
    if not (caches.active.ledgers or ledgers.has_changes):
        return None
    cache = caches.swap()
    states, deleted = ledgers.take_changes()
    for ledger_id in cache.ledgers:
        states[ledger_id] = ledgers.states[ledger_id]
    stats.active_cache_size, stats.flushing_cache_size = 0, cache.size
    return Flush(cache=cache, position=position, states=states, deleted=deleted)


def drop_flushed(caches: WriteCaches, ledgers: LedgerTable, stats: StorageStats) -> None:
    """The index answers for the flushed entries from now on."""
    caches.flushing = None
    ledgers.forgotten()
    ledgers.evict(caches.active.ledgers)
    stats.flushing_cache_size = 0
    stats.ledgers_in_memory = len(ledgers.states)


class FlushLoop:
    """Event loop only. Owns the task that flushes, from `start` to `stop`."""

    def __init__(
        self,
        *,
        caches: WriteCaches,
        ledgers: LedgerTable,
        journal: Journal,
        journal_synced: Callable[[], Awaitable[None]],
        flusher: Flusher,
        clock: Callable[[], float],
        settings: StorageSettings,
        stats: StorageStats,
        flushed: Callable[[Flush], None],
        unfinished: Flush | None = None,
    ) -> None:
        """`journal_synced` returns once everything appended is durable, or raises. `flushed` hears of each flush.
        `unfinished`: one that the start found no space for.
        """
        self._caches = caches
        self._ledgers = ledgers
        self._journal = journal
        self._journal_synced = journal_synced
        self._flusher = flusher
        self._clock = clock
        self._settings = settings
        self._stats = stats
        self._tell_flushed = flushed
        self._loop = asyncio.get_running_loop()
        self._is_stopping = False
        self._wanted = asyncio.Event()
        self._next = unfinished
        self._done_count = 0
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._rolls: list[asyncio.Future[None]] = []
        """Those who wait for the open entry log to be closed."""
        self._age_timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = self._loop.create_task(self._run(), name="bookie-flush")
        if self._has_more():
            self.start_age_timer()

    async def stop(self) -> None:
        """Flush what there is, once, and end. What fails stays in the journal."""
        self._is_stopping = True
        self._wanted.set()
        if self._task is not None:
            await self._task
        if self._age_timer is not None:
            self._age_timer.cancel()

    @property
    def is_done(self) -> bool:
        """Whether everything is flushed."""
        return self._next is None and not self._has_more()

    def start_age_timer(self) -> None:
        """Something is there to flush: do so in `flush_interval_s` at the latest."""
        if self._age_timer is None and not self._is_stopping:
            self._age_timer = self._loop.call_later(self._settings.flush_interval_s, self._aged)

    def make_room(self) -> bool:
        """Swap a full cache if the other is free. Whether the active one has room now."""
        if self._caches.active.is_full and self._caches.flushing is None and self._next is None:
            self._next = self._take()
            self._wanted.set()
        return not self._caches.active.is_full

    async def flush(self) -> None:
        """Return once what was accepted before this call is flushed. Raises OSError when that fails now, and at the
        end of the bookie."""
        needed = self._done_count + (self._next is not None) + self._has_more()
        if needed == self._done_count:
            return
        if self._task is None or self._task.done():
            raise OSError("storage is closing")
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append((needed, waiter))
        self._wanted.set()
        await waiter

    async def roll(self) -> None:
        """Return once the entry log that was being written is closed. Raises OSError or BinderyError."""
        if self._is_stopping:
            raise OSError("storage is closing")
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._rolls.append(waiter)
        self._wanted.set()
        await waiter

    def _aged(self) -> None:
        self._age_timer = None
        self._wanted.set()

    def _take(self) -> Flush | None:
        return take_flush(self._caches, self._ledgers, self._stats, self._journal.position)

    def _has_more(self) -> bool:
        return bool(self._caches.active.ledgers) or self._ledgers.has_changes

    async def _run(self) -> None:
        while not self._is_stopping or self._next is not None or self._has_more():
            if not self._is_stopping and (self._next is None or self._journal.failed):
                await self._wanted.wait()
            self._wanted.clear()
            if self._journal.failed:  # nothing more is accepted; what is in memory is in the journal or was refused
                self._fail_waiters()
                if self._is_stopping:
                    return
                continue
            if self._next is None:
                self._next = self._take()
            if self._next is not None and not await self._try(self._next):
                if self._is_stopping:
                    return
                await self._pause()
            if self._rolls and self._next is None:
                await self._roll()

    async def _roll(self) -> None:
        error: OSError | BinderyError | None = None
        try:
            await self._flusher.roll()
        except (OSError, BinderyError) as raised:
            error = raised
        waiters, self._rolls = self._rolls, []
        for waiter in waiters:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)

    async def _try(self, flush: Flush) -> bool:
        start = self._clock()
        try:
            await self._flush(flush)
        except Exception as error:  # a fault of ours, too, must not end the loop: adds would wait for ever
            self._stats.flush_failed = True
            is_ours = not isinstance(error, OSError | BinderyError)
            log.error("flush_failed", error=str(error), attempts=flush.attempts, exc_info=is_ours)
            if is_no_space(error):
                self._stats.no_space(str(error))
            self._fail_waiters()
            return False
        seconds = self._clock() - start
        self._stats.flush_failed = False
        self._stats.flush_s += seconds
        self._stats.observe_flush_s(seconds)
        self._next = None
        drop_flushed(self._caches, self._ledgers, self._stats)
        self._tell_flushed(flush)
        self._tell_waiters()
        if self._has_more():
            self.start_age_timer()
        await self._release(flush.cache)
        return True

    async def _flush(self, flush: Flush) -> None:
        # The index must not point to what the journal could still lose: should the crash come before the mark is
        # written, the entry log is cut back, and only a replay of the very same entries mends such rows.
        await self._journal_synced()
        if not flush.is_stored:
            await self._flusher.store(flush)
            flush.is_stored = True
        await self._flusher.advance_mark(flush.position)

    async def _release(self, cache: WriteCache) -> None:
        is_left = True
        while is_left:
            is_left = cache.release(_RELEASE_ENTRIES)
            await asyncio.sleep(0)

    async def _pause(self) -> None:
        """Wait before trying again, or until somebody wants it."""
        self._wanted.clear()
        try:
            async with asyncio.timeout(self._settings.flush_retry_s):
                await self._wanted.wait()
        except TimeoutError:
            pass

    def _tell_waiters(self) -> None:
        self._done_count += 1
        ready = [waiter for needed, waiter in self._waiters if needed <= self._done_count]
        self._waiters = [item for item in self._waiters if item[0] > self._done_count]
        for waiter in ready:
            if not waiter.done():
                waiter.set_result(None)
        if self._waiters:
            self._wanted.set()

    def _fail_waiters(self) -> None:
        waiters = [*(waiter for _, waiter in self._waiters), *self._rolls]
        self._waiters, self._rolls = [], []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(OSError("flush failed"))
