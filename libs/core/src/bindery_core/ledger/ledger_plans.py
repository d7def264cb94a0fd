"""Metadata changes of a ledger, as pure decisions for the metadata update loop.

The transport runs the loop. It reads the metadata and its version and calls `plan(metadata)`. If the result is None,
the loop ends, and the metadata as read is final. Otherwise the transport writes the planned metadata by compare-and-set
at that version. After a VersionConflict or an unknown outcome, the loop starts again. Every plan returns None when it
reads its own result back, so the same loop resolves an unknown outcome.

| plan                 | OPEN              | IN_RECOVERY  | CLOSED                                         |
|----------------------|-------------------|--------------|------------------------------------------------|
| plan_ensemble_change | new last ensemble | LedgerFenced | LedgerClosed                                   |
| plan_close           | CLOSED            | CLOSED       | same values: None; other values: LedgerFenced  |
| plan_begin_recovery  | IN_RECOVERY       | None         | None                                           |
| plan_recovery_close  | None              | CLOSED       | None: another client closed it                 |

Source: BookKeeper MetadataUpdateLoop, EnsembleUtils, LedgerHandle.
"""

from collections.abc import Callable, Mapping

from bindery_core.errors import LedgerClosed, LedgerFenced, TryAgain
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId

Plan = Callable[[LedgerMetadata], LedgerMetadata | None]
Choose = Callable[[tuple[BookieId, ...], Mapping[int, BookieId]], Mapping[int, BookieId]]
"""(ensemble, failed members by index) -> replacements by index, at least one; raises NotEnoughBookies."""


def plan_ensemble_change(
    metadata: LedgerMetadata, *, failed: Mapping[int, BookieId], first_entry_id: int, choose: Choose
) -> LedgerMetadata | None:
    """Put replacements for `failed` into the last ensemble, from `first_entry_id` (last add confirmed + 1) on.

    If the last segment begins at `first_entry_id`, it is replaced; otherwise a segment is appended. `choose` may
    replace only some of the failed bookies.
    Returns None if one of the failed bookies is no longer at its index: an earlier attempt with an unknown outcome
    succeeded, possibly in part, and its result must be adopted. (Replacing the rest could end in NotEnoughBookies, and
    the writer would then confirm entries on an ensemble that is not the published one.)
    Raises LedgerClosed, LedgerFenced, or NotEnoughBookies from `choose`. In these cases nothing was changed.
    """
    if metadata.state is LedgerState.CLOSED:
        raise LedgerClosed("the ledger was closed while its writer changed the ensemble")
    if metadata.state is LedgerState.IN_RECOVERY:
        raise LedgerFenced("the ledger is being recovered by another client")
    return replace_failed(metadata, failed=failed, first_entry_id=first_entry_id, choose=choose)


def replace_failed(
    metadata: LedgerMetadata, *, failed: Mapping[int, BookieId], first_entry_id: int, choose: Choose
) -> LedgerMetadata | None:
    """Like `plan_ensemble_change`, but for any state. Recovery uses it to change ensembles in memory."""
    last = metadata.last_segment
    assert last.first_entry_id <= first_entry_id
    if any(last.ensemble[index] != bookie_id for index, bookie_id in failed.items()):
        return None
    replacements = choose(last.ensemble, failed)
    assert replacements
    assert replacements.keys() <= failed.keys()
    ensemble = tuple(replacements.get(index, bookie_id) for index, bookie_id in enumerate(last.ensemble))
    assert len(set(ensemble)) == len(ensemble)
    kept = metadata.segments if last.first_entry_id < first_entry_id else metadata.segments[:-1]
    return metadata.with_changes(segments=(*kept, Segment(EntryId(first_entry_id), ensemble)))


def plan_close(metadata: LedgerMetadata, *, last_entry_id: int, length: int) -> LedgerMetadata | None:
    """Close as the writer. IN_RECOVERY is overwritten too: the compare-and-set alone decides a race with recovery."""
    if metadata.state is LedgerState.CLOSED:
        if (metadata.last_entry_id, metadata.length) == (last_entry_id, length):
            return None
        raise LedgerFenced(
            "another client closed the ledger",
            last_entry_id=metadata.last_entry_id,
            own_last_entry_id=last_entry_id,
            length=metadata.length,
            own_length=length,
        )
    return metadata.with_changes(state=LedgerState.CLOSED, last_entry_id=EntryId(last_entry_id), length=length)


def plan_begin_recovery(metadata: LedgerMetadata) -> LedgerMetadata | None:
    """Change OPEN to IN_RECOVERY. If another recovery is running, both continue."""
    if metadata.state is not LedgerState.OPEN:
        return None
    return metadata.with_changes(state=LedgerState.IN_RECOVERY)


def plan_recovery_close(
    metadata: LedgerMetadata,
    *,
    began: tuple[Segment, ...],
    recovered: tuple[Segment, ...],
    last_entry_id: int,
    length: int,
) -> LedgerMetadata | None:
    """Close as a recovery, which read the segments `began` and wrote back to the segments `recovered`.

    Re-replication may have changed ensembles in the meantime. That change is kept if recovery changed no ensemble.
    Raises TryAgain if both changed ensembles; a new recovery resolves this.
    """
    if metadata.state is not LedgerState.IN_RECOVERY:
        return None
    segments = metadata.segments
    if recovered != began:
        if segments != began:
            raise TryAgain("another client changed the ensembles while the ledger was recovered")
        segments = recovered
    return metadata.with_changes(
        segments=segments, state=LedgerState.CLOSED, last_entry_id=EntryId(last_entry_id), length=length
    )


def fence_targets(metadata: LedgerMetadata) -> tuple[BookieId, ...]:
    """Bookies to fence before the ledger is deleted: those that could still accept adds from its writer.

    Best effort: send each SendReads((-1,), fence=True) with a short time limit, then delete whatever the responses are.
    """
    return () if metadata.state is LedgerState.CLOSED else metadata.last_segment.ensemble
