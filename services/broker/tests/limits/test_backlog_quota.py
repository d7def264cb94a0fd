"""When a backlog exceeds its quota, and how much is evicted."""

import pytest
from bindery_broker.limits.backlog_quota import (
    EVICTED_TO,
    SubscriptionBacklog,
    evicted_before_ms,
    evicted_entries,
    find_excess,
)
from bindery_broker.namespaces.policies import BacklogQuota, QuotaAction
from hypothesis import given
from hypothesis import strategies as st

FAST = SubscriptionBacklog("fast", entries=2, size=200, oldest_id="5:8", oldest_ms=90_000)
SLOW = SubscriptionBacklog("slow", entries=10, size=1_000, oldest_id="5:0", oldest_ms=40_000)


def quota(limit: int, action: QuotaAction = QuotaAction.HOLD) -> BacklogQuota:
    return BacklogQuota(limit, action)


def test_the_largest_backlog_decides_the_size() -> None:
    (found,) = find_excess([FAST, SLOW], size=quota(999), age=None, now_ms=100_000)
    assert (found.quota, found.value, found.backlog) == ("size", 1_000, SLOW)
    assert found.text == "subscription slow has 1000 bytes to read, the quota is 999 bytes; its oldest message is 5:0"
    assert find_excess([FAST, SLOW], size=quota(1_000), age=None, now_ms=100_000) == []


def test_the_oldest_message_decides_the_age() -> None:
    (found,) = find_excess([FAST, SLOW], size=None, age=quota(59, QuotaAction.REFUSE), now_ms=100_000)
    assert (found.quota, found.value, found.backlog, found.action) == ("age", 60, SLOW, QuotaAction.REFUSE)
    assert find_excess([FAST, SLOW], size=None, age=quota(60), now_ms=100_000) == []


def test_both_quotas_have_their_own_action() -> None:
    found = find_excess([SLOW], size=quota(1, QuotaAction.EVICT), age=quota(1), now_ms=100_000)
    assert [(one.quota, one.action) for one in found] == [("size", QuotaAction.EVICT), ("age", QuotaAction.HOLD)]


@pytest.mark.parametrize(
    "backlog", [SLOW._replace(entries=0, size=0, oldest_ms=None), SLOW._replace(size=0, oldest_ms=None)]
)
def test_what_is_empty_or_not_known_exceeds_nothing(backlog: SubscriptionBacklog) -> None:
    assert find_excess([backlog], size=quota(1), age=quota(1), now_ms=10**9) == []
    assert find_excess([], size=quota(1), age=quota(1), now_ms=10**9) == []


@given(entries=st.integers(1, 10_000), each=st.integers(1, 1_000), limit=st.integers(1, 10**6))
def test_an_eviction_leaves_about_nine_tenths_of_the_limit(entries: int, each: int, limit: int) -> None:
    backlog = SubscriptionBacklog("s", entries, entries * each, "5:0")
    left = (entries - evicted_entries(backlog, limit)) * each
    if backlog.size <= limit:
        assert left == backlog.size
    else:
        assert EVICTED_TO * limit - each <= left <= EVICTED_TO * limit


def test_an_eviction_by_age_leaves_nine_tenths_of_the_time() -> None:
    assert evicted_before_ms(100, 1_000_000) == 910_000
