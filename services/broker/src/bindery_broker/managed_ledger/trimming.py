"""Delete the oldest ledgers of a topic once no cursor and no retention setting needs them.

The metadata is written first, and the ledgers are deleted after it. A ledger that cannot be deleted is remembered and
deleted by a later call. When the topic closes, the log names the ledgers that are still not deleted.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace

import structlog
from bindery_client.ledger.api import LedgerClient
from bindery_core.errors import BinderyError, TopicFenced, TryAgain
from bindery_core.ids import LedgerId
from bindery_pulsar.message_id import Position

from bindery_broker.managed_ledger.cursors.cursor_table import CursorTable
from bindery_broker.managed_ledger.ledger_list import LedgerList, LedgerRecord
from bindery_broker.managed_ledger.read_handles import ReadHandles
from bindery_broker.managed_ledger.retention import (
    SYSTEM_CURSORS,
    LedgerVerdict,
    RetentionRule,
    judge,
    trimmable,
)
from bindery_broker.managed_ledger.settings import ManagedLedgerSettings
from bindery_broker.managed_ledger.topic_metadata import limited

log = structlog.get_logger()


class Trimmer:
    """Trims one open topic."""

    def __init__(
        self,
        *,
        topic: str,
        ledgers: LedgerList,
        ledgers_lock: asyncio.Lock,
        cursors: CursorTable,
        client: LedgerClient,
        handles: ReadHandles,
        settings: ManagedLedgerSettings,
        clock: Callable[[], int],
        retention: Callable[[], RetentionRule | None],
        write_ledgers: Callable[[Sequence[LedgerRecord]], Awaitable[None]],
        is_ledger_open: Callable[[], bool],
        check_open: Callable[[], None],
        on_fenced: Callable[[TopicFenced], None],
    ) -> None:
        """`ledgers_lock` is held while `write_ledgers` stores the list of ledgers. `retention`: None stands for the
        settings. `is_ledger_open`: whether messages are added to the last ledger."""
        self.deletable: list[int] = []
        """Ledgers that metadata no longer names and that are not deleted yet."""
        self._topic = topic
        self._ledgers = ledgers
        self._ledgers_lock = ledgers_lock
        self._cursors = cursors
        self._client = client
        self._handles = handles
        self._settings = settings
        self._clock = clock
        self._retention = retention
        self._write_ledgers = write_ledgers
        self._is_ledger_open = is_ledger_open
        self._check_open = check_open
        self._on_fenced = on_fenced
        self._task: asyncio.Task[None] | None = None
        self._is_started = False

    def start(self) -> None:
        """Enable `trim_soon`. Before the cursors are loaded, every entry would count as unneeded."""
        self._is_started = True
        self.trim_soon()

    def trim_soon(self) -> None:
        """Trim in a task, unless one is running."""
        if self._is_started and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._trim_in_background())

    def stop(self) -> None:
        self._is_started = False
        if self._task is not None:
            self._task.cancel()

    async def trim(self) -> int:
        """See `ManagedLedger.trim`."""
        async with self._cursors.trim_lock:
            self._check_open()
            async with self._ledgers_lock:  # the positions must hold until the list is stored: seeks wait for the lock
                positions = await self._cursors.positions_for_trimming()
                if positions is None:
                    return 0
                count = trimmable(self._ledgers, positions, now_ms=self._clock(), retention=self._rule(positions))
                if count:
                    await self._drop_first(count)
            self.deletable = [ledger_id for ledger_id in self.deletable if not await self.delete_ledger(ledger_id)]
            return count

    def explain(self) -> list[LedgerVerdict]:
        """See `ManagedLedger.explain_retention`."""
        positions = self._cursors.known_positions()
        return judge(
            self._ledgers,
            positions,
            is_open=self._is_ledger_open(),
            now_ms=self._clock(),
            retention=self.rule,
            unknown=next(iter(self._cursors.damaged), None),
        )

    def retains_entries(self, *, idle_s: float) -> bool:
        """See `ManagedLedger.retains_entries`."""
        positions = self._cursors.known_positions()
        if positions is None:
            return True
        positions = {name: position for name, position in positions.items() if name not in SYSTEM_CURSORS}
        now_ms = self._clock()
        records = list(self._ledgers)
        last = records[-1]
        if last.entries:
            closed = last if last.closed_ms else replace(last, closed_ms=now_ms - round(idle_s * 1_000))
            records = [*records[:-1], closed, LedgerRecord(ledger_id=last.ledger_id + 1)]
        count = trimmable(LedgerList(records), positions, now_ms=now_ms, retention=self.rule)
        return count < len(records) - 1

    @property
    def releases_last(self) -> bool:
        """Whether all ledgers could be deleted, if the last one, which must be closed, were not the last."""
        last = self._ledgers.current
        positions = self._cursors.known_positions() if last.entries else None
        if positions is None:
            return False
        followed = LedgerList([*self._ledgers, LedgerRecord(ledger_id=last.ledger_id + 1)])
        return (
            trimmable(followed, positions, now_ms=self._clock(), retention=self._rule(positions)) == len(followed) - 1
        )

    def next_release_in_s(self) -> float:
        """Return the seconds until the retention releases the oldest ledger; infinite: not before a cursor moves, or
        entries are added."""
        positions = self._cursors.known_positions()
        first = self._ledgers.first
        is_only = len(self._ledgers) == 1
        if positions is None or (is_only and (self._is_ledger_open() or not first.entries)):
            return math.inf
        time_s = self._rule(positions).time_s
        if time_s is None or any(at < Position(first.ledger_id, first.entries - 1) for at in positions.values()):
            return math.inf
        return max(0.0, first.closed_ms / 1_000 + time_s - self._clock() / 1_000)

    @property
    def rule(self) -> RetentionRule:
        """The retention in force."""
        return self._rule([*self._cursors.cursors, *self._cursors.damaged])

    def _rule(self, cursors: Iterable[str]) -> RetentionRule:
        """Return the retention in force for a topic with these cursors."""
        rule = self._retention()
        if rule is not None:
            return rule
        is_subscribed = any(name not in SYSTEM_CURSORS for name in cursors)
        settings = self._settings
        return RetentionRule(settings.retention_acked_s if is_subscribed else settings.retention_unsubscribed_s, None)

    async def delete_remaining(self) -> None:
        """Try once more to delete `deletable`, because no other process has the list. Logs the remaining ledgers."""
        try:
            async with limited(self._settings.operation_timeout_s, "delete trimmed ledgers"), self._cursors.trim_lock:
                while self.deletable and await self.delete_ledger(self.deletable[0]):
                    del self.deletable[0]
        except TryAgain as error:
            log.warning("trimmed_ledgers_not_deleted", topic=self._topic, error=str(error))
        if self.deletable:
            log.warning("trimmed_ledgers_left", topic=self._topic, ledger_ids=self.deletable)

    async def delete_ledger(self, ledger_id: int) -> bool:
        """Delete a ledger that metadata does not name. Returns False, with a warning in the log, if that failed."""
        await self._handles.drop(ledger_id)
        try:
            async with limited(self._settings.operation_timeout_s, "delete a ledger"):
                await self._client.delete(LedgerId(ledger_id))
        except BinderyError as error:
            log.warning("ledger_not_deleted", topic=self._topic, ledger_id=ledger_id, error=str(error))
            return False
        return True

    async def _drop_first(self, count: int) -> None:
        """Remove the `count` oldest ledgers from the list, durably."""
        dropped = [record.ledger_id for record in list(self._ledgers)[:count]]
        try:
            await self._write_ledgers(list(self._ledgers)[count:])
        except TopicFenced as error:
            self._on_fenced(error)
            raise
        self._cursors.before_trim(Position(list(self._ledgers)[count].ledger_id, 0))
        self._ledgers.drop_first(count)
        self.deletable.extend(dropped)
        log.info("topic_trimmed", topic=self._topic, ledgers=dropped)

    async def _trim_in_background(self) -> None:
        try:
            await self.trim()
        except BinderyError as error:
            log.warning("topic_not_trimmed", topic=self._topic, error=str(error))
        finally:
            self._task = None
