"""Measure lists, memory and ZooKeeper traffic with many namespaces and topics, on a cluster of its own.

    .venv/bin/python bench/namespaces.py                                   # 1,000 namespaces x 10 topics
    .venv/bin/python bench/namespaces.py --namespaces 100 --topics 2       # quick

The tenant `bench` gets `--namespaces` namespaces with `--topics` topics each, and the namespace `bench-big/all` as many
topics alone as all of them together. Everything is created over HTTP, as `bindery` does. Then each list is read page
by page, `--rounds` times, one request at a time; the latency is that of one page, from the request to the last byte.
The traffic is what ZooKeeper counts (`mntr`): packets of all its clients. With `--brokers 2`, the pages alternate
between two brokers. Exits with 1 if the p99 of a list is above `--page-ms-max`.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bindery.common.progress import Progress
from bindery.standalone.throwaway import ThrowawayCluster
from bindery_metadata.stores.embedded import four_letter_word

TENANT: Final = "bench"
BIG: Final = "bench-big/all"
CONNECTIONS: Final = 16
"""Number of connections that create namespaces and topics."""
REQUEST_TIMEOUT_S: Final = 60.0
OPERATIONS: Final = 200
"""Number of operations whose ZooKeeper packets are counted."""


class Client:
    """One HTTP connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Return the status and the body of the answer."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22)
        reader, writer = self._streams
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
            size = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
            return int(lines[0].split()[1]), await reader.readexactly(size)

    async def want(self, method: str, path: str, body: bytes = b"", *, statuses: Sequence[int] = (200, 201)) -> Any:
        status, answer = await self.ask(method, path, body)
        if status not in statuses:
            raise SystemExit(f"{method} {path} was answered with {status}: {answer[:300]!r}")
        return json.loads(answer) if answer else None


@dataclass
class Pages:
    """Latencies of the pages of one list, in ms."""

    name: str
    items: int = 0
    """Number of names in one pass."""
    pages: int = 0
    """Number of pages of one pass."""
    ms: list[float] = field(default_factory=list)
    packets: float = 0.0
    """ZooKeeper packets that the brokers sent for one page."""

    def at(self, share: float) -> float:
        ordered = sorted(self.ms)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Bench:
    def __init__(self, cluster: ThrowawayCluster, arguments: argparse.Namespace) -> None:
        self.cluster = cluster
        self.arguments = arguments
        ports = [int(cluster.broker_url(n).rpartition(":")[2]) for n in range(arguments.brokers)]
        self.clients = [Client(ports[n % len(ports)]) for n in range(CONNECTIONS)]
        self.readers = [Client(port) for port in ports]
        self.progress = Progress()

    def rss_mib(self) -> list[float]:
        """Return the resident memory of each broker, in MiB."""
        found = []
        for n in range(self.arguments.brokers):
            status = Path(f"/proc/{self.cluster.pid(f'broker-{n}')}/status").read_text()
            line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
            found.append(round(int(line.split()[1]) / 1024, 1))
        return found

    async def zookeeper(self) -> dict[str, int]:
        """Return the counters of the ZooKeeper server."""
        host, _, port = self.cluster.zookeeper.partition(":")
        text = await four_letter_word(host, int(port), "mntr", timeout_s=10.0)
        assert text is not None, "zookeeper does not answer"
        rows = (line.split("\t") for line in text.splitlines() if "\t" in line)
        return {row[0]: int(row[1]) for row in rows if row[1].lstrip("-").isdigit()}

    async def create(self, what: str, calls: list[tuple[str, str, bytes]]) -> float:
        """Make the calls over all connections. Return the seconds taken."""
        began = time.monotonic()
        left = iter(calls)
        done = 0

        async def work(client: Client) -> None:
            nonlocal done
            for method, path, body in left:
                await client.want(method, path, body)
                done += 1
                self.progress.show(f"{what}: {done} of {len(calls)}")

        await asyncio.gather(*(work(client) for client in self.clients))
        return time.monotonic() - began

    async def pages(self, name: str, path: str, members: str) -> Pages:
        """Read all pages of a list several times."""
        found = Pages(name)
        before = (await self.zookeeper())["zk_packets_received"]
        for number in range(self.arguments.rounds):
            self.progress.show(f"{name}: round {number} of {self.arguments.rounds}")
            found.items = found.pages = 0
            after: str | None = None
            while found.pages == 0 or after is not None:
                reader = self.readers[(number + found.pages) % len(self.readers)]
                query = "" if after is None else f"{'&' if '?' in path else '?'}after={after.replace('%', '%25')}"
                began = time.perf_counter()
                answer = await reader.want("GET", path + query)
                found.ms.append((time.perf_counter() - began) * 1000)
                found.pages += 1
                found.items += len(answer[members] if members else answer)
                after = answer.get("next") if members else None
        after_packets = (await self.zookeeper())["zk_packets_received"]
        found.packets = (after_packets - before) / len(found.ms)
        return found

    async def packets_of(self, operation: Callable[[int], Awaitable[Any]]) -> float:
        """Return the ZooKeeper packets of one operation."""
        before = (await self.zookeeper())["zk_packets_received"]
        for number in range(OPERATIONS):
            await operation(number)
        return ((await self.zookeeper())["zk_packets_received"] - before) / OPERATIONS


async def measure(bench: Bench) -> dict[str, Any]:
    arguments = bench.arguments
    spaces = [f"{TENANT}/n{number:04}" for number in range(arguments.namespaces)]
    topics = [f"{space}/t{number}" for space in spaces for number in range(arguments.topics)]
    result: dict[str, Any] = {"rss_mib_before": bench.rss_mib()}
    idle_before = await idle(bench)
    tenants = [("PUT", f"/v1/tenants/{name}", b"{}") for name in (TENANT, BIG.partition("/")[0])]
    await bench.create("create tenants", tenants)
    made = await bench.zookeeper()
    space_s = await bench.create("create namespaces", [("PUT", f"/v1/namespaces/{name}", b"{}") for name in spaces])
    between = await bench.zookeeper()
    topic_s = await bench.create("create topics", [("PUT", f"/v1/topics/{name}", b"") for name in topics])
    result["rss_mib_after_topics"] = bench.rss_mib()
    after = await bench.zookeeper()
    result["packets_of"] = {
        "create a namespace": ratio(between, made, len(spaces)),
        "create a topic in it": ratio(after, between, len(topics)),
    }
    result["seconds"] = {"namespaces": round(space_s, 1), "topics": round(topic_s, 1)}
    result["watches"] = {"start": made["zk_watch_count"], "topics loaded": after["zk_watch_count"]}
    result["nodes"] = {"znodes": after["zk_znode_count"], "ephemeral": after["zk_ephemerals_count"]}
    idle_after = await idle(bench)
    result["idle_packets_per_s"] = {"empty": idle_before, "topics loaded": idle_after}
    if arguments.big:
        await bench.create("create namespace", [("PUT", f"/v1/namespaces/{BIG}", b"{}")])
        big = [f"{BIG}/t{number:05}" for number in range(len(topics))]
        await bench.create("create topics in one namespace", [("PUT", f"/v1/topics/{name}", b"") for name in big])
    lists = [
        ("GET /v1/tenants", "/v1/tenants", "tenants"),
        (f"GET /v1/namespaces/{TENANT}", f"/v1/namespaces/{TENANT}", "namespaces"),
        ("GET /v1/namespaces", "/v1/namespaces", "namespaces"),
        ("GET /v1/topics?namespace=T/N", f"/v1/topics?namespace={spaces[len(spaces) // 2]}", "topics"),
        ("GET /v1/topics", "/v1/topics", "topics"),
        ("GET /v1/topics?max=100", "/v1/topics?max=100", "topics"),
        ("GET /admin/v2/persistent/T/N", f"/admin/v2/persistent/{spaces[len(spaces) // 2]}", ""),
        ("GET /admin/v2/tenants", "/admin/v2/tenants", ""),
        (f"GET /admin/v2/namespaces/{TENANT}", f"/admin/v2/namespaces/{TENANT}", ""),
    ]
    if arguments.big:
        lists += [
            ("GET /v1/topics?namespace, all in one", f"/v1/topics?namespace={BIG}", "topics"),
            ("GET /admin/v2/persistent/T/N, all in one", f"/admin/v2/persistent/{BIG}", ""),
        ]
    tables = [await bench.pages(*row) for row in lists]
    reader = bench.readers[0]
    some = [topics[number * len(topics) // OPERATIONS] for number in range(OPERATIONS)]
    message = b'{"payload": "x"}'
    result["packets_of"]["produce the first message"] = await bench.packets_of(
        lambda n: reader.want("POST", f"/v1/topics/{some[n]}/messages", message)
    )
    result["packets_of"]["produce another message"] = await bench.packets_of(
        lambda n: reader.want("POST", f"/v1/topics/{some[n]}/messages", message)
    )
    result["packets_of"]["stats of a topic"] = await bench.packets_of(
        lambda n: reader.want("GET", f"/v1/topics/{some[n]}")
    )
    result["packets_of"]["effective policies of a topic"] = await bench.packets_of(
        lambda n: reader.want("GET", f"/v1/topics/{some[n]}/policies?effective=true")
    )
    result["rss_mib_end"] = bench.rss_mib()
    result["watches"]["end"] = (await bench.zookeeper())["zk_watch_count"]
    result["lists"] = [
        {
            "list": one.name,
            "names": one.items,
            "pages": one.pages,
            "p50_ms": round(one.at(0.5), 1),
            "p99_ms": round(one.at(0.99), 1),
            "max_ms": round(max(one.ms), 1),
            "packets": round(one.packets, 1),
        }
        for one in tables
    ]
    return result


async def idle(bench: Bench) -> float:
    """Return the ZooKeeper packets per second while nothing is asked for."""
    before = await bench.zookeeper()
    bench.progress.show("measuring idle traffic")
    await asyncio.sleep(bench.arguments.idle_s)
    after = await bench.zookeeper()
    return round((after["zk_packets_received"] - before["zk_packets_received"]) / bench.arguments.idle_s, 2)


def ratio(after: dict[str, int], before: dict[str, int], count: int) -> float:
    return round((after["zk_packets_received"] - before["zk_packets_received"]) / count, 2)


def render(result: dict[str, Any]) -> str:
    """Return the tables of docs/benchmarks.md."""
    lines = [
        "| list | names | pages | p50 ms | p99 ms | max ms | ZooKeeper packets a page |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row['list']} | {row['names']:,} | {row['pages']} | {row['p50_ms']} | {row['p99_ms']} | {row['max_ms']} "
        f"| {row['packets']} |"
        for row in result["lists"]
    ]
    lines += ["", "| ZooKeeper packets of all brokers | |", "|---|--:|"]
    lines += [f"| idle, {name}: per second | {value} |" for name, value in result["idle_packets_per_s"].items()]
    lines += [f"| {name} | {value} |" for name, value in result["packets_of"].items()]
    lines += ["", "| state | |", "|---|--:|"]
    lines += [f"| watches, {name} | {value:,} |" for name, value in result["watches"].items()]
    lines += [f"| {name} nodes | {value:,} |" for name, value in result["nodes"].items()]
    for name in ("before", "after_topics", "end"):
        sizes = ", ".join(str(size) for size in result[f"rss_mib_{name}"])
        lines.append(f"| RSS of each broker, MiB, {name.replace('_', ' ')} | {sizes} |")
    return "\n".join(lines)


def commit() -> str:
    words = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--namespaces", type=int, default=1_000)
    parser.add_argument("--topics", type=int, default=10, help="topics of each namespace")
    parser.add_argument("--brokers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=100, help="times that each list is read")
    parser.add_argument("--idle-s", type=float, default=20.0, help="seconds without requests")
    parser.add_argument("--big", action="store_true", help="also create as many topics in one namespace")
    parser.add_argument("--page-ms-max", type=float, default=100.0, help="maximum p99 of a page in ms")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    began = time.monotonic()
    topics_max = 3 * arguments.namespaces * arguments.topics + 1_000
    environment = {"BROKER_TOPICS_MAX": str(topics_max)}
    with ThrowawayCluster(bookies=3, brokers=arguments.brokers, environment=environment) as cluster:
        bench = Bench(cluster, arguments)
        result = asyncio.run(measure(bench))
        bench.progress.clear()
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        print(
            f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, commit {commit()}; "
            f"`{' '.join(['bench/namespaces.py', *sys.argv[1:]])}`, {time.monotonic() - began:.0f} s; "
            f"namespaces created in {result['seconds']['namespaces']} s, topics in {result['seconds']['topics']} s.\n"
        )
        print(render(result))
    slow = [row["list"] for row in result["lists"] if row["p99_ms"] > arguments.page_ms_max]
    if slow:
        print(f"TOO SLOW: the p99 of a page is above {arguments.page_ms_max} ms: {', '.join(slow)}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
