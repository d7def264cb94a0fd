"""What metadata say: ensembles, placement, ages, marks, topics, cursors. Each kind beside its nearest innocent."""

import pytest
from bindery_spark.audit.checks import topics as topic_checks
from frames import DAY_MS, NOW_MS, RUN, Tables, cursor, facts, ledger, topic
from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(600)  # a busy machine takes minutes for what is seconds otherwise


HOUR_MS = 3_600_000


ABC = ["a", "b", "c"]


@pytest.fixture(scope="module")
def tables(spark: SparkSession) -> Tables:
    return Tables(spark)


def test_topics_cursors_and_ledgers_tell_the_same_story_or_it_is_found(tables: Tables) -> None:
    ours = {"custom": {"application": b"bindery", "component": b"managed-ledger"}}
    old = {"created_ms": NOW_MS - 2 * HOUR_MS}
    ledgers = tables.ledgers(
        ledger(1, [(0, ABC)], last=9, **ours),
        ledger(2, [(0, ABC)], last=None, **ours),
        ledger(3, [(0, ABC)], last=4, **ours),
        ledger(4, [(0, ABC)], last=4, **ours),
        ledger(5, [(0, ABC)], last=None, **ours),
        ledger(6, [(0, ABC)], last=4, **ours),  # its cursor's own
        ledger(20, [(0, ABC)], last=4, **ours, **old),  # nothing names it
        ledger(21, [(0, ABC)], last=4, **{**ours, "created_ms": NOW_MS - HOUR_MS // 2}),  # too young to say
        ledger(22, [(0, ABC)], last=4, **old),  # somebody else's
        ledger(23, [(0, ABC)], last=4, custom={"application": b"pulsar", "component": b"schema"}, **old),
        ledger(24, [(0, ABC)], last=4, **ours, **old),  # a position stands in it
    )
    topics = tables.topics(
        topic("good", [(1, 10, 100, NOW_MS), (2, 0, 0, None)]),
        topic("counts", [(3, 6, 50, NOW_MS), (4, 4, 50, NOW_MS)]),
        topic("open", [(5, 3, 30, NOW_MS), (99, 1, 1, NOW_MS)]),
        topic("empty", []),
    )
    cursors = tables.cursors(
        cursor("good", "within", (1, 9), 6), cursor("good", "trimmed", (0, 77)), cursor("good", "start", (1, -1)),
        cursor("good", "tail", (2, 500)), cursor("good", "beyond", (1, 10)), cursor("good", "ahead", (24, 0)),
        cursor("good", "lost", None, 98), cursor("empty", "waits", (7, 3)),
    )  # fmt: skip
    found = topic_checks.topic_findings(topics, cursors, ledgers, RUN, orphan_after_ms=HOUR_MS)
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


def test_no_ledger_is_called_an_orphan_while_a_topic_cannot_be_read(tables: Tables) -> None:
    ours = {"custom": {"application": b"bindery"}, "created_ms": NOW_MS - DAY_MS}
    args = tables.cursors(), tables.ledgers(ledger(20, [(0, ABC)], last=4, **ours)), RUN
    broken = tables.topics(topic("t", [], problem="garbage"))
    found = topic_checks.unnamed_ledgers(broken, *args, orphan_after_ms=HOUR_MS)
    assert facts(found) == set()
