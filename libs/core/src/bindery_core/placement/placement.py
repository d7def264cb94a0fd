"""Placement: choose bookies for a new ledger, or replacements for members of an ensemble.

The functions are pure: they take the current candidates, and randomness comes from `rng`, so equal inputs give equal
results, in whatever order the candidates are.

- Racks: each position takes a bookie from the rack that its neighbors (the members that share a write quorum with it)
  use least. This is a preference and never a reason to refuse: with every bookie in `DEFAULT_RACK` it has no effect.
- Free space: if every usable candidate reports its free bytes, the probability of a choice is proportional to them;
  otherwise all are equally likely.
- Refusals are reported: NotEnoughBookies contains the request, the usable bookies, and the reason for each refused one.

Source: the intent of BookKeeper's RackawareEnsemblePlacementPolicy.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bindery_core.errors import NotEnoughBookies
from bindery_core.ids import BookieId
from bindery_core.sources import RandomFloats

DEFAULT_RACK: Final = "/default-rack"
"""Rack of a bookie without a configured rack."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A bookie as the cluster reports it."""

    bookie_id: BookieId
    rack: str = DEFAULT_RACK
    free_bytes: int | None = None
    """Free bytes on the bookie's disks; None: unknown."""
    refusal: str | None = None
    """Reason why the bookie accepts no new ledgers ("read-only", "draining", ...); None: it accepts them."""


def choose_ensemble(
    candidates: Collection[Candidate],
    *,
    ensemble_size: int,
    write_quorum: int,
    ack_quorum: int,
    rng: RandomFloats,
    exclude: Mapping[BookieId, str] | None = None,
) -> tuple[BookieId, ...]:
    """Choose bookies for a new ledger, in ensemble order. `exclude`: bookie -> reason, for the error's text.

    Raises NotEnoughBookies with the facts asked, usable, known and refused (bookie -> reason).
    """
    assert 1 <= ack_quorum <= write_quorum <= ensemble_size
    usable, refused = _sort_out(candidates, exclude or {})
    asked = f"{ensemble_size} (write_quorum={write_quorum} ack_quorum={ack_quorum})"
    if len(usable) < ensemble_size:
        raise _not_enough("not enough bookies for a new ledger", asked, usable, refused)
    places: list[Candidate | None] = [None] * ensemble_size
    for index in range(ensemble_size):
        places[index] = _take(usable, _rack_uses(places, index, write_quorum), rng)
    return tuple(place.bookie_id for place in places if place is not None)


def choose_replacements(
    candidates: Collection[Candidate],
    *,
    ensemble: Sequence[BookieId],
    failed: Mapping[int, BookieId],
    write_quorum: int,
    rng: RandomFloats,
    exclude: Mapping[BookieId, str] | None = None,
) -> dict[int, BookieId]:
    """Choose replacements by ensemble index for the members in `failed`; fewer if there are too few spares.

    Members of the ensemble and the failed bookies are never chosen. Raises NotEnoughBookies if there is no spare.
    """
    assert failed
    why_not = dict(exclude or {})
    why_not.update((bookie_id, "in the ensemble already") for bookie_id in ensemble)
    why_not.update((bookie_id, "failed in this ledger") for bookie_id in failed.values())
    usable, refused = _sort_out(candidates, why_not)
    if not usable:
        asked = f"{len(failed)} to replace {','.join(failed[index] for index in sorted(failed))}"
        raise _not_enough("no spare bookie", asked, usable, refused)
    known = {candidate.bookie_id: candidate for candidate in candidates}
    places: list[Candidate | None] = [
        None if index in failed else known.get(bookie_id, Candidate(bookie_id))
        for index, bookie_id in enumerate(ensemble)
    ]
    chosen: dict[int, BookieId] = {}
    for index in sorted(failed)[: len(usable)]:
        place = _take(usable, _rack_uses(places, index, write_quorum), rng)
        places[index] = place
        chosen[index] = place.bookie_id
    return chosen


def _sort_out(
    candidates: Collection[Candidate], exclude: Mapping[BookieId, str]
) -> tuple[list[Candidate], dict[BookieId, str]]:
    """Return the usable candidates, and the reasons for the others, both ordered by id."""
    usable: list[Candidate] = []
    refused: dict[BookieId, str] = {}
    for candidate in sorted(candidates, key=lambda candidate: candidate.bookie_id):
        reason = exclude.get(candidate.bookie_id, candidate.refusal)
        if reason is None:
            usable.append(candidate)
        else:
            refused[candidate.bookie_id] = reason
    return usable, refused


def _rack_uses(places: Sequence[Candidate | None], index: int, write_quorum: int) -> dict[str, int]:
    """Count, by rack, the members that share a write quorum with `index`."""
    uses: dict[str, int] = {}
    size = len(places)
    for other, place in enumerate(places):
        distance = min((other - index) % size, (index - other) % size)
        if place is not None and 0 < distance < write_quorum:
            uses[place.rack] = uses.get(place.rack, 0) + 1
    return uses


def _take(usable: list[Candidate], rack_uses: Mapping[str, int], rng: RandomFloats) -> Candidate:
    """Choose one of the candidates in the least used racks at random, and remove it from `usable`."""
    fewest = min(rack_uses.get(candidate.rack, 0) for candidate in usable)
    drawn_from = [candidate for candidate in usable if rack_uses.get(candidate.rack, 0) == fewest]
    weights = [candidate.free_bytes for candidate in drawn_from]
    if any(weight is None for weight in weights) or not any(weights):
        taken = drawn_from[int(rng.random() * len(drawn_from))]
    else:
        point = rng.random() * sum(weight or 0 for weight in weights)
        taken = drawn_from[-1]
        for candidate, weight in zip(drawn_from, weights, strict=True):
            point -= weight or 0
            if point < 0:
                taken = candidate
                break
    usable.remove(taken)
    return taken


def _not_enough(
    message: str, asked: str, usable: Collection[Candidate], refused: Mapping[BookieId, str]
) -> NotEnoughBookies:
    names = ",".join(candidate.bookie_id for candidate in usable)
    return NotEnoughBookies(
        message,
        asked=asked,
        usable=f"{len(usable)} ({names})" if names else 0,
        known=len(usable) + len(refused),
        refused=_Reasons(refused),
    )


class _Reasons(dict[BookieId, str]):
    """A dict that prints as one readable clause inside an error's message."""

    def __str__(self) -> str:
        return "; ".join(f"{bookie_id}: {reason}" for bookie_id, reason in self.items()) or "none"
