"""A pytest plugin of `pipeline.py`, loaded with `-p ci_outcome`.

If BINDERY_CI_OUTCOME names a file, the outcome of each test is recorded there by test id. The record says whether the
run was complete, that is, whether every collected test was run and pytest itself ended in order. The end of each
failure is printed at once, because pytest prints failures at its own end, and the run may be ended before.

If BINDERY_CI_SAMPLE is a number, one of the collected tests is run, chosen by that number.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ORDERLY = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
FAILURE_LINES_MAX = 40


class Outcome:
    def __init__(self, path: Path, config: pytest.Config) -> None:
        self._path = path
        self._config = config
        self._collected: set[str] = set()
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._skipped: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected |= {item.nodeid for item in session.items}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Iterable[str]) -> None:
        self._collected |= set(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
            lines = report.longreprtext.splitlines()[-FAILURE_LINES_MAX:]
            self._config.get_terminal_writer().write("\n".join(["", f"FAILED {report.nodeid}", *lines, ""]))
        elif report.skipped:
            self._skipped.add(report.nodeid)
        if str(report.when) in ("teardown", "???"):  # "???": its xdist worker died
            self._finished.add(report.nodeid)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        record = {
            "complete": exitstatus in ORDERLY and bool(self._collected) and self._collected == self._finished,
            "collected": len(self._collected),
            "passed": len(self._finished - self._failed - self._skipped),
            "skipped": len(self._skipped - self._failed),
            "failed": sorted(self._failed),
        }
        self._path.write_text(json.dumps(record))


class Sample:
    def __init__(self, seed: int) -> None:
        self._seed = seed

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if items:
            chosen = items[self._seed % len(items)]
            config.hook.pytest_deselected(items=[item for item in items if item is not chosen])
            items[:] = [chosen]


def pytest_configure(config: Any) -> None:
    if seed := os.environ.get("BINDERY_CI_SAMPLE"):
        config.pluginmanager.register(Sample(int(seed)))
    path = os.environ.get("BINDERY_CI_OUTCOME")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcome(Path(path), config))
