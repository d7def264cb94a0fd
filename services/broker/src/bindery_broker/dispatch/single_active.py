"""The dispatcher of exclusive and failover subscriptions: one active consumer, always in the topic's order.

Messages are delivered in order. If one is returned (negative acknowledgement, timeout, or the consumer left), every
message in delivery is returned with it, and reading starts again at the lowest unacknowledged message: `rewind_wanted`
makes the owner move the read position there before it reads on. Messages that were read before a rewind are recognized
by their `generation` and dropped.

A failover subscription has several consumers, of which `pick_active` chooses one whenever one joins or leaves. If the
choice changes while the former active consumer holds messages, the new one waits, because acknowledgements may be on
their way:

| meanwhile the former active consumer              | the new one continues                                     |
|---------------------------------------------------|-----------------------------------------------------------|
| acknowledges all that it holds                    | with the next message, at once: nothing is delivered twice |
| still holds messages after HANDOVER_S             | with the lowest unacknowledged message                    |
| returns one, leaves, or its session or lease ends | with the lowest unacknowledged message, at once           |
| becomes active again                              | not at all; the former one keeps what it holds            |

Nobody waits for a consumer that holds nothing, nor for one that has left: it cannot process what it returned.

Invariants: ready messages are in ascending order and above all held ones; after a rewind no message is held or ready;
between rewinds no message is offered again after its delivery, also if later ones were put down; at most one consumer
holds messages; nothing is delivered while another consumer than the active one holds messages.
Source: Pulsar's single-active-consumer dispatcher (rewind to mark-delete + 1), which always waits for
activeConsumerFailoverDelayTimeMillis after a change of a failover subscription.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, Generic

from bindery_pulsar.message_id import Position

from bindery_broker.dispatch.consumers import Consumer
from bindery_broker.dispatch.dispatcher import CountsOf, Redelivered, no_counts
from bindery_broker.dispatch.item import B, Delivery, DispatchLimits, Item, MessageRef
from bindery_broker.dispatch.leases import LeaseTable
from bindery_broker.dispatch.portions import Portion, PortionTable, State
from bindery_broker.dispatch.read_ahead import ReadAhead

HANDOVER_S: Final = 1.0
"""Maximum seconds for which a new active consumer waits for the acknowledgements of the former one. Pulsar's default
of activeConsumerFailoverDelayTimeMillis."""

PickActive = Callable[[Sequence[Consumer]], Consumer]

_LEASED = frozenset({State.LEASED})


def first_of(consumers: Sequence[Consumer]) -> Consumer:
    """Choose the consumer that joined first: an exclusive subscription has one."""
    return consumers[0]


class SingleActiveDispatcher(Generic[B]):
    """A `Dispatcher` that keeps the order."""

    in_order = True
    keeps_delays = False
    hash_of: Callable[[bytes], int] | None = None

    def __init__(
        self,
        *,
        limits: DispatchLimits | None = None,
        read_ahead: ReadAhead | None = None,
        counts_of: CountsOf = no_counts,
        pick_active: PickActive = first_of,
    ) -> None:
        """`read_ahead`: shared by the subscriptions of the broker. `counts_of`: the redelivery counts stored before."""
        self.limits = limits or DispatchLimits()
        self._read_ahead = read_ahead or ReadAhead(self.limits.ready_bytes_max)
        self._counts_of = counts_of
        self._pick_active = pick_active
        self.leases = LeaseTable()
        self.generation = 0
        """Incremented by each rewind or reset."""
        self.rewind_wanted = False
        """The owner moves the read position to the lowest unacknowledged message and calls `rewound`."""
        self.paused_until: float | None = None
        """End of the delay of a negative acknowledgement; it also delays all later messages."""
        self.redelivered: list[Redelivered] = []
        self.consumers: list[Consumer] = []
        """In the order in which they joined."""
        self.active: Consumer | None = None
        self._former: Consumer | None = None
        """The consumer that held messages when another one became active."""
        self._handover_ends_at: float | None = None
        """When the messages of `_former` are returned; monotonic seconds. None: no time has passed since the change."""
        self._ready: deque[Item[B]] = deque()
        self._ready_count = 0
        self._ready_bytes = 0
        self._counted = (0, 0)
        """The bytes and the number of ready messages that are counted in `read_ahead`."""
        self._table: PortionTable[B] = PortionTable()
        """Messages that are held, or being acknowledged, also if they were not read."""
        self._offered_upto: MessageRef | None = None
        """The last messages that were offered."""
        self._taken_upto: MessageRef | None = None

    # -- consumers -----------------------------------------------------------------------------------------------

    def join(self, consumer: Consumer) -> None:
        """A consumer has connected. It may become the active one."""
        assert consumer not in self.consumers
        self.consumers.append(consumer)
        self._choose()

    def leave(self, consumer: Consumer) -> int:
        """The consumer has left: see `release`. Another one may become active."""
        count = self.release(consumer)
        self.consumers.remove(consumer)
        self._choose()
        return count

    def _choose(self) -> None:
        chosen = self._pick_active(self.consumers) if self.consumers else None
        if chosen is self.active:
            return
        if self.active is not None and self.active.held:
            self._former, self._handover_ends_at = self.active, None
        self.active = chosen

    @property
    def waits_for(self) -> Consumer | None:
        """The former active consumer, if it holds messages whose acknowledgements the active one waits for."""
        former = self._former
        return former if former is not None and former is not self.active and former.held else None

    def _hand_over(self, *, now: float) -> None:
        """Return what the former active consumer still holds HANDOVER_S after it was replaced."""
        if self.waits_for is None:
            self._former = None
        elif self._handover_ends_at is None:
            self._handover_ends_at = now + HANDOVER_S
        elif now >= self._handover_ends_at:
            self.rewind()

    def taker(self, waiting: Collection[Consumer], *, now: float) -> Consumer | None:
        """Return the active consumer, if it waits and something can be delivered to it."""
        active = self.active
        if active is None or active not in waiting or not self._ready or self.waits_for is not None:
            return None
        if self.paused_until is not None and now < self.paused_until:
            return None
        return active if active.held < self.limits.unacked_per_consumer_max else None

    def reads_for(self, waiting: Collection[Consumer]) -> Consumer | None:
        """Return the active consumer, if it is in `waiting` and may hold more now."""
        active = self.active
        if active is None or active not in waiting or self.waits_for is not None:
            return None
        return active if active.held < self.limits.unacked_per_consumer_max else None

    def prepare(self, waiting: Collection[Consumer]) -> None:
        """Nothing to do: only the active consumer can get messages, and it can get each of them."""

    def make_room(self, waiting: Collection[Consumer]) -> None:
        """Nothing to do, as in `prepare`."""

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def ready_count(self) -> int:
        return self._ready_count

    @property
    def ready_bytes(self) -> int:
        """Bytes of the ready messages."""
        return self._ready_bytes

    @property
    def known_count(self) -> int:
        return self._ready_count + self._table.messages

    def known_bits(self, position: Position) -> int:
        """Return the messages of an entry that are held or being acknowledged, as bits."""
        return self._table.bits_of(position)

    def find(self, ref: MessageRef) -> Portion[B] | None:
        """Return the portion with a message of `ref`; None: it is not known, or only read."""
        return self._table.find(ref)

    def room(self, *, asked: int | None = None) -> int:
        """Return how many messages may be read now; 0 while a limit is reached, or the active consumer has to wait for
        acknowledgements of the former one.

        `asked`: number of messages that a consumer requested while there is no room to read ahead. At most this number
        may be read, and none while a message is ready.
        """
        if self.waits_for is not None:
            return 0
        if self._ready_bytes >= self.limits.ready_bytes_max or (asked is not None and self._ready):
            return 0
        room = max(0, min(self.limits.ready_max - self._ready_count, self.limits.unacked_max - self.known_count))
        return room if asked is None else min(room, asked)

    def rewound(self) -> None:
        self.rewind_wanted = False

    def replayable(self) -> bool:
        """Return False: returned messages are read again after a rewind."""
        return False

    def replay(self, count_max: int, *, entries_max: int | None = None) -> list[MessageRef]:
        return []

    def replay_due(self, positions: Iterable[Position]) -> None:
        raise AssertionError("messages are delivered in the order of the topic, without delays")

    def give_back(self, refs: Iterable[MessageRef]) -> None:
        raise AssertionError("the messages are read again after a rewind only")

    def forget_missing(self, refs: Iterable[MessageRef]) -> None:
        raise AssertionError("the messages are read again after a rewind only")

    def offer_again(self, items: Sequence[Item[B]], *, generation: int) -> None:
        raise AssertionError("the messages are read again after a rewind only")

    def offer(self, items: Sequence[Item[B]], *, generation: int) -> None:
        """Add messages in the order of the read. Messages that are being acknowledged are dropped.

        If a rewind followed the read, all messages are dropped.
        """
        if generation != self.generation or self.rewind_wanted:
            return
        for item in items:
            last = self._offered_upto
            assert (
                last is None
                or last.position < item.position
                or (last.position == item.position and not last.bits & item.bits)
            ), (last, item.position)
            self._offered_upto = MessageRef(item.position, item.bits)
            known = self._table.bits_of(item.position) & item.bits
            if known:
                if known == item.bits:
                    continue
                item.cut(known)
            self._ready.append(item)
            self._ready_count += item.bits.bit_count()
            self._ready_bytes += item.size
        self._count()

    # -- delivering ----------------------------------------------------------------------------------------------

    def next_size(self, consumer: Consumer) -> int:
        """Return the bytes of the next ready message; 0: there is none for `consumer`."""
        return self._ready[0].first_size if self._ready and consumer is self.active else 0

    def take(
        self,
        consumer: Consumer,
        *,
        count_max: int,
        bytes_max: int,
        lease_s: float,
        now: float,
        alone_from: int | None = None,
    ) -> list[Delivery[B]]:
        """Lease the next ready messages to `consumer`, if it is active; at least one, whatever its size."""
        assert alone_from is None, "messages that are delivered in order are not dead-lettered"
        if consumer is not self.active or self.waits_for is not None:
            return []
        if self.paused_until is not None:
            if now < self.paused_until:
                return []
            self.paused_until = None
        count_max = min(count_max, self.limits.unacked_per_consumer_max - consumer.held)
        taken: list[tuple[Portion[B], Item[B]]] = []
        while self._ready and count_max > 0:
            item = self._ready[0]
            if taken and item.first_size > bytes_max:
                break
            bits, count = self._same_count(item)
            if bits != item.bits:
                self._ready.appendleft(item := item.cut(bits))
            bits = item.first_bits(count_max=count_max, size_max=bytes_max)
            if bits == item.bits:
                self._ready.popleft()
            else:
                item = item.cut(bits)
            portion = self._table.add(item.position, item.bits, State.LEASED)
            portion.size = item.size
            portion.redelivery_count = count
            taken.append((portion, item))
            self._ready_count -= portion.count
            self._ready_bytes -= item.size
            count_max -= portion.count
            bytes_max -= item.size
        if not taken:
            return []
        self._taken_upto = taken[-1][0].ref
        self._count()
        return self.leases.deliver(consumer, taken, lease_s=lease_s, now=now)

    def _same_count(self, item: Item[B]) -> tuple[int, int]:
        """Return the first messages of `item` that have the same redelivery count, and this count."""
        lowest = item.bits & -item.bits
        count, bits = 0, item.bits
        for other, of_others in self._counts_of(item.position):
            if of_others & lowest:
                count, bits = other, of_others & item.bits
                break
            bits &= ~of_others
        rest = item.bits & ~bits
        return (bits & ((rest & -rest) - 1) if rest else bits), count

    def held(self, consumer: Consumer, refs: Iterable[MessageRef]) -> list[Portion[B]]:
        """Return those messages that `consumer` holds."""
        return [
            portion
            for portion in self._table.select(refs, _LEASED)
            if portion.grant is not None and portion.grant.consumer is consumer
        ]

    def renew(
        self, consumer: Consumer, refs: Iterable[MessageRef], *, lease_s: float, now: float
    ) -> tuple[str, list[Portion[B]]]:
        """Restart the leases of those messages that `consumer` still holds. Returns the lease and these messages."""
        return self.leases.renew(consumer, self.held(consumer, refs), lease_s=lease_s, now=now)

    # -- returning -----------------------------------------------------------------------------------------------

    def begin_ack(self, refs: Iterable[MessageRef]) -> list[Portion[B]]:
        """Mark messages as acknowledged, not yet durably. Pass the result to `finish_ack` or `fail_ack`.

        Messages of other entries than those that are known, for example of an earlier delivery before a rewind, are
        marked as well, because a read that is in progress may offer them.
        """
        refs = list(refs)
        acking = self._table.select(refs, _LEASED)
        self.leases.drop(acking)
        for portion in acking:
            portion.state = State.ACKING
        acking += self._drop_ready(refs)
        acking += [
            self._table.add(position, bits, State.ACKING) for position, bits in refs if position not in self._table
        ]
        return acking

    def begin_cumulative_ack(self, last: MessageRef) -> list[Portion[B]]:
        """Mark everything before the entry of `last`, and its messages `last.bits`, as acknowledged."""
        refs = [portion.ref for portion in self.leases if portion.position < last.position]
        refs += [MessageRef(item.position, item.bits) for item in self._ready if item.position < last.position]
        return self.begin_ack([*refs, last])

    def finish_ack(self, portions: Iterable[Portion[B]]) -> None:
        for portion in portions:
            if portion.state is State.ACKING:
                self._table.remove(portion)

    def fail_ack(self, portions: Iterable[Portion[B]]) -> None:
        """The durable write failed: deliver the messages again, and all that follow them."""
        self.finish_ack(portions)
        self.rewind()

    def hold(self, refs: Iterable[MessageRef]) -> tuple[list[Portion[B]], list[Portion[B]]]:
        """Mark messages as in `begin_ack`. Returns those that were known, and those that were not."""
        refs = list(refs)
        known = self.begin_ack(refs)
        added = []
        for position, bits in refs:
            fresh = bits & ~self._table.bits_of(position)
            if fresh:
                added.append(self._table.add(position, fresh, State.ACKING))
        return known, added

    def part_of(self, portion: Portion[B], bits: int) -> Portion[B]:
        """Return `bits`, a part of the messages of a portion that is held, as a portion of their own."""
        return self._table.split(portion, bits)

    def return_held(self, portions: Iterable[Portion[B]], *, delay_s: float, now: float) -> None:
        """Deliver messages that `hold` returned again, and all that follow them, after `delay_s`."""
        held = [portion for portion in portions if portion.state is State.ACKING]
        if held:
            self.fail_ack(held)
            if delay_s > 0:
                self.paused_until = max(self.paused_until or 0.0, now + delay_s)

    def forget_upto(self, position: Position) -> None:
        """Everything up to `position` is acknowledged. Messages that the consumer holds stay with it until they end."""
        kept = deque(item for item in self._ready if item.position > position)
        self._set_ready(kept)

    def nack(
        self, refs: Iterable[MessageRef], *, delay_s: float, now: float, consumer: Consumer | None = None
    ) -> list[MessageRef]:
        """Return held messages: all held messages are delivered again, in order, after `delay_s`.

        Counts a redelivery for `refs` only. Returns those that were held (by `consumer`, if given).
        """
        held = self._table.select(refs, _LEASED) if consumer is None else self.held(consumer, refs)
        if not held:
            return []
        self._count_redeliveries(held)
        returned = [portion.ref for portion in held]
        self.rewind()
        if delay_s > 0:
            self.paused_until = max(self.paused_until or 0.0, now + delay_s)
        return returned

    def hand_back(self, consumer: Consumer, refs: Iterable[MessageRef]) -> None:
        """Return messages that `consumer` was given but has not got, and all that it holds, without counting."""
        if self.held(consumer, refs):
            self.rewind()

    def release(self, consumer: Consumer) -> int:
        """Deliver everything again, without counting a redelivery. Returns the number of messages it held."""
        count = consumer.held
        if count:
            self.rewind()
        return count

    def put_down(self) -> MessageRef | None:
        """Drop the ready messages. Returns the first of them, from which the owner must read on. No read may be in
        progress."""
        if not self._ready:
            return None
        bits = self._ready[0].bits
        first = MessageRef(self._ready[0].position, bits & -bits)
        self._drop_all_ready()
        self._offered_upto = self._taken_upto
        return first

    def tick(self, *, now: float) -> int:
        """End expired leases and waits for a former active consumer; all held messages are delivered again then.

        Returns the number of messages whose leases expired.
        """
        if self.paused_until is not None and now >= self.paused_until:
            self.paused_until = None
        expired = self.leases.expire(now=now)
        if expired:
            self._count_redeliveries(expired)
            self.rewind()
        self._hand_over(now=now)
        return sum(portion.count for portion in expired)

    def next_deadline(self) -> float | None:
        handover = None if self.waits_for is None else self._handover_ends_at
        times = [time for time in (self.paused_until, self.leases.next_deadline(), handover) if time is not None]
        return min(times) if times else None

    def rewind(self) -> None:
        """Return everything that is held or ready. Messages that are being acknowledged stay."""
        self.generation += 1
        self.rewind_wanted = True
        self._drop_all_ready()
        self._offered_upto = self._taken_upto = self._former = None
        self.leases.clear()
        for portion in list(self._table):
            if portion.state is not State.ACKING:
                self._table.remove(portion)

    def reset(self) -> None:
        """Forget everything: the cursor was moved. The owner has set the read position."""
        self.rewind()
        self.rewind_wanted = False
        self.paused_until = None
        self._table.clear()
        self.redelivered.clear()

    def state_counts(self) -> dict[str, int]:
        acking = sum(portion.count for portion in self._table if portion.state is State.ACKING)
        counts = {"ready": self._ready_count, "leased": len(self.leases), "acking": acking}
        return {state: count for state, count in counts.items() if count}

    # -- helpers -------------------------------------------------------------------------------------------------

    def _count_redeliveries(self, portions: Iterable[Portion[B]]) -> None:
        for portion in portions:
            self.redelivered.append(Redelivered(portion.position, portion.bits, portion.redelivery_count + 1))

    def _drop_all_ready(self) -> None:
        self._ready.clear()
        self._ready_count = self._ready_bytes = 0
        self._count()

    def _drop_ready(self, refs: Sequence[MessageRef]) -> list[Portion[B]]:
        """Move ready messages that were acknowledged, for example by a late acknowledgement of an earlier delivery, to
        the messages being acknowledged."""
        if not self._ready or not refs or max(refs).position < self._ready[0].position:
            return []
        gone: dict[Position, int] = {}
        for position, bits in refs:
            gone[position] = gone.get(position, 0) | bits
        acking: list[Portion[B]] = []
        kept: deque[Item[B]] = deque()
        for item in self._ready:
            bits = gone.get(item.position, 0) & item.bits
            if bits:
                acking.append(self._table.add(item.position, bits, State.ACKING))
                if bits == item.bits:
                    continue
                item.cut(bits)
            kept.append(item)
        self._set_ready(kept)
        return acking

    def _set_ready(self, items: "deque[Item[B]]") -> None:
        self._ready = items
        self._ready_count = sum(item.bits.bit_count() for item in items)
        self._ready_bytes = sum(item.size for item in items)
        self._count()

    def _count(self) -> None:
        size, count = self._counted
        self._counted = self._ready_bytes, self._ready_count
        self._read_ahead.change(self._ready_bytes - size, messages=self._ready_count - count)
