"""The compaction of one loaded topic: its state, when it runs, and how the compacted topic is read.

Invariants: at most one compaction of the topic runs; none runs once the topic is closed. The state in force is that of
the cursor `__compaction`, so that it is the same for the next owner of the topic.

The cursor is not one of the topic's subscriptions: nobody can consume through it, and no backlog, quota or expiry
counts it. `internalStats` shows it, as in Pulsar.
"""

import asyncio
from dataclasses import dataclass, replace
from enum import StrEnum

from bindery_core.errors import BinderyError, Conflict, NoSuchSubscription
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_pulsar.message_id import EARLIEST, Position
from bindery_pulsar.topic_name import TopicName

from bindery_broker.compaction.compacted_ledger import CompactedLedger
from bindery_broker.compaction.compactor import (
    LEDGER_PROPERTY,
    CompactionTools,
    Compactor,
    Progress,
    delete_ledger,
    delete_left_over,
    left_over,
)
from bindery_broker.compaction.view import Compacted, CompactedView
from bindery_broker.managed_ledger import COMPACTION_CURSOR, ManagedCursor, ManagedLedger

log = get_logger(__name__)


class Status(StrEnum):
    """Values as in Pulsar's LongRunningProcessStatus."""

    NOT_RUN = "NOT_RUN"
    RUNNING = "RUNNING"
    SUCCESS = "SUCCESS"
    ERROR = "ERROR"


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRun:
    """The compaction that runs, or the last one since the topic was loaded."""

    status: Status = Status.NOT_RUN
    error: BinderyError | None = None
    started_ms: int | None = None
    """In ms since 1970."""
    ended_ms: int | None = None


class TopicCompaction:
    """Created with the topic. `stop` or `cancel` ends it."""

    def __init__(self, name: TopicName, ledger: ManagedLedger, tools: CompactionTools) -> None:
        self._name = name
        self._ledger = ledger
        self._tools = tools
        self._task: asyncio.Task[None] | None = None
        self._is_stopped = False
        self._reader: CompactedLedger | None = None
        self._releases: dict[asyncio.Task[None], None] = {}
        self.last_run = LastRun()
        self.progress = Progress()
        self.view = CompactedView(ledger, self.current)
        """The compacted topic."""

    # --- state

    @property
    def cursor(self) -> ManagedCursor | None:
        """The cursor `__compaction`; None: there is none, or its state cannot be read."""
        return self._ledger.system_cursor(COMPACTION_CURSOR)

    @property
    def is_running(self) -> bool:
        return self._task is not None

    @property
    def size_not_compacted(self) -> int:
        """Payload bytes of the entries that were not compacted; an estimate."""
        cursor = self.cursor
        return self._ledger.size if cursor is None else cursor.backlog[1]

    def current(self) -> Compacted | None:
        """Return the state in force; None: the topic was never compacted."""
        cursor = self.cursor
        ledger_id = None if cursor is None else cursor.position_properties.get(LEDGER_PROPERTY)
        if cursor is None or ledger_id is None:
            return None
        if self._reader is None or self._reader.ledger_id != ledger_id:
            self._release_reader()
            self._reader = CompactedLedger(
                self._tools.client, ledger_id, timeout_s=self._tools.settings.operation_timeout_s
            )
        return Compacted(self._reader, cursor.mark_delete)

    # --- running

    async def prepare(self) -> None:
        """Create the cursor if it is missing, so that no entry is trimmed before it is compacted."""
        if self.cursor is None and not self._is_stopped:
            await self._ledger.open_cursor(COMPACTION_CURSOR, start=EARLIEST)

    def start(self) -> None:
        """Start a compaction. Raises Conflict if one runs, Corrupt if the state of the cursor cannot be read."""
        if self._task is not None:
            raise Conflict("the topic is being compacted", topic=self._name.short)
        if self._is_stopped:
            raise Conflict("the topic is closing", topic=self._name.short)
        self._ledger.check_cursor(COMPACTION_CURSOR)
        self.last_run = LastRun(status=Status.RUNNING, started_ms=self._tools.clock())
        self.progress = Progress()
        self._tools.hold(self._name)
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"compaction {self._name.short}")
        self._task.add_done_callback(self._done)

    async def maintain(self, *, threshold: int) -> None:
        """Start a compaction if at least `threshold` bytes were not compacted; 0: never by itself."""
        if threshold <= 0 or self._task is not None or self._is_stopped:
            return
        await self.prepare()
        if self._ledger.last_confirmed > self._horizon and self.size_not_compacted >= threshold:
            self.start()

    def is_due(self, *, threshold: int) -> bool:
        """Return whether the next `maintain` may start a compaction."""
        return 0 < threshold <= self.size_not_compacted and self._ledger.last_confirmed > self._horizon

    async def wait(self) -> None:
        """Return once no compaction runs."""
        while self._task is not None:
            await asyncio.wait([self._task])

    def cancel(self) -> None:
        """Start none any more, and end the one that runs. What it has written is deleted, unless it is in force."""
        self._is_stopped = True
        if self._task is not None:
            self._task.cancel()

    async def stop(self) -> None:
        """`cancel`, and return once that is done."""
        self.cancel()
        await self.wait()
        self._release_reader()
        await asyncio.gather(*self._releases, return_exceptions=True)

    async def forget(self) -> None:
        """Delete the cursor, durably, then the compacted ledger: reads begin with what the topic still has.

        Raises NoSuchSubscription if there is no cursor, Conflict while a compaction runs.
        """
        if self._task is not None:
            raise Conflict("the topic is being compacted", topic=self._name.short)
        ledger_ids = self.ledger_ids()
        await self._ledger.delete_cursor(COMPACTION_CURSOR)
        self._release_reader()
        await self.delete_ledgers(ledger_ids)

    def ledger_ids(self) -> list[int]:
        """Return the compacted ledgers that exist or may exist."""
        cursor = self.cursor
        if cursor is None:
            return []
        current = cursor.position_properties.get(LEDGER_PROPERTY)
        return [*left_over(cursor), *([] if current is None else [current])]

    async def delete_ledgers(self, ledger_ids: list[int]) -> None:
        """Delete compacted ledgers after the cursor is deleted."""
        for ledger_id in ledger_ids:
            await delete_ledger(self._tools, ledger_id, topic=self._name)

    @property
    def _horizon(self) -> Position:
        cursor = self.cursor
        return EARLIEST if cursor is None else cursor.mark_delete

    async def _run(self) -> None:
        async with self._tools.slots:
            await self.prepare()
            cursor = self.cursor
            if cursor is None:
                raise NoSuchSubscription("the subscription was deleted", subscription=COMPACTION_CURSOR)
            last = self._ledger.last_confirmed
            if not self._ledger.contains(last) or last <= cursor.mark_delete:
                await delete_left_over(self._tools, cursor, topic=self._name)
                return
            await Compactor(self._name, cursor, self.view, self._tools, self.progress).run(last)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._task = None
        self._tools.release(self._name)
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            error = Conflict("the compaction was ended, because the topic was closed", topic=self._name.short)
        elif error is not None and not isinstance(error, BinderyError):
            log.error("compaction_broken", topic=self._name.short, error=repr(error))
            error = BinderyError(f"the compaction failed: {error!r}", topic=self._name.short)
        assert error is None or isinstance(error, BinderyError)
        status = Status.SUCCESS if error is None else Status.ERROR
        self.last_run = replace(self.last_run, status=status, error=error, ended_ms=self._tools.clock())
        if error is not None:
            log.warning("topic_not_compacted", topic=self._name.short, **error_fields(error))
            return
        progress = self.progress
        log.info(
            "topic_compacted",
            topic=self._name.short,
            entries=progress.entries_read,
            keys=progress.keys,
            written=progress.entries_written,
        )

    def _release_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            task = asyncio.get_running_loop().create_task(reader.release())
            self._releases[task] = None
            task.add_done_callback(self._releases.pop)
