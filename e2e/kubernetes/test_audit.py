"""The chart's audit: verdicts, the results of Jobs, and recovery from killed pods.

The tests run in the order of the file on one release: first with all replicas, then with one replica missing.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from bindery_e2e.cluster.audits import DIRECTORY, Audits, JobState
from bindery_e2e.cluster.cluster import Pod
from bindery_e2e.cluster.images import Images
from bindery_e2e.cluster.release import VALUES, Release
from bindery_e2e.runs.session import installed

AUDIT_VALUES = VALUES / "audit.yaml"
HOLE = Path(__file__).parent / "put_hole.py"
MESSAGES = 1500
TOPICS = ("orders", "payments")
JOB_TIMEOUT_S = 420.0
BEGIN_TIMEOUT_S = 240.0
"""Seconds until Java, Spark and Python are up on cores that other processes use, too."""
FAILED_BY_FINDINGS = JobState("Failed", "PodFailurePolicy")
pytestmark = [pytest.mark.long_run(together=True), pytest.mark.timeout(1500)]  # the first one builds the images


@dataclass
class Story:
    """The release, and the missing replica that was created in it."""

    release: Release
    audits: Audits
    hole: dict[str, Any] = field(default_factory=dict)

    def expected(self) -> tuple[str, str, int, int, int, str]:
        entry = self.hole["entry"]
        return "MISSING_REPLICA", "under_replicated", self.hole["ledger_id"], entry, entry, self.hole["bookie"]


@pytest.fixture(scope="module")
def story(images: Images, reports: Path) -> Iterator[Story]:
    images.spark()
    with installed("bindery-e2e-audit", values=[AUDIT_VALUES], folder=reports / "audit") as release:
        text = "\n".join(f"message {number} {'.' * 500}" for number in range(MESSAGES))
        for topic in TOPICS:
            release.cluster.toolbox("bindery", "produce", topic, stdin=text)
        yield Story(release, Audits(release.cluster))


def key(finding: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(finding[name] for name in ("kind", "severity", "ledger_id", "first_entry", "last_entry", "bookie"))


def damage(findings: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Keys of the findings, without those that are due to the test itself.

    ORPHAN_DATA (info): the replicas on the former bookie, which it deletes later. MISSING_MARK: a second audit reports
    that the ledger is not marked, because recovery is paused.
    """
    return [key(one) for one in findings if one["severity"] != "info" and one["kind"] != "MISSING_MARK"]


def without_message(state: JobState) -> JobState:
    return JobState(state.verdict, state.reason)


def kill_one(story: Story, pods: list[Pod]) -> Pod:
    story.release.cluster.delete_pod(pods[0].name, grace_s=0)
    return pods[0]


def groups(story: Story, pod: str) -> dict[str, str]:
    """Name -> inode of the newest run's checkpoint groups. A group that is read again has another inode.

    `pod`: a pod that mounts the volume.
    """
    script = f"ls -di $(ls -d {DIRECTORY}/2* | tail -n 1)/checkpoint/groups/*"
    found = story.release.cluster.exec(pod, "sh", "-c", script, check=False).split()
    return {path.rpartition("/")[2]: inode for inode, path in zip(found[::2], found[1::2], strict=True)}


def checkpointed(story: Story, job: str) -> str:
    """Why the run cannot be resumed yet; empty: one group is complete and another one has begun."""
    pods = [pod for pod in story.audits.pods(job) if pod.phase == "Running"]
    if not pods:
        return "no driver runs"
    found = groups(story, pods[-1].name)
    return "" if "00000" in found and any(name.endswith(".part") for name in found) else f"groups: {sorted(found)}"


def executors_work(story: Story) -> str:
    """Why the executors do not work yet; empty: both have Python workers, so a task has begun on each."""
    running = [pod for pod in story.audits.executors() if pod.phase == "Running"]
    if len(running) != 2:
        return f"{len(running)} executors run"
    workers = ("sh", "-c", "grep -l pyspark.daemon /proc/[0-9]*/cmdline 2>/dev/null")
    names = [pod.name for pod in running]
    idle = [name for name in names if not story.release.cluster.exec(name, *workers, check=False).strip()]
    return f"idle executors: {', '.join(idle)}" if idle else ""


def test_a_whole_cluster_is_healthy_and_the_report_stays_on_the_volume(story: Story) -> None:
    began = time.monotonic()
    story.audits.start("whole")
    state = story.audits.wait("whole", timeout_s=JOB_TIMEOUT_S)
    print(f"driver mode: {time.monotonic() - began:.0f} s")
    assert state.verdict == "Complete", story.audits.log("whole")
    assert story.audits.exit_codes("whole") == [0]
    assert story.audits.logged_verdicts("whole") == ["HEALTHY"]
    with story.audits.reports() as volume:
        summary = volume.summary()
        assert (summary["verdict"], summary["coverage"], summary["unknown"]) == ("HEALTHY", 1.0, 0)
        assert summary["copies"] >= 3 * len(TOPICS)
        assert summary["ledgers"] >= len(TOPICS)
        assert {summary["run_id"], "report.html", "summary.txt", "metrics.prom"} <= set(volume.names())
        assert "bindery_audit_exit_code 0" in volume.read("metrics.prom")


def test_after_a_killed_driver_the_next_one_resumes_the_run_and_finds_the_missing_replica_once(story: Story) -> None:
    # Otherwise an auditor would copy the entry within seconds.
    story.release.cluster.toolbox("bindery", "recovery", "pause", "--reason", "an audit must find it")
    story.hole = json.loads(story.release.cluster.toolbox("python", "-", stdin=HOLE.read_text()))
    story.audits.start("hole")
    story.release.cluster.until(lambda: checkpointed(story, "hole"), "a group is read", timeout_s=BEGIN_TIMEOUT_S)
    drivers = story.audits.pods("hole")
    done = groups(story, drivers[0].name)["00000"]
    killed = kill_one(story, drivers)
    state = story.audits.wait("hole", timeout_s=JOB_TIMEOUT_S)
    assert without_message(state) == FAILED_BY_FINDINGS, "a Job that failed because of findings is not retried"
    assert "exit code 1" in state.message
    assert story.audits.exit_codes("hole")[-1] == 1
    assert killed.name not in {pod.name for pod in story.audits.pods("hole") if pod.phase == "Running"}
    assert set(story.audits.logged_verdicts("hole")) == {"UNDER-REPLICATED"}, "the log repeats the verdict at its end"
    with story.audits.reports() as volume:
        summary = volume.summary()
        assert damage(volume.findings(summary["run_id"])) == [story.expected()]
        runs = [name for name in volume.names() if name[:1].isdigit()]
        assert len(runs) == 2, "the second driver resumed the run of the first"
        assert groups(story, volume.pod)["00000"] == done, "a complete group is not read again"


def test_an_executor_that_is_killed_changes_nothing_in_the_report(story: Story) -> None:
    began = time.monotonic()
    story.release.upgrade(["audit.executors.enabled=true", "upgradeGate.force=true"], what="to executors")
    story.audits.start("executors")
    cluster = story.release.cluster
    cluster.until(lambda: executors_work(story), "both executors work", timeout_s=BEGIN_TIMEOUT_S)
    running = [pod for pod in story.audits.executors() if pod.phase == "Running"]
    assert {pod.node for pod in running} == {pod.node for pod in story.audits.pods("executors")}, "they share a volume"
    killed = kill_one(story, running)
    state = story.audits.wait("executors", timeout_s=JOB_TIMEOUT_S)
    print(f"executors: {time.monotonic() - began:.0f} s")
    assert without_message(state) == FAILED_BY_FINDINGS
    assert story.audits.exit_codes("executors") == [1], "the driver survived"
    assert killed.uid not in {pod.uid for pod in story.audits.executors()}
    with story.audits.reports() as volume:
        summary = volume.summary()
        assert summary["coverage"] == 1.0
        assert damage(volume.findings(summary["run_id"])) == [story.expected()]
    cluster.until(
        lambda: ", ".join(pod.name for pod in story.audits.executors()), "no executor is left behind", timeout_s=120
    )
