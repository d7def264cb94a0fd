"""Track which consumer holds which messages, and until when.

Invariants: a portion is held at most once; a grant's portions all belong to one consumer and end at one time; counts
and bytes are those of the messages held now.

One `take` makes one grant for all its portions, so that expiry checks one deadline per grant. Times are monotonic
seconds, passed by the caller. A lease without an end (`math.inf`) lasts until the consumer leaves.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from bindery_broker.dispatch.consumers import Consumer, Grant
from bindery_broker.dispatch.item import B, Delivery, Item
from bindery_broker.dispatch.portions import Portion, State

_HEAP_SLACK: Final = 64

AnyPortion = Portion[Any]


class LeaseTable:
    """The leases of one subscription."""

    def __init__(self) -> None:
        self._grants: dict[Grant[AnyPortion], None] = {}
        self._heap: list[tuple[float, int, Grant[AnyPortion]]] = []
        self._serial = 0
        self.bytes_held = 0
        self.messages_held = 0

    def __len__(self) -> int:
        """Return the number of messages that are held."""
        return self.messages_held

    def __iter__(self) -> Iterator[AnyPortion]:
        """Iterate over the portions that are held, oldest grant first."""
        for grant in self._grants:
            yield from grant.portions

    def last_deadline_of(self, consumer: Consumer) -> float | None:
        """Return when the consumer's last lease ends; None: it holds nothing."""
        return max(grant.deadline for grant in consumer.grants.values()) if consumer.grants else None

    def grant(
        self, consumer: Consumer, portions: Sequence[AnyPortion], *, deadline: float, now: float
    ) -> Grant[AnyPortion]:
        """Lease `portions` to `consumer`. None of them may be held."""
        assert portions
        self._serial += 1
        grant: Grant[AnyPortion] = Grant(self._serial, consumer, granted_at=now, deadline=deadline)
        held = grant.portions
        count = 0
        for portion in portions:
            assert portion.grant is None
            portion.state = State.LEASED
            portion.grant = grant
            held[portion] = None
            count += portion.count
            self.bytes_held += portion.size
        self.messages_held += count
        consumer.held += count
        consumer.grants[grant.serial] = grant
        self._grants[grant] = None
        if deadline < math.inf:
            heapq.heappush(self._heap, (deadline, grant.serial, grant))
            if len(self._heap) > 2 * len(self._grants) + _HEAP_SLACK:  # many were returned long before their deadlines
                self._heap = [row for row in self._heap if row[2].portions]
                heapq.heapify(self._heap)
        return grant

    def drop(self, portions: Iterable[AnyPortion]) -> None:
        """End the leases of `portions`; those that are not held are ignored. The caller sets their next state."""
        for portion in portions:
            grant = portion.grant
            if grant is None:
                continue
            portion.grant = None
            del grant.portions[portion]
            count = portion.count
            self.bytes_held -= portion.size
            self.messages_held -= count
            grant.consumer.held -= count
            if not grant.portions:
                del self._grants[grant]
                del grant.consumer.grants[grant.serial]

    def deliver(
        self, consumer: Consumer, taken: Sequence[tuple[Portion[B], Item[B]]], *, lease_s: float, now: float
    ) -> list[Delivery[B]]:
        """Lease what was taken, and return it."""
        if not taken:
            return []
        grant = self.grant(consumer, [portion for portion, _ in taken], deadline=now + lease_s, now=now)
        lease = str(grant.serial)
        return [
            Delivery(portion.position, portion.bits, item.body, lease, portion.redelivery_count)
            for portion, item in taken
        ]

    def renew(
        self, consumer: Consumer, portions: Iterable[Portion[B]], *, lease_s: float, now: float
    ) -> tuple[str, list[Portion[B]]]:
        """Restart the leases of those `portions` that `consumer` still holds. Returns the lease and these portions."""
        kept = [portion for portion in portions if portion.grant is not None and portion.grant.consumer is consumer]
        if not kept:
            return "", []
        self.drop(kept)
        return str(self.grant(consumer, kept, deadline=now + lease_s, now=now).serial), kept

    def release(self, consumer: Consumer) -> list[AnyPortion]:
        """End all leases of `consumer`. Returns the portions in the order of delivery."""
        portions = [portion for grant in consumer.grants.values() for portion in grant.portions]
        self.drop(portions)
        return portions

    def due(self, *, now: float) -> list[AnyPortion]:
        """Return the portions whose deadline is reached (deadline <= now), once. The caller passes them to `drop`."""
        expired: list[AnyPortion] = []
        heap = self._heap
        while heap and (heap[0][0] <= now or not heap[0][2].portions):
            expired.extend(heapq.heappop(heap)[2].portions)
        return expired

    def expire(self, *, now: float) -> list[AnyPortion]:
        """End the leases whose deadline is reached. Returns their portions."""
        expired = self.due(now=now)
        self.drop(expired)
        return expired

    def next_deadline(self) -> float | None:
        heap = self._heap
        while heap and not heap[0][2].portions:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def clear(self) -> None:
        self.drop(list(self))
