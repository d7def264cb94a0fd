"""Files of a run: its plan, its progress and its findings.

| below OUT/<run id>        | content                                                                                 |
|---------------------------|-----------------------------------------------------------------------------------------|
| checkpoint/run.json       | options, plan, and facts about the cluster when the run began                           |
| checkpoint/before/<table> | Parquet: metadata at the beginning; after/: at the end                                  |
| checkpoint/groups/<n>     | Parquet findings/ and coverage/ of one finished group, created by a rename              |
| checkpoint/second/<n>     | Parquet findings/, coverage/, said/ (COPY_STATES) and batch.json of a second-pass batch |
| options.json              | options, stored again because checkpoint/ of a finished run may be deleted              |
| lock                      | the process that works on the run, see `run_lock`                                       |
| findings/*.parquet        | all findings                                                                            |
| marks.json                | ledgers that were marked at the end of the run, for the next run                        |
| summary.json, summary.txt | the verdict                                                                             |
| actions.json              | marks that `--apply` would write                                                        |
| applied.json              | marks that `--apply` wrote; missing: not finished or not requested                      |
| report.html, metrics.prom | report for people, metrics for Prometheus                                               |
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bindery_core.errors import BadRequest

FORMAT: Final = 2
"""Version of the files. Version 1 did not record which bookies could not list their data."""
_RUN: Final = "checkpoint/run.json"
_OPTIONS: Final = "options.json"
_APPLIED: Final = "applied.json"
_BATCH: Final = "batch.json"


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Directory of one run."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def findings(self) -> Path:
        return self.path / "findings"

    @property
    def is_finished(self) -> bool:
        return (self.path / "summary.json").exists()

    @property
    def is_begun(self) -> bool:
        """Whether the checkpoint has a plan."""
        return (self.path / _RUN).exists()

    @property
    def is_applied(self) -> bool:
        return (self.path / _APPLIED).exists()

    def table(self, when: str, name: str) -> Path:
        """`when`: before or after."""
        return self.path / "checkpoint" / when / name

    def group(self, number: int) -> Path:
        return self.path / "checkpoint" / "groups" / f"{number:05d}"

    def begin_group(self, number: int) -> Path:
        """Create an empty directory for a group that is being read."""
        return _begun(self.group(number))

    def finish_group(self, number: int) -> None:
        """Mark the group as done."""
        os.rename(self.group(number).with_suffix(".part"), self.group(number))

    def done(self) -> set[int]:
        """Numbers of the finished groups."""
        found = (self.path / "checkpoint" / "groups").glob("*")
        return {int(path.name) for path in found if path.name.isdecimal()}

    def batch(self, number: int) -> Path:
        """Directory of a batch of the second pass."""
        return self.path / "checkpoint" / "second" / f"{number:05d}"

    def begin_batch(self, number: int) -> Path:
        """Create an empty directory for a batch that is being read."""
        return _begun(self.batch(number))

    def finish_batch(self, number: int, facts: Mapping[str, Any]) -> None:
        """Mark the batch as done and store `facts`, which `batches` returns."""
        making = self.batch(number).with_suffix(".part")
        (making / _BATCH).write_text(json.dumps(facts))
        os.rename(making, self.batch(number))

    def drop_batch(self, number: int) -> None:
        shutil.rmtree(self.batch(number))

    def batches(self) -> dict[int, dict[str, Any]]:
        """Facts of the finished batches by number, ascending."""
        found = sorted(path for path in self.batch(0).parent.glob("*") if path.name.isdecimal())
        return {int(path.name): json.loads((path / _BATCH).read_text()) for path in found}

    def write_run(self, facts: Mapping[str, Any]) -> None:
        """Store what a resumed run needs."""
        self.write_json(_OPTIONS, {"format": FORMAT, "options": facts.get("options", {})})
        self.write_json(_RUN, {"format": FORMAT, **facts})

    def read_run(self) -> dict[str, Any]:
        """Raise BadRequest if the run cannot be resumed."""
        return self._read_formatted(_RUN)

    def read_options(self) -> dict[str, Any]:
        """Return the options, also of a finished run without checkpoint. Raise BadRequest if the run cannot be
        resumed."""
        name = _OPTIONS if self.is_finished and not self.is_begun else _RUN
        options: dict[str, Any] = self._read_formatted(name).get("options", {})
        return options

    def write_applied(self, facts: Mapping[str, Any]) -> None:
        """Record that `--apply` is finished."""
        self.write_json(_APPLIED, facts)

    def _read_formatted(self, name: str) -> dict[str, Any]:
        try:
            facts: dict[str, Any] = json.loads((self.path / name).read_text())
        except (OSError, ValueError) as error:
            raise BadRequest("there is no run that can be resumed", path=str(self.path), reason=str(error)) from None
        if facts.get("format") != FORMAT:
            raise BadRequest("the run was begun by another version: begin a new one", format=facts.get("format"))
        return facts

    def write_json(self, name: str, facts: Any) -> None:
        self.write_text(name, json.dumps(facts, indent=1, sort_keys=True) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write the file atomically."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        making = path.with_name(path.name + ".part")
        making.write_text(text)
        os.replace(making, path)

    def read_json(self, name: str) -> Any:
        return json.loads((self.path / name).read_text())


def run_directory(out: Path, run: str) -> RunDirectory:
    """`run`: a run id below `out`, or a path. Raise BadRequest if there is no such directory."""
    for path in (out / run, Path(run)):
        if _is_run(path):
            return RunDirectory(path.resolve())
    raise BadRequest(f"there is no audit run {run} in {out}: `bindery audit show --out {out}` lists all runs")


def runs_in(out: Path) -> list[RunDirectory]:
    """Return the runs in `out`, oldest first, which is the order of their ids."""
    found = out.iterdir() if out.is_dir() else ()
    return [RunDirectory(path) for path in sorted(found) if _is_run(path)]


def last_finished(
    out: Path, *, before: str, cluster_id: str, fits: Callable[[Mapping[str, Any]], bool] = lambda _: True
) -> RunDirectory | None:
    """The latest finished run of the same cluster that is older than the run `before`. `fits`: predicate over its
    options."""
    for run in reversed(runs_in(out)):
        if run.run_id < before and run.is_finished and run.read_json("summary.json")["cluster_id"] == cluster_id:
            try:
                options = run.read_options()
            except BadRequest:
                options = {}
            if fits(options):
                return run
    return None


def _begun(whole: Path) -> Path:
    making = whole.with_suffix(".part")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    return making


def _is_run(path: Path) -> bool:
    """Return True if `path` is a run. The checkpoint of a finished run may have been deleted."""
    return (path / "checkpoint").is_dir() or RunDirectory(path).is_finished
