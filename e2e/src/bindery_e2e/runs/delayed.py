"""Play the load of `traffic.delayed` on a cluster of local processes, and compare the figures with the requirements."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bindery.standalone.throwaway import ThrowawayCluster

from bindery_e2e.runs.local import BOOKIES, LocalBroker
from bindery_e2e.traffic.delayed import Delayed, DelayedFigures, DelayedSettings
from bindery_e2e.traffic.exchange import fixed

ACCEPT_RATIO_MIN: Final = 0.5
"""Rate at which delayed messages are stored, compared with other messages of one entry each."""
MEMORY_MIB_MAX: Final = 64.0
LOAD_S_MAX: Final = 2.0
IN_TIME_MIN: Final = 0.999


@dataclass(frozen=True, slots=True)
class Requirement:
    text: str
    value: str
    is_met: bool

    def __str__(self) -> str:
        return f"{'met   ' if self.is_met else 'MISSED'}  {self.text}: {self.value}"


def requirements(figures: DelayedFigures) -> list[Requirement]:
    """The times and sizes that are required. A busy machine may miss those of time."""
    steady = figures.delays.steady
    return [
        Requirement(
            f"delayed messages are stored at {ACCEPT_RATIO_MIN:g} of the plain rate or more",
            f"{figures.accept_ratio:.2f}",
            figures.accept_ratio >= ACCEPT_RATIO_MIN,
        ),
        Requirement(
            f"they take less than {MEMORY_MIB_MAX:g} MiB of the broker's memory",
            f"{figures.memory_mib:.1f} MiB",
            figures.memory_mib < MEMORY_MIB_MAX,
        ),
        Requirement(
            f"after a kill, the topic answers within {LOAD_S_MAX:g} s",
            f"{figures.load_s:.2f} s",
            figures.load_s < LOAD_S_MAX,
        ),
        Requirement(
            f"{IN_TIME_MIN:.1%} are received within 1 s of being due",
            f"{steady.in_time:.3%}",
            steady.in_time >= IN_TIME_MIN,
        ),
    ]


def verdict_of(figures: DelayedFigures, *, strict: bool) -> str:
    """GOOD or BAD. Errors are BAD; with `strict`, a requirement that is missed, too."""
    if figures.delays.errors or not figures.drained:
        return "BAD"
    return "BAD" if strict and not all(one.is_met for one in requirements(figures)) else "GOOD"


def run_delayed(
    settings: DelayedSettings,
    folder: Path,
    *,
    facts: dict[str, Any],
    strict: bool = False,
    say: Callable[[str], None] = print,
) -> tuple[str, DelayedFigures]:
    """Play and judge; return the verdict. The figures are in `folder`/figures.json.

    Raises TrafficError, StandaloneError.
    """
    with ThrowawayCluster(bookies=BOOKIES) as cluster:
        run = Delayed(fixed(cluster.url), LocalBroker(cluster), settings, say=say)
        asyncio.run(run.play())
    figures = run.figures
    verdict = verdict_of(figures, strict=strict)
    folder.mkdir(parents=True, exist_ok=True)
    summary = {"facts": facts, "settings": asdict(settings), "figures": asdict(figures), "verdict": verdict}
    (folder / "figures.json").write_text(json.dumps(summary, indent=2) + "\n")
    delays = figures.delays
    say(f"lateness while the broker was up: {delays.steady}")
    caught_up = "never" if figures.caught_up_s is None else f"after {figures.caught_up_s:.1f} s"
    say(
        f"lateness of messages that were due from a second before the second kill until the consumers had caught up "
        f"({caught_up}): {delays.disturbed}"
    )
    say(f"the second kill: messages came again {figures.drain_load_s:.2f} s after the start of the process")
    for requirement in requirements(figures):
        say(str(requirement))
    for example in delays.examples:
        say(example)
    errors = ", ".join(f"{count:,} {kind}" for kind, count in sorted(delays.errors.items())) or "no errors"
    say(
        f"{settings.messages:,} delayed messages, {figures.window_rate:,.0f} due a second, {delays.delivered:,} "
        f"deliveries, {delays.repeated:,} of them again without an answered acknowledgement; 2 kills; "
        f"{errors}; {verdict}"
    )
    return verdict, figures
