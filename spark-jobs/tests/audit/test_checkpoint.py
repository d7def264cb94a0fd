"""The directory of a run as other runs and the command read it: finished, unfinished, or with applied marks."""

import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from bindery_core.errors import BadRequest
from bindery_spark import main as main_module
from bindery_spark.audit import apply as apply_module
from bindery_spark.audit.checkpoint import RunDirectory, last_finished, run_directory, runs_in
from bindery_spark.audit.findings.findings import Exit
from bindery_spark.audit.options import Options
from bindery_spark.main import main
from finished_runs import Cluster, deep, finished, missing

FIRST, SECOND, THIRD = (f"2026010{n}T000000Z-abcdef" for n in (1, 2, 3))


def test_a_run_without_its_checkpoint_is_still_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = deep(tmp_path, FIRST, [missing()])
    shutil.rmtree(run.path / "checkpoint")
    assert runs_in(tmp_path) == [run]
    assert main(["show", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{FIRST}  UNDER-REPLICATED\n"
    assert last_finished(tmp_path, before=SECOND, cluster_id="c-1") == run
    alike = last_finished(tmp_path, before=SECOND, cluster_id="c-1", fits=Options(level="quick").is_covered_by)
    assert alike == run, "it checked at least as much"
    assert last_finished(tmp_path, before=SECOND, cluster_id="c-1", fits=lambda options: not options) is None


def test_options_of_runs_of_older_versions_are_read_from_the_checkpoint(tmp_path: Path) -> None:
    run = deep(tmp_path, FIRST, [])
    (run.path / "options.json").unlink()
    assert run.read_options() == asdict(Options())
    shutil.rmtree(run.path / "checkpoint")
    with pytest.raises(BadRequest, match="no run that can be resumed"):
        run.read_options()
    assert last_finished(tmp_path, before=SECOND, cluster_id="c-1") == run
    assert last_finished(tmp_path, before=SECOND, cluster_id="c-1", fits=Options().is_covered_by) is None


def test_a_run_without_a_verdict_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep(tmp_path, FIRST, [])
    RunDirectory(tmp_path / SECOND).write_run({"options": {}})
    for names in ((FIRST, SECOND), (SECOND, FIRST)):
        assert main(["diff", *names, "--out", str(tmp_path)]) == Exit.JOB_ERROR
        assert f"--resume {SECOND}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--rate", "abc"], "option --rate must be a number of bytes"),
        (["--rate", "64MiB/min"], "option --rate must be a number of bytes"),
        (["--timeout", "0s"], "option --timeout must be above 0"),
    ],
)
def test_invalid_options_are_rejected_before_the_run_begins(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(main_module, "_audit", lambda *_, **__: pytest.fail("Spark was started"))
    assert main(["run", *arguments, "--out", str(tmp_path / "runs")]) == Exit.JOB_ERROR
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setattr(apply_module, "apply_to", cluster)
    monkeypatch.setattr(main_module, "_audit", lambda *_, **__: pytest.fail("a finished run was read again"))
    return cluster


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_resuming_a_finished_run_prints_it_and_applies_its_marks(
    cluster: Cluster, tmp_path: Path, has_checkpoint: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run = deep(tmp_path, FIRST, [missing(7), missing(8)])
    if not has_checkpoint:
        shutil.rmtree(run.path / "checkpoint")
    words = ["run", "--resume", FIRST, "--out", str(tmp_path)]
    assert main(words) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "bindery c-1 is UNDER-REPLICATED"
    assert (cluster.marked, run.is_applied) == ([], False)
    cluster.dies = True
    assert main([*words, "--apply", "--yes"]) == 130
    assert not run.is_applied, "the marks were not recorded"
    cluster.dies = False
    assert main([*words, "--apply", "--yes"]) == 1
    assert cluster.marked == [[7, 8]]
    assert run.read_json("applied.json") == {"already": [], "left": {"9": "it was deleted"}, "marked": [7, 8]}


def test_the_previous_run_is_the_latest_finished_one_of_the_same_cluster(tmp_path: Path) -> None:
    first, second = (finished(tmp_path, f"2026010{n}T000000Z-a", []) for n in (1, 2))
    unfinished = RunDirectory(tmp_path / "20260103T000000Z-a")
    unfinished.write_run({})
    assert last_finished(tmp_path, before="20260104", cluster_id="c-1") == second
    assert last_finished(tmp_path, before=second.run_id, cluster_id="c-1") == first
    assert last_finished(tmp_path, before="20260104", cluster_id="another") is None
    assert runs_in(tmp_path) == [first, second, unfinished]
    assert last_finished(tmp_path, before="20260104", cluster_id="c-1", fits=lambda options: False) is None


@pytest.mark.parametrize(
    ("mine", "other", "is_enough"),
    [
        ({}, {}, True),
        ({}, {"level": "quick"}, False),
        ({"level": "quick"}, {}, True),
        ({"first": 3, "last": 9}, {"first": 2, "last": 9}, True),
        ({}, {"first": 1}, False),
        ({}, {"bookie": "a"}, False),
        ({"bookie": "a"}, {"bookie": "a"}, True),
        ({"bookie": "a"}, {}, True),
    ],
)
def test_first_seen_times_come_only_from_runs_that_checked_at_least_as_much(
    mine: dict, other: dict, is_enough: bool
) -> None:
    assert Options(**mine).is_covered_by(asdict(Options(**other))) == is_enough
    assert not Options().is_covered_by({}), "a run with unknown options"


def test_only_a_complete_group_is_done(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "r")
    making = directory.begin_group(3)
    (making / "half").touch()
    assert directory.done() == set()
    assert list(directory.begin_group(3).iterdir()) == [], "begun again"
    directory.finish_group(3)
    assert directory.done() == {3}


def test_a_run_of_another_version_is_not_resumed(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "r")
    directory.write_json("checkpoint/run.json", {"format": 99})
    with pytest.raises(BadRequest, match="another version"):
        directory.read_run()
    directory.write_run({"options": {"level": "deep", "an_option_of_tomorrow": 1}})
    with pytest.raises(BadRequest, match="another version"):
        Options.from_json(directory.read_run()["options"])
    directory.write_run({"options": asdict(Options(level="quick", orphans=False))})
    assert Options.from_json(directory.read_run()["options"]) == Options(level="quick", orphans=False)
    directory.write_json("checkpoint/run.json", {"format": 1})
    with pytest.raises(BadRequest, match="another version"):
        directory.read_run()
    with pytest.raises(BadRequest, match="no audit run x"):
        run_directory(tmp_path, "x")


def test_a_batch_of_the_second_pass_keeps_its_facts_until_it_is_dropped(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "r")
    assert directory.batches() == {}
    for number in (12, 3):
        making = directory.begin_batch(number)
        assert list(directory.begin_batch(number).iterdir()) == [], "begun again"
        (making / "part").touch()
        assert number not in directory.batches()
        directory.finish_batch(number, {"ended_ms": number})
        assert (directory.batch(number) / "part").exists()
    assert directory.batches() == {3: {"ended_ms": 3}, 12: {"ended_ms": 12}}
    assert list(directory.batches()) == [3, 12]
    directory.drop_batch(3)
    assert list(directory.batches()) == [12]
    assert directory.batch(3) == tmp_path / "r" / "checkpoint" / "second" / "00003"


def test_tables_and_groups_have_their_places_below_the_checkpoint(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "r")
    assert directory.table("before", "marks") == tmp_path / "r" / "checkpoint" / "before" / "marks"
    assert directory.group(7) == tmp_path / "r" / "checkpoint" / "groups" / "00007"
    assert directory.done() == set()


def test_files_are_json_for_people_in_version_2(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "r")
    directory.write_json("x.json", {"b": 1, "a": [2]})
    assert (directory.path / "x.json").read_text() == '{\n "a": [\n  2\n ],\n "b": 1\n}\n'
    directory.write_run({"options": {"level": "deep"}})
    assert directory.read_json("options.json") == {"format": 2, "options": {"level": "deep"}}
    assert directory.read_run()["format"] == 2
