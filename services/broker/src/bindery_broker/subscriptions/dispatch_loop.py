"""Run the dispatcher of a subscription: read for it, push its messages to calls that wait, pass the time to it.

A call that finds enough ready messages takes them at once. Otherwise it becomes a demand, which waits until messages
are pushed to it, its client has gone, or its time is over. One task reads for all demands (returned messages first,
then the next entries) as long as there is something to read for them; it starts again when an entry arrives or a
message is returned. Which demand gets the next message is the dispatcher's decision (`taker`); a message that arrives
wakes only the call that gets it. Each call first passes the present time to the dispatcher and the sessions; while
demands wait, a timer does so at the next deadline. Another timer puts the ready messages down when no call has been in
progress for IDLE_S: a consumer that has gone without leaving must not take the room of others until its session ends.
At the end of a call, they are put down if all subscriptions together hold too many. They are read again when a call
needs them.

Invariants: at most one read is in progress; a demand is served, fails, or ends exactly once; the dispatcher that is
replaced is reset, so that reads and acknowledgements in progress recognize it by its generation; a consumer that the
dispatcher knows has a session.
"""

import asyncio
import functools
import math
from collections.abc import Awaitable, Callable, Sequence
from operator import itemgetter
from typing import Final

import structlog
from bindery_core.errors import BinderyError, TooManyRequests, TryAgain
from bindery_core.sources import MonotonicClock
from bindery_pulsar.entry_size import ENTRY_SIZE_MAX

from bindery_broker.dispatch.consumers import Consumer
from bindery_broker.dispatch.dispatcher import CountsOf, Dispatcher, Redelivered
from bindery_broker.dispatch.item import Delivery, DispatchLimits, MessageRef
from bindery_broker.dispatch.key_shared import AUTO_SPLIT, KeySharedDispatcher, KeySharedMode
from bindery_broker.dispatch.read_ahead import ReadAhead
from bindery_broker.dispatch.sessions import Session, Sessions
from bindery_broker.dispatch.shared import SharedDispatcher
from bindery_broker.dispatch.single_active import PickActive, SingleActiveDispatcher, first_of
from bindery_broker.errors import RESPONSES_FULL, ResponsesFull
from bindery_broker.limits.rate_limit import RateLimit
from bindery_broker.managed_ledger import WallClock
from bindery_broker.subscriptions.consumer import ReceiveCall, ReceiveRequest, SubscriptionType
from bindery_broker.subscriptions.decoding import RoomNeeded
from bindery_broker.subscriptions.reading import (
    READ_BYTES_MAX,
    READ_MESSAGES_MAX,
    REPLAY_ENTRIES_MAX,
    STORED_BYTES_MAX,
    MessageReader,
    Messages,
    messages_of,
)

IDLE_S: Final = 10.0
"""Seconds without a call after which the messages that were read ahead are put down. Reading them again costs less than
it takes to process as many."""
DELAYS_STORED_S: Final = 1.0
"""Minimum seconds between two writes of the index of delayed messages. What was added since is read again after
a crash."""
BEFORE_READ_S: Final = 5.0
"""Seconds after which calls whose time is over no longer wait for what precedes a read: the end of a move to another
topic. Usually that ends, or fails, before."""
DUE_RETRY_S: Final = 0.05
"""Seconds after which messages that are due, and could not be delivered, are looked for again."""
DUE_MAX: Final = 1_000
"""Maximum number of delayed messages that become due at a time."""
RATE_PAUSE_S: Final = 0.02
"""Seconds that a call waits beyond the end of a debt of a rate, so that it gets several messages at a time."""
KEYS_KEPT_S: Final = 1.0
"""Seconds during which a consumer that shares keys keeps its share without a call and without messages. Then the keys
belong to others until its next call, so that a client that has died does not hold them until its session ends."""

log = structlog.get_logger()

Deliveries = list[Delivery[Messages]]
Record = Callable[[Sequence[Redelivered]], Awaitable[None]]


class _NoRoom(Exception):
    """Nothing can be read, because its `size` bytes would exceed those of all responses."""

    def __init__(self, size: int) -> None:
        super().__init__(f"{size} bytes do not fit into the responses")
        self.size = size


class _Demand:
    """A call that waits for messages."""

    __slots__ = ("after_pass", "call", "granted", "is_over", "result")

    def __init__(self, call: ReceiveCall, *, after_pass: int) -> None:
        self.call = call
        self.after_pass = after_pass
        """Number of the pass that had begun before; a later one looks for messages for this demand."""
        self.is_over = False
        """Whether the time of the call is over: the demand ends with the pass in progress."""
        self.result: asyncio.Future[Deliveries] = asyncio.get_running_loop().create_future()
        self.granted: asyncio.Future[None] | None = None
        """Completed when there is room for the messages in the responses; None: the demand does not wait for room."""

    @property
    def consumer(self) -> Consumer:
        return self.call.session.consumer


class DispatchLoop:
    """Owns the dispatcher, the demands, and the task that reads for them."""

    __slots__ = (
        "__dict__",
        "_calls_open",
        "_clock",
        "_closed",
        "_counts_of",
        "_deadline",
        "_deadline_at",
        "_delays_lock",
        "_delays_stored_at",
        "_demands",
        "_dispatcher",
        "_ending_overdue",
        "_idle_check",
        "_is_blocked_by_limit",
        "_is_draining",
        "_keys_checked_at",
        "_last_call_at",
        "_limits",
        "_members",
        "_must_look_again",
        "_now",
        "_parked",
        "_pass",
        "_pick_active",
        "_rates",
        "_read_ahead",
        "_reader",
        "_reading",
        "_record",
        "_sessions",
        "_storing",
        "before_read",
        "key_shared",
        "read_lock",
        "resets",
        "type",
    )

    def __init__(
        self,
        reader: MessageReader,
        sessions: Sessions,
        *,
        limits: DispatchLimits,
        read_ahead: ReadAhead,
        now: MonotonicClock,
        clock: WallClock,
        counts_of: CountsOf,
        record: Record,
        pick_active: PickActive = first_of,
        rates: Callable[[], Sequence[RateLimit]] = lambda: (),
    ) -> None:
        """`record`: stores redelivery counts, which `counts_of` then returns. `pick_active`: for failover. `rates`: the
        limits of dispatching in force."""
        self.type: SubscriptionType | None = None
        """Type of the subscription; None: no consumer has connected since the topic was loaded."""
        self.key_shared = KeySharedMode()
        self.read_lock = asyncio.Lock()
        """Held during a read, and while the cursor is moved."""
        self.before_read: Callable[[], Awaitable[None] | None] | None = None
        """Called before each read, and awaited if it returns something. If that raises, nothing is read, and the calls
        that wait fail."""
        self.resets = 0
        """Number of times that the cursor was moved: what was held or delivered before does not count any more."""
        self._reader = reader
        self._sessions = sessions
        self._limits = limits
        self._read_ahead = read_ahead
        self._now = now
        self._clock = clock
        self._counts_of = counts_of
        self._record = record
        self._pick_active = pick_active
        self._rates = rates
        self._dispatcher: Dispatcher[Messages] = SharedDispatcher(
            limits=limits, read_ahead=read_ahead, counts_of=counts_of
        )
        self._members: dict[Consumer, None] = {}
        """Consumers that the dispatcher knows."""
        self._demands: dict[Consumer, dict[_Demand, None]] = {}
        """Demands that can be served, by consumer; consumers and demands in the order in which they are served."""
        self._parked: dict[_Demand, None] = {}
        """Demands that wait for room in the responses."""
        self._reading: asyncio.Task[None] | None = None
        self._must_look_again = False
        """Whether something may have become readable since the task that reads looked last."""
        self._pass = 0
        """Number of the last pass over the demands that has begun."""
        self._is_blocked_by_limit = False
        """Whether a demand waits because a limit of unacknowledged messages is reached."""
        self._deadline: asyncio.TimerHandle | None = None
        self._deadline_at = math.inf
        """When `_deadline` calls `_look_again`; monotonic seconds."""
        self._storing: asyncio.Task[None] | None = None
        """Stores the index of delayed messages."""
        self._delays_lock = asyncio.Lock()
        self._delays_stored_at = 0.0
        """When the index may be stored again; monotonic seconds."""
        self._ending_overdue: asyncio.TimerHandle
        """Calls `_end_overdue` while `before_read` is awaited."""
        self._keys_checked_at = 0.0
        """When idle consumers are looked for again; monotonic seconds."""
        self._calls_open = 0
        self._last_call_at = 0.0
        """When the last call ended; monotonic seconds."""
        self._idle_check: asyncio.TimerHandle | None = None
        self._closed: BinderyError | None = None
        self._is_draining = False
        self._moving: BinderyError | None = None
        """The error of calls that would wait, because the topic moves to another broker."""

    @property
    def dispatcher(self) -> Dispatcher[Messages]:
        return self._dispatcher

    @property
    def is_draining(self) -> bool:
        """Whether the broker stops, so that no call may wait."""
        return self._is_draining

    @property
    def demands_count(self) -> int:
        """Number of calls that wait."""
        return sum(map(len, self._demands.values())) + len(self._parked)

    def change_type(self, kind: SubscriptionType, *, key_shared: KeySharedMode = AUTO_SPLIT) -> None:
        """Replace the dispatcher. No other consumer may be connected."""
        uncounted = list(self._dispatcher.redelivered)
        self._dispatcher.reset()
        self._members.clear()
        self.type = kind
        self.key_shared = key_shared
        limits, read_ahead, counts_of = self._limits, self._read_ahead, self._counts_of
        if kind == "shared":
            self._dispatcher = SharedDispatcher(limits=limits, read_ahead=read_ahead, counts_of=counts_of)
        elif kind == "key_shared":
            self._dispatcher = KeySharedDispatcher(
                limits=limits, read_ahead=read_ahead, counts_of=counts_of, mode=key_shared
            )
        else:
            pick_active = self._pick_active if kind == "failover" else first_of
            self._dispatcher = SingleActiveDispatcher(
                limits=limits, read_ahead=read_ahead, counts_of=counts_of, pick_active=pick_active
            )
        self._dispatcher.redelivered.extend(uncounted)
        self._reader.batch_sizes.clear()
        self._reader.rewind()

    def restart(self) -> None:
        """Forget what was delivered and read, and continue after the cursor's position. Call it under `read_lock`."""
        self.resets += 1
        self._dispatcher.reset()
        self._reader.batch_sizes.clear()
        self._reader.clear_delays()
        self._reader.stuck = None
        self._reader.rewind()
        self.wake()

    # -- consumers -----------------------------------------------------------------------------------------------

    def admit(self, consumer: Consumer) -> None:
        """Let the dispatcher know a consumer. Raises the errors of `join` of its dispatcher."""
        if consumer not in self._members:
            self._dispatcher.join(consumer)
            self._members[consumer] = None

    @property
    def members(self) -> frozenset[Consumer]:
        """The consumers that the dispatcher knows."""
        return frozenset(self._members)

    def knows(self, consumer: Consumer) -> bool:
        return consumer in self._members

    def dismiss(self, consumer: Consumer) -> int:
        """The consumer has left: return what it holds, and end its calls. Returns the number of messages it held."""
        for demand in [*self._demands.get(consumer, ()), *(one for one in self._parked if one.consumer is consumer)]:
            self._settle(demand, [])
        return self._remove_member(consumer)

    def _remove_member(self, consumer: Consumer) -> int:
        if consumer not in self._members:
            return 0
        del self._members[consumer]
        count = self._dispatcher.leave(consumer)
        self.wake()
        return count

    # -- calls ---------------------------------------------------------------------------------------------------

    async def take(self, call: ReceiveCall) -> Deliveries:
        """Return messages, leased to the consumer; none if there are none before the deadline."""
        self._calls_open += 1
        try:
            return await self._take(call)
        finally:
            self._calls_open -= 1
            self._last_call_at = self._now()
            self._put_down_if_over()
            self._check_idle_later(IDLE_S)

    async def _take(self, call: ReceiveCall) -> Deliveries:
        self.check_open()
        self.tick()
        consumer = call.session.consumer
        if (call.client is not None and call.client.is_gone) or self._has_left(call):
            return []
        self.admit(consumer)
        dispatcher = self._dispatcher
        if (
            not self._demands
            and not dispatcher.replayable()
            and dispatcher.ready_count >= call.request.count_max
            and dispatcher.taker((consumer,), now=self._now()) is consumer
        ):  # most calls
            taken, _ = self._lease(call)
            if taken:
                return taken
        if self._moving is not None:
            raise _copy(self._moving)
        demand = _Demand(call, after_pass=self._pass)
        self._demands.setdefault(consumer, {})[demand] = None
        try:
            self._read_soon()
            taken = await self._wait(demand)
        except asyncio.CancelledError:
            if demand.result.done() and not demand.result.cancelled() and demand.result.exception() is None:
                self.hand_back(consumer, demand.result.result())
            raise
        finally:
            self._remove(demand)
        if (call.client is not None and call.client.is_gone) or self._has_left(call):
            self.hand_back(consumer, taken)
            taken = []
        if not taken:
            call.charge.release()
        return taken

    async def _wait(self, demand: _Demand) -> Deliveries:
        """Return when the demand is served or has ended. Raises the error with which it fails."""
        call = demand.call
        if call.client is not None:
            call.client.begin_wait(functools.partial(self._settle, demand, []))
        left_s = call.deadline - self._now()
        timer = asyncio.get_running_loop().call_later(left_s, self._expire, demand) if left_s > 0 else None
        try:
            return await demand.result
        finally:
            if call.client is not None:
                call.client.waited()
            if timer is not None:
                timer.cancel()

    def _has_left(self, call: ReceiveCall) -> bool:
        return self._sessions.get(call.request.consumer) is not call.session

    def _expire(self, demand: _Demand) -> None:
        """The time of a call is over. If a pass is in progress, its end decides."""
        demand.is_over = True
        if demand in self._parked:
            self._fail(demand, ResponsesFull(RESPONSES_FULL))
        elif self._reading is None:
            self._settle(demand, [])

    def _settle(self, demand: _Demand, taken: Deliveries) -> None:
        if not demand.result.done():
            demand.result.set_result(taken)
        self._remove(demand)

    def _fail(self, demand: _Demand, error: BaseException) -> None:
        if not demand.result.done():
            demand.result.set_exception(error)
        self._remove(demand)

    def _remove(self, demand: _Demand) -> None:
        """The demand no longer waits. The consumer's next one waits after those of others."""
        consumer = demand.consumer
        demands = self._demands.get(consumer)
        if demands is not None and demand in demands:
            del self._demands[consumer]
            del demands[demand]
            if demands:
                self._demands[consumer] = demands
        self._parked.pop(demand, None)
        if demand.granted is not None:
            demand.granted.cancel()
            demand.granted = None

    def hand_back(self, consumer: Consumer, taken: Sequence[Delivery[Messages] | MessageRef]) -> None:
        """Return messages whose client has gone before it got them."""
        if taken and consumer in self._members:
            self._dispatcher.hand_back(consumer, [MessageRef(one.position, one.bits) for one in taken])
            self.wake()

    def set_limits(self, limits: DispatchLimits) -> None:
        """Replace the limits, also those of the present dispatcher."""
        self._limits = self._dispatcher.limits = limits
        self.wake()

    def throttle(self) -> tuple[float, RateLimit | None]:
        """Return the seconds until a message may be delivered, and the limit of the rate that is exceeded."""
        now = self._now()
        found = max(((limit.wait_s(now), limit) for limit in self._rates()), key=itemgetter(0), default=(0.0, None))
        return found if found[0] > 0 else (0.0, None)

    def _lease(self, call: ReceiveCall) -> tuple[Deliveries, int]:
        """Lease ready messages, whose bytes the call's charge then holds. Return them, or the bytes that do not fit."""
        request, charge = call.request, call.charge
        rates, now = self._rates(), self._now()
        count_max = request.count_max
        for limit in rates:
            if limit.wait_s(now) > 0:
                return [], 0
            count_max = min(count_max, limit.messages_max(now) or count_max)
        consumer = call.session.consumer
        next_size = self._dispatcher.next_size(consumer)
        if not next_size:
            return [], 0
        room = charge.room(least=next_size, most=max(next_size, request.bytes_max))
        if not room:
            return [], next_size
        before = self._dispatcher.leases.bytes_held
        taken = self._dispatcher.take(
            consumer,
            count_max=count_max,
            bytes_max=min(room, request.bytes_max),
            lease_s=request.ack_timeout_s,
            now=self._now(),
            alone_from=None if request.dead_letters is None else request.dead_letters.max_redeliver,
        )
        if taken:
            size = self._dispatcher.leases.bytes_held - before
            charge.keep(size)
            if rates:
                count = sum(len(messages_of(one)) for one in taken)
                for limit in rates:
                    limit.take(count, size, now)
        return taken, 0

    def wake(self) -> None:
        """Look again for messages of those that wait: an entry has arrived, or messages were returned."""
        if self._demands:
            self._read_soon()

    def wake_blocked(self) -> None:
        """Messages were acknowledged: look again if that may let somebody get messages."""
        if self._demands and (self._is_blocked_by_limit or self._dispatcher.hash_of is not None):
            self._read_soon()

    # -- demands -------------------------------------------------------------------------------------------------

    def _push(self, reader: _Demand | None) -> bool:
        """Serve the demands whose turn it is. Returns whether any was served, or waits for room now.

        `reader`: the demand for which the last read was made; others are served only if enough messages are ready,
        because more can be read for them. None: nothing more can be read.
        """
        pushed = False
        while self._demands:
            consumer = self._dispatcher.taker(self._demands, now=self._now())
            if consumer is None:
                break
            demand = next(iter(self._demands[consumer]))
            if demand.result.done():  # cancelled: its call has not run since
                self._remove(demand)
                continue
            count_max = demand.call.request.count_max
            if reader is not None and demand is not reader and self._dispatcher.ready_count < count_max:
                break
            taken, missing_size = self._lease(demand.call)
            if taken:
                self._settle(demand, taken)
            elif missing_size:
                self._park(demand, missing_size)
            else:
                break
            pushed = True
        return pushed

    def _park(self, demand: _Demand, least: int) -> None:
        """Let the demand wait until the responses have room for `least` bytes. It fails at its deadline."""
        call = demand.call
        self._remove(demand)
        call.charge.release()
        if self._is_draining:
            self._settle(demand, [])
            return
        if call.deadline <= self._now():
            self._fail(demand, ResponsesFull(RESPONSES_FULL))
            return
        self._put_down_if_over()
        self._parked[demand] = None
        demand.granted = call.charge.wait(least=least, most=max(least, call.request.bytes_max))
        demand.granted.add_done_callback(functools.partial(self._unpark, demand))

    def _unpark(self, demand: _Demand, granted: "asyncio.Future[None]") -> None:
        if granted.cancelled() or demand not in self._parked:
            return
        del self._parked[demand]
        demand.granted = None
        demand.after_pass = self._pass
        consumers = self._demands.pop(demand.consumer, {})
        self._demands = {demand.consumer: {demand: None, **consumers}, **self._demands}
        self._read_soon()

    async def wait_for_room(self, call: ReceiveCall, *, least: int) -> None:
        """Return when `call.charge` holds `least` bytes, or when the client of the call has gone.

        Raises ResponsesFull at the deadline of the call, or if the broker stops. The charge must hold nothing.
        """
        if self._moving is not None:
            raise _copy(self._moving)
        if self._is_draining or call.deadline <= self._now():
            raise ResponsesFull(RESPONSES_FULL)
        demand = _Demand(call, after_pass=self._pass)
        self._parked[demand] = None
        demand.granted = call.charge.wait(least=least, most=max(least, call.request.bytes_max))
        demand.granted.add_done_callback(lambda granted: None if granted.cancelled() else self._settle(demand, []))
        try:
            await self._wait(demand)
        finally:
            self._remove(demand)

    # -- reading -------------------------------------------------------------------------------------------------

    def _read_soon(self) -> None:
        """Have the task that reads look for messages for those who wait."""
        self._must_look_again = True
        if self._reading is None and self._closed is None:
            self._reading = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        try:
            while self._must_look_again and self._demands and self._closed is None:
                self._must_look_again = False
                self._pass += 1
                self.tick()
                await self._read_for_demands()
                if self._push(None):  # what was ready may have taken the room to read for others
                    self._must_look_again = True
                else:
                    self._end_pass()
                self._store_delays_soon()
        except Exception as error:
            log.exception("dispatch_failed", cursor=self._reader.cursor_name)
            self._fail_all(error)
        finally:
            self._reading = None
            self._put_down_if_over()
            self._check_idle_later(IDLE_S)  # the calls may have ended before the read

    async def _read_for_demands(self) -> None:
        """Read, and serve demands, as long as there is something to read for one of them and the rates allow it."""
        while self._demands and self._closed is None and not self.throttle()[0]:
            self._dispatcher.prepare(self._demands)
            self._move_due()
            consumer = self._dispatcher.reads_for(self._demands)
            if consumer is None:
                return
            demand = next(iter(self._demands[consumer]))
            if demand.result.done():  # as in _push
                self._remove(demand)
                continue
            has_read = False
            try:
                if self._must_read(demand):
                    has_read = await self._fill(demand)
            except BinderyError as error:
                self._push(None)
                self._fail_all(error)
                return
            except _NoRoom as no_room:
                self._push(demand)
                if not demand.result.done() and demand not in self._parked:
                    self._park(demand, no_room.size)
                continue
            if has_read and not self._is_enough(demand):
                continue
            pushed = self._push(demand)
            if not demand.result.done() and demand not in self._parked:
                demand.call.charge.release()
            if not has_read and not pushed:
                return

    def _is_enough(self, demand: _Demand) -> bool:
        """Whether what is ready may be all that the demand can take. Otherwise more is read, if there is room."""
        dispatcher, request = self._dispatcher, demand.call.request
        return dispatcher.ready_count >= request.count_max or dispatcher.ready_bytes >= request.bytes_max

    def _move_due(self) -> None:
        """Have delayed messages whose time has come read again, unless others are to be read again."""
        dispatcher, delays = self._dispatcher, self._reader.delays
        if dispatcher.keeps_delays and len(delays) and not dispatcher.replayable():
            room = min(DUE_MAX, self._limits.unacked_max - dispatcher.known_count)
            if room > 0:
                dispatcher.replay_due(delays.due(self._clock(), room))

    def _store_delays_soon(self) -> None:
        """Store the index of delayed messages if it may have changed, at most once in DELAYS_STORED_S."""
        if self._storing is not None or self._closed is not None or self._now() < self._delays_stored_at:
            return
        if len(self._reader.delays) or self._reader.has_stored_delays:
            self._delays_stored_at = self._now() + DELAYS_STORED_S
            self._storing = asyncio.get_running_loop().create_task(self.store_delays())

    async def store_delays(self, *, seal: bool = False) -> None:
        """Store the index of delayed messages. An error is only logged: what is not stored is read again later.

        `seal`: also the messages that were added last. Otherwise they are stored once they are many.
        """
        try:
            async with self._delays_lock:
                if self._reader.has_delays_to_restore:  # what is stored is complete
                    return
                if seal:
                    self._reader.delays.seal()
                await self._reader.store_delays()
        except BinderyError as error:
            log.warning("delayed_index_not_stored", cursor=self._reader.cursor_name, error=str(error))
        finally:
            self._storing = None

    def _end_overdue(self) -> None:
        """End the calls whose time is over although the read has not begun."""
        now = self._now()
        for demand in [demand for demands in self._demands.values() for demand in demands]:
            if self._is_draining:
                self._settle(demand, [])
            elif demand.is_over or demand.call.deadline <= now:
                self._fail(
                    demand,
                    TryAgain(
                        "whether messages were moved to another topic is not known yet; receive again",
                        subscription=self._reader.cursor_name,
                    ),
                )
        self._ending_overdue = asyncio.get_running_loop().call_later(BEFORE_READ_S, self._end_overdue)

    def _must_read(self, demand: _Demand) -> bool:
        dispatcher = self._dispatcher
        return (
            dispatcher.replayable()
            or dispatcher.ready_count < demand.call.request.count_max
            or dispatcher.taker((demand.consumer,), now=self._now()) is None
        )

    def _end_pass(self) -> None:
        """Nothing more can be read now: end the demands that do not wait, and see when the others look again."""
        now = self._now()
        for demand in [demand for demands in self._demands.values() for demand in demands]:
            is_over = self._is_draining or demand.is_over or demand.call.deadline <= now
            if demand.after_pass >= self._pass:  # made since this pass began: the next one looks for it
                continue
            demand.call.charge.release()
            if is_over:
                self._settle(demand, [])
        if not self._demands:
            return
        dispatcher = self._dispatcher
        held_max = self._limits.unacked_per_consumer_max
        self._is_blocked_by_limit = not dispatcher.room() or any(one.held >= held_max for one in self._demands)
        self._forget_deadline()
        throttled_s, _ = self.throttle()
        if throttled_s:
            self._look_at(now + throttled_s + RATE_PAUSE_S)
        until = dispatcher.next_deadline()
        if until is not None:
            self._look_at(until)
        if dispatcher.keeps_delays and (due_ms := self._reader.delays.next_due_ms()) is not None:
            left_ms = due_ms - self._clock()
            self._look_at(now + (left_ms / 1_000 if left_ms > 0 else DUE_RETRY_S))
        if len(self._members) > len(self._demands):  # somebody may lose what those who wait can get then
            for session in self._sessions:
                self._look_when_gone(session)

    def call_ended(self, session: Session) -> None:
        """A call of the session has ended: if the consumer does not come back, others get what was for it."""
        if self._demands:
            self._look_when_gone(session)

    def _look_when_gone(self, session: Session) -> None:
        """Look again when a consumer without a call stops being the active one, or loses its keys."""
        consumer = session.consumer
        if session.calls_open or consumer not in self._members:
            return
        if self._shares_keys:
            if not consumer.held:
                self._look_at(max(session.last_call_at + KEYS_KEPT_S, self._keys_checked_at))
        elif self.type == "failover":
            leases_end = self._dispatcher.leases.last_deadline_of(consumer)
            ends_at = self._sessions.ends_at(session, leases_end=leases_end)
            if ends_at is not None:
                self._look_at(ends_at)

    @property
    def _shares_keys(self) -> bool:
        return self._dispatcher.hash_of is not None and not self.key_shared.sticky

    def _look_at(self, until: float) -> None:
        """Look again at a time in monotonic seconds, or before."""
        if until < self._deadline_at and self._closed is None:
            self._forget_deadline()
            self._deadline_at = until
            left_s = max(0.0, until - self._now())
            self._deadline = asyncio.get_running_loop().call_later(left_s, self._look_again)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline, self._deadline_at = None, math.inf

    def _look_again(self) -> None:
        self._forget_deadline()
        if self._demands:
            self._read_soon()

    def _fail_all(self, error: Exception) -> None:
        for demand in [demand for demands in self._demands.values() for demand in demands]:
            self._fail(demand, _copy(error))

    @staticmethod
    def _read_size(request: ReceiveRequest) -> int:
        """Return the bytes that a read takes which reads no more than `request` requires; one entry at least."""
        return max(ENTRY_SIZE_MAX, min(READ_BYTES_MAX, request.bytes_max))

    async def _fill(self, demand: _Demand) -> bool:
        """Read the messages to deliver next. Returns whether more may be readable, or ready, than before.

        If there is no room to read ahead, the bytes count as those of the response. Raises _NoRoom if they do not fit.
        """
        call, dispatcher = demand.call, self._dispatcher
        async with self.read_lock:
            await self._reader.restore_delays()
            if self.before_read is not None and (settled := self.before_read()) is not None:
                self._ending_overdue = asyncio.get_running_loop().call_later(BEFORE_READ_S, self._end_overdue)
                try:
                    await settled
                finally:
                    self._ending_overdue.cancel()
            size = READ_BYTES_MAX
            while True:
                await self._record_counts(dispatcher)
                self.check_open()
                if dispatcher is not self._dispatcher or demand.result.done():  # its charge may be in use again
                    return True
                reserved = self._read_ahead.reserve(size, messages=READ_MESSAGES_MAX)
                if not reserved:
                    dispatcher.make_room(self._demands)
                    if not (dispatcher.replayable() or dispatcher.rewind_wanted or self._reader.has_next):
                        return False
                    size = max(size, self._read_size(call.request))
                    if not call.charge.take(least=size, most=max(size, call.charge.size)):
                        raise _NoRoom(size)
                try:
                    return await self._read_next(dispatcher, call.request, ahead=reserved > 0, decoded_max=size)
                except RoomNeeded as needed:
                    size = needed.size
                finally:
                    if reserved:
                        self._read_ahead.release(reserved, messages=READ_MESSAGES_MAX)

    async def _record_counts(self, dispatcher: Dispatcher[Messages]) -> None:
        """Store the redelivery counts of returned messages, before they are delivered again.

        If the cursor cannot hold them, they are delivered nevertheless: otherwise nobody could get, and acknowledge,
        the messages that take its room.
        """
        while dispatcher.redelivered:  # more may be returned while these are stored
            counts = list(dispatcher.redelivered)
            dispatcher.redelivered.clear()
            try:
                await self._record(counts)
            except TooManyRequests as error:
                log.warning("redelivery_counts_not_stored", cursor=self._reader.cursor_name, error=str(error))
            except BaseException:
                self._dispatcher.redelivered[:0] = counts  # it may have been replaced meanwhile
                raise

    async def _read_next(
        self, dispatcher: Dispatcher[Messages], request: ReceiveRequest, *, ahead: bool, decoded_max: int
    ) -> bool:
        """Read the messages to deliver next. `ahead`: more than `request` requires may be read.

        Returns whether anything was read. Raises RoomNeeded if an entry takes more than `decoded_max` bytes.
        """
        size_max = STORED_BYTES_MAX if ahead else min(STORED_BYTES_MAX, request.bytes_max)
        refs = dispatcher.replay(REPLAY_ENTRIES_MAX, entries_max=None if ahead else 1)
        if refs:
            await self._reader.read_again(dispatcher, refs, size_max=size_max, decoded_max=decoded_max)
            return True
        if dispatcher.rewind_wanted:
            self._reader.rewind()
            dispatcher.rewound()
        if dispatcher.paused_until is not None and self._now() < dispatcher.paused_until:
            return False
        room = dispatcher.room(asked=None if ahead else request.count_max)
        if room <= 0:
            return False
        # With a filter, few of the messages may match: a read for each would take long.
        messages_max = READ_MESSAGES_MAX if ahead or self._reader.filter.is_active else request.count_max
        return await self._reader.read_on(
            dispatcher,
            room,
            size_max=size_max,
            decoded_max=decoded_max,
            messages_max=messages_max,
            now_ms=self._clock(),
        )

    # -- time and end --------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """End the leases and sessions whose time is over."""
        now = self._now()
        dispatcher = self._dispatcher
        returned = dispatcher.tick(now=now)
        for session in self._sessions.expire(now=now, leases_end_at=dispatcher.leases.last_deadline_of):
            self._remove_member(session.consumer)
        if self._shares_keys:
            self._free_keys(now)
        if returned:
            self.wake()
        self.put_down_if_idle()

    def _free_keys(self, now: float) -> None:
        """Give the keys of consumers that hold nothing, and have not called for KEYS_KEPT_S, to others."""
        if now < self._keys_checked_at:
            return
        self._keys_checked_at = now + KEYS_KEPT_S / 4
        for session in self._sessions:
            consumer = session.consumer
            is_idle = not session.calls_open and not consumer.held and session.last_call_at + KEYS_KEPT_S <= now
            if is_idle and consumer in self._members:
                self._remove_member(consumer)

    def put_down_if_idle(self) -> None:
        """If no consumer is connected, drop the message bodies in memory. They are read again for the next consumer."""
        if not len(self._sessions):
            self._put_down()

    def _put_down_if_over(self) -> None:
        if self._read_ahead.is_over:
            self._put_down()

    def _put_down(self) -> None:
        """Drop the ready messages, unless a read is in progress. They are read again when a call needs them."""
        if self.read_lock.locked():
            return
        first = self._dispatcher.put_down()
        if first is not None:
            self._reader.step_back(first)

    def _check_idle_later(self, after_s: float) -> None:
        if self._idle_check is None and self._closed is None and self._dispatcher.ready_count:
            self._idle_check = asyncio.get_running_loop().call_later(after_s, self._put_down_when_idle)

    def _put_down_when_idle(self) -> None:
        self._idle_check = None
        left_s = IDLE_S if self._calls_open else self._last_call_at + IDLE_S - self._now()
        if left_s <= 0:
            used_before = self._read_ahead.used
            self._put_down()
            self._read_ahead.idle_size += used_before - self._read_ahead.used
        self._check_idle_later(left_s if left_s > 0 else IDLE_S)

    def drain(self) -> None:
        """End every wait, because the broker stops."""
        self._is_draining = True
        for demand in list(self._parked):
            self._settle(demand, [])
        self.wake()

    def end_waits(self, reason: BinderyError) -> None:
        """Fail the calls that wait, with nothing leased, because the topic moves. Later calls do not wait either."""
        self._moving = reason
        for demand in list(self._parked):
            self._fail(demand, _copy(reason))
        self._fail_all(reason)

    def close(self, reason: BinderyError) -> None:
        """Fail all calls, also the waiting ones, with `reason`."""
        self._closed = reason
        if self._idle_check is not None:
            self._idle_check.cancel()
            self._idle_check = None
        self._forget_deadline()
        for demand in list(self._parked):
            self._fail(demand, _copy(reason))
        self._fail_all(reason)

    @property
    def is_closed(self) -> bool:
        return self._closed is not None

    def check_open(self) -> None:
        if self._closed is not None:
            raise _copy(self._closed)


def _copy(error: Exception) -> Exception:
    """Return the error for one call: a shared one would collect the tracebacks of all calls."""
    return type(error)(error.message, **error.facts) if isinstance(error, BinderyError) else error
