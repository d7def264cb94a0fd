"""The pods of an audit without Kubernetes: the processes of the chart's Jobs, with the variables that the chart sets.

Drivers are `bindery-spark scheduled`, executors `bindery-spark executor` with the variables that Spark's scheduler for
Kubernetes sets. The driver creates a local cluster whose only worker is too small for any executor, so the only
executors are those that the test starts, like pods. A killed executor is replaced by one with another number.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bindery.standalone.throwaway import ThrowawayCluster
from bindery_spark.kubernetes import job_tag, names_of
from bindery_spark.session import JVM_OPTIONS

from e2e.audit.test_command import ENTRIES, LEDGERS, run, write

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]
POD = [sys.executable, "-m", "bindery_spark.kubernetes"]
HOLE = Path(__file__).parents[1] / "kubernetes" / "put_hole.py"
WAIT_S = 300.0
RATE = "--rate=64KiB/s"
SECRET = "known-to-driver-and-executors"
LEDGER_COPIES_BYTES = 3 * ENTRIES * 1000


def until(condition: Callable[[], bool], what: str, process: subprocess.Popen[str]) -> None:
    began = time.monotonic()
    while not condition():
        assert process.poll() is None, f"{what}: ended with {process.returncode}: {process.communicate()}"
        assert time.monotonic() - began < WAIT_S, what
        time.sleep(0.1)


def descendants(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(word) for task in tasks for word in (task / "children").read_text().split()]
    except OSError:
        return []
    return [one for child in children for one in (child, *descendants(child))]


@dataclass
class Volume:
    """The volume that pods share."""

    path: Path
    zookeeper: str

    def environment(self, uid: str, **others: str) -> dict[str, str]:
        chart = {
            "POD_NAME": "audit-driver",
            "POD_IP": "127.0.0.1",
            "BINDERY_AUDIT_JOB": uid,
            "BINDERY_AUDIT_KEEP": "2",
            "BINDERY_SPARK_CONF": json.dumps({"spark.driver.memory": "512m"}),
            "BINDERY_ZOOKEEPER": self.zookeeper,
            "BINDERY_AUDIT_OUT": str(self.path),
        }
        return {**os.environ, **chart, **others}

    def begin(self, uid: str, *options: str, **others: str) -> subprocess.Popen[str]:
        """Start a pod in a session of its own, so that all its processes can be killed together."""
        command = [*POD, "scheduled", "--level=deep", RATE, "--cores=1", *options]
        return subprocess.Popen(
            command,
            env=self.environment(uid, **others),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def pod(self, uid: str, *options: str, **others: str) -> subprocess.CompletedProcess[str]:
        command = [*POD, "scheduled", "--rate=64MiB/s", "--cores=1", *options]
        return run(*command, **self.environment(uid, **others))

    def run_of(self, uid: str) -> Path:
        (name,) = [name for name in names_of(self.path) if name.endswith(f"-{job_tag(uid)}")]
        return self.path / name

    def groups(self) -> list[str]:
        return sorted(path.name for path in self.path.glob("*/checkpoint/groups/*"))

    def newest(self) -> dict[str, Any]:
        return dict(json.loads((self.path / "summary.json").read_text()))


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThrowawayCluster]:
    with ThrowawayCluster(bookies=4, auditors=0) as cluster:
        asyncio.run(write(cluster.zookeeper))
        yield cluster


@pytest.fixture
def volume(cluster: ThrowawayCluster, tmp_path: Path) -> Volume:
    return Volume(tmp_path, cluster.zookeeper)


def inodes(run: Path) -> dict[str, int]:
    """Inode of each group's directory. A group that is read again has a new directory."""
    return {path.name: path.stat().st_ino for path in (run / "checkpoint" / "groups").iterdir()}


def test_a_run_is_resumed_after_pods_are_stopped_or_killed(volume: Volume) -> None:
    options = f"--checkpoint-every={LEDGER_COPIES_BYTES}B"
    stopped = volume.begin("first", options)
    until(lambda: bool(volume.groups()), "reads", stopped)
    stopped.send_signal(signal.SIGTERM)
    _, output = stopped.communicate(timeout=WAIT_S)
    assert stopped.returncode == 130, output
    directory = volume.run_of("first")
    killed = volume.begin("first", options)
    until(lambda: "00000" in volume.groups() and "00001.part" in volume.groups(), "reads the second group", killed)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=WAIT_S)
    before = {name: inode for name, inode in inodes(directory).items() if name.isdecimal()}
    assert "00000" in before
    assert not (volume.path / "summary.json").exists()
    last = volume.begin("first", options)
    output = "".join(last.communicate(timeout=WAIT_S))
    assert last.returncode == 0, output
    after = inodes(directory)
    assert len(after) >= LEDGERS
    assert before.items() <= after.items(), "finished groups are not read again"
    facts = volume.newest()
    assert (facts["verdict"], facts["run_id"], facts["copies"]) == ("HEALTHY", directory.name, 3 * LEDGERS * ENTRIES)


def test_each_job_is_a_run_with_an_exit_code_and_old_runs_are_deleted(
    volume: Volume, cluster: ThrowawayCluster
) -> None:
    old = volume.path / "20200101T000000Z-000000"
    (old / "checkpoint").mkdir(parents=True)
    first = volume.pod("first", "--level=quick")
    assert first.returncode == 0, first.stderr
    again = volume.pod("first", "--level=quick")
    assert (again.returncode, again.stdout) == (0, first.stdout), "the verdict is only printed again"
    assert names_of(volume.path) == [old.name, volume.run_of("first").name]
    nowhere = volume.pod("second", "--level=quick", BINDERY_ZOOKEEPER="127.0.0.1:1")
    assert nowhere.returncode == 4, nowhere.stderr
    assert "bindery:" in nowhere.stderr
    assert volume.newest()["run_id"] == volume.run_of("first").name, "a run without a verdict does not count"
    silent = cluster.pid("bookie-0")
    os.kill(silent, signal.SIGSTOP)
    try:
        blind = volume.pod("third", "--level=quick", "--timeout=2s")
    finally:
        os.kill(silent, signal.SIGCONT)
    assert blind.returncode == 3, blind.stderr
    assert blind.stdout.splitlines()[-1].endswith(" is INCOMPLETE")
    assert volume.newest()["run_id"] == volume.run_of("third").name
    assert not old.exists()


def free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0


class Executors:
    """Executor pods with one core each."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.running: list[subprocess.Popen[bytes]] = []
        self.made = 0

    def conf(self) -> Mapping[str, str]:
        """Settings of the driver as in the chart, except the master: its only core has no room for executors."""
        return {
            "spark.master": "local-cluster[1,1,512]",
            "spark.executor.cores": "2",
            "spark.executor.memory": "512m",
            "spark.driver.memory": "512m",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.port": str(self._port),
            "spark.authenticate": "true",
            "spark.authenticate.secret": SECRET,
            "spark.network.crypto.enabled": "true",
            "spark.executor.extraJavaOptions": JVM_OPTIONS,
            "spark.deploy.appIdPattern": "audit",
        }

    def start(self) -> None:
        self.made += 1
        options = [
            *JVM_OPTIONS.split(),
            "-Dspark.authenticate=true",
            "-Dspark.network.crypto.enabled=true",
            f"-Dspark.driver.port={self._port}",
        ]
        scheduler = {
            "SPARK_DRIVER_URL": f"spark://CoarseGrainedScheduler@127.0.0.1:{self._port}",
            "SPARK_EXECUTOR_ID": str(100 + self.made),
            "SPARK_EXECUTOR_CORES": "1",
            "SPARK_EXECUTOR_MEMORY": "512m",
            "SPARK_APPLICATION_ID": "audit",
            "SPARK_EXECUTOR_POD_IP": "127.0.0.1",
            "SPARK_RESOURCE_PROFILE_ID": "0",
            "SPARK_EXECUTOR_POD_NAME": f"audit-exec-{self.made}",
            "_SPARK_AUTH_SECRET": SECRET,
            **{f"SPARK_JAVA_OPT_{number}": option for number, option in enumerate(options)},
        }
        self.running.append(subprocess.Popen([*POD, "executor"], env={**os.environ, **scheduler}))

    def work(self) -> bool:
        """Whether each executor has Python workers, so that a task has begun on it."""
        return all(len(descendants(one.pid)) >= 2 for one in self.running)

    def kill_one(self) -> None:
        """Kill one executor with its workers, as when a pod is killed."""
        one = self.running.pop(0)
        for pid in (one.pid, *descendants(one.pid)):
            os.kill(pid, signal.SIGKILL)
        one.wait()

    def exit_codes(self) -> list[int]:
        return [one.wait(timeout=WAIT_S) for one in self.running]

    def end(self) -> None:
        for one in self.running:
            one.kill()
            one.wait()


@pytest.fixture
def executors() -> Iterator[Executors]:
    made = Executors(free_port())
    yield made
    made.end()


def test_a_killed_executor_does_not_change_the_report(executors: Executors, tmp_path: Path) -> None:
    with ThrowawayCluster(bookies=4, auditors=0) as cluster:
        asyncio.run(write(cluster.zookeeper))
        hole = json.loads(run(sys.executable, str(HOLE), BINDERY_ZOOKEEPER=cluster.zookeeper).stdout)
        volume = Volume(tmp_path, cluster.zookeeper)
        driver = volume.begin("executors", BINDERY_SPARK_CONF=json.dumps(executors.conf()))
        port = int(executors.conf()["spark.driver.port"])
        until(lambda: listens(port), "the driver listens", driver)
        for _ in range(2):
            executors.start()
        until(executors.work, "both executors read", driver)
        executors.kill_one()
        executors.start()
        output, errors = driver.communicate(timeout=WAIT_S)
        assert driver.returncode == 1, errors
        assert executors.exit_codes() == [0, 0], "the driver stopped them"
        assert output.splitlines()[-1].endswith(" is UNDER-REPLICATED")
        summary = volume.newest()
        assert (summary["coverage"], summary["unknown"]) == (1.0, 0)
        output = run(*POD, "show", summary["run_id"], "--out", str(tmp_path), "--findings", "--json").stdout
        findings = [one for one in map(json.loads, output.splitlines()) if one["severity"] != "info"]
        names = ("kind", "ledger_id", "first_entry", "last_entry", "bookie")
        expected = ("MISSING_REPLICA", hole["ledger_id"], hole["entry"], hole["entry"], hole["bookie"])
        assert [tuple(one[name] for name in names) for one in findings] == [expected]
