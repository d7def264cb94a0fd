"""The validators detect errors: a broker with a defect is judged BAD, with exactly the kinds of that defect."""

import asyncio
from pathlib import Path

import pytest
from bindery_e2e.cluster.images import BROKEN_TAG, Images
from bindery_e2e.cluster.release import Release
from bindery_e2e.runs.runner import RunSettings
from bindery_e2e.runs.session import facts_of, play, world_of
from bindery_e2e.traffic.traffic import TrafficSettings

PLAY_S = 20.0
pytestmark = pytest.mark.timeout(900)  # the first one builds the images


@pytest.mark.parametrize(("defect", "kinds"), [("forgets", {"lost", "undelivered"}), ("swaps", {"reordered"})])
def test_a_broken_broker_is_detected(
    default_release: Release, images: Images, reports: Path, defect: str, kinds: set[str]
) -> None:
    images.broken()
    default_release.upgrade(
        [
            f"broker.image.tag={BROKEN_TAG}",
            "broker.service.type=NodePort",
            "broker.env[0].name=BINDERY_DEFECT",
            f"broker.env[0].value={defect}",
        ],
        what=f"to the broker that {defect}",
    )
    traffic = TrafficSettings(topics=(f"public/default/{defect}",), messages_per_s=150)
    settings = RunSettings(
        folder=reports / f"broken-{defect}",
        facts=facts_of(f"broken build: {defect}"),
        traffic=traffic,
        seconds_min=PLAY_S,
    )
    report = asyncio.run(play(world_of(default_release, settings), settings, []))
    found = {finding.kind for finding in report.judgement.findings}
    print(f"{defect}: {report.judgement.verdict}, found {sorted(found)}")
    assert report.judgement.verdict == "BAD"
    assert found == kinds
