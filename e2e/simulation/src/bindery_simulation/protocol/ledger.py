"""Record the state of the ledger of a history, and check the invariants."""

from collections.abc import Mapping
from itertools import pairwise

from bindery_core.entry import Entry, peek_header
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState
from bindery_core.ids import BookieId, EntryId, LedgerId

from bindery_simulation.protocol.bookie import Bookie
from bindery_simulation.protocol.invariants import Invariant, Violation

LEDGER_ID = LedgerId(7)
"""Id of the ledger of every history."""
PAYLOAD_OFFSET = 36
"""Number of bytes before the payload in a CRC32C frame: 32 bytes of header and 4 bytes of digest."""


class Ledger:
    """The metadata node, the under-replication mark, and the state of the checks."""

    def __init__(self, metadata: LedgerMetadata, bookies: Mapping[BookieId, Bookie]) -> None:
        self.metadata = metadata
        self.version = 0
        self.is_deleted = False
        self.mark: int | None = None
        """Version of the under-replication mark; None: not marked."""
        self.mark_count = 0
        self.bookies = bookies
        self.payloads: list[bytes] = []
        self.lengths: list[int] = []
        self.carried: list[int] = []
        """LAC that the frame of each entry contains."""
        self.confirmed = -1
        self.pushed_when_deleted: int | None = None
        """Number of entries pushed before a deletion that had fenced all bookies; None: there was no such deletion."""

    # -- metadata writes of clients --------------------------------------------------------------------------------

    def compare_and_set(self, planned: LedgerMetadata, version: int) -> bool:
        if version != self.version or self.is_deleted:
            return False
        before, self.metadata = self.metadata, planned
        self.version += 1
        self._check_change(before, planned)
        return True

    def delete(self, version: int, *, has_fenced: bool) -> bool:
        if self.is_deleted:
            return True
        if version != self.version:
            return False
        self.is_deleted = True
        self.mark = None
        if has_fenced:
            self.pushed_when_deleted = len(self.payloads)
        return True

    def set_mark(self) -> None:
        """Set the mark with a new version, so that a repair that began earlier does not remove it."""
        if not self.is_deleted:
            self.mark_count += 1
            self.mark = self.mark_count

    def remove_mark(self, version: int) -> bool:
        if self.mark != version:
            return False
        self.mark = None
        if self.metadata.state is LedgerState.CLOSED:
            for entry_id in range(self.metadata.last_entry_id + 1):
                for holder in self.holders(entry_id):
                    if not self.bookies[holder].has_good(entry_id):
                        raise Violation(
                            Invariant.MARK, f"the mark was removed, but {holder} has no good copy of entry {entry_id}"
                        )
        return True

    # -- checks ----------------------------------------------------------------------------------------------------

    def pushed(self, payloads: tuple[bytes, ...], *, lac: int) -> None:
        length = self.lengths[-1] if self.lengths else 0
        for payload in payloads:
            length += len(payload)
            self.payloads.append(payload)
            self.lengths.append(length)
            self.carried.append(lac)

    def holders(self, entry_id: int) -> list[BookieId]:
        """Return the write set in the published metadata, computed independently of `bindery_core.placement`."""
        metadata = self.metadata
        ensemble = metadata.segment_of(EntryId(entry_id)).ensemble
        size = metadata.ensemble_size
        return [ensemble[(entry_id + place) % size] for place in range(metadata.write_quorum)]

    def copies(self, entry_id: int) -> int:
        """Return the number of members of the write set that stored the entry, even if a fault removed it since."""
        count = 0
        for holder in self.holders(entry_id):
            bookie = self.bookies[holder]
            count += entry_id in bookie.entries or entry_id in bookie.removed
        return count

    def _check_change(self, before: LedgerMetadata, after: LedgerMetadata) -> None:
        if before.state is LedgerState.CLOSED and (
            after.state is not LedgerState.CLOSED
            or (after.last_entry_id, after.length) != (before.last_entry_id, before.length)
        ):
            raise Violation(
                Invariant.FINAL,
                f"closed at {before.last_entry_id} with {before.length} bytes, now {after.state.name} "
                f"at {after.last_entry_id} with {after.length}",
            )
        if after.state < before.state:
            raise Violation(Invariant.SEGMENTS, f"state went back from {before.state.name} to {after.state.name}")
        firsts = [segment.first_entry_id for segment in after.segments]
        if firsts[0] != 0 or any(a >= b for a, b in pairwise(firsts)):
            raise Violation(Invariant.SEGMENTS, f"segments begin at {firsts}")
        for segment in after.segments:
            if len(set(segment.ensemble)) != after.ensemble_size:
                raise Violation(Invariant.SEGMENTS, f"not {after.ensemble_size} bookies: {','.join(segment.ensemble)}")
        for segment in before.segments:
            if segment.first_entry_id <= self.confirmed and segment.first_entry_id not in firsts:
                raise Violation(Invariant.SEGMENTS, f"the segment at {segment.first_entry_id} is gone, entries are not")
        if after.state is LedgerState.CLOSED:
            last = int(after.last_entry_id)
            if last < self.confirmed:
                raise Violation(Invariant.READABLE, f"closed at {last}, but entry {self.confirmed} is confirmed")
            if last >= len(self.payloads):
                raise Violation(Invariant.DENSE, f"closed at {last}, but only {len(self.payloads)} were pushed")
            if after.length != (self.lengths[last] if last >= 0 else 0):
                raise Violation(Invariant.FINAL, f"closed at {last} with a length of {after.length}")
        else:
            last = self.confirmed
        for entry_id in range(last + 1):
            copies = self.copies(entry_id)
            if copies < after.ack_quorum:
                is_confirmed = entry_id <= self.confirmed
                raise Violation(
                    Invariant.READABLE if is_confirmed else Invariant.DENSE,
                    f"metadata now places entry {entry_id} ({'confirmed' if is_confirmed else 'closed over'}) where "
                    f"{copies} of {after.ack_quorum} copies are",
                )

    def confirm(self, first: int, last: int, *, is_broken: bool) -> None:
        if first != self.confirmed + 1 or last < first:
            raise Violation(Invariant.DENSE, f"confirmed {first}..{last} after {self.confirmed}")
        if is_broken:
            raise Violation(Invariant.DENSE, f"confirmed {first}..{last} after the handle was broken")
        metadata = self.metadata
        if self.is_deleted:
            if self.pushed_when_deleted is not None and last >= self.pushed_when_deleted:
                raise Violation(Invariant.NO_ACK_AFTER_FENCE, f"confirmed {last}, pushed after the ledger was deleted")
            self.confirmed = last
            return
        if metadata.state is LedgerState.CLOSED and last > metadata.last_entry_id:
            raise Violation(
                Invariant.NO_ACK_AFTER_FENCE, f"confirmed {last}, but the ledger was closed at {metadata.last_entry_id}"
            )
        for entry_id in range(first, last + 1):
            copies = self.copies(entry_id)
            if copies < metadata.ack_quorum:
                raise Violation(
                    Invariant.NO_DIVERGENCE,
                    f"confirmed {entry_id}, with {copies} of {metadata.ack_quorum} copies where metadata points "
                    f"({','.join(self.holders(entry_id))})",
                )
        self.confirmed = last

    def stored(self, bookie: Bookie, entry_id: int, frame: bytes, *, recovery: bool) -> None:
        """Check an add that a bookie acknowledged."""
        if not recovery and bookie.has_answered_fence:
            raise Violation(
                Invariant.NO_ACK_AFTER_FENCE, f"{bookie.bookie_id} stored entry {entry_id} after it answered a fence"
            )
        header = peek_header(frame)
        self.check_entry(entry_id, frame[PAYLOAD_OFFSET:], header.length, f"stored by {bookie.bookie_id}")
        if header.entry_id != entry_id:
            raise Violation(Invariant.AGREE, f"{bookie.bookie_id} stores entry {header.entry_id} as {entry_id}")

    def check_entry(self, entry_id: int, payload: bytes, length: int, what: str) -> None:
        if entry_id >= len(self.payloads):
            raise Violation(Invariant.AGREE, f"entry {entry_id}, {what}, was never pushed")
        if payload != self.payloads[entry_id] or length != self.lengths[entry_id]:
            raise Violation(
                Invariant.AGREE,
                f"entry {entry_id}, {what}: {payload.hex()} with length {length}, pushed was "
                f"{self.payloads[entry_id].hex()} with length {self.lengths[entry_id]}",
            )

    def was_read(self, entry: Entry, reader: str) -> None:
        self.check_entry(entry.entry_id, entry.payload, entry.length, f"read by {reader}")

    def lac_to_be_found(self) -> int:
        """Return the lowest permitted result of a LAC read that begins now and covers the ensemble."""
        return self.carried[self.confirmed] if self.confirmed >= 0 else -1

    def covered_lac(self, lac: int, reader: str, *, version: int, at_least: int) -> None:
        """Check a LAC read that covered the ensemble.

        `version` and `at_least`: metadata version and `lac_to_be_found` when the read began.
        """
        if version == self.version and self.metadata.state is LedgerState.OPEN and lac < at_least:
            raise Violation(
                Invariant.LAC_RECENT, f"{reader} found lac {lac}, but entries confirmed before carry {at_least}"
            )

    def saw_lac(self, lac: int, reader: str) -> None:
        if self.is_deleted:
            return
        closed = self.metadata.last_entry_id if self.metadata.state is LedgerState.CLOSED else -1
        if lac > max(self.confirmed, closed):
            raise Violation(Invariant.LAC_SAFE, f"{reader} saw lac {lac}; confirmed is {self.confirmed}")
