"""Whole simulated clusters keep every invariant, and a seed determines a run.

`make sim SEED=<n>` replays a seed with its trace. `make sim-ci` runs the tests marked `simulator` and searches for
longer than these tests may.
"""

import os
import subprocess
import sys
from functools import partial

import pytest
from bindery_simulation import runner
from bindery_simulation.runner import Budget
from bindery_simulation.service import bookie_machine, faults, search
from bindery_simulation.service.healing import faults as healing_faults
from bindery_simulation.service.healing.plan import HealingKind, draw_plan
from bindery_simulation.service.world import HEALED_S_MAX, TRAFFIC_S, run_seed

pytestmark = pytest.mark.timeout(600)  # a busy machine takes minutes for seconds
SEEDS = 12
FIRST_SEED = int(os.environ.get("BINDERY_SEED", "0"))


def test_every_invariant_holds_for_the_first_seeds(capsys) -> None:
    tally = search.Tally()
    seconds = runner.search(
        partial(search.run_one, healing=None), range(FIRST_SEED, FIRST_SEED + SEEDS), tally, Budget()
    )
    with capsys.disabled():
        sys.stdout.write(f"\n{tally.text(seconds, 1)}\n")
    assert tally.failed == []
    assert tally.count == SEEDS


@pytest.mark.simulator
@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (11, ("--healing", "none")),
        (5, ("--faults", "stop_bookie,kill_client,slow_and_flaky")),
        (4, ("--healing", "storm")),
        (0, ("--healing", "returns")),
    ],
)
def test_a_seed_gives_the_same_run_in_another_process(seed, options) -> None:
    """Another process has other addresses and another order of sets."""
    arguments = ["service", "--seed", str(seed), "--trace", *options]
    play = f"import sys; from bindery_simulation.command import main; sys.exit(main({arguments!r}))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    first, second = (
        subprocess.run(
            [sys.executable, *command], env={**environment, **extra}, capture_output=True, timeout=300, check=True
        ).stdout
        for command, extra in (
            (["-m", "bindery_simulation", *arguments], {}),
            (["-c", play], {"PYTHONHASHSEED": "17", "PYTHONMALLOC": "malloc"}),
        )
    )
    assert b"every invariant holds" in first
    assert b"sha256" in first
    assert first == second


@pytest.mark.simulator
def test_a_trace_does_not_influence_a_run() -> None:
    for healing in (False, HealingKind.STORM):
        traced, untraced = run_seed(5, is_traced=True, healing=healing), run_seed(5, healing=healing)
        assert (traced.callbacks, traced.simulated_s) == (untraced.callbacks, untraced.simulated_s)
        assert traced.trace.events
        assert untraced.trace.events == []


def test_different_seeds_give_different_runs() -> None:
    assert run_seed(1, is_traced=True).trace.digest() != run_seed(2, is_traced=True).trace.digest()


@pytest.mark.parametrize("kind", dict.fromkeys(faults.FAULTS), ids=lambda kind: kind.__name__)
def test_every_invariant_holds_under_each_fault_alone(kind) -> None:
    """Seeds from 0 are run until the fault is injected before the end of the work."""
    for seed in range(20):
        outcome = run_seed(seed, faults=(kind,))
        assert outcome.violation is None, outcome.violation
        if outcome.faults:
            assert set(outcome.faults) == {kind.__name__}
            return
    raise AssertionError("no seed injected the fault")


def test_runs_reach_the_states_that_the_verdict_checks() -> None:
    """Runs have recoveries, ensemble changes, fences and rejected adds. Without these, the verdict proves nothing."""
    wanted = {
        "recovered",
        "tailed",
        "acknowledged",
        "add failed",
        "deletes",
        "audited",
        "fenced",
        "ensemble change",
        "fenced writer",
        "loses power",
        "is killed",
    }
    seen = set()
    for seed in range(12):
        for _, _, what, facts in run_seed(seed, is_traced=True, healing=False).trace.events:
            seen.add(what)
            if what == "ledger" and len(facts["segments"]) > 1:
                seen.add("ensemble change")
            if what == "adds" and any(status == "FENCED" for _, _, status in facts["answered"]):
                seen.add("fenced writer")
        if seen >= wanted:
            return
    raise AssertionError(f"twelve seeds do not reach {wanted - seen}")


def test_some_clusters_have_auditors() -> None:
    plans = [draw_plan(seed) for seed in range(200)]
    kinds = [plan.kind for plan in plans if plan is not None]
    assert 40 <= len(kinds) <= 90
    assert set(kinds) == set(HealingKind)


@pytest.mark.parametrize("kind", healing_faults.HEALING_FAULTS, ids=lambda kind: kind.__name__)
def test_clusters_with_auditors_survive_each_fault(kind) -> None:
    """The seed may add a lost disk and draining."""
    for seed in range(20):
        outcome = run_seed(seed, faults=(kind,), healing=HealingKind.STORM)
        assert outcome.violation is None, outcome.violation
        if kind.__name__ in outcome.faults:
            return
    raise AssertionError("no seed injected the fault")


@pytest.mark.simulator
def test_clusters_with_auditors_reach_the_states_that_the_verdict_checks() -> None:
    wanted = {"is lost for good", "has an empty disk", "draining", "copies", "nothing is missing"}
    seen = set()
    copies = 0
    for seed in range(8):
        outcome = run_seed(seed, is_traced=True, healing=HealingKind.STORM)
        assert outcome.violation is None, outcome.violation
        seen |= {what for _, _, what, _ in outcome.trace.events}
        copies += outcome.entries_healed
        if seen >= wanted and copies > 100:
            return
    raise AssertionError(f"eight seeds do not reach {wanted - seen}, or too few copies: {copies}")


def test_the_time_to_heal_includes_the_refill_of_lost_disks(monkeypatch) -> None:
    monkeypatch.setattr(bookie_machine, "REPAIR_RATES", (256,))
    outcome = run_seed(17, healing=HealingKind.STORM)
    assert outcome.violation is None, outcome.violation
    assert outcome.simulated_s > HEALED_S_MAX + 2 * TRAFFIC_S, "the refill did not take longer than all other healing"
