"""Fuzz the HTTP ports of a real broker, bookie and auditor: hostile connections by seed.

A cluster runs on this machine: ZooKeeper, one process of each service, and a second bookie, because the fuzzed one
becomes read-only. While hostile clients connect from 127.0.0.2 and the addresses after it, the program checks that
- the processes run, log no internal error, and respond to no request with one;
- a request that a plan expects to be refused gets that refusal, or at least no other response;
- a well-behaved client of each service gets the right responses within HEALTHY_S (`Heartbeat`);
- a web page of another site is refused;
- resident memory stays below RSS_MAX_MIB;
- every connection ends within CONNECTION_LIMIT_S.
The well-behaved clients undo what hostile operators may do: read-only bookies, suspended compaction, paused recovery.
At the end, the services must work and stop in order. The bytes depend only on the seed and the routes of the services;
their interleaving does not.

A request counts if the operating system accepted all its bytes while the connection was open. Responses are counted by
their status lines.

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
from typing import cast

import uvloop
from bindery_e2e.attacks.http_routes import http_routes, pulsar_admin_routes
from bindery_simulation.http_fuzz import PROBES, TOKEN, End, Plan, Refusal, plan
from fuzzed_process import RSS_MAX_MIB, Failed, FuzzedProcess, attack, empty_cluster, free_port

HEALTHY_S = 5.0
HEARTBEAT_S = 0.05
CONNECTIONS = 12
"""Hostile connections at a time to each service, without slow ones."""
SLOW_CONNECTIONS = 48
"""Slow connections at a time to each service."""
CONNECTION_LIMIT_S = 20.0
SILENCE_S = 0.7
"""Time in seconds without a response after which a client waits for no further one."""
ANSWERS_MAX_S = 8.0
"""Maximum time in seconds that a client waits for responses."""
ADDRESSES = 20
HEAD_TIMEOUT_S = 2
TRANSFER_GRACE_S = 3
PROGRESS_S = 30.0
DEFECTS = {
    "no-deadline": "from bindery_kit.http.http_limits import HttpLimits; HttpLimits._set_deadline = lambda *_: None",
    "no-origin-check": "from bindery_kit.http.origin import OriginPolicy; OriginPolicy.refusal = lambda *_: None",
    "no-head-limit": "from bindery_kit.http import http_limits as h; h.HEAD_SIZE_MAX = h.HEADERS_MAX = 2**40",
    "no-body-limit": "from bindery_kit.admin import http; http.BODY_SIZE_MAX = 2**40",
    "no-body-limit-in-the-broker": (
        "from bindery_broker.http.exchange import Exchange; read = Exchange.read_body; "
        "Exchange.read_body = lambda self, size_max: read(self, size_max=2**40)"
    ),
    "no-coding-check": "from bindery_kit.admin import content_types as c; c.check_content_coding = lambda _: None",
    "no-type-check": "from bindery_kit.admin import content_types as c; c.check_json_type = lambda _: None",
    "no-token-check": "from bindery_kit.admin.access import Access; Access.check = lambda *_: 'anybody'",
    "blocked-loop": (
        "import time; from bindery_kit.admin.app import AdminApp; found = AdminApp.not_found; "
        "AdminApp.not_found = lambda self, path: time.sleep(6) or found(self, path)"
    ),
    "silent-refusal": (
        "from bindery_kit.http.http_limits import HttpLimits; "
        "HttpLimits._hang_up = lambda self, *_: self.transport.close()"
    ),
    "broken-refusal": "from bindery_kit.http.http_limits import ServerLimits; ServerLimits.refused = lambda *_: 1 / 0",
    "broken-count": "from bindery_kit.http.http_stats import HttpStats; HttpStats.count = lambda *_: 1 / 0",
}
"""Defects that can be injected into all services, to prove that the fuzzer finds them."""
STATUS = re.compile(rb"HTTP/1\.1 (\d\d\d) [A-Z]")
INTERNAL = re.compile(rb"urn:bindery:problem:internal|HTTP/1\.1 500 ")
TAIL_SIZE = 40
"""Bytes of earlier reads in which a pattern may begin."""
BUSY = frozenset({429, 503})
"""Statuses by which a service may refuse any request, because others take too much."""
REFUSALS_MIN = 8
"""Number of requests of one kind of refusal of which at least half must be answered."""
NAMESPACES = ("fuzz", "healthy")
TOPIC = "/v1/topics/public/healthy/healthy"


class Heartbeat:
    """Measure how late this program itself runs on a fully used machine, to judge the durations it measures."""

    def __init__(self) -> None:
        self.late_s = 0.0
        """Sum of the delays."""

    async def run(self) -> None:
        while True:
            started = time.monotonic()
            await asyncio.sleep(HEARTBEAT_S)
            self.late_s += max(0.0, time.monotonic() - started - HEARTBEAT_S)


class Hostile(asyncio.Protocol):
    """One connection of a plan: count what comes back."""

    def __init__(self, service: "Service", one: Plan) -> None:
        self._service = service
        self._plan = one
        self._tail = b""
        self.answers = 0
        self.first = 0
        """Status of the first response; 0: none."""
        self.read_size = 0
        self.has_broken = False
        self.is_blocked = False
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._moved = asyncio.Event()
        """Set when something that the client waits for may have happened."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's class is not derived from it
        self.transport.set_write_buffer_limits(high=0)  # so that `is_blocked` means: bytes are not sent yet
        if self._plan.end is End.UNREAD:
            self.transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.has_broken = exc is not None
        if not self.closed.done():  # otherwise whoever waited was cancelled
            self.closed.set_result(None)
        self._moved.set()

    def pause_writing(self) -> None:
        self.is_blocked = True

    def resume_writing(self) -> None:
        self.is_blocked = False
        self._moved.set()

    def data_received(self, data: bytes) -> None:
        self.read_size += len(data)
        tail_size, window = len(self._tail), self._tail + data
        for found in STATUS.finditer(window):
            if found.end() > tail_size:
                self._service.statuses[found[1].decode()] += 1
                self.answers += 1
                self.first = self.first or int(found[1])
        if INTERNAL.search(window):
            self._service.fail(self._plan, f"had an internal error\n{window[:1500]!r}")
        self._tail = window[-TAIL_SIZE:]
        self._moved.set()

    async def wait_sent(self) -> None:
        """Wait until all bytes are sent, or the connection is closed."""
        while self.is_blocked and not self.closed.done():
            self._moved.clear()
            await self._moved.wait()

    async def wait_answered(self) -> None:
        """Wait for one response per request, for the end of the connection, or for silence."""
        until = time.monotonic() + ANSWERS_MAX_S
        with contextlib.suppress(TimeoutError):
            while time.monotonic() < until and self.answers < len(self._plan.request_ends) and not self.closed.done():
                self._moved.clear()
                async with asyncio.timeout(SILENCE_S):
                    await self._moved.wait()


class Service:
    """A process, what was sent to it, and its well-behaved client."""

    def __init__(self, name: str, seed: int, process: FuzzedProcess, port: int, heartbeat: Heartbeat) -> None:
        self.name = name
        self.seed = seed
        self.process = process
        self.port = port
        own = [*http_routes()[name], *(("GET", path) for path in PROBES)]
        admin = pulsar_admin_routes() if name == "broker" else []
        self.routes = [*own * max(1, len(admin) // len(own)), *admin]  # its own API as often as Pulsar's
        self.requests = 0
        self.connections = 0
        self.answered_size = 0
        self.healthy_s_max = self.healthy_raw_s_max = 0.0
        """Duration of the slowest healthy call, without and with the delay of this program."""
        self.healthy_calls = 0
        self.undone = 0
        """How often the well-behaved client found the bookie read-only, or recovery paused."""
        self.slowest: tuple[float, int, str] = (0.0, -1, "none")
        """Seconds, number and kind of the connection that lasted longest."""
        self.ends: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.refusals: Counter[tuple[Refusal, int]] = Counter()
        """Number of requests by the refusal they had to get and the status they got; 0: the connection ended before."""
        self._heartbeat = heartbeat
        self._next_number = 0
        self._slow: set[asyncio.Task[None]] = set()
        self._failure: Failed | None = None

    # --- hostile clients

    def fail(self, one: Plan, what: str) -> None:
        self._failure = self._failure or Failed(
            f"the {self.name} {what}\nconnection {one.number} ({one.kind}), alone: --service {self.name} "
            f"--only {one.number}"
        )

    async def worker(self, requests_max: int | None, deadline: float | None) -> None:
        """Run plans until enough requests were sent, and leave slow ones to tasks of their own."""
        while (requests_max is None or self.requests < requests_max) and (
            deadline is None or time.monotonic() < deadline
        ):
            number, self._next_number = self._next_number, self._next_number + 1
            one = plan(self.seed, number, self.routes)
            if one.is_slow and len(self._slow) < SLOW_CONNECTIONS:
                task = asyncio.create_task(self.run_plan(one))
                self._slow.add(task)
                task.add_done_callback(self._end_slow)
            else:
                await self.run_plan(one)
        if self._slow:
            await asyncio.wait(self._slow)
        if self._failure is not None:
            raise self._failure

    def _end_slow(self, task: "asyncio.Task[None]") -> None:
        self._slow.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or (error if isinstance(error, Failed) else Failed(repr(error)))

    async def run_plan(self, one: Plan) -> None:
        """Send the bytes of one connection. Any end of the connection is accepted, but it must end."""
        self.connections += 1
        started = time.monotonic()
        connection: Hostile | None = None
        try:
            async with asyncio.timeout(CONNECTION_LIMIT_S):
                address = (f"127.0.0.{2 + one.number % ADDRESSES}", 0)
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Hostile(self, one), "127.0.0.1", self.port, local_addr=address
                )
                await self._send(one, connection)
                await self._end(one, connection)
        except TimeoutError:  # an OSError, too: it comes first
            raise Failed(
                f"connection {one.number} to the {self.name} ({one.kind}) hung for {CONNECTION_LIMIT_S:g} s; alone: "
                f"--service {self.name} --only {one.number}"
            ) from None
        except OSError:  # of the connect
            self.ends["not connected"] += 1
        finally:
            self.slowest = max(self.slowest, (time.monotonic() - started, one.number, one.kind))
            if connection is not None:
                connection.transport.abort()
                self.answered_size += connection.read_size
        if connection is not None and one.refusal is not None and one.end is not End.GONE:
            self._judge(one, one.refusal, connection.first)
        if self._failure is not None:
            raise self._failure

    def _judge(self, one: Plan, refusal: Refusal, status: int) -> None:
        """Check the first response to a request that must be refused. A response can be lost with its connection."""
        self.refusals[refusal, status] += 1
        if status != 0 and status not in refusal.statuses | BUSY:
            self.fail(one, f"answered {status} to a request that it must refuse ({refusal.value})")

    def check_refusals(self) -> None:
        """Raise Failed if the connection often ended without the refusal."""
        for refusal in Refusal:
            total = sum(count for (kind, _), count in self.refusals.items() if kind is refusal)
            silent = self.refusals[refusal, 0]
            if total >= REFUSALS_MIN and 2 * silent > total:
                raise Failed(f"the {self.name} answered only {total - silent} of {total} requests ({refusal.value})")

    async def _send(self, one: Plan, connection: Hostile) -> None:
        sent_size = 0
        for piece in one.pieces:
            if connection.closed.done() or connection.transport.is_closing():
                break
            connection.transport.write(piece.data)
            await connection.wait_sent()
            if connection.is_blocked:
                break
            sent_size += len(piece.data)
            if piece.pause_s:
                await asyncio.sleep(piece.pause_s)
        self.requests += one.requests(sent_size)

    async def _end(self, one: Plan, connection: Hostile) -> None:
        if one.end is End.GONE or one.end is End.UNREAD:
            self.ends[one.end.value] += 1
            return
        if one.end is End.ANSWERED:
            await connection.wait_answered()
        if connection.closed.done():
            self.ends["broken by the service" if connection.has_broken else "closed by the service"] += 1
            return
        if one.end is not End.HOLD and not connection.transport.is_closing():
            connection.transport.write_eof()
        await connection.closed
        self.ends[one.end.value] += 1

    # --- the well-behaved client

    async def healthy(self) -> None:
        """Use the service on a new connection, and undo what hostile clients may do."""
        if self.name == "bookie":
            state = await self._call("GET", "/api/v1/bookie/state")
            self.undone += state["readOnly"] is True
            await self._call("PUT", "/api/v1/bookie/state/readonly", {"readOnly": False})
            if not state.get("running") or state.get("shuttingDown"):
                raise Failed(f"the bookie describes itself as {state}")
            await self._call("PUT", "/api/v1/bookie/gc/resume_compaction", {"resumeMajor": True, "resumeMinor": True})
        elif self.name == "auditor":
            resumed = await self._call("POST", "/v1/recovery/resume")
            self.undone += resumed["was_paused"] is True
            # Hostile clients have an operator's token, and may therefore use every place of heavy requests.
            await self._call("GET", "/v1/recovery/status", statuses=(b"200", b"429"))
        else:
            for namespace in NAMESPACES:  # "fuzz" is where hostile clients have topics; they may have deleted it
                path = f"/v1/namespaces/public/{namespace}"
                await self._call("PUT", path, {}, statuses=(b"200", b"201", b"409"))
            await self._call("POST", f"{TOPIC}/messages", b"healthy")
            receive = {"consumer": "c", "initial": "earliest", "max": 10}
            found = await self._call("POST", f"{TOPIC}/subscriptions/healthy/receive", receive)
            messages = found["messages"]
            assert isinstance(messages, list)
            if ids := [message["message_id"] for message in messages]:
                await self._call("POST", f"{TOPIC}/subscriptions/healthy/ack", {"message_ids": ids})

    async def settled(self) -> None:
        """Check, when no hostile client is left, that the service does what it is for. Raises Failed."""
        await self.healthy()
        if self.name == "bookie":
            sanity = await self._call("GET", "/api/v1/bookie/sanity")
            if not sanity.get("passed") or sanity.get("readOnly"):
                raise Failed(f"the bookie cannot be written after the attack: {sanity}")
        elif self.name == "auditor":
            status = await self._call("GET", "/v1/recovery/status")
            if not status.get("is_enabled"):
                raise Failed(f"recovery is not enabled after the attack: {status}")

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
        started, late_s = time.monotonic(), self._heartbeat.late_s
        answer = b""
        try:
            async with asyncio.timeout(2 * HEALTHY_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.write(head.encode() + content)
                answer = await reader.read(-1)
                writer.close()
        except TimeoutError:
            pass
        except OSError as error:
            self.process.check()
            raise Failed(f"the {self.name} did not answer {method} {path} of a healthy client: {error!r}") from error
        raw_s = time.monotonic() - started
        took_s = raw_s - min(HEALTHY_S, raw_s, self._heartbeat.late_s - late_s)
        if took_s > HEALTHY_S or raw_s >= 2 * HEALTHY_S:
            self.process.check()
            raise Failed(
                f"the {self.name} did not answer {method} {path} of a healthy client within {HEALTHY_S:g} s: it took "
                f"{raw_s:.1f} s, of which this program was late {raw_s - took_s:.1f} s"
            )
        self.healthy_calls += 1
        self.healthy_s_max = max(self.healthy_s_max, took_s)
        self.healthy_raw_s_max = max(self.healthy_raw_s_max, raw_s)
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
        self.healthy_calls, self.healthy_s_max, self.healthy_raw_s_max = 0, 0.0, 0.0

    async def watch(self) -> None:
        """Run the well-behaved client and check the process, twice per second."""
        while True:
            self.process.check()
            await self.healthy()
            await self.foreign()
            await asyncio.sleep(0.5)

    def report(self, seconds: float) -> str:
        found = sorted(self.refusals.items())
        refused = {
            refusal.value: {status or "none": count for (kind, status), count in found if kind is refusal}
            for refusal in Refusal
        }
        answers = sum(self.statuses.values())
        return (
            f"{self.name}: {self.requests} requests on {self.connections} connections "
            f"({self.requests / seconds:.0f} requests/s), {answers} responses, {self.answered_size / 2**20:.0f} MiB\n"
            f"  statuses: {dict(sorted(self.statuses.items()))}\n"
            f"  refusals: {refused}\n"
            f"  ends: {dict(sorted(self.ends.items()))}\n"
            f"  longest connection: {self.slowest[0]:.1f} s, number {self.slowest[1]} ({self.slowest[2]})\n"
            f"  slowest of {self.healthy_calls} healthy calls: {1000 * self.healthy_s_max:.0f} ms (bound "
            f"{1000 * HEALTHY_S:.0f}), with the delay of this program {1000 * self.healthy_raw_s_max:.0f} ms; "
            f"{self.undone} states undone; at most {self.process.rss_mib_max:.0f} MiB resident (bound {RSS_MAX_MIB})"
        )


def bookie_options(directory: Path, name: str) -> list[str]:
    return [
        "--bookie-id", name, "--port", str(free_port()), "--journal-dir", str(directory / f"{name}-journal"),
        "--ledger-dir", str(directory / f"{name}-ledgers"),
    ]  # fmt: skip


def start(directory: Path, zookeeper: str, seed: int, defect: str | None, heartbeat: Heartbeat) -> list[Service]:
    """Start one process of each service, with a defect of DEFECTS."""
    token = directory / "token"
    token.write_text(TOKEN)
    options = {
        "bookie": [*bookie_options(directory, "b1"), "--admin-token-file", str(token)],
        "broker": [],
        "auditor": ["--admin-token-file", str(token)],
    }
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
        services.append(Service(name, seed, process, port, heartbeat))
    return services


def start_second_bookie(directory: Path, zookeeper: str) -> FuzzedProcess:
    """Start a bookie that nobody attacks, so that the broker can write while the other one is read-only."""
    own = bookie_options(directory, "b2")
    command = ["-m", "bindery_bookie", "--zookeeper", zookeeper, "--http-port", "0", *own]
    return FuzzedProcess("second bookie", command, directory / "second-bookie.log")


async def progress(services: list[Service]) -> None:
    started = time.monotonic()
    while True:
        await asyncio.sleep(PROGRESS_S)
        counts = ", ".join(
            f"{one.name} {one.requests} requests {sum(one.statuses.values())} responses "
            f"{1000 * one.healthy_s_max:.0f} ms {one.process.rss_mib_max:.0f} MiB"
            for one in services
        )
        print(f"{time.monotonic() - started:.0f} s: {counts}", flush=True)


async def fuzz(arguments: argparse.Namespace, directory: Path) -> None:
    heartbeat = Heartbeat()
    async with empty_cluster(directory) as zookeeper:
        second = start_second_bookie(directory, zookeeper)
        services: list[Service] = []
        try:
            await second.until_logged("bookie_started")
            services += start(directory, zookeeper, arguments.seed, arguments.defect, heartbeat)
            for service in services:
                await service.until_ready()
            attacked = [one for one in services if arguments.service in (None, one.name)]
            seconds = await run(services, attacked, second, heartbeat, arguments)
            for service in services:
                service.check_refusals()
                await service.settled()
            print(f"{sum(one.requests for one in attacked)} requests in {seconds:.0f} s, seed {arguments.seed}")
            for service in services:
                print(service.report(seconds))
            for process in (*(service.process for service in reversed(services)), second):
                process.check()
                await process.stop()
        except Failed as error:
            errors = "".join(f"\n{one.name} logged {text}" for one in services if (text := one.process.last_errors()))
            raise Failed(f"{error}{errors}") from error
        finally:
            for process in (*(service.process for service in services), second):
                process.kill()


async def run(
    services: list[Service],
    attacked: list[Service],
    second: FuzzedProcess,
    heartbeat: Heartbeat,
    arguments: argparse.Namespace,
) -> float:
    """Attack and watch the services. Return the seconds. Raises Failed."""
    deadline = time.monotonic() + arguments.seconds if arguments.seconds else None
    if arguments.only is not None:
        attackers = [one.run_plan(plan(arguments.seed, arguments.only, one.routes)) for one in attacked]
    else:
        attackers = [one.worker(arguments.requests, deadline) for one in attacked for _ in range(CONNECTIONS)]

    async def watch_second() -> None:
        while True:
            second.check()
            await asyncio.sleep(0.5)

    async def watch() -> None:
        watching = (one.watch() for one in services)
        await asyncio.gather(heartbeat.run(), progress(services), watch_second(), *watching)

    return await attack(watch(), attackers)


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
