"""Read large entries, and others that decompress to a thousand times their size, in a container's memory.

Who can write to bookies and ZooKeeper, as every client of Pulsar's brokers can in effect, chooses the entries of a
topic. While attackers read them as fast as they can, each call of a healthy client succeeds within HEALTHY_S, and
the broker lives. Afterwards its memory returns to what it was in normal use.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from bindery_e2e.attacks.foreign_topic import compressed_batch, compressed_message, plain_message, store_topic
from bindery_e2e.attacks.services import HOST, Services, services
from bindery_pulsar.pulsar_messages_pb2 import LZ4, ZSTD

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
ATTACK_S: Final = float(os.environ.get("BINDERY_ATTACK_S", "5"))
"""Seconds of each attack."""
HEALTHY_S: Final = 5.0
"""Maximum seconds of each request of the healthy client."""
ATTACKER: Final = "127.0.0.2"
READERS: Final = 40
ENTRIES: Final = 100
MEMORY_GROWTH_MAX: Final = 1.2
"""Memory after an attack, compared with that before it."""
CACHE_SIZE_MAX: Final = 8 * 2**20
"""The cache of entries is full before the attacks, as it is after them."""
RETURN_S: Final = 30.0
"""Maximum seconds until it is reached: messages that were read ahead are given up after ten."""
BATCHES: Final = "batches"
BATCH_COUNT: Final = 40_000
"""Messages of a batch that takes almost as much memory as an entry may."""
SUBSCRIPTIONS: Final = 200
"""Number of subscriptions that receive from these batches."""
SUBSCRIPTIONS_EACH: Final = 2
"""Number of subscriptions of each reader of the other topics."""
MIB: Final = 2**20
READABLE: Final = 200
UNREADABLE: Final = 422
BUSY: Final = 429
ENDED: Final = 0
"""Instead of a status: the broker ended the connection, because the client read too slowly."""

BOMBS: Final = {
    "plain": ([plain_message(128 * 2**10)] * ENTRIES, READABLE),
    "128-MiB": ([compressed_message(128 * MIB - 4096)] * ENTRIES, READABLE),
    "a-million-messages": ([compressed_batch(1_000_000)] * ENTRIES, READABLE),
    "properties": ([compressed_batch(100, properties=5_000)] * ENTRIES, UNREADABLE),
    "almost-16-MiB": ([compressed_message(16 * MIB - 4096)] * ENTRIES, READABLE),
    "almost-16-MiB-zstd": ([compressed_message(16 * MIB - 4096, compression=ZSTD)] * ENTRIES, READABLE),
    "almost-16-MiB-lz4": ([compressed_message(16 * MIB - 4096, compression=LZ4)] * ENTRIES, READABLE),
}
"""Entries of a topic, and the status of a request that reads its first. The first three are delivered as they are
stored, and the last three decoded, so that the broker holds messages for consumers that have gone."""


async def test_compressed_entries_neither_kill_nor_block_a_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKER_LEDGER_CACHE_SIZE_MAX", str(CACHE_SIZE_MAX))
    async with services(tmp_path, "broker") as running:
        for name, (entries, _) in BOMBS.items():
            await store_topic(running.zookeeper, name, entries)
            assert sum(map(len, entries)) < ENTRIES * MIB // 4
        await store_topic(running.zookeeper, BATCHES, [compressed_batch(BATCH_COUNT)] * ENTRIES)
        await running.serve_normally("broker")
        await asyncio.sleep(2)
        before_size = running.resident_size("broker")
        print(f"\n    {before_size // MIB} MiB before the attacks")
        await withstand_batches(running)
        for name, (_, status) in BOMBS.items():
            await withstand_bombs(running, name, status)
        await memory_returns(running, before_size)


async def withstand_batches(running: Services) -> None:
    """Receive some messages of batches of very many messages by each of SUBSCRIPTIONS, whose consumers stay."""
    statuses: Counter[int] = Counter()
    served: set[int] = set()
    readers = [receive(running, number, statuses, served) for number in range(READERS)]
    await withstand(running, BATCHES, readers, statuses, {READABLE}, has_ended=lambda: len(served) == SUBSCRIPTIONS)


async def withstand_bombs(running: Services, topic: str, status: int) -> None:
    statuses: Counter[int] = Counter()
    readers = [read(running, topic, number, statuses) for number in range(READERS)]
    await withstand(running, topic, readers, statuses, {status}, has_ended=lambda: bool(statuses[status]))


async def withstand(
    running: Services,
    topic: str,
    attackers: Sequence[Coroutine[Any, Any, None]],
    statuses: Counter[int],
    expected: set[int],
    *,
    has_ended: Callable[[], bool],
) -> None:
    """Run `attackers`, which count the responses in `statuses`, for ATTACK_S, and until `has_ended`."""
    tasks = [asyncio.create_task(attacker) for attacker in attackers]
    slowest_s, peak_size, until = 0.0, 0, time.monotonic() + ATTACK_S
    try:
        while time.monotonic() < until or not has_ended():
            try:
                slowest_s = max(slowest_s, await running.healthy_call("broker"))
            except httpx.TransportError:
                running.check()
                raise
            running.check()
            peak_size = max(peak_size, running.resident_size("broker"))
            assert slowest_s <= HEALTHY_S, f"{topic}: a request of the healthy client took {slowest_s:.1f} s"
            for task in tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.1)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert set(statuses) <= {*expected, BUSY, ENDED}, f"{topic}: {statuses}"
    print(
        f"    {topic}: {numbers(statuses.items())} responses; slowest healthy request {slowest_s:.2f} s, "
        f"at most {peak_size // MIB} MiB"
    )


async def memory_returns(running: Services, before_size: int) -> None:
    began = time.monotonic()
    while (size := running.resident_size("broker")) > MEMORY_GROWTH_MAX * before_size:
        assert time.monotonic() < began + RETURN_S, f"{size // MIB} MiB, {before_size // MIB} before the attacks"
        running.check()
        await asyncio.sleep(0.5)
    print(f"    {size // MIB} MiB {time.monotonic() - began:.0f} s after the attacks")


def numbers(statuses: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"{count} with {status}" for status, count in sorted(statuses))


async def read(running: Services, topic: str, number: int, statuses: Counter[int]) -> None:
    """Read the topic again and again: every second reader by several subscriptions in turn.

    There are few of them, and few messages in delivery, because both take memory as long as they exist.
    """
    path = f"/v1/topics/public/default/{topic}"
    subscription = 0
    while True:
        if number % 2:
            status = await request(running.ports["broker"], f"GET {path}/messages?start=earliest&max=100", b"")
        else:
            subscription = (subscription + 1) % SUBSCRIPTIONS_EACH
            body = b'{"consumer": "c", "initial": "earliest", "max": 100}'
            status = await request(
                running.ports["broker"], f"POST {path}/subscriptions/{number}-{subscription}/receive", body
            )
        statuses[status] += 1


async def receive(running: Services, number: int, statuses: Counter[int], served: set[int]) -> None:
    """Receive from every READERS-th subscription in turn, and add those that had messages to `served`."""
    path = f"/v1/topics/public/default/{BATCHES}/subscriptions"
    while True:
        for subscription in range(number, SUBSCRIPTIONS, READERS):
            kind = "exclusive" if subscription % 2 else "shared"
            body = f'{{"consumer": "c", "type": "{kind}", "initial": "earliest", "max": 1, "session_ttl_ms": 3600000}}'
            status = await request(running.ports["broker"], f"POST {path}/{subscription}/receive", body.encode())
            statuses[status] += 1
            if status == READABLE:
                served.add(subscription)


async def request(port: int, line: str, body: bytes) -> int:
    """Return the status of the response, or ENDED, once all of the response was read."""
    reader, writer = await asyncio.open_connection(HOST, port, local_addr=(ATTACKER, 0), limit=MIB)
    try:
        head = f"{line} HTTP/1.1\r\nHost: {HOST}:{port}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status = (await reader.readline()).split()
        while await reader.read(MIB):
            pass
        return int(status[1]) if status else ENDED
    except ConnectionError:
        return ENDED
    finally:
        writer.close()
