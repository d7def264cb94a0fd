"""What dispatchers handle: entries, or parts of them, with an opaque body.

An entry holds one message or a batch. Its messages are the bits of an integer: bit i stands for the message with batch
index i. An entry that is not a batch has bit 0 only. WHOLE stands for all messages of an entry, however many it has.
The order of positions, and of the bits in an entry, is the order of the topic.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from bindery_pulsar.message_codec import BATCH_COUNT_MAX
from bindery_pulsar.message_id import MessageId, Position

B = TypeVar("B")

SINGLE: Final = 1
"""Bits of an entry that is not a batch."""
WHOLE: Final = -1
"""Bits of an entry with an unknown number of messages."""
NOT_IN_BATCH: Final = -1
"""Batch index of a message that is an entry of its own."""


class MessageRef(NamedTuple):
    """Messages of one entry, by their bits."""

    position: Position
    bits: int


def refs_of(ids: Iterable[MessageId], known_bits: Callable[[Position], int]) -> list[MessageRef]:
    """Return the messages that `ids` name, one reference for each entry. An id without a batch index names all.

    `known_bits`: the messages of an entry that may be named, WHOLE if their number is not known. Others are left out,
    and indexes that no batch has: a client may send any index, and an integer with such a bit would be large.
    """
    named: dict[Position, set[int]] = {}
    for message_id in ids:
        named.setdefault(message_id.position, set()).add(message_id.batch_index)
    refs: list[MessageRef] = []
    for position, indexes in named.items():
        if NOT_IN_BATCH in indexes:
            refs.append(MessageRef(position, WHOLE))
            continue
        known = known_bits(position)  # once for each entry: it may consist of thousands of parts
        end = BATCH_COUNT_MAX if known < 0 else known.bit_length()
        in_batch = sorted(index for index in indexes if index < end)
        bits = bits_of(in_batch) & known if in_batch else 0
        if bits:
            refs.append(MessageRef(position, bits))
    return refs


def indexes_of(bits: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set, ascending. `bits` must not be negative."""
    assert bits >= 0
    base = 0
    while bits:
        skipped = (bits & -bits).bit_length() - 1
        bits >>= skipped + 1
        base += skipped
        yield base
        base += 1


def lowest(bits: int) -> int:
    """Return the number of the lowest bit that is set. `bits` must not be 0."""
    return (bits & -bits).bit_length() - 1


def bits_of(indexes: Sequence[int]) -> int:
    """Return the bits with these numbers, ascending and at least one."""
    first = indexes[0]
    found = bytearray((indexes[-1] - first >> 3) + 1)  # integers would be copied for each of the bits
    for index in indexes:
        found[index - first >> 3] |= 1 << (index - first & 7)
    return int.from_bytes(found, "little") << first


def count_of(bits: int) -> int:
    """Return the number of messages; 1 for WHOLE and what remains of it."""
    return bits.bit_count() if bits >= 0 else 1


class Item(Generic[B]):
    """One entry that was read, or a part of it. A part can be cut off; both share the body then."""

    __slots__ = ("bits", "body", "deliver_at_ms", "key_hash", "position", "size", "sizes")

    def __init__(
        self,
        position: Position,
        *,
        size: int,
        body: B,
        bits: int = SINGLE,
        sizes: Sequence[int] | None = None,
        key_hash: int = 0,
        deliver_at_ms: int = 0,
    ) -> None:
        """`size`: bytes that count against the limits. `sizes`: those of each message in a batch, in order."""
        self.position = position
        self.bits = bits
        self.size = size
        self.sizes = sizes
        self.body = body
        self.key_hash = key_hash
        self.deliver_at_ms = deliver_at_ms

    def cut(self, bits: int) -> "Item[B]":
        """Remove the messages of `bits`, a part of this item's, and return them as an item of their own."""
        bits &= self.bits
        assert 0 < bits < self.bits
        assert self.sizes is not None
        chosen: list[int] = []
        kept: list[int] = []
        if bits == self.bits & ((1 << bits.bit_length()) - 1):  # the first ones, as in most deliveries
            count = bits.bit_count()
            chosen, kept = [*self.sizes[:count]], [*self.sizes[count:]]
        else:
            first = lowest(self.bits)
            relative = bits >> first  # the bits of a part of a large batch may be many zeros
            for index, size in zip(indexes_of(self.bits >> first), self.sizes, strict=True):
                (chosen if relative >> index & 1 else kept).append(size)
        taken = Item(
            self.position,
            size=sum(chosen),
            body=self.body,
            bits=bits,
            sizes=chosen,
            key_hash=self.key_hash,
            deliver_at_ms=self.deliver_at_ms,
        )
        self.bits &= ~bits
        self.sizes = kept
        self.size -= taken.size
        return taken

    @property
    def first_size(self) -> int:
        """Bytes of the first message."""
        return self.sizes[0] if self.sizes else self.size

    def first_bits(self, *, count_max: int, size_max: int) -> int:
        """Return the bits of the first messages: at most `count_max`, and `size_max` bytes except for the first."""
        assert count_max >= 1
        if self.sizes is None or (self.size <= size_max and self.bits.bit_count() <= count_max):
            return self.bits
        first = lowest(self.bits)
        bits = size = 0
        for index, one in zip(indexes_of(self.bits >> first), self.sizes, strict=True):
            size += one
            if bits and (size > size_max or count_max <= 0):
                break
            bits |= 1 << index
            count_max -= 1
        return bits << first


class Delivery(NamedTuple, Generic[B]):
    """Messages of one entry that were delivered to a consumer."""

    position: Position
    bits: int
    body: B
    lease: str
    """Id of the delivery, not of the message: a redelivery has another lease."""
    redelivery_count: int
    """Number of earlier negative acknowledgements and timeouts of these messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchLimits:
    """Limits of one subscription, in memory and in delivery."""

    unacked_max: int = 50_000
    """Maximum number of unacknowledged messages: delivered, returned, or waiting. At the limit nothing new is read."""
    unacked_per_consumer_max: int = 10_000
    """Maximum number of messages that one consumer holds."""
    ready_max: int = 2_000
    """Maximum number of messages that are read and not delivered."""
    ready_bytes_max: int = 8 * 1024 * 1024
    """Maximum bytes of messages that are read and not delivered; `ReadAhead` limits the sum over all subscriptions."""

    def __post_init__(self) -> None:
        assert 1 <= self.unacked_per_consumer_max <= self.unacked_max
        assert self.ready_max >= 1
        assert self.ready_bytes_max >= 1
