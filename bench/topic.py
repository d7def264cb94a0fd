"""Measure the broker's CPU time per message produced and consumed: codec, managed ledger, cursor. No network or disk.

    .venv/bin/python bench/topic.py

Requests of 1,000 messages (or 1,000 requests of one) over ledgers in memory, whose own cost is included: it is small.
The last rows decode an entry with a batch of 1,000 messages of 128 bytes, not compressed and in each compression.
Best of several rounds, microseconds per message.
"""

import argparse
import asyncio
import logging
import random
import time
import zlib
from collections.abc import Awaitable, Callable

import cramjam
import crc32c
import structlog
from bindery_broker.managed_ledger import ManagedLedger, ManagedLedgerSettings
from bindery_broker.topics.batching import encode_entries, message_ids, plan_entries
from bindery_client.memory.memory import MemoryLedgerClient
from bindery_metadata.stores.memory import MemoryTree
from bindery_pulsar.compression import NAMES
from bindery_pulsar.message_codec import OutgoingMessage, decode_entry, encode_batch
from bindery_pulsar.message_id import Position
from bindery_pulsar.pulsar_messages_pb2 import LZ4, SNAPPY, ZLIB, ZSTD, MessageMetadata

COUNT = 1_000
ROUNDS = 10
SIZE_MAX = 10**9
HEAD_SIZE = 10
"""Bytes of magic, checksum and size of the metadata."""


async def best(work: Callable[[], Awaitable[object]]) -> float:
    """Run `work` ROUNDS times. Returns the time of the fastest round in microseconds per message."""
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        await work()
        seconds.append(time.perf_counter() - started)
    return min(seconds) / COUNT * 1e6


def batches() -> dict[str, bytes]:
    """Return an entry with the same batch of text in each compression."""
    randomness = random.Random(1)
    words = ["".join(randomness.choices("abcdefghijklmnop", k=6)) for _ in range(1_000)]
    messages = [
        OutgoingMessage(
            payload=" ".join(randomness.choices(words, k=18)).encode(), key="key", properties={"path": "a/b"}
        )
        for _ in range(COUNT)
    ]
    plain = encode_batch(messages, producer_name="p", publish_time_ms=1, sequence_ids=range(COUNT))
    start = HEAD_SIZE + int.from_bytes(plain[HEAD_SIZE - 4 : HEAD_SIZE], "big")
    payload = plain[start:]
    compressed = {
        LZ4: bytes(cramjam.lz4.compress_block(payload, store_size=False)),
        ZLIB: zlib.compress(payload),
        ZSTD: bytes(cramjam.zstd.compress(payload)),
        SNAPPY: bytes(cramjam.snappy.compress_raw(payload)),
    }
    entries = {"not compressed": plain}
    for compression, smaller in compressed.items():
        metadata = MessageMetadata.FromString(plain[HEAD_SIZE:start])
        metadata.compression, metadata.uncompressed_size = compression, len(payload)
        head = metadata.SerializeToString()
        rest = len(head).to_bytes(4, "big") + head + smaller
        entries[NAMES[compression]] = plain[:2] + crc32c.crc32c(rest).to_bytes(4, "big") + rest
    return entries


async def measure() -> None:
    topic = await ManagedLedger.open(
        "public/default/persistent/bench",
        client=MemoryLedgerClient(),
        store=MemoryTree().connect(),
        clock=lambda: time.time_ns() // 10**6,
        settings=ManagedLedgerSettings(),
    )
    messages = [OutgoingMessage(payload=bytes(128), key="key", properties={"path": "a/b/c"}) for _ in range(COUNT)]

    async def produce(batch: bool) -> None:
        plan = plan_entries(messages, batch=batch)
        entries = encode_entries(messages, plan, producer_name="p", publish_time_ms=1, sequence_id=0)
        message_ids(plan, await topic.add_many(entries))

    async def produce_one() -> None:
        plan = plan_entries(messages[:1])
        entries = encode_entries(messages[:1], plan, producer_name="p", publish_time_ms=1, sequence_id=0)
        message_ids(plan, await topic.add_many(entries))

    async def produce_apart() -> None:
        await asyncio.gather(*(produce_one() for _ in range(COUNT)))

    print(f"one request, batched                       {await best(lambda: produce(True)):6.2f}")
    first = await topic.add_many([b""])
    print(f"one request, one entry per message         {await best(lambda: produce(False)):6.2f}")
    print(f"{COUNT} requests at once, one entry each  {await best(produce_apart):6.2f}")

    start = topic.next_position(first[0])
    cursor = await topic.open_cursor("s", start=start)

    async def receive() -> None:
        read = await cursor.read_unacked(start, entries_max=COUNT, size_max=SIZE_MAX)
        assert sum(len(decode_entry(entry.payload)) for entry in read.entries) == COUNT

    async def acknowledge(step: int) -> None:
        await cursor.seek(start)
        for offset in range(step):
            positions = [Position(start.ledger_id, start.entry_id + i) for i in range(offset, COUNT, step)]
            await cursor.ack_many(positions)

    print(f"read from the cache, decode                {await best(receive):6.2f}")
    for name, entry in batches().items():

        async def decode(entry: bytes = entry) -> None:
            assert len(decode_entry(entry)) == COUNT

        print(f"decode a batch, {name:<26} {await best(decode):6.2f}")
    print(f"acknowledge in order                       {await best(lambda: acknowledge(1)):6.2f}")
    print(f"acknowledge every other, then the rest     {await best(lambda: acknowledge(2)):6.2f}")
    await topic.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="number of rounds; the best one counts")
    ROUNDS = parser.parse_args().rounds
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    asyncio.run(measure())
