"""Run the dispatcher of a subscription: read for it, hand its messages to waiting calls, pass the time to it.

A call takes ready messages. If there are too few, it reads first (returned messages, then the next entries). If there
is nothing to read, it waits until an entry arrives, a message is returned, or its time is over. No task runs in the
background: each call first passes the current time to the dispatcher and the sessions, and a waiting call wakes itself
for the next deadline. Only a timer puts the ready messages down when no call has been in progress for IDLE_S: a
consumer that has gone without leaving must not take the room of others until its session ends. At the end of a call,
they are put down if all subscriptions together hold too many. They are read again when a call needs them.

Invariants: at most one read is in progress; a call joins the queue before it reads, so that it misses no wake-up; the
dispatcher that is replaced is reset, so that reads and acknowledgements in progress recognize it by its generation.
"""

import asyncio
from typing import Final

from bindery_core.errors import BinderyError
from bindery_core.sources import MonotonicClock
from bindery_pulsar.entry_size import ENTRY_SIZE_MAX
from bindery_pulsar.message_codec import Message

from bindery_broker.dispatch.dispatcher import Dispatcher
from bindery_broker.dispatch.exclusive import ExclusiveDispatcher
from bindery_broker.dispatch.item import Delivery, DispatchLimits
from bindery_broker.dispatch.read_ahead import ReadAhead
from bindery_broker.dispatch.sessions import Sessions
from bindery_broker.dispatch.shared import SharedDispatcher
from bindery_broker.errors import RESPONSES_FULL, ResponsesFull
from bindery_broker.subscriptions.consumer import ReceiveCall, ReceiveRequest, SubscriptionType
from bindery_broker.subscriptions.decoding import RoomNeeded
from bindery_broker.subscriptions.reading import (
    MESSAGE_OVERHEAD,
    READ_BYTES_MAX,
    READ_ENTRIES_MAX,
    READ_MESSAGES_MAX,
    MessageReader,
)

IDLE_S: Final = 10.0
"""Seconds without a call after which the messages that were read ahead are put down. Reading them again costs less than
it takes to process as many."""


class _NoRoom(Exception):
    """Nothing can be read, because its `size` bytes would exceed those of all responses."""

    def __init__(self, size: int) -> None:
        super().__init__(f"{size} bytes do not fit into the responses")
        self.size = size


class DispatchLoop:
    """Owns the dispatcher and the queue of waiting calls."""

    def __init__(
        self,
        reader: MessageReader,
        sessions: Sessions,
        *,
        limits: DispatchLimits,
        read_ahead: ReadAhead,
        now: MonotonicClock,
    ) -> None:
        self.type: SubscriptionType | None = None
        """Type of the subscription; None: no consumer has connected since the topic was loaded."""
        self.read_lock = asyncio.Lock()
        """Held during a read, and while the cursor is moved."""
        self._reader = reader
        self._sessions = sessions
        self._limits = limits
        self._read_ahead = read_ahead
        self._now = now
        self._dispatcher: Dispatcher[Message] = SharedDispatcher[Message](limits=limits, read_ahead=read_ahead)
        self._waiters: dict[asyncio.Future[None], None] = {}
        """In the order in which the calls began to wait."""
        self._is_blocked_by_limit = False
        """Whether a call waits because a limit of unacknowledged messages is reached."""
        self._calls_open = 0
        self._last_call_at = 0.0
        """When the last call ended; monotonic seconds."""
        self._idle_check: asyncio.TimerHandle | None = None
        self._closed: BinderyError | None = None
        self._is_draining = False

    @property
    def dispatcher(self) -> Dispatcher[Message]:
        return self._dispatcher

    def change_type(self, kind: SubscriptionType) -> None:
        """Replace the dispatcher. No consumer may be connected."""
        self._dispatcher.reset()
        self.type = kind
        self._dispatcher = (
            SharedDispatcher[Message](limits=self._limits, read_ahead=self._read_ahead)
            if kind == "shared"
            else ExclusiveDispatcher[Message](limits=self._limits, read_ahead=self._read_ahead)
        )
        self._reader.batch_sizes.clear()
        self._reader.rewind()

    def restart(self) -> None:
        """Forget what was delivered and read, and continue after the cursor's position. Call it under `read_lock`."""
        self._dispatcher.reset()
        self._reader.batch_sizes.clear()
        self._reader.stuck = None
        self._reader.rewind()
        self.wake()

    # -- waiting calls -------------------------------------------------------------------------------------------

    async def take(self, call: ReceiveCall) -> list[Delivery[Message]]:
        """Return messages, leased to the consumer; none if there are none before the deadline."""
        self._calls_open += 1
        try:
            return await self._take(call)
        finally:
            self._calls_open -= 1
            self._last_call_at = self._now()
            self._put_down_if_over()
            self._check_idle_later(IDLE_S)

    async def _take(self, call: ReceiveCall) -> list[Delivery[Message]]:
        request = call.request
        charge = call.charge
        while True:
            self.check_open()
            self.tick()
            if call.client is not None and call.client.is_gone:
                return []
            must_read = self._dispatcher.replayable() or self._dispatcher.ready_count < request.count_max
            if not must_read and self._sessions.get(request.consumer) is call.session:  # most calls
                taken, _ = self._lease(call)
                if taken:
                    return taken
            least = 0  # bytes that must fit into the responses before anything can be read or delivered
            waiter = self._begin_wait(call)
            try:
                failure: BinderyError | None = None
                has_read = False
                if must_read:
                    try:
                        has_read = await self._fill(call)
                    except BinderyError as error:
                        failure = error
                    except _NoRoom as no_room:
                        least = no_room.size
                if self._sessions.get(request.consumer) is not call.session:  # the consumer left during the read
                    return []
                taken, missing_size = self._lease(call)
                if taken:
                    return taken
                least = missing_size or least
                charge.release()
                if failure is not None:
                    raise failure
                if has_read and not least:
                    continue
                if self._is_draining:
                    return []
                if least:
                    self._put_down_if_over()
                    await self.wait_for_room(call, least=least)
                    continue
                if self._dispatcher.room() == 0 or self._holds_all_it_may(call):
                    self._is_blocked_by_limit = True
                until = min(call.deadline, self._dispatcher.next_deadline() or call.deadline)
                timeout = until - self._now()
                if timeout > 0:
                    await asyncio.wait({waiter}, timeout=timeout)
                elif until >= call.deadline:
                    return []
            finally:
                self._end_wait(waiter)

    def _lease(self, call: ReceiveCall) -> tuple[list[Delivery[Message]], int]:
        """Lease ready messages, whose bytes the call's charge then holds. Return them, or the bytes that do not fit."""
        request, charge = call.request, call.charge
        next_size = self._dispatcher.next_size()
        if not next_size:
            return [], 0
        room = charge.room(least=next_size, most=max(next_size, request.bytes_max))
        if not room:
            return [], next_size
        taken = self._dispatcher.take(
            request.consumer,
            count_max=request.count_max,
            bytes_max=min(room, request.bytes_max),
            ack_timeout_s=request.ack_timeout_s,
            now=self._now(),
        )
        if taken:
            charge.keep(sum([delivery.message.size + MESSAGE_OVERHEAD for delivery in taken]))
        return taken, 0

    def _holds_all_it_may(self, call: ReceiveCall) -> bool:
        held = self._dispatcher.leases.count_of(call.request.consumer)
        return held >= self._limits.unacked_per_consumer_max

    def _begin_wait(self, call: ReceiveCall) -> asyncio.Future[None]:
        """Return what `wake`, or the end of the client's connection, completes."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        if call.client is not None:
            call.client.waiter = waiter
        return waiter

    def _end_wait(self, waiter: asyncio.Future[None]) -> None:
        waiter.cancel()
        self._waiters.pop(waiter, None)

    def wake(self) -> None:
        """Let each waiting call check again for messages and for the state of the subscription."""
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def wake_blocked(self) -> None:
        """Wake the waiting calls if a limit of unacknowledged messages blocked one of them."""
        if self._is_blocked_by_limit:
            self._is_blocked_by_limit = False
            self.wake()

    async def wait_for_room(self, call: ReceiveCall, *, least: int) -> None:
        """Return when `call.charge` holds `least` bytes, or when the call should check again for its end.

        Raises ResponsesFull at the deadline of the call. The charge must hold nothing.
        """
        timeout = call.deadline - self._now()
        if timeout <= 0:
            raise ResponsesFull(RESPONSES_FULL)
        granted = call.charge.wait(least=least, most=max(least, call.request.bytes_max))
        waiter = self._begin_wait(call)
        try:
            await asyncio.wait({granted, waiter}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            granted.cancel()
            self._end_wait(waiter)

    # -- reading -------------------------------------------------------------------------------------------------

    @staticmethod
    def _read_size(request: ReceiveRequest) -> int:
        """Return the bytes that a read takes which reads no more than `request` requires; one entry at least."""
        return max(ENTRY_SIZE_MAX, min(READ_BYTES_MAX, request.bytes_max))

    async def _fill(self, call: ReceiveCall) -> bool:
        """Read the messages to deliver next. Returns True if the caller should check again for ready messages.

        If there is no room to read ahead, the bytes count as those of the response. Raises _NoRoom if they do not fit.
        """
        dispatcher = self._dispatcher
        ready_before = dispatcher.ready_count
        async with self.read_lock:
            self.check_open()
            if dispatcher is not self._dispatcher or dispatcher.ready_count > ready_before:  # another call read
                return True
            size = READ_BYTES_MAX
            while True:
                reserved = self._read_ahead.reserve(size, messages=READ_MESSAGES_MAX)
                if not reserved:
                    if self._holds_all_it_may(call):  # it could take nothing of what is read
                        return False
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

    async def _read_next(
        self, dispatcher: Dispatcher[Message], request: ReceiveRequest, *, ahead: bool, decoded_max: int
    ) -> bool:
        """Read the messages to deliver next. `ahead`: more than `request` requires may be read.

        Returns True if the caller should check again for ready messages. Raises RoomNeeded if an entry takes more than
        `decoded_max` bytes.
        """
        size_max = READ_BYTES_MAX if ahead else min(READ_BYTES_MAX, request.bytes_max)
        keys = dispatcher.replay(READ_ENTRIES_MAX, entries_max=None if ahead else 1)
        if keys:
            await self._reader.read_again(dispatcher, keys, size_max=size_max, decoded_max=decoded_max)
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
            dispatcher, room, size_max=size_max, decoded_max=decoded_max, messages_max=messages_max
        )

    # -- time and end --------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """End the leases and sessions whose time is over."""
        now = self._now()
        dispatcher = self._dispatcher
        returned = dispatcher.tick(now=now)
        self._sessions.expire(now=now, leases_end_at=dispatcher.leases.last_deadline_of)
        if returned:
            self.wake()
        self.put_down_if_idle()

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
        self.wake()

    def close(self, reason: BinderyError) -> None:
        """Fail all calls, also the waiting ones, with `reason`."""
        self._closed = reason
        if self._idle_check is not None:
            self._idle_check.cancel()
            self._idle_check = None
        self.wake()

    @property
    def is_closed(self) -> bool:
        return self._closed is not None

    def check_open(self) -> None:
        if self._closed is not None:
            raise type(self._closed)(self._closed.message, **self._closed.facts)
