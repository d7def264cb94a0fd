"""Goal: the crash search looks at what it says, comes to the same end each time, and its promises hold."""

import pytest
from bindery_simulation.storage import crash
from bindery_simulation.storage.command import main
from bindery_simulation.storage.mutants import MUTANTS
from bindery_simulation.storage.runner import quietly

SEEDS = (104, 114, 121)
"""Short ones, with all that there is."""


def notes(seed: int) -> tuple[list[str], crash.Outcome]:
    told: list[str] = []
    return told, crash.play(seed, note=told.append, wanted=lambda operation: operation % 40 == 7)


def test_what_was_acknowledged_survives_a_power_cut_before_any_write() -> None:
    points = replayed = rebuilt = 0
    for seed in SEEDS:
        outcome = quietly(lambda seed: crash.play(seed, wanted=lambda operation: operation % 6 == 1), seed)
        assert not outcome.problems, f"seed {seed}: {outcome.problems[0]}"
        points += outcome.points
        replayed += outcome.reached["entries replayed"]
        rebuilt += outcome.reached["index lost and rebuilt"]
        assert outcome.reached["acknowledged entries read"] > 0
    assert points > 60
    assert replayed > 100, "hardly anything was replayed: this checks nothing"
    assert rebuilt > 3


def test_compaction_is_cut_too() -> None:
    outcome = quietly(lambda seed: crash.play(seed, wanted=lambda operation: operation % 3 == 1), 176)
    assert not outcome.problems
    assert outcome.reached["entry logs compacted"] > 0
    assert outcome.kinds["compacted log rename"] > 0
    assert outcome.kinds["entry-logs rename"] > 0


def test_each_kind_of_write_is_cut() -> None:
    kinds = {kind for seed in SEEDS for kind in crash.play(seed, wanted=lambda operation: False).kinds}
    assert kinds >= {
        "journal create", "journal write", "journal datasync", "journal directory sync", "journal remove",
        "entry log create", "entry log write", "entry log datasync", "entry log sync", "index batch",
        "LastLogMark create", "LastLogMark write", "LastLogMark sync", "LastLogMark rename", "ledgers directory sync",
    }  # fmt: skip


def test_a_seed_is_the_same_history_each_time() -> None:
    told, outcome = notes(11)
    again, repeated = notes(11)
    assert told == again
    assert len(told) > 20
    assert (outcome.operations, outcome.points, outcome.reached) == (
        repeated.operations, repeated.points, repeated.reached,
    )  # fmt: skip


def test_a_point_alone_is_what_it_was_among_others() -> None:
    """Photographs change nothing: what comes after is the same with them and without."""
    many = crash.play(12, wanted=lambda operation: operation < 60, problems_max=10**9)
    one = crash.play(12, wanted=lambda operation: operation == 59)
    assert many.points == 60
    assert one.points == 1
    assert one.operations == many.operations


def test_the_command_counts_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["crash", "--points", "20", "--first", "109"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    points = int(last.split(" ")[0])
    assert points >= 20
    assert f"{points} crash points, 0 violations; seeds from 109" in last


def test_the_command_names_the_point_and_the_line_that_replays_it(capsys: pytest.CaptureFixture[str]) -> None:
    with MUTANTS["fence-not-journaled"].patch():
        assert main(["crash", "--points", "400", "--first", "104"]) == 1
        told = capsys.readouterr().out
        (point,) = [line.rpartition(" ")[2] for line in told.splitlines() if line.startswith("replay: ")][:1]
        assert f"replay: python -m bindery_simulation storage crash --point {point}" in told
        assert "VIOLATED fences-hold" in told
        assert main(["crash", "--point", point]) == 1
        replayed = capsys.readouterr().out
    assert "VIOLATED fences-hold" in replayed
    assert "start\n" in replayed
