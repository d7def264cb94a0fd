"""Compactor: free the space of deleted ledgers, one entry log at a time.

A log without live entries is removed. Logs whose live ratio is below a threshold are rewritten, the sparsest first: all
of them when the interval of minor or major compaction is over, and as many as necessary when there are too many dead
bytes (`space_policy`). A rewrite:

| step                                                               | after a crash following it, the start finds     |
|--------------------------------------------------------------------|-------------------------------------------------|
| 1 the manifest lists the new id as absent                          | nothing to do                                   |
| 2 `rewrite` copies to `<id>.log.compacting`, and syncs             | an unfinished file, which it removes            |
| 3 rename to `<id>.log`, sync the directory                         | an absent log, which it removes                 |
| 4 the manifest lists the new log as compacted                      | both logs, not switched: it removes the new log |
| 5 one synced batch with a counter: the index refers to the new log | both logs, switched: it removes the old log     |
| 6 the manifest lists the old log as absent                         | an absent log, which it removes                 |
| 7 the reader closes the old log, and it is removed                 | nothing to do                                   |

Copying runs in a separate worker. Its rate in bytes per second is limited and its syncs are small, so that adds are not
delayed. Steps that must not run concurrently with a flush (1 and 3 to 7) run in the flush worker.

Invariants: only one log is rewritten at a time, so the additional space is at most its live bytes; a log is removed
only after the index durably refers to nothing in it; a failed change is completed or undone before the next one begins.
Everything here runs in the event loop.
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
from bindery_bookie.storage.collection.space_policy import (
    Speed,
    dead_allowed,
    dead_bytes,
    plan_space,
    wanted_speed,
)
from bindery_bookie.storage.entry_log import entry_log_format as fmt
from bindery_bookie.storage.entry_log.log_manifest import LogIds, ManifestFile
from bindery_bookie.storage.io.worker import run_in
from bindery_bookie.storage.settings import StorageSettings
from bindery_bookie.storage.stats import StorageStats

log = structlog.get_logger(__name__)

OPEN_LOG_PARTS: Final = 16
"""Divisor of `entry_log_size_max`. Unless a run is forced, a smaller open log is not closed for compaction."""

_SLEEP_MIN_S: Final = 0.01
"""Minimum length of a pause in seconds. Shorter pauses are accumulated."""

_OBSERVE_S: Final = 1.0
"""Seconds between two adjustments of the speed."""

REST_PART: Final = 20
"""Refreshes read all rows of ledgers in the index. After a run, one that only a deletion requested therefore waits for
this many times as long as the refreshes took."""

_ERRORS = (OSError, BinderyError)


class _Stopping(TryAgain):
    """The bookie is stopping, so the rewrite is abandoned."""

    code = "stopping"


@dataclass(slots=True)
class _Request:
    minor: bool = False
    major: bool = False
    force: bool = False
    waiters: list["asyncio.Future[CollectionResult]"] = field(default_factory=list)

    @property
    def may_rest(self) -> bool:
        """Whether the run may wait until the last one has cost little enough."""
        return not (self.minor or self.major or self.force or self.waiters)


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
    """Implements GarbageCollection. Selects the logs; `log_replacement` performs the changes."""

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
        """Called at each forced request, to start a search for ledgers whose metadata was deleted."""
        self._replacement = LogReplacement(parts, manifest, ids, stats)
        self._settings = settings
        self._stats = stats
        self._table = UsageTable(parts.disk, parts.directory, parts.index)
        self._damaged: set[int] = set()
        self._refreshing = asyncio.Lock()
        self._request: _Request | None = None
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._suspended = {CollectionKind.MINOR: False, CollectionKind.MAJOR: False}
        self._is_forced = False
        self._running: CollectionKind | None = None
        self._log_id: int | None = None
        self._bytes_done = self._bytes_total = 0
        self._debt_s = 0.0
        self._speed = Speed()
        self._observe_at = 0.0
        self._refreshes_s = 0.0
        """Seconds that the refreshes of the current run took."""
        self._rested_at = 0.0
        self._last_run_ms = 0
        self._last_ms = {CollectionKind.MINOR: 0, CollectionKind.MAJOR: 0}
        self._last_error = ""
        self._next_run = 0.0
        self._last = {CollectionKind.MINOR: 0.0, CollectionKind.MAJOR: 0.0}

    # --- interface

    def start(self) -> None:
        now = self._parts.clock()
        self._last = dict.fromkeys(self._last, now)
        self._next_run = now + self._settings.gc_wait_time_s
        self._task = asyncio.get_running_loop().create_task(self._loop(), name="bookie-compaction")

    async def stop(self) -> None:
        """Stop. An unfinished copy is deleted."""
        self._stopping.set()
        self._wake.set()
        if self._task is not None:
            await self._task
        async with self._refreshing:
            pass
        request, self._request = self._request, None
        for waiter in request.waiters if request is not None else ():
            if not waiter.done():
                waiter.set_result(CollectionResult(left=((0, "the bookie is stopping"),)))

    def request(self, *, minor: bool = False, major: bool = False, force: bool = False) -> None:
        """See GarbageCollection."""
        request = self._request = self._request or _Request()
        request.minor |= minor
        request.major |= major
        request.force |= force
        self._wake.set()
        if force:
            self.on_forced()

    async def run(self, *, minor: bool = False, major: bool = False, force: bool = False) -> CollectionResult:
        """See GarbageCollection."""
        if self._task is None or self._stopping.is_set():
            return CollectionResult(left=((0, "the bookie is not running"),))
        self.request(minor=minor, major=major, force=force)
        assert self._request is not None
        waiter: asyncio.Future[CollectionResult] = asyncio.get_running_loop().create_future()
        self._request.waiters.append(waiter)
        return await waiter

    def suspend(self, *, minor: bool = False, major: bool = False) -> None:
        """See GarbageCollection."""
        self._suspended[CollectionKind.MINOR] |= minor
        self._suspended[CollectionKind.MAJOR] |= major

    def resume(self, *, minor: bool = False, major: bool = False) -> None:
        """See GarbageCollection."""
        self._suspended[CollectionKind.MINOR] &= not minor
        self._suspended[CollectionKind.MAJOR] &= not major
        self.request()  # dead bytes may have accumulated meanwhile

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
            dead_bytes=dead_bytes(infos),
            dead_bytes_allowed=self._dead_allowed(),
        )

    def logs(self) -> Sequence[LogInfo]:
        """See GarbageCollection."""
        return [self._table.infos[log_id] for log_id in sorted(self._table.infos)]

    async def refresh(self) -> Sequence[LogInfo]:
        """See GarbageCollection."""
        parts = self._parts
        async with self._refreshing:
            began = parts.clock()
            while True:
                open_ledgers = await parts.open_ledgers()
                manifest, closed_below = self._replacement.manifest, parts.closed_below()
                await self._pump(
                    self._table.refresh(
                        manifest,
                        closed_below,
                        end=parts.log_end,
                        open_ledgers=open_ledgers,
                        damaged=frozenset(self._damaged),
                        now_ms=parts.wall_clock_ms(),
                    )
                )
                if manifest is self._replacement.manifest:  # otherwise logs were added or removed meanwhile
                    break
            self._table.accept(self._stats)
            self._stats.dead_bytes_allowed = self._dead_allowed() or 0
            self._refreshes_s += parts.clock() - began
        return self.logs()

    async def explain(self, log_id: int) -> LogExplanation:
        """See GarbageCollection."""
        await self.refresh()
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

    # --- schedule

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
        """Return the seconds until the next run that includes this kind; None if disabled or suspended.

        Runs are `gc_wait_time_s` apart.
        """
        until_run = max(self._next_run - self._parts.clock(), 0.0)
        if kind is CollectionKind.REMOVAL:
            return until_run
        if not self._is_on(kind) or self._suspended[kind]:
            return None
        return max(until_run, self._last[kind] + self._interval_s(kind) - self._parts.clock())

    def _dead_allowed(self) -> int | None:
        """Return the dead bytes that the shard may have; None if compaction runs by interval only."""
        settings = self._settings
        if not settings.dead_ratio_max or not any(map(self._is_on, self._last)):
            return None
        live = sum(info.live_bytes for info in self._table.infos.values())
        return dead_allowed(live, ratio_max=settings.dead_ratio_max, size_min=settings.dead_size_min)

    def _kind_of(self, info: LogInfo) -> CollectionKind:
        """Return the kind of compaction to which a log belongs that is rewritten because of dead bytes."""
        minor = CollectionKind.MINOR
        is_minor = self._is_on(minor) and info.live_ratio < self._threshold(minor)
        return minor if is_minor else CollectionKind.MAJOR

    def _space_threshold(self) -> float:
        """Return the live ratio below which a log may be rewritten because of dead bytes; 0: no log may be."""
        kinds = [kind for kind in self._last if self._is_on(kind) and not self._suspended[kind]]
        return max(map(self._threshold, kinds), default=0.0)

    def _verdict(self, info: LogInfo) -> tuple[CollectionKind | None, list[str]]:
        """Return the kind of collection that will remove or rewrite the log, and the reasons."""
        percent = f"{100 * info.live_ratio:.1f} %"
        if info.state is LogState.OPEN:
            return None, ["It is being written; garbage collection takes closed logs only."]
        sentences: list[str] = []
        if self._replacement.is_blocked:
            sentences.append(f"An earlier step must succeed first; it failed: {self._last_error}")
        if info.log_id == self._log_id:
            sentences.append(f"It is being rewritten: {self._bytes_done} of {self._bytes_total} bytes.")
        if not info.live_bytes:
            return CollectionKind.REMOVAL, [*sentences, "It has no live entries; the next run removes it."]
        if info.state is LogState.DAMAGED:
            sentences.append(
                "Live entries in it cannot be read. It is kept until they are repaired from other bookies or their "
                "ledgers are deleted."
            )
        for kind in (CollectionKind.MINOR, CollectionKind.MAJOR):
            threshold = self._threshold(kind)
            if not self._is_on(kind):
                sentences.append(f"{kind.capitalize()} compaction is disabled.")
            elif info.live_ratio >= threshold:
                sentences.append(f"{percent} of it is live: not below the {threshold:.0%} of {kind} compaction.")
            elif self._suspended[kind]:
                sentences.append(f"{percent} of it is live, below {threshold:.0%}, but {kind} compaction is suspended.")
            else:
                due = self._due_in_s(kind)
                return kind, [
                    f"{percent} of it is live, below {threshold:.0%}: {kind} compaction rewrites it, due in "
                    f"{due:.0f} s, at {self._settings.compaction_rate} bytes per second.",
                    *sentences,
                    *self._space_sentences(),
                ]
        return None, sentences

    def _space_sentences(self) -> list[str]:
        allowed = self._dead_allowed()
        if allowed is None:
            return []
        dead = dead_bytes(self._table.infos.values())
        if dead > allowed:
            return [f"The shard has {dead} dead bytes, more than {allowed}: the next run rewrites the sparsest logs."]
        return [f"Earlier if the shard has more than {allowed} dead bytes; it has {dead}."]

    async def _until_due(self) -> None:
        """Return when a run is due, or the bookie stops."""
        while not self._stopping.is_set():
            due = self._next_run
            if self._request is not None:
                due = min(due, self._rested_at) if self._request.may_rest else 0.0
            seconds = due - self._parts.clock()
            if seconds <= 0:
                return
            self._wake.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._wake.wait()
            except TimeoutError:
                return

    async def _loop(self) -> None:
        while True:
            await self._until_due()
            self._wake.clear()
            if self._stopping.is_set():
                return
            request, self._request = self._request or _Request(), None
            outcome = _Outcome()
            started = self._parts.clock()
            self._last_error = ""
            try:
                await self._collect(request, outcome)
            except _Stopping:
                self._last_error = "the bookie is stopping"
            except _ERRORS as error:
                self._failed(outcome, self._log_id or 0, error)
            except Exception as error:  # a bug here must not stop the bookie, which can still serve
                log.exception("collection_crashed")
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
            self._rested_at = self._parts.clock() + REST_PART * self._refreshes_s
            self._refreshes_s = 0.0
            for waiter in request.waiters:
                if not waiter.done():
                    waiter.set_result(outcome.result())

    # --- one run

    async def _collect(self, request: _Request, outcome: _Outcome) -> None:
        self._running, self._is_forced = CollectionKind.REMOVAL, request.force
        await self._replacement.finish()
        try:
            await self._parts.flush_deletions()
        except _ERRORS as error:  # ledgers whose deletion was flushed before can still be collected
            log.warning("collection_without_flush", error=str(error))
        await self.refresh()
        requested = {CollectionKind.MINOR: request.minor, CollectionKind.MAJOR: request.major}
        kinds = [kind for kind in requested if (requested[kind] or self._is_due(kind)) and self._is_allowed(kind)]
        if await self._roll_sparse(kinds):
            await self.refresh()
        await self._remove_dead(outcome)
        stats = self._stats
        self._speed.begin(adds=stats.journal_adds, seconds=stats.journal_add_s)
        try:
            for kind in kinds:
                await self._compact(kind, outcome)
                self._last[kind] = self._parts.clock()
                self._last_ms[kind] = self._parts.wall_clock_ms()
            if outcome.rewritten:
                await self.refresh()
                await self._remove_dead(outcome)
            await self._compact_for_space(outcome)
        finally:
            self._speed.end(adds=stats.journal_adds, seconds=stats.journal_add_s)
            stats.compaction_speed = 0.0

    def _is_allowed(self, kind: CollectionKind) -> bool:
        return self._is_forced or not self._suspended[kind]

    async def _roll_sparse(self, kinds: Sequence[CollectionKind]) -> bool:
        """Close the open log if it is dead or sparse enough to be collected; return True if it was closed."""
        info = self._table.open_info
        if info is None or not self._table.open_ledgers:
            return False
        if info.live_ledgers and not any(info.live_ratio < self._threshold(kind) for kind in kinds):
            return False
        if not self._is_forced and info.size < self._settings.entry_log_size_max // OPEN_LOG_PARTS:
            return False  # closing it would create many small logs
        return await self._close_open_log()

    async def _close_open_log(self) -> bool:
        try:
            await self._parts.roll()
        except _ERRORS as error:  # perhaps no space; closed logs can still be collected
            log.warning("log_not_closed", error=str(error))
            return False
        return True

    async def _remove_dead(self, outcome: _Outcome) -> None:
        """Remove dead logs, the oldest first, until none is left.

        A `deleted` record is needed only while an older log has the ledger, so a removal may make a newer log dead.
        """
        self._running = CollectionKind.REMOVAL
        while dead := self._table.dead():
            sizes = {log_id: self._table.usages[log_id].size for log_id in dead}  # a concurrent refresh drops them
            await self._replacement.remove_logs(dead)
            for log_id, size in sizes.items():
                self._table.drop(log_id)
                self._damaged.discard(log_id)
                outcome.removed.append(log_id)
                outcome.reclaimed_bytes += size
                self._stats.logs_removed += 1
                self._stats.reclaimed_deletion_bytes += size
            log.info("entry_logs_removed", logs=len(dead))
            await self.refresh()

    async def _compact(self, kind: CollectionKind, outcome: _Outcome) -> None:
        self._running = kind
        for log_id in self._table.below(self._threshold(kind)):
            if self._stopping.is_set() or not self._is_allowed(kind):
                return
            await self._rewrite_or_leave(log_id, kind, outcome)
            if self._replacement.is_blocked:
                return

    async def _rewrite_or_leave(self, log_id: int, kind: CollectionKind, outcome: _Outcome) -> None:
        """Rewrite a log; record an error in `outcome`. Raises _Stopping."""
        self._running = kind
        try:
            await self._rewrite(log_id, kind, outcome)
        except _Stopping:
            outcome.left.append((log_id, "stopped"))
            raise
        except _ERRORS as error:
            self._failed(outcome, log_id, error)
        finally:
            self._log_id = None
            self._bytes_done = self._bytes_total = 0

    async def _compact_for_space(self, outcome: _Outcome) -> None:
        """Rewrite logs one by one until the dead bytes are at the goal of `space_policy`, or no log is left for it.

        After each log, logs that have died meanwhile are removed, so that nothing of them is copied.
        """
        tried = set(outcome.rewritten) | {log_id for log_id, _ in outcome.left}
        has_begun = has_closed = False
        while (allowed := self._dead_allowed()) is not None and not self._replacement.is_blocked:
            infos = self._table.infos
            plan = plan_space(
                infos.values(),
                allowed=allowed,
                threshold=self._space_threshold(),
                excluded=tried | self._damaged,
                has_begun=has_begun,
            )
            if plan.closes_open and not has_closed:
                has_closed = True
                if not await self._close_open_log():
                    return
            elif plan.log_ids:
                has_begun = True
                log_id = plan.log_ids[0]
                tried.add(log_id)
                await self._rewrite_or_leave(log_id, self._kind_of(infos[log_id]), outcome)
                self._stats.compactions_for_space += log_id in outcome.rewritten
            else:
                return
            await self.refresh()
            await self._remove_dead(outcome)

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
                f"entry log {fmt.file_name(log_id)}: no space for a copy of its {alive.live_bytes} live bytes"
            )
            outcome.left.append((log_id, "no space"))
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
        freed = source.size - target.size
        outcome.rewritten.append(log_id)
        outcome.copied_bytes += rewrite.copied_bytes
        outcome.reclaimed_bytes += freed
        self._stats.compacted_bytes += rewrite.copied_bytes
        self._stats.reclaimed_compaction_bytes += max(freed, 0)
        if kind is CollectionKind.MINOR:
            self._stats.compactions_minor += 1
        else:
            self._stats.compactions_major += 1
        log.info("entry_log_compacted", source=log_id, target=target.log_id, bytes=target.size, freed=freed)

    # --- rate limit

    async def _pump(self, steps: Generator[int, None, None], *, copied: Callable[[], int] | None = None) -> None:
        """Run all steps in the worker, no faster than `compaction_rate` times the current speed. Raises _Stopping.

        The size of a step is the number of bytes that it read, also from the index, and wrote. `copied`: returns the
        live bytes copied so far, which `state` shows; None: the state does not change.
        """
        worker = self._parts.worker
        try:
            while (size := await run_in(worker, lambda: next(steps, None))) is not None:
                if copied is not None:
                    self._bytes_done = copied()
                    self._adjust_speed()
                await self._pause(size)
                if self._stopping.is_set():
                    raise _Stopping("the bookie is stopping")
        finally:
            await run_in(worker, steps.close)

    def _adjust_speed(self) -> None:
        now, stats = self._parts.clock(), self._stats
        if now < self._observe_at:
            return
        self._observe_at = now + _OBSERVE_S
        allowed = self._dead_allowed()
        dead = dead_bytes(self._table.infos.values())
        wanted = 1.0 if allowed is None else wanted_speed(dead=dead, allowed=allowed)
        self._speed.observe(adds=stats.journal_adds, seconds=stats.journal_add_s, wanted=wanted)
        stats.compaction_speed = self._speed.now

    async def _pause(self, size: int) -> None:
        self._debt_s += size / (self._settings.compaction_rate * self._speed.now)
        if self._debt_s < _SLEEP_MIN_S:
            return
        seconds, self._debt_s = self._debt_s, 0.0
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass
