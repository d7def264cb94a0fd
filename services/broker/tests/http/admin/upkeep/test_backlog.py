"""The analysis of the backlog of a subscription."""

import json

import pytest
from bindery_broker.http.admin.upkeep import backlog
from broker_harness import TOPIC as V1

P = "/admin/v2/persistent/public/default/t"
FULL = "persistent://public/default/t"
CALL = f"{P}/subscription/s/analyzeBacklog"


async def counts(broker, body=""):
    answer = await broker.client.post(CALL, content=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["filterAcceptedEntries"] == found["entries"]
    assert found["filterAcceptedMessages"] == found["messages"]
    return found["entries"], found["messages"], found["aborted"]


@pytest.fixture
async def topic(broker):
    """A topic with five entries, of which one is a batch of three messages and one is acknowledged."""
    await broker.client.put(f"{V1}/subscriptions/s", json={"initial": "earliest"})
    ids = [*await broker.produce("a", "b"), (await broker.produce_batch("c", "d", "e"))[0]]
    await broker.broker.topics.loaded(next(iter(broker.broker.topics)).name).ledger.roll()
    ids += await broker.produce("f", "g")
    await broker.receive("c")
    await broker.post(f"{V1}/subscriptions/s/ack", {"message_ids": [ids[1]]})
    return ids


async def test_entries_and_messages_that_are_not_acknowledged_are_counted(broker, topic):
    assert await counts(broker) == (4, 6, False)


async def test_it_begins_where_the_body_says(broker, topic):
    ledger, entry = map(int, topic[2].split(":")[:2])
    assert await counts(broker, json.dumps({"ledgerId": ledger, "entryId": entry})) == (3, 5, False)
    ledger, entry = map(int, topic[4].split(":")[:2])
    assert await counts(broker, json.dumps({"ledgerId": ledger, "entryId": entry})) == (1, 1, False)


async def test_it_changes_nothing(broker, topic):
    before = (await broker.client.get(f"{P}/internalStats")).json()["cursors"]
    await counts(broker)
    assert (await broker.client.get(f"{P}/internalStats")).json()["cursors"] == before


async def test_nothing_is_counted_where_there_is_none(broker):
    await broker.client.put(f"{P}/subscription/s")
    assert await counts(broker) == (0, 0, False)


async def test_it_ends_early_and_says_so(broker, topic, monkeypatch):
    monkeypatch.setattr(backlog, "ENTRIES_MAX", 2)
    assert await counts(broker) == (2, 4, True)


async def test_it_waits_for_room_like_other_answers(broker, topic):
    others = broker.broker.topics.responses.charge("another client")
    assert others.take(least=2**40, most=2**40)
    answer = await broker.client.post(CALL)
    others.release()
    assert (answer.status_code, set(answer.json())) == (429, {"reason"})
    assert "retry-after" in answer.headers


async def test_a_missing_subscription_is_named(broker, topic):
    answer = await broker.client.post(f"{P}/subscription/none/analyzeBacklog")
    assert answer.json() == {"reason": f"Subscription none not found for topic {FULL}"}


@pytest.mark.parametrize("body", ["{", "[]", '{"ledgerId": 1}', '{"ledgerId": "a", "entryId": 0}'])
async def test_other_bodies_are_refused(broker, topic, body):
    answer = await broker.client.post(CALL, content=body)
    assert (answer.status_code, set(answer.json())) == (400, {"reason"})
    assert await counts(broker) == (4, 6, False)
