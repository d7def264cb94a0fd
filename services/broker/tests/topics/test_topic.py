"""One loaded topic: publishing in parts, reads that wait, single messages, limits, and how it ends."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from bindery_broker.errors import NoSuchMessage, NotOwner
from bindery_broker.subscriptions.response_budget import Charge, ResponseBudget
from bindery_broker.topics import topic as topic_module
from bindery_broker.topics.topic import Topic
from bindery_core.errors import BinderyError, Conflict, NoSuchTopic, OutcomeUnknown, TooManyRequests, TopicFenced
from bindery_pulsar.message_codec import Message, OutgoingMessage, PackedEntry
from bindery_pulsar.message_id import EARLIEST, LATEST, MessageId, Position
from bindery_pulsar.topic_name import TopicName
from broker_harness import Harness, problem

NAME = TopicName.parse("public/default/t")


@pytest.fixture
async def topic(broker: Harness) -> Topic:
    await broker.client.put("/v1/topics/public/default/t")
    (topic,) = broker.broker.topics
    return topic


@pytest.fixture
async def narrow(tree, ledgers, clock) -> AsyncIterator[Topic]:
    """A topic that may have two subscriptions and 1000 bytes that are not stored yet."""
    harness = Harness(
        tree=tree,
        ledgers=ledgers,
        clock=clock,
        url="http://narrow",
        subscriptions_per_topic_max=2,
        ledger={"pending_size_max": 1000},
    )
    await harness.client.put("/v1/topics/public/default/t")
    (topic,) = harness.broker.topics
    yield topic
    await harness.close()


def charge() -> Charge:
    return ResponseBudget(64 * 2**20, now=lambda: 0.0).charge("a")


async def publish(topic: Topic, *payloads: bytes, batch: bool = False, **fields: object) -> list[str | BinderyError]:
    messages = [OutgoingMessage(payload=payload, **fields) for payload in payloads]  # type: ignore[arg-type]
    results = await topic.publish(messages, producer=None, batch=batch)
    return [str(result) if isinstance(result, MessageId) else result for result in results]


async def test_messages_without_a_sequence_id_are_numbered_over_all_requests(topic: Topic) -> None:
    await publish(topic, b"a", b"b")
    await publish(topic, b"c", sequence_id=70)
    await publish(topic, b"d", b"e", batch=True)
    found, _ = await topic.read(EARLIEST, charge=charge(), count_max=10, bytes_max=1000)
    assert [item.message.sequence_id for item in found] == [0, 1, 70, 3, 4]


async def test_a_request_in_parts_has_the_ids_and_counts_of_one_call(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [OutgoingMessage(payload=b"x", key=key) for key in (None, None, "k", None)]
    whole = await topic.publish(messages, producer=None, batch=True)
    counted = (topic.statistics.published.messages, topic.statistics.published.bytes)
    monkeypatch.setattr(topic_module, "ADD_CALL_SIZE_MAX", 1)
    parts = await topic.publish(messages, producer=None, batch=True)
    assert [str(result) for result in whole] == ["0:0:-1:0", "0:0:-1:1", "0:1:-1:-1", "0:2:-1:-1"]
    assert [str(result) for result in parts] == ["0:3:-1:0", "0:3:-1:1", "0:4:-1:-1", "0:5:-1:-1"]
    assert (topic.statistics.published.messages, topic.statistics.published.bytes) == (2 * counted[0], 2 * counted[1])


async def test_a_part_is_filled_up_to_its_limit(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    await publish(topic, b"x")
    monkeypatch.setattr(topic_module, "ADD_CALL_SIZE_MAX", 2 * topic.statistics.published.bytes)
    submit, sizes = topic.ledger.submit_many, []

    def counted(entries: list[bytes]) -> asyncio.Future[list[Position]]:
        sizes.append(len(entries))
        return submit(entries)

    monkeypatch.setattr(topic.ledger, "submit_many", counted)
    await publish(topic, b"1", b"2", b"3", b"4", b"5")
    assert sizes == [2, 2, 1]


@pytest.mark.parametrize("lost", [False, True])
async def test_a_request_whose_first_part_is_refused_is_not_stored(
    narrow: Topic, ledgers, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """The reason is the error of the refusal: no part has an unknown outcome."""
    monkeypatch.setattr(topic_module, "ADD_CALL_SIZE_MAX", 100)
    ledgers.hold_adds()
    first = asyncio.ensure_future(publish(narrow, bytes(990)))
    await asyncio.sleep(0.01)
    if lost:
        narrow.abandon("made up")
        await narrow.ledger.crash()
    with pytest.raises(BinderyError) as caught:
        await publish(narrow, bytes(90), bytes(90))
    assert isinstance(caught.value, TooManyRequests) is not lost
    assert not isinstance(caught.value, OutcomeUnknown) or isinstance(caught.value, TopicFenced)
    ledgers.release_adds()
    await asyncio.gather(first, return_exceptions=True)
    assert narrow.statistics.published.messages == (0 if lost else 1)


async def test_an_id_without_index_names_the_first_message_of_a_batch(topic: Topic) -> None:
    await publish(topic, b"a", b"b", batch=True)
    for index, payload, shown in [(-1, b"a", 0), (0, b"a", 0), (1, b"b", 1)]:
        found = await topic.read_one(MessageId(0, 0, index, -1), charge=charge())
        assert (found.message.payload, found.id.batch_index) == (payload, shown)
    for missing in (MessageId(0, 0, 2, -1), MessageId(0, 1, -1, -1), MessageId(0, 0, 0, 3)):
        with pytest.raises(NoSuchMessage):
            await topic.read_one(missing, charge=charge())


async def test_a_read_ends_at_its_limits_and_continues_inside_a_batch(topic: Topic) -> None:
    await publish(topic, b"aa", b"bb", b"cc", batch=True)
    await publish(topic, b"dd")
    found, following = await topic.read(EARLIEST, charge=charge(), count_max=2, bytes_max=1000)
    assert ([item.message.payload for item in found], str(following)) == ([b"aa", b"bb"], "0:0:-1:2")
    found, following = await topic.read(following, charge=charge(), count_max=10, bytes_max=4)
    assert ([item.message.payload for item in found], str(following)) == ([b"cc", b"dd"], "0:2:-1:-1")
    found, following = await topic.read(EARLIEST, charge=charge(), count_max=10, bytes_max=5)
    assert ([item.message.payload for item in found], str(following)) == ([b"aa", b"bb"], "0:0:-1:2")
    found, following = await topic.read(EARLIEST, charge=charge(), count_max=10, bytes_max=1)
    assert ([item.message.payload for item in found], str(following)) == ([b"aa"], "0:0:-1:1")


async def test_a_read_decodes_the_part_of_a_batch_that_it_returns(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish(topic, *(b"%d" % n for n in range(25)), batch=True)
    decode, decoded = PackedEntry.decode, 0

    def counted(entry: PackedEntry, **limits: int) -> list[Message]:
        nonlocal decoded
        found = decode(entry, **limits)
        decoded += len(found)
        return found

    monkeypatch.setattr(PackedEntry, "decode", counted)
    found: list[bytes] = []
    position: MessageId | Position = EARLIEST
    while len(found) < 25:
        part, position = await topic.read(position, charge=charge(), count_max=10, bytes_max=1000)
        found += [item.message.payload for item in part]
    assert found == [b"%d" % n for n in range(25)]
    assert str(position) == "0:1:-1:-1"
    assert decoded == 25
    one = await topic.read_one(MessageId(0, 0, 24, -1), charge=charge())
    first = await topic.read_one(MessageId(0, 0, -1, -1), charge=charge())
    assert (one.message.payload, first.message.payload, decoded) == (b"24", b"0", 27)


async def test_a_read_from_an_index_that_the_entry_does_not_have_continues_with_the_next_entry(topic: Topic) -> None:
    await publish(topic, b"a")
    await publish(topic, b"b", b"c", batch=True)
    await publish(topic, b"d")
    for start, payloads in ((MessageId(0, 0, 0, -1), [b"b", b"c", b"d"]), (MessageId(0, 1, 2, -1), [b"d"])):
        found, following = await topic.read(start, charge=charge(), count_max=10, bytes_max=1000)
        assert [item.message.payload for item in found] == payloads
        assert str(following) == "0:3:-1:-1"


async def test_a_full_read_continues_with_the_next_entry(topic: Topic) -> None:
    await publish(topic, b"a", b"b", batch=True)
    await publish(topic, b"c", b"d", batch=True)
    found, following = await topic.read(EARLIEST, charge=charge(), count_max=2, bytes_max=1000)
    assert ([item.message.payload for item in found], following.position) == ([b"a", b"b"], Position(0, 1))
    found, _ = await topic.read(following, charge=charge(), count_max=2, bytes_max=1000)
    assert [item.message.payload for item in found] == [b"c", b"d"]


async def test_a_read_waits_only_until_the_broker_stops(topic: Topic) -> None:
    waiting = asyncio.ensure_future(topic.read(LATEST, charge=charge(), count_max=1, bytes_max=1, wait_s=30))
    await asyncio.sleep(0.01)
    topic.drain()
    async with asyncio.timeout(0.5):
        assert (await waiting)[0] == []
        assert (await topic.read(LATEST, charge=charge(), count_max=1, bytes_max=1, wait_s=30))[0] == [], (
            "nor does a later one wait"
        )


async def test_the_number_of_subscriptions_is_limited(narrow: Topic) -> None:
    for name in ("a", "b"):
        assert (await narrow.subscribe(name))[1]
    with pytest.raises(Conflict, match="max=2"):
        await narrow.subscribe("c")
    assert not (await narrow.subscribe("b"))[1], "an existing one is not refused"
    await narrow.unsubscribe("a")
    assert (await narrow.subscribe("c"))[1]


async def test_the_tags_of_a_subscription_are_fixed(topic: Topic) -> None:
    subscription, _ = await topic.subscribe("s", tags=["red", "blue"], properties={"team": "x"})
    assert (subscription.tags, subscription.cursor.properties["team"]) == ({"red", "blue"}, "x")
    assert await topic.subscribe("s") == (subscription, False)
    assert await topic.subscribe("s", tags=["blue", "red"]) == (subscription, False)
    with pytest.raises(Conflict, match=r"blue\|\|red"):
        await topic.subscribe("s", tags=["red"])


async def test_a_topic_ends_once_and_keeps_its_first_reason(broker: Harness, topic: Topic) -> None:
    subscription, _ = await topic.subscribe("s")
    await topic.close("moved")
    assert (topic.is_open, topic.closed_because, list(broker.broker.topics)) == (False, "moved", [])
    topic.abandon("lost")
    assert (topic.is_abandoned, topic.closed_because) == (False, "moved"), "its handles are released already"
    for call in (subscription.ack([MessageId(0, 0, -1, -1)]), topic.subscribe("new")):
        with pytest.raises((NotOwner, TopicFenced)):
            await call


async def test_an_abandoned_topic_releases_its_ledgers_later(broker: Harness, topic: Topic) -> None:
    subscription, _ = await topic.subscribe("s")
    topic.abandon("lost")
    assert (topic.is_abandoned, topic.is_open) == (True, False)
    assert broker.broker.topics.loaded(NAME) is None
    with pytest.raises(TopicFenced, match="lost"):
        subscription.leave("c1")
    await asyncio.sleep(0.01)
    assert not topic.ledger.is_open


async def test_a_deleted_topic_ends_its_subscriptions(topic: Topic) -> None:
    subscription, _ = await topic.subscribe("s")
    await topic.delete()
    with pytest.raises(NoSuchTopic):
        subscription.leave("c1")


async def test_deleting_a_subscription_ends_it(topic: Topic) -> None:
    subscription, _ = await topic.subscribe("s")
    await publish(topic, b"a")
    await topic.unsubscribe("s")
    with pytest.raises(BinderyError, match="deleted"):
        subscription.leave("c1")
    with pytest.raises(BinderyError, match="no such subscription"):
        topic.subscription("s")


async def test_a_refusal_names_the_consumers_of_a_subscription(broker: Harness, topic: Topic) -> None:
    await broker.receive("c1")
    await broker.receive("c2")
    with pytest.raises(Conflict, match="consumers=2"):
        await topic.unsubscribe("s")
    answer = await broker.client.delete("/v1/topics/public/default/t")
    problem(answer, status=409, code="topic_in_use")
    await topic.unsubscribe("s", force=True)
    assert not topic.has_consumers


async def test_what_a_reader_received_still_counts_after_it_has_ended(broker: Harness, topic: Topic) -> None:
    """The totals are counters: they must not decrease."""
    await publish(topic, b"abc")
    await broker.receive(durable=False, wait_ms=0)
    assert (topic.volume.messages_out, topic.volume.bytes_out) == (1, 3)
    (subscription,) = topic.subscriptions.values()
    subscription.leave("c1")
    topic.end_readers()
    assert not topic.subscriptions
    assert (topic.volume.messages_out, topic.volume.bytes_out) == (1, 3)
