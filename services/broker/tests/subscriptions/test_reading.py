"""Reading for one subscription: batch sizes, entries that cannot be decoded, and resets during a read."""

import asyncio
from collections.abc import Sequence

import pytest
from bindery_broker.dispatch.consumers import Consumer
from bindery_broker.dispatch.dispatcher import Dispatcher
from bindery_broker.dispatch.item import SINGLE, WHOLE, MessageRef
from bindery_broker.dispatch.shared import SharedDispatcher
from bindery_broker.dispatch.single_active import SingleActiveDispatcher
from bindery_broker.errors import UnknownMessages
from bindery_broker.managed_ledger import BatchAck
from bindery_broker.subscriptions.decoding import DECODED_BYTES_MAX, LARGE_MAX
from bindery_broker.subscriptions.reading import (
    MESSAGE_OVERHEAD,
    READ_BYTES_MAX,
    READ_MESSAGES_MAX,
    BatchSizes,
    Messages,
)
from bindery_core.errors import BinderyError, MetadataUnavailable
from bindery_pulsar.message_codec import (
    METADATA_READ_SIZE_MAX,
    CorruptMessage,
    Message,
    OutgoingMessage,
    PackedEntry,
    UnreadableMessage,
    encode_batch,
    encode_message,
)
from bindery_pulsar.message_id import MessageId, Position
from bindery_pulsar.pulsar_messages_pb2 import MessageMetadata, SingleMessageMetadata
from managed_ledger_cluster import Cluster
from subscription_parts import Parts, at, batch, keys_of, one, single, zipped

BAD = b"\x0e\x01no message"


async def read_on(
    parts: Parts, dispatcher: Dispatcher[Messages], room: int, *, messages_max: int = READ_MESSAGES_MAX
) -> bool:
    return await parts.reader.read_on(
        dispatcher, room, size_max=READ_BYTES_MAX, decoded_max=DECODED_BYTES_MAX, messages_max=messages_max, now_ms=0
    )


async def read_again(parts: Parts, *, size_max: int = READ_BYTES_MAX) -> None:
    dispatcher = parts.loop.dispatcher
    await parts.reader.read_again(dispatcher, dispatcher.replay(10), size_max=size_max, decoded_max=DECODED_BYTES_MAX)


async def load(
    parts: Parts, refs: Sequence[MessageRef], *, size_max: int = READ_BYTES_MAX
) -> tuple[list[tuple[int, Message]], list[MessageRef]]:
    """Return the messages with the ids of their entries, and what was not read."""
    found, rest = await parts.reader.load(refs, size_max=size_max, decoded_max=DECODED_BYTES_MAX)
    return [(position.entry_id, message) for position, _, messages in found for message in messages], rest


C = Consumer("c")


def exclusive() -> SingleActiveDispatcher[Messages]:
    dispatcher = SingleActiveDispatcher[Messages]()
    dispatcher.join(C)
    return dispatcher


async def test_the_size_of_a_batch_is_read_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = await Parts.create(cluster, batch(b"a", b"b", b"c"), single(b"d"))
    sizes = BatchSizes(parts.cursor, parts.topic)
    assert await sizes.look_up(at(0)) == 3
    assert await sizes.look_up(at(1)) == 0
    assert await sizes.look_up(at(2)) is None
    assert len(sizes) == 1

    async def refuse(*arguments: object, **limits: object) -> None:
        raise MetadataUnavailable("made up")

    monkeypatch.setattr(parts.topic, "read", refuse)
    assert await sizes.look_up(at(0)) == 3
    with pytest.raises(MetadataUnavailable):
        await sizes.look_up(at(1))


async def test_a_batch_may_have_a_single_message(cluster: Cluster) -> None:
    """Pulsar's clients write such batches."""
    parts = await Parts.create(cluster, batch(b"a"))
    assert await parts.reader.batch_sizes.look_up(at(0)) == 1
    assert await parts.take() == [b"a"]


async def test_only_sizes_of_completely_acknowledged_batches_are_forgotten(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, batch(b"a", b"b"), batch(b"c", b"d"))
    sizes = parts.reader.batch_sizes
    assert [await sizes.look_up(at(n)) for n in range(2)] == [2, 2]
    await parts.cursor.ack_many([at(0)])
    sizes.forget_acked()
    assert len(sizes) == 1
    assert sizes[at(1)] == 2


async def test_a_read_stops_before_an_entry_that_cannot_be_decoded_and_the_next_one_raises(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, single(b"a"), BAD, single(b"c"))
    dispatcher = SharedDispatcher[Messages]()
    assert await read_on(parts, dispatcher, 100)
    assert (dispatcher.ready_count, parts.reader.position, parts.reader.stuck) == (1, at(1), None)
    with pytest.raises(BinderyError) as caught:
        await read_on(parts, dispatcher, 100)
    assert caught.value.facts["message_id"] == "0:1:-1:-1"
    assert parts.reader.position == at(1)
    assert parts.reader.stuck is not None
    await parts.cursor.ack_many([at(1)])
    assert await read_on(parts, dispatcher, 100)
    assert (dispatcher.ready_count, parts.reader.position, parts.reader.stuck) == (2, at(3), None)
    assert not await read_on(parts, dispatcher, 100)


async def test_a_read_is_dropped_if_the_dispatcher_is_reset_meanwhile(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = await Parts.create(cluster, single(b"a"))
    dispatcher = SharedDispatcher[Messages]()
    read = parts.cursor.read_unacked

    async def reset_meanwhile(*arguments: object, **limits: object) -> object:
        found = await read(*arguments, **limits)
        dispatcher.reset()
        return found

    monkeypatch.setattr(parts.cursor, "read_unacked", reset_meanwhile)
    assert await read_on(parts, dispatcher, 100)
    assert (dispatcher.known_count, parts.reader.position) == (0, at(0))


async def test_messages_that_do_not_match_the_filter_are_acknowledged(cluster: Cluster) -> None:
    topic = await cluster.open()
    await topic.add_many([single(b"a", "red"), single(b"b", "blue")])
    parts = Parts(topic, await topic.open_cursor("s", start=at(0), properties={"blue": "1"}))
    assert await parts.take() == [b"b"]
    assert parts.cursor.is_acked(at(0))
    assert not parts.cursor.is_acked(at(1))


async def test_keys_are_given_back_if_they_cannot_be_read_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = await Parts.create(cluster, single(b"a"))
    dispatcher = parts.loop.dispatcher
    await parts.take()
    parts.release("c")

    async def refuse(*arguments: object, **limits: object) -> None:
        raise MetadataUnavailable("made up")

    with monkeypatch.context() as patch:
        patch.setattr(parts.topic, "read_some", refuse)
        with pytest.raises(MetadataUnavailable):
            await read_again(parts)
    assert dispatcher.state_counts() == {"replay": 1}
    assert await parts.take() == [b"a"]


async def test_a_returned_message_that_cannot_be_decoded_is_not_forgotten(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = await Parts.create(cluster, single(b"a"))
    dispatcher = parts.loop.dispatcher
    await parts.take()
    parts.release("c")

    async def damaged(*arguments: object, **limits: object) -> tuple[list[tuple[Position, bytes]], list[Position]]:
        return [(at(0), BAD)], []

    with monkeypatch.context() as patch:
        patch.setattr(parts.topic, "read_some", damaged)
        with pytest.raises(BinderyError) as caught:
            await read_again(parts)
    assert caught.value.facts["message_id"] == "0:0:-1:-1"
    assert "acknowledge" in str(caught.value.facts["hint"])
    assert dispatcher.state_counts() == {"replay": 1}
    assert await parts.take() == [b"a"]


async def test_messages_before_one_that_cannot_be_decoded_are_read_again(cluster: Cluster) -> None:
    """A delayed entry is decoded when it is due, together with returned messages before it."""
    parts = await Parts.create(cluster, single(b"a"), BAD, single(b"c"))
    dispatcher = parts.loop.dispatcher
    dispatcher.replay_due([at(0), at(1), at(2)])
    await read_again(parts)
    assert await parts.take(count_max=1) == [b"a"]
    with pytest.raises(CorruptMessage):
        await read_again(parts)
    await parts.cursor.ack_many([at(1)])
    await read_again(parts)
    assert await parts.take(count_max=1) == [b"c"]


async def test_the_size_of_an_acknowledged_batch_is_not_remembered(cluster: Cluster) -> None:
    """Ids of old messages, in calls that are refused, would fill the memory."""
    parts = await Parts.create(cluster, batch(b"a", b"b"))
    await parts.cursor.ack_many([at(0)])
    with pytest.raises(UnknownMessages):
        await parts.ack(MessageId.parse("0:0:-1:7"))
    assert len(parts.reader.batch_sizes) == 0


async def test_entries_anywhere_are_read_again_together(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read may return fewer entries than requested. Entries that were trimmed are left out."""
    parts = await Parts.create(cluster, *(single(b"%d" % n) for n in range(8)))
    read, reads = parts.topic.read_some, []

    async def three_at_once(
        positions: Sequence[Position], *, size_max: int
    ) -> tuple[list[tuple[Position, bytes]], Sequence[Position]]:
        reads.append([position.entry_id for position in positions])
        found, rest = await read(positions[:3], size_max=size_max)
        return found, [*rest, *positions[3:]]

    monkeypatch.setattr(parts.topic, "read_some", three_at_once)
    found, rest = await load(parts, [one(at(n)) for n in (0, 1, 2, 3, 4, 6, 7, 8)])
    assert rest == []
    assert [entry_id for entry_id, _ in found] == [0, 1, 2, 3, 4, 6, 7]
    assert reads == [[0, 1, 2, 3, 4, 6, 7, 8], [3, 4, 6, 7, 8], [7, 8]]


async def test_entries_that_are_read_again_and_not_decoded_yet_come_with_the_next_read(cluster: Cluster) -> None:
    """The entries are within the limit of stored bytes, and more than the limit once they are decoded."""
    parts = await Parts.create(cluster, *(single(b"%d" % n) for n in range(6)))
    parts.loop.dispatcher.replay_due([at(n) for n in (0, 2, 3, 5)])
    found, rest = await load(parts, [one(at(n)) for n in (0, 2, 3, 5)], size_max=2 * MESSAGE_OVERHEAD)
    assert [entry_id for entry_id, _ in found] == [0, 2]
    assert rest == [one(at(3)), one(at(5))]


async def test_a_delayed_message_is_known_as_one_message_once_it_was_read(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, single(b"a"), batch(b"b", b"c"))
    dispatcher = parts.loop.dispatcher
    dispatcher.replay_due([at(0), at(1)])
    assert dispatcher.known_bits(at(0)) == dispatcher.known_bits(at(1)) == WHOLE
    await read_again(parts)
    assert (dispatcher.known_bits(at(0)), dispatcher.known_bits(at(1))) == (SINGLE, 0b11)
    assert (dispatcher.known_count, dispatcher.ready_count) == (3, 3)
    assert await parts.take() == [b"a", b"b", b"c"]


async def test_a_read_without_a_message_to_deliver_counts_as_a_read(cluster: Cluster) -> None:
    """The caller then reads on, instead of waiting for the next entry."""
    topic = await cluster.open()
    await topic.add_many([single(b"a", "red"), single(b"b", "red")])
    parts = Parts(topic, await topic.open_cursor("s", start=at(0), properties={"blue": "1"}))
    dispatcher = SharedDispatcher[Messages]()
    assert await read_on(parts, dispatcher, 1) is True
    assert (dispatcher.known_count, parts.reader.position) == (0, at(1))
    assert parts.cursor.mark_delete == at(0)
    assert await read_on(parts, dispatcher, 1) is True
    assert await read_on(parts, dispatcher, 1) is False
    assert parts.reader.position == at(2)


async def test_messages_of_a_batch_that_are_acknowledged_are_not_offered(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, batch(b"a", b"b", b"c"))
    await parts.cursor.ack_many([], batches=[BatchAck(at(0), 3, [1])])
    assert await parts.take() == [b"a", b"c"]
    found, _ = await load(parts, [one(at(0), n) for n in range(3)])
    assert [message.payload for _, message in found] == [b"a", b"c"]
    await parts.cursor.ack_many([at(0)])
    assert await load(parts, [one(at(0), 0)]) == ([], [])


async def test_the_size_of_a_message_includes_its_overhead(cluster: Cluster) -> None:
    """Messages without payload take memory too, so they must not be read without a limit."""
    parts = await Parts.create(cluster, single(b""), single(b"12345"))
    dispatcher = exclusive()
    sizes = []
    for _ in range(2):
        assert await read_on(parts, dispatcher, 1)
        sizes.append(dispatcher.next_size(C))
        offered(dispatcher)
    assert sizes[0] > MESSAGE_OVERHEAD
    assert sizes[1] == sizes[0] + 5


async def test_a_returned_message_that_was_acknowledged_is_forgotten(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, batch(b"a", b"b"), single(b"c"))
    dispatcher = parts.loop.dispatcher
    await parts.take()
    parts.release("c")
    await parts.cursor.ack_many([at(1)])
    await read_again(parts)
    assert dispatcher.state_counts() == {"ready": 2}


async def test_only_the_requested_messages_of_a_batch_are_loaded(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, batch(b"a", b"b", b"c"), single(b"d"), single(b"e"))
    found, _ = await load(parts, [one(at(2)), one(at(0), 2), one(at(0), 1)])
    assert [message.payload for _, message in found] == [b"b", b"c", b"e"]


async def test_a_step_back_never_moves_the_read_position_forward(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, *(single(b"%d" % n) for n in range(3)))
    await parts.take()
    parts.reader.step_back(one(at(1)))
    assert parts.reader.position == at(1)
    parts.reader.step_back(one(at(2)))
    assert parts.reader.position == at(1)


async def test_a_read_ends_when_its_messages_are_large_once_decoded(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, *[zipped(READ_BYTES_MAX // 2)] * 5)
    dispatcher = SharedDispatcher[Messages]()
    for read in (2, 4, 5):
        assert await read_on(parts, dispatcher, 100)
        assert dispatcher.ready_count == read


async def test_a_bomb_is_delivered_as_it_is_stored(cluster: Cluster) -> None:
    bomb = zipped(DECODED_BYTES_MAX + 1)
    parts = await Parts.create(cluster, single(b"a"), bomb, single(b"c"))
    before, stored, after = await parts.take()
    assert (before, after) == (b"a", b"c")
    assert bomb.endswith(stored)
    parts.nack(MessageId.of(at(1)))
    assert await parts.take() == [stored]


async def test_metadata_above_the_limit_stops_a_subscription_at_the_entry(cluster: Cluster) -> None:
    metadata = MessageMetadata(producer_name="p", sequence_id=0, publish_time=1)
    metadata.properties.add(key="k", value="v" * METADATA_READ_SIZE_MAX)
    head = metadata.SerializeToString()
    parts = await Parts.create(cluster, single(b"a"), len(head).to_bytes(4, "big") + head, single(b"c"))
    assert await parts.take() == [b"a"]
    with pytest.raises(UnreadableMessage) as caught:
        await parts.take()
    assert caught.value.facts["message_id"] == "0:1:-1:-1"
    await parts.acknowledger.ack([at(1)], [])
    assert await parts.take() == [b"c"]


async def test_damage_stops_a_subscription_at_the_entry(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, single(b"a"), zipped(1_000)[:-20], single(b"c"))
    assert await parts.take() == [b"a"]
    with pytest.raises(CorruptMessage) as caught:
        await parts.take()
    assert caught.value.facts["message_id"] == "0:1:-1:-1"
    assert parts.reader.stuck is not None
    await parts.acknowledger.ack([at(0), at(1)], [])
    assert await parts.take() == [b"c"]


async def test_an_entry_that_is_acknowledged_while_it_is_decoded_is_not_offered(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, zipped(1_000_000), batch(b"a", b"b"))
    dispatcher = SharedDispatcher[Messages]()
    reading = asyncio.create_task(read_on(parts, dispatcher, 100))
    while parts.decoder._large._value == LARGE_MAX:
        await asyncio.sleep(0)
    await parts.cursor.ack_many([at(0)], batches=[BatchAck(at(1), 2, [0])])
    assert await reading
    assert (dispatcher.ready_count, parts.reader.position) == (1, at(2))


async def test_a_read_is_dropped_if_the_dispatcher_is_reset_while_an_entry_is_decoded(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, zipped(1_000_000), single(b"b"))
    dispatcher = SharedDispatcher[Messages]()
    reading = asyncio.create_task(read_on(parts, dispatcher, 100))
    while parts.decoder._large._value == LARGE_MAX:
        await asyncio.sleep(0)
    dispatcher.reset()
    assert await reading
    assert (dispatcher.known_count, parts.reader.position) == (0, at(0))


async def test_messages_beyond_the_limit_are_read_again_later(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, *(single(b"%d" % n * 1_000) for n in range(5)))
    dispatcher = parts.loop.dispatcher
    await parts.take()
    parts.release("c")
    await read_again(parts, size_max=2_000)
    assert dispatcher.state_counts() == {"ready": 2, "replay": 3}
    assert [text[:1] for text in await parts.take()] == [b"0", b"1", b"2", b"3", b"4"]


async def test_the_metadata_of_a_message_counts(cluster: Cluster) -> None:
    many = OutgoingMessage(payload=b"", properties={str(number): "" for number in range(1_000)})
    entry = encode_message(many, producer_name="p", publish_time_ms=1, sequence_id=0)
    parts = await Parts.create(cluster, single(b""), entry)
    ((_, small), (_, large)), _ = await load(parts, [one(at(0)), one(at(1))])
    assert large.size > small.size + 100_000


async def test_the_size_of_a_batch_is_found_without_decoding_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = await Parts.create(cluster, batch(b"a", b"b"), single(b"c"))
    monkeypatch.setattr(PackedEntry, "decode", None)
    assert await parts.reader.batch_sizes.look_up(at(0)) == 2
    assert await parts.reader.batch_sizes.look_up(at(1)) == 0
    assert await parts.reader.batch_sizes.look_up(at(2)) is None


# -- batches that are read in parts


def offered(dispatcher: Dispatcher[Messages]) -> list[tuple[int, int]]:
    """Take what is ready. Returns entry ids and batch indexes."""
    taken = dispatcher.take(C, count_max=10**6, bytes_max=10**9, lease_s=30, now=0)
    return [key[1:] for key in keys_of(taken)]


async def test_a_batch_with_more_messages_than_a_read_is_read_in_parts(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, single(b"x"), batch(*[b"a"] * 5), single(b"y"))
    dispatcher = exclusive()
    found = []
    while await read_on(parts, dispatcher, 100, messages_max=2):
        found.append((offered(dispatcher), parts.reader.position))
    assert found == [
        ([(0, -1)], at(1)),  # the batch does not fit whole
        ([(1, 0), (1, 1)], at(1)),
        ([(1, 2), (1, 3)], at(1)),
        ([(1, 4), (2, -1)], at(3)),
    ]


async def test_a_rewind_begins_with_the_whole_entry(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, batch(*[b"a"] * 5))
    dispatcher = SharedDispatcher[Messages]()
    await read_on(parts, dispatcher, 100, messages_max=2)
    dispatcher.reset()
    parts.reader.rewind()
    await read_on(parts, dispatcher, 100, messages_max=2)
    assert offered(dispatcher) == [(0, 0), (0, 1)]


async def test_a_step_back_leads_to_a_message_of_a_batch(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, batch(*[b"a"] * 5), single(b"x"))
    dispatcher = exclusive()
    await read_on(parts, dispatcher, 100)
    dispatcher.take(C, count_max=3, bytes_max=10**6, lease_s=30, now=0)
    first = dispatcher.put_down()
    assert first == one(at(0), 3)
    parts.reader.step_back(first)
    parts.reader.step_back(one(at(0), 4))
    parts.reader.step_back(one(at(1)))
    assert parts.reader.position == at(0)
    await read_on(parts, dispatcher, 100)
    assert offered(dispatcher) == [(0, 3), (0, 4), (1, -1)]


async def test_a_part_begins_with_a_message_that_is_not_acknowledged(cluster: Cluster) -> None:
    """Otherwise a batch of which almost everything is acknowledged would take as many reads as it has messages."""
    parts = await Parts.create(cluster, batch(*[b"a"] * 8), single(b"x"))
    dispatcher = SharedDispatcher[Messages]()
    await parts.cursor.ack_many([], batches=[BatchAck(at(0), 8, [1, 2, 3, 5])])
    for part in ([(0, 0)], [(0, 4)], [(0, 6), (0, 7)], [(1, -1)]):
        assert await read_on(parts, dispatcher, 100, messages_max=2)
        assert offered(dispatcher) == part
    assert parts.cursor.mark_delete < at(0)


async def test_the_acknowledged_end_of_a_batch_is_passed_without_decoding_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = await Parts.create(cluster, batch(*[b"a"] * 4), single(b"x"))
    dispatcher = SharedDispatcher[Messages]()
    assert await read_on(parts, dispatcher, 100, messages_max=2)
    await parts.cursor.ack_many([], batches=[BatchAck(at(0), 4, [2, 3])])
    assert await read_on(parts, dispatcher, 100, messages_max=2)
    assert offered(dispatcher) == [(0, 0), (0, 1), (1, -1)]
    assert parts.reader.position == at(2)


async def test_a_read_that_is_cancelled_continues_after_what_it_offered(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, single(b"a"), zipped(1_000_000), single(b"c"))
    dispatcher = exclusive()
    reading = asyncio.create_task(read_on(parts, dispatcher, 100))
    while parts.decoder._large._value == LARGE_MAX:
        await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    assert (dispatcher.ready_count, parts.reader.position) == (1, at(1))
    assert await read_on(parts, dispatcher, 100)
    assert offered(dispatcher) == [(0, -1), (1, -1), (2, -1)]


async def test_the_filter_acknowledges_messages_part_by_part(cluster: Cluster) -> None:
    topic = await cluster.open()
    tags = ["red", "red", "blue", "red", "red", "red"]
    messages = [OutgoingMessage(payload=b"", properties={tag: "TAGS"}) for tag in tags]
    entry = encode_batch(messages, producer_name="p", publish_time_ms=1, sequence_ids=range(6))
    await topic.add_many([entry, entry])
    parts = Parts(topic, await topic.open_cursor("s", start=at(0), properties={"blue": "1"}))
    dispatcher = SharedDispatcher[Messages]()
    remaining = []
    for _ in range(3):
        assert await read_on(parts, dispatcher, 100, messages_max=2)
        remaining.append(parts.cursor.remaining(at(0)))
    assert remaining == [0b111100, 0b110100, 0b000100]
    assert offered(dispatcher) == [(0, 2)]
    await parts.cursor.ack_many([], batches=[BatchAck(at(0), 6, [2])])
    assert parts.cursor.is_acked(at(0))


async def test_a_large_delayed_batch_is_filtered_to_its_end(cluster: Cluster) -> None:
    topic = await cluster.open()
    messages = [
        OutgoingMessage(payload=b"", properties={tag: "TAGS"}, deliver_at_ms=5) for tag in ("red", "red", "red", "blue")
    ]
    entry = encode_batch(messages, producer_name="p", publish_time_ms=1, sequence_ids=range(4))
    await topic.add_many([entry, single(b"next", "blue")])
    parts = Parts(topic, await topic.open_cursor("s", start=at(0), properties={"blue": "1"}))
    dispatcher = SharedDispatcher[Messages]()
    while await read_on(parts, dispatcher, 100, messages_max=2):
        pass
    assert parts.cursor.remaining(at(0)) == 0b1000
    assert parts.reader.delays.deliver_at(at(0)) == 5
    assert offered(dispatcher) == [(1, -1)]


async def test_parts_that_were_removed_by_compaction_are_acknowledged(cluster: Cluster) -> None:
    heads = [SingleMessageMetadata(payload_size=0, compacted_out=n != 5).SerializeToString() for n in range(6)]
    metadata = MessageMetadata(producer_name="p", sequence_id=0, publish_time=1, num_messages_in_batch=6)
    head = metadata.SerializeToString()
    payload = b"".join(len(one).to_bytes(4, "big") + one for one in heads)
    parts = await Parts.create(cluster, len(head).to_bytes(4, "big") + head + payload)
    dispatcher = SharedDispatcher[Messages]()
    for _ in range(3):
        assert await read_on(parts, dispatcher, 100, messages_max=2)
    assert offered(dispatcher) == [(0, 5)]
    assert parts.cursor.remaining(at(0)) == 0b110000


async def test_an_error_in_the_middle_of_a_batch_stops_before_its_part(cluster: Cluster) -> None:
    """What was delivered before is not delivered again, and the message id tells where it stopped."""
    head = MessageMetadata(producer_name="p", sequence_id=0, publish_time=1, num_messages_in_batch=4)
    one = SingleMessageMetadata(payload_size=0).SerializeToString()
    payload = 2 * (len(one).to_bytes(4, "big") + one) + b"\xff\xff"
    metadata = head.SerializeToString()
    parts = await Parts.create(cluster, len(metadata).to_bytes(4, "big") + metadata + payload)
    dispatcher = exclusive()
    assert await read_on(parts, dispatcher, 100, messages_max=2)
    assert offered(dispatcher) == [(0, 0), (0, 1)]
    for _ in range(2):
        with pytest.raises(BinderyError) as caught:
            await read_on(parts, dispatcher, 100, messages_max=2)
        assert caught.value.facts["message_id"] == "0:0:-1:-1"
    assert offered(dispatcher) == []


async def test_only_the_part_of_a_batch_with_returned_messages_is_decoded(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = await Parts.create(cluster, batch(*[b"a"] * 10), single(b"x"))
    decode, decoded = PackedEntry.decode, []

    def counted(entry: PackedEntry, **limits: int) -> list[Message]:
        decoded.append((limits["first"], limits["count_max"]))
        return decode(entry, **limits)

    monkeypatch.setattr(PackedEntry, "decode", counted)
    found, _ = await load(parts, [one(at(0), 7), one(at(0), 4), one(at(1))])
    assert [(entry_id, message.batch_index) for entry_id, message in found] == [(0, 4), (0, 7), (1, -1)]
    assert decoded == [(4, 4), (0, 1)]


async def test_scattered_delayed_messages_are_passed_in_large_steps(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restart: each looking up in the index takes time in proportion to the entries that are looked up."""
    count = 2_000
    parts = await Parts.create(cluster, *[single(b"a")] * count)
    await parts.cursor.ack_many([at(n) for n in range(0, count - 2, 2)])
    for n in range(1, count - 2, 2):
        parts.reader.delays.add(at(n), 1_000)
    parts.reader.delays.add(at(count - 1), 1_000)
    parts.reader.rewind()
    look_up, looked_up = parts.reader.delays.delayed_in, []

    def counted(ledger_id: int, first: int, last: int) -> list[tuple[int, int]]:
        looked_up.append(first)
        return look_up(ledger_id, first, last)

    monkeypatch.setattr(parts.reader.delays, "delayed_in", counted)
    dispatcher = SharedDispatcher[Messages]()
    assert await read_on(parts, dispatcher, 100)
    assert (dispatcher.ready_count, parts.reader.position) == (1, at(count - 1))
    assert len(looked_up) < 20
    assert not await read_on(parts, dispatcher, 100)
    assert parts.reader.position == at(count)
    assert len(parts.reader.delays) == count // 2


async def test_a_read_ends_if_the_dispatcher_is_reset_while_delayed_messages_are_passed(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, *[single(b"a")] * 500)
    for n in range(400):
        parts.reader.delays.add(at(n), 1_000)
    dispatcher = SharedDispatcher[Messages]()
    reading = asyncio.get_running_loop().create_task(read_on(parts, dispatcher, 100))
    await asyncio.sleep(0)
    dispatcher.reset()
    parts.reader.rewind()
    assert await reading
    assert (dispatcher.ready_count, parts.reader.position) == (0, at(0))
    assert await read_on(parts, dispatcher, 100)
    assert (dispatcher.ready_count, parts.reader.position) == (100, at(500))


async def test_a_delayed_batch_of_which_the_first_part_does_not_match_the_filter_is_read_on(cluster: Cluster) -> None:
    tags = ["red", "red", "red", "blue", "red", "red"]
    messages = [OutgoingMessage(payload=b"m", properties={tag: "TAGS"}, deliver_at_ms=9) for tag in tags]
    topic = await cluster.open()
    await topic.add_many([encode_batch(messages, producer_name="p", publish_time_ms=1, sequence_ids=range(len(tags)))])
    parts = Parts(topic, await topic.open_cursor("s", start=at(0), properties={"blue": "1"}))
    dispatcher = SharedDispatcher[Messages]()
    assert await read_on(parts, dispatcher, 100, messages_max=2)
    assert (len(parts.reader.delays), parts.reader.position) == (0, at(0))
    assert await read_on(parts, dispatcher, 100, messages_max=2)
    assert (len(parts.reader.delays), parts.reader.position) == (1, at(1))
    assert dispatcher.ready_count == 0
    assert not parts.cursor.is_acked(at(0))


async def test_a_delayed_message_that_is_acknowledged_while_another_one_is_decoded_does_not_wait(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    delayed = encode_message(
        OutgoingMessage(payload=b"m", deliver_at_ms=9), producer_name="p", publish_time_ms=1, sequence_id=0
    )
    parts = await Parts.create(cluster, zipped(1_000_000), delayed)
    decode = parts.decoder.decode

    async def acknowledge_meanwhile(*arguments: object, **limits: object) -> object:
        await parts.cursor.ack_many([at(1)])
        return await decode(*arguments, **limits)

    monkeypatch.setattr(parts.decoder, "decode", acknowledge_meanwhile)
    dispatcher = SharedDispatcher[Messages]()
    assert await read_on(parts, dispatcher, 100)
    assert (dispatcher.ready_count, len(parts.reader.delays), parts.reader.position) == (1, 0, at(2))
