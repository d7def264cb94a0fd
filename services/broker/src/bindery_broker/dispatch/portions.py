"""The messages that a dispatcher knows: parts of entries, each in one state.

A portion is a set of messages of one entry that share a state, a holder and a redelivery count. Most entries have one
portion for all their messages. It is split when a part of them is delivered, acknowledged or returned.

| state   | meaning                                                  | item | grant |
|---------|----------------------------------------------------------|------|-------|
| READY   | read, and not delivered                                  | yes  | no    |
| LEASED  | delivered to a consumer that holds it                    | no   | yes   |
| ACKING  | acknowledged, not durably yet                            | no   | no    |
| DELAYED | returned with a delay that has not ended                 | no   | no    |
| REPLAY  | returned; to be read again                               | no   | no    |
| LOADING | being read again                                         | no   | no    |
| SHELVED | put aside without its body, because its key cannot be delivered now | no | no |

Invariants: the portions of an entry have no message in common; a portion has at least one message; `messages` is the
number of messages in all portions.
"""

from collections.abc import Collection, Iterable, Iterator
from enum import IntEnum
from typing import Any, Generic

from bindery_pulsar.message_id import Position

from bindery_broker.dispatch.consumers import Grant
from bindery_broker.dispatch.item import B, Item, MessageRef, count_of


class State(IntEnum):
    READY = 1
    LEASED = 2
    ACKING = 3
    DELAYED = 4
    REPLAY = 5
    LOADING = 6
    SHELVED = 7
    GONE = 8
    """Acknowledged or forgotten. Queues may still refer to such a portion."""


class Portion(Generic[B]):
    """Messages of one entry that share a state. Compared by identity."""

    __slots__ = (
        "bits",
        "due",
        "grant",
        "is_returned",
        "item",
        "key_hash",
        "next",
        "position",
        "redelivery_count",
        "size",
        "state",
    )

    def __init__(self, position: Position, bits: int, state: State) -> None:
        self.position = position
        self.bits = bits
        self.state = state
        self.redelivery_count = 0
        self.size = 0
        """Bytes of the messages when they were last read."""
        self.key_hash = 0
        self.is_returned = False
        """Whether the messages were delivered before."""
        self.item: Item[B] | None = None
        self.grant: Grant[Portion[Any]] | None = None
        self.due: float | None = None
        """When the delay of a negative acknowledgement ends."""
        self.next: Portion[B] | None = None
        """The next portion of the same entry."""

    @property
    def ref(self) -> MessageRef:
        return MessageRef(self.position, self.bits)

    @property
    def count(self) -> int:
        """Number of messages."""
        return count_of(self.bits)


class PortionTable(Generic[B]):
    """The portions of one subscription, by position."""

    def __init__(self) -> None:
        self._first: dict[Position, Portion[B]] = {}
        self.messages = 0

    def __iter__(self) -> Iterator[Portion[B]]:
        for position in self._first:
            yield from self.of(position)

    def of(self, position: Position) -> Iterator[Portion[B]]:
        """Yield the portions of an entry. They may be split or removed meanwhile."""
        portion = self._first.get(position)
        while portion is not None:
            following = portion.next
            yield portion
            portion = following

    def __contains__(self, position: object) -> bool:
        return position in self._first

    def bits_of(self, position: Position) -> int:
        """Return the messages of an entry that are known."""
        bits = 0
        for portion in self.of(position):
            bits |= portion.bits
        return bits

    def add(self, position: Position, bits: int, state: State) -> Portion[B]:
        """Add messages that are not known yet."""
        portion: Portion[B] = Portion(position, bits, state)
        first = self._first.get(position)
        if first is None:
            self._first[position] = portion
        else:
            assert not self.bits_of(position) & bits
            portion.next, first.next = first.next, portion
        self.messages += count_of(bits)
        return portion

    def remove(self, portion: Portion[B]) -> None:
        self.messages -= portion.count
        portion.state = State.GONE
        portion.item = None
        first = self._first[portion.position]
        if first is portion:
            if portion.next is None:
                del self._first[portion.position]
            else:
                self._first[portion.position] = portion.next
            return
        while first.next is not portion:
            assert first.next is not None
            first = first.next
        first.next = portion.next

    def split(self, portion: Portion[B], bits: int) -> Portion[B]:
        """Make `bits`, a part of the portion's, a portion of their own in the same state, and return it.

        The new portion has no place in the queues of its dispatcher.
        """
        bits &= portion.bits
        assert bits not in (0, portion.bits)
        before = portion.count
        part: Portion[B] = Portion(portion.position, bits, portion.state)
        portion.bits &= ~bits
        self.messages += portion.count + part.count - before
        part.redelivery_count, part.due, part.key_hash = portion.redelivery_count, portion.due, portion.key_hash
        part.is_returned = portion.is_returned
        part.next, portion.next = portion.next, part
        if portion.item is not None:
            part.item = portion.item.cut(bits)
            part.size = part.item.size
        else:
            part.size = portion.size * part.count // (part.count + portion.count)
        portion.size -= part.size
        if portion.grant is not None:
            part.grant = portion.grant
            portion.grant.portions[part] = None
        return part

    def select(self, refs: Iterable[MessageRef], states: Collection[State]) -> list[Portion[B]]:
        """Return the messages of `refs` in one of `states` as portions; those of which a part is chosen are split."""
        chosen: list[Portion[B]] = []
        for position, bits in refs:
            for portion in self.of(position):
                if portion.state not in states:
                    continue
                common = portion.bits & bits
                if common == portion.bits:
                    chosen.append(portion)
                elif common:
                    chosen.append(self.split(portion, common))
        return chosen

    def clear(self) -> None:
        for portion in self:
            portion.state = State.GONE
            portion.item = None
        self._first.clear()
        self.messages = 0
