"""Plan re-replication: which entries to copy to which bookie, and the metadata change that makes the copies count.

A *fragment* is the part of one segment that one ensemble index holds. Only closed fragments may be copied: all
fragments of a CLOSED ledger, and in other ledgers those below the last segment. (An open last segment must be recovered
first, because its writer would not detect a replacement.)

The order is essential: copy all entries of the fragment to the replacement -> compare-and-set the ensemble -> check the
whole ledger again -> remove the mark. After a failure in between, the mark remains, and there may be copies on a bookie
that no ensemble contains.
Source: BookKeeper LedgerChecker, LedgerFragmentReplicator.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId
from bindery_core.placement.write_set import entries_of


@dataclass(frozen=True, slots=True)
class Fragment:
    """The part of one segment that ensemble index `index` holds."""

    segment_first: int
    """First entry id of the segment, which identifies it in the metadata."""
    last: int
    """Last entry id of the segment, inclusive; below `segment_first` if it is empty."""
    index: int
    bookie_id: BookieId
    entry_ids: Sequence[int]
    """Entries of the segment that this index must hold, ascending; may be empty."""


def closed_fragments(metadata: LedgerMetadata) -> list[Fragment]:
    """Return all fragments that may be checked and copied now, by segment, then index."""
    segments = metadata.segments
    ends = [int(segment.first_entry_id) - 1 for segment in segments[1:]]
    if metadata.state is LedgerState.CLOSED:
        ends.append(metadata.last_entry_id)
    fragments = []
    for segment, end in zip(segments, ends, strict=False):  # the open last segment has no end
        for index, bookie_id in enumerate(segment.ensemble):
            ids = entries_of(
                index,
                first=segment.first_entry_id,
                last=max(end, segment.first_entry_id - 1),
                ensemble_size=metadata.ensemble_size,
                write_quorum=metadata.write_quorum,
            )
            fragments.append(Fragment(segment.first_entry_id, end, index, bookie_id, ids))
    return fragments


def plan_replacement(
    metadata: LedgerMetadata, *, segment_first: int, replacements: Mapping[int, tuple[BookieId, BookieId]]
) -> LedgerMetadata | None:
    """Replace bookies in the segment that begins at `segment_first`. `replacements`: index -> (old, new).

    For the metadata update loop. An index that no longer has its old bookie is left unchanged. Returns None if nothing
    is left to do: no old bookie is in its place, or the segment does not exist or is open. Run it only after the new
    bookies stored all entries of the fragments.
    """
    segments = list(metadata.segments)
    for place, segment in enumerate(segments):
        if segment.first_entry_id != segment_first:
            continue
        if place == len(segments) - 1 and metadata.state is not LedgerState.CLOSED:
            return None
        ensemble = list(segment.ensemble)
        for index, (old, new) in replacements.items():
            if ensemble[index] == old and new not in ensemble:
                ensemble[index] = new
        if tuple(ensemble) == segment.ensemble:
            return None
        segments[place] = Segment(segment.first_entry_id, tuple(ensemble))
        return metadata.with_changes(segments=tuple(segments))
    return None
