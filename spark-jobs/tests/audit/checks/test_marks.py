"""Checks of under-replication marks: each defect, beside the most similar valid case."""

import pytest
from bindery_spark.audit.checks import marks as mark_checks
from bindery_spark.audit.checks.finding_rows import together
from frames import NOW_MS, RUN, Tables, bookie, facts, finding, ledger, mark
from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(600)  # seconds, but minutes on a busy machine


HOUR_MS = 3_600_000


ABC = ["a", "b", "c"]


@pytest.fixture(scope="module")
def tables(spark: SparkSession) -> Tables:
    return Tables(spark)


def test_false_and_missing_marks_are_found(tables: Tables) -> None:
    bookies = tables.bookies(
        *(bookie(name) for name in ABC),
        bookie("down", registration="absent"),
        bookie("leaves", intent="draining"),
        bookie("excused", registration="absent", intent="maintenance"),
        bookie("fresh", registration="absent"),
    )
    ledgers = tables.ledgers(
        *(ledger(i, [(0, ABC)], last=3) for i in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)),
        *(
            ledger(i, [(0, ["a", name])], last=3)
            for i, name in ((21, "down"), (22, "leaves"), (23, "down"), (24, "excused"), (25, "fresh"))
        ),
    )
    lacks = {"action": "mark", "severity": "under_replicated", "first_seen_ms": NOW_MS - HOUR_MS}
    findings = tables.findings(
        finding("MISSING_REPLICA", 2, **lacks),
        finding("MISSING_REPLICA", 6, **lacks),
        finding("DIGEST_MISMATCH", 7, **{**lacks, "first_seen_ms": NOW_MS}),
        finding("STALE_ENSEMBLE", 8, **lacks),
        finding("OPEN_TOO_LONG", 9, **lacks),
        finding("MISSING_REPLICA", 10, **lacks),
    )
    marks = tables.marks(
        mark(1),
        mark(2),
        mark(3, locked=True),
        mark(4, reason="placement"),
        mark(5, reason=None),
        mark(21),
        mark(22),
        mark(77),
    )
    covered = tables.ids(*(i for i in range(1, 30) if i != 5))
    absences = tables.bookies()  # only for its session
    absences = absences.sparkSession.createDataFrame(
        [("down", NOW_MS - HOUR_MS), ("excused", NOW_MS - HOUR_MS), ("fresh", NOW_MS - 1_000)],
        "bookie string, since_ms long",
    )
    lacking = mark_checks.lacking(findings).unionByName(mark_checks.away(ledgers, bookies, absences))
    not_healed = mark_checks.not_healed(lacking, marks, tables.ids(2, 9, 10), RUN)
    found = together(
        [
            mark_checks.false_marks(marks, ledgers, bookies, covered, findings, RUN),
            not_healed,
            mark_checks.missing_marks(lacking, marks, not_healed, RUN, delay_ms=60_000),
        ]
    )
    found = found.localCheckpoint()
    texts = {(r.kind, r.ledger_id): (r.expected, r.found, r.repairable, r.action) for r in found.collect()}
    assert texts["FALSE_MARK", 1] == ("a copy that is missing", "every copy is stored", False, None)
    assert texts["FALSE_MARK", 77] == ("a copy that is missing", "the ledger was deleted", False, None)
    assert texts["NOT_HEALED", 10] == ("all copies, because its mark was removed", "MISSING_REPLICA", True, "mark")
    assert texts["MISSING_MARK", 6] == ("a mark after 60 s", "MISSING_REPLICA", True, "mark")
    assert texts["MISSING_MARK", 23] == ("a mark after 60 s", "down away", True, "mark")
    assert facts(found) == {
        ("FALSE_MARK", "warning", 1, None, None, None, None),
        ("FALSE_MARK", "warning", 77, None, None, None, None),
        ("NOT_HEALED", "under_replicated", 10, None, None, None, None),
        ("MISSING_MARK", "under_replicated", 6, None, None, None, None),
        ("MISSING_MARK", "under_replicated", 8, None, None, None, None),
        ("MISSING_MARK", "under_replicated", 23, None, None, None, None),
    }
