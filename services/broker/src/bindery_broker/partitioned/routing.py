"""Assign messages to partitions. No I/O.

| message without a key of a request with | partition                                                              |
|-----------------------------------------|------------------------------------------------------------------------|
| an idempotency key                      | by the hash of that key                                                |
| a producer and sequence ids             | by the hash of the producer's name, then in turn: the next partition   |
|                                         | for each SEQUENCE_BLOCK sequence ids                                   |
| neither                                 | the next in turn, for all such messages of the request                 |

A message with a key goes to the Murmur3 hash of the key's UTF-8 bytes, modulo the number of partitions. So the messages
of a key are in one partition, in the order of the request.

A message that may be repeated must go to the same partition each time, because each partition detects repetitions on
its own. Its partition therefore depends only on what is repeated with it, not on the request: a producer may repeat its
messages in other requests than before. Their sequence ids ascend in each partition. Blocks keep neighbours together, so
that a request is stored in large batches.

Pulsar's clients choose the partition of a message without a key in turn, with or without a sequence id. They repeat a
message at the same partition only while the producer lives, so that Pulsar's documentation asks for a router by key if
a producer repeats messages after a restart.

If the number of partitions grows, the partition of most keys changes. Messages of a key that were stored before and
after can then be consumed out of order.
Source: Pulsar's clients, Murmur3_32Hash and MathUtils.signSafeMod.
"""

from collections.abc import Sequence
from typing import Final

from bindery_pulsar.murmur3 import murmur3_hash

SEQUENCE_BLOCK: Final = 128
"""Number of sequence ids of a producer that go to one partition before the next one gets some."""


def partition_of(key: str | bytes, partitions: int) -> int:
    """Return the partition of a key: 0 to `partitions` - 1."""
    return murmur3_hash(key.encode() if isinstance(key, str) else key) % partitions


def route(
    keys: Sequence[str | bytes | None],
    *,
    partitions: int,
    turn: int,
    identity: str | None = None,
    sequence_ids: Sequence[int | None] | None = None,
) -> dict[int, list[int]]:
    """Return the indexes of the messages by partition, in ascending order each.

    `keys`: of each message of a request; None: no key. `turn`: number of earlier requests, for those without a key.
    `identity`: what is the same whenever this request is repeated; None: it is never repeated. `sequence_ids`: of each
    message, if the messages are repeated one by one.
    """
    assert partitions > 0
    keyless = turn % partitions if identity is None else partition_of(identity, partitions)
    found: dict[int, list[int]] = {}
    for index, key in enumerate(keys):
        if key is not None:
            partition = partition_of(key, partitions)
        else:
            sequence_id = None if sequence_ids is None else sequence_ids[index]
            partition = (keyless + (sequence_id or 0) // SEQUENCE_BLOCK) % partitions
        found.setdefault(partition, []).append(index)
    return found
