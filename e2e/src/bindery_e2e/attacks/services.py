"""Services: ZooKeeper, a bookie, a broker and an auditor as processes on loopback, some of them in memory groups.

Ledgers have one copy, so that one bookie suffices.
"""

import asyncio
import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.embedded import EmbeddedZooKeeper, ServerSpec, die_with_parent
from bindery_metadata.stores.zookeeper import ZooKeeperStore

from bindery_e2e.attacks.memory_group import MemoryGroup, memory_group

LIMIT_SIZE: Final = 512 * 2**20
"""Memory limit of an attacked process in bytes: that of a container in the chart."""
READY_TIMEOUT_S: Final = 90.0
HOST: Final = "127.0.0.1"
TOPIC: Final = "/v1/topics/public/default/healthy"
BIG_TOPIC: Final = "/v1/topics/public/default/big"
NORMAL_CLIENTS: Final = {"broker": 400, "bookie": 100, "auditor": 100}
"""Number of connections of normal use: a twelfth of what a broker allows, and less than half of the other ports."""
NORMAL: Final[dict[str, list[tuple[str, str, Any]]]] = {
    "broker": [
        ("GET", "/v1/topics", None),
        ("GET", "/metrics", None),
        ("POST", f"{TOPIC}/messages", b"x" * 1000),
        ("POST", f"{TOPIC}/subscriptions/normal/receive", {"consumer": "c", "max": 10, "wait_ms": 0}),
        ("POST", f"{TOPIC}-empty/subscriptions/s/receive", {"consumer": "c", "wait_ms": 500}),
        ("GET", f"{TOPIC}/messages?start=earliest&max=10", None),
        ("GET", f"{BIG_TOPIC}/messages?start=earliest&max=10", None),
    ],
    "bookie": [("GET", "/api/v1/bookie/state", None), ("GET", "/metrics", None), ("GET", "/api/v1/bookie/gc", None)],
    "auditor": [("GET", "/v1/recovery/status", None), ("GET", "/metrics", None), ("GET", "/v1/bookies", None)],
}
"""Requests of normal use, also those that attackers send. Each client sends all but the last one; a few send that."""
BIG_MESSAGES: Final = 12
BIG_SIZE: Final = 2**20


class Services:
    """`groups`: memory groups by the names of the processes that are in them: bookie, broker, auditor."""

    def __init__(self, groups: dict[str, MemoryGroup], directory: Path, zookeeper: str) -> None:
        self._groups = groups
        self._directory = directory
        self.zookeeper = zookeeper
        self.ports = {name: _free_port() for name in ("ledger", "bookie", "broker", "auditor")}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._http = httpx.AsyncClient(timeout=30, trust_env=False)

    def resident_size(self, name: str) -> int:
        """Return the resident memory of a process in a group, in bytes."""
        return self._groups[name].usage().resident_size

    def url(self, name: str) -> str:
        return f"http://{HOST}:{self.ports[name]}"

    def start(self) -> None:
        data = self._directory
        self._start(
            "bookie",
            *("--bookie-id", "b1", "--port", str(self.ports["ledger"]), "--http-port", str(self.ports["bookie"])),
            *("--journal-dir", str(data / "journal"), "--ledger-dir", str(data / "ledgers")),
        )
        self._start("broker", "--port", str(self.ports["broker"]))
        self._start("auditor", "--port", str(self.ports["auditor"]))

    def _start(self, name: str, *options: str) -> None:
        command = [sys.executable, "-m", f"bindery_{name}", "--zookeeper", self.zookeeper, *options]
        quorums = {f"BROKER_LEDGER_{what}": "1" for what in ("ENSEMBLE_SIZE", "WRITE_QUORUM", "ACK_QUORUM")}
        begin = self._groups[name].start if name in self._groups else subprocess.Popen
        with self._log(name).open("wb") as log:
            self._processes[name] = begin(
                command, stdout=log, stderr=log, env={**os.environ, **quorums}, preexec_fn=die_with_parent
            )

    def log(self, name: str) -> str:
        return self._log(name).read_text(errors="replace")

    def log_size(self, name: str) -> int:
        """Return how many bytes a process has logged."""
        return self._log(name).stat().st_size

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def check(self) -> None:
        """Fail if a process has ended."""
        for name, process in self._processes.items():
            code = process.poll()
            assert code is None, f"the {name} ended with {code}; its last lines:\n{self.log(name)[-3000:]}"
        for name, group in self._groups.items():
            assert not group.usage().killed, f"the kernel killed the {name}: no memory was left"

    async def until_ready(self) -> None:
        """Wait until all serve, and store the messages that attackers read."""
        until = time.monotonic() + READY_TIMEOUT_S
        while True:
            self.check()
            try:
                await self.healthy_call("broker")
                await self.healthy_call("auditor")
                break
            except (httpx.TransportError, AssertionError):
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(0.2)
        url = self.url("broker")
        for _ in range(BIG_MESSAGES):
            (await self._http.post(f"{url}{BIG_TOPIC}/messages", content=b"x" * BIG_SIZE)).raise_for_status()
        for _ in range(3):
            (await self._http.get(f"{url}{BIG_TOPIC}/messages?start=earliest&max=10")).raise_for_status()
            for name in ("bookie", "broker", "auditor"):
                await self.healthy_call(name)

    async def healthy_call(self, name: str) -> float:
        """Use a service as a well-behaved client does, on a new connection and on an old one.

        Return the seconds of the slowest request.
        """
        slowest_s = 0.0

        async def ok(call: Coroutine[Any, Any, httpx.Response]) -> httpx.Response:
            nonlocal slowest_s
            began = time.monotonic()
            response = await _ok(call)
            slowest_s = max(slowest_s, time.monotonic() - began)
            return response

        if name == "broker":
            topic = self.url(name) + TOPIC
            await ok(self._http.post(f"{topic}/messages", content=b"healthy"))
            receive = {"consumer": "c", "initial": "earliest", "max": 10}
            received = await ok(self._http.post(f"{topic}/subscriptions/s/receive", json=receive))
            ids = [message["message_id"] for message in received.json()["messages"]]
            if ids:
                await ok(self._http.post(f"{topic}/subscriptions/s/ack", json={"message_ids": ids}))
        path = {"bookie": "/api/v1/bookie/state", "broker": "/v1/topics", "auditor": "/v1/recovery/status"}[name]
        await ok(self._http.get(self.url(name) + path))
        async with httpx.AsyncClient(timeout=30, trust_env=False) as fresh:
            await ok(fresh.get(self.url(name) + path))
        return slowest_s

    async def serve_normally(self, name: str) -> None:
        """Use a process as many clients at a time do, so that it has the memory of a service in use."""
        unused = httpx.create_ssl_context()  # each client would create its own

        def client() -> httpx.AsyncClient:  # a common pool of so many connections takes most of the time
            return httpx.AsyncClient(base_url=self.url(name), timeout=60, trust_env=False, verify=unused)

        async def send(http: httpx.AsyncClient, method: str, path: str, body: Any) -> None:
            content = {} if body is None else {"content" if isinstance(body, bytes) else "json": body}
            while (response := await http.request(method, path, **content)).status_code == 429:
                await asyncio.sleep(0.2)
            assert response.status_code < 300, f"{path}: {response.status_code} {response.text[:300]}"

        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(client()) for _ in range(NORMAL_CLIENTS[name])]

            async def use(http: httpx.AsyncClient) -> None:
                for request in NORMAL[name][:-1]:
                    await send(http, *request)

            await asyncio.gather(*map(use, clients))
            await asyncio.gather(*(send(http, *NORMAL[name][-1]) for http in clients[:4]))

    async def refused(self, name: str) -> dict[str, int]:
        """Return how many requests and connections a process refused, by reason."""
        page = (await _ok(self._http.get(self.url(name) + "/metrics"))).text
        prefix = 'bindery_http_refused_total{reason="'
        lines = [line.removeprefix(prefix) for line in page.splitlines() if line.startswith(prefix)]
        return {reason: int(value) for reason, _, value in (line.partition('"} ') for line in lines)}

    async def close(self) -> None:
        await self._http.aclose()
        for process in self._processes.values():
            process.kill()
            process.wait()


async def _ok(call: Coroutine[Any, Any, httpx.Response]) -> httpx.Response:
    response = await call
    assert response.status_code == 200, f"{response.request.url}: {response.status_code} {response.text[:300]}"
    return response


@contextlib.asynccontextmanager
async def services(directory: Path, *inside: str, size_max: int = LIMIT_SIZE) -> AsyncIterator[Services]:
    """Run the services during the block. `inside`: names of those that are in a memory group, each in its own."""
    spec = ServerSpec(directory / "zookeeper", _free_port())
    zookeeper = EmbeddedZooKeeper(spec)
    await zookeeper.start()
    try:
        store = await ZooKeeperStore.connect(spec.hosts)
        await initialize_cluster(store, LedgersLayout(), randomness=random.SystemRandom())
        await store.close()
        with contextlib.ExitStack() as stack:
            groups = {name: stack.enter_context(memory_group(size_max)) for name in inside}
            running = Services(groups, directory, spec.hosts)
            try:
                running.start()
                await running.until_ready()
                yield running
            finally:
                await running.close()
    finally:
        await zookeeper.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def refused_more(before: dict[str, int], after: dict[str, int], reasons: Sequence[str]) -> int:
    """Return how many refusals of one of `reasons` there were in between."""
    return sum(after.get(reason, 0) - before.get(reason, 0) for reason in reasons)
