"""The acknowledgements of one subscription, over the ledgers of its topic. Pure.

Beside them it has what is forgotten with them: redelivery counts, and the blobs of the subscription. A change takes
time in proportion to itself, not to the acknowledged entries. `take_changes` returns what the next record must contain.

Invariants
- Everything <= mark_delete is acknowledged, and neither `acked` nor `batches` nor `counts` contains it.
- The entry after mark_delete is not in `acked`: mark_delete is as high as possible, also across ledgers.
- A batch in `batches` has at least one bit set and is not in `acked`.
- An acknowledged message has no redelivery count. The count of another message never goes down.
- Without `seek`, mark_delete never moves back and no acknowledgement is taken back.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from bindery_core.errors import BadRequest, TooLarge, TooManyRequests
from bindery_pulsar.cursor_fields import (
    BLOB_NAME_SIZE_MAX,
    BLOB_SIZE_MAX,
    BLOBS_MAX,
    COUNTED_ENTRIES_MAX,
    REDELIVERY_COUNT_MAX,
    Counts,
    CursorState,
)
from bindery_pulsar.message_id import Position
from bindery_pulsar.position_map import PositionMap
from bindery_pulsar.subscription_log import CursorChange

from bindery_broker.managed_ledger.cursors.changes import Changes
from bindery_broker.managed_ledger.ledger_list import LedgerList

BATCH_SIZE_MAX: Final = 2**20
"""Maximum number of messages of an entry for which redelivery counts are kept."""
_BLOCK_SIZE: Final = 704
"""Maximum bytes of a block of acknowledged entries in a record."""
_BATCH_SIZE: Final = 48
"""Approximate bytes of a partly acknowledged batch, or of the counts of an entry, in a record, without its bits."""
_WORD_SIZE: Final = 11
"""Maximum bytes of 64 bits of a batch in a record."""


class BatchAck(NamedTuple):
    """Acknowledged messages of one batch entry."""

    position: Position
    batch_size: int
    """Number of messages in the entry, acknowledged or not."""
    indexes: Sequence[int]
    """Indexes of the acknowledged messages, each from 0 to batch_size - 1."""


class Redelivered(NamedTuple):
    """Messages of one entry that are about to be delivered again."""

    position: Position
    bits: int
    """Bit i: message i of the batch; bit 0 for an entry that is no batch."""
    count: int  # type: ignore[assignment]  # hides tuple.count
    """Number of deliveries of these messages before the next one, from 1 to 2^31 - 1."""


class AckState:
    """Acknowledgements over a list of ledgers that grows and is trimmed."""

    def __init__(self, ledgers: LedgerList, stored: CursorState) -> None:
        self._ledgers = ledgers
        self.mark_delete = stored.mark_delete
        self.acked = stored.acked.copy()
        self.batches = PositionMap(stored.batches, weight_of=_batch_size)
        self.counts = PositionMap(stored.redelivery_counts, weight_of=_counts_size)
        self.blobs: dict[str, bytes] = dict(stored.blobs)
        self.properties: Mapping[str, int] = dict(stored.properties)
        self._changes = Changes()
        self._forget_upto_mark_delete()
        self._advance()
        for position, remaining in self.batches.items():
            if position in self.counts:
                self._keep_counts(position, remaining)

    def copy(self) -> "AckState":
        """Return a copy without the changes, which are therefore unknown. Takes O(state)."""
        return AckState(self._ledgers, self.stored())

    def stored(self) -> CursorState:
        """Return the state to store. It shares the collections of this object, so encode it before the next change."""
        return CursorState(
            mark_delete=self.mark_delete,
            acked=self.acked,
            batches=self.batches,
            properties=self.properties,
            redelivery_counts=self.counts,
            blobs=self.blobs,
        )

    def frozen(self) -> CursorState:
        """Return the state to store, which later changes do not affect. Takes O(state)."""
        return CursorState(
            mark_delete=self.mark_delete,
            acked=self.acked.copy(),
            batches=self.batches.copy(),
            properties=dict(self.properties),
            redelivery_counts=self.counts.copy(),
            blobs=dict(self.blobs),
        )

    def take_changes(self) -> Changes:
        """Return what changed since the last call."""
        changes, self._changes = self._changes, Changes()
        return changes

    def change(self, changes: Changes) -> CursorChange:
        """Return `changes`, which were taken, with the present values of what changed."""
        changes.acked.remove_upto(*self.mark_delete)
        return CursorChange(
            mark_delete=self.mark_delete,
            properties=self.properties,
            acked=changes.acked,
            batches={at: self.batches[at] for at in changes.batches if at in self.batches},
            redelivery_counts={at: self.counts[at] for at in changes.counted if at in self.counts},
            blobs={name: self.blobs[name] for name in changes.put_blobs},
            removed_blobs=changes.removed_blobs,
            is_move=changes.is_move,
        )

    @property
    def size(self) -> int:
        """Approximate maximum bytes of the stored state. Takes O(ledgers)."""
        entries = self.batches.weight + self.counts.weight
        return self.acked.blocks_count * _BLOCK_SIZE + entries + sum(map(len, self.blobs.values()))

    # --- questions

    def is_acked(self, position: Position) -> bool:
        return position <= self.mark_delete or self.acked.contains(*position)

    def has_acked(self, ledger_id: int, first: int, last: int) -> bool:
        """See `ManagedCursor.has_acked`."""
        return Position(ledger_id, first) <= self.mark_delete or self.acked.has_any(ledger_id, first, last)

    def remaining(self, position: Position) -> int | None:
        """See `ManagedCursor.remaining`."""
        return self.batches.get(position)

    def redelivery_count(self, position: Position, index: int) -> int:
        """See `ManagedCursor.redelivery_count`."""
        for count, bits in self.counts.get(position, ()):
            if bits >> index & 1:
                return count
        return 0

    def next_unacked(self, position: Position) -> Position:
        """Return the first position >= `position` that is not acknowledged, possibly the position of the next add."""
        position = self._ledgers.clamp(max(position, self._ledgers.next(self.mark_delete)))
        while (end := self.acked.end_of_range(*position)) is not None:
            position = self._ledgers.next(Position(position.ledger_id, end))
        return position

    def unacked_upto(self, position: Position) -> int:
        """Return the number of existing entries <= `position` that are not acknowledged."""
        behind = self._ledgers.entries_between(after=self.mark_delete, upto=position)
        return behind - self.acked.count_upto(*position)

    def after_unacked(self, count: int) -> Position:
        """Return the lowest confirmed entry up to which at least `count` entries are not acknowledged, else the last
        entry."""
        last = self._ledgers.last_confirmed
        first_index = self._ledgers.entries_between(after=Position(-1, -1), upto=self.mark_delete)
        low, high = first_index, self._ledgers.entries_between(after=Position(-1, -1), upto=last) - 1
        if high < low:
            return last
        while low < high:
            middle = (low + high) // 2
            if self.unacked_upto(self._ledgers.nth(middle)) >= count:
                high = middle
            else:
                low = middle + 1
        return self._ledgers.nth(low)

    @property
    def backlog(self) -> tuple[int, int]:
        """Number of entries that are not completely acknowledged, and their payload bytes.

        The bytes are an estimate, as if the entries of a ledger had the same size.
        """
        behind, size = self._ledgers.after(self.mark_delete)
        acked = self.acked.entries_count
        return behind - acked, size * (behind - acked) // behind if acked else size

    def partly_acked(self) -> tuple[int, int]:
        """Return the number of batches of which a part is acknowledged, and of their unacknowledged messages."""
        return len(self.batches), sum(map(int.bit_count, self.batches.values()))

    def check(self, position: Position) -> None:
        """Raise BadRequest unless `position` is an entry of the topic, existing or trimmed."""
        if position > self.mark_delete and not self._ledgers.contains(position):
            if position < self._ledgers.first_position:
                return  # trimmed
            raise BadRequest("no such message in this topic", position=str(position))

    @staticmethod
    def check_batch(batch: BatchAck) -> None:
        """Raise BadRequest unless the batch size and the indexes are valid."""
        if batch.batch_size < 1 or (
            batch.indexes and not 0 <= min(batch.indexes) <= max(batch.indexes) < batch.batch_size
        ):
            raise BadRequest("no such message in this batch", position=str(batch.position), size=batch.batch_size)

    def check_redelivered(self, changes: Sequence[Redelivered], *, size_max: float) -> None:
        """Raise BadRequest unless positions, bits and counts are valid, TooManyRequests if there are too many.

        `size_max`: maximum bytes of the stored state.
        """
        added = 0
        for position, bits, count in changes:
            self.check(position)
            if not 1 <= count <= REDELIVERY_COUNT_MAX or bits < 1 or bits.bit_length() > BATCH_SIZE_MAX:
                raise BadRequest("the redelivery count is not valid", position=str(position), count=count)
            added += _counts_size(((count, bits),))
        if len(self.counts) + len(changes) > COUNTED_ENTRIES_MAX:
            raise TooManyRequests(
                "the subscription has too many redelivered messages; acknowledge some of them",
                count=len(self.counts),
                count_max=COUNTED_ENTRIES_MAX,
            )
        self._check_size(added, size_max)

    def check_blobs(self, put: Mapping[str, bytes], remove: Collection[str], *, size_max: float) -> None:
        """Raise BadRequest or TooLarge if names, sizes or the number of blobs are not valid.

        `size_max`: maximum bytes of the stored state. Raises TooManyRequests if it would be larger.
        """
        for name, value in put.items():
            if not 1 <= len(name.encode()) <= BLOB_NAME_SIZE_MAX or name in remove:
                raise BadRequest("the name of the blob is not valid", name=name)
            if len(value) > BLOB_SIZE_MAX:
                raise TooLarge("the blob is too large", name=name, size=len(value), size_max=BLOB_SIZE_MAX)
        count = len(self.blobs.keys() - set(remove) | put.keys())
        if count > BLOBS_MAX:
            raise TooLarge("the cursor has too many blobs", count=count, count_max=BLOBS_MAX)
        added = sum(map(len, put.values()))
        removed = sum(len(value) for name, value in self.blobs.items() if name in put or name in remove)
        self._check_size(added - removed, size_max)

    def _check_size(self, added: int, size_max: float) -> None:
        """Raise TooManyRequests if the stored state would grow by `added` bytes, and exceed `size_max`."""
        if added > 0 and (size := self.size + added) > size_max:
            raise TooManyRequests(
                "the state of the subscription is too large to store; acknowledge its oldest messages",
                size=size,
                size_max=size_max,
            )

    # --- changes

    def ack(self, positions: Sequence[Position], batches: Sequence[BatchAck]) -> tuple[bool, list[Position]]:
        """Acknowledge entries and messages of batches, which the caller must have checked.

        Returns whether anything changed, and the entries that became completely acknowledged.
        """
        first = self._ledgers.first_position
        if len(positions) == 1 and not batches and self._ack_next(positions[0], first):
            return True, [positions[0]]
        changed = False
        finished: list[Position] = []
        for batch in batches:
            position = batch.position
            if self.is_acked(position) or position < first:
                continue
            before = self.batches.get(position, (1 << batch.batch_size) - 1)
            remaining = before & ~_bits_of(batch.indexes)
            if remaining != before:
                changed = True
                self.batches[position] = remaining
                self._changes.batches[position] = None
                if not remaining:
                    finished.append(position)
                elif position in self.counts:
                    self._keep_counts(position, remaining)
        completed: list[Position] = []
        mark_delete, batched, counts, changes = self.mark_delete, self.batches, self.counts, self._changes.acked
        for position in (*positions, *finished) if finished else positions:
            if position > mark_delete and position >= first and self.acked.add(*position):
                if batched:
                    batched.pop(position, None)
                if counts:
                    counts.pop(position, None)
                changes.add(*position)
                completed.append(position)
        ledger_id, entry_id = self.mark_delete
        if any(each.ledger_id != ledger_id or each.entry_id == entry_id + 1 for each in completed):
            self._advance()
        return changed or bool(completed), completed

    def _ack_next(self, position: Position, first: Position) -> bool:
        """Acknowledge the entry after mark_delete if that moves it by this entry only. Return False if it does not."""
        ledger_id, entry_id = self.mark_delete
        if position != (ledger_id, entry_id + 1) or position < first or self.batches or self.counts:
            return False
        if self.acked.end_of_range(*self._ledgers.next(position)) is not None:
            return False
        self.mark_delete = position
        self._changes.acked.add(*position)
        return True

    def ack_upto(self, position: Position) -> bool:
        """Acknowledge everything <= `position`. Returns whether that changed anything."""
        if position <= self.mark_delete:
            return False
        self.mark_delete = position
        self._forget_upto_mark_delete()
        self._advance()
        return True

    def seek(self, position: Position) -> None:
        """Move before `position` (clamped by the caller), and forget all acknowledgements, counts and blobs."""
        self.mark_delete = self._ledgers.previous(position)
        self.acked.clear()
        self.batches.clear()
        self.counts.clear()
        self.blobs.clear()
        self._changes = Changes(is_move=True)

    def record_redeliveries(self, changes: Sequence[Redelivered]) -> bool:
        """Raise the counts of messages, which the caller must have checked, to at least those given.

        Acknowledged and trimmed messages are left out. Returns whether that changed anything.
        """
        changed = False
        first = self._ledgers.first_position
        for position, bits, count in changes:
            if self.is_acked(position) or position < first:
                continue
            bits &= self.batches.get(position, bits)
            before = self.counts.get(position, ())
            after = _raised(before, bits, count)
            if after != before:
                self.counts[position] = after
                self._changes.counted[position] = None
                changed = True
        return changed

    def put_blobs(self, put: Mapping[str, bytes], remove: Collection[str]) -> bool:
        """Set and remove blobs, which the caller must have checked. Returns whether that changed anything."""
        changed = {name for name, value in put.items() if self.blobs.get(name) != value}
        removed = {name for name in remove if name in self.blobs}
        for name in removed:
            del self.blobs[name]
        for name in changed:
            self.blobs[name] = bytes(put[name])
        self._changes.add_blobs(changed, removed)
        return bool(changed or removed)

    def _keep_counts(self, position: Position, remaining: int) -> None:
        """Forget the counts of the acknowledged messages of a batch."""
        kept = tuple((count, bits & remaining) for count, bits in self.counts[position] if bits & remaining)
        if kept:
            self.counts[position] = kept
        else:
            del self.counts[position]

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
            self.batches.remove_upto(self.mark_delete)
        if self.counts:
            self.counts.remove_upto(self.mark_delete)


def _batch_size(bits: int) -> int:
    """Return the approximate maximum bytes of a partly acknowledged batch in a record."""
    return _BATCH_SIZE + _WORD_SIZE * (bits.bit_length() + 63 >> 6)


def _counts_size(counts: Counts) -> int:
    """Return the approximate maximum bytes of the counts of an entry in a record."""
    return _BATCH_SIZE + _WORD_SIZE * sum(bits.bit_length() + 63 >> 6 for _, bits in counts)


def _bits_of(indexes: Sequence[int]) -> int:
    """Return the bits with these numbers. Takes O(number of indexes + highest index / 8), also for large batches."""
    if isinstance(indexes, range) and indexes and indexes.step == 1:
        return (1 << indexes.stop) - (1 << indexes.start)
    octets = bytearray((max(indexes, default=0) >> 3) + 1)
    for index in indexes:
        octets[index >> 3] |= 1 << (index & 7)
    return int.from_bytes(octets, "little")


def _raised(counts: Counts, bits: int, count: int) -> Counts:
    """Return the counts with those of the messages in `bits` raised to at least `count`."""
    levels: dict[int, int] = {}
    for known, messages in counts:
        if known >= count:
            levels[known] = messages
            bits &= ~messages
        elif rest := messages & ~bits:
            levels[known] = rest
    if bits:
        levels[count] = levels.get(count, 0) | bits
    return tuple(sorted(levels.items()))
