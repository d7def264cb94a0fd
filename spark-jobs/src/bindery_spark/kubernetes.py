"""Entry point of the Spark image (`bindery-spark`). The first argument selects what the pod runs.

| argument  | meaning                                                                                   |
|-----------|-------------------------------------------------------------------------------------------|
| scheduled | an audit in a pod of a Job: a new run, or the run that another pod of the same Job began  |
| executor  | a Spark executor; Spark's Kubernetes scheduler passes its parameters in SPARK_* variables |
| others    | a subcommand of `bindery audit`, as in `bindery-spark show`                               |

A Job retries by starting another pod, and only the volume passes state from one pod to the next. A run is therefore
named after its Job: `<time>-<tag>`, where the tag is six hexadecimal digits of a hash of the Job's uid. A pod resumes
an unfinished run of its Job. It prints a finished run again, because the previous pod may have died before Kubernetes
received the exit code; with --apply it then also applies the proposed marks, unless the previous pod applied all of
them.

| variable of `scheduled` | meaning                                                                             |
|-------------------------|-------------------------------------------------------------------------------------|
| BINDERY_AUDIT_OUT       | the directory of all runs, on a volume                                              |
| BINDERY_AUDIT_JOB       | the Job's uid, from the label batch.kubernetes.io/controller-uid                    |
| BINDERY_AUDIT_KEEP      | number of runs to keep, this one included; older ones are deleted after it ends     |

The files NEWEST of the newest run are also copied to the directory of all runs.
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
"""Files of the newest finished run that are copied to the directory of all runs."""
KEEP_DEFAULT: Final = 10
"""Default number of runs to keep."""
KEEP_MIN: Final = 2
"""Minimum number of runs to keep: this run and the previous one, which has the time at which each finding was first
seen."""
POD_OPTIONS: Final = ("--apply", "--yes", "--cores=", "--json")
"""Options that a run does not store, so each pod passes them again when it resumes the run."""
RUN_NAME: Final = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")
"""Pattern of run ids: time at which the run began, and a tag."""
EXECUTOR_CLASS: Final = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"
"""Main class of Spark's executors on Kubernetes."""
EXECUTOR_ARGUMENTS: Final = {
    "--driver-url": "SPARK_DRIVER_URL",
    "--executor-id": "SPARK_EXECUTOR_ID",
    "--cores": "SPARK_EXECUTOR_CORES",
    "--app-id": "SPARK_APPLICATION_ID",
    "--hostname": "SPARK_EXECUTOR_POD_IP",
    "--resourceProfileId": "SPARK_RESOURCE_PROFILE_ID",
    "--podName": "SPARK_EXECUTOR_POD_NAME",
}
"""Options of Spark's executor, and the variables in which Spark's scheduler passes their values."""


def scheduled(
    arguments: Sequence[str], environment: Mapping[str, str], *, run: Callable[[Sequence[str]], int], now_s: float
) -> int:
    """Run the audit of this pod's Job and return the exit code. `arguments`: options of `bindery audit run`."""
    out = Path(environment.get("BINDERY_AUDIT_OUT", audit.OUT_DEFAULT))
    tag = job_tag(environment.get("BINDERY_AUDIT_JOB", ""))
    directory = run_of(out, tag) or RunDirectory(out / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(now_s))}-{tag}")
    code = run(audit_command(directory, arguments))
    if directory.is_finished:
        show_newest(directory, out)
        for name in outdated(names_of(out), keep=int(environment.get("BINDERY_AUDIT_KEEP", KEEP_DEFAULT))):
            shutil.rmtree(out / name, ignore_errors=True)
        if code:  # the last line of the log must be the verdict, also if --apply printed lines after the summary
            print((directory.path / "summary.txt").read_text().strip().splitlines()[-1], flush=True)
    return code


def job_tag(uid: str) -> str:
    """Six hexadecimal digits that identify a Job. Pods without a Job all have the same digits."""
    return hashlib.sha256(uid.encode()).hexdigest()[:6]


def run_of(out: Path, tag: str) -> RunDirectory | None:
    """Return the newest run that a Job with this tag began. Without a Job uid: the newest unfinished one."""
    named = [RunDirectory(out / name) for name in names_of(out) if name.endswith(f"-{tag}")]
    if tag == job_tag(""):
        named = [one for one in named if not one.is_finished]
    return named[-1] if named else None


def names_of(out: Path) -> list[str]:
    """Names of the runs in `out`, oldest first."""
    return sorted(path.name for path in out.iterdir() if RUN_NAME.fullmatch(path.name)) if out.is_dir() else []


def audit_command(directory: RunDirectory, arguments: Sequence[str]) -> list[str]:
    """Arguments of `bindery audit` that show a finished run, resume an unfinished one, or begin a new one. A finished
    run whose marks are not applied is resumed too: that prints it and applies the marks."""
    out = ["--out", str(directory.path.parent)]
    is_to_mark = "--apply" in arguments and not directory.is_applied
    if directory.is_finished and not is_to_mark:
        return ["show", directory.run_id, *out]
    if directory.is_finished or directory.is_begun:
        return ["run", "--resume", directory.run_id, *out, *(a for a in arguments if a.startswith(POD_OPTIONS))]
    return ["run", "--run-id", directory.run_id, *out, *arguments]


def outdated(names: Sequence[str], *, keep: int) -> list[str]:
    """Return the runs to delete, of `names`, which are sorted by time. Unfinished runs count like finished ones."""
    return list(names[: -max(keep, KEEP_MIN)])


def show_newest(directory: RunDirectory, out: Path) -> None:
    """Copy the NEWEST files of a run to `out`, each with an atomic rename."""
    for name in NEWEST:
        making = out / f".{name}.part"
        shutil.copyfile(directory.path / name, making)
        making.replace(out / name)


def executor_command(java_home: Path, environment: Mapping[str, str], *, spark_home: Path, log4j: Path) -> list[str]:
    """Return the command of an executor's JVM. Raises KeyError if a variable of Spark's scheduler is missing."""
    given = {name: value for name, value in environment.items() if name.startswith("SPARK_JAVA_OPT_")}
    options = [given[name] for name in sorted(given, key=lambda name: int(name.removeprefix("SPARK_JAVA_OPT_")))]
    classes = [environment.get("SPARK_CLASSPATH", ""), str(spark_home / "jars" / "*")]
    heap = environment["SPARK_EXECUTOR_MEMORY"]
    return [
        str(java_home / "bin" / "java"),
        f"-Dlog4j2.configurationFile={log4j.as_uri()}",
        *options,
        f"-Xms{heap}",
        f"-Xmx{heap}",
        "-cp",
        ":".join(filter(None, classes)),
        EXECUTOR_CLASS,
        *(word for option, name in EXECUTOR_ARGUMENTS.items() for word in (option, environment[name])),
    ]


def become_executor(environment: Mapping[str, str]) -> NoReturn:
    """Replace this process with the JVM, which then receives the container's signals and ends the container."""
    import pyspark

    from bindery_spark.java import java_home

    spark_home = Path(pyspark.__file__).parent
    home = java_home(environment)
    command = executor_command(home, environment, spark_home=spark_home, log4j=LOG4J)
    python = {"SPARK_HOME": str(spark_home), "JAVA_HOME": str(home), "PYSPARK_PYTHON": sys.executable}
    os.execve(command[0], command, {**environment, **python})  # noqa: S606 a shell is not needed


def interrupted(number: int, frame: FrameType | None) -> NoReturn:
    """End the pod and leave its run for the next pod. A handler is required because the kernel delivers only signals
    that have a handler to the first process of a container."""
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the first argument selects, and return the exit code."""
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
    except Exception as error:  # Python would exit with 1, the code of a verdict
        print(f"bindery: the audit failed: {type(error).__name__}: {error}", file=sys.stderr)
        return Exit.JOB_ERROR
    finally:
        stop()


if __name__ == "__main__":
    sys.exit(main())
