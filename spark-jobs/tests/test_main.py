"""The command: output, exit codes, help and errors, without Spark."""

from pathlib import Path

import pytest
from bindery_spark.audit.checkpoint import RunDirectory
from bindery_spark.audit.findings.findings import Exit
from bindery_spark.audit.outcome import Outcome
from bindery_spark.main import _print_outcome, main
from finished_runs import finished, missing, summary


@pytest.mark.parametrize("as_json", [False, True])
def test_a_run_that_was_not_recorded_in_the_cluster_prints_why(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, as_json: bool
) -> None:
    outcome = Outcome(summary([]), [], [], RunDirectory(tmp_path / "r1"), "zookeeper did not answer")
    _print_outcome(outcome, as_json=as_json)
    printed = capsys.readouterr()
    assert "bindery: the run was not recorded in the cluster: zookeeper did not answer" in printed.err.splitlines()
    assert "not recorded" not in printed.out


def test_show_lists_runs_and_shows_one_with_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = finished(tmp_path, "20260101T000000Z-a", [missing()])
    assert main(["show", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{directory.run_id}  UNDER-REPLICATED\n"
    assert main(["audit", "show", directory.run_id, "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "bindery c-1 is UNDER-REPLICATED"
    assert main(["show", directory.run_id, "--out", str(tmp_path), "--findings", "--json"]) == 1
    assert '"kind": "MISSING_REPLICA"' in capsys.readouterr().out


def test_diff_has_an_exit_code_for_differences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = finished(tmp_path, "1", [missing()]), finished(tmp_path, "2", [missing(), missing(8)])
    assert main(["diff", "1", "1", "--out", str(tmp_path)]) == 0
    assert main(["diff", str(one.path), str(two.path)]) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith("+ MISSING_REPLICA (under_replicated) ledger 8, entries 3..5")
    assert printed.err.splitlines()[-1] == "1 new, 0 gone, 0 changed"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["run", "--level", "full"], "quick, standard, deep"),
        (["run", "--ledgers", "9-7"], "the range is empty"),
        (["run", "--nonsense"], "No such option"),
        (["run", "--resume", "nothing", "--out", "/nonexistent"], "no audit run nothing"),
        (["show", "nothing", "--out", "/nonexistent"], "no audit run nothing"),
        (["nonsense"], "No such command"),
    ],
)
def test_wrong_usage_is_a_job_error_and_names_the_fix(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == Exit.JOB_ERROR
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["show", "--help"], ["diff", "--help"]])
def test_every_subcommand_has_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert "Usage: bindery audit" in capsys.readouterr().out


def test_show_without_runs_prints_how_to_start_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--json"]):
        assert main(["show", "--out", str(tmp_path / "none"), *arguments]) == 0
        output = capsys.readouterr()
        assert output.out == "", "scripts read stdout"
        assert f"no runs in {tmp_path / 'none'}. To start one: bindery audit run" in output.err


def test_an_audit_with_findings_prints_the_next_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = finished(tmp_path, "20260101T000000Z-a", [missing()])
    assert main(["run", "--resume", directory.run_id, "--out", str(tmp_path)]) == 1
    output = capsys.readouterr().err
    assert f"all findings: bindery audit show {directory.run_id} --out {tmp_path} --findings\n" in output
    again = f"bindery audit run --resume {directory.run_id} --out {tmp_path} --apply"
    assert output.endswith(f"nothing was marked. To mark these ledgers: {again}\n")


def test_the_exit_codes_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    for code in ("0 healthy", "1 under-replicated", "2 corrupt", "3 incomplete", "4 the command failed", "130 interr"):
        assert code in words
