"""TopicWriter: adds entries to a topic's current ledger, and moves on to the next one when it is full or fails.

Theory of operation

    queue -> (grouped) -> in flight in the current ledger -> confirmed, in order

Adds that arrive in one turn of the loop travel as one group. A *switch* ends the current ledger and starts the next:

- rolled (full or old): the next ledger is created while adds go on; then sending pauses, what is in flight completes,
  the ledger is closed, the topic's znode is written with both ledgers, sending goes on.
- failed: sending pauses, the writer is abandoned and the ledger recovered, which decides for good how many entries it
  has. Adds in flight below that number are confirmed; the others were certainly not stored and go to the head of the
  queue. Then as above. Until a ledger can be had, adds wait in the queue, each at most `add_timeout_s`.

A ledger that somebody else fenced or closed failed like any other if the topic is certainly still ours: healing
recovers the open ledgers of idle topics. If it is not, or if somebody else has written the znode, another broker owns
the topic: everything fails with TopicFenced, for good.

Invariants
- An entry is sent only to a ledger that the topic's znode names.
- A position is handed out once, and only for a durable entry: confirmed by its ledger, or found by its recovery.
- An entry is sent again only after its former ledger was closed without it.
- Entries have the order of the calls.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

import structlog
from bindery_client.ledger.api import LedgerClient, ReadHandle, WriteHandle
from bindery_core.errors import (
    AddTimeout,
    BinderyError,
    LostOwnership,
    MetadataUnavailable,
    NoSuchLedger,
    NoSuchTopic,
    OutcomeUnknown,
    TooManyRequests,
    TopicFenced,
    TryAgain,
)
from bindery_core.ids import LedgerId
from bindery_pulsar.message_id import Position

from bindery_broker.managed_ledger.entry_cache import EntryCache
from bindery_broker.managed_ledger.ledger_list import LedgerList, LedgerRecord
from bindery_broker.managed_ledger.ownership_proof import OwnershipProof
from bindery_broker.managed_ledger.settings import ManagedLedgerSettings
from bindery_broker.managed_ledger.topic_metadata import limited

GROUP_SIZE_MAX: Final = 4 * 2**20
"""Payload bytes sent in one call to the ledger, unless one add alone has more."""
FENCES_MAX: Final = 5
"""Ledgers in a row, without an entry stored, that others may fence before the topic is given up."""
EXPIRY_PAUSE_S_MIN: Final = 0.05
"""Shortest time between two looks for adds that waited too long."""
ROLL_RETRY_S: Final = 10.0
"""Pause after a ledger could not be created while the current one still serves."""

log = structlog.get_logger()


class _Add:
    """One call of `add_many`, or what is left to store of it."""

    __slots__ = ("deadline", "future", "payloads", "positions", "sent", "size")

    def __init__(self, payloads: Sequence[bytes], size: int, future: "asyncio.Future[list[Position]]", deadline: float):
        self.payloads = payloads
        self.size = size
        self.future = future
        self.deadline = deadline
        self.positions: list[Position] = []
        self.sent = False
        """Part of it may be stored in a ledger that has not been recovered yet."""


class _Group:
    """Adds that travel together; `first` is the first one's entry id."""

    __slots__ = ("adds", "count", "done", "first")

    def __init__(self, first: int, adds: list[_Add], count: int) -> None:
        self.first = first
        self.adds = adds
        self.count = count
        self.done = False


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
        cache: EntryCache,
        custom_metadata: dict[str, bytes],
        ownership: OwnershipProof,
        store_ledgers: Callable[[Callable[[], Sequence[LedgerRecord]]], Coroutine[Any, Any, None]],
        on_confirmed: Callable[[], None],
        on_fenced: Callable[[TopicFenced], None],
        on_recovered: Callable[[ReadHandle], Coroutine[Any, Any, None]],
    ) -> None:
        """`store_ledgers` stores the answer of its argument as the topic's ledgers, in the znode, then in `ledgers`;
        `on_confirmed` is called after each step of the last entry."""
        self._topic = topic
        self._client = client
        self._ledgers = ledgers
        self._settings = settings
        self._clock = clock
        self._cache = cache
        self._custom_metadata = custom_metadata
        self._ownership = ownership
        self._store_ledgers = store_ledgers
        self._on_confirmed = on_confirmed
        self._on_fenced = on_fenced
        self._on_recovered = on_recovered
        self._loop = asyncio.get_running_loop()
        self._handle: WriteHandle | None = None
        self._opened_at = 0.0
        self._next_entry_id = 0
        self._queue: deque[_Add] = deque()
        self._in_flight: deque[_Group] = deque()
        self._pending_size = 0
        self._pump_scheduled = False
        self._paused = True
        self._closing = False
        self._failure: BinderyError | None = None
        """Why the current ledger takes no more."""
        self._end: BinderyError | None = None
        """Why this writer takes no more."""
        self._switch_task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._roll_timer: asyncio.TimerHandle | None = None
        self._roll_not_before = 0.0
        self._expiry_timer: asyncio.TimerHandle | None = None
        self._unused: list[tuple[WriteHandle, bool]] = []
        """New ledgers of switches that ended without them, and whether the topic's znode may name them."""
        self._obstacle: BinderyError | None = None
        """What kept the switch under way from going on, last."""
        self._fences = 0
        """Of ledgers by others since an entry was last stored."""
        self.entries_added = 0

    @property
    def handle(self) -> WriteHandle | None:
        """Of the current ledger, to read it: it knows what is confirmed, even if it takes no more. None: closed."""
        return self._handle

    @property
    def pending_adds(self) -> int:
        return len(self._queue) + sum(len(group.adds) for group in self._in_flight)

    @property
    def state(self) -> str:
        """In Pulsar's words."""
        if self._end is not None:
            return "Fenced" if isinstance(self._end, TopicFenced) else "Closed"
        if self._paused:
            return "ClosingLedger" if self._failure is None else "CreatingLedger"
        return "LedgerOpened"

    async def start(self, records: Sequence[LedgerRecord]) -> None:
        """Create our first ledger, behind `records` (all closed). Raises TopicFenced, TryAgain, OutcomeUnknown."""
        handle = await self._create_ledger()
        new = LedgerRecord(ledger_id=handle.ledger_id)
        try:
            await self._store_ledgers(lambda: [*records, new])
        except BinderyError as error:
            await self._discard(handle, delete=not isinstance(error, OutcomeUnknown))
            raise
        self._use(handle)

    # --- adding

    def submit_many(self, payloads: Sequence[bytes]) -> "asyncio.Future[list[Position]]":
        """Queue at least one entry; raises what refuses it. The future tells what became of it."""
        if self._end is not None:
            raise _again(self._end)
        if self._closing:
            raise TryAgain("the topic is closed here", topic=self._topic)
        assert payloads
        size = sum(map(len, payloads))
        if self._pending_size and self._pending_size + size > self._settings.pending_size_max:
            raise TooManyRequests(
                "too much is waiting to be stored in this topic",
                pending_size=self._pending_size,
                size_max=self._settings.pending_size_max,
            )
        future: asyncio.Future[list[Position]] = self._loop.create_future()
        add = _Add(payloads, size, future, self._loop.time() + self._settings.add_timeout_s)
        self._pending_size += size
        self._queue.append(add)
        self._pump_soon()
        return future

    def _pump_soon(self) -> None:
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Send what is queued."""
        self._pump_scheduled = False
        handle = self._handle
        while self._queue and not self._paused and self._failure is None and self._end is None:
            assert handle is not None
            adds: list[_Add] = []
            payloads: list[bytes] = []
            size = 0
            while self._queue and (not adds or size + self._queue[0].size <= GROUP_SIZE_MAX):
                add = self._queue.popleft()
                if add.future.done():  # its caller has left
                    self._pending_size -= add.size
                    continue
                add.sent = True
                adds.append(add)
                payloads.extend(add.payloads)
                size += add.size
            if not adds:
                continue
            group = _Group(self._next_entry_id, adds, len(payloads))
            self._next_entry_id += len(payloads)
            self._in_flight.append(group)
            self._spawn(self._send(handle, group, payloads))

    async def _send(self, handle: WriteHandle, group: _Group, payloads: list[bytes]) -> None:
        try:
            first = await handle.add_many(payloads)
        except BinderyError as error:
            self._ledger_failed(handle, error)
            return
        assert first == group.first, "the ledger numbers entries as we do"
        group.done = True
        if handle is not self._handle:
            return
        confirmed = False
        while self._in_flight and self._in_flight[0].done:
            self._confirm(self._in_flight.popleft())
            confirmed = True
        if confirmed:
            self._fences = 0
            self._changed.set()
            self._on_confirmed()
            self._roll_if_due()

    def _confirm(self, group: _Group) -> None:
        ledger_id = self._ledgers.current.ledger_id
        entry_id = group.first
        self._ledgers.grow(entries=group.count, size=sum(add.size for add in group.adds))
        self.entries_added += group.count
        for add in group.adds:
            positions = [Position(ledger_id, i) for i in range(entry_id, entry_id + len(add.payloads))]
            entry_id += len(add.payloads)
            self._cache.put_many(zip(positions, add.payloads, strict=True))
            self._pending_size -= add.size
            if not add.future.done():
                add.future.set_result(add.positions + positions if add.positions else positions)

    # --- moving on

    def _ledger_failed(self, handle: WriteHandle, error: BinderyError) -> None:
        if handle is not self._handle or self._end is not None or self._failure is not None:
            return
        self._failure = error
        self._changed.set()
        if isinstance(error, LostOwnership) and not self._ownership.is_possible:
            self.fence(self._taken_over())
            return
        log.warning("topic_ledger_failed", topic=self._topic, ledger_id=handle.ledger_id, error=str(error))
        self._switch()

    def roll_due(self) -> bool:
        """Whether the current ledger is full or old enough, and holds anything."""
        current, settings = self._ledgers.current, self._settings
        if self._paused or self._failure is not None or self._end is not None or not current.entries:
            return False
        age_s = self._loop.time() - self._opened_at
        full = current.entries >= settings.entries_max or current.size >= settings.size_max
        return (full and age_s >= settings.age_s_min) or age_s >= settings.age_s_max

    def _roll_if_due(self) -> None:
        if self.roll_due() and self._loop.time() >= self._roll_not_before:
            self._switch()

    def _watch_age(self) -> None:
        """Look again when the ledger gets old, or old enough to be rolled for its size."""
        if self._roll_timer is not None:
            self._roll_timer.cancel()
        if self._end is not None:
            return
        settings = self._settings
        age_s = self._loop.time() - self._opened_at
        wait_s = min(
            (limit - age_s for limit in (settings.age_s_min, settings.age_s_max) if limit > age_s), default=None
        )
        if wait_s is None:
            wait_s = settings.age_s_max
        self._roll_timer = self._loop.call_later(max(wait_s, 0.01), self._age_reached)

    def _age_reached(self) -> None:
        self._roll_if_due()
        self._watch_age()

    async def roll(self) -> None:
        """End the current ledger and start the next, whatever its age; nothing if it is empty."""
        if self._end is not None:
            raise _again(self._end)
        if self._switch_task is not None:
            await asyncio.wait([self._switch_task])
        if self._end is None and (self._ledgers.current.entries or self._in_flight or self._queue):
            self._switch()
            assert self._switch_task is not None
            await asyncio.wait([self._switch_task])
        if self._end is not None:
            raise _again(self._end)

    def _switch(self) -> None:
        if self._switch_task is None:
            self._switch_task = self._loop.create_task(self._move_on())
            self._tasks.add(self._switch_task)
            self._switch_task.add_done_callback(self._switched)
            self._watch_deadlines()

    def _switched(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._switch_task = None
        if self._expiry_timer is not None:
            self._expiry_timer.cancel()
        if not task.cancelled() and task.exception() is not None:
            log.error("topic_writer_broken", topic=self._topic, error=repr(task.exception()))
            self.fence(TopicFenced("the topic's writer is broken", topic=self._topic))
        elif self._failure is not None and self._end is None and not task.cancelled():
            self._switch()  # it failed after the switch had looked

    def _watch_deadlines(self) -> None:
        """While a switch is under way, let adds go in time, however long its calls take."""
        waiting = [add.deadline for group in self._in_flight for add in group.adds if not add.future.done()]
        if self._queue:
            waiting.append(self._queue[0].deadline)
        now = self._loop.time()
        wait_s = min(waiting, default=now + self._settings.add_timeout_s) - now  # nobody comes who may wait less
        self._expiry_timer = self._loop.call_later(max(wait_s, EXPIRY_PAUSE_S_MIN), self._deadline_reached)

    def _deadline_reached(self) -> None:
        if self._paused or self._failure is not None:
            self._expire(self._obstacle or TryAgain("no ledger can be written now", topic=self._topic))
        self._watch_deadlines()

    async def _move_on(self) -> None:
        prepared: WriteHandle | None = None
        try:
            if self._failure is None:
                try:
                    prepared = await self._create_ledger()
                except BinderyError as error:
                    if self._failure is None:
                        log.warning("topic_roll_postponed", topic=self._topic, error=str(error))
                        self._roll_not_before = self._loop.time() + ROLL_RETRY_S
                        return
            self._paused = True
            try:
                closed = await self._seal()
            except (Exception, asyncio.CancelledError):
                if prepared is not None:
                    self._unused.append((prepared, False))
                raise
            await self._go_on_behind(closed, prepared)
        except TopicFenced as error:
            await self._discard_unused()
            self.fence(error)
        except NoSuchLedger:
            await self._discard_unused()
            self.fence(TopicFenced("the topic's ledger was deleted", topic=self._topic))

    async def _seal(self) -> LedgerRecord:
        """Close the current ledger and settle what was in flight; its final record."""
        handle = self._handle
        assert handle is not None
        while self._in_flight and self._failure is None and self._end is None:
            self._changed.clear()
            await self._changed.wait()
        if self._end is not None:
            raise TopicFenced("the topic was lost", topic=self._topic)
        entries = size = 0
        if self._failure is None:
            try:
                async with limited(self._settings.operation_timeout_s, "close a ledger"):
                    metadata = await handle.close()
                entries, size = metadata.last_entry_id + 1, metadata.length
            except BinderyError as error:
                self._failure = error
        if self._failure is not None:
            if isinstance(self._failure, LostOwnership):
                await self._prove_ownership(self._failure)
            entries, size = await self._recover(handle)
        return LedgerRecord(ledger_id=handle.ledger_id, entries=entries, size=size, closed_ms=self._clock())

    async def _prove_ownership(self, lost: LostOwnership) -> None:
        """Return once it is certain that the topic is ours though its ledger was fenced or closed; else TopicFenced."""
        self._fences += 1
        pause_s = self._settings.retry_pause_s
        while True:
            try:
                is_ours = self._fences <= FENCES_MAX and await self._ownership.holds()
            except BinderyError as error:
                pause_s = await self._wait_to_retry(error, pause_s)
            else:
                break
        if not is_ours:
            raise self._taken_over() from lost

    def _taken_over(self) -> TopicFenced:
        return TopicFenced("another broker has taken the topic over", topic=self._topic)

    async def _recover(self, handle: WriteHandle) -> tuple[int, int]:
        """Let recovery decide what the failed ledger holds; entries and bytes."""
        await handle.abandon()
        pause_s = self._settings.retry_pause_s
        while True:
            try:
                async with limited(self._settings.operation_timeout_s, "recover a ledger"):
                    reader = await self._client.open(handle.ledger_id, recover=True)
            except NoSuchLedger:
                raise
            except BinderyError as error:
                pause_s = await self._wait_to_retry(error, pause_s)
            else:
                break
        entries = reader.last_add_confirmed + 1
        await self._on_recovered(reader)
        self._settle(entries)
        return entries, reader.metadata.length

    def _settle(self, entries: int) -> None:
        """Confirm what the closed ledger holds, queue the rest again, in order."""
        again: list[_Add] = []
        for group in self._in_flight:
            entry_id = group.first
            for add in group.adds:
                count = len(add.payloads)
                stored = min(max(entries - entry_id, 0), count)
                if stored:
                    self._confirm_part(add, first=entry_id, count=stored)
                if stored < count:
                    again.append(add)
                entry_id += count
        self._in_flight.clear()
        for add in reversed(again):
            add.sent = bool(add.positions)
            if add.future.done():  # its caller has left or was told that the outcome is unknown
                self._pending_size -= add.size
            else:
                self._queue.appendleft(add)
        self._changed.set()
        self._on_confirmed()

    def _confirm_part(self, add: _Add, *, first: int, count: int) -> None:
        """The first `count` of an add's entries are stored; the others are not."""
        ledger_id = self._ledgers.current.ledger_id
        stored = add.payloads[:count]
        positions = [Position(ledger_id, first + i) for i in range(count)]
        size = sum(map(len, stored))
        self._fences = 0
        self._ledgers.grow(entries=count, size=size)
        self.entries_added += count
        self._cache.put_many(zip(positions, stored, strict=True))
        add.positions += positions
        add.payloads = add.payloads[count:]
        add.size -= size
        self._pending_size -= size
        if not add.payloads and not add.future.done():
            add.future.set_result(add.positions)

    async def _go_on_behind(self, closed: LedgerRecord, prepared: WriteHandle | None) -> None:
        """Put the next ledger (`prepared`, else a new one) behind the closed one and send on."""
        assert closed.entries >= self._ledgers.current.entries, "acknowledged entries never vanish"
        kept = [closed] if closed.entries else []
        handle = prepared
        named = False
        """Whether the topic's znode may name it."""

        def successors(new: LedgerRecord) -> list[LedgerRecord]:
            nonlocal named
            named = True
            return [*list(self._ledgers)[:-1], *kept, new]

        pause_s = self._settings.retry_pause_s
        try:
            while True:
                try:
                    if handle is None:
                        handle = await self._create_ledger()
                    new = LedgerRecord(ledger_id=handle.ledger_id)
                    await self._store_ledgers(partial(successors, new))
                except TopicFenced:
                    named = False
                    raise
                except BinderyError as error:
                    named = named and not isinstance(error, TryAgain)
                    pause_s = await self._wait_to_retry(error, pause_s)
                else:
                    break
        except (Exception, asyncio.CancelledError):
            if handle is not None:
                self._unused.append((handle, named))
            raise
        self._use(handle)
        if not closed.entries:
            self._spawn(self._delete(closed.ledger_id))
        log.info("topic_ledger_started", topic=self._topic, ledger_id=new.ledger_id, behind=closed.ledger_id)

    def _use(self, handle: WriteHandle) -> None:
        self._handle = handle
        self._next_entry_id = 0
        self._opened_at = self._loop.time()
        self._failure = None
        self._obstacle = None
        self._paused = False
        self._watch_age()
        self._changed.set()
        self._pump_soon()

    async def _wait_to_retry(self, error: BinderyError, pause_s: float) -> float:
        """Sleep, let adds go that waited too long; the next pause."""
        log.warning("topic_writer_waits", topic=self._topic, pause_s=pause_s, error=str(error))
        self._obstacle = error
        await asyncio.sleep(pause_s)
        self._expire(error)
        if self._end is not None:
            raise TopicFenced("the topic was lost", topic=self._topic)
        return min(2 * pause_s, self._settings.retry_pause_s_max)

    def _expire(self, error: BinderyError) -> None:
        """Fail adds that are over their time; what they still wait for is `error`. What is in flight in a ledger that
        serves ends by the ledger's own limits."""
        now = self._loop.time()
        for group in self._in_flight if self._failure is not None else ():
            for add in group.adds:
                if add.deadline <= now and not add.future.done():
                    add.future.set_exception(_unknown(error))
        while self._queue and self._queue[0].deadline <= now:
            add = self._queue.popleft()
            self._pending_size -= add.size
            if not add.future.done():
                add.future.set_exception(_unknown(error) if add.sent else _not_stored(error))

    async def _create_ledger(self) -> WriteHandle:
        settings = self._settings
        async with limited(settings.operation_timeout_s, "create a ledger"):
            return await self._client.create(
                ensemble_size=settings.ensemble_size,
                write_quorum=settings.write_quorum,
                ack_quorum=settings.ack_quorum,
                custom=self._custom_metadata,
            )

    # --- ending

    def fence(self, error: TopicFenced) -> None:
        """The topic is lost: fail everything, for good. What was in flight may be stored."""
        if self._end is None:
            log.warning("topic_fenced", topic=self._topic, error=str(error))
            self._stop(error)
            self._on_fenced(error)

    def stop(self, error: BinderyError) -> None:
        """Fail everything with `error`, as a crash would: the ledger stays open for a recovery."""
        if self._end is None:
            self._stop(error)

    def _stop(self, error: BinderyError) -> None:
        self._end = error
        for timer in (self._roll_timer, self._expiry_timer):
            if timer is not None:
                timer.cancel()
        adds = [add for group in self._in_flight for add in group.adds] + list(self._queue)
        self._in_flight.clear()
        self._queue.clear()
        self._pending_size = 0
        for add in adds:
            if not add.future.done():
                lost = _unknown(error) if add.sent and not isinstance(error, TopicFenced) else _again(error)
                add.future.set_exception(lost)
        self._changed.set()
        if self._handle is not None:
            self._spawn(self._abandon(self._handle))

    async def close(self) -> None:
        """Complete what is pending (at most `add_timeout_s`), then close the ledger so that the next open need not
        recover it. Later adds fail with TryAgain."""
        closed = TryAgain("the topic is closed here", topic=self._topic)
        self._closing = True
        try:
            async with asyncio.timeout(self._settings.add_timeout_s):
                while self._end is None and (self._queue or self._in_flight or self._switch_task is not None):
                    self._changed.clear()
                    waiter = self._loop.create_task(self._changed.wait())
                    try:
                        waits: set[asyncio.Task[Any]] = {waiter}
                        if self._switch_task is not None:
                            waits.add(self._switch_task)
                        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        waiter.cancel()
        except TimeoutError:
            log.warning("topic_closed_with_adds_pending", topic=self._topic, adds=self.pending_adds)
        if self._switch_task is not None:
            self._switch_task.cancel()
            await asyncio.wait([self._switch_task])
        handle, healthy = self._handle, self._end is None and self._failure is None and not self._in_flight
        if healthy and handle is not None:
            self._handle = None
            self._stop(closed)
            try:
                async with limited(self._settings.operation_timeout_s, "close a ledger"):
                    await handle.close()
            except BinderyError as error:
                log.warning("topic_ledger_not_closed", topic=self._topic, error=str(error))
                await self._abandon(handle)
        elif self._end is None:
            self._stop(closed)
        await self.finished()

    async def finished(self) -> None:
        """Return once no task of this writer runs (or `operation_timeout_s` is over); after its end only."""
        if self._switch_task is not None:
            self._switch_task.cancel()
            await asyncio.wait([self._switch_task], timeout=self._settings.operation_timeout_s)
        await self._discard_unused()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._settings.operation_timeout_s)

    async def _discard_unused(self) -> None:
        """Give up ledgers of switches that ended without them; a crash deletes nothing."""
        crashed = self._end is not None and not self._closing and not isinstance(self._end, (TopicFenced, NoSuchTopic))
        while self._unused:
            handle, named = self._unused.pop()
            await self._discard(handle, delete=not named and not crashed)

    async def _abandon(self, handle: WriteHandle) -> None:
        try:
            await handle.abandon()
        except BinderyError as error:
            log.warning("topic_ledger_not_abandoned", topic=self._topic, error=str(error))

    async def _discard(self, handle: WriteHandle, *, delete: bool) -> None:
        """Give up a ledger that never held anything. `delete=False`: the topic's znode may name it."""
        await self._abandon(handle)
        if delete:
            await self._delete(handle.ledger_id)

    async def _delete(self, ledger_id: int) -> None:
        """Best effort: a ledger that stays behind costs its metadata only, as it is empty."""
        try:
            async with limited(self._settings.operation_timeout_s, "delete a ledger"):
                await self._client.delete(LedgerId(ledger_id))
        except BinderyError as error:
            log.warning("empty_ledger_not_deleted", topic=self._topic, ledger_id=ledger_id, error=str(error))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._spawned_done)

    def _spawned_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("topic_writer_broken", topic=self._topic, error=repr(error))
            self.fence(TopicFenced("the topic's writer is broken", topic=self._topic))


def _again(error: BinderyError) -> BinderyError:
    """The same error for another caller: a raised one collects the traces of all."""
    return type(error)(error.message, **error.facts)


def _unknown(cause: BinderyError) -> AddTimeout:
    return AddTimeout("whether the entries were stored is not known", cause=str(cause))


def _not_stored(cause: BinderyError) -> BinderyError:
    return _again(cause) if isinstance(cause, TryAgain) else MetadataUnavailable(cause.message, **cause.facts)
