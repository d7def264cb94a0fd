"""Decide which messages of a topic stay: for each key the last one, unless that one removes the key. Pure.

| message                                                | effect                                                     |
|--------------------------------------------------------|------------------------------------------------------------|
| has a key and a payload                                | stays, and replaces the former message of the key          |
| has a key, and a null value or no payload (tombstone)  | removes the key                                            |
| has no key                                             | is removed                                                 |
| is a marker of a broker                                | is removed                                                 |
| is a chunk                                             | stays until all chunks of its message are there; the       |
|                                                        | message then replaces the former one of the key            |
| is encrypted                                           | its entry counts as one message with the key of the entry  |
| cannot be decoded, because it is damaged               | its entry stays, and replaces nothing                      |

A key is the text or the decoded bytes. The memory that this takes is estimated and limited.
Source: Pulsar AbstractTwoPhaseCompactor, PublishingOrderCompactor. Pulsar keeps one chunk of a message.
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from bindery_core.errors import TooManyRequests
from bindery_pulsar.message_codec import Message, OpaqueMessage
from bindery_pulsar.message_encoding import OpaqueReason
from bindery_pulsar.message_id import Position

from bindery_broker.errors import NotCompactable

Key = str | bytes
KEY_SIZE: Final = 300
"""Bytes of memory that a key takes besides its own."""
ENTRY_SIZE: Final = 150
"""Bytes of memory that an entry takes which stays as a whole, or a chunk."""
WHOLE: Final = -1
"""Index of a message that is a whole entry."""


class Place(NamedTuple):
    """Where a message is."""

    position: Position
    batch_index: int
    """Index in the batch; WHOLE: the entry is no batch."""


class Survivors:
    """Invariant: `size` is the estimated memory in bytes, at most `size_max`."""

    def __init__(self, *, size_max: int) -> None:
        self._size_max = size_max
        self.size = 0
        self.messages = 0
        """Number of messages that were added."""
        self._last: dict[Key, Place] = {}
        self._whole: set[Position] = set()
        """Entries that stay whatever their keys are."""
        self._chunked: dict[Place, list[Position]] = {}
        """Chunks of a message that stays, by the place of its last one, which is not listed."""
        self._incomplete: dict[str, list[Position]] = {}
        """Chunks by the uuid of a message whose last chunk was not added."""

    @property
    def keys(self) -> int:
        """Number of keys that have a message."""
        return len(self._last)

    def add(self, position: Position, messages: Iterable[Message]) -> None:
        """Add an entry: entries are added in order. `messages`: what it decodes to.

        Raises TooManyRequests if the keys take too much memory, NotCompactable for an entry whose keys are unknown.
        """
        for message in messages:
            self.messages += 1
            if isinstance(message, OpaqueMessage):
                self._add_opaque(position, message)
            elif message.key is not None:
                is_removal = message.null_value or not message.payload
                self._put(message.key, Place(position, message.batch_index), is_removal=is_removal)

    def add_unreadable(self, position: Position) -> None:
        """Add an entry that cannot be decoded."""
        self._grow(ENTRY_SIZE)
        self._whole.add(position)

    def kept(self) -> dict[Position, Sequence[int]]:
        """Return the indexes of the messages that stay, ascending, by entry; empty: the whole entry stays.

        Ends the use of this object, whose memory it takes over.
        """
        found: dict[Position, Sequence[int]] = {}
        while self._last:
            _, (position, index) = self._last.popitem()
            if index == WHOLE:
                found[position] = ()
            else:
                indexes = found.setdefault(position, [])
                assert isinstance(indexes, list)
                indexes.append(index)
        for indexes in found.values():
            if isinstance(indexes, list):
                indexes.sort()
        for chunks in (*self._chunked.values(), *self._incomplete.values(), self._whole):
            for position in chunks:
                found[position] = ()
        return found

    def _add_opaque(self, position: Position, message: OpaqueMessage) -> None:
        encoding = message.encoding
        if encoding.chunk is not None:
            if message.key is not None:
                self._add_chunk(position, message.key, encoding.chunk.uuid, encoding.chunk.index, encoding.chunk.count)
            return
        if encoding.batch_size is not None and encoding.reason is not OpaqueReason.ENCRYPTED:
            raise NotCompactable(
                "the keys of a batch are unknown, because it cannot be decompressed, or only to more than "
                "BROKER_DECODED_BYTES_MAX",
                position=str(position),
                reason=encoding.reason.value,
            )
        if message.key is not None:
            size = encoding.uncompressed_size if encoding.uncompressed_size is not None else len(message.payload)
            self._put(message.key, Place(position, WHOLE), is_removal=message.null_value or not size)

    def _add_chunk(self, position: Position, key: Key, uuid: str, index: int, count: int) -> None:
        if index == 0:
            self._forget_incomplete(uuid)  # the producer began again
        if index < count - 1:
            self._grow(ENTRY_SIZE + len(uuid))
            self._incomplete.setdefault(uuid, []).append(position)
            return
        chunks = self._incomplete.pop(uuid, [])
        self.size -= len(uuid) * len(chunks)
        place = Place(position, WHOLE)
        self._put(key, place, is_removal=False)
        self._chunked[place] = chunks

    def _forget_incomplete(self, uuid: str) -> None:
        for _ in self._incomplete.pop(uuid, ()):
            self.size -= ENTRY_SIZE + len(uuid)

    def _put(self, key: Key, place: Place, *, is_removal: bool) -> None:
        before = self._last.pop(key, None) if is_removal else self._last.get(key)
        if before is not None:
            self.size -= ENTRY_SIZE * len(self._chunked.pop(before, ()))
            if is_removal:
                self.size -= KEY_SIZE + len(key)
        elif not is_removal:
            self._grow(KEY_SIZE + len(key))
        if not is_removal:
            self._last[key] = place

    def _grow(self, size: int) -> None:
        if self.size + size > self._size_max:
            raise TooManyRequests(
                "the topic has too many keys to compact it within BROKER_COMPACTION_KEYS_BYTES_MAX; raise the setting",
                keys=len(self._last),
                size_max=self._size_max,
            )
        self.size += size
