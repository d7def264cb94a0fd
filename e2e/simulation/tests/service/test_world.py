"""Whole simulated clusters: every invariant holds under every seed, and the same seed is the same run bit for bit.

`make sim SEED=<n>` replays one with its trace. `make sim-ci` spends more time than these tests may, and runs those
marked `simulator`.
"""

import os
import subprocess
import sys

import pytest
from bindery_simulation.service import faults
from bindery_simulation.service.command import main
from bindery_simulation.service.healing import faults as healing_faults
from bindery_simulation.service.healing.plan import HealingKind, draw_plan
from bindery_simulation.service.runner import run_seeds
from bindery_simulation.service.world import run_seed

pytestmark = pytest.mark.timeout(600)  # a busy machine takes minutes for seconds
SEEDS = 12
FIRST_SEED = int(os.environ.get("BINDERY_SEED", "0"))


def test_every_invariant_holds_under_the_first_seeds(capsys) -> None:
    summary = run_seeds(range(FIRST_SEED, FIRST_SEED + SEEDS))
    with capsys.disabled():
        sys.stdout.write(f"\n{summary.text()}\n")
    assert summary.failures == []
    assert summary.seeds == SEEDS


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
def test_a_seed_is_the_same_run_in_another_process_byte_for_byte(seed, options) -> None:
    """Another process: other addresses. Not even the order of sets decides anything: the seed means the same here."""
    arguments = ["service", "--seed", str(seed), "--trace", *options]
    play = f"import sys; from bindery_simulation.service.command import main; sys.exit(main({arguments[1:]!r}))"
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
def test_tracing_changes_nothing() -> None:
    for healing in (False, HealingKind.STORM):
        traced, untraced = run_seed(5, is_traced=True, healing=healing), run_seed(5, healing=healing)
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
    wanted = {
        "recovered", "tailed", "acknowledged", "add failed", "deletes", "audited", "fenced", "ensemble change",
        "fenced writer", "loses power", "is killed",
    }  # fmt: skip
    told = set()
    for seed in range(12):
        for _, _, what, facts in run_seed(seed, is_traced=True, healing=False).trace.events:
            told.add(what)
            if what == "ledger" and len(facts["segments"]) > 1:
                told.add("ensemble change")
            if what == "adds" and any(status == "FENCED" for _, _, status in facts["answered"]):
                told.add("fenced writer")
        if told >= wanted:
            return
    raise AssertionError(f"twelve seeds do not reach {wanted - told}")


def test_a_part_of_the_worlds_heals() -> None:
    plans = [draw_plan(seed) for seed in range(200)]
    kinds = [plan.kind for plan in plans if plan is not None]
    assert 40 <= len(kinds) <= 90
    assert set(kinds) == set(HealingKind)


@pytest.mark.parametrize("kind", healing_faults.HEALING_FAULTS, ids=lambda kind: kind.__name__)
def test_healing_survives_every_kind_of_fault(kind) -> None:
    """Besides lost disks and drains, which the seed decides."""
    for seed in range(20):
        outcome = run_seed(seed, faults=(kind,), healing=HealingKind.STORM)
        assert outcome.violation is None, outcome.violation
        if kind.__name__ in outcome.faults:
            return
    raise AssertionError("it never came")


@pytest.mark.simulator
def test_worlds_that_heal_reach_what_they_are_meant_to_reach() -> None:
    wanted = {"is lost for good", "has an empty disk", "draining", "copies", "nothing is missing"}
    told = set()
    copies = 0
    for seed in range(8):
        outcome = run_seed(seed, is_traced=True, healing=HealingKind.STORM)
        assert outcome.violation is None, outcome.violation
        told |= {what for _, _, what, _ in outcome.trace.events}
        copies += outcome.entries_healed
        if told >= wanted and copies > 100:
            return
    raise AssertionError(f"eight seeds do not reach {wanted - told}, or too few copies: {copies}")


def test_the_command_counts_and_names_the_replay(capsys) -> None:
    assert main(["--seeds", "0..2"]) == 0
    assert capsys.readouterr().out.startswith("2 service seeds from 0 in")
    assert main(["--seed", "1"]) == 0
    assert "every invariant holds" in capsys.readouterr().out
    assert main(["--seeds", "0..2", "--healing", "restarts"]) == 0
    assert "with auditors: 2 (restarts 2), 0 marks removed, 0 copies made" in capsys.readouterr().out
