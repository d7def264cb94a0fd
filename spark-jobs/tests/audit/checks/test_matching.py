"""Findings matched between two readings and between two runs."""

import pytest
from bindery_spark.audit.checks import matching
from frames import NOW_MS, Tables, facts, finding
from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(600)  # seconds, but minutes on a busy machine


@pytest.fixture(scope="module")
def tables(spark: SparkSession) -> Tables:
    return Tables(spark)


def test_findings_of_only_one_reading_are_not_reported(tables: Tables) -> None:
    run = {"segment": 0, "bookie": "a"}
    first = tables.findings(
        finding("MISSING_REPLICA", 1, **run, first_entry=0, last_entry=9),
        finding("MISSING_REPLICA", 2, **run, first_entry=0, last_entry=9),
        finding("TOPIC_INCONSISTENT", 3, expected="topic t"),
        finding("TOPIC_INCONSISTENT", 4, expected="topic t"),
    )
    second = tables.findings(
        finding("MISSING_REPLICA", 1, **run, first_entry=2, last_entry=3),
        finding("MISSING_REPLICA", 1, **run, first_entry=8, last_entry=20),
        finding("MISSING_REPLICA", 2, **{**run, "bookie": "b"}, first_entry=0, last_entry=9),
        finding("TOPIC_INCONSISTENT", 3, expected="topic t"),
        finding("TOPIC_INCONSISTENT", 4, expected="topic u"),
    )
    both = matching.overlapping(first.where("ledger_id < 3"), second.where("ledger_id < 3"))
    assert facts(both) == {
        ("MISSING_REPLICA", "warning", 1, 0, 2, 3, "a"),
        ("MISSING_REPLICA", "warning", 1, 0, 8, 9, "a"),
    }
    twice = matching.reported_twice(first.where("ledger_id > 2"), second.where("ledger_id > 2"))
    assert facts(twice) == {("TOPIC_INCONSISTENT", "warning", 3, None, None, None, None)}


def test_first_seen_times_are_kept_from_run_to_run(tables: Tables) -> None:
    now = tables.findings(finding("FALSE_MARK", 1), finding("FALSE_MARK", 2), finding("NOT_HEALED", 1))
    earlier = tables.findings(finding("FALSE_MARK", 1, first_seen_ms=5), finding("FALSE_MARK", 3, first_seen_ms=5))
    seen = {(r.kind, r.ledger_id): r.first_seen_ms for r in matching.with_first_seen(now, earlier).collect()}
    assert seen == {("FALSE_MARK", 1): 5, ("FALSE_MARK", 2): NOW_MS, ("NOT_HEALED", 1): NOW_MS}
    assert matching.with_first_seen(now, None) is now
