"""Counts of the last full minute, by range."""

import random

from bindery_broker.statistics.minute_counts import MinuteCounts


def test_values_are_counted_in_the_range_that_contains_them() -> None:
    counts = MinuteCounts((1, 10))
    for value in (0, 1, 1.5, 10, 11, 100):
        counts.add(value, now=30)
    assert list(counts.last(60)) == [2, 2, 2, 6, 123.5]


def test_the_present_minute_is_not_shown() -> None:
    counts = MinuteCounts((1,))
    counts.add(1, 3, now=0)
    assert list(counts.last(59.9)) == [0, 0, 0, 0]
    assert list(counts.last(60)) == list(counts.last(119.9)) == [3, 0, 3, 3]
    assert list(counts.last(120)) == [0, 0, 0, 0]


def test_a_minute_without_values_is_not_skipped() -> None:
    counts = MinuteCounts((1,))
    counts.add(1, now=10)
    counts.add(5, now=130)
    assert list(counts.last(130)) == [0, 0, 0, 0]
    assert list(counts.last(180)) == [0, 1, 1, 5]


def test_the_counts_are_those_of_a_list_of_values() -> None:
    randomness = random.Random(7)
    counts, values, now = MinuteCounts((2, 4, 8)), [], 0.0
    for _ in range(2_000):
        now += randomness.choice((0.1, 5.0, 70.0))
        value = randomness.randrange(12)
        counts.add(value, now=now)
        values.append((int(now // 60), value))
        at = now + randomness.choice((0.0, 60.0, 120.0))
        last = [value for minute, value in values if minute == int(at // 60) - 1]
        ranges = [sum(low < one <= high for one in last) for low, high in ((-1, 2), (2, 4), (4, 8), (8, 99))]
        assert list(counts.last(at)) == [*ranges, len(last), sum(last)]
