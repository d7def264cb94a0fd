"""Measure the add latency of a steady load without maintenance, during flushes, and during compaction.

    .venv/bin/python bench/maintenance.py                       # print the table; takes about 30 s
    .venv/bin/python bench/maintenance.py --rate 30000 --json

The program runs one storage engine in its own process, without a network, and with fsync. Journal, entry logs and
index are on one disk. That is the worst case: flushes and compaction do not delay a journal that is on a separate disk.
A load of `--rate` adds per second runs all the time, in batches every 2 ms. The latency of a batch is the time from its
due time to its callback, so it includes delays of the event loop. A batch counts for the flush or the compaction that
was running when it was sent or when it was answered. Compaction copies the live half of logs whose other half was
deleted, at `--compaction-rate`.
"""

import argparse
import asyncio
import json
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, Final

import uvloop
from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_bookie.storage.settings import KIB, MIB, StorageSettings
from bindery_core.wire.messages import AddRequest
from bindery_kit.observability.logs import configure
from peer_report import write_docs
from storage import _KEY, entry

TICK_S: Final = 0.002
LOAD_LEDGER: Final = 1
OLD_LEDGERS: Final = range(100, 132)
LOG_SIZE: Final = 16 * MIB
QUIET: Final = "quiet"


class Load:
    """Sends adds at a steady rate. `phase`: the maintenance that is running: "flush", "compaction" or QUIET (none)."""

    def __init__(self, engine: StorageEngine, *, rate: int, payload: bytes) -> None:
        self._engine = engine
        self._count = max(1, round(rate * TICK_S))
        self._payload = payload
        self._next = 0
        self._stopping = False
        self.phase = QUIET
        self.latencies_s: dict[str, list[float]] = {}

    async def run(self) -> None:
        due = time.perf_counter()
        while not self._stopping:
            self._send(due)
            due += TICK_S
            await asyncio.sleep(max(0.0, due - time.perf_counter()))

    def stop(self) -> None:
        self._stopping = True

    def _send(self, due: float) -> None:
        first, self._next = self._next, self._next + self._count
        adds = [
            AddRequest(0, LOAD_LEDGER, at, _KEY, entry(LOAD_LEDGER, at, self._payload))
            for at in range(first, self._next)
        ]
        begun = self.phase

        def answered(statuses: Sequence[int]) -> None:
            assert not any(statuses), statuses
            phase = self.phase if begun == QUIET else begun
            self.latencies_s.setdefault(phase, []).append(time.perf_counter() - due)

        self._engine.add_many(adds, answered)

    async def during(self, phase: str, work: Awaitable[Any]) -> Any:
        self.phase = phase
        try:
            return await work
        finally:
            self.phase = QUIET


async def fill(engine: StorageEngine, *, size: int, payload: bytes) -> None:
    """Write `size` payload bytes. Each entry log has entries of all OLD_LEDGERS."""
    loop = asyncio.get_running_loop()
    step = len(OLD_LEDGERS) * 16
    for first in range(size // len(payload) // step):
        adds = [
            AddRequest(0, ledger_id, at, _KEY, entry(ledger_id, at, payload))
            for ledger_id in OLD_LEDGERS
            for at in range(16 * first, 16 * first + 16)
        ]
        done: asyncio.Future[Sequence[int]] = loop.create_future()
        engine.add_many(adds, done.set_result)
        assert not any(await done)
        if first % 16 == 15:
            await engine.flush()
    await engine.flush()


async def measure(directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    settings = StorageSettings(
        journal_directory=str(directory / "journal"),
        ledger_directory=str(directory / "ledgers"),
        flush_interval_s=3600,
        entry_log_size_max=LOG_SIZE,
        compaction_rate=args.compaction_rate * MIB,
        flush_sync_size=args.flush_sync_size * KIB,
    )
    engine = StorageEngine.on_real_disk(settings, wall_clock_ms=lambda: time.time_ns() // 1_000_000)
    await engine.open()
    payload = bytes(range(256)) * (args.size // 256) + bytes(args.size % 256)
    await fill(engine, size=args.old_size * MIB, payload=payload)
    for ledger_id in OLD_LEDGERS[::2]:
        await engine.delete_ledger(ledger_id)
    await engine.flush()
    load = Load(engine, rate=args.rate, payload=payload)
    loading = asyncio.create_task(load.run())
    await asyncio.sleep(1.0)
    load.latencies_s.clear()
    for _ in range(args.rounds):
        await asyncio.sleep(args.seconds)
        await load.during("flush", engine.flush())
    await asyncio.sleep(args.seconds)
    bytes_before = engine.stats.flush_bytes
    began = time.perf_counter()
    result = await load.during("compaction", engine.compactor.run(major=True, force=True))
    took = time.perf_counter() - began
    load.stop()
    await loading
    assert bytes_before <= engine.stats.flush_bytes
    await engine.close()
    return {
        "rate": args.rate,
        "size": args.size,
        "compaction": {"seconds": round(took, 1), "result": repr(result)},
        "rows": [row(phase, load.latencies_s.get(phase, [])) for phase in (QUIET, "flush", "compaction")],
    }


def row(phase: str, latencies_s: list[float]) -> dict[str, Any]:
    if not latencies_s:
        return {"phase": phase, "batches": 0}
    ordered = sorted(latencies_s)

    def at(part: float) -> float:
        return round(1000 * ordered[min(len(ordered) - 1, int(len(ordered) * part))], 2)

    return {
        "phase": phase,
        "batches": len(ordered),
        "p50_ms": at(0.5),
        "p90_ms": at(0.9),
        "p99_ms": at(0.99),
        "p999_ms": at(0.999),
        "max_ms": at(1.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", help="directory on the disk to measure; default: a temporary one")
    parser.add_argument("--rate", type=int, default=10_000, help="adds per second")
    parser.add_argument("--size", type=int, default=1024, help="payload bytes")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds without maintenance before each flush")
    parser.add_argument("--rounds", type=int, default=6, help="number of flushes")
    parser.add_argument(
        "--old-size", type=int, default=96, metavar="MIB", help="data written before, of which half is deleted"
    )
    parser.add_argument("--compaction-rate", type=int, default=16, metavar="MIB", help="compaction rate per second")
    parser.add_argument("--flush-sync-size", type=int, default=StorageSettings().flush_sync_size // KIB, metavar="KIB")
    parser.add_argument("--write-docs", action="store_true", help="update the table in docs/benchmarks.md")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    sys.setswitchinterval(0.0005)
    configure(service="bench", level="warning")
    root = Path(tempfile.mkdtemp(prefix="bindery-bench-", dir=args.directory))
    try:
        result = uvloop.run(measure(root, args))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if args.json:
        json.dump(result, sys.stdout, indent=1)
        print()
        return
    text = render(result, args)
    print(text)
    if args.write_docs:
        write_docs("bench-maintenance", text)


def render(result: dict[str, Any], args: argparse.Namespace) -> str:
    lines = [
        f"{time.strftime('%-d %B %Y')}, Python {platform.python_version()}, {args.rate:,} adds/s of {args.size:,} B, "
        f"{args.rounds} flushes, compaction for {result['compaction']['seconds']} s.",
        "",
        "| while | batches | p50 ms | p90 ms | p99 ms | p99.9 ms | max ms |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for line in result["rows"]:
        cells = [f"{value:,}" if isinstance(value, int) else str(value) for value in line.values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
