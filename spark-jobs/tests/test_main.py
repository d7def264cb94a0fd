"""The command: output, exit codes, help and errors, without Spark."""

import errno
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bindery_client.connection.security import SecurityFiles
from bindery_core.errors import BadRequest
from bindery_core.ids import ID_MAX
from bindery_metadata.stores.zookeeper_access import NO_ACCESS
from bindery_spark import main as main_module
from bindery_spark import progress as progress_module
from bindery_spark import session as session_module
from bindery_spark.audit import apply as apply_module
from bindery_spark.audit import run as run_module
from bindery_spark.audit import source as source_module
from bindery_spark.audit.apply import Applied
from bindery_spark.audit.checkpoint import RunDirectory
from bindery_spark.audit.findings.findings import Exit
from bindery_spark.audit.options import Options
from bindery_spark.audit.outcome import Outcome
from bindery_spark.main import _print_outcome, main
from bindery_spark.progress import QuietProgress
from bindery_spark.sources import cluster as cluster_module
from finished_runs import Cluster, deep, finished, missing, summary


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


# --- a new run, without Spark -----------------------------------------------------------------------------------------


class Audits:
    """Replaces the audit: records the options of each run and returns an outcome."""

    def __init__(self) -> None:
        self.findings: list[dict] = []
        self.options: list[Options] = []
        self.directories: list[RunDirectory] = []
        self.settings: list[dict[str, Any]] = []
        self.does: Callable[[], None] = lambda: None

    def __call__(self, directory: RunDirectory, options: Options, **settings: Any) -> Outcome:
        self.options.append(options)
        self.directories.append(directory)
        self.settings.append(settings)
        self.does()
        return Outcome(summary(self.findings), self.findings, [], directory)


@pytest.fixture
def audits(monkeypatch: pytest.MonkeyPatch) -> Audits:
    audits = Audits()
    monkeypatch.setattr(main_module, "_audit", audits)
    for name in [name for name in os.environ if name.startswith("BINDERY_")]:
        monkeypatch.delenv(name)
    return audits


def test_without_options_a_run_has_the_defaults_of_the_manual(audits: Audits, tmp_path: Path) -> None:
    assert main(["run", "--out", str(tmp_path)]) == 0
    assert audits.options == [
        Options(
            zookeeper="127.0.0.1:2181",
            level="deep",
            first=0,
            last=ID_MAX,
            open_max_ms=604_800_000,
            orphan_after_ms=3_600_000,
            rate="64MiB/s",
            timeout_s=10.0,
            orphans=True,
            record=True,
        )
    ]
    assert audits.options[0].security == SecurityFiles()
    assert audits.settings == [{"cores": 2, "is_new": True, "is_quiet": False}]
    (directory,) = audits.directories
    assert re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{6}", directory.run_id)
    assert directory.path.parent == tmp_path.resolve()


def test_the_options_of_a_run_are_those_of_the_command(audits: Audits, tmp_path: Path) -> None:
    words = "--zookeeper h:1 --level quick --ledgers 7-20 --bookie b --since-verified 2d --rate 1MiB/s --cores 3"
    words += " --open-max 1h --orphan-after 2h --no-orphans --no-record --timeout 1500s --checkpoint-every 2GiB"
    words += " --run-id mine --ledgers-root /x --token-file t --no-check-hostname --json"
    assert main(["run", *words.split(), "--out", str(tmp_path)]) == 0
    (options,) = audits.options
    assert options == Options(
        zookeeper="h:1",
        ledgers_root="/x",
        level="quick",
        first=7,
        last=20,
        bookie="b",
        since_verified_ms=172_800_000,
        open_max_ms=3_600_000,
        orphan_after_ms=7_200_000,
        rate="1MiB/s",
        timeout_s=1_500.0,
        group_bytes=2**31,
        security=SecurityFiles(token_file="t", check_hostname=False),
        orphans=False,
        record=False,
    )
    assert audits.settings == [{"cores": 3, "is_new": True, "is_quiet": True}]
    assert audits.directories == [RunDirectory((tmp_path / "mine").resolve())]


def test_fractions_of_a_second_are_not_lost_in_the_timeout(audits: Audits, tmp_path: Path) -> None:
    assert main(["run", "--timeout", "1m1s", "--out", str(tmp_path)]) == 0
    assert audits.options[0].timeout_s == 61.0


def test_an_unfinished_run_is_resumed_with_its_own_options(audits: Audits, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "mine")
    stored = {"level": "standard", "rate": "7"}
    directory.write_run({"options": stored})
    assert main(["run", "--resume", "mine", "--level", "quick", "--out", str(tmp_path)]) == 0
    assert audits.options == [Options(**stored)]
    assert audits.settings == [{"cores": 2, "is_new": False, "is_quiet": False}]


def test_a_new_run_with_the_id_of_a_finished_one_is_not_shown_instead(audits: Audits, tmp_path: Path) -> None:
    finished(tmp_path, "mine", [])
    assert main(["run", "--run-id", "mine", "--out", str(tmp_path)]) == 0
    assert [settings["is_new"] for settings in audits.settings] == [True]


def test_the_result_in_json_has_sorted_names(
    audits: Audits, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--run-id", "mine", "--out", str(tmp_path), "--json"]) == 0
    printed = capsys.readouterr()
    facts = json.loads(printed.out)
    assert facts["directory"] == str((tmp_path / "mine").resolve())
    assert facts["verdict"] == "HEALTHY"
    assert list(facts) == sorted(facts)
    assert printed.err == ""


def test_the_report_is_named_and_findings_only_if_there_are_any(
    audits: Audits, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--run-id", "mine", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().err == f"report: {(tmp_path / 'mine').resolve() / 'report.html'}\n"


def test_a_volume_without_locks_causes_a_warning(
    audits: Audits, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise OSError("No locks available")

    monkeypatch.setattr("fcntl.flock", refuses)
    assert main(["run", "--run-id", "mine", "--out", str(tmp_path)]) == 0
    assert "bindery: the run cannot be locked" in capsys.readouterr().err


# --- errors -----------------------------------------------------------------------------------------------------------


def raises(error: BaseException) -> Callable[[], None]:
    def does() -> None:
        raise error

    return does


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("  \n  first \n second"), "first"),
        (ValueError("java.Exception\n  bindery_core.errors.Corrupt: x\n at y"), "bindery_core.errors.Corrupt: x"),
        (ValueError(""), "ValueError"),
        (ValueError("x" * 501), "x" * 500),
    ],
)
def test_an_unexpected_error_is_printed_as_one_line(
    audits: Audits, tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception, line: str
) -> None:
    audits.does = raises(error)
    assert main(["run", "--out", str(tmp_path)]) == Exit.JOB_ERROR
    assert capsys.readouterr().err == f"bindery: the audit failed: {line}\n"


def test_with_a_variable_an_unexpected_error_has_its_traceback(
    audits: Audits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BINDERY_TRACEBACK", "1")
    audits.does = raises(ValueError("why"))
    with pytest.raises(ValueError, match="why"):
        main(["run", "--out", str(tmp_path)])


def test_an_error_of_bindery_is_printed_and_an_interruption_has_its_exit_code(
    audits: Audits, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audits.does = raises(BadRequest("no such thing", name="x"))
    assert main(["run", "--out", str(tmp_path)]) == Exit.JOB_ERROR
    assert capsys.readouterr().err == "bindery: no such thing: name=x\n"
    audits.does = raises(KeyboardInterrupt())
    assert main(["run", "--out", str(tmp_path)]) == 130
    assert "interrupted before anything was stored; start the command again" in capsys.readouterr().err


def test_a_closed_pipe_is_a_failure_without_a_traceback(
    audits: Audits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[tuple[int, int]] = []
    monkeypatch.setattr(main_module.os, "dup2", lambda *numbers: copies.append(numbers))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(fileno=lambda: 77, write=lambda _: None, flush=lambda: None))
    audits.does = raises(BrokenPipeError(errno.EPIPE, "Broken pipe"))
    assert main(["run", "--out", str(tmp_path)]) == Exit.JOB_ERROR
    ((null, stdout),) = copies
    assert (os.readlink(f"/proc/self/fd/{null}"), stdout) == (os.devnull, 77)
    os.close(null)


def test_a_subcommand_of_topics_is_part_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("export", "count"):
        assert main([name, "--help"]) == 0
        assert f"bindery audit {name}" in capsys.readouterr().out


# --- the marks --------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setattr(apply_module, "apply_to", cluster)
    return cluster


@pytest.mark.parametrize("count", [20, 21])
def test_at_most_20_proposed_marks_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int) -> None:
    directory = deep(tmp_path, "mine", [missing(number) for number in range(count)])
    assert main(["run", "--resume", "mine", "--out", str(tmp_path)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len([line for line in lines if line.startswith("would mark ledger ")]) == 20
    assert [line for line in lines if line.startswith("and ")] == (
        [] if count == 20 else ["and 1 more; actions.json lists all"]
    )
    assert not directory.is_applied


@pytest.mark.parametrize(
    ("has_terminal", "answer", "is_marked"), [(False, True, False), (True, False, False), (True, True, True)]
)
def test_marks_are_written_only_after_confirmation(
    cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    has_terminal: bool,
    answer: bool,
    is_marked: bool,
) -> None:
    asked: list[tuple[str, bool]] = []

    def confirm(question: str, *, err: bool) -> bool:
        asked.append((question, err))
        return answer

    monkeypatch.setattr(main_module.typer, "confirm", confirm)
    monkeypatch.setattr(main_module.sys, "stdin", SimpleNamespace(isatty=lambda: has_terminal))
    directory = deep(tmp_path, "mine", [missing(7), missing(8)])
    assert main(["run", "--resume", "mine", "--out", str(tmp_path), "--apply"]) == 1
    assert (cluster.marked, directory.is_applied) == (([[7, 8]], True) if is_marked else ([], False))
    assert asked == ([("mark 2 ledgers?", True)] if has_terminal else [])
    lines = capsys.readouterr().err.splitlines()
    assert lines[2].startswith("mark ledger 7 for a:3181")
    if is_marked:
        assert lines[-2:] == ["ledger 9 was skipped: it was deleted", "marked 2 ledgers; 0 were marked already"]
    else:
        assert lines[-1] == "bindery: nothing was marked; pass --yes to mark without confirmation"


def test_with_json_marks_are_written_without_texts(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deep(tmp_path, "mine", [missing(7)])
    assert main(["run", "--resume", "mine", "--out", str(tmp_path), "--apply", "--yes", "--json"]) == 1
    assert cluster.marked == [[7]]
    assert capsys.readouterr().err == ""


def test_a_run_without_proposals_says_nothing_about_marks(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deep(tmp_path, "mine", [])
    assert main(["run", "--resume", "mine", "--out", str(tmp_path), "--apply", "--yes"]) == 0
    assert (cluster.marked, "mark" in capsys.readouterr().err) == ([], False)


def test_the_time_of_a_mark_is_in_ms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main_module.time, "time_ns", lambda: 1_800_000_000_123_456_789)
    times: list[int] = []

    def apply(*_: object, clock_ms: Callable[[], int], **__: object) -> Applied:
        times.append(clock_ms())
        return Applied()

    monkeypatch.setattr(apply_module, "apply_to", apply)
    deep(tmp_path, "mine", [missing(7)])
    main(["run", "--resume", "mine", "--out", str(tmp_path), "--apply", "--yes"])
    assert times == [1_800_000_000_123]


# --- comparison -------------------------------------------------------------------------------------------------------


def test_diff_prints_each_kind_of_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished(tmp_path, "1", [missing(7), missing(8)])
    finished(tmp_path, "2", [missing(8, last=9), missing(9)])
    assert main(["diff", "1", "2", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    text = (
        "MISSING_REPLICA (under_replicated) ledger {}, entries 3..{}, on a:3181: the bookie denies it; expected a copy"
    )
    assert printed.out.splitlines() == [
        "+ " + text.format(9, 5),
        "- " + text.format(7, 5),
        "~ " + text.format(8, 9),
        "  was: " + text.format(8, 5),
    ]
    assert printed.err == "1 new, 1 gone, 1 changed\n"
    assert main(["diff", "1", "2", "--out", str(tmp_path), "--json"]) == 1
    printed = capsys.readouterr()
    facts = json.loads(printed.out)
    assert list(facts) == ["changed", "gone", "new"]
    assert [[found["ledger_id"] for found in facts[name]] for name in ("gone", "new")] == [[7], [9]]
    assert list(facts["new"][0]) == sorted(facts["new"][0])
    assert printed.err == ""


def test_show_as_json_lists_runs_and_findings_with_sorted_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished(tmp_path, "1", [missing(7)])
    RunDirectory(tmp_path / "2").write_run({"options": {}})
    assert main(["show", "--out", str(tmp_path), "--json"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"run_id": "1", "verdict": "UNDER-REPLICATED"},
        {"run_id": "2", "verdict": "unfinished"},
    ]
    assert main(["show", "1", "--out", str(tmp_path), "--findings", "--json"]) == 1
    (finding,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (list(finding), finding["ledger_id"]) == (sorted(finding), 7)
    assert main(["show", "1", "--out", str(tmp_path), "--findings"]) == 1
    assert capsys.readouterr().out.startswith("MISSING_REPLICA (under_replicated) ledger 7")


# --- the audit itself -------------------------------------------------------------------------------------------------


class Job:
    """Replaces Spark, the cluster and `run_audit`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.does: Callable[[RunDirectory], None] = lambda _: None
        self.calls: list[tuple[Any, ...]] = []
        self.shared: list[Path] = []
        self.kwargs: dict[str, Any] = {}
        monkeypatch.setattr(session_module, "session", self.session)
        monkeypatch.setattr(
            session_module, "share", lambda spark, path: path.mkdir(parents=True) or self.shared.append(path)
        )
        self.checked: list[tuple[Any, ...]] = []
        monkeypatch.setattr(source_module, "ClusterSource", lambda *arguments: arguments)
        monkeypatch.setattr(cluster_module, "check_access", lambda *arguments: self.checked.append(arguments))
        monkeypatch.setattr(run_module, "run_audit", self.run_audit)
        monkeypatch.setattr(progress_module, "TerminalProgress", self.terminal)

    def session(self, *arguments: Any, **settings: Any) -> str:
        self.calls.append((*arguments, settings))
        return "spark"

    def terminal(self, spark: str, *, clock: Callable[[], float]) -> "Job":
        assert clock is main_module.time.monotonic
        return self

    def __enter__(self) -> str:
        return "a bar"

    def __exit__(self, *_: object) -> None:
        pass

    def run_audit(self, spark: str, source: Any, directory: RunDirectory, options: Options, **more: Any) -> Outcome:
        self.kwargs = {"source": source, **more}
        self.does(directory)
        return Outcome(summary([]), [], [], directory)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


@pytest.mark.parametrize("as_json", [False, True])
def test_an_audit_runs_in_a_session_without_data_sources_and_shows_progress_unless_json_is_printed(
    job: Job, tmp_path: Path, as_json: bool
) -> None:
    words = ["run", "--run-id", "mine", "--out", str(tmp_path), *(["--json"] if as_json else [])]
    assert main(words) == 0
    assert job.calls == [(2, "bindery audit mine", session_module.AUDIT_CONF, {"with_sources": False})]
    progress = job.kwargs["progress"]
    assert isinstance(progress, QuietProgress) if as_json else progress == "a bar"
    assert (job.kwargs["out"], job.kwargs["is_new"]) == (tmp_path.resolve(), True)
    assert job.kwargs["source"] == ("spark", "127.0.0.1:2181", "/ledgers", "64MiB/s", 10.0, SecurityFiles(), NO_ACCESS)
    assert job.checked == [("127.0.0.1:2181", "/ledgers", SecurityFiles(), NO_ACCESS)]
    (shared,) = job.shared
    assert shared == (tmp_path / "mine" / "checkpoint" / "spark").resolve()
    assert not shared.exists(), "intermediate results are deleted"


def test_an_interrupted_audit_prints_how_to_resume_it(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def begins(directory: RunDirectory) -> None:
        directory.write_run({"options": {}})
        raise KeyboardInterrupt

    job.does = begins
    assert main(["run", "--run-id", "mine", "--out", str(tmp_path)]) == 130
    command = f"bindery audit run --resume mine --out {tmp_path.resolve()}"
    assert capsys.readouterr().err == f"\ninterrupted; finished groups are kept. To resume: {command}\n"
    assert not job.shared[0].exists()


def test_an_audit_that_is_interrupted_before_its_plan_is_stored_cannot_be_resumed(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupts(_: RunDirectory) -> None:
        job.shared[0].rmdir()  # results that are gone already are no error
        raise KeyboardInterrupt

    job.does = interrupts
    assert main(["run", "--run-id", "mine", "--out", str(tmp_path)]) == 130
    assert "interrupted before anything was stored" in capsys.readouterr().err
