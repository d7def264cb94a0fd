"""Rates of messages and bytes."""

import pytest
from bindery_broker.limits.rate_limit import RateLimit
from bindery_broker.namespaces.policies import Rate
from hypothesis import given
from hypothesis import strategies as st


def limit(messages: int | None = None, size: int | None = None, period_s: int = 1) -> RateLimit:
    made = RateLimit()
    made.set(Rate(messages=messages, size=size, period_s=period_s), 0.0)
    return made


def test_without_a_policy_nothing_waits() -> None:
    none = RateLimit()
    none.take(10**9, 10**9, 0.0)
    assert (none.wait_s(0.0), none.messages_max(0.0), none.text()) == (0.0, None, "no limit")


def test_a_full_bucket_passes_one_period_then_the_rate() -> None:
    ten = limit(messages=10)
    ten.take(10, 0, 0.0)
    assert ten.wait_s(0.0) == pytest.approx(0, abs=1e-5)
    ten.take(5, 0, 0.0)
    assert ten.wait_s(0.0) == pytest.approx(0.5, abs=1e-5)
    assert ten.wait_s(0.3) == pytest.approx(0.2, abs=1e-5)
    assert ten.wait_s(0.51) == 0.0
    assert (ten.messages_max(0.51), ten.messages_max(1.0), ten.messages_max(100.0)) == (1, 5, 10)


def test_messages_and_bytes_are_limited_each() -> None:
    both = limit(messages=100, size=1_000, period_s=2)
    both.take(1, 3_000, 0.0)
    assert both.wait_s(0.0) == pytest.approx(4.0, abs=1e-4)
    assert both.text() == "100 messages and 1000 bytes in 2 s"


def test_a_change_of_the_policy_forgives_no_debt() -> None:
    changing = limit(messages=10)
    changing.take(30, 0, 0.0)
    changing.set(Rate(messages=20, size=None), 0.0)
    assert changing.wait_s(0.0) == pytest.approx(1.0, abs=1e-5)
    changing.set(None, 0.0)
    assert changing.wait_s(0.0) == 0.0


@given(
    rate=st.integers(1, 1_000),
    period_s=st.integers(1, 10),
    calls=st.lists(st.tuples(st.floats(0, 3), st.integers(1, 500)), min_size=1, max_size=60),
)
def test_no_span_exceeds_the_rate_by_more_than_a_period_and_a_request(
    rate: int, period_s: int, calls: list[tuple[float, int]]
) -> None:
    bucket = limit(messages=rate, period_s=period_s)
    now, passed, largest = 0.0, 0, 0
    for pause, count in calls:
        now += pause
        if not bucket.wait_s(now):
            bucket.take(count, 0, now)
            passed += count
            largest = max(largest, count)
    assert passed <= rate * now / period_s + rate + largest + 1
