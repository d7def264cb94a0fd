"""For all tests: check that helper modules have unique names, let the workers share the work of collecting, start the
longest files first, share one Spark session among the files that use it, undo changes of the logging configuration, and
let examples of properties take as long as they do.

E2E_SAMPLE=<seed>: a third of the tests with the marker `long_run`, chosen by the seed, as in `.ci/run`. Otherwise all.
`long_run(together=True)`: the tests of a file need one another, and count as one.
"""

import logging
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

import hypothesis
import pytest
import structlog
from bindery_kit.observability.logs import CHATTY

hypothesis.settings.register_profile("bindery", deadline=None)  # a busy machine takes seconds for milliseconds
hypothesis.settings.load_profile("bindery")
ROOT: Final = Path(__file__).parent
SHARES: Final = 3
"""A sample has one of so many shares of the tests with the marker `long_run`."""
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
    "spark-jobs/tests/audit/second_pass/test_second_pass.py",
    "spark-jobs/tests/audit/test_run.py",
    "spark-jobs/tests/audit/checks/test_copies.py",
    "spark-jobs/tests/audit/checks/test_coverage.py",
    "spark-jobs/tests/audit/checks/test_ledgers.py",
    "spark-jobs/tests/audit/checks/test_marks.py",
    "spark-jobs/tests/audit/checks/test_matching.py",
    "spark-jobs/tests/audit/checks/test_topics.py",
    "spark-jobs/tests/examples/test_enrich.py",
    "spark-jobs/tests/sources/test_ledgers.py",
    "spark-jobs/tests/sources/test_secured_cluster.py",
    "spark-jobs/tests/sources/sink/test_messages.py",
    "spark-jobs/tests/sources/sink/test_writer.py",
    "spark-jobs/tests/sources/topic/test_source.py",
    "spark-jobs/tests/topics/test_count.py",
)
"""Patterns of test files that run in one worker: a Spark session takes half a minute of one core to start and warm up.
All files that use the fixture `spark` are here; a file that is missing ends the run with an error."""
LONGEST: Final = (
    *ONE_SPARK,
    "services/auditor/tests/*test_process.py",
    "cli/tests/*test_kill_all.py",
    "cli/tests/*test_move_to_secure.py",
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


def files_with_spark(items: Sequence[pytest.Item]) -> set[str]:
    """Return the paths, relative to the root, of the test files that use the fixture `spark`."""
    return {item.path.relative_to(ROOT).as_posix() for item in items if "spark" in getattr(item, "fixturenames", ())}


def rotated(folders: Sequence[str], *, worker: int, workers: int, root: Path) -> list[str]:
    """Return `folders`, beginning with another one for each worker, so that each has about as many files before it."""
    counts = [1 + sum(1 for _ in (root / folder).rglob("test_*.py")) for folder in folders]
    before, start = 0, 0
    while start < len(folders) - 1 and before * workers < worker * sum(counts):
        before += counts[start]
        start += 1
    return [*folders[start:], *folders[:start]]


def pytest_configure(config: pytest.Config) -> None:
    """Rotate what a worker of xdist collects.

    Without bytecode of the tests, pytest rewrites their asserts, which takes most of the time of a collection. All
    workers collect all tests; if each one begins elsewhere, it finds most of the bytecode written by the others.
    """
    name, workers = os.environ.get("PYTEST_XDIST_WORKER", ""), os.environ.get("PYTEST_XDIST_WORKER_COUNT", "")
    if name and workers and all((ROOT / argument).exists() for argument in config.args):
        config.args[:] = rotated(config.args, worker=int(name.removeprefix("gw")), workers=int(workers), root=ROOT)


def pytest_sessionstart(session: pytest.Session) -> None:
    if doubled := helpers_of_one_name(ROOT):
        lines = [f"  {name}: {', '.join(at)}" for name, at in sorted(doubled.items())]
        raise pytest.UsageError("\n".join(["test helpers share one import path and need unique names:", *lines]))
    # No test reads these logs, and formatting a traceback with all local variables takes seconds.
    structlog.dev.ConsoleRenderer.get_active().exception_formatter = structlog.dev.plain_traceback


def left_out(names: Sequence[str], sample: str) -> set[str]:
    """Return what is not in the sample of this seed. The order of `names` has no effect."""
    ordered = sorted(names)
    return set(ordered) - set(ordered[int(sample) % SHARES :: SHARES])


def sampled_unit(item: pytest.Item) -> str | None:
    """Return what a test is sampled with: itself, or its file if the marker says `together`; None: it always runs."""
    marker = item.get_closest_marker("long_run")
    if marker is None:
        return None
    return item.path.relative_to(ROOT).as_posix() if marker.kwargs.get("together") else item.nodeid


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start the longest files first. Workers also sort by path, because all of them must have the same order."""
    if sample := os.environ.get("E2E_SAMPLE"):
        units = {item.nodeid: unit for item in items if (unit := sampled_unit(item)) is not None}
        absent = left_out(sorted(set(units.values())), sample)
        config.hook.pytest_deselected(items=[item for item in items if units.get(item.nodeid) in absent])
        items[:] = [item for item in items if units.get(item.nodeid) not in absent]
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    ranks: dict[Path, tuple[int, str]] = {}
    for item in items:
        if item.path not in ranks:
            path = item.path.relative_to(ROOT).as_posix()
            ranks[item.path] = rank(path, LONGEST), path if is_worker else ""
    if unlisted := files_with_spark(items) - set(ONE_SPARK):
        raise pytest.UsageError(f"these files use the fixture `spark`; add them to ONE_SPARK: {sorted(unlisted)}")
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

    A service or a command that runs inside a test configures all loggers, also those of the standard library. A later
    test would capture nothing: a cached logger keeps the configuration, and loggers keep their levels and handlers.
    """
    configure, root = structlog.configure, logging.getLogger()
    handlers = [*root.handlers]
    levels = {logger: logger.level for logger in (root, *map(logging.getLogger, CHATTY))}

    def uncached(**settings: Any) -> None:
        configure(**{**settings, "cache_logger_on_first_use": False})

    monkeypatch.setattr(structlog, "configure", uncached)
    yield
    if structlog.is_configured():
        structlog.reset_defaults()
    root.handlers[:] = handlers
    for logger, level in levels.items():
        logger.setLevel(level)


@pytest.fixture
def check_section() -> Callable[[str, str, str], None]:
    """Compare a generated section of a document: `check_section(document, name, text)`.

    `document`: path relative to `docs`. The section is what stands between `<!-- NAME: begin -->` and
    `<!-- NAME: end -->`. With UPDATE_DOCUMENTS=1 in the environment the section is written instead.
    """

    def check(document: str, name: str, text: str) -> None:
        path = ROOT / "docs" / document
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        before, _, rest = path.read_text().partition(begin)
        old, found, after = rest.partition(end)
        assert found, f"{path} has no section {name}: add the lines {begin.strip()} and {end}"
        if os.environ.get("UPDATE_DOCUMENTS"):
            path.write_text(f"{before}{begin}{text}\n{end}{after}")
            return
        assert old == f"{text}\n", f"docs/{document} differs from the code: run this test with UPDATE_DOCUMENTS=1"

    return check
