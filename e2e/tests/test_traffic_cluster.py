"""Goal: traffic, history and verdict work together with real processes that are killed."""

import asyncio
from pathlib import Path
from typing import Final

import pytest
from bindery.standalone.throwaway import ThrowawayCluster
from bindery_e2e.judging.history import History, read_history
from bindery_e2e.reporting.report import report_of, text_summary, write_report
from bindery_e2e.traffic.traffic import Traffic, TrafficError, TrafficSettings, find_files, fixed

SOURCES: Final = Path(__file__).resolve().parents[2] / "libs"
SETTINGS: Final = TrafficSettings(
    seed=8,
    topics=("public/default/one", "public/default/two"),
    messages_per_s=150.0,
    ack_timeout_ms=5_000,
    request_timeout_s=10.0,
)

pytestmark = pytest.mark.integration


async def run(cluster: ThrowawayCluster, history: History) -> None:
    files = find_files([SOURCES], count_max=300)
    async with Traffic(history, fixed(cluster.url), files=files, settings=SETTINGS) as traffic:
        await traffic.wait_acknowledged(200, timeout_s=30)
        for name in ("bookie-1", "broker-0"):
            with history.fault("kill -9", name, gap_s_max=30):
                await asyncio.to_thread(cluster.kill, name)
                await traffic.wait_acknowledged(200, timeout_s=45)
        await traffic.finish(timeout_s=45)
    with pytest.raises(TrafficError, match="holds messages already"):
        async with Traffic(history, fixed(cluster.url), files=files, settings=SETTINGS):
            pass


@pytest.mark.long_run
@pytest.mark.timeout(600)  # a busy machine may need minutes
def test_a_killed_bookie_and_broker_leave_a_good_history(tmp_path: Path) -> None:
    """kill -9 of a bookie, then of the only broker, under load: some requests are unknown, and the verdict is GOOD."""
    path = tmp_path / "history.jsonl"
    with ThrowawayCluster(bookies=4) as cluster, History(path, facts={"command": "a test", "seed": 8}) as history:
        asyncio.run(run(cluster, history))
    report = report_of(path, required=("undelivered", "unavailable"))
    write_report(report, tmp_path / "report")
    print(text_summary(report))
    assert report.judgement.verdict == "GOOD", text_summary(report)
    counts = report.judgement.counts
    assert counts["acknowledged"] >= 600
    assert counts["refused"] + counts["unknown"] > 0, "a killed broker went unnoticed"
    assert counts["delivered"] >= 2 * counts["acknowledged"], "two subscriptions"
    assert [fault.outcome for fault in report.figures.faults] == ["ok", "ok"]
    sizes = {size for record in read_history(path) for size in record.values.get("sizes", ())}
    assert min(sizes) == 0
    assert max(sizes) > 16 * 1024
