"""Add entries to the current ledger of a topic, and continue in the next one when it is full or fails.

Adds that arrive in one turn of the event loop are sent as one group (`pending_adds`). `rolling` decides when a ledger
is full, old or unused; `switch` ends a ledger and starts the next one, as the only task that changes the current one.

A writer begins without a ledger, and rests without one after a time without adds: it then has no task and no timer, and
the last ledger is closed. The first add starts a ledger.

Invariants
- An entry is sent only to a ledger that the topic's znode names.
- A position is returned once, and only for a durable entry: confirmed by its ledger, or found by its recovery.
- An entry is sent again only after its former ledger was closed without it.
- Entries keep the order of the calls.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

import structlog
from bindery_client.ledger.api import LedgerClient, ReadHandle, WriteHandle
from bindery_core.errors import (
    BinderyError,
    LostOwnership,
    NoSuchLedger,
    NoSuchTopic,
    OutcomeUnknown,
    TooManyRequests,
    TopicFenced,
    TryAgain,
)
from bindery_pulsar.message_id import Position

from bindery_broker.errors import NotOwner
from bindery_broker.managed_ledger.caching.entry_cache import TopicCache
from bindery_broker.managed_ledger.ledger_list import LedgerList, LedgerRecord
from bindery_broker.managed_ledger.ownership_proof import OwnershipProof
from bindery_broker.managed_ledger.settings import ManagedLedgerSettings
from bindery_broker.managed_ledger.writing.ledger_operations import LedgerOperations
from bindery_broker.managed_ledger.writing.pending_adds import Group, PendingAdds, StoredEntries, copy_error
from bindery_broker.managed_ledger.writing.rolling import next_check_s, rest_due, roll_due
from bindery_broker.managed_ledger.writing.switch import LedgerSwitch, StoreLedgers, taken_over
from bindery_broker.statistics.entries import EntryStatistics

EXPIRY_PAUSE_S_MIN: Final = 0.05
"""Minimum seconds between two checks for expired adds."""
ROLL_RETRY_S: Final = 10.0
"""Seconds before a roll is tried again after the next ledger could not be created."""

log = structlog.get_logger()


class TopicWriter:
    """The single writer of a topic. One per open managed ledger."""

    def __init__(
        self,
        *,
        topic: str,
        client: LedgerClient,
        ledgers: LedgerList,
        settings: ManagedLedgerSettings,
        clock: Callable[[], int],
        cache: TopicCache,
        custom_metadata: Mapping[str, bytes],
        ownership: OwnershipProof,
        store_ledgers: StoreLedgers,
        on_confirmed: Callable[[], None],
        on_fenced: Callable[[TopicFenced], None],
        on_recovered: Callable[[ReadHandle], Coroutine[Any, Any, None]],
        statistics: EntryStatistics,
    ) -> None:
        """`on_confirmed` is called each time the last confirmed entry advances."""
        self.entries_added = 0
        self._topic = topic
        self._ledgers = ledgers
        self._settings = settings
        self._cache = cache
        self._ownership = ownership
        self._store_ledgers = store_ledgers
        self._on_confirmed = on_confirmed
        self._on_fenced = on_fenced
        self._statistics = statistics
        self._operations = LedgerOperations(topic, client, settings, custom_metadata)
        self._ledger_switch = LedgerSwitch(
            topic,
            self,
            self._operations,
            ledgers=ledgers,
            settings=settings,
            clock=clock,
            ownership=ownership,
            store_ledgers=store_ledgers,
            on_recovered=on_recovered,
        )
        self._pending = PendingAdds()
        self._loop = asyncio.get_running_loop()
        self._handle: WriteHandle | None = None
        self._opened_at = 0.0
        self._added_at = 0.0
        """Loop time at which entries were last stored, or the ledger was opened."""
        self._next_entry_id = 0
        self._pump_scheduled = False
        self._paused = True
        self._closing = False
        self._failure: BinderyError | None = None
        """The reason why the current ledger accepts no more entries; None: it accepts them."""
        self._end: BinderyError | None = None
        """The reason why this writer accepts no more adds; None: it accepts them."""
        self._switch_task: asyncio.Task[None] | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._changed: asyncio.Event | None = None
        """Set when anything has changed that a call waits for; None: none has waited yet."""
        self._roll_timer: asyncio.TimerHandle | None = None
        self._roll_not_before = 0.0
        self._expiry_timer: asyncio.TimerHandle | None = None

    @property
    def handle(self) -> WriteHandle | None:
        """The current ledger, for reading its confirmed entries, even if it accepts no more. None: the last ledger of
        the topic is closed."""
        return self._handle

    @property
    def is_resting(self) -> bool:
        """Whether there is no open ledger, and none is being started."""
        return self._handle is None and self._switch_task is None

    @property
    def is_waited_for(self) -> bool:
        """Whether an add is queued."""
        return self._pending.has_queued

    @property
    def age_s(self) -> float:
        """Seconds since the current ledger was opened; 0: there is none."""
        return self._loop.time() - self._opened_at if self._handle is not None else 0.0

    @property
    def pending_adds(self) -> int:
        return self._pending.count

    @property
    def pending_size(self) -> int:
        """Payload bytes that are queued or in flight."""
        return self._pending.size

    @property
    def state(self) -> str:
        """One of Pulsar's names for the state of a managed ledger."""
        if self._end is not None:
            return "Fenced" if isinstance(self._end, TopicFenced) else "Closed"
        if self.is_resting:
            return "ClosedLedger"
        if self._handle is None:
            return "CreatingLedger"
        if self._paused:
            return "ClosingLedger" if self._failure is None else "CreatingLedger"
        return "LedgerOpened"

    async def start(self) -> None:
        """Start a ledger without an add, unless there is one. Returns without one if none can be created now."""
        if self._end is None and not self._closing and self._handle is None:
            self._switch()
            assert self._switch_task is not None
            await asyncio.wait([self._switch_task], timeout=self._settings.operation_timeout_s)

    async def start_after(self, records: Sequence[LedgerRecord]) -> None:
        """Create the first ledger of this owner after `records` (all closed), for a topic that is being opened.

        Raises TopicFenced, TryAgain, OutcomeUnknown.
        """
        handle = await self._operations.create()
        new = LedgerRecord(ledger_id=handle.ledger_id)
        try:
            await self._store_ledgers(lambda: [*records, new])
        except BinderyError as error:
            await self._operations.discard(handle, delete=not isinstance(error, OutcomeUnknown))
            raise
        self._use(handle)

    def _use(self, handle: WriteHandle) -> None:
        self._handle = handle
        self._next_entry_id = 0
        self._opened_at = self._added_at = self._loop.time()
        self._failure = None
        self._paused = False
        self._watch_age()
        self._has_changed()
        self._pump_soon()

    # --- adding

    def submit_many(self, payloads: Sequence[bytes]) -> "asyncio.Future[list[Position]]":
        """Queue at least one entry. Returns a future for the positions. Raises an error if the add is refused."""
        if self._end is not None:
            raise copy_error(self._end)
        if self._closing:
            raise NotOwner("the topic is closed here", topic=self._topic)
        assert payloads
        pending_size, size_max = self._pending.size, self._settings.pending_size_max
        if pending_size and pending_size + sum(map(len, payloads)) > size_max:
            raise TooManyRequests(
                "too much is waiting to be stored in this topic", pending_size=pending_size, size_max=size_max
            )
        future: asyncio.Future[list[Position]] = self._loop.create_future()
        now = self._loop.time()
        self._pending.append(payloads, future, queued_at=now, deadline=now + self._settings.add_timeout_s)
        if self._handle is None:
            self._switch()
        else:
            self._pump_soon()
        return future

    def _pump_soon(self) -> None:
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Send the queued adds."""
        self._pump_scheduled = False
        if self._paused or self._failure is not None or self._end is not None:
            return
        handle = self._handle
        assert handle is not None
        while (group := self._pending.next_group(self._next_entry_id)) is not None:
            self._next_entry_id += group.count
            self._spawn(self._send(handle, group, group.payloads()))

    async def _send(self, handle: WriteHandle, group: Group, payloads: list[bytes]) -> None:
        try:
            first = await handle.add_many(payloads)
        except BinderyError as error:
            self._ledger_failed(handle, error)
            return
        assert first == group.first, "the ledger and the writer must assign the same entry ids"
        group.is_stored = True
        if handle is not self._handle:
            return
        stored = self._pending.confirm(self._ledgers.current.ledger_id)
        if stored:
            self._count_stored(stored)
            self._has_changed()
            self._on_confirmed()
            self._roll_if_due()

    def _count_stored(self, stored: Sequence[StoredEntries]) -> None:
        self._ledger_switch.entry_stored()
        count = sum(len(one.positions) for one in stored)
        self._ledgers.grow(entries=count, size=sum(one.size for one in stored))
        self.entries_added += count
        now = self._added_at = self._loop.time()
        for one in stored:
            ledger_id, first = one.positions[0]
            self._statistics.add(one.payloads, one.size, latency_s=now - one.queued_at)
            self._cache.add_written(ledger_id, first, one.payloads, size=one.size)

    def _has_changed(self) -> None:
        if self._changed is not None:
            self._changed.set()

    async def _next_change(self) -> None:
        if self._changed is None:
            self._changed = asyncio.Event()
        self._changed.clear()
        await self._changed.wait()

    # --- control of the sending by a switch

    @property
    def failure(self) -> BinderyError | None:
        return self._failure

    def fail(self, error: BinderyError) -> None:
        self._failure = error

    def pause(self) -> WriteHandle:
        assert self._handle is not None
        self._paused = True
        return self._handle

    async def drained(self) -> None:
        while self._pending.has_in_flight and self._failure is None and self._end is None:
            await self._next_change()
        self._raise_if_lost()

    def settle(self, entries: int) -> None:
        stored = self._pending.settle(self._ledgers.current.ledger_id, entries)
        if stored:
            self._count_stored(stored)
        self._has_changed()
        self._on_confirmed()

    def expire(self, error: BinderyError) -> None:
        self._expire(error)
        self._raise_if_lost()

    def _expire(self, error: BinderyError) -> None:
        self._pending.expire(error, now=self._loop.time(), ledger_has_failed=self._failure is not None)

    def _raise_if_lost(self) -> None:
        if self._end is not None:
            raise TopicFenced("the topic was lost", topic=self._topic)

    # --- when to switch

    def _ledger_failed(self, handle: WriteHandle, error: BinderyError) -> None:
        if handle is not self._handle or self._end is not None or self._failure is not None:
            return
        self._failure = error
        self._has_changed()
        if isinstance(error, LostOwnership) and not self._ownership.is_possible:
            self.fence(taken_over(self._topic))
            return
        log.warning("topic_ledger_failed", topic=self._topic, ledger_id=handle.ledger_id, error=str(error))
        self._switch()

    def _roll_if_due(self) -> None:
        if self._paused or self._failure is not None or self._end is not None:
            return
        now = self._loop.time()
        if now >= self._roll_not_before and roll_due(
            self._ledgers.current, self._settings, age_s=now - self._opened_at
        ):
            self._switch()

    def _watch_age(self) -> None:
        """Check again when the ledger reaches an age at which it may be rolled, or was not used for long."""
        if self._roll_timer is not None:
            self._roll_timer.cancel()
            self._roll_timer = None
        if self._end is None and self._handle is not None:
            now = self._loop.time()
            wait_s = next_check_s(self._settings, age_s=now - self._opened_at, idle_s=now - self._added_at)
            self._roll_timer = self._loop.call_later(wait_s, self._age_reached)

    def _age_reached(self) -> None:
        self._rest_if_due()
        self._roll_if_due()
        self._watch_age()

    def _rest_if_due(self) -> None:
        if self._paused or self._failure is not None or self._end is not None or self._pending.count:
            return
        if rest_due(self._settings, idle_s=self._loop.time() - self._added_at):
            self._switch(rest=True)

    async def roll(self) -> None:
        """End the current ledger, whatever its age, and start the next one. An empty ledger is kept, and so is a closed
        one."""
        if self._end is not None:
            raise copy_error(self._end)
        if self._switch_task is not None:
            await asyncio.wait([self._switch_task])
        if self._end is None and self._handle is not None and (self._ledgers.current.entries or self._pending.count):
            self._switch()
            assert self._switch_task is not None
            await asyncio.wait([self._switch_task])
        if self._end is not None:
            raise copy_error(self._end)

    async def decided(self, *, timeout_s: float) -> None:
        """Return once no add that was answered may still become stored: its outcome was unknown until the ledger was
        replaced. Raises TryAgain after `timeout_s`, or the reason why the writer has ended."""
        if self._switch_task is not None:
            await asyncio.wait([self._switch_task], timeout=timeout_s)
        if self._end is not None:
            raise copy_error(self._end)
        if self._failure is not None or (self._paused and self._handle is not None):
            raise TryAgain("the topic's ledger is being replaced; retry", topic=self._topic)

    def _switch(self, *, rest: bool = False) -> None:
        """Continue in the next ledger; `rest`: end the current one only. Nothing happens while a switch runs."""
        if self._switch_task is None:
            self._switch_task = self._loop.create_task(self._run_switch(rest=rest))
            self._tasks[self._switch_task] = None
            self._switch_task.add_done_callback(self._switched)
            self._watch_deadlines()

    async def _run_switch(self, *, rest: bool) -> None:
        try:
            if rest:
                await self._ledger_switch.end()
                self._rested()
                return
            switched = await self._ledger_switch.run()
        except TopicFenced as error:
            await self._discard_unused()
            self.fence(error)
        except NoSuchLedger:
            await self._discard_unused()
            self.fence(TopicFenced("the topic's ledger was deleted", topic=self._topic))
        else:
            if switched is None:
                self._roll_not_before = self._loop.time() + ROLL_RETRY_S
                return
            closed, handle = switched
            self._use(handle)
            if closed is not None and not closed.entries:
                self._spawn(self._operations.delete(closed.ledger_id))
            behind = None if closed is None else closed.ledger_id
            log.info("topic_ledger_started", topic=self._topic, ledger_id=handle.ledger_id, behind=behind)

    def _rested(self) -> None:
        """The current ledger was closed, and the topic has no open one now."""
        closed = self._ledgers.current
        self._handle, self._failure = None, None
        self._watch_age()
        log.info("topic_ledger_rests", topic=self._topic, ledger_id=closed.ledger_id, entries=closed.entries)

    def _switched(self, task: "asyncio.Task[None]") -> None:
        self._tasks.pop(task, None)
        self._switch_task = None
        if self._expiry_timer is not None:
            self._expiry_timer.cancel()
            self._expiry_timer = None
        if not task.cancelled() and task.exception() is not None:
            self._broken(task.exception())
        elif self._end is None and not task.cancelled() and self._handle is None and self._pending.has_queued:
            self._switch()  # adds came while the ledger was closed
        elif self._failure is not None and self._end is None and not task.cancelled():
            self._switch()  # the ledger failed after the switch had read `failure`

    def _watch_deadlines(self) -> None:
        """Fail adds at their deadlines while a switch is in progress, however long its calls take."""
        now = self._loop.time()
        deadline = self._pending.next_deadline()
        # An add that arrives later has a later deadline.
        wait_s = self._settings.add_timeout_s if deadline is None else deadline - now
        self._expiry_timer = self._loop.call_later(max(wait_s, EXPIRY_PAUSE_S_MIN), self._deadline_reached)

    def _deadline_reached(self) -> None:
        if self._paused or self._failure is not None:
            obstacle = self._ledger_switch.obstacle
            self._expire(obstacle or TryAgain("no ledger can be written now", topic=self._topic))
        self._watch_deadlines()

    # --- ending

    def fence(self, error: TopicFenced) -> None:
        """End the writer because the topic is lost: fail all adds. Adds in flight may be stored."""
        if self._end is None:
            log.warning("topic_fenced", topic=self._topic, error=str(error))
            self._stop(error)
            self._on_fenced(error)

    def stop(self, error: BinderyError) -> None:
        """End the writer like a crash: fail all adds with `error`. The ledger stays open for a recovery."""
        if self._end is None:
            self._stop(error)

    def _stop(self, error: BinderyError) -> None:
        self._end = error
        for timer in (self._roll_timer, self._expiry_timer):
            if timer is not None:
                timer.cancel()
        self._pending.fail_all(error)
        self._has_changed()
        if self._handle is not None:
            self._spawn(self._operations.abandon(self._handle))

    async def close(self) -> None:
        """Complete the pending adds within `add_timeout_s`, then close the ledger. Later adds fail with NotOwner.

        The next open then need not recover the ledger.
        """
        closed = NotOwner("the topic is closed here", topic=self._topic)
        self._closing = True
        try:
            async with asyncio.timeout(self._settings.add_timeout_s):
                await self._idle()
        except TimeoutError:
            log.warning("topic_closed_with_adds_pending", topic=self._topic, adds=self.pending_adds)
        if self._switch_task is not None:
            self._switch_task.cancel()
            await asyncio.wait([self._switch_task])
        handle = self._handle
        is_healthy = self._end is None and self._failure is None and not self._pending.has_in_flight
        if is_healthy and handle is not None:
            self._handle = None
            self._stop(closed)
            try:
                await self._operations.close(handle)
            except BinderyError as error:
                log.warning("topic_ledger_not_closed", topic=self._topic, error=str(error))
                await self._operations.abandon(handle)
        elif self._end is None:
            self._stop(closed)
        await self.finished()

    async def _idle(self) -> None:
        """Return once nothing is pending and no switch is in progress, or this writer has ended."""
        while self._end is None and (self._pending.count or self._switch_task is not None):
            waiter = self._loop.create_task(self._next_change())
            try:
                tasks: set[asyncio.Task[Any]] = {waiter}
                if self._switch_task is not None:
                    tasks.add(self._switch_task)
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiter.cancel()

    async def finished(self) -> None:
        """After the end of this writer: return once none of its tasks runs, or after `operation_timeout_s`."""
        if self._switch_task is not None:
            self._switch_task.cancel()
            await asyncio.wait([self._switch_task], timeout=self._settings.operation_timeout_s)
        await self._discard_unused()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._settings.operation_timeout_s)

    async def _discard_unused(self) -> None:
        """Release the new ledgers of switches that failed. Delete them too, unless the writer ended like a crash."""
        has_crashed = (
            self._end is not None and not self._closing and not isinstance(self._end, (TopicFenced, NoSuchTopic))
        )
        await self._ledger_switch.discard_unused(delete=not has_crashed)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._spawned_done)

    def _spawned_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken(error)

    def _broken(self, error: BaseException | None) -> None:
        log.error("topic_writer_broken", topic=self._topic, error=repr(error))
        self.fence(TopicFenced("the topic's writer is broken", topic=self._topic))
