"""Which bookie is to hold which entries: a ledger's metadata as fragments, one for each bookie of each segment. Pure.

| case                         | entries that are expected of a fragment                                               |
|------------------------------|---------------------------------------------------------------------------------------|
| segment that another follows | all of its share: an ensemble is replaced from the first unconfirmed entry on         |
| last segment, ledger closed  | its share up to the ledger's last entry                                               |
| last segment, not closed     | its share up to the LAC; what the bookie holds beyond is read, too, and not expected  |

The LAC of a ledger that is not closed is the highest that any bookie of its last ensemble tells, piggybacked on its
last entry or written explicitly, when the partitions are planned. It only ever grows, so an entry up to it stays
confirmed; entries confirmed since then are not looked at. A bookie's share of a segment is the entries in whose write
set it is; a bookie that stands twice in an ensemble has the shares of both places, each entry once.
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
"""Bytes of an entry beside its payload, about."""
ENTRY_SIZE_UNKNOWN: Final = 1024
"""Payload bytes assumed of an entry of which nothing is known."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """What reading a ledger's replicas takes. It pickles, and holds no connection."""

    ledger_id: LedgerId
    digest_type: DigestType
    password: bytes
    ensemble_size: int
    write_quorum: int
    is_closed: bool
    limit: int | None
    """The last entry that is expected; -1: none. None: nobody could tell the LAC."""
    entry_size: int
    """Estimated payload bytes of an entry."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """What one bookie is to hold of one segment, or of a part of it."""

    ledger: Ledger
    bookie_id: BookieId
    segment: int
    """Index in the metadata's list."""
    indexes: tuple[int, ...]
    """Places of the bookie in the ensemble; several when it stands there twice."""
    first: int
    last: int
    """Inclusive; >= first. Beyond `ledger.limit` there are entries that nobody confirmed."""

    @property
    def is_dense(self) -> bool:
        """Whether the bookie's share is every entry."""
        return self.ledger.write_quorum == self.ledger.ensemble_size

    def entry_ids(self) -> Sequence[int]:
        """Ascending."""
        if self.is_dense:
            return range(self.first, self.last + 1)
        size, quorum = self.ledger.ensemble_size, self.ledger.write_quorum
        residues = {(index - back) % size for index in self.indexes for back in range(quorum)}
        return [entry_id for entry_id in range(self.first, self.last + 1) if entry_id % size in residues]

    def confirmed(self) -> "Fragment | None":
        """Without what nobody confirmed; None: nothing is left. Where the LAC is not known it is left as it is."""
        limit = self.ledger.limit
        if limit is None or self.last <= limit:
            return self
        return replace(self, last=limit) if self.first <= limit else None

    @property
    def entry_count(self) -> int:
        """Without listing them; of a bookie that stands twice in the ensemble perhaps too many."""
        if self.is_dense:
            return self.last - self.first + 1
        size, quorum = self.ledger.ensemble_size, self.ledger.write_quorum
        return sum(
            entry_count_of(index, first=self.first, last=self.last, ensemble_size=size, write_quorum=quorum)
            for index in self.indexes
        )

    def ends(self) -> tuple[int, ...]:
        """The first and the last entry of the share that are expected; empty: there are none."""
        limit = self.last if self.ledger.limit is None else min(self.last, self.ledger.limit)
        if limit < self.first:
            return ()
        size = self.ledger.ensemble_size
        # Of `size` entries in a row each place has one at least.
        low = Fragment(
            self.ledger, self.bookie_id, self.segment, self.indexes, self.first, min(limit, self.first + size - 1)
        ).entry_ids()
        high = Fragment(
            self.ledger, self.bookie_id, self.segment, self.indexes, max(self.first, limit - size + 1), limit
        ).entry_ids()
        return tuple(sorted({*low[:1], *high[-1:]}))

    def shared_ends(self) -> tuple[int, ...]:
        """`ends` of all shares of the segment, as far as this bookie has them. So each of those entries is asked of all
        its bookies: one that lacks it does not look like an entry that nobody has."""
        if self.is_dense:
            return self.ends()
        size, quorum = self.ledger.ensemble_size, self.ledger.write_quorum
        ends = {entry_id for index in range(size) for entry_id in replace(self, indexes=(index,)).ends()}
        return tuple(e for e in sorted(ends) if any((index - e) % size < quorum for index in self.indexes))


@dataclass(frozen=True, slots=True)
class Tail:
    """What was found out about the end of a ledger that is not closed."""

    lac: int | None
    """None: too few bookies of the last ensemble could tell."""
    length: int = 0
    """The ledger's length at an entry near its end, and `length_at` that entry's id: for estimates only."""
    length_at: int = -1
    held: Mapping[BookieId, int] | None = None
    """The last entry that each bookie holds; -1: none. Who is not in it told nothing."""


def ledger_of(ledger_id: LedgerId, metadata: LedgerMetadata, tail: Tail | None) -> Ledger:
    """`tail`: of a ledger that is not closed."""
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
        ledger_id, digest_type, metadata.password or b"", metadata.ensemble_size, metadata.write_quorum, is_closed,
        limit, max(1, size),
    )  # fmt: skip


def fragments_of(ledger: Ledger, metadata: LedgerMetadata, tail: Tail | None = None) -> Iterator[Fragment]:
    """By segment, then by place. Fragments without entries are left out.

    Where nobody can tell the LAC each silent bookie of the last ensemble has a fragment of one entry, the segment's
    first: what its reader says of it is that it could not say. What came before is confirmed all the same.
    """
    told = tail.held if tail is not None and tail.held is not None else {}
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
                last = first - 1 if bookie_id in told else first
            elif tail is not None and tail.held is not None:
                last = max(ledger.limit, tail.held.get(bookie_id, -1))
            else:
                last = ledger.limit
            indexes = tuple(index for index, member in enumerate(segment.ensemble) if member == bookie_id)
            fragment = Fragment(ledger if is_last else before, bookie_id, number, indexes, first, last)
            if last >= first and fragment.entry_count:
                yield fragment


def is_expected(metadata: LedgerMetadata, bookie_id: BookieId, entry_id: int) -> bool:
    """Whether metadata name this bookie for this entry; whether the entry is confirmed is not asked."""
    number = max(n for n, segment in enumerate(metadata.segments) if segment.first_entry_id <= entry_id)
    ensemble = metadata.segments[number].ensemble
    size = metadata.ensemble_size
    return any(
        member == bookie_id and (index - entry_id) % size < metadata.write_quorum
        for index, member in enumerate(ensemble)
    )
