"""Run every check that must hold on a clean clone, and end with a table of targets, counts of tests and times.

Three lanes share the machine:

- *cluster*: from the beginning, start Kubernetes and build and load the images (at low priority); then wait for *go*.
- *main*: `make setup`, `lint`, `types`, `test`, one after the other. Then it gives the cluster lane its *go*.
- *beside*: while the tests on Kubernetes run, which wait most of the time, everything else. `healing` is first: it
  measures times, and the first tests on Kubernetes use little processor time.

The first failure ends the run. One seed, the time of the commit, selects the samples (faults, tests of pods, a third
of the tests with the marker `long_run`, Pulsar's load manager, the kill test's moments), so a run of the same commit
repeats them. `make test`, `make e2e`, `make audit-pods`, `make chaos` and `make sim-ci` by themselves run in full.
The seed also selects one of each pair of `PAIRS`, because each of them takes minutes; the table names what was left
out.

The table has the wall-clock and the processor time of each target. Processor time is that of processes that have ended
and were waited for: Kubernetes' pods and daemons are not included.

Nothing that failed is run again. A target of pytest must also have run every test that it collected.
"""

import contextlib
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
END_TIMEOUT_S = 180.0
"""Maximum time in seconds that ended processes may take to clean up. Stopping the cluster takes most of it."""
COUNTS = re.compile(
    r"^(?:=+ )?[0-9]+ (?:passed|failed).*|^[0-9,]+ (?:protocol histories|service seeds|topics seeds|crash points"
    r"|damaged files|.*frames|requests in|messages of).*|^GOOD: .*"
)
FAILURES = re.compile(r"^(?:FAILED|ERROR) .*|^E  .*|^make: \*\*\*.*")
FAILURE_LINES_MAX = 60
HEARTBEAT_S = 60.0
DEADLINE_S = 88 * 60.0
"""Maximum duration of the run in seconds. A step that hangs fails after this time."""


@dataclass
class Step:
    """A make target. `options` go to pytest or to the tool that the target runs."""

    target: str
    options: str = ""
    is_pytest: bool = False
    nice: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    variables: tuple[str, ...] = ()
    """Variables of make, as `NAME=value`."""


def main_steps() -> list[Step]:
    return [
        Step("setup"),
        Step("lint"),
        Step("types"),
        Step("test", is_pytest=True),
    ]


PAIRS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("audit-truth",), ("audit-pods", "spark-kills")),
    (("interop",), ("interop-admin", "interop-beside")),
)
"""Pairs of groups of targets. A run has one group of each pair, chosen by its seed."""


def left_out(seed: int) -> set[str]:
    """Targets of `beside_steps` that are not in the run of this seed. Each combination is as likely as the others."""
    bits = int(hashlib.sha256(str(seed).encode()).hexdigest(), 16)
    return {target for number, pair in enumerate(PAIRS) for target in pair[bits >> number & 1]}


def beside_steps(seed: int) -> list[Step]:
    return [
        Step("healing", is_pytest=True),
        Step("chart", is_pytest=True, nice=5),
        Step("audit-truth", is_pytest=True, nice=5),
        Step("interop", is_pytest=True),
        Step("interop-admin", is_pytest=True),
        Step("interop-beside", is_pytest=True),
        Step("audit-pods", is_pytest=True, nice=5, environment={"BINDERY_CI_SAMPLE": str(seed)}),
        Step("browser", is_pytest=True),
        Step("storage-ci", nice=5, variables=("STORAGE_SECONDS=20",)),
        Step("fuzz", f"--seconds 12 --seed {seed}", nice=5),
        Step("fuzz-http", f"--seconds 12 --seed {seed}", nice=5),
        Step("sim-ci", nice=5, variables=("SIM_SECONDS=25",)),
        Step("attacks", is_pytest=True),
        Step("spark-kills", f"--kills 1 --per-round 1200 --partitions 2 --without-totals --seed {seed}"),
        Step("ordering", variables=("SECONDS=20", f"SEED={seed}")),
    ]


class CheckFailed(Exception):
    pass


class Pipeline:
    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.seed = seed
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._running: dict[int, tuple[str, float]] = {}
        self._busy_at_start = machine_busy_s()
        self.rows: list[tuple[str, str, str, str]] = []
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / ".ci"), os.environ.get("PYTHONPATH")])),
            "BINDERY_KILL_SEED": os.environ.get("BINDERY_KILL_SEED", str(seed)),
            "E2E_SAMPLE": os.environ.get("E2E_SAMPLE", str(seed)),
        }

    # --- processes ----------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        with self._lock:
            print(text, flush=True)

    def start(self, command: list[str], log: Path, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        """Start the command in a process group of its own, so that it can be ended with all of its children."""
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        with self._lock:
            self._processes.append(process)
            self._running[process.pid] = (shlex.join(command), time.monotonic())
        return process

    def wait(self, process: "subprocess.Popen[bytes]") -> tuple[int, float]:
        """Exit code, and processor time in seconds of the process and of all children that it waited for."""
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except ChildProcessError:  # wait_ended was first: the run has failed
            code, cpu_s = process.wait(), 0.0
        else:
            code = process.returncode = os.waitstatus_to_exitcode(status)
            cpu_s = usage.ru_utime + usage.ru_stime
        with self._lock:
            self._running.pop(process.pid, None)
        return code, cpu_s

    def end_all(self) -> None:
        """Send SIGTERM to all steps that still run. They then clean up, and the cluster lane stops its cluster."""
        with self._lock:
            pids = list(self._running)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGTERM)

    def wait_ended(self) -> None:
        deadline = time.monotonic() + END_TIMEOUT_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    # --- steps --------------------------------------------------------------------------------------------------------

    def run(self, step: Step) -> None:
        began = time.monotonic()
        self.say(f"=== make {step.target} begins at {began - self._began:.0f} s")
        code, log, outcome, cpu_s = self._make(step)
        if code:
            raise CheckFailed(f"make {step.target} failed after {time.monotonic() - began:.0f} s")
        if step.is_pytest and (outcome is None or not outcome["complete"] or not outcome["passed"]):
            raise CheckFailed(f"make {step.target} ended with 0 without having run every test that it collected")
        self._row(step, log, outcome, time.monotonic() - began, cpu_s)

    def _make(self, step: Step) -> tuple[int, Path, dict[str, Any] | None, float]:
        """Exit code, log, recorded outcome of pytest, processor time in seconds."""
        log, record = self.folder / f"{step.target}.log", self.folder / f"{step.target}.json"
        options = [step.options]
        environment = {**self.environment, **step.environment}
        if step.is_pytest:
            options += ["-p ci_outcome", f"-o cache_dir={self.folder / step.target}-cache"]
            environment["BINDERY_CI_OUTCOME"] = str(record)
        command = ["nice", f"-n{step.nice}"] if step.nice else []
        command += ["make", step.target, *step.variables, f"ARGS={' '.join(filter(None, options))}"]
        code, cpu_s = self.wait(self.start(command, log, environment))
        self.show(step.target, log)
        return code, log, json.loads(record.read_text()) if record.exists() else None, cpu_s

    def show(self, name: str, log: Path) -> None:
        text = log.read_text(errors="replace")
        self.say(f"\n=== output of make {name}\n{text}")

    def _row(
        self, step: Step, log: Path, outcome: Mapping[str, Any] | None, seconds: float, cpu_s: float, notes: str = ""
    ) -> None:
        if outcome is not None:
            counts = f"{outcome['passed']} tests"
            if outcome["skipped"]:
                counts += f", {outcome['skipped']} skipped"
        else:
            lines = log.read_text(errors="replace").splitlines()
            counts = "; ".join(line.strip("= ") for line in lines if COUNTS.match(line))
        with self._lock:
            found = "; ".join(filter(None, [counts, notes]))
            self.rows.append((step.target, f"{seconds:.0f} s", f"{cpu_s:.0f} s", found))
        self.say(f"=== make {step.target}: {seconds:.0f} s")

    # --- the cluster lane ---------------------------------------------------------------------------------------------

    def start_cluster(self) -> "subprocess.Popen[bytes]":
        environment = {
            **self.environment,
            "BINDERY_CI_PID": str(os.getpid()),
            "BINDERY_CI_OUTCOME": str(self.folder / "e2e.json"),
        }
        return self.start([".ci/with-cluster", ".ci/e2e", str(self.folder)], self.folder / "e2e.log", environment)

    def check_cluster(self, process: "subprocess.Popen[bytes]") -> None:
        """Raise as soon as the cluster lane has failed, also before its tests have begun."""
        if process.poll():
            self.show("e2e", self.folder / "e2e.log")
            raise CheckFailed(f"the cluster or its images could not be made, or make e2e failed ({process.returncode})")

    def finish_cluster(self, process: "subprocess.Popen[bytes]", began: float) -> None:
        code, cpu_s = self.wait(process)
        log, record = self.folder / "e2e.log", self.folder / "e2e.json"
        outcome = json.loads(record.read_text()) if record.exists() else None
        if code:
            self.show("e2e", log)
            raise CheckFailed(f"make e2e failed after {time.monotonic() - began:.0f} s")
        if outcome is None or not outcome["complete"]:
            self.show("e2e", log)
            raise CheckFailed("make e2e ended without having run every test that it collected")
        self.show("e2e", log)
        notes = f"sample {self.environment['E2E_SAMPLE']}"
        self._row(Step("e2e"), log, outcome, time.monotonic() - began, cpu_s, notes)

    # --- the whole ----------------------------------------------------------------------------------------------------

    def play(self) -> None:
        cluster = self.start_cluster()
        for step in main_steps():
            self.run(step)
            if step.target == "setup":
                (self.folder / "setup-done").touch()
            self.check_cluster(cluster)
        (self.folder / "go").touch()
        went = time.monotonic()
        problems: list[BaseException] = []

        def guarded(work: Callable[[], None]) -> None:
            try:
                work()
            except BaseException as error:
                problems.append(error)
                self.end_all()

        def beside() -> None:
            absent = left_out(self.seed)
            for step in beside_steps(self.seed):
                if problems:
                    return
                if step.target in absent:
                    with self._lock:
                        self.rows.append((step.target, "-", "-", f"left out, sample {self.seed}"))
                else:
                    self.run(step)

        lanes = [
            threading.Thread(target=guarded, args=(beside,), daemon=True),
            threading.Thread(target=guarded, args=(lambda: self.finish_cluster(cluster, went),), daemon=True),
        ]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
        if problems:
            raise problems[0]

    def heartbeat(self) -> None:
        while True:
            time.sleep(HEARTBEAT_S)
            now = time.monotonic()
            with self._lock:
                running = [f"{command} for {now - since:.0f} s" for command, since in self._running.values()]
            self.say(f"... {now - self._began:.0f} s; running: {'; '.join(running)}")

    def table(self) -> str:
        rows = [("target", "wall", "CPU", "result"), *self.rows]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            f"  {target:{widths[0]}}  {wall:>{widths[1]}}  {cpu:>{widths[2]}}  {found}"
            for target, wall, cpu, found in rows
        ]
        wall_s = time.monotonic() - self._began
        busy = (machine_busy_s() - self._busy_at_start) / (wall_s * (os.cpu_count() or 1))
        return "\n".join([*lines, f"  all: {wall_s:.0f} s, the machine's processors {busy:.0%} busy, seed {self.seed}"])

    def failures(self) -> str:
        """The lines of all logs that report failures, for the end of the output."""
        found: list[str] = []
        for log in sorted(self.folder.glob("*.log")):
            lines = [line[:400] for line in log.read_text(errors="replace").splitlines() if FAILURES.match(line)]
            if lines:
                found += [f"--- {log.stem}", *lines[-FAILURE_LINES_MAX:]]
        return "\n".join(found)


def machine_busy_s() -> float:
    """Processor time in seconds that all processes of the machine have used since its start; 0 where it is unknown."""
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    idle, waiting = int(words[3]), int(words[4])
    return (sum(map(int, words[:8])) - idle - waiting) / os.sysconf("SC_CLK_TCK")


def commit_time() -> int:
    done = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False)
    return int(done.stdout or 0)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="bindery-ci-") as folder:
        pipeline = Pipeline(Path(folder), commit_time())

        def stopped(*_: object) -> None:
            raise KeyboardInterrupt

        def late(*_: object) -> None:
            raise CheckFailed(f"not finished after {DEADLINE_S:.0f} s")

        signal.signal(signal.SIGTERM, stopped)
        signal.signal(signal.SIGHUP, stopped)
        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
        threading.Thread(target=pipeline.heartbeat, daemon=True).start()
        try:
            pipeline.play()
        except BaseException as error:
            # The steps have sessions of their own, so nothing else would end them.
            for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            pipeline.end_all()
            pipeline.wait_ended()
            with contextlib.suppress(OSError, ValueError):
                pipeline.say(f"\n{pipeline.failures()}\n\n=== FAILED: {str(error) or 'stopped'}\n{pipeline.table()}")
            if not isinstance(error, CheckFailed | KeyboardInterrupt):
                raise
            return 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        pipeline.say(f"\n=== every check holds\n{pipeline.table()}")
        return 0


if __name__ == "__main__":
    sys.exit(main())
