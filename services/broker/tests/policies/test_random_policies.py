"""Random use of a topic with a time to live and a retention: nothing that a subscription needs is ever removed.

| invariant           | holds                                                                                  |
|---------------------|----------------------------------------------------------------------------------------|
| never early         | a message that nobody acknowledged is acknowledged only once its time to live is over  |
| never trimmed early | a message that a subscription has not acknowledged is stored                           |
| expired in the end  | a round of the policies leaves nothing expired but what consumers have, or soon have   |
"""

import random

import pytest
from bindery_broker.namespaces.policies import Retention
from bindery_client.memory.memory import MemoryLedgers
from bindery_metadata.stores.memory import MemoryTree
from bindery_pulsar.message_id import MessageId, Position
from bindery_pulsar.topic_name import TopicName
from broker_harness import TOPIC, Clock, Harness, ids
from policy_parts import set_policies

NAME = TopicName.parse("public/default/t")
SUBSCRIPTIONS = ("a", "b")
TTL_S = 20
STEPS = 120
WAYS = ("produce", "produce", "delay", "consume", "consume", "time", "enforce", "maintain", "more")


@pytest.mark.parametrize("seed", range(12))
async def test_nothing_that_a_subscription_needs_is_removed(
    seed: int, tree: MemoryTree, ledgers: MemoryLedgers
) -> None:
    chance, clock = random.Random(seed), Clock()
    broker = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://one")
    retention = chance.choice([None, Retention(5, None), Retention(None, 300), Retention(0, 0)])
    set_policies(broker, message_ttl_s=TTL_S, retention=retention)
    for name in SUBSCRIPTIONS:
        await broker.receive(sub=name, session_ttl_ms=1_000)
    expires: dict[str, int] = {}
    """When the time to live of a message is over, in ms since 1970."""
    acked: dict[str, set[str]] = {name: set() for name in SUBSCRIPTIONS}
    """What was ever acknowledged."""
    seen_in_use: dict[str, set[Position]] = {name: set() for name in SUBSCRIPTIONS}
    """What a consumer had, or was about to get: it may expire a round later."""
    for _ in range(STEPS):
        step = chance.choice(
            ["produce", "produce", "delay", "consume", "consume", "time", "enforce", "maintain", "more"]
        )
        if step == "produce":
            (message_id,) = await broker.produce("x" * chance.randrange(1, 60), params={"key": chance.choice("klm")})
            expires[message_id] = clock.wall_ms + TTL_S * 1_000
        elif step == "delay":
            delay_ms = chance.randrange(1, 60_000)
            (message_id,) = await broker.produce("d", params={"deliver_after_ms": delay_ms})
            expires[message_id] = clock.wall_ms + delay_ms + TTL_S * 1_000
        elif step == "consume":
            name = chance.choice(SUBSCRIPTIONS)
            got = ids(await broker.receive(sub=name, max=5, session_ttl_ms=1_000, ack_timeout_ms=3_000))
            some = [one for one in got if chance.random() < 0.7]
            if some:
                assert (await broker.ack(some, sub=name)).status_code == 200
                acked[name] |= set(some)
        elif step == "time":
            clock.advance(chance.choice([0.5, 3, 15]))
        elif step == "enforce":
            await broker.broker.topics.enforce()
        elif step == "maintain":
            await broker.broker.topics.maintain()
        elif chance.random() < 0.5:
            await (await broker.broker.topic(NAME)).ledger.roll()
        elif chance.random() < 0.3:
            await (await broker.broker.topic(NAME)).close()
        else:
            name = chance.choice(SUBSCRIPTIONS)
            answer = await broker.post(f"{TOPIC}/subscriptions/{name}/seek", {"message_id": "earliest"})
            assert answer.status_code == 200
        topic = await broker.broker.topic(NAME)
        for name in SUBSCRIPTIONS:
            cursor = topic.subscriptions[name].cursor
            for message_id, expires_ms in expires.items():
                position = MessageId.parse(message_id).position
                if message_id not in acked[name] and expires_ms > clock.wall_ms:
                    assert topic.ledger.contains(position), f"{message_id} was trimmed, and {name} needs it"
                    assert not cursor.is_acked(position), f"{message_id} was acknowledged for {name} before its time"
                elif step == "enforce" and expires_ms <= clock.wall_ms and not cursor.is_acked(position):
                    in_use = topic.subscriptions[name].dispatcher.known_bits(position)
                    assert in_use or position in seen_in_use[name], f"{message_id} has not expired for {name}"
                if topic.subscriptions[name].dispatcher.known_bits(position):
                    seen_in_use[name].add(position)
    await broker.close()
