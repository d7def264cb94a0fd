"""The HTML page: the data of `/v1/...` as tables. It has no scripts, loads nothing else, and escapes all values."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any, Final

from bindery_kit.admin.http import Answer
from bindery_kit.http.page_headers import page_headers
from bindery_metadata.recovery.last_audits import findings_text
from bindery_recovery.records import sentences

_STYLE: Final = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1d2430; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .3rem .8rem .3rem 0;
vertical-align: top; border-bottom: 1px solid #d8dde6; } th { font-weight: 600; }
.bad { color: #a3261b; } .quiet { color: #5c6676; }
"""
_HEADERS: Final = tuple((name.lower().encode(), value.encode()) for name, value in page_headers(_STYLE).items())


def render(
    *,
    status: Mapping[str, Any],
    ledgers: Sequence[Mapping[str, Any]],
    ledgers_more: bool,
    bookies: Sequence[Mapping[str, Any]],
    history: Sequence[Mapping[str, Any]],
    now_ms: int,
) -> Answer:
    """Return the page. The arguments have the form of the responses of `/v1/...`."""
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><meta http-equiv='refresh' content='10'>",
        f"<title>Bindery auditor</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(headline(status))}</h1>",
        _table((), ((f"<b>{escape(name)}</b>", escape(value)) for name, value in _facts(status))),
        "<h2>Under-replicated ledgers</h2>",
        _table(
            ("ledger", "marked for", "reason", "state", "obstacle", "next attempt"),
            (_ledger_row(ledger, now_ms) for ledger in ledgers),
            empty="None.",
        ),
        "<p class='quiet'>More ledgers: <code>/v1/recovery/ledgers</code></p>" if ledgers_more else "",
        "<h2>Bookies</h2>",
        _table(("bookie", "registered", "membership", ""), (_bookie_row(bookie) for bookie in bookies), empty="None."),
        "<h2>Last audits of the whole cluster</h2>",
        _table(
            ("level", "verdict", "ended", "copies checked", "findings", "run"),
            (_audit_row(audit) for audit in status["audits"]),
            empty="No audit has recorded a result.",
        ),
        "<h2>History</h2>",
        _table(
            ("time (UTC)", "event"),
            ((f"<span class='quiet'>{_when(event['at_ms'])}</span>", escape(event["text"])) for event in history),
            empty="No events.",
        ),
        "</body></html>\n",
    ]
    return Answer(200, "text/html; charset=utf-8", "".join(parts).encode(), _HEADERS)


def headline(status: Mapping[str, Any]) -> str:
    """Return the state of recovery as a sentence."""
    marked = status["marked"]
    left = f"{sentences.counted(marked, 'ledger is', 'ledgers are')} under-replicated"
    if not status["is_enabled"]:
        why = f": {status['pause']['reason']}" if status["pause"] and status["pause"]["reason"] else ""
        return f"Recovery is paused{why}. {left}."
    if not status["auditor"]:
        return f"No auditor is elected, so lost bookies are not detected. {left}."
    if not marked:
        return "No ledger is known to be under-replicated."
    if status["eta_s"] is None:
        return f"{left}: {status['why_no_eta']}."
    return f"{left}; about {sentences.span(status['eta_s'])} left."


def _facts(status: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    this, workers = status["this"], len(status["workers"])
    copies = sentences.counted(status["entries_left"], "copy", "copies")
    yield "auditor", f"{status['auditor'] or 'none'} (this is {this['name']})"
    yield "left", f"{sentences.size(status['bytes_left'])}, {copies}"
    yield "now", f"{sentences.size(status['rate_bytes_per_s'])} per second by {sentences.counted(workers, 'worker')}"
    if status["unrecoverable"]:
        yield "unrecoverable", sentences.counted(status["unrecoverable"], "ledger")
    for bookie in status["lost"]:
        left_s = bookie["left_s"]
        soon = f"counts as lost in {sentences.span(left_s)}" if left_s else "lost"
        yield f"{bookie['bookie_id']} is absent", "its ledgers are marked" if left_s is None else soon
    yield "delay before a bookie counts as lost", f"{status['lost_bookie_delay_s']} s"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, empty: str = "") -> str:
    """Return an HTML table; `empty` as a paragraph if there are no rows. `rows`: cells in HTML."""
    lines = ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
    if not lines:
        return f"<p class='quiet'>{escape(empty)}</p>"
    names = f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>" if head else ""
    return f"<table>{names}{''.join(lines)}</table>"


def _ledger_row(ledger: Mapping[str, Any], now_ms: int) -> Sequence[str]:
    record: Mapping[str, Any] = ledger["record"] or {}
    marked_ms = record.get("first_marked_ms") or ledger["marked_ms"]
    next_ms = record.get("next_retry_ms")
    why = [word for word in (record.get("reason", "").replace("_", " "), ", ".join(ledger["bookies"])) if word]
    obstacle = record.get("detail") or record.get("last_error") or ""
    ledger_id = escape(str(ledger["ledger_id"]))
    return (
        f"<a href='/v1/recovery/ledgers/{ledger_id}'>{ledger_id}</a>",
        sentences.span((now_ms - marked_ms) / 1000) if marked_ms else "-",
        escape(": ".join(why)),
        escape(str(record.get("state", "not checked yet")).replace("_", " ")),
        f"<span class='bad'>{escape(obstacle)}</span>",
        sentences.span(max(0, next_ms - now_ms) / 1000) if next_ms else "-",
    )


def _bookie_row(bookie: Mapping[str, Any]) -> Sequence[str]:
    registration = str(bookie["registration"]).replace("_", "-")
    notes = [f"{bookie['by']}: {bookie['reason']}".strip(": ")] if bookie["by"] or bookie["reason"] else []
    drain = bookie["drain"]
    if drain is not None:
        ledgers = [_known(drain[name], str) for name in ("ledgers_left", "ledgers_total")]
        sizes = [_known(drain[name], sentences.size) for name in ("bytes_left", "bytes_total")]
        notes.append(f"left: {ledgers[0]} of {ledgers[1]} ledgers, {sizes[0]} of {sizes[1]}")
    return (
        escape(str(bookie["bookie_id"])),
        f"<span class='bad'>{registration}</span>" if registration == "absent" else escape(registration),
        escape(str(bookie["intent"])),
        escape("; ".join(notes)),
    )


def _audit_row(audit: Mapping[str, Any]) -> Sequence[str]:
    verdict = escape(audit["verdict"])
    return (
        escape(audit["level"]),
        verdict if audit["exit_code"] == 0 else f"<span class='bad'>{verdict}</span>",
        f"{sentences.span(audit['age_s'])} ago",
        f"{audit['copies_verified']} of {audit['copies_expected']}",
        findings_text(audit["severities"]),
        escape(audit["run_id"]),
    )


def _known(value: int | None, shown: Callable[[int], str]) -> str:
    return "?" if value is None else shown(value)


def _when(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
