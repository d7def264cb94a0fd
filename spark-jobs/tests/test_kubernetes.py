"""Pods of the Spark image: which run they resume, which files stay on the volume, how executors start."""

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from bindery_core.errors import BadRequest
from bindery_spark import kubernetes
from bindery_spark.kubernetes import (
    NEWEST,
    RUN_NAME,
    executor_command,
    job_tag,
    main,
    names_of,
    outdated,
    run_of,
    scheduled,
)
from bindery_spark.session import conf_of, settings

DAY_S = 86_400
NOON_S = 1_772_366_400.0  # 2026-03-01 12:00 UTC
UID = "7c0f4a52-0b1e-4a0e-9f5d-1d0d4f6f4e11"


class Runs:
    """Replaces `bindery audit`: records the arguments and calls `does`, which writes files to the volume."""

    def __init__(self, out: Path, does: Callable[[Path], int]) -> None:
        self.out = out
        self.asked: list[list[str]] = []
        self._does = does

    def __call__(self, arguments: Sequence[str]) -> int:
        self.asked.append(list(arguments))
        name = (
            arguments[arguments.index("--run-id") + 1]
            if "--run-id" in arguments
            else arguments[2 if arguments[0] == "run" else 1]
        )
        return self._does(self.out / name)

    def pod(self, does: Callable[[Path], int], *arguments: str, uid: str = UID, now_s: float = NOON_S) -> int:
        self._does = does
        environment = {"BINDERY_AUDIT_OUT": str(self.out), "BINDERY_AUDIT_JOB": uid, "BINDERY_AUDIT_KEEP": "3"}
        return scheduled(arguments, environment, run=self, now_s=now_s)


def dies_at_once(path: Path) -> int:
    return 137


def dies_in_the_middle(path: Path) -> int:
    (path / "checkpoint").mkdir(parents=True, exist_ok=True)
    (path / "checkpoint" / "run.json").write_text("{}")
    return 137


def ends(code: int) -> Callable[[Path], int]:
    def does(path: Path) -> int:
        dies_in_the_middle(path)
        for name in NEWEST:
            (path / name).write_text(f"{name} of {path.name}")
        return code

    return does


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path, dies_at_once)


def test_a_new_job_begins_a_run_named_after_it(runs: Runs) -> None:
    assert runs.pod(ends(0), "--level=quick") == 0
    name = f"20260301T120000Z-{job_tag(UID)}"
    assert runs.asked == [["run", "--run-id", name, "--out", str(runs.out), "--level=quick"]]
    assert names_of(runs.out) == [name]


def test_the_next_pod_of_a_job_resumes_its_run_with_pod_options(runs: Runs) -> None:
    runs.pod(dies_in_the_middle, "--level=quick")
    given = ("--level=quick", "--cores=3", "--apply", "--yes")
    assert runs.pod(ends(1), *given, now_s=NOON_S + 60) == 1
    name = f"20260301T120000Z-{job_tag(UID)}"
    assert runs.asked[1] == ["run", "--resume", name, "--out", str(runs.out), "--cores=3", "--apply", "--yes"]


def test_a_run_without_a_plan_is_begun_again(runs: Runs) -> None:
    runs.pod(dies_at_once)
    (runs.out / f"20260301T120000Z-{job_tag(UID)}").mkdir()
    runs.pod(ends(0), now_s=NOON_S + 60)
    assert runs.asked[1][:3] == ["run", "--run-id", f"20260301T120000Z-{job_tag(UID)}"]


def test_a_finished_run_of_the_same_job_is_shown_again(runs: Runs) -> None:
    runs.pod(ends(2))
    assert runs.pod(ends(2), now_s=NOON_S + 60) == 2
    assert runs.asked[1] == ["show", f"20260301T120000Z-{job_tag(UID)}", "--out", str(runs.out)]


def test_the_next_pod_applies_marks_that_the_previous_pod_did_not_apply(runs: Runs) -> None:
    given = ("--level=quick", "--apply", "--yes")
    runs.pod(ends(1), *given)
    assert runs.pod(ends(1), *given, now_s=NOON_S + 60) == 1
    name = f"20260301T120000Z-{job_tag(UID)}"
    assert runs.asked[1] == ["run", "--resume", name, "--out", str(runs.out), "--apply", "--yes"]
    (runs.out / name / "applied.json").write_text("{}")
    runs.pod(ends(1), *given, now_s=NOON_S + 120)
    assert runs.asked[2] == ["show", name, "--out", str(runs.out)]


def test_a_job_does_not_resume_the_run_of_another_job(runs: Runs) -> None:
    runs.pod(dies_in_the_middle, uid="first")
    runs.pod(ends(0), uid="second", now_s=NOON_S + DAY_S)
    assert runs.asked[1][:3] == ["run", "--run-id", f"20260302T120000Z-{job_tag('second')}"]
    assert run_of(runs.out, job_tag("first")) is not None


def test_without_a_job_only_an_unfinished_run_is_resumed(runs: Runs) -> None:
    runs.pod(dies_in_the_middle, uid="")
    runs.pod(ends(0), uid="", now_s=NOON_S + 60)
    runs.pod(ends(0), uid="", now_s=NOON_S + 120)
    assert [arguments[1] for arguments in runs.asked] == ["--run-id", "--resume", "--run-id"]


def test_only_runs_beyond_the_limit_are_deleted(runs: Runs) -> None:
    (runs.out / "lost+found").mkdir()
    for day in range(5):
        runs.pod(ends(0), uid=f"job {day}", now_s=NOON_S + day * DAY_S)
    assert [name[:8] for name in names_of(runs.out)] == ["20260303", "20260304", "20260305"]
    assert (runs.out / "lost+found").is_dir()
    assert outdated(["a", "b", "c"], keep=0) == ["a"], "each run is compared with the previous one"


def test_a_run_without_a_verdict_deletes_nothing(runs: Runs) -> None:
    for day in range(5):
        runs.pod(dies_in_the_middle, uid=f"job {day}", now_s=NOON_S + day * DAY_S)
    assert len(names_of(runs.out)) == 5


def test_the_files_of_the_newest_run_are_copied_beside_the_runs(runs: Runs) -> None:
    runs.pod(ends(0), uid="one")
    runs.pod(ends(1), uid="two", now_s=NOON_S + DAY_S)
    newest = names_of(runs.out)[-1]
    assert {name: (runs.out / name).read_text() for name in NEWEST} == {n: f"{n} of {newest}" for n in NEWEST}
    runs.pod(dies_in_the_middle, uid="three", now_s=NOON_S + 2 * DAY_S)
    assert newest in (runs.out / "summary.txt").read_text()


def test_the_log_ends_with_a_verdict_that_is_not_healthy(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.pod(ends(0), uid="one")
    assert capsys.readouterr().out == ""
    runs.pod(ends(1), uid="two", now_s=NOON_S + DAY_S)
    assert capsys.readouterr().out == f"summary.txt of {names_of(runs.out)[-1]}\n"


def test_runs_of_jobs_are_named_like_runs_of_the_command() -> None:
    assert RUN_NAME.fullmatch("20260301T020000Z-1f2e3d")
    assert not RUN_NAME.fullmatch("summary.txt")


EXECUTOR = {
    "SPARK_DRIVER_URL": "spark://driver:7078",
    "SPARK_EXECUTOR_ID": "3",
    "SPARK_EXECUTOR_CORES": "1",
    "SPARK_EXECUTOR_MEMORY": "512m",
    "SPARK_APPLICATION_ID": "spark-1",
    "SPARK_EXECUTOR_POD_IP": "10.0.0.7",
    "SPARK_RESOURCE_PROFILE_ID": "0",
    "SPARK_EXECUTOR_POD_NAME": "audit-exec-3",
}


def test_an_executor_gets_the_parameters_of_sparks_scheduler() -> None:
    options = {f"SPARK_JAVA_OPT_{number}": f"-Dnumber={number}" for number in (10, 2, 0)}
    command = executor_command(
        Path("/java"), {**EXECUTOR, **options}, spark_home=Path("/spark"), log4j=Path("/log4j2.properties")
    )
    assert command[0] == "/java/bin/java"
    assert [word for word in command if word.startswith("-Dnumber")] == ["-Dnumber=0", "-Dnumber=2", "-Dnumber=10"]
    assert command[command.index("-cp") + 1] == "/spark/jars/*"
    assert {"-Xms512m", "-Xmx512m"} <= set(command)
    at = command.index("org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend")
    passed = dict(zip(command[at + 1 :: 2], command[at + 2 :: 2], strict=True))
    assert passed == {
        "--driver-url": "spark://driver:7078",
        "--executor-id": "3",
        "--cores": "1",
        "--app-id": "spark-1",
        "--hostname": "10.0.0.7",
        "--resourceProfileId": "0",
        "--podName": "audit-exec-3",
    }


def test_an_executor_without_sparks_variables_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SPARK_EXECUTOR_MEMORY", raising=False)
    assert main(["executor"]) == 4
    assert "SPARK_EXECUTOR_MEMORY is not set" in capsys.readouterr().err


def test_an_unexpected_failure_has_the_exit_code_of_a_job_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python's exit code after an error is 1, which is the code of a verdict."""

    def fail(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kubernetes, "scheduled", fail)
    monkeypatch.setattr(kubernetes, "stop", lambda: None)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["scheduled"]) == 4
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "No space left on device" in capsys.readouterr().err


def test_other_arguments_are_passed_to_bindery_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(kubernetes.audit, "main", lambda arguments: asked.append(list(arguments)) or 3)
    assert main(["show", "x"]) == 3
    assert asked == [["show", "x"]]


def test_settings_of_the_environment_take_precedence() -> None:
    conf = conf_of({"BINDERY_SPARK_CONF": json.dumps({"spark.master": "k8s://https://api:443"})})
    chosen = settings(2, conf)
    assert chosen["spark.master"] == "k8s://https://api:443"
    assert chosen["spark.ui.enabled"] == "false"
    assert conf_of({}) == {}


@pytest.mark.parametrize("text", ["x", "[]", '{"spark.driver.port": 7078}'])
def test_settings_that_are_not_texts_are_rejected(text: str) -> None:
    with pytest.raises(BadRequest, match="BINDERY_SPARK_CONF must be a JSON object"):
        conf_of({"BINDERY_SPARK_CONF": text})


def test_without_a_setting_ten_runs_are_kept(runs: Runs) -> None:
    for day in range(12):
        (runs.out / f"202602{day + 1:02}T120000Z-abcdef" / "checkpoint").mkdir(parents=True)
    runs._does = ends(0)
    assert scheduled([], {"BINDERY_AUDIT_OUT": str(runs.out), "BINDERY_AUDIT_JOB": UID}, run=runs, now_s=NOON_S) == 0
    assert len(names_of(runs.out)) == 10


def test_a_run_that_cannot_be_deleted_does_not_change_the_verdict(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise OSError("busy")

    for day in range(3):
        runs.pod(ends(0), uid=f"job {day}", now_s=NOON_S + day * DAY_S)
    monkeypatch.setattr("os.rmdir", refuses)
    assert runs.pod(ends(2), uid="job 9", now_s=NOON_S + 9 * DAY_S) == 2


def test_the_verdict_is_printed_as_soon_as_the_run_has_ended(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes may kill the pod before Python writes its buffers."""
    seen = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(seen, write_through=False))

    def summary(path: Path) -> int:
        code = ends(1)(path)
        (path / "summary.txt").write_text("first line\n\nbindery c-1 is UNDER-REPLICATED\n")
        return code

    runs.pod(summary)
    assert seen.getvalue() == b"bindery c-1 is UNDER-REPLICATED\n"


def test_the_newest_run_of_a_job_is_resumed(runs: Runs) -> None:
    for name in (f"20260301T120000Z-{job_tag(UID)}", f"20260302T120000Z-{job_tag(UID)}"):
        dies_in_the_middle(runs.out / name)
    found = run_of(runs.out, job_tag(UID))
    assert found is not None
    assert found.run_id.startswith("20260302")


@pytest.fixture
def in_pod(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Calls of `stop`, and the handler of SIGTERM as it was."""
    stopped: list[object] = []
    monkeypatch.setattr(kubernetes, "stop", lambda: stopped.append("stopped"))
    before = signal.getsignal(signal.SIGTERM)
    yield stopped
    signal.signal(signal.SIGTERM, before)


def test_a_scheduled_pod_runs_the_audit_with_the_rest_of_its_arguments(
    monkeypatch: pytest.MonkeyPatch, in_pod: list[object]
) -> None:
    asked: list[object] = []

    def audited(arguments: Sequence[str], environment: object, *, run: object, now_s: float) -> int:
        asked.extend((list(arguments), run, now_s))
        return 1

    monkeypatch.setattr(kubernetes, "scheduled", audited)
    monkeypatch.setattr(kubernetes.time, "time", lambda: 7.0)
    assert main(["scheduled", "--level=quick", "--json"]) == 1
    assert asked == [["--level=quick", "--json"], kubernetes.audit.main, 7.0]
    assert in_pod == ["stopped"], "executors end with the driver"
    monkeypatch.setattr("sys.argv", ["bindery-spark", "scheduled", "--apply"])
    assert main() == 1
    assert asked[3] == ["--apply"]


def test_a_pod_that_is_terminated_has_the_exit_code_of_an_interruption(
    monkeypatch: pytest.MonkeyPatch, in_pod: list[object]
) -> None:
    def terminated(*_: object, **__: object) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    monkeypatch.setattr(kubernetes, "scheduled", terminated)
    assert main(["scheduled"]) == 130
    assert in_pod == ["stopped"]


def test_an_executor_replaces_the_process_with_its_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    class Replaced(BaseException):
        pass

    calls: list[tuple[str, list[str], dict[str, str]]] = []

    def execve(path: str, command: list[str], environment: dict[str, str]) -> None:
        calls.append((path, command, environment))
        raise Replaced

    monkeypatch.setattr(kubernetes.os, "execve", execve)
    monkeypatch.setattr("bindery_spark.java.java_home", lambda _: Path("/java"))
    for name, value in EXECUTOR.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Replaced):
        main(["executor"])
    ((path, command, environment),) = calls
    assert path == command[0] == "/java/bin/java"
    assert (environment["JAVA_HOME"], environment["PYSPARK_PYTHON"]) == ("/java", sys.executable)
    assert environment["SPARK_EXECUTOR_ID"] == "3"
    assert Path(environment["SPARK_HOME"]).name == "pyspark"
