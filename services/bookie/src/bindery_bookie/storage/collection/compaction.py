"""Compactor: wins back the space of deleted ledgers, one entry log at a time.

A log in which nothing is alive is removed. One that is sparse enough is rewritten, the sparsest first:

| step                                                              | a crash behind it finds, and the start does    |
|-------------------------------------------------------------------|------------------------------------------------|
| 1 the list of entry logs calls the new id absent                  | nothing                                        |
| 2 `rewrite` copies to `<id>.log.compacting`, and syncs            | an unfinished file: removed                    |
| 3 rename to `<id>.log`, directory synced                          | an absent log: removed                         |
| 4 the list calls the new log compacted                            | both logs, index not switched: new log removed |
| 5 the index points to the new log: one synced batch, with a count | both logs, index switched: old log removed     |
| 6 the list calls the old log absent                               | an absent log: removed                         |
| 7 the reader closes the old log, which is removed                 | nothing                                        |

Copying runs in a worker of its own, paced in bytes a second, with small syncs, so that acknowledgements do not feel it.
All that flushes could cross (steps 1 and 3 to 7) runs in the flush's worker.

Invariants: one log is rewritten at a time, so that no more room is needed than its live bytes; a log is removed only
when the index, durably, points to nothing in it; what failed half-way is finished or undone before anything else is
begun. Everything here runs in the event loop.
"""

import asyncio
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog
from bindery_core.errors import BinderyError, TryAgain

from bindery_bookie.storage.collection.collection_interface import (
    LEDGERS_SHOWN_MAX,
    CollectionKind,
    CollectionResult,
    GarbageState,
    LogExplanation,
    LogInfo,
    LogState,
    NoSuchEntryLog,
)
from bindery_bookie.storage.collection.log_replacement import CollectionEnvironment, LogReplacement
from bindery_bookie.storage.collection.log_usage import UsageTable, is_in
from bindery_bookie.storage.collection.rewrite import Rewrite
from bindery_bookie.storage.entry_log import entry_log_format as fmt
from bindery_bookie.storage.entry_log.log_manifest import LogIds, ManifestFile
from bindery_bookie.storage.io.worker import run_in
from bindery_bookie.storage.settings import StorageSettings
from bindery_bookie.storage.stats import StorageStats

log = structlog.get_logger(__name__)

ROOM_MARGIN: Final = 1024 * 1024
"""Bytes beside the copy: index rows, lists, control records."""

SMALL_PARTS: Final = 16
"""A log being written is closed for compaction when it has reached that part of a full one: a sixteenth."""

_SLEEP_MIN_S: Final = 0.01
"""Shorter pauses are saved up."""

_ERRORS = (OSError, BinderyError)


class _Stopping(TryAgain):
    """The bookie stops: leave the log as it is."""

    code = "stopping"


@dataclass(slots=True)
class _Wish:
    minor: bool = False
    major: bool = False
    force: bool = False
    waiters: list["asyncio.Future[CollectionResult]"] = field(default_factory=list)


@dataclass(slots=True)
class _Outcome:
    removed: list[int] = field(default_factory=list)
    rewritten: list[int] = field(default_factory=list)
    left: list[tuple[int, str]] = field(default_factory=list)
    copied_bytes: int = 0
    reclaimed_bytes: int = 0

    def result(self) -> CollectionResult:
        return CollectionResult(self.removed, self.rewritten, self.left, self.copied_bytes, self.reclaimed_bytes)


class Compactor:
    """See GarbageCollection. Decides what to do; `log_replacement` does it."""

    def __init__(
        self,
        parts: CollectionEnvironment,
        *,
        manifest: ManifestFile,
        ids: LogIds,
        settings: StorageSettings,
        stats: StorageStats,
    ) -> None:
        self._parts = parts
        self.on_forced: Callable[[], None] = lambda: None
        """Hears of each forced request: whose ledgers' metadata is gone should be found out, too."""
        self._replacement = LogReplacement(parts, manifest, ids, stats)
        self._settings = settings
        self._stats = stats
        self._table = UsageTable(parts.disk, parts.directory, parts.index)
        self._damaged: set[int] = set()
        self._looking = asyncio.Lock()
        self._wish: _Wish | None = None
        self._wanted = asyncio.Event()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._suspended = {CollectionKind.MINOR: False, CollectionKind.MAJOR: False}
        self._is_forced = False
        self._running: CollectionKind | None = None
        self._log_id: int | None = None
        self._bytes_done = self._bytes_total = 0
        self._debt_s = 0.0
        self._last_run_ms = 0
        self._last_ms = {CollectionKind.MINOR: 0, CollectionKind.MAJOR: 0}
        self._last_error = ""
        self._next_run = 0.0
        self._last = {CollectionKind.MINOR: 0.0, CollectionKind.MAJOR: 0.0}

    # --- what others ask

    def start(self) -> None:
        now = self._parts.clock()
        self._last = dict.fromkeys(self._last, now)
        self._next_run = now + self._settings.gc_wait_time_s
        self._task = asyncio.get_running_loop().create_task(self._loop(), name="bookie-compaction")

    async def stop(self) -> None:
        """End; a copy under way is dropped."""
        self._stopping.set()
        self._wanted.set()
        if self._task is not None:
            await self._task
        async with self._looking:
            pass
        wish, self._wish = self._wish, None
        for waiter in wish.waiters if wish is not None else ():
            if not waiter.done():
                waiter.set_result(CollectionResult(left=((0, "the bookie is stopping"),)))

    def request(self, *, minor: bool = False, major: bool = False, force: bool = False) -> None:
        """See GarbageCollection."""
        wish = self._wish = self._wish or _Wish()
        wish.minor |= minor
        wish.major |= major
        wish.force |= force
        self._wanted.set()
        if force:
            self.on_forced()

    async def run(self, *, minor: bool = False, major: bool = False, force: bool = False) -> CollectionResult:
        """See GarbageCollection."""
        if self._task is None or self._stopping.is_set():
            return CollectionResult(left=((0, "the bookie is not running"),))
        self.request(minor=minor, major=major, force=force)
        assert self._wish is not None
        waiter: asyncio.Future[CollectionResult] = asyncio.get_running_loop().create_future()
        self._wish.waiters.append(waiter)
        return await waiter

    def suspend(self, *, minor: bool = False, major: bool = False) -> None:
        """See GarbageCollection."""
        self._suspended[CollectionKind.MINOR] |= minor
        self._suspended[CollectionKind.MAJOR] |= major

    def resume(self, *, minor: bool = False, major: bool = False) -> None:
        """See GarbageCollection."""
        self._suspended[CollectionKind.MINOR] &= not minor
        self._suspended[CollectionKind.MAJOR] &= not major

    def state(self) -> GarbageState:
        """See GarbageCollection."""
        infos = self._table.infos.values()
        return GarbageState(
            running=self._running,
            log_id=self._log_id,
            bytes_done=self._bytes_done,
            bytes_total=self._bytes_total,
            minor_suspended=self._suspended[CollectionKind.MINOR],
            major_suspended=self._suspended[CollectionKind.MAJOR],
            last_run_ms=self._last_run_ms,
            last_minor_ms=self._last_ms[CollectionKind.MINOR],
            last_major_ms=self._last_ms[CollectionKind.MAJOR],
            next_run_in_s=max(self._next_run - self._parts.clock(), 0.0),
            minor_due_in_s=self._due_in_s(CollectionKind.MINOR),
            major_due_in_s=self._due_in_s(CollectionKind.MAJOR),
            last_error=self._last_error,
            logs=len(infos),
            log_bytes=sum(info.size for info in infos),
            live_bytes=sum(info.live_bytes for info in infos),
        )

    def logs(self) -> Sequence[LogInfo]:
        """See GarbageCollection."""
        return [self._table.infos[log_id] for log_id in sorted(self._table.infos)]

    async def look(self) -> Sequence[LogInfo]:
        """See GarbageCollection."""
        parts = self._parts
        async with self._looking:
            while True:
                open_ledgers = await parts.open_ledgers()
                manifest, closed_below = self._replacement.manifest, parts.closed_below()
                await self._pump(
                    self._table.look(
                        manifest,
                        closed_below,
                        end=parts.log_end,
                        open_ledgers=open_ledgers,
                        damaged=frozenset(self._damaged),
                        now_ms=parts.wall_clock_ms(),
                    )
                )
                if manifest is self._replacement.manifest:  # else logs came and went meanwhile
                    break
            self._table.accept(self._stats)
        return self.logs()

    async def explain(self, log_id: int) -> LogExplanation:
        """See GarbageCollection."""
        await self.look()
        info = self._table.infos.get(log_id)
        if info is None:
            raise NoSuchEntryLog("no such entry log", log_id=log_id, file=fmt.file_name(log_id))
        usage = self._table.usages.get(log_id)
        held = self._table.open_ledgers if usage is None else usage.ledger_ids
        live: list[int] = []
        dead: list[int] = []
        for ledger_id in held:
            (live if is_in(self._table.live, ledger_id) else dead).append(ledger_id)
        kind, sentences = self._verdict(info)
        return LogExplanation(
            info,
            sorted(live)[:LEDGERS_SHOWN_MAX],
            sorted(dead)[:LEDGERS_SHOWN_MAX],
            kind,
            None if kind is None else self._due_in_s(kind),
            sentences,
        )

    # --- when

    def _is_on(self, kind: CollectionKind) -> bool:
        if kind is CollectionKind.MINOR:
            return self._settings.has_minor_compaction
        return self._settings.has_major_compaction

    def _threshold(self, kind: CollectionKind) -> float:
        settings = self._settings
        is_minor = kind is CollectionKind.MINOR
        return settings.minor_compaction_threshold if is_minor else settings.major_compaction_threshold

    def _is_due(self, kind: CollectionKind) -> bool:
        return self._is_on(kind) and self._parts.clock() >= self._last[kind] + self._interval_s(kind)

    def _interval_s(self, kind: CollectionKind) -> float:
        settings = self._settings
        is_minor = kind is CollectionKind.MINOR
        return settings.minor_compaction_interval_s if is_minor else settings.major_compaction_interval_s

    def _due_in_s(self, kind: CollectionKind) -> float | None:
        """Until the run that takes it: runs are `gc_wait_time_s` apart."""
        until_run = max(self._next_run - self._parts.clock(), 0.0)
        if kind is CollectionKind.REMOVAL:
            return until_run
        if not self._is_on(kind) or self._suspended[kind]:
            return None
        return max(until_run, self._last[kind] + self._interval_s(kind) - self._parts.clock())

    def _verdict(self, info: LogInfo) -> tuple[CollectionKind | None, list[str]]:
        """What takes the log, and why."""
        percent = f"{100 * info.live_ratio:.1f} %"
        if info.state is LogState.OPEN:
            return None, ["It is being written; garbage collection takes closed logs only."]
        said: list[str] = []
        if self._replacement.is_blocked:
            said.append(f"Nothing is begun before an earlier step succeeds: {self._last_error}")
        if info.log_id == self._log_id:
            said.append(f"It is being worked on: {self._bytes_done} of {self._bytes_total} bytes.")
        if not info.live_bytes:
            return CollectionKind.REMOVAL, [*said, "Nothing in it is alive; the next run removes it."]
        if info.state is LogState.DAMAGED:
            said.append(
                "Live entries in it cannot be read. It is kept until they are healed from other bookies or their "
                "ledgers are gone."
            )
        for kind in (CollectionKind.MINOR, CollectionKind.MAJOR):
            threshold = self._threshold(kind)
            if not self._is_on(kind):
                said.append(f"{kind.capitalize()} compaction is switched off.")
            elif info.live_ratio >= threshold:
                said.append(f"{percent} of it is alive: not below the {threshold:.0%} of {kind} compaction.")
            elif self._suspended[kind]:
                said.append(f"{percent} of it is alive, below {threshold:.0%}, but {kind} compaction is suspended.")
            else:
                due = self._due_in_s(kind)
                return kind, [
                    f"{percent} of it is alive, below {threshold:.0%}: {kind} compaction rewrites it, due in "
                    f"{due:.0f} s, at {self._settings.compaction_rate} bytes a second.",
                    *said,
                ]
        return None, said

    async def _loop(self) -> None:
        while not self._stopping.is_set():
            try:
                async with asyncio.timeout(max(self._next_run - self._parts.clock(), 0.0)):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            self._wanted.clear()
            if self._stopping.is_set():
                return
            wish, self._wish = self._wish or _Wish(), None
            outcome = _Outcome()
            started = self._parts.clock()
            self._last_error = ""
            try:
                await self._collect(wish, outcome)
            except _Stopping:
                self._last_error = "the bookie is stopping"
            except _ERRORS as error:
                self._failed(outcome, self._log_id or 0, error)
            except Exception as error:  # a bug here must not end the bookie, which serves all the same
                log.exception("collection_broke")
                self._failed(outcome, self._log_id or 0, error)
            finally:
                self._running = self._log_id = None
                self._bytes_done = self._bytes_total = 0
                self._is_forced = False
            seconds = self._parts.clock() - started
            self._last_run_ms = self._parts.wall_clock_ms()
            self._stats.gc_runs += 1
            self._stats.gc_s += seconds
            self._stats.observe_gc_s(seconds)
            self._next_run = self._parts.clock() + self._settings.gc_wait_time_s
            for waiter in wish.waiters:
                if not waiter.done():
                    waiter.set_result(outcome.result())

    # --- one run

    async def _collect(self, wish: _Wish, outcome: _Outcome) -> None:
        self._running, self._is_forced = CollectionKind.REMOVAL, wish.force
        await self._replacement.finish()
        try:
            await self._parts.flush_deletions()
        except _ERRORS as error:  # what was deleted before is known to be dead all the same
            log.warning("collection_without_flush", error=str(error))
        await self.look()
        wished = {CollectionKind.MINOR: wish.minor, CollectionKind.MAJOR: wish.major}
        kinds = [kind for kind in wished if (wished[kind] or self._is_due(kind)) and self._is_taken(kind)]
        if await self._roll_sparse(kinds):
            await self.look()
        await self._remove_dead(outcome)
        for kind in kinds:
            await self._compact(kind, outcome)
            self._last[kind] = self._parts.clock()
            self._last_ms[kind] = self._parts.wall_clock_ms()
        if outcome.rewritten:
            await self.look()
            await self._remove_dead(outcome)

    def _is_taken(self, kind: CollectionKind) -> bool:
        return self._is_forced or not self._suspended[kind]

    async def _roll_sparse(self, kinds: Sequence[CollectionKind]) -> bool:
        """Close the log being written when that is what keeps space. Whether it was."""
        info = self._table.open_info
        if info is None or not self._table.open_ledgers:
            return False
        if info.live_ledgers and not any(info.live_ratio < self._threshold(kind) for kind in kinds):
            return False
        if not self._is_forced and info.size < self._settings.entry_log_size_max // SMALL_PARTS:
            return False  # it would leave many small logs
        try:
            await self._parts.roll()
        except _ERRORS as error:  # no space, perhaps: what is closed can be taken all the same
            log.warning("log_not_closed", error=str(error))
            return False
        return True

    async def _remove_dead(self, outcome: _Outcome) -> None:
        """Oldest first: a `deleted` record is needed only while an older log holds the ledger."""
        self._running = CollectionKind.REMOVAL
        while dead := self._table.dead():
            sizes = {log_id: self._table.usages[log_id].size for log_id in dead}  # a look meanwhile drops them
            await self._replacement.remove_logs(dead)
            for log_id, size in sizes.items():
                self._table.drop(log_id)
                self._damaged.discard(log_id)
                outcome.removed.append(log_id)
                outcome.reclaimed_bytes += size
                self._stats.logs_removed += 1
                self._stats.reclaimed_deletion_bytes += size
            log.info("entry_logs_removed", logs=len(dead))
            await self.look()

    async def _compact(self, kind: CollectionKind, outcome: _Outcome) -> None:
        self._running = kind
        for log_id in self._table.below(self._threshold(kind)):
            if self._stopping.is_set() or not self._is_taken(kind):
                return
            try:
                await self._rewrite(log_id, kind, outcome)
            except _Stopping:
                outcome.left.append((log_id, "stopped"))
                raise
            except _ERRORS as error:
                self._failed(outcome, log_id, error)
                if self._replacement.is_blocked:
                    return
            finally:
                self._log_id = None
                self._bytes_done = self._bytes_total = 0

    def _failed(self, outcome: _Outcome, log_id: int, error: Exception) -> None:
        self._last_error = f"entry log {fmt.file_name(log_id)}: {error}" if log_id else str(error)
        outcome.left.append((log_id, str(error)))
        log.error("collection_failed", log_id=log_id, error=str(error))

    # --- one log

    async def _rewrite(self, log_id: int, kind: CollectionKind, outcome: _Outcome) -> None:
        source = self._table.usages[log_id]
        alive = self._table.alive[log_id]
        self._log_id, self._bytes_total, self._bytes_done = log_id, alive.live_bytes, 0
        if not await self._replacement.has_room(alive.live_bytes):
            self._last_error = (
                f"entry log {fmt.file_name(log_id)}: no room for the {alive.live_bytes} bytes alive in it"
            )
            outcome.left.append((log_id, "no room"))
            return
        target_id = await self._replacement.new_log_id()
        rewrite = Rewrite(
            self._parts.disk,
            self._parts.directory,
            self._parts.index,
            source=source,
            target_id=target_id,
            live=self._table.live,
            deletions=alive.deletions,
            sync_size=self._settings.flush_sync_size,
        )
        try:
            await self._pump(rewrite.steps(), copied=lambda: rewrite.copied_bytes)
        except _ERRORS:
            await self._replacement.remove_file(rewrite.temporary_path)
            raise
        if rewrite.damage:
            await self._replacement.remove_file(rewrite.temporary_path)
            self._damaged.add(log_id)
            self._table.mark_damaged(log_id)
            for damage in rewrite.damage:
                self._parts.damaged(damage)
            outcome.left.append((log_id, f"{len(rewrite.damage)} live entries cannot be read"))
            return
        await self._replacement.install(rewrite)
        target = rewrite.target
        self._table.replace(log_id, target, self._parts.wall_clock_ms())
        self._damaged.discard(log_id)
        won = source.size - target.size
        outcome.rewritten.append(log_id)
        outcome.copied_bytes += rewrite.copied_bytes
        outcome.reclaimed_bytes += won
        self._stats.compacted_bytes += rewrite.copied_bytes
        self._stats.reclaimed_compaction_bytes += max(won, 0)
        if kind is CollectionKind.MINOR:
            self._stats.compactions_minor += 1
        else:
            self._stats.compactions_major += 1
        log.info("entry_log_compacted", source=log_id, target=target.log_id, bytes=target.size, won=won)

    # --- pace

    async def _pump(self, steps: Generator[int, None, None], *, copied: Callable[[], int] | None = None) -> None:
        """Run a worker's steps to their end, no faster than `compaction_rate`. Raises _Stopping.

        A step's size is the work that it did: what it read, also of the index, and what it wrote. `copied`: live bytes
        copied so far, which is what the state shows; None: the state does not change.
        """
        worker = self._parts.worker
        try:
            while (size := await run_in(worker, lambda: next(steps, None))) is not None:
                if copied is not None:
                    self._bytes_done = copied()
                await self._pause(size)
                if self._stopping.is_set():
                    raise _Stopping("the bookie is stopping")
        finally:
            await run_in(worker, steps.close)

    async def _pause(self, size: int) -> None:
        self._debt_s += size / self._settings.compaction_rate
        if self._debt_s < _SLEEP_MIN_S:
            return
        seconds, self._debt_s = self._debt_s, 0.0
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass
