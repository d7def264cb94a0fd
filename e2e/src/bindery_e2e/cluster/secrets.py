"""The Secrets of a release in the secure form: read and change them, run their jobs, and wait until pods have them."""

import base64
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from bindery_e2e.cluster.cluster import API_TIMEOUT_S, INSTANCE_LABEL, Cluster, ClusterError, Pod

DIRECTORY: Final = "/etc/bindery/secure"
FILES: Final = {
    "ca.crt": "tls", "tls.crt": "tls", "tls.key": "tls", "keys": "credentials", "token": "credentials"
}  # fmt: skip
"""File of a service in DIRECTORY -> suffix of the Secret that contains it."""
OPERATOR_FILES: Final = ("ca.crt", "token")
SERVICES: Final = ("bookie", "broker", "auditor")
JOB_TIMEOUT_S: Final = 90.0
SPREAD_TIMEOUT_S: Final = 180.0
"""Maximum seconds until a change of a Secret has reached all pods. The kubelet's default is up to 90 s."""


class ReleaseSecrets:
    """The Secrets of the release that `cluster` accesses. Methods raise ClusterError, CommandFailed or ApiException."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._hints = 0

    def read(self, name: str) -> dict[str, bytes]:
        """Return the data of the Secret `<fullname>-<name>`."""
        found = self._cluster.core.read_namespaced_secret(
            f"{self._cluster.fullname}-{name}", self._cluster.namespace, _request_timeout=API_TIMEOUT_S
        )
        return {key: base64.b64decode(value) for key, value in (found.data or {}).items()}

    def change(self, name: str, data: Mapping[str, bytes]) -> None:
        """Replace these keys of the Secret `<fullname>-<name>`, and keep the others."""
        encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
        self._cluster.core.patch_namespaced_secret(
            f"{self._cluster.fullname}-{name}",
            self._cluster.namespace,
            {"data": encoded},
            _request_timeout=API_TIMEOUT_S,
        )

    def start_job(self, job: str, cron_job: str) -> None:
        """Start the job that the CronJob `<fullname>-<cron_job>` describes."""
        source = f"cronjob/{self._cluster.fullname}-{cron_job}"
        self._cluster.kubectl("create", "job", job, f"--from={source}")

    def finish_job(self, job: str) -> str:
        """Wait until the job has succeeded, and return its log."""
        words = ["wait", "--for=condition=complete", f"job/{job}", f"--timeout={JOB_TIMEOUT_S:.0f}s"]
        self._cluster.kubectl(*words, timeout_s=JOB_TIMEOUT_S + 30)
        return self._cluster.kubectl("logs", f"job/{job}")

    def end_job(self, job: str) -> None:
        """Delete a job that waits, with its pod."""
        self._cluster.kubectl("delete", "job", job, "--wait=false")

    def spread(self) -> float:
        """Wait until the files in all pods are those of the Secrets, and return the seconds waited.

        The kubelet updates mounted Secrets when it synchronizes a pod, by default every 60 to 90 s. A change of an
        annotation makes it do so at once.
        """
        attempts = 0

        def problem() -> str:
            nonlocal attempts
            if attempts % 5 == 0:
                self._hint()
            attempts += 1
            return self._outdated()

        return self._cluster.until(problem, "all pods have the files of the Secrets", timeout_s=SPREAD_TIMEOUT_S)

    def _hint(self) -> None:
        self._hints += 1
        selector = f"{INSTANCE_LABEL}={self._cluster.release}"
        self._cluster.kubectl("annotate", "pods", "-l", selector, "--overwrite", f"e2e/secrets={self._hints}")

    def _outdated(self) -> str:
        """Return names of pods whose files are not those of their Secrets, separated by commas."""
        wanted = {
            identity: {
                file: self.read(f"{identity}-{FILES[file]}")[file]
                for file in (OPERATOR_FILES if identity == "operator" else FILES)
            }
            for identity in (*SERVICES, "operator")
        }
        pods = [pod for component in (*SERVICES, "toolbox") for pod in self._cluster.pods(component)]

        def is_outdated(pod: Pod) -> bool:
            files = wanted["operator" if pod.component == "toolbox" else pod.component]
            paths = [f"{DIRECTORY}/{file}" for file in files]
            found = self._cluster.exec(pod.name, "cat", *paths, container=pod.component)
            return found != b"".join(files.values()).decode()

        if not pods:
            raise ClusterError("the release has no pods")
        with ThreadPoolExecutor(len(pods)) as threads:
            found = threads.map(is_outdated, pods)
            return ", ".join(pod.name for pod, outdated in zip(pods, found, strict=True) if outdated)
