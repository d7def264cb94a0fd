"""TokenBucket: what passes in any span of time, by both ways to use it."""

import pytest
from bindery_kit.limits.token_bucket import TokenBucket
from hypothesis import given, settings
from hypothesis import strategies as st

CALLS = st.lists(st.tuples(st.floats(0, 3), st.integers(1, 500)), min_size=1, max_size=60)


def test_a_full_bucket_passes_its_burst_at_once_and_then_its_rate() -> None:
    bucket = TokenBucket(rate=10, period_s=2, now=0.0)
    assert (bucket.rate, bucket.burst, bucket.is_full(0.0)) == (10, 20, True)
    assert bucket.wait_for_s(20, 0.0) == 0.0
    bucket.take(20, 0.0)
    assert bucket.wait_for_s(5, 0.0) == pytest.approx(0.5)
    assert bucket.wait_for_s(5, 0.5) == pytest.approx(0.0)
    assert not bucket.is_full(1.9)
    assert bucket.is_full(2.0)


def test_a_request_above_the_burst_waits_for_a_full_bucket_and_leaves_a_debt() -> None:
    bucket = TokenBucket(rate=10, period_s=1, now=0.0)
    bucket.take(1, 0.0)
    assert bucket.wait_for_s(1_000, 0.0) == pytest.approx(0.1)
    bucket.take(1_000, 0.1)
    assert bucket.tokens(0.1) == pytest.approx(-990)
    assert bucket.wait_for_s(1, 0.1) == pytest.approx(99.1)


def test_time_that_goes_back_adds_nothing() -> None:
    bucket = TokenBucket(rate=10, period_s=1, now=5.0)
    bucket.take(10, 5.0)
    assert bucket.tokens(1.0) == 0
    assert bucket.tokens(5.5) == pytest.approx(5)


@settings(deadline=None)
@given(rate=st.floats(0.1, 1_000), period_s=st.floats(0.1, 10), calls=CALLS)
def test_who_waits_before_it_goes_on_never_exceeds_rate_and_burst_in_any_span(
    rate: float, period_s: float, calls: list[tuple[float, int]]
) -> None:
    bucket = TokenBucket(rate=rate, period_s=period_s, now=0.0)
    now, passed = 0.0, []
    for pause, count in calls:
        now += pause
        passed.append((now + bucket.wait_for_s(count, now), count))
        bucket.take(count, now)
    assert passed == sorted(passed, key=lambda one: one[0]), "in the order of the requests"
    allowed = max(bucket.burst, *(count for _, count in passed))
    for first in range(len(passed)):
        total = 0
        for at, count in passed[first:]:
            total += count
            assert total <= rate * (at - passed[first][0]) + allowed + max(1e-6 * total, 1e-6)
