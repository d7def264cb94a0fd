"""Install, upgrade, roll back, test and remove a Helm release, and collect its logs after a failure."""

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kubernetes.client.exceptions import ApiException

from bindery_e2e.cluster.cluster import RESTRICTED, Cluster, ClusterError
from bindery_e2e.cluster.commands import CommandFailed, Runner, run

ROOT: Final = Path(__file__).resolve().parents[4]
CHART: Final = ROOT / "charts" / "bindery"
VALUES: Final = ROOT / "e2e" / "values"
INSTALL_TIMEOUT_S: Final = 180.0
UPGRADE_TIMEOUT_S: Final = 420.0
TEST_TIMEOUT_S: Final = 180.0
LOG_LINES_MAX: Final = 20_000


@dataclass
class Release:
    """The release of the chart that `cluster` accesses."""

    cluster: Cluster
    chart: Path = CHART
    runner: Runner = run
    clock: Callable[[], float] = time.monotonic
    timings: list[tuple[str, float]] = field(default_factory=list)
    """Operations and the seconds they took, in order."""

    @property
    def name(self) -> str:
        return self.cluster.release

    def make_namespace(self) -> None:
        """Create the namespace, which enforces the restricted Pod Security level.

        Kubernetes rejects pods that violate this level.
        """
        metadata = {"name": self.cluster.namespace, "labels": dict(RESTRICTED)}
        with contextlib.suppress(ApiException):
            if self.cluster.core.read_namespace(self.cluster.namespace).status.phase == "Terminating":
                self.cluster.until(
                    lambda: "" if not self._namespace_exists() else "still there",
                    f"the old namespace {self.cluster.namespace} is gone",
                    timeout_s=180,
                )
        manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
        self.runner(["kubectl", "apply", "-f", "-"], timeout_s=60, stdin=json.dumps(manifest))

    def remove_namespace(self, *, wait: bool = False) -> None:
        """Delete the namespace with everything in it, including volumes."""
        command = ["kubectl", "delete", "namespace", self.cluster.namespace, "--ignore-not-found"]
        self.runner([*command, f"--wait={str(wait).lower()}"], timeout_s=300)

    def _namespace_exists(self) -> bool:
        try:
            self.cluster.core.read_namespace(self.cluster.namespace)
        except ApiException as error:
            if error.status == 404:
                return False
            raise
        return True

    # --- helm ---------------------------------------------------------------------------------------------------------

    def install(
        self, values: Sequence[Path] = (), settings: Sequence[str] = (), *, timeout_s: float = INSTALL_TIMEOUT_S
    ) -> float:
        """Install, wait until all pods are ready, and return the seconds. `settings`: `key=value`, as for --set."""
        return self._timed(
            "install",
            [
                "install",
                self.name,
                str(self.chart),
                "--wait",
                f"--timeout={timeout_s:.0f}s",
                *_options(values, settings),
            ],
            timeout_s,
        )

    def upgrade(
        self,
        settings: Sequence[str] = (),
        *,
        values: Sequence[Path] = (),
        timeout_s: float = UPGRADE_TIMEOUT_S,
        what: str = "",
        wait: bool = True,
    ) -> float:
        """Upgrade and keep earlier values that are not overridden. `wait`: wait until all pods are ready again."""
        return self._timed(
            f"upgrade {what or ' '.join(settings)}",
            [
                "upgrade",
                self.name,
                str(self.chart),
                "--reset-then-reuse-values",
                *(["--wait"] if wait else []),
                f"--timeout={timeout_s:.0f}s",
                *_options(values, settings),
            ],
            timeout_s,
        )

    def rollback(self, *, timeout_s: float = UPGRADE_TIMEOUT_S) -> float:
        """Roll back to the previous revision and wait until all pods are ready again."""
        return self._timed("rollback", ["rollback", self.name, "--wait", f"--timeout={timeout_s:.0f}s"], timeout_s)

    def test(self, *, timeout_s: float = TEST_TIMEOUT_S) -> float:
        """Run `helm test`. Raises CommandFailed with the logs of failed test pods."""
        return self._timed("test", ["test", self.name, "--logs", f"--timeout={timeout_s:.0f}s"], timeout_s)

    def uninstall(self, *, timeout_s: float = 180) -> float:
        return self._timed("uninstall", ["uninstall", self.name, "--wait", f"--timeout={timeout_s:.0f}s"], timeout_s)

    def _timed(self, what: str, words: list[str], timeout_s: float) -> float:
        began = self.clock()
        try:
            self._helm(words, timeout_s + 60)
        finally:
            self.timings.append((what, self.clock() - began))
        return self.clock() - began

    def _helm(self, words: list[str], timeout_s: float) -> str:
        return self.runner(["helm", "-n", self.cluster.namespace, *words], timeout_s=timeout_s)

    # --- diagnosis of failures ----------------------------------------------------------------------------------------

    def collect(self, folder: Path) -> None:
        """Write statuses, events, and logs of current and previous containers to files in `folder`.

        If something cannot be read, its file contains the error.
        """
        folder.mkdir(parents=True, exist_ok=True)
        kubectl = self.cluster.kubectl
        self._save(folder / "pods.txt", lambda: kubectl("get", "pods", "-o", "wide", "--show-labels"))
        self._save(folder / "objects.txt", lambda: kubectl("get", "all,pvc,pdb,endpointslices", "-o", "wide"))
        self._save(folder / "pods.yaml", lambda: kubectl("get", "pods", "-o", "yaml"))
        self._save(folder / "nodes.txt", lambda: kubectl("get", "nodes", "-o", "wide"))
        self._save(folder / "events.txt", lambda: kubectl("get", "events", "--sort-by=.lastTimestamp"))
        self._save(folder / "values.yaml", lambda: self._helm(["get", "values", self.name, "--all"], 60))
        self._save(folder / "recovery.json", lambda: json.dumps(self.cluster.auditor_status()[1], indent=1))
        for verb in (("bookie", "members"), ("recovery", "history")):
            self._save(folder / f"{'-'.join(verb)}.txt", lambda verb=verb: self.cluster.toolbox("bindery", *verb))  # type: ignore[misc]
        for name in self._save(folder / "pod-names.txt", lambda: kubectl("get", "pods", "-o", "name")).split():
            pod = name.removeprefix("pod/")
            tail = f"--tail={LOG_LINES_MAX}"
            logs = [name, "--all-containers", "--timestamps", tail]
            self._save(folder / f"{pod}.log", lambda logs=logs: kubectl("logs", *logs))  # type: ignore[misc]
            self._save(
                folder / f"{pod}.previous.log",
                lambda logs=logs: kubectl("logs", *logs, "--previous", check=False),  # type: ignore[misc]
            )
        for path in folder.glob("*.previous.log"):
            if not path.read_text().strip():
                path.unlink()

    @staticmethod
    def _save(path: Path, get: Callable[[], str]) -> str:
        try:
            text = get()
        except (ClusterError, CommandFailed, ApiException) as error:
            path.write_text(f"could not be read: {error}\n")
            return ""
        path.write_text(text)
        return text


def _options(values: Sequence[Path], settings: Sequence[str]) -> list[str]:
    return [*(f"--values={path}" for path in values), *(f"--set={one}" for one in settings)]


CPU: Final = {"m": 0.001, "": 1.0}
MEMORY: Final = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "k": 10**3, "M": 10**6, "G": 10**9, "": 1}


def quantity(text: str, units: dict[str, float] | dict[str, int]) -> float:
    """A Kubernetes quantity such as 125m or 144Mi, in cores or bytes. Raises ValueError."""
    number = text.rstrip("".join(set("".join(units))))
    unit = text[len(number) :]
    if unit not in units:
        raise ValueError(f"not a quantity: {text}")
    return float(number) * units[unit]


def requested(pods: Sequence[Any]) -> tuple[float, float]:
    """(cores, bytes) that the containers of these V1Pods request in total."""
    cores = size = 0.0
    for pod in pods:
        for container in pod.spec.containers:
            requests = (container.resources and container.resources.requests) or {}
            cores += quantity(requests.get("cpu", "0"), CPU)
            size += quantity(requests.get("memory", "0"), MEMORY)
    return cores, size
