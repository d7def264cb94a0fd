"""The lock of a run's directory: only one process works on a run."""

import errno
import fcntl
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from bindery_core.errors import BadRequest, Conflict
from bindery_spark import main as main_module
from bindery_spark.audit import apply as apply_module
from bindery_spark.audit.checkpoint import RunDirectory
from bindery_spark.audit.findings.findings import Exit
from bindery_spark.audit.options import Options
from bindery_spark.main import main
from bindery_spark.run_lock import LOCK, held
from finished_runs import Cluster, deep

FIRST, SECOND, THIRD = (f"2026010{n}T000000Z-abcdef" for n in (1, 2, 3))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setattr(apply_module, "apply_to", cluster)
    monkeypatch.setattr(main_module, "_audit", lambda *_, **__: pytest.fail("a finished run was read again"))
    return cluster


HOLDER = """
import os, sys, time
from pathlib import Path
from bindery_spark.run_lock import held
with held(Path(sys.argv[1]), pid=os.getpid(), warn=print):
    print("held", flush=True)
    time.sleep(60)
"""


def test_only_one_process_holds_a_run_and_a_killed_process_releases_it(tmp_path: Path) -> None:
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


def test_the_error_names_the_process_that_holds_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cluster: Cluster
) -> None:
    run = deep(tmp_path, FIRST, [])
    with held(run.path, pid=77, warn=pytest.fail):
        assert main(["run", "--resume", FIRST, "--out", str(tmp_path)]) == Exit.JOB_ERROR
    assert "holder=pid 77 on" in capsys.readouterr().err


def test_a_volume_without_locks_is_used_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuses)
    warned: list[str] = []
    run = RunDirectory(tmp_path / FIRST)
    with held(run.path, pid=1, warn=warned.append):
        run.write_run({})
    assert "No locks available" in warned[0]
    assert run.is_begun


def test_a_run_that_did_not_begin_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(BadRequest), held(tmp_path / FIRST, pid=1, warn=pytest.fail):
        raise BadRequest("there is no cluster")
    assert list(tmp_path.iterdir()) == []
