"""What a worker says of its speed, from its first copies on."""

import pytest
from bindery_recovery.repair.smoothed_rate import SmoothedRate


def test_the_first_rate_is_told_as_it_is() -> None:
    rate = SmoothedRate()
    for _ in range(100):
        rate.see(0)
    assert rate.value == 0
    rate.see(1000)
    assert rate.value == pytest.approx(1000)


def test_it_follows_smoothly() -> None:
    rate = SmoothedRate()
    for _ in range(20):
        rate.see(1000)
    rate.see(0)
    assert 600 < rate.value < 1000
    for _ in range(20):
        rate.see(3000)
    assert rate.value == pytest.approx(3000, rel=0.01)


def test_after_a_rest_it_begins_anew() -> None:
    rate = SmoothedRate()
    rate.see(1_000_000)
    for _ in range(100):
        rate.see(0)
    assert rate.value == 0
    rate.see(10)
    assert rate.value == pytest.approx(10)
