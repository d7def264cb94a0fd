"""The HTML page, rendered from data of the form of the API's responses: its sentences, cells and escaping."""

import html
import re
from typing import Any

import pytest
from bindery_auditor.page import headline, render
from bindery_kit.admin.http import Answer
from bindery_kit.http.page_headers import page_headers

NOW_MS = 1_700_000_000_000
MINUTE_MS = 60_000


def status_of(**changes: Any) -> dict[str, Any]:
    known: dict[str, Any] = {
        "marked": 0,
        "is_enabled": True,
        "pause": None,
        "auditor": "auditor-1",
        "eta_s": 120.0,
        "why_no_eta": None,
        "this": {"name": "auditor-0"},
        "workers": ["w0"],
        "entries_left": 0,
        "bytes_left": 0,
        "rate_bytes_per_s": 0,
        "unrecoverable": 0,
        "lost": [],
        "lost_bookie_delay_s": 90,
        "audits": [],
    }
    return {**known, **changes}


def ledger_of(record: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {"ledger_id": 7, "marked_ms": NOW_MS - 2 * MINUTE_MS, "bookies": ["bookie-0"], "record": record, **changes}


def bookie_of(**changes: Any) -> dict[str, Any]:
    known = {"bookie_id": "b0", "registration": "writable", "intent": "active", "by": "", "reason": "", "drain": None}
    return {**known, **changes}


def audit_of(**changes: Any) -> dict[str, Any]:
    known = {
        "level": "deep",
        "verdict": "HEALTHY",
        "exit_code": 0,
        "age_s": 180.0,
        "copies_verified": 150,
        "copies_expected": 200,
        "severities": {},
        "run_id": "r1",
    }
    return {**known, **changes}


def page_of(**parts: Any) -> Answer:
    known: dict[str, Any] = {
        "status": status_of(),
        "ledgers": [],
        "ledgers_more": False,
        "bookies": [],
        "history": [],
        "now_ms": NOW_MS,
    }
    return render(**{**known, **parts})


def text_of(**parts: Any) -> str:
    return page_of(**parts).body.decode()


def rows_of(title: str, **parts: Any) -> list[list[str]]:
    """Return the cells of the table below a heading, in HTML, without the row of names."""
    below = text_of(**parts).split(f"<h2>{title}</h2>")[1].split("</table>")[0]
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", below)]
    return [row for row in rows if row]


def facts_of(**changes: Any) -> dict[str, str]:
    """Return the facts above the first heading, as text."""
    above = text_of(status=status_of(**changes)).split("<h2>")[0]
    return {
        html.unescape(name): html.unescape(value)
        for name, value in re.findall(r"<tr><td><b>(.*?)</b></td><td>(.*?)</td></tr>", above)
    }


# --- the headline -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "No ledger is known to be under-replicated."),
        ({"marked": 1}, "1 ledger is under-replicated; about 2 min left."),
        ({"marked": 2}, "2 ledgers are under-replicated; about 2 min left."),
        ({"marked": 2, "eta_s": 0}, "2 ledgers are under-replicated; about 1 s left."),
        (
            {"marked": 2, "eta_s": None, "why_no_eta": "nothing was copied yet"},
            "2 ledgers are under-replicated: nothing was copied yet.",
        ),
        (
            {"marked": 2, "auditor": None},
            "No auditor is elected, so lost bookies are not detected. 2 ledgers are under-replicated.",
        ),
        (
            {"marked": 2, "is_enabled": False, "auditor": None, "pause": {"reason": "new racks"}},
            "Recovery is paused: new racks. 2 ledgers are under-replicated.",
        ),
        ({"is_enabled": False, "pause": {"reason": ""}}, "Recovery is paused. 0 ledgers are under-replicated."),
        ({"is_enabled": False, "pause": None}, "Recovery is paused. 0 ledgers are under-replicated."),
    ],
)
def test_the_headline_is_the_state_of_recovery(changes: dict[str, Any], expected: str) -> None:
    assert headline(status_of(**changes)) == expected
    assert f"<h1>{html.escape(expected)}</h1>" in text_of(status=status_of(**changes))


# --- the page as a whole ----------------------------------------------------------------------------------------------


def test_the_page_is_html_that_may_load_nothing() -> None:
    answer = page_of()
    assert (answer.status, answer.content_type) == (200, "text/html; charset=utf-8")
    headers = dict(answer.headers)
    text = answer.body.decode()
    style = text.partition("<style>")[2].partition("</style>")[0]
    assert headers == {name.lower().encode(): value.encode() for name, value in page_headers(style).items()}
    assert " style=" not in text, "the policy would ignore it"
    assert text.startswith("<!doctype html>")
    assert text.endswith("</body></html>\n")


def test_the_sections_have_a_fixed_order() -> None:
    assert re.findall("<h2>(.*?)</h2>", text_of()) == [
        "Under-replicated ledgers",
        "Bookies",
        "Last audits of the whole cluster",
        "History",
    ]


def test_a_section_without_data_says_so() -> None:
    assert re.findall("</h2><p class='quiet'>(.*?)</p>", text_of()) == [
        "None.",
        "None.",
        "No audit has recorded a result.",
        "No events.",
    ]


def test_the_columns_have_names() -> None:
    text = text_of(
        status=status_of(audits=[audit_of()]),
        ledgers=[ledger_of()],
        bookies=[bookie_of()],
        history=[{"at_ms": NOW_MS, "text": "x"}],
    )
    assert [re.findall("<th>(.*?)</th>", table) for table in re.findall("<table>(.*?)</table>", text)] == [
        [],
        ["ledger", "marked for", "reason", "state", "obstacle", "next attempt"],
        ["bookie", "registered", "membership", ""],
        ["level", "verdict", "ended", "copies checked", "findings", "run"],
        ["time (UTC)", "event"],
    ]


def test_further_ledgers_are_linked_only_if_there_are_any() -> None:
    link = "<p class='quiet'>More ledgers: <code>/v1/recovery/ledgers</code></p>"
    assert link not in text_of(ledgers=[ledger_of()])
    assert link in text_of(ledgers=[ledger_of()], ledgers_more=True)


# --- facts ------------------------------------------------------------------------------------------------------------


def test_the_facts_of_a_healthy_cluster() -> None:
    assert facts_of() == {
        "auditor": "auditor-1 (this is auditor-0)",
        "left": "0 B, 0 copies",
        "now": "0 B per second by 1 worker",
        "delay before a bookie counts as lost": "90 s",
    }


def test_the_work_that_is_left() -> None:
    facts = facts_of(auditor=None, bytes_left=2048, entries_left=1, rate_bytes_per_s=1024, workers=["a", "b"])
    assert facts["auditor"] == "none (this is auditor-0)"
    assert facts["left"] == "2.0 KiB, 1 copy"
    assert facts["now"] == "1.0 KiB per second by 2 workers"


@pytest.mark.parametrize(("count", "expected"), [(1, "1 ledger"), (2, "2 ledgers")])
def test_unrecoverable_ledgers_are_counted(count: int, expected: str) -> None:
    assert facts_of(unrecoverable=count)["unrecoverable"] == expected


@pytest.mark.parametrize(
    ("left_s", "expected"),
    [
        (None, "its ledgers are marked"),
        (0, "lost"),
        (60.0, "counts as lost in 60 s"),
        (600, "counts as lost in 10 min"),
    ],
)
def test_an_absent_bookie_counts_as_lost_after_a_delay(left_s: float | None, expected: str) -> None:
    assert facts_of(lost=[{"bookie_id": "b<0>", "left_s": left_s}])["b<0> is absent"] == expected


# --- ledgers ----------------------------------------------------------------------------------------------------------


def ledger_row(record: dict[str, Any] | None = None, **changes: Any) -> list[str]:
    (row,) = rows_of("Under-replicated ledgers", ledgers=[ledger_of(record, **changes)])
    return row


def test_a_ledger_without_a_record_was_not_checked_yet() -> None:
    assert ledger_row() == [
        "<a href='/v1/recovery/ledgers/7'>7</a>",
        "2 min",
        "bookie-0",
        "not checked yet",
        "<span class='bad'></span>",
        "-",
    ]


def test_a_ledger_with_a_record() -> None:
    record = {
        "first_marked_ms": NOW_MS - 10 * MINUTE_MS,
        "next_retry_ms": NOW_MS + 5 * MINUTE_MS,
        "reason": "lost_bookie",
        "state": "no_spare",
        "detail": "no bookie <can> replace it",
        "last_error": "an earlier error",
    }
    assert ledger_row(record, bookies=["b0", "b1"]) == [
        "<a href='/v1/recovery/ledgers/7'>7</a>",
        "10 min",
        "lost bookie: b0, b1",
        "no spare",
        "<span class='bad'>no bookie &lt;can&gt; replace it</span>",
        "5 min",
    ]


def test_the_last_error_is_shown_if_there_is_no_obstacle() -> None:
    assert ledger_row({"last_error": "connection lost"})[4] == "<span class='bad'>connection lost</span>"


def test_a_reason_without_bookies_stands_alone() -> None:
    assert ledger_row({"reason": "lost_bookie"}, bookies=[])[2] == "lost bookie"


def test_an_attempt_that_is_due_is_not_in_the_past() -> None:
    assert ledger_row({"next_retry_ms": NOW_MS - 5 * MINUTE_MS})[5] == "1 s"


@pytest.mark.parametrize(("seconds", "expected"), [(7_195, "120 min"), (7_200, "2 h")])
def test_times_are_exact_to_the_second(seconds: int, expected: str) -> None:
    row = ledger_row({"first_marked_ms": NOW_MS - seconds * 1000, "next_retry_ms": NOW_MS + seconds * 1000})
    assert (row[1], row[5]) == (expected, expected)


def test_the_time_of_a_mark_may_be_unknown() -> None:
    assert ledger_row(marked_ms=0)[1] == "-"


# --- bookies ----------------------------------------------------------------------------------------------------------


def bookie_row(**changes: Any) -> list[str]:
    (row,) = rows_of("Bookies", bookies=[bookie_of(**changes)])
    return row


def test_a_bookie_without_notes() -> None:
    assert bookie_row() == ["b0", "writable", "active", ""]


@pytest.mark.parametrize(
    ("registration", "expected"),
    [("read_only", "read-only"), ("absent", "<span class='bad'>absent</span>")],
)
def test_a_bookie_that_is_not_writable(registration: str, expected: str) -> None:
    assert bookie_row(registration=registration)[1] == expected


@pytest.mark.parametrize(
    ("by", "reason", "expected"),
    [("ann", "new disks", "ann: new disks"), ("ann", "", "ann"), ("", "new <disks>", "new &lt;disks&gt;")],
)
def test_who_changed_the_membership_and_why(by: str, reason: str, expected: str) -> None:
    assert bookie_row(by=by, reason=reason)[3] == expected


def test_the_progress_of_a_drain_follows_the_reason() -> None:
    drain = {"ledgers_left": 0, "ledgers_total": 12, "bytes_left": 1024, "bytes_total": 2048}
    row = bookie_row(intent="draining", by="ann", reason="old", drain=drain)
    assert row[2:] == ["draining", "ann: old; left: 0 of 12 ledgers, 1.0 KiB of 2.0 KiB"]


def test_numbers_of_a_drain_that_are_not_known_yet() -> None:
    drain = {"ledgers_left": None, "ledgers_total": None, "bytes_left": None, "bytes_total": None}
    assert bookie_row(drain=drain)[3] == "left: ? of ? ledgers, ? of ?"


# --- audits and history -----------------------------------------------------------------------------------------------


def test_the_last_audits() -> None:
    bad = audit_of(level="quick", verdict="CORRUPT", exit_code=1, severities={"unreadable": 3, "warning": 1})
    rows = rows_of("Last audits of the whole cluster", status=status_of(audits=[audit_of(), bad]))
    assert rows[0] == ["deep", "HEALTHY", "3 min ago", "150 of 200", "none", "r1"]
    assert rows[1][:2] == ["quick", "<span class='bad'>CORRUPT</span>"]
    assert rows[1][4] == "3 unreadable, 1 warning"


def test_the_history_has_times_in_utc() -> None:
    rows = rows_of("History", history=[{"at_ms": NOW_MS + 999, "text": "<b>"}, {"at_ms": 0, "text": "first"}])
    assert rows == [
        ["<span class='quiet'>2023-11-14 22:13:20</span>", "&lt;b&gt;"],
        ["<span class='quiet'>1970-01-01 00:00:00</span>", "first"],
    ]
