"""Whole simulated clusters: every invariant holds under every seed, and the same seed is the same run bit for bit.

`make sim SEED=<n>` replays one with its trace. `make sim-ci` spends more time than these tests may.
"""

import os
import subprocess
import sys

import pytest
from bindery_simulation.service import faults
from bindery_simulation.service.command import main
from bindery_simulation.service.runner import run_seeds
from bindery_simulation.service.world import run_seed

BUDGET_S = float(os.environ.get("BINDERY_SIMULATION_S", "10"))
FIRST_SEED = int(os.environ.get("BINDERY_SEED", "0"))


def test_every_invariant_holds_under_as_many_seeds_as_the_time_allows(capsys) -> None:
    summary = run_seeds(range(FIRST_SEED, FIRST_SEED + 1_000_000), seconds=BUDGET_S)
    with capsys.disabled():
        sys.stdout.write(f"\n{summary.text()}\n")
    assert summary.failures == []
    assert summary.seeds >= 3


@pytest.mark.parametrize(("seed", "options"), [(11, ()), (5, ("--faults", "stop_bookie,kill_client,slow_and_flaky"))])
def test_a_seed_is_the_same_run_in_another_process_byte_for_byte(seed, options) -> None:
    """Another process: other addresses. Not even the order of sets decides anything: the seed means the same here."""
    arguments = ["service", "--seed", str(seed), "--trace", *options]
    play = f"import sys; from bindery_simulation.service.command import main; sys.exit(main({arguments[1:]!r}))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    first, second = (
        subprocess.run(
            [sys.executable, *command], env={**environment, **extra}, capture_output=True, timeout=60, check=True
        ).stdout
        for command, extra in (
            (["-m", "bindery_simulation", *arguments], {}),
            (["-c", play], {"PYTHONHASHSEED": "17", "PYTHONMALLOC": "malloc"}),
        )
    )
    assert b"every invariant holds" in first
    assert b"sha256" in first
    assert first == second


def test_tracing_changes_nothing() -> None:
    traced, untraced = run_seed(5, is_traced=True), run_seed(5)
    assert (traced.callbacks, traced.simulated_s) == (untraced.callbacks, untraced.simulated_s)
    assert traced.trace.events
    assert untraced.trace.events == []


def test_two_seeds_are_two_runs() -> None:
    assert run_seed(1, is_traced=True).trace.digest() != run_seed(2, is_traced=True).trace.digest()


@pytest.mark.parametrize("kind", dict.fromkeys(faults.FAULTS), ids=lambda kind: kind.__name__)
def test_every_kind_of_fault_is_survived_alone(kind) -> None:
    """Of the seeds from 0, the first in which the fault came before the work was over."""
    for seed in range(20):
        outcome = run_seed(seed, faults=(kind,))
        assert outcome.violation is None, outcome.violation
        if outcome.faults:
            assert set(outcome.faults) == {kind.__name__}
            return
    raise AssertionError("it never came")


def test_a_run_reaches_what_it_is_meant_to_reach() -> None:
    """Recoveries, ensemble changes, fences and refused adds happen, or the verdict judges nothing."""
    told = set()
    for seed in range(12):
        for _, _, what, facts in run_seed(seed, is_traced=True).trace.events:
            told.add(what)
            if what == "ledger" and len(facts["segments"]) > 1:
                told.add("ensemble change")
            if what == "adds" and any(status == "FENCED" for _, _, status in facts["answered"]):
                told.add("fenced writer")
    assert told >= {
        "recovered", "tailed", "acknowledged", "add failed", "deletes", "audited", "fenced", "ensemble change",
        "fenced writer", "loses power", "is killed",
    }  # fmt: skip


def test_the_command_counts_and_names_the_replay(capsys) -> None:
    assert main(["--seeds", "0..2"]) == 0
    assert capsys.readouterr().out.startswith("2 service seeds from 0 in")
    assert main(["--seed", "1"]) == 0
    assert "every invariant holds" in capsys.readouterr().out
