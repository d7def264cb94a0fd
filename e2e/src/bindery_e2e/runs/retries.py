"""Play the load of `traffic.retries` on a cluster of local processes, and judge its history."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

from bindery.standalone.throwaway import ThrowawayCluster

from bindery_e2e.judging.history import History, read_history
from bindery_e2e.judging.retries import Retries, judge_retries
from bindery_e2e.runs.local import CHANGE_TIMEOUT_S, LocalBroker
from bindery_e2e.traffic.clients import TrafficError
from bindery_e2e.traffic.exchange import in_turn
from bindery_e2e.traffic.retries import RetriesSettings, RetryRun

BOOKIES: Final = 4
POLL_S: Final = 0.1


class LocalBookie(LocalBroker):
    """Kills a bookie of a cluster, and lets the supervisor start it again."""

    def __init__(self, cluster: ThrowawayCluster, name: str) -> None:
        super().__init__(cluster, name)
        self._local = cluster

    async def ready(self) -> None:
        """Wait until it serves. Raises TrafficError."""
        try:
            async with asyncio.timeout(CHANGE_TIMEOUT_S):
                while not await asyncio.to_thread(self._is_ready):
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise TrafficError(
                f"{self.name} is not ready {CHANGE_TIMEOUT_S:.0f} s after its start\n{self._local.output()}"
            ) from None

    def _is_ready(self) -> bool:
        status = self._local.status()
        processes = [] if status is None else status["processes"]
        return any(one["state"] == "ready" and not one["held"] for one in processes if one["name"] == self.name)


def run_retries(
    settings: RetriesSettings,
    folder: Path,
    *,
    facts: dict[str, Any],
    brokers: int = 1,
    say: Callable[[str], None] = print,
) -> Retries:
    """Play and judge; the history is in `folder`/history.jsonl, the judgement in `folder`/figures.json.

    Raises TrafficError, StandaloneError; FileExistsError if the folder has a history.
    """
    path = folder / "history.jsonl"
    with ThrowawayCluster(bookies=BOOKIES, brokers=brokers) as cluster, History(path, facts=facts) as history:
        killed = [LocalBroker(cluster, f"broker-{number}") for number in range(brokers)]
        bookies = [LocalBookie(cluster, f"bookie-{number}") for number in range(BOOKIES)]
        endpoint = in_turn([cluster.broker_url(number) for number in range(brokers)])
        asyncio.run(RetryRun(history, endpoint, killed, bookies, settings).play())
    found = judge_retries(read_history(path))
    judgement = {one.name: getattr(found, one.name) for one in fields(found)}
    summary = {"facts": facts, "settings": asdict(settings), "judgement": judgement, "verdict": found.verdict}
    (folder / "figures.json").write_text(json.dumps(summary, indent=2) + "\n")
    for example in found.examples:
        say(example)
    say(f"history: {path}")
    say(f"{found}; {found.verdict}")
    return found
