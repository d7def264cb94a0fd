"""Terminated topics over Pulsar's admin API and `/v1`."""

import pytest
from broker_harness import TOPIC as V1
from broker_harness import problem

P = "/admin/v2/persistent/public/default/t"
FULL = "persistent://public/default/t"
JSON = {"content-type": "application/json"}


async def terminate(broker, path=P, rest="terminate"):
    return await broker.client.post(f"{path}/{rest}", headers=JSON)


def refused(answer, status, reason):
    assert (answer.status_code, answer.json()) == (status, {"reason": reason})


async def test_a_terminated_topic_refuses_messages_and_says_where_it_ends(broker):
    ids = await broker.produce("a", "b")
    ledger, entry = map(int, ids[-1].split(":")[:2])
    last = {"ledgerId": ledger, "entryId": entry, "partitionIndex": -1}
    assert (await terminate(broker)).json() == last
    assert (await terminate(broker)).json() == last
    found = problem(await broker.client.post(f"{V1}/messages", content=b"c"), status=409, code="topic_terminated")
    assert "use another topic" in found["detail"]
    info = (await broker.client.get(f"{P}/internal-info")).json()
    assert info["terminatedPosition"] == {"ledgerId": ledger, "entryId": entry}
    assert (await broker.client.get(V1)).json()["terminated"] is True
    stats = (await broker.client.get(f"{P}/internalStats")).json()
    assert (stats["state"], stats["lastConfirmedEntry"]) == ("Terminated", f"{ledger}:{entry}")


async def test_readers_see_the_end_and_do_not_wait_for_more(broker):
    await broker.produce("a")
    await terminate(broker)
    answer = (await broker.client.get(f"{V1}/messages?start=earliest")).json()
    assert "end_of_topic" not in answer
    answer = (await broker.client.get(f"{V1}/messages?start={answer['next']}&wait_ms=30000")).json()
    assert (answer["messages"], answer["end_of_topic"]) == ([], True)


async def test_a_subscription_sees_the_end_once_everything_is_acknowledged(broker):
    await broker.client.put(f"{V1}/subscriptions/s", json={"initial": "earliest"})
    await broker.produce("a")
    await terminate(broker)
    (message,) = await broker.receive("c")
    answer = (await broker.receive_raw("c", wait_ms=0)).json()
    assert answer["messages"] == []
    assert "end_of_topic" not in answer
    await broker.post(f"{V1}/subscriptions/s/ack", {"message_ids": [message["message_id"]]})
    assert (await broker.receive_raw("c", wait_ms=0)).json()["end_of_topic"] is True


async def test_a_repeated_request_gets_the_ids_of_what_it_stored_before(broker):
    headers = {"idempotency-key": "k"}
    (first,) = await broker.produce("a", headers=headers)
    await terminate(broker)
    assert await broker.produce("a", headers=headers) == [first]
    again = await broker.client.post(f"{V1}/messages?producer=p&sequence_id=1", content=b"b")
    problem(again, status=409, code="topic_terminated")


async def test_it_is_terminated_at_its_owner_and_stays_so_after_a_move(pair):
    one, two = pair
    await one.produce("a")
    assert (await terminate(two)).json()["entryId"] == 0
    assert (await two.client.put(f"{P}/unload")).status_code == 204
    await one.client.put("/admin/v2/namespaces/public/default/unload")
    problem(await two.client.post(f"{V1}/messages", content=b"b"), status=409, code="topic_terminated")
    found = (await two.client.get(f"{V1}/messages?start=earliest")).json()
    assert [message["payload"] for message in found["messages"]] == ["a"]


async def test_no_producer_takes_a_terminated_topic(broker):
    await broker.produce("a")
    await terminate(broker)
    answer = await broker.client.put(f"{V1}/producers/p/access", json={"access_mode": "exclusive"})
    problem(answer, status=409, code="topic_terminated")


async def test_a_terminated_topic_is_compacted_truncated_and_deleted(broker):
    await broker.client.put(f"{V1}/subscriptions/s", json={"initial": "earliest"})
    await broker.produce("a")
    await terminate(broker)
    assert (await broker.client.put(f"{P}/compaction")).status_code == 204
    assert (await broker.client.delete(f"{P}/truncate")).status_code == 204
    assert (await broker.client.get(f"{P}/stats")).json()["subscriptions"]["s"]["msgBacklog"] == 0
    await broker.broker.topics.maintain()
    assert (await broker.client.delete(f"{P}?force=true")).status_code == 204
    assert (await broker.client.put(P)).status_code == 204
    await broker.produce("b")


async def test_each_partition_is_terminated(broker):
    await broker.client.put(f"{P}/partitions", content="2", headers=JSON)
    refused(await terminate(broker), 405, "Termination of a partitioned topic is not allowed")
    found = (await terminate(broker, rest="terminate/partitions")).json()
    assert set(found) == {"0", "1"}
    assert {one["entryId"] for one in found.values()} == {-1}
    problem(await broker.client.post(f"{V1}/messages", content=b"a"), status=409, code="topic_terminated")
    again = (await terminate(broker, rest="terminate/partitions")).json()
    assert again == found


@pytest.mark.parametrize("exists", [False, True])
async def test_a_topic_without_partitions_is_not_terminated_by_partition(broker, exists):
    if exists:
        await broker.client.put(P)
    answer = await terminate(broker, rest="terminate/partitions")
    reason = "Termination of a non-partitioned topic is not allowed using partitioned-terminate"
    refused(answer, 405, f"{reason}, please use terminate commands")


async def test_a_missing_topic_is_not_created(broker):
    refused(await terminate(broker), 404, f"Topic {FULL} not found")
    assert (await broker.client.get("/admin/v2/persistent/public/default")).json() == []


async def test_a_page_of_another_site_cannot_terminate(broker):
    await broker.client.put(P)
    for rest in ("terminate", "terminate/partitions"):
        assert (await broker.client.post(f"{P}/{rest}", content=b"{}")).status_code == 415
    await broker.produce("a")
