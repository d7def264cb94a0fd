"""Say in a sentence why a message is not delivered, to anybody or to one consumer.

| code              | the message                                                                        |
|-------------------|------------------------------------------------------------------------------------|
| acknowledged      | is acknowledged: it is never delivered again                                       |
| leased            | is held by a consumer, until when                                                  |
| returned          | was returned by a consumer and waits for its redelivery, until when                |
| delayed           | is not due, until when                                                             |
| filtered          | has tags, none of which the subscription wants; or belongs to another subscription |
| unreadable        | is damaged, or comes after a message that is                                       |
| unacked_max       | waits until messages are acknowledged: a limit is reached                          |
| dispatch_rate     | waits because a policy limits the rate of deliveries                               |
| key_held          | has a key of which another consumer than the owner still holds messages            |
| key_of_other      | has a key that another consumer owns                                               |
| not_active        | goes to the active consumer, which is another one                                  |
| behind            | comes after other messages that are delivered first                                |
| no_consumer       | waits for a consumer                                                               |
| next              | is delivered to the next call                                                      |
"""

from collections.abc import Callable
from typing import NamedTuple

from bindery_core.errors import BinderyError
from bindery_pulsar.message_codec import BATCH_COUNT_MAX
from bindery_pulsar.message_id import MessageId, Position

from bindery_broker.dispatch.item import NOT_IN_BATCH, SINGLE, MessageRef
from bindery_broker.dispatch.key_shared import KeySharedDispatcher
from bindery_broker.dispatch.portions import Portion, State
from bindery_broker.dispatch.single_active import SingleActiveDispatcher
from bindery_broker.errors import NoSuchMessage
from bindery_broker.limits.rate_limit import RateLimit
from bindery_broker.managed_ledger import ManagedCursor, ManagedLedger
from bindery_broker.subscriptions.dispatch_loop import DispatchLoop
from bindery_broker.subscriptions.reading import MessageReader


class Reason(NamedTuple):
    """Why a message is not delivered."""

    code: str
    detail: str
    """One sentence."""
    until_ms: int | None = None
    """Milliseconds from now after which the reason ends by itself; None: it does not, or nobody knows when."""
    consumer: str | None = None
    """The consumer that is the reason."""
    policy: str | None = None
    """Field of EffectivePolicies that is the reason."""


class Explainer:
    """Explains for one subscription. It changes nothing, and reads at most one entry."""

    def __init__(
        self,
        cursor: ManagedCursor,
        ledger: ManagedLedger,
        loop: DispatchLoop,
        reader: MessageReader,
        *,
        partition: int,
        policy_of: Callable[[RateLimit], str],
    ) -> None:
        """`policy_of`: returns the policy that sets a limit of deliveries."""
        self._cursor = cursor
        self._ledger = ledger
        self._loop = loop
        self._reader = reader
        self._partition = partition
        self._policy_of = policy_of

    async def explain(
        self, message_id: MessageId, *, consumer: str | None, connected: list[str], now: float, now_ms: int
    ) -> Reason:
        """Return why the message is not delivered (to `consumer`, if given). `connected`: names of all consumers.

        `now` in monotonic seconds, `now_ms` in ms since 1970. Raises NoSuchMessage.
        """
        position, index = message_id.position, message_id.batch_index
        if message_id.partition not in (-1, self._partition) or not (
            self._ledger.contains(position) or position < self._ledger.first_position
        ):
            raise NoSuchMessage("the topic holds no such message", message_id=str(message_id))
        if self._is_acked(position, index):
            return Reason("acknowledged", "the message is acknowledged and is never delivered again")
        # No batch has an index from BATCH_COUNT_MAX on, and an integer with such a bit would be large.
        bits = SINGLE if index <= 0 else 1 << index if index < BATCH_COUNT_MAX else 0
        portion = self._loop.dispatcher.find(MessageRef(position, bits)) if bits else None
        if portion is not None and (reason := self._of_state(portion, now=now)) is not None:
            return reason
        deliver_at_ms = self._reader.delays.deliver_at(position)
        key_hash = 0 if portion is None else portion.key_hash
        if portion is None and deliver_at_ms is None:
            try:
                found = await self._look(position, max(index, 0))
            except BinderyError as error:
                return Reason("unreadable", f"the message cannot be decoded: {error}")
            if found.is_foreign:
                return Reason(
                    "filtered",
                    "the message belongs to another subscription: its properties REAL_TOPIC and REAL_SUBSCRIPTION "
                    "do not name this one and its topic",
                )
            if found.filtered:
                wanted = " or ".join(sorted(self._reader.filter.tags))
                return Reason(
                    "filtered", f"the message has tags, and the subscription wants only those tagged {wanted}"
                )
            deliver_at_ms, key_hash = found.deliver_at_ms, found.key_hash
        if deliver_at_ms is not None and deliver_at_ms > now_ms and self._loop.dispatcher.keeps_delays:
            left = deliver_at_ms - now_ms
            return Reason("delayed", f"the message is to be delivered in {left} ms, at {deliver_at_ms}", left)
        return (
            self._of_limits(consumer)
            or self._of_rates()
            or self._of_consumers(consumer, connected, key_hash)
            or self._of_order(position)
        )

    def blocked(self, consumer: str, *, now: float) -> Reason | None:
        """Return what stops the delivery of any message to a consumer; None: nothing, or there is no message."""
        position = self._reader.position
        if self._reader.stuck is not None and self._ledger.contains(position) and not self._cursor.is_acked(position):
            return Reason("unreadable", f"an entry holds up the subscription: {self._reader.stuck}")
        if (reason := self._of_own_limit(consumer) or self._of_activity(consumer)) is not None:
            return reason
        dispatcher = self._loop.dispatcher
        if dispatcher.paused_until is not None and dispatcher.paused_until > now:
            left = round((dispatcher.paused_until - now) * 1_000)
            return Reason("returned", f"a consumer returned a message; delivery continues in {left} ms", left)
        reason = self._of_limits(None) if self._reader.has_next else None
        return reason or self.throttled()

    def throttled(self) -> Reason | None:
        """Return what limits the rate of deliveries now; None: nothing does, or there is nothing to deliver."""
        return self._of_rates() if self._reader.has_next or self._loop.dispatcher.ready_count else None

    def _of_rates(self) -> Reason | None:
        wait_s, limit = self._loop.throttle()
        if limit is None:
            return None
        left = round(wait_s * 1_000)
        return Reason(
            "dispatch_rate",
            f"a policy limits the rate of deliveries to {limit.text()}; delivery continues in {left} ms",
            left,
            policy=self.throttled_by(),
        )

    def throttled_by(self) -> str | None:
        """Return the policy that holds back deliveries now."""
        limit = self._loop.throttle()[1]
        return None if limit is None else self._policy_of(limit)

    def _is_acked(self, position: Position, index: int) -> bool:
        if self._cursor.is_acked(position) or position < self._ledger.first_position:
            return True
        remaining = self._cursor.remaining(position)
        return index != NOT_IN_BATCH and remaining is not None and not remaining >> index & 1

    def _of_state(self, portion: Portion[object], *, now: float) -> Reason | None:
        grant = portion.grant
        if grant is not None:
            left = max(0, round((grant.deadline - now) * 1_000))
            name = grant.consumer.name
            return Reason(
                "leased", f"consumer {name} holds the message; it is delivered again in {left} ms", left, name
            )
        if portion.state is State.DELAYED and portion.due is not None:
            left = max(0, round((portion.due - now) * 1_000))
            return Reason("returned", f"a consumer returned the message; it is delivered again in {left} ms", left)
        if portion.state is State.ACKING:
            return Reason("acknowledged", "the message is being acknowledged")
        return None

    def _of_own_limit(self, consumer: str | None) -> Reason | None:
        limits = self._loop.dispatcher.limits
        for member in self._loop.members:
            if member.name == consumer and member.held >= limits.unacked_per_consumer_max:
                return Reason(
                    "unacked_max",
                    f"consumer {consumer} holds {member.held} messages, the limit is "
                    f"{limits.unacked_per_consumer_max}: acknowledge some",
                    consumer=consumer,
                    policy="unacked_per_consumer_max",
                )
        return None

    def _of_limits(self, consumer: str | None) -> Reason | None:
        if (reason := self._of_own_limit(consumer)) is not None:
            return reason
        dispatcher, limits = self._loop.dispatcher, self._loop.dispatcher.limits
        if dispatcher.known_count >= limits.unacked_max:
            return Reason(
                "unacked_max",
                f"{dispatcher.known_count} messages of the subscription are not acknowledged, the limit is "
                f"{limits.unacked_max}: acknowledge some",
                policy="unacked_per_subscription_max",
            )
        return None

    def _of_consumers(self, consumer: str | None, connected: list[str], key_hash: int) -> Reason | None:
        dispatcher = self._loop.dispatcher
        if not connected:
            return Reason("no_consumer", "no consumer is connected")
        if (reason := self._of_activity(consumer)) is not None:
            return reason
        if isinstance(dispatcher, KeySharedDispatcher) and key_hash:
            for held in dispatcher.keys_held((key_hash,), count_max=1):
                heir = "no consumer" if held.owner is None else f"consumer {held.owner.name}"
                return Reason(
                    "key_held",
                    f"the key now belongs to {heir}, but consumer {held.holder.name} still holds messages of it",
                    consumer=held.holder.name,
                )
            owner = dispatcher.ranges.owner(key_hash)
            if owner is not None and consumer not in (None, owner.name):
                return Reason("key_of_other", f"consumer {owner.name} owns the key", consumer=owner.name)
            if owner is None:
                return Reason("no_consumer", "no consumer that is connected now owns the key")
        return None

    def _of_activity(self, consumer: str | None) -> Reason | None:
        dispatcher = self._loop.dispatcher
        active = dispatcher.active if isinstance(dispatcher, SingleActiveDispatcher) else None
        if active is None or consumer in (None, active.name):
            return None
        return Reason("not_active", f"consumer {active.name} is the active one", consumer=active.name)

    def _of_order(self, position: Position) -> Reason:
        dispatcher = self._loop.dispatcher
        if self._reader.stuck is not None and self._reader.position <= position:
            return Reason("unreadable", f"an earlier entry holds up the subscription: {self._reader.stuck}")
        if dispatcher.in_order:
            following = self._cursor.next_unacked(self._ledger.first_position)
            before = self._ledger.entries_between(after=following, upto=position)
            if before > 0:
                return Reason("behind", f"up to {before} entries before the message are delivered first")
        elif self._reader.position < position:
            before = self._ledger.entries_between(after=self._reader.position, upto=position)
            return Reason("behind", f"up to {before + 1} entries before the message are read first")
        return Reason("next", "the message is ready, or is read next; it is delivered to a call that waits or comes")

    async def _look(self, position: Position, index: int) -> "_Found":
        entry, message = await self._reader.peek(position, index)
        hash_of = self._loop.dispatcher.hash_of
        is_foreign = self._reader.filter.is_foreign
        return _Found(
            is_foreign=message is not None and is_foreign is not None and is_foreign(message.properties),
            deliver_at_ms=entry.deliver_at_ms or None,
            key_hash=0 if hash_of is None else hash_of(entry.key_bytes),
            filtered=message is not None and not self._reader.filter.matching([message]),
        )


class _Found(NamedTuple):
    deliver_at_ms: int | None
    key_hash: int
    filtered: bool
    is_foreign: bool
