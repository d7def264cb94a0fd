"""The state of a subscription as JSON, and the reasons why it delivers nothing."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from bindery_broker.http.v1.models import DeliveryStats, Explanation, SubscriptionInfo
from bindery_broker.http.v1.statistics_view import Times
from bindery_broker.http.v1.subscription_view import explain, info, size_of
from bindery_broker.topics.retried import RetriedSubscription
from broker_harness import TOPIC, Clock, Harness, ids, settle

COUNTED = set(DeliveryStats.model_fields)
CONSUMER_COUNTED = {
    "address", "connected_since", "messages", "bytes", "messages_per_s", "bytes_per_s", "redelivered", "acked",
    "last_delivered_at", "last_acked_at",
}  # fmt: skip
"""Fields of `statistics_view`, which has tests of its own."""


@pytest.fixture
async def broker(tree, ledgers, clock) -> AsyncIterator[Harness]:
    """A broker with low limits: a consumer holds up to two messages, a subscription five."""
    harness = Harness(
        tree=tree, ledgers=ledgers, clock=clock, url="http://one", unacked_max=5, unacked_per_consumer_max=2
    )
    yield harness
    await harness.close()


def shown(broker: Harness, *, after_s: float = 0) -> SubscriptionInfo:
    (topic,) = broker.broker.topics
    return info(topic, topic.subscription("s"), retried(broker), times(broker, after_s=after_s))


def explained(broker: Harness, *, after_s: float = 0) -> Explanation:
    (topic,) = broker.broker.topics
    return explain(topic, topic.subscription("s"), retried(broker), times(broker, after_s=after_s))


def retried(broker: Harness) -> RetriedSubscription:
    (topic,) = broker.broker.topics
    return RetriedSubscription(topic, topic.subscription("s"), broker.broker.retry_topics)


def times(broker: Harness, *, after_s: float = 0) -> Times:
    return Times(broker.clock.now() + after_s, broker.clock.now_ms() + round(after_s * 1000))


def blocked_by(broker: Harness) -> list[str]:
    return explained(broker).blocked_by


def summary(broker: Harness) -> str:
    return explained(broker).summary


# -- state


async def test_a_subscription_without_consumers_has_its_positions_and_properties(broker: Harness, clock: Clock) -> None:
    await broker.produce("a", "b")
    body = {"tags": "y||x", "subscription_properties": {"p": "v"}}
    await broker.client.put(f"{TOPIC}/subscriptions/s", json=body)
    assert shown(broker).model_dump(exclude=COUNTED) == {
        "subscription": "s",
        "type": None,
        "mark_delete": "0:-1",
        "read_position": "0:0",
        "consumers": [],
        "tags": "x||y",
        "properties": {"p": "v", "x": "1", "y": "1"},
        "retry": None,
        "dead_letters": None,
    }


async def test_a_subscription_without_tags_shows_none(broker: Harness, clock: Clock) -> None:
    await broker.receive()
    assert shown(broker).model_dump(exclude_unset=True, exclude=COUNTED).keys() == {
        "subscription", "type", "mark_delete", "read_position", "consumers", "properties",
    }  # fmt: skip


async def test_a_consumer_shows_its_oldest_message_and_its_next_timeout(broker: Harness, clock: Clock) -> None:
    await broker.produce("a", "b", "c")
    await broker.receive("c1", max=1, ack_timeout_ms=30_000)
    clock.advance(2)
    await broker.receive("c1", max=1, ack_timeout_ms=10_000)
    await broker.receive("c2", max=1, ack_timeout_ms=90_000)
    clock.advance(1)
    found = shown(broker)
    assert (found.type, found.unacked, found.backlog_entries, found.read_position) == ("shared", 3, 3, "0:3")
    assert [consumer.model_dump(exclude=CONSUMER_COUNTED) for consumer in found.consumers] == [
        {
            "consumer": "c1",
            "type": "shared",
            "unacked": 2,
            "oldest_lease_age_ms": 3_000,
            "next_timeout_in_ms": 9_000,
            "session_ends_in_ms": 59_000,
            "calls_open": 0,
            "calls": 2,
        },
        {
            "consumer": "c2",
            "type": "shared",
            "unacked": 1,
            "oldest_lease_age_ms": 1_000,
            "next_timeout_in_ms": 89_000,
            "session_ends_in_ms": 89_000,
            "calls_open": 0,
            "calls": 1,
        },
    ]


async def test_a_consumer_that_waits_has_no_end_of_its_session(broker: Harness, clock: Clock) -> None:
    await broker.receive("c1")
    waiting = asyncio.create_task(broker.receive("c1", wait_ms=30_000))
    await settle()
    (consumer,) = shown(broker).consumers
    assert consumer.model_dump(exclude_unset=True, exclude=CONSUMER_COUNTED) == {
        "consumer": "c1",
        "type": "shared",
        "unacked": 0,
        "calls_open": 1,
        "calls": 2,
    }
    broker.broker.finish()
    assert await waiting == []


async def test_leases_and_sessions_that_are_over_are_not_shown(broker: Harness, clock: Clock) -> None:
    await broker.produce("a")
    await broker.receive("c1", ack_timeout_ms=10_000, session_ttl_ms=20_000)
    clock.advance(10)
    found = shown(broker)
    assert (found.unacked, [consumer.unacked for consumer in found.consumers]) == (0, [0])
    clock.advance(10)
    assert shown(broker).consumers == []


async def test_times_are_never_below_zero(broker: Harness, clock: Clock) -> None:
    await broker.produce("a")
    await broker.receive("c1", ack_timeout_ms=10_000)
    (consumer,) = shown(broker, after_s=100).consumers
    assert (consumer.next_timeout_in_ms, consumer.session_ends_in_ms) == (0, 0)
    (consumer,) = shown(broker, after_s=-100).consumers
    assert consumer.oldest_lease_age_ms == 0


# -- explanation


async def test_an_explanation_has_the_states_and_the_limits(broker: Harness, clock: Clock) -> None:
    await broker.produce("a", "b")
    await broker.receive("c1", max=1)
    found = explained(broker)
    assert found.subscription == shown(broker)
    assert found.states == {"ready": 1, "leased": 1}
    assert found.limits == {
        "unacked_max": 5,
        "unacked_per_consumer_max": 2,
        "ready_max": 2_000,
        "ready_bytes_max": 8_388_608,
    }
    assert found.blocked_by == []
    assert found.summary == (
        "2 entries are not acknowledged; 1 messages are with 1 consumers; "
        "the other messages are delivered to later calls"
    )


async def test_nothing_is_wrong_when_everything_is_acknowledged(broker: Harness) -> None:
    await broker.produce("a")
    await broker.ack(ids(await broker.receive()))
    assert (blocked_by(broker), summary(broker)) == ([], "everything is acknowledged")
    await broker.client.delete(f"{TOPIC}/subscriptions/s/consumers/c1")
    assert (blocked_by(broker), summary(broker)) == ([], "everything is acknowledged")


async def test_messages_wait_for_a_consumer(broker: Harness) -> None:
    await broker.produce("a")
    await broker.client.put(f"{TOPIC}/subscriptions/s", json={})
    assert blocked_by(broker) == ["no consumer is connected"]
    assert summary(broker) == (
        "1 entries are not acknowledged; 0 messages are with 0 consumers; blocked: no consumer is connected"
    )


async def test_delayed_messages_wait_for_their_time(broker: Harness, clock: Clock) -> None:
    for after_ms in (7_000, 5_000):
        await broker.produce("late", params={"deliver_after_ms": after_ms})
    await broker.receive("c1")
    clock.advance(2)
    due = clock.now_ms() + 3_000
    assert blocked_by(broker) == []
    assert summary(broker) == (
        "2 entries are not acknowledged; 0 messages are with 0 consumers; "
        f"2 are delayed, the first of them until {due}, for 3000 ms more"
    )
    await broker.produce("now")
    assert summary(broker).endswith("for 3000 ms more; the other messages are delivered to later calls")
    await broker.client.delete(f"{TOPIC}/subscriptions/s/consumers/c1")
    assert summary(broker).endswith("for 3000 ms more; blocked: no consumer is connected")
    await broker.receive("c1", type="exclusive", max=1)
    assert "delayed" not in summary(broker), "an exclusive consumer gets them at once"


async def test_a_consumer_that_becomes_active_waits_for_the_former_one(broker: Harness) -> None:
    await broker.produce("a", "b")
    await broker.receive("standby", type="failover", priority=1, max=1)
    await broker.receive("preferred", type="failover", priority=0)
    assert blocked_by(broker) == [
        "the active consumer waits, for a second at most, until standby, which was active before, has acknowledged "
        "1 messages"
    ]


async def test_messages_wait_for_acknowledgements_at_the_limits(broker: Harness) -> None:
    await broker.produce("a", "b", "c", "d")
    await broker.receive("c1", max=1)
    await broker.receive("c2", max=2)
    assert blocked_by(broker) == ["consumer c2 holds 2 messages, the limit is 2"]
    await broker.receive("c1", max=1)
    await broker.receive("c3", max=1)
    await broker.produce("e", "f")
    await broker.receive("c4", max=1)
    assert blocked_by(broker) == [
        "5 messages are not acknowledged, the limit is 5",
        "consumer c1 holds 2 messages, the limit is 2",
        "consumer c2 holds 2 messages, the limit is 2",
    ]
    assert summary(broker).startswith(
        "6 entries are not acknowledged; 5 messages are with 3 consumers; "
        "blocked: 5 messages are not acknowledged, the limit is 5; consumer c"
    )


async def test_an_entry_that_cannot_be_decoded_is_named(broker: Harness) -> None:
    await broker.produce("a")
    (topic,) = broker.broker.topics
    await topic.ledger.add_many([b"no message"])
    await broker.receive("c1")
    assert (await broker.receive_raw("c1")).status_code == 500
    (reason,) = blocked_by(broker)
    assert reason.startswith("message 0:1:-1:-1 cannot be decoded: ")


async def test_a_negative_acknowledgement_holds_an_exclusive_subscription_back(broker: Harness, clock: Clock) -> None:
    await broker.produce("a")
    held = ids(await broker.receive("c1", type="exclusive"))
    await broker.post(f"{TOPIC}/subscriptions/s/nack", {"message_ids": held, "delay_ms": 5_000})
    clock.advance(1)
    assert blocked_by(broker) == ["a negative acknowledgement holds delivery back for 4000 ms more"]
    assert explained(broker, after_s=4).blocked_by == []


async def test_an_exclusive_consumer_that_holds_messages_has_to_call_again(broker: Harness) -> None:
    await broker.produce("a")
    await broker.receive("c1", type="exclusive", max=1)
    assert blocked_by(broker) == ["consumer c1 has not called again yet"]
    waiting = asyncio.create_task(broker.receive("c1", type="exclusive", wait_ms=30_000))
    await settle()
    assert blocked_by(broker) == []
    broker.broker.finish()
    assert await waiting == []


async def test_an_exclusive_consumer_that_holds_nothing_blocks_nothing(broker: Harness) -> None:
    await broker.receive("c1", type="exclusive")
    assert blocked_by(broker) == []
    await broker.client.delete(f"{TOPIC}/subscriptions/s/consumers/c1")
    await broker.produce("a")
    assert blocked_by(broker) == ["no consumer is connected"]


async def test_the_estimated_size_of_a_subscription_is_near_that_of_its_json(broker: Harness) -> None:
    await broker.produce("a")
    body = {"subscription_properties": {"p": "v" * 1_000}}
    await broker.client.put(f"{TOPIC}/subscriptions/s", json=body)
    for number in range(20):
        await broker.receive(f"consumer-{number}")
    (topic,) = broker.broker.topics
    real = len(shown(broker).model_dump_json())
    assert 0.5 * real < size_of(topic.subscription("s")) < 2 * real
