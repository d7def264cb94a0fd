"""The files of a finished run."""

from pathlib import Path

from bindery_spark.audit.checkpoint import run_directory
from bindery_spark.audit.findings.diff import read_findings
from bindery_spark.audit.outcome import read_outcome
from finished_runs import finished, missing, summary


def test_a_finished_run_is_read_back_unchanged(tmp_path: Path) -> None:
    found = [missing(8), missing(7)]
    directory = finished(tmp_path, "20260101T000000Z-a", found)
    outcome = read_outcome(run_directory(tmp_path, directory.run_id))
    assert outcome.summary == summary(found, run_id=directory.run_id)
    assert [f["ledger_id"] for f in outcome.findings] == [7, 8]
    assert [one.ledger_id for one in outcome.proposals] == [7, 8]
    assert read_findings(directory.findings) == outcome.findings
