"""Maxima, rates, allowed types, inactive topics and the expiration of subscriptions."""

import asyncio
from typing import Any

import pytest
from bindery_broker.namespaces.policies import InactiveMode, InactiveTopics, Rate, Retention
from bindery_broker.topics.admission import PUBLISH_WAIT_S_MAX
from bindery_pulsar.topic_name import TopicName
from broker_harness import TOPIC, Harness, ids, payloads, problem
from policy_parts import set_policies

NAME = TopicName.parse("public/default/t")


async def enforce(broker: Harness) -> None:
    await broker.broker.topics.enforce()


async def post(broker: Harness, payload: str, **params: Any) -> Any:
    return await broker.client.post(f"{TOPIC}/messages", content=payload.encode(), params=params)


# -- maxima ------------------------------------------------------------------------------------------------------------


async def test_consumers_of_a_topic_and_of_a_subscription_are_limited(broker: Harness) -> None:
    set_policies(broker, consumers_max=3, consumers_per_subscription_max=2)
    await broker.receive("c1", sub="a")
    await broker.receive("c2", sub="a")
    answer = await broker.receive_raw("c3", sub="a")
    assert problem(answer, status=429, code="too_many_requests")["facts"] == {"consumers": 2, "limit": 2}
    await broker.receive("c3", sub="b")
    answer = await broker.receive_raw("c4", sub="b")
    assert "consumers_max" in problem(answer, status=429, code="too_many_requests")["detail"]
    await broker.receive("c1", sub="a")  # those that are connected go on
    assert (await broker.client.delete(f"{TOPIC}/subscriptions/a/consumers/c1")).status_code == 200
    await broker.receive("c4", sub="b")


async def send_as(broker: Harness, producer: str, **params: Any) -> int:
    return int((await post(broker, "x", producer=producer, **params)).status_code)


@pytest.mark.parametrize("level", ["namespaces/public/default", "topics/public/default/t"])
async def test_named_producers_are_limited_by_either_level_at_each_broker(
    pair: tuple[Harness, Harness], level: str
) -> None:
    one, two = pair
    await post(one, "first")  # names no producer, so it counts for none
    policies = f"/v1/{level}/policies"
    assert (await two.client.put(policies, json={"producers_max": 2})).status_code == 200
    assert [await send_as(broker, name) for broker, name in ((one, "a"), (two, "b"), (one, "a"))] == [200] * 3
    for broker in pair:
        refused = await post(broker, "x", producer="c", sequence_id=1)
        problem(refused, status=429, code="too_many_producers")
        assert refused.headers["retry-after"] == "30"
        facts = refused.json()["facts"]
        assert (facts["producers"], facts["limit"], facts["producer"]) == (2, 2, "c")
        assert "set-policy" in refused.json()["detail"]
        stats = (await broker.client.get(TOPIC)).json()
        assert stats["producers"] == 2
        rule = next(one for one in stats["policies"] if one["policy"] == "producers_max")
        assert (rule["acts"], rule["value"], rule["effect"]) == (True, 2, "refuses")
        assert rule["detail"].startswith("at most 2 producers; 2 are connected")
    assert (await post(one, "unnamed")).status_code == 200
    # A lower maximum ends none of them.
    assert (await one.client.put(policies, json={"producers_max": 1})).status_code == 200
    assert [await send_as(two, "a"), await send_as(two, "b"), await send_as(two, "c")] == [200, 200, 429]
    one.clock.advance(30)
    assert [await send_as(one, "c"), await send_as(one, "a")] == [200, 429]
    assert (await one.client.put(policies, json={"producers_max": 0})).status_code == 200
    assert await send_as(two, "a") == 200


async def test_a_repeat_that_is_stored_is_answered_above_the_maximum(broker: Harness) -> None:
    first = await post(broker, "x", producer="a", sequence_id=1)
    broker.clock.advance(30)
    assert await send_as(broker, "b") == 200
    set_to = await broker.client.put("/v1/topics/public/default/t/policies", json={"producers_max": 1})
    assert set_to.status_code == 200
    again = await post(broker, "x", producer="a", sequence_id=1)
    assert (again.status_code, again.json()) == (200, first.json())
    assert await send_as(broker, "a", sequence_id=2) == 429


async def test_an_exclusive_producer_is_the_only_one(broker: Harness) -> None:
    set_policies(broker, producers_max=1)
    assert await send_as(broker, "a") == 200
    body = {"access_mode": "exclusive"}
    epoch = (await broker.client.put(f"{TOPIC}/producers/b/access", json=body)).json()["producer_epoch"]
    assert await send_as(broker, "b", producer_epoch=epoch) == 200
    problem(await post(broker, "x", producer="a"), status=409, code="producer_busy")
    assert (await broker.client.get(TOPIC)).json()["producers"] == 1


async def test_producers_of_topics_of_the_system_are_not_limited(broker: Harness) -> None:
    set_policies(broker, producers_max=1)
    path = "/v1/topics/public/default/__change_events/messages"
    codes = [
        (await broker.client.post(path, content=b"x", params={"producer": name})).status_code for name in ("a", "b")
    ]
    assert codes == [200, 200]


async def test_subscriptions_are_limited(broker: Harness) -> None:
    set_policies(broker, subscriptions_max=1)
    await broker.receive(sub="a")
    answer = await broker.receive_raw(sub="b")
    assert "subscriptions_max" in problem(answer, status=409, code="policy_forbids")["detail"]
    await broker.receive(sub="a")
    set_policies(broker, subscriptions_max=2)
    await broker.receive(sub="b")


async def test_unacknowledged_messages_are_limited_by_the_present_policy(broker: Harness) -> None:
    set_policies(broker, unacked_per_consumer_max=2, unacked_per_subscription_max=3)
    await broker.produce(*"abcdef")
    assert len(await broker.receive("c1", max=10)) == 2
    answer = (await broker.receive_raw("c1")).json()
    assert (answer["messages"], answer["blocked"]["code"]) == ([], "unacked_max")
    assert len(await broker.receive("c2", max=10)) == 1
    set_policies(broker)
    assert len(await broker.receive("c1", max=10)) == 3


async def test_the_settings_stay_the_outer_limits(broker: Harness) -> None:
    set_policies(broker, unacked_per_consumer_max=10**9, unacked_per_subscription_max=10**9)
    await broker.receive()
    topic = await broker.broker.topic(NAME)
    limits = topic.subscriptions["s"].dispatcher.limits
    settings = broker.settings
    assert (limits.unacked_max, limits.unacked_per_consumer_max) == (
        settings.unacked_max,
        settings.unacked_per_consumer_max,
    )


async def test_the_size_of_a_message_is_limited(broker: Harness) -> None:
    set_policies(broker, message_size_max=5)
    assert (await post(broker, "12345")).status_code == 200
    facts = problem(await post(broker, "123456"), status=413, code="too_large")["facts"]
    assert facts == {"index": 0, "size": 6, "size_max": 5}


async def test_types_of_subscriptions_are_limited(broker: Harness) -> None:
    set_policies(broker, subscription_types=frozenset({"exclusive"}))
    body = problem(await broker.receive_raw(type="shared"), status=409, code="policy_forbids")
    assert body["facts"]["allowed"] == ["exclusive"]
    await broker.receive(type="exclusive")


async def test_messages_that_are_not_encrypted_are_refused_if_encryption_is_required(broker: Harness) -> None:
    set_policies(broker, encryption_required=True)
    problem(await post(broker, "x"), status=409, code="policy_forbids")


# -- delayed delivery --------------------------------------------------------------------------------------------------


async def test_a_delay_longer_than_the_policy_allows_is_refused(broker: Harness) -> None:
    set_policies(broker, delay_s_max=10)
    assert (await post(broker, "x", deliver_after_ms=10_000)).status_code == 200
    problem(await post(broker, "x", deliver_after_ms=10_001), status=400, code="delay_too_long")


async def test_delays_are_not_respected_if_the_policy_turns_them_off(broker: Harness) -> None:
    set_policies(broker, delayed_delivery=False)
    await post(broker, "x", deliver_after_ms=60_000)
    assert payloads(await broker.receive(type="shared")) == ["x"]


async def test_delayed_messages_are_delivered_once_delays_are_turned_off(broker: Harness) -> None:
    set_policies(broker)
    await broker.receive(type="shared")
    await post(broker, "x", deliver_after_ms=60_000)
    assert await broker.receive(type="shared") == []
    set_policies(broker, delayed_delivery=False)
    assert payloads(await broker.receive(type="shared")) == ["x"]


# -- rates -------------------------------------------------------------------------------------------------------------


async def test_a_producer_above_the_rate_waits_and_then_is_refused(broker: Harness) -> None:
    set_policies(broker, publish_rate=Rate(messages=2, size=None))
    loop = asyncio.get_running_loop()
    began = loop.time()
    await post(broker, "0")
    await post(broker, "1")
    broker.clock.advance(0.1)
    await post(broker, "2")
    assert loop.time() == pytest.approx(began, abs=0.01)  # a full bucket, then a debt
    await post(broker, "waits")
    assert loop.time() - began == pytest.approx(0.4, abs=0.01)
    lines = "\n".join('{"payload": "x"}' for _ in range(10))
    await broker.client.post(f"{TOPIC}/messages", content=lines, headers={"content-type": "application/x-ndjson"})
    answer = await post(broker, "too much")
    facts = problem(answer, status=429, code="publish_rate_exceeded")["facts"]
    assert facts["retry_after_s"] > PUBLISH_WAIT_S_MAX
    assert int(answer.headers["retry-after"]) >= facts["retry_after_s"]
    broker.clock.advance(int(answer.headers["retry-after"]))
    assert (await post(broker, "in time")).status_code == 200


async def test_a_throttled_topic_delays_no_other(broker: Harness) -> None:
    set_policies(broker, publish_rate=Rate(messages=1, size=None))
    await post(broker, "1")
    await post(broker, "2")
    waiting = asyncio.ensure_future(post(broker, "3"))
    await asyncio.sleep(0.01)
    began = asyncio.get_running_loop().time()
    await broker.produce("other", topic="/v1/topics/public/default/other")
    assert asyncio.get_running_loop().time() - began < 0.01
    assert (await waiting).status_code == 200


async def test_bytes_are_limited_too(broker: Harness) -> None:
    set_policies(broker, publish_rate=Rate(messages=None, size=10))
    await post(broker, "x" * 100)
    problem(await post(broker, "y"), status=429, code="publish_rate_exceeded")


@pytest.mark.parametrize("policy", ["dispatch_rate", "subscription_dispatch_rate"])
async def test_deliveries_are_limited_and_the_answer_names_the_policy(broker: Harness, policy: str) -> None:
    set_policies(broker, **{policy: Rate(messages=3, size=None)})
    await broker.produce(*"abcdefgh")
    assert payloads(await broker.receive(max=10)) == ["a", "b", "c"]
    broker.clock.advance(0.01)
    assert payloads(await broker.receive(max=10)) == ["d"]  # above zero, then in debt
    answer = (await broker.receive_raw(max=10)).json()
    assert (answer["messages"], answer["blocked"]["code"]) == ([], "dispatch_rate")
    assert "3 messages in 1 s" in answer["blocked"]["detail"]
    assert 0 < answer["blocked"]["ends_in_ms"] <= 334
    broker.clock.advance(1)
    assert payloads(await broker.receive(max=10)) == ["e", "f"]


async def test_a_call_that_waits_gets_messages_when_the_rate_allows_it(broker: Harness) -> None:
    set_policies(broker, dispatch_rate=Rate(messages=1, size=None))
    await broker.produce("a", "b", "c")
    await broker.receive(max=1)
    broker.clock.advance(0.01)
    await broker.receive(max=1)
    waiting = asyncio.ensure_future(broker.receive(max=1, wait_ms=20_000))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    broker.clock.advance(1.01)
    assert payloads(await waiting) == ["c"]


async def test_the_rate_of_a_topic_is_shared_and_that_of_a_subscription_is_not(broker: Harness) -> None:
    set_policies(broker, dispatch_rate=Rate(messages=4, size=None))
    await broker.produce(*"abcdefgh")
    got = [len(await broker.receive(sub=sub, max=10)) for sub in ("a", "b", "a", "b")]
    assert sum(got) <= 5
    set_policies(broker, subscription_dispatch_rate=Rate(messages=4, size=None))
    broker.clock.advance(10)
    for sub in ("a", "b"):
        await broker.receive(sub=sub, redeliver=True, max=1)
    assert [len(await broker.receive(sub=sub, max=10)) for sub in ("a", "b")] == [3, 3]


async def test_a_consumer_that_connects_too_often_is_refused(broker: Harness) -> None:
    set_policies(broker, subscribe_rate=Rate(messages=2, size=None, period_s=30))

    async def connect(consumer: str) -> Any:
        answer = await broker.receive_raw(consumer)
        await broker.client.delete(f"{TOPIC}/subscriptions/s/consumers/{consumer}")
        return answer

    for _ in range(3):
        assert (await connect("c1")).status_code == 200
        broker.clock.advance(0.01)
    problem(await connect("c1"), status=429, code="subscribe_rate_exceeded")
    assert (await connect("c2")).status_code == 200
    broker.clock.advance(16)
    assert (await connect("c1")).status_code == 200


# -- inactive topics and subscriptions ---------------------------------------------------------------------------------

AT_ONCE = Retention(time_s=0, size_max=0)


async def test_a_topic_without_subscriptions_is_deleted_when_it_is_inactive(broker: Harness) -> None:
    policy = InactiveTopics(InactiveMode.NO_SUBSCRIPTIONS, 60)
    set_policies(broker, inactive_topics=policy, retention=AT_ONCE)
    await broker.produce("a")
    broker.clock.advance(59)
    await enforce(broker)
    assert (await broker.client.get(TOPIC)).status_code == 200
    broker.clock.advance(1)
    await enforce(broker)
    assert (await broker.client.get(TOPIC)).status_code == 404
    await broker.produce("again")


async def test_retained_messages_are_never_inactive(broker: Harness) -> None:
    policy = InactiveTopics(InactiveMode.CAUGHT_UP, 60)
    set_policies(broker, inactive_topics=policy, retention=Retention(time_s=100, size_max=None))
    await broker.receive()
    await broker.ack(await broker.produce("a"))
    broker.clock.advance(99)
    await enforce(broker)
    assert (await broker.client.get(TOPIC)).status_code == 200
    broker.clock.advance(1)
    await enforce(broker)
    assert (await broker.client.get(TOPIC)).status_code == 404


@pytest.mark.parametrize("mode", InactiveMode)
async def test_a_subscription_with_a_backlog_keeps_its_topic(broker: Harness, mode: InactiveMode) -> None:
    set_policies(broker, inactive_topics=InactiveTopics(mode, 60), retention=AT_ONCE)
    await broker.receive(session_ttl_ms=1_000)
    await broker.produce("a")
    broker.clock.advance(10_000)
    await enforce(broker)
    assert (await broker.client.get(TOPIC)).status_code == 200


async def test_partitions_and_a_topic_in_use_are_not_deleted(broker: Harness) -> None:
    set_policies(broker, inactive_topics=InactiveTopics(InactiveMode.CAUGHT_UP, 60), retention=AT_ONCE)
    await broker.produce("a", topic="/v1/topics/public/default/p-partition-0")
    await broker.produce("b")
    topic = await broker.broker.topic(NAME)
    broker.clock.advance(1_000)
    broker.broker.topics.begin_use(NAME)
    await enforce(broker)
    assert len(broker.broker.topics) == 2
    broker.broker.topics.end_use(NAME)
    await enforce(broker)
    assert not topic.is_open
    assert len(broker.broker.topics) == 1


async def test_a_request_that_arrives_during_the_deletion_gets_a_new_topic(broker: Harness) -> None:
    set_policies(broker, inactive_topics=InactiveTopics(InactiveMode.NO_SUBSCRIPTIONS, 60), retention=AT_ONCE)
    await broker.produce("old")
    broker.clock.advance(100)
    deleting = asyncio.ensure_future(enforce(broker))
    await asyncio.sleep(0)
    await broker.produce("new")
    await deleting
    assert payloads((await broker.client.get(f"{TOPIC}/messages")).json()["messages"]) in (["new"], ["old", "new"])
    broker.clock.advance(1)
    await enforce(broker)
    assert "new" in payloads((await broker.client.get(f"{TOPIC}/messages")).json()["messages"])


async def test_a_topic_is_used_until_its_last_subscription_is_deleted(broker: Harness) -> None:
    policy = InactiveTopics(InactiveMode.NO_SUBSCRIPTIONS, 60)
    set_policies(broker, inactive_topics=policy, retention=AT_ONCE)
    await broker.receive()
    await broker.ack(await broker.produce("a"))
    broker.clock.advance(1_000)
    assert (await broker.client.delete(f"{TOPIC}/subscriptions/s", params={"force": "true"})).status_code == 200
    broker.clock.advance(59)
    await enforce(broker)
    assert (await broker.client.get(TOPIC)).status_code == 200
    broker.clock.advance(1)
    await enforce(broker)
    assert (await broker.client.get(TOPIC)).status_code == 404


async def test_an_empty_topic_stays_loaded_until_it_is_deleted(broker: Harness) -> None:
    """Only loaded topics are deleted, and idle ones are closed."""
    seconds = 3 * round(broker.settings.topic_idle_s)
    set_policies(broker, inactive_topics=InactiveTopics(InactiveMode.NO_SUBSCRIPTIONS, seconds), retention=AT_ONCE)
    await broker.produce("old")
    topic = await broker.broker.topic(NAME)
    await topic.ledger.roll()
    for _ in range(2):
        broker.clock.advance(seconds / 2 - 1)
        await broker.broker.topics.maintain()
        await enforce(broker)
        assert topic.is_open
    assert topic.ledger.entries_count == 0
    broker.clock.advance(2)
    await enforce(broker)
    assert (await broker.client.get(TOPIC)).status_code == 404


async def test_a_subscription_without_consumers_expires(broker: Harness) -> None:
    set_policies(broker, subscription_expiration_s=60)
    await broker.receive(sub="old", session_ttl_ms=1_000)
    await broker.produce("a")
    topic = await broker.broker.topic(NAME)
    broker.clock.advance(30)
    await broker.receive(sub="young", session_ttl_ms=1_000)
    broker.clock.advance(29.9)
    await enforce(broker)
    assert set(topic.subscriptions) == {"old", "young"}
    broker.clock.advance(0.2)
    await enforce(broker)
    assert set(topic.subscriptions) == {"young"}


async def test_a_subscription_with_a_consumer_does_not_expire(broker: Harness) -> None:
    set_policies(broker, subscription_expiration_s=60)
    await broker.produce("a")
    held = await broker.receive(session_ttl_ms=3_600_000, ack_timeout_ms=3_600_000)
    broker.clock.advance(600)
    await enforce(broker)
    assert (await broker.ack(ids(held))).status_code == 200
