"""The HTML report."""

import re
from xml.etree import ElementTree

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
