"""Measure what idempotency keys and sequence ids cost: requests of one message over HTTP, beside plain ones.

The modes take turns, so that other load on the machine affects all of them. `--rounds 5 --seconds 4 --clients 8`.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from typing import Final

from bindery.standalone.throwaway import ThrowawayCluster

MODES: Final = ("plain", "sequence id", "key")
PAYLOAD: Final = b"x" * 100
PATH: Final = "/v1/topics/public/default/bench/messages"


def request(mode: str, client: int, number: int) -> bytes:
    query = f"?producer=p{client}&sequence_id={number}" if mode == "sequence id" else ""
    key = f"idempotency-key: {client}-{number}\r\n" if mode == "key" else ""
    head = f"POST {PATH}{query} HTTP/1.1\r\nhost: localhost\r\n{key}content-length: {len(PAYLOAD)}\r\n\r\n"
    return head.encode() + PAYLOAD


async def client(port: int, mode: str, number: int, first: int, until: float) -> int:
    """Send one request after another. Returns how many were answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    count = 0
    while time.monotonic() < until:
        writer.write(request(mode, number, first + count))
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head[:16], head
        size = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(size)
        count += 1
    writer.close()
    return count


def cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(port: int, pid: int, rounds: int, seconds: float, clients: int) -> None:
    rates: dict[str, list[float]] = {mode: [] for mode in MODES}
    costs: dict[str, list[float]] = {mode: [] for mode in MODES}
    first = 0
    for round_number in range(rounds + 1):
        for mode in MODES:
            began, before = time.monotonic(), cpu_s(pid)
            until = began + seconds
            counts = await asyncio.gather(*(client(port, mode, n, first, until) for n in range(clients)))
            took = time.monotonic() - began
            first += max(counts) + 1
            if round_number:  # the first one warms up
                rates[mode].append(sum(counts) / took)
                costs[mode].append((cpu_s(pid) - before) / sum(counts) * 1e6)
    plain_rate, plain_cost = (statistics.median(found["plain"]) for found in (rates, costs))
    for mode in MODES:
        rate, cost = statistics.median(rates[mode]), statistics.median(costs[mode])
        spread = f"{min(costs[mode]):.0f} to {max(costs[mode]):.0f}"
        print(
            f"| {mode} | {clients} | {rate:,.0f} | {rate / plain_rate:.2f} | {cost:.0f} ({spread}) "
            f"| {cost / plain_cost:.2f} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--clients", type=int, default=8)
    args = parser.parse_args()
    print("| mode | clients | requests/s | of plain | broker's CPU, us a request | of plain |")
    print("|---|--:|--:|--:|--:|--:|")
    with ThrowawayCluster(bookies=3) as cluster:
        port = int(cluster.url.rpartition(":")[2])
        asyncio.run(measure(port, cluster.pid("broker-0"), args.rounds, args.seconds, args.clients))
    return 0


if __name__ == "__main__":
    sys.exit(main())
