"""A broker stops between any two steps of a move, or any of its calls fails: each message is then in exactly one place.

A seed chooses the faults; `Plan` counts the calls to bookies and metadata. The broker stops at each of them in turn.
"""

import asyncio
import contextlib
from typing import Any

import pytest
from bindery_pulsar.message_id import MessageId
from bindery_pulsar.topic_name import TopicName
from broker_harness import TOPIC, Harness
from managed_ledger_faults import Plan

RETRY = f"{TOPIC}-s-RETRY"
DLQ = f"{TOPIC}-s-DLQ"
STEPS_MAX = 20
"""More than the calls of a retry, as the first test checks."""
PAYLOADS = ["a", "b", "c", "d", "e"]
ORDER = [3, 0, 2]
"""The messages that are retried, in this order."""


class Cluster:
    def __init__(self, *, tree, ledgers, clock) -> None:
        self.tree, self.ledgers, self.clock = tree, ledgers, clock
        self.born = 0

    def broker(self, plan: Plan | None = None) -> Harness:
        self.born += 1
        return Harness(tree=self.tree, ledgers=self.ledgers, clock=self.clock, url=f"http://b{self.born}", plan=plan)

    async def left(self, broker: Harness, topic: str, *, sub: str = "s") -> list[dict[str, Any]]:
        """Return the messages that the subscription has not acknowledged, in the order of the topic. Consumes none."""
        found: list[dict[str, Any]] = []
        for _ in range(10):
            found += await broker.receive("z", topic=topic, sub=sub, ack_timeout_ms=3_600_000, session_ttl_ms=3_600_000)
        return sorted(found, key=lambda message: MessageId.parse(message["message_id"]))

    async def check(self, broker: Harness, originals: dict[str, str]) -> int:
        """Check that each message is in exactly one place, with an exact backlog. Returns the number of copies."""
        self.clock.advance(4_000)  # the leases of others end
        here = await self.left(broker, TOPIC)
        copies = await self.left(broker, RETRY)
        assert all(originals[message["message_id"]] == message["payload"] for message in here)
        assert sorted(message["payload"] for message in [*here, *copies]) == PAYLOADS
        order = [PAYLOADS.index(message["payload"]) for message in copies]
        assert order == [index for index in ORDER if index in order], "the copies keep the order of the call"
        for message in copies:
            origin = message["properties"]["ORIGIN_MESSAGE_ID"]
            assert originals[f"{origin}:-1"] == message["payload"]
            assert message["properties"]["RECONSUMETIMES"] == "1"
        for topic, messages in ((TOPIC, here), (RETRY, copies)):
            stats = (await broker.client.get(topic)).json()["subscriptions"]["s"]
            assert stats["backlog_entries"] == len(messages)
        return len(copies)


@pytest.fixture
def cluster(tree, ledgers, clock) -> Cluster:
    return Cluster(tree=tree, ledgers=ledgers, clock=clock)


async def begin(cluster: Cluster, plan: Plan) -> tuple[Harness, dict[str, str], list[str]]:
    """Return a broker, its messages, and the ids to retry. All messages are leased."""
    broker = cluster.broker(plan)
    ids = await broker.produce(*PAYLOADS)
    assert len(await broker.receive(ack_timeout_ms=3_600_000)) == len(PAYLOADS)
    return broker, dict(zip(ids, PAYLOADS, strict=True)), [ids[index] for index in ORDER]


async def retry(broker: Harness, ids: list[str]) -> Any:
    return await broker.post(f"{TOPIC}/subscriptions/s/retry", {"message_ids": ids})


async def until_dead_or_done(plan: Plan, *tasks: "asyncio.Task[Any]") -> None:
    death = asyncio.create_task(plan.died.wait())
    await asyncio.wait([death, asyncio.gather(*tasks)], return_when=asyncio.FIRST_COMPLETED)
    death.cancel()


async def test_a_retry_has_fewer_steps_than_are_tested(cluster):
    plan = Plan(0, die_at=None, fault_rate=0)
    broker, originals, ids = await begin(cluster, plan)
    before = plan.steps
    answer = await retry(broker, ids)
    assert [moved["message_id"] for moved in answer.json()["moved"]] == ids
    assert 5 < plan.steps - before < STEPS_MAX
    assert await cluster.check(broker, originals) == len(ORDER)
    await broker.close()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("step", range(1, STEPS_MAX))
async def test_a_broker_that_stops_at_any_step_leaves_each_message_in_one_place(step, seed, cluster):
    plan = Plan(seed, die_at=None, fault_rate=0)
    broker, originals, ids = await begin(cluster, plan)
    plan._die_at = plan.steps + step
    task = asyncio.create_task(retry(broker, ids))
    await until_dead_or_done(plan, task)
    answered = task.done() and not task.cancelled()
    await broker.die()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    following = cluster.broker()
    await following.client.put(f"{RETRY}/subscriptions/s", json={})
    copies = await cluster.check(following, originals)
    if answered:
        assert copies == len(ORDER)
    cursor = (await following.broker.topic(TopicName.parse("t"))).ledger.cursors["s"]
    assert not cursor.blobs, "the intent is removed once it is settled"
    await following.close()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("step", range(1, STEPS_MAX))
async def test_a_broker_that_stops_at_any_step_dead_letters_each_message_once(step, seed, cluster):
    plan = Plan(seed, die_at=None, fault_rate=0)
    broker, originals, _ = await begin(cluster, plan)
    dead = [one for one, text in originals.items() if text in "bd"]
    await broker.post(f"{TOPIC}/subscriptions/s/nack", {"message_ids": dead})
    plan._die_at = plan.steps + step
    task = asyncio.create_task(broker.receive_raw("c2", dead_letter={"max_redeliver": 0}))
    await until_dead_or_done(plan, task)
    await broker.die()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    following = cluster.broker()
    await following.client.put(f"{DLQ}/subscriptions/dead-letters", json={})
    here = await cluster.left(following, TOPIC)
    letters = await cluster.left(following, DLQ, sub="dead-letters")
    assert sorted(message["payload"] for message in [*here, *letters]) == PAYLOADS
    assert [message["payload"] for message in letters] in ([], ["b"], ["b", "d"])
    await following.close()


@pytest.mark.parametrize("keepers", [["dead-letters"], ["dead-letters", "other"]])
@pytest.mark.parametrize("step", range(1, STEPS_MAX))
async def test_a_broker_that_stops_at_any_step_moves_each_dead_letter_back_once_for_each_keeper(step, keepers, cluster):
    plan = Plan(step, die_at=None, fault_rate=0)
    broker, _, ids = await begin(cluster, plan)
    for keeper in keepers:
        await broker.client.put(f"{DLQ}/subscriptions/{keeper}", json={"initial": "earliest"})
    body = {"message_ids": ids, "max_redeliver": 0}
    assert len((await broker.post(f"{TOPIC}/subscriptions/s/retry", body)).json()["moved"]) == len(ORDER)
    plan._die_at = plan.steps + step
    path = f"{TOPIC}/subscriptions/s/dead-letters/redrive"
    tasks = [asyncio.create_task(broker.post(path, {"initial_subscription": keeper})) for keeper in keepers]
    await until_dead_or_done(plan, *tasks)
    await broker.die()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    following = cluster.broker()
    await following.client.put(f"{RETRY}/subscriptions/s", json={})
    left = [await cluster.left(following, DLQ, sub=keeper) for keeper in keepers]
    copies = await cluster.left(following, RETRY)
    for keeper, letters in zip(keepers, left, strict=True):
        of_keeper = [one for one in copies if one["properties"]["REDRIVEN_FROM"].endswith(f"/{keeper}")]
        together = sorted(message["payload"] for message in [*letters, *of_keeper])
        assert together == sorted(PAYLOADS[index] for index in ORDER)
    assert {message["properties"]["REAL_SUBSCRIPTION"] for message in copies} <= {"s"}
    await following.close()


@pytest.mark.parametrize("seed", range(150))
async def test_calls_that_fail_leave_each_message_in_one_place(seed, cluster):
    plan = Plan(seed, die_at=None, fault_rate=0)
    broker, originals, ids = await begin(cluster, plan)
    plan._fault_rate = 0.15
    answer = await retry(broker, ids)
    assert answer.status_code in (200, 409, 503, 504), answer.text
    plan._fault_rate = 0.0
    cluster.clock.advance(400)  # delays of refused messages, and the leases of the others
    await asyncio.sleep(60)  # what has an unknown outcome is settled in the background
    await broker.client.put(f"{RETRY}/subscriptions/s", json={})
    copies = await cluster.check(broker, originals)
    if answer.status_code == 200 and not answer.json()["failed"]:
        assert copies == len(ORDER)
    await broker.close()
