"""Goal: delayed messages of a real broker come when they are due, through two kills."""

from pathlib import Path

import pytest
from bindery_e2e.runs.delayed import requirements, run_delayed, verdict_of
from bindery_e2e.traffic import delayed
from bindery_e2e.traffic.delayed import DelayedFigures, DelayedSettings


@pytest.mark.long_run
@pytest.mark.integration
@pytest.mark.timeout(600)  # a busy machine may need minutes
def test_delayed_messages_survive_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delayed, "MARGIN_S", 12.0)
    settings = DelayedSettings(seed=5, messages=2_000, rate=400, is_random=True)
    verdict, figures = run_delayed(settings, tmp_path, facts={"command": "a test"})
    assert verdict == "GOOD", figures.delays
    assert figures.drained
    delays = figures.delays
    assert delays.delivered - delays.repeated == settings.messages + 1
    assert figures.memory_mib < 64
    assert figures.load_s < 30, "generous, because other tests use the machine"


def test_requirements_are_those_of_the_figures() -> None:
    figures = DelayedFigures(plain_rate=100, accept_rate=50, rss_after=2**26 - 1, load_s=1.9, drained=True)
    assert all(one.is_met for one in requirements(figures))
    figures = DelayedFigures(plain_rate=100, accept_rate=49, rss_after=2**26, load_s=2, drained=True)
    figures.delays.steady.in_time = 0.998
    assert not any(one.is_met for one in requirements(figures))
    assert verdict_of(figures, strict=False) == "GOOD"
    assert verdict_of(figures, strict=True) == "BAD"


def test_what_is_not_received_is_an_error() -> None:
    assert verdict_of(DelayedFigures(drained=False), strict=False) == "BAD"
    figures = DelayedFigures(drained=True)
    figures.delays.add("early", "message 1")
    assert verdict_of(figures, strict=False) == "BAD"
