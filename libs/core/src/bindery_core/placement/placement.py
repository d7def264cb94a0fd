"""Placement: choose bookies for a new ledger, replacements for members of an ensemble, or a move to another rack.

The functions are pure: they take the current candidates, and randomness comes from `rng`, so equal inputs give equal
results, in whatever order the candidates are.

- Racks: each position takes a bookie from the rack that its neighbors (the members that share a write quorum with it)
  use least. With every bookie in `DEFAULT_RACK` this has no effect.
- Minimum of racks (`RackRule`): if that leaves a write quorum on fewer racks than the minimum, a search looks for racks
  that satisfy it (`rack_spread`). If it finds none, the first choice stays, or, if the minimum is enforced, the choice
  fails. A replacement need not give a write quorum more racks than it had with the member that it replaces.
- Free space: if every usable candidate reports its free bytes, the probability of a choice is proportional to them;
  otherwise all are equally likely.
- Refusals are reported: NotEnoughBookies contains the request, the usable bookies, and the reason for each refused one.

Source: the intent of BookKeeper's RackawareEnsemblePlacementPolicy, its minNumRacksPerWriteQuorum and
enforceMinNumRacksPerWriteQuorum.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bindery_core.errors import NotEnoughBookies
from bindery_core.ids import BookieId
from bindery_core.placement.rack_spread import fill_racks, racks_per_set, satisfies
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


@dataclass(frozen=True, slots=True)
class RackRule:
    """How many racks each write quorum has. A write quorum of fewer bookies needs only as many racks as bookies."""

    minimum: int = 2
    """Minimum number of racks. Source: minNumRacksPerWriteQuorum."""
    is_enforced: bool = False
    """Whether a choice that cannot reach the minimum fails. Source: enforceMinNumRacksPerWriteQuorum."""


PREFER_TWO_RACKS: Final = RackRule()
"""The default, as in BookKeeper."""


def choose_ensemble(
    candidates: Collection[Candidate],
    *,
    ensemble_size: int,
    write_quorum: int,
    ack_quorum: int,
    rng: RandomFloats,
    exclude: Mapping[BookieId, str] | None = None,
    rule: RackRule = PREFER_TWO_RACKS,
) -> tuple[BookieId, ...]:
    """Choose bookies for a new ledger, in ensemble order. `exclude`: bookie -> reason, for the error's text.

    Raises NotEnoughBookies with the facts asked, usable, known and refused (bookie -> reason), and racks if the minimum
    of racks is enforced and cannot be reached.
    """
    assert 1 <= ack_quorum <= write_quorum <= ensemble_size
    usable, refused = _sort_out(candidates, exclude or {})
    asked = f"{ensemble_size} (write_quorum={write_quorum} ack_quorum={ack_quorum})"
    if len(usable) < ensemble_size:
        raise _not_enough("not enough bookies for a new ledger", asked, usable, refused)
    needed = min(rule.minimum, write_quorum)
    needs = [needed] * ensemble_size
    left = list(usable)
    places: list[Candidate | None] = [None] * ensemble_size
    for index in range(ensemble_size):
        places[index] = _take(left, _rack_uses(places, index, write_quorum), rng)
    if not satisfies(_racks(places), needs, write_quorum=write_quorum):
        found = fill_racks([None] * ensemble_size, _count_racks(usable), needs, write_quorum=write_quorum)
        if found is not None:
            left = list(usable)
            places = [_take_from(left, rack, rng) for rack in found]
        elif rule.is_enforced:
            asked = f"{asked}, each write quorum on {needed} racks"
            raise _not_enough("not enough racks for a new ledger", asked, usable, refused, show_racks=True)
    return tuple(place.bookie_id for place in places if place is not None)


def choose_replacements(
    candidates: Collection[Candidate],
    *,
    ensemble: Sequence[BookieId],
    failed: Mapping[int, BookieId],
    write_quorum: int,
    rng: RandomFloats,
    exclude: Mapping[BookieId, str] | None = None,
    rule: RackRule = PREFER_TWO_RACKS,
    absent: Mapping[BookieId, str] | None = None,
) -> dict[int, BookieId]:
    """Choose replacements by ensemble index for the members in `failed`; fewer if there are too few spares.

    Members of the ensemble and the failed bookies are never chosen. `absent`: racks of members that are not candidates.
    Raises NotEnoughBookies if there is no spare, or none that the enforced minimum of racks allows.
    """
    assert failed
    why_not = dict(exclude or {})
    why_not.update((bookie_id, "in the ensemble already") for bookie_id in ensemble)
    why_not.update((bookie_id, "failed in this ledger") for bookie_id in failed.values())
    usable, refused = _sort_out(candidates, why_not)
    asked = f"{len(failed)} to replace {','.join(failed[index] for index in sorted(failed))}"
    if not usable:
        raise _not_enough("no spare bookie", asked, usable, refused)
    members = _members(candidates, ensemble, absent or {})
    kept: list[Candidate | None] = [None if index in failed else member for index, member in enumerate(members)]
    left, places = list(usable), list(kept)
    chosen: dict[int, BookieId] = {}
    for index in sorted(failed)[: len(usable)]:
        place = _take(left, _rack_uses(places, index, write_quorum), rng)
        places[index] = place
        chosen[index] = place.bookie_id
    before = _racks(members)
    after = [place.rack if place is not None else before[index] for index, place in enumerate(places)]
    had = racks_per_set(before, write_quorum=write_quorum)
    needs = [min(rule.minimum, write_quorum, count) for count in had]
    if satisfies(after, needs, write_quorum=write_quorum):
        return chosen
    found = None
    if len(usable) >= len(failed):
        found = fill_racks(_racks(kept), _count_racks(usable), needs, write_quorum=write_quorum)
    if found is not None:
        left = list(usable)
        return {index: _take_from(left, found[index], rng).bookie_id for index in sorted(failed)}
    if not rule.is_enforced:
        return chosen
    chosen = _choose_allowed(usable, members, sorted(failed), needs, write_quorum, rng)
    if not chosen:
        asked = f"{asked}, each write quorum on {max(needs)} racks"
        raise _not_enough("no spare bookie in the racks that are needed", asked, usable, refused, show_racks=True)
    return chosen


def choose_move(
    candidates: Collection[Candidate],
    *,
    ensemble: Sequence[BookieId],
    write_quorum: int,
    rng: RandomFloats,
    exclude: Mapping[BookieId, str] | None = None,
    absent: Mapping[BookieId, str] | None = None,
) -> tuple[int, BookieId] | None:
    """Choose a member and a bookie of another rack to replace it, so that write quorums are on more racks.

    Returns (ensemble index, new bookie). No write quorum gets fewer racks, so repeated moves end. None: no single move
    puts any write quorum on more racks.
    """
    why_not = {**(exclude or {}), **dict.fromkeys(ensemble, "in the ensemble already")}
    usable, _ = _sort_out(candidates, why_not)
    racks = _racks(_members(candidates, ensemble, absent or {}))
    before = racks_per_set(racks, write_quorum=write_quorum)
    best: tuple[int, int, str] | None = None
    for index in range(len(ensemble)):
        for rack in sorted(_count_racks(usable)):
            after = racks_per_set([*racks[:index], rack, *racks[index + 1 :]], write_quorum=write_quorum)
            gain = sum(after) - sum(before)
            is_better = best is None or gain > best[0]
            if gain > 0 and is_better and all(new >= old for new, old in zip(after, before, strict=True)):
                best = (gain, index, rack)
    if best is None:
        return None
    _, index, rack = best
    return index, _take_from(usable, rack, rng).bookie_id


def _choose_allowed(
    usable: Sequence[Candidate],
    members: Sequence[Candidate],
    failed: Sequence[int],
    needs: Sequence[int],
    write_quorum: int,
    rng: RandomFloats,
) -> dict[int, BookieId]:
    """Replace one failed member after the other, as far as `needs` allows it. The others keep their places."""
    left, racks = list(usable), _racks(members)
    chosen: dict[int, BookieId] = {}
    for index in failed:
        allowed = {
            rack
            for rack in _count_racks(left)
            if satisfies([*racks[:index], rack, *racks[index + 1 :]], needs, write_quorum=write_quorum)
        }
        fitting = [candidate for candidate in left if candidate.rack in allowed]
        if fitting:
            place = _take(fitting, {}, rng)
            left.remove(place)
            racks[index] = place.rack
            chosen[index] = place.bookie_id
    return chosen


def _members(
    candidates: Collection[Candidate], ensemble: Sequence[BookieId], absent: Mapping[BookieId, str]
) -> list[Candidate]:
    known = {candidate.bookie_id: candidate for candidate in candidates}
    return [
        known.get(bookie_id) or Candidate(bookie_id, rack=absent.get(bookie_id, DEFAULT_RACK)) for bookie_id in ensemble
    ]


def _racks(places: Sequence[Candidate | None]) -> list[str | None]:
    return [None if place is None else place.rack for place in places]


def _count_racks(candidates: Iterable[Candidate]) -> Counter[str]:
    return Counter(candidate.rack for candidate in candidates)


def _take_from(left: list[Candidate], rack: str, rng: RandomFloats) -> Candidate:
    """Choose one of the candidates in `rack` at random, and remove it from `left`."""
    taken = _take([candidate for candidate in left if candidate.rack == rack], {}, rng)
    left.remove(taken)
    return taken


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
    message: str,
    asked: str,
    usable: Collection[Candidate],
    refused: Mapping[BookieId, str],
    *,
    show_racks: bool = False,
) -> NotEnoughBookies:
    names = ",".join(candidate.bookie_id for candidate in usable)
    racks = " ".join(f"{rack}:{count}" for rack, count in sorted(_count_racks(usable).items()))
    return NotEnoughBookies(
        message,
        asked=asked,
        usable=f"{len(usable)} ({names})" if names else 0,
        known=len(usable) + len(refused),
        refused=_Reasons(refused),
        **({"racks": racks} if show_racks else {}),
    )


class _Reasons(dict[BookieId, str]):
    """A dict that prints as one readable clause inside an error's message."""

    def __str__(self) -> str:
        return "; ".join(f"{bookie_id}: {reason}" for bookie_id, reason in self.items()) or "none"
