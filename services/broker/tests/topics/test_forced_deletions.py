"""Topics that were deleted by force are not created again by clients that still use them."""

import asyncio
import json

import pytest
from bindery_broker.topics.forced_deletions import HOLD_S, ROOT, ForcedDeletions
from bindery_core.errors import AlreadyExists, NoSuchNode
from bindery_pulsar.topic_name import TopicName
from broker_harness import TOPIC, Harness, payloads, problem

RECORD = f"{ROOT}/public%2Fdefault%2Ft"


async def delete(broker: Harness, *, force: bool, topic: str = TOPIC) -> None:
    answer = await broker.client.delete(f"{topic}?force={str(force).lower()}")
    assert answer.status_code == 200, answer.text


async def test_clients_do_not_revive_a_topic_that_was_deleted_by_force(broker: Harness) -> None:
    await broker.produce("old")
    await broker.receive()
    await delete(broker, force=True)
    refused = await broker.client.post(f"{TOPIC}/messages", content="new")
    facts = problem(refused, status=409, code="topic_deleted")["facts"]
    assert facts == {"topic": "public/default/t", "retry_after_s": HOLD_S}
    assert refused.headers["retry-after"] == str(HOLD_S)
    body = {"consumer": "c1", "initial": "earliest"}
    problem(await broker.client.post(f"{TOPIC}/subscriptions/s/receive", json=body), status=409, code="topic_deleted")
    problem(await broker.client.put(f"{TOPIC}/subscriptions/s", json={}), status=409, code="topic_deleted")
    problem(await broker.client.get(TOPIC), status=404, code="no_such_topic")


async def test_the_topic_can_be_created_explicitly_at_once(broker: Harness) -> None:
    await broker.produce("old")
    await delete(broker, force=True)
    assert (await broker.client.put(TOPIC)).status_code == 201
    await broker.produce("new")
    assert payloads(await broker.receive()) == ["new"]


async def test_the_hold_ends_and_its_record_is_removed(broker: Harness) -> None:
    await broker.produce("old")
    await delete(broker, force=True)
    broker.clock.advance(HOLD_S - 1)
    problem(await broker.client.post(f"{TOPIC}/messages", content="x"), status=409, code="topic_deleted")
    await broker.broker.topics.maintain()
    assert RECORD in broker.znodes()
    broker.clock.advance(1)
    await broker.produce("new")
    assert payloads(await broker.receive()) == ["new"]
    await broker.broker.topics.maintain()
    assert RECORD not in broker.znodes()


async def test_a_second_deletion_begins_the_hold_again(broker: Harness) -> None:
    await broker.produce("old")
    await delete(broker, force=True)
    broker.clock.advance(HOLD_S - 1)
    assert (await broker.client.put(TOPIC)).status_code == 201
    await delete(broker, force=True)
    broker.clock.advance(HOLD_S - 1)
    await broker.broker.topics.maintain()
    problem(await broker.client.post(f"{TOPIC}/messages", content="x"), status=409, code="topic_deleted")
    broker.clock.advance(1)
    await broker.broker.topics.maintain()
    await broker.broker.topics.maintain()
    assert RECORD not in broker.znodes()


async def test_a_deletion_without_force_holds_nothing(broker: Harness) -> None:
    await broker.produce("old")
    await delete(broker, force=False)
    await broker.produce("new")
    assert payloads(await broker.receive()) == ["new"]
    assert RECORD not in broker.znodes()


async def test_the_hold_is_that_of_every_broker_and_survives_its_deleter(pair: tuple[Harness, Harness]) -> None:
    one, two = pair
    await one.produce("old")
    await delete(two, force=True)
    problem(await two.client.post(f"{TOPIC}/messages", content="x"), status=409, code="topic_deleted")
    problem(await one.client.post(f"{TOPIC}/messages", content="x"), status=409, code="topic_deleted")
    left = ForcedDeletions(two.broker.store, clock=two.clock.now_ms)  # as after a restart
    await left.clean()
    two.clock.advance(HOLD_S)
    await left.clean()
    assert RECORD not in two.znodes()


async def test_deletions_at_the_same_moment_leave_one_record(pair: tuple[Harness, Harness]) -> None:
    name = TopicName.parse("public/default/t")
    await asyncio.gather(
        *(ForcedDeletions(harness.broker.store, clock=harness.clock.now_ms).record(name) for harness in (*pair, *pair))
    )
    assert [path for path in pair[0].znodes() if path.startswith(f"{ROOT}/")] == [RECORD]
    problem(await pair[0].client.post(f"{TOPIC}/messages", content="x"), status=409, code="topic_deleted")


async def test_a_record_that_is_removed_meanwhile_is_written_again(broker: Harness) -> None:
    """The record exists when it is created, and is removed before it is set."""

    class Store:
        def __init__(self) -> None:
            self.calls: list[str] = []

        async def set(self, path: str, data: bytes, *, version: None) -> None:
            self.calls.append("set")
            if len(self.calls) < 5:
                raise NoSuchNode("made up")

        async def create(self, path: str, data: bytes, *, make_parents: bool) -> None:
            self.calls.append("create")
            raise AlreadyExists("made up")

    store = Store()
    deletions = ForcedDeletions(store, clock=broker.clock.now_ms)  # type: ignore[arg-type]
    await deletions.record(TopicName.parse("public/default/t"))
    assert store.calls == ["set", "create", "set", "create", "set"]


async def test_a_record_that_cannot_be_decoded_holds_nothing_and_is_removed(broker: Harness) -> None:
    await broker.broker.store.create(RECORD, b"{", make_parents=True)
    await broker.produce("new")
    deletions = ForcedDeletions(broker.broker.store, clock=broker.clock.now_ms)
    await deletions.clean()
    broker.clock.advance(HOLD_S)
    await deletions.clean()
    assert RECORD not in broker.znodes()


async def test_the_deletion_of_a_namespace_holds_no_topic(broker: Harness) -> None:
    assert (await broker.client.put("/v1/namespaces/public/other", json={})).status_code == 201
    topic = "/v1/topics/public/other/t"
    await broker.produce("old", topic=topic)
    assert (await broker.client.delete("/v1/namespaces/public/other?force=true")).status_code == 200
    assert not [path for path in broker.znodes() if path.startswith(f"{ROOT}/")]


@pytest.mark.parametrize("force", [True, False])
async def test_a_partitioned_topic(pair: tuple[Harness, Harness], force: bool) -> None:
    one, two = pair
    assert (await one.client.put(f"{TOPIC}/partitions", json={"partitions": 4})).status_code == 201
    await two.produce("old")
    assert (await two.client.delete(f"{TOPIC}/partitions?force={json.dumps(force)}")).status_code == 200
    answer = await one.client.post(f"{TOPIC}/messages", content="x")
    if force:
        problem(answer, status=409, code="topic_deleted")
        problem(await two.client.post(f"{TOPIC}/messages", content="x"), status=409, code="topic_deleted")
    else:
        assert answer.status_code == 200
        await delete(one, force=False)
    for index in range(4):
        partition = f"{TOPIC}-partition-{index}"
        answer = await one.client.post(f"{partition}/messages", content="x")
        if force:
            problem(answer, status=409, code="topic_deleted")
        else:
            assert answer.status_code == 200
            await delete(one, force=True, topic=partition)
    assert (await one.client.put(f"{TOPIC}/partitions", json={"partitions": 4})).status_code == 201
    await two.produce("new")
