"""A verdict that cannot say no is worth nothing: each broken promise is noticed, by the invariant that it breaks."""

import gc
import sys
import time

import pytest
from bindery_simulation.service.command import main
from bindery_simulation.service.mutants import MUTANTS, mutant
from bindery_simulation.service.world import run_seed

pytestmark = [
    pytest.mark.simulator,
    pytest.mark.timeout(600),  # the budget is seconds of the processor, and it may be a busy one
]
SEEDS_MAX = 150
BUDGET_S = 60.0
SHOWN_BY = {
    "confirm-before-ensemble-change": 30,
    "early-lac": 4,
    "lease-ignored": 12,
    "limbo-is-absence": 17,
    "membership-not-asked-again": 12,
    "no-second-attempt": 1,
    "note-removed-unlooked": 17,
    "replaced-member-counts": 8,
}
"""The seed that is asked first. One that shows its mutant no longer costs a run, and all others are asked as ever."""


def catch(name: str) -> tuple[int, str, str]:
    """(seed, invariant, what was said) of the first violation."""
    until = time.process_time() + BUDGET_S
    with mutant(name):
        for count, seed in enumerate(dict.fromkeys([SHOWN_BY.get(name, 0), *range(SEEDS_MAX)])):
            outcome = run_seed(seed, faults=MUTANTS[name].faults, healing=MUTANTS[name].healing or False)
            if outcome.violation is not None:
                return seed, outcome.violation.invariant, str(outcome.violation)
            if count % 10 == 0:
                gc.collect()
            assert time.process_time() < until, f"{name} was not caught in {BUDGET_S} s ({count + 1} seeds)"
    raise AssertionError(f"{name} was not caught by {SEEDS_MAX} seeds")


def test_what_is_asked_first_is_asked_of_mutants_there_are() -> None:
    assert SHOWN_BY.keys() <= MUTANTS.keys()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught_by_its_invariant(name, capsys) -> None:
    seed, invariant, said = catch(name)
    with capsys.disabled():
        sys.stdout.write(f"\n{name}: seed {seed}: {said[:110]}\n")
    assert invariant in MUTANTS[name].caught_by, said


def test_what_is_caught_can_be_replayed(capsys) -> None:
    """The message names the invariant, the seed and the command."""
    with mutant("recovery-does-not-fence"):
        seed = next(seed for seed in range(SEEDS_MAX) if run_seed(seed, healing=False).violation is not None)
    assert main(["--seed", str(seed), "--mutant", "recovery-does-not-fence"]) == 1
    told = capsys.readouterr().out
    assert f'replay: make sim SEED={seed} ARGS="--mutant recovery-does-not-fence"' in told
    assert "VIOLATED writer-metadata" in told
    assert "VERDICT" in told
