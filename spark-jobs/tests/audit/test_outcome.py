"""The files of a finished run."""

from pathlib import Path

from bindery_spark.audit.checkpoint import run_directory
from bindery_spark.audit.findings.diff import read_findings
from bindery_spark.audit.findings.report import report_html
from bindery_spark.audit.findings.summary import BookieCoverage, metrics_text, summary_text
from bindery_spark.audit.outcome import bookie_coverage, read_outcome
from finished_runs import finished, missing, summary


def test_a_finished_run_is_read_back_unchanged(tmp_path: Path) -> None:
    found = [missing(8), missing(7)]
    directory = finished(tmp_path, "20260101T000000Z-a", found)
    outcome = read_outcome(run_directory(tmp_path, directory.run_id))
    assert outcome.summary == summary(found, run_id=directory.run_id)
    assert [f["ledger_id"] for f in outcome.findings] == [7, 8]
    assert [one.ledger_id for one in outcome.proposals] == [7, 8]
    assert read_findings(directory.findings) == outcome.findings


def test_the_coverage_of_a_bookie_is_the_sum_over_its_ledgers() -> None:
    def row(ledger_id: int, bookie: str, copies: int, unknown: int, size: int, reason: str | None = None) -> dict:
        return {
            "ledger_id": ledger_id,
            "bookie": bookie,
            "copies": copies,
            "unknown": unknown,
            "bytes": size,
            "reason": reason,
        }

    rows = [
        row(1, "b", 10, 2, 100, "timeout"),
        row(2, "b", 5, 1, 50, "busy"),
        row(1, "a", 7, 0, 70),
        row(2, "a", 1, 0, 1),
    ]
    assert bookie_coverage(rows, {"b": "no list", "c": "absent"}) == (
        [
            BookieCoverage("a", 8, 0, 71),
            BookieCoverage("b", 15, 3, 150, "busy", "no list"),
            BookieCoverage("c", 0, 0, 0, None, "absent"),
        ],
        2,
    )
    assert bookie_coverage([], {}) == ([], 0)


def test_the_files_of_a_finished_run_contain_its_summary(tmp_path: Path) -> None:
    found = [missing(7)]
    path = finished(tmp_path, "20260101T000000Z-a", found).path
    result = summary(found, run_id="20260101T000000Z-a")
    assert (path / "summary.txt").read_text() == summary_text(result, found)
    assert (path / "metrics.prom").read_text() == metrics_text(result)
    assert (path / "report.html").read_text() == report_html(result, found)
    lines = (path / "summary.json").read_text().splitlines()
    names = [line.split('"')[1] for line in lines if line.startswith(' "')]
    assert names == sorted(result.to_json()), "one line for each name, indented by one space, in order"
