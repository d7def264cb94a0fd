"""What a pod of the Spark image does, by its first argument (`bindery-spark`).

| argument  | is                                                                                                |
|-----------|---------------------------------------------------------------------------------------------------|
| scheduled | an audit as a Job's pod runs it: begun, or gone on with where a pod of the same Job left off       |
| executor  | an executor, as Spark's scheduler for Kubernetes asks for one: everything else is in SPARK_...     |
| others    | the verbs of `bindery audit`: `bindery-spark show`                                                |

A Job tries again by starting another pod, which knows nothing of the one before but what lies on the volume. So a run
is called after its Job: `<time>-<six hexadecimal digits of the Job's uid>`. A pod that finds a run of its Job goes on
with it; one that is finished is told again, for the pod may have died before Kubernetes heard the exit code. With
--apply what it proposes is marked then, unless the pod before came to the end of that.

| variable of `scheduled` | is                                                                                  |
|-------------------------|-------------------------------------------------------------------------------------|
| BINDERY_AUDIT_OUT       | the directory of all runs, on a volume                                              |
| BINDERY_AUDIT_JOB       | the Job's uid, from the label batch.kubernetes.io/controller-uid                    |
| BINDERY_AUDIT_KEEP      | runs that stay, this one among them; older ones are deleted when it has ended       |

The newest run's NEWEST files also stand beside the runs.
"""

import hashlib
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from bindery_spark import main as audit
from bindery_spark.arguments import EXIT_INTERRUPTED
from bindery_spark.audit.checkpoint import RunDirectory
from bindery_spark.audit.findings.findings import Exit
from bindery_spark.session import LOG4J, stop

NEWEST: Final = ("report.html", "summary.txt", "summary.json", "metrics.prom")
KEEP_DEFAULT: Final = 10
KEEP_MIN: Final = 2
"""This run, and the one before it: since when something is seen is carried on from there."""
OF_EACH_POD: Final = ("--apply", "--yes", "--cores=", "--json")
"""Options that a resumed run does not know from its beginning."""
RUN_NAME: Final = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")
EXECUTOR_CLASS: Final = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"
EXECUTOR_ARGUMENTS: Final = {
    "--driver-url": "SPARK_DRIVER_URL",
    "--executor-id": "SPARK_EXECUTOR_ID",
    "--cores": "SPARK_EXECUTOR_CORES",
    "--app-id": "SPARK_APPLICATION_ID",
    "--hostname": "SPARK_EXECUTOR_POD_IP",
    "--resourceProfileId": "SPARK_RESOURCE_PROFILE_ID",
    "--podName": "SPARK_EXECUTOR_POD_NAME",
}
"""Of Spark's executor: the variable that Spark's scheduler tells each in."""


def scheduled(
    arguments: Sequence[str], environment: Mapping[str, str], *, run: Callable[[Sequence[str]], int], now_s: float
) -> int:
    """An audit of this pod's Job; the exit code. `arguments`: options of `bindery audit run`, for a new run."""
    out = Path(environment.get("BINDERY_AUDIT_OUT", audit.OUT_DEFAULT))
    tag = job_tag(environment.get("BINDERY_AUDIT_JOB", ""))
    directory = run_of(out, tag) or RunDirectory(out / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(now_s))}-{tag}")
    code = run(words(directory, arguments))
    if directory.is_finished:
        show_newest(directory, out)
        for name in outdated(names_of(out), keep=int(environment.get("BINDERY_AUDIT_KEEP", KEEP_DEFAULT))):
            shutil.rmtree(out / name, ignore_errors=True)
        if code:  # the last line of the log is the verdict, whatever was said of marks after the summary
            print((directory.path / "summary.txt").read_text().strip().splitlines()[-1], flush=True)
    return code


def job_tag(uid: str) -> str:
    """Six digits that stand for a Job; of no Job: always the same."""
    return hashlib.sha256(uid.encode()).hexdigest()[:6]


def run_of(out: Path, tag: str) -> RunDirectory | None:
    """The newest run that a Job with this tag began. Without a uid of the Job its last one that is not finished."""
    named = [RunDirectory(out / name) for name in names_of(out) if name.endswith(f"-{tag}")]
    if tag == job_tag(""):
        named = [one for one in named if not one.is_finished]
    return named[-1] if named else None


def names_of(out: Path) -> list[str]:
    """Of runs in `out`, oldest first."""
    return sorted(path.name for path in out.iterdir() if RUN_NAME.fullmatch(path.name)) if out.is_dir() else []


def words(directory: RunDirectory, arguments: Sequence[str]) -> list[str]:
    """What `bindery audit` is asked: to tell a finished run, to go on with one, or to begin it. A finished run that is
    gone on with is told, and marked."""
    out = ["--out", str(directory.path.parent)]
    is_to_mark = "--apply" in arguments and not directory.is_applied
    if directory.is_finished and not is_to_mark:
        return ["show", directory.run_id, *out]
    if directory.is_finished or directory.is_begun:
        return ["run", "--resume", directory.run_id, *out, *(a for a in arguments if a.startswith(OF_EACH_POD))]
    return ["run", "--run-id", directory.run_id, *out, *arguments]


def outdated(names: Sequence[str], *, keep: int) -> list[str]:
    """Those to delete, of names that are sorted by time. A run that never ended goes as others do."""
    return list(names[: -max(keep, KEEP_MIN)])


def show_newest(directory: RunDirectory, out: Path) -> None:
    """Copies of its files beside the runs, each all or nothing."""
    for name in NEWEST:
        making = out / f".{name}.part"
        shutil.copyfile(directory.path / name, making)
        making.replace(out / name)


def executor_command(java_home: Path, environment: Mapping[str, str], *, spark_home: Path, log4j: Path) -> list[str]:
    """The JVM of an executor. Raises KeyError for what Spark's scheduler always sets."""
    given = {name: value for name, value in environment.items() if name.startswith("SPARK_JAVA_OPT_")}
    options = [given[name] for name in sorted(given, key=lambda name: int(name.removeprefix("SPARK_JAVA_OPT_")))]
    classes = [environment.get("SPARK_CLASSPATH", ""), str(spark_home / "jars" / "*")]
    heap = environment["SPARK_EXECUTOR_MEMORY"]
    return [
        str(java_home / "bin" / "java"), f"-Dlog4j2.configurationFile={log4j.as_uri()}", *options,
        f"-Xms{heap}", f"-Xmx{heap}", "-cp", ":".join(filter(None, classes)), EXECUTOR_CLASS,
        *(word for option, name in EXECUTOR_ARGUMENTS.items() for word in (option, environment[name])),
    ]  # fmt: skip


def become_executor(environment: Mapping[str, str]) -> NoReturn:
    """This process is Java from here on: signals reach it, and its end is the container's."""
    import pyspark

    from bindery_spark.java import java_home

    spark_home = Path(pyspark.__file__).parent
    home = java_home(environment)
    command = executor_command(home, environment, spark_home=spark_home, log4j=LOG4J)
    python = {"SPARK_HOME": str(spark_home), "JAVA_HOME": str(home), "PYSPARK_PYTHON": sys.executable}
    os.execve(command[0], command, {**environment, **python})  # noqa: S606 no shell is wanted


def interrupted(number: int, frame: FrameType | None) -> NoReturn:
    """A pod that has to go leaves its run for the next one. The first process of a container has no other way out:
    signals without a handler do not reach it."""
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["executor"]:
        try:
            become_executor(os.environ)
        except KeyError as error:
            print(f"bindery: {error.args[0]} is not set: Spark's scheduler starts executors", file=sys.stderr)
            return Exit.JOB_ERROR
    if given[:1] != ["scheduled"]:
        return audit.main(given)
    signal.signal(signal.SIGTERM, interrupted)
    try:
        return scheduled(given[1:], os.environ, run=audit.main, now_s=time.time())
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:  # Python's own exit code, 1, would be taken for a verdict
        print(f"bindery: the audit failed: {type(error).__name__}: {error}", file=sys.stderr)
        return Exit.JOB_ERROR
    finally:
        stop()


if __name__ == "__main__":
    sys.exit(main())
