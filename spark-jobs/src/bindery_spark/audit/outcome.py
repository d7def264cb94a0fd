"""The outcome of a run: its summary, findings and proposals, and the files that hold them."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bindery_spark.audit.checkpoint import RunDirectory
from bindery_spark.audit.findings.actions import Proposal
from bindery_spark.audit.findings.diff import read_findings
from bindery_spark.audit.findings.report import report_html
from bindery_spark.audit.findings.summary import BookieCoverage, Summary, metrics_text, summary_text


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a finished run."""

    summary: Summary
    findings: list[dict[str, Any]]
    proposals: list[Proposal]
    directory: RunDirectory
    unrecorded: str = ""
    """Why the run was not recorded in the cluster; empty: it was."""


def write_outputs(
    directory: RunDirectory, summary: Summary, findings: list[dict[str, Any]], wanted: list[Proposal]
) -> None:
    """Write the files of a finished run, summary.json last: a run is finished as soon as that file exists."""
    directory.write_json("actions.json", [proposal.to_json() for proposal in wanted])
    directory.write_text("report.html", report_html(summary, findings))
    directory.write_text("metrics.prom", metrics_text(summary))
    directory.write_text("summary.txt", summary_text(summary, findings))
    directory.write_text("summary.json", json.dumps(summary.to_json(), indent=1, sort_keys=True) + "\n")


def read_outcome(directory: RunDirectory) -> Outcome:
    """Read a finished run. Raise OSError if a file is missing."""
    summary = Summary.from_json(directory.read_json("summary.json"))
    wanted: list[Mapping[str, Any]] = directory.read_json("actions.json")
    return Outcome(summary, read_findings(directory.findings), [Proposal.from_json(one) for one in wanted], directory)


def bookie_coverage(
    coverage: Iterable[Mapping[str, Any]], unlisted: Mapping[str, str]
) -> tuple[list[BookieCoverage], int]:
    """Coverage by bookie, and the number of ledgers. `coverage`: rows of COVERAGE; `unlisted`: bookies whose orphaned
    data was not checked, and why."""
    sums = {bookie: BookieCoverage(bookie, 0, 0, 0, unlisted=why) for bookie, why in unlisted.items()}
    ledgers = set()
    for row in coverage:
        ledgers.add(row["ledger_id"])
        was = sums.get(row["bookie"]) or BookieCoverage(row["bookie"], 0, 0, 0, None)
        sums[row["bookie"]] = BookieCoverage(
            row["bookie"],
            was.copies + row["copies"],
            was.unknown + row["unknown"],
            was.bytes + row["bytes"],
            min(filter(None, (was.reason, row["reason"])), default=None),
            was.unlisted,
        )
    return [sums[name] for name in sorted(sums)], len(ledgers)
