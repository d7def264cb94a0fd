"""Backoff: the sequence of delays, its bounds, jitter and reset."""

import random

import pytest
from bindery_core.backoff import Backoff


class FixedFraction:
    """A random source that always returns the same fraction."""

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction

    def random(self) -> float:
        return self._fraction


def test_delays_double_up_to_the_maximum() -> None:
    backoff = Backoff(0.1, 1.0)
    assert [backoff.next_delay_s() for _ in range(6)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
    assert backoff.failures == 6


def test_the_factor_can_be_chosen() -> None:
    backoff = Backoff(1.0, 100.0, factor=3.0)
    assert [backoff.next_delay_s() for _ in range(6)] == [1.0, 3.0, 9.0, 27.0, 81.0, 100.0]


def test_a_factor_of_one_keeps_the_delay() -> None:
    backoff = Backoff(2.0, 5.0, factor=1.0)
    assert [backoff.next_delay_s() for _ in range(3)] == [2.0, 2.0, 2.0]


def test_reset_starts_again_at_the_first_delay() -> None:
    backoff = Backoff(0.1, 1.0)
    backoff.next_delay_s()
    backoff.next_delay_s()
    backoff.reset()
    assert backoff.failures == 0
    assert backoff.next_delay_s() == 0.1


def test_delay_s_uses_the_count_of_the_caller_and_does_not_change_its_own() -> None:
    backoff = Backoff(5.0, 300.0)
    assert [backoff.delay_s(failures) for failures in (1, 2, 6, 7, 8)] == [5.0, 10.0, 160.0, 300.0, 300.0]
    assert backoff.failures == 0


@pytest.mark.parametrize("failures", [65, 66, 1_000, 10**9])
def test_any_number_of_failures_gives_the_maximum(failures: int) -> None:
    assert Backoff(0.001, 60.0).delay_s(failures) == 60.0
    assert Backoff(0.001, 60.0, factor=100.0).delay_s(failures) == 60.0


@pytest.mark.parametrize(("fraction", "expected"), [(0.0, 7.5), (0.5, 10.0), (0.75, 11.25)])
def test_jitter_shortens_or_lengthens_a_delay(fraction: float, expected: float) -> None:
    backoff = Backoff(10.0, 10.0, jitter=0.25, randomness=FixedFraction(fraction))
    assert backoff.next_delay_s() == expected


def test_jitter_stays_within_its_share() -> None:
    backoff = Backoff(1.0, 8.0, jitter=0.25, randomness=random.Random(7))
    for failures, middle in ((1, 1.0), (2, 2.0), (4, 8.0), (9, 8.0)):
        delays = [backoff.delay_s(failures) for _ in range(500)]
        assert 0.75 * middle <= min(delays) < 0.8 * middle
        assert 1.2 * middle < max(delays) <= 1.25 * middle


def test_without_jitter_no_random_number_is_drawn() -> None:
    source = random.Random(3)
    before = source.getstate()
    Backoff(1.0, 8.0, randomness=source).next_delay_s()
    assert source.getstate() == before


@pytest.mark.parametrize(
    ("first_s", "max_s", "options"),
    [
        (0.0, 1.0, {}),
        (2.0, 1.0, {}),
        (1.0, 2.0, {"factor": 0.5}),
        (1.0, 2.0, {"jitter": 0.1}),
        (1.0, 2.0, {"jitter": 1.5, "randomness": FixedFraction(0)}),
        (1.0, 2.0, {"jitter": -0.5, "randomness": FixedFraction(0)}),
    ],
)
def test_contradictory_parameters_fail_an_assertion(first_s: float, max_s: float, options: dict[str, object]) -> None:
    with pytest.raises(AssertionError):
        Backoff(first_s, max_s, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("failures", [0, -1])
def test_there_is_no_delay_without_a_failure(failures: int) -> None:
    with pytest.raises(AssertionError):
        Backoff(1.0, 2.0).delay_s(failures)
