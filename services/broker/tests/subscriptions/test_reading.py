"""Reading for one subscription: batch sizes, entries that cannot be decoded, and resets during a read."""

import asyncio

import pytest
from bindery_broker.dispatch.shared import SharedDispatcher
from bindery_broker.managed_ledger import BatchAck
from bindery_broker.subscriptions.decoding import DECODED_BYTES_MAX, LARGE_MAX
from bindery_broker.subscriptions.reading import READ_BYTES_MAX, BatchSizes
from bindery_core.errors import BinderyError, MetadataUnavailable
from bindery_pulsar.message_codec import (
    Message,
    OutgoingMessage,
    PackedEntry,
    UnreadableMessage,
    encode_message,
)
from bindery_pulsar.message_id import MessageId, Position
from managed_ledger_cluster import Cluster
from subscription_parts import Parts, at, batch, single, zipped

BAD = b"\x0e\x01no message"


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
    dispatcher = SharedDispatcher[Message]()
    assert await parts.reader.read_on(dispatcher, 100, size_max=2**20)
    assert (dispatcher.ready_count, parts.reader.position, parts.reader.stuck) == (1, at(1), None)
    with pytest.raises(BinderyError) as caught:
        await parts.reader.read_on(dispatcher, 100, size_max=2**20)
    assert caught.value.facts["message_id"] == "0:1:-1:-1"
    assert parts.reader.position == at(1)
    assert parts.reader.stuck is not None
    await parts.cursor.ack_many([at(1)])
    assert await parts.reader.read_on(dispatcher, 100, size_max=2**20)
    assert (dispatcher.ready_count, parts.reader.position, parts.reader.stuck) == (2, at(3), None)
    assert not await parts.reader.read_on(dispatcher, 100, size_max=2**20)


async def test_a_read_is_dropped_if_the_dispatcher_is_reset_meanwhile(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = await Parts.create(cluster, single(b"a"))
    dispatcher = SharedDispatcher[Message]()
    read = parts.cursor.read_unacked

    async def reset_meanwhile(*arguments: object, **limits: object) -> object:
        found = await read(*arguments, **limits)
        dispatcher.reset()
        return found

    monkeypatch.setattr(parts.cursor, "read_unacked", reset_meanwhile)
    assert await parts.reader.read_on(dispatcher, 100, size_max=2**20)
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
    dispatcher.release("c")

    async def refuse(*arguments: object, **limits: object) -> None:
        raise MetadataUnavailable("made up")

    with monkeypatch.context() as patch:
        patch.setattr(parts.topic, "read", refuse)
        with pytest.raises(MetadataUnavailable):
            await parts.reader.read_again(dispatcher, dispatcher.replay(10), size_max=2**20)
    assert dispatcher.state_counts() == {"replay": 1}
    assert await parts.take() == [b"a"]


async def test_a_returned_message_that_cannot_be_decoded_is_not_forgotten(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = await Parts.create(cluster, single(b"a"))
    dispatcher = parts.loop.dispatcher
    await parts.take()
    dispatcher.release("c")

    async def damaged(*arguments: object, **limits: object) -> list[tuple[Position, bytes]]:
        return [(at(0), BAD)]

    with monkeypatch.context() as patch:
        patch.setattr(parts.topic, "read", damaged)
        with pytest.raises(BinderyError) as caught:
            await parts.reader.read_again(dispatcher, dispatcher.replay(10), size_max=2**20)
    assert caught.value.facts["message_id"] == "0:0:-1:-1"
    assert "acknowledge" in str(caught.value.facts["hint"])
    assert dispatcher.state_counts() == {"replay": 1}
    assert await parts.take() == [b"a"]


async def test_consecutive_entries_are_read_again_at_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read may return fewer entries than requested. Entries that were trimmed are left out."""
    parts = await Parts.create(cluster, *(single(b"%d" % n) for n in range(8)))
    read, reads = parts.topic.read, []

    async def two_at_once(position: Position, *, entries_max: int, size_max: int) -> list[tuple[Position, bytes]]:
        reads.append((position.entry_id, entries_max))
        return await read(position, entries_max=min(entries_max, 2), size_max=size_max)

    monkeypatch.setattr(parts.topic, "read", two_at_once)
    items, rest = await parts.reader.load([(0, n, -1) for n in (0, 1, 2, 3, 4, 6, 7, 8)], size_max=2**20)
    assert rest == []
    assert [item.key[1] for item in items] == [0, 1, 2, 3, 4, 6, 7]
    assert reads == [(0, 5), (2, 3), (4, 1), (6, 3), (8, 1)]


async def test_a_read_without_a_message_to_deliver_counts_as_a_read(cluster: Cluster) -> None:
    """The caller then reads on, instead of waiting for the next entry."""
    topic = await cluster.open()
    await topic.add_many([single(b"a", "red"), single(b"b", "red")])
    parts = Parts(topic, await topic.open_cursor("s", start=at(0), properties={"blue": "1"}))
    dispatcher = SharedDispatcher[Message]()
    assert await parts.reader.read_on(dispatcher, 1, size_max=2**20) is True
    assert (dispatcher.known_count, parts.reader.position) == (0, at(1))
    assert parts.cursor.mark_delete == at(0)
    assert await parts.reader.read_on(dispatcher, 1, size_max=2**20) is True
    assert await parts.reader.read_on(dispatcher, 1, size_max=2**20) is False
    assert parts.reader.position == at(2)


async def test_messages_of_a_batch_that_are_acknowledged_are_not_offered(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, batch(b"a", b"b", b"c"))
    await parts.cursor.ack_many([], batches=[BatchAck(at(0), 3, [1])])
    assert await parts.take() == [b"a", b"c"]
    items, _ = await parts.reader.load([(0, 0, n) for n in range(3)], size_max=2**20)
    assert [item.message.payload for item in items] == [b"a", b"c"]
    await parts.cursor.ack_many([at(0)])
    assert await parts.reader.load([(0, 0, 0)], size_max=2**20) == ([], [])


async def test_the_size_of_a_message_includes_its_overhead(cluster: Cluster) -> None:
    """Messages without payload take memory too, so they must not be read without a limit."""
    parts = await Parts.create(cluster, single(b""), single(b"12345"))
    (empty, other), _ = await parts.reader.load([(0, 0, -1), (0, 1, -1)], size_max=2**20)
    assert empty.size > 0
    assert other.size == empty.size + 5


async def test_a_returned_message_that_was_acknowledged_is_forgotten(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, batch(b"a", b"b"), single(b"c"))
    dispatcher = parts.loop.dispatcher
    await parts.take()
    dispatcher.release("c")
    await parts.cursor.ack_many([at(1)])
    await parts.reader.read_again(dispatcher, dispatcher.replay(10), size_max=2**20)
    assert dispatcher.state_counts() == {"ready": 2}


async def test_only_the_requested_messages_of_a_batch_are_loaded(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, batch(b"a", b"b", b"c"), single(b"d"), single(b"e"))
    items, _ = await parts.reader.load([(0, 2, -1), (0, 0, 2), (0, 0, 1)], size_max=2**20)
    assert [item.message.payload for item in items] == [b"b", b"c", b"e"]


async def test_a_step_back_never_moves_the_read_position_forward(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, *(single(b"%d" % n) for n in range(3)))
    await parts.take()
    parts.reader.step_back((0, 1, -1))
    assert parts.reader.position == at(1)
    parts.reader.step_back((0, 2, -1))
    assert parts.reader.position == at(1)


async def test_a_read_ends_when_its_messages_are_large_once_decoded(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, *[zipped(READ_BYTES_MAX // 2)] * 5)
    dispatcher = SharedDispatcher[Message]()
    for read in (2, 4, 5):
        assert await parts.reader.read_on(dispatcher, 100, size_max=READ_BYTES_MAX)
        assert dispatcher.ready_count == read


async def test_a_bomb_fails_as_any_entry_that_cannot_be_decoded(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, single(b"a"), zipped(DECODED_BYTES_MAX + 1), single(b"c"))
    assert await parts.take() == [b"a"]
    with pytest.raises(UnreadableMessage) as caught:
        await parts.take()
    assert caught.value.facts["message_id"] == "0:1:-1:-1"
    assert parts.reader.stuck is not None
    await parts.acknowledger.ack([at(0), at(1)], [], [MessageId(0, 0), MessageId(0, 1)])
    assert await parts.take() == [b"c"]


async def test_an_entry_that_is_acknowledged_while_it_is_decoded_is_not_offered(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, zipped(1_000_000), batch(b"a", b"b"))
    dispatcher = SharedDispatcher[Message]()
    reading = asyncio.create_task(parts.reader.read_on(dispatcher, 100, size_max=2**20))
    while parts.decoder._large._value == LARGE_MAX:
        await asyncio.sleep(0)
    await parts.cursor.ack_many([at(0)], batches=[BatchAck(at(1), 2, [0])])
    assert await reading
    assert (dispatcher.ready_count, parts.reader.position) == (1, at(2))


async def test_a_read_is_dropped_if_the_dispatcher_is_reset_while_an_entry_is_decoded(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, zipped(1_000_000), single(b"b"))
    dispatcher = SharedDispatcher[Message]()
    reading = asyncio.create_task(parts.reader.read_on(dispatcher, 100, size_max=2**20))
    while parts.decoder._large._value == LARGE_MAX:
        await asyncio.sleep(0)
    dispatcher.reset()
    assert await reading
    assert (dispatcher.known_count, parts.reader.position) == (0, at(0))


async def test_messages_beyond_the_limit_are_read_again_later(cluster: Cluster) -> None:
    parts = await Parts.create(cluster, *(single(b"%d" % n * 1_000) for n in range(5)))
    dispatcher = parts.loop.dispatcher
    await parts.take()
    dispatcher.release("c")
    await parts.reader.read_again(dispatcher, dispatcher.replay(10), size_max=2_000)
    assert dispatcher.state_counts() == {"ready": 2, "replay": 3}
    assert [text[:1] for text in await parts.take()] == [b"0", b"1", b"2", b"3", b"4"]


async def test_the_metadata_of_a_message_counts(cluster: Cluster) -> None:
    many = OutgoingMessage(payload=b"", properties={str(number): "" for number in range(1_000)})
    entry = encode_message(many, producer_name="p", publish_time_ms=1, sequence_id=0)
    parts = await Parts.create(cluster, single(b""), entry)
    (small, large), _ = await parts.reader.load([(0, 0, -1), (0, 1, -1)], size_max=2**20)
    assert large.size > small.size + 100_000


async def test_the_size_of_a_batch_is_found_without_decoding_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = await Parts.create(cluster, batch(b"a", b"b"), single(b"c"))
    monkeypatch.setattr(PackedEntry, "decode", None)
    assert await parts.reader.batch_sizes.look_up(at(0)) == 2
    assert await parts.reader.batch_sizes.look_up(at(1)) == 0
    assert await parts.reader.batch_sizes.look_up(at(2)) is None
