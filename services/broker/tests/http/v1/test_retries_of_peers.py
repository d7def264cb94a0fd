"""A subscription whose retry and dead-letter topics belong to other brokers."""

import asyncio
import base64

import httpx
import pytest
from bindery_broker.http.peers import retries
from bindery_broker.ownership.bundles import Bundle
from bindery_broker.topics import retried
from bindery_pulsar.pulsar_messages_pb2 import MessageMetadata
from bindery_pulsar.topic_name import TopicName
from broker_harness import Harness, ids, payloads, problem, settle

NAME = next(
    name
    for number in range(1_000)
    if len({Bundle.of(TopicName.parse((name := f"t{number}") + end)) for end in ("", "-s-RETRY", "-s-DLQ")}) == 3
)
"""A topic that is in another bundle than its retry topic and its dead-letter topic."""
TOPIC = f"/v1/topics/public/default/{NAME}"
RETRY = f"{TOPIC}-s-RETRY"
DEAD = f"{TOPIC}-s-DLQ"
SUB = f"{TOPIC}/subscriptions/s"
LONG_MS = 3_600_000


@pytest.fixture
async def brokers(tree, ledgers, clock, monkeypatch):
    """Brokers that own the topic, its retry topic, and the topic of its dead letters."""
    monkeypatch.setattr(retries, "QUIET_S", 0.0)
    names = ("main", "again", "dead")
    found = [Harness(tree=tree, ledgers=ledgers, clock=clock, url=f"http://{name}") for name in names]
    for one in found:
        for other in found:
            if one is not other:
                one.peers[other.client.base_url.host] = httpx.ASGITransport(app=other.app)
    for broker, path in zip(found, (TOPIC, RETRY, DEAD), strict=True):
        name = TopicName.parse(path.removeprefix("/v1/topics/"))
        assert await broker.broker.ownership.locate(Bundle.of(name)) is None
    yield found
    for one in found:
        await one.close()


async def again(broker: Harness, message_id: str, **fields: object) -> dict:
    answer = await broker.post(f"{SUB}/retry", {"message_ids": [message_id], **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_message_goes_through_its_retries_to_the_dead_letters(brokers):
    main, _, dead = brokers
    await main.client.put(SUB, json={})
    await main.post(f"{TOPIC}/messages", {"payload": "job", "key": "k", "properties": {"p": "q"}})
    (message,) = await main.receive(topic=TOPIC)
    for times in (1, 2):
        moved = await again(main, message["message_id"], delay_ms=5_000, max_redeliver=2, properties={"why": "busy"})
        assert [(one["topic"], one["reconsume_times"]) for one in moved["moved"]] == [
            (f"public/default/{NAME}-s-RETRY", times)
        ]
        assert await main.receive(topic=TOPIC) == []
        main.clock.advance(5)
        (message,) = await main.receive(topic=TOPIC)
        found = message["properties"]
        assert (message["payload"], message["key"], found["p"], found["why"]) == ("job", "k", "q", "busy")
        assert (found["RECONSUMETIMES"], found["REAL_SUBSCRIPTION"]) == (str(times), "s")
    moved = await again(main, message["message_id"], max_redeliver=2)
    assert [one["topic"] for one in moved["moved"]] == [f"public/default/{NAME}-s-DLQ"]
    assert await main.receive(topic=TOPIC) == []
    assert payloads(await dead.receive(topic=DEAD, sub="dead-letters")) == ["job"]
    assert [len(one.broker.topics) for one in brokers] == [1, 1, 1]


async def test_messages_that_are_returned_too_often_become_dead_letters(brokers):
    main, retry, dead = brokers
    policy = {"dead_letter": {"max_redeliver": 1}}
    await retry.client.put(f"{RETRY}/subscriptions/s", json={})
    await main.produce("n", topic=TOPIC)
    await retry.produce("r", topic=RETRY)
    for _ in range(2):
        got = []
        while len(got) < 2:
            got += await main.receive(topic=TOPIC, **policy)
        assert sorted(payloads(got)) == ["n", "r"]
        await main.post(f"{SUB}/nack", {"message_ids": ids(got)})
    assert await main.receive(topic=TOPIC, **policy) == []
    assert sorted(payloads(await dead.receive(topic=DEAD, sub="dead-letters"))) == ["n", "r"]


async def test_what_a_race_leaves_over_is_handed_back_without_a_redelivery(brokers):
    main, retry, _ = brokers
    await retry.client.put(f"{RETRY}/subscriptions/s", json={})
    for number in range(20):
        waiting = asyncio.create_task(main.receive(topic=TOPIC, wait_ms=20_000, max=1, ack_timeout_ms=LONG_MS))
        await settle()
        await asyncio.gather(main.produce(f"n{number}", topic=TOPIC), retry.produce(f"r{number}", topic=RETRY))
        got = await waiting
        await settle()
        while len(got) < 2:
            got += await main.receive(topic=TOPIC, max=1, ack_timeout_ms=LONG_MS)
        assert sorted(payloads(got)) == [f"n{number}", f"r{number}"]
        assert {one["redelivery_count"] for one in got} == {0}
        await main.ack(ids(got), topic=TOPIC)


async def test_a_waiting_call_goes_on_when_the_broker_of_the_retry_topic_dies(brokers):
    main, retry, _ = brokers
    await retry.client.put(f"{RETRY}/subscriptions/s", json={})
    waiting = asyncio.create_task(main.receive(topic=TOPIC, wait_ms=20_000))
    await settle()
    del main.peers["again"]
    main.tree.expire(retry.store)
    await settle()
    await main.produce("new", topic=TOPIC)
    assert payloads(await waiting) == ["new"]


async def test_an_entry_that_is_not_decoded_keeps_its_encoding(brokers):
    main, retry, _ = brokers
    await retry.client.put(f"{RETRY}/subscriptions/s", json={})
    metadata = MessageMetadata(producer_name="p", sequence_id=0, publish_time=1, uuid="u", total_chunk_msg_size=4)
    metadata.num_chunks_from_msg, metadata.chunk_id = 2, 1
    key = metadata.encryption_keys.add(key="key", value=b"secret")
    key.metadata.add(key="m", value="v")
    metadata.encryption_param, metadata.encryption_algo = b"iv", "AES"
    head = metadata.SerializeToString()
    topic = await retry.broker.topic(TopicName.parse(f"{NAME}-s-RETRY"))
    await topic.ledger.add_many([len(head).to_bytes(4, "big") + head + b"data"])
    (direct,) = (await retry.client.get(f"{RETRY}/messages")).json()["messages"]
    (found,) = await main.receive(topic=TOPIC)
    assert base64.b64decode(found["payload_base64"]) == b"data"
    assert found["encoding"] == direct["encoding"]
    assert found["encoding"]["encryption"]["keys"][0]["name"] == "key"


async def test_binary_keys_and_tags_are_kept(brokers):
    main, retry, _ = brokers
    await retry.client.put(f"{RETRY}/subscriptions/s", json={})
    await retry.client.post(f"{RETRY}/messages", json={"payload_base64": "/w==", "tags": "a||b", "event_time": 7})
    (direct,) = (await retry.client.get(f"{RETRY}/messages")).json()["messages"]
    (found,) = await main.receive(topic=TOPIC)
    del found["lease"]
    assert found == direct


async def test_an_explanation_and_a_negative_acknowledgement_reach_the_other_broker(brokers):
    main, retry, _ = brokers
    await retry.client.put(f"{RETRY}/subscriptions/s", json={})
    (message_id,) = await retry.produce("r", topic=RETRY)
    await main.receive(topic=TOPIC, ack_timeout_ms=LONG_MS)
    reason = (await main.client.get(f"{SUB}/explain", params={"message_id": message_id})).json()["message"]
    assert (reason["code"], reason["consumer"]) == ("leased", "c1")
    answer = await main.post(f"{SUB}/nack", {"message_ids": [message_id], "delay_ms": 1_000})
    assert answer.json()["returned"] == [message_id]
    assert await main.receive(topic=TOPIC) == []
    main.clock.advance(1)
    (found,) = await main.receive(topic=TOPIC)
    assert found["redelivery_count"] == 1


async def test_errors_of_the_other_broker_keep_their_code(brokers):
    main, retry, _ = brokers
    await retry.client.put(f"{RETRY}/subscriptions/s", json={})
    (message_id,) = await retry.produce("r", topic=RETRY)
    await main.receive(topic=TOPIC)
    ledger_id = message_id.split(":")[0]
    body = problem(await main.ack([f"{ledger_id}:99:-1:-1"], topic=TOPIC), status=400, code="unknown_messages")
    assert body["facts"]["message_ids"] == [f"{ledger_id}:99:-1:-1"]


async def test_large_messages_of_another_broker_are_within_the_limits_of_the_call(brokers):
    main, retry, _ = brokers
    await retry.client.put(f"{RETRY}/subscriptions/s", json={})
    await retry.produce(*("x" * 1_000 for _ in range(10)), topic=RETRY)
    await main.produce(*("y" * 1_000 for _ in range(10)), topic=TOPIC)
    got = await main.receive(topic=TOPIC, max_bytes=4_000, ack_timeout_ms=LONG_MS)
    assert 1 <= len(got) <= 4
    assert main.broker.topics.responses.used == 0
    assert got[0]["payload"] == "x" * 1_000


class Slow(httpx.AsyncBaseTransport):
    """A broker whose answers to receives come too late, while it goes on with them."""

    def __init__(self, broker: Harness) -> None:
        self._transport = httpx.ASGITransport(app=broker.app)
        self.go_on = asyncio.Event()
        self.late: list[asyncio.Task[httpx.Response]] = []
        self.is_slow = True

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if not self.is_slow or not request.url.path.endswith("/receive"):
            return await self._transport.handle_async_request(request)

        async def later() -> httpx.Response:
            await self.go_on.wait()
            return await self._transport.handle_async_request(request)

        self.late.append(asyncio.create_task(later()))
        raise httpx.ReadTimeout("made up")


async def test_a_receive_that_is_late_leases_nothing(brokers):
    """What it would get was handed back before it had it."""
    main, retry, _ = brokers
    await retry.client.put(f"{RETRY}/subscriptions/s", json={})
    await retry.produce("r", topic=RETRY)
    slow = main.peers["again"] = Slow(retry)
    problem(await main.receive_raw(topic=TOPIC), status=503, code="try_again")
    await settle()
    slow.go_on.set()
    await asyncio.gather(*slow.late)
    slow.is_slow = False
    main.clock.advance(10)
    (found,) = await main.receive("other", topic=TOPIC)
    assert (found["payload"], found["redelivery_count"]) == ("r", 0)


@pytest.mark.parametrize("request_id", [{}, {"request_id": "a"}])
async def test_a_broker_that_does_not_answer_does_not_hold_up_the_topic(brokers, request_id):
    main, retry, _ = brokers
    await retry.client.put(f"{RETRY}/subscriptions/s", json={})
    await main.receive(topic=TOPIC)
    slow = main.peers["again"] = Slow(retry)
    await main.produce("n1", topic=TOPIC)
    assert payloads(await main.receive(topic=TOPIC, **request_id)) == ["n1"]
    for number in range(5):
        await main.produce(f"m{number}", topic=TOPIC)
        assert payloads(await main.receive(topic=TOPIC)) == [f"m{number}"]
    assert len(slow.late) == 1, "it is not asked by each call"
    slow.go_on.set()
    await asyncio.gather(*slow.late)


async def test_a_deleted_retry_topic_is_not_created_again(brokers):
    main, retry, _ = brokers
    await retry.client.put(f"{RETRY}/subscriptions/s", json={})
    await retry.client.put(f"{RETRY}/subscriptions/keeper", json={})
    await retry.produce("r", topic=RETRY)
    await main.ack(ids(await main.receive(topic=TOPIC)), topic=TOPIC)
    assert (await retry.client.delete(f"{RETRY}/subscriptions/s", params={"force": "true"})).status_code == 200
    await main.receive_raw(topic=TOPIC)
    main.clock.advance(20)
    assert await main.receive(topic=TOPIC) == []
    assert list((await retry.client.get(RETRY)).json()["subscriptions"]) == ["keeper"]


async def test_messages_of_a_new_ledger_are_acknowledged_at_once(brokers):
    main, retry, _ = brokers
    await retry.client.put(f"{RETRY}/subscriptions/s", json={})
    await retry.produce("r1", topic=RETRY)
    assert (await main.ack(ids(await main.receive(topic=TOPIC)), topic=TOPIC)).status_code == 200
    await (await retry.broker.topic(TopicName.parse(f"{NAME}-s-RETRY"))).ledger.roll()
    await retry.produce("r2", topic=RETRY)
    answer = await main.ack(ids(await main.receive(topic=TOPIC)), topic=TOPIC)
    assert answer.json() == {"acknowledged": 1}


async def test_a_retry_of_which_a_part_failed_tells_what_was_moved(brokers):
    main, retry, _ = brokers
    await retry.client.put(f"{RETRY}/subscriptions/s", json={})
    (again_id,) = await retry.produce("r", topic=RETRY)
    (main_id,) = await main.produce("n", topic=TOPIC)
    await main.receive(topic=TOPIC, ack_timeout_ms=LONG_MS)
    transport = main.peers["again"]

    class NoRetries(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.path.endswith("/retry"):
                raise httpx.ConnectError("made up")
            return await transport.handle_async_request(request)

    main.peers["again"] = NoRetries()
    answer = await main.post(f"{SUB}/retry", {"message_ids": [main_id, again_id]})
    assert answer.status_code == 200, answer.text
    assert [one["message_id"] for one in answer.json()["moved"]] == [main_id]
    assert [one["message_id"] for one in answer.json()["failed"]] == [again_id]


async def test_a_waiting_call_goes_on_when_the_broker_of_the_retry_topic_stops(brokers):
    main, retry, _ = brokers
    await retry.client.put(f"{RETRY}/subscriptions/s", json={})
    waiting = asyncio.create_task(main.receive(topic=TOPIC, wait_ms=20_000))
    await settle()
    retry.broker.finish()
    await settle()
    assert not waiting.done()
    await main.produce("new", topic=TOPIC)
    assert payloads(await waiting) == ["new"]


async def test_a_waiting_call_receives_from_the_next_owner_of_the_retry_topic(brokers, monkeypatch):
    monkeypatch.setattr(retried, "LOOK_AGAIN_S", 0.05)
    main, retry, _ = brokers
    await retry.client.put(f"{RETRY}/subscriptions/s", json={})
    waiting = asyncio.create_task(main.receive(topic=TOPIC, wait_ms=20_000))
    await settle()
    await retry.close()
    del main.peers["again"]
    await main.produce("r", topic=RETRY)
    async with asyncio.timeout(15):
        assert payloads(await waiting) == ["r"]
