"""Audits of a release as its CronJob runs them: start one, see what it is doing, read what came out.

A Job is made of the CronJob's template, as `kubectl create job --from` does it. What the pods said is read from their
logs, what a run left behind from the volume, through a pod of the release's own for looking at reports.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from bindery_e2e.cluster.cluster import API_TIMEOUT_S, Cluster, ClusterError, Pod, pod_of
from bindery_e2e.cluster.commands import json_lines

DIRECTORY: Final = "/var/lib/bindery/audits"
JOB_LABEL: Final = "batch.kubernetes.io/job-name"
ROLE_LABEL: Final = "spark-role"
VERDICT_LINE: Final = re.compile(r"bindery [0-9a-f-]{36} is [A-Z-]+$")


@dataclass(frozen=True, slots=True)
class JobState:
    """`verdict`: Complete or Failed, empty while it is neither; `reason`, `message`: of a failure."""

    verdict: str
    reason: str = ""
    message: str = ""


class Audits:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    # --- Jobs -----------------------------------------------------------------------------------------------------

    def start(self, job: str) -> None:
        self._make(job, f"{self._cluster.fullname}-audit")

    def _make(self, job: str, cronjob: str) -> None:
        self._cluster.kubectl("create", "job", job, f"--from=cronjob/{cronjob}")

    def state(self, job: str) -> JobState:
        found = json.loads(self._cluster.kubectl("get", "job", job, "-o", "json"))
        for condition in found["status"].get("conditions", ()):
            if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
                return JobState(condition["type"], condition.get("reason", ""), condition.get("message", ""))
        return JobState("")

    def wait(self, job: str, *, timeout_s: float) -> JobState:
        """Until it has ended, however it did."""
        ended: list[JobState] = []

        def problem() -> str:
            state = self.state(job)
            ended.append(state)
            return "" if state.verdict else f"pods: {[(pod.name, pod.phase) for pod in self.pods(job)]}"

        self._cluster.until(problem, f"the job {job} ends", timeout_s=timeout_s)
        return ended[-1]

    def pods(self, job: str) -> list[Pod]:
        """Drivers, the first one first."""
        return [pod_of(one) for one in self._listed(f"{JOB_LABEL}={job}")]

    def executors(self) -> list[Pod]:
        """Of all audits."""
        return [pod_of(one) for one in self._listed(f"{ROLE_LABEL}=executor")]

    def exit_codes(self, job: str) -> list[int | None]:
        """Of the drivers; None: still at it, or gone without one."""
        codes = []
        for pod in self._listed(f"{JOB_LABEL}={job}"):
            states = [one.state.terminated for one in pod.status.container_statuses or () if one.state]
            codes.append(states[0].exit_code if states and states[0] else None)
        return codes

    def _listed(self, selector: str) -> list[Any]:
        found = self._cluster.core.list_namespaced_pod(
            self._cluster.namespace, label_selector=selector, _request_timeout=API_TIMEOUT_S
        ).items  # fmt: skip
        return sorted(found, key=lambda one: one.metadata.creation_timestamp)

    def said(self, job: str) -> list[str]:
        """Lines of the last driver's log."""
        return self._cluster.kubectl("logs", self.pods(job)[-1].name, timeout_s=60).splitlines()

    def said_verdicts(self, job: str) -> list[str]:
        """What the last driver called the cluster: twice, if something is wrong. Not simply its last line: a log has
        both stdout and stderr, and which of two lines written at once comes first is chance."""
        return [line.rpartition(" is ")[2] for line in self.said(job) if VERDICT_LINE.match(line)]

    # --- reports --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def reports(self, job: str = "look") -> Iterator["Reports"]:
        """A pod with the volume, while the block lasts."""
        self._make(job, f"{self._cluster.fullname}-audit-reports")
        try:
            self._cluster.until(
                lambda: "" if any(pod.is_ready for pod in self.pods(job)) else "not ready",
                "a pod with the reports is ready", timeout_s=240,
            )  # fmt: skip
            yield Reports(self._cluster, self.pods(job)[-1].name)
        finally:
            self._cluster.kubectl("delete", "job", job, "--cascade=foreground", timeout_s=240)


@dataclass(frozen=True, slots=True)
class Reports:
    """What is on the volume."""

    cluster: Cluster
    pod: str

    def names(self) -> list[str]:
        """Of runs and files, sorted."""
        return sorted(self.cluster.exec(self.pod, "ls", DIRECTORY).split())

    def read(self, name: str) -> str:
        return self.cluster.exec(self.pod, "cat", f"{DIRECTORY}/{name}")

    def summary(self, run: str = "") -> dict[str, Any]:
        """Of the newest run unless one is named."""
        found = json.loads(self.read(f"{run}/summary.json" if run else "summary.json"))
        if not isinstance(found, dict):
            raise ClusterError("summary.json is no object")
        return found

    def findings(self, run: str) -> list[dict[str, Any]]:
        return json_lines(
            self.cluster.exec(
                self.pod, "bindery", "audit", "show", run, "--findings", "--json", timeout_s=120, check=False
            )
        )  # fmt: skip
