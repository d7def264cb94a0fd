"""The summary of a run as text, metrics, and the record in the cluster."""

import re

from bindery_metadata.recovery.last_audits import SEVERITIES, VERDICTS, LastAudit
from bindery_spark.audit.findings.findings import Severity, Verdict, verdict_of
from bindery_spark.audit.findings.summary import (
    BookieCoverage,
    Summary,
    last_audit,
    metrics_text,
    summary_text,
)
from finished_runs import WHOLE, missing, summary
from frames import NOW_MS, finding


def test_the_record_in_the_cluster_has_the_same_verdicts_and_severities() -> None:
    worst_last = [verdict_of([severity], is_complete=True) for severity in SEVERITIES]
    assert tuple(Severity) == SEVERITIES
    assert tuple(dict.fromkeys(worst_last)) == VERDICTS
    assert set(VERDICTS) == set(Verdict)


def test_the_record_in_the_cluster_agrees_with_the_summary() -> None:
    bookies = [*WHOLE, BookieCoverage("c:3181", 50, 20, 0, "unreachable")]
    found = summary([missing(), missing(8), finding("ORPHAN_DATA", 9, severity="warning")], bookies)
    assert last_audit(found) == LastAudit(
        level="deep",
        run_id="r1",
        verdict="UNDER-REPLICATED",
        exit_code=1,
        began_ms=NOW_MS,
        ended_ms=NOW_MS + 2_000,
        copies_expected=200,
        copies_verified=180,
        bytes_read=1_500,
        oldest_verified_ms=NOW_MS - 8_000,
        kinds={"MISSING_REPLICA": 2, "ORPHAN_DATA": 1},
        severities={"under_replicated": 2, "warning": 1},
    )


def test_the_last_line_of_the_summary_is_the_verdict() -> None:
    text = summary_text(summary([]), [])
    assert text.splitlines()[-1] == "bindery c-1 is HEALTHY"
    assert "150 of 150 copies of entries (100 %)" in text
    found = [missing()]
    text = summary_text(summary(found), found)
    assert text.splitlines()[-1] == "bindery c-1 is UNDER-REPLICATED"
    assert (
        "  MISSING_REPLICA (under_replicated) ledger 7, entries 3..5, on a:3181: the bookie denies it; expected a copy"
        in text.splitlines()
    )


def test_unchecked_copies_have_a_reason_and_coverage_is_below_a_hundred_per_cent() -> None:
    bookies = [*WHOLE, BookieCoverage("c:3181", 100_000, 1, 5, "unreachable: refused")]
    result = summary([], bookies)
    assert (result.verdict, result.exit_code, result.unknown) == ("INCOMPLETE", 3, 1)
    text = summary_text(result, [])
    assert "(99.99 %)" in text
    assert "c:3181: 1 of 100000 copies were not checked: unreachable: refused" in text


def test_unchecked_orphaned_data_makes_a_run_incomplete() -> None:
    bookies = [WHOLE[0], BookieCoverage("b:3181", 50, 0, 500, unlisted="unlisted: no admin HTTP")]
    result = summary([], bookies)
    assert (result.verdict, result.exit_code, result.coverage) == ("INCOMPLETE", 3, 1.0)
    assert "  b:3181: orphaned data was not checked: unlisted: no admin HTTP" in summary_text(result, []).splitlines()
    lines = metrics_text(result).splitlines()
    assert {line for line in lines if line.startswith("bindery_audit_bookie_unlisted{")} == {
        'bindery_audit_bookie_unlisted{bookie="a:3181"} 0',
        'bindery_audit_bookie_unlisted{bookie="b:3181"} 1',
    }
    assert Summary.from_json(result.to_json()) == result


def test_metrics_are_valid_prometheus_text() -> None:
    text = metrics_text(summary([missing()], [BookieCoverage('a"\\', 10, 4, 1, "x")]))
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r'bindery_audit_\w+(\{\w+="(?:[^"\\]|\\.)*"\})? [0-9.e+-]+', line) for line in lines), lines
    assert 'bindery_audit_findings{kind="MISSING_REPLICA"} 1' in lines
    assert 'bindery_audit_findings{kind="ENTRY_LOST"} 0' in lines
    assert "bindery_audit_coverage_ratio 0.6" in lines
    assert "bindery_audit_oldest_verification_seconds 10.0" in lines
    assert "bindery_audit_copies_per_second 5.0" in lines
