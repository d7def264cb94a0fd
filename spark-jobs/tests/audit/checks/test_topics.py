"""Checks of topics and cursors: each defect, beside the most similar valid case."""

import pytest
from bindery_spark.audit.checks import topics as topic_checks
from frames import DAY_MS, NOW_MS, RUN, Tables, cursor, facts, ledger, topic
from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(600)  # seconds, but minutes on a busy machine


HOUR_MS = 3_600_000


ABC = ["a", "b", "c"]


@pytest.fixture(scope="module")
def tables(spark: SparkSession) -> Tables:
    return Tables(spark)


def test_inconsistencies_between_topics_cursors_and_ledgers_are_found(tables: Tables) -> None:
    ours = {"custom": {"application": b"bindery", "component": b"managed-ledger"}}
    old = {"created_ms": NOW_MS - 2 * HOUR_MS}
    ledgers = tables.ledgers(
        ledger(1, [(0, ABC)], last=9, **ours),
        ledger(2, [(0, ABC)], last=None, **ours),
        ledger(3, [(0, ABC)], last=4, **ours),
        ledger(4, [(0, ABC)], last=4, **ours),
        ledger(5, [(0, ABC)], last=None, **ours),
        ledger(6, [(0, ABC)], last=4, **ours),  # the cursor's ledger
        ledger(20, [(0, ABC)], last=4, **ours, **old),  # nothing names it
        ledger(21, [(0, ABC)], last=4, **{**ours, "created_ms": NOW_MS - HOUR_MS // 2}),  # too young to report
        ledger(22, [(0, ABC)], last=4, **old),  # of another application
        ledger(23, [(0, ABC)], last=4, custom={"application": b"pulsar", "component": b"schema"}, **old),
        ledger(24, [(0, ABC)], last=4, **ours, **old),  # a position is in it
    )
    topics = tables.topics(
        topic("good", [(1, 10, 100, NOW_MS), (2, 0, 0, None)]),
        topic("counts", [(3, 6, 50, NOW_MS), (4, 4, 50, NOW_MS)]),
        topic("open", [(5, 3, 30, NOW_MS), (99, 1, 1, NOW_MS)]),
        topic("empty", []),
    )
    cursors = tables.cursors(
        cursor("good", "within", (1, 9), 6),
        cursor("good", "trimmed", (0, 77)),
        cursor("good", "start", (1, -1)),
        cursor("good", "tail", (2, 500)),
        cursor("good", "beyond", (1, 10)),
        cursor("good", "ahead", (24, 0)),
        cursor("good", "lost", None, 98),
        cursor("empty", "waits", (7, 3)),
    )
    found = topic_checks.topic_findings(topics, cursors, ledgers, RUN, orphan_after_ms=HOUR_MS)
    found = found.localCheckpoint()
    texts = {(r.kind, r.ledger_id): (r.expected, r.found) for r in found.collect()}
    assert texts["TOPIC_INCONSISTENT", 3] == ("topic counts: 6 entries, 50 bytes", "5 entries, 50 bytes")
    assert texts["TOPIC_INCONSISTENT", 4] == ("topic counts: 4 entries, 50 bytes", "5 entries, 50 bytes")
    assert texts["TOPIC_INCONSISTENT", 5] == ("closed, because topic open no longer writes it", "open")
    assert texts["CURSOR_INCONSISTENT", 1][1] == "1:10, beyond the end"
    assert facts(found) == {
        ("ORPHAN_METADATA", "unreadable", 99, None, None, None, None),
        ("ORPHAN_METADATA", "warning", 98, None, None, None, None),
        ("ORPHAN_METADATA", "warning", 20, None, None, None, None),
        ("TOPIC_INCONSISTENT", "corrupt", 3, None, None, None, None),
        ("TOPIC_INCONSISTENT", "warning", 4, None, None, None, None),
        ("TOPIC_INCONSISTENT", "warning", 5, None, None, None, None),
        ("CURSOR_INCONSISTENT", "warning", 1, None, None, None, None),
        ("CURSOR_INCONSISTENT", "warning", 24, None, None, None, None),
    }


def test_no_ledger_is_an_orphan_while_a_topic_is_unreadable(tables: Tables) -> None:
    ours = {"custom": {"application": b"bindery"}, "created_ms": NOW_MS - DAY_MS}
    args = tables.cursors(), tables.ledgers(ledger(20, [(0, ABC)], last=4, **ours)), RUN
    broken = tables.topics(topic("t", [], problem="garbage"))
    found = topic_checks.unnamed_ledgers(broken, *args, orphan_after_ms=HOUR_MS)
    assert facts(found) == set()
