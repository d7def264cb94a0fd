"""The verdict about disk space under churn, and the comparison of latencies."""

import math

import pytest
from bindery_e2e.judging.space import (
    ADDS_MIN,
    COLLECTING,
    QUIET,
    SETTLING,
    ChurnLimits,
    SpaceSample,
    Window,
    judge_churn,
    latency_of,
    space_of,
)

LIMITS = ChurnLimits(allowance=100, latency_ratio_max=1.5)
SAMPLES = {"b0": [SpaceSample(0, 100, 0, 0), SpaceSample(1, 400, 100, 300), SpaceSample(2, 90, 50, 700)]}


def windows(*phases_and_latencies: tuple[str, float]) -> list[Window]:
    return [Window(phase, [latency_s] * ADDS_MIN) for phase, latency_s in phases_and_latencies]


def test_the_figures_of_a_bookie_are_those_of_its_worst_sample() -> None:
    found = space_of(SAMPLES["b0"])
    assert (found.disk_max, found.live_max, found.disk_end, found.live_end, found.written) == (400, 100, 90, 50, 700)
    assert (found.excess_max, found.excess_at_s) == (100, 0)


def test_three_times_the_live_bytes_and_the_allowance_are_good() -> None:
    found = judge_churn(SAMPLES, windows((COLLECTING, 1.5), (QUIET, 1.0)), LIMITS)
    assert (found.verdict, found.findings) == ("GOOD", [])
    assert (found.p50_ratio, found.p99_ratio, found.pairs) == (1.5, 1.5, 1)


def test_one_byte_more_is_bad() -> None:
    samples = {**SAMPLES, "b1": [SpaceSample(7, 401, 100, 300)]}
    found = judge_churn(samples, windows((COLLECTING, 1.0), (QUIET, 1.0)), LIMITS)
    assert found.verdict == "BAD"
    [finding] = found.findings
    assert finding.startswith("space: at 7 s the disk of b1 exceeded 3 times its live bytes by 101 bytes")


def test_slow_adds_while_collecting_are_bad() -> None:
    found = judge_churn(SAMPLES, windows((COLLECTING, 1.6), (QUIET, 1.0)), LIMITS)
    assert [one[:12] for one in found.findings] == ["latency: p50", "latency: p99"]


def test_the_ratio_is_the_median_of_the_pairs_so_one_disturbed_window_does_not_decide() -> None:
    found = judge_churn(
        SAMPLES,
        windows((COLLECTING, 1.0), (QUIET, 1.0), (COLLECTING, 9.0), (QUIET, 1.0), (COLLECTING, 1.2), (QUIET, 1.0)),
        LIMITS,
    )
    assert (found.p50_ratio, found.pairs, found.verdict) == (1.2, 3, "GOOD")
    assert found.collecting.longest_ms == 9000


def test_compaction_that_ends_late_counts_as_collecting() -> None:
    found = judge_churn(SAMPLES, windows((COLLECTING, 1.0), (SETTLING, 50.0), (QUIET, 1.0), (COLLECTING, 1.0)), LIMITS)
    assert (found.p50_ratio, found.p99_ratio, found.pairs) == (1.0, 50.0, 1)
    assert found.collecting.adds == 3 * ADDS_MIN


def test_small_windows_are_not_compared() -> None:
    few = [Window(COLLECTING, [1.0] * (ADDS_MIN - 1)), Window(QUIET, [1.0] * ADDS_MIN)]
    assert judge_churn(SAMPLES, few, LIMITS).pairs == 0


def test_a_run_without_a_pair_is_good_only_if_the_latency_is_not_limited() -> None:
    assert judge_churn(SAMPLES, [], LIMITS).verdict == "BAD"
    assert judge_churn(SAMPLES, [], ChurnLimits(100, math.inf)).verdict == "GOOD"


def test_errors_are_bad() -> None:
    found = judge_churn(SAMPLES, [], ChurnLimits(100, math.inf), errors=["kept ledger 3 cannot be read"])
    assert (found.verdict, found.findings) == ("BAD", ["kept ledger 3 cannot be read"])


@pytest.mark.parametrize(("count", "p99"), [(100, 99.0), (101, 100.0), (1, 1.0)])
def test_percentiles_are_values_that_occurred(count: int, p99: float) -> None:
    found = latency_of([at / 1000 for at in range(1, count + 1)])
    assert found.p99_ms == pytest.approx(p99)
    assert found.longest_ms == pytest.approx(count)
