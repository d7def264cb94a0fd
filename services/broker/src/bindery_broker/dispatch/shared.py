"""The dispatcher of shared subscriptions: every consumer gets other messages, in no guaranteed order.

The states of messages are those of `portions`:

    offer: -> READY            take: READY -> LEASED          nack, release: LEASED -> REPLAY | DELAYED
    replay: REPLAY -> LOADING  offer_again: LOADING -> READY  tick: LEASED (timeout), DELAYED (due) -> REPLAY
    begin_ack: any -> ACKING   finish_ack: ACKING -> gone     fail_ack: ACKING -> REPLAY

The queues may hold stale rows, such as a READY portion that was acknowledged; the state decides, so no message is
delivered twice. A delivery drops the body: a redelivery reads the entry again, usually from the cache.

Invariants: at most one lease holds a message; each known message stays known until it is acknowledged or the
dispatcher forgets it (`put_down`, `reset`); `redelivery_count` counts negative acknowledgements and timeouts, not
consumers that left.
Source: Pulsar's shared dispatcher (replay set first, then normal reads; consumers of the lowest priority number first).
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Generic

from bindery_pulsar.message_id import Position

from bindery_broker.dispatch.consumers import Consumer
from bindery_broker.dispatch.dispatcher import CountsOf, Redelivered, no_counts
from bindery_broker.dispatch.item import WHOLE, B, Delivery, DispatchLimits, Item, MessageRef
from bindery_broker.dispatch.leases import LeaseTable
from bindery_broker.dispatch.portions import Portion, PortionTable, State
from bindery_broker.dispatch.read_ahead import ReadAhead

_HEAP_SLACK: Final = 64
"""Number of stale rows that a short heap may have."""
_ANY_BUT_ACKING = frozenset(State) - {State.ACKING, State.GONE}
_LEASED = frozenset({State.LEASED})
_LOADING = frozenset({State.LOADING})

_NOTHING: Final[deque[Any]] = deque(maxlen=0)
"""Stands for an empty queue until something is added: most topics are idle, and an empty deque takes 760 bytes."""


class SharedDispatcher(Generic[B]):
    """A `Dispatcher` that redelivers single messages."""

    in_order = False
    keeps_delays = True
    hash_of: Callable[[bytes], int] | None = None
    rewind_wanted = False
    paused_until: float | None = None

    def __init__(
        self,
        *,
        limits: DispatchLimits | None = None,
        read_ahead: ReadAhead | None = None,
        counts_of: CountsOf = no_counts,
    ) -> None:
        """`read_ahead`: shared by the subscriptions of the broker. `counts_of`: the redelivery counts stored before."""
        self.limits = limits or DispatchLimits()
        self._read_ahead = read_ahead or ReadAhead(self.limits.ready_bytes_max)
        self._counts_of = counts_of
        self.leases = LeaseTable()
        self.generation = 0
        """Incremented by each `reset`: messages that were read before it are dropped."""
        self.redelivered: list[Redelivered] = []
        self._table: PortionTable[B] = PortionTable()
        self._replay: list[tuple[Position, int, int, Portion[B]]] = []
        """Heap of (position, lowest bit, serial, portion), with stale rows."""
        self._due: deque[Portion[B]] = _NOTHING
        """Delayed entries whose time has come, in the order in which they are read; with stale ones."""
        self._delayed: list[tuple[float, int, Portion[B]]] = []
        self._serial = 0
        self._ready_count = 0
        self._ready_bytes = 0
        self._counted = (0, 0)
        """The bytes and the number of ready messages that are counted in `read_ahead`."""
        self._fresh: deque[Portion[B]] = _NOTHING
        self._again: list[tuple[Position, int, int, Portion[B]]] = []
        """Heap of (position, lowest bit, serial, portion), with stale rows."""

    # -- consumers -----------------------------------------------------------------------------------------------

    def join(self, consumer: Consumer) -> None:
        """A consumer has connected."""

    def leave(self, consumer: Consumer) -> int:
        """The consumer has left: see `release`."""
        return self.release(consumer)

    def taker(self, waiting: Collection[Consumer], *, now: float) -> Consumer | None:
        """Return the consumer to serve next: the first of those with the lowest priority number that may hold more.

        None: nothing is ready, or nobody may take it.
        """
        if self._head() is None:
            return None
        held_max = self.limits.unacked_per_consumer_max
        best: Consumer | None = None
        for consumer in waiting:
            if consumer.held < held_max and (best is None or consumer.priority < best.priority):
                best = consumer
                if not consumer.priority:
                    break
        return best

    def reads_for(self, waiting: Collection[Consumer]) -> Consumer | None:
        """Return a consumer in `waiting` for which messages should be read; None: none of them may hold more."""
        held_max = self.limits.unacked_per_consumer_max
        return next((consumer for consumer in waiting if consumer.held < held_max), None)

    def prepare(self, waiting: Collection[Consumer]) -> None:
        """Nothing to do: each consumer can get each message."""

    def make_room(self, waiting: Collection[Consumer]) -> None:
        """There is no room to read ahead: put aside what none of `waiting` can get now."""

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def ready_count(self) -> int:
        """Number of ready messages."""
        return self._ready_count

    @property
    def ready_bytes(self) -> int:
        """Bytes of the ready messages."""
        return self._ready_bytes

    @property
    def known_count(self) -> int:
        return self._table.messages

    def known_bits(self, position: Position) -> int:
        """Return the messages of an entry that are known, as bits."""
        return self._table.bits_of(position)

    def find(self, ref: MessageRef) -> Portion[B] | None:
        """Return the portion with a message of `ref`; None: it is not known, or only read."""
        return self._table.find(ref)

    def room(self, *, asked: int | None = None) -> int:
        """Return how many new messages may be read now; 0 while a limit is reached.

        `asked`: number of messages that a consumer requested while there is no room to read ahead. At most this number
        may be read, and none while a message is ready.
        """
        if self._ready_bytes >= self.limits.ready_bytes_max or (asked is not None and self._ready_count):
            return 0
        room = max(0, min(self.limits.ready_max - self._ready_count, self.limits.unacked_max - self._table.messages))
        return room if asked is None else min(room, asked)

    def replayable(self) -> bool:
        """Return whether `replay` may have messages; they may all be stale."""
        return bool(self._replay) or bool(self._due)

    def replay(self, count_max: int, *, entries_max: int | None = None) -> list[MessageRef]:
        """Return messages to read again: returned ones, lowest first, then those of `replay_due` in order.

        The owner passes each to `offer_again` or `give_back`.
        Returns none while the limit of ready messages is reached. `entries_max`: maximum number of entries to which
        they belong, set if there is no room to read ahead; then none is returned while a message is ready.
        """
        if self._ready_count and (entries_max is not None or self._is_full()):
            return []
        refs: list[MessageRef] = []
        entries = 0
        while len(refs) < count_max and (self._replay or self._due):
            portion = self._replay[0][3] if self._replay else self._due[0]
            if portion.state is State.REPLAY:
                entries += not refs or portion.position != refs[-1].position
                if entries_max is not None and entries > entries_max:
                    break
                portion.state = State.LOADING
                refs.append(portion.ref)
            if self._replay:
                heapq.heappop(self._replay)
            else:
                self._due.popleft()
        return refs

    def _is_full(self) -> bool:
        return self._ready_count >= self.limits.ready_max or self._ready_bytes >= self.limits.ready_bytes_max

    def replay_due(self, positions: Iterable[Position]) -> None:
        """Entries whose delay has ended: `replay` returns them. Known ones are ignored."""
        table = self._table
        for position in sorted(positions):
            if position not in table:
                portion = table.add(position, WHOLE, State.REPLAY)
                portion.is_returned = True
                if self._due is _NOTHING:
                    self._due = deque()
                self._due.append(portion)

    def give_back(self, refs: Iterable[MessageRef]) -> None:
        """The read failed, or ended before these: `replay` returns them again."""
        for portion in self._table.select(refs, _LOADING):
            self._to_replay(portion)

    def forget_missing(self, refs: Iterable[MessageRef]) -> None:
        """Messages that `replay` returned do not exist any more, or were acknowledged."""
        for portion in self._table.select(refs, _LOADING):
            self._forget(portion)

    def offer(self, items: Sequence[Item[B]], *, generation: int) -> None:
        """Add messages that were read for the first time. Known ones are ignored."""
        if generation != self.generation:
            return
        table = self._table
        for item in items:
            if item.position in table:
                fresh = item.bits & ~table.bits_of(item.position)
                if not fresh:
                    continue
                if fresh != item.bits:
                    item = item.cut(fresh)
            for part, count in self._by_count(item):
                portion = table.add(part.position, part.bits, State.READY)
                portion.redelivery_count = count
                self._make_ready(portion, part)
                self._enqueue_fresh(portion)
        self._count()

    def _by_count(self, item: Item[B]) -> list[tuple[Item[B], int]]:
        """Split an item into the parts that have the same redelivery count."""
        parts: list[tuple[Item[B], int]] = []
        for count, bits in self._counts_of(item.position):
            common = bits & item.bits
            if common == item.bits:
                return [*parts, (item, count)]
            if common:
                parts.append((item.cut(common), count))
        parts.append((item, 0))
        return parts

    def offer_again(self, items: Sequence[Item[B]], *, generation: int) -> None:
        """Add messages that `replay` returned. Those acknowledged meanwhile are ignored.

        An entry that is not a batch has one message: what else `replay` returned of it is forgotten.
        """
        if generation != self.generation:
            return
        for item in items:
            if item.sizes is None and self._offer_single(item):
                continue
            rest: Item[B] | None = item
            for portion in self._table.select([MessageRef(item.position, item.bits)], _LOADING):
                assert rest is not None
                part = rest
                if portion.bits != rest.bits:
                    part = rest.cut(portion.bits)
                else:
                    rest = None
                for piece, count in self._by_count(part):  # a delayed entry may have counts of before a restart
                    one = portion if piece.bits == portion.bits else self._table.split(portion, piece.bits)
                    one.redelivery_count = max(one.redelivery_count, count)
                    self._make_ready(one, piece)
                    self._enqueue_again(one)
        self._count()

    def _offer_single(self, item: Item[B]) -> bool:
        """Add an entry that is not a batch. Returns False if it is not known as one portion that is being loaded."""
        portion = self._table.only(item.position)
        if portion is None or portion.state is not State.LOADING:
            self.forget_missing((MessageRef(item.position, ~item.bits),))
            return False
        if portion.bits != item.bits:
            portion.bits = item.bits  # of a delayed entry, the number of messages was not known
        for _, count in self._by_count(item):
            portion.redelivery_count = max(portion.redelivery_count, count)
        self._make_ready(portion, item)
        self._enqueue_again(portion)
        return True

    # -- delivering ----------------------------------------------------------------------------------------------

    def next_size(self, consumer: Consumer) -> int:
        """Return the bytes of the next message for `consumer`; 0: there is none."""
        portion = self._peek(consumer)
        if portion is None:
            return 0
        assert portion.item is not None
        return portion.item.first_size

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
        """Lease ready messages to `consumer`: returned ones first, lowest first, then new ones in order.

        At most `count_max` messages and `bytes_max` bytes, but at least one message, whatever its size. `alone_from`:
        a message with this redelivery count is delivered alone, so that a consumer that fails because of it does not
        raise the counts of others above the limit of dead letters.
        """
        count_max = min(count_max, self.limits.unacked_per_consumer_max - consumer.held)
        taken: list[tuple[Portion[B], Item[B]]] = []
        while count_max > 0:
            portion = self._peek(consumer)
            if portion is None:
                break
            item = portion.item
            assert item is not None
            is_alone = portion.redelivery_count == alone_from
            if taken and (is_alone or item.first_size > bytes_max):
                break
            if is_alone:
                count_max = 1
            bits = item.first_bits(count_max=count_max, size_max=bytes_max) & self._first_part(portion)
            if bits != portion.bits:
                portion = self._table.split(portion, bits)
                item = portion.item
                assert item is not None
            self._leave_ready(portion)
            self._assign(portion, consumer)
            taken.append((portion, item))
            count_max -= portion.count
            bytes_max -= item.size
        self._count()
        return self.leases.deliver(consumer, taken, lease_s=lease_s, now=now)

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

        Returns those that are known.
        """
        known = self._table.select(refs, _ANY_BUT_ACKING)
        for portion in known:
            self._withdraw(portion)
            portion.state = State.ACKING
        self._count()
        return known

    def begin_cumulative_ack(self, last: MessageRef) -> list[Portion[B]]:
        """Mark everything before the entry of `last`, and its messages `last.bits`, as acknowledged.

        Only for an acknowledgement that began before the subscription was shared.
        """
        refs = [portion.ref for portion in self._table if portion.position < last.position]
        return self.begin_ack([*refs, last])

    def rewound(self) -> None:
        raise AssertionError("no rewind was requested")

    def finish_ack(self, portions: Iterable[Portion[B]]) -> None:
        for portion in portions:
            if portion.state is State.ACKING:
                self._forget(portion)

    def fail_ack(self, portions: Iterable[Portion[B]]) -> None:
        """The durable write failed: deliver the messages again."""
        for portion in portions:
            if portion.state is State.ACKING:
                self._to_replay(portion)

    def hold(self, refs: Iterable[MessageRef]) -> tuple[list[Portion[B]], list[Portion[B]]]:
        """Withdraw messages from whoever holds them, and deliver them to nobody, also those that were not read yet.

        Messages that are being acknowledged are left out. Returns the known ones, and those that were not known. Pass
        both to `finish_ack` or `return_held`.
        """
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
        """Deliver messages that `hold` returned again, after `delay_s`. It does not count as a redelivery."""
        for portion in portions:
            if portion.state is not State.ACKING:
                continue
            if delay_s > 0:
                self._delay(portion, now + delay_s)
            else:
                self._to_replay(portion)

    def forget_upto(self, position: Position) -> None:
        """Everything up to `position` is acknowledged. Messages that consumers hold stay with them until they end."""
        for portion in list(self._table):
            if portion.position <= position and portion.state not in (State.LEASED, State.ACKING):
                self._withdraw(portion)
                self._forget(portion)
        self._count()

    def nack(
        self, refs: Iterable[MessageRef], *, delay_s: float, now: float, consumer: Consumer | None = None
    ) -> list[MessageRef]:
        """Return held messages, for delivery after `delay_s`. Returns those held (by `consumer`, if given)."""
        returned = self._table.select(refs, _LEASED) if consumer is None else self.held(consumer, refs)
        for portion in returned:
            self._withdraw(portion)
            self._count_redelivery(portion)
            if delay_s > 0:
                self._delay(portion, now + delay_s)
            else:
                self._to_replay(portion)
        return [portion.ref for portion in returned]

    def hand_back(self, consumer: Consumer, refs: Iterable[MessageRef]) -> None:
        """Return messages that `consumer` was given but has not got, without counting a redelivery."""
        for portion in self.held(consumer, refs):
            self._withdraw(portion)
            self._to_replay(portion)

    def release(self, consumer: Consumer) -> int:
        """Deliver what the consumer holds again, without counting a redelivery. Returns the number of messages."""
        count = consumer.held
        held = [portion for grant in consumer.grants.values() for portion in grant.portions]
        for portion in held:
            self._withdraw(portion)
            self._to_replay(portion)
        return count

    def put_down(self) -> MessageRef | None:
        """Drop the bodies of ready messages. No read may be in progress.

        New messages are forgotten; returns the lowest of them, from which the owner must read on. Returned messages are
        kept for replay.
        """
        if not self._ready_count:
            return None
        first: MessageRef | None = None
        kept_upto = self._kept_upto()
        for portion in list(self._table):
            if portion.state is not State.READY:
                continue
            self._withdraw(portion)
            kept = kept_upto.get(portion.key_hash)
            if portion.is_returned or (kept is not None and (portion.position, portion.bits & -portion.bits) < kept):
                self._to_replay(portion)
            else:
                lowest = MessageRef(portion.position, portion.bits & -portion.bits)
                first = lowest if first is None else min(first, lowest)
                self._forget(portion)
        self._clear_ready()
        self._count()
        return first

    def tick(self, *, now: float) -> int:
        """Move messages whose lease or delay has ended by `now` to REPLAY. Returns their number."""
        count = 0
        for portion in self.leases.due(now=now):
            self._withdraw(portion)
            self._count_redelivery(portion)
            self._to_replay(portion)
            count += portion.count
        while (due := self._next_due()) is not None and due <= now:
            portion = heapq.heappop(self._delayed)[2]
            portion.due = None
            self._to_replay(portion)
            count += portion.count
        return count

    def next_deadline(self) -> float | None:
        """Return the time at which the next lease or delay ends."""
        times = [time for time in (self._next_due(), self.leases.next_deadline()) if time is not None]
        return min(times) if times else None

    def reset(self) -> None:
        """Forget everything: the cursor was moved, or is read again from its first unacknowledged message."""
        self.generation += 1
        self.leases.clear()
        self._table.clear()
        self._clear_ready()
        self._replay.clear()
        self._due.clear()
        self._delayed.clear()
        self.redelivered.clear()
        self._ready_count = self._ready_bytes = 0
        self._count()

    def state_counts(self) -> dict[str, int]:
        """Return the number of messages by state, for `explain`. Takes O(n) for n known messages."""
        counts: Counter[State] = Counter()
        for portion in self._table:
            counts[portion.state] += portion.count
        return {state.name.lower(): count for state, count in sorted(counts.items())}

    # -- the queues of ready messages ----------------------------------------------------------------------------

    def _enqueue_fresh(self, portion: Portion[B]) -> None:
        if self._fresh is _NOTHING:
            self._fresh = deque()
        self._fresh.append(portion)

    def _enqueue_again(self, portion: Portion[B]) -> None:
        self._serial += 1
        heapq.heappush(self._again, (portion.position, portion.bits & -portion.bits, self._serial, portion))

    def _peek(self, consumer: Consumer) -> Portion[B] | None:
        """Return the portion to deliver next to `consumer`."""
        return self._head()

    def _head(self) -> Portion[B] | None:
        while self._again:
            if self._again[0][3].state is State.READY:
                return self._again[0][3]
            heapq.heappop(self._again)
        while self._fresh:
            if self._fresh[0].state is State.READY:
                return self._fresh[0]
            self._fresh.popleft()
        return None

    def _first_part(self, portion: Portion[B]) -> int:
        """Return the messages of the portion, as bits, that may be delivered before those of other portions."""
        return portion.bits

    def _kept_upto(self) -> Mapping[int, tuple[Position, int]]:
        """Return, by key hash, the message (position, bit) before which `put_down` keeps new messages."""
        return {}

    def _assign(self, portion: Portion[B], consumer: Consumer) -> None:
        """`portion`, which was ready, goes to `consumer`."""
        portion.state = State.LEASED

    def _clear_ready(self) -> None:
        self._again.clear()
        self._fresh.clear()

    # -- helpers -------------------------------------------------------------------------------------------------

    def _make_ready(self, portion: Portion[B], item: Item[B]) -> None:
        portion.state = State.READY
        portion.item = item
        portion.size = item.size
        portion.key_hash = item.key_hash
        self._ready_count += portion.count
        self._ready_bytes += item.size

    def _leave_ready(self, portion: Portion[B]) -> None:
        self._ready_count -= portion.count
        self._ready_bytes -= portion.size
        portion.item = None

    def _withdraw(self, portion: Portion[B]) -> None:
        """Take a portion out of its present state; the caller sets the next one."""
        if portion.state is State.READY:
            self._leave_ready(portion)
        elif portion.state is State.LEASED:
            self.leases.drop((portion,))
        portion.due = None

    def _delay(self, portion: Portion[B], due: float) -> None:
        portion.state = State.DELAYED
        portion.due = due
        self._serial += 1
        heapq.heappush(self._delayed, (due, self._serial, portion))
        if len(self._delayed) > 2 * self._table.messages + _HEAP_SLACK:  # many were acknowledged during their delays
            self._delayed = [row for row in self._delayed if _is_due_at(row)]
            heapq.heapify(self._delayed)

    def _next_due(self) -> float | None:
        """Return when the next delay ends."""
        while self._delayed:
            if _is_due_at(self._delayed[0]):
                return self._delayed[0][0]
            heapq.heappop(self._delayed)
        return None

    def _count_redelivery(self, portion: Portion[B]) -> None:
        portion.redelivery_count += 1
        self.redelivered.append(Redelivered(portion.position, portion.bits, portion.redelivery_count))

    def _count(self) -> None:
        size, count = self._counted
        if self._ready_bytes != size or self._ready_count != count:
            self._counted = self._ready_bytes, self._ready_count
            self._read_ahead.change(self._ready_bytes - size, messages=self._ready_count - count)

    def _to_replay(self, portion: Portion[B]) -> None:
        portion.state = State.REPLAY
        portion.is_returned = True
        self._serial += 1
        heapq.heappush(self._replay, (portion.position, portion.bits & -portion.bits, self._serial, portion))

    def _forget(self, portion: Portion[B]) -> None:
        self._table.remove(portion)


def _is_due_at(row: tuple[float, int, Portion[B]]) -> bool:
    """Return whether a row of the delays is not stale."""
    due, _, portion = row
    return portion.state is State.DELAYED and portion.due == due
