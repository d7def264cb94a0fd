"""Check whether the ensembles of closed ledgers follow the placement policy. Pure, except for `check_placement`.

| adherence | an ensemble that                                                                                         |
|-----------|----------------------------------------------------------------------------------------------------------|
| FAIL      | names a bookie twice (an entry has fewer than Qw replicas), or one that was removed or is draining       |
| SOFT      | has a write set on fewer racks than the known bookies allow                                              |
| STRICT    | has neither defect                                                                                       |

This check only counts; `placement_repair` moves replicas of SOFT ledgers to other racks. A bookie whose rack is unknown
is in DEFAULT_RACK; if all bookies are there, nothing is SOFT. Source: BookKeeper's AuditorPlacementPolicyCheckTask,
which has the same three classes.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState
from bindery_core.ids import BookieId, LedgerId
from bindery_core.placement.placement import DEFAULT_RACK
from bindery_core.placement.write_set import write_set

from bindery_recovery.cluster.ledger_index import READS_IN_FLIGHT, MetadataReader
from bindery_recovery.cluster.ledger_walk import LedgerWalk, Skip

KEPT_MAX: Final = 1000
"""Maximum number of ledger ids that a result contains."""


class Adherence(IntEnum):
    """Ordered from worst to best."""

    FAIL = 0
    SOFT = 1
    STRICT = 2


def judge_ensemble(
    ensemble: Sequence[BookieId],
    *,
    write_quorum: int,
    racks: Mapping[BookieId, str],
    unwanted: Collection[BookieId] = (),
) -> Adherence:
    """Judge one ensemble. `racks`: racks of the known bookies; a write set needs no more racks than they have.
    `unwanted`: draining and removed bookies."""
    if len(set(ensemble)) < len(ensemble) or any(bookie_id in unwanted for bookie_id in ensemble):
        return Adherence.FAIL
    possible = min(write_quorum, len(set(racks.values())) or 1)
    for first in range(len(ensemble)):
        members = write_set(entry_id=first, ensemble_size=len(ensemble), write_quorum=write_quorum)
        if len({racks.get(ensemble[index], DEFAULT_RACK) for index in members}) < possible:
            return Adherence.SOFT
    return Adherence.STRICT


def judge_ledger(
    metadata: LedgerMetadata, *, racks: Mapping[BookieId, str], unwanted: Collection[BookieId] = ()
) -> Adherence:
    """Return the worst adherence of the ledger's ensembles."""
    return min(
        judge_ensemble(segment.ensemble, write_quorum=metadata.write_quorum, racks=racks, unwanted=unwanted)
        for segment in metadata.segments
    )


@dataclass(slots=True)
class PlacementResult:
    """Counters of one check of closed ledgers."""

    ledgers: int = 0
    open_ledgers: int = 0
    """Open ledgers, which are not judged: their writers may still change them."""
    unreadable: int = 0
    strict: int = 0
    soft: int = 0
    failed: int = 0
    failed_ids: list[LedgerId] = field(default_factory=list)
    """At most KEPT_MAX ids."""

    def to_json(self) -> dict[str, Any]:
        return {
            "failed": self.failed,
            "ledgers": self.ledgers,
            "open_ledgers": self.open_ledgers,
            "soft": self.soft,
            "strict": self.strict,
            "unreadable": self.unreadable,
        }


async def check_placement(
    client: MetadataReader,
    *,
    racks: Mapping[BookieId, str],
    unwanted: Collection[BookieId] = (),
    reads_in_flight: int = READS_IN_FLIGHT,
    soft: Callable[[LedgerId, LedgerMetadata], None] | None = None,
) -> PlacementResult:
    """Judge all closed ledgers. `soft` is called for each ledger that is SOFT, and also for open ones. Raises errors of
    the metadata store; there is no partial result."""
    result = PlacementResult()

    async with LedgerWalk(reads_in_flight).run(client.list_ledgers(), client.metadata) as ledgers:
        async for ledger_id, metadata in ledgers:
            if isinstance(metadata, Skip):
                result.unreadable += metadata is Skip.UNREADABLE
                continue
            adherence = judge_ledger(metadata, racks=racks, unwanted=unwanted)
            if adherence is Adherence.SOFT and soft is not None:
                soft(ledger_id, metadata)
            if metadata.state is not LedgerState.CLOSED:
                result.open_ledgers += 1
            else:
                result.ledgers += 1
                result.strict += adherence is Adherence.STRICT
                result.soft += adherence is Adherence.SOFT
                result.failed += adherence is Adherence.FAIL
                if adherence is Adherence.FAIL and len(result.failed_ids) < KEPT_MAX:
                    result.failed_ids.append(ledger_id)
    return result
