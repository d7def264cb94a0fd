"""Judge the order in which a subscription delivered, and whether anything was stuck. Pure; the input is an index.

Lanes. The messages of a subscription are divided into lanes by the order that it promises:

| order   | a lane is                             | types of subscriptions |
|---------|---------------------------------------|------------------------|
| `key`   | the messages with one key             | Key_Shared             |
| `topic` | all messages                          | Exclusive, Failover    |
| `none`  | each message by itself                | Shared                 |

Within a lane, messages are ordered by their ids, which are places in the topic. *Earlier* means a lower place in the
same lane. A consumer *holds* a message from its delivery until the delivery ends (`consuming`). A message is
*acknowledged* from the time at which an acknowledgement is sent that does not definitely fail, so that one in flight
counts.

Rules, and the kinds of errors:

1. `held-twice`. While a consumer holds a message, no other consumer gets a message of the same lane, and that message
   is delivered to no consumer. So a consumer that takes a key over gets nothing of it, neither later nor earlier
   messages, before the consumer that had the key has acknowledged or returned all of it. In a failover subscription,
   the consumer that becomes active takes all messages away from the one before it, so nothing is held twice there.
2. `out-of-order`. When a message is delivered to a consumer, each earlier message is acknowledged, or this consumer
   holds it. An earlier message is neither new, nor returned and not delivered again, nor held elsewhere. This covers:
   - first deliveries: all earlier messages were delivered before;
   - redelivery: after a return (negative acknowledgement, end of a lease, a consumer that left), a lane continues with
     its lowest returned message, and then in order;
   - returns of single messages: if a consumer holds messages 4, 5 and 6 of a key and returns 4, then it still holds 5
     and 6, and may acknowledge them. Message 7, which was not delivered yet, must not be delivered before 4 was
     delivered again. With the order `topic`, the return of one message returns all, so that 5 is delivered again after
     4, too.
3. `stuck`. A message is *reached* when it or a later message of the topic was delivered, or when a receive that was
   sent after it was stored got nothing: before that, it may wait for its turn in a backlog. A lane *waits* while it has
   a reached message that is not acknowledged, no consumer can hold a message of the lane, and the delay of a negative
   acknowledgement is over. A consumer has *demand* during receives that return fewer messages than they asked for, and
   between two of them that are at most 0.5 s apart. No lane waits for more than 2 s without interruption while all
   members of the subscription have demand. All, because the history does not have the owner of a key; a consumer that
   disappeared without a request to leave is a member until its session and its leases have ended. So, after a consumer
   left, its keys are delivered to the others within 2 s. The periods of faults do not count.
4. `unacknowledged`. At the end, each message that was acknowledged to its producer is acknowledged by a consumer.

That nothing is delivered again after the acknowledgement was answered (`redelivered`), and that each message is
delivered (`undelivered`), are rules of `observed` and `validate`.

An error is reported only if no order of events within the recorded times is allowed. If a response to a receive was
lost, its consumer may hold any message that was sent before: rule 2 does not count those as missing, and no lane waits
until the leases of that response have ended.
"""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from bindery_e2e.judging.consuming import LATE_NS, MS, Call, Consuming, Delivery

STUCK_NS: Final = 2_000 * MS
DEMAND_GAP_NS: Final = 500 * MS
"""Maximum pause in nanoseconds between two receives of a consumer that has demand."""
Case = tuple[str, str]
"""Kind of error, and description."""
Period = tuple[int, int]
"""[begin, end) in nanoseconds."""


@dataclass(slots=True, eq=False)
class Stored:
    """A message of the topic. `sent_at`: when its first produce was sent; `stored_at`: when it certainly was stored."""

    id: str
    key: str
    sent_at: int
    stored_at: int
    is_acknowledged: bool
    """Whether its producer got this id in a response."""
    text: str
    acked_at: int | None = None
    """Time of the first acknowledgement by a consumer that did not definitely fail."""
    is_done: bool = False
    """Whether an acknowledgement by a consumer succeeded."""

    @property
    def place(self) -> tuple[int, int, int]:
        return place_of(self.id)

    def __str__(self) -> str:
        return f"{self.id} ({self.text})"


def place_of(message_id: str) -> tuple[int, int, int]:
    """Return the position in the topic: ledger, entry, index in the batch."""
    ledger, entry, _, index = message_id.split(":")
    return int(ledger), int(entry), int(index)


@dataclass(slots=True)
class Lane:
    name: str
    messages: list[Stored] = field(default_factory=list)
    """Ascending by place."""
    deliveries: list[Delivery] = field(default_factory=list)
    """Ascending by the time of the response."""


def find(
    consuming: Consuming, stored: Iterable[Stored], *, drained: bool, faults: Sequence[Period] = ()
) -> Iterator[Case]:
    """Find all errors.

    `stored`: the messages that the subscription must deliver. `drained`: whether the cluster confirmed at the end that
    all of them are acknowledged; an acknowledgement without a response then counts. `faults`: periods of faults,
    ascending.
    """
    consuming.settle(faults)
    lanes, by_id = _lanes(consuming, stored)
    waits = Waiting(consuming, faults)
    lost = [call for call in consuming.calls if call.is_lost]
    for lane in lanes:
        yield from _order(lane, by_id, lost, is_exclusive=consuming.kind != "failover")
        yield from waits.find(lane)
    for message in by_id.values():
        is_done = message.is_done or (drained and message.acked_at is not None)
        if message.is_acknowledged and not is_done:
            yield "unacknowledged", f"{message}"


def _lanes(consuming: Consuming, stored: Iterable[Stored]) -> tuple[list[Lane], dict[str, Stored]]:
    by_id = {message.id: message for message in stored}
    lanes: dict[str, Lane] = {}
    names: dict[str, str] = {}
    for message in sorted(by_id.values(), key=lambda message: message.place):
        acks = consuming.acks.get(message.id, ())
        message.acked_at = min((effect.begun for effect in acks), default=None)
        message.is_done = any(effect.is_sure for effect in acks)
        name = {"key": message.key, "topic": "", "none": message.id}[consuming.order]
        names[message.id] = name
        lanes.setdefault(name, Lane(name)).messages.append(message)
    for delivery in sorted(consuming.deliveries, key=lambda d: (d.ended, d.index)):
        if delivery.message_id in names:  # others were not sent by the traffic: phantoms
            lanes[names[delivery.message_id]].deliveries.append(delivery)
    return list(lanes.values()), by_id


# -- order -------------------------------------------------------------------------------------------------------------


def _order(lane: Lane, by_id: Mapping[str, Stored], lost: Sequence[Call], *, is_exclusive: bool) -> Iterator[Case]:
    """Find held-twice and out-of-order, delivery by delivery in the order of responses."""
    of_message: dict[str, list[Delivery]] = {}
    for delivery in lane.deliveries:
        of_message.setdefault(delivery.message_id, []).append(delivery)
    unacknowledged = _Unacknowledged(lane.messages)
    held: list[Delivery] = []
    for delivery in lane.deliveries:
        held = [other for other in held if other.may_end > delivery.ended]
        other = _held_twice(delivery, held) if is_exclusive else None
        message = by_id[delivery.message_id]
        if other is not None:
            yield (
                "held-twice",
                f"{_described(delivery, message)}, while {other.consumer} held {by_id[other.message_id]} since "
                f"operation {other.call.n}",
            )
        else:
            for earlier in unacknowledged.before(message, at=delivery.ended):
                if not _may_hold(delivery, earlier, of_message.get(earlier.id, ()), lost):
                    yield (
                        "out-of-order",
                        f"{_described(delivery, message)}, before {earlier}, which was neither acknowledged nor held by"
                        f" it",
                    )
                    break
        held.append(delivery)


def _held_twice(delivery: Delivery, held: Iterable[Delivery]) -> Delivery | None:
    """Return a delivery that was certainly not over when this one was made."""
    for other in held:
        if other.consumer == delivery.consumer and other.message_id != delivery.message_id:
            continue
        # `other` was held at the response of `delivery`. The latter was made before that, perhaps before `other`: then
        # it must have been over by then.
        if delivery.may_end > delivery.ended or other.ended <= delivery.begun:
            return other
    return None


def _may_hold(delivery: Delivery, earlier: Stored, deliveries: Iterable[Delivery], lost: Iterable[Call]) -> bool:
    """Whether the consumer of `delivery` may have held `earlier` when it was made."""
    for other in deliveries:
        if other.consumer == delivery.consumer and other.is_before(delivery) and other.has_ended >= delivery.begun:
            return True
    return any(
        call.consumer == delivery.consumer and call.begun < delivery.ended and earlier.sent_at < call.ended
        for call in lost
    )


class _Unacknowledged:
    """The messages of a lane that are not acknowledged, as time passes. A linked list: removal takes constant time."""

    def __init__(self, messages: Sequence[Stored]) -> None:
        self._messages = messages
        self._index = {message.id: index for index, message in enumerate(messages)}
        self._next = list(range(1, len(messages) + 2))
        """Index of the next one, shifted by one: `_next[0]` is the first."""
        self._before = list(range(-1, len(messages) + 1))
        times = [(m.acked_at, index) for index, m in enumerate(messages) if m.acked_at is not None]
        self._due = sorted(times, reverse=True)

    def before(self, message: Stored, *, at: int) -> Iterator[Stored]:
        """Iterate over the earlier messages that are not acknowledged at the time `at`, which never decreases."""
        while self._due and self._due[-1][0] < at:
            self._remove(self._due.pop()[1] + 1)
        end = self._index[message.id] + 1
        place = self._next[0]
        while place < end:
            yield self._messages[place - 1]
            place = self._next[place]

    def _remove(self, place: int) -> None:
        before, following = self._before[place], self._next[place]
        self._next[before] = following
        if following < len(self._before):
            self._before[following] = before


def _described(delivery: Delivery, message: Stored) -> str:
    return f"{message} of {message.key!r} was delivered to {delivery.consumer} in operation {delivery.call.n}"


# -- waiting -----------------------------------------------------------------------------------------------------------


class Waiting:
    """Finds lanes that wait for too long."""

    def __init__(self, consuming: Consuming, faults: Iterable[Period] = ()) -> None:
        self._lost = [(call.begun, _lost_until(consuming, call)) for call in consuming.calls if call.is_lost]
        self._quiet = merged([*no_demand(consuming), *faults])
        self._quiet_begins = [begin for begin, _ in self._quiet]
        self._quiet_ends = [end for _, end in self._quiet]
        self._last = max((call.ended for call in consuming.calls), default=0)
        empty = sorted((call.begun, call.ended) for call in consuming.calls if not call.is_lost and not call.count)
        self._empty_begins = [begin for begin, _ in empty]
        self._empty_ends = list(itertools.accumulate((end for _, end in reversed(empty)), min))[::-1]
        """For each empty response, the first end of it and all later ones."""
        self._passed: list[tuple[int, int, int]] = []
        """Ascending places of delivered messages."""
        self._passed_at: list[int] = []
        """The times at which each of them was delivered."""
        for delivery in sorted(consuming.deliveries, key=lambda delivery: delivery.ended):
            place = place_of(delivery.message_id)
            if not self._passed or place > self._passed[-1]:
                self._passed.append(place)
                self._passed_at.append(delivery.ended)

    def _reached_at(self, message: Stored) -> int:
        """Time at which the broker has certainly read the message."""
        passed = bisect_left(self._passed, message.place)
        empty = bisect_left(self._empty_begins, message.stored_at)
        return min(
            self._passed_at[passed] if passed < len(self._passed) else self._last,
            self._empty_ends[empty] if empty < len(self._empty_ends) else self._last,
        )

    def find(self, lane: Lane) -> Iterator[Case]:
        held = [(delivery.begun, delivery.free_at) for delivery in lane.deliveries]
        begins = {message.id: max(message.stored_at, self._reached_at(message)) for message in lane.messages}
        unacknowledged = [
            (begins[message.id], self._last if message.acked_at is None else message.acked_at)
            for message in lane.messages
        ]
        for begin, end in without(merged(unacknowledged), merged([*held, *self._lost])):
            near = self._quiet[bisect_right(self._quiet_ends, begin) : bisect_left(self._quiet_begins, end)]
            for since, until in without([(begin, end)], near):
                if until - since > STUCK_NS:
                    waiting = next(m for m in lane.messages if begins[m.id] < until and (m.acked_at or until) > since)
                    seconds = (until - since) / 1e9
                    yield "stuck", f"{waiting} of {waiting.key!r} waited {seconds:.3f} s while all consumers had demand"


def judged_s(consuming: Consuming) -> float:
    """Return the seconds in which a lane could be found to be stuck: the sum of the periods that are long enough."""
    first = min((call.begun for call in consuming.calls), default=0)
    last = max((call.ended for call in consuming.calls), default=0)
    periods = without([(first, last)], no_demand(consuming))
    return sum(end - begin for begin, end in periods if end - begin > STUCK_NS) / 1e9


def _lost_until(consuming: Consuming, call: Call) -> int:
    """Time at which the messages of a lost response have certainly been returned."""
    leaves = consuming.leaves.get(call.consumer, ())
    left = min((e.ended for e in leaves if e.is_sure and e.begun >= call.ended), default=None)
    over = call.ended + call.ack_timeout + LATE_NS
    return over if left is None else min(over, left)


def no_demand(consuming: Consuming) -> list[Period]:
    """Return the periods in which there is no member, or a member without demand; ascending, not overlapping."""
    demand: dict[str, list[Period]] = {}
    for call in sorted(consuming.calls, key=lambda call: call.begun):
        if call.is_lost or call.count >= call.count_max:
            continue
        periods = demand.setdefault(call.consumer, [])
        if periods and call.begun - periods[-1][1] <= DEMAND_GAP_NS:
            periods[-1] = (periods[-1][0], max(periods[-1][1], call.ended))
        else:
            periods.append((call.begun, call.ended))
    memberships = consuming.memberships()
    quiet: list[Period] = []
    everybody: list[Period] = []
    for consumer, periods in memberships.items():
        quiet += without(merged(periods), demand.get(consumer, []))
        everybody += periods
    first = min((call.begun for call in consuming.calls), default=0)
    last = max((call.ended for call in consuming.calls), default=0)
    return merged([*quiet, (0, first), *without([(first, last)], merged(everybody))])


def merged(periods: Iterable[Period]) -> list[Period]:
    """Return the union of periods: ascending, not overlapping, without empty ones."""
    found: list[Period] = []
    for begin, end in sorted(periods):
        if begin >= end:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def without(periods: Iterable[Period], gone: Sequence[Period]) -> list[Period]:
    """Return what remains of `periods` outside of `gone`. Both are ascending and do not overlap."""
    found: list[Period] = []
    index = 0
    for begin, end in periods:
        at = begin
        while index < len(gone) and gone[index][1] <= at:
            index += 1
        place = index
        while place < len(gone) and gone[place][0] < end:
            if gone[place][0] > at:
                found.append((at, gone[place][0]))
            at = max(at, gone[place][1])
            place += 1
        if at < end:
            found.append((at, end))
    return found
