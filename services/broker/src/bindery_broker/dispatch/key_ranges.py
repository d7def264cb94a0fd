"""Decide which consumer of a Key_Shared subscription owns a key.

A key is hashed to 1..65535 (`hash_of`), and each hash belongs to at most one consumer (`owner`). There are two ways to
share the hashes. Each reduces the hash of a key differently, so a hash from one must not be passed to the other:

| class          | Pulsar's mode | hash of a key                        | owner                                   |
|----------------|---------------|--------------------------------------|-----------------------------------------|
| `HashRing`     | AUTO_SPLIT    | murmur3 modulo 65535, plus 1         | the next of 100 points of each consumer |
| `StickyRanges` | STICKY        | murmur3 modulo 65536; 1 instead of 0 | the consumer that declared its range    |

No key has hash 0, which means "not set" in Pulsar. For consumers with the same names that joined in the same order,
Pulsar's brokers choose the same owners.

Invariants: a join moves hashes to the joining consumer only; a leave moves only the hashes of the leaving consumer; the
ranges of two consumers never overlap.
Source: Pulsar 4.0 ConsistentHashingStickyKeyConsumerSelector, HashRangeExclusiveStickyKeyConsumerSelector,
StickyKeyConsumerSelectorUtils, ConsumerNameIndexTracker; golden values in tests/dispatch/golden.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable, Iterable, Sequence
from typing import Final, Generic, Protocol, TypeVar

from bindery_core.errors import BadRequest, Conflict
from bindery_pulsar.murmur3 import murmur3_hash

C = TypeVar("C", bound=Hashable)
"""A consumer: an object compared by identity, never a name."""

KeyRange = tuple[int, int]
"""The first and the last hash of a range."""

HASH_MAX: Final = 65_535
RING_HASH_MIN: Final = 1
POINTS_PER_CONSUMER: Final = 100
"""Source: Pulsar, subscriptionKeySharedConsistentHashingReplicaPoints."""


class KeyRanges(Protocol[C]):
    """The interface of both ways to share the hashes."""

    def hash_of(self, key: bytes) -> int:
        """Return the hash of a key: 1..65535."""

    def owner(self, key_hash: int) -> C | None:
        """Return the consumer that owns the hash; None if there is none."""

    def remove(self, consumer: C) -> None:
        """Remove a consumer that was added."""

    def owned(self, consumer: C) -> list[KeyRange]:
        """Return the ranges of one consumer, in any order; they may be adjacent."""

    def ranges(self) -> dict[C, list[KeyRange]]:
        """Return the ranges of each consumer, ascending and not adjacent, for statistics."""


class HashRing(Generic[C]):
    """AUTO_SPLIT by consistent hashing: a hash belongs to the next point at or above it, or else to the first point.

    A consumer's points depend on its name and on the lowest number that no other consumer of this name has. If points
    coincide, the consumer that joined first has the point and the others wait for it in the order of joining. So
    consumers of one name have different points, and a consumer that joins again under its name has the same ones.
    """

    def __init__(self) -> None:
        self._points: list[int] = []
        """All points, ascending."""
        self._queues: dict[int, list[C]] = {}
        """The owner of each point, then the consumers that wait for the point."""
        self._names: dict[C, tuple[str, int]] = {}
        """The name of each consumer, and its number among the consumers of this name."""
        self._numbers: dict[str, set[int]] = {}

    def hash_of(self, key: bytes) -> int:
        return _ring_hash(key)

    def add(self, consumer: C, name: str) -> None:
        """Add a consumer. It owns nothing while all of its points belong to others, which needs hundreds of them."""
        assert consumer not in self._names, consumer
        numbers = self._numbers.setdefault(name, set())
        number = next(n for n in range(len(numbers) + 1) if n not in numbers)
        numbers.add(number)
        self._names[consumer] = (name, number)
        for point in _points_of(name, number):
            queue = self._queues.get(point)
            if queue is None:
                self._queues[point] = [consumer]
                insort(self._points, point)
            else:
                queue.append(consumer)

    def remove(self, consumer: C) -> None:
        name, number = self._names.pop(consumer)
        self._numbers[name].remove(number)
        if not self._numbers[name]:
            del self._numbers[name]
        for point in _points_of(name, number):
            queue = self._queues[point]
            queue.remove(consumer)
            if not queue:
                del self._queues[point]
                del self._points[bisect_left(self._points, point)]

    def owner(self, key_hash: int) -> C | None:
        points = self._points
        if not points:
            return None
        index = bisect_left(points, key_hash)
        return self._queues[points[index if index < len(points) else 0]][0]

    def owned(self, consumer: C) -> list[KeyRange]:
        found: list[KeyRange] = []
        points = self._points
        for point in _points_of(*self._names[consumer]):
            if self._queues[point][0] is not consumer:
                continue
            index = bisect_left(points, point)
            found.append((points[index - 1] + 1 if index else RING_HASH_MIN, point))
            if not index and points[-1] < HASH_MAX:
                found.append((points[-1] + 1, HASH_MAX))
        return found

    def ranges(self) -> dict[C, list[KeyRange]]:
        found: dict[C, list[KeyRange]] = {consumer: [] for consumer in self._names}
        first = RING_HASH_MIN
        for point in [*self._points, HASH_MAX] if self._points else []:
            if point < first:  # the highest point is HASH_MAX itself
                break
            owner = self.owner(point)
            assert owner is not None
            _append(found[owner], (first, point))
            first = point + 1
        return found


class StickyRanges(Generic[C]):
    """STICKY: each consumer declares the ranges of hashes that it owns. A hash may belong to no consumer."""

    def __init__(self) -> None:
        self._held: list[tuple[int, int, C]] = []
        """(first, last, consumer), ascending and disjoint."""
        self._names: dict[C, str] = {}

    def hash_of(self, key: bytes) -> int:
        return murmur3_hash(key) % (HASH_MAX + 1) or 1

    def add(self, consumer: C, name: str, ranges: Sequence[KeyRange]) -> None:
        """Add a consumer with its `ranges`; nothing is changed by an error.

        Raises BadRequest if `ranges` is empty, contains bounds outside 0..65535 or in the wrong order, or overlaps
        itself; Conflict if a range overlaps one of another consumer: the error names both.
        """
        assert consumer not in self._names, consumer
        wanted = checked_ranges(ranges)
        for first, last in wanted:
            index = bisect_right(self._held, first, key=_first_of)
            for held_first, held_last, holder in self._held[max(0, index - 1) : index + 1]:
                if held_first <= last and first <= held_last:
                    overlap = (max(first, held_first), min(last, held_last))
                    raise Conflict(
                        "the key range is held by another consumer; choose a free one, or remove that consumer",
                        range=[first, last],
                        overlap=list(overlap),
                        holder=self._names[holder],
                        held_range=[held_first, held_last],
                    )
        self._names[consumer] = name
        self._held += [(first, last, consumer) for first, last in wanted]
        self._held.sort(key=_first_of)

    def remove(self, consumer: C) -> None:
        del self._names[consumer]
        self._held = [row for row in self._held if row[2] is not consumer]

    def owner(self, key_hash: int) -> C | None:
        index = bisect_right(self._held, key_hash, key=_first_of) - 1
        if index < 0:
            return None
        _, last, consumer = self._held[index]
        return consumer if key_hash <= last else None

    def owned(self, consumer: C) -> list[KeyRange]:
        return [(first, last) for first, last, holder in self._held if holder is consumer]

    def ranges(self) -> dict[C, list[KeyRange]]:
        found: dict[C, list[KeyRange]] = {consumer: [] for consumer in self._names}
        for first, last, consumer in self._held:
            _append(found[consumer], (first, last))
        return found


def checked_ranges(ranges: Iterable[KeyRange]) -> list[KeyRange]:
    """Return the ranges that a consumer declared, ascending.

    Raises BadRequest if there are none, if bounds are outside 0..65535 or in the wrong order, or if two overlap.
    """
    ascending = sorted(ranges)
    if not ascending:
        raise BadRequest("a sticky consumer needs at least one range of key hashes, for example [0, 65535]")
    previous: KeyRange | None = None
    for first, last in ascending:
        if not 0 <= first <= last <= HASH_MAX:
            raise BadRequest("invalid range of key hashes: needs 0 <= first <= last <= 65535", range=[first, last])
        if previous is not None and first <= previous[1]:
            raise BadRequest(
                "two ranges of key hashes of one consumer overlap; merge them",
                range=list(previous),
                other=[first, last],
            )
        previous = (first, last)
    return ascending


def _ring_hash(data: bytes) -> int:
    return murmur3_hash(data) % HASH_MAX + RING_HASH_MIN


def _points_of(name: str, number: int) -> set[int]:
    """Return the points of a consumer. Two of its own may coincide: they are one point."""
    head = f"{name}\0{number}\0".encode(errors="replace")
    return {_ring_hash(head + b"%d" % point) for point in range(POINTS_PER_CONSUMER)}


def _first_of(held: tuple[int, int, object]) -> int:
    return held[0]


def _append(ranges: list[KeyRange], new: KeyRange) -> None:
    """Append a range, or extend the last one if the two are adjacent."""
    if ranges and ranges[-1][1] + 1 == new[0]:
        ranges[-1] = (ranges[-1][0], new[1])
    else:
        ranges.append(new)
