"""Play the load of `traffic.repeats` on a cluster of local processes, and judge its history."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

from bindery.standalone.throwaway import ThrowawayCluster

from bindery_e2e.judging.history import History, read_history
from bindery_e2e.judging.repeats import Repeats, judge_repeats
from bindery_e2e.runs.local import LocalBroker
from bindery_e2e.traffic.repeats import RepeatRun, RepeatsSettings

BOOKIES: Final = 3


def run_repeats(
    settings: RepeatsSettings,
    folder: Path,
    *,
    facts: dict[str, Any],
    brokers: int = 2,
    say: Callable[[str], None] = print,
) -> Repeats:
    """Play and judge; the history is in `folder`/history.jsonl, the judgement in `folder`/figures.json.

    Raises TrafficError, StandaloneError; FileExistsError if the folder has a history.
    """
    path = folder / "history.jsonl"
    with ThrowawayCluster(bookies=BOOKIES, brokers=brokers) as cluster, History(path, facts=facts) as history:
        killed = [LocalBroker(cluster, f"broker-{number}") for number in range(brokers)]
        urls = [cluster.broker_url(number) for number in range(brokers)]
        asyncio.run(RepeatRun(history, urls, killed, settings).play())
    found = judge_repeats(read_history(path))
    judgement = {one.name: getattr(found, one.name) for one in fields(found)}
    summary = {"facts": facts, "settings": asdict(settings), "judgement": judgement, "verdict": found.verdict}
    (folder / "figures.json").write_text(json.dumps(summary, indent=2) + "\n")
    for example in found.examples:
        say(example)
    say(f"history: {path}")
    say(f"{found}; {found.verdict}")
    return found
