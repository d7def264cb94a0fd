"""Racks of ensembles: how many racks each write set has, and which racks the places of an ensemble can take.

An ensemble is a sequence of racks here, by ensemble index; None: the place is open. A rule is a number of racks for
each write set, by its first index. E=4 Qw=2, racks /a /a /b /b: the write sets 0..3 have 1, 2, 1 and 2 racks.

| function         | result                                                                          |
|------------------|---------------------------------------------------------------------------------|
| racks_per_set    | number of different racks of each write set                                     |
| satisfies        | whether each write set has as many racks as the rule says                       |
| fill_racks       | racks for the open places that satisfy the rule                                 |

All functions are pure. `fill_racks` is a search with backtracking, bounded by SEARCH_STEPS_MAX.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from bindery_core.placement.write_set import write_set

SEARCH_STEPS_MAX: Final = 2_000
"""Maximum number of places that one search tries to fill. It finds every solution of ensembles of up to 8 bookies in 3
racks; for larger ones it may report that there is none."""


def racks_per_set(racks: Sequence[str | None], *, write_quorum: int) -> tuple[int, ...]:
    """Return the number of different racks of each write set; open places do not count."""
    return tuple(len({racks[index] for index in members} - {None}) for members in _write_sets(len(racks), write_quorum))


def satisfies(racks: Sequence[str | None], rule: Sequence[int], *, write_quorum: int) -> bool:
    """Return whether each write set has at least the number of racks that `rule` says."""
    found = racks_per_set(racks, write_quorum=write_quorum)
    return all(count >= needed for count, needed in zip(found, rule, strict=True))


def fill_racks(
    racks: Sequence[str | None], spare: Mapping[str, int], rule: Sequence[int], *, write_quorum: int
) -> list[str] | None:
    """Return `racks` with all open places filled so that `rule` holds; None: the search found no such racks.

    `spare`: number of bookies by rack that may be used. Racks that the neighbors use least are tried first, and of
    those, the ones with the most bookies left.
    """
    places = list(racks)
    if max(rule, default=0) > len({rack for rack in (*places, *spare) if rack is not None}):
        return None
    search = _Search(places, dict(spare), rule, write_quorum)
    return search.filled() if search.fill(0) else None


class _Search:
    def __init__(self, places: list[str | None], spare: dict[str, int], rule: Sequence[int], write_quorum: int) -> None:
        self._places = places
        self._spare = spare
        self._rule = rule
        self._open = [index for index, rack in enumerate(places) if rack is None]
        self._sets = _write_sets(len(places), write_quorum)
        self._sets_of = [
            [first for first, members in enumerate(self._sets) if index in members] for index in range(len(places))
        ]
        self._steps = SEARCH_STEPS_MAX

    def fill(self, at: int) -> bool:
        """Fill the open places from number `at` on; restore them if that is impossible."""
        if at == len(self._open):
            return all(self._may_hold(first) for first in range(len(self._sets)))
        index = self._open[at]
        for rack in self._by_preference(index):
            self._steps -= 1
            if self._steps < 0:
                return False
            self._places[index] = rack
            self._spare[rack] -= 1
            if all(map(self._may_hold, self._sets_of[index])) and self.fill(at + 1):
                return True
            self._spare[rack] += 1
            self._places[index] = None
        return False

    def filled(self) -> list[str]:
        return [rack for rack in self._places if rack is not None]

    def _may_hold(self, first: int) -> bool:
        """Return whether the write set can still get as many racks as it needs."""
        racks = [self._places[index] for index in self._sets[first]]
        return len(set(racks) - {None}) + racks.count(None) >= self._rule[first]

    def _by_preference(self, index: int) -> list[str]:
        near = [self._places[other] for first in self._sets_of[index] for other in self._sets[first]]
        usable = [rack for rack, count in self._spare.items() if count > 0]
        return sorted(usable, key=lambda rack: (near.count(rack), -self._spare[rack], rack))


def _write_sets(ensemble_size: int, write_quorum: int) -> list[tuple[int, ...]]:
    return [
        write_set(entry_id=first, ensemble_size=ensemble_size, write_quorum=write_quorum)
        for first in range(ensemble_size)
    ]
