"""Commands of helm and of image builds, and sums of resource requests."""

from pathlib import Path
from types import SimpleNamespace as Thing

import pytest
from bindery_e2e.cluster.cluster import Cluster
from bindery_e2e.cluster.commands import CommandFailed
from bindery_e2e.cluster.images import BROKEN_TAG, Images
from bindery_e2e.cluster.release import CPU, MEMORY, Release, quantity, requested

from .test_cluster import FakeApps, FakeCore, Recorded


def release_of(runner: Recorded) -> Release:
    cluster = Cluster(FakeCore([]), FakeApps(), namespace="ns", runner=runner)
    return Release(cluster, chart=Path("chart"), runner=runner)


def test_an_install_waits_with_its_values_and_settings() -> None:
    runner = Recorded()
    release_of(runner).install([Path("a.yaml")], ["bookie.replicas=5"], timeout_s=90)
    assert runner.commands == [
        ["helm", "-n", "ns", "install", "bindery", "chart", "--wait", "--timeout=90s", "--values=a.yaml",
         "--set=bookie.replicas=5"]
    ]  # fmt: skip


def test_an_upgrade_keeps_the_values_in_use() -> None:
    runner = Recorded()
    release = release_of(runner)
    release.upgrade(["global.imageTag=0.1.1"])
    release.rollback()
    assert runner.commands[0][3:7] == ["upgrade", "bindery", "chart", "--reset-then-reuse-values"]
    assert runner.commands[1][3:6] == ["rollback", "bindery", "--wait"]
    assert [what for what, _ in release.timings] == ["upgrade global.imageTag=0.1.1", "rollback"]


def test_a_failed_install_is_timed_too() -> None:
    release = release_of(Recorded(CommandFailed("timed out")))
    with pytest.raises(CommandFailed):
        release.install()
    assert [what for what, _ in release.timings] == ["install"]


def test_logs_of_a_failure_are_collected_even_if_some_cannot_be_read(tmp_path: Path) -> None:
    refused = CommandFailed("the server is away")
    answers: list[str | Exception] = ["pods", "objects", "yaml", refused, "events", "values"]
    runner = Recorded(*answers, "pod/b-0\n", "said", "said before it died")
    release_of(runner).collect(tmp_path)
    assert (tmp_path / "nodes.txt").read_text() == "could not be read: the server is away\n"
    assert (tmp_path / "b-0.log").read_text() == "said"
    assert (tmp_path / "b-0.previous.log").read_text() == "said before it died"


@pytest.mark.parametrize(("text", "value"), [("125m", 0.125), ("1", 1.0), ("0.5", 0.5)])
def test_cpu_quantities_become_cores(text: str, value: float) -> None:
    assert quantity(text, CPU) == pytest.approx(value)


@pytest.mark.parametrize(("text", "value"), [("144Mi", 144 * 2**20), ("1Gi", 2**30), ("128", 128), ("1k", 1000)])
def test_memory_quantities_become_bytes(text: str, value: float) -> None:
    assert quantity(text, MEMORY) == value


def test_an_unknown_unit_is_rejected() -> None:
    with pytest.raises(ValueError, match="12Xi"):
        quantity("12Xi", MEMORY)


def test_requests_of_all_containers_add_up() -> None:
    one = Thing(resources=Thing(requests={"cpu": "100m", "memory": "64Mi"}))
    none = Thing(resources=None)
    pods = [Thing(spec=Thing(containers=[one, none])), Thing(spec=Thing(containers=[one]))]
    cores, size = requested(pods)
    assert cores == pytest.approx(0.2)
    assert size == 128 * 2**20


def test_images_are_built_by_the_repositorys_own_script_and_loaded() -> None:
    runner = Recorded()
    images = Images(runner=runner, environment={"E2E_LOAD": "my load"}.get, say=lambda text: None)
    assert images.version("0.1.1")[0] == "bindery/bookie:0.1.1"
    build, load = runner.commands
    assert "docker/build.py" in build
    assert build[-2:] == ["--version", "0.1.1"]
    assert load == [
        "my",
        "load",
        "bindery/bookie:0.1.1",
        "bindery/broker:0.1.1",
        "bindery/auditor:0.1.1",
        "bindery/toolbox:0.1.1",
    ]


def test_the_broken_broker_is_based_on_the_image_under_test() -> None:
    runner = Recorded()
    images = Images(runner=runner, environment={"E2E_BUILD": "my build"}.get)
    assert images.broken() == f"bindery/broker:{BROKEN_TAG}"
    build, load = runner.commands
    assert build[:3] == ["my", "build", f"bindery/broker:{BROKEN_TAG}"]
    assert "BASE=bindery/broker:0.1.0" in build
    assert load == ["kind", "load", "docker-image", f"bindery/broker:{BROKEN_TAG}"]


def test_images_that_are_present_are_not_built_again() -> None:
    runner = Recorded()
    images = Images(runner=runner, environment={"E2E_IMAGES": "present"}.get)
    assert len(images.version()) == 4
    assert images.broken()
    assert runner.commands == []
