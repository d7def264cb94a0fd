"""The directory of a run as other runs, other pods and the command find it: finished, unfinished, marked, in use."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from bindery_core.errors import BadRequest, Conflict
from bindery_spark import main as main_module
from bindery_spark.audit import apply as apply_module
from bindery_spark.audit.apply import Applied
from bindery_spark.audit.audit import Options
from bindery_spark.audit.checkpoint import RunDirectory, last_finished, runs_in
from bindery_spark.audit.findings.actions import Proposal
from bindery_spark.audit.findings.findings import Exit
from bindery_spark.audit.run_lock import LOCK, held
from bindery_spark.main import main

from .test_audit_outputs import finished, missing

FIRST, SECOND, THIRD = (f"2026010{n}T000000Z-abcdef" for n in (1, 2, 3))


def deep(out: Path, run_id: str, findings: list[dict]) -> RunDirectory:
    directory = finished(out, run_id, findings)
    directory.write_run({"options": asdict(Options()), "began_ms": 1})
    return directory


# --- without a checkpoint ---------------------------------------------------------------------------------------------


def test_a_finished_run_is_one_when_its_checkpoint_was_deleted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = deep(tmp_path, FIRST, [missing()])
    shutil.rmtree(run.path / "checkpoint")
    assert runs_in(tmp_path) == [run]
    assert main(["show", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{FIRST}  UNDER-REPLICATED\n"
    assert last_finished(tmp_path, before=SECOND, cluster_id="c-1") == run
    alike = last_finished(tmp_path, before=SECOND, cluster_id="c-1", fits=Options(level="quick").sees_no_more_than)
    assert alike == run, "it looked at all of it as deeply, and knows since when"
    assert last_finished(tmp_path, before=SECOND, cluster_id="c-1", fits=lambda options: not options) is None


def test_a_run_of_an_older_version_tells_its_options_by_its_checkpoint(tmp_path: Path) -> None:
    run = deep(tmp_path, FIRST, [])
    (run.path / "options.json").unlink()
    assert run.read_options() == asdict(Options())
    shutil.rmtree(run.path / "checkpoint")
    with pytest.raises(BadRequest, match="no run that can be resumed"):
        run.read_options()
    assert last_finished(tmp_path, before=SECOND, cluster_id="c-1") == run
    assert last_finished(tmp_path, before=SECOND, cluster_id="c-1", fits=Options().sees_no_more_than) is None


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_run_without_a_verdict_is_compared_with_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_wrong_options_are_refused_before_anything_is_begun(
    arguments: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(main_module, "_audit", lambda *_, **__: pytest.fail("Spark was started"))
    assert main(["run", *arguments, "--out", str(tmp_path / "runs")]) == Exit.JOB_ERROR
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


class Cluster:
    """Keeps what it was told to mark."""

    def __init__(self) -> None:
        self.marked: list[list[int]] = []
        self.dies = False

    def __call__(self, zookeeper: str, ledgers_root: str, proposals: list[Proposal], **_: object) -> Applied:
        if self.dies:
            raise KeyboardInterrupt
        self.marked.append([one.ledger_id for one in proposals])
        return Applied(marked=self.marked[-1], left={9: "it was deleted"})


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setattr(apply_module, "apply_to", cluster)
    monkeypatch.setattr(main_module, "_audit", lambda *_, **__: pytest.fail("a finished run was read again"))
    return cluster


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_finished_run_that_is_resumed_is_told_and_marked(
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
    assert not run.is_applied, "nobody knows what was marked"
    cluster.dies = False
    assert main([*words, "--apply", "--yes"]) == 1
    assert cluster.marked == [[7, 8]]
    assert run.read_json("applied.json") == {"already": [], "left": {"9": "it was deleted"}, "marked": [7, 8]}


# --- one at a time ----------------------------------------------------------------------------------------------------

HOLDER = """
import os, sys, time
from pathlib import Path
from bindery_spark.audit.run_lock import held
with held(Path(sys.argv[1]), pid=os.getpid(), warn=print):
    print("held", flush=True)
    time.sleep(60)
"""


def test_two_processes_are_not_at_one_run_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / FIRST)
    run.write_run({"options": asdict(Options())})
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(run.path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == b"held\n"
            with pytest.raises(Conflict, match=f"holder=pid {other.pid} on "), held(run.path, pid=1, warn=pytest.fail):
                pytest.fail("two hold it")
        finally:
            other.kill()
    with held(run.path, pid=os.getpid(), warn=pytest.fail):
        assert (run.path / LOCK).read_text().startswith(f"pid {os.getpid()} on ")
    assert run.is_begun


def test_the_command_names_who_is_at_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cluster: Cluster
) -> None:
    run = deep(tmp_path, FIRST, [])
    with held(run.path, pid=77, warn=pytest.fail):
        assert main(["run", "--resume", FIRST, "--out", str(tmp_path)]) == Exit.JOB_ERROR
    assert "holder=pid 77 on" in capsys.readouterr().err


def test_a_volume_without_locks_is_warned_of_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuses)
    warned: list[str] = []
    run = RunDirectory(tmp_path / FIRST)
    with held(run.path, pid=1, warn=warned.append):
        run.write_run({})
    assert "No locks available" in warned[0]
    assert run.is_begun


def test_a_run_that_was_never_begun_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(BadRequest), held(tmp_path / FIRST, pid=1, warn=pytest.fail):
        raise BadRequest("there is no cluster")
    assert list(tmp_path.iterdir()) == []
