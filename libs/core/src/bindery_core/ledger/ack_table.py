"""AckTable: which members of the ensemble stored each entry of a ledger that is being written.

An entry is *complete* when an ack quorum of its write set stored it. A member is *given up* for an entry when its ack
is no longer expected. An entry is *settled* when every member of its write set stored it or was given up for it. The
table drops settled entries from its front, so its size follows the entries in flight: one int per unsettled entry.

Members are sets of ensemble indexes, as the bits of an int.

Invariants: `acks[i]` belongs to entry `base + i` and has only bits of that entry's write set; `lost` has no empty set.
Every call works on a batch, because a call per entry would dominate the cost of an add.
"""

from collections.abc import Sequence
from itertools import repeat

from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.placement.write_set import write_set_masks
from bindery_core.wire.messages import AddResponse, Status

_OK = int(Status.OK)


class AckTable:
    """Acks of consecutive entries of one ledger. Invariants: see the module docstring."""

    __slots__ = ("_masks", "_size", "ack_quorum", "acks", "base", "is_everywhere", "lost")

    def __init__(self, metadata: LedgerMetadata, *, first_entry_id: int) -> None:
        self._size = metadata.ensemble_size
        self._masks = write_set_masks(ensemble_size=metadata.ensemble_size, write_quorum=metadata.write_quorum)
        self.is_everywhere = metadata.write_quorum == metadata.ensemble_size
        """Whether every write set is the whole ensemble."""
        self.ack_quorum = metadata.ack_quorum
        self.base = first_entry_id
        """Id of the first entry in the table."""
        self.acks: list[int] = []
        """At position i: the members that stored entry `base + i`."""
        self.lost: dict[int, int] = {}
        """Entry -> members that were given up for it. Empty unless a member failed."""

    def extend(self, count: int) -> None:
        """Append `count` entries that no member has stored."""
        self.acks.extend(repeat(0, count))

    def clear(self) -> None:
        self.acks.clear()
        self.lost.clear()

    def entries_of(self, bit: int, first: int, end: int) -> list[int]:
        """Return the entries first..end-1 whose write set contains the member."""
        size, masks = self._size, self._masks
        return [entry_id for entry_id in range(first, end) if masks[entry_id % size] & bit]

    # -- responses -------------------------------------------------------------------------------------------------

    def record(self, bit: int, responses: Sequence[AddResponse]) -> list[AddResponse]:
        """Record the entries that the member stored, and return the responses with another status than OK."""
        acks, base, count = self.acks, self.base, len(self.acks)
        refused: list[AddResponse] = []
        if self.is_everywhere:
            for response in responses:
                position = response.entry_id - base
                if response.status != _OK:
                    refused.append(response)
                elif 0 <= position < count:
                    acks[position] |= bit
        else:
            size, masks = self._size, self._masks
            for response in responses:
                entry_id = response.entry_id
                if response.status != _OK:
                    refused.append(response)
                elif 0 <= entry_id - base < count and masks[entry_id % size] & bit:
                    acks[entry_id - base] |= bit
        return refused

    def complete_count(self, first: int) -> int:
        """Return the number of consecutive complete entries from `first` on."""
        acks, ack_quorum = self.acks, self.ack_quorum
        start = position = first - self.base
        count = len(acks)
        while position < count and acks[position].bit_count() >= ack_quorum:
            position += 1
        return position - start

    def settle(self, end: int) -> bool:
        """Drop the settled entries at the front, up to `end - 1`. Return whether there were any."""
        acks, base, masks = self.acks, self.base, self._masks
        confirmed = end - base
        settled = 0
        if self.lost:
            lost, size = self.lost, self._size
            while settled < confirmed:
                entry_id = base + settled
                if acks[settled] | lost.get(entry_id, 0) != masks[entry_id % size]:
                    break
                lost.pop(entry_id, None)
                settled += 1
        elif self.is_everywhere:
            everyone = masks[0]
            while settled < confirmed and acks[settled] == everyone:
                settled += 1
        else:
            size = self._size
            while settled < confirmed and acks[settled] == masks[(base + settled) % size]:
                settled += 1
        if not settled:
            return False
        del acks[:settled]
        self.base = base + settled
        return True

    # -- failed members --------------------------------------------------------------------------------------------

    def awaited(self, entry_id: int) -> int:
        """Return the members that should store the entry, have not, and were not given up for it."""
        stored = self.acks[entry_id - self.base] | self.lost.get(entry_id, 0)
        return self._masks[entry_id % self._size] & ~stored

    def is_awaited(self, bit: int) -> bool:
        """Return whether the member is awaited for any entry."""
        return any(self.awaited(entry_id) & bit for entry_id in range(self.base, self.base + len(self.acks)))

    def give_up(self, members: int, first: int, end: int) -> int | None:
        """Expect no more acks of `members` for first..end-1. Return the first entry affected; None: no entry is."""
        hole = None
        for entry_id in range(first, end):
            missing = self._masks[entry_id % self._size] & members & ~self.acks[entry_id - self.base]
            if missing:
                self.lost[entry_id] = self.lost.get(entry_id, 0) | missing
                hole = entry_id if hole is None else hole
        return hole

    def discard(self, bit: int, first: int, end: int) -> None:
        """Remove the member from `acks` and `lost` for first..end-1, because another bookie replaces it."""
        for entry_id in range(first, end):
            self.acks[entry_id - self.base] &= ~bit
            lost = self.lost.pop(entry_id, 0) & ~bit
            if lost:
                self.lost[entry_id] = lost

    def lost_count_max(self, first: int, end: int) -> int:
        """Return the largest number of members given up for one entry of first..end-1."""
        counts = (
            (self.lost.get(entry_id, 0) & ~self.acks[entry_id - self.base]).bit_count()
            for entry_id in range(first, end)
        )
        return max(counts, default=0)


def indexes_of(members: int) -> list[int]:
    """Return the ensemble indexes in a set of members, ascending."""
    return [index for index in range(members.bit_length()) if members >> index & 1]
