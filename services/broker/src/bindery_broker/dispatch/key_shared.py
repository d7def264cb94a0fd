"""The dispatcher of key-shared subscriptions: many consumers, and the messages of each key in order.

Each key belongs to one consumer (`key_ranges`). Messages of a key that are not delivered wait in the order of the
topic; the first of them may be delivered if its body was read, and if no other consumer than the owner holds messages
of the key. So a consumer that joins waits only for the keys that are in flight elsewhere, and nobody waits for anybody
else.

| event                              | effect on the key                                                              |
|------------------------------------|--------------------------------------------------------------------------------|
| offer, offer_again                 | its messages wait, ready                                                       |
| take                               | the owner holds the first message; the next one may follow to the same owner   |
| nack, timeout                      | the messages wait again, before later ones; those in flight stay with the owner |
| join or leave that moves the key   | the new owner gets nothing until the former one holds no message of the key    |
| leave of the consumer that holds it | its messages wait again; the key is free at once                              |

Messages that cannot be delivered now are put aside without their bodies (`prepare`) when others need the room, and read
again when their turn comes. With `allow_out_of_order` a key belongs to one consumer too, but nothing waits for messages
that are held or returned.

Invariants: at most one consumer holds messages of a key, unless `allow_out_of_order`; a message is delivered only if no
earlier message of its key waits.
Source: Pulsar's PIP-379 (draining hashes); a hash stands for a key, as in Pulsar.
"""

import heapq
from collections.abc import Collection, Iterable, Mapping
from typing import Final, Generic, NamedTuple

from bindery_core.errors import BadRequest
from bindery_pulsar.message_id import Position

from bindery_broker.dispatch.consumers import Consumer
from bindery_broker.dispatch.dispatcher import CountsOf, no_counts
from bindery_broker.dispatch.item import B, DispatchLimits, MessageRef
from bindery_broker.dispatch.key_ranges import HashRing, StickyRanges
from bindery_broker.dispatch.portions import Portion, State
from bindery_broker.dispatch.read_ahead import ReadAhead
from bindery_broker.dispatch.shared import SharedDispatcher

UNSHELVED_MAX: Final = 100
"""Maximum number of shelved messages that are read again at a time."""

_WAITING = frozenset({State.READY, State.DELAYED, State.REPLAY, State.LOADING, State.SHELVED})
_WAITING_OUT_OF_ORDER = frozenset({State.READY, State.SHELVED})


class KeySharedMode(NamedTuple):
    """What all consumers of a key-shared subscription have in common."""

    sticky: bool = False
    """Whether consumers declare their ranges, instead of sharing all keys."""
    allow_out_of_order: bool = False


AUTO_SPLIT: Final = KeySharedMode()
"""The mode of subscriptions whose consumers declare none."""


class HeldKey(NamedTuple):
    """A key whose next message waits until another consumer holds none of the key."""

    key_hash: int
    holder: Consumer
    owner: Consumer | None


class _Key(Generic[B]):
    """The messages of one hash."""

    __slots__ = ("held", "holder", "key_hash", "queued", "row", "runnable_for", "waiting", "waiting_states")

    def __init__(self, key_hash: int, waiting_states: frozenset[State]) -> None:
        self.key_hash = key_hash
        self.waiting_states = waiting_states
        self.waiting: list[tuple[Position, int, int, Portion[B]]] = []
        """Heap of (position, lowest bit, serial, portion); rows of portions that no longer wait are stale. The lowest
        bit is that of the time when the row was added: the portion may have lost messages since."""
        self.queued: set[Portion[B]] = set()
        """The portions that have a row in `waiting`."""
        self.holder: Consumer | None = None
        self.held = 0
        """Number of messages that `holder` holds."""
        self.runnable_for: Consumer | None = None
        """The consumer to which the first waiting message can be delivered now."""
        self.row: tuple[Consumer, Portion[B]] | None = None
        """The consumer whose heap of runnable keys has a row of the key, and the first waiting portion in the row."""

    def head(self) -> Portion[B] | None:
        """Return the first waiting portion."""
        waiting = self.waiting
        while waiting:
            position, bit, serial, portion = waiting[0]
            if portion.state not in self.waiting_states:
                heapq.heappop(waiting)
                self.queued.remove(portion)
            elif portion.bits & bit:
                return portion
            else:
                heapq.heapreplace(waiting, (position, portion.bits & -portion.bits, serial, portion))
        return None


class KeySharedDispatcher(SharedDispatcher[B]):
    """A `Dispatcher` that keeps the order of each key."""

    def __init__(
        self,
        *,
        limits: DispatchLimits | None = None,
        read_ahead: ReadAhead | None = None,
        counts_of: CountsOf = no_counts,
        mode: KeySharedMode = AUTO_SPLIT,
    ) -> None:
        """See `SharedDispatcher`."""
        super().__init__(limits=limits, read_ahead=read_ahead, counts_of=counts_of)
        self.mode = mode
        self.ranges: HashRing[Consumer] | StickyRanges[Consumer] = StickyRanges() if mode.sticky else HashRing()
        self.hash_of = self.ranges.hash_of
        self._waiting_states = _WAITING_OUT_OF_ORDER if mode.allow_out_of_order else _WAITING
        self._keys: dict[int, _Key[B]] = {}
        self._runnable: dict[Consumer, list[tuple[Position, int, int, _Key[B], Portion[B]]]] = {}
        """For each consumer, the keys of which it can get a message: a heap of (position, lowest bit, serial, key, its
        first waiting portion), with stale rows."""
        self._shelved: dict[Consumer, dict[_Key[B], None]] = {}
        """For each consumer, keys of which it can get a shelved message."""

    # -- consumers -----------------------------------------------------------------------------------------------

    def join(self, consumer: Consumer) -> None:
        """A consumer has connected, and owns its share of the keys.

        Raises Conflict if a declared range is held by another consumer, BadRequest if the ranges are invalid.
        """
        if isinstance(self.ranges, StickyRanges):
            self.ranges.add(consumer, consumer.name, consumer.key_ranges)
        elif consumer.key_ranges:
            raise BadRequest("key ranges need the mode sticky", consumer=consumer.name)
        else:
            self.ranges.add(consumer, consumer.name)
        self._runnable[consumer] = []
        self._shelved[consumer] = {}
        for key in self._owned(consumer):
            self._update(key)

    def leave(self, consumer: Consumer) -> int:
        """The consumer has left: its keys, and the messages that it held, go to others."""
        count = self.release(consumer)
        moved = self._owned(consumer)
        self.ranges.remove(consumer)
        del self._shelved[consumer]
        for _, _, _, key, _ in self._runnable.pop(consumer):
            if key.row is not None and key.row[0] is consumer:
                key.row = None
        for key in moved:
            self._update(key)
        return count

    def taker(self, waiting: Collection[Consumer], *, now: float) -> Consumer | None:
        held_max = self.limits.unacked_per_consumer_max
        for consumer in waiting:
            if consumer.held < held_max and consumer in self._runnable and self._peek(consumer) is not None:
                return consumer
        return None

    def prepare(self, waiting: Collection[Consumer]) -> None:
        """Have the shelved messages that `waiting` consumers can get read again, and make room for what they can."""
        left = UNSHELVED_MAX
        for consumer in self._able(waiting):
            keys = self._shelved[consumer]
            while keys and left > 0:
                key = next(iter(keys))
                del keys[key]
                head = key.head()
                if head is not None and head.state is State.SHELVED and self._owner_now(key) is consumer:
                    left -= self._unshelve(key, count_max=left)
        if self._is_full():
            self.make_room(waiting)

    def make_room(self, waiting: Collection[Consumer]) -> None:
        """There is no room to read: if none of `waiting` can get a ready message, put all of them aside."""
        able = self._able(waiting)
        if self._ready_count and able and all(self._peek(consumer) is None for consumer in able):
            self._shelve()

    def _able(self, waiting: Collection[Consumer]) -> list[Consumer]:
        """Return those of `waiting` that may hold more messages."""
        held_max = self.limits.unacked_per_consumer_max
        return [consumer for consumer in waiting if consumer.held < held_max and consumer in self._runnable]

    def _shelve(self) -> None:
        """Drop the bodies of all ready messages."""
        keys: dict[int, None] = {}
        for portion in self._table:
            if portion.state is State.READY:
                self._leave_ready(portion)
                portion.state = State.SHELVED
                portion.is_returned = True  # only its body is forgotten
                keys[portion.key_hash] = None
        for key_hash in keys:
            self._update(self._keys[key_hash])
        self._count()

    def keys_held(self, key_hashes: Iterable[int] | None = None, *, count_max: int) -> list[HeldKey]:
        """Return keys that wait because another consumer than the owner holds messages of them, for `explain`."""
        found: list[HeldKey] = []
        for key_hash in self._keys if key_hashes is None else key_hashes:
            key = self._keys.get(key_hash)
            if len(found) >= count_max:
                break
            if key is None or key.holder is None or key.head() is None:
                continue
            owner = self.ranges.owner(key_hash)
            if owner is not key.holder:
                found.append(HeldKey(key_hash, key.holder, owner))
        return found

    # -- changes of the state of portions --------------------------------------------------------------------------

    def _peek(self, consumer: Consumer) -> Portion[B] | None:
        rows = self._runnable[consumer]
        while rows:
            _, _, _, key, portion = rows[0]
            if key.runnable_for is consumer and portion.state is State.READY and key.head() is portion:
                return portion
            heapq.heappop(rows)
            if key.row is not None and key.row[0] is consumer and key.row[1] is portion:
                key.row = None
        return None

    def _enqueue_fresh(self, portion: Portion[B]) -> None:
        self._wait(portion)

    def _enqueue_again(self, portion: Portion[B]) -> None:
        self._wait(portion)

    def _first_part(self, portion: Portion[B]) -> int:
        """Return the messages before those of other portions of the entry that wait: bits of one can lie between those
        of another, if they were returned separately."""
        first = portion.bits & -portion.bits
        bits = portion.bits
        # The first row is that of `portion`, and the least of the others is the second or the third. Its bit is not
        # after the messages of its portion. An entry may have thousands of portions.
        after = [row[1] for row in self._keys[portion.key_hash].waiting[1:3] if row[0] == portion.position]
        if not after or min(after) > first:
            return bits & min(after) - 1 if after else bits
        for other in self._table.of(portion.position):
            if other is not portion and other.state in _WAITING:
                rest = other.bits & -first
                if rest:
                    bits &= (rest & -rest) - 1
        return bits

    def _assign(self, portion: Portion[B], consumer: Consumer) -> None:
        portion.state = State.LEASED
        key = self._keys[portion.key_hash]
        if key.holder is not consumer:
            assert key.holder is None or self.mode.allow_out_of_order
            key.holder, key.held = consumer, 0
        key.held += portion.count
        self._update(key)

    def _withdraw(self, portion: Portion[B]) -> None:
        was_leased = portion.state is State.LEASED
        holder = portion.grant.consumer if was_leased and portion.grant is not None else None
        super()._withdraw(portion)
        if holder is not None:
            self._give_up(portion, holder)

    def _give_up(self, portion: Portion[B], holder: Consumer) -> None:
        """`holder` no longer holds the portion."""
        key = self._keys.get(portion.key_hash)
        if key is None or key.holder is not holder:
            return
        key.held -= portion.count
        if key.held <= 0:
            key.holder, key.held = None, 0
            self._update(key)

    def _to_replay(self, portion: Portion[B]) -> None:
        super()._to_replay(portion)
        if portion.key_hash:  # it was read before
            self._wait(portion)

    def _forget(self, portion: Portion[B]) -> None:
        super()._forget(portion)
        self._changed(portion)

    def begin_ack(self, refs: Iterable[MessageRef]) -> list[Portion[B]]:
        portions = super().begin_ack(refs)
        for portion in portions:
            self._changed(portion)
        return portions

    def nack(
        self, refs: Iterable[MessageRef], *, delay_s: float, now: float, consumer: Consumer | None = None
    ) -> list[MessageRef]:
        returned = super().nack(refs, delay_s=delay_s, now=now, consumer=consumer)
        if delay_s > 0:
            for portion in self._table.select(returned, (State.DELAYED,)):
                self._wait(portion)
        return returned

    def return_held(self, portions: Iterable[Portion[B]], *, delay_s: float, now: float) -> None:
        portions = list(portions)
        super().return_held(portions, delay_s=delay_s, now=now)
        for portion in portions:
            if portion.state is State.DELAYED and portion.key_hash:  # it was read before
                self._wait(portion)

    def reset(self) -> None:
        super().reset()
        self._keys.clear()
        for keys in self._shelved.values():
            keys.clear()

    def _clear_ready(self) -> None:
        for rows in self._runnable.values():
            rows.clear()
        for key in self._keys.values():
            key.row = None

    def _kept_upto(self) -> Mapping[int, tuple[Position, int]]:
        """If a message stays known, for example because its acknowledgement may fail, the earlier ones of its key must
        stay known, too: it is replayed before new messages are read."""
        kept: dict[int, tuple[Position, int]] = {}
        if self.mode.allow_out_of_order:
            return kept
        for portion in self._table:
            is_new = portion.state is State.READY and not portion.is_returned
            if portion.key_hash and not is_new and portion.state is not State.LEASED:
                last = (portion.position, 1 << portion.bits.bit_length() - 1)
                kept[portion.key_hash] = max(last, kept.get(portion.key_hash, last))
        return kept

    # -- keys ----------------------------------------------------------------------------------------------------

    def _wait(self, portion: Portion[B]) -> None:
        """The portion waits for its delivery, or its state while it waits has changed."""
        key = self._keys.get(portion.key_hash)
        if key is None:
            key = self._keys[portion.key_hash] = _Key(portion.key_hash, self._waiting_states)
        if portion not in key.queued and portion.state in self._waiting_states:
            self._serial += 1
            key.queued.add(portion)
            row = (portion.position, portion.bits & -portion.bits, self._serial, portion)
            heapq.heappush(key.waiting, row)
        self._update(key)

    def _changed(self, portion: Portion[B]) -> None:
        key = self._keys.get(portion.key_hash)
        if key is not None:
            self._update(key)

    def _update(self, key: _Key[B]) -> None:
        """Find out to whom the first waiting message of the key can be delivered."""
        head = key.head()
        key.runnable_for = None
        if head is None:
            if not key.held:
                self._keys.pop(key.key_hash, None)
            return
        owner = self._owner_now(key)
        if owner is None:
            return
        if head.state is State.SHELVED:
            self._shelved[owner][key] = None
        elif head.state is State.READY:
            key.runnable_for = owner
            if key.row is None or key.row[0] is not owner or key.row[1] is not head:
                key.row = (owner, head)
                self._serial += 1
                row = (head.position, head.bits & -head.bits, self._serial, key, head)
                heapq.heappush(self._runnable[owner], row)

    def _owner_now(self, key: _Key[B]) -> Consumer | None:
        """Return the consumer that may get the next message of the key; None: it waits for another consumer."""
        owner = self.ranges.owner(key.key_hash)
        if key.holder in (None, owner) or self.mode.allow_out_of_order:
            return owner
        return None

    def _owned(self, consumer: Consumer) -> list[_Key[B]]:
        """Return the keys that the consumer owns. Takes O(its share of the hashes), or O(keys) if they are fewer."""
        owned = self.ranges.owned(consumer)
        if sum(last - first + 1 for first, last in owned) > len(self._keys):
            return [key for key in self._keys.values() if self.ranges.owner(key.key_hash) is consumer]
        hashes = (key_hash for first, last in owned for key_hash in range(first, last + 1))
        return [self._keys[key_hash] for key_hash in hashes if key_hash in self._keys]

    def _unshelve(self, key: _Key[B], *, count_max: int) -> int:
        """Have the first messages of the key read again. Returns the number of portions."""
        first = heapq.nsmallest(count_max, (row for row in key.waiting if row[3].state in self._waiting_states))
        shelved = [portion for *_, portion in first if portion.state is State.SHELVED]
        for portion in shelved:
            super()._to_replay(portion)
        return len(shelved)
