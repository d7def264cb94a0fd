"""One broker: which topics it serves, its maintenance, and how it stops."""

import asyncio

import pytest
from bindery_broker.errors import NotOwner
from bindery_broker.ownership.ownership import RemoteOwner
from bindery_client.memory.memory import MemoryLedgers
from bindery_core.errors import NoSuchTopic
from bindery_core.ids import LedgerId
from bindery_metadata.stores.memory import MemoryTree
from bindery_pulsar.message_codec import OutgoingMessage
from bindery_pulsar.message_id import EARLIEST
from bindery_pulsar.topic_name import TopicName
from bindery_simulation.instant import InstantLoop
from broker_harness import Clock, Harness, settle

NAME = TopicName.parse("public/default/t")


@pytest.fixture
def other(tree: MemoryTree, ledgers: MemoryLedgers, clock: Clock) -> Harness:
    """A second broker of the cluster. It needs no close: the stores are in memory."""
    return Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://two")


async def test_a_missing_topic_is_not_located_and_its_bundle_is_not_taken(broker: Harness) -> None:
    with pytest.raises(NoSuchTopic) as raised:
        await broker.broker.locate(NAME, create=False)
    assert raised.value.facts == {"topic": "public/default/t"}
    assert broker.broker.ownership.held == []


async def test_the_bundle_of_a_topic_to_be_created_is_taken(broker: Harness) -> None:
    assert await broker.broker.locate(NAME, create=True) is None
    assert len(broker.broker.ownership.held) == 1


async def test_a_topic_of_an_owned_bundle_is_here_even_if_it_does_not_exist(broker: Harness) -> None:
    """The answer is then that of the topic."""
    await broker.broker.locate(NAME, create=True)
    assert await broker.broker.locate(NAME, create=False) is None


async def test_the_owner_of_a_topic_is_located_by_other_brokers(broker: Harness, other: Harness) -> None:
    await broker.broker.locate(NAME, create=True)
    await broker.broker.topic(NAME, create=True)
    assert await other.broker.locate(NAME, create=False) == RemoteOwner("http://one")
    assert await other.broker.locate(NAME, create=True) == RemoteOwner("http://one")


async def test_a_topic_is_created_only_on_request_and_then_stays_loaded(broker: Harness) -> None:
    await broker.broker.locate(NAME, create=True)
    with pytest.raises(NoSuchTopic):
        await broker.broker.topic(NAME)
    topic = await broker.broker.topic(NAME, create=True)
    assert topic.name == NAME
    assert await broker.broker.topic(NAME) is topic


async def test_messages_are_named_after_the_session_of_the_broker(broker: Harness) -> None:
    await broker.broker.locate(NAME, create=True)
    topic = await broker.broker.topic(NAME, create=True)
    await topic.publish([OutgoingMessage(payload=b"a")], producer=None, batch=False)
    ((found,), _) = await topic.read(
        EARLIEST, charge=broker.broker.topics.responses.charge("a"), count_max=1, bytes_max=100
    )
    assert found.message.producer_name == "http-1000000000000001"


async def test_topics_of_a_lost_bundle_are_abandoned(broker: Harness, tree: MemoryTree) -> None:
    await broker.broker.locate(NAME, create=True)
    topic = await broker.broker.topic(NAME, create=True)
    tree.expire(broker.store)
    await settle()
    assert not topic.is_open
    assert len(broker.broker.topics) == 0


async def test_a_stop_ends_waiting_calls_of_loaded_topics(broker: Harness) -> None:
    await broker.produce("a")
    assert len(await broker.receive()) == 1
    waiting = asyncio.ensure_future(broker.receive(wait_ms=30_000))
    await settle()
    assert not waiting.done()
    assert not broker.broker.stopping
    broker.broker.finish()
    assert broker.broker.stopping
    assert await waiting == []


async def test_a_close_seals_the_ledgers_and_then_releases_the_bundles(
    broker: Harness, other: Harness, ledgers: MemoryLedgers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.produce("a")
    (bundle,) = broker.broker.ownership.held
    release, sealed = broker.broker.ownership.release, []

    async def released(of: object) -> None:
        assert of == bundle
        sealed.append(ledgers.ledgers[LedgerId(0)].is_closed)
        await release(bundle)

    monkeypatch.setattr(broker.broker.ownership, "release", released)
    await broker.broker.close()
    await broker.broker.close()
    assert sealed == [True]
    assert await other.broker.locate(NAME, create=False) is None
    with pytest.raises(NotOwner):
        await broker.broker.locate(NAME, create=False)


async def test_a_second_close_does_not_wait_for_the_first(broker: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = asyncio.Event()
    monkeypatch.setattr(broker.broker.topics, "close", closed.wait)
    first = asyncio.ensure_future(broker.broker.close())
    await settle()
    second = asyncio.ensure_future(broker.broker.close())
    await settle()
    assert second.done()
    assert not first.done()
    closed.set()
    await first


def test_the_topics_are_maintained_once_per_interval(
    tree: MemoryTree, ledgers: MemoryLedgers, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        harness = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://one", maintenance_interval_s=7)
        loop = asyncio.get_running_loop()
        rounds: list[float] = []

        async def maintain() -> None:
            rounds.append(loop.time())

        monkeypatch.setattr(harness.broker.topics, "maintain", maintain)
        began = loop.time()
        task = asyncio.ensure_future(harness.broker.maintain_forever())
        await asyncio.sleep(22)
        task.cancel()
        assert rounds == [began + 7, began + 14, began + 21]
        await harness.close()

    with asyncio.Runner(loop_factory=InstantLoop) as runner:
        runner.run(scenario())


async def test_a_broker_tells_its_address_and_clocks(broker: Harness, clock: Clock) -> None:
    clock.advance(5)
    assert (broker.broker.url, broker.broker.now(), broker.broker.clock()) == ("http://one", 1005.0, 1_700_000_005_000)
