"""Index what the consumers of one subscription did: calls, deliveries, acknowledgements, returns. Pure.

A history has the times of requests and of their responses, and the broker acted at some time between the two. So the
end of a delivery is known as two times, which the rules in `delivery_order` use:

| time        | meaning                                                                                 |
|-------------|-----------------------------------------------------------------------------------------|
| `may_end`   | before it, from the response of the receive on, the consumer certainly held the message |
| `has_ended` | from it on, the consumer certainly did not hold the message any more                    |

What ends a delivery: an acknowledgement of the message, by any consumer; a negative acknowledgement; that its consumer
left (DELETE); the end of its lease, which is `ack_timeout_ms` after the broker granted it; another delivery of the same
message. A subscription in the topic's order returns all messages if one is returned, and in a failover subscription, a
delivery to another consumer ends those before it. A fault of the cluster may end any delivery. A request without a
definite response (unknown) may have an effect at any time after it was sent, but need not have any.

Times are nanoseconds of the monotonic clock. Receives that use `redeliver` or `request_id` repeat deliveries and must
not be used with an order that is judged.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from sys import intern
from typing import Final

from bindery_e2e.judging.history import HistoryError, Record

MS: Final = 1_000_000
ORDERS: Final = ("none", "key", "topic")
LATE_NS: Final = 1_000 * MS
"""Nanoseconds after a deadline within which the broker certainly ends a lease or a session."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A receive that did not definitely fail."""

    n: int
    consumer: str
    begun: int
    ended: int
    is_lost: bool
    """Whether the response was lost (unknown): the consumer may hold messages that the history does not have."""
    count_max: int
    """Number of messages that the call asked for."""
    count: int
    """Number of messages in the response."""
    ack_timeout: int
    session_ttl: int


@dataclass(frozen=True, slots=True)
class Effect:
    """A request that may end deliveries. `ended` is the time of its response; it certainly had its effect by then if
    `is_sure`. `delay`: after it, the message may be delivered again."""

    begun: int
    ended: int
    is_sure: bool
    delay: int = 0


@dataclass(slots=True, eq=False)
class Delivery:
    message_id: str
    call: Call
    index: int
    """Position in the response."""
    may_end: int = 0
    has_ended: int = 0
    free_at: int = 0
    """`has_ended` plus the delay of a negative acknowledgement: from here on, the message must be delivered again."""

    @property
    def consumer(self) -> str:
        return self.call.consumer

    @property
    def begun(self) -> int:
        return self.call.begun

    @property
    def ended(self) -> int:
        return self.call.ended

    def is_before(self, other: "Delivery") -> bool:
        """Whether this delivery may have been made before the other one."""
        if self.call is other.call:
            return self.index < other.index
        return self.begun < other.ended


@dataclass(slots=True)
class Consuming:
    """All operations on one subscription, in the order of their responses. `order`: one of ORDERS."""

    kind: str
    order: str
    calls: list[Call] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)
    acks: dict[str, list[Effect]] = field(default_factory=dict)
    """Message id -> its acknowledgements that did not definitely fail."""
    nacks: dict[str, list[Effect]] = field(default_factory=dict)
    """Message id -> its negative acknowledgements that did not definitely fail."""
    returns: list[Effect] = field(default_factory=list)
    """Negative acknowledgements that returned a message, or may have."""
    leaves: dict[str, list[Effect]] = field(default_factory=dict)
    """Consumer -> the requests that removed it, or may have."""
    touches: dict[str, list[int]] = field(default_factory=dict)
    """Consumer -> times at which a request of it may have extended its session."""

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise HistoryError(f"unknown order {self.order!r} of a subscription: use {', '.join(ORDERS)}")

    # -- reading the history -------------------------------------------------------------------------------------------

    def take(self, begun: Record, ended: Record) -> None:
        """Add an operation that has ended."""
        values, op = begun.values, begun.values["op"]
        if op == "receive" and ended.type != "failed":
            self._take_receive(begun, ended)
            return
        self.touches.setdefault(intern(values["process"]), []).append(ended.at)
        if ended.type == "failed":
            return
        sure = ended.type == "ok"
        effect = Effect(begun.at, ended.at, sure, values.get("delay_ms", 0) * MS if op == "nack" else 0)
        if op == "ack":
            for message_id in values["ids"]:
                self.acks.setdefault(intern(message_id), []).append(effect)
        elif op == "nack":
            returned = ended.values["returned"] if sure else values["ids"]
            for message_id in returned:
                self.nacks.setdefault(intern(message_id), []).append(effect)
            if returned:
                self.returns.append(effect)
        elif op == "leave":
            self.leaves.setdefault(values["process"], []).append(effect)

    def _take_receive(self, begun: Record, ended: Record) -> None:
        values = begun.values
        rows = ended.values["messages"] if ended.type == "ok" else ()
        call = Call(
            n=begun.n,
            consumer=intern(values["process"]),
            begun=begun.at,
            ended=ended.at,
            is_lost=ended.type != "ok",
            count_max=values["max"],
            count=len(rows),
            ack_timeout=values["ack_timeout_ms"] * MS,
            session_ttl=values["session_ttl_ms"] * MS,
        )
        self.calls.append(call)
        self.deliveries += [Delivery(intern(row[0]), call, index) for index, row in enumerate(rows)]

    # -- ends of deliveries --------------------------------------------------------------------------------------------

    def settle(self, faults: Sequence[tuple[int, int]] = ()) -> None:
        """Compute the ends of all deliveries. `faults`: begins and ends of faults, both ascending."""
        by_message: dict[str, list[Delivery]] = {}
        for delivery in self.deliveries:
            by_message.setdefault(delivery.message_id, []).append(delivery)
        for delivery in self.deliveries:
            self._settle(delivery, by_message[delivery.message_id], faults)
        if self.kind == "failover":
            self._settle_failover()
        elif self.order == "topic":
            self._settle_together()

    def _settle(self, delivery: Delivery, same: Sequence[Delivery], faults: Sequence[tuple[int, int]]) -> None:
        call = delivery.call
        acks = self.acks.get(delivery.message_id, ())
        nacks = self.returns if self.order == "topic" else self.nacks.get(delivery.message_id, ())
        leaves = self.leaves.get(call.consumer, ())
        may_end = call.begun + call.ack_timeout
        has_ended = free_at = call.ended + call.ack_timeout + LATE_NS
        for effect in (*acks, *nacks, *leaves):
            if effect.is_sure and effect.ended <= call.begun:
                continue  # before the delivery
            may_end = min(may_end, effect.begun)
            if effect.is_sure and effect.begun >= call.ended and effect.ended < has_ended:
                has_ended, free_at = effect.ended, effect.ended + effect.delay
        for other in same:
            if other.begun >= call.ended and other.ended < has_ended:
                has_ended = free_at = other.ended
        fault = bisect_left(faults, call.begun, key=itemgetter(1))  # it may have begun before the call
        if fault < len(faults):
            may_end = min(may_end, faults[fault][0])
        delivery.may_end = max(may_end, call.begun)
        delivery.has_ended, delivery.free_at = has_ended, free_at

    def _settle_together(self) -> None:
        """The end of one lease returns all messages."""
        leased: deque[Delivery] = deque()
        for delivery in sorted(self.deliveries, key=lambda delivery: delivery.begun):
            while leased and leased[0].has_ended <= delivery.begun:
                leased.popleft()
            leased.append(delivery)
            oldest = leased[0].call
            delivery.may_end = min(delivery.may_end, max(delivery.begun, oldest.begun + oldest.ack_timeout))

    def _settle_failover(self) -> None:
        """Another consumer may become active at any time, which returns all messages of the one before it."""
        ordered = sorted(self.deliveries, key=lambda delivery: delivery.begun)
        begins = [delivery.begun for delivery in ordered]
        others = [len(ordered)] * len(ordered)
        """Index of the next delivery to another consumer."""
        for index in range(len(ordered) - 2, -1, -1):
            is_same = ordered[index].consumer == ordered[index + 1].consumer
            others[index] = others[index + 1] if is_same else index + 1
        for delivery in ordered:
            delivery.may_end = delivery.begun
            index = bisect_left(begins, delivery.ended)
            if index < len(ordered) and ordered[index].consumer == delivery.consumer:
                index = others[index]
            if index < len(ordered):
                delivery.has_ended = min(delivery.has_ended, ordered[index].ended)
                delivery.free_at = min(delivery.free_at, ordered[index].ended)

    # -- members -------------------------------------------------------------------------------------------------------

    def memberships(self) -> Mapping[str, list[tuple[int, int]]]:
        """Consumer -> the periods in which the subscription may count it as a member, ascending.

        A period begins with a receive. It ends with a request to leave that was sent after all receives before it had
        ended, or when the session has certainly ended: after the last request, and after all leases.
        """
        found: dict[str, list[tuple[int, int]]] = {}
        by_consumer: dict[str, list[Call]] = {}
        for call in self.calls:
            by_consumer.setdefault(call.consumer, []).append(call)
        for consumer, calls in by_consumer.items():
            calls.sort(key=lambda call: call.begun)
            touches = self.touches.get(consumer, [])
            leaves = [effect for effect in self.leaves.get(consumer, ()) if effect.is_sure]
            periods = found.setdefault(consumer, [])
            began, last_ended = calls[0].begun, calls[0].ended
            for call, following in zip(calls, [*calls[1:], None], strict=True):
                last_ended = max(last_ended, call.ended)
                left = min((e.ended for e in leaves if e.begun >= last_ended), default=None)
                touched = max((at for at in touches if following is None or at < following.begun), default=0)
                over = max(last_ended, touched) + max(call.session_ttl, call.ack_timeout) + LATE_NS
                end = over if left is None else min(over, left)
                if following is None or end <= following.begun:
                    periods.append((began, end))
                    if following is not None:
                        began = following.begun
        return found
