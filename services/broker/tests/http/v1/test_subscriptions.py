"""Subscriptions over HTTP whose stored state is lost."""

import asyncio

import pytest
from bindery_core.errors import NoSuchEntry
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


async def test_every_operation_on_a_damaged_subscription_reports_the_damage(damaged):
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


async def delete_during(at, attaching) -> None:
    """Delete the subscription while `attaching`, its creation or reset, waits for the metadata store."""
    multi = at.store.multi

    async def slow(*arguments, **named):
        await asyncio.sleep(0.05)
        return await multi(*arguments, **named)

    at.store.multi = slow
    begun = asyncio.create_task(attaching)
    await asyncio.sleep(0.01)
    deleted = await at.client.delete(SUBSCRIPTION)
    assert (await begun).status_code in (200, 201)
    assert deleted.status_code == 200, deleted.text
    (topic,) = at.broker.topics
    assert dict(topic.subscriptions) == {}, "attached to a cursor that was deleted"
    assert dict(topic.ledger.cursors) == {}


async def test_a_deletion_waits_for_a_creation_in_progress(broker):
    await broker.produce("a")
    await delete_during(broker, broker.client.put(SUBSCRIPTION, json={"initial": "earliest"}))


async def test_a_deletion_waits_for_a_reset_in_progress(damaged):
    await damaged.client.get(f"{TOPIC}/subscriptions")
    await delete_during(damaged, damaged.post(f"{SUBSCRIPTION}/reset", {"initial": "earliest"}))


async def test_a_cursor_ledger_without_its_last_record_damages_only_its_subscription(broker, tree, ledgers, clock):
    await broker.produce("a")
    assert (await broker.ack(ids(await broker.receive()))).status_code == 200
    (topic,) = broker.broker.topics
    cursor_ledger_id = LedgerId(topic.ledger.cursors["s"].store.ledger_id)
    await broker.die()
    ledgers.fail_next("read", NoSuchEntry("denied by all replicas", ledger_id=cursor_ledger_id))
    successor = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://two")
    body = problem(await successor.receive_raw(), status=500, code="corrupt")
    assert "lost its last record" in body["detail"]
    assert len(await successor.produce("b")) == 1
    assert b"bindery_broker_damaged_subscriptions 1\n" in await successor.topic_page()
    await successor.close()


@pytest.mark.parametrize("partitions", [0, 2])
async def test_a_subscription_is_created_without_a_body(pair: tuple[Harness, Harness], partitions: int) -> None:
    if partitions:
        answer = await pair[0].client.put(f"{TOPIC}/partitions", json={"partitions": partitions})
        assert answer.status_code == 201
    for broker, status in zip(pair, (201, 200), strict=True):
        answer = await broker.client.put(f"{TOPIC}/subscriptions/bare")
        assert answer.status_code == status, answer.text
    await pair[0].produce("x")
    assert payloads(await pair[1].receive(sub="bare")) == ["x"]


async def test_only_a_body_that_is_left_out_needs_no_content_type(broker: Harness) -> None:
    for options in ({"content": b"{}"}, {"headers": {"content-type": "text/plain"}}):
        answer = await broker.client.put(f"{TOPIC}/subscriptions/bare", **options)
        assert answer.status_code == 415, options
