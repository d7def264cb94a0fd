"""A subscription at work: the cursor that remembers, the dispatcher that hands out, the sessions that wait.

Flow. `receive` joins a session, lets the dispatcher hand out what is ready, else reads (one read at a time: what came
back first, then the next entries), else waits until an entry arrives, something comes back, or its time is over.
Nothing runs in the background: each call first lets the dispatcher and the sessions know the time, and a waiting call
wakes itself for the next deadline. `ack` makes the cursor durable before the dispatcher forgets.

Invariants: at most one read is under way; what is handed out is unacknowledged in the cursor as far as this broker
knows; the type changes only while nobody is connected.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from bindery_core.errors import BadRequest, BinderyError
from bindery_core.sources import MonotonicClock
from bindery_pulsar.message_codec import Message, publish_time_ms
from bindery_pulsar.message_id import MessageId, Position

from bindery_broker.dispatch.dispatcher import Dispatcher
from bindery_broker.dispatch.exclusive import ExclusiveDispatcher
from bindery_broker.dispatch.item import Delivery, DispatchLimits, MessageKey
from bindery_broker.dispatch.read_ahead import ReadAhead
from bindery_broker.dispatch.sessions import Session, Sessions
from bindery_broker.dispatch.shared import SharedDispatcher
from bindery_broker.errors import (
    ConsumerBusy,
    SubscriptionTypeConflict,
)
from bindery_broker.managed_ledger import BatchAck, ManagedCursor, ManagedLedger
from bindery_broker.subscriptions.reading import READ_BYTES_MAX, MessageReader, key_of

SubscriptionType = Literal["shared", "exclusive"]

READ_ENTRIES_MAX = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveRequest:
    """One call for messages; times in seconds."""

    consumer: str
    count_max: int
    bytes_max: int
    wait_s: float
    ack_timeout_s: float
    session_ttl_s: float
    request_id: str | None = None
    redeliver: bool = False


class Subscription:
    def __init__(
        self,
        cursor: ManagedCursor,
        ledger: ManagedLedger,
        *,
        partition: int,
        now: MonotonicClock,
        limits: DispatchLimits | None = None,
        read_ahead: ReadAhead | None = None,
        sessions_max: int = 1000,
    ) -> None:
        """`read_ahead`: shared by the broker's subscriptions."""
        self.name = cursor.name
        self.cursor = cursor
        self.type: SubscriptionType | None = None
        """None: nobody has consumed since the topic was loaded."""
        self.sessions = Sessions(sessions_max=sessions_max)
        self.messages_out = 0
        self.bytes_out = 0
        self.redeliveries = 0
        self._ledger = ledger
        self._now = now
        self._limits = limits or DispatchLimits()
        self._read_ahead = read_ahead or ReadAhead(self._limits.ready_bytes_max)
        self._dispatcher: Dispatcher[Message] = SharedDispatcher[Message](
            limits=self._limits, read_ahead=self._read_ahead
        )
        self._read_position = cursor.mark_delete
        self._rewind()
        self._read_lock = asyncio.Lock()
        self._waiters: list[asyncio.Future[None]] = []
        self._requests_open: dict[tuple[str, str], asyncio.Future[None]] = {}
        self._reader = MessageReader(cursor, ledger, partition=partition)
        self._closed: BinderyError | None = None
        self._draining = False
        self._remove_listener = ledger.on_new_entries(self._wake)
        self._blocked_by_limit = False
        self.tags = self._reader.tags

    @property
    def dispatcher(self) -> Dispatcher[Message]:
        return self._dispatcher

    @property
    def read_position(self) -> Position:
        return self._read_position

    @property
    def stuck(self) -> str | None:
        """Why the entry at the read position cannot be read, if that is so."""
        return self._reader.stuck

    # -- consuming -----------------------------------------------------------------------------------------------

    def join(self, consumer: str, kind: SubscriptionType) -> None:
        """Check that `consumer` may consume as `kind`, and become that kind if nobody is connected.

        Raises ConsumerBusy (naming the holder) or SubscriptionTypeConflict.
        """
        self._tick()
        others = [session.consumer for session in self.sessions if session.consumer != consumer]
        if kind != self.type:
            if others:
                raise SubscriptionTypeConflict(
                    f"the subscription is consumed as {self.type}",
                    subscription=self.name, type=self.type, consumers=len(others),
                )  # fmt: skip
            self._become(kind)
        elif kind == "exclusive" and others:
            raise ConsumerBusy("another consumer holds the subscription", subscription=self.name, consumer=others[0])

    async def receive(
        self, request: ReceiveRequest, *, kind: SubscriptionType, gone: Callable[[], bool] | None = None
    ) -> tuple[list[Delivery[Message]], Session]:
        """Messages for the consumer, leased to it; empty when there are none within the time.

        `gone`: whether the client went away meanwhile; it is then given nothing (see `wake_all`).
        """
        self._check_open()
        self.join(request.consumer, kind)
        if request.redeliver and self._dispatcher.release(request.consumer):
            self._wake()
        session = self.sessions.begin_call(request.consumer, ttl_s=request.session_ttl_s, now=self._now())
        try:
            deliveries = await self._receive(request, session, gone)
        finally:
            self.sessions.end_call(session, now=self._now())
        session.message_count += len(deliveries)
        self.messages_out += len(deliveries)
        for delivery in deliveries:
            self.bytes_out += len(delivery.message.payload)
            self.redeliveries += delivery.redelivery_count > 0
        return deliveries, session

    async def _receive(
        self, request: ReceiveRequest, session: Session, gone: Callable[[], bool] | None
    ) -> list[Delivery[Message]]:
        deadline = self._now() + request.wait_s
        if request.request_id is None:
            return await self._take(request, session, deadline, gone)
        key = (request.consumer, request.request_id)
        while (running := self._requests_open.get(key)) is not None:  # the first call is still waiting: let it end
            timeout = deadline - self._now()
            if timeout <= 0:
                return []
            await asyncio.wait({running}, timeout=timeout)
        remembered = session.remembered.get(request.request_id)
        if remembered is not None:
            repeated = await self._repeat(request, remembered)
            if repeated:
                return repeated
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._requests_open[key] = done
        try:
            deliveries = await self._take(request, session, deadline, gone)
            if deliveries:
                session.remember(request.request_id, tuple(delivery.key for delivery in deliveries))
            return deliveries
        finally:
            del self._requests_open[key]
            done.set_result(None)

    async def _take(
        self, request: ReceiveRequest, session: Session, deadline: float, gone: Callable[[], bool] | None
    ) -> list[Delivery[Message]]:
        while True:
            self._check_open()
            self._tick()
            if gone is not None and gone():
                return []
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)  # before the read, so that nothing can come in between unnoticed
            try:
                failure: BinderyError | None = None
                looked = False
                if self._wants_more(request.count_max):
                    try:
                        looked = await self._fill(request)
                    except BinderyError as error:
                        failure = error
                if self.sessions.get(request.consumer) is not session:  # it left: what it took would be nobody's
                    return []
                taken = self._dispatcher.take(
                    request.consumer, count_max=request.count_max, bytes_max=request.bytes_max,
                    ack_timeout_s=request.ack_timeout_s, now=self._now(),
                )  # fmt: skip
                if taken:
                    return taken
                if failure is not None:
                    raise failure
                if looked:
                    continue
                if self._draining:
                    return []
                held = self._dispatcher.leases.count_of(request.consumer)
                if self._dispatcher.room() == 0 or held >= self._limits.unacked_per_consumer_max:
                    self._blocked_by_limit = True
                until = min(deadline, self._dispatcher.next_deadline() or deadline)
                timeout = until - self._now()
                if timeout > 0:
                    await asyncio.wait({waiter}, timeout=timeout)
                elif until >= deadline:
                    return []
            finally:
                if not waiter.done():
                    waiter.cancel()
                    self._waiters.remove(waiter)

    def _wants_more(self, count: int) -> bool:
        """Whether to read before handing `count` messages out. What came back is read first, so that it goes first."""
        return self._dispatcher.replayable() or self._dispatcher.ready_count < count

    async def _repeat(self, request: ReceiveRequest, keys: Sequence[MessageKey]) -> list[Delivery[Message]]:
        """The messages of an earlier answer that the consumer still holds, their leases begun anew."""
        items = {item.key: item for item in await self._reader.load(keys)}
        lease, held = self._dispatcher.renew(
            request.consumer, [key for key in keys if key in items],
            ack_timeout_s=request.ack_timeout_s, now=self._now(),
        )  # fmt: skip
        return [Delivery(key, items[key].message, lease, self._dispatcher.redelivery_count(key)) for key in held]

    # -- coming back ---------------------------------------------------------------------------------------------

    async def ack(self, ids: Sequence[MessageId], *, consumer: str | None = None) -> None:
        """Acknowledge messages; durable on return. Raises UnknownMessages, nothing done, if one of `ids` is none."""
        self._check_open()
        positions, batches = await self._reader.resolve(ids)
        self._touch(consumer)
        dispatcher = self._dispatcher
        generation = dispatcher.generation
        keys = dispatcher.begin_ack([key_of(message_id) for message_id in ids])
        try:
            finished = await self.cursor.ack_many(positions, batches=batches)
        except BaseException:
            self._dispatcher.fail_ack(keys)
            self._wake()
            raise
        self._dispatcher.finish_ack(keys)
        if dispatcher is not self._dispatcher or generation != dispatcher.generation:  # they may have been read anew
            self._dispatcher.finish_ack(self._dispatcher.begin_ack([key_of(message_id) for message_id in ids]))
        for position in finished:
            self._reader.batch_sizes.pop(position, None)
        for batch in batches:  # a repetition finishes nothing, and looked up the size again
            if self.cursor.is_acked(batch.position):
                self._reader.batch_sizes.pop(batch.position, None)
        self._after_ack()

    async def ack_cumulative(self, last: MessageId, *, consumer: str | None = None) -> None:
        """Acknowledge everything up to and including `last`, durably. Exclusive subscriptions only."""
        self._check_open()
        if not self._dispatcher.in_order:
            raise BadRequest("cumulative acknowledgement needs an exclusive consumer", subscription=self.name)
        positions, batches = await self._reader.resolve([last])
        dispatcher = self._dispatcher
        if not dispatcher.in_order:  # the type changed meanwhile
            raise BadRequest("cumulative acknowledgement needs an exclusive consumer", subscription=self.name)
        self._touch(consumer)
        generation = dispatcher.generation
        keys = dispatcher.begin_cumulative_ack(key_of(last))
        batch = batches[0]._replace(indexes=range(last.batch_index + 1)) if batches else None
        try:
            await self.cursor.ack_cumulative(positions[0] if positions else last.position, batch=batch)
        except BaseException:
            dispatcher.fail_ack(keys)
            self._wake()
            raise
        dispatcher.finish_ack(keys)
        if dispatcher is self._dispatcher and generation != dispatcher.generation:  # they may have been read anew
            dispatcher.finish_ack(dispatcher.begin_cumulative_ack(key_of(last)))
        self._reader.forget_acked()
        self._after_ack()

    def nack(self, ids: Sequence[MessageId], *, delay_s: float, consumer: str | None = None) -> list[MessageKey]:
        """Return held messages for redelivery after `delay_s`; answers those that were held."""
        self._check_open()
        self._tick()
        self._touch(consumer)
        keys = [key_of(message_id) for message_id in ids]
        returned = self._dispatcher.nack(keys, delay_s=delay_s, now=self._now(), consumer=consumer)
        if returned:
            self._wake()
        return returned

    async def seek(self, target: MessageId | Position | int) -> Position:
        """Go to a message, to EARLIEST or LATEST, or to the first entry published at a time (ms since 1970) or later.

        Returns the position that comes next. After an error messages go on where they were, and what is out comes
        again; errors as `ManagedCursor.seek`."""
        self._check_open()
        passed: BatchAck | None = None
        if isinstance(target, int):
            at = target
            position = await self._ledger.find_first(lambda entry: publish_time_ms(entry) >= at)
        elif isinstance(target, MessageId):
            _, batches = await self._reader.resolve([target])
            position = target.position
            if batches and target.batch_index > 0:  # no batch: it was trimmed, and what follows it comes next
                passed = batches[0]._replace(indexes=range(target.batch_index))
        else:
            position = target
        async with self._read_lock:
            try:
                return await self.cursor.seek(position, passed=passed)
            finally:  # what is out was handed out before, whatever became of the seek
                self._dispatcher.reset()
                self._reader.batch_sizes.clear()
                for session in self.sessions:
                    session.remembered.clear()
                self._reader.stuck = None
                self._rewind()
                self._wake()

    def leave(self, consumer: str) -> bool:
        """End a consumer's session; what it holds goes to others. False: there was none."""
        self._check_open()
        self._tick()
        known = self.sessions.remove(consumer) is not None
        if self._dispatcher.release(consumer) or known:
            self._wake()
        self._rest()
        return known

    # -- life ----------------------------------------------------------------------------------------------------

    def close(self, reason: BinderyError) -> None:
        """Let no one in any more; waiting calls fail with `reason`. Idempotent."""
        if self._closed is None:
            self._closed = reason
            self._remove_listener()
            self._wake()

    def drain(self) -> None:
        """The broker stops: nobody waits any more."""
        self._draining = True
        self._wake()

    def wake_all(self) -> None:
        """Have each waiting call look again, at `gone` too."""
        self._wake()

    def tick(self) -> None:
        """Let leases and sessions that are over end now; for those who look without consuming."""
        self._tick()

    # -- reading -------------------------------------------------------------------------------------------------

    async def _fill(self, request: ReceiveRequest) -> bool:
        """Read what can be handed out next. True when the caller should look again."""
        dispatcher = self._dispatcher
        ready_before = dispatcher.ready_count
        async with self._read_lock:
            self._check_open()
            if dispatcher is not self._dispatcher or dispatcher.ready_count > ready_before:  # another call read
                return True
            reserved = self._read_ahead.reserve(READ_BYTES_MAX)
            try:
                return await self._read_next(dispatcher, request, ahead=reserved > 0)
            finally:
                self._read_ahead.change(-reserved)

    async def _read_next(self, dispatcher: Dispatcher[Message], request: ReceiveRequest, *, ahead: bool) -> bool:
        """`ahead`: more than `request` asks for may be read."""
        keys = dispatcher.replay(READ_ENTRIES_MAX, entries_max=None if ahead else 1)
        if keys:
            await self._replay(dispatcher, keys)
            return True
        if dispatcher.rewind_wanted:
            self._rewind()
            dispatcher.rewound()
        if dispatcher.paused_until is not None and self._now() < dispatcher.paused_until:
            return False
        room = dispatcher.room(asked=None if ahead else request.count_max)
        size_max = READ_BYTES_MAX if ahead else min(READ_BYTES_MAX, request.bytes_max)
        return room > 0 and await self._read_on(dispatcher, room, size_max=size_max)

    async def _read_on(self, dispatcher: Dispatcher[Message], room: int, *, size_max: int) -> bool:
        if self._read_position > self._ledger.last_confirmed:
            return False
        generation = dispatcher.generation
        read = await self.cursor.read_unacked(
            self._read_position, entries_max=min(room, READ_ENTRIES_MAX), size_max=size_max
        )
        if dispatcher is not self._dispatcher or generation != dispatcher.generation:
            return True
        consumed: list[Position] = []
        parts: list[BatchAck] = []
        began_at, ends_at = self._read_position, read.next_position
        for index, (position, payload, remaining) in enumerate(read.entries):
            items = self._reader.decode(position, payload, remaining, stop=index > 0)
            if items is None:  # deliver what came before; the next read begins with it and says why
                ends_at = position
                break
            passed = self._reader.passed(items)
            if passed:
                dispatcher.offer(passed, generation=generation)
            if not passed:  # filtered as a whole, or a marker without any message: it counts as consumed
                consumed.append(position)
            elif len(passed) < len(items):
                kept = {item.key for item in passed}
                indexes = [item.key[2] for item in items if item.key not in kept]
                parts.append(BatchAck(position, self._reader.batch_sizes[position], indexes))
        self._read_position = ends_at
        if consumed or parts:
            for finished in await self.cursor.ack_many(consumed, batches=parts):
                self._reader.batch_sizes.pop(finished, None)
        return bool(read.entries) or began_at != ends_at

    async def _replay(self, dispatcher: Dispatcher[Message], keys: Sequence[MessageKey]) -> None:
        generation = dispatcher.generation
        try:
            items = await self._reader.load(keys)
        except BaseException:
            dispatcher.give_back(keys)
            raise
        dispatcher.offer_again(items, generation=generation)
        missing = set(keys).difference(item.key for item in items)
        if missing and generation == dispatcher.generation:  # acknowledged or trimmed since
            dispatcher.finish_ack(dispatcher.begin_ack(missing))

    # -- helpers -------------------------------------------------------------------------------------------------

    def _become(self, kind: SubscriptionType) -> None:
        if self.type is not None:
            self._dispatcher.reset()
        self.type = kind
        self._dispatcher = (
            SharedDispatcher[Message](limits=self._limits, read_ahead=self._read_ahead)
            if kind == "shared"
            else ExclusiveDispatcher[Message](limits=self._limits, read_ahead=self._read_ahead)
        )
        self._reader.batch_sizes.clear()
        self._rewind()

    def _rewind(self) -> None:
        self._read_position = self._ledger.next_position(self.cursor.mark_delete)

    def _tick(self) -> None:
        now = self._now()
        dispatcher = self._dispatcher
        came_back = dispatcher.tick(now=now)
        for consumer in self.sessions.expire(now=now, leases_end_at=dispatcher.leases.last_deadline_of):
            came_back += dispatcher.release(consumer)
        if came_back:
            self._wake()
        self._rest()

    def _rest(self) -> None:
        """While nobody is connected nothing is kept at hand: it is read anew for whoever comes."""
        if len(self.sessions) or self._read_lock.locked():
            return
        first = self._dispatcher.put_down()
        if first is not None:
            self._read_position = min(self._read_position, Position(first[0], first[1]))

    def _touch(self, consumer: str | None) -> None:
        if consumer is not None:
            self.sessions.touch(consumer, now=self._now())

    def _after_ack(self) -> None:
        if self._blocked_by_limit:
            self._blocked_by_limit = False
            self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _check_open(self) -> None:
        if self._closed is not None:
            raise type(self._closed)(self._closed.message, **self._closed.facts)
