"""Pulsar's admin calls on topics and subscriptions, on their owner and on another broker."""

import json

import pytest
from broker_harness import TOPIC as V1
from broker_harness import settle

P = "/admin/v2/persistent/public/default/t"
FULL = "persistent://public/default/t"
JSON = {"content-type": "application/json"}


async def post(broker, path, body=""):
    return await broker.client.post(path, content=body, headers=JSON)


async def put(broker, path, body=""):
    return await broker.client.put(path, content=body, headers=JSON)


def refused(answer, status, reason):
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"reason": reason}


async def test_a_topic_is_created_once_listed_and_deleted(broker):
    assert (await put(broker, P)).status_code == 204
    refused(await put(broker, P), 409, "This topic already exists")
    assert (await broker.client.get("/admin/v2/persistent/public/default")).json() == [FULL]
    assert (await broker.client.get("/admin/v2/non-persistent/public/default")).json() == []
    assert (await broker.client.delete(P)).status_code == 204
    refused(await broker.client.delete(P), 404, f"Topic {FULL} not found")
    assert (await broker.client.get("/admin/v2/persistent/public/default")).json() == []


async def test_a_topic_with_consumers_is_deleted_only_by_force(broker):
    await put(broker, P)
    await put(broker, f"{P}/subscription/s")
    await broker.receive("c")
    refused(await broker.client.delete(P), 412, "Topic has active producers/subscriptions")
    assert (await broker.client.delete(f"{P}?force=true")).status_code == 204


@pytest.mark.parametrize("path", ["stats", "internalStats", "internal-info", "subscriptions", "lastMessageId"])
async def test_a_missing_topic_is_named_as_pulsar_does(broker, path):
    refused(await broker.client.get(f"{P}/{path}"), 404, f"Topic {FULL} not found")


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "skip_all"), ("POST", "skip/1"), ("POST", "expireMessages/1"), ("POST", "resetcursor/0"), ("DELETE", "")],
)
async def test_a_missing_subscription_is_named_as_pulsar_does(broker, method, path):
    await put(broker, P)
    target = f"{P}/subscription/s%2Fx/{path}".rstrip("/")
    answer = await broker.client.request(method, target, headers=JSON)
    refused(answer, 404, f"Subscription s/x not found for topic {FULL}")


async def test_names_are_form_encoded(broker):
    await put(broker, "/admin/v2/persistent/public/default/a+b%2Bc")
    assert (await broker.client.get("/admin/v2/persistent/public/default")).json() == [
        "persistent://public/default/a b+c"
    ]


async def test_a_wrong_name_is_refused_with_412(broker):
    answer = await put(broker, "/admin/v2/persistent/pub%20lic/default/t")
    assert answer.status_code == 412
    assert answer.json()["reason"].startswith("not a tenant name")


async def test_statistics_have_pulsars_fields(broker):
    await broker.produce("one", "two")
    await put(broker, f"{P}/subscription/s", '"earliest"')
    await broker.receive("c", max=1)
    stats = (await broker.client.get(f"{P}/stats")).json()
    assert (stats["msgInCounter"], stats["msgOutCounter"], stats["ownerBroker"]) == (2, 1, "one")
    assert stats["storageSize"] == stats["bytesInCounter"] > 0
    subscription = stats["subscriptions"]["s"]
    assert (subscription["type"], subscription["msgBacklog"], subscription["unackedMessages"]) == ("Shared", 2, 1)
    (consumer,) = subscription["consumers"]
    assert (consumer["consumerName"], consumer["unackedMessages"]) == ("c", 1)
    assert consumer["connectedSince"] == "2023-11-14T22:13:20.000Z"


async def test_ledgers_and_cursors_are_shown(broker):
    (first, last) = await broker.produce("one", "two")
    await put(broker, f"{P}/subscription/s", '"earliest"')
    stats = (await broker.client.get(f"{P}/internalStats")).json()
    ledger, entry = last.split(":")[:2]
    assert stats["lastConfirmedEntry"] == f"{ledger}:{entry}"
    assert [one["ledgerId"] for one in stats["ledgers"]] == [int(ledger)]
    assert stats["cursors"]["s"]["readPosition"] == ":".join(first.split(":")[:2])
    info = (await broker.client.get(f"{P}/internal-info")).json()
    assert info["ledgers"] == [{"ledgerId": int(ledger), "isOffloaded": False}]
    assert info["cursors"]["s"]["markDelete"] == {"ledgerId": int(ledger), "entryId": -1}
    assert (await broker.client.get(f"{P}/lastMessageId")).json()["entryId"] == int(entry)


async def test_a_subscription_is_created_at_each_kind_of_place(broker):
    ids = await broker.produce("a", "b", "c")
    ledger, entry = map(int, ids[1].split(":")[:2])
    for name, place in (
        ("first", '"earliest"'),
        ("last", '"latest"'),
        ("default", ""),
        ("third", json.dumps({"ledgerId": ledger, "entryId": entry})),
        ("newest", json.dumps({"ledgerId": 2**63 - 1, "entryId": 2**63 - 1})),
    ):
        assert (await put(broker, f"{P}/subscription/{name}", place)).status_code == 204
    refused(await put(broker, f"{P}/subscription/last"), 409, "Subscription already exists for topic")
    stats = (await broker.client.get(f"{P}/stats")).json()["subscriptions"]
    backlog = {name: one["msgBacklog"] for name, one in stats.items()}
    assert backlog == {"first": 3, "last": 0, "default": 0, "third": 2, "newest": 0}
    assert (await broker.client.get(f"{P}/subscriptions")).json() == sorted(backlog)


async def test_creating_a_subscription_creates_its_topic(broker):
    assert (await put(broker, f"{P}/subscription/s")).status_code == 204
    assert (await put(broker, f"{P}/subscription/a%252Fb+c")).status_code == 204
    assert (await broker.client.get(f"{P}/subscriptions")).json() == ["a/b c", "s"]


async def backlog_of(broker):
    return (await broker.client.get(f"{P}/stats")).json()["subscriptions"]["s"]["msgBacklog"]


async def test_messages_are_skipped_expired_and_sought_back(broker):
    await put(broker, f"{P}/subscription/s")
    ids = await broker.produce("a", "b", "c")
    broker.clock.advance(60)
    ids += await broker.produce("d", "e")
    assert (await post(broker, f"{P}/subscription/s/skip/1")).status_code == 204
    assert await backlog_of(broker) == 4
    assert (await post(broker, f"{P}/subscription/s/expireMessages/30")).status_code == 204
    assert await backlog_of(broker) == 2
    assert (await post(broker, f"{P}/subscription/s/skip_all")).status_code == 204
    assert await backlog_of(broker) == 0
    assert (await post(broker, f"{P}/subscription/s/resetcursor/{broker.clock.wall_ms - 30_000}")).status_code == 204
    assert await backlog_of(broker) == 2
    ledger, entry = map(int, ids[1].split(":")[:2])
    place = {"ledgerId": ledger, "entryId": entry, "partitionIndex": -1}
    assert (await post(broker, f"{P}/subscription/s/resetcursor", json.dumps(place))).status_code == 204
    assert await backlog_of(broker) == 4
    place["isExcluded"] = True
    assert (await post(broker, f"{P}/subscription/s/resetcursor", json.dumps(place))).status_code == 204
    assert await backlog_of(broker) == 3
    assert (await post(broker, f"{P}/all_subscription/expireMessages/0")).status_code == 204


async def test_a_subscription_with_consumers_is_deleted_only_by_force(broker):
    await put(broker, f"{P}/subscription/s")
    await broker.receive("c")
    answer = await broker.client.delete(f"{P}/subscription/s")
    refused(answer, 412, "Subscription has active connected consumers")
    assert (await broker.client.delete(f"{P}/subscription/s?force=true")).status_code == 204


async def test_peek_returns_stored_entries_without_delivering_them(broker):
    await put(broker, f"{P}/subscription/s")
    body = '{"payload":"a","key":"k","properties":{"p":"\u00e9"}}'
    headers = {"content-type": "application/x-ndjson"}
    (first,) = (await broker.client.post(f"{V1}/messages", content=body, headers=headers)).json()["message_ids"]
    await broker.produce_batch("b", "c")
    answer = await broker.client.get(f"{P}/subscription/s/position/1")
    assert answer.content == b"a"
    assert answer.headers["x-pulsar-message-id"] == ":".join(first.split(":")[:2])
    assert json.loads(answer.headers["x-pulsar-property"]) == {"p": "\u00e9"}
    assert answer.headers["x-pulsar-partition-key"] == "k"
    assert answer.headers["x-pulsar-publish-time"] == "2023-11-14T22:13:20.000Z"
    batch = await broker.client.get(f"{P}/subscription/s/position/2")
    assert batch.headers["x-pulsar-num-batch-message"] == "2"
    assert len(batch.content) == int(batch.headers["x-pulsar-batch-size"])
    assert batch.content.endswith(b"c")
    refused(await broker.client.get(f"{P}/subscription/s/position/3"), 404, "Message not found")
    assert await backlog_of(broker) == 2


async def test_entries_are_read_by_id_and_by_place(broker):
    ids = await broker.produce("a", "b")
    ledger, entry = ids[1].split(":")[:2]
    assert (await broker.client.get(f"{P}/ledger/{ledger}/entry/{entry}")).content == b"b"
    refused(await broker.client.get(f"{P}/ledger/{ledger}/entry/9"), 404, "Message id not found")
    examine = f"{P}/examinemessage?messagePosition="
    assert (await broker.client.get(f"{examine}1")).content == b"b"
    assert (await broker.client.get(f"{examine}1&initialPosition=earliest")).content == b"a"
    assert (await broker.client.get(f"{examine}99")).content == b"a"
    found = (await broker.client.get(f"{P}/messageid/0")).json()
    assert found == {"ledgerId": int(ledger), "entryId": 0, "partitionIndex": -1}
    size = (await put(broker, f"{P}/backlogSize", json.dumps({"ledgerId": int(ledger), "entryId": 0}))).json()
    assert 0 < size < (await broker.client.get(f"{P}/stats")).json()["storageSize"]


async def test_unload_trim_and_truncate(broker):
    await put(broker, f"{P}/subscription/s")
    await broker.produce("a")
    topic = next(iter(broker.broker.topics))
    assert (await put(broker, f"{P}/unload")).status_code == 204
    assert not topic.is_open
    assert await backlog_of(broker) == 1
    assert (await post(broker, f"{P}/trim")).status_code == 204
    assert await backlog_of(broker) == 1
    assert (await broker.client.delete(f"{P}/truncate")).status_code == 204
    assert await backlog_of(broker) == 0


async def test_a_post_without_the_type_of_json_is_refused(broker):
    await put(broker, f"{P}/subscription/s")
    answer = await broker.client.post(f"{P}/subscription/s/skip_all")
    assert answer.status_code == 415
    assert set(answer.json()) == {"reason"}


@pytest.mark.parametrize(
    "body", ["{", "[]", '"middle"', '{"ledgerId":"x"}', '{"ledgerId":1,"entryId":1,"batchIndex":"x"}']
)
async def test_a_wrong_body_is_refused(broker, body):
    answer = await put(broker, f"{P}/subscription/s", body)
    assert answer.status_code == 400
    assert set(answer.json()) == {"reason"}


async def test_a_lookup_for_the_binary_protocol_is_refused_with_the_owner(broker):
    await put(broker, P)
    found = await broker.client.get("/lookup/v2/topic/persistent/public/default/t")
    assert found.status_code == 501
    assert "a broker of Bindery at http://one serves the topic over HTTP; it has no port" in found.json()["reason"]
    bundle = await broker.client.get("/lookup/v2/topic/persistent/public/default/t/bundle")
    assert bundle.text == "0x80000000_0xc0000000"


async def test_a_topic_is_compacted(broker):
    refused(await put(broker, f"{P}/compaction"), 404, f"Topic {FULL} not found")
    refused(await broker.client.get(f"{P}/compaction"), 404, f"Topic {FULL} not found")
    await put(broker, P)
    assert (await broker.client.get(f"{P}/compaction")).json() == {"status": "NOT_RUN", "lastError": ""}
    for payload in ("a", "b"):
        await broker.client.post(f"{V1}/messages", json={"payload": payload, "key": "k"})
    assert (await put(broker, f"{P}/compaction")).status_code == 204
    assert (await put(broker, f"{P}/compaction")).status_code == 409
    for _ in range(100):
        found = (await broker.client.get(f"{P}/compaction")).json()
        if found["status"] != "RUNNING":
            break
        await settle()
    assert found == {"status": "SUCCESS", "lastError": ""}
    left = await broker.client.get(f"{V1}/messages?compacted=true&start=earliest")
    assert [message["payload"] for message in left.json()["messages"]] == ["b"]


async def test_the_partitions_of_a_topic_are_compacted(broker):
    await put(broker, f"{P}/partitions", "2")
    assert (await put(broker, f"{P}/compaction")).status_code == 204
    refused(await broker.client.get(f"{P}/compaction"), 404, f"Topic {FULL} not found")
    for index in range(2):
        found = (await broker.client.get(f"{P}-partition-{index}/compaction")).json()
        assert found["status"] in ("RUNNING", "SUCCESS")


async def test_producers_that_are_known_by_name_are_shown(broker):
    await broker.produce("a")
    assert (await broker.client.get(f"{P}/stats")).json()["publishers"] == []
    for name in ("p", "q"):
        await broker.client.post(f"{V1}/messages?producer={name}", content=b"b")
    found = (await broker.client.get(f"{P}/stats")).json()["publishers"]
    assert found == [{"accessMode": "Shared", "producerName": name} for name in ("p", "q")]
    await broker.client.put(f"{V1}/producers/q/access", json={"access_mode": "exclusive"})
    found = (await broker.client.get(f"{P}/stats")).json()["publishers"]
    assert found == [{"accessMode": "Exclusive", "producerName": "q"}]
    await broker.client.delete(f"{V1}/producers/q/access")
    broker.clock.advance(3_600)
    assert (await broker.client.get(f"{P}/stats")).json()["publishers"] == []
