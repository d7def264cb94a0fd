"""The output, counts and exit codes of the command line. It names the command that replays a violation."""

import pytest
from bindery_simulation.command import TABLES, main
from bindery_simulation.mutant import Kind
from bindery_simulation.protocol.history import play
from bindery_simulation.protocol.search import report

pytestmark = pytest.mark.timeout(600)  # seconds of work take minutes on a busy machine


def test_a_history_prints_its_trace_and_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["protocol", "--seed", "7", "--trace"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("seed 7 (")
    assert any(" -> metadata " in line for line in printed)
    assert printed[-1] == "every invariant holds"


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_range_of_histories_is_counted(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["protocol", "--seeds", "10..40", "--jobs", jobs]) == 0
    assert capsys.readouterr().out.startswith("30 protocol histories in ")


def test_a_search_ends_after_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["protocol", "--seconds", "0.2", "--first", "5000"]) == 0
    printed = capsys.readouterr().out
    assert "protocol histories in" in printed
    assert "seeds 5000.." in printed


def test_a_violation_names_invariant_seed_and_replay_command(capsys: pytest.CaptureFixture[str]) -> None:
    mutant = TABLES[Kind.PROTOCOL]["recovery treats an entry as absent after one denial"]
    options = ["--seed", str(mutant.seed), "--profile", "fence race", "--mutant", mutant.name]
    assert main(["protocol", *options]) == 1
    printed = capsys.readouterr().out
    assert "VIOLATED acknowledged-entries-readable" in printed
    assert f'protocol --seed {mutant.seed} --profile "fence race" --trace' in printed
    assert " -> recovery0" in printed, "a violation is printed with its trace"


def test_a_range_with_violations_fails_after_five(capsys: pytest.CaptureFixture[str]) -> None:
    mutant = "a reader treats an entry as absent after one denial"
    assert main(["protocol", "--seeds", "0..200", "--mutant", mutant]) == 1
    assert "5 violations" in capsys.readouterr().out


def test_a_report_without_trace_has_two_lines() -> None:
    assert len(report(play(3), trace=False).splitlines()) == 2


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_clusters_are_counted(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["service", "--seeds", "0..2", "--jobs", jobs]) == 0
    assert capsys.readouterr().out.startswith("2 service seeds from 0 in")


def test_clusters_with_auditors_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["service", "--seeds", "0..2", "--healing", "restarts"]) == 0
    assert "with auditors: 2 (restarts 2), 0 marks removed, 0 copies made" in capsys.readouterr().out


def test_a_cluster_prints_its_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["service", "--seed", "1"]) == 0
    assert "every invariant holds" in capsys.readouterr().out


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_clusters_with_brokers_are_counted(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topics", "--seeds", "0..3", "--jobs", jobs]) == 0
    assert capsys.readouterr().out.startswith("3 topics seeds from 0 in")


def test_a_violation_of_a_cluster_with_brokers_can_be_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    name = "ack-before-durable"
    found = TABLES[Kind.TOPICS].hunt(name, cost_max=150, seconds_max=60)  # known seeds change with the broker
    assert found is not None
    seed = found.trial.seed
    assert main(["topics", "--seed", str(seed), "--mutant", name]) == 1
    printed = capsys.readouterr().out
    assert f'replay: make sim KIND=topics SEED={seed} ARGS="--mutant {name}"' in printed
    assert "VIOLATED no-delivery-after-durable-ack" in printed
    assert "VERDICT" in printed


@pytest.mark.simulator
def test_a_violation_of_a_cluster_can_be_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    """The output names the invariant, the seed and the command."""
    name = "recovery-does-not-fence"
    seed = TABLES[Kind.SERVICE][name].seed
    assert main(["service", "--seed", str(seed), "--mutant", name]) == 1
    printed = capsys.readouterr().out
    assert f'replay: make sim SEED={seed} ARGS="--mutant {name}"' in printed
    assert "VIOLATED writer-metadata" in printed
    assert "VERDICT" in printed


def test_crash_points_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["storage", "crash", "--points", "20", "--first", "109"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    points = int(last.split(" ")[0])
    assert points >= 20
    assert f"{points} crash points, 0 violations; seeds from 109" in last


def test_a_broken_promise_names_the_crash_point_and_the_command_that_replays_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with TABLES[Kind.CRASH]["fence-not-journaled"].applied():
        assert main(["storage", "crash", "--points", "400", "--first", "104"]) == 1
        printed = capsys.readouterr().out
        (point,) = [line.rpartition(" ")[2] for line in printed.splitlines() if line.startswith("replay: ")][:1]
        assert f"replay: python -m bindery_simulation storage crash --point {point}" in printed
        assert "VIOLATED fences-hold" in printed
        assert main(["storage", "crash", "--point", point]) == 1
        replayed = capsys.readouterr().out
    assert "VIOLATED fences-hold" in replayed
    assert "start\n" in replayed


def test_damaged_files_are_counted_and_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["storage", "damage", "--cases", "12", "--first", "100"]) == 0
    assert "12 damaged files, 0 violations; seeds from 100" in capsys.readouterr().out.splitlines()[-1]
    assert main(["storage", "damage", "--case", "105"]) == 0
    assert capsys.readouterr().out.startswith("seed 105: ")


def test_mutants_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mutants", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(map(len, TABLES.values()))
    assert "crash ack-before-journal: Adds are acknowledged before the journal wrote them. Seed 0: " in "\n".join(lines)


def test_a_hunt_names_the_invariant_that_reported_the_mutant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mutants", "damage"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("damage entry-digests-unchecked: 1 damaged files, seed 0: ")
    assert lines[-1] == "4 mutants, 0 not caught"


@pytest.mark.parametrize(
    "arguments",
    [
        ["protocol"],
        ["service", "--faults", "kill_bookie", "--seconds", "1"],
        ["service", "--mutant", "early-lac", "--seconds", "1"],
        ["topics", "--faults", "kill_broker", "--seconds", "1"],
    ],
)
def test_missing_options_are_reported(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == 2
    assert "require" in capsys.readouterr().err
