"""The report as one HTML page: verdict, a chart of coverage and findings by bookie, and the findings. Pure.

The page loads nothing and runs no script. Text from the cluster is escaped.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from time import gmtime, strftime
from typing import Any, Final

from bindery_spark.audit.findings.diff import place_text
from bindery_spark.audit.findings.findings import WHAT_TO_DO, Kind, Severity
from bindery_spark.audit.findings.summary import MIB, BookieCoverage, Summary

ROWS_MAX: Final = 2_000
"""Maximum number of findings in the report."""
BAR_WIDTH: Final = 520
BAR_HEIGHT: Final = 16
LABEL_WIDTH: Final = 210
LINE: Final = 26
"""Height of a line of the chart. Lengths are in units of the SVG picture."""
COLOURS: Final[Mapping[str, str]] = {
    Severity.INFO: "#8aa0b5",
    Severity.WARNING: "#d9a514",
    Severity.INCOMPLETE: "#9a9a9a",
    Severity.UNDER_REPLICATED: "#e07b00",
    Severity.CORRUPT: "#c62828",
    Severity.UNREADABLE: "#6a1b9a",
}
_STYLE: Final = """
body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:70em;padding:0 1em;color:#1d2733}
table{border-collapse:collapse;width:100%}
td,th{padding:.25em .6em;text-align:left;border-bottom:1px solid #dde3e9;vertical-align:top}
.verdict{font-size:1.6em;font-weight:600}.HEALTHY{color:#2e7d32}
.UNDER-REPLICATED{color:#e07b00}.CORRUPT{color:#c62828}.INCOMPLETE{color:#666}
svg text{font:13px system-ui,sans-serif;fill:#1d2733}code{overflow-wrap:anywhere}
"""


def report_html(summary: Summary, findings: Sequence[Mapping[str, Any]]) -> str:
    """`findings`: rows of FINDINGS; ROWS_MAX of them are shown, the worst first."""
    order = list(Severity)
    worst = sorted(findings, key=lambda f: -order.index(Severity(f["severity"])))
    more = (
        f"<p>and {len(worst) - ROWS_MAX} more; see <code>bindery audit show --findings</code></p>"
        if len(worst) > ROWS_MAX
        else ""
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<title>Audit {escape(summary.run_id)}</title><style>{_STYLE}</style>"
        f'<h1>Audit of {escape(summary.cluster_id)}</h1><p class="verdict {escape(summary.verdict)}">'
        f"{escape(summary.verdict)}</p>{_facts(summary)}<h2>Bookies</h2>{_picture(summary.bookies, findings)}"
        f"<h2>Findings</h2>{_kinds(summary)}{_table(worst[:ROWS_MAX])}{more}</html>\n"
    )


def _facts(summary: Summary) -> str:
    rows = {
        "Run": summary.run_id,
        "Level": summary.level,
        "Began": strftime("%Y-%m-%d %H:%M:%S UTC", gmtime(summary.began_ms / 1000)),
        "Took": f"{summary.seconds:.1f} s",
        "Ledgers": f"{summary.ledgers} checked, {summary.ledgers_skipped} skipped, {summary.ledgers_verified} verified",
        "Copies of entries": f"{summary.copies - summary.unknown} of {summary.copies} checked",
        "Payload": f"{summary.bytes / MIB:.1f} MiB",
        "Ledgers to mark": f"{summary.proposals}",
    }
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows.items())
    return f"<table>{cells}</table>"


def _picture(bookies: Sequence[BookieCoverage], findings: Sequence[Mapping[str, Any]]) -> str:
    """Two bars per bookie: its share of the copies, with unchecked ones in grey; and its findings."""
    of_bookie: dict[str, Counter[str]] = {}
    for finding in findings:
        if finding["bookie"] is not None:
            of_bookie.setdefault(finding["bookie"], Counter())[finding["severity"]] += 1
    names = sorted({one.bookie for one in bookies} | of_bookie.keys())
    by_name = {one.bookie: one for one in bookies}
    copies_max = max((one.copies for one in bookies), default=0) or 1
    found_max = max((counts.total() for counts in of_bookie.values()), default=0) or 1
    rows = []
    for at, name in enumerate(names):
        rows.append(
            _bars(at * 2 * LINE, by_name.get(name), name, of_bookie.get(name, Counter()), copies_max, found_max)
        )
    width, height = LABEL_WIDTH + BAR_WIDTH + 230, max(1, len(names)) * 2 * LINE + 4
    title = "Coverage and findings of each bookie"
    return (
        f'<svg viewBox="0 0 {width} {height}" width="100%" role="img" aria-label="{title}"><title>{title}</title>'
        + "".join(rows)
        + "</svg>"
    )


def _bars(top: int, one: BookieCoverage | None, name: str, found: Counter[str], copies_max: int, found_max: int) -> str:
    copies, unknown = (one.copies, one.unknown) if one is not None else (0, 0)
    seen = BAR_WIDTH * (copies - unknown) / copies_max
    unseen = BAR_WIDTH * unknown / copies_max
    checked = f"{copies - unknown} of {copies} copies checked"
    shapes = [
        f'<text x="0" y="{top + 14}">{escape(name)}</text>',
        _bar(LABEL_WIDTH, top + 2, seen, "#2e7d32", checked),
        _bar(LABEL_WIDTH + seen, top + 2, unseen, COLOURS[Severity.INCOMPLETE], (one and one.reason) or "not checked"),
        f'<text x="{LABEL_WIDTH + seen + unseen + 8:.1f}" y="{top + 14}">{escape(checked)}</text>',
    ]
    x = float(LABEL_WIDTH)
    for severity in Severity:
        width = BAR_WIDTH * found[severity] / found_max
        shapes.append(_bar(x, top + LINE - 4, width, COLOURS[severity], f"{found[severity]} {severity}"))
        x += width
    if found:
        text = ", ".join(f"{found[severity]} {severity}" for severity in Severity if found[severity])
        shapes.append(f'<text x="{x + 8:.1f}" y="{top + LINE + 9}">{escape(text)}</text>')
    return "".join(shapes)


def _bar(x: float, y: float, width: float, colour: str, title: str) -> str:
    if width <= 0:
        return ""
    shown = max(width, 1.0)
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{shown:.1f}" height="{BAR_HEIGHT}" fill="{colour}">'
        f"<title>{escape(title)}</title></rect>"
    )


def _kinds(summary: Summary) -> str:
    if not summary.kinds:
        return "<p>None.</p>"
    rows = "".join(
        f"<tr><th>{escape(kind)}</th><td>{count}</td><td>{escape(WHAT_TO_DO[Kind(kind)])}</td></tr>"
        for kind, count in summary.kinds.items()
    )
    return f"<table><tr><th>Kind</th><th>Findings</th><th>What to do</th></tr>{rows}</table>"


def _table(findings: Sequence[Mapping[str, Any]]) -> str:
    if not findings:
        return ""
    rows = "".join(
        "<tr>"
        f'<td style="color:{COLOURS[finding["severity"]]}">{escape(finding["severity"])}</td>'
        f"<td>{escape(finding['kind'])}</td><td>{escape(place_text(finding))}</td>"
        f"<td>{escape(finding['expected'] or '')}</td><td><code>{escape(finding['found'] or '')}</code></td>"
        f"<td>{strftime('%Y-%m-%d %H:%M', gmtime(finding['first_seen_ms'] / 1000))}</td></tr>"
        for finding in findings
    )
    head = "<tr><th>Severity</th><th>Kind</th><th>Where</th><th>Expected</th><th>Found</th><th>First seen</th></tr>"
    return f"<table>{head}{rows}</table>"
