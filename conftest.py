"""For all tests: helpers have one name each, what takes longest begins first, one Spark serves all, and logs stay as
they were."""

import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import structlog

ROOT: Final = Path(__file__).parent
TEST_DIRECTORIES: Final = (
    "libs/*/tests",
    "cli/tests",
    "e2e/simulation/tests",
    "services/*/tests",
    "spark-jobs/tests",
    "charts/tests",
    "docker/tests",
    "tools/tests",
    "e2e/tests",
)
ONE_SPARK: Final = (
    "spark-jobs/tests/test_audit_run.py",
    "spark-jobs/tests/test_checks_copies.py",
    "spark-jobs/tests/test_checks_metadata.py",
    "spark-jobs/tests/test_sources.py",
    "spark-jobs/tests/test_topic_source.py",
)
"""One worker's, all of them: Spark takes half a minute of a core until it is up and warm, once."""
LONGEST: Final = (
    *ONE_SPARK,
    "services/auditor/tests/test_process.py",
    "e2e/simulation/tests/service/test_world.py",
    "cli/tests/test_kill_all.py",
    "cli/tests/test_recovery_cluster.py",
    "e2e/tests/test_traffic_liar.py",
    "cli/tests/test_standalone.py",
    "services/bookie/tests/test_process.py",
)
"""A file is one worker's. One of these that came last would keep one core busy while the others have nothing to do."""


def helpers_of_one_name(root: Path) -> dict[str, list[str]]:
    """Name -> places, of modules that tests import and that are there twice, or are called as one of Python's own.

    The directories of all tests are on one path: whichever is imported first would serve everybody.
    """
    places: defaultdict[str, list[str]] = defaultdict(list)
    for directory in sorted(found for pattern in TEST_DIRECTORIES for found in root.glob(pattern)):
        for path in sorted(directory.rglob("*.py")):
            if path.stem not in ("conftest", "__init__") and not path.stem.startswith("test_"):
                places[path.stem].append(str(path.relative_to(root)))
    return {name: at for name, at in places.items() if len(at) > 1 or name in sys.stdlib_module_names}


def pytest_sessionstart(session: pytest.Session) -> None:
    if doubled := helpers_of_one_name(ROOT):
        lines = [f"  {name}: {', '.join(at)}" for name, at in sorted(doubled.items())]
        raise pytest.UsageError("\n".join(["test helpers need names of their own, for all share one path:", *lines]))
    # Nobody reads what is logged without a service's configuration, and a traceback with all its locals takes seconds.
    structlog.dev.ConsoleRenderer.get_active().exception_formatter = structlog.dev.plain_traceback


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {ROOT / name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return ONE_SPARK[0] if file in ONE_SPARK else file

    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def logs_as_they_were(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A service that is run inside a test configures all loggers, and they keep it from their first line on: a later
    test would wait in vain for what it captures."""
    configure = structlog.configure

    def uncached(**settings: Any) -> None:
        configure(**{**settings, "cache_logger_on_first_use": False})

    monkeypatch.setattr(structlog, "configure", uncached)
    yield
    if structlog.is_configured():
        structlog.reset_defaults()
