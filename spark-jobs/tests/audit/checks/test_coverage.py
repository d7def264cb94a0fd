"""Findings about bookies and ledgers that a run could not check."""

import pytest
from bindery_spark.audit.checks.coverage import unread_ledgers, unreadable_bookies
from frames import RUN, Tables, facts, ledger
from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(600)  # seconds, but minutes on a busy machine


ABC = ["a", "b", "c"]


@pytest.fixture(scope="module")
def tables(spark: SparkSession) -> Tables:
    return Tables(spark)


def test_unchecked_copies_make_a_run_incomplete(tables: Tables) -> None:
    ledgers = tables.ledgers(
        ledger(1, [(0, ABC)], last=3),
        ledger(2, [(0, ABC)], last=3),
        ledger(3, [(0, ABC)], last=None),
        ledger(4, [(0, ["a", "a", "b"])], last=3),
        ledger(5, [(0, ABC)], last=-1),
        ledger(6, [(0, ABC)], last=0),
    )
    coverage = ledgers.sparkSession.createDataFrame(
        [(1, "a", 12, 4, 0, "timeout"), (2, "a", 11, 0, 0, None), (4, "a", 8, 0, 0, None)],
        "ledger_id long, bookie string, copies long, unknown long, bytes long, reason string",
    )
    assert facts(unread_ledgers(ledgers, coverage, RUN)) == {
        ("UNREADABLE_BOOKIE", "incomplete", 2, None, None, None, None),
        ("UNREADABLE_BOOKIE", "incomplete", 6, None, None, None, None),
    }
    (reported,) = unreadable_bookies(coverage, RUN).collect()
    assert (reported.bookie, reported.found) == ("a", "timeout; 4 copies of 1 ledgers were not checked")
    listless = ledgers.sparkSession.createDataFrame([("a", "timeout"), ("d", "no HTTP")], "bookie string, why string")
    reported = unreadable_bookies(coverage, RUN, unlisted=listless)
    assert {(row.bookie, row.expected, row.found) for row in reported.collect()} == {
        (
            "a",
            "an answer for every copy",
            "timeout; 4 copies of 1 ledgers were not checked; orphaned data was not checked: timeout",
        ),
        ("d", "a list of its ledgers", "orphaned data was not checked: no HTTP"),
    }
