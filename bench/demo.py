"""Send real data through a temporary cluster while processes are killed: `make demo`.

Each file of the running Python's standard library becomes a message, or several if it is too large. Several producers
send the messages over HTTP: small files together as NDJSON, larger ones each as a raw body. Half way, a bookie is
killed with -9, and later the broker. The cluster restarts them, and the producers repeat requests that were not
acknowledged. One consumer then receives and acknowledges all messages, and the program checks that

- every acknowledged message was received with the SHA-256 that was sent,
- the messages of each producer are in order,
- a message is duplicated only if its request was repeated,
- no message was received that was never sent.

Exit code: 0 if all checks passed, 1 otherwise.
"""

import argparse
import asyncio
import base64
import hashlib
import json
import signal
import sys
import sysconfig
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import httpx
from bindery.standalone.throwaway import ThrowawayCluster
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

PART_SIZE_MAX: Final = 4 * 1024 * 1024
"""Maximum bytes of a message; a larger file is sent in parts."""
SMALL_SIZE_MAX: Final = 8 * 1024
"""Maximum bytes of a message that is sent together with others."""
LINES_MAX: Final = 100
"""Maximum number of messages in one request."""
BATCH_SIZE_MAX: Final = 256 * 1024
"""Maximum bytes of the messages in one request."""
RETRY_PAUSE_S: Final = 0.2
RETRY_TIMEOUT_S: Final = 90.0
DRAIN_WAIT_MS: Final = 5_000
TOPIC: Final = "/v1/topics/public/default/stdlib"
RECEIVE_TIMEOUT_S: Final = 120.0

Key = tuple[int, int]
"""(producer, sequence number)"""


@dataclass(frozen=True, slots=True)
class Piece:
    """The payload of one message: a file or a part of it."""

    producer: int
    sequence: int
    path: Path
    name: str
    part: int
    offset: int
    size: int

    @property
    def key(self) -> Key:
        return self.producer, self.sequence

    def read(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            payload = file.read(self.size)
        assert len(payload) == self.size, f"{self.path} changed while it was sent"
        return payload

    def properties(self, digest: str) -> dict[str, str]:
        return {
            "path": self.name,
            "part": str(self.part),
            "producer": str(self.producer),
            "sequence": str(self.sequence),
            "sha256": digest,
        }


@dataclass(slots=True)
class Record:
    """The results of the producers."""

    sent: dict[Key, str] = field(default_factory=dict)
    """SHA-256 of each payload, recorded before it is sent."""
    acknowledged: dict[Key, str] = field(default_factory=dict)
    """Message ids."""
    repeated: set[Key] = field(default_factory=set)
    """Messages that were sent more than once, because the first request failed or had no response."""
    retries: int = 0
    bytes_acknowledged: int = 0


@dataclass(slots=True)
class Verdict:
    lost: list[str]
    changed: list[str]
    out_of_order: list[str]
    doubled: list[str]
    invented: list[str]

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.changed or self.out_of_order or self.doubled or self.invented)


def find_pieces(root: Path, *, producers: int, with_caches: bool, limit: int | None) -> list[list[Piece]]:
    """The files below `root`, distributed over the producers in turn."""
    dealt: list[list[Piece]] = [[] for _ in range(producers)]
    skipped = {"site-packages", "dist-packages"} | (set() if with_caches else {"__pycache__"})
    paths = sorted(
        path for path in root.rglob("*") if path.is_file() and not path.is_symlink() and not skipped & set(path.parts)
    )
    for index, path in enumerate(paths[:limit]):
        mine = dealt[index % producers]
        size = path.stat().st_size
        for part, offset in enumerate(range(0, max(size, 1), PART_SIZE_MAX)):
            length = min(PART_SIZE_MAX, size - offset)
            name = str(path.relative_to(root))
            mine.append(Piece(index % producers, len(mine), path, name, part, offset, length))
    return dealt


def group(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Group consecutive small pieces into one request; each larger piece is a request. The order is kept."""
    run: list[Piece] = []
    for piece in pieces:
        is_small = piece.size <= SMALL_SIZE_MAX
        if run and (not is_small or len(run) == LINES_MAX or sum(p.size for p in run) + piece.size > BATCH_SIZE_MAX):
            yield run
            run = []
        if is_small:
            run.append(piece)
        else:
            yield [piece]
    if run:
        yield run


def request_of(pieces: list[Piece], record: Record) -> tuple[bytes, dict[str, str]]:
    """Body and headers of the request that sends `pieces`."""
    if len(pieces) == 1 and pieces[0].size > SMALL_SIZE_MAX:
        piece = pieces[0]
        payload = piece.read()
        digest = hashlib.sha256(payload).hexdigest()
        record.sent[piece.key] = digest
        headers = {f"bindery-property-{name}": quote(value) for name, value in piece.properties(digest).items()}
        return payload, {"content-type": "application/octet-stream", **headers}
    lines = []
    for piece in pieces:
        payload = piece.read()
        digest = hashlib.sha256(payload).hexdigest()
        record.sent[piece.key] = digest
        encoded = base64.b64encode(payload).decode()
        lines.append(json.dumps({"payload_base64": encoded, "properties": piece.properties(digest)}))
    return "\n".join(lines).encode(), {"content-type": "application/x-ndjson"}


async def produce(url: str, pieces: list[Piece], record: Record, advance: Any) -> None:
    """A producer. It sends a request only after the previous one was acknowledged, which keeps the order."""
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http:
        for batch in group(pieces):
            body, headers = await asyncio.to_thread(request_of, batch, record)
            ids = await send(http, body, headers, batch, record)
            for piece, message_id in zip(batch, ids, strict=True):
                record.acknowledged[piece.key] = message_id
                record.bytes_acknowledged += piece.size
            advance(len(batch), sum(piece.size for piece in batch))


async def send(
    http: httpx.AsyncClient, body: bytes, headers: dict[str, str], batch: list[Piece], record: Record
) -> list[str]:
    """Send a request until it is acknowledged. Raises SystemExit for a permanent error."""
    deadline = time.monotonic() + RETRY_TIMEOUT_S
    params = {"producer": f"demo-{batch[0].producer}"}
    while True:
        problem = ""
        try:
            answer = await http.post(f"{TOPIC}/messages", params=params, content=body, headers=headers)
            if answer.status_code == 200:
                ids: list[str] = answer.json()["message_ids"]
                return ids
            problem = f"{answer.status_code} {answer.text[:300]}"
            if answer.status_code < 500 and answer.status_code not in (207, 408, 409, 429):
                raise SystemExit(f"refused: {problem}")
        except httpx.HTTPError as error:
            problem = repr(error)
        if time.monotonic() > deadline:
            raise SystemExit(f"not acknowledged within {RETRY_TIMEOUT_S:.0f} s: {problem}")
        record.repeated.update(piece.key for piece in batch)
        record.retries += 1
        await asyncio.sleep(RETRY_PAUSE_S)


async def consume(url: str, advance: Any) -> list[dict[str, Any]]:
    """Receive and acknowledge all messages. Returns (key, digest, ...) of each, without payloads."""
    received: list[dict[str, Any]] = []
    base = f"{TOPIC}/subscriptions/verifier"
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
        while True:
            wanted = {"consumer": "verifier", "type": "exclusive", "initial": "earliest", "max": 500}
            messages = (await call(http, f"{base}/receive", {**wanted, "wait_ms": DRAIN_WAIT_MS}))["messages"]
            if not messages:
                return received
            size = 0
            for message in messages:
                text = message.get("payload")
                payload = base64.b64decode(message["payload_base64"]) if text is None else text.encode()
                size += len(payload)
                received.append(
                    {
                        "message_id": message["message_id"],
                        "properties": message["properties"],
                        "sha256": hashlib.sha256(payload).hexdigest(),
                    }
                )
            ids = [message["message_id"] for message in messages]
            await call(http, f"{base}/ack", {"message_ids": ids, "consumer": "verifier"})
            advance(len(messages), size)


async def call(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    deadline = time.monotonic() + RECEIVE_TIMEOUT_S
    while True:
        try:
            answer = await http.post(path, json=body)
            if answer.status_code == 200:
                return answer.json()
            problem = f"{answer.status_code} {answer.text[:300]}"
        except httpx.HTTPError as error:
            problem = repr(error)
        if time.monotonic() > deadline:
            raise SystemExit(f"{path} failed: {problem}")
        await asyncio.sleep(RETRY_PAUSE_S)


def judge(record: Record, received: list[dict[str, Any]]) -> Verdict:
    """Compare the received messages with the acknowledged ones. Pure; each list has a few examples at most."""
    verdict = Verdict([], [], [], [], [])
    times: Counter[Key] = Counter()
    highest: dict[int, int] = defaultdict(lambda: -1)
    ids: set[str] = set()
    for message in received:
        properties = message["properties"]
        label = f"{message['message_id']} {properties}"
        try:
            key = int(properties["producer"]), int(properties["sequence"])
        except (KeyError, ValueError):
            verdict.invented.append(label)
            continue
        if key not in record.sent or message["message_id"] in ids:
            verdict.invented.append(label)
            continue
        ids.add(message["message_id"])
        if message["sha256"] != record.sent[key] or properties["sha256"] != record.sent[key]:
            verdict.changed.append(label)
        times[key] += 1
        if times[key] > 1:
            if key not in record.repeated:
                verdict.doubled.append(label)
        else:
            if key[1] != highest[key[0]] + 1:
                verdict.out_of_order.append(f"{label} after {highest[key[0]]}")
            highest[key[0]] = max(highest[key[0]], key[1])
    verdict.lost = [f"{message_id} {key}" for key, message_id in record.acknowledged.items() if message_id not in ids]
    return verdict


async def inject_faults(cluster: ThrowawayCluster, progress: "Shown", say: Any) -> None:
    """Kill a bookie with -9 at half of the messages, and the broker at three quarters."""
    for share, name in ((0.5, "bookie-1"), (0.75, "broker-0")):
        while progress.share_sent < share:
            await asyncio.sleep(0.01)
        pid = cluster.kill(name)
        say(f"kill -9 {pid} ({name}) at {progress.share_sent:.0%} of the messages")


class Shown:
    """The two progress bars and the progress of the producers."""

    def __init__(self, bars: Progress, *, messages: int, size: int) -> None:
        self._bars = bars
        self._messages = messages
        self._sent = 0
        self._tasks = {
            "produce": bars.add_task("produce", total=size, count=0, messages=messages),
            "consume": bars.add_task("consume", total=size, count=0, messages=messages, visible=False),
        }
        self._counts = {"produce": 0, "consume": 0}

    @property
    def share_sent(self) -> float:
        return self._counts["produce"] / max(1, self._messages)

    def advance(self, what: str, count: int, size: int) -> None:
        self._counts[what] += count
        self._bars.update(self._tasks[what], advance=size, count=self._counts[what], visible=True)


async def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    root = Path(sysconfig.get_paths()["stdlib"])
    dealt = find_pieces(root, producers=arguments.producers, with_caches=arguments.with_caches, limit=arguments.files)
    pieces = [piece for mine in dealt for piece in mine]
    size = sum(piece.size for piece in pieces)

    def say(line: str) -> None:
        console.print(line, soft_wrap=True, highlight=False)

    say(f"{len(pieces)} messages of 0 to {max(p.size for p in pieces)} bytes, {size / 1e6:.1f} MB, from {root}")
    record = Record()
    with ThrowawayCluster(bookies=4) as cluster:
        say(f"the temporary cluster is ready: {cluster.url}, data in {cluster.directory.root}")
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[count]}/{task.fields[messages]} messages"),
            DownloadColumn(),
            TransferSpeedColumn(),
        )
        with Progress(*columns, console=console) as bars:
            shown = Shown(bars, messages=len(pieces), size=size)
            began = time.monotonic()
            faults = asyncio.create_task(inject_faults(cluster, shown, say))
            async with asyncio.TaskGroup() as group_of_producers:
                for mine in dealt:
                    group_of_producers.create_task(
                        produce(cluster.url, mine, record, lambda count, size: shown.advance("produce", count, size))
                    )
            produce_s = time.monotonic() - began
            await faults
            began = time.monotonic()
            received = await consume(cluster.url, lambda count, size: shown.advance("consume", count, size))
            consume_s = time.monotonic() - began - DRAIN_WAIT_MS / 1000  # the last call waited for nothing
        restarts = [
            line.partition("; ")[0]
            for line in cluster.output(200).splitlines()
            if "; restart in " in line or "again ready" in line
        ]
    verdict = judge(record, received)
    ledgers = sorted({int(message["message_id"].split(":")[0]) for message in received})
    return {
        "messages": len(pieces),
        "bytes": size,
        "acknowledged": len(record.acknowledged),
        "received": len(received),
        "duplicates": len(received)
        - len({tuple(m["properties"].get(n) for n in ("producer", "sequence")) for m in received}),
        "requests_repeated": record.retries,
        "produce_s": round(produce_s, 2),
        "produce_mb_per_s": round(size / 1e6 / produce_s, 2),
        "consume_s": round(consume_s, 2),
        "consume_mb_per_s": round(size / 1e6 / max(consume_s, 0.001), 2),
        "ledgers": ledgers,
        "restarts": restarts,
        "lost": verdict.lost,
        "changed": verdict.changed,
        "out_of_order": verdict.out_of_order,
        "doubled": verdict.doubled,
        "invented": verdict.invented,
        "verdict": "GOOD" if verdict.is_good and len(record.acknowledged) == len(pieces) else "BAD",
    }


def show(result: dict[str, Any], console: Console) -> None:
    found = {name: result[name] for name in ("lost", "changed", "out_of_order", "doubled", "invented")}
    lines = [
        f"acknowledged {result['acknowledged']} of {result['messages']} messages, {result['bytes'] / 1e6:.1f} MB, in "
        f"{result['produce_s']} s ({result['produce_mb_per_s']} MB/s); {result['requests_repeated']} requests repeated",
        f"received {result['received']} in {result['consume_s']} s ({result['consume_mb_per_s']} MB/s), "
        f"{result['duplicates']} of them repetitions",
        f"ledgers used: {', '.join(map(str, result['ledgers']))}",
        *(f"  {line}" for line in result["restarts"]),
        ", ".join(f"{name.replace('_', ' ')}: {len(cases)}" for name, cases in found.items()),
        *(f"  {name.replace('_', ' ')}, for example: {cases[0]}" for name, cases in found.items() if cases),
        f"verdict: {result['verdict']}",
    ]
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--producers", type=int, default=4, metavar="N", help="producers at once (4)")
    parser.add_argument("--files", type=int, metavar="N", help="only the first N files")
    parser.add_argument("--with-caches", action="store_true", help="include __pycache__ folders")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    arguments = parser.parse_args()
    console = Console(stderr=arguments.json)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster is removed in this case, too
    try:
        result = asyncio.run(run(arguments, console))
    except KeyboardInterrupt:
        return 130
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        show(result, console)
    return 0 if result["verdict"] == "GOOD" else 1


if __name__ == "__main__":
    sys.exit(main())
