"""The chart's backup: ZooKeeper loses its data, a backup is restored, and all acknowledged messages are readable.

The release is secured, its metadata is below a chroot, and it has objects of the operator and an HTTPRoute. The tests
run in the order of the file on this release.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from bindery_e2e.cluster.images import Images
from bindery_e2e.cluster.release import CHART, VALUES, Release
from bindery_e2e.runs.session import installed

BACKUP_VALUES = VALUES / "backup.yaml"
ROUTES = CHART.parent / "tests" / "crds" / "httproutes.yaml"
TOPIC = "orders"
BEFORE, AFTER = 300, 100
"""Numbers of messages before and after the backup."""
SERVICES = ("broker", "auditor", "bookie")
pytestmark = [pytest.mark.long_run(together=True), pytest.mark.timeout(1200)]  # the first one builds the images


@pytest.fixture(scope="module")
def routes() -> Iterator[None]:
    """Define HTTPRoutes: those of an installed Gateway API, or a temporary stand-in."""
    made = subprocess.run(["kubectl", "create", "-f", str(ROUTES)], capture_output=True, text=True, timeout=60)
    assert made.returncode == 0 or "AlreadyExists" in made.stderr, made.stderr
    wait = [
        "kubectl",
        "wait",
        "--for=condition=Established",
        "crd/httproutes.gateway.networking.k8s.io",
        "--timeout=30s",
    ]
    subprocess.run(wait, check=True, capture_output=True, timeout=60)
    yield
    if made.returncode == 0:
        subprocess.run(["kubectl", "delete", "-f", str(ROUTES)], check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def release(images: Images, reports: Path, routes: None) -> Iterator[Release]:
    values = [CHART / "values-tls-auth.yaml", BACKUP_VALUES]
    with installed("bindery-e2e-backup", values=values, folder=reports / "backup") as made:
        yield made


def run_job(release: Release, job: str, cronjob: str) -> str:
    """Start a job from a CronJob of the chart, as an operator does, and return its log. Fails if the job fails."""
    kubectl = release.cluster.kubectl
    kubectl("create", "job", job, f"--from=cronjob/{release.cluster.fullname}-{cronjob}")

    def problem() -> str:
        status = json.loads(kubectl("get", "job", job, "-o", "json"))["status"]
        ended = [one["type"] for one in status.get("conditions", ()) if one["status"] == "True"]
        assert "Failed" not in ended, kubectl("logs", f"job/{job}", "--tail=20", check=False)
        return "" if "Complete" in ended else f"{status}"

    release.cluster.until(problem, f"the job {job} is complete", timeout_s=180)
    return kubectl("logs", f"job/{job}")


def send(release: Release, first: int, count: int) -> None:
    text = "\n".join(f"message {number}" for number in range(first, first + count))
    release.cluster.toolbox("bindery", "produce", TOPIC, stdin=text)


def readable(release: Release) -> list[str]:
    return release.cluster.toolbox("bindery", "consume", TOPIC).splitlines()


def test_kubernetes_has_the_route_and_the_objects_of_the_operator(release: Release) -> None:
    kubectl = release.cluster.kubectl
    route = json.loads(kubectl("get", "httproute", f"{release.cluster.fullname}-broker", "-o", "json"))["spec"]
    assert [rule["timeouts"]["request"] for rule in route["rules"]] == ["0s", "60s"]
    for name, kind in (("of-the-operator", "map"), (f"{release.cluster.fullname}-of-the-operator", "text")):
        assert json.loads(kubectl("get", "configmap", name, "-o", "json"))["data"] == {"kind": kind}


def test_after_the_loss_of_zookeepers_data_every_acknowledged_message_is_readable(release: Release) -> None:
    cluster, kubectl = release.cluster, release.cluster.kubectl
    send(release, 0, BEFORE)
    said = run_job(release, "backup", "backup")
    assert "/backups/metadata-" in said
    status = cluster.bindery("recovery", "status")[0]["backup"]
    assert (status["has_failed"], status["is_uploaded"]) == (False, False)
    assert status["nodes"] > 20
    send(release, BEFORE, AFTER)  # to a ledger of the backup
    expected = [f"message {number}" for number in range(BEFORE + AFTER)]
    assert readable(release) == expected

    wanted = cluster.wanted()
    for components in (SERVICES, ("zookeeper",)):  # bookies report their stop to ZooKeeper
        for component in components:
            kubectl("scale", cluster.workload(component), "--replicas=0")
        stopping = f"app.kubernetes.io/component in ({','.join(components)})"
        kubectl("wait", "--for=delete", "pod", "-l", stopping, "--timeout=120s", timeout_s=150)
    claim = f"data-{cluster.fullname}-zookeeper-1"
    before = cluster.claims()[claim]
    kubectl("delete", "pvc", claim, timeout_s=120)
    kubectl("scale", cluster.workload("zookeeper"), f"--replicas={wanted['zookeeper']}")
    kubectl("rollout", "status", cluster.workload("zookeeper"), "--timeout=120s", timeout_s=150)
    assert cluster.claims()[claim] != before, "ZooKeeper is empty"

    said = run_job(release, "restore", "restore")
    assert "nodes" in said
    for component in SERVICES:
        kubectl("scale", cluster.workload(component), f"--replicas={wanted[component]}")
    cluster.until(lambda: "; ".join(cluster.not_ready()), "all pods are ready", timeout_s=300)
    cluster.until(
        lambda: "" if readable(release) == expected else "messages are missing", "all are readable", timeout_s=90
    )
    send(release, BEFORE + AFTER, AFTER)
    assert len(readable(release)) == BEFORE + 2 * AFTER


def test_the_volume_keeps_the_newest_backups_and_the_restored_cluster_is_backed_up(release: Release) -> None:
    for number in range(2):
        run_job(release, f"again-{number}", "backup")
    kubectl = release.cluster.kubectl
    kubectl("create", "job", "look", f"--from=cronjob/{release.cluster.fullname}-backups")
    kubectl("wait", "--for=condition=Ready", "pod", "-l", "job-name=look", "--timeout=120s", timeout_s=150)
    listed = kubectl("exec", "job/look", "--", "bindery", "cluster", "backups", "list", "/backups", "--json")
    found = [json.loads(line) for line in listed.splitlines()]
    assert len(found) == 2
    assert len({one["cluster"] for one in found}) == 1, "the restored cluster is the same one"
    kubectl("delete", "job", "look", "--cascade=foreground", timeout_s=120)


def test_autoscaling_is_enabled_without_a_moment_with_fewer_brokers(release: Release) -> None:
    kubectl = release.cluster.kubectl
    release.upgrade(["broker.replicas=2", "upgradeGate.force=true"], what="to two brokers")
    workload = release.cluster.workload("broker")
    uids = {pod.uid for pod in release.cluster.pods("broker")}
    assert len(uids) == 2
    scaling = "broker.autoscaling.enabled=true,broker.autoscaling.minReplicas=1"
    release.upgrade([scaling, "upgradeGate.force=true"], what="to autoscaling")
    assert kubectl("get", workload, "-o", "jsonpath={.spec.replicas}") == "2"
    assert {pod.uid for pod in release.cluster.pods("broker")} == uids, "no broker was stopped"
    assert "bindery-broker" in kubectl("get", "horizontalpodautoscaler", "-o", "name")
