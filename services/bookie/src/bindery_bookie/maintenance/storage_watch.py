"""StorageWatch: looks after the disks and the journals while the bookie runs.

| a directory is | since                                                       | until                                 |
|----------------|-------------------------------------------------------------|---------------------------------------|
| full           | more than `disk_usage_max` is in use, or something found no | less than `disk_usage_low` is in use, |
|                | space in it, or its reserve does not fit                    | and the reserve is back               |
| failed         | the file system does not answer                             | it does                               |
| warn           | more than `disk_usage_warn` is in use                       | that is over                          |
| ok             | otherwise                                                   |                                       |

What is in use counts the reserve as held, so that giving it up does not look like room. Any full or failed directory,
of journal or ledgers, makes the bookie read-only, and the last one that recovers makes it writable, both by itself.
Reads are served throughout. BookKeeper's bookie (readOnlyModeOnAnyDiskFull, on since 4.18) does the same.

When something found no space, the reserves of that shard's directories are given up, so that what is in memory finds
its way to the entry logs and old journals can go; the watch looks at once, and every TICK_S while a directory is full.
All that is asked of the file systems, putting a reserve back above all, is done by a worker: it may take seconds.

Besides: flushes that go on failing make the bookie read-only until one succeeds, for what is taken meanwhile piles up
in memory and journal. And when a journal failed nothing can be made durable any more; after a failed fdatasync nobody
knows what the disk holds. The process ends with an error; the next start replays what is really there.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

from bindery_kit.observability.health import Health
from bindery_kit.observability.logs import get_logger

from bindery_bookie.settings import BookieSettings
from bindery_bookie.state import READ_ONLY_DISK, READ_ONLY_FLUSH, READ_ONLY_JOURNAL, BookieState
from bindery_bookie.storage.io.disk import Disk, DiskUsage
from bindery_bookie.storage.io.reserve import Reserve
from bindery_bookie.storage.io.worker import Worker, close_worker, run_in
from bindery_bookie.storage.stats import StorageStats

TICK_S: Final = 1.0
FLUSH_FAILED_TICKS_MAX: Final = 3
"""Looks that may find the last flush failed before that counts: one failure may pass."""

log = get_logger(__name__)


class DirectoryStatus(StrEnum):
    OK = "ok"
    WARN = "warn"
    FULL = "full"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryState:
    """One configured directory at the last look."""

    path: str
    holds: tuple[str, ...]
    """`journal`, `ledgers` or both."""
    status: DirectoryStatus
    reason: str
    """Why it is not `ok`, with bytes and per cent; empty when it is."""
    total: int
    """Bytes of the file system."""
    free: int
    usage: float
    """Part in use, the reserve counted as held, 0 .. 1."""
    reserve_size: int
    """Bytes that the reserves here are to hold."""
    reserve_held: int
    since_ms: int
    """Wall clock of the look that found this status first."""
    last_check_ms: int

    @property
    def is_writable(self) -> bool:
        return self.status in (DirectoryStatus.OK, DirectoryStatus.WARN)


class WatchedShard(Protocol):
    """A StorageEngine, as its watch sees it."""

    stats: StorageStats
    journal_reserve: Reserve
    ledger_reserve: Reserve
    start_reserve: Reserve
    """In the ledger directory; the watch puts it back, only a start gives it up."""


@dataclass(slots=True)
class _Watched:
    """A configured directory and what is known of it."""

    path: str
    holds: list[str] = field(default_factory=list)
    reserves: list[Reserve] = field(default_factory=list)
    """Given up when something found no space."""
    kept_reserves: list[Reserve] = field(default_factory=list)
    """Put back, but not given up."""
    journals_of: list[WatchedShard] = field(default_factory=list)
    no_space: str = ""
    """What found no space here since the last look."""
    state: DirectoryState | None = None
    pressed_ms: int = 0
    """Wall clock when its ledgers' garbage was asked for last."""

    @property
    def all_reserves(self) -> list[Reserve]:
        return self.kept_reserves + self.reserves


class StorageWatch:
    """`on_journal_failed(reason)` is called once.

    Invariants: a writable directory holds its reserve; the bookie has READ_ONLY_DISK exactly while a directory is not
    writable, with the reasons of all that are not. Event loop only.
    """

    def __init__(
        self,
        shards: Sequence[WatchedShard],
        disk: Disk,
        state: BookieState,
        health: Health,
        settings: BookieSettings,
        *,
        wall_clock_ms: Callable[[], int],
        on_journal_failed: Callable[[str], None],
        on_pressure: Callable[[], None] = lambda: None,
        start_worker: Callable[[], Worker] | None = None,
    ) -> None:
        """`shards`: in the order of `settings.resolved_storages()`. `on_pressure`: a ledger directory fills up, or is
        full: called when that becomes so, and every `gc_wait_time_s` while it stays full: what can be collected, and
        which logs are sparse, changes. `start_worker`: called by the first `check`, in the event loop; None, for
        disks that are memory: the loop does the work."""
        self._shards = tuple(shards)
        self._disk = disk
        self._state = state
        self._health = health
        self._settings = settings
        self._wall_clock_ms = wall_clock_ms
        self._on_journal_failed = on_journal_failed
        self._on_pressure = on_pressure
        self._start_worker = start_worker
        self._worker: Worker | None = None
        self._looking = asyncio.Lock()
        self._journal_failed = False
        self._flush_failed_ticks = 0
        self._look_now = asyncio.Event()
        self._watched: dict[str, _Watched] = {}
        journals, ledgers = settings.journal_dirs, settings.ledger_dirs
        for at, shard in enumerate(self._shards):
            journal = self._watch(journals[at % len(journals)], "journal", shard.journal_reserve)
            ledger = self._watch(ledgers[at % len(ledgers)], "ledgers", shard.ledger_reserve)
            journal.journals_of.append(shard)
            ledger.kept_reserves.append(shard.start_reserve)
            shard.stats.no_space = self._no_space(journal, ledger)

    def _watch(self, path: str, holds: str, reserve: Reserve) -> _Watched:
        watched = self._watched.setdefault(path, _Watched(path))
        if holds not in watched.holds:
            watched.holds.append(holds)
        if reserve.path not in [known.path for known in watched.reserves]:
            watched.reserves.append(reserve)
        return watched

    def _no_space(self, journal: _Watched, ledger: _Watched) -> Callable[[str], None]:
        """What a shard calls that found no space; its message names a file."""

        def found(reason: str) -> None:
            there = [one for one in (journal, ledger) if f"{one.path}/" in reason]
            for one in there or (journal, ledger):
                one.no_space = reason
            self._look_now.set()

        return found

    @property
    def usage(self) -> float:
        """Part in use of the fullest ledger directory, 0 .. 1; looked up now if it never was."""
        return max((one.usage for one in self.directories() if "ledgers" in one.holds), default=0.0)

    def directories(self) -> Sequence[DirectoryState]:
        """All directories, the ledgers' first, as of the last look; the first call looks."""
        if any(watched.state is None for watched in self._watched.values()):
            self._judge_all(self._look(restores=False))
        states = [watched.state for watched in self._watched.values() if watched.state is not None]
        return sorted(states, key=lambda state: "ledgers" not in state.holds)

    async def run(self) -> None:
        """Look until cancelled."""
        try:
            await self._run()
        finally:
            worker, self._worker = self._worker, None
            if worker is not None:
                await close_worker(worker)

    async def _run(self) -> None:
        ticks = max(1, round(self._settings.disk_check_interval_s / TICK_S))
        pause_s = min(TICK_S, self._settings.disk_check_interval_s)
        while True:
            await self.check()
            for _ in range(ticks):
                self.check_journal()
                self.check_flush()
                try:
                    async with asyncio.timeout(pause_s):
                        await self._look_now.wait()
                except TimeoutError:
                    pass
                if self._look_now.is_set() or READ_ONLY_DISK in self._state.reasons:
                    break

    async def check(self) -> None:
        """Look once at the space left everywhere, in the worker."""
        if self._worker is None and self._start_worker is not None:
            self._worker = self._start_worker()
        if self._worker is None:
            self.check_disk()
            return
        async with self._looking:
            found = self._take_no_space()
            self._judge_all(await run_in(self._worker, lambda: self._look(found)))

    def check_disk(self) -> None:
        """As `check`, in the event loop."""
        self._judge_all(self._look(self._take_no_space()))

    def _take_no_space(self) -> dict[str, str]:
        """By directory, what found no space since the last look; what finds none from now on asks for another look."""
        self._look_now.clear()
        found = {watched.path: watched.no_space for watched in self._watched.values()}
        for watched in self._watched.values():
            watched.no_space = ""
        return found

    def _look(self, no_space: Mapping[str, str] | None = None, *, restores: bool = True) -> list[DirectoryState]:
        """At all directories. Any thread, one at a time: it changes reserves and nothing else. `restores`: put back the
        reserves where there is room."""
        found = no_space or {}
        return [
            self._look_at(watched, found.get(watched.path, ""), restores=restores) for watched in self._watched.values()
        ]

    def _judge_all(self, states: Sequence[DirectoryState]) -> None:
        """Go by what a look found."""
        free_min: int | None = None
        for watched, state in zip(self._watched.values(), states, strict=True):
            before = watched.state
            watched.state = state
            if "ledgers" in watched.holds:
                free_min = state.free if free_min is None else min(free_min, state.free)
            is_news = before is None or state.status != before.status
            if is_news:
                self._tell(state)
            if "ledgers" in watched.holds and self._is_pressed(watched, state, is_news=is_news):
                watched.pressed_ms = state.last_check_ms
                self._on_pressure()
        self._state.high_priority_writes = (free_min or 0) >= self._settings.high_priority_free_size_min
        reasons = [one.state.reason for one in self._watched.values() if one.state and not one.state.is_writable]
        self._state.set_read_only(READ_ONLY_DISK, "; ".join(reasons) or None)

    def _is_pressed(self, watched: _Watched, state: DirectoryState, *, is_news: bool) -> bool:
        """Whether its garbage is to be collected now."""
        if is_news:
            return state.status in (DirectoryStatus.WARN, DirectoryStatus.FULL)
        since_ms = abs(state.last_check_ms - watched.pressed_ms)  # the clock may have been set back
        return state.status is DirectoryStatus.FULL and since_ms >= self._settings.storage.gc_wait_time_s * 1000

    def _look_at(self, watched: _Watched, no_space: str, *, restores: bool) -> DirectoryState:
        reserve_size = 0
        try:
            if no_space:
                for reserve in watched.reserves:
                    reserve.release()
            usage = self._disk.usage(watched.path)
            reserve_size = sum(reserve.size() for reserve in watched.all_reserves)
            status, reason = self._judge(watched, usage, reserve_size, no_space, restores=restores)
            usage = self._disk.usage(watched.path)
        except OSError as error:
            usage = DiskUsage(total=0, free=0, file_system_id=0)
            status, reason = DirectoryStatus.FAILED, f"{watched.path} does not answer: {error.strerror or error}"
        held = sum(reserve.size_held for reserve in watched.all_reserves)
        now_ms = self._wall_clock_ms()
        before = watched.state
        return DirectoryState(
            path=watched.path,
            holds=tuple(watched.holds),
            status=status,
            reason=reason,
            total=usage.total,
            free=usage.free,
            usage=_part_in_use(usage, missing=reserve_size - held),
            reserve_size=reserve_size,
            reserve_held=held,
            since_ms=before.since_ms if before is not None and before.status == status else now_ms,
            last_check_ms=now_ms,
        )

    def _judge(
        self, watched: _Watched, usage: DiskUsage, reserve_size: int, no_space: str, *, restores: bool
    ) -> tuple[DirectoryStatus, str]:
        """Status and reason. Takes the reserves back when there is room."""
        settings = self._settings
        held = sum(reserve.size_held for reserve in watched.all_reserves)
        part = _part_in_use(usage, missing=reserve_size - held)
        was_full = watched.state is not None and not watched.state.is_writable
        in_use = f"{usage.total - usage.free} of {usage.total} bytes ({part:.1%} with its reserve) in use"
        if no_space:
            return DirectoryStatus.FULL, f"{watched.path} has no space: {no_space}; {in_use}"
        if part > settings.disk_usage_max or (was_full and part >= settings.disk_usage_low):
            above = f", more than {settings.disk_usage_max:.0%}" if part > settings.disk_usage_max else ""
            until = f"writable again below {settings.disk_usage_low:.0%}"
            return DirectoryStatus.FULL, f"{watched.path} is full: {in_use}{above}; {until}"
        restored = [reserve.restore() for reserve in watched.all_reserves if restores]
        if not all(restored):
            return DirectoryStatus.FULL, f"{watched.path} has no room for its reserve of {reserve_size} bytes: {in_use}"
        if any(shard.stats.journal_full for shard in watched.journals_of):
            return DirectoryStatus.FULL, f"{watched.path} had no room for a journal file: {in_use}"
        if part > settings.disk_usage_warn:
            return DirectoryStatus.WARN, f"{watched.path} fills up: {in_use}, more than {settings.disk_usage_warn:.0%}"
        return DirectoryStatus.OK, ""

    def _tell(self, state: DirectoryState) -> None:
        if state.status == DirectoryStatus.OK:
            log.info("directory_has_room", path=state.path, free=state.free, usage=round(state.usage, 4))
        else:
            log.warning(f"directory_{state.status}", path=state.path, reason=state.reason)

    def check_journal(self) -> None:
        """Look once whether the journals still work."""
        if not self._journal_failed and any(shard.stats.journal_failed for shard in self._shards):
            self._journal_failed = True
            reason = "the journal could not be written"
            self._health.fail("journal", reason)
            self._state.set_read_only(READ_ONLY_JOURNAL, reason)
            self._on_journal_failed(reason)

    def check_flush(self) -> None:
        """Look once whether what is in the journals can be moved to the ledger disks."""
        if not any(shard.stats.flush_failed for shard in self._shards):
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


def _part_in_use(usage: DiskUsage, *, missing: int) -> float:
    """`missing`: bytes of the reserves that are not held."""
    return min(1.0, (usage.total - usage.free + missing) / usage.total) if usage.total else 1.0
