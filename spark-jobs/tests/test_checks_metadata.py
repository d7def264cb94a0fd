"""What metadata say: ensembles, placement, ages, marks, topics, cursors. Each kind beside its nearest innocent."""

import pytest
from bindery_spark.audit.checks import again
from bindery_spark.audit.checks import ledgers as ledger_checks
from bindery_spark.audit.checks import marks as mark_checks
from bindery_spark.audit.checks import topics as topic_checks
from bindery_spark.audit.checks.shape import together
from frames import DAY_MS, NOW_MS, RUN, Tables, bookie, cursor, facts, finding, ledger, mark, topic
from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(600)  # a busy machine takes minutes for what is seconds otherwise
HOUR_MS = 3_600_000
ABC = ["a", "b", "c"]


@pytest.fixture(scope="module")
def tables(spark: SparkSession) -> Tables:
    return Tables(spark)


def test_what_the_metadata_of_ledgers_show(tables: Tables) -> None:
    bookies = tables.bookies(
        bookie("a", rack="/r1"), bookie("b", rack="/r1"), bookie("c", rack="/r2"), bookie("d"),
        bookie("down", registration="absent"),
        bookie("removed", registration="absent", intent="removed"),
        bookie("foreign", registration="absent", cookie=False),
        bookie("new", registration="absent", cookie=False, intent="joining"),
    )  # fmt: skip
    ledgers = tables.ledgers(
        ledger(1, [(0, ["a", "c"])], last=3),
        ledger(2, [(0, ["a", "down"]), (2, ["a", "c"])], last=3),  # down is not gone
        ledger(3, [(0, ["a", "removed"]), (2, ["c", "foreign"])], last=None),
        ledger(4, [(0, ["a", "c"]), (4, ["a", "removed"])], last=3),  # the last segment holds nothing
        ledger(5, [(0, ["a", "new"])], last=0),
        ledger(6, [(0, ["a", "c", "a"])], last=0),
        ledger(7, [(0, ["a", "b"])], last=0),  # one rack, and there are three
        ledger(8, [(0, ["a", "b"])], last=None),  # the same, and its writer may go elsewhere
        ledger(9, [(0, ["a", "b", "c", "d"])], last=0, qw=2),  # a and b hold entries together
        ledger(10, [(0, ["a", "c", "b", "d"])], last=0, qw=2),
        ledger(11, [(0, ["a", "c"])], last=None, created_ms=NOW_MS - 8 * DAY_MS),
        ledger(12, [(0, ["a", "c"])], last=None, created_ms=NOW_MS - 6 * DAY_MS),
        ledger(13, [(0, ["a", "c"])], last=3, created_ms=NOW_MS - 90 * DAY_MS),
        ledger(14, [(0, ["a", "c"])], last=None, created_ms=None),
        ledger(15, [(0, ["a", "c"])], last=None, state="in_recovery", created_ms=NOW_MS - 8 * DAY_MS),
        {**ledger(16, [(0, ["a"])], last=None), "problem": "garbage", "ensemble_size": 0, "segments": []},
    )  # fmt: skip
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
    rest = found.where("ledger_id is null").select("kind", "expected", "found").collect()
    assert sorted(map(tuple, rest)) == [
        ("METADATA_UNREADABLE", "readable metadata of subscription s of t", "garbage"),
        ("METADATA_UNREADABLE", "readable metadata of topic t", "garbage"),
    ]


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


def test_marks_are_true_and_none_is_missing(tables: Tables) -> None:
    bookies = tables.bookies(
        *(bookie(name) for name in ABC), bookie("down", registration="absent"), bookie("leaves", intent="draining"),
        bookie("excused", registration="absent", intent="maintenance"), bookie("fresh", registration="absent"),
    )  # fmt: skip
    ledgers = tables.ledgers(
        *(ledger(i, [(0, ABC)], last=3) for i in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)),
        *(
            ledger(i, [(0, ["a", name])], last=3)
            for i, name in ((21, "down"), (22, "leaves"), (23, "down"), (24, "excused"), (25, "fresh"))
        ),
    )
    lacks = {"action": "mark", "severity": "under_replicated", "first_seen_ms": NOW_MS - HOUR_MS}
    findings = tables.findings(
        finding("MISSING_REPLICA", 2, **lacks), finding("MISSING_REPLICA", 6, **lacks),
        finding("DIGEST_MISMATCH", 7, **{**lacks, "first_seen_ms": NOW_MS}), finding("STALE_ENSEMBLE", 8, **lacks),
        finding("OPEN_TOO_LONG", 9, **lacks), finding("MISSING_REPLICA", 10, **lacks),
    )  # fmt: skip
    marks = tables.marks(
        mark(1), mark(2), mark(3, locked=True), mark(4, reason="placement"), mark(5, reason=None), mark(21), mark(22),
        mark(77),
    )  # fmt: skip
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
            mark_checks.false_marks(marks, ledgers, bookies, covered, findings, RUN), not_healed,
            mark_checks.missing_marks(lacking, marks, not_healed, RUN, delay_ms=60_000),
        ]
    )  # fmt: skip
    assert facts(found) == {
        ("FALSE_MARK", "warning", 1, None, None, None, None),
        ("FALSE_MARK", "warning", 77, None, None, None, None),
        ("NOT_HEALED", "under_replicated", 10, None, None, None, None),
        ("MISSING_MARK", "under_replicated", 6, None, None, None, None),
        ("MISSING_MARK", "under_replicated", 8, None, None, None, None),
        ("MISSING_MARK", "under_replicated", 23, None, None, None, None),
    }


def test_what_is_seen_once_is_not_told(tables: Tables) -> None:
    run = {"segment": 0, "bookie": "a"}
    first = tables.findings(
        finding("MISSING_REPLICA", 1, **run, first_entry=0, last_entry=9),
        finding("MISSING_REPLICA", 2, **run, first_entry=0, last_entry=9),
        finding("TOPIC_INCONSISTENT", 3, expected="topic t"), finding("TOPIC_INCONSISTENT", 4, expected="topic t"),
    )  # fmt: skip
    second = tables.findings(
        finding("MISSING_REPLICA", 1, **run, first_entry=2, last_entry=3),
        finding("MISSING_REPLICA", 1, **run, first_entry=8, last_entry=20),
        finding("MISSING_REPLICA", 2, **{**run, "bookie": "b"}, first_entry=0, last_entry=9),
        finding("TOPIC_INCONSISTENT", 3, expected="topic t"), finding("TOPIC_INCONSISTENT", 4, expected="topic u"),
    )  # fmt: skip
    both = again.confirmed(first.where("ledger_id < 3"), second.where("ledger_id < 3"))
    assert facts(both) == {
        ("MISSING_REPLICA", "warning", 1, 0, 2, 3, "a"),
        ("MISSING_REPLICA", "warning", 1, 0, 8, 9, "a"),
    }
    twice = again.seen_twice(first.where("ledger_id > 2"), second.where("ledger_id > 2"))
    assert facts(twice) == {("TOPIC_INCONSISTENT", "warning", 3, None, None, None, None)}


def test_first_seen_is_carried_from_run_to_run(tables: Tables) -> None:
    now = tables.findings(finding("FALSE_MARK", 1), finding("FALSE_MARK", 2), finding("NOT_HEALED", 1))
    earlier = tables.findings(finding("FALSE_MARK", 1, first_seen_ms=5), finding("FALSE_MARK", 3, first_seen_ms=5))
    seen = {(r.kind, r.ledger_id): r.first_seen_ms for r in again.carried(now, earlier).collect()}
    assert seen == {("FALSE_MARK", 1): 5, ("FALSE_MARK", 2): NOW_MS, ("NOT_HEALED", 1): NOW_MS}
    assert again.carried(now, None) is now


def test_copies_that_nobody_reported_make_a_run_incomplete(tables: Tables) -> None:
    ledgers = tables.ledgers(
        ledger(1, [(0, ABC)], last=3), ledger(2, [(0, ABC)], last=3), ledger(3, [(0, ABC)], last=None),
        ledger(4, [(0, ["a", "a", "b"])], last=3), ledger(5, [(0, ABC)], last=-1), ledger(6, [(0, ABC)], last=0),
    )  # fmt: skip
    coverage = ledgers.sparkSession.createDataFrame(
        [(1, "a", 12, 4, 0, "timeout"), (2, "a", 11, 0, 0, None), (4, "a", 8, 0, 0, None)],
        "ledger_id long, bookie string, copies long, unknown long, bytes long, reason string",
    )
    assert facts(again.unread_ledgers(ledgers, coverage, RUN)) == {
        ("UNREADABLE_BOOKIE", "incomplete", 2, None, None, None, None),
        ("UNREADABLE_BOOKIE", "incomplete", 6, None, None, None, None),
    }
    (told,) = again.unreadable_bookies(coverage, RUN).collect()
    assert (told.bookie, told.found) == ("a", "timeout; 4 copies of 1 ledgers were not seen")
    listless = ledgers.sparkSession.createDataFrame([("a", "timeout"), ("d", "no HTTP")], "bookie string, why string")
    told = again.unreadable_bookies(coverage, RUN, unlisted=listless)
    assert {(row.bookie, row.expected, row.found) for row in told.collect()} == {
        (
            "a", "an answer for every copy",
            "timeout; 4 copies of 1 ledgers were not seen; orphans were not looked for: timeout",
        ),
        ("d", "a list of what it holds", "orphans were not looked for: no HTTP"),
    }  # fmt: skip
