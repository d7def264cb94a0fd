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

A large batch that is delivered one message at a time has very many portions. Each keeps its bits without the zeros
below the lowest one, so that it takes as much memory as its messages, wherever they are in the batch.

Invariants: the portions of an entry have no message in common; a portion has at least one message; `messages` is the
number of messages in all portions.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any, Final, Generic

from bindery_pulsar.message_id import Position

from bindery_broker.dispatch.consumers import Grant
from bindery_broker.dispatch.item import WHOLE, B, Item, MessageRef, count_of, indexes_of, lowest


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


SHORT_BITS_MAX: Final = 256
"""Maximum number of bits that are kept as they are, with the zeros below the lowest one."""


class Portion(Generic[B]):
    """Messages of one entry that share a state. Compared by identity."""

    __slots__ = (
        "_base",
        "_bits",
        "count",
        "due",
        "grant",
        "is_returned",
        "item",
        "key_hash",
        "position",
        "redelivery_count",
        "size",
        "state",
    )

    def __init__(self, position: Position, bits: int, state: State) -> None:
        self.position = position
        self.count: int
        """Number of messages; set with `bits`."""
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

    @property
    def bits(self) -> int:
        """The messages, as in a MessageRef."""
        return self._bits << self._base if self._base else self._bits

    @bits.setter
    def bits(self, bits: int) -> None:
        self._base = lowest(bits) if bits.bit_length() > SHORT_BITS_MAX else 0
        self._bits = bits >> self._base if self._base else bits
        self.count = count_of(self._bits)

    @property
    def index(self) -> int | None:
        """Index of the message in its batch; None: the portion may have several messages."""
        bits = self._bits
        return self._base + bits.bit_length() - 1 if bits > 0 and not bits & (bits - 1) else None

    @property
    def ref(self) -> MessageRef:
        return MessageRef(self.position, self.bits)


class _Parts(Generic[B]):
    """The portions of an entry that has several. Those of one message are found by its index."""

    __slots__ = ("bits", "others", "singles")

    def __init__(self, only: Portion[B]) -> None:
        self.bits = only.bits
        """The messages of all portions."""
        self.singles: dict[int, Portion[B]] = {}
        self.others: dict[Portion[B], None] = {}
        self.put(only)

    def __len__(self) -> int:
        return len(self.singles) + len(self.others)

    def put(self, portion: Portion[B]) -> None:
        index = portion.index
        if index is None:
            self.others[portion] = None
        else:
            self.singles[index] = portion

    def discard(self, portion: Portion[B]) -> None:
        index = portion.index
        if index is None:
            del self.others[portion]
        else:
            del self.singles[index]

    def all(self) -> list[Portion[B]]:
        return [*self.others, *self.singles.values()]

    def near(self, bits: int) -> list[Portion[B]]:
        """Return the portions that may have messages of `bits`."""
        if bits < 0 or bits.bit_count() > len(self.singles):
            return self.all()
        return [*self.others, *(self.singles[index] for index in indexes_of(bits) if index in self.singles)]


class PortionTable(Generic[B]):
    """The portions of one subscription, by position. Those of a single message are found without the others."""

    def __init__(self) -> None:
        self._entries: dict[Position, Portion[B] | _Parts[B]] = {}
        self.messages = 0

    def __iter__(self) -> Iterator[Portion[B]]:
        for position in self._entries:
            yield from self.of(position)

    def of(self, position: Position) -> Iterator[Portion[B]]:
        """Yield the portions of an entry. They may be split or removed meanwhile."""
        return iter(self._near(position, WHOLE))

    def _near(self, position: Position, bits: int) -> Sequence[Portion[B]]:
        """Return the portions of an entry that may have messages of `bits`."""
        found = self._entries.get(position)
        if found is None:
            return ()
        return found.near(bits) if isinstance(found, _Parts) else (found,)

    def find(self, ref: MessageRef) -> Portion[B] | None:
        """Return a portion with a message of `ref`; None: no portion has one."""
        for portion in self._near(ref.position, ref.bits):
            if portion.bits & ref.bits:
                return portion
        return None

    def __contains__(self, position: object) -> bool:
        return position in self._entries

    def only(self, position: Position) -> Portion[B] | None:
        """Return the portion of an entry that has one; None: it has several, or is not known."""
        found = self._entries.get(position)
        return None if isinstance(found, _Parts) else found

    def bits_of(self, position: Position) -> int:
        """Return the messages of an entry that are known."""
        found = self._entries.get(position)
        return 0 if found is None else found.bits

    def add(self, position: Position, bits: int, state: State) -> Portion[B]:
        """Add messages that are not known yet."""
        portion: Portion[B] = Portion(position, bits, state)
        found = self._entries.get(position)
        if found is None:
            self._entries[position] = portion
        else:
            if not isinstance(found, _Parts):
                found = self._entries[position] = _Parts(found)
            assert not found.bits & bits
            found.bits |= bits
            found.put(portion)
        self.messages += count_of(bits)
        return portion

    def remove(self, portion: Portion[B]) -> None:
        self.messages -= portion.count
        portion.state = State.GONE
        portion.item = None
        found = self._entries[portion.position]
        if not isinstance(found, _Parts):
            assert found is portion
            del self._entries[portion.position]
            return
        found.discard(portion)
        found.bits &= ~portion.bits
        if len(found) == 1:
            (self._entries[portion.position],) = found.all()

    def split(self, portion: Portion[B], bits: int) -> Portion[B]:
        """Make `bits`, a part of the portion's, a portion of their own in the same state, and return it.

        The new portion has no place in the queues of its dispatcher.
        """
        bits &= portion.bits
        assert bits not in (0, portion.bits)
        before = portion.count
        found = self._entries[portion.position]
        if not isinstance(found, _Parts):
            found = self._entries[portion.position] = _Parts(portion)
        part: Portion[B] = Portion(portion.position, bits, portion.state)
        found.discard(portion)
        portion.bits &= ~bits
        found.put(portion)
        found.put(part)
        self.messages += portion.count + part.count - before
        part.redelivery_count, part.due, part.key_hash = portion.redelivery_count, portion.due, portion.key_hash
        part.is_returned = portion.is_returned
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
            for portion in self._near(position, bits):
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
        self._entries.clear()
        self.messages = 0
