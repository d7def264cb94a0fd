"""What changed in a cursor since its last durable record. Pure."""

from collections.abc import Set
from typing import Final

from bindery_pulsar.ack_ranges import AckRanges
from bindery_pulsar.message_id import Position

_NO_NAMES: Final[frozenset[str]] = frozenset()


class Changes:
    """Which parts of a state changed. The values are in the state itself, except for acknowledged entries."""

    __slots__ = ("acked", "batches", "counted", "is_move", "put_blobs", "removed_blobs")

    def __init__(self, *, is_move: bool = False) -> None:
        self.is_move = is_move
        """The cursor was moved by a seek, so nothing of the former state is left."""
        self.acked = AckRanges()
        """Newly acknowledged entries. Those that the mark-delete position has passed count no more."""
        self.batches: dict[Position, None] = {}
        """Entries of which single messages were acknowledged."""
        self.counted: dict[Position, None] = {}
        """Entries whose redelivery counts changed."""
        self.put_blobs: frozenset[str] = _NO_NAMES
        self.removed_blobs: frozenset[str] = _NO_NAMES

    @property
    def _is_empty(self) -> bool:
        return not (self.acked or self.batches or self.counted or self.put_blobs or self.removed_blobs or self.is_move)

    def add_blobs(self, put: Set[str], removed: Set[str]) -> None:
        """Note that blobs were put or removed. `put` and `removed` have no name in common."""
        self.put_blobs = (self.put_blobs - removed) | put
        self.removed_blobs = (self.removed_blobs - put) | removed

    def add(self, later: "Changes") -> "Changes":
        """Return the changes of both. `later` happened after these, which may be changed by the call."""
        if later.is_move or self._is_empty:
            return later
        self.acked.update(later.acked)
        self.batches |= later.batches
        self.counted |= later.counted
        self.add_blobs(later.put_blobs, later.removed_blobs)
        return self
