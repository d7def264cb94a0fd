"""Create, explain and delete subscriptions over HTTP."""

import asyncio

from broker_harness import TOPIC, Harness, problem, settle

SUB = f"{TOPIC}/subscriptions/s"


async def test_a_subscription_is_created_without_a_consumer(broker):
    answer = await broker.client.put(SUB, json={"initial": "latest", "subscription_properties": {"team": "x"}})
    assert (answer.status_code, answer.json()["created"]) == (201, True)
    assert (await broker.client.put(SUB, json={})).status_code == 200
    (listed,) = (await broker.client.get(f"{TOPIC}/subscriptions")).json()["subscriptions"]
    assert (listed["properties"], listed["type"]) == ({"team": "x"}, None)


async def test_explain_lists_consumers_with_their_leases_and_what_blocks_delivery(tree, ledgers, clock):
    harness = Harness(
        tree=tree, ledgers=ledgers, clock=clock, url="http://one", unacked_max=2, unacked_per_consumer_max=2
    )
    await harness.produce("a", "b", "c")
    await harness.receive("c1")
    clock.advance(3)
    told = (await harness.client.get(f"{SUB}/explain")).json()
    (consumer,) = told["subscription"]["consumers"]
    assert (consumer["consumer"], consumer["unacked"]) == ("c1", 2)
    assert (consumer["oldest_lease_age_ms"], consumer["next_timeout_in_ms"]) == (3_000, 27_000)
    assert told["states"] == {"leased": 2}
    assert any("the limit is 2" in reason for reason in told["blocked_by"])
    assert "blocked" in told["summary"]
    clock.advance(100)
    told = (await harness.client.get(f"{SUB}/explain")).json()
    assert told["blocked_by"][0] == "no consumer is connected"
    await harness.close()


async def test_a_subscription_with_consumers_is_deleted_only_by_force(broker):
    await broker.receive()
    problem(await broker.client.delete(SUB), status=409, code="conflict")
    assert (await broker.client.delete(f"{SUB}?force=true")).json() == {"deleted": "s"}
    problem(await broker.client.delete(SUB), status=404, code="no_such_subscription")


async def test_waiting_calls_fail_when_the_subscription_is_deleted(broker):
    await broker.receive()
    task = asyncio.create_task(broker.receive_raw(wait_ms=30_000))
    await settle()
    await broker.client.delete(f"{SUB}?force=true")
    async with asyncio.timeout(30):
        problem(await task, status=404, code="no_such_subscription")
