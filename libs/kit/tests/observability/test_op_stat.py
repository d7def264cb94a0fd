"""OpStat: quantiles within ten per cent, over the last two windows."""

import math
import random

from bindery_kit.observability.op_stat import WINDOW_S, OpStat


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_quantiles_are_within_ten_per_cent() -> None:
    stat = OpStat(Clock())
    numbers = [random.Random(3).lognormvariate(1, 2) for _ in range(5000)]
    for number in numbers:
        stat.observe(number)
    numbers.sort()
    for part in (0.5, 0.95, 0.99):
        truth = numbers[math.ceil(part * len(numbers)) - 1]
        assert truth <= stat.quantile(part) <= truth * 1.1
    assert stat.count == 5000
    assert math.isclose(stat.sum, sum(numbers))


def test_a_group_counts_like_single_observations() -> None:
    stat = OpStat(Clock())
    stat.observe(1.0, 99)
    stat.observe(1000.0)
    assert stat.count == 100
    assert stat.quantile(0.99) < 1.2
    assert stat.quantile(1.0) >= 1000


def test_extreme_values_are_counted_in_the_outer_buckets() -> None:
    stat = OpStat(Clock())
    for number in (0.0, 1e-9, 1e300):
        stat.observe(number)
    assert stat.quantile(0.1) <= 0.001
    assert stat.quantile(1.0) > 1e8


def test_quantiles_cover_two_windows_and_counts_are_cumulative() -> None:
    clock = Clock()
    stat = OpStat(clock)
    assert math.isnan(stat.quantile(0.5))
    stat.observe(500.0)
    clock.now = WINDOW_S + 1
    assert stat.quantile(0.5) >= 500
    clock.now = 2 * WINDOW_S + 2
    assert math.isnan(stat.quantile(0.5))
    stat.observe(1.0)
    assert stat.quantile(1.0) < 1.2
    assert stat.count == 2
