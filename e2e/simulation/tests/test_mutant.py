"""A table of mutants applies, removes and hunts defects."""

from collections.abc import Iterable, Iterator
from itertools import count

import pytest
from bindery_core.ledger.ledger_writer import LedgerWriter
from bindery_simulation import defects
from bindery_simulation.command import TABLES
from bindery_simulation.mutant import Kind, MutantTable, Trial


def trials(seeds: Iterable[int], cost: int) -> Iterator[Trial]:
    """Report the defect in seeds from 5 on."""
    for seed in seeds:
        is_broken = seed >= 5 and LedgerWriter._drain is not ORIGINAL
        yield Trial(seed, cost, "dense" if is_broken else None)


ORIGINAL = LedgerWriter._drain
TABLE: MutantTable[int] = MutantTable(
    Kind.PROTOCOL,
    trials,
    [("early", "Confirms early.", ("dense",), 7, 3, defects.confirm_before_ensemble_change)],
    unit="histories",
)


def test_a_mutant_is_removed_after_its_block() -> None:
    with TABLE["early"].applied():
        assert LedgerWriter._drain is not ORIGINAL
    assert LedgerWriter._drain is ORIGINAL


def test_a_hunt_begins_with_the_known_seed_and_counts_its_cost() -> None:
    found = TABLE.hunt("early", cost_max=100)
    assert found is not None
    assert (found.trial.seed, found.cost) == (7, 3)


def test_a_hunt_from_zero_counts_all_seeds() -> None:
    found = TABLE.hunt("early", cost_max=100, seeds=count())
    assert found is not None
    assert (found.trial.seed, found.cost) == (5, 18)


def test_a_hunt_ends_at_its_limits() -> None:
    assert TABLE.hunt("early", cost_max=15, seeds=count()) is None
    assert TABLE.hunt("early", cost_max=100, seconds_max=0.0, seeds=count()) is None
    assert LedgerWriter._drain is ORIGINAL


def test_each_seed_is_tried_once() -> None:
    seeds = TABLE["early"].seeds()
    assert [next(seeds) for _ in range(9)] == [7, 0, 1, 2, 3, 4, 5, 6, 8]


@pytest.mark.parametrize("kind", Kind)
def test_each_defect_can_be_injected(kind: Kind) -> None:
    """Without a hunt, this test finds an attribute of the product that was renamed."""
    for mutant in TABLES[kind].values():
        with mutant.applied():
            pass
