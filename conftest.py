"""For all tests: check that helper modules have unique names, start the longest files first, share one Spark session
among the files that use it, and undo changes of the logging configuration.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

import pytest
import structlog

ROOT: Final = Path(__file__).parent
TEST_DIRECTORIES: Final = (
    ".ci/tests",
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
"""Patterns of the directories with tests, relative to the root."""
ONE_SPARK: Final = (
    "spark-jobs/tests/audit/test_run.py",
    "spark-jobs/tests/audit/checks/test_copies.py",
    "spark-jobs/tests/audit/checks/test_coverage.py",
    "spark-jobs/tests/audit/checks/test_ledgers.py",
    "spark-jobs/tests/audit/checks/test_marks.py",
    "spark-jobs/tests/audit/checks/test_matching.py",
    "spark-jobs/tests/audit/checks/test_topics.py",
    "spark-jobs/tests/sources/test_ledgers.py",
    "spark-jobs/tests/sources/topic/test_source.py",
    "spark-jobs/tests/topics/test_count.py",
)
"""Patterns of test files that run in one worker: a Spark session takes half a minute of one core to start and warm up.
All files that use the fixture `spark` are here, except for the one in LONGEST."""
LONGEST: Final = (
    *ONE_SPARK,
    "spark-jobs/tests/audit/second_pass/test_second_pass.py",
    "services/auditor/tests/*test_process.py",
    "cli/tests/*test_kill_all.py",
    "cli/tests/*test_recovery_cluster.py",
    "e2e/simulation/tests/service/*test_world.py",
    "spark-jobs/tests/*test_session.py",
    "e2e/tests/*test_traffic_liar.py",
    "e2e/tests/*test_traffic_cluster.py",
    "cli/tests/*test_standalone.py",
    "libs/recovery/tests/*test_service_zookeeper.py",
    "services/bookie/tests/*test_process.py",
)
"""Patterns of the longest test files, the longest first. Each file runs in one worker, so a long file that starts last
leaves the other workers idle."""


def rank(path: str, patterns: Sequence[str]) -> int:
    """Return the index of the first pattern that matches, or the number of patterns. `path` is relative to the root."""
    return next((index for index, pattern in enumerate(patterns) if fnmatch(path, pattern)), len(patterns))


def helpers_of_one_name(root: Path) -> dict[str, list[str]]:
    """Return name -> paths of test helper modules whose name is not unique or is that of a standard library module.

    The folders of all tests are on one import path, so the first module imported under a name would serve every test.
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
        raise pytest.UsageError("\n".join(["test helpers share one import path and need unique names:", *lines]))
    # No test reads these logs, and formatting a traceback with all local variables takes seconds.
    structlog.dev.ConsoleRenderer.get_active().exception_formatter = structlog.dev.plain_traceback


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks: dict[Path, int] = {}
    for item in items:
        if item.path not in ranks:
            ranks[item.path] = rank(item.path.relative_to(ROOT).as_posix(), LONGEST)
    items.sort(key=lambda item: ranks[item.path])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return ONE_SPARK[0] if rank(file, ONE_SPARK) < len(ONE_SPARK) else file

    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def logs_as_they_were(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the logging configuration after each test.

    A service that runs inside a test configures all loggers. A cached logger would keep that configuration, and a later
    test would capture nothing.
    """
    configure = structlog.configure

    def uncached(**settings: Any) -> None:
        configure(**{**settings, "cache_logger_on_first_use": False})

    monkeypatch.setattr(structlog, "configure", uncached)
    yield
    if structlog.is_configured():
        structlog.reset_defaults()
