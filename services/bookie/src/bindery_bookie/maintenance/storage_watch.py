"""StorageWatch: check the disks and the journals while the bookie runs.

| a directory is | since                                                        | until                                |
|----------------|--------------------------------------------------------------|--------------------------------------|
| full           | more than `disk_usage_max` is in use, or a write found       | less than `disk_usage_low` is used,  |
|                | no space in it, or its reserve does not fit                  | and the reserve is restored          |
| failed         | the file system does not answer                              | it answers                           |
| warn           | more than `disk_usage_warn` is in use                        | less is in use                       |
| ok             | otherwise                                                    |                                      |

The reserve counts as in use even while it is released, so that releasing it does not look like free space. If any
directory of journal or ledgers is full or failed, the bookie is read-only; when the last one recovers, it is writable
again. It serves reads throughout. BookKeeper does the same (readOnlyModeOnAnyDiskFull, the default since 4.18).

When an operation of a shard finds no space, the reserves of that shard's directories are released, so that entries in
memory can be flushed to the entry logs and old journals can be deleted. The watch then checks at once, and every TICK_S
while a directory is full. A worker makes all calls to the file systems, above all the restoring of a reserve, because
they may take seconds.

If flushes keep failing, the bookie is read-only until one succeeds, because accepted entries accumulate in memory and
journal. If a journal has failed, nothing can be made durable, and after a failed fdatasync the content of the disk is
unknown. The process then ends with an error, and the next start replays what the disk holds.
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
"""Seconds between two checks of the journals and flushes, and of the disks while a directory is full."""
FLUSH_FAILED_TICKS_MAX: Final = 3
"""Consecutive checks that find a failed flush before the bookie is read-only, because one failure may be transient."""

log = get_logger(__name__)


class DirectoryStatus(StrEnum):
    OK = "ok"
    WARN = "warn"
    FULL = "full"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryState:
    """One configured directory at the last check."""

    path: str
    holds: tuple[str, ...]
    """`journal`, `ledgers` or both."""
    status: DirectoryStatus
    reason: str
    """Why it is not `ok`, with bytes and per cent; empty if it is."""
    total: int
    """Size of the file system in bytes."""
    free: int
    usage: float
    """Fraction in use including the whole reserve, 0 .. 1."""
    reserve_size: int
    """Bytes of the reserves when they are complete."""
    reserve_held: int
    since_ms: int
    """Time of the first check that found this status, in ms since 1970."""
    last_check_ms: int

    @property
    def is_writable(self) -> bool:
        return self.status in (DirectoryStatus.OK, DirectoryStatus.WARN)


class WatchedShard(Protocol):
    """The part of a StorageEngine that is watched."""

    stats: StorageStats
    journal_reserve: Reserve
    ledger_reserve: Reserve
    start_reserve: Reserve
    """In the ledger directory; the watch restores it, and only a start releases it."""


@dataclass(slots=True)
class _Watched:
    """A configured directory and its state."""

    path: str
    holds: list[str] = field(default_factory=list)
    reserves: list[Reserve] = field(default_factory=list)
    """Released when an operation finds no space."""
    kept_reserves: list[Reserve] = field(default_factory=list)
    """Restored, but not released."""
    journals_of: list[WatchedShard] = field(default_factory=list)
    no_space: str = ""
    """Error of an operation that found no space since the last check."""
    state: DirectoryState | None = None
    pressed_ms: int = 0
    """Time of the last request to collect garbage here, in ms since 1970."""

    @property
    def all_reserves(self) -> list[Reserve]:
        return self.kept_reserves + self.reserves


class StorageWatch:
    """`on_journal_failed(reason)` is called once.

    Invariants: a writable directory holds its reserve; the bookie has READ_ONLY_DISK exactly while some directory is
    not writable, with the reasons of all of these. Event loop only.
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
        """`shards`: in the order of `settings.resolved_storages()`. `on_pressure`: called when a ledger directory
        becomes `warn` or `full`, and every `gc_wait_time_s` while it is full, because more garbage may be collectable
        by then. `start_worker`: called by the first `check`, in the event loop; None for disks in memory: the loop
        does the work."""
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
        self._checking = asyncio.Lock()
        self._journal_failed = False
        self._flush_failed_ticks = 0
        self._check_now = asyncio.Event()
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
        """Return the function that a shard calls with the text of a no-space error, which contains a path."""

        def found(reason: str) -> None:
            there = [one for one in (journal, ledger) if f"{one.path}/" in reason]
            for one in there or (journal, ledger):
                one.no_space = reason
            self._check_now.set()

        return found

    @property
    def usage(self) -> float:
        """Fraction in use of the fullest ledger directory, 0 .. 1."""
        return max((one.usage for one in self.directories() if "ledgers" in one.holds), default=0.0)

    def directories(self) -> Sequence[DirectoryState]:
        """Return the state of all directories at the last check, ledger directories first. The first call checks."""
        if any(watched.state is None for watched in self._watched.values()):
            self._judge_all(self._check_all(restores=False))
        states = [watched.state for watched in self._watched.values() if watched.state is not None]
        return sorted(states, key=lambda state: "ledgers" not in state.holds)

    async def run(self) -> None:
        """Check until cancelled."""
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
                        await self._check_now.wait()
                except TimeoutError:
                    pass
                if self._check_now.is_set() or READ_ONLY_DISK in self._state.reasons:
                    break

    async def check(self) -> None:
        """Check the space of all directories once, in the worker."""
        if self._worker is None and self._start_worker is not None:
            self._worker = self._start_worker()
        if self._worker is None:
            self.check_disk()
            return
        async with self._checking:
            found = self._take_no_space()
            self._judge_all(await run_in(self._worker, lambda: self._check_all(found)))

    def check_disk(self) -> None:
        """Check the space of all directories once, in the event loop."""
        self._judge_all(self._check_all(self._take_no_space()))

    def _take_no_space(self) -> dict[str, str]:
        """Return the no-space errors since the last check, by directory, and reset them."""
        self._check_now.clear()
        found = {watched.path: watched.no_space for watched in self._watched.values()}
        for watched in self._watched.values():
            watched.no_space = ""
        return found

    def _check_all(self, no_space: Mapping[str, str] | None = None, *, restores: bool = True) -> list[DirectoryState]:
        """Check all directories. In any thread, one at a time: it changes only reserves. `restores`: restore reserves
        for which there is space."""
        found = no_space or {}
        return [
            self._check_directory(watched, found.get(watched.path, ""), restores=restores)
            for watched in self._watched.values()
        ]

    def _judge_all(self, states: Sequence[DirectoryState]) -> None:
        """Apply the result of a check to the bookie's state."""
        free_min: int | None = None
        for watched, state in zip(self._watched.values(), states, strict=True):
            before = watched.state
            watched.state = state
            if "ledgers" in watched.holds:
                free_min = state.free if free_min is None else min(free_min, state.free)
            is_changed = before is None or state.status != before.status
            if is_changed:
                self._log_status(state)
            if "ledgers" in watched.holds and self._is_pressed(watched, state, is_changed=is_changed):
                watched.pressed_ms = state.last_check_ms
                self._on_pressure()
        self._state.high_priority_writes = (free_min or 0) >= self._settings.high_priority_free_size_min
        reasons = [one.state.reason for one in self._watched.values() if one.state and not one.state.is_writable]
        self._state.set_read_only(READ_ONLY_DISK, "; ".join(reasons) or None)

    def _is_pressed(self, watched: _Watched, state: DirectoryState, *, is_changed: bool) -> bool:
        """Return whether garbage must be collected now."""
        if is_changed:
            return state.status in (DirectoryStatus.WARN, DirectoryStatus.FULL)
        since_ms = abs(state.last_check_ms - watched.pressed_ms)  # the clock may have been set back
        return state.status is DirectoryStatus.FULL and since_ms >= self._settings.storage.gc_wait_time_s * 1000

    def _check_directory(self, watched: _Watched, no_space: str, *, restores: bool) -> DirectoryState:
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
        """Return status and reason. Restores the reserves if there is space."""
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

    def _log_status(self, state: DirectoryState) -> None:
        if state.status == DirectoryStatus.OK:
            log.info("directory_has_room", path=state.path, free=state.free, usage=round(state.usage, 4))
        else:
            log.warning(f"directory_{state.status}", path=state.path, reason=state.reason)

    def check_journal(self) -> None:
        """Check once whether a journal has failed."""
        if not self._journal_failed and any(shard.stats.journal_failed for shard in self._shards):
            self._journal_failed = True
            reason = "the journal could not be written"
            self._health.fail("journal", reason)
            self._state.set_read_only(READ_ONLY_JOURNAL, reason)
            self._on_journal_failed(reason)

    def check_flush(self) -> None:
        """Check once whether flushes from the write caches to the ledger disks succeed."""
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
    """Return the fraction in use. `missing`: bytes of the reserves that are not held."""
    return min(1.0, (usage.total - usage.free + missing) / usage.total) if usage.total else 1.0
