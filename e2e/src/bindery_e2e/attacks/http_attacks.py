"""Attacks on an HTTP port: thousands of connections from other loopback addresses than the healthy client's.

| attack        | each connection                                                                              |
|---------------|----------------------------------------------------------------------------------------------|
| silent        | sends nothing                                                                                |
| heads         | sends 31 KiB of a head and waits                                                             |
| large heads   | sends complete requests with heads of 31 KiB that are answered late, or never read           |
| slow bodies   | announces a large body, sends a part at once, then a byte per second                         |
| unread        | requests large responses and reads nothing                                                   |
| pipelines     | sends many small requests at once and reads nothing                                          |
| garbage       | sends random bytes, and connects again when it is disconnected                               |

An attack keeps its number of connections: each that ends is opened again, at most `per_s` times per second in all. The
attacks are on memory: they must not take all of the processor, for which no port has a limit.
"""

import asyncio
import contextlib
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, cast

KIB: Final = 1024
SOURCES: Final = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
"""Addresses of the attackers."""
PER_S: Final = 2000
"""Default maximum number of connections that are opened per second."""
CONNECT_TIMEOUT_S: Final = 10.0

Attack = Callable[["Attacker"], Awaitable[None]]


class Attacker(asyncio.Protocol):
    """A connection that reads only what it is told to."""

    def __init__(self, number: int, *, reads: bool) -> None:
        self.number = number
        self.lost = asyncio.Event()
        self.received_size = 0
        self._reads = reads
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        self.transport = transport
        if not self._reads:
            transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        self.received_size += len(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()

    def send(self, data: bytes) -> None:
        if not self.lost.is_set():
            self.transport.write(data)


class Siege:
    """Keeps `count` connections of one attack open."""

    def __init__(self, port: int, attack: Attack, *, count: int, reads: bool, per_s: int) -> None:
        self._port, self._attack, self._count, self._reads, self._per_s = port, attack, count, reads, per_s
        self._tasks: list[asyncio.Task[None]] = []
        self._tickets = asyncio.Semaphore(0)
        self.counts: Counter[str] = Counter()

    @property
    def open(self) -> int:
        return self.counts["opened"] - self.counts["ended"]

    async def run(self) -> None:
        self._tasks = [asyncio.create_task(self._keep(number)) for number in range(self._count)]
        while True:
            for _ in range(self._per_s // 10):
                self._tickets.release()
            await asyncio.sleep(0.1)
            while not self._tickets.locked() and self._tickets._value > self._per_s:
                await self._tickets.acquire()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._tickets.acquire()
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * KIB)
            sock.setblocking(False)
            attacker = Attacker(number, reads=self._reads)
            try:
                sock.bind((SOURCES[number % len(SOURCES)], 0))
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await loop.sock_connect(sock, ("127.0.0.1", self._port))
                await loop.create_connection(lambda one=attacker: one, sock=sock)  # type: ignore[misc]
            except (OSError, TimeoutError):
                sock.close()
                self.counts["not connected"] += 1
                await asyncio.sleep(0.5)
                continue
            self.counts["opened"] += 1
            try:
                await self._attack(attacker)
                await attacker.lost.wait()
            finally:
                self.counts["ended"] += 1
                attacker.transport.abort()
            await asyncio.sleep(random.random())


@contextlib.asynccontextmanager
async def siege(
    port: int, attack: Attack, *, count: int, reads: bool = False, per_s: int = PER_S
) -> AsyncIterator[Siege]:
    """Attack during the block."""
    one = Siege(port, attack, count=count, reads=reads, per_s=per_s)
    task = asyncio.create_task(one.run())
    try:
        yield one
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await one.stop()


async def silent(_: Attacker) -> None:
    return


async def heads(attacker: Attacker) -> None:
    attacker.send(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Filler: " + b"a" * (31 * KIB))


async def garbage(attacker: Attacker) -> None:
    attacker.send(random.randbytes(2000))


def large_heads(method: str, path: str, *, body: str = "") -> Attack:
    lines = b"".join(b"X-%d: %s\r\n" % (number, b"a" * 300) for number in range(90))

    async def attack(attacker: Attacker) -> None:
        content = body.encode()
        start = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
        attacker.send(start.encode() + b"Content-Type: application/json\r\n" + lines + b"\r\n" + content)

    return attack


def slow_bodies(path: str, *, size: int, at_once: int, content_type: str) -> Attack:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\nContent-Length: {size}\r\n\r\n"

    async def attack(attacker: Attacker) -> None:
        attacker.send(head.encode() + b"1" * at_once)
        while not attacker.lost.is_set():
            await asyncio.sleep(1)
            attacker.send(b"1")

    return attack


def unread(path: str, *, times: int) -> Attack:
    async def attack(attacker: Attacker) -> None:
        attacker.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() * times)

    return attack


def pipelines(path: str) -> Attack:
    async def attack(attacker: Attacker) -> None:
        request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        attacker.send(request * 2000)

    return attack
