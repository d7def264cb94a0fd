"""One subscription of a loaded topic: its cursor, its dispatcher and the sessions of its consumers.

Invariants: a message in delivery is unacknowledged in the cursor as far as this broker knows; the type changes only
while no other consumer is connected. An acknowledgement is durable in the cursor before the dispatcher forgets it.
"""

import asyncio
import functools
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final

from bindery_core.errors import BinderyError, Conflict, TooManyRequests
from bindery_core.sources import MonotonicClock
from bindery_pulsar.message_id import MessageId, Position
from bindery_pulsar.topic_name import TopicName

from bindery_broker.dispatch import dispatcher as dispatching
from bindery_broker.dispatch.dispatcher import Dispatcher
from bindery_broker.dispatch.failover import pick_active
from bindery_broker.dispatch.item import NOT_IN_BATCH, WHOLE, DispatchLimits, MessageRef, refs_of
from bindery_broker.dispatch.key_shared import AUTO_SPLIT, KeySharedMode
from bindery_broker.dispatch.read_ahead import ReadAhead
from bindery_broker.dispatch.sessions import Session, Sessions
from bindery_broker.errors import ConsumerBusy, PolicyForbids, SubscriptionTypeConflict
from bindery_broker.limits.rate_limit import RateLimit
from bindery_broker.managed_ledger import (
    SYSTEM_CURSORS,
    BatchAck,
    ManagedCursor,
    ManagedLedger,
    Redelivered,
    TransientCursor,
    WallClock,
)
from bindery_broker.namespaces.policies import DEFAULTS, EffectivePolicies, Rate
from bindery_broker.retries.copies import REAL_SUBSCRIPTION, names_other
from bindery_broker.retries.names import origin_topic
from bindery_broker.retries.targets import Targets
from bindery_broker.statistics.delivery import ConsumerStatistics, SubscriptionStatistics
from bindery_broker.statistics.traffic import Rates
from bindery_broker.subscriptions.acknowledging import Acknowledger
from bindery_broker.subscriptions.consumer import (
    ClientWatch,
    MessageFilter,
    ReceiveCall,
    ReceiveRequest,
    SubscriptionType,
)
from bindery_broker.subscriptions.decoding import EntryDecoder
from bindery_broker.subscriptions.dispatch_loop import Deliveries, DispatchLoop
from bindery_broker.subscriptions.expiring import Expiring
from bindery_broker.subscriptions.explaining import Explainer, Reason
from bindery_broker.subscriptions.moving import MoveResult, MoveTask, Moving, RetryTo
from bindery_broker.subscriptions.oldest import OldestMessage
from bindery_broker.subscriptions.reading import MESSAGE_OVERHEAD, MessageReader, Messages, messages_of
from bindery_broker.subscriptions.redelivery import Redelivery
from bindery_broker.subscriptions.response_budget import Charge

CANCELLED_REMEMBERED_MAX: Final = 1_000
"""Maximum number of cancelled messages of which a repeated cancelling is recognized after their time."""


ALL_DUE_MS: Final = 2**63 - 1
"""Time in ms since 1970 at which every delayed message is due."""
DEAD_LETTERS_S: Final = 1.0
"""Seconds that a call waits at least for messages to be moved to the dead-letter topic, so that it gets those after
them."""
MOVES_CHECKED_S: Final = 0.5
"""Seconds after which a call that waits for moves looks whether its client has gone, or the broker stops."""


class Subscription:
    """Every operation raises the reason of `close` once the subscription is closed."""

    def __init__(
        self,
        cursor: ManagedCursor,
        ledger: ManagedLedger,
        *,
        topic: TopicName,
        now: MonotonicClock,
        clock: WallClock,
        limits: DispatchLimits,
        read_ahead: ReadAhead,
        decoder: EntryDecoder,
        sessions_max: int,
        targets: Targets,
        policies: Callable[[], EffectivePolicies] = lambda: DEFAULTS,
        dispatch_rate: RateLimit | None = None,
        publish_rate: Callable[[], Rates] = lambda: Rates(0.0, 0.0),
        check_joining: Callable[[str], None] = lambda _consumer: None,
        is_kept: Callable[[str], bool] = lambda _subscription: False,
    ) -> None:
        """`read_ahead` and `decoder`: shared by the broker's subscriptions. `targets`: topics to which messages are
        moved. `policies`: those in force. `dispatch_rate`: limit of the topic, shared by its subscriptions.
        `publish_rate`: at which the topic is published now. `check_joining`: called before a new consumer is admitted;
        raises an error if that is refused. `is_kept`: whether the topic has another stored subscription of a name."""
        partition = topic.partition
        self.name = cursor.name
        self.cursor = cursor
        self.sessions = Sessions(sessions_max=sessions_max)
        self.statistics = SubscriptionStatistics()
        self.oldest = OldestMessage(cursor, ledger)
        self.created_at = now()
        """When the subscription was created or loaded; monotonic seconds."""
        self._ledger = ledger
        self._now = now
        self._clock = clock
        self._limits = limits
        self._policies = policies
        self._followed = DEFAULTS
        """The policies of which the limits of the dispatcher are set."""
        self._publish_rate = publish_rate
        self._check_joining = check_joining
        self._topic_rate = RateLimit() if dispatch_rate is None else dispatch_rate
        self._own_rate = RateLimit()
        self._reader = MessageReader(
            cursor, ledger, partition=partition, decoder=decoder, message_filter=_filter(cursor, topic, is_kept)
        )
        self._loop = DispatchLoop(
            self._reader,
            self.sessions,
            limits=limits,
            read_ahead=read_ahead,
            now=now,
            clock=self._delivery_clock,
            counts_of=cursor.counts_of,
            record=self._record,
            pick_active=functools.partial(pick_active, partition=partition, topic=topic.full),
            rates=self._present_rates,
        )
        self._redelivery = Redelivery(self._loop, self._reader, now=now)
        self._acknowledger = Acknowledger(cursor, ledger, self._loop, self._reader, partition=partition)
        self._expiring = Expiring(
            cursor, ledger, self._loop, self._acknowledger, decoder=decoder, statistics=self.statistics, now=now
        )
        self._explainer = Explainer(
            cursor, ledger, self._loop, self._reader, partition=partition, policy_of=self._policy_of
        )
        self._moving = Moving(
            cursor, self._loop, self._reader, self._acknowledger, topic=topic, targets=targets, now=now, clock=clock
        )
        self.is_durable = not isinstance(cursor, TransientCursor)
        """Whether the subscription is stored. Otherwise it ends with its last consumer."""
        self._cancelled: dict[Position, None] = {}
        """Entries that were cancelled since the last seek, oldest first."""
        self._remove_listener = ledger.on_new_entries(self._loop.wake)

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def type(self) -> SubscriptionType | None:
        """Type of the subscription; None: no consumer has connected since the topic was loaded."""
        return self._loop.type

    @property
    def dispatcher(self) -> Dispatcher[Messages]:
        return self._loop.dispatcher

    @property
    def read_position(self) -> Position:
        return self._reader.position

    @property
    def tags(self) -> frozenset[str]:
        return self._reader.filter.tags

    @property
    def delayed_count(self) -> int:
        """Number of messages that were read and are not due."""
        return len(self._reader.delays)

    @property
    def next_due_ms(self) -> int | None:
        """When the first message that waits for its time is due, in ms since 1970; None: no message waits for it."""
        return self._reader.delays.next_due_ms() if self.dispatcher.keeps_delays else None

    @property
    def stuck(self) -> str | None:
        """Reason why the entry at the read position cannot be decoded; None: it can be decoded."""
        return self._reader.stuck

    @property
    def is_blocked_on_unacked(self) -> bool:
        """Whether nothing new is read, because the maximum number of unacknowledged messages is reached."""
        return self.dispatcher.known_count >= self.dispatcher.limits.unacked_max

    @property
    def is_system(self) -> bool:
        """Whether the subscription belongs to the broker. No policy of subscriptions applies to it."""
        return self.name in SYSTEM_CURSORS

    # -- policies ------------------------------------------------------------------------------------------------

    def follow_policies(self) -> None:
        """Apply the present policies to the limits of unacknowledged messages. The settings are the outer limits."""
        policies = self._policies()
        if policies is self._followed:
            return
        self._followed = policies
        unacked_max = _least(self._limits.unacked_max, policies.unacked_per_subscription_max)
        self._loop.set_limits(
            replace(
                self._limits,
                unacked_max=unacked_max,
                unacked_per_consumer_max=min(
                    unacked_max, _least(self._limits.unacked_per_consumer_max, policies.unacked_per_consumer_max)
                ),
            )
        )

    def _delivery_clock(self) -> int:
        """Return the time that decides whether a delayed message is due: if delays are off, each is."""
        return self._clock() if self._policies().delayed_delivery else ALL_DUE_MS

    def _present_rates(self) -> Sequence[RateLimit]:
        """Return the limits of dispatching that are in force, with their present values."""
        policies, now = self._policies(), self._now()
        self._own_rate.set(self._relative(policies.subscription_dispatch_rate), now)
        self._topic_rate.set(self._relative(policies.dispatch_rate), now)
        return [limit for limit in (self._own_rate, self._topic_rate) if limit.rate is not None]

    def _policy_of(self, limit: RateLimit) -> str:
        return "subscription_dispatch_rate" if limit is self._own_rate else "dispatch_rate"

    @property
    def throttled_by(self) -> str | None:
        """The policy that holds back deliveries now; None: none does."""
        return self._explainer.throttled_by()

    @property
    def throttled(self) -> Reason | None:
        """What limits the rate of deliveries now; None: nothing does, or there is nothing to deliver."""
        return self._explainer.throttled()

    @property
    def has_full_consumer(self) -> bool:
        """Whether a consumer holds its maximum number of messages."""
        held_max = self.dispatcher.limits.unacked_per_consumer_max
        return any(session.consumer.held >= held_max for session in self.sessions)

    def _relative(self, rate: Rate | None) -> Rate | None:
        """Add the publish rate to a limit that is relative to it."""
        if rate is None or not rate.is_relative_to_publish_rate:
            return rate
        published = self._publish_rate()
        return replace(
            rate,
            messages=None if rate.messages is None else rate.messages + round(published.messages * rate.period_s),
            size=None if rate.size is None else rate.size + round(published.bytes * rate.period_s),
        )

    def _admit(self, consumer: str, kind: SubscriptionType) -> None:
        """Check the policies before a call. Raises PolicyForbids, TooManyRequests or SubscribeRateExceeded."""
        self.follow_policies()
        policies = self._policies()
        if kind not in policies.subscription_types:
            raise PolicyForbids(
                f"the policy subscription_types does not allow consumers of type {kind}",
                subscription=self.name,
                allowed=sorted(policies.subscription_types),
            )
        if self.sessions.get(consumer) is None:
            count, count_max = len(self.sessions), policies.consumers_per_subscription_max
            if count_max and count >= count_max:
                raise TooManyRequests(
                    "the subscription has the maximum number of consumers by the policy consumers_per_subscription_max",
                    consumers=count,
                    limit=count_max,
                )
            self._check_joining(consumer)

    async def expire_due(self, *, reads_max: int) -> int:
        """Acknowledge messages whose time to live is over, if a policy limits it. See `Expiring.run`."""
        ttl_s = self._policies().message_ttl_s
        if not ttl_s or not self.is_durable or self.is_system:
            return 0
        return await self._expiring.run(ttl_ms=ttl_s * 1_000, now_ms=self._clock(), reads_max=reads_max)

    def expires_in_s(self, now_ms: int) -> float:
        """Return the seconds until `expire_due` may find something, if a policy limits the time to live; infinite: not
        before the next message. `now_ms`: ms since 1970."""
        return self._expiring.next_in_s(now_ms) if self.cursor.backlog_entries else math.inf

    async def evict(self, entries: int) -> None:
        """Acknowledge the oldest `entries` entries, because a quota is exceeded, durably."""
        await self.skip(entries)
        self.statistics.evicted += entries

    async def evict_before(self, before_ms: int) -> None:
        """Acknowledge the entries published before a time in ms since 1970, because a quota is exceeded, durably."""
        entries = self.cursor.backlog_entries
        await self.expire(before_ms)
        self.statistics.evicted += max(0, entries - self.cursor.backlog_entries)

    # -- consuming -----------------------------------------------------------------------------------------------

    def join(self, consumer: str, kind: SubscriptionType, *, key_shared: KeySharedMode = AUTO_SPLIT) -> None:
        """Check that `consumer` may consume as `kind`, and change the type if no other consumer is connected.

        Raises ConsumerBusy with the name of the connected consumer, or SubscriptionTypeConflict.
        """
        self._loop.tick()
        if kind == self.type and kind != "exclusive" and (kind != "key_shared" or key_shared == self._loop.key_shared):
            return
        others = [session.consumer.name for session in self.sessions if session.consumer.name != consumer]
        if kind != self.type or (kind == "key_shared" and key_shared != self._loop.key_shared):
            if others:
                how = f"as {self.type}" if kind != self.type else "in another mode of key_shared"
                raise SubscriptionTypeConflict(
                    f"the subscription is consumed {how}",
                    subscription=self.name,
                    type=self.type,
                    consumers=len(others),
                )
            self._loop.change_type(kind, key_shared=key_shared)
            self._moving.mover.dispatcher_replaced()
        elif others:
            raise ConsumerBusy("another consumer holds the subscription", subscription=self.name, consumer=others[0])

    async def receive(
        self,
        request: ReceiveRequest,
        *,
        kind: SubscriptionType,
        charge: Charge,
        client: ClientWatch | None = None,
    ) -> tuple[Deliveries, Session]:
        """Return messages, leased to the consumer; none if none arrive in time.

        `charge` has the bytes of the messages on return; the caller releases it once they are sent. `client`:
        tells whether the client has disconnected; no messages are leased to it then. Raises ResponsesFull, with nothing
        leased, if there is no room for the messages in time.
        """
        self._loop.check_open()
        self._loop.tick()
        self._admit(request.consumer, kind)
        self.join(request.consumer, kind, key_shared=request.key_shared)
        session = self.sessions.begin_call(request.consumer, ttl_s=request.session_ttl_s, now=self._now())
        session.statistics.address = request.address
        self.statistics.last_request_at = session.last_call_at
        call = ReceiveCall(
            request=request, session=session, deadline=self._now() + request.wait_s, client=client, charge=charge
        )
        try:
            self._connect(session, request)
            if request.redeliver:
                self._redelivery.release(session.consumer)
            deliveries = await self._take(call)
        finally:
            self.sessions.end_call(session, now=self._now())
            self._loop.call_ended(session)
        count = size = redelivered = 0
        for delivery in deliveries:
            messages = messages_of(delivery)
            count += len(messages)
            for message in messages:
                size += len(message.payload)
            if delivery.redelivery_count:
                redelivered += len(messages)
        if count:
            self.statistics.deliver(session.statistics, count, size, redelivered=redelivered, now=session.last_call_at)
        return deliveries, session

    async def _take(self, call: ReceiveCall) -> Deliveries:
        """Return messages for a call. Those above its limit of redeliveries are moved instead of being returned."""
        request = call.request
        while True:
            if request.request_id is None:
                deliveries = await self._loop.take(call)
            else:
                deliveries = await self._redelivery.take(call, request.request_id)
            if request.dead_letters is None or not deliveries:
                return deliveries
            kept, moves = self._moving.split_dead(deliveries, request.dead_letters, charge=call.charge)
            if kept:
                if moves:
                    call.charge.keep(
                        sum(message.size + MESSAGE_OVERHEAD for one in kept for message in messages_of(one))
                    )
                return kept
            call.charge.release()
            if not await self._have_moved(call, moves):
                return []

    async def _have_moved(self, call: ReceiveCall, moves: Sequence[MoveTask]) -> bool:
        """Wait for moves. Returns False, while they continue, if the call is over before: it ends without messages."""
        ends = asyncio.get_running_loop().time() + max(call.deadline - self._now(), DEAD_LETTERS_S)
        pending = set(moves)
        if call.client is not None:
            call.client.look()
        while pending and not self._loop.is_draining and not (call.client is not None and call.client.is_gone):
            left_s = ends - asyncio.get_running_loop().time()
            if left_s <= 0:
                break
            _, pending = await asyncio.wait(pending, timeout=min(left_s, MOVES_CHECKED_S))
        return not pending

    def attend(self, request: ReceiveRequest, *, kind: SubscriptionType) -> None:
        """Begin or continue the session of a consumer as `receive` does, without a call. Raises its errors."""
        self._loop.check_open()
        self._loop.tick()
        self._admit(request.consumer, kind)
        self.join(request.consumer, kind, key_shared=request.key_shared)
        session = self.sessions.begin_call(request.consumer, ttl_s=request.session_ttl_s, now=self._now())
        try:
            self._connect(session, request)
        finally:
            self.sessions.end_call(session, now=self._now())
        session.call_count -= 1

    def count_call(self, consumer: str) -> None:
        """Count a call of a consumer that was answered without `receive`."""
        session = self.sessions.get(consumer)
        if session is not None:
            session.call_count += 1

    def hand_back(self, consumer: str, deliveries: Deliveries) -> None:
        """Return messages that `receive` returned and that were not sent. That is no redelivery, unlike a nack."""
        session = self.sessions.get(consumer)
        if session is not None and not self._loop.is_closed:
            self._loop.hand_back(session.consumer, deliveries)

    @property
    def is_draining(self) -> bool:
        """Whether no call waits any more, because the broker is stopping."""
        return self._loop.is_draining

    def still_holds(self, consumer: str, request_id: str) -> bool:
        """Whether the consumer holds a message of an earlier answer to the request id."""
        session = self.sessions.get(consumer)
        refs = None if session is None else session.remembered.get(request_id)
        return session is not None and bool(refs) and bool(self.dispatcher.held(session.consumer, refs or ()))

    def hand_back_request(self, consumer: str, request_id: str) -> bool:
        """As `hand_back`, of what `receive` returned for a request id, or will return. Returns False if the consumer
        holds nothing of it now."""
        if self._loop.is_closed:
            return False
        if not self.still_holds(consumer, request_id):
            self._redelivery.give_up(consumer, request_id)
            return False
        session = self.sessions.get(consumer)
        assert session is not None
        self._loop.hand_back(session.consumer, session.remembered.pop(request_id))
        return True

    def _connect(self, session: Session, request: ReceiveRequest) -> None:
        """Let the dispatcher know the consumer with what its request says of it.

        Raises Conflict if its key ranges are held by another consumer, or differ from those of its earlier calls.
        """
        consumer = session.consumer
        consumer.priority = request.priority
        if consumer.key_ranges != request.key_ranges:
            if session.call_count > 1 and self._loop.knows(consumer):
                raise Conflict(
                    "the consumer has declared other key ranges; end its session first (DELETE .../consumers/NAME)",
                    consumer=consumer.name,
                    key_ranges=consumer.key_ranges,
                )
            consumer.key_ranges = request.key_ranges
        try:
            self._loop.admit(consumer)
        except BinderyError:
            if session.call_count == 1:
                self.sessions.remove(consumer.name)
            raise

    def leave(self, consumer: str) -> bool:
        """End a consumer's session, so that its messages are delivered again. Returns False if there was no session."""
        self._loop.check_open()
        self._loop.tick()
        session = self.sessions.remove(consumer)
        if session is not None:
            self._loop.dismiss(session.consumer)
        self._loop.put_down_if_idle()
        return session is not None

    # -- acknowledging and moving --------------------------------------------------------------------------------

    async def ack(self, ids: Sequence[MessageId], *, consumer: str | None = None) -> None:
        """Acknowledge messages; durable on return. Raises UnknownMessages, and acknowledges none, if one is unknown."""
        self._loop.check_open()
        positions, batches = await self._acknowledger.resolve(ids)
        self._touch(consumer)
        acker = self._statistics_of(consumer, ids)
        count = await self._acknowledger.ack(positions, batches)
        self.statistics.ack(acker, count, now=self._now())

    async def unknown(self, ids: Sequence[MessageId]) -> list[MessageId]:
        """Return those of `ids` that name no message of the topic, so that `ack` would refuse all of them."""
        self._loop.check_open()
        return (await self._acknowledger.look_up(ids))[2]

    def touch(self, consumer: str) -> None:
        """Extend the session of a consumer, if it has one."""
        self._touch(consumer)

    async def ack_cumulative(self, last: MessageId, *, consumer: str | None = None) -> None:
        """Acknowledge everything up to and including `last`, durably. Exclusive subscriptions only."""
        self._loop.check_open()
        self._acknowledger.check_in_order()
        positions, batches = await self._acknowledger.resolve([last])
        self._acknowledger.check_in_order()  # the type may have changed meanwhile
        self._touch(consumer)
        acker = self._statistics_of(consumer, [last])
        count = await self._acknowledger.ack_cumulative(positions, batches, last)
        self.statistics.ack(acker, count, now=self._now())

    def nack(self, ids: Sequence[MessageId], *, delay_s: float, consumer: str | None = None) -> list[MessageId]:
        """Return held messages for delivery after `delay_s`. Returns those that were held (by `consumer`, if given)."""
        self._loop.check_open()
        self._loop.tick()
        self._touch(consumer)
        if consumer is None:
            return self._redelivery.nack(ids, delay_s=delay_s, consumer=None)
        session = self.sessions.get(consumer)
        return [] if session is None else self._redelivery.nack(ids, delay_s=delay_s, consumer=session.consumer)

    async def retry(
        self, ids: Sequence[MessageId], to: RetryTo, *, charge: Charge, consumer: str | None = None
    ) -> MoveResult:
        """Move messages to the retry topic, or to the dead-letter topic once they were retried too often.

        Each has exactly one copy, in the order of `ids`, and is acknowledged. Acknowledged messages are not copied. A
        message that its target refuses is delivered again later. Errors as `Moving.move_ids`; BadRequest if a target is
        the topic itself, unless that is the retry topic.
        """
        self._loop.check_open()
        self._touch(consumer)
        acker = self._statistics_of(consumer, ids)
        result = await self._moving.retry(ids, to, charge=charge)
        self.statistics.ack(acker, len(result.moved), now=self._now())
        return result

    @property
    def moving(self) -> Moving:
        """Moves messages of this subscription to other topics."""
        return self._moving

    async def seek(self, target: MessageId | Position | int) -> Position:
        """Move to a message, to EARLIEST or LATEST, or to the first entry published at a time (ms since 1970) or later.

        Waits for messages that are being moved to another topic; those that were sought back to are delivered again,
        although they have a copy. Returns the position that comes next. After an error delivery continues at the former
        position, and messages in delivery are delivered again. Raises the errors of `ManagedCursor.seek`.
        """
        self._loop.check_open()
        passed: BatchAck | None = None
        if isinstance(target, int):
            position = await self._ledger.find_published(target)
        elif isinstance(target, MessageId):
            _, batches = await self._acknowledger.resolve([target])
            position = target.position
            if batches and target.batch_index > 0:  # without a batch the entry was trimmed: the next one follows
                passed = batches[0]._replace(indexes=range(target.batch_index))
        else:
            position = target
        async with self._loop.read_lock, self._moving.mover.paused():
            try:
                return await self.cursor.seek(position, passed=passed)
            finally:
                self._cancelled.clear()
                for session in self.sessions:
                    session.remembered.clear()
                self._loop.restart()

    async def seek_percent(self, percent: float) -> Position:
        """Move to the entry before which `percent` (0 to 100) of the topic's entries are. Otherwise as `seek`."""
        return await self.seek(self._ledger.position_at(round(self._ledger.entries_count * percent / 100)))

    async def skip(self, entries: int) -> Position:
        """Acknowledge the next `entries` entries that are not acknowledged. Returns the position that comes next."""
        return await self._pass(self.cursor.skip(entries))

    async def clear(self) -> Position:
        """Acknowledge everything that is stored now. Returns the position that comes next."""
        return await self._pass(self.cursor.clear_backlog())

    async def expire(self, before_ms: int) -> Position:
        """Acknowledge all entries before the first one published at `before_ms` (ms since 1970) or later.

        Delayed messages that are not due are acknowledged, too. Returns the position that comes next.
        """
        self._loop.check_open()
        first = await self._ledger.find_published(before_ms)
        return await self._pass(self.cursor.ack_upto_entry_before(first))

    async def _pass(self, change: Awaitable[None]) -> Position:
        """Wait for a change that acknowledges everything up to some entry, then forget what it has acknowledged.

        Messages that consumers hold stay with them, so that no key of theirs goes to others meanwhile; their
        acknowledgement is accepted later as a repetition.
        """
        self._loop.check_open()
        await change
        self._acknowledger.passed()
        return self._ledger.next_position(self.cursor.mark_delete)

    async def cancel(self, position: Position, *, deliver_at_ms: int) -> bool:
        """Acknowledge a delayed entry if it was not delivered, durably. Returns whether that was so, now or before.

        `deliver_at_ms`: its time, in ms since 1970. A repeated call is recognized among the last
        CANCELLED_REMEMBERED_MAX of this broker. Shared and key_shared consumers get no message before its time, so one
        that is acknowledged before was not delivered to them.
        """
        self._loop.check_open()
        if position not in self._cancelled:
            if self.cursor.is_acked(position):
                if self.type not in ("shared", "key_shared") or deliver_at_ms <= self._clock():
                    return False
            elif self.dispatcher.known_bits(position):
                return False
            self._cancelled[position] = None
            if len(self._cancelled) > CANCELLED_REMEMBERED_MAX:
                del self._cancelled[next(iter(self._cancelled))]
        try:
            await self._acknowledger.ack([position], [])  # a repeated one waits until the first is durable
        except BaseException:
            if not self.cursor.is_acked(position):
                self._cancelled.pop(position, None)
            raise
        return True

    async def explain(self, message_id: MessageId, *, consumer: str | None = None) -> Reason:
        """Return why a message is not delivered (to `consumer`, if given). Raises NoSuchMessage."""
        self._loop.check_open()
        self._loop.tick()
        connected = [session.consumer.name for session in self.sessions]
        return await self._explainer.explain(
            message_id, consumer=consumer, connected=connected, now=self._now(), now_ms=self._clock()
        )

    def blocked(self, consumer: str) -> Reason | None:
        """Return what stops the delivery of any message to a consumer; None: nothing, or there is no message."""
        return self._explainer.blocked(consumer, now=self._now())

    # -- life ----------------------------------------------------------------------------------------------------

    def close(self, reason: BinderyError) -> None:
        """Fail all calls, also the waiting ones, with `reason`. Idempotent."""
        if not self._loop.is_closed:
            self._remove_listener()
            self._moving.mover.close()
            self._loop.close(reason)

    async def store_delays(self) -> None:
        """Store the index of delayed messages, so that the next broker need not read them: before a close."""
        await self._loop.store_delays(seal=True)

    def end_waits(self, reason: BinderyError) -> None:
        """Fail the calls that wait, with nothing leased to them, because the topic moves to another broker."""
        self._loop.end_waits(reason)

    def drain(self) -> None:
        """End every wait, because the broker stops."""
        self._loop.drain()

    def tick(self) -> None:
        """End the leases and sessions whose time is over. For callers that only read the state."""
        self._loop.tick()

    async def _record(self, changes: Sequence[dispatching.Redelivered]) -> None:
        """Store redelivery counts."""
        await self.cursor.record_redeliveries([Redelivered(*change) for change in changes])

    def _touch(self, consumer: str | None) -> None:
        if consumer is not None:
            self.sessions.touch(consumer, now=self._now())

    def _statistics_of(self, consumer: str | None, ids: Sequence[MessageId]) -> ConsumerStatistics | None:
        """Return the statistics of `consumer`, or of the holder of the first of `ids`; None: it is not connected."""
        if consumer is None and ids:
            ref = self._ref_of(ids[0])
            portion = None if ref is None else self.dispatcher.find(ref)
            if portion is not None and portion.grant is not None:
                consumer = portion.grant.consumer.name
        session = None if consumer is None else self.sessions.get(consumer)
        return None if session is None else session.statistics

    def _ref_of(self, message_id: MessageId) -> MessageRef | None:
        """Return the message of `message_id`; None: it is not known."""
        if message_id.batch_index == NOT_IN_BATCH:
            return MessageRef(message_id.position, WHOLE)
        return next(iter(refs_of((message_id,), self.dispatcher.known_bits)), None)


def _least(limit: int, policy: int) -> int:
    """Return the smaller of a limit and of a policy, of which 0 stands for no limit."""
    return min(limit, policy) if policy else limit


def _filter(cursor: ManagedCursor, topic: TopicName, is_kept: Callable[[str], bool]) -> MessageFilter:
    """Return what a subscription delivers. A retry topic may be that of several subscriptions, by its name: each
    delivers the messages of which REAL_TOPIC and REAL_SUBSCRIPTION do not name another one."""
    source = origin_topic(topic, cursor.name)
    if source == topic.partitioned_topic:
        return MessageFilter(cursor.properties)
    return MessageFilter(
        cursor.properties,
        is_foreign=functools.partial(names_other, topic=source, subscription=cursor.name),
        is_kept=lambda properties: is_kept(properties.get(REAL_SUBSCRIPTION, "")),
    )
