"""Play the load of `traffic.ordering` on a cluster of local processes, and judge its history."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bindery_e2e.judging.history import History
from bindery_e2e.reporting.report import Report, report_of, write_report
from bindery_e2e.runs.local import broker_at
from bindery_e2e.traffic.exchange import fixed
from bindery_e2e.traffic.ordering import Ordering, OrderingSettings

REQUIRED: Final = ("out-of-order", "held-twice", "stuck", "unacknowledged", "redelivered", "undelivered")


def run_ordering(
    settings: OrderingSettings,
    folder: Path,
    *,
    facts: dict[str, Any],
    url: str | None = None,
    say: Callable[[str], None] = print,
) -> Report:
    """Play and judge; the report and the history are in `folder`.

    `url`: a broker that runs already; None: a temporary cluster. Raises TrafficError, StandaloneError; FileExistsError
    if the folder has a history.
    """
    path = folder / "history.jsonl"
    with broker_at(url) as at, History(path, facts=facts) as history:
        ordering = Ordering(history, fixed(at), settings)
        try:
            asyncio.run(ordering.play())
        finally:
            report = report_of(path, required=REQUIRED)
            paths = write_report(report, folder)
            say(paths.text.read_text())
            say(f"report: {paths.html}")
    counts = report.judgement.counts
    ends = ", ".join(f"{count} {how}" for how, count in sorted(ordering.ends.items()))
    say(
        f"{counts['acknowledged']:,} messages of {settings.keys} keys, {counts['delivered']:,} deliveries, ends of "
        f"consumers: {ends or 'none'}; {report.judgement.verdict}"
    )
    return report
