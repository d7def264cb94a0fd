"""Backlog quotas: producers are held or refused with the reason, or the oldest messages are evicted."""

import asyncio
from typing import Any

import pytest
from bindery_broker.managed_ledger import SYSTEM_CURSORS
from bindery_broker.namespaces.policies import BacklogQuota, QuotaAction, Rate
from bindery_broker.topics.admission import HELD_MAX, HOLD_S_MAX
from bindery_pulsar.message_id import EARLIEST
from bindery_pulsar.topic_name import TopicName
from broker_harness import TOPIC, Harness, ids, payloads, problem
from policy_parts import set_policies

NAME = TopicName.parse("public/default/t")
REFUSALS = {QuotaAction.REFUSE: "backlog_quota_refused", QuotaAction.HOLD: "backlog_quota_exceeded"}
"""Codes of the errors with which producers are refused."""


def quota(limit: int, action: QuotaAction) -> BacklogQuota:
    return BacklogQuota(limit=limit, action=action)


async def fill(broker: Harness, count: int = 3, size: int = 500) -> list[str]:
    await broker.receive()
    return await broker.produce(*["x" * size] * count)


async def refused(broker: Harness, *, status: int, code: str) -> dict[str, Any]:
    broker.clock.advance(1)
    return problem(await broker.client.post(f"{TOPIC}/messages", content=b"more"), status=status, code=code)


async def test_a_producer_is_refused_with_the_subscription_the_limit_and_the_oldest_message(broker: Harness) -> None:
    set_policies(broker, backlog_quota_size=quota(1_000, QuotaAction.REFUSE))
    stored = await fill(broker)
    body = await refused(broker, status=507, code="backlog_quota_refused")
    facts = body["facts"]
    assert (facts["subscription"], facts["quota"], facts["limit"]) == ("s", "size", 1_000)
    assert facts["value"] > 1_500
    assert stored[0].startswith(facts["oldest"])
    assert "subscription s has" in body["detail"]
    assert payloads(await broker.receive(max=10)) == ["x" * 500] * 3


async def test_a_held_producer_waits_and_is_admitted_once_the_backlog_is_read(broker: Harness) -> None:
    set_policies(broker, backlog_quota_size=quota(1_000, QuotaAction.HOLD))
    await fill(broker)
    messages = await broker.receive()
    broker.clock.advance(1)
    waiting = asyncio.ensure_future(broker.client.post(f"{TOPIC}/messages", content=b"more"))
    await asyncio.sleep(1.1)
    assert not waiting.done()
    await broker.ack(ids(messages))
    began = asyncio.get_running_loop().time()
    assert (await waiting).status_code == 200
    assert asyncio.get_running_loop().time() - began < 1


async def test_a_held_producer_is_refused_in_the_end_and_told_to_come_back(broker: Harness) -> None:
    set_policies(broker, backlog_quota_size=quota(1_000, QuotaAction.HOLD))
    await fill(broker)
    began = asyncio.get_running_loop().time()
    broker.clock.advance(1)
    answer = await broker.client.post(f"{TOPIC}/messages", content=b"more")
    problem(answer, status=429, code="backlog_quota_exceeded")
    assert answer.headers["retry-after"] == "1"
    assert HOLD_S_MAX <= asyncio.get_running_loop().time() - began < HOLD_S_MAX + 1


async def test_few_requests_are_held_at_a_time(broker: Harness) -> None:
    set_policies(broker, backlog_quota_size=quota(1_000, QuotaAction.HOLD))
    await fill(broker)
    broker.clock.advance(1)
    calls = [asyncio.ensure_future(broker.client.post(f"{TOPIC}/messages", content=b"x")) for _ in range(HELD_MAX + 4)]
    await asyncio.sleep(1)
    assert sum(call.done() for call in calls) == 4
    assert {(await call).status_code for call in calls} == {429}


async def test_producers_are_admitted_within_a_second_after_the_limit_clears(broker: Harness) -> None:
    set_policies(broker, backlog_quota_size=quota(1_000, QuotaAction.REFUSE))
    await fill(broker)
    await refused(broker, status=507, code="backlog_quota_refused")
    await broker.ack(ids(await broker.receive()))
    broker.clock.advance(0.9)
    assert (await broker.client.post(f"{TOPIC}/messages", content=b"more")).status_code == 200


async def test_the_age_of_the_oldest_message_is_limited(broker: Harness) -> None:
    set_policies(broker, backlog_quota_age=quota(60, QuotaAction.REFUSE))
    await broker.receive(sub="fast")
    (oldest,) = await fill(broker, count=1)
    await broker.ack([oldest], sub="fast")
    broker.clock.advance(59)
    await broker.produce("young")
    broker.clock.advance(1)
    body = await refused(broker, status=507, code="backlog_quota_refused")
    assert (body["facts"]["quota"], body["facts"]["subscription"], body["facts"]["value"]) == ("age", "s", 61)
    await broker.ack([oldest])
    broker.clock.advance(1)
    await broker.produce("admitted")


async def test_the_broker_s_own_cursors_and_readers_never_count(broker: Harness) -> None:
    set_policies(broker, backlog_quota_size=quota(1_000, QuotaAction.REFUSE))
    await broker.produce("a")
    topic = await broker.broker.topic(NAME)
    for name in SYSTEM_CURSORS:
        await topic.ledger.open_cursor(name, start=EARLIEST)
    await topic.subscribe("reader", durable=False)
    for _ in range(5):
        broker.clock.advance(1)
        await broker.produce("x" * 500)


async def test_an_eviction_acknowledges_the_oldest_of_the_slowest_subscription(broker: Harness) -> None:
    set_policies(broker, backlog_quota_size=quota(10_000, QuotaAction.EVICT))
    await broker.receive(sub="fast")
    await fill(broker, count=30)
    newest = (await broker.receive(sub="fast", max=100))[:25]
    await broker.ack(ids(newest), sub="fast")
    await broker.broker.topics.enforce()
    topic = await broker.broker.topic(NAME)
    left, size = topic.subscriptions["s"].cursor.backlog
    assert 8_000 <= size <= 9_000
    assert topic.subscriptions["s"].statistics.evicted == 30 - left
    assert topic.subscriptions["fast"].cursor.backlog_entries == 5
    assert topic.subscriptions["fast"].statistics.evicted == 0
    await broker.produce("producers are not held")


async def test_an_eviction_by_age_leaves_nine_tenths_of_the_time(broker: Harness) -> None:
    set_policies(broker, backlog_quota_age=quota(100, QuotaAction.EVICT))
    await broker.receive()
    for number in range(12):
        await broker.produce(str(number))
        broker.clock.advance(10)
    await broker.broker.topics.enforce()
    assert payloads(await broker.receive(max=100)) == [str(number) for number in range(3, 12)]


@pytest.mark.parametrize("action", [QuotaAction.REFUSE, QuotaAction.HOLD])
@pytest.mark.parametrize(
    ("query", "headers"),
    [({"producer": "p", "sequence_id": 7}, {}), ({}, {"idempotency-key": "one"})],
    ids=["sequence-id", "idempotency-key"],
)
async def test_a_repeated_request_that_is_stored_gets_its_answer_above_the_quota(
    broker: Harness, action: QuotaAction, query: dict[str, Any], headers: dict[str, str]
) -> None:
    set_policies(broker, backlog_quota_size=quota(1_000, action))
    await broker.receive()
    stored = await broker.produce("x" * 2_000, params=query, headers=headers)
    broker.clock.advance(1)
    assert await broker.produce("x" * 2_000, params=query, headers=headers) == stored
    await refused(broker, status=507 if action is QuotaAction.REFUSE else 429, code=REFUSALS[action])
    answer = await broker.client.post(
        f"{TOPIC}/messages", content=b"new", params={"producer": "p", "sequence_id": 9_999}, headers={}
    )
    problem(answer, status=answer.status_code, code=REFUSALS[action])
    assert len(await broker.receive(max=10)) == 1


async def test_a_repeated_request_waits_for_no_rate(broker: Harness) -> None:
    set_policies(broker, publish_rate=Rate(1, None, period_s=60))
    query = {"producer": "p", "sequence_id": 7}
    stored = await broker.produce("a", params=query)
    await broker.produce("b")  # more than the rate allows
    assert await broker.produce("a", params=query) == stored
    problem(await broker.client.post(f"{TOPIC}/messages", content=b"c"), status=429, code="publish_rate_exceeded")


async def test_a_repeated_request_gets_its_answer_after_a_policy_has_forbidden_such_messages(broker: Harness) -> None:
    query = {"producer": "p", "sequence_id": 7}
    set_policies(broker)
    stored = await broker.produce("large", params=query)
    set_policies(broker, message_size_max=3)
    assert await broker.produce("large", params=query) == stored
    answer = await broker.client.post(f"{TOPIC}/messages", content=b"large", params={**query, "sequence_id": 8})
    problem(answer, status=413, code="too_large")


async def test_a_refused_request_stores_nothing_and_is_stored_once_when_it_is_repeated(broker: Harness) -> None:
    set_policies(broker, backlog_quota_size=quota(1_000, QuotaAction.REFUSE))
    await fill(broker)
    broker.clock.advance(1)
    query = {"producer": "p", "sequence_id": 7}
    answer = await broker.client.post(f"{TOPIC}/messages", content=b"more", params=query)
    problem(answer, status=507, code="backlog_quota_refused")
    await broker.ack(ids(await broker.receive()))
    broker.clock.advance(1)
    stored = await broker.produce("more", params=query)
    assert await broker.produce("more", params=query) == stored
    assert payloads(await broker.receive(max=10)) == ["more"]
