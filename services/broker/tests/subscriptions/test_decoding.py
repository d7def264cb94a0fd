"""Large entries are decoded in a thread, few at a time, and within the limit; small ones at once."""

import asyncio
import threading
import zlib

import pytest
from bindery_broker.subscriptions.decoding import LARGE_MAX, EntryDecoder, RoomNeeded
from bindery_pulsar.message_codec import METADATA_READ_SIZE_MAX, PackedEntry, UnreadableMessage
from bindery_pulsar.pulsar_messages_pb2 import ZLIB, MessageMetadata, SingleMessageMetadata
from subscription_parts import zipped


async def test_small_entries_are_decoded_without_a_switch_of_tasks() -> None:
    ran = []
    asyncio.get_running_loop().call_soon(ran.append, True)
    (message,) = await EntryDecoder().decode(zipped(1_000), room=1_000)
    assert len(message.payload) == 1_000
    assert not ran


async def test_the_loop_goes_on_while_a_large_entry_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()
    decode = PackedEntry.decode

    def watched(self: PackedEntry, *, size_max: int) -> list[object]:
        threads.add(threading.get_ident())
        return decode(self, size_max=size_max)  # type: ignore[return-value]

    monkeypatch.setattr(PackedEntry, "decode", watched)
    (message,) = await EntryDecoder().decode(zipped(1_000_000), room=1_000_000)
    assert len(message.payload) == 1_000_000
    assert threading.get_ident() not in threads


async def test_few_large_entries_are_decoded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    running = most = 0
    lock, release = threading.Lock(), threading.Event()

    def slow(self: PackedEntry, *, size_max: int) -> list[object]:
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
    await asyncio.gather(*(decoder.decode(zipped(100_000), room=100_000) for _ in range(6)))
    assert most == LARGE_MAX


async def test_an_entry_above_the_limit_is_refused() -> None:
    decoder = EntryDecoder(size_max=1_000_000)
    assert len((await decoder.decode(zipped(1_000_000), room=2_000_000))[0].payload) == 1_000_000
    with pytest.raises(UnreadableMessage):
        await decoder.decode(zipped(1_000_001), room=2_000_000)


async def test_an_entry_that_does_not_fit_is_not_decoded_until_there_is_room() -> None:
    decoder = EntryDecoder(size_max=2_000_000)
    with pytest.raises(RoomNeeded) as caught:
        await decoder.decode(zipped(1_000_000), room=999_999)
    assert caught.value.size == 2_000_000
    assert await decoder.decode(zipped(1_000_000), room=1_000_000)
    assert await decoder.decode(zipped(1_000_000), room=caught.value.size)


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
        await decoder.decode(entry, room=2_000_000)
    assert len(await decoder.decode(entry, room=3_000_000)) == 20


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
            assert (await decoder.decode(entry, room=1_000))[0].properties["k"] == "v" * size
        else:
            with pytest.raises(UnreadableMessage, match="metadata"):
                await decoder.decode(entry, room=1_000)
