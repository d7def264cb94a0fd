"""What makes .ci/run fail, what it records of a run of pytest, and the order of its targets."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pipeline import PAIRS, ROOT, CheckFailed, Pipeline, Step, beside_steps, left_out, main_steps

STEPS = [*main_steps(), *beside_steps(0)]


def outcome(*failed: str, collected: int = 10, complete: bool = True) -> dict[str, Any]:
    return {
        "complete": complete,
        "collected": collected,
        "skipped": 0,
        "failed": list(failed),
        "passed": collected - len(failed) if complete else 1,
    }


def recorded(folder: Path, text: str, *options: str, **environment: str) -> dict[str, Any]:
    """The outcome that a pytest run of `text` records."""
    (folder / "test_sample.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\naddopts =\n")
    record = folder / "outcome.json"
    variables = {**os.environ, "PYTHONPATH": str(ROOT / ".ci"), "BINDERY_CI_OUTCOME": str(record), **environment}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "ci_outcome", "-p", "no:cacheprovider", *options]
    subprocess.run(command, cwd=folder, env=variables, capture_output=True, timeout=110, check=False)
    return dict(json.loads(record.read_text()))


TESTS = """
import pytest

@pytest.mark.parametrize("words", ["a b", "a c"])
def test_many(words):
    assert words == "a b"

@pytest.mark.skip
def test_skipped(): pass

@pytest.fixture
def broken():
    yield
    raise OSError

def test_teardown(broken): pass

def test_good(): pass
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_outcomes_are_recorded_by_test_id(tmp_path: Path, workers: str) -> None:
    assert recorded(tmp_path, TESTS, "-n", workers) == {
        "complete": True,
        "collected": 5,
        "passed": 2,
        "skipped": 1,
        "failed": ["test_sample.py::test_many[a c]", "test_sample.py::test_teardown"],
    }


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize(
    "text",
    [
        "import nothing_of_this_name",
        "import pytest\ndef test_one(): assert False\ndef test_two(): pytest.exit('stop')\ndef test_three(): pass",
    ],
    ids=["collection error", "pytest.exit"],
)
def test_a_run_that_stopped_early_is_not_complete(tmp_path: Path, workers: str, text: str) -> None:
    assert not recorded(tmp_path, text, "-n", workers)["complete"]


def test_a_sample_is_one_test_chosen_by_the_seed(tmp_path: Path) -> None:
    text = "".join(f"def test_{name}(): assert False\n" for name in "abc")
    chosen = [recorded(tmp_path, text, "-n", "0", BINDERY_CI_SAMPLE=str(seed))["failed"] for seed in range(4)]
    assert [one[0][-1] for one in chosen] == ["a", "b", "c", "a"]


class Scripted(Pipeline):
    """`make` is a script: exit code and outcome of each call."""

    def __init__(self, folder: Path, *made: tuple[int, dict[str, Any] | None]) -> None:
        super().__init__(folder, 7)
        self.made = list(made)

    def _make(self, step: Step) -> tuple[int, Path, dict[str, Any] | None, float]:
        log = self.folder / "log"
        log.touch()
        code, found = self.made.pop(0)
        return code, log, found, 1.0


PASSED = (0, outcome())


def test_a_target_that_passes_is_run_once_and_reported(tmp_path: Path) -> None:
    pipeline = Scripted(tmp_path, PASSED, PASSED)
    pipeline.run(Step("test", is_pytest=True))
    assert len(pipeline.made) == 1
    assert "10 tests" in pipeline.table()


@pytest.mark.parametrize(
    ("step", "made"),
    [
        (Step("test", is_pytest=True), (2, outcome("a.py::test_one"))),
        (Step("lint"), (2, None)),
        (Step("test", is_pytest=True), (0, None)),
        (Step("test", is_pytest=True), (0, outcome(complete=False))),
        (Step("test", is_pytest=True), (0, outcome(collected=0))),
    ],
    ids=["a failed test", "a failed tool", "no outcome", "tests not run", "no tests"],
)
def test_a_target_that_failed_or_did_not_run_every_test_fails_the_run_at_once(
    tmp_path: Path, step: Step, made: tuple[int, dict[str, Any] | None]
) -> None:
    pipeline = Scripted(tmp_path, made, PASSED)
    with pytest.raises(CheckFailed, match=step.target):
        pipeline.run(step)
    assert len(pipeline.made) == 1, "nothing is run again"


def test_the_seed_of_the_run_selects_every_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BINDERY_KILL_SEED", "E2E_SAMPLE"):
        monkeypatch.delenv(name, raising=False)
    environment = Pipeline(tmp_path, 1234).environment
    assert environment["BINDERY_KILL_SEED"] == "1234"
    assert environment["E2E_SAMPLE"] == "1234"


def root_conftest() -> Any:
    spec = importlib.util.spec_from_file_location("root_conftest", ROOT / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    return conftest


def test_samples_of_three_seeds_in_a_row_have_every_long_run_once() -> None:
    names = [f"test_{number}" for number in range(10)]
    absent = root_conftest().left_out
    samples = [set(names) - absent(names, str(seed)) for seed in (7, 8, 9)]
    assert sorted(map(len, samples)) == [3, 3, 4]
    assert set().union(*samples) == set(names)
    assert absent(names[::-1], "7") == absent(names, "7"), "workers collect in different orders"


def test_the_longest_files_exist() -> None:
    """A pattern of conftest.py that matches no file would silently have no effect."""
    conftest = root_conftest()
    files = [
        path.relative_to(ROOT).as_posix()
        for folder in ("libs", "services", "cli", "spark-jobs", "e2e")
        for path in (ROOT / folder).rglob("test_*.py")
    ]
    for pattern in conftest.LONGEST:
        assert any(conftest.rank(file, [pattern]) == 0 for file in files), pattern


def test_targets_exist_and_every_test_file_belongs_to_one() -> None:
    """A test file of e2e that no target names would never run."""
    makefile = (ROOT / "Makefile").read_text()
    for step in STEPS:
        assert f"\n{step.target}:" in makefile, step.target
    recipes = {block.split(":", 1)[0]: block for block in makefile.split("\n.PHONY: ")}
    run = "\n".join(
        block.split("\n", 1)[1]
        for name, block in recipes.items()
        if name.split("\n")[0] in {*(step.target for step in STEPS), "e2e"}
    )
    covered_by_test = ("e2e/tests", "e2e/simulation")
    for path in sorted((ROOT / "e2e").rglob("test_*.py")):
        name = str(path.relative_to(ROOT))
        is_run = name.startswith(covered_by_test) or any(word in run for word in (name, str(Path(name).parent)))
        assert is_run, f"no target of .ci/run runs {name}"


MAKEFILE = """\
RECORD = {"complete": true, "collected": 3, "passed": 3, "skipped": 0, "failed": []}
%:
\t@echo begin $@ >>order; ./script $@; echo '$(RECORD)' >"$${BINDERY_CI_OUTCOME:-/dev/null}"; echo end $@ >>order
"""
WITH_CLUSTER = """\
#!/usr/bin/env bash
set -m
trap 'echo down >>order' EXIT
trap 'kill -TERM "$child"' TERM
"$@" & child=$!
wait "$child"
"""


def played(folder: Path, script: str) -> tuple[int, str, list[str]]:
    """Exit code, output and order of events of `.ci/run` in a folder whose `make`, cluster and Python are scripts."""
    (folder / ".ci").mkdir()
    (folder / ".venv/bin").mkdir(parents=True)
    for name in ("run", "e2e", "pipeline.py", "ci_outcome.py"):
        shutil.copy(ROOT / ".ci" / name, folder / ".ci" / name)
    scripts = {
        ".ci/with-cluster": WITH_CLUSTER,
        ".venv/bin/python": "#!/bin/sh\necho images >>order\n",
        "script": script,
    }
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "Makefile").write_text(MAKEFILE)
    done = subprocess.run([folder / ".ci/run"], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr, (folder / "order").read_text().splitlines()


def test_every_target_is_run_and_reported(tmp_path: Path) -> None:
    code, output, order = played(tmp_path, "#!/bin/sh\n[ $1 = fuzz ] && echo '9 frames on 2 connections'; exit 0\n")
    assert code == 0, output
    table = output.partition("=== every check holds")[2]
    absent = left_out(0)
    for step in [*STEPS, Step("e2e")]:
        assert (f"end {step.target}" in order) is (step.target not in absent)
        assert f"\n  {step.target} " in table, step.target
    assert table.count("left out, sample 0") == len(absent)
    tested = [step.target for step in [*STEPS, Step("e2e", is_pytest=True)] if step.is_pytest]
    assert table.count("3 tests") == len(set(tested) - absent)
    assert "9 frames on 2 connections" in table
    assert order.index("images") > order.index("end setup")
    assert order.index("begin e2e") > order.index("end test"), "tests on Kubernetes and of processes disturb each other"
    assert order[-1] == "down" or "down" in order[order.index("end e2e") :]


def test_a_run_has_one_group_of_each_pair_and_leaves_out_nothing_else() -> None:
    targets = {step.target for step in STEPS}
    assert {target for pair in PAIRS for group in pair for target in group} <= targets
    seen = {frozenset(left_out(seed)) for seed in range(1_764_000_000, 1_764_000_040)}
    assert seen == {frozenset(first + second) for first in PAIRS[0] for second in PAIRS[1]}, (
        "forty commits have every combination"
    )


@pytest.mark.parametrize("target", ["lint", "chart", "e2e"])
def test_the_first_failure_ends_the_run_and_takes_the_cluster_down(tmp_path: Path, target: str) -> None:
    script = f"#!/bin/sh\nif [ $1 = {target} ]; then echo 'FAILED a.py::test_one - E   lost'; kill $PPID; exit 1; fi\n"
    if target != "e2e":
        script += "[ $1 = e2e ] && sleep 50\n"
    code, output, order = played(tmp_path, script + "exit 0\n")
    assert code == 1, output
    assert f"=== FAILED: make {target} failed" in output or (target == "e2e" and "=== FAILED" in output)
    assert "FAILED a.py::test_one" in output.partition("\n--- ")[2], "the end of the output says why"
    assert "down" in order
    assert f"end {target}" not in order
