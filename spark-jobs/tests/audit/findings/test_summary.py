"""The summary of a run as text, metrics, and the record in the cluster."""

import re

import pytest
from bindery_metadata.recovery.last_audits import SEVERITIES, VERDICTS, LastAudit
from bindery_spark.audit.findings.findings import WHAT_TO_DO, Kind, Severity, Verdict, verdict_of
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


def test_the_text_has_sizes_skipped_ledgers_and_advice() -> None:
    found = [missing(), missing(8)]
    result = summary(found, [BookieCoverage("a:3181", 10, 0, 3 * 2**19)], ledgers_skipped=4, proposals=2)
    assert result.proposals == 2
    lines = summary_text(result, found).splitlines()
    assert lines[:3] == [
        "audit r1, level deep",
        "checked 3 ledgers, 10 of 10 copies of entries (100 %), 1.5 MiB in 2.0 s",
        "skipped 4 ledgers that were verified recently",
    ]
    assert lines[-2] == f"2 MISSING_REPLICA: {WHAT_TO_DO[Kind.MISSING_REPLICA]}"
    assert not any(line.startswith("skipped") for line in summary_text(summary(found), found).splitlines())


@pytest.mark.parametrize(("count", "more"), [(50, []), (51, ["  and 1 more, listed in report.html"])])
def test_at_most_50_findings_are_in_the_text_the_worst_first(count: int, more: list[str]) -> None:
    found = [missing(number, severity="warning") for number in range(count - 1)] + [missing(99)]
    lines = summary_text(summary(found), found).splitlines()
    listed = [line for line in lines if line.startswith("  MISSING_REPLICA")]
    assert len(listed) == 50
    assert "ledger 99" in listed[0]
    assert [line for line in lines if "more, listed" in line] == more


def test_a_run_without_a_duration_has_no_rate() -> None:
    for ended_ms, rate in ((NOW_MS, 0.0), (NOW_MS + 500, 300.0), (NOW_MS + 7_000, 21.4), (NOW_MS + 1, 150_000.0)):
        result = summary([], ended_ms=ended_ms)
        assert result.to_json()["copies_per_s"] == rate
        assert f"bindery_audit_copies_per_second {rate}" in metrics_text(result).splitlines()


def test_without_proposals_no_ledger_is_to_be_marked() -> None:
    assert summary([]).proposals == 0


def test_every_metric_has_its_value_and_help() -> None:
    bookies = [BookieCoverage("a", 8, 2, 70, "x"), BookieCoverage("b", 2, 0, 5)]
    lines = metrics_text(summary([], bookies)).splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith(("#", "bindery_audit_findings{")))
    assert {name.removeprefix("bindery_audit_"): float(value) for name, value in values.items()} == {
        "exit_code": 3,
        "ended_seconds": 1_800_000_002,
        "duration_seconds": 2,
        "ledgers": 3,
        "ledgers_verified": 2,
        "copies": 10,
        "copies_per_second": 5,
        "bytes": 75,
        "coverage_ratio": 0.8,
        "oldest_verification_seconds": 10,
        'bookie_copies_unknown{bookie="a"}': 2,
        'bookie_copies_unknown{bookie="b"}': 0,
        'bookie_unlisted{bookie="a"}': 0,
        'bookie_unlisted{bookie="b"}': 0,
    }
    names = {line.split("{")[0].split()[0] for line in lines if not line.startswith("#")}
    assert {line.split()[2] for line in lines if line.startswith("# HELP")} == names
    assert {tuple(line.split()[2:]) for line in lines if line.startswith("# TYPE")} == {(n, "gauge") for n in names}


def test_without_a_verification_the_beginning_of_the_run_counts() -> None:
    result = summary([], oldest_verified_ms=None)
    assert last_audit(result).oldest_verified_ms == NOW_MS
    assert "bindery_audit_oldest_verification_seconds 2.0" in metrics_text(result).splitlines()


def test_texts_in_labels_are_escaped() -> None:
    text = metrics_text(summary([], [BookieCoverage('a"\\\n', 1, 0, 0)]))
    assert 'bindery_audit_bookie_unlisted{bookie="a\\"\\\\\\n"} 0' in text.splitlines()


def test_a_run_without_copies_is_covered() -> None:
    assert summary([], []).coverage == 1.0
    assert "0 of 0 copies of entries (100 %)" in summary_text(summary([], []), [])
