"""Compute which entries each bookie must store: one fragment for each bookie of each segment of a ledger. Pure.

| case                         | expected entries of a fragment                                                        |
|------------------------------|---------------------------------------------------------------------------------------|
| not the last segment         | all of its share: an ensemble is replaced from the first unconfirmed entry on         |
| last segment, ledger closed  | its share up to the ledger's last entry                                               |
| last segment, not closed     | its share up to the LAC; entries beyond it are read if stored, but are not expected   |

The LAC of a ledger that is not closed is the highest one that any bookie of its last ensemble reports while the
partitions are planned, either in its last entry or as an explicit LAC. A LAC never decreases, so entries up to it stay
confirmed; entries confirmed later are not checked. A bookie's share of a segment is the entries whose write set
includes it. A bookie that is twice in an ensemble has the shares of both positions, each entry once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from bindery_client.client import DIGEST_TYPE_UNTOLD
from bindery_core.entry import HEADER_SIZE
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, LedgerState
from bindery_core.ids import BookieId, LedgerId
from bindery_core.placement.write_set import entry_count_of

FRAME_OVERHEAD: Final = HEADER_SIZE + 8
"""Approximate size in bytes of an entry without its payload."""
ENTRY_SIZE_UNKNOWN: Final = 1024
"""Assumed payload size in bytes if no entry of the ledger is known."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The facts of a ledger that are needed to read its replicas. Can be pickled: it holds no connection."""

    ledger_id: LedgerId
    digest_type: DigestType
    password: bytes
    ensemble_size: int
    write_quorum: int
    is_closed: bool
    limit: int | None
    """Id of the last expected entry. -1: no entry. None: the LAC is unknown."""
    entry_size: int
    """Estimated payload size of an entry in bytes."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """The entries of one segment, or of a part of it, that one bookie must store."""

    ledger: Ledger
    bookie_id: BookieId
    segment: int
    """Index in the list of segments of the metadata."""
    indexes: tuple[int, ...]
    """Positions of the bookie in the ensemble; usually one."""
    first: int
    last: int
    """Last entry id, inclusive; >= `first`. Entries beyond `ledger.limit` are unconfirmed."""

    @property
    def is_dense(self) -> bool:
        """Whether the bookie's share includes every entry."""
        return self.ledger.write_quorum == self.ledger.ensemble_size

    def entry_ids(self) -> Sequence[int]:
        """Ids of the bookie's share, ascending."""
        if self.is_dense:
            return range(self.first, self.last + 1)
        size, quorum = self.ledger.ensemble_size, self.ledger.write_quorum
        residues = {(index - back) % size for index in self.indexes for back in range(quorum)}
        return [entry_id for entry_id in range(self.first, self.last + 1) if entry_id % size in residues]

    def confirmed(self) -> "Fragment | None":
        """Return the fragment without unconfirmed entries; None if none remains. If the LAC is unknown: unchanged."""
        limit = self.ledger.limit
        if limit is None or self.last <= limit:
            return self
        return replace(self, last=limit) if self.first <= limit else None

    @property
    def entry_count(self) -> int:
        """Number of entries, computed without their list. Too high if the bookie is twice in the ensemble."""
        if self.is_dense:
            return self.last - self.first + 1
        size, quorum = self.ledger.ensemble_size, self.ledger.write_quorum
        return sum(
            entry_count_of(index, first=self.first, last=self.last, ensemble_size=size, write_quorum=quorum)
            for index in self.indexes
        )

    def ends(self) -> tuple[int, ...]:
        """The first and the last expected entry of the share; empty if no entry is expected."""
        limit = self.last if self.ledger.limit is None else min(self.last, self.ledger.limit)
        if limit < self.first:
            return ()
        size = self.ledger.ensemble_size
        # Each position stores at least one of `size` consecutive entries.
        low = Fragment(
            self.ledger, self.bookie_id, self.segment, self.indexes, self.first, min(limit, self.first + size - 1)
        ).entry_ids()
        high = Fragment(
            self.ledger, self.bookie_id, self.segment, self.indexes, max(self.first, limit - size + 1), limit
        ).entry_ids()
        return tuple(sorted({*low[:1], *high[-1:]}))

    def shared_ends(self) -> tuple[int, ...]:
        """The `ends` of the shares of all bookies of the segment, if they are also in this bookie's share. Each of
        these entries is thus requested from its whole write set, so an entry that is missing on one bookie does not
        look lost."""
        if self.is_dense:
            return self.ends()
        size, quorum = self.ledger.ensemble_size, self.ledger.write_quorum
        ends = {entry_id for index in range(size) for entry_id in replace(self, indexes=(index,)).ends()}
        return tuple(e for e in sorted(ends) if any((index - e) % size < quorum for index in self.indexes))


@dataclass(frozen=True, slots=True)
class Tail:
    """What the bookies report about the end of a ledger that is not closed."""

    lac: int | None
    """Highest LAC that a bookie reported. None: too few bookies of the last ensemble answered."""
    length: int = 0
    """The ledger's length at the entry `length_at`, near its end. For estimates only."""
    length_at: int = -1
    held: Mapping[BookieId, int] | None = None
    """The last entry that each bookie stores; -1: none. Bookies that did not answer are absent."""


def ledger_of(ledger_id: LedgerId, metadata: LedgerMetadata, tail: Tail | None) -> Ledger:
    """Return the facts of a ledger. `tail`: required if the ledger is not closed."""
    is_closed = metadata.state is LedgerState.CLOSED
    before = int(metadata.last_segment.first_entry_id) - 1
    if is_closed:
        limit: int | None = int(metadata.last_entry_id)
        size = metadata.length // (limit + 1) if limit is not None and limit >= 0 else 0
    else:
        assert tail is not None
        limit = None if tail.lac is None else max(tail.lac, before)
        size = tail.length // (tail.length_at + 1) if tail.length_at >= 0 else ENTRY_SIZE_UNKNOWN
    digest_type = metadata.digest_type or DIGEST_TYPE_UNTOLD
    return Ledger(
        ledger_id,
        digest_type,
        metadata.password or b"",
        metadata.ensemble_size,
        metadata.write_quorum,
        is_closed,
        limit,
        max(1, size),
    )


def fragments_of(ledger: Ledger, metadata: LedgerMetadata, tail: Tail | None = None) -> Iterator[Fragment]:
    """Yield the fragments by segment, then by position in the ensemble. Fragments without entries are omitted.

    If the LAC is unknown, each bookie of the last ensemble that did not answer gets a fragment with one entry, the
    first of the segment, so that its reader reports the missing answer. All earlier segments are confirmed anyway.
    """
    held = tail.held if tail is not None and tail.held is not None else {}
    before = replace(ledger, limit=int(metadata.last_segment.first_entry_id) - 1) if ledger.limit is None else ledger
    for number, segment in enumerate(metadata.segments):
        first = int(segment.first_entry_id)
        is_last = number == len(metadata.segments) - 1
        for bookie_id in dict.fromkeys(segment.ensemble):
            if not is_last:
                last = int(metadata.segments[number + 1].first_entry_id) - 1
                if ledger.is_closed and ledger.limit is not None:
                    last = min(last, ledger.limit)  # a recovery may have closed the ledger before its last ensemble
            elif ledger.limit is None:
                last = first - 1 if bookie_id in held else first
            elif tail is not None and tail.held is not None:
                last = max(ledger.limit, tail.held.get(bookie_id, -1))
            else:
                last = ledger.limit
            indexes = tuple(index for index, member in enumerate(segment.ensemble) if member == bookie_id)
            fragment = Fragment(ledger if is_last else before, bookie_id, number, indexes, first, last)
            if last >= first and fragment.entry_count:
                yield fragment


def is_expected(metadata: LedgerMetadata, bookie_id: BookieId, entry_id: int) -> bool:
    """Whether the metadata assigns this entry to this bookie. It may still be unconfirmed."""
    number = max(n for n, segment in enumerate(metadata.segments) if segment.first_entry_id <= entry_id)
    ensemble = metadata.segments[number].ensemble
    size = metadata.ensemble_size
    return any(
        member == bookie_id and (index - entry_id) % size < metadata.write_quorum
        for index, member in enumerate(ensemble)
    )
