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


async def test_subscriptions_are_listed_in_pages(broker):
    await broker.produce("a")
    for name in "abcde":
        await broker.client.put(f"{TOPIC}/subscriptions/{name}", json={})
    found, after = [], {}
    for _ in range(3):
        answer = (await broker.client.get(f"{TOPIC}/subscriptions", params={"max": 2, **after})).json()
        found.append([row["subscription"] for row in answer["subscriptions"]])
        after = {"after": answer.get("next")}
    assert (found, after) == ([["a", "b"], ["c", "d"], ["e"]], {"after": None})
    answer = await broker.client.get(f"{TOPIC}/subscriptions?max=0")
    assert answer.status_code == 400


async def test_a_list_of_large_subscriptions_ends_at_a_limit(broker):
    await broker.produce("a")
    properties = {str(number): "x" * 60_000 for number in range(15)}
    for name in "abc":
        answer = await broker.client.put(f"{TOPIC}/subscriptions/{name}", json={"subscription_properties": properties})
        assert answer.status_code == 201
    answer = (await broker.client.get(f"{TOPIC}/subscriptions")).json()
    assert ([row["subscription"] for row in answer["subscriptions"]], answer["next"]) == (["a", "b"], "b")
    answer = (await broker.client.get(f"{TOPIC}/subscriptions?after=b")).json()
    assert ([row["subscription"] for row in answer["subscriptions"]], "next" in answer) == (["c"], False)
