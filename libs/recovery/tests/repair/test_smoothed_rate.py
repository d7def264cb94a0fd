"""The copy rate that a worker reports, from its first copies on."""

import pytest
from bindery_recovery.repair.smoothed_rate import SmoothedRate


def test_the_first_rate_is_reported_unchanged() -> None:
    rate = SmoothedRate()
    for _ in range(100):
        rate.see(0)
    assert rate.value == 0
    rate.see(1000)
    assert rate.value == pytest.approx(1000)


def test_the_rate_changes_gradually() -> None:
    rate = SmoothedRate()
    for _ in range(20):
        rate.see(1000)
    rate.see(0)
    assert 600 < rate.value < 1000
    for _ in range(20):
        rate.see(3000)
    assert rate.value == pytest.approx(3000, rel=0.01)


def test_the_rate_starts_again_after_a_pause() -> None:
    rate = SmoothedRate()
    rate.see(1_000_000)
    for _ in range(100):
        rate.see(0)
    assert rate.value == 0
    rate.see(10)
    assert rate.value == pytest.approx(10)
