"""Checks of ledger metadata: each defect, beside the most similar valid case."""

import pytest
from bindery_spark.audit.checks import ledgers as ledger_checks
from frames import DAY_MS, NOW_MS, RUN, Tables, bookie, cursor, facts, ledger, topic
from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(600)  # the tests take seconds, or minutes on a busy machine


@pytest.fixture(scope="module")
def tables(spark: SparkSession) -> Tables:
    return Tables(spark)


def test_each_defect_of_ledger_metadata_is_found(tables: Tables) -> None:
    bookies = tables.bookies(
        bookie("a", rack="/r1"),
        bookie("b", rack="/r1"),
        bookie("c", rack="/r2"),
        bookie("d"),
        bookie("down", registration="absent"),
        bookie("removed", registration="absent", intent="removed"),
        bookie("foreign", registration="absent", cookie=False),
        bookie("new", registration="absent", cookie=False, intent="joining"),
    )
    ledgers = tables.ledgers(
        ledger(1, [(0, ["a", "c"])], last=3),
        ledger(2, [(0, ["a", "down"]), (2, ["a", "c"])], last=3),  # the bookie `down` may come back
        ledger(3, [(0, ["a", "removed"]), (2, ["c", "foreign"])], last=None),
        ledger(4, [(0, ["a", "c"]), (4, ["a", "removed"])], last=3),  # the last segment has no entries
        ledger(5, [(0, ["a", "new"])], last=0),
        ledger(6, [(0, ["a", "c", "a"])], last=0),
        ledger(7, [(0, ["a", "b"])], last=0),  # on one of three racks
        ledger(8, [(0, ["a", "b"])], last=None),  # open: its writer may still change the ensemble
        ledger(9, [(0, ["a", "b", "c", "d"])], last=0, qw=2),  # a and b, on one rack, are the write set of some entries
        ledger(10, [(0, ["a", "c", "b", "d"])], last=0, qw=2),
        ledger(11, [(0, ["a", "c"])], last=None, created_ms=NOW_MS - 8 * DAY_MS),
        ledger(12, [(0, ["a", "c"])], last=None, created_ms=NOW_MS - 6 * DAY_MS),
        ledger(13, [(0, ["a", "c"])], last=3, created_ms=NOW_MS - 90 * DAY_MS),
        ledger(14, [(0, ["a", "c"])], last=None, created_ms=None),
        ledger(15, [(0, ["a", "c"])], last=None, state="in_recovery", created_ms=NOW_MS - 8 * DAY_MS),
        {**ledger(16, [(0, ["a"])], last=None), "problem": "garbage", "ensemble_size": 0, "segments": []},
    )
    broken = [topic("t", [], problem="garbage")], [{**cursor("t"), "problem": "garbage"}]
    found = ledger_checks.ledger_findings(
        ledgers, bookies, tables.topics(*broken[0]), tables.cursors(*broken[1]), RUN, open_max_ms=7 * DAY_MS
    ).localCheckpoint()
    assert facts(found.where("ledger_id is not null")) == {
        ("STALE_ENSEMBLE", "under_replicated", 3, 0, 0, 1, "removed"),
        ("STALE_ENSEMBLE", "under_replicated", 3, 1, 2, None, "foreign"),
        ("BAD_PLACEMENT", "under_replicated", 6, 0, 0, 0, "a"),
        ("BAD_PLACEMENT", "warning", 7, 0, 0, 0, None),
        ("BAD_PLACEMENT", "warning", 9, 0, 0, 0, None),
        ("OPEN_TOO_LONG", "warning", 11, None, None, None, None),
        ("OPEN_TOO_LONG", "warning", 15, None, None, None, None),
        ("METADATA_UNREADABLE", "unreadable", 16, None, None, None, None),
    }
    texts = {(r.kind, r.ledger_id, r.segment): (r.expected, r.found, r.repairable, r.action) for r in found.collect()}
    assert texts["STALE_ENSEMBLE", 3, 0] == ("a bookie of this cluster", "it left for good", True, "mark")
    assert texts["BAD_PLACEMENT", 6, 0] == (
        "each copy on a bookie of its own",
        "two copies on one bookie",
        False,
        "inspect",
    )
    assert texts["BAD_PLACEMENT", 7, 0] == ("copies on 2 racks", "on 1", False, "inspect")
    assert texts["BAD_PLACEMENT", 9, 0] == ("copies on 2 racks", "on 1", False, "inspect")
    assert texts["OPEN_TOO_LONG", 11, None] == ("closed within 604800 s", "open for 691200 s", False, "inspect")
    assert texts["OPEN_TOO_LONG", 15, None][1] == "in_recovery for 691200 s"
    rest = found.where("ledger_id is null").select("kind", "expected", "found").collect()
    assert sorted(map(tuple, rest)) == [
        ("METADATA_UNREADABLE", "readable metadata of subscription s of t", "garbage"),
        ("METADATA_UNREADABLE", "readable metadata of topic t", "garbage"),
    ]
