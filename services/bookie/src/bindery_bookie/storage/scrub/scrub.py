"""Scrubber: verify everything that a shard stores, in repeated rounds, without slowing down clients.

A round reads entry logs, ledger rows and every entry (`scrub_walk`) in steps of about 100 KiB, in a separate worker.
After each step the scrubber pauses: as long as `scrub_rate` requires, and at least 19 times as long as the step took,
so that it uses at most a twentieth of one processor. Damage is reported to the DamageRegister, whose listeners repair
it from other bookies, and added to the list of quarantined regions. The scrubber itself changes and removes nothing. A
region leaves quarantine once all its entries are healed or deleted.

Position and findings are stored in the file `scrub` (`scrub_state`), so a round continues after a restart.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import structlog
from bindery_core.errors import BinderyError

from bindery_bookie.storage.corruption.damage import Damage, DamageRegister, Healed
from bindery_bookie.storage.entry_log.entry_log import list_logs
from bindery_bookie.storage.entry_log.log_manifest import LogEnd
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.io.disk import Disk
from bindery_bookie.storage.io.worker import Worker, run_in
from bindery_bookie.storage.scrub.scrub_state import (
    REGIONS_MAX,
    Region,
    ScrubRecord,
    read_scrub_record,
    write_scrub_record,
)
from bindery_bookie.storage.scrub.scrub_walk import ScrubCursor, ScrubStep, ScrubWalk, total_size
from bindery_bookie.storage.settings import StorageSettings

log = structlog.get_logger(__name__)

START_DELAY_S: Final = 600.0
"""Delay in seconds after a start before a round begins or continues, because a start has other work to do."""

SAVE_INTERVAL_S: Final = 60.0
"""Interval in seconds at which the position is saved: the maximum part of a round that a crash loses."""

RETRY_S: Final = 60.0
"""Delay in seconds before a step that failed for a temporary reason is retried."""

_RegionKey = tuple[str, int, int | None]
"""Identity of a region, whose size may grow: path, offset, ledger id."""

_PAUSE_FACTOR: Final = 19.0
"""Minimum pause after a step, as a multiple of its duration."""


@dataclass(frozen=True, slots=True)
class ScrubState:
    """The state of one shard's scrub, for operators and metrics. Times are ms since 1970; 0: never."""

    is_running: bool
    """True during a round, including pauses and the delay after a start."""
    phase: str
    """`logs`, `ledgers` or `entries`; empty between rounds."""
    position: tuple[int, int]
    """(log or ledger id, entry id) of the next step."""
    percent: float
    """Progress in percent of the bytes in entry logs. Deleted ledgers are skipped, so a round may end earlier."""
    rounds: int
    """Number of finished rounds, over all runs of the bookie."""
    start_ms: int
    """Start of the current round."""
    last_start_ms: int
    last_end_ms: int
    """End of the last finished round."""
    oldest_verified_ms: int
    """Everything that was stored before this time was verified after it. 0: not yet."""
    next_ms: int
    """Scheduled start of the next round; 0: a round is in progress, or rounds run on request only."""
    entries: int
    """Number of entries verified in the current or last round."""
    size: int
    """Bytes of these entries."""
    rate: float
    """Bytes per second of the current round since it began or continued."""
    regions: int
    """Number of quarantined regions."""
    error: str
    """Why the last step failed, which is then retried; empty if it succeeded."""


class Scrubber:
    """The scrub of one shard. Event loop only, from `start` to `stop`.

    Invariants: at most one step runs in the worker; the cursor advances only over verified data.
    """

    def __init__(
        self,
        *,
        disk: Disk,
        directory: str,
        index: Index,
        durable_log_id: Callable[[], int],
        log_end: Callable[[int], LogEnd],
        is_cached: Callable[[int, int], bool],
        damage: DamageRegister,
        start_worker: Callable[[], Worker],
        clock: Callable[[], float],
        wall_clock_ms: Callable[[], int],
        settings: StorageSettings,
    ) -> None:
        """`directory`: the ledger directory's `current`. These are called from the worker: `durable_log_id`, the log id
        of LastLogMark; `log_end`, see Flusher; `is_cached`, True if a write cache has (ledger id, entry id).
        """
        self._disk = disk
        self._directory = directory
        self._index = index
        self._durable_log_id = durable_log_id
        self._log_end = log_end
        self._is_cached = is_cached
        self._damage = damage
        self._start_worker = start_worker
        self._clock = clock
        self._wall_clock_ms = wall_clock_ms
        self._interval_s = settings.scrub_interval_s
        self._settings_rate = settings.scrub_rate
        self._rate = settings.scrub_rate
        self._worker: Worker | None = None
        self._record = ScrubRecord()
        self._found: list[Region] = []
        """Regions found by the current round."""
        self._healed: dict[_RegionKey, set[int]] = {}
        """Healed entries of regions that have other damaged entries."""
        self._is_changed = False
        """True if regions were removed that the file still has."""
        damage.on_healed(self._remove_healed)
        self._walk: ScrubWalk | None = None
        self._requested = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._not_before_s = 0.0
        self._began_s = 0.0
        self._began_size = 0
        self._saved_s = 0.0
        self._error = ""

    def start(self, record: ScrubRecord) -> None:
        """Start the scrub. `record`: from `read_scrub_record`."""
        self._record = record
        self._found = [region for region in record.regions if record.start_ms and region.found_ms >= record.start_ms]
        self._not_before_s = self._clock() + START_DELAY_S
        self._task = asyncio.get_running_loop().create_task(self._run(), name="bookie-scrub")

    async def stop(self) -> None:
        """Stop, and save the position. Returns once the worker has no more jobs of the scrub."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        if self._is_changed and self._worker is None:
            self._worker = self._start_worker()
        if self._worker is not None:
            await self._save()

    def request(self, *, rate: int | None = None) -> bool:
        """Begin a round now, or continue the current one without delay. Return True if a new round begins.

        `rate`: bytes per second for this round instead of `scrub_rate`.
        """
        self._rate = rate or self._settings_rate
        self._not_before_s = 0.0
        if self._walk is None:
            self._requested.set()
        return not self._record.start_ms

    def state(self) -> ScrubState:
        """Return the current state."""
        record, is_running = self._record, bool(self._record.start_ms)
        seconds = self._clock() - self._began_s
        moved = record.size - self._began_size
        is_moving = is_running and self._walk is not None and seconds > 0
        percent = 0.0
        if is_running and record.total_size:
            percent = min(100.0 * record.size / record.total_size, 99.9)
        return ScrubState(
            is_running=is_running,
            phase=str(record.cursor.phase) if is_running else "",
            position=(record.cursor.first, record.cursor.entry_id),
            percent=percent,
            rounds=record.rounds,
            start_ms=record.start_ms,
            last_start_ms=record.last_start_ms,
            last_end_ms=record.last_end_ms,
            oldest_verified_ms=record.last_start_ms,
            next_ms=self._next_ms(),
            entries=record.entries,
            size=record.size,
            rate=moved / seconds if is_moving else 0.0,
            regions=len(self.regions()),
            error=self._error,
        )

    def regions(self) -> Sequence[Region]:
        """Return the quarantined regions: found by the current round, and by the last one if not found again yet."""
        found = set(map(_key, self._found))
        older = [region for region in self._record.regions if _key(region) not in found]
        return [*self._found, *older][:REGIONS_MAX]

    # --- schedule

    def _next_ms(self) -> int:
        wait_s = self._wait_s()
        return 0 if self._record.start_ms or wait_s is None else self._wall_clock_ms() + round(wait_s * 1000)

    def _wait_s(self) -> float | None:
        """Return the seconds until the next step; None: rounds run on request only."""
        pause_s = max(self._not_before_s - self._clock(), 0.0)
        if self._requested.is_set() or self._record.start_ms:
            return pause_s
        if not self._interval_s:
            return None
        if not self._record.last_end_ms:
            return pause_s
        since_s = (self._wall_clock_ms() - self._record.last_end_ms) / 1000
        return max(pause_s, min(self._interval_s - since_s, self._interval_s))

    async def _run(self) -> None:
        while True:
            wait_s = self._wait_s()
            if wait_s is None or wait_s > 0:
                await self._sleep_or_requested(wait_s)
                continue
            self._requested.clear()
            try:
                await self._round()
            except Exception as error:  # a bug must not end the scrub silently
                self._error = repr(error)
                log.exception("scrub_crashed", directory=self._directory)
                await asyncio.sleep(RETRY_S)

    async def _sleep_or_requested(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._requested.wait()
        except TimeoutError:
            pass

    # --- a round

    async def _round(self) -> None:
        if self._worker is None:
            self._worker = self._start_worker()
        self._walk = ScrubWalk(
            self._disk,
            self._directory,
            self._index,
            durable_log_id=self._durable_log_id,
            log_end=self._log_end,
            is_cached=self._is_cached,
        )
        if not self._record.start_ms:
            await self._begin()
        self._began_s, self._began_size = self._clock(), self._record.size
        self._saved_s = self._clock()
        cursor: ScrubCursor | None = self._record.cursor
        while cursor is not None:
            cursor = await self._step(self._walk, cursor)
        await self._finish()

    async def _begin(self) -> None:
        assert self._worker is not None
        try:
            total = await run_in(
                self._worker,
                lambda: total_size(self._disk, self._directory, list_logs(self._disk, self._directory)),
            )
        except OSError:
            total = 0
        self._found = []
        self._healed = {}
        start_ms = max(self._wall_clock_ms(), 1)
        self._record = replace(
            self._record, start_ms=start_ms, cursor=ScrubCursor(), entries=0, size=0, total_size=total
        )
        log.info("scrub_round_started", directory=self._directory, size=total)

    async def _step(self, walk: ScrubWalk, cursor: ScrubCursor) -> ScrubCursor | None:
        assert self._worker is not None
        before = self._clock()
        try:
            step = await run_in(self._worker, lambda: walk.step(cursor))
        except (OSError, BinderyError) as error:
            self._error = str(error)
            log.warning("scrub_step_failed", directory=self._directory, error=str(error))
            await asyncio.sleep(RETRY_S)
            return cursor
        self._error = ""
        self._use(step)
        now = self._clock()
        if now - self._saved_s >= SAVE_INTERVAL_S:
            await self._save()
            self._saved_s = self._clock()
        await asyncio.sleep(max(step.size / self._rate, (now - before) * _PAUSE_FACTOR))
        return step.cursor

    def _use(self, step: ScrubStep) -> None:
        record = self._record
        for damage, size in step.damage:
            ledger_id, entry_id = damage.ledger_id, damage.entry_id
            if ledger_id is not None and entry_id is not None and self._is_cached(ledger_id, entry_id):
                continue  # healed since the step
            self._quarantine(damage, size)
            self._damage.report(damage)
        self._record = replace(
            record,
            cursor=step.cursor or record.cursor,
            entries=record.entries + step.entries,
            size=record.size + step.size,
        )

    def _quarantine(self, damage: Damage, size: int) -> None:
        last = self._found[-1] if self._found else None
        if last is not None and _follows(last, damage):
            size = damage.offset + size - last.offset
            self._found[-1] = replace(last, size=size, entries=last.entries + 1)
        elif len(self._found) < REGIONS_MAX:
            self._found.append(
                Region(
                    path=damage.path,
                    offset=damage.offset,
                    size=size,
                    reason=damage.reason,
                    ledger_id=damage.ledger_id,
                    first_entry_id=damage.entry_id,
                    entries=int(damage.entry_id is not None),
                    found_ms=self._wall_clock_ms(),
                )
            )

    def _remove_healed(self, healed: Healed) -> None:
        """Remove regions from quarantine that are completely healed."""
        keys = {_key(region) for region in self.regions() if self._is_healed(region, healed)}
        if keys:
            self._found = [region for region in self._found if _key(region) not in keys]
            kept = tuple(region for region in self._record.regions if _key(region) not in keys)
            self._record = replace(self._record, regions=kept)
            self._is_changed = True
            for key in keys:
                self._healed.pop(key, None)

    def _is_healed(self, region: Region, healed: Healed) -> bool:
        """Return True if `healed` completes the healing of a region."""
        if healed.ledger_id is None:
            return region.path == healed.path and region.offset >= healed.offset
        if region.ledger_id != healed.ledger_id:
            return False
        if healed.entry_id is None or region.first_entry_id is None:
            return healed.entry_id is None
        if not region.first_entry_id <= healed.entry_id < region.first_entry_id + region.entries:
            return False
        entry_ids = self._healed.setdefault(_key(region), set())
        entry_ids.add(healed.entry_id)
        return len(entry_ids) == region.entries

    async def _finish(self) -> None:
        record = self._record
        self._record = replace(
            record,
            rounds=record.rounds + 1,
            last_start_ms=record.start_ms,
            last_end_ms=max(self._wall_clock_ms(), 1),
            start_ms=0,
            cursor=ScrubCursor(),
            regions=tuple(self._found),
        )
        self._walk = None  # from here on a request is for the next round
        self._rate = self._settings_rate
        log.info(
            "scrub_round_finished",
            directory=self._directory,
            entries=record.entries,
            size=record.size,
            regions=len(self._found),
        )
        await self._save()

    async def _save(self) -> None:
        """Save position and findings. Errors are only logged: the next save may succeed, or data is verified again."""
        assert self._worker is not None
        record = replace(self._record, regions=tuple(self.regions()))
        try:
            await run_in(self._worker, lambda: write_scrub_record(self._disk, self._directory, record))
        except OSError as error:
            log.warning("scrub_state_not_saved", directory=self._directory, error=str(error))
        else:
            self._is_changed = False


def _key(region: Region) -> _RegionKey:
    return region.path, region.offset, region.ledger_id


def _follows(last: Region, damage: Damage) -> bool:
    """Return True if the damage is of the next entry of the same ledger, in the same file."""
    return (
        last.path == damage.path
        and last.reason == damage.reason
        and last.ledger_id == damage.ledger_id
        and last.first_entry_id is not None
        and damage.entry_id == last.first_entry_id + last.entries
        and damage.offset > last.offset
    )


async def load_scrub_record(disk: Disk, directory: str, worker: Worker) -> ScrubRecord:
    """Return the state of earlier rounds; an empty one if it cannot be read."""
    try:
        return await run_in(worker, lambda: read_scrub_record(disk, directory))
    except OSError as error:
        log.warning("scrub_state_ignored", directory=directory, error=str(error))
        return ScrubRecord()
