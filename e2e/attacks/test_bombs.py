"""Read entries that decompress to a thousand times their size through a broker in a container's memory.

Who can write to bookies and ZooKeeper, as every client of Pulsar's brokers can in effect, chooses the entries of a
topic. While attackers read them as fast as they can, each call of a healthy client succeeds within HEALTHY_S, and
the broker lives.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest
from bindery_e2e.attacks.foreign_topic import compressed_batch, compressed_message, store_topic
from bindery_e2e.attacks.services import HOST, Services, services

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
ATTACK_S: Final = float(os.environ.get("BINDERY_ATTACK_S", "5"))
"""Seconds of each attack."""
HEALTHY_S: Final = 5.0
"""Maximum seconds of each request of the healthy client."""
ATTACKER: Final = "127.0.0.2"
READERS: Final = 40
ENTRIES: Final = 100
MIB: Final = 2**20
READABLE: Final = 200
UNREADABLE: Final = 422
BUSY: Final = 429
ENDED: Final = 0
"""Instead of a status: the broker ended the connection, because the client read too slowly."""

BOMBS: Final = {
    "almost-16-MiB": ([compressed_message(16 * MIB - 4096)] * ENTRIES, READABLE),
    "128-MiB": ([compressed_message(128 * MIB - 4096)] * ENTRIES, UNREADABLE),
    "a-million-messages": ([compressed_batch(1_000_000)] * ENTRIES, UNREADABLE),
    "properties": ([compressed_batch(100, properties=5_000)] * ENTRIES, UNREADABLE),
}
"""Entries of a topic, and the status of a request that reads its first."""


async def test_compressed_entries_neither_kill_nor_block_a_broker(tmp_path: Path) -> None:
    async with services(tmp_path, "broker") as running:
        for name, (entries, _) in BOMBS.items():
            await store_topic(running.zookeeper, name, entries)
            assert sum(map(len, entries)) < ENTRIES * MIB // 4
        await asyncio.sleep(2)
        print(f"\n    {running.resident_size('broker') // MIB} MiB before the attacks")
        for name, (_, status) in BOMBS.items():
            await withstand(running, name, status)


async def withstand(running: Services, topic: str, status: int) -> None:
    statuses: Counter[int] = Counter()
    readers = [asyncio.create_task(read(running, topic, number, statuses)) for number in range(READERS)]
    slowest_s, peak_size, until = 0.0, 0, time.monotonic() + ATTACK_S
    try:
        while time.monotonic() < until or not statuses[status]:
            slowest_s = max(slowest_s, await running.healthy_call("broker"))
            running.check()
            peak_size = max(peak_size, running.resident_size("broker"))
            assert slowest_s <= HEALTHY_S, f"{topic}: a request of the healthy client took {slowest_s:.1f} s"
            for reader in readers:
                if reader.done():
                    reader.result()
            await asyncio.sleep(0.1)
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    assert set(statuses) <= {status, BUSY, ENDED}, f"{topic}: {statuses}"
    print(
        f"    {topic}: {numbers(statuses.items())} responses; slowest healthy request {slowest_s:.2f} s, "
        f"at most {peak_size // MIB} MiB"
    )


def numbers(statuses: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"{count} with {status}" for status, count in sorted(statuses))


async def read(running: Services, topic: str, number: int, statuses: Counter[int]) -> None:
    """Read the topic again and again: every second reader by subscriptions, each of which is new."""
    path = f"/v1/topics/public/default/{topic}"
    subscription = 0
    while True:
        if number % 2:
            status = await request(running.ports["broker"], f"GET {path}/messages?start=earliest&max=100", b"")
        else:
            subscription += 1
            body = b'{"consumer": "c", "initial": "earliest", "max": 100}'
            status = await request(
                running.ports["broker"], f"POST {path}/subscriptions/{number}-{subscription}/receive", body
            )
        statuses[status] += 1


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
