"""`helm install` without values on a cluster of a laptop."""

import pytest
from bindery_e2e.cluster.cluster import API_TIMEOUT_S
from bindery_e2e.cluster.release import Release, requested
from bindery_e2e.runs.session import READY_S_MAX

CORES_MAX = 1.0
MEMORY_MAX = 1.2 * 2**30
HELM_TEST_S_MAX = 60.0

pytestmark = pytest.mark.timeout(900)  # the first one builds the images


def test_the_release_is_ready_within_two_minutes(default_release: Release) -> None:
    ((what, seconds),) = default_release.timings
    assert what == "install"
    assert seconds < READY_S_MAX
    assert default_release.cluster.not_ready() == []
    print(f"ready after {seconds:.1f} s")


def test_all_pods_together_request_at_most_one_core_and_1_2_gib(default_release: Release) -> None:
    """Completed Jobs count, because they requested their resources while they ran.

    A failed pod does not: its Job replaces it by another one after its end.
    """
    cluster = default_release.cluster
    pods = cluster.core.list_namespaced_pod(cluster.namespace, _request_timeout=API_TIMEOUT_S).items
    cores, size = requested([pod for pod in pods if pod.status.phase != "Failed"])
    print(f"requested: {cores:.3f} cores, {size / 2**20:.0f} MiB: {', '.join(pod.metadata.name for pod in pods)}")
    assert cores <= CORES_MAX
    assert size <= MEMORY_MAX


def test_helm_test_succeeds_within_a_minute(default_release: Release) -> None:
    seconds = default_release.test()
    print(f"helm test: {seconds:.1f} s")
    assert seconds < HELM_TEST_S_MAX


def test_no_container_was_restarted(default_release: Release) -> None:
    restarts = {pod.name: pod.restarts for pod in default_release.cluster.pods() if pod.restarts}
    assert restarts == {}


def test_an_uninstall_keeps_only_the_volume_claims(default_release: Release) -> None:
    """An uninstall by mistake must not delete data. This test is the last one, because it removes the release."""
    cluster = default_release.cluster
    before = cluster.claims()
    default_release.uninstall()
    cluster.until(
        lambda: cluster.kubectl("get", "pods", "--field-selector=status.phase!=Succeeded", "-o", "name").strip(),
        "no pod is running",
        timeout_s=90,
    )
    assert cluster.kubectl("get", "statefulsets,deployments,services", "-o", "name").strip() == ""
    assert len(before) == 9
    assert cluster.claims() == before
