"""Finished audit runs on disk, with summaries and findings, for tests that need no Spark."""

from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
from bindery_spark.audit.apply import Applied
from bindery_spark.audit.checkpoint import RunDirectory
from bindery_spark.audit.findings.actions import Proposal, proposals
from bindery_spark.audit.findings.summary import BookieCoverage, Summary, summarize
from bindery_spark.audit.options import Options
from bindery_spark.audit.outcome import write_outputs
from frames import NOW_MS, finding

WHOLE = [BookieCoverage("a:3181", 100, 0, 1_000), BookieCoverage("b:3181", 50, 0, 500)]


def summary(findings: list[dict], bookies: list[BookieCoverage] = WHOLE, **changes: object) -> Summary:
    known = {
        "run_id": "r1",
        "cluster_id": "c-1",
        "level": "deep",
        "began_ms": NOW_MS,
        "ended_ms": NOW_MS + 2_000,
        "ledgers": 3,
        "ledgers_skipped": 0,
        "ledgers_verified": 2,
        "oldest_verified_ms": NOW_MS - 8_000,
    }
    return summarize(findings, bookies, **{**known, **changes})


def missing(ledger_id: int = 7, bookie: str | None = "a:3181", first: int = 3, last: int = 5, **more: object) -> dict:
    facts = {
        "bookie": bookie,
        "segment": 0,
        "first_entry": first,
        "last_entry": last,
        "severity": "under_replicated",
        "found": "the bookie denies it",
        "expected": "a copy",
        "repairable": True,
        "action": "mark",
    }
    return finding("MISSING_REPLICA", ledger_id, **{**facts, **more})


def finished(out: Path, run_id: str, findings: list[dict]) -> RunDirectory:
    directory = RunDirectory(out / run_id)
    directory.findings.mkdir(parents=True)
    if findings:
        parquet.write_table(pa.Table.from_pylist(findings), directory.findings / "part-0.parquet")
    directory.write_run({"options": {}, "began_ms": NOW_MS})
    result = summary(findings, run_id=run_id)
    write_outputs(directory, result, findings, proposals(findings))
    return directory


def deep(out: Path, run_id: str, findings: list[dict]) -> RunDirectory:
    """A finished deep run that still has its checkpoint."""
    directory = finished(out, run_id, findings)
    directory.write_run({"options": asdict(Options()), "began_ms": 1})
    return directory


class Cluster:
    """Records the proposals to mark."""

    def __init__(self) -> None:
        self.marked: list[list[int]] = []
        self.dies = False

    def __call__(self, zookeeper: str, ledgers_root: str, proposals: list[Proposal], **_: object) -> Applied:
        if self.dies:
            raise KeyboardInterrupt
        self.marked.append([one.ledger_id for one in proposals])
        return Applied(marked=self.marked[-1], left={9: "it was deleted"})
