"""The dispatcher of shared subscriptions: any consumer may get any message; returned messages are delivered first.

Every message that was read and is not acknowledged is known by its key and is in exactly one state:

    READY    read, in memory, waiting for a consumer
    LEASED   held by a consumer until its lease ends
    ACKING   acknowledged by a consumer, the durable write is in progress: must not be delivered again
    DELAYED  negatively acknowledged, waiting for the end of its delay
    REPLAY   returned; must be read again
    LOADING  being read again

    offer: new -> READY        take: READY -> LEASED           nack: LEASED -> REPLAY | DELAYED
    replay: REPLAY -> LOADING  offer_again: LOADING -> READY   tick: LEASED (timeout), DELAYED (due) -> REPLAY
    begin_ack: any -> ACKING   finish_ack: ACKING -> gone      fail_ack: ACKING -> REPLAY

The queues may hold stale rows, such as a READY message that was acknowledged; the state decides, so no message is
delivered twice. A delivery drops the body: a redelivery reads the entry again, usually from the cache.

Invariants: at most one lease holds a message; each known message stays known until it is acknowledged or the
dispatcher forgets it (`put_down`, `reset`); `redelivery_count` counts negative acknowledgements and timeouts, not
consumers that left.
Source: Pulsar's shared dispatcher (replay set first, then normal reads).
"""

import heapq
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from enum import IntEnum
from typing import Generic

from bindery_broker.dispatch.item import NOT_IN_BATCH, Delivery, DispatchLimits, Item, M, MessageKey
from bindery_broker.dispatch.leases import LeaseTable
from bindery_broker.dispatch.read_ahead import ReadAhead


class State(IntEnum):
    READY = 1
    LEASED = 2
    ACKING = 3
    DELAYED = 4
    REPLAY = 5
    LOADING = 6


class SharedDispatcher(Generic[M]):
    """A `Dispatcher` that redelivers single messages."""

    in_order = False
    rewind_wanted = False
    paused_until: float | None = None

    def __init__(self, *, limits: DispatchLimits | None = None, read_ahead: ReadAhead | None = None) -> None:
        """`read_ahead`: shared by the subscriptions of the broker."""
        self.limits = limits or DispatchLimits()
        self._read_ahead = read_ahead or ReadAhead(self.limits.ready_bytes_max)
        self.leases = LeaseTable()
        self.generation = 0
        """Incremented by each `reset`: messages that were read before it are dropped."""
        self._states: dict[MessageKey, State] = {}
        self._fresh: deque[Item[M]] = deque()
        self._again: list[tuple[MessageKey, int, Item[M]]] = []
        self._again_serial = 0
        self._replay: list[MessageKey] = []
        self._delayed: list[tuple[float, MessageKey]] = []
        self._due: dict[MessageKey, float] = {}
        self._counts: Counter[MessageKey] = Counter()
        self._ready_count = 0
        self._ready_bytes = 0
        self._counted = (0, 0)
        """The bytes and the number of ready messages that are counted in `read_ahead`."""

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def ready_count(self) -> int:
        """Number of ready messages; an upper bound, since stale rows count until they reach the head of a queue."""
        self._peek()
        return self._ready_count

    @property
    def known_count(self) -> int:
        return len(self._states)

    def room(self, *, asked: int | None = None) -> int:
        """Return how many new messages may be read now; 0 while a limit is reached.

        `asked`: number of messages that a consumer requested while there is no room to read ahead. At most this number
        may be read, and none while a message is ready.
        """
        at_hand = self.ready_count
        if self._ready_bytes >= self.limits.ready_bytes_max or (asked is not None and at_hand):
            return 0
        room = max(0, min(self.limits.ready_max - at_hand, self.limits.unacked_max - len(self._states)))
        return room if asked is None else min(room, asked)

    def replay(self, count_max: int, *, entries_max: int | None = None) -> list[MessageKey]:
        """Return keys to read again, lowest first. The owner passes each to `offer_again` or `give_back`.

        Returns no keys while the limit of ready messages is reached. `entries_max`: maximum number of entries to which
        the keys belong, set if there is no room to read ahead; then no key is returned while a message is ready.
        """
        at_hand = self.ready_count
        if at_hand and (entries_max is not None or self._is_full()):
            return []
        keys: list[MessageKey] = []
        entries = 0
        while self._replay and len(keys) < count_max:
            key = self._replay[0]
            if self._states.get(key) is State.REPLAY:
                entries += not keys or key[:2] != keys[-1][:2]
                if entries_max is not None and entries > entries_max:
                    break
                self._states[key] = State.LOADING
                keys.append(key)
            heapq.heappop(self._replay)
        return keys

    def _is_full(self) -> bool:
        return self._ready_count >= self.limits.ready_max or self._ready_bytes >= self.limits.ready_bytes_max

    def give_back(self, keys: Iterable[MessageKey]) -> None:
        """The read failed: `replay` returns `keys` again."""
        for key in keys:
            if self._states.get(key) is State.LOADING:
                self._to_replay(key)

    def offer(self, items: Sequence[Item[M]], *, generation: int) -> None:
        """Add messages that were read for the first time. Known ones are ignored."""
        if generation != self.generation:
            return
        states = self._states
        for item in items:
            if item.key not in states:
                states[item.key] = State.READY
                self._fresh.append(item)
                self._ready_count += 1
                self._ready_bytes += item.size
        self._count()

    def offer_again(self, items: Sequence[Item[M]], *, generation: int) -> None:
        """Add messages that `replay` returned. Those acknowledged meanwhile are ignored."""
        if generation != self.generation:
            return
        for item in items:
            if self._states.get(item.key) is State.LOADING:
                self._states[item.key] = State.READY
                self._again_serial += 1
                heapq.heappush(self._again, (item.key, self._again_serial, item))
                self._ready_count += 1
                self._ready_bytes += item.size
        self._count()

    # -- delivering ----------------------------------------------------------------------------------------------

    def next_size(self) -> int:
        """Return the size of the next ready message; 0: there is none."""
        item = self._peek()
        return 0 if item is None else item.size

    def take(
        self, consumer: str, *, count_max: int, bytes_max: int, ack_timeout_s: float, now: float
    ) -> list[Delivery[M]]:
        """Lease ready messages to `consumer`: returned ones first, lowest first, then new ones in order.

        At most `count_max` and `bytes_max`, but at least one message, whatever its size.
        """
        count_max = min(count_max, self.limits.unacked_per_consumer_max - self.leases.count_of(consumer))
        taken: list[Item[M]] = []
        taken_bytes = 0
        while len(taken) < count_max:
            item = self._peek()
            if item is None or (taken and taken_bytes + item.size > bytes_max):
                break
            self._pop()
            self._states[item.key] = State.LEASED
            taken_bytes += item.size
            taken.append(item)
        self._count()
        if not taken:
            return []
        grant = self.leases.grant(
            consumer, [(item.key, item.size) for item in taken], deadline=now + ack_timeout_s, now=now
        )
        lease = str(grant.serial)
        counts = self._counts
        return [Delivery(item.key, item.message, lease, counts.get(item.key, 0)) for item in taken]

    def renew(
        self, consumer: str, keys: Iterable[MessageKey], *, ack_timeout_s: float, now: float
    ) -> tuple[str, list[MessageKey]]:
        """Restart the leases of those `keys` that `consumer` still holds. Returns the lease and these keys."""
        grant, kept = self.leases.renew(consumer, keys, deadline=now + ack_timeout_s, now=now)
        return "" if grant is None else str(grant.serial), kept

    def redelivery_count(self, key: MessageKey) -> int:
        return self._counts.get(key, 0)

    # -- returning -----------------------------------------------------------------------------------------------

    def begin_ack(self, keys: Iterable[MessageKey]) -> list[MessageKey]:
        """Mark `keys` as acknowledged, not yet durably. Pass the result to `finish_ack` or `fail_ack`.

        Returns the known keys. A key with index -1 that is not known itself means every known message of its entry.
        """
        known = [key for key in self._expand(keys) if self._states.get(key, State.ACKING) is not State.ACKING]
        self.leases.drop(known)
        for key in known:
            self._states[key] = State.ACKING
        return known

    def begin_cumulative_ack(self, last: MessageKey) -> list[MessageKey]:
        raise AssertionError("a shared subscription has no cumulative acknowledgement")

    def rewound(self) -> None:
        raise AssertionError("no rewind was requested")

    def finish_ack(self, keys: Iterable[MessageKey]) -> None:
        for key in keys:
            if self._states.get(key) is State.ACKING:
                self._forget(key)

    def fail_ack(self, keys: Iterable[MessageKey]) -> None:
        """The durable write failed: deliver the messages again."""
        for key in keys:
            if self._states.get(key) is State.ACKING:
                self._to_replay(key)

    def nack(
        self, keys: Iterable[MessageKey], *, delay_s: float, now: float, consumer: str | None = None
    ) -> list[MessageKey]:
        """Return held messages, for delivery after `delay_s`. Returns those held (by `consumer`, if given)."""
        returned = [
            key
            for key in self._expand(keys)
            if (holder := self.leases.holder(key)) is not None and consumer in (None, holder)
        ]
        for key in self.leases.drop(returned):
            self._counts[key] += 1
            if delay_s > 0:
                self._states[key] = State.DELAYED
                self._due[key] = now + delay_s
                heapq.heappush(self._delayed, (now + delay_s, key))
            else:
                self._to_replay(key)
        return returned

    def release(self, consumer: str) -> int:
        """The consumer left: deliver what it held again, without counting a redelivery."""
        keys = self.leases.release(consumer)
        for key in keys:
            self._to_replay(key)
        return len(keys)

    def put_down(self) -> MessageKey | None:
        """Drop the bodies of ready messages. No read may be in progress.

        New messages are forgotten; returns the lowest of them, from which the owner must read on. Returned messages are
        kept for replay.
        """
        for key, _, _ in self._again:
            if self._states.get(key) is State.READY:
                self._to_replay(key)
        first: MessageKey | None = None
        for item in self._fresh:
            if self._states.get(item.key) is State.READY:
                first = item.key if first is None else min(first, item.key)
                self._forget(item.key)
        self._again.clear()
        self._fresh.clear()
        self._ready_count = self._ready_bytes = 0
        self._count()
        return first

    def tick(self, *, now: float) -> int:
        """Move messages whose lease or delay has ended by `now` to REPLAY. Returns their number."""
        expired = self.leases.expire(now=now)
        for key in expired:
            self._counts[key] += 1
            self._to_replay(key)
        count = len(expired)
        while self._delayed and self._delayed[0][0] <= now:
            due, key = heapq.heappop(self._delayed)
            if self._states.get(key) is State.DELAYED and self._due.get(key) == due:
                del self._due[key]
                self._to_replay(key)
                count += 1
        return count

    def next_deadline(self) -> float | None:
        """Return the time at which the next lease or delay ends."""
        times = [self._delayed[0][0]] if self._delayed else []
        deadline = self.leases.next_deadline()
        if deadline is not None:
            times.append(deadline)
        return min(times) if times else None

    def reset(self) -> None:
        """Forget everything: the cursor was moved, or is read again from its first unacknowledged message."""
        self.generation += 1
        self._states.clear()
        self._fresh.clear()
        self._again.clear()
        self._replay.clear()
        self._delayed.clear()
        self._due.clear()
        self._counts.clear()
        self._ready_count = self._ready_bytes = 0
        self._count()
        self.leases.clear()

    def state_counts(self) -> dict[str, int]:
        """Return the number of messages by state, for `explain`. Takes O(n) for n known messages."""
        return {state.name.lower(): count for state, count in sorted(Counter(self._states.values()).items())}

    def replayable(self) -> bool:
        """Return whether `replay` may have keys; they may all be stale."""
        return bool(self._replay)

    # -- helpers -------------------------------------------------------------------------------------------------

    def _peek(self) -> Item[M] | None:
        while self._again:
            if self._states.get(self._again[0][0]) is State.READY:
                return self._again[0][2]
            self._pop_again()
        while self._fresh:
            if self._states.get(self._fresh[0].key) is State.READY:
                return self._fresh[0]
            self._pop_fresh()
        return None

    def _pop(self) -> None:
        if self._again:
            self._pop_again()
        else:
            self._pop_fresh()

    def _pop_again(self) -> None:
        self._count_out(heapq.heappop(self._again)[2])

    def _pop_fresh(self) -> None:
        self._count_out(self._fresh.popleft())

    def _count_out(self, item: Item[M]) -> None:
        self._ready_count -= 1
        self._ready_bytes -= item.size

    def _count(self) -> None:
        size, count = self._counted
        self._counted = self._ready_bytes, self._ready_count
        self._read_ahead.change(self._ready_bytes - size, messages=self._ready_count - count)

    def _to_replay(self, key: MessageKey) -> None:
        self._states[key] = State.REPLAY
        heapq.heappush(self._replay, key)

    def _forget(self, key: MessageKey) -> None:
        del self._states[key]
        self._counts.pop(key, None)
        self._due.pop(key, None)

    def _expand(self, keys: Iterable[MessageKey]) -> Collection[MessageKey]:
        keys = dict.fromkeys(keys)
        entries = {key[:2] for key in keys if key[2] == NOT_IN_BATCH and key not in self._states}
        if entries:
            keys.update(dict.fromkeys(key for key in self._states if key[:2] in entries))
        return keys
