"""Secrets of a release without a cluster: when all pods have them, and how the kubelet is hastened."""

import base64
from collections.abc import Sequence
from types import SimpleNamespace as Thing
from typing import Any

import pytest
from bindery_e2e.cluster.cluster import Cluster, ClusterError
from bindery_e2e.cluster.secrets import FILES, OPERATOR_FILES, SPREAD_TIMEOUT_S, ReleaseSecrets

from .test_cluster import FakeApps, FakeCore, v1_pod


class Kubernetes(FakeCore):
    """Secrets, and pods whose files follow them `late` annotations later; None: never."""

    def __init__(self, late: int | None) -> None:
        super().__init__([v1_pod(f"{name}-0", name) for name in ("bookie", "broker", "auditor", "toolbox")])
        self.late = late
        self.annotations = 0
        self.now_s = 0.0
        self.changes: list[tuple[str, Any]] = []

    def read_namespaced_secret(self, name: str, namespace: str, **_: Any) -> Any:
        return Thing(data={file: base64.b64encode(f"{name} {file} new\n".encode()) for file in FILES})

    def patch_namespaced_secret(self, name: str, namespace: str, body: Any, **_: Any) -> None:
        self.changes.append((name, body))

    def run(self, command: Sequence[str], *, timeout_s: float, stdin: str | None = None, check: bool = True) -> str:
        if "annotate" in command:
            self.annotations += 1
            return ""
        component = command[command.index("-c") + 1]
        files = OPERATOR_FILES if component == "toolbox" else tuple(FILES)
        assert [word.rsplit("/", 1)[1] for word in command if word.startswith("/etc")] == list(files)
        age = "new" if self.late is not None and self.annotations >= self.late else "old"
        identity = "operator" if component == "toolbox" else component
        return "".join(f"bindery-{identity}-{FILES[file]} {file} {age}\n" for file in files)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def secrets(self) -> ReleaseSecrets:
        cluster = Cluster(
            self, FakeApps(), namespace="ns", runner=self.run, clock=lambda: self.now_s, sleep=self.sleep
        )  # fmt: skip
        return ReleaseSecrets(cluster)


def test_changes_have_spread_when_each_pod_has_its_files() -> None:
    assert Kubernetes(late=1).secrets().spread() == 0
    slow = Kubernetes(late=3)
    assert slow.secrets().spread() == 10
    assert slow.annotations == 3


def test_pods_that_keep_old_files_are_named() -> None:
    with pytest.raises(ClusterError, match="bookie-0, broker-0, auditor-0, toolbox-0") as caught:
        Kubernetes(late=None).secrets().spread()
    assert f"not within {SPREAD_TIMEOUT_S:.0f} s" in str(caught.value)


def test_data_is_encoded() -> None:
    kubernetes = Kubernetes(late=None)
    secrets = kubernetes.secrets()
    assert secrets.read("broker-tls")["token"] == b"bindery-broker-tls token new\n"
    secrets.change("authority", {"settled_from": b"1"})
    assert kubernetes.changes == [("bindery-authority", {"data": {"settled_from": "MQ=="}})]
