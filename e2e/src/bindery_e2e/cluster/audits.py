"""Start audits of a release the way its CronJob does, follow their Jobs, and read their reports.

A Job is created from the CronJob's template, as `kubectl create job --from` does. Output of the pods comes from their
logs. Reports come from the volume, through the pod that the release offers for reading reports.
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
    """State of a Job. `verdict`: Complete, Failed, or empty while it runs. `reason`, `message`: those of a failure."""

    verdict: str
    reason: str = ""
    message: str = ""


class Audits:
    """The audit Jobs of a release, and access to their reports."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    # --- Jobs ---------------------------------------------------------------------------------------------------------

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
        """Wait until the Job has ended, and return its state."""
        ended: list[JobState] = []

        def problem() -> str:
            state = self.state(job)
            ended.append(state)
            return "" if state.verdict else f"pods: {[(pod.name, pod.phase) for pod in self.pods(job)]}"

        self._cluster.until(problem, f"the job {job} ends", timeout_s=timeout_s)
        return ended[-1]

    def pods(self, job: str) -> list[Pod]:
        """Driver pods of the Job, oldest first."""
        return [pod_of(one) for one in self._listed(f"{JOB_LABEL}={job}")]

    def executors(self) -> list[Pod]:
        """Executor pods of all audits."""
        return [pod_of(one) for one in self._listed(f"{ROLE_LABEL}=executor")]

    def exit_codes(self, job: str) -> list[int | None]:
        """Exit codes of the drivers, oldest first; None: the driver runs, or its pod ended without an exit code."""
        codes = []
        for pod in self._listed(f"{JOB_LABEL}={job}"):
            states = [one.state.terminated for one in pod.status.container_statuses or () if one.state]
            codes.append(states[0].exit_code if states and states[0] else None)
        return codes

    def _listed(self, selector: str) -> list[Any]:
        found = self._cluster.core.list_namespaced_pod(
            self._cluster.namespace, label_selector=selector, _request_timeout=API_TIMEOUT_S
        ).items
        return sorted(found, key=lambda one: one.metadata.creation_timestamp)

    def log(self, job: str) -> list[str]:
        """Lines of the last driver's log."""
        return self._cluster.kubectl("logs", self.pods(job)[-1].name, timeout_s=60).splitlines()

    def logged_verdicts(self, job: str) -> list[str]:
        """Verdicts in the last driver's log; a verdict other than HEALTHY appears twice.

        The last line alone is not enough: the log merges stdout and stderr, and their order is not deterministic.
        """
        return [line.rpartition(" is ")[2] for line in self.log(job) if VERDICT_LINE.match(line)]

    # --- reports ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def reports(self, job: str = "look") -> Iterator["Reports"]:
        """Run a pod that mounts the reports' volume until the block ends."""
        self._make(job, f"{self._cluster.fullname}-audit-reports")
        try:
            self._cluster.until(
                lambda: "" if any(pod.is_ready for pod in self.pods(job)) else "not ready",
                "a pod with the reports is ready",
                timeout_s=240,
            )
            yield Reports(self._cluster, self.pods(job)[-1].name)
        finally:
            self._cluster.kubectl("delete", "job", job, "--cascade=foreground", timeout_s=240)


@dataclass(frozen=True, slots=True)
class Reports:
    """The reports on the volume."""

    cluster: Cluster
    pod: str

    def names(self) -> list[str]:
        """Names of runs and files, sorted."""
        return sorted(self.cluster.exec(self.pod, "ls", DIRECTORY).split())

    def read(self, name: str) -> str:
        return self.cluster.exec(self.pod, "cat", f"{DIRECTORY}/{name}")

    def summary(self, run: str = "") -> dict[str, Any]:
        """Summary of a run; default: the newest run."""
        found = json.loads(self.read(f"{run}/summary.json" if run else "summary.json"))
        if not isinstance(found, dict):
            raise ClusterError("summary.json is no object")
        return found

    def findings(self, run: str) -> list[dict[str, Any]]:
        return json_lines(
            self.cluster.exec(
                self.pod, "bindery", "audit", "show", run, "--findings", "--json", timeout_s=120, check=False
            )
        )
