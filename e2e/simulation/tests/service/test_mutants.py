"""An invariant of the verdict reports each mutant of whole clusters."""

import sys

import pytest
from bindery_simulation.service.mutants import MUTANTS

pytestmark = [
    pytest.mark.simulator,
    pytest.mark.long_run,
    pytest.mark.timeout(600),  # BUDGET_S counts processor time, and the processor may be busy
]
SEEDS_MAX = 150
BUDGET_S = 60.0


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_reported_by_its_invariant(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = MUTANTS.hunt(name, cost_max=SEEDS_MAX, seconds_max=BUDGET_S)
    assert found is not None, f"{name} was not reported within {SEEDS_MAX} seeds and {BUDGET_S} s"
    with capsys.disabled():
        sys.stdout.write(f"\n{name}: seed {found.trial.seed}: {found.trial.text[:110]}\n")
    assert found.trial.invariant in MUTANTS[name].caught_by, found.trial.text
