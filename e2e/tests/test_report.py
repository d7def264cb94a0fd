"""Goal: the page has the verdict and all data, escapes the history's text, and is written for every run."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bindery_e2e.judging.figures import FaultFigures, Span, figures_of
from bindery_e2e.judging.history import History
from bindery_e2e.judging.observed import Observed
from bindery_e2e.judging.validate import judge_observed
from bindery_e2e.judging.verdict import KINDS
from bindery_e2e.reporting.picture import FAULT_ROWS_MAX, Axis, clock, nice, rows_of, timeline
from bindery_e2e.reporting.report import Report, page, report_of, text_summary, write_report
from histories import TRUTH, Story, good

EVIL = "<script>alert('&\"')</script>"


def reported(story: Story, **facts: str) -> Report:
    observed = Observed(story.records)
    return Report(Path("h.jsonl"), facts, judge_observed(observed), figures_of(observed))


def bad() -> Story:
    story = good()
    story.add("fault-begin", 100, fault="kill -9", target="bookie-0", gap_s_max=0.001, entries_copied_max=0)
    story.wait(2)
    story.add("fault-end", 100, outcome="ok", entries_copied=7)
    story.sent("p1", [2], ["2:1:-1:-1"])
    story.read(*TRUTH)
    return story


class Tags(HTMLParser):
    """Collects tags, and addresses that a browser would fetch."""

    VOID = frozenset(("meta", "!doctype"))

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.outside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.outside += [name for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_self_contained() -> None:
    for story in (good(), bad(), Story()):
        text = page(reported(story, command="make chaos"))
        tags = Tags(text)
        assert not tags.open
        assert not tags.outside
        assert "script" not in tags.seen
        assert "url(" not in text
        assert "@import" not in text


def test_the_page_shows_errors_and_how_to_repeat_the_run() -> None:
    text = page(reported(bad(), command="make chaos MINUTES=1 SEED=7", seed="7"))
    assert "<h1>BAD</h1>" in text
    for kind in KINDS:
        assert f"<b>{kind}</b>" in text
    assert "2:1:-1:-1 of p1 #2" in text
    assert "make chaos MINUTES=1 SEED=7" in text
    assert "7 (limit 0)" in text


def test_text_from_a_history_is_escaped() -> None:
    story = good()
    story.topic = EVIL
    story.add("fault-begin", 100, fault=EVIL, target=EVIL)
    story.add("fault-end", 100, outcome="failed", detail=EVIL)
    story.add("observation", what="note", text=EVIL)
    story.add("observation", what="replicas", compared=1, diverged=[EVIL])
    story.sent(EVIL, [0], [EVIL + ":"])
    story.read([EVIL, EVIL, 1, EVIL])
    text = page(reported(story, **{EVIL: EVIL, "command": f"</title>{EVIL}"}))
    assert "<script" not in text
    assert text.count("</title>") == 1 + text.count("<g><title>")
    assert not Tags(text).open


def test_the_summary_ends_with_the_verdict() -> None:
    for story, verdict in ((bad(), "BAD"), (good(), "INCOMPLETE")):
        lines = text_summary(reported(story)).splitlines()
        assert lines[0].startswith(verdict)
        assert lines[-1] == f"verdict: {verdict}"


def test_the_three_files_replace_older_ones(tmp_path: Path) -> None:
    with History(tmp_path / "h.jsonl", facts={"seed": 7}) as history:
        history.observe("note", text="hello")
    for _ in range(2):
        paths = write_report(report_of(tmp_path / "h.jsonl"), tmp_path / "out")
    summary = json.loads(paths.json.read_text())
    assert summary["verdict"] == "INCOMPLETE"
    assert summary["facts"]["seed"] == 7
    assert paths.text.read_text().endswith("verdict: INCOMPLETE\n")
    assert "hello" in paths.html.read_text()


def test_a_damaged_history_has_a_report_of_its_readable_part(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    with History(path) as history:
        history.observe("note", text="before")
    with path.open("a") as file:
        file.write("no record\n")
    report = report_of(path)
    assert report.judgement.verdict == "INCOMPLETE"
    assert "line 3 is no record" in report.judgement.missing[0]
    assert "before" in page(report)
    path.write_text("")
    assert report_of(path).judgement.verdict == "INCOMPLETE"


# -- the picture -------------------------------------------------------------------------------------------------------


def test_the_picture_is_well_formed_and_within_its_box() -> None:
    for story in (good(), bad(), Story()):
        svg = ElementTree.fromstring(timeline(figures_of(Observed(story.records))))
        width, height = map(float, svg.attrib["viewBox"].split()[2:])
        for element in svg.iter("{http://www.w3.org/2000/svg}rect"):
            assert 0 <= float(element.attrib["x"]) <= width
            assert float(element.attrib["x"]) + float(element.attrib["width"]) <= width + 5
            assert float(element.attrib["y"]) <= height
        paths = " ".join(e.attrib["d"] for e in svg.iter("{http://www.w3.org/2000/svg}path"))
        assert "nan" not in paths
        numbers = [float(text) for text in re.findall(r"-?\d+\.?\d*", paths)]
        assert all(0 <= number <= max(width, height) for number in numbers)


def span() -> Span:
    return Span(1.0, 0, 0, 0, 0.0, "", None, None)


def test_bars_and_labels_of_one_row_do_not_touch() -> None:
    axis = Axis(100.0)
    faults = [FaultFigures(i + 1, "kill", "b", i * 9.0, i * 9.0 + 4, "ok", span(), {}) for i in range(11)]
    assert set(rows_of(faults, axis)) <= set(range(3))
    at_once = [FaultFigures(i + 1, "kill", "b", 1.0, 50.0, "ok", span(), {}) for i in range(40)]
    rows = rows_of(at_once, axis)
    assert rows[:FAULT_ROWS_MAX] == list(range(FAULT_ROWS_MAX))
    assert max(rows) == FAULT_ROWS_MAX - 1


@pytest.mark.parametrize(("value", "top"), [(0, 1), (1, 1), (1.1, 2), (7, 10), (10, 10), (11, 20), (4_999, 5_000)])
def test_axes_end_at_round_numbers(value: float, top: float) -> None:
    assert nice(value) == top


def test_seconds_are_shown_as_minutes_or_hours() -> None:
    assert [clock(seconds) for seconds in (0, 61.9, 3_599, 3_600)] == ["0:00", "1:01", "59:59", "1:00:00"]
