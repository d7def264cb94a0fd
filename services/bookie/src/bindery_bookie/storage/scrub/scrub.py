"""Scrubber: verifies everything that a shard stores, round after round, so gently that nobody waits for it.

A round walks over entry logs, ledger rows and every entry (`scrub_walk`) in steps of about a hundred KiB, in a worker
of its own. After each step it rests: as long as `scrub_rate` asks for, and never less than 19 times as long as the step
took, so that it has a twentieth of one processor at most. What it finds goes to the DamageRegister, which has it
repaired from other bookies, and into the list of quarantined regions; it changes and removes nothing itself. A region
is no longer quarantined once all its entries were healed, or deleted.

Position and findings are kept in the file `scrub` (`scrub_state`): a restart goes on where the last run was.
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
"""After a start, before a round begins or goes on: others have more to do then. Seconds."""

SAVE_INTERVAL_S: Final = 60.0
"""A crash costs so much of a round at most. Seconds."""

RETRY_S: Final = 60.0
"""After a step failed for a reason that may pass. Seconds."""

_Place = tuple[str, int, int | None]
"""What tells a region from others: path, offset, ledger id. It may grow."""

_REST: Final = 19.0
"""Times the length of a step to rest after it."""


@dataclass(frozen=True, slots=True)
class ScrubState:
    """What the scrub of one shard does now, for people and metrics. Times are wall clock milliseconds, 0: never."""

    is_running: bool
    """A round is under way, though it may rest or wait for the bookie's start to settle."""
    phase: str
    """`logs`, `ledgers` or `entries`; empty when none is under way."""
    position: tuple[int, int]
    """(log or ledger id, entry id) where it goes on."""
    percent: float
    """Of the bytes in entry logs. Those of deleted ledgers are passed over, so a round may end early."""
    rounds: int
    """Finished ones, over all runs."""
    start_ms: int
    """Of the round under way."""
    last_start_ms: int
    last_end_ms: int
    """Of the last finished round."""
    oldest_verified_ms: int
    """All that was stored before this was verified since. 0: not yet."""
    next_ms: int
    """When the next round begins by itself; 0: one is under way, or only on request."""
    entries: int
    """Verified in the round under way, or in the last one."""
    size: int
    """Bytes of them."""
    rate: float
    """Bytes per second of the round under way since it began or went on."""
    regions: int
    """Quarantined ones."""
    error: str
    """Why the last step failed, and will be tried again; empty: it did not."""


class Scrubber:
    """Event loop only, from `start` to `stop`.

    Invariants: one step at most is at the worker; the cursor moves only over what was looked at.
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
        """`directory`: the ledger directory's `current`. `durable_log_id`: LastLogMark's; `log_end`: see Flusher;
        `is_cached`: whether a write cache holds (ledger id, entry id); all are asked from the worker."""
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
        """By the round under way."""
        self._healed: dict[_Place, set[int]] = {}
        """Entries healed of regions that are not whole again yet."""
        self._is_changed = False
        """Whether regions went that the file still has."""
        damage.on_healed(self._take_healed)
        self._walk: ScrubWalk | None = None
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._not_before_s = 0.0
        self._began_s = 0.0
        self._began_size = 0
        self._saved_s = 0.0
        self._error = ""

    def start(self, record: ScrubRecord) -> None:
        """Begin to work. `record`: from `read_scrub_record`."""
        self._record = record
        self._found = [region for region in record.regions if record.start_ms and region.found_ms >= record.start_ms]
        self._not_before_s = self._clock() + START_DELAY_S
        self._task = asyncio.get_running_loop().create_task(self._run(), name="bookie-scrub")

    async def stop(self) -> None:
        """End, with the position kept. Returns once the worker has nothing more of it to do."""
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
        """Begin a round now, or go on with the one under way without waiting. Whether a new one begins.

        `rate`: bytes per second for this round instead of `scrub_rate`.
        """
        self._rate = rate or self._settings_rate
        self._not_before_s = 0.0
        if self._walk is None:
            self._wanted.set()
        return not self._record.start_ms

    def state(self) -> ScrubState:
        """As of now."""
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
        """Quarantined: found by the round under way, and by the last one as far as this one has not come yet."""
        found = set(map(_place, self._found))
        older = [one for one in self._record.regions if _place(one) not in found]
        return [*self._found, *older][:REGIONS_MAX]

    # --- when

    def _next_ms(self) -> int:
        wait_s = self._wait_s()
        return 0 if self._record.start_ms or wait_s is None else self._wall_clock_ms() + round(wait_s * 1000)

    def _wait_s(self) -> float | None:
        """Seconds until there is something to do; None: only on request."""
        pause_s = max(self._not_before_s - self._clock(), 0.0)
        if self._wanted.is_set() or self._record.start_ms:
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
                await self._sleep_or_wanted(wait_s)
                continue
            self._wanted.clear()
            try:
                await self._round()
            except Exception as error:  # a fault of ours must not end the scrub, which nobody would notice
                self._error = repr(error)
                log.exception("scrub_broke", directory=self._directory)
                await asyncio.sleep(RETRY_S)

    async def _sleep_or_wanted(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wanted.wait()
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
        self._take(step)
        now = self._clock()
        if now - self._saved_s >= SAVE_INTERVAL_S:
            await self._save()
            self._saved_s = self._clock()
        await asyncio.sleep(max(step.size / self._rate, (now - before) * _REST))
        return step.cursor

    def _take(self, step: ScrubStep) -> None:
        record = self._record
        for damage, size in step.damage:
            ledger_id, entry_id = damage.ledger_id, damage.entry_id
            if ledger_id is not None and entry_id is not None and self._is_cached(ledger_id, entry_id):
                continue  # healed since the step looked
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

    def _take_healed(self, healed: Healed) -> None:
        """Regions that are in order again are no longer quarantined."""
        whole = {_place(region) for region in self.regions() if self._is_whole(region, healed)}
        if whole:
            self._found = [region for region in self._found if _place(region) not in whole]
            kept = tuple(region for region in self._record.regions if _place(region) not in whole)
            self._record = replace(self._record, regions=kept)
            self._is_changed = True
            for place in whole:
                self._healed.pop(place, None)

    def _is_whole(self, region: Region, healed: Healed) -> bool:
        if healed.ledger_id is None:
            return region.path == healed.path and region.offset >= healed.offset
        if region.ledger_id != healed.ledger_id:
            return False
        if healed.entry_id is None or region.first_entry_id is None:
            return healed.entry_id is None
        if not region.first_entry_id <= healed.entry_id < region.first_entry_id + region.entries:
            return False
        entry_ids = self._healed.setdefault(_place(region), set())
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
        self._walk = None  # from here on a request means the next round
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
        """A full disk must not end the scrub: what is not kept now is kept later, or verified again."""
        assert self._worker is not None
        record = replace(self._record, regions=tuple(self.regions()))
        try:
            await run_in(self._worker, lambda: write_scrub_record(self._disk, self._directory, record))
        except OSError as error:
            log.warning("scrub_state_not_saved", directory=self._directory, error=str(error))
        else:
            self._is_changed = False


def _place(region: Region) -> _Place:
    return region.path, region.offset, region.ledger_id


def _follows(last: Region, damage: Damage) -> bool:
    """Whether the damage goes on with the next entry of the same ledger, in the same file."""
    return (
        last.path == damage.path
        and last.reason == damage.reason
        and last.ledger_id == damage.ledger_id
        and last.first_entry_id is not None
        and damage.entry_id == last.first_entry_id + last.entries
        and damage.offset > last.offset
    )


async def load_scrub_record(disk: Disk, directory: str, worker: Worker) -> ScrubRecord:
    """What is known of earlier rounds; nothing if the disk cannot tell."""
    try:
        return await run_in(worker, lambda: read_scrub_record(disk, directory))
    except OSError as error:
        log.warning("scrub_state_ignored", directory=directory, error=str(error))
        return ScrubRecord()
