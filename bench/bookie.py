"""Measure a real bookie over its port: adds with fsync, then catch-up reads. Protocol version 3, one connection.

    .venv/bin/python bench/bookie.py                                  # the table
    .venv/bin/python bench/bookie.py --in-flight 1 100 --size 128 --seconds 5 --json

Starts a throwaway cluster with one bookie on the disk of TMPDIR. The client only keeps a constant number of requests in
flight, so that its own cost is small; it still shares the machine's cores with the bookie. Latency is measured from the
write of a request to the arrival of its response. "us CPU" is the bookie process's user and system time per entry.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any, cast

import uvloop
from bindery.standalone.throwaway import ThrowawayCluster
from bindery_core import entry
from bindery_core.digest import Digester, master_key
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.wire import v3
from bindery_core.wire.framing import FrameDecoder
from bindery_core.wire.messages import AddRequest, AddResponse, ReadRequest, ReadResponse

BOOKIE_PORT = 3181
FRAMES_PACKED = 512
"""Number of entries that are encoded at a time. It is lower than the largest number of requests in flight (1,000 by
default), so that the encoding does not increase the latency."""


class Window(asyncio.Protocol):
    """Keeps `in_flight` requests in flight until it is stopped, and records the latency of each."""

    def __init__(self, requests: "Adds | Reads", *, in_flight: int) -> None:
        self._requests = requests
        self._in_flight = in_flight
        self._decoder = FrameDecoder()
        self._sent_at: dict[int, float] = {}
        self._ending = False
        self.latencies_s: list[float] = []
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send(self._in_flight)

    def _send(self, count: int) -> None:
        frames, txn_ids = self._requests.take(count)
        now = time.perf_counter()
        for txn_id in txn_ids:
            self._sent_at[txn_id] = now
        self._transport.write(frames)

    def data_received(self, data: bytes) -> None:
        messages = self._decoder.feed(data)
        if not messages:
            return
        now = time.perf_counter()
        responses = v3.decode_responses(messages)
        for response in responses:
            assert isinstance(response, AddResponse | ReadResponse)
            if response.status != 0:
                raise SystemExit(f"the bookie answered {response}")
            self.latencies_s.append(now - self._sent_at.pop(response.txn_id))
        if not self._ending:
            self._send(len(responses))
        elif not self._sent_at:
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the bookie closed the connection"))

    async def run(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._ending = True
        await asyncio.wait_for(self.done, timeout=30)
        self._transport.close()


class Adds:
    """Requests that append to one ledger."""

    def __init__(self, *, ledger_id: int, size: int) -> None:
        self._ledger_id = ledger_id
        self._digester = Digester(DigestType.CRC32C, b"")
        self._key = master_key(b"")
        self._payload = os.urandom(size)
        self._ready: list[bytes] = []
        self.count = 0
        self._packed = 0

    def take(self, count: int) -> tuple[bytes, range]:
        while len(self._ready) < count:
            size = len(self._payload)
            frames = entry.pack_many(
                self._digester,
                [self._payload] * FRAMES_PACKED,
                ledger_id=self._ledger_id,
                first_entry_id=self._packed,
                lac=self._packed - 1,
                length=self._packed * size,
            )
            for entry_id, frame in enumerate(frames, self._packed):
                request = AddRequest(entry_id, self._ledger_id, entry_id, self._key, frame)
                self._ready.append(v3.encode_request(request))
            self._packed += FRAMES_PACKED
        taken, self._ready = self._ready[:count], self._ready[count:]
        first, self.count = self.count, self.count + count
        return b"".join(taken), range(first, first + count)


class Reads:
    """Requests that read one ledger from its start, repeatedly."""

    def __init__(self, *, ledger_id: int, entries: int) -> None:
        self._ledger_id = ledger_id
        self._entries = entries
        self.count = 0

    def take(self, count: int) -> tuple[bytes, range]:
        txn_ids = range(self.count, self.count + count)
        self.count += count
        return v3.encode_requests(
            ReadRequest(txn_id, self._ledger_id, txn_id % self._entries) for txn_id in txn_ids
        ), txn_ids


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def measure(port: int, pid: int, requests: Adds | Reads, *, in_flight: int, seconds: float) -> dict[str, Any]:
    cpu, began = cpu_seconds(pid), time.perf_counter()
    _, window = await asyncio.get_running_loop().create_connection(
        lambda: Window(requests, in_flight=in_flight), "127.0.0.1", port
    )
    await window.run(seconds)
    took = time.perf_counter() - began
    latencies = sorted(window.latencies_s)
    count = len(latencies)
    return {
        "in_flight": in_flight,
        "per_s": round(count / took),
        "p50_ms": round(latencies[count // 2] * 1000, 2),
        "p99_ms": round(latencies[count * 99 // 100] * 1000, 2),
        "max_ms": round(latencies[-1] * 1000, 2),
        "cpu_us": round((cpu_seconds(pid) - cpu) / count * 1e6, 1),
        "rss_mib": round(rss_mib(pid)),
    }


async def run(args: argparse.Namespace, cluster: ThrowawayCluster) -> list[dict[str, Any]]:
    port, pid = BOOKIE_PORT + cluster.port_offset, cluster.pid("bookie-0")
    rows = []
    ledger_id = 1_000_000  # far from the ids that the cluster assigns
    for size in args.size:
        largest = (0, 0)
        for in_flight in args.in_flight:
            ledger_id += 1
            adds = Adds(ledger_id=ledger_id, size=size)
            row = await measure(port, pid, adds, in_flight=in_flight, seconds=args.seconds)
            rows.append({"what": "add", "size": size, **row})
            largest = max(largest, (adds.count, ledger_id))
        for in_flight in args.in_flight:
            reads = Reads(ledger_id=largest[1], entries=largest[0])
            row = await measure(port, pid, reads, in_flight=in_flight, seconds=args.seconds)
            rows.append({"what": "read", "size": size, **row})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 32, 256, 1000])
    parser.add_argument("--size", type=int, nargs="+", default=[128, 1024], help="payload bytes")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds per table row")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with ThrowawayCluster(bookies=1) as cluster:
        rows = uvloop.run(run(args, cluster))
    if args.json:
        json.dump({"machine": f"{platform.machine()}, {os.cpu_count()} cores", "rows": rows}, sys.stdout, indent=1)
        print()
        return
    print("| what | bytes | in flight | per s | p50 ms | p99 ms | max ms | us CPU (bookie) | RSS MiB |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        print(
            "| " + " | ".join(f"{value:,}" if isinstance(value, int) else str(value) for value in row.values()) + " |"
        )


if __name__ == "__main__":
    main()
