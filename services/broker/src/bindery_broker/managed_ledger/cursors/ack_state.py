"""The acknowledgements of one subscription, over the ledgers of its topic. Pure.

Invariants
- Everything <= mark_delete is acknowledged, and neither `acked` nor `batches` contains it.
- The entry after mark_delete is not in `acked`: mark_delete is as high as possible, also across ledgers.
- A batch in `batches` has at least one bit set and is not in `acked`.
- Without `seek`, mark_delete never moves back and no acknowledgement is taken back.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bindery_core.errors import BadRequest
from bindery_pulsar.managed_ledger_codec import CursorState
from bindery_pulsar.message_id import Position

from bindery_broker.managed_ledger.ledger_list import LedgerList


class BatchAck(NamedTuple):
    """Acknowledged messages of one batch entry."""

    position: Position
    batch_size: int
    """Number of messages in the entry, acknowledged or not."""
    indexes: Sequence[int]
    """Indexes of the acknowledged messages, each from 0 to batch_size - 1."""


class AckState:
    """Acknowledgements over a list of ledgers that grows and is trimmed."""

    def __init__(self, ledgers: LedgerList, stored: CursorState) -> None:
        self._ledgers = ledgers
        self.mark_delete = stored.mark_delete
        self.acked = stored.acked.copy()
        self.batches = dict(stored.batches)
        self.properties: Mapping[str, int] = dict(stored.properties)
        self._forget_upto_mark_delete()
        self._advance()

    def copy(self) -> "AckState":
        return AckState(self._ledgers, self.stored())

    def stored(self) -> CursorState:
        """Return the state to store. It shares the collections of this object, so encode it before the next change."""
        return CursorState(
            mark_delete=self.mark_delete, acked=self.acked, batches=self.batches, properties=self.properties
        )

    # --- questions

    def is_acked(self, position: Position) -> bool:
        return position <= self.mark_delete or self.acked.contains(*position)

    def remaining(self, position: Position) -> int | None:
        """See `ManagedCursor.remaining`."""
        return self.batches.get(position)

    def next_unacked(self, position: Position) -> Position:
        """Return the first position >= `position` that is not acknowledged, possibly the position of the next add."""
        position = self._ledgers.clamp(max(position, self._ledgers.next(self.mark_delete)))
        while (end := self.acked.end_of_range(*position)) is not None:
            position = self._ledgers.next(Position(position.ledger_id, end))
        return position

    @property
    def backlog_entries(self) -> int:
        behind = self._ledgers.entries_between(after=self.mark_delete, upto=self._ledgers.last_confirmed)
        return behind - self.acked.entries_count

    def check(self, position: Position) -> None:
        """Raise BadRequest unless `position` is an entry of the topic, existing or trimmed."""
        if position > self.mark_delete and not self._ledgers.contains(position):
            if position < self._ledgers.first_position:
                return  # trimmed
            raise BadRequest("no such message in this topic", position=str(position))

    @staticmethod
    def check_batch(batch: BatchAck) -> None:
        """Raise BadRequest unless the batch size and the indexes are valid."""
        if batch.batch_size < 1 or any(not 0 <= index < batch.batch_size for index in batch.indexes):
            raise BadRequest("no such message in this batch", position=str(batch.position), size=batch.batch_size)

    # --- changes

    def ack(self, positions: Sequence[Position], batches: Sequence[BatchAck]) -> tuple[bool, list[Position]]:
        """Acknowledge entries and messages of batches, which the caller must have checked.

        Returns whether anything changed, and the entries that became completely acknowledged.
        """
        changed = False
        finished: list[Position] = []
        first = self._ledgers.first_position
        for batch in batches:
            position = batch.position
            if self.is_acked(position) or position < first:
                continue
            before = self.batches.get(position, (1 << batch.batch_size) - 1)
            remaining = before
            for index in batch.indexes:
                remaining &= ~(1 << index)
            if remaining != before:
                changed = True
                self.batches[position] = remaining
                if not remaining:
                    finished.append(position)
        completed: list[Position] = []
        for position in (*positions, *finished):
            if position > self.mark_delete and position >= first and self.acked.add(*position):
                self.batches.pop(position, None)
                completed.append(position)
        if completed:
            self._advance()
        return changed or bool(completed), completed

    def ack_upto(self, position: Position) -> bool:
        """Acknowledge everything <= `position`. Returns whether that changed anything."""
        if position <= self.mark_delete:
            return False
        self.mark_delete = position
        self._forget_upto_mark_delete()
        self._advance()
        return True

    def seek(self, position: Position) -> None:
        """Move before `position` (clamped by the caller), and forget all acknowledgements after it."""
        self.mark_delete = self._ledgers.previous(position)
        self.acked.clear()
        self.batches.clear()

    def _advance(self) -> None:
        """Move mark_delete over the acknowledged entries that follow it."""
        moved = False
        while True:
            following = self._ledgers.next(self.mark_delete)
            end = self.acked.end_of_range(*following)
            if end is None:
                break
            self.mark_delete = Position(following.ledger_id, end)
            moved = True
        if moved:
            self._forget_upto_mark_delete()

    def _forget_upto_mark_delete(self) -> None:
        self.acked.remove_upto(*self.mark_delete)
        if self.batches:
            for position in [position for position in self.batches if position <= self.mark_delete]:
                del self.batches[position]
