"""What clients, tenants and namespaces may use, on a clock of the test."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from bindery_broker.errors import LimitExceeded
from bindery_broker.limits.accounts import (
    BUSY_RETRY_S,
    ENTRIES_MAX,
    NO_OVERRIDES,
    Account,
    Accounts,
    Limit,
    Overrides,
    Owner,
    OwnerLimits,
    decode_overrides,
)
from bindery_core.errors import BadRequest
from bindery_identity.followed import FollowedFile
from hypothesis import given, settings
from hypothesis import strategies as st

ETL = (Owner.ROLE, "etl")
ONE = {Limit.REQUESTS: 1.0}


class Made:
    """Accounts whose overrides the test replaces."""

    def __init__(self, *, tracked_max: int = 1_000, overrides: Overrides = NO_OVERRIDES, **limits: OwnerLimits) -> None:
        self.overrides = overrides
        self.accounts = Accounts(
            {owner: limits.get(owner, OwnerLimits()) for owner in Owner},
            burst_s=1,
            wait_s_max=2,
            tracked_max=tracked_max,
            overrides=lambda: self.overrides,
        )

    def get(self, owner: Owner, name: str, now: float = 0.0) -> Account:
        account = self.accounts.account(owner, name, now)
        assert account is not None
        return account


def test_without_limits_nothing_is_counted() -> None:
    made = Made()
    assert made.accounts.is_off
    assert made.accounts.account(*ETL, 0.0) is None
    assert len(made.accounts) == 0


def test_only_owners_with_limits_have_accounts() -> None:
    made = Made(tenant=OwnerLimits(requests_rate=1), overrides=Overrides(roles={"etl": OwnerLimits(bytes_in_rate=5)}))
    assert made.accounts.account(Owner.ROLE, "other", 0.0) is None
    assert made.accounts.account(Owner.NAMESPACE, "t/n", 0.0) is None
    assert made.get(Owner.TENANT, "t").bucket(Limit.REQUESTS) is not None
    assert made.get(*ETL).bucket(Limit.REQUESTS) is None


def test_requests_above_the_rate_wait_for_their_turn_and_then_are_refused() -> None:
    made = Made(role=OwnerLimits(requests_rate=10))
    of_etl = [made.get(*ETL)]
    assert [made.accounts.take(of_etl, ONE, 0.0) for _ in range(10)] == [0.0] * 10
    waits = [made.accounts.take(of_etl, ONE, 0.0) for _ in range(20)]
    assert waits == pytest.approx([n / 10 for n in range(1, 21)])
    with pytest.raises(LimitExceeded) as refused:
        made.accounts.take(of_etl, ONE, 0.0)
    assert refused.value.facts == {
        "limit": "requests",
        "kind": "role",
        "name": "etl",
        "rate": 10,
        "retry_after_s": 2.1,
    }
    assert refused.value.retry_after_s == 3
    assert "10 requests per second" in str(refused.value)
    assert made.accounts.take(of_etl, ONE, 0.1) == pytest.approx(2.0), "the refused one took nothing"
    assert (made.accounts.refused, made.accounts.delayed) == ({(Owner.ROLE, Limit.REQUESTS): 1}, 21)


def test_a_request_takes_from_all_of_its_accounts_or_from_none() -> None:
    made = Made(role=OwnerLimits(requests_rate=100), tenant=OwnerLimits(bytes_in_rate=10))
    role, tenant = made.get(*ETL), made.get(Owner.TENANT, "t")
    needs = {Limit.REQUESTS: 1.0, Limit.BYTES_IN: 30.0}
    assert made.accounts.take([role, tenant], needs, 0.0) == 0.0
    with pytest.raises(LimitExceeded) as refused:
        made.accounts.take([role, tenant], needs, 0.0)
    assert (refused.value.facts["kind"], refused.value.facts["retry_after_s"]) == ("tenant", 3.0)
    bucket = role.bucket(Limit.REQUESTS)
    assert bucket is not None
    assert bucket.tokens(0.0) == 99


def test_connections_are_refused_at_once_and_counted_until_they_end() -> None:
    made = Made(role=OwnerLimits(connections_max=2), tenant=OwnerLimits(connections_max=3))
    role, tenant = made.get(*ETL), made.get(Owner.TENANT, "t")
    made.accounts.connect([role, tenant])
    made.accounts.connect([role, tenant])
    with pytest.raises(LimitExceeded) as refused:
        made.accounts.connect([tenant, role])
    assert (refused.value.facts["limit"], refused.value.retry_after_s) == ("connections", BUSY_RETRY_S)
    assert (role.connections, tenant.connections) == (2, 2)
    made.accounts.disconnect([role, tenant])
    made.accounts.connect([role, tenant])


def test_bytes_that_went_out_are_a_debt() -> None:
    made = Made(role=OwnerLimits(bytes_out_rate=1_000))
    of_etl = [made.get(*ETL)]
    assert made.accounts.debt_s(of_etl, Limit.BYTES_OUT, 0.0) == 0.0
    assert made.accounts.room(of_etl, Limit.BYTES_OUT, 0.0) == 1_000
    made.accounts.spend(of_etl, Limit.BYTES_OUT, 4_000, 0.0)
    assert made.accounts.debt_s(of_etl, Limit.BYTES_OUT, 1.0) == pytest.approx(2.0, abs=1e-4)
    assert made.accounts.refuse_debt(of_etl, Limit.BYTES_OUT, 1.0).facts["limit"] == "bytes_out"


def test_topics_are_counted_by_the_minute() -> None:
    made = Made(tenant=OwnerLimits(topics_rate=60))
    tenant = [made.get(Owner.TENANT, "t")]
    assert made.accounts.take(tenant, {Limit.TOPICS: 60}, 0.0) == 0.0
    assert made.accounts.take(tenant, {Limit.TOPICS: 1}, 0.0) == pytest.approx(1.0)
    with pytest.raises(LimitExceeded, match="60 new topics per minute"):
        made.accounts.take(tenant, {Limit.TOPICS: 30}, 0.0)


def test_overrides_replace_single_limits_live_and_forgive_no_debt() -> None:
    made = Made(role=OwnerLimits(requests_rate=10, bytes_in_rate=7))
    account = made.get(*ETL)
    made.accounts.take([account], {Limit.REQUESTS: 10, Limit.BYTES_IN: 7}, 0.0)
    made.overrides = Overrides(roles={"etl": OwnerLimits(requests_rate=20, bytes_in_rate=0)})
    assert made.get(*ETL) is account
    assert {use.limit: use.rate for use in account.usage(0.0)} == {Limit.REQUESTS: 20}
    assert made.accounts.take([account], ONE, 0.0) == pytest.approx(0.05)
    made.overrides = NO_OVERRIDES
    assert {use.limit: use.rate for use in made.get(*ETL).usage(0.0)} == {Limit.REQUESTS: 10, Limit.BYTES_IN: 7}


def test_overrides_alone_switch_limits_on_and_off() -> None:
    made = Made()
    assert made.accounts.is_off
    made.overrides = Overrides(namespaces={"t/n": OwnerLimits(requests_rate=1)})
    assert not made.accounts.is_off
    assert made.accounts.account(Owner.NAMESPACE, "t/n", 0.0) is not None
    made.overrides = Overrides()
    assert made.accounts.is_off
    assert made.accounts.account(Owner.NAMESPACE, "t/n", 0.0) is None


def test_memory_is_bounded_and_debts_are_forgotten_last() -> None:
    made = Made(tracked_max=20, role=OwnerLimits(requests_rate=1))
    for _ in range(3):
        made.accounts.take([made.get(*ETL)], ONE, 0.0)
    for number in range(15):
        made.get(Owner.ROLE, f"idle-{number}")
    for number in range(1_000):
        made.accounts.take([made.get(Owner.ROLE, f"busy-{number}")], ONE, 0.0)
        assert len(made.accounts) <= 20
        if number < 19:  # until then, there was an account without a debt
            assert made.get(*ETL).bucket(Limit.REQUESTS).tokens(0.0) == -2  # type: ignore[union-attr]


def test_usage_shows_what_is_left_and_when_to_retry() -> None:
    made = Made(role=OwnerLimits(requests_rate=10, connections_max=1, topics_rate=6))
    account = made.get(*ETL)
    made.accounts.take([account], {Limit.REQUESTS: 15}, 0.0)
    made.accounts.connect([account])
    shown = {use.limit: use for use in account.usage(0.0)}
    assert shown[Limit.REQUESTS][1:4] == (10, 10, -5)
    assert shown[Limit.REQUESTS].retry_after_s == pytest.approx(0.5, abs=1e-3)
    assert shown[Limit.CONNECTIONS][1:] == (1, 1, 0, BUSY_RETRY_S)
    assert shown[Limit.TOPICS][1:] == (6, 6, 6, 0.0)


@settings(deadline=None)
@given(
    rate=st.floats(0.5, 200),
    calls=st.lists(st.tuples(st.floats(0, 2), st.integers(1, 100)), min_size=1, max_size=50),
)
def test_no_span_has_more_than_its_rate_and_the_burst(rate: float, calls: list[tuple[float, int]]) -> None:
    made = Made(role=OwnerLimits(bytes_in_rate=rate))
    of_etl = [made.get(*ETL)]
    now, passed = 0.0, []
    for pause, count in calls:
        now += pause
        try:
            passed.append((now + made.accounts.take(of_etl, {Limit.BYTES_IN: count}, now), count))
        except LimitExceeded:
            continue
    allowed = max(rate, *(count for _, count in calls))
    for first in range(len(passed)):
        for last in range(first, len(passed)):
            total = sum(count for _, count in passed[first : last + 1])
            assert total <= rate * (passed[last][0] - passed[first][0]) + allowed + 1e-3


def test_a_file_of_overrides() -> None:
    content = {
        "roles": {"etl": {"requests_rate": 5, "connections_max": 0}},
        "addresses": {"10.0.0.1": {"bytes_in_rate": 1e6}},
        "tenants": {"shop": {"topics_rate": 2}},
        "namespaces": {"shop/orders": {"bytes_out_rate": 9.5}},
    }
    found = decode_overrides(json.dumps(content).encode())
    assert found.roles["etl"] == OwnerLimits(requests_rate=5, connections_max=0)
    assert found.of(Owner.NAMESPACE)["shop/orders"].bytes_out_rate == 9.5
    assert decode_overrides(b"{}") == NO_OVERRIDES


@pytest.mark.parametrize("content", [b"", b" ", b"\n"])
def test_an_empty_file_of_overrides_is_refused(content: bytes) -> None:
    with pytest.raises(BadRequest, match="empty"):
        decode_overrides(content)


def test_a_truncated_file_keeps_the_limits(tmp_path: Path) -> None:
    content = b'{"roles": {"etl": {"requests_rate": 5}}}'
    path = tmp_path / "limits"
    path.write_bytes(content)
    file = FollowedFile(str(path), decode_overrides)
    for size in range(len(content)):
        path.write_bytes(content[:size])
        assert not file.poll()
        assert file.failure is not None
        assert file.value.roles["etl"].requests_rate == 5


@pytest.mark.parametrize(
    "content",
    [
        {"role": {}},
        {"roles": {"etl": {"requests": 5}}},
        {"roles": {"etl": {"requests_rate": -1}}},
        {"roles": {"etl": {"requests_rate": "5"}}},
        {"roles": {"etl": {"connections_max": 1.5}}},
        {"roles": {"etl": {"requests_rate": 1e16}}},
        {"namespaces": {"shop": {}}},
        {"tenants": {f"t{n}": {} for n in range(ENTRIES_MAX + 1)}},
        [],
    ],
    ids=lambda content: json.dumps(content)[:60],
)
def test_a_wrong_file_of_overrides_is_refused(content: Mapping[str, Any]) -> None:
    with pytest.raises(BadRequest):
        decode_overrides(json.dumps(content).encode())


@pytest.mark.parametrize(
    "content", [b"{", b"\xff", b'{"roles": ' + b"[" * 100_000, b'{"roles":{"a":{"requests_rate":NaN}}}']
)
def test_a_file_that_is_not_json_is_refused(content: bytes) -> None:
    with pytest.raises(BadRequest):
        decode_overrides(content)
