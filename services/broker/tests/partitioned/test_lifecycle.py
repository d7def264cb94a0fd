"""Create, enlarge and delete partitioned topics, with two brokers."""

import asyncio
import json

import httpx
import pytest
from bindery_broker.http.v1.partitioned import lifecycle
from bindery_broker.ownership.bundles import Bundle
from bindery_broker.partitioned.catalog import DELETIONS_ROOT
from bindery_core.errors import OutcomeUnknown
from bindery_pulsar.topic_name import TopicName
from broker_harness import TOPIC, Harness, ids, payloads, problem, settle

NAME = TopicName.parse("public/default/t")
ZNODE = "/admin/partitioned-topics/public/default/persistent/t"


def side(name: TopicName) -> int:
    """Return 0 or 1 in turn for consecutive bundles."""
    return Bundle.of(name).lower // 2**30 % 2


async def put(broker, partitions, *, topic=TOPIC):
    return await broker.client.put(f"{topic}/partitions", json={"partitions": partitions})


async def spread(one, two, *, partitions=8):
    """Create the topic so that both brokers own partitions of it."""
    for broker, number in ((one, 0), (two, 1)):
        wanted = [name for k in range(partitions) if side(name := NAME.with_partition(k)) == number]
        for name in wanted:
            assert await broker.broker.ownership.locate(Bundle.of(name)) is None
    answer = await put(one, partitions)
    assert answer.status_code == 201, answer.text
    assert len(one.broker.topics) > 0
    assert len(two.broker.topics) > 0
    assert len(one.broker.topics) + len(two.broker.topics) == partitions


async def test_a_partitioned_topic_is_created_with_all_its_partitions(pair):
    one, two = pair
    await spread(one, two)
    assert json.loads(one.znodes()[ZNODE][0]) == {"partitions": 8}
    assert (await two.client.get(f"{TOPIC}/partitions")).json() == {
        "topic": "public/default/t",
        "partitions": 8,
        "deleted": False,
    }
    assert (await put(two, 8)).json() == {"topic": "public/default/t", "partitions": 8, "created": False}
    assert (await two.client.put(TOPIC)).json() == {"topic": "public/default/t", "created": False}


async def test_the_list_has_the_partitions_and_the_numbers_of_partitions(pair):
    one, two = pair
    await put(one, 2)
    await one.produce("x", topic=f"{TOPIC}-other")
    assert (await two.client.get("/v1/topics?namespace=public/default")).json() == {
        "topics": ["public/default/t-other", "public/default/t-partition-0", "public/default/t-partition-1"],
        "partitioned": {"public/default/t": 2},
    }


@pytest.mark.parametrize("partitions", [0, 257, -1, "3", 2.5, None])
async def test_a_wrong_number_of_partitions_is_refused(pair, partitions):
    problem(await put(pair[0], partitions), status=400, code="bad_request")
    assert ZNODE not in pair[0].znodes()


async def test_a_request_that_a_web_page_can_send_creates_nothing(pair):
    answer = await pair[0].client.put(
        f"{TOPIC}/partitions", content=b'{"partitions":2}', headers={"content-type": "text/plain"}
    )
    problem(answer, status=415, code="unsupported_media_type")
    assert ZNODE not in pair[0].znodes()


async def test_partitions_are_added_and_never_removed(pair):
    one, two = pair
    await put(one, 2)
    await one.client.put(f"{TOPIC}/subscriptions/s", json={"initial": "latest", "tags": "a||b"})
    assert (await put(two, 5)).status_code == 200
    assert problem(await put(one, 4), status=409, code="conflict")["facts"]["partitions"] == 5
    assert (await one.client.get(f"{TOPIC}/partitions")).json()["partitions"] == 5
    for k in range(5):
        (found,) = (await one.client.get(f"{TOPIC}-partition-{k}/subscriptions")).json()["subscriptions"]
        assert (found["subscription"], found["tags"]) == ("s", "a||b")


async def test_members_of_the_record_that_are_not_ours_are_kept(pair):
    one, two = pair
    record = {"partitions": 2, "properties": {"a": "b"}, "later": [1]}
    await one.store.create(ZNODE, json.dumps(record).encode(), make_parents=True)
    assert (await put(two, 3)).json()["created"] is False
    assert json.loads(one.znodes()[ZNODE][0]) == {**record, "partitions": 3}


async def test_a_topic_that_is_not_partitioned_stays_so(pair):
    one, two = pair
    await one.produce("a")
    problem(await put(two, 2), status=409, code="conflict")
    assert ZNODE not in one.znodes()
    problem(await two.client.get(f"{TOPIC}/partitions"), status=404, code="no_such_topic")
    assert payloads(await two.receive()) == ["a"]


async def test_a_partition_cannot_be_partitioned(pair):
    problem(await put(pair[0], 2, topic=f"{TOPIC}-partition-0"), status=400, code="bad_request")


async def test_a_broker_that_does_not_know_of_the_topic_yet_creates_no_ordinary_one(pair):
    one, two = pair
    for broker in pair:
        problem(await broker.client.get(TOPIC), status=404, code="no_such_topic")  # now both remember that
    await put(two, 3)
    await one.produce("a", "b", "c")
    assert payloads(await one.receive()) != []
    assert "/managed-ledgers/public/default/persistent/t" not in one.znodes()


async def test_a_partition_beyond_the_last_is_not_created_by_use(pair):
    one, two = pair
    await put(one, 2)
    answer = await two.client.post(f"{TOPIC}-partition-2/messages", content=b"x")
    problem(answer, status=404, code="no_such_topic")
    problem(await one.receive_raw(topic=f"{TOPIC}-partition-9"), status=404, code="no_such_topic")


async def test_a_topic_is_deleted_with_its_partitions(pair):
    one, two = pair
    await spread(one, two)
    await one.client.put(f"{TOPIC}/subscriptions/s", json={})
    await one.produce("a")
    assert (await two.client.delete(TOPIC)).json() == {"deleted": "public/default/t"}
    assert not [
        path
        for path in one.znodes()
        if path.startswith(("/admin/partitioned-topics", "/managed-ledgers")) and "/t" in path
    ]
    problem(await one.client.get(TOPIC), status=404, code="no_such_topic")
    problem(await one.client.delete(f"{TOPIC}/partitions"), status=404, code="no_such_topic")


async def test_a_topic_with_consumers_is_deleted_by_force_only(pair):
    one, two = pair
    await spread(one, two)
    await one.receive()
    problem(await two.client.delete(f"{TOPIC}/partitions"), status=409, code="topic_in_use")
    assert json.loads(one.znodes()[ZNODE][0]) == {"partitions": 8}
    assert (await two.client.delete(f"{TOPIC}/partitions?force=true")).status_code == 200
    assert ZNODE not in one.znodes()


class Refusing(httpx.AsyncBaseTransport):
    """A broker that does not answer."""

    async def handle_async_request(self, request):
        raise httpx.ReadTimeout("made up")


async def test_a_deletion_that_was_interrupted_is_completed_by_a_repetition(pair):
    one, two = pair
    await spread(one, two)
    peer = one.peers["two"]
    one.peers["two"] = Refusing()
    problem(await one.client.delete(f"{TOPIC}/partitions?force=true"), status=504, code="outcome_unknown")
    assert json.loads(one.znodes()[ZNODE][0]) == {"partitions": 8, "deleted": True}
    assert len(one.broker.topics) == 0
    # Nothing can use, create or enlarge it meanwhile, at any broker.
    assert (await two.client.get(f"{TOPIC}/partitions")).json()["deleted"] is True
    problem(await put(two, 9), status=409, code="conflict")
    k = next(k for k in range(8) if side(NAME.with_partition(k)) == 0)
    problem(await one.client.put(f"{TOPIC}-partition-{k}"), status=409, code="conflict")
    problem(await one.client.post(f"{TOPIC}-partition-{k}/messages", content=b"x"), status=409, code="conflict")
    one.peers["two"] = peer
    assert (await one.client.delete(f"{TOPIC}/partitions")).status_code == 200
    assert ZNODE not in one.znodes()
    assert not [path for path in one.znodes() if "-partition-" in path]
    assert (await put(two, 2)).status_code == 201


async def test_a_deletion_goes_on_when_its_topic_is_asked_for(pair):
    one, two = pair
    await spread(one, two)
    peer = one.peers["two"]
    one.peers["two"] = Refusing()
    await one.client.delete(f"{TOPIC}/partitions?force=true")
    one.peers["two"] = peer
    problem(await two.client.post(f"{TOPIC}/messages", content=b"x"), status=409, code="conflict")
    await settle()
    await asyncio.gather(*two.broker.deletions._running.values())
    assert_deleted(one)


def assert_deleted(broker):
    znodes = broker.znodes()
    assert ZNODE not in znodes
    assert not [path for path in znodes if "-partition-" in path]
    assert not [path for path in znodes if path.startswith(f"{DELETIONS_ROOT}/")]


async def rounds(*brokers, count=1):
    """Run rounds of maintenance, each with the deletions that it goes on with."""
    for _ in range(count):
        for broker in brokers:
            await broker.broker.deletions.maintain()
            await asyncio.gather(*broker.broker.deletions._running.values())


async def interrupt_deletion(one, two):
    """Begin a deletion at `one` that deletes the partitions of `one` only."""
    peer = one.peers["two"]
    one.peers["two"] = Refusing()
    problem(await one.client.delete(f"{TOPIC}/partitions?force=true"), status=504, code="outcome_unknown")
    one.peers["two"] = peer
    assert [path for path in one.znodes() if "-partition-" in path]


async def test_a_deletion_goes_on_by_itself_after_its_broker_died(pair):
    one, two = pair
    await spread(one, two)
    await interrupt_deletion(one, two)
    await one.die()
    await settle()
    await rounds(two)
    assert ZNODE in two.znodes()  # seen for the first time: the request may be running
    await rounds(two)
    assert_deleted(two)
    assert (await put(two, 2)).status_code == 201
    await rounds(two, count=3)
    assert (await two.client.get(f"{TOPIC}/partitions")).json()["partitions"] == 2


async def test_one_broker_goes_on_with_a_deletion(pair):
    one, two = pair
    await spread(one, two)
    await interrupt_deletion(one, two)
    await rounds(one, two)
    owner, other = (one, two) if side(NAME.with_partition(0)) == 0 else (two, one)
    await other.broker.deletions.maintain()
    assert not other.broker.deletions._running
    await rounds(owner)
    assert_deleted(one)


async def test_a_deletion_waits_for_an_owner_that_does_not_answer(pair):
    one, two = pair
    await spread(one, two)
    await interrupt_deletion(one, two)
    owner = one if side(NAME.with_partition(0)) == 0 else two
    host = "two" if owner is one else "one"
    peer = owner.peers[host]
    owner.peers[host] = Refusing()
    if owner is two:  # a partition of `one` is missing; one that is there has an owner that does not answer
        await put_partition(one)
    await rounds(owner, count=3)
    assert ZNODE in one.znodes()
    owner.peers[host] = peer
    await rounds(owner)
    assert_deleted(one)


async def put_partition(broker):
    """Create a partition of the broker's own in the metadata, as if it were not deleted yet."""
    name = next(name for k in range(8) if side(name := NAME.with_partition(k)) == 0)
    await broker.store.create(f"/managed-ledgers/public/default/persistent/{name.encoded_local}")


async def test_a_deletion_never_touches_a_new_topic_of_the_name(pair):
    one, two = pair
    await spread(one, two)
    await interrupt_deletion(one, two)
    await rounds(one, two)  # both have seen it
    assert (await two.client.delete(f"{TOPIC}/partitions")).status_code == 200
    assert (await put(two, 8)).status_code == 201
    await one.produce("a")
    for broker in pair:
        broker.broker.deletions.go_on(NAME)
    await rounds(one, two, count=3)
    assert payloads(await two.receive()) == ["a"]
    assert (await one.client.get(f"{TOPIC}/partitions")).json()["deleted"] is False


async def test_a_deletion_without_its_topic_is_forgotten(pair):
    one, two = pair
    await put(one, 2)
    await one.broker.partitioned.mark_deleted(NAME)
    await one.store.delete(ZNODE, version=None)  # as the deletion of a namespace does
    await rounds(one, two, count=2)
    assert not [path for path in one.znodes() if path.startswith(f"{DELETIONS_ROOT}/")]


async def test_rounds_without_deletions_read_nothing_once_the_list_is_known(pair):
    one, _ = pair
    await put(one, 2)
    await one.client.delete(TOPIC)
    await rounds(one)
    reads = one.broker.partitioned._deletions.reads
    await rounds(one, count=5)
    assert one.broker.partitioned._deletions.reads == reads


async def test_the_maximum_number_of_partitions_is_a_setting(tree, ledgers, clock):
    broker = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://one", partitions_per_topic_max=3)
    facts = problem(await put(broker, 4), status=400, code="bad_request")["facts"]
    assert facts["partitions_max"] == 3
    assert (await put(broker, 3)).status_code == 201
    await broker.close()


async def test_partitions_that_are_missing_are_created_by_a_repetition(pair, monkeypatch):
    one, two = pair
    create = lifecycle._create

    async def fail(exchange, names):
        await create(exchange, names[:1])
        raise OutcomeUnknown("made up")

    monkeypatch.setattr(lifecycle, "_create", fail)
    problem(await put(one, 4), status=504, code="outcome_unknown")
    monkeypatch.undo()
    assert sum("-partition-" in path for path in one.znodes()) == 1
    assert (await put(two, 4)).status_code == 200
    assert sum("-partition-" in path for path in one.znodes()) == 4


async def test_produce_and_receive_work_although_partitions_are_missing(pair, monkeypatch):
    one, two = pair
    await one.store.create(ZNODE, b'{"partitions": 3}', make_parents=True)
    await two.produce("a", "b", "c")
    got = await one.receive()
    assert sorted(payloads(got)) == ["a", "b", "c"]
    assert {message_id.split(":")[2] for message_id in ids(got)} == {"0", "1", "2"}
