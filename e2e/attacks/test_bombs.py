"""Read entries that decompress to a thousand times their size through a broker in a container's memory.

Who can write to bookies and ZooKeeper, as every client of Pulsar's brokers can in effect, chooses the entries of a
topic. While attackers read them as fast as they can, each call of a healthy client succeeds within HEALTHY_S, and
the broker lives. Afterwards its memory returns to what it was in normal use.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

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
MEMORY_GROWTH_MAX: Final = 1.2
"""Memory after an attack, compared with that before it."""
RETURN_S: Final = 30.0
"""Maximum seconds until it is reached: messages that were read ahead are given up after ten."""
BATCH_COUNT: Final = 40_000
"""Messages of a batch that takes almost as much memory as an entry may."""
SUBSCRIPTIONS: Final = 200
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
    async with services(tmp_path, inside="broker") as running:
        for name, (entries, _) in BOMBS.items():
            await store_topic(running.zookeeper, name, entries)
            assert sum(map(len, entries)) < ENTRIES * MIB // 4
        before_size = await size_in_normal_use(running)
        for name, (_, status) in BOMBS.items():
            statuses: Counter[int] = Counter()
            readers = [read(running, name, number, statuses) for number in range(READERS)]
            await withstand(running, name, readers, statuses, expected={status})
        await memory_returns(running, before_size)


@pytest.mark.parametrize("kind", ["shared", "exclusive"])
async def test_batches_of_very_many_messages_do_not_take_memory_per_subscription(tmp_path: Path, kind: str) -> None:
    """Each subscription receives some messages of the same batches, and keeps its consumer for an hour."""
    async with services(tmp_path, inside="broker") as running:
        await store_topic(running.zookeeper, "batches", [compressed_batch(BATCH_COUNT)] * ENTRIES)
        before_size = await size_in_normal_use(running)
        statuses: Counter[int] = Counter()
        received: Counter[int] = Counter()
        readers = [receive(running, "batches", kind, number, statuses, received) for number in range(READERS)]
        await withstand(running, "batches", readers, statuses, expected={READABLE}, received=received)
        await memory_returns(running, before_size)


async def size_in_normal_use(running: Services) -> int:
    await running.serve_normally()
    await asyncio.sleep(2)
    size = running.resident_size
    print(f"\n    {size // MIB} MiB before the attacks")
    return size


async def memory_returns(running: Services, before_size: int) -> None:
    began = time.monotonic()
    while (size := running.resident_size) > MEMORY_GROWTH_MAX * before_size:
        assert time.monotonic() < began + RETURN_S, f"{size // MIB} MiB, {before_size // MIB} before the attacks"
        running.check()
        await asyncio.sleep(0.5)
    print(f"    {size // MIB} MiB {time.monotonic() - began:.0f} s after the attacks")


async def withstand(
    running: Services,
    topic: str,
    attackers: Sequence[Coroutine[Any, Any, None]],
    statuses: Counter[int],
    *,
    expected: set[int],
    received: Counter[int] | None = None,
) -> None:
    """Run `attackers`, which count the responses in `statuses`, for ATTACK_S, and until there is an expected one.

    `received`: number of responses with messages by subscription; each of SUBSCRIPTIONS must have one in the end.
    """
    readers = [asyncio.create_task(attacker) for attacker in attackers]
    slowest_s, peak_size, until = 0.0, 0, time.monotonic() + ATTACK_S

    def has_ended() -> bool:
        if received is not None and len(received) < SUBSCRIPTIONS:
            return False
        return time.monotonic() >= until and not expected.isdisjoint(statuses)

    try:
        while not has_ended():
            slowest_s = max(slowest_s, await running.healthy_call("broker"))
            running.check()
            peak_size = max(peak_size, running.resident_size)
            assert slowest_s <= HEALTHY_S, f"{topic}: a request of the healthy client took {slowest_s:.1f} s"
            for reader in readers:
                if reader.done():
                    reader.result()
            await asyncio.sleep(0.1)
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    assert set(statuses) <= {*expected, BUSY, ENDED}, f"{topic}: {statuses}"
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
            status = await request(running.port, f"GET {path}/messages?start=earliest&max=100", b"")
        else:
            subscription += 1
            body = b'{"consumer": "c", "initial": "earliest", "max": 100}'
            status = await request(running.port, f"POST {path}/subscriptions/{number}-{subscription}/receive", body)
        statuses[status] += 1


async def receive(
    running: Services, topic: str, kind: str, number: int, statuses: Counter[int], received: Counter[int]
) -> None:
    """Receive from every READERS-th subscription in turn."""
    path = f"/v1/topics/public/default/{topic}/subscriptions"
    body = f'{{"consumer": "c", "type": "{kind}", "initial": "earliest", "max": 10, "session_ttl_ms": 3600000}}'.encode()
    while True:
        for subscription in range(number, SUBSCRIPTIONS, READERS):
            status = await request(running.port, f"POST {path}/{subscription}/receive", body)
            statuses[status] += 1
            received[subscription] += status == READABLE
            if not received[subscription]:
                del received[subscription]


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
