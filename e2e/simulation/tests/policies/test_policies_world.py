"""Simulated clusters whose topics have policies keep every invariant, and a seed determines a run."""

import os
import sys

import pytest
from bindery_simulation import runner
from bindery_simulation.policies import search
from bindery_simulation.policies.world import run_seed
from bindery_simulation.runner import Budget

pytestmark = pytest.mark.timeout(600)  # a busy machine takes minutes for seconds
SEEDS = 4
FIRST_SEED = int(os.environ.get("BINDERY_SEED", "0"))


def test_every_invariant_holds_for_the_first_seeds_which_reach_what_the_judge_checks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tally = search.Tally()
    seconds = runner.search(search.run_one, range(FIRST_SEED, FIRST_SEED + SEEDS), tally, Budget())
    with capsys.disabled():
        sys.stdout.write(f"\n{tally.text(seconds, 1)}\n")
    assert tally.failed == []
    assert tally.count == SEEDS
    assert tally.hours >= SEEDS
    if FIRST_SEED == 0:
        assert min(tally.trimmed, tally.refused, tally.released) > 0


@pytest.mark.simulator
def test_a_seed_gives_the_same_run_again_with_and_without_a_trace() -> None:
    first, second, untraced = run_seed(1, is_traced=True), run_seed(1, is_traced=True), run_seed(1)
    assert first.trace.events
    assert first.trace.digest() == second.trace.digest()
    assert (first.callbacks, first.simulated_s) == (untraced.callbacks, untraced.simulated_s)
    assert "every invariant holds" in search.report(first, trace=False)
