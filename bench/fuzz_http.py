"""Fuzz the HTTP ports of a real broker, bookie and auditor: hostile connections by seed.

A cluster runs on this machine: ZooKeeper, and one process of each service. While hostile clients connect from 127.0.0.2
and the addresses after it, the program checks that
- the processes run, log no internal error, and respond to no request with one;
- a well-behaved client of each service gets the right responses within HEALTHY_S;
- a web page of another site is refused;
- resident memory stays below RSS_MAX_MIB;
- every connection ends within CONNECTION_LIMIT_S.
At the end, all processes must stop in order. The bytes depend only on the seed and the routes of the services; their
interleaving does not.

    make fuzz-http                                    30 seconds, a new seed
    .venv/bin/python bench/fuzz_http.py --requests 100000 --seed 7
    .venv/bin/python bench/fuzz_http.py --seed 7 --service broker --only 1234     one connection of that run

Exit codes: 0, or 1 with the reason and the command that repeats the run.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import uvloop
from bindery_e2e.attacks.http_routes import http_routes
from bindery_simulation.http_fuzz import PROBES, TOKEN, End, Plan, plan
from fuzzed_process import RSS_MAX_MIB, Failed, FuzzedProcess, attack, empty_cluster, free_port

HEALTHY_S = 5.0
CONNECTIONS = 8
"""Hostile connections at a time to each service."""
CONNECTION_LIMIT_S = 20.0
ADDRESSES = 20
HEAD_TIMEOUT_S = 2
TRANSFER_GRACE_S = 3
PROGRESS_S = 30.0
DEFECTS = {
    "no-deadline": "from bindery_kit.http.http_limits import HttpLimits; HttpLimits._set_deadline = lambda *_: None",
    "no-origin-check": "from bindery_kit.http.origin import OriginPolicy; OriginPolicy.refusal = lambda *_: None",
    "broken-count": "from bindery_kit.http.http_stats import HttpStats; HttpStats.count = lambda *_: 1 / 0",
}
"""Defects that can be injected into all services, to prove that the fuzzer finds them."""
INTERNAL = re.compile(rb"urn:bindery:problem:internal|HTTP/1\.1 500 ")
INTERNAL_SIZE = 40
RESUME = {"resumeMajor": True, "resumeMinor": True}
TOPIC = "/v1/topics/public/healthy/healthy"


class Service:
    """A process, what was sent to it, and its well-behaved client."""

    def __init__(self, name: str, seed: int, process: FuzzedProcess, port: int) -> None:
        self.name = name
        self.seed = seed
        self.process = process
        self.port = port
        self.routes = [*http_routes()[name], *(("GET", path) for path in PROBES)]
        self.requests = 0
        self.connections = 0
        self.answered_size = 0
        self.healthy_ms_max = 0.0
        self.slowest: tuple[float, int, str] = (0.0, -1, "none")
        """Seconds, number and kind of the connection that lasted longest."""
        self.ends: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self._next_number = 0

    # --- hostile clients

    async def worker(self, requests_max: int | None, deadline: float | None) -> None:
        while (requests_max is None or self.requests < requests_max) and (
            deadline is None or time.monotonic() < deadline
        ):
            number, self._next_number = self._next_number, self._next_number + 1
            await self.run_plan(plan(self.seed, number, self.routes))

    async def run_plan(self, one: Plan) -> None:
        """Send the bytes of one connection. Any end of the connection is accepted, but it must end."""
        writer = reading = None
        self.requests += one.requests
        self.connections += 1
        started = time.monotonic()
        try:
            async with asyncio.timeout(CONNECTION_LIMIT_S):
                address = (f"127.0.0.{2 + one.number % ADDRESSES}", 0)
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=address)
                if one.end is not End.UNREAD:
                    reading = asyncio.create_task(self._read(one, reader))
                for piece in one.pieces:
                    if writer.transport.is_closing() or (reading is not None and reading.done()):
                        break
                    writer.write(piece.data)
                    if piece.pause_s:
                        await asyncio.sleep(piece.pause_s)
                    elif reading is not None:
                        await writer.drain()
                await self._end(one, writer, reading)
        except TimeoutError:  # an OSError, too: it comes first
            raise Failed(
                f"connection {one.number} to the {self.name} ({one.kind}) hung for {CONNECTION_LIMIT_S:g} s; alone: "
                f"--service {self.name} --only {one.number}"
            ) from None
        except OSError:
            self.ends["broken by the service"] += 1
        finally:
            self.slowest = max(self.slowest, (time.monotonic() - started, one.number, one.kind))
            if writer is not None:
                writer.transport.abort()
            if reading is not None and not reading.done():
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
        if reading is not None and not reading.cancelled():
            reading.result()

    async def _end(self, one: Plan, writer: asyncio.StreamWriter, reading: "asyncio.Task[None] | None") -> None:
        if reading is None or one.end is End.GONE:
            self.ends[one.end.value] += 1
            return
        if reading.done():
            self.ends["closed by the service"] += 1
            return
        if one.end is End.HALF_CLOSE:
            writer.write_eof()
        await reading
        self.ends[one.end.value] += 1

    async def _read(self, one: Plan, reader: asyncio.StreamReader) -> None:
        """Read until the service closes the connection."""
        last = b""
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if last == b"" and data.startswith(b"HTTP/1.1 "):
                    self.statuses[data[9:12].decode(errors="replace")] += 1
                self.answered_size += len(data)
                window = last + data
                if INTERNAL.search(window):
                    raise Failed(
                        f"the {self.name} had an internal error on connection {one.number} ({one.kind}); alone: "
                        f"--service {self.name} --only {one.number}\n{window[:1500]!r}"
                    )
                last = window[-INTERNAL_SIZE:]

    # --- the well-behaved client

    async def healthy(self) -> None:
        """Use the service on a new connection."""
        if self.name == "bookie":
            state = await self._call("GET", "/api/v1/bookie/state")
            if not state.get("running") or state.get("readOnly"):
                raise Failed(f"the bookie describes itself as {state}")
            await self._call("PUT", "/api/v1/bookie/gc/resume_compaction", RESUME)
        elif self.name == "auditor":
            await self._call("GET", "/v1/recovery/status")
        else:
            await self._call("POST", f"{TOPIC}/messages", b"healthy")
            receive = {"consumer": "c", "initial": "earliest", "max": 10}
            found = await self._call("POST", f"{TOPIC}/subscriptions/healthy/receive", receive)
            if ids := [message["message_id"] for message in found["messages"]]:
                await self._call("POST", f"{TOPIC}/subscriptions/healthy/ack", {"message_ids": ids})

    async def foreign(self) -> None:
        """Use the service as a web page of another site, which must be refused."""
        path = {"bookie": "/api/v1/bookie/state", "auditor": "/v1/recovery/status", "broker": "/v1/topics"}[self.name]
        await self._call("GET", path, origin="http://hostile.example", statuses=(b"403",))

    async def _call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        origin: str | None = None,
        statuses: tuple[bytes, ...] = (b"200", b"204"),
    ) -> dict[str, object]:
        kind = "octet-stream" if isinstance(body, bytes) else "json"
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nAuthorization: Bearer {TOKEN}\r\n"
            f"Content-Type: application/{kind}\r\nContent-Length: {len(content)}\r\nConnection: close\r\n"
        )
        head += f"Origin: {origin}\r\n\r\n" if origin else "\r\n"
        started = time.monotonic()
        try:
            async with asyncio.timeout(HEALTHY_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.write(head.encode() + content)
                answer = await reader.read(-1)
                writer.close()
        except (OSError, TimeoutError) as error:
            self.process.check()
            raise Failed(
                f"the {self.name} did not answer {method} {path} of a healthy client within {HEALTHY_S:g} s: {error!r}"
            ) from error
        self.healthy_ms_max = max(self.healthy_ms_max, 1000 * (time.monotonic() - started))
        first, _, rest = answer.partition(b"\r\n\r\n")
        if first[9:12] not in statuses:
            client = "a foreign page" if origin else "a healthy client"
            raise Failed(f"the {self.name} answered {method} {path} of {client} with\n{answer[:1500]!r}")
        if b"transfer-encoding: chunked" in first.lower():
            rest = b"".join(rest.split(b"\r\n")[1::2])
        try:
            found = json.loads(rest)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    async def until_ready(self) -> None:
        """Wait until the service answers a healthy client."""
        until = time.monotonic() + 30
        while True:
            self.process.check()
            try:
                await self.healthy()
                break
            except Failed:
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(0.2)
        self.healthy_ms_max = 0.0

    async def watch(self) -> None:
        """Run the well-behaved client and check the process, twice per second."""
        while True:
            self.process.check()
            await self.healthy()
            await self.foreign()
            await asyncio.sleep(0.5)

    def report(self, seconds: float) -> str:
        return (
            f"{self.name}: {self.requests} requests on {self.connections} connections "
            f"({self.requests / seconds:.0f} requests/s)\n"
            f"  ends: {dict(sorted(self.ends.items()))}; first responses: {dict(sorted(self.statuses.items()))}; "
            f"{self.answered_size / 2**20:.0f} MiB of responses\n"
            f"  longest connection: {self.slowest[0]:.1f} s, number {self.slowest[1]} ({self.slowest[2]})\n"
            f"  slowest healthy call: {self.healthy_ms_max:.0f} ms (bound {1000 * HEALTHY_S:.0f}); "
            f"at most {self.process.rss_mib_max:.0f} MiB resident (bound {RSS_MAX_MIB})"
        )


def start(directory: Path, zookeeper: str, seed: int, defect: str | None) -> list[Service]:
    """Start one process of each service, with a defect of DEFECTS."""
    token = directory / "token"
    token.write_text(TOKEN)
    options = {
        "bookie": [
            "--bookie-id", "b1", "--port", str(free_port()), "--journal-dir", str(directory / "journal"),
            "--ledger-dir", str(directory / "ledgers"), "--admin-token-file", str(token),
        ],
        "broker": [],
        "auditor": ["--admin-token-file", str(token)],
    }  # fmt: skip
    limits = ["--http-head-timeout-s", str(HEAD_TIMEOUT_S), "--http-transfer-grace-s", str(TRANSFER_GRACE_S)]
    quorums = {f"BROKER_LEDGER_{what}": 1 for what in ("ENSEMBLE_SIZE", "WRITE_QUORUM", "ACK_QUORUM")}
    environment = {**os.environ, **{name: str(value) for name, value in quorums.items()}}
    services = []
    for name, own in options.items():
        port = free_port()
        option = "--http-port" if name == "bookie" else "--port"
        module = ["-m", f"bindery_{name}"]
        if defect is not None:
            run_module = f"import runpy; runpy.run_module('bindery_{name}', run_name='__main__', alter_sys=True)"
            module = ["-c", f"{DEFECTS[defect]}\n{run_module}"]
        command = [*module, "--zookeeper", zookeeper, option, str(port), *limits, *own]
        process = FuzzedProcess(name, command, directory / f"{name}.log", environment=environment)
        services.append(Service(name, seed, process, port))
    return services


async def progress(services: list[Service]) -> None:
    started = time.monotonic()
    while True:
        await asyncio.sleep(PROGRESS_S)
        counts = ", ".join(f"{one.name} {one.requests} requests, {one.process.rss_mib_max:.0f} MiB" for one in services)
        print(f"{time.monotonic() - started:.0f} s: {counts}", flush=True)


async def fuzz(arguments: argparse.Namespace, directory: Path) -> None:
    async with empty_cluster(directory) as zookeeper:
        services = start(directory, zookeeper, arguments.seed, arguments.defect)
        try:
            for service in services:
                await service.until_ready()
            attacked = [one for one in services if arguments.service in (None, one.name)]
            await run(services, attacked, arguments)
            for service in reversed(services):
                service.process.check()
                await service.process.stop()
        finally:
            for service in services:
                service.process.kill()


async def run(services: list[Service], attacked: list[Service], arguments: argparse.Namespace) -> None:
    deadline = time.monotonic() + arguments.seconds if arguments.seconds else None
    if arguments.only is not None:
        attackers = [one.run_plan(plan(arguments.seed, arguments.only, one.routes)) for one in attacked]
    else:
        attackers = [one.worker(arguments.requests, deadline) for one in attacked for _ in range(CONNECTIONS)]

    async def watch() -> None:
        await asyncio.gather(progress(services), *(one.watch() for one in services))

    seconds = await attack(watch(), attackers)
    print(f"{sum(one.requests for one in attacked)} requests in {seconds:.0f} s, seed {arguments.seed}")
    for one in services:
        print(one.report(seconds))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, help="maximum number of requests to each service")
    parser.add_argument("--seconds", type=float, help="maximum seconds (default: 30 without --requests)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--service", choices=("broker", "bookie", "auditor"), help="attack only this service")
    parser.add_argument("--defect", choices=tuple(DEFECTS), help="inject this defect: the run must fail")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="run only this connection")
    arguments = parser.parse_args()
    if arguments.requests is None and arguments.seconds is None:
        arguments.seconds = 30.0
    with tempfile.TemporaryDirectory(prefix="bindery-fuzz-") as directory:
        try:
            uvloop.run(fuzz(arguments, Path(directory)))
        except Failed as error:
            length = f"--requests {arguments.requests}" if arguments.requests else f"--seconds {arguments.seconds:g}"
            service = f" --service {arguments.service}" if arguments.service else ""
            service += f" --only {arguments.only}" if arguments.only is not None else ""
            print(f"FAILED: {error}")
            defect = f" --defect {arguments.defect}" if arguments.defect else ""
            print(f"repeat with: .venv/bin/python {sys.argv[0]} --seed {arguments.seed} {length}{service}{defect}")
            return 1
    print("no crash, no hang, no internal error, memory bounded")
    return 0


if __name__ == "__main__":
    sys.exit(main())
