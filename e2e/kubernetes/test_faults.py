"""Inject each fault once under traffic, and judge the observations of all clients.

E2E_SAMPLE=<seed>: a sample with one fault of each kind, as in `.ci/run`.
"""

import asyncio
import os
from pathlib import Path

import pytest
from bindery_e2e.cluster.release import Release
from bindery_e2e.runs.runner import RunSettings
from bindery_e2e.runs.session import facts_of, play, world_of
from bindery_e2e.runs.suite import not_played, quick_steps, sampled_steps
from bindery_e2e.traffic.traffic import TrafficSettings

SECONDS_MAX = 900.0
SEED = 1


@pytest.mark.timeout(SECONDS_MAX + 300)
def test_no_acknowledged_message_is_lost_in_any_fault(chaos_release: Release, reports: Path) -> None:
    """No message is lost or reordered, all replicas agree, the cluster recovers by itself and copies no more than
    needed."""
    settings = RunSettings(
        folder=reports / "faults", seed=SEED, facts=facts_of("make e2e"), traffic=TrafficSettings(seed=SEED)
    )
    world = world_of(chaos_release, settings)
    sample = os.environ.get("E2E_SAMPLE")
    steps = list(quick_steps(SEED) if not sample else sampled_steps(int(sample)))
    report = asyncio.run(play(world, settings, steps))
    print(f"{len(report.figures.faults)} faults in {report.figures.duration_s:.0f} s, report in {settings.folder}")
    for fault in report.figures.faults:
        print(f"  {fault.fault} ({fault.target}): {fault.outcome}")
    assert report.judgement.is_good, str(report.judgement)
    assert not_played(steps, report.figures.faults, has_nodes=world.nodes is not None) == []
    assert report.figures.duration_s < SECONDS_MAX
