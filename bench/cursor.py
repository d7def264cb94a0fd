"""Measure the subscription log: a commit, a snapshot and the loading of a cursor with many scattered acknowledgements.

    .venv/bin/python bench/cursor.py                                 # the table
    .venv/bin/python bench/cursor.py --backlog 1000000 --json

The ledgers are in memory, so the times are the broker's own; in a cluster, bookies and network come on top. The backlog
has `--backlog` entries in topic ledgers of 50,000, of which every other one is acknowledged, in random order and 100 to
a call. "commit" is one acknowledgement: the CPU time of the event loop, and the bytes of its record. Commits that write
a snapshot are listed separately. "load" is the opening of the topic with its cursor, when about as many changes as
possible follow the last snapshot, and the peak of the memory that Python allocates meanwhile.
"""

import argparse
import asyncio
import json
import logging
import os
import platform
import random
import sys
import time
import tracemalloc
from typing import Any

import structlog
from bindery_broker.managed_ledger import ManagedCursor, ManagedLedger, ManagedLedgerSettings
from bindery_client.memory.memory import MemoryLedgerClient, MemoryLedgers
from bindery_core.ids import LedgerId
from bindery_metadata.stores.memory import MemoryTree
from bindery_pulsar.managed_ledger_pb2 import PositionInfo
from bindery_pulsar.message_id import EARLIEST, Position

LEDGER_ENTRIES = 50_000
ADDED_AT_ONCE = 10_000
ACKED_AT_ONCE = 100


class Bench:
    """A topic in memory that is opened by one broker after another."""

    def __init__(self, backlog: int) -> None:
        self.backlog = backlog
        self.ledgers = MemoryLedgers()
        self.tree = MemoryTree()
        self.cursor: ManagedCursor

    async def open(self) -> ManagedLedger:
        topic = await ManagedLedger.open(
            "public/default/persistent/bench",
            client=MemoryLedgerClient(self.ledgers),
            store=self.tree.connect(),
            clock=lambda: time.time_ns() // 10**6,
            settings=ManagedLedgerSettings(entries_max=LEDGER_ENTRIES, age_s_min=0),
        )
        self.cursor = await topic.open_cursor("s", start=EARLIEST)
        return topic

    @property
    def records(self) -> int:
        """Number of records in the cursor ledger."""
        return len(self.ledgers.ledgers[LedgerId(self.cursor.store.ledger_id)].entries)

    def payloads(self, first: int) -> list[bytes]:
        """The records from `first` on."""
        entries = self.ledgers.ledgers[LedgerId(self.cursor.store.ledger_id)].entries
        return [entry.payload for entry in entries[first:]]

    async def commit(self, position: Position) -> tuple[float, int, bool]:
        """Acknowledge one entry. Returns CPU seconds, bytes, and whether a snapshot was written."""
        ledger_id, before = self.cursor.store.ledger_id, self.records if self.cursor.store.ledger_id >= 0 else 0
        began = time.thread_time()
        await self.cursor.ack_many([position])
        taken = time.thread_time() - began
        first = before if self.cursor.store.ledger_id == ledger_id else 0
        written = [PositionInfo.FromString(payload) for payload in self.payloads(first)]
        return taken, sum(map(len, self.payloads(first))), any(record.log.kind == 1 for record in written)


async def measure(backlog: int, commits: int) -> dict[str, Any]:
    bench = Bench(backlog)
    topic = await bench.open()
    positions: list[Position] = []
    while len(positions) < backlog:
        positions += await topic.add_many([b"x"] * min(ADDED_AT_ONCE, backlog - len(positions)))
    chosen = positions[1::2]
    random.Random(0).shuffle(chosen)
    last, rest = chosen[:commits], chosen[commits:]
    for start in range(0, len(rest), ACKED_AT_ONCE):
        await bench.cursor.ack_many(rest[start : start + ACKED_AT_ONCE])
    rows = []
    changes_after = most = 0
    for position in last:
        rows.append(await bench.commit(position))
        changes_after = 0 if rows[-1][2] else changes_after + 1
        most = max(most, changes_after)
        if changes_after == most and len(rows) > commits // 2 and changes_after > commits // 3:
            break  # about as many changes as a load ever has to read
    changes = sorted((taken, size) for taken, size, is_snapshot in rows if not is_snapshot)
    snapshots = [(taken, size) for taken, size, is_snapshot in rows if is_snapshot]
    ranges = bench.cursor.ranges_count
    await topic.crash()
    tracemalloc.start()
    again = await bench.open()
    _, memory_peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    await again.crash()
    began = time.perf_counter()
    again = await bench.open()
    loaded = time.perf_counter() - began
    assert bench.cursor.ranges_count == ranges
    _, snapshot_size, _ = await bench.commit(positions[0])
    await again.crash()
    return {
        "backlog": backlog,
        "ranges": ranges,
        "commits": len(changes),
        "commit_ms_median": changes[len(changes) // 2][0] * 1e3,
        "commit_ms_p99": changes[int(len(changes) * 0.99)][0] * 1e3,
        "commit_ms_max": changes[-1][0] * 1e3,
        "commit_bytes_max": max(size for _, size in changes),
        "snapshots": len(snapshots),
        "snapshot_ms_max": max((taken for taken, _ in snapshots), default=0.0) * 1e3,
        "snapshot_bytes": snapshot_size,
        "changes_loaded": changes_after,
        "load_s": loaded,
        "load_memory_peak": memory_peak,
    }


def show(row: dict[str, Any]) -> None:
    print(f"backlog {row['backlog']:,}, acknowledged ranges {row['ranges']:,}")
    print(f"commit          median {row['commit_ms_median']:.3f} ms, p99 {row['commit_ms_p99']:.3f} ms,", end=" ")
    print(f"at most {row['commit_ms_max']:.3f} ms and {row['commit_bytes_max']} bytes ({row['commits']:,} commits)")
    print(f"snapshot        at most {row['snapshot_ms_max']:.1f} ms, {row['snapshot_bytes']:,} bytes", end=" ")
    print(f"({row['snapshots']} commits)")
    print(f"load            {row['load_s']:.2f} s, {row['changes_loaded']:,} changes after the snapshot;", end=" ")
    print(f"memory at most {row['load_memory_peak'] / 2**20:.1f} MiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backlog", type=int, default=1_000_000, help="number of entries")
    parser.add_argument("--commits", type=int, default=20_000, help="number of single acknowledgements measured")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    found = asyncio.run(measure(args.backlog, args.commits))
    if args.json:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        json.dump({"machine": machine, "rows": [found]}, sys.stdout, indent=1)
    else:
        show(found)
