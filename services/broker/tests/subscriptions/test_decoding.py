"""Large entries are decoded in a thread, few at a time, and within the limit; small ones at once."""

import asyncio
import threading
import zlib

import pytest
from bindery_broker.subscriptions.decoding import LARGE_MAX, EntryDecoder
from bindery_pulsar.message_codec import PackedEntry, UnreadableMessage
from bindery_pulsar.pulsar_messages_pb2 import ZLIB, MessageMetadata


def zipped(size: int) -> bytes:
    """Return an entry that decompresses to `size` bytes."""
    metadata = MessageMetadata(
        producer_name="p", sequence_id=0, publish_time=1, compression=ZLIB, uncompressed_size=size
    ).SerializeToString()
    return len(metadata).to_bytes(4, "big") + metadata + zlib.compress(bytes(size))


async def test_small_entries_are_decoded_without_a_switch_of_tasks() -> None:
    ran = []
    asyncio.get_running_loop().call_soon(ran.append, True)
    (message,) = await EntryDecoder().decode(zipped(1_000))
    assert len(message.payload) == 1_000
    assert not ran


async def test_the_loop_goes_on_while_a_large_entry_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()
    decode = PackedEntry.decode

    def watched(self: PackedEntry, *, size_max: int) -> list[object]:
        threads.add(threading.get_ident())
        return decode(self, size_max=size_max)  # type: ignore[return-value]

    monkeypatch.setattr(PackedEntry, "decode", watched)
    (message,) = await EntryDecoder().decode(zipped(1_000_000))
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
    await asyncio.gather(*(decoder.decode(zipped(100_000)) for _ in range(6)))
    assert most == LARGE_MAX


async def test_an_entry_above_the_limit_is_refused() -> None:
    decoder = EntryDecoder(size_max=1_000_000)
    assert len((await decoder.decode(zipped(1_000_000)))[0].payload) == 1_000_000
    with pytest.raises(UnreadableMessage):
        await decoder.decode(zipped(1_000_001))
