"""The searches of the storage report each mutant."""

import pytest
from bindery_simulation.runner import without_logs
from bindery_simulation.storage.mutants import DAMAGE_MUTANTS, MUTANTS

POINTS_MAX = 1_000
"""Maximum number of crash points per mutant, ten seconds of one core. Nearly all mutants need fewer than fifty."""
CASES_MAX = 1_000
"""Maximum number of damaged files per mutant, from twenty bookies. Six consecutive bookies may have been killed with
nearly empty journals."""


@pytest.mark.simulator
@pytest.mark.long_run
@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_broken_promise_is_reported(name: str) -> None:
    with without_logs():
        found = MUTANTS.hunt(name, cost_max=POINTS_MAX)
    assert found is not None, f"{POINTS_MAX} crash points report no violation"
    assert found.trial.invariant in MUTANTS[name].caught_by, found.trial.text


@pytest.mark.simulator
@pytest.mark.long_run
@pytest.mark.parametrize("name", sorted(DAMAGE_MUTANTS))
def test_a_check_that_is_left_out_is_reported(name: str) -> None:
    with without_logs():
        found = DAMAGE_MUTANTS.hunt(name, cost_max=CASES_MAX)
    assert found is not None, f"{CASES_MAX} damaged files report no violation"
    assert found.trial.invariant in DAMAGE_MUTANTS[name].caught_by, found.trial.text


def test_there_are_enough_mutants() -> None:
    assert len(MUTANTS) >= 23
