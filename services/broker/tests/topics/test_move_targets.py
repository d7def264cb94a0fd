"""Topics of a broker as targets of moves."""

import asyncio

import pytest
from bindery_broker.retries.copies import Identity
from bindery_broker.retries.targets import Destination
from bindery_broker.topics.move_targets import HostedMoves, TopicTargets
from bindery_core.errors import BookieUnavailable, Conflict, NoSuchTopic, TryAgain
from bindery_pulsar.message_codec import OutgoingMessage
from bindery_pulsar.message_id import MessageId
from bindery_pulsar.topic_name import TopicName
from broker_harness import Harness

TO = Destination(TopicName.parse("x"), "keeper")
SOURCE = "persistent://public/default/t/s"


def copy(origin: str) -> OutgoingMessage:
    return OutgoingMessage(payload=b"", properties={"ORIGIN_MESSAGE_ID": origin})


@pytest.fixture
def targets(broker: Harness) -> TopicTargets:
    found = TopicTargets(broker.broker.topics, HostedMoves("p"))
    found.bind(broker.broker.ownership)
    return found


async def test_a_missing_topic_is_created_with_the_subscription_that_keeps_its_messages(broker, targets):
    with pytest.raises(NoSuchTopic):
        async with targets.open(TO, create=False, source=SOURCE):
            pass
    async with targets.open(TO, create=True, source=SOURCE) as target:
        (found,) = await target.publish([copy("1")])
    assert isinstance(found, MessageId)
    topic = await broker.broker.topic(TO.topic)
    assert topic.subscription("keeper").cursor.backlog_entries == 1
    assert not targets.hosted.writes


async def test_a_missing_topic_is_not_created_if_topics_are_not_created_automatically(tree, ledgers, clock):
    broker = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://one", auto_create_topics=False)
    with pytest.raises(Conflict, match="topics are not created automatically"):
        async with TopicTargets(broker.broker.topics, HostedMoves("p")).open(TO, create=True, source=SOURCE):
            pass
    await broker.close()


async def test_a_scan_returns_the_single_messages_after_a_position_across_ledgers(broker, targets):
    async with targets.open(TO, create=True, source=SOURCE) as target:
        topic = await broker.broker.topic(TO.topic)
        await target.publish([copy("before")])
        after = target.end
        await target.publish([copy("1"), copy("2")])
        await topic.publish([copy("batch"), copy("batch")], producer=None, batch=True)
        await topic.ledger.add_many([b"damaged"])
        await topic.ledger.roll()
        await target.publish([copy(str(number)) for number in range(3, 250)])
        found = [identity async for _, identity in target.scan(after)]
        assert found == [Identity("", str(number), "") for number in range(1, 250)]
        assert [identity async for _, identity in target.scan(target.end)] == []


async def test_whether_writes_were_stored_is_decided_after_their_end(broker, targets, ledgers):
    async with targets.open(TO, create=True, source=SOURCE) as target:
        ledgers.hold_adds()
        write = asyncio.create_task(target.publish([copy("1")]))
        await asyncio.sleep(0)
        write.cancel()  # the write continues
        await asyncio.sleep(0)
        decided = asyncio.create_task(target.decided())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not decided.done()
        ledgers.release_adds()
        await decided
        assert not targets.hosted.writes
        topic = await broker.broker.topic(TO.topic)
        assert topic.ledger.entries_count == 1


async def test_a_target_that_is_closed_has_stored_nothing(broker, targets):
    async with targets.open(TO, create=True, source=SOURCE) as target:
        topic = await broker.broker.topic(TO.topic)
        await topic.close()
        with pytest.raises(TryAgain, match="was closed"):
            await target.publish([copy("1")])


async def test_errors_of_opening_are_passed_on(broker, targets, ledgers):
    async with targets.open(TO, create=True, source=SOURCE) as target:
        await target.publish([copy("1")])
    topic = await broker.broker.topic(TO.topic)
    await topic.ledger.crash()
    topic.abandon("made up")
    ledgers.fail_next("open", BookieUnavailable("made up"), count=100)
    with pytest.raises(BookieUnavailable):
        async with targets.open(TO, create=True, source=SOURCE):
            pass


async def test_a_target_without_bookies_stores_nothing(broker, targets, ledgers):
    """A topic is opened without a ledger: the first copy starts one."""
    ledgers.fail_next("create", BookieUnavailable("made up"), count=1_000)
    async with targets.open(TO, create=True, source=SOURCE) as target:
        writing = asyncio.create_task(target.publish([copy("1")]))
        for _ in range(100):
            broker.clock.advance(1)
            await asyncio.sleep(0.01)
            if writing.done():
                break
        with pytest.raises(TryAgain):
            await writing
        await target.decided()
    topic = await broker.broker.topic(TO.topic)
    assert topic.ledger.entries_count == 0
