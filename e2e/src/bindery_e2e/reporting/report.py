"""Write the report of a run: report.html (one self-contained file), summary.txt, summary.json.

The only input is the history, so a report can be written again later. If a history cannot be read to its end, for
example after a disk error, the report covers the readable part, with the error and at best the verdict INCOMPLETE.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

from bindery_e2e.judging.figures import FaultFigures, Figures, Span, figures_of
from bindery_e2e.judging.history import HistoryError, Record, read_history
from bindery_e2e.judging.observed import Observed
from bindery_e2e.judging.validate import judge_observed
from bindery_e2e.judging.verdict import KINDS, Judgement
from bindery_e2e.reporting.picture import clock, timeline

TEXT_MAX: Final = 2000
"""Maximum characters of a fact in the page."""
_STYLE: Final = (Path(__file__).parent / "report.css").read_text()


@dataclass(frozen=True, slots=True)
class Paths:
    html: Path
    text: Path
    json: Path


@dataclass(frozen=True, slots=True)
class Report:
    """The judgement and the figures of a history."""

    history: Path
    facts: Mapping[str, Any]
    judgement: Judgement
    figures: Figures


def report_of(history: Path, *, required: Sequence[str] = ()) -> Report:
    """Read and judge `history`. `required` as in `validate.judge`. Raises FileNotFoundError."""
    broken: list[str] = []

    def readable() -> Iterator[Record]:
        try:
            yield from read_history(history)
        except HistoryError as error:
            broken.append(f"the history could not be read to its end: {error}")

    observed = Observed(readable())
    judgement = judge_observed(observed, required=required)
    judgement.missing[:0] = broken
    return Report(history, observed.facts, judgement, figures_of(observed))


def write_report(report: Report, directory: Path) -> Paths:
    """Create the directory and write the three files, replacing older ones."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = Paths(directory / "report.html", directory / "summary.txt", directory / "summary.json")
    paths.html.write_text(page(report))
    paths.text.write_text(text_summary(report))
    paths.json.write_text(json.dumps(json_summary(report), indent=2) + "\n")
    return paths


# -- summaries ---------------------------------------------------------------------------------------------------------


def json_summary(report: Report) -> dict[str, Any]:
    judgement, figures = report.judgement, report.figures
    return {
        "verdict": judgement.verdict,
        "findings": [asdict(finding) for finding in judgement.findings],
        "missing": judgement.missing,
        "judged": judgement.judged,
        "unjudged": judgement.unjudged,
        "counts": judgement.counts,
        "duration_s": round(figures.duration_s, 3),
        "whole": asdict(figures.whole),
        "faults": [asdict(fault) for fault in figures.faults],
        "facts": dict(report.facts),
        "history": str(report.history),
    }


def text_summary(report: Report) -> str:
    """The report as some dozens of lines; the last one is the verdict."""
    judgement, figures = report.judgement, report.figures
    lines = [headline(report), ""]
    lines += [f"{name}: {value}" for name, value in fact_lines(report.facts)]
    if figures.faults:
        rows = [fault_cells(fault) for fault in figures.faults]
        widths = [max(len(row[i]) for row in [FAULT_COLUMNS, *rows]) for i in range(len(FAULT_COLUMNS))]
        lines.append("")
        for row in [FAULT_COLUMNS, *rows]:
            lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    lines.append("")
    for kind, state, count, _ in verdict_rows(judgement):
        lines.append(f"{kind:18} {state:10} {count}")
    for finding in judgement.findings:
        lines += ["", f"{finding.kind}: {KINDS[finding.kind]}", *(f"  {text}" for text in finding.examples)]
    lines += ["", *(f"incomplete: {reason}" for reason in judgement.missing)]
    lines.append(f"verdict: {judgement.verdict}")
    return "\n".join(lines) + "\n"


def headline(report: Report) -> str:
    judgement, figures = report.judgement, report.figures
    if judgement.findings:
        first = ", ".join(f"{finding.count} {finding.kind}" for finding in judgement.findings)
        what = f"errors: {first}"
    elif judgement.missing:
        what = "no errors were found, but not everything could be judged"
    else:
        what = "no acknowledged message was lost, changed, duplicated, reordered or withheld"
    counts = judgement.counts
    return (
        f"{judgement.verdict}: {what}. {counts['acknowledged']} messages acknowledged, {counts['refused']} refused, "
        f"{counts['unknown']} unknown, {counts['delivered']} deliveries, {len(figures.faults)} faults in "
        f"{clock(figures.duration_s)}."
    )


FAULT_COLUMNS: Final = (
    "#", "fault", "target", "from", "to", "outcome", "longest gap", "p50", "p99", "ok", "refused", "unknown", "copied",
)  # fmt: skip


def fault_cells(fault: FaultFigures) -> tuple[str, ...]:
    span, values = fault.span, fault.values
    limit = f" (limit {values['gap_s_max']:g} s)" if "gap_s_max" in values else ""
    copied = str(values.get("entries_copied", ""))
    if "entries_copied_max" in values:
        copied += f" (limit {values['entries_copied_max']})"
    return (
        str(fault.number), fault.fault, fault.target, clock(fault.begin_s),
        "" if fault.end_s is None else clock(fault.end_s), fault.outcome, f"{span.gap_s:.1f} s{limit}",
        milliseconds(span.p50_ms), milliseconds(span.p99_ms), str(span.acknowledged), str(span.refused),
        str(span.unknown), copied.strip(),
    )  # fmt: skip


def milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def verdict_rows(judgement: Judgement) -> Iterator[tuple[str, str, str, list[str]]]:
    """(kind; "held", "VIOLATED" or "not judged"; number or reason; examples) of each kind."""
    found = {finding.kind: finding for finding in judgement.findings}
    for kind in KINDS:
        if kind in found:
            yield kind, "VIOLATED", str(found[kind].count), found[kind].examples
        elif kind in judgement.unjudged:
            yield kind, "not judged", judgement.unjudged[kind], []
        else:
            yield kind, "held", f"{judgement.judged.get(kind, 0)} checked", []


def fact_lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in facts.items():
        if name != "version":
            text = value if isinstance(value, str) else json.dumps(value)
            yield name, text[:TEXT_MAX]


# -- the page ----------------------------------------------------------------------------------------------------------


def page(report: Report) -> str:
    """The HTML page. Text from the history is escaped."""
    judgement, figures = report.judgement, report.figures
    title = f"{judgement.verdict}: {report.facts.get('command', 'a run of Bindery under faults')}"
    missing = "".join(f"<li>{escape(reason)}</li>" for reason in judgement.missing)
    notes = "".join(f"<li><b>{clock(at)}</b> {escape(text)}</li>" for at, text in figures.notes)
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>",
            f'<header class="{judgement.verdict.lower()}"><h1>{judgement.verdict}</h1>'
            f"<p>{escape(headline(report).partition(': ')[2])}</p></header>",
            f"<ul class=missing>{missing}</ul>" if missing else "",
            _tiles(figures.whole, judgement),
            f"<h2>What happened</h2>\n<figure>{timeline(figures)}</figure>",
            f"<h2>Notes</h2><ul>{notes}</ul>" if notes else "",
            f"<h2>Verdicts</h2>\n{_verdicts(judgement)}",
            f"<h2>Faults</h2>\n{_faults(figures.faults)}",
            f"<h2>How to repeat it</h2>\n{_facts(report)}",
            "</body>\n</html>\n",
        ]
    )


def _tiles(whole: Span, judgement: Judgement) -> str:
    counts = judgement.counts
    tiles = [
        (f"{counts['acknowledged']:,}", "messages acknowledged"),
        (f"{counts['unknown']:,}", "of unknown outcome"),
        (f"{counts['refused']:,}", "refused"),
        (f"{counts['delivered']:,}", "deliveries"),
        (milliseconds(whole.p50_ms) or "none", "median produce"),
        (milliseconds(whole.p99_ms) or "none", "99th percentile"),
        (f"{whole.gap_s:.1f} s", f"longest gap, {whole.gap_topic or 'no topic'}"),
    ]
    cells = "".join(f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>" for value, label in tiles)
    return f'<section class="tiles">{cells}</section>'


def _verdicts(judgement: Judgement) -> str:
    rows = []
    for kind, state, count, examples in verdict_rows(judgement):
        cases = "".join(f"<li>{escape(text)}</li>" for text in examples)
        rows.append(
            f'<tr class="{state.lower().replace(" ", "-")}"><td><b>{kind}</b></td><td><mark>{state}</mark></td>'
            f"<td>{escape(count)}</td><td>{escape(KINDS[kind])}{f'<ol>{cases}</ol>' if cases else ''}</td></tr>"
        )
    head = "<tr><th>verdict</th><th>state</th><th>count</th><th>meaning and first cases</th></tr>"
    return f'<div class="wide"><table>{head}{"".join(rows)}</table></div>'


def _faults(faults: Sequence[FaultFigures]) -> str:
    if not faults:
        return "<p>No fault was injected.</p>"
    head = "".join(f"<th>{escape(name)}</th>" for name in (*FAULT_COLUMNS, "detail"))
    rows = []
    for fault in faults:
        cells = (*fault_cells(fault), str(fault.values.get("detail", "")))
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return f'<div class="wide"><table class="figures"><tr>{head}</tr>{"".join(rows)}</table></div>'


def _facts(report: Report) -> str:
    facts = [*fact_lines(report.facts), ("history", str(report.history))]
    rows = "".join(f"<tr><th>{escape(name)}</th><td><code>{escape(text)}</code></td></tr>" for name, text in facts)
    return f'<div class="wide"><table>{rows}</table></div>'
