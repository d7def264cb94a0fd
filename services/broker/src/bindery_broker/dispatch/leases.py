"""Track which consumer holds which message, and until when.

Invariants: a message is held at most once; a grant's messages all belong to one consumer and end at one time; counts
and bytes are those of the messages held now.

One `take` makes one grant for all its messages, so that the cost per message is one dict entry, and expiry checks one
deadline per grant. Times are monotonic seconds, passed by the caller.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from bindery_broker.dispatch.item import MessageKey

_HEAP_SLACK = 64


@dataclass(slots=True, eq=False)
class Grant:
    """The messages of one delivery that are still held."""

    serial: int
    consumer: str
    granted_at: float
    deadline: float
    sizes: dict[MessageKey, int] = field(default_factory=dict)


class LeaseTable:
    """The leases of one subscription, by message and by consumer."""

    def __init__(self) -> None:
        self._by_key: dict[MessageKey, Grant] = {}
        self._by_consumer: dict[str, dict[int, Grant]] = {}
        self._counts: dict[str, int] = {}
        self._heap: list[tuple[float, int, Grant]] = []
        self._grant_count = 0
        self._serial = 0
        self.bytes_held = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: object) -> bool:
        return key in self._by_key

    def __iter__(self) -> Iterator[MessageKey]:
        """Iterate over the keys that are held, oldest grant first."""
        return iter(self._by_key)

    def holder(self, key: MessageKey) -> str | None:
        grant = self._by_key.get(key)
        return None if grant is None else grant.consumer

    def grant_of(self, key: MessageKey) -> Grant | None:
        return self._by_key.get(key)

    def count_of(self, consumer: str) -> int:
        return self._counts.get(consumer, 0)

    def grants_of(self, consumer: str) -> list[Grant]:
        """Return the consumer's grants that hold a message, oldest first."""
        return list(self._by_consumer.get(consumer, {}).values())

    def last_deadline_of(self, consumer: str) -> float | None:
        """Return when the consumer's last lease ends; None: it holds nothing."""
        grants = self._by_consumer.get(consumer)
        return max(grant.deadline for grant in grants.values()) if grants else None

    def grant(self, consumer: str, held: Sequence[tuple[MessageKey, int]], *, deadline: float, now: float) -> Grant:
        """Lease `held` (key, size) to `consumer`. None of the keys may be held."""
        assert held
        self._serial += 1
        grant = Grant(serial=self._serial, consumer=consumer, granted_at=now, deadline=deadline, sizes=dict(held))
        by_key = self._by_key
        for key, size in held:
            assert key not in by_key, key
            by_key[key] = grant
            self.bytes_held += size
        self._by_consumer.setdefault(consumer, {})[grant.serial] = grant
        self._counts[consumer] = self._counts.get(consumer, 0) + len(held)
        self._grant_count += 1
        heapq.heappush(self._heap, (deadline, grant.serial, grant))
        if len(self._heap) > 2 * self._grant_count + _HEAP_SLACK:  # many were returned long before their deadlines
            self._heap = [row for row in self._heap if row[2].sizes]
            heapq.heapify(self._heap)
        return grant

    def drop(self, keys: Iterable[MessageKey]) -> list[MessageKey]:
        """End the leases of `keys`. Returns those that were held."""
        dropped = []
        for key in keys:
            grant = self._by_key.pop(key, None)
            if grant is None:
                continue
            dropped.append(key)
            self.bytes_held -= grant.sizes.pop(key)
            self._counts[grant.consumer] -= 1
            if not grant.sizes:
                self._forget(grant)
        return dropped

    def renew(
        self, consumer: str, keys: Iterable[MessageKey], *, deadline: float, now: float
    ) -> tuple[Grant | None, list[MessageKey]]:
        """Return a new grant of those `keys` that `consumer` still holds, and these keys; None if it holds none."""
        held = [
            (key, grant.sizes[key])
            for key in keys
            if (grant := self.grant_of(key)) is not None and grant.consumer == consumer
        ]
        if not held:
            return None, []
        kept = self.drop([key for key, _ in held])
        return self.grant(consumer, held, deadline=deadline, now=now), kept

    def release(self, consumer: str) -> list[MessageKey]:
        """End all leases of `consumer`. Returns the keys in the order of delivery."""
        return self.drop([key for grant in self.grants_of(consumer) for key in grant.sizes])

    def expire(self, *, now: float) -> list[MessageKey]:
        """End the leases whose deadline is reached (deadline <= now). Returns their keys."""
        expired: list[MessageKey] = []
        heap = self._heap
        while heap and (heap[0][0] <= now or not heap[0][2].sizes):
            grant = heapq.heappop(heap)[2]
            expired.extend(self.drop(list(grant.sizes)))
        return expired

    def next_deadline(self) -> float | None:
        heap = self._heap
        while heap and not heap[0][2].sizes:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def clear(self) -> None:
        self.drop(list(self._by_key))

    def _forget(self, grant: Grant) -> None:
        self._grant_count -= 1
        grants = self._by_consumer[grant.consumer]
        del grants[grant.serial]
        if not grants:
            del self._by_consumer[grant.consumer]
            del self._counts[grant.consumer]
