"""The dispatcher of exclusive subscriptions: one consumer, always in the topic's order.

Messages are delivered in order. If one is returned (negative acknowledgement, timeout, or the consumer left), every
message in delivery is returned with it, and reading starts again at the lowest unacknowledged message: `rewind_wanted`
makes the owner move the read position there before it reads on. Messages that were read before a rewind are recognized
by their `generation` and dropped.

Invariants: ready messages are in ascending order and above all held ones; after a rewind no message is held or ready;
between rewinds no message is offered again after its delivery, also if later ones were put down.
Source: Pulsar's single-active-consumer dispatcher (rewind to mark-delete + 1).
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from typing import Generic

from bindery_broker.dispatch.item import NOT_IN_BATCH, Delivery, DispatchLimits, Item, M, MessageKey
from bindery_broker.dispatch.leases import LeaseTable
from bindery_broker.dispatch.read_ahead import ReadAhead


class ExclusiveDispatcher(Generic[M]):
    """A `Dispatcher` that keeps the order."""

    in_order = True

    def __init__(self, *, limits: DispatchLimits | None = None, read_ahead: ReadAhead | None = None) -> None:
        """`read_ahead`: shared by the subscriptions of the broker."""
        self.limits = limits or DispatchLimits()
        self._read_ahead = read_ahead or ReadAhead(self.limits.ready_bytes_max)
        self.leases = LeaseTable()
        self.generation = 0
        """Incremented by each rewind or reset."""
        self.rewind_wanted = False
        """The owner moves the read position to the lowest unacknowledged message and calls `rewound`."""
        self.paused_until: float | None = None
        """End of the delay of a negative acknowledgement; it also delays all later messages."""
        self._ready: deque[Item[M]] = deque()
        self._ready_bytes = 0
        self._counted = (0, 0)
        """The bytes and the number of ready messages that are counted in `read_ahead`."""
        self._acking: set[MessageKey] = set()
        self._counts: Counter[MessageKey] = Counter()
        self._last_offered: MessageKey | None = None
        self._last_taken: MessageKey | None = None

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def ready_count(self) -> int:
        return len(self._ready)

    @property
    def known_count(self) -> int:
        return len(self._ready) + len(self.leases) + len(self._acking)

    def room(self, *, asked: int | None = None) -> int:
        """Return how many messages may be read now; 0 while a limit is reached.

        `asked`: number of messages that a consumer requested while there is no room to read ahead. At most this number
        may be read, and none while a message is ready.
        """
        if self._ready_bytes >= self.limits.ready_bytes_max or (asked is not None and self._ready):
            return 0
        room = max(0, min(self.limits.ready_max - len(self._ready), self.limits.unacked_max - self.known_count))
        return room if asked is None else min(room, asked)

    def rewound(self) -> None:
        self.rewind_wanted = False

    def replayable(self) -> bool:
        """Return False: returned messages are read again after a rewind."""
        return False

    def replay(self, count_max: int, *, entries_max: int | None = None) -> list[MessageKey]:
        return []

    def give_back(self, keys: Iterable[MessageKey]) -> None:
        raise AssertionError("an exclusive subscription reads again after a rewind only")

    def offer_again(self, items: Sequence[Item[M]], *, generation: int) -> None:
        raise AssertionError("an exclusive subscription reads again after a rewind only")

    def offer(self, items: Sequence[Item[M]], *, generation: int) -> None:
        """Add messages in the order of the read. Messages that are being acknowledged are dropped.

        If a rewind followed the read, all messages are dropped.
        """
        if generation != self.generation or self.rewind_wanted:
            return
        for item in items:
            assert self._last_offered is None or self._last_offered < item.key, (self._last_offered, item.key)
            self._last_offered = item.key
            if item.key not in self._acking:
                self._ready.append(item)
                self._ready_bytes += item.size
        self._count()

    # -- delivering ----------------------------------------------------------------------------------------------

    def next_size(self) -> int:
        """Return the size of the next ready message; 0: there is none."""
        return self._ready[0].size if self._ready else 0

    def take(
        self, consumer: str, *, count_max: int, bytes_max: int, ack_timeout_s: float, now: float
    ) -> list[Delivery[M]]:
        """Lease the next ready messages to `consumer`; at least one, whatever its size."""
        if self.paused_until is not None:
            if now < self.paused_until:
                return []
            self.paused_until = None
        count_max = min(count_max, self.limits.unacked_per_consumer_max - self.leases.count_of(consumer))
        taken: list[Item[M]] = []
        taken_bytes = 0
        while self._ready and len(taken) < count_max:
            item = self._ready[0]
            if taken and taken_bytes + item.size > bytes_max:
                break
            taken.append(item)
            taken_bytes += item.size
            self._ready.popleft()
            self._ready_bytes -= item.size
        if not taken:
            return []
        self._last_taken = taken[-1].key
        self._count()
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
        """Mark `keys` as acknowledged, not yet durably. Pass the result to `finish_ack` or `fail_ack`."""
        keys = list(keys)
        entries = {key[:2] for key in keys if key[2] == NOT_IN_BATCH and key not in self.leases}
        if entries:
            keys += [key for key in self.leases if key[:2] in entries]
            keys += [item.key for item in self._ready if item.key[:2] in entries]
        fresh = [key for key in dict.fromkeys(keys) if key not in self._acking]
        self.leases.drop(fresh)
        self._acking.update(fresh)
        self._drop_ready(fresh)
        return fresh

    def begin_cumulative_ack(self, last: MessageKey) -> list[MessageKey]:
        """Mark everything up to `last` as acknowledged; index -1 means the whole entry."""
        below = (last[0], last[1] + 1, NOT_IN_BATCH) if last[2] == NOT_IN_BATCH else (last[0], last[1], last[2] + 1)
        keys = [key for key in self.leases if key < below]
        keys += [item.key for item in self._ready if item.key < below]
        keys += [key for key in self._counts if key < below]
        return self.begin_ack(keys)

    def finish_ack(self, keys: Iterable[MessageKey]) -> None:
        for key in keys:
            self._acking.discard(key)
            self._counts.pop(key, None)

    def fail_ack(self, keys: Iterable[MessageKey]) -> None:
        """The durable write failed: deliver the messages again, and all that follow them."""
        self._acking.difference_update(keys)
        self.rewind()

    def nack(
        self, keys: Iterable[MessageKey], *, delay_s: float, now: float, consumer: str | None = None
    ) -> list[MessageKey]:
        """Return held messages: all held messages are delivered again, in order, after `delay_s`.

        Returns those of `keys` that were held (by `consumer`, if given).
        """
        keys = dict.fromkeys(keys)
        entries = {key[:2] for key in keys if key[2] == NOT_IN_BATCH and key not in self.leases}
        if entries:
            keys.update(dict.fromkeys(key for key in self.leases if key[:2] in entries))
        returned = [key for key in keys if (h := self.leases.holder(key)) is not None and consumer in (None, h)]
        if returned:
            for key in returned:
                self._counts[key] += 1
            if delay_s > 0:
                self.paused_until = now + delay_s  # no message is held during a pause, so there is no earlier one
            self.rewind()
        return returned

    def release(self, consumer: str) -> int:
        """The consumer left or starts again: deliver everything it held again, without counting a redelivery."""
        count = self.leases.count_of(consumer)
        if count:
            self.rewind()
        return count

    def put_down(self) -> MessageKey | None:
        """Drop the ready messages. Returns the first of them, from which the owner must read on. No read may be in
        progress."""
        if not self._ready:
            return None
        first = self._ready[0].key
        self._drop_all_ready()
        self._last_offered = self._last_taken
        return first

    def tick(self, *, now: float) -> int:
        """End expired leases; if there are any, all held messages are delivered again. Returns their number."""
        if self.paused_until is not None and now >= self.paused_until:
            self.paused_until = None
        expired = self.leases.expire(now=now)
        if expired:
            for key in expired:
                self._counts[key] += 1
            self.rewind()
        return len(expired)

    def next_deadline(self) -> float | None:
        times = [time for time in (self.paused_until, self.leases.next_deadline()) if time is not None]
        return min(times) if times else None

    def rewind(self) -> None:
        self.generation += 1
        self.rewind_wanted = True
        self._drop_all_ready()
        self._last_offered = self._last_taken = None
        self.leases.clear()

    def reset(self) -> None:
        """Forget everything: the cursor was moved. The owner has set the read position."""
        self.rewind()
        self.rewind_wanted = False
        self.paused_until = None
        self._acking.clear()
        self._counts.clear()

    def _drop_all_ready(self) -> None:
        self._ready.clear()
        self._ready_bytes = 0
        self._count()

    def _drop_ready(self, keys: Collection[MessageKey]) -> None:
        """Drop ready messages that were acknowledged, for example by a late acknowledgement of an earlier delivery."""
        if not self._ready or not keys or max(keys) < self._ready[0].key:
            return
        gone = set(keys)
        self._ready = deque(item for item in self._ready if item.key not in gone)
        self._ready_bytes = sum(item.size for item in self._ready)
        self._count()

    def _count(self) -> None:
        size, count = self._counted
        self._counted = self._ready_bytes, len(self._ready)
        self._read_ahead.change(self._ready_bytes - size, messages=len(self._ready) - count)

    def state_counts(self) -> dict[str, int]:
        counts = {"ready": len(self._ready), "leased": len(self.leases), "acking": len(self._acking)}
        return {state: count for state, count in counts.items() if count}
