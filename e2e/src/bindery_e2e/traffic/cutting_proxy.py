"""A TCP proxy on loopback that cuts connections at random: before, within and after a request, and before its answer.

Clients open a connection for each request. What happens to a connection is drawn when it arrives:

| fate         | the broker gets                  | the client gets                       |
|--------------|----------------------------------|---------------------------------------|
| pass         | the request                      | the answer                            |
| cut-before   | nothing                          | a closed connection                   |
| cut-within   | the first half of the request    | a closed connection                   |
| cut-after    | the request                      | a closed connection, at once          |
| drop-answer  | the request                      | a closed connection once it is served |
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Final
from urllib.parse import urlsplit

FATES: Final = {"pass": 0.6, "cut-before": 0.05, "cut-within": 0.05, "cut-after": 0.15, "drop-answer": 0.15}
READ_SIZE: Final = 64 * 2**10
ANSWER_S_MAX: Final = 60.0


class CuttingProxy:
    def __init__(self, target: str, *, seed: int) -> None:
        """`target`: URL of a broker."""
        parts = urlsplit(target)
        assert parts.hostname is not None
        assert parts.port is not None
        self._target = parts.hostname, parts.port
        self._random = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self.fates: Counter[str] = Counter()
        self.url = ""

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=ANSWER_S_MAX)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fate = self._random.choices(list(FATES), list(FATES.values()))[0]
        self.fates[fate] += 1
        try:
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(ANSWER_S_MAX):
                    await self._handle(fate, reader, writer)
        finally:
            writer.transport.abort()

    async def _handle(self, fate: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = 0
        for line in head.split(b"\r\n"):
            if line.lower().startswith(b"content-length:"):
                size = int(line.partition(b":")[2])
        lines = [line for line in head.split(b"\r\n") if line and not line.lower().startswith(b"connection:")]
        head = b"\r\n".join([*lines, b"Connection: close", b"", b""])
        request = head + await reader.readexactly(size)
        if fate == "cut-before":
            return
        broker_reader, broker_writer = await asyncio.open_connection(*self._target)
        try:
            broker_writer.write(request[: len(request) // 2] if fate == "cut-within" else request)
            await broker_writer.drain()
            if fate == "cut-within":
                return
            if fate == "cut-after":
                writer.transport.abort()
            while data := await broker_reader.read(READ_SIZE):
                if fate == "drop-answer":
                    return
                if fate == "pass":
                    writer.write(data)
                    await writer.drain()
        finally:
            broker_writer.transport.abort()
