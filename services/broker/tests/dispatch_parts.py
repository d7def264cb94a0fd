"""Messages for the tests of dispatchers, and what the owner of a dispatcher knows: the topic and stored counts.

Entry n is at position 0:n, and its body is n. Each message has `SIZE` bytes. A message is written as (entry, index).
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from bindery_broker.dispatch.dispatcher import Redelivered
from bindery_broker.dispatch.item import SINGLE, Delivery, Item, MessageRef, indexes_of
from bindery_pulsar.message_id import Position

SIZE = 10

Pair = tuple[int, int]
"""A message: entry id and index in the entry."""


def at(n: int) -> Position:
    return Position(0, n)


def ref(n: int, bits: int = SINGLE) -> MessageRef:
    return MessageRef(at(n), bits)


def refs(*numbers: int) -> list[MessageRef]:
    """Return references to entries that are no batches."""
    return [ref(n) for n in numbers]


def item(n: int, size: int = SIZE, *, key_hash: int = 0) -> Item[int]:
    """Return an entry that is no batch."""
    return Item(at(n), size=size, body=n, key_hash=key_hash)


def batch(n: int, bits: int, *, key_hash: int = 0) -> Item[int]:
    """Return the messages `bits` of a batch."""
    sizes = [SIZE] * bits.bit_count()
    return Item(at(n), size=sum(sizes), sizes=sizes, bits=bits, body=n, key_hash=key_hash)


def pairs(found: Iterable[Any]) -> list[Pair]:
    """Return the messages of references, portions or deliveries, in their order."""
    return [(one.position.entry_id, index) for one in found for index in indexes_of(one.bits)]


def bodies(taken: Iterable[Delivery[int]]) -> list[int]:
    return [delivery.body for delivery in taken]


def as_refs(messages: Iterable[Pair]) -> list[MessageRef]:
    """Return references to messages, one for each entry."""
    bits: dict[int, int] = {}
    for n, index in sorted(messages):
        bits[n] = bits.get(n, 0) | 1 << index
    return [ref(n, of_entry) for n, of_entry in bits.items()]


class Topic:
    """The topic of a model test: one message in entry 0, a batch of two in entry 1, one of three in entry 2, and so on.

    A batch with one message is an entry that is no batch. Each entry has one of `keys` keys.
    """

    def __init__(self, *, keys: int = 1) -> None:
        self.hashes = [1 + 65_000 // keys * key for key in range(keys)]

    def count(self, n: int) -> int:
        return 1 + n % 3

    def key(self, n: int) -> int:
        return self.hashes[n * 7 // 3 % len(self.hashes)]

    def messages(self, n: int) -> list[Pair]:
        return [(n, index) for index in range(self.count(n))]

    def item(self, n: int, bits: int) -> Item[int]:
        if self.count(n) == 1:
            assert bits == SINGLE
            return item(n, key_hash=self.key(n))
        return batch(n, bits, key_hash=self.key(n))

    def items(self, messages: Iterable[Pair]) -> list[Item[int]]:
        return [self.item(position.entry_id, bits) for position, bits in as_refs(messages)]


class StoredCounts:
    """The redelivery counts that the owner has stored."""

    def __init__(self) -> None:
        self.counts: dict[Pair, int] = {}

    def __call__(self, position: Position, /) -> Sequence[tuple[int, int]]:
        found: dict[int, int] = {}
        for (n, index), count in self.counts.items():
            if n == position.entry_id:
                found[count] = found.get(count, 0) | 1 << index
        return list(found.items())

    def store(self, redelivered: list[Redelivered]) -> None:
        """Store what a dispatcher has counted, as its owner does before each read."""
        for position, bits, count in redelivered:
            for index in indexes_of(bits):
                assert count == self.counts.get((position.entry_id, index), 0) + 1
                self.counts[position.entry_id, index] = count
        redelivered.clear()

    def forget(self, messages: Collection[Pair]) -> None:
        for message in messages:
            self.counts.pop(message, None)
