"""Differences between the findings of two runs."""

from bindery_spark.audit.findings.diff import compare, finding_text
from finished_runs import missing
from frames import finding


def test_a_difference_is_a_new_gone_or_changed_finding() -> None:
    topics = [
        finding("TOPIC_INCONSISTENT", 5, expected="topic t1"),
        finding("TOPIC_INCONSISTENT", 5, expected="topic t2"),
    ]
    before = [missing(), missing(8), missing(9), *topics]
    after = [missing(run_id="r2", first_seen_ms=1), missing(9, last=6), missing(10), topics[1]]
    found = compare(before, after)
    assert [f["ledger_id"] for f in found.new] == [10]
    assert [(f["ledger_id"], f["expected"]) for f in found.gone] == [(5, "topic t1"), (8, "a copy")]
    assert [(was["last_entry"], now["last_entry"]) for was, now in found.changed] == [(5, 6)]
    assert compare(before, before).is_empty
    assert finding_text(finding("UNREADABLE_BOOKIE", None, bookie="b")) == "UNREADABLE_BOOKIE (warning) on b"
