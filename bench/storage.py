"""Measure the bookie's storage engine without a network: adds with fsync, and catch-up reads from disk.

Run: `python bench/storage.py [--directory DIR] [--seconds S] [--profile]`. Prints a table for docs/benchmarks.md: adds
per second and the latency from `add_many` to its callback, by entries in flight and payload size; then reads per
second. Everything runs in one process on one event loop (uvloop), with the engine's own threads.
"""

import argparse
import asyncio
import cProfile
import platform
import pstats
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop
from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_bookie.storage.settings import StorageSettings
from bindery_core.wire.messages import AddRequest

_HEADER = struct.Struct(">qqqqI")
_BATCH_MAX = 64
"""Entries per `add_many`, about as many as in one read from a socket."""

_KEY = bytes(20)


def entry(ledger_id: int, entry_id: int, payload: bytes) -> bytes:
    return _HEADER.pack(ledger_id, entry_id, entry_id - 1, (entry_id + 1) * len(payload), 0) + payload


class Adder:
    """Keeps a constant number of adds in flight."""

    def __init__(self, engine: StorageEngine, *, ledger_id: int, in_flight: int, payload_size: int) -> None:
        self._engine = engine
        self._ledger_id = ledger_id
        self._in_flight = in_flight
        self._payload = bytes(range(256)) * (payload_size // 256) + bytes(payload_size % 256)
        self._batch = max(1, min(_BATCH_MAX, in_flight // 4))
        self._next = 0
        self.done = 0
        self.latencies: list[float] = []

    async def run(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop_at = time.perf_counter() + seconds
        self._finished: asyncio.Future[None] = self._loop.create_future()
        self._open = 0
        for _ in range(self._in_flight // self._batch):
            self._send()
        await self._finished

    def _send(self) -> None:
        first = self._next
        self._next += self._batch
        ledger_id, payload = self._ledger_id, self._payload
        adds = [AddRequest(0, ledger_id, e, _KEY, entry(ledger_id, e, payload)) for e in range(first, self._next)]
        start = time.perf_counter()
        self._open += 1

        def answered(statuses: Sequence[int]) -> None:
            now = time.perf_counter()
            assert not any(statuses), statuses
            self.latencies.append(now - start)
            self.done += len(statuses)
            self._open -= 1
            if now < self._stop_at:
                self._loop.call_soon(self._send)
            elif not self._open:
                self._finished.set_result(None)

        self._engine.add_many(adds, answered)


def settings(directory: Path) -> StorageSettings:
    return StorageSettings(journal_directory=str(directory / "journal"), ledger_directory=str(directory / "ledgers"))


def engine(directory: Path) -> StorageEngine:
    return StorageEngine.on_real_disk(settings(directory), wall_clock_ms=lambda: time.time_ns() // 1_000_000)


async def bench_adds(root: Path, seconds: float) -> None:
    print("| in flight | payload | adds/s | MB/s | p50 ms | p99 ms | max ms | entries per fsync |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for payload_size in (128, 1024):
        for number, in_flight in enumerate((1, 32, 256, 1000)):
            directory = root / f"adds-{payload_size}-{in_flight}"
            store = engine(directory)
            await store.open()
            adder = Adder(store, ledger_id=number + 1, in_flight=in_flight, payload_size=payload_size)
            start = time.perf_counter()
            await adder.run(seconds)
            took = time.perf_counter() - start
            latencies = sorted(adder.latencies)
            rate = adder.done / took
            groups = store.stats.journal_groups
            print(
                f"| {in_flight} | {payload_size} | {rate:,.0f} | {rate * (payload_size + 36) / 1e6:.1f} "
                f"| {latencies[len(latencies) // 2] * 1e3:.2f} | {latencies[int(len(latencies) * 0.99)] * 1e3:.2f} "
                f"| {latencies[-1] * 1e3:.1f} | {adder.done / groups:.1f} |",
                flush=True,
            )
            await store.close()
            shutil.rmtree(directory)


async def bench_reads(root: Path, entries: int) -> None:
    print("\n| read | payload | reads/s | MB/s | disk jobs |")
    print("|---|---:|---:|---:|---:|")
    for payload_size in (128, 1024):
        directory = root / f"reads-{payload_size}"
        store = engine(directory)
        await store.open()
        adder = Adder(store, ledger_id=1, in_flight=1000, payload_size=payload_size)
        while adder.done < entries:
            await adder.run(0.5)
        await store.close()
        store = engine(directory)
        await store.open()
        loop = asyncio.get_running_loop()
        start = time.perf_counter()
        total = min(adder.done, entries)
        for first in range(0, total, 100):
            read: asyncio.Future[Sequence[bytes | int]] = loop.create_future()
            store.read_many([(1, e) for e in range(first, min(first + 100, total))], read.set_result)
            answers = await read
            assert all(type(one) is bytes for one in answers), (first, [one for one in answers if type(one) is int])
        rate = total / (time.perf_counter() - start)
        megabytes = rate * payload_size / 1e6
        jobs = store.stats.read_jobs
        print(f"| catch-up, 100 at a time | {payload_size} | {rate:,.0f} | {megabytes:.1f} | {jobs} |")
        await store.close()
        shutil.rmtree(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", help="directory on the disk to measure; default: a temporary one")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds per table row")
    parser.add_argument("--reads", type=int, default=200_000, help="entries to read back")
    parser.add_argument("--switch-interval-ms", type=float, default=0.2, help="sys.setswitchinterval")
    parser.add_argument("--profile", action="store_true", help="profile 1,000 adds in flight instead")
    arguments = parser.parse_args()
    sys.setswitchinterval(arguments.switch_interval_ms / 1e3)
    root = Path(tempfile.mkdtemp(prefix="bindery-bench-", dir=arguments.directory))
    print(f"Python {platform.python_version()}, uvloop, {platform.machine()}, fsync on, {root.parent}\n")
    try:
        if arguments.profile:
            uvloop.run(profile(root, arguments.seconds))
        else:
            uvloop.run(bench_adds(root, arguments.seconds))
            uvloop.run(bench_reads(root, arguments.reads))
    finally:
        shutil.rmtree(root, ignore_errors=True)


async def profile(root: Path, seconds: float) -> None:
    store = engine(root)
    await store.open()
    adder = Adder(store, ledger_id=1, in_flight=1000, payload_size=128)
    profiler = cProfile.Profile()
    profiler.enable()
    await adder.run(seconds)
    profiler.disable()
    print(f"{adder.done / seconds:,.0f} adds/s with the profiler on")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(20)
    await store.close()


if __name__ == "__main__":
    main()
