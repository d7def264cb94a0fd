"""Choose the active consumer of a Failover subscription: the only one that gets messages.

The candidates are the consumers with the lowest priority number, sorted by name. On a partition, the candidate at the
index `partition` modulo their number is active, so that the partitions of a topic are spread over its consumers. On any
other topic a ring decides: each candidate has 100 points, the hashes of its name followed by a number, and the active
one has the next point at or above the hash of the topic's name, or the first point. If points coincide, the later
candidate has them.

So the choice depends on names, priorities and the order of joining between equal names, and a consumer that joins does
not become active just because it came first or last. Pulsar's brokers choose the same consumer.
Source: Pulsar 4.0 AbstractDispatcherSingleActiveConsumer with its default settings; golden values in
tests/dispatch/golden.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Protocol, TypeVar

from bindery_pulsar.murmur3 import HASH_MAX, murmur3_hash

POINTS_PER_CONSUMER: Final = 100
RING_SIZE: Final = HASH_MAX + 1


class Candidate(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def priority(self) -> int:
        """Consumers with the lowest number are preferred."""


C = TypeVar("C", bound=Candidate)


def pick_active(consumers: Sequence[C], *, partition: int, topic: str) -> C:
    """Return the active one of `consumers`, which are in the order of joining and at least one.

    `partition`: index of the partition, -1 if the topic is not one. `topic`: full name, such as
    `persistent://public/default/orders`.
    """
    priority = min(consumer.priority for consumer in consumers)
    best = sorted((consumer for consumer in consumers if consumer.priority == priority), key=_java_order)
    if partition >= 0:
        return best[partition % len(best)]
    start = murmur3_hash(topic.encode())
    return min(reversed(best), key=lambda consumer: _distance(consumer.name, start))


@lru_cache(maxsize=10_000)
def _distance(name: str, start: int) -> int:
    """Return how far the consumer's next point is from `start`, around the ring.

    Remembered, because each consumer that joins or leaves needs the distances of all the others.
    """
    head = name.encode(errors="replace")
    return min((murmur3_hash(head + b"%d" % point) - start) % RING_SIZE for point in range(POINTS_PER_CONSUMER))


def _java_order(consumer: Candidate) -> bytes:
    """Return the sort key of Java's strings: UTF-16 units, unlike Python's code points."""
    return consumer.name.encode("utf-16-be", "surrogatepass")
