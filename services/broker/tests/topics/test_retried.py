"""A subscription with its retry topic: no message is lost, or stays leased, however a call ends."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from bindery_broker.broker import Broker
from bindery_broker.errors import UnknownMessages
from bindery_broker.http.peers import retries as remote_retries
from bindery_broker.subscriptions.consumer import ClientWatch, ReceiveRequest, SubscriptionType
from bindery_broker.subscriptions.reading import messages_of
from bindery_broker.topics.retried import Part, RetriedSubscription
from bindery_core.errors import BinderyError, NoSuchTopic, NotThere
from bindery_pulsar.message_codec import OutgoingMessage
from bindery_pulsar.message_id import EARLIEST, MessageId
from bindery_pulsar.topic_name import TopicName
from broker_harness import Harness, settle

MAIN = TopicName.parse("t")
RETRY = TopicName.parse("t-s-RETRY")


def request(consumer: str = "c", **fields: Any) -> ReceiveRequest:
    values = {
        "count_max": 100, "bytes_max": 2**20, "wait_s": 20.0, "ack_timeout_s": 3_600.0, "session_ttl_s": 3_600.0,
    }  # fmt: skip
    return ReceiveRequest(consumer=consumer, **{**values, **fields})


class World:
    """The broker's subscription `s` of the topic `t`, and calls to it."""

    def __init__(self, broker: Broker, kind: SubscriptionType = "shared", *, retries_at: Broker | None = None) -> None:
        """`retries_at`: the broker that owns the retry topic; None: the same."""
        self.broker = broker
        self.retries_at = retries_at or broker
        self.kind = kind

    async def start(self) -> "World":
        for name in (MAIN, RETRY):
            await self.subscribe(name)
        return self

    def owner(self, name: TopicName) -> Broker:
        return self.retries_at if name == RETRY else self.broker

    async def subscribe(self, name: TopicName) -> None:
        assert await self.owner(name).locate(name, create=True) is None
        topic = await self.owner(name).topic(name, create=True)
        await topic.subscribe("s", initial=EARLIEST)

    async def both(self) -> RetriedSubscription:
        topic = await self.broker.topic(MAIN)
        return RetriedSubscription(topic, topic.subscription("s"), self.broker.retry_topics)

    async def publish(self, name: TopicName, text: str) -> None:
        topic = await self.owner(name).topic(name, create=True)
        await topic.publish([OutgoingMessage(payload=text.encode())], producer=None, batch=False)

    async def receive(self, consumer: str = "c", *, client: ClientWatch | None = None, **fields: Any) -> list[Part]:
        charge = self.broker.topics.responses.charge("a")
        try:
            both = await self.both()
            parts = await both.receive(request(consumer, **fields), kind=self.kind, charge=charge, client=client)
            size = sum(message.size for part in parts for message in _messages(part))
            assert (charge.size > 0) == (size > 0)
            assert charge.size >= size
            return parts
        finally:
            charge.release()

    async def held(self) -> int:
        """Number of messages that consumers hold, when everything is done."""
        await settle()
        return sum(
            len(subscription.dispatcher.leases)
            for broker in {self.broker, self.retries_at}
            for topic in broker.topics
            for subscription in topic.subscriptions.values()
        )


def _messages(part: Part) -> list[Any]:
    return [message for delivery in part.deliveries for message in messages_of(delivery)]


def texts(parts: list[Part]) -> list[str]:
    return [message.payload.decode() for part in parts for message in _messages(part)]


def ids(parts: list[Part]) -> list[MessageId]:
    return [
        MessageId.of(delivery.position, batch_index=message.batch_index, partition=part.partition)
        for part in parts
        for delivery in part.deliveries
        for message in messages_of(delivery)
    ]


@pytest.fixture(params=["local", "remote"])
async def retries_at(
    request: pytest.FixtureRequest,
    broker: Harness,
    tree: Any,
    ledgers: Any,
    clock: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Broker]:
    """The broker that owns the retry topic."""
    if request.param == "local":
        yield broker.broker
        return
    monkeypatch.setattr(remote_retries, "QUIET_S", 0.0)
    other = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://two")
    broker.peers["two"] = httpx.ASGITransport(app=other.app)
    yield other.broker
    await other.close()


@pytest.fixture
async def world(broker: Harness, retries_at: Broker) -> World:
    return await World(broker.broker, retries_at=retries_at).start()


@pytest.mark.parametrize("turns", range(0, 24, 2))
async def test_a_client_that_goes_while_messages_arrive_holds_nothing(world: World, turns: int) -> None:
    client = ClientWatch()
    call = asyncio.create_task(world.receive(client=client))
    await settle()
    sending = asyncio.gather(world.publish(MAIN, "n"), world.publish(RETRY, "r"))
    for _ in range(turns):
        await asyncio.sleep(0)
    client.set_gone()
    got = await call
    await sending
    assert await world.held() == len(texts(got))
    await (await world.both()).nack(ids(got), delay_s=0)
    assert sorted(texts(await world.receive("other", wait_s=0.0))) == ["n", "r"]


@pytest.mark.parametrize("turns", range(12))
async def test_a_call_that_is_cancelled_between_both_topics_holds_nothing(world: World, turns: int) -> None:
    await world.publish(RETRY, "r")
    await world.publish(MAIN, "n")
    call = asyncio.create_task(world.receive(wait_s=0.0))
    for _ in range(turns):
        await asyncio.sleep(0)
    call.cancel()
    (got,) = await asyncio.gather(call, return_exceptions=True)
    assert await world.held() == (len(texts(got)) if isinstance(got, list) else 0)


async def test_a_client_that_has_gone_before_gets_nothing(world: World) -> None:
    client = ClientWatch()
    client.set_gone()
    await world.publish(RETRY, "r")
    await world.publish(MAIN, "n")
    got = await world.receive(client=client)
    assert await world.held() == len(texts(got))


@pytest.mark.parametrize("gone", [MAIN, RETRY])
async def test_the_end_of_one_topic_leaves_nothing_leased_in_the_other(world: World, gone: TopicName) -> None:
    other = RETRY if gone == MAIN else MAIN
    call = asyncio.create_task(world.receive())
    await settle()
    deleting = asyncio.create_task(world.owner(gone).topics.delete(gone, force=True))
    await world.publish(other, "x")
    await deleting
    if gone == RETRY:
        assert texts(await call) == ["x"]
        return
    try:
        assert texts(await call) == ["x"]
    except NoSuchTopic:
        assert await world.held() == 0


async def test_the_answer_says_of_which_partition_its_messages_are(broker: Harness) -> None:
    """A retry topic is that of all partitions of a topic, and no partition itself."""
    name = TopicName.parse("t-partition-3")
    world = World(broker.broker)
    await world.subscribe(name)
    await world.subscribe(RETRY)
    await world.publish(name, "n")
    await world.publish(RETRY, "r")
    topic = await broker.broker.topic(name)
    both = RetriedSubscription(topic, topic.subscription("s"), broker.broker.retry_topics)
    charge = broker.broker.topics.responses.charge("a")
    parts = await both.receive(request(wait_s=0.0), kind="shared", charge=charge)
    assert [(part.partition, texts([part])) for part in parts] == [(-1, ["r"]), (3, ["n"])]
    await both.ack(ids(parts))
    assert topic.subscription("s").cursor.backlog_entries == 0


async def test_calls_of_two_consumers_share_the_messages_of_both(world: World) -> None:
    calls = [asyncio.create_task(world.receive(name, count_max=1)) for name in ("c1", "c2", "c3", "c4")]
    await settle()
    for number in range(2):
        await world.publish(MAIN, f"n{number}")
        await world.publish(RETRY, f"r{number}")
    assert sorted(text for got in await asyncio.gather(*calls) for text in texts(got)) == ["n0", "n1", "r0", "r1"]


@pytest.mark.parametrize("kind", ["shared", "key_shared"])
@pytest.mark.parametrize("seed", range(12))
async def test_random_calls_lose_nothing_and_deliver_nothing_twice(
    broker: Harness, retries_at: Broker, seed: int, kind: SubscriptionType
) -> None:
    """Each message is acknowledged exactly once, and no two consumers hold it at a time."""
    chance = random.Random(seed)
    world = await World(broker.broker, kind, retries_at=retries_at).start()
    sent: set[str] = set()
    acked: set[str] = set()
    held: dict[str, str] = {}

    async def produce() -> None:
        for number in range(40):
            text = f"m{number}"
            sent.add(text)
            await world.publish(chance.choice((MAIN, RETRY)), text)
            for _ in range(chance.randrange(6)):
                await asyncio.sleep(0)

    async def consume(name: str) -> None:
        while len(acked) < 40:
            client = ClientWatch()
            call = asyncio.create_task(
                world.receive(
                    name,
                    client=client,
                    count_max=chance.randrange(1, 4),
                    wait_s=chance.choice((0.0, 0.02)),
                    request_id=None if chance.random() < 0.5 else f"{name}-{chance.random()}",
                )
            )
            for _ in range(chance.randrange(30)):
                await asyncio.sleep(0)
            how = chance.random()
            if how < 0.1:
                call.cancel()
            elif how < 0.2:
                client.set_gone()
            (outcome,) = await asyncio.gather(call, return_exceptions=True)
            if isinstance(outcome, BinderyError | asyncio.CancelledError):
                continue
            assert not isinstance(outcome, BaseException), outcome
            got = dict(zip(texts(outcome), ids(outcome), strict=True))
            assert not got.keys() & (held.keys() | acked), (got, held, acked)
            held.update(dict.fromkeys(got, name))
            await asyncio.sleep(0)
            both = await world.both()
            if chance.random() < 0.3:
                for text in got:
                    del held[text]
                await both.nack(list(got.values()), delay_s=0)
            elif got:
                await both.ack(list(got.values()), consumer=name)
                for text in got:
                    del held[text]
                acked.update(got)

    async with asyncio.timeout(30):
        await asyncio.gather(produce(), *(consume(name) for name in ("c1", "c2", "c3")))
    assert acked == sent
    assert await world.held() == 0
    assert broker.broker.topics.responses.used == 0


@pytest.mark.parametrize("first", [MAIN, RETRY])
async def test_ids_name_the_topic_that_has_their_ledger(world: World, first: TopicName) -> None:
    """The first ledger of the cluster has the id 0. A topic without messages has no ledger, and so claims none."""
    await world.publish(first, "first")
    got = await world.receive(wait_s=0.0)
    assert [one.ledger_id for one in ids(got)] == [0]
    assert await (await world.both()).nack(ids(got), delay_s=0) == ids(got)
    got = await world.receive(wait_s=0.0)
    await (await world.both()).ack(ids(got), consumer="c")
    assert await world.held() == 0
    await world.publish(RETRY if first == MAIN else MAIN, "second")
    got += await world.receive(wait_s=0.0)
    assert texts(got) == ["first", "second"]
    await (await world.both()).ack(ids(got), consumer="c")  # the first one again
    for name in (MAIN, RETRY):
        assert world.owner(name).topics.loaded(name).subscription("s").cursor.backlog_entries == 0
    with pytest.raises(UnknownMessages):
        await (await world.both()).ack([MessageId.parse("7:0")])


async def test_an_ended_retry_topic_is_left_out_of_an_acknowledgement(world: World) -> None:
    await world.publish(RETRY, "r")
    got = await world.receive(wait_s=0.0)
    await world.retries_at.topics.delete(RETRY, force=True)
    with pytest.raises((NotThere, BinderyError)):
        await (await world.both()).ack(ids(got))
