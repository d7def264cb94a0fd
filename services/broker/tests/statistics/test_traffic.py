"""Counters with rates over a sliding window."""

import pytest
from bindery_broker.statistics.traffic import WINDOW_S, Rates, Traffic


def test_steady_traffic_has_its_rate_from_the_second_second_on() -> None:
    traffic = Traffic()
    for second in range(100):
        traffic.add(5, 500, now=1000.0 + second)
        if second >= 1:
            # Each second's messages are counted at its beginning, so one second too many is within the window at most.
            assert 5 <= traffic.rates(1000.0 + second).messages <= 10
            assert traffic.rates(1001.0 + second) == pytest.approx((5, 500))
    assert (traffic.messages, traffic.bytes) == (500, 50_000)


def test_the_rate_of_young_traffic_is_the_mean_since_its_first_message() -> None:
    traffic = Traffic()
    traffic.add(8, 80, now=50.0)
    assert traffic.rates(50.0) == Rates(8, 80), "divided by a second at least"
    assert traffic.rates(50.5) == Rates(8, 80)
    assert traffic.rates(54.0) == Rates(2, 20)


def test_the_part_of_the_last_slot_that_is_within_the_window_counts() -> None:
    traffic = Traffic()
    traffic.add(100, 1000, now=0.0)
    traffic.add(40, 400, now=12.0)
    # At 12.5, three quarters of the slot 0..10 are within the window.
    assert traffic.rates(12.5) == Rates((40 + 75) / 10, (400 + 750) / 10)
    assert traffic.rates(20.0) == Rates(4, 40)
    assert traffic.rates(25.0) == Rates(2, 20)


def test_the_rate_falls_to_zero_after_two_slots() -> None:
    traffic = Traffic()
    traffic.add(100, 1000, now=0.0)
    assert [traffic.rates(now).messages for now in (10.0, 15.0, 19.0, 20.0, 1e9)] == [10, 5, pytest.approx(1), 0, 0]


def test_traffic_after_a_pause_is_young_again() -> None:
    traffic = Traffic()
    traffic.add(100, 1000, now=0.0)
    traffic.add(6, 60, now=20.0)
    assert traffic.rates(22.0) == Rates(3, 30)
    assert traffic.messages == 106


def test_nothing_was_counted_at_first() -> None:
    assert Traffic().rates(7.0) == Rates(0, 0)


def test_reading_changes_nothing() -> None:
    read, unread = Traffic(), Traffic()
    for step in range(200):
        now = step * 0.7
        for traffic in (read, unread):
            traffic.add(step % 3, step, now=now)
        read.rates(now + WINDOW_S * (step % 4))
    assert read.rates(140.0) == unread.rates(140.0)
