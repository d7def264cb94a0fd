"""The judge reports each violation of a policy in a history made by hand, and nothing in a correct one."""

from dataclasses import replace

import pytest
from bindery_simulation.policies.judge import (
    CALM_S,
    DELAY_S,
    Ledger,
    Record,
    Run,
    Seen,
    Trim,
    Use,
    Write,
    judge,
)
from bindery_simulation.policies.model import FOREVER, STALE_S, Action, Message, Policy, Timeline, Topic

HOUR = 3_600.0


def record_of(policy: Policy, *, subscriptions: tuple[str, ...] = ("s0",), size: int = 100) -> Record:
    """Return the record of a topic with a message sent at 100 s, in ledger 1, and one at 200 s in ledger 2."""
    messages = [
        Message(100.0, 100.5, (1, 0, -1)),
        Message(200.0, 200.5, (2, 0, -1)),
    ]
    return Record(Topic("t", size, subscriptions, Timeline([(0.0, 0.0, policy)]), messages))


def found(record: Record, *faults_s: float, existing: frozenset[int] = frozenset()) -> list[str]:
    return [one.invariant for one in judge(Run([record], faults_s, 1_000.0, existing))]


def seen(at_s: float, *entries: tuple[int, int, int]) -> Seen:
    return Seen("s0", at_s, at_s + 0.1, frozenset(entries))


BOTH = ((1, 0, -1), (2, 0, -1))


def test_a_time_to_live_acknowledges_neither_early_nor_late() -> None:
    record = record_of(Policy(ttl_s=1_000))
    record.seen = [seen(1_000.0, *BOTH), seen(1_150.0, BOTH[1]), seen(1_150.0, *BOTH), seen(1_500.0)]
    assert found(record) == []
    record.seen = [seen(1_000.0, BOTH[1])]
    assert found(record) == ["ttl-never-early"]
    record.seen = [seen(1_100.5 + DELAY_S + 1, *BOTH)]
    assert found(record) == ["ttl-in-time"]
    assert found(record, 1_100.0) == [], "a fault excuses a delay"


def test_the_time_of_a_delayed_message_begins_when_it_is_due() -> None:
    record = record_of(Policy(ttl_s=1_000))
    record.topic.messages[0].deliver_at_s = 500.0
    record.seen = [seen(1_400.0, BOTH[0])]
    assert found(record) == []
    record.seen = [seen(1_400.0)]
    assert found(record) == ["ttl-never-early"]


def test_what_its_consumer_acknowledged_is_gone_for_a_reason() -> None:
    record = record_of(Policy())
    record.seen = [seen(300.0)]
    assert found(record) == ["ttl-never-early"] * 2
    for message in record.topic.messages:
        message.acks["s0"] = [(250.0, FOREVER)]
    assert found(record) == []


def test_the_policy_before_a_change_may_still_be_in_force_for_a_while() -> None:
    record = record_of(Policy(ttl_s=1_000))
    record.topic.timeline.changes.append((1_000.0, 1_001.0, Policy()))
    record.seen = [seen(1_300.0)]
    assert found(record) == ["ttl-never-early"] * 2
    record.topic.timeline.changes[-1] = (1_200.0, 1_201.0 - STALE_S, Policy())
    assert found(record) == []


@pytest.mark.parametrize(
    ("policy", "at_s", "allowed"),
    [
        (Policy(), 400.0, True),
        (Policy(has_retention=True), 400.0, True),
        (Policy(has_retention=True, retention_s=600, retention_size=None), 680.0, False),
        (Policy(has_retention=True, retention_s=600, retention_size=None), 901.0, True),
        (Policy(has_retention=True, retention_s=600, retention_size=10**6), 680.0, False),
        (Policy(has_retention=True, retention_s=600, retention_size=100), 400.0, True),
        (Policy(has_retention=True, retention_s=None, retention_size=None), 10**6, False),
    ],
)
def test_a_ledger_is_deleted_when_the_retention_allows_it(policy: Policy, at_s: float, allowed: bool) -> None:
    record = record_of(policy)
    for message in record.topic.messages:
        message.acks["s0"] = [(250.0, 250.1)]
    ledgers = (Ledger(1, 150, 300.0, 300.0), Ledger(2, 0, FOREVER, FOREVER))
    record.trims = [Trim(at_s, ledgers, (1,))]
    assert found(record) == ([] if allowed else ["retention-keeps"])


def test_a_ledger_that_is_needed_is_not_deleted() -> None:
    record = record_of(Policy(has_retention=True))
    record.trims = [Trim(400.0, (Ledger(1, 150, 300.0, 300.0), Ledger(2, 0, FOREVER, FOREVER)), (1,))]
    assert found(record) == ["trim-keeps-needed"]


def test_what_nothing_keeps_is_deleted_in_time_and_for_good() -> None:
    record = record_of(Policy(has_retention=True, retention_s=600, retention_size=None))
    record.seen = [seen(HOUR, BOTH[1])]
    record.topic.messages[0].acks["s0"] = [(250.0, 250.1)]
    record.remaining, record.ended_s = (Ledger(1, 150, 300.0, 300.0), Ledger(2, 0, FOREVER, FOREVER)), HOUR + 500
    assert found(record) == ["trim-in-time"]
    assert found(record, HOUR + 450) == []
    record.seen = [seen(HOUR, *BOTH)]
    assert found(record) == []
    record.seen, record.remaining = [], (Ledger(2, 0, FOREVER, FOREVER),)
    record.trims = [Trim(HOUR, (Ledger(1, 150, 300.0, 300.0), Ledger(2, 0, FOREVER, FOREVER)), (1,))]
    assert found(record, existing=frozenset({1})) == ["no-leak"]
    assert found(record, HOUR + 1, existing=frozenset({1})) == [], "a fault may have prevented the deletion"


@pytest.mark.parametrize("action", [Action.REFUSE, Action.HOLD])
def test_a_quota_refuses_above_its_limit_and_only_there(action: Action) -> None:
    error = {Action.REFUSE: "BacklogQuotaRefused", Action.HOLD: "BacklogQuotaExceeded"}[action]
    other = "BacklogQuotaExceeded" if action is Action.REFUSE else "BacklogQuotaRefused"
    policy = Policy(action=action, quota_size=150)
    record = record_of(policy)
    record.writes = [Write(300.0, 300.1, error)]
    assert found(record) == []
    record.writes = [Write(300.0, 300.1, other)]
    assert found(record) == ["quota-admits"]
    record.writes = [Write(300.0, 300.1, "")]
    assert found(record) == ["quota-refuses"]
    for message in record.topic.messages:
        message.acks["s0"] = [(250.0, 251.0)]
    assert found(record) == []
    record.writes = [Write(300.0, 300.1, error)]
    assert found(record) == ["quota-admits"]


def test_a_quota_of_age_counts_from_the_oldest_message() -> None:
    record = record_of(Policy(quota_age_s=500))
    record.writes = [Write(590.0, 590.1, ""), Write(602.0, 602.1, "BacklogQuotaRefused")]
    assert found(record) == []
    record.writes = [Write(590.0, 590.1, "BacklogQuotaRefused"), Write(605.0, 605.1, "")]
    assert found(record) == ["quota-admits", "quota-refuses"]


def test_an_eviction_takes_the_surplus_in_time_and_no_more() -> None:
    record = record_of(Policy(action=Action.EVICT, quota_size=1_000), size=1_000)
    record.seen = [seen(600.0, BOTH[1])]
    assert found(record) == []
    record.seen = [seen(600.0, *BOTH)]
    assert found(record) == ["evict-in-time"]
    record = record_of(Policy(action=Action.EVICT, quota_size=10_000), size=1_000)
    record.seen = [seen(600.0, BOTH[1])]
    assert found(record) == ["ttl-never-early"]


def test_an_inactive_topic_is_deleted_when_it_is_unused_and_not_needed() -> None:
    policy = Policy(has_retention=True, inactive_s=600, deletes_caught_up=True)
    record = record_of(policy, subscriptions=())
    record.uses, record.subscribed = [Use(300.0, 301.0)], [(50.0, FOREVER)]
    for message in record.topic.messages:
        message.acks["s0"] = [(250.0, 250.1)]
    record.deletions, record.ended_s = [950.0], HOUR
    assert found(record) == []
    record.deletions = [850.0]
    assert found(record) == ["inactive-not-early"]
    record.deletions = [950.0]
    record.topic.messages[0].acks.clear()
    assert found(record) == ["inactive-keeps-needed"]
    record.topic.timeline.changes[0] = (0.0, 0.0, replace(policy, deletes_caught_up=False))
    assert found(record) == ["inactive-keeps-needed"] * 2


def test_an_unused_topic_is_deleted_in_time() -> None:
    record = record_of(Policy(has_retention=True, inactive_s=600), subscriptions=())
    record.uses, record.remaining, record.ended_s = [Use(300.0, 301.0)], (Ledger(2, 0, FOREVER, FOREVER),), HOUR
    assert found(record) == ["inactive-in-time"]
    assert found(record, 301.0 + CALM_S) == []
    record.remaining = ()
    assert found(record) == []
