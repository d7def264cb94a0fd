"""Differences between the findings of two runs."""

from bindery_spark.audit.findings.diff import compare, finding_text, place_text
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


def test_any_kind_of_difference_is_one() -> None:
    assert not compare([], [missing()]).is_empty
    assert not compare([missing()], []).is_empty
    assert not compare([missing()], [missing(last=9)]).is_empty
    assert compare([missing()], [missing()]).is_empty
    found = compare([missing(1), missing(2)], [missing(2, last=9), missing(3)])
    assert found.to_json() == {
        "new": [missing(3)],
        "gone": [missing(1)],
        "changed": [{"was": missing(2), "is": missing(2, last=9)}],
    }


def test_differences_are_sorted_by_place_kind_bookie_and_expectation() -> None:
    ordered = [
        finding("ENTRY_LOST", None, expected="a"),
        finding("ENTRY_LOST", None, expected="b"),
        finding("ENTRY_LOST", None, bookie="b"),
        finding("UNREADABLE_BOOKIE", None),
        finding("ENTRY_LOST", 0, segment=None),
        finding("ENTRY_LOST", 0, segment=0, first_entry=None),
        finding("ENTRY_LOST", 0, segment=0, first_entry=0),
        finding("MISSING_REPLICA", 0, segment=0, first_entry=0, bookie="a"),
        finding("MISSING_REPLICA", 0, segment=0, first_entry=0, bookie="b"),
        finding("ENTRY_LOST", 0, segment=0, first_entry=1),
        finding("ENTRY_LOST", 1),
    ]
    assert list(compare([], reversed(ordered)).new) == ordered
    assert list(compare(reversed(ordered), []).gone) == ordered
    before = [{**each, "severity": "info"} for each in ordered]
    assert [now for _, now in compare(reversed(before), ordered).changed] == ordered


def test_the_place_of_a_finding_is_as_exact_as_it_is_known() -> None:
    def place(**where: object) -> str:
        return place_text(finding("ENTRY_LOST", where.pop("ledger_id", None), **where))

    assert place() == ""
    assert place(ledger_id=0, first_entry=0, last_entry=0) == "ledger 0, entry 0"
    assert place(ledger_id=7, first_entry=3, last_entry=5) == "ledger 7, entries 3..5"
    assert place(ledger_id=7, first_entry=3) == "ledger 7, entries 3.."
    assert place(bookie="b") == "on b"


def test_a_finding_is_one_line_with_the_known_details() -> None:
    assert finding_text(finding("ENTRY_LOST", None)) == "ENTRY_LOST (warning)"
    assert finding_text(finding("ENTRY_LOST", 7, expected="x")) == "ENTRY_LOST (warning) ledger 7: expected x"
    assert finding_text(finding("ENTRY_LOST", 7, found="y")) == "ENTRY_LOST (warning) ledger 7: y"
    assert (
        finding_text(finding("ENTRY_LOST", 7, found="y", expected="x"))
        == "ENTRY_LOST (warning) ledger 7: y; expected x"
    )
