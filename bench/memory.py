"""Measure a bookie's resident memory under adverse load and compare it with its memory budget.

    python bench/memory.py --seconds 30

A bookie process with in-memory metadata is started and filled with entries. The load then has, at the same time, ten or
more readers that request far more than they read from their sockets, a catch-up scan of all entries, and writers at
full speed, some with large entries. VmRSS and its parts are sampled from `/proc/<pid>/status`. The test passes if no
sample exceeds `--budget-mib` by more than 15 %. Exit codes: 0 passed, 1 failed.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from bindery_core.formats.ledger_metadata import LedgerMetadata, Segment
from bindery_core.formats.ledger_metadata_codec import encode
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.wire import v2
from bindery_core.wire.framing import FrameDecoder
from bindery_core.wire.messages import AddRequest, ReadRequest, Status

KEY = b"k" * 20
MIB = 1024 * 1024
TOLERANCE = 1.15
FILL_LEDGERS = 40
LARGE = 256 * 1024
SMALL_ONES = list(range(1, FILL_LEDGERS + 1))
LARGE_ONES = [1001, 1002]
WRITTEN_ONES = [2000, 2001, 3000]
ALL_LEDGERS = [*SMALL_ONES, *LARGE_ONES, *WRITTEN_ONES]


def entry(ledger_id: int, entry_id: int, size: int) -> bytes:
    return struct.pack(">qqqq", ledger_id, entry_id, -1, 0) + bytes(size)


async def serve(port: int, http_port: int, directory: str, memory_size_max: int) -> None:
    """Entry point of the bookie process."""
    from bindery_bookie.process import BookieProcess
    from bindery_bookie.settings import BookieSettings
    from bindery_kit.observability.logs import configure
    from bindery_kit.process.runtime import Shutdown
    from bindery_metadata.cluster import initialize_cluster
    from bindery_metadata.layout.layout import LedgersLayout
    from bindery_metadata.stores.memory import MemoryStore, MemoryTree

    configure(service="bookie", level="error")
    tree = MemoryTree()
    layout, store = LedgersLayout(), tree.connect()
    await initialize_cluster(store, layout, randomness=random.Random(1))

    async def connect() -> MemoryStore:
        return tree.connect()

    process = BookieProcess(
        BookieSettings(
            port=port,
            http_port=http_port,
            bookie_id="b0",
            journal_dir=f"{directory}/journal",
            ledger_dir=f"{directory}/ledgers",
            memory_size_max=memory_size_max,
        ),
        Shutdown(),
        connect=connect,
        clock=time.monotonic,
        wall_clock_ms=lambda: time.time_ns() // 1_000_000,
    )
    await process.start()
    metadata = encode(
        LedgerMetadata(
            ensemble_size=1, write_quorum=1, ack_quorum=1, segments=(Segment(EntryId(0), (BookieId("b0"),)),)
        )
    )
    for ledger_id in ALL_LEDGERS:  # a ledger without metadata would be deleted
        await store.create(layout.ledger(LedgerId(ledger_id)), metadata, make_parents=True)
    print("ready", flush=True)
    await asyncio.Event().wait()


@dataclass
class Load:
    """The clients, and the numbers of their operations."""

    port: int
    adds: int = 0
    refused: int = 0
    reads: int = 0
    is_over: bool = False
    filled: dict[int, int] = field(default_factory=dict)
    """Ledger -> number of readable entries."""

    async def _link(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def write(self, ledger_id: int, *, size: int, count: int | None = None, in_flight: int = 512) -> None:
        """Add entries continuously, `in_flight` at a time."""
        reader, writer = await self._link()
        decoder = FrameDecoder()
        room = asyncio.Semaphore(in_flight)
        sent = 0

        async def answers() -> None:
            while True:
                data = await reader.read(1 << 18)
                if not data:
                    return
                for message in decoder.feed(data):
                    status = v2.decode_response(message).status
                    self.adds += status == Status.OK
                    self.refused += status != Status.OK
                    room.release()

        answering = asyncio.create_task(answers())
        while not self.is_over and (count is None or sent < count):
            batch = min(32, in_flight, (count - sent) if count is not None else 32)
            for _ in range(batch):
                await room.acquire()
            ids = range(sent, sent + batch)
            writer.write(v2.encode_requests([AddRequest(0, ledger_id, e, KEY, entry(ledger_id, e, size)) for e in ids]))
            await writer.drain()
            sent += batch
        for _ in range(in_flight):
            await room.acquire()
        self.filled[ledger_id] = sent
        writer.close()
        answering.cancel()

    async def read_slowly(self, ledgers: list[int], seed: int, *, bytes_per_s: int) -> None:
        """Send as many read requests as allowed, and read little of the responses."""
        lots = random.Random(seed)
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", self.port))

        async def ask() -> None:
            while not self.is_over:
                ledger_id = lots.choice(ledgers)
                first = lots.randrange(self.filled[ledger_id])
                last = min(first + 256, self.filled[ledger_id])
                await loop.sock_sendall(
                    sock, v2.encode_requests([ReadRequest(0, ledger_id, e) for e in range(first, last)])
                )
                await asyncio.sleep(0.005)

        asking = asyncio.create_task(ask())
        while not self.is_over:
            await asyncio.sleep(0.1)
            await loop.sock_recv(sock, max(1, bytes_per_s // 10))
        asking.cancel()
        sock.close()

    async def scan(self, ledgers: list[int], *, window: int = 1000) -> None:
        """Read all entries in order, repeatedly."""
        reader, writer = await self._link()
        decoder = FrameDecoder()
        while not self.is_over:
            for ledger_id in ledgers:
                for first in range(0, self.filled[ledger_id], window):
                    ids = range(first, min(first + window, self.filled[ledger_id]))
                    writer.write(v2.encode_requests([ReadRequest(0, ledger_id, e) for e in ids]))
                    missing = len(ids)
                    while missing:
                        data = await reader.read(1 << 18)
                        missing -= sum(1 for _ in decoder.feed(data))
                    self.reads += len(ids)
                    if self.is_over:
                        return


@dataclass
class Memory:
    """Memory samples of a process."""

    pid: int
    most: dict[str, int] = field(default_factory=dict)
    samples: int = 0

    def sample(self) -> dict[str, int]:
        found = {}
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("VmRSS", "RssAnon", "RssFile", "RssShmem"):
                found[name] = int(value.split()[0]) * 1024
        self.samples += 1
        if found["VmRSS"] > self.most.get("VmRSS", 0):
            self.most = found
        return found

    async def watch(self, load: Load) -> None:
        while not load.is_over:
            self.sample()
            await asyncio.sleep(0.05)


def mib(size: int) -> float:
    return round(size / MIB, 1)


async def measure(arguments: argparse.Namespace, port: int, pid: int) -> dict[str, Any]:
    load, memory = Load(port), Memory(pid)
    idle = memory.sample()["VmRSS"]
    watching = asyncio.create_task(memory.watch(load))
    per_ledger = arguments.fill_mib * MIB // FILL_LEDGERS
    small, large = SMALL_ONES, LARGE_ONES
    for at in range(0, FILL_LEDGERS, 4):
        await asyncio.gather(*(load.write(n, size=1024, count=per_ledger // 1024) for n in small[at : at + 4]))
    await asyncio.gather(*(load.write(n, size=LARGE, count=max(32, per_ledger // LARGE), in_flight=16) for n in large))
    filled, added = memory.most["VmRSS"], load.adds
    async with asyncio.TaskGroup() as group:
        for seed in range(arguments.slow_readers):
            group.create_task(load.read_slowly(small + 20 * large, seed, bytes_per_s=64 * 1024))
        group.create_task(load.scan(small))
        group.create_task(load.scan(large, window=32))
        *written, written_large = WRITTEN_ONES
        for n in written:
            group.create_task(load.write(n, size=1024))
        group.create_task(load.write(written_large, size=LARGE, in_flight=64))
        await asyncio.sleep(arguments.seconds)
        load.is_over = True
    watching.cancel()
    return {
        "budget_mib": arguments.budget_mib,
        "limit_mib": round(arguments.budget_mib * TOLERANCE, 1),
        "rss_idle_mib": mib(idle),
        "rss_filled_mib": mib(filled),
        "rss_most_mib": mib(memory.most["VmRSS"]),
        "rss_most_parts_mib": {name: mib(size) for name, size in memory.most.items()},
        "samples": memory.samples,
        "slow_readers": arguments.slow_readers,
        "adds_under_load": load.adds - added,
        "adds_refused": load.refused,
        "reads_of_scans": load.reads,
    }


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--budget-mib", type=int, default=384)
    parser.add_argument("--fill-mib", type=int, default=400, help="MiB stored before the load begins")
    parser.add_argument("--slow-readers", type=int, default=20)
    parser.add_argument("--directory", help="directory of the bookie (default: a temporary one)")
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        port, http_port, directory, size = arguments.serve
        uvloop.run(serve(int(port), int(http_port), directory, int(size)))
        return 0
    with tempfile.TemporaryDirectory(prefix="bindery-memory-", dir=arguments.directory) as directory:
        port, http_port = free_port(), free_port()
        words = [str(port), str(http_port), directory, str(arguments.budget_mib * MIB)]
        child = subprocess.Popen([sys.executable, __file__, "--serve", *words], stdout=subprocess.PIPE, env=os.environ)
        try:
            assert child.stdout is not None
            if child.stdout.readline() != b"ready\n":
                print("the bookie did not start", file=sys.stderr)
                return 1
            result = uvloop.run(measure(arguments, port, child.pid))
        finally:
            child.kill()
            child.wait()
    print(json.dumps(result, indent=2))
    if result["rss_most_mib"] > result["limit_mib"]:
        print(f"WRONG: {result['rss_most_mib']} MiB resident, more than {result['limit_mib']}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
