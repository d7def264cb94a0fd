"""The command line of the protocol simulation."""

import pytest
from bindery_simulation.protocol.command import main, report
from bindery_simulation.protocol.history import play
from bindery_simulation.protocol.mutants import MUTANTS, applied, hunt


def test_one_seed_prints_its_trace_and_how_it_ended(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "7", "--trace"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("seed 7 (")
    assert any(" -> metadata " in line for line in told)
    assert told[-1] == "every invariant holds"


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_range_of_seeds_is_counted(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "10..40", "--jobs", jobs]) == 0
    assert capsys.readouterr().out.startswith("30 protocol histories in ")


def test_a_time_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seconds", "0.2", "--first", "5000"]) == 0
    told = capsys.readouterr().out
    assert "protocol histories in" in told
    assert "seeds 5000.." in told


def test_a_failure_names_invariant_seed_and_replay(capsys: pytest.CaptureFixture[str]) -> None:
    mutant = MUTANTS["one denial ends the ledger"]
    outcome, _ = hunt(mutant, seeds_max=500)
    assert outcome is not None
    assert main(["--seed", str(outcome.seed), "--profile", "fence race", "--mutant", mutant.name]) == 1
    told = capsys.readouterr().out
    assert "VIOLATED acknowledged-entries-readable" in told
    assert f'protocol --seed {outcome.seed} --profile "fence race" --trace' in told
    assert " -> recovery0" in told, "the trace comes unasked"


def test_a_range_with_failures_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with applied(MUTANTS["one replica's denial is enough for a reader"]):
        assert main(["--seeds", "0..200"]) == 1
    assert "5 violations" in capsys.readouterr().out


def test_a_report_without_trace_is_short() -> None:
    assert len(report(play(3), trace=False).splitlines()) == 2
