"""Goal: the validators detect each kind of error of a broker, and judge a correct broker as GOOD."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from bindery.standalone.throwaway import ThrowawayCluster
from bindery_e2e.judging.history import History
from bindery_e2e.reporting.report import Report, report_of, text_summary
from bindery_e2e.traffic.traffic import Traffic, TrafficSettings, find_files, fixed
from liar import LIES, lying_broker

SOURCES: Final = Path(__file__).resolve().parents[1] / "src"
SETTINGS: Final = TrafficSettings(
    messages_per_s=40.0,
    producers_per_topic=2,
    batch_max=4,
    subscriptions=(("workers", "shared", 1), ("ledger", "exclusive", 1)),
    receive_wait_ms=200,
    ack_timeout_ms=1_000,
    request_timeout_s=20.0,
)

pytestmark = pytest.mark.integration


async def told(url: str, lie: str, path: Path) -> int:
    """Run traffic through a proxy that injects `lie`, and return the number of injections."""
    settings = replace(SETTINGS, topics=(f"public/default/{lie}",))
    with History(path, facts={"lie": lie}) as history:
        async with lying_broker(url, lie) as (liar, at):
            async with Traffic(history, fixed(at), files=find_files([SOURCES]), settings=settings) as traffic:
                await traffic.wait_acknowledged(40, timeout_s=120)
                await traffic.stop_producing()
                await asyncio.sleep(2.0 if lie == "forget" else 0.0)  # longer than acknowledgements may take
                await traffic.finish(timeout_s=40)
            return liar.lies


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Report, int]]:
    folder = tmp_path_factory.mktemp("lies")

    async def all_of_them() -> list[int]:
        return await asyncio.gather(*(told(cluster.url, lie, folder / f"{lie}.jsonl") for lie in LIES))

    with ThrowawayCluster(bookies=3) as cluster:
        counts = asyncio.run(all_of_them())
    return {lie: (report_of(folder / f"{lie}.jsonl"), count) for lie, count in zip(LIES, counts, strict=True)}


@pytest.mark.timeout(600)  # a busy machine may need minutes
@pytest.mark.parametrize("lie", LIES)
def test_each_injected_error_is_judged_as_its_kind(lie: str, runs: dict[str, tuple[Report, int]]) -> None:
    report, count = runs[lie]
    assert {finding.kind for finding in report.judgement.findings} == LIES[lie], text_summary(report)
    assert (count > 0) == (lie != "none"), "it did not lie"
    assert report.judgement.verdict == ("BAD" if LIES[lie] else "GOOD")
