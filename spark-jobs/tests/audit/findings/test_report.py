"""The HTML report."""

import re
from xml.etree import ElementTree

import pytest
from bindery_spark.audit.findings.findings import WHAT_TO_DO, Kind
from bindery_spark.audit.findings.report import report_html
from bindery_spark.audit.findings.summary import (
    BookieCoverage,
)
from finished_runs import WHOLE, missing, summary

NASTY = '<script>alert("x")</script>&'


def test_the_report_loads_nothing_and_escapes_text() -> None:
    found = [missing(bookie=NASTY, found=NASTY, expected=NASTY)]
    page = report_html(
        summary(found, [*WHOLE, BookieCoverage(NASTY, 10, 5, 0, NASTY)], cluster_id=NASTY, run_id=NASTY), found
    )
    assert "<script" not in page
    assert not re.search(r"(src|href)=", page), "nothing is loaded from elsewhere"
    picture = ElementTree.fromstring(re.search(r"<svg.*</svg>", page, re.DOTALL).group())
    texts = [each.text for each in picture.iter("text")]
    assert {"a:3181", "b:3181", NASTY, "5 of 10 copies checked", "1 under_replicated"} <= set(texts)
    assert len(list(picture.iter("rect"))) == 5, "three seen, one unseen, one of findings"


def test_a_report_without_bookies_and_findings_is_a_valid_page() -> None:
    page = report_html(summary([], []), [])
    ElementTree.fromstring(re.search(r"<svg.*</svg>", page, re.DOTALL).group())
    assert "HEALTHY" in page


def test_each_bookie_has_a_bar_of_copies_and_a_bar_of_findings_to_scale() -> None:
    bookies = [BookieCoverage("a", 100, 20, 0, "timeout"), BookieCoverage("b", 40, 0, 0), BookieCoverage("c", 0, 0, 0)]
    found = [
        missing(bookie="a"),
        missing(bookie="a", severity="corrupt"),
        missing(bookie="d", severity="corrupt"),
        missing(bookie=None),
    ]
    picture = ElementTree.fromstring(re.search(r"<svg.*</svg>", report_html(summary(found, bookies), found)).group())
    assert picture.get("viewBox") == "0 0 960 212"
    rects = [
        (*(float(each.get(name)) for name in ("x", "y", "width", "height")), each.get("fill"), each.find("title").text)
        for each in picture.iter("rect")
    ]
    assert rects == [
        (210.0, 2.0, 416.0, 16.0, "#2e7d32", "80 of 100 copies checked"),
        (626.0, 2.0, 104.0, 16.0, "#9a9a9a", "timeout"),
        (210.0, 22.0, 260.0, 16.0, "#e07b00", "1 under_replicated"),
        (470.0, 22.0, 260.0, 16.0, "#c62828", "1 corrupt"),
        (210.0, 54.0, 208.0, 16.0, "#2e7d32", "40 of 40 copies checked"),
        (210.0, 178.0, 260.0, 16.0, "#c62828", "1 corrupt"),
    ]
    texts = [(float(each.get("x")), float(each.get("y")), each.text) for each in picture.iter("text")]
    assert texts == [
        (0.0, 14.0, "a"),
        (738.0, 14.0, "80 of 100 copies checked"),
        (738.0, 35.0, "1 under_replicated, 1 corrupt"),
        (0.0, 66.0, "b"),
        (426.0, 66.0, "40 of 40 copies checked"),
        (0.0, 118.0, "c"),
        (218.0, 118.0, "0 of 0 copies checked"),
        (0.0, 170.0, "d"),
        (218.0, 170.0, "0 of 0 copies checked"),
        (478.0, 191.0, "1 corrupt"),
    ]


def test_a_bar_is_visible_however_small_its_share_is_and_has_a_reason() -> None:
    bookies = [BookieCoverage("a", 10**6, 1, 0), BookieCoverage("b", 1, 0, 0)]
    page = report_html(summary([], bookies), [])
    picture = ElementTree.fromstring(re.search(r"<svg.*</svg>", page).group())
    widths = [(float(each.get("width")), each.find("title").text) for each in picture.iter("rect")]
    assert widths == [
        (520.0, "999999 of 1000000 copies checked"),
        (1.0, "not checked"),
        (1.0, "1 of 1 copies checked"),
    ]
    assert picture.get("viewBox") == "0 0 960 108"


def test_without_bookies_the_picture_has_the_height_of_one() -> None:
    page = report_html(summary([], []), [])
    assert ElementTree.fromstring(re.search(r"<svg.*</svg>", page).group()).get("viewBox") == "0 0 960 56"
    assert "<h2>Findings</h2><p>None.</p></html>" in page


def test_the_facts_of_the_run_are_a_table() -> None:
    bookies = [BookieCoverage("a", 10, 3, 3 * 2**19)]
    page = report_html(summary([], bookies, proposals=4, ledgers_skipped=5), [])
    table = re.search(r"<table>.*?</table>", page).group()
    cells = [(row.find("th").text, row.find("td").text) for row in ElementTree.fromstring(table)]
    assert dict(cells) == {
        "Run": "r1",
        "Level": "deep",
        "Began": "2027-01-15 08:00:00 UTC",
        "Took": "2.0 s",
        "Ledgers": "3 checked, 5 skipped, 2 verified",
        "Copies of entries": "7 of 10 checked",
        "Payload": "1.5 MiB",
        "Ledgers to mark": "4",
    }


def rows_of(page: str, heading: str) -> list[list[str]]:
    """Cells of the rows of the table whose first heading this is."""
    (table,) = re.findall(rf"<table><tr><th>{heading}</th>.*?</table>", page)
    return [["".join(cell.itertext()) for cell in row] for row in ElementTree.fromstring(table)][1:]


def test_findings_are_listed_with_the_worst_first_and_by_kind_with_advice() -> None:
    found = [
        missing(severity="warning", found=None, expected=None),
        {**missing(8, severity="unreadable"), "kind": "ENTRY_LOST"},
    ]
    page = report_html(summary(found), found)
    assert rows_of(page, "Severity") == [
        [
            "unreadable",
            "ENTRY_LOST",
            "ledger 8, entries 3..5, on a:3181",
            "a copy",
            "the bookie denies it",
            "2027-01-15 08:00",
        ],
        ["warning", "MISSING_REPLICA", "ledger 7, entries 3..5, on a:3181", "", "", "2027-01-15 08:00"],
    ]
    assert rows_of(page, "Kind") == [
        ["ENTRY_LOST", "1", WHAT_TO_DO[Kind.ENTRY_LOST]],
        ["MISSING_REPLICA", "1", WHAT_TO_DO[Kind.MISSING_REPLICA]],
    ]
    assert '<td style="color:#6a1b9a">' in page


@pytest.mark.parametrize(("count", "more"), [(2_000, None), (2_001, "and 1 more")])
def test_at_most_2000_findings_are_listed(count: int, more: str | None) -> None:
    found = [missing(number) for number in range(count)]
    page = report_html(summary(found), found)
    assert page.count("ledger ") == 2_000
    assert ("<p>and" in page) is (more is not None)
    assert more is None or f"<p>{more}; see <code>bindery audit show --findings</code></p>" in page
