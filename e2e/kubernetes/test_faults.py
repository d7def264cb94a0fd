"""Each fault once, under traffic of real data, and the verdict over what every client saw."""

import asyncio
from pathlib import Path

import pytest
from bindery_e2e.cluster.release import Release
from bindery_e2e.runs.runner import RunSettings
from bindery_e2e.runs.session import facts_of, play, world_of
from bindery_e2e.runs.suite import quick_steps
from bindery_e2e.traffic.traffic import TrafficSettings

SECONDS_MAX = 900.0
SEED = 1


@pytest.mark.timeout(SECONDS_MAX + 300)
def test_nothing_acknowledged_is_lost_through_every_fault(chaos_release: Release, reports: Path) -> None:
    """Nothing lost, order kept, every copy compared, whole again by itself, nothing copied needlessly."""
    settings = RunSettings(
        folder=reports / "faults", seed=SEED, facts=facts_of("make e2e"), traffic=TrafficSettings(seed=SEED)
    )
    report = asyncio.run(play(world_of(chaos_release, settings), settings, quick_steps(SEED)))
    offered = [fault for fault in report.figures.faults if fault.outcome == "ok"]
    print(f"{len(offered)} faults in {report.figures.duration_s:.0f} s, report in {settings.folder}")
    assert report.judgement.verdict == "GOOD", report.judgement
    assert report.figures.duration_s < SECONDS_MAX
