"""Fill disks of bookies: no request fails for long, no process dies, and the bookies become writable again."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from bindery_e2e.cluster.images import Images
from bindery_e2e.cluster.release import Release
from bindery_e2e.faults.faults import FillDisk
from bindery_e2e.runs.runner import RunSettings
from bindery_e2e.runs.session import SMALL_DISKS, facts_of, installed, play, world_of
from bindery_e2e.traffic.traffic import TrafficSettings

SEED = 2


@pytest.fixture(scope="module")
def release(images: Images, reports: Path) -> Iterator[Release]:
    with installed("bindery-e2e-disks", values=[SMALL_DISKS], folder=reports / "disks") as found:
        yield found


@pytest.mark.timeout(500)
def test_the_cluster_survives_full_disks(release: Release, reports: Path) -> None:
    traffic = TrafficSettings(seed=SEED, messages_per_s=40)
    settings = RunSettings(folder=reports / "disks", seed=SEED, facts=facts_of("full disks"), traffic=traffic)
    steps = [[FillDisk(draw, disk=disk)] for draw in (0.1, 0.6) for disk in ("ledgers", "journal")]
    report = asyncio.run(play(world_of(release, settings), settings, steps))
    assert report.judgement.is_good, str(report.judgement)
    assert [fault.outcome for fault in report.figures.faults] == ["ok"] * len(steps)
