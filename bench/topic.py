"""Measure the broker's CPU time per message produced and consumed: codec, managed ledger, cursor. No network or disk.

    .venv/bin/python bench/topic.py

Requests of 1,000 messages (or 1,000 requests of one) over ledgers in memory, whose own cost is included: it is small.
Best of several rounds, microseconds per message.
"""

import argparse
import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import structlog
from bindery_broker.managed_ledger import ManagedLedger, ManagedLedgerSettings
from bindery_broker.topics.batching import encode_entries, message_ids, plan_entries
from bindery_client.memory.memory import MemoryLedgerClient
from bindery_metadata.stores.memory import MemoryTree
from bindery_pulsar.message_codec import OutgoingMessage, decode_entry
from bindery_pulsar.message_id import Position

COUNT = 1_000
ROUNDS = 10
SIZE_MAX = 10**9


async def best(work: Callable[[], Awaitable[object]]) -> float:
    """Run `work` ROUNDS times. Returns the time of the fastest round in microseconds per message."""
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        await work()
        seconds.append(time.perf_counter() - started)
    return min(seconds) / COUNT * 1e6


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
    print(f"acknowledge in order                       {await best(lambda: acknowledge(1)):6.2f}")
    print(f"acknowledge every other, then the rest     {await best(lambda: acknowledge(2)):6.2f}")
    await topic.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="number of rounds; the best one counts")
    ROUNDS = parser.parse_args().rounds
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    asyncio.run(measure())
