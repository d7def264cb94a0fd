"""Subscriptions over HTTP: what happens when the stored state of one is lost."""

import pytest
from bindery_core.ids import LedgerId
from broker_harness import TOPIC, Harness, ids, payloads, problem

SUBSCRIPTION = f"{TOPIC}/subscriptions/s"


@pytest.fixture
async def damaged(broker, tree, ledgers, clock):
    """A broker whose topic has four messages and a subscription that was sought back; its cursor ledger is missing."""
    await broker.produce("a", "b", "c", "d")
    messages = await broker.receive()
    assert (await broker.ack(ids(messages))).status_code == 200
    sought = await broker.post(f"{SUBSCRIPTION}/seek", {"message_id": ids(messages)[1]})
    assert sought.status_code == 200
    (topic,) = broker.broker.topics
    cursor_ledger_id = topic.ledger.cursors["s"].store.ledger_id
    await broker.die()
    del ledgers.ledgers[LedgerId(cursor_ledger_id)]
    successor = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://two")
    yield successor
    await successor.close()


async def test_every_operation_on_a_damaged_subscription_says_that_it_is_damaged(damaged):
    for answer in (
        await damaged.receive_raw(),
        await damaged.ack(["0:0:-1:-1"]),
        await damaged.post(f"{SUBSCRIPTION}/seek", {"timestamp": 0}),
        await damaged.client.get(f"{SUBSCRIPTION}/explain"),
        await damaged.client.put(SUBSCRIPTION, json={}),
    ):
        body = problem(answer, status=500, code="corrupt")
        assert "the cursor ledger is missing" in body["detail"]
        assert "reset or delete the subscription" in body["detail"]
        assert body["facts"]["cursor"] == "s"
    listed = (await damaged.client.get(f"{TOPIC}/subscriptions")).json()
    assert listed["subscriptions"] == []
    assert list(listed["damaged"]) == ["s"]
    assert payloads(await damaged.receive(sub="other")) == ["a", "b", "c", "d"]
    assert len(await damaged.produce("e")) == 1


@pytest.mark.parametrize(("initial", "rest"), [("earliest", ["a", "b", "c", "d"]), ("latest", [])])
async def test_a_damaged_subscription_works_again_after_a_reset(damaged, initial, rest):
    answer = await damaged.post(f"{SUBSCRIPTION}/reset", {"initial": initial})
    assert answer.status_code == 200, answer.text
    messages = await damaged.receive()
    assert payloads(messages) == rest
    if rest:
        assert answer.json()["next"] == ids(messages)[0]
    assert "damaged" not in (await damaged.client.get(f"{TOPIC}/subscriptions")).json()
    await damaged.produce("e")
    assert payloads(await damaged.receive("c1")) == ["e"]


async def test_a_damaged_subscription_can_be_deleted(damaged):
    assert (await damaged.client.delete(SUBSCRIPTION)).status_code == 200
    assert payloads(await damaged.receive()) == ["a", "b", "c", "d"]


async def test_only_a_damaged_subscription_can_be_reset(broker):
    await broker.produce("a")
    await broker.receive()
    answer = await broker.post(f"{SUBSCRIPTION}/reset", {"initial": "latest"})
    assert "use seek" in problem(answer, status=409, code="conflict")["detail"]
    answer = await broker.post(f"{TOPIC}/subscriptions/other/reset", {"initial": "latest"})
    problem(answer, status=404, code="no_such_subscription")
    problem(await broker.post(f"{SUBSCRIPTION}/reset", {}), status=400, code="bad_request")
