"""`helm install` with no values on a laptop's cluster."""

import pytest
from bindery_e2e.cluster.cluster import API_TIMEOUT_S
from bindery_e2e.cluster.release import Release, requested
from bindery_e2e.runs.session import READY_S_MAX

CORES_MAX = 1.0
MEMORY_MAX = 1.2 * 2**30
HELM_TEST_S_MAX = 60.0

pytestmark = pytest.mark.timeout(900)  # the first one builds the images


def test_it_is_ready_within_two_minutes(default_release: Release) -> None:
    ((what, seconds),) = default_release.timings
    assert what == "install"
    assert seconds < READY_S_MAX
    assert default_release.cluster.not_ready() == []
    print(f"ready after {seconds:.1f} s")


def test_all_it_asks_for_is_a_core_and_a_little_more_than_a_gibibyte(default_release: Release) -> None:
    """Jobs that are over count too: they asked for it while they ran."""
    cluster = default_release.cluster
    cores, size = requested(cluster.core.list_namespaced_pod(cluster.namespace, _request_timeout=API_TIMEOUT_S).items)
    print(f"requested: {cores:.3f} cores, {size / 2**20:.0f} MiB")
    assert cores <= CORES_MAX
    assert size <= MEMORY_MAX


def test_helm_test_is_green_within_a_minute(default_release: Release) -> None:
    seconds = default_release.test()
    print(f"helm test: {seconds:.1f} s")
    assert seconds < HELM_TEST_S_MAX


def test_no_container_had_to_be_started_twice(default_release: Release) -> None:
    restarts = {pod.name: pod.restarts for pod in default_release.cluster.pods() if pod.restarts}
    assert restarts == {}


def test_an_uninstall_leaves_nothing_but_the_data(default_release: Release) -> None:
    """Last: what was stored outlives a mistake."""
    cluster = default_release.cluster
    before = cluster.claims()
    default_release.uninstall()
    cluster.until(
        lambda: cluster.kubectl("get", "pods", "--field-selector=status.phase!=Succeeded", "-o", "name").strip(),
        "nothing runs any more", timeout_s=90,
    )  # fmt: skip
    assert cluster.kubectl("get", "statefulsets,deployments,services", "-o", "name").strip() == ""
    assert len(before) == 9
    assert cluster.claims() == before
