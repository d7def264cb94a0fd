"""Play the load of `traffic.kills` on a cluster of local processes, and judge its history."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bindery.standalone.throwaway import ThrowawayCluster

from bindery_e2e.judging.history import History, read_history
from bindery_e2e.judging.observed import Observed
from bindery_e2e.reporting.report import Report, report_of, write_report
from bindery_e2e.runs.local import BOOKIES, LocalBroker
from bindery_e2e.traffic.exchange import fixed
from bindery_e2e.traffic.kills import Kills, KillsSettings

REQUIRED: Final = (
    *("redelivered", "undelivered", "unacknowledged", "count-fell", "inconsistent"),
    *("out-of-order", "held-twice", "fault-failed", "unavailable"),
)


@dataclass(frozen=True, slots=True)
class KillsFigures:
    """What a history of kills contains."""

    kills: int
    acknowledged: int
    """Messages that were acknowledged to their producers."""
    delivered: int
    acks: dict[str, int]
    """Successful acknowledgements by kind, as `Observed.acks_by_kind`."""
    unknown: int
    """Acknowledged messages of unknown outcome."""
    count_max: int
    silence_s: dict[str, float]
    """Operation -> longest time between two successes, in seconds."""

    def __str__(self) -> str:
        acks = ", ".join(f"{count:,} {kind}" for kind, count in self.acks.items())
        silence = ", ".join(f"{op} {self.silence_s.get(op, 0):.1f} s" for op in ("produce", "receive", "ack"))
        return (
            f"{self.kills} kills; {self.acknowledged:,} messages, {self.delivered:,} deliveries; acknowledgements: "
            f"{acks}, {self.unknown:,} of unknown outcome; highest redelivery count {self.count_max}; longest time "
            f"without an answer: {silence}"
        )


def figures_of(observed: Observed) -> KillsFigures:
    kept = [subscribed.durability for subscribed in observed.subscriptions.values()]
    return KillsFigures(
        kills=sum("killed_at" in seen.values for seen in observed.faults.values()),
        acknowledged=observed.counts["acknowledged"],
        delivered=observed.counts["delivered"],
        acks=observed.acks_by_kind,
        unknown=sum(durability.unknown for durability in kept),
        count_max=max((durability.count_max for durability in kept), default=0),
        silence_s={op: longest / 1e9 for op, (_, longest) in observed.waits.items()},
    )


def run_kills(
    settings: KillsSettings, folder: Path, *, facts: dict[str, Any], say: Callable[[str], None] = print
) -> Report:
    """Play and judge; the report and the history are in `folder`.

    Raises TrafficError, StandaloneError; FileExistsError if the folder has a history.
    """
    path = folder / "history.jsonl"
    with ThrowawayCluster(bookies=BOOKIES) as cluster, History(path, facts=facts) as history:
        kills = Kills(history, fixed(cluster.url), LocalBroker(cluster), settings)
        try:
            asyncio.run(kills.play())
        finally:
            report = report_of(path, required=REQUIRED)
            paths = write_report(report, folder)
            say(paths.text.read_text())
            say(f"report: {paths.html}")
    say(f"{figures_of(Observed(read_history(path)))}; {report.judgement.verdict}")
    return report
