"""FlushLoop: start flushes, retry failed ones, and release flushed entries from memory.

A flush begins when the active write cache is full, when its oldest entry is `flush_interval_s` old, on request, and at
the stop. While a flush fails, its cache stays readable and the other one fills up; then adds wait (`adds`).
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
"""Number of entries of a flushed cache freed per iteration of the event loop: about 0.3 ms."""


def take_flush(
    caches: WriteCaches, ledgers: LedgerTable, stats: StorageStats, position: JournalPosition
) -> Flush | None:
    """Swap the caches and return a flush; None if there is nothing to flush. `position`: the end of the journal."""
    if not (caches.active.ledgers or ledgers.has_changes):
        return None
    cache = caches.swap()
    states, deleted = ledgers.take_changes()
    for ledger_id in cache.ledgers:
        states[ledger_id] = ledgers.states[ledger_id]
    stats.active_cache_size, stats.flushing_cache_size = 0, cache.size
    return Flush(cache=cache, position=position, states=states, deleted=deleted)


def drop_flushed(caches: WriteCaches, ledgers: LedgerTable, stats: StorageStats) -> None:
    """Drop the flushing cache after its flush. From now on reads find the entries through the index."""
    caches.flushing = None
    ledgers.deletions_flushed()
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
        """`journal_synced` returns once all appended records are durable, or raises. `flushed` is called after a flush.

        `unfinished`: a flush for which the start found no space.
        """
        self._caches = caches
        self._ledgers = ledgers
        self._journal = journal
        self._journal_synced = journal_synced
        self._flusher = flusher
        self._clock = clock
        self._settings = settings
        self._stats = stats
        self._flushed = flushed
        self._loop = asyncio.get_running_loop()
        self._is_stopping = False
        self._wake = asyncio.Event()
        self._next = unfinished
        self._done_count = 0
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._rolls: list[asyncio.Future[None]] = []
        """Callers that wait for the open entry log to be closed."""
        self._age_timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = self._loop.create_task(self._run(), name="bookie-flush")
        if self._has_more():
            self.start_age_timer()

    async def stop(self) -> None:
        """Flush everything once, and end. If the flush fails, the entries stay in the journal."""
        self._is_stopping = True
        self._wake.set()
        if self._task is not None:
            await self._task
        if self._age_timer is not None:
            self._age_timer.cancel()

    @property
    def is_done(self) -> bool:
        """True if everything is flushed."""
        return self._next is None and not self._has_more()

    def start_age_timer(self) -> None:
        """Make sure that a flush begins within `flush_interval_s`."""
        if self._age_timer is None and not self._is_stopping:
            self._age_timer = self._loop.call_later(self._settings.flush_interval_s, self._aged)

    def make_room(self) -> bool:
        """Swap a full cache if the other one is free. Return True if the active cache has room."""
        if self._caches.active.is_full and self._caches.flushing is None and self._next is None:
            self._next = self._take()
            self._wake.set()
        return not self._caches.active.is_full

    async def flush(self) -> None:
        """Return once everything accepted before this call is flushed.

        Raises OSError if the flush fails, and if the storage is closing.
        """
        needed = self._done_count + (self._next is not None) + self._has_more()
        if needed == self._done_count:
            return
        if self._task is None or self._task.done():
            raise OSError("storage is closing")
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append((needed, waiter))
        self._wake.set()
        await waiter

    async def roll(self) -> None:
        """Return once the open entry log is closed. Raises OSError, BinderyError."""
        if self._is_stopping:
            raise OSError("storage is closing")
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._rolls.append(waiter)
        self._wake.set()
        await waiter

    def _aged(self) -> None:
        self._age_timer = None
        self._wake.set()

    def _take(self) -> Flush | None:
        return take_flush(self._caches, self._ledgers, self._stats, self._journal.position)

    def _has_more(self) -> bool:
        return bool(self._caches.active.ledgers) or self._ledgers.has_changes

    async def _run(self) -> None:
        while not self._is_stopping or self._next is not None or self._has_more():
            if not self._is_stopping and (self._next is None or self._journal.failed):
                await self._wake.wait()
            self._wake.clear()
            if self._journal.failed:  # entries in memory are in the journal, or their adds were refused
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
        except Exception as error:  # a bug must not end the loop either, or adds would wait forever
            self._stats.flush_failed = True
            is_bug = not isinstance(error, OSError | BinderyError)
            log.error("flush_failed", error=str(error), attempts=flush.attempts, exc_info=is_bug)
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
        self._flushed(flush)
        self._complete_waiters()
        if self._has_more():
            self.start_age_timer()
        await self._release(flush.cache)
        return True

    async def _flush(self, flush: Flush) -> None:
        # The index must not refer to entries that the journal could still lose. After a crash before the mark is
        # written, the entry log is truncated, and only a replay of the same entries makes such rows valid.
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
        """Wait before a retry, or until a flush is requested."""
        self._wake.clear()
        try:
            async with asyncio.timeout(self._settings.flush_retry_s):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _complete_waiters(self) -> None:
        self._done_count += 1
        ready = [waiter for needed, waiter in self._waiters if needed <= self._done_count]
        self._waiters = [item for item in self._waiters if item[0] > self._done_count]
        for waiter in ready:
            if not waiter.done():
                waiter.set_result(None)
        if self._waiters:
            self._wake.set()

    def _fail_waiters(self) -> None:
        waiters = [*(waiter for _, waiter in self._waiters), *self._rolls]
        self._waiters, self._rolls = [], []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(OSError("flush failed"))
