"""Large entries are decoded in a thread, few at a time, and within the limit; small ones at once."""

import asyncio
import threading
import zlib
from typing import Any

import pytest
from bindery_broker.subscriptions.decoding import LARGE_MAX, EntryDecoder, RoomNeeded
from bindery_broker.subscriptions.reading import MESSAGE_OVERHEAD
from bindery_pulsar.message_codec import (
    MESSAGE_SIZE,
    METADATA_READ_SIZE_MAX,
    OpaqueMessage,
    OutgoingMessage,
    PackedEntry,
    UnreadableMessage,
    encode_message,
)
from bindery_pulsar.message_encoding import Encoding, OpaqueReason
from bindery_pulsar.pulsar_messages_pb2 import ZLIB, MessageMetadata, SingleMessageMetadata
from subscription_parts import zipped, zipped_batch


def packed(size: int) -> PackedEntry:
    return EntryDecoder().open(zipped(size))


async def test_small_entries_are_decoded_without_a_switch_of_tasks() -> None:
    ran = []
    asyncio.get_running_loop().call_soon(ran.append, True)
    (message,) = await EntryDecoder().decode(packed(1_000), room=1_000)
    assert len(message.payload) == 1_000
    assert not ran


async def test_the_loop_goes_on_while_a_large_entry_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()
    decode = PackedEntry.decode

    def watched(self: PackedEntry, **limits: Any) -> list[object]:
        threads.add(threading.get_ident())
        return decode(self, **limits)  # type: ignore[return-value]

    monkeypatch.setattr(PackedEntry, "decode", watched)
    (message,) = await EntryDecoder().decode(packed(1_000_000), room=1_001_000)
    assert len(message.payload) == 1_000_000
    assert threading.get_ident() not in threads


async def test_few_large_entries_are_decoded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    running = most = 0
    lock, release = threading.Lock(), threading.Event()

    def slow(self: PackedEntry, **limits: Any) -> list[object]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        release.wait(0.05)
        with lock:
            running -= 1
        return []

    monkeypatch.setattr(PackedEntry, "decode", slow)
    decoder = EntryDecoder()
    await asyncio.gather(*(decoder.decode(packed(100_000), room=101_000) for _ in range(6)))
    assert most == LARGE_MAX


async def test_an_entry_above_the_limit_is_one_message_as_stored() -> None:
    decoder = EntryDecoder(size_max=1_000_000)
    (message,) = await decoder.decode(decoder.open(zipped(1_000_000)), room=2_000_000)
    assert len(message.payload) == 1_000_000
    (message,) = await decoder.decode(decoder.open(zipped(1_000_001)), room=2_000)
    assert isinstance(message, OpaqueMessage)
    assert message.encoding == Encoding(reason=OpaqueReason.SIZE, compression="ZLIB", uncompressed_size=1_000_001)
    assert zlib.decompress(message.payload) == bytes(1_000_001)


async def test_an_entry_that_does_not_fit_is_not_decompressed_until_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = EntryDecoder(size_max=2_000_000)
    with monkeypatch.context() as patch:
        patch.setattr(PackedEntry, "decode", None)
        with pytest.raises(RoomNeeded) as caught:
            await decoder.decode(packed(1_000_000), room=999_999)
    assert caught.value.size == packed(1_000_000).claimed_size() < 1_001_000
    assert await decoder.decode(packed(1_000_000), room=caught.value.size)


async def test_an_entry_above_the_limit_is_not_decompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = EntryDecoder(size_max=1_000_000)
    monkeypatch.setattr(zlib, "decompressobj", None)
    for entry in (zipped(1_000_001), zipped_batch(2_000, size=300_000)):
        assert (decoder.open(entry).is_small, decoder.open(entry).count) == (True, 1)
        assert len(decoder.decode_small(decoder.open(entry))) == 1


async def test_the_room_of_an_entry_is_what_its_messages_count_once_they_are_read() -> None:
    """Otherwise a call that made room for an entry could not deliver it."""
    tagged = OutgoingMessage(payload=bytes(100_000), properties={"a": "TAGS", "b": "x"}, key="k")
    single = encode_message(tagged, producer_name="p", publish_time_ms=1, sequence_id=0)
    for entry in (EntryDecoder().open(single), packed(1_000_000)):
        (message,) = await EntryDecoder().decode(entry, room=2_000_000)
        assert message.size + MESSAGE_OVERHEAD == entry.claimed_size()
    entry = EntryDecoder().open(zipped_batch(2_000, size=200_000))
    found = await EntryDecoder().decode(entry, room=2_000_000)
    assert sum(message.size + MESSAGE_OVERHEAD for message in found) <= entry.claimed_size()


async def test_a_part_of_a_batch_needs_room_for_its_messages_only() -> None:
    entry = EntryDecoder().open(zipped_batch(10_000))
    decoder = EntryDecoder(size_max=5_000_000)
    room = entry.claimed_size(100)
    assert room == 10_000 * 6 + 100 * MESSAGE_SIZE
    assert [m.batch_index for m in await decoder.decode(entry, room=room, first=500, count_max=100)] == [
        *range(500, 600)
    ]
    with pytest.raises(RoomNeeded) as caught:
        await decoder.decode(entry, room=room, first=500, count_max=101)
    assert caught.value.size == room + MESSAGE_SIZE


async def test_properties_count_as_what_they_take_in_memory() -> None:
    """The smallest property is six bytes of an entry, and a hundred in memory."""
    single = SingleMessageMetadata(payload_size=0)
    for _ in range(1_000):
        single.properties.add(key="", value="")
    head = single.SerializeToString()
    payload = (len(head).to_bytes(4, "big") + head) * 20
    metadata = MessageMetadata(producer_name="p", sequence_id=0, publish_time=1, num_messages_in_batch=20)
    metadata.compression, metadata.uncompressed_size = ZLIB, len(payload)
    head = metadata.SerializeToString()
    entry = len(head).to_bytes(4, "big") + head + zlib.compress(payload)
    decoder = EntryDecoder(size_max=3_000_000)
    with pytest.raises(RoomNeeded):
        await decoder.decode(decoder.open(entry), room=2_000_000)
    assert len(await decoder.decode(decoder.open(entry), room=3_000_000)) == 20


@pytest.mark.parametrize("in_batch", [False, True])
async def test_metadata_above_the_limit_is_not_parsed(in_batch: bool) -> None:
    decoder = EntryDecoder()
    for size, is_readable in ((METADATA_READ_SIZE_MAX - 200, True), (METADATA_READ_SIZE_MAX + 200, False)):
        metadata = MessageMetadata(producer_name="p", sequence_id=0, publish_time=1)
        single = SingleMessageMetadata(payload_size=0)
        (single if in_batch else metadata).properties.add(key="k", value="v" * size)
        payload = b""
        if in_batch:
            metadata.num_messages_in_batch = 1
            head = single.SerializeToString()
            payload = len(head).to_bytes(4, "big") + head
        head = metadata.SerializeToString()
        entry = len(head).to_bytes(4, "big") + head + payload
        if is_readable:
            assert (await decoder.decode(decoder.open(entry), room=1_000))[0].properties["k"] == "v" * size
        else:
            with pytest.raises(UnreadableMessage, match="metadata"):
                await decoder.decode(decoder.open(entry), room=1_000)
