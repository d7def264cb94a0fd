"""Install the releases under test, each in its own namespace, and keep their logs after a failure.

E2E_REPORTS (default `e2e-reports`): directory for histories, reports and the logs of pods.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bindery_e2e.cluster.images import NEXT_VERSION, VERSION, Images
from bindery_e2e.cluster.release import Release
from bindery_e2e.runs.session import CHAOS_VALUES, READY_S_MAX, installed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.kubernetes)
    # The audit tests run last: Spark uses all cores, and other steps of .ci/run that need them have then ended.
    items.sort(key=lambda item: item.path == here / "test_audit.py")


@pytest.fixture(scope="session")
def reports() -> Path:
    return Path(os.environ.get("E2E_REPORTS", "e2e-reports")) / time.strftime("e2e-%Y%m%d-%H%M%S")


@pytest.fixture(scope="session")
def images() -> Images:
    """This tree's images, built and loaded. Tests request the other images themselves."""
    made = Images()
    made.version(VERSION)
    return made


@pytest.fixture(scope="module")
def default_release(images: Images, reports: Path) -> Iterator[Release]:
    """A release that was installed without values."""
    with installed("bindery-e2e", timeout_s=READY_S_MAX, folder=reports / "default") as release:
        yield release


@pytest.fixture(scope="module")
def chaos_release(images: Images, reports: Path) -> Iterator[Release]:
    """A release with at least two pods of each service and with delays of seconds."""
    images.version(NEXT_VERSION)
    with installed("bindery-e2e-faults", values=[CHAOS_VALUES], folder=reports / "faults") as release:
        yield release
