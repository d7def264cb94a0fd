"""Measure HTTP produce and receive on a running broker: messages/s and latency, single messages and batches.

    python bench/broker.py http://127.0.0.1:8080
    python bench/broker.py http://127.0.0.1:8080 --seconds 10 --connections 1,16,64 --json

Each row keeps a number of connections busy for some seconds, with one request in flight on each. `single` is one
message per request (raw body), `batch` an NDJSON request of --batch messages. The receive rows read the messages of the
produce rows and acknowledge all of them, with one ack call for each receive call. The client implements HTTP over plain
sockets, because it shares the machine with the broker and must cost little; the table has its CPU time.
"""

import argparse
import asyncio
import json
import platform
import ssl
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit


@dataclass
class Row:
    what: str
    connections: int
    messages_per_request: int
    size: int
    seconds: float
    requests: int
    messages: int
    messages_per_s: float
    mib_per_s: float
    latency_ms_p50: float
    latency_ms_p99: float
    client_cpu: float
    """CPU seconds of this client per second."""


class Connection:
    """One keep-alive HTTP/1.1 connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, headers: str) -> None:
        self._reader = reader
        self._writer = writer
        self._headers = headers

    @classmethod
    async def open(cls, url: str, *, tls: ssl.SSLContext | None = None, token: str = "") -> "Connection":
        """Connect, with TLS if there is a context for it. `token`: sent with each request."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, limit=2**24, ssl=tls)
        headers = f"Host: {parts.netloc}\r\n" + (f"Authorization: Bearer {token}\r\n" if token else "")
        return cls(reader, writer, headers)

    async def request(self, method: str, path: str, body: bytes, content_type: str = "application/json") -> bytes:
        """The body of a 2xx response. Raises RuntimeError for other responses."""
        head = (
            f"{method} {path} HTTP/1.1\r\n{self._headers}Content-Type: {content_type}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        status = int(answer[9:12])
        lowered = answer.lower()
        at = lowered.index(b"content-length:") + 15
        content = await self._reader.readexactly(int(lowered[at : lowered.index(b"\r\n", at)]))
        if not 200 <= status < 300:
            raise RuntimeError(f"{method} {path}: {status} {content[:500]!r}")
        return content

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


Step = Callable[[Connection, int], Awaitable[int]]
"""Send one request, or several that belong together, on a connection. Returns the number of messages; 0: the end."""


async def run(
    url: str,
    step: Step,
    *,
    what: str,
    connections: int,
    per_request: int,
    size: int,
    seconds: float,
    lines: Sequence[Connection] = (),
) -> Row:
    """`lines`: open connections, which stay open; without any, `connections` are opened and closed."""
    opened = [] if lines else [await Connection.open(url) for _ in range(connections)]
    lines = lines or opened
    latencies: list[float] = []
    messages = 0
    began, cpu_began = time.perf_counter(), time.process_time()
    deadline = began + seconds

    async def worker(number: int, connection: Connection) -> None:
        nonlocal messages
        while (at := time.perf_counter()) < deadline:
            moved = await step(connection, number)
            if not moved:
                return
            latencies.append(time.perf_counter() - at)
            messages += moved

    await asyncio.gather(*(worker(number, line) for number, line in enumerate(lines)))
    took, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    for line in opened:
        await line.close()
    ordered = sorted(latencies) or [0.0]
    return Row(
        what=what,
        connections=connections,
        messages_per_request=per_request,
        size=size,
        seconds=round(took, 2),
        requests=len(latencies),
        messages=messages,
        messages_per_s=round(messages / took),
        mib_per_s=round(messages * size / took / 2**20, 2),
        latency_ms_p50=round(statistics.median(ordered) * 1e3, 2),
        latency_ms_p99=round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e3, 2),
        client_cpu=round(cpu / took, 2),
    )


def producing(topic: str, *, size: int, batch: int) -> Step:
    path = f"/v1/topics/{topic}/messages"
    if batch == 1:
        body, content_type = b"x" * size, "application/octet-stream"
    else:
        body = b"\n".join([json.dumps({"payload": "x" * size}).encode()] * batch)
        content_type = "application/x-ndjson"

    async def step(connection: Connection, _number: int) -> int:
        await connection.request("POST", path, body, content_type)
        return batch

    return step


def receiving(topic: str, *, subscription: str, batch: int, in_one_call: bool = False) -> Step:
    """`in_one_call`: acknowledge the messages of the last receive call with the next one, not with a call after it."""
    path = f"/v1/topics/{topic}/subscriptions/{subscription}"
    received: dict[int, list[str]] = {}

    async def step(connection: Connection, number: int) -> int:
        fields = {"consumer": f"bench-{number}", "max": batch, "wait_ms": 0, "ack_timeout_ms": 600_000}
        if before := received.pop(number, None):
            fields["ack"] = before
        answer = json.loads(await connection.request("POST", f"{path}/receive", json.dumps(fields).encode()))
        found = [message["message_id"] for message in answer["messages"]]
        if found and in_one_call:
            received[number] = found
        elif found:
            await connection.request("POST", f"{path}/ack", json.dumps({"message_ids": found}).encode())
        return len(found)

    return step


async def measure(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    stamp = int(time.time())
    for connections in options.connections:
        for batch in (1, options.batch):
            topic = f"public/default/bench-{stamp}-{connections}-{batch}"
            common = {
                "connections": connections,
                "per_request": batch,
                "size": options.size,
                "seconds": options.seconds,
            }
            kind = "single" if batch == 1 else "batch"
            rows.append(
                await run(
                    options.url, producing(topic, size=options.size, batch=batch), what=f"produce {kind}", **common
                )
            )
            show(rows[-1], options)
            step = receiving(topic, subscription="bench", batch=batch)
            rows.append(await run(options.url, step, what=f"receive+ack {kind}", **common))
            show(rows[-1], options)
            line = await Connection.open(options.url)
            await line.request("DELETE", f"/v1/topics/{topic}?force=true", b"")
            await line.close()
    return rows


def show(row: Row, options: argparse.Namespace) -> None:
    if not options.json:
        print(
            f"{row.what:<20}{row.connections:>6}{row.messages_per_request:>8}{row.messages_per_s:>12,}{row.mib_per_s:>9}"
            f"{row.latency_ms_p50:>10}{row.latency_ms_p99:>10}{row.client_cpu:>8}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="URL of the broker")
    parser.add_argument("--seconds", type=float, default=5, help="seconds per row (5)")
    parser.add_argument("--size", type=int, default=1024, help="payload bytes of a message (1024)")
    parser.add_argument("--batch", type=int, default=100, help="messages of a batched request (100)")
    parser.add_argument(
        "--connections",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[1, 8, 64],
        help="numbers of connections, one per row, separated by commas (1,8,64)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()
    if not options.json:
        print(f"{options.size} B messages, {options.seconds:g} s per row, {platform.platform()}")
        print(f"{'':<20}{'conns':>6}{'msg/req':>8}{'messages/s':>12}{'MiB/s':>9}{'p50 ms':>10}{'p99 ms':>10}{'cpu':>8}")
    rows = asyncio.run(measure(options))
    if options.json:
        json.dump({"machine": platform.platform(), "rows": [asdict(row) for row in rows]}, sys.stdout, indent=2)
        print()


if __name__ == "__main__":
    main()
