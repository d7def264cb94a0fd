"""A subscription's place in a topic, durable.

(Signatures first: bodies follow.)
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bindery_broker.message_id import Position


class BatchAck(NamedTuple):
    """Messages of one batch entry that were consumed."""

    position: Position
    batch_size: int
    """Messages in the entry, acknowledged or not."""
    indexes: Sequence[int]
    """0 .. batch_size - 1."""


class UnackedEntry(NamedTuple):
    position: Position
    payload: bytes
    remaining: int | None
    """Bit i set: message i of the batch is still to be acknowledged. None: the whole entry is."""


class UnackedRead(NamedTuple):
    entries: list[UnackedEntry]
    next_position: Position
    """Where the next read goes on."""


class ManagedCursor:
    """One subscription's acknowledgements: the mark-delete position, what is acknowledged beyond it, parts of batches."""

    name: str
    """The subscription's name, as users write it."""

    @property
    def mark_delete(self) -> Position:
        """This entry and all before it are acknowledged."""
        raise NotImplementedError

    @property
    def properties(self) -> Mapping[str, str]:
        """Subscription properties, fixed when the cursor was made."""
        raise NotImplementedError

    @property
    def position_properties(self) -> Mapping[str, int]:
        """Numbers that are stored with the position; for the subscription's own use."""
        raise NotImplementedError

    @property
    def backlog_entries(self) -> int:
        """Confirmed entries that are not wholly acknowledged."""
        raise NotImplementedError

    def is_acked(self, position: Position) -> bool:
        """Whether the whole entry is acknowledged (or trimmed)."""
        raise NotImplementedError

    def remaining(self, position: Position) -> int | None:
        """Unacknowledged indexes of a partly acknowledged batch, as bits; None: none of it is, or all is."""
        raise NotImplementedError

    def next_unacked(self, position: Position) -> Position:
        """The first position >= `position` that is not acknowledged; may be where the next entry will stand."""
        raise NotImplementedError

    async def read_unacked(self, start: Position, *, entries_max: int, size_max: int) -> UnackedRead:
        """Up to `entries_max` unacknowledged entries from `start` on, as `ManagedLedger.read`."""
        raise NotImplementedError

    async def ack_many(self, positions: Sequence[Position], *, batches: Sequence[BatchAck] = ()) -> list[Position]:
        """Acknowledge entries and parts of batches; returns when that is durable (many calls share one record).

        Returns the entries that became wholly acknowledged by this call, a batch by its last index included. Repeating
        is harmless and waits for durability as well. BadRequest (nothing applied) when one of them is not an entry of
        this topic. On any other error the acks may or may not be durable: repeat, or let them be delivered again.
        """
        raise NotImplementedError

    async def ack_cumulative(self, position: Position, *, batch: BatchAck | None = None) -> None:
        """Acknowledge everything up to and including `position`, durably. `batch`: the id points into that batch, so up to
        the entry before it, and the batch's given indexes."""
        raise NotImplementedError

    async def seek(self, position: Position) -> Position:
        """Forget all acknowledgements and stand so that `position` (clamped; EARLIEST, LATEST) comes next; durably.

        Returns the position that comes next."""
        raise NotImplementedError

    async def set_position_properties(self, properties: Mapping[str, int]) -> None:
        """Replace `position_properties`, durably."""
        raise NotImplementedError
