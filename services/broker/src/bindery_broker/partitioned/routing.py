"""Assign messages to partitions. No I/O.

| message       | partition                                                                                        |
|---------------|--------------------------------------------------------------------------------------------------|
| with a key    | Murmur3 hash of the key's UTF-8 bytes, modulo the number of partitions                           |
| without a key | one for all such messages of a request: the next in turn, or by the hash of the request's identity |

The messages of a key thus are in one partition, in the order of the request. Messages without a key stay together, so
that a request is stored in large batches. A request that may be repeated (an idempotency key, or a producer with
sequence ids) has an identity: its messages without a key must go to the same partition each time, because each
partition detects repetitions on its own.

If the number of partitions grows, the partition of most keys changes. Messages of a key that were stored before and
after can then be consumed out of order.
Source: Pulsar's clients, Murmur3_32Hash and MathUtils.signSafeMod.
"""

from collections.abc import Sequence

from bindery_pulsar.murmur3 import murmur3_hash


def partition_of(key: str | bytes, partitions: int) -> int:
    """Return the partition of a key: 0 to `partitions` - 1."""
    return murmur3_hash(key.encode() if isinstance(key, str) else key) % partitions


def route(
    keys: Sequence[str | bytes | None], *, partitions: int, turn: int, identity: str | None = None
) -> dict[int, list[int]]:
    """Return the indexes of the messages by partition, in ascending order each.

    `keys`: of each message of a request; None: no key. `turn`: number of earlier requests, for those without a key.
    `identity`: what is the same whenever this request is repeated; None: it is never repeated.
    """
    assert partitions > 0
    keyless = turn % partitions if identity is None else partition_of(identity, partitions)
    found: dict[int, list[int]] = {}
    for index, key in enumerate(keys):
        partition = keyless if key is None else partition_of(key, partitions)
        found.setdefault(partition, []).append(index)
    return found
