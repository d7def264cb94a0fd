"""Play the load of `traffic.churn` on bookies of this machine, and judge their disk space and latency."""

import asyncio
import json
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import httpx
from bindery.standalone.throwaway import ThrowawayCluster
from bindery_client.client import LedgerClient
from bindery_core.errors import BinderyError
from bindery_core.ids import BookieId
from bindery_metadata.stores.zookeeper import ZooKeeperStore

from bindery_e2e.judging.space import ChurnJudgement, ChurnLimits, judge_churn
from bindery_e2e.traffic.churn import KIB, MIB, Churn, ChurnBookie, ChurnFigures, ChurnSettings
from bindery_e2e.traffic.churned import ENSEMBLE, Ledgers, Topics
from bindery_e2e.traffic.clients import TrafficError

REQUEST_TIMEOUT_S: Final = 60.0

SHORT: Final = {
    "BOOKIE_STORAGE_JOURNAL_FILE_SIZE_MAX": str(4 * MIB),
    "BOOKIE_STORAGE_RESERVE_SIZE": str(4 * MIB),
    "BOOKIE_STORAGE_WRITE_CACHE_SIZE_MAX": str(8 * MIB),
    "BOOKIE_STORAGE_FLUSH_INTERVAL_S": "1",
    "BOOKIE_STORAGE_ENTRY_LOG_SIZE_MAX": str(32 * MIB),
    "BOOKIE_STORAGE_INDEX_WRITE_BUFFER_SIZE": str(256 * KIB),
    "BOOKIE_STORAGE_DEAD_SIZE_MIN": str(24 * MIB),
    "BOOKIE_STORAGE_GC_WAIT_TIME_MIN_S": "1",
}
"""Settings of bookies for a run of a minute, in which every size and time is a small part of its default."""


def run_churn(
    settings: ChurnSettings,
    limits: ChurnLimits,
    folder: Path,
    *,
    facts: dict[str, Any],
    are_topics: bool = False,
    environment: Mapping[str, str] | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Play and judge. Return the summary, which is also in `folder`/figures.json with all samples.

    `are_topics`: write topics over HTTP instead of ledgers. `environment`: settings of the services. Raises
    TrafficError, StandaloneError.
    """
    load_begin = os.getloadavg()
    brokers = 1 if are_topics else 0
    with ThrowawayCluster(bookies=ENSEMBLE, brokers=brokers, auditors=0, environment=environment) as cluster:
        try:
            figures = asyncio.run((_play_topics if are_topics else _play_ledgers)(cluster, settings, say))
        except (BinderyError, httpx.HTTPError) as error:
            raise TrafficError(f"the run could not be completed: {error!r}\n{cluster.output()}") from error
    name = Topics.name if are_topics else Ledgers.name
    judgement = judge_churn(figures.samples, figures.windows, limits, errors=figures.errors)
    summary = {
        "facts": {**facts, "load_average": {"begin": load_begin, "end": os.getloadavg()}},
        "settings": asdict(settings),
        "environment": dict(environment or {}),
        "limits": asdict(limits),
        "judgement": asdict(judgement),
        name: {"written": figures.written, "deleted": figures.deleted, "kept": figures.kept},
        "entries": {"written": figures.entries_written, "verified": figures.entries_verified},
        "compacting_s": figures.compacting_s,
        "garbage": figures.counters,
        "verdict": judgement.verdict,
    }
    folder.mkdir(parents=True, exist_ok=True)
    samples = {bookie: [asdict(one) for one in found] for bookie, found in figures.samples.items()}
    (folder / "figures.json").write_text(json.dumps({**summary, "samples": samples}, indent=1) + "\n")
    for line in _lines(judgement, figures, limits, name):
        say(line)
    return summary


async def _play_ledgers(cluster: ThrowawayCluster, settings: ChurnSettings, say: Callable[[str], None]) -> ChurnFigures:
    store = await ZooKeeperStore.connect(cluster.zookeeper)
    try:
        client = await LedgerClient.connect(store, randomness=random.Random(settings.seed))
        try:
            return await Churn(Ledgers(client), _bookies(cluster), settings, say=say).play()
        finally:
            await client.close()
    finally:
        await store.close()


async def _play_topics(cluster: ThrowawayCluster, settings: ChurnSettings, say: Callable[[str], None]) -> ChurnFigures:
    bookies = _bookies(cluster)
    async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S) as http:
        topics = Topics(http, cluster.url, [one.bookie_id for one in bookies])
        return await Churn(topics, bookies, settings, say=say).play()


def _bookies(cluster: ThrowawayCluster) -> list[ChurnBookie]:
    return [
        ChurnBookie(
            BookieId(f"bookie-{number}"),
            cluster.bookie_url(number),
            cluster.directory.of_process(f"bookie-{number}"),
        )
        for number in range(ENSEMBLE)
    ]


def _lines(judgement: ChurnJudgement, figures: ChurnFigures, limits: ChurnLimits, name: str) -> list[str]:
    lines = [
        f"{bookie}: {space.written / MIB:,.0f} MiB received, at most {space.disk_max / MIB:,.0f} MiB on disk "
        f"({space.disk_end / MIB:,.0f} at the end) for at most {space.live_max / MIB:,.0f} MiB of live entries; the "
        f"disk without three times the live bytes was at most {space.excess_max / MIB:,.0f} of "
        f"{limits.allowance / MIB:,.0f} MiB"
        for bookie, space in judgement.bookies.items()
    ]
    lines.append(f"while collecting: {judgement.collecting}")
    lines.append(f"quiet:            {judgement.quiet}")
    if judgement.p50_ratio is not None and judgement.p99_ratio is not None:
        lines.append(
            f"median ratio of {judgement.pairs} pairs of windows: p50 {judgement.p50_ratio:.2f}, p99 "
            f"{judgement.p99_ratio:.2f}; at most {limits.latency_ratio_max:g} is allowed"
        )
    lines += judgement.findings
    lines.append(
        f"{figures.written:,} {name}, {figures.deleted:,} deleted, {figures.kept:,} kept; "
        f"{figures.entries_written:,} entries written, {figures.entries_verified:,} of kept {name} verified; "
        f"compaction ran in {figures.compacting_s:.0f} s; {judgement.verdict}"
    )
    return lines
