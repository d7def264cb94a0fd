"""A whole audit from its options to its files: what `bindery audit run` does, without the terminal."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bindery_core.errors import BinderyError
from bindery_metadata.ledgers.verified_records import Verified
from pyspark.sql import SparkSession

from bindery_spark.audit.audit import Audit, Options, Progress
from bindery_spark.audit.checkpoint import RunDirectory
from bindery_spark.audit.cluster_facts import Facts
from bindery_spark.audit.findings.actions import Proposal, proposals
from bindery_spark.audit.findings.diff import read_findings
from bindery_spark.audit.findings.report import report_html
from bindery_spark.audit.findings.summary import (
    BookieCoverage,
    Summary,
    last_audit,
    metrics_text,
    summarise,
    summary_text,
)
from bindery_spark.audit.source import Source


@dataclass(frozen=True, slots=True)
class Outcome:
    summary: Summary
    findings: list[dict[str, Any]]
    proposals: list[Proposal]
    directory: RunDirectory
    unrecorded: str = ""
    """Why the cluster was not told of the run; empty: it was."""


def run_audit(
    spark: SparkSession, source: Source, directory: RunDirectory, options: Options, *, out: Path,
    clock_ms: Callable[[], int], progress: Progress, is_new: bool,
) -> Outcome:  # fmt: skip
    """Begin the run, or go on with it, to its end. Everything is written below `directory`.

    Raises what the metadata store raises; what Spark raises is no BinderyError.
    """
    audit = Audit(spark, source, directory, options, clock_ms=clock_ms, progress=progress)
    if is_new:
        audit.begin()
    audit.read_groups()
    audit.finish(out)
    progress.phase("writing")
    findings = read_findings(directory.findings)
    verified = audit.verified(findings)
    facts = directory.read_run()
    bookies, ledgers = _of_bookies(audit.seen(), audit.unlisted())
    wanted = proposals(findings)
    summary = summarise(
        findings,
        bookies,
        run_id=directory.run_id,
        cluster_id=Facts.from_json(facts["facts"]).cluster_id,
        level=options.level,
        began_ms=facts["began_ms"],
        ended_ms=clock_ms(),
        ledgers=ledgers,
        ledgers_skipped=facts["skipped"]["ledgers"],
        ledgers_verified=len(verified),
        oldest_verified_ms=min(filter(None, (facts["skipped"]["oldest_ms"], facts["began_ms"]))),
        proposals=len(wanted),
    )
    unrecorded = _record(audit, source, options, summary, verified)
    write_outputs(directory, summary, findings, wanted)
    return Outcome(summary, findings, wanted, directory, unrecorded)


def _record(
    audit: Audit, source: Source, options: Options, summary: Summary, verified: Sequence[Verified]
) -> str:  # fmt: skip
    """Tell the cluster what was found, before the run counts as finished: one that dies in between tells it again.
    Why that was not done; empty: it was. No verdict hangs on it."""
    if not options.record:
        return "--no-record was asked for"
    try:
        audit.write_verified(verified)
        if options.is_whole:
            source.write_last(last_audit(summary))
    except BinderyError as error:
        return str(error)
    return ""


def write_outputs(
    directory: RunDirectory, summary: Summary, findings: list[dict[str, Any]], wanted: list[Proposal]
) -> None:
    """The summary last: with it the run is finished."""
    directory.write_json("actions.json", [proposal.to_json() for proposal in wanted])
    directory.write_text("report.html", report_html(summary, findings))
    directory.write_text("metrics.prom", metrics_text(summary))
    directory.write_text("summary.txt", summary_text(summary, findings))
    directory.write_text("summary.json", json.dumps(summary.to_json(), indent=1, sort_keys=True) + "\n")


def read_outcome(directory: RunDirectory) -> Outcome:
    """Of a finished run. Raises OSError when a file is not there."""
    summary = Summary.from_json(directory.read_json("summary.json"))
    wanted: list[Mapping[str, Any]] = directory.read_json("actions.json")
    return Outcome(summary, read_findings(directory.findings), [Proposal.from_json(one) for one in wanted], directory)


def _of_bookies(
    seen: Iterable[Mapping[str, Any]], unlisted: Mapping[str, str]
) -> tuple[list[BookieCoverage], int]:  # fmt: skip
    """By bookie, and how many ledgers there are. `seen`: rows of coverage; `unlisted`: where orphans were not looked
    for, and why."""
    sums = {bookie: BookieCoverage(bookie, 0, 0, 0, unlisted=why) for bookie, why in unlisted.items()}
    ledgers = set()
    for row in seen:
        ledgers.add(row["ledger_id"])
        was = sums.get(row["bookie"]) or BookieCoverage(row["bookie"], 0, 0, 0, None)
        sums[row["bookie"]] = BookieCoverage(
            row["bookie"], was.copies + row["copies"], was.unknown + row["unknown"], was.bytes + row["bytes"],
            min(filter(None, (was.reason, row["reason"])), default=None), was.unlisted,
        )  # fmt: skip
    return [sums[name] for name in sorted(sums)], len(ledgers)
