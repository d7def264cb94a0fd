"""Measure the ledger client: CPU time per entry and adds per second, with bookies that only acknowledge.

    .venv/bin/python bench/client.py                      # the table
    .venv/bin/python bench/client.py --real               # the same through real bookies that fsync
    .venv/bin/python bench/client.py --profile            # where the time goes
    .venv/bin/python bench/client.py --in-flight 1 1000 --size 128 --seconds 5

By default, the bookies run in another process and store nothing, so the results show the cost of the client alone.
`--real` starts a throwaway cluster: a real ZooKeeper and three bookies, on the disk of TMPDIR. "us CPU" is the process
time of the client (loop, codec, state machine, callers' tasks) divided by the number of confirmed entries. Each entry
is sent to three bookies (E=3 Qw=3 Qa=2). A "single" call adds one entry, a "100 each" call adds a hundred.
"""

import argparse
import asyncio
import cProfile
import os
import platform
import pstats
import random
import subprocess
import sys
import time
from collections.abc import Awaitable
from typing import cast

import uvloop
from bindery.standalone.throwaway import ThrowawayCluster
from bindery_client.client import LedgerClient
from bindery_client.ledger.writer import WriteHandle
from bindery_client.settings import ClientSettings
from bindery_core.formats.bookie_service_info import encode, of_bookie
from bindery_core.ids import BookieId
from bindery_core.wire import v3
from bindery_core.wire.framing import FrameDecoder
from bindery_core.wire.messages import AddRequest
from bindery_metadata.bookies.registration import BookieRegistration
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.memory import MemoryTree
from bindery_metadata.stores.zookeeper import ZooKeeperStore

BOOKIES = 3
BATCH = 100
"""Entries per call of the callers with "100 each"."""


class NullBookie(asyncio.Protocol):
    """A bookie that acknowledges adds and stores nothing."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's do not inherit from it
        self.decoder = FrameDecoder()

    def data_received(self, data: bytes) -> None:
        requests = v3.decode_requests(self.decoder.feed(data))
        adds = [request for request in requests if type(request) is AddRequest]
        if adds:
            self.transport.write(v3.encode_add_responses(adds, [0] * len(adds)))


async def serve_bookies() -> None:
    """Entry point of the bookies' process: print the ports, and serve until stdin is closed."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(NullBookie, "127.0.0.1", 0) for _ in range(BOOKIES)]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


async def connect_real(zookeeper: str) -> LedgerClient:
    return await LedgerClient.connect(await ZooKeeperStore.connect(zookeeper), randomness=random.SystemRandom())


async def connect(ports: list[int]) -> LedgerClient:
    tree, layout = MemoryTree(), LedgersLayout()
    store = tree.connect()
    await initialize_cluster(store, layout, randomness=random.Random(1))
    for number, port in enumerate(ports):
        await BookieRegistration(
            store, layout, BookieId(f"bookie-{number}"), encode(of_bookie(host="127.0.0.1", port=port))
        ).register()
    return await LedgerClient.connect(tree.connect(), randomness=random.Random(1), settings=ClientSettings())


async def load(
    writer: WriteHandle, *, in_flight: int, size: int, batch: int, seconds: float
) -> tuple[int, list[float]]:
    """Keep `in_flight` entries in flight for `seconds`. Returns (confirmed entries, latencies of the calls)."""
    payload = bytes(size)
    payloads = [payload] * batch
    end = time.perf_counter() + seconds
    latencies: list[float] = []

    async def caller() -> int:
        count = 0
        while True:
            started = time.perf_counter()
            if started >= end:
                return count
            await writer.add_many(payloads)
            latencies.append(time.perf_counter() - started)
            count += batch

    return sum(await asyncio.gather(*(caller() for _ in range(max(1, in_flight // batch))))), latencies


async def measure(connecting: Awaitable[LedgerClient], args: argparse.Namespace) -> None:
    client = await connecting
    kind = "real bookies" if args.real else "null bookies"
    print(
        f"{platform.machine()} {os.cpu_count()} cores, Python {platform.python_version()}, uvloop, E=Qw=3 Qa=2, {kind}"
    )
    print(f"{'calls':>8} {'in flight':>9} {'bytes':>6} {'adds/s':>9} {'p50 ms':>7} {'p99 ms':>7} {'us CPU':>7}")
    for batch in (1, BATCH):
        for size in args.size:
            for in_flight in args.in_flight:
                if in_flight < batch and batch > 1:
                    continue
                writer = await client.create()
                await load(writer, in_flight=in_flight, size=size, batch=batch, seconds=0.3)
                profile = cProfile.Profile()
                if args.profile:
                    profile.enable()
                cpu, wall = time.process_time(), time.perf_counter()
                count, latencies = await load(writer, in_flight=in_flight, size=size, batch=batch, seconds=args.seconds)
                cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
                profile.disable()
                latencies.sort()
                kind = "single" if batch == 1 else f"{batch} each"
                p50, p99 = latencies[len(latencies) // 2] * 1e3, latencies[len(latencies) * 99 // 100] * 1e3
                print(
                    f"{kind:>8} {in_flight:>9} {size:>6} {count / wall:>9.0f} {p50:>7.2f} {p99:>7.2f} "
                    f"{cpu / count * 1e6:>7.1f}",
                    flush=True,
                )
                if args.profile:
                    pstats.Stats(profile).sort_stats("tottime").print_stats(25)
                await writer.close()
    await client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 32, 256, 1000])
    parser.add_argument("--size", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--real", action="store_true", help="measure with real bookies")
    parser.add_argument("--serve-bookies", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_bookies:
        uvloop.run(serve_bookies())
        return
    if args.real:
        with ThrowawayCluster(bookies=BOOKIES) as cluster:
            uvloop.run(measure(connect_real(cluster.zookeeper), args))
        return
    bookies = subprocess.Popen(
        [sys.executable, __file__, "--serve-bookies"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert bookies.stdout is not None
        ports = [int(port) for port in bookies.stdout.readline().split()]
        uvloop.run(measure(connect(ports), args))
    finally:
        bookies.kill()
        bookies.wait()


if __name__ == "__main__":
    main()
