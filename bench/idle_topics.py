"""Measure what many idle topics cost one broker: memory, processor time, ZooKeeper traffic, stop, start and fail-over.

    .venv/bin/python bench/idle_topics.py                              # 10,000 topics
    .venv/bin/python bench/idle_topics.py --topics 2000 --idle-s 20    # quick

A cluster of ZooKeeper, three bookies that sync and one broker is started. `--topics` topics are created over HTTP, with
one subscription each, in `--namespaces` namespaces; every tenth one (`--backlog-share`) gets ten messages that nobody
receives. Then nothing is requested for `--idle-s` seconds: the broker's processor time and the packets of ZooKeeper are
counted, and its memory is read from /proc (PSS; RSS includes pages that other processes share).

Then the broker is stopped in order, started again, and asked once for each topic over `--connections` connections; a
busy topic gets one message after the other meanwhile. The same follows after a SIGKILL, which leaves all ledgers open:
that is what the next owner of the topics does after a broker has died, without the time of the session.

The figures "of the topics" are those of the broker with all topics less those of the same broker without any.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bindery.common.progress import Progress
from bindery.standalone.control import ask
from bindery.standalone.throwaway import ThrowawayCluster
from bindery_metadata.stores.embedded import four_letter_word

TENANT: Final = "bench"
BUSY: Final = f"{TENANT}/busy/hot"
"""A topic that is written while all others are opened."""
REQUEST_TIMEOUT_S: Final = 60.0
READY_TIMEOUT_S: Final = 120.0
MESSAGES: Final = 10
"""Number of messages in a topic with a backlog."""
CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")


class Client:
    """One HTTP connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Return the status and the body of the answer. A connection that was idle may be closed: it is made again."""
        if self._streams is not None:
            with suppress(OSError, asyncio.IncompleteReadError):
                return await self._ask(method, path, body)
        return await self._ask(method, path, body)

    async def _ask(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22)
        reader, writer = self._streams
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        try:
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
                size = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
                return int(lines[0].split()[1]), await reader.readexactly(size)
        except (OSError, asyncio.IncompleteReadError):
            self.close()
            raise

    async def want(self, method: str, path: str, body: bytes = b"", *, statuses: Sequence[int] = (200, 201)) -> bytes:
        status, answer = await self.ask(method, path, body)
        if status not in statuses:
            raise SystemExit(f"{method} {path} was answered with {status}: {answer[:300]!r}")
        return answer

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None


@dataclass
class Calls:
    """Latencies of calls, in ms."""

    seconds: float = 0.0
    """From the begin of the first call to the end of the last one."""
    ms: list[float] = field(default_factory=list)
    refused: int = 0
    """Answers that ask for another attempt: 429, 503, 504."""

    def row(self) -> dict[str, Any]:
        ordered = sorted(self.ms) or [0.0]

        def at(share: float) -> float:
            return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)

        return {
            "seconds": round(self.seconds, 1),
            "calls": len(self.ms),
            "p50_ms": at(0.5),
            "p99_ms": at(0.99),
            "max_ms": round(ordered[-1], 1),
            "refused": self.refused,
        }


class Bench:
    def __init__(self, cluster: ThrowawayCluster, arguments: argparse.Namespace) -> None:
        self.cluster = cluster
        self.arguments = arguments
        port = int(cluster.broker_url().rpartition(":")[2])
        self.clients = [Client(port) for _ in range(arguments.connections)]
        self.other = Client(port)
        self.progress = Progress()
        count = arguments.namespaces
        self.topics = [f"{TENANT}/n{n % count:03}/t{n:05}" for n in range(arguments.topics)]
        step = round(1 / arguments.backlog_share) if arguments.backlog_share else 0
        self.with_backlog = self.topics[::step] if step else []

    # -- what the operating system and ZooKeeper count ------------------------------------------------------------

    def memory(self) -> dict[str, float]:
        """Return the memory of the broker in MiB."""
        text = Path(f"/proc/{self.cluster.pid('broker-0')}/smaps_rollup").read_text()
        rows = {line.split(":")[0]: line.split() for line in text.splitlines()[1:]}
        return {name.lower(): round(int(rows[name][1]) / 1024, 1) for name in ("Rss", "Pss")}

    def cpu_s(self) -> float:
        """Return the processor time that the broker has taken."""
        fields = Path(f"/proc/{self.cluster.pid('broker-0')}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS

    async def zookeeper(self) -> dict[str, int]:
        host, _, port = self.cluster.zookeeper.partition(":")
        text = await four_letter_word(host, int(port), "mntr", timeout_s=10.0)
        assert text is not None, "zookeeper does not answer"
        rows = (line.split("\t") for line in text.splitlines() if "\t" in line)
        return {row[0]: int(row[1]) for row in rows if row[1].lstrip("-").isdigit()}

    async def idle(self, seconds: float) -> dict[str, float]:
        """Request nothing. Returns the share of a core that the broker takes, and the packets of ZooKeeper."""
        cpu_s, packets = self.cpu_s(), (await self.zookeeper())["zk_packets_received"]
        began = time.monotonic()
        while (left_s := began + seconds - time.monotonic()) > 0:
            self.progress.show(f"idle for {left_s:.0f} s")
            await asyncio.sleep(min(1.0, left_s))
        took = time.monotonic() - began
        packets = (await self.zookeeper())["zk_packets_received"] - packets
        return {
            "cpu_percent": round(100 * (self.cpu_s() - cpu_s) / took, 2),
            "packets_per_s": round(packets / took, 1),
        }

    # -- calls ----------------------------------------------------------------------------------------------------

    async def all(self, what: str, calls: list[tuple[str, str, bytes]]) -> Calls:
        """Make the calls over all connections, and repeat those that are refused for now."""
        found = Calls()
        left = iter(calls)
        done = 0

        async def work(client: Client) -> None:
            nonlocal done
            for method, path, body in left:
                began = time.perf_counter()
                while True:
                    status, answer = await client.ask(method, path, body)
                    if status not in (429, 503, 504):
                        break
                    found.refused += 1
                    await asyncio.sleep(0.05)
                if status not in (200, 201):
                    raise SystemExit(f"{method} {path} was answered with {status}: {answer[:300]!r}")
                found.ms.append((time.perf_counter() - began) * 1000)
                done += 1
                if done % 50 == 0:
                    self.progress.show(f"{what}: {done} of {len(calls)}")

        began = time.monotonic()
        await asyncio.gather(*(work(client) for client in self.clients))
        found.seconds = time.monotonic() - began
        return found

    async def busy(self) -> Calls:
        """Write to one topic, one message after the other, until cancelled."""
        found = Calls()
        with suppress(asyncio.CancelledError):
            while True:
                began = time.perf_counter()
                status, answer = await self.other.ask("POST", f"/v1/topics/{BUSY}/messages", b'{"payload": "x"}')
                if status not in (200, 429, 503, 504):
                    raise SystemExit(f"the busy topic was answered with {status}: {answer[:300]!r}")
                found.refused += status != 200
                found.ms.append((time.perf_counter() - began) * 1000)
        return found

    async def metrics(self) -> dict[str, float]:
        """Return size and time of the page of metrics, which is collected for it."""
        await asyncio.sleep(10)  # a page is sent again for some seconds
        began = time.perf_counter()
        page = await self.other.want("GET", "/metrics")
        return {"ms": round((time.perf_counter() - began) * 1000, 1), "mib": round(len(page) / 2**20, 2)}

    async def ready(self, *, not_pid: int) -> None:
        """Wait until another process than `not_pid` serves."""
        began = time.monotonic()
        while time.monotonic() - began < READY_TIMEOUT_S:
            if self.cluster.has_restarted("broker-0", since=not_pid):
                with suppress(OSError, asyncio.IncompleteReadError):
                    if (await self.other.ask("GET", "/readyz"))[0] == 200:
                        return
                self.other.close()
            await asyncio.sleep(0.05)
        raise SystemExit("the broker did not become ready again")

    async def open_all(self, what: str) -> dict[str, Any]:
        """Ask once for each topic, while a busy one is written."""
        cpu_s = self.cpu_s()
        busy = asyncio.create_task(self.busy())
        opened = await self.all(what, [("GET", f"/v1/topics/{topic}", b"") for topic in self.topics])
        busy.cancel()
        return {
            "first_requests": opened.row(),
            "busy": (await busy).row(),
            "cpu_s": round(self.cpu_s() - cpu_s, 1),
            "memory": self.memory(),
        }

    async def again(self, *, kill: bool) -> dict[str, Any]:
        """End the broker, start it, and open all topics."""
        for client in [*self.clients, self.other]:
            client.close()
        pid = self.cluster.pid("broker-0")
        result: dict[str, Any] = {}
        began = time.monotonic()
        if kill:
            self.progress.show("killed the broker")
            self.cluster.kill("broker-0")
        else:
            self.progress.show("stopping the broker")
            socket = self.cluster.directory.control_socket
            await asyncio.to_thread(ask, socket, {"verb": "stop", "name": "broker-0"}, timeout_s=120.0)
            while Path(f"/proc/{pid}").exists():
                await asyncio.sleep(0.05)
            result["stop_s"] = round(time.monotonic() - began, 2)
            began = time.monotonic()
            await asyncio.to_thread(ask, socket, {"verb": "start", "name": "broker-0"}, timeout_s=60.0)
        await self.ready(not_pid=pid)
        result["ready_s"] = round(time.monotonic() - began, 2)
        result |= await self.open_all("opened after a kill" if kill else "opened after a stop")
        return result


async def measure(bench: Bench) -> dict[str, Any]:
    arguments = bench.arguments
    result: dict[str, Any] = {"topics": arguments.topics, "with_backlog": len(bench.with_backlog)}
    await bench.other.want("PUT", f"/v1/tenants/{TENANT}", b"{}")
    spaces = sorted({topic.rpartition("/")[0] for topic in [*bench.topics, BUSY]})
    await bench.all("namespaces", [("PUT", f"/v1/namespaces/{space}", b"{}") for space in spaces])
    await bench.other.want("POST", f"/v1/topics/{BUSY}/messages", b'{"payload": "x"}')
    empty: dict[str, Any] = {"memory": bench.memory(), **await bench.idle(arguments.idle_s / 3)}
    before = await bench.zookeeper()
    result["empty"] = empty
    created = await bench.all("created", [("PUT", f"/v1/topics/{topic}", b"") for topic in bench.topics])
    between = await bench.zookeeper()
    subscribed = await bench.all(
        "subscribed", [("PUT", f"/v1/topics/{topic}/subscriptions/s", b"{}") for topic in bench.topics]
    )
    after = await bench.zookeeper()
    message = json.dumps([{"payload": "m" * 100}] * MESSAGES).encode()
    produced = await bench.all(
        "produced", [("POST", f"/v1/topics/{topic}/messages?batch=false", message) for topic in bench.with_backlog]
    )
    count = len(bench.topics)
    result["created"] = created.row() | {
        "packets": round((between["zk_packets_received"] - before["zk_packets_received"]) / count, 1),
        "znodes": round((between["zk_znode_count"] - before["zk_znode_count"]) / count, 2),
        "watches": round((between["zk_watch_count"] - before["zk_watch_count"]) / count, 2),
    }
    result["subscribed"] = subscribed.row() | {
        "packets": round((after["zk_packets_received"] - between["zk_packets_received"]) / count, 1)
    }
    result["produced"] = produced.row()
    bench.progress.show("waiting for a round of maintenance")
    await asyncio.sleep(arguments.settle_s)
    result["idle"] = {"memory": bench.memory(), **await bench.idle(arguments.idle_s)}
    result["metrics"] = await bench.metrics()
    memory, loaded = empty["memory"]["pss"], bench.memory()["pss"]
    result["of_the_topics"] = {
        "pss_mib": round(loaded - memory, 1),
        "kib_per_topic": round((loaded - memory) * 1024 / count, 1),
        "cpu_percent": round(result["idle"]["cpu_percent"] - empty["cpu_percent"], 2),
    }
    result["stop"] = await bench.again(kill=False)
    result["kill"] = await bench.again(kill=True)
    return result


def render(result: dict[str, Any]) -> str:
    """Return the tables of docs/benchmarks.md."""
    lines = [
        "| broker | PSS MiB | RSS MiB | processor %, idle | ZooKeeper packets/s, whole cluster |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, key in (("without topics", "empty"), (f"{result['topics']:,} topics", "idle")):
        row = result[key]
        memory = row["memory"]
        lines.append(f"| {name} | {memory['pss']} | {memory['rss']} | {row['cpu_percent']} | {row['packets_per_s']} |")
    of = result["of_the_topics"]
    lines += [
        f"| of the topics | {of['pss_mib']} ({of['kib_per_topic']} KiB each) | | {of['cpu_percent']} | |",
        "",
        "| calls | seconds | calls | p50 ms | p99 ms | max ms | refused, repeated |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    rows = [(name, result[name]) for name in ("created", "subscribed", "produced")]
    for key, name in (("stop", "after a stop"), ("kill", "after a kill")):
        rows += [
            (f"first request, {name}", result[key]["first_requests"]),
            (f"busy topic, {name}", result[key]["busy"]),
        ]
    lines += [
        f"| {name} | {row['seconds']} | {row['calls']:,} | {row['p50_ms']} | {row['p99_ms']} | {row['max_ms']} "
        f"| {row['refused']} |"
        for name, row in rows
    ]
    stop, kill, created = result["stop"], result["kill"], result["created"]
    lines += [
        "",
        f"Stop in order: {stop['stop_s']} s. Ready again: {stop['ready_s']} s after the start, {kill['ready_s']} s "
        f"after the kill. Processor time for opening all: {stop['cpu_s']} s after a stop, {kill['cpu_s']} s after a "
        f"kill; PSS then: {stop['memory']['pss']} and {kill['memory']['pss']} MiB. Creating a topic: "
        f"{created['packets']} ZooKeeper packets, {created['znodes']} znodes, {created['watches']} watches; "
        f"subscribing: {result['subscribed']['packets']} packets. /metrics: {result['metrics']['mib']} MiB in "
        f"{result['metrics']['ms']} ms.",
    ]
    return "\n".join(lines)


def commit() -> str:
    words = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topics", type=int, default=10_000)
    parser.add_argument("--namespaces", type=int, default=10)
    parser.add_argument("--backlog-share", type=float, default=0.1, help="part of the topics that get a backlog")
    parser.add_argument("--idle-s", type=float, default=60.0, help="seconds without requests")
    parser.add_argument("--settle-s", type=float, default=70.0, help="seconds before that, for a round of maintenance")
    parser.add_argument("--connections", type=int, default=32, help="number of connections that call in parallel")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    began = time.monotonic()
    environment = {"BROKER_TOPICS_MAX": str(arguments.topics + 1_000)}
    with ThrowawayCluster(bookies=3, brokers=1, environment=environment) as cluster:
        bench = Bench(cluster, arguments)
        result = asyncio.run(measure(bench))
        bench.progress.clear()
    if arguments.json:
        print(json.dumps(result, indent=2))
        return 0
    print(
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, commit {commit()}; "
        f"`{' '.join(['bench/idle_topics.py', *sys.argv[1:]])}`, {time.monotonic() - began:.0f} s.\n"
    )
    print(render(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
