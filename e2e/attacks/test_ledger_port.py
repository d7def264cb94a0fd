"""The ledger port of a bookie with 512 MiB under attack: it lives, serves others, and returns the memory.

Each attack comes from other addresses than the healthy clients: one that keeps its connection, two that connect for
each call, one of them with TLS, and a broker. No connection and no request of them takes longer than CALL_MAX_S. After
each attack, and after all of them in a row, memory returns to within a fifth of that in normal use.
"""

import asyncio
import json
import ssl
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Final

import httpx
import pytest
import pytest_asyncio
from bindery_e2e.attacks.ledger_attacks import ENTRIES, LEDGER_ID
from bindery_e2e.attacks.ledger_client import LedgerClient
from bindery_e2e.attacks.services import Services, services
from bindery_simulation.certificates import CA, certificate, key

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]
CALL_MAX_S: Final = 25.0
"""Maximum duration of a call in seconds. The tests on Kubernetes of CI may use the same processors."""
CLIENTS: Final = 2000
"""The bookie's default limit of connections."""
ATTACK_S: Final = 4.0
RETURN_MAX_S: Final = 60.0
MEMORY_FACTOR_MAX: Final = 1.2
ENTRY_SIZE: Final = 2**20
USUAL_LEDGER_ID: Final = 9
"""Ledger of normal use."""
USUAL_ENTRIES: Final = 160
"""Number of its entries: more than the caches hold."""
USUAL_CLIENTS: Final = 900
"""Number of connections of normal use: less than half of the limit, and of an address."""
PAUSED_ADDRESS: Final = "127.0.0.20"
SETTLE_S: Final = 25.0
"""Seconds until a bookie has returned the memory that it needs no longer (`MemoryRelease`)."""
PAUSE_S: Final = 1.5
"""Seconds that a healthy client does not read, for example because it collects garbage."""
COUNTERS: Final = ("bindery_bookie_connections_ended_total{", "bindery_bookie_bad_frames")


class World:
    def __init__(self, running: Services, client: LedgerClient) -> None:
        self.services = running
        self.client = client
        """Connected before the first attack."""
        self.size_normal = self.size_before = 0
        """Resident memory in normal use, and before the attack, in bytes."""
        self.slowest_s, self.slowest = 0.0, ""
        """Seconds of the slowest request or connection of a healthy client, and what it was."""
        self._tls = ssl.create_default_context(cafile=str(CA))

    @property
    def port(self) -> int:
        return self.services.ports["ledger"]

    async def ends(self) -> Counter[str]:
        """Return how many connections ended, by reason."""
        async with httpx.AsyncClient(timeout=30, trust_env=False) as http:
            page = (await http.get(self.services.url("bookie") + "/metrics")).text
        lines = [line.rpartition(" ") for line in page.splitlines() if line.startswith(COUNTERS)]
        return Counter(
            {name.partition('reason="')[2].removesuffix('"}') or name: int(value) for name, _, value in lines}
        )

    async def healthy_calls(self) -> None:
        """Use the bookie as well-behaved clients do. Fails if one of them is disconnected or waits too long."""
        seconds = {"broker": await self.services.healthy_call("broker")}
        async with asyncio.timeout(3 * CALL_MAX_S):
            seconds["connected client"] = await self.client.call()
        for name, connect in (("connect", self._connect), ("connect with TLS", self._connect_securely)):
            began = time.monotonic()
            async with asyncio.timeout(3 * CALL_MAX_S):
                fresh = await connect()
                seconds[name] = time.monotonic() - began
                seconds[f"{name}, call"] = await fresh.call()
            fresh.close()
        for name, taken_s in seconds.items():
            if taken_s > self.slowest_s:
                self.slowest_s, self.slowest = taken_s, name

    async def _connect(self) -> LedgerClient:
        return await LedgerClient.connect(self.port)

    async def _connect_securely(self) -> LedgerClient:
        return await LedgerClient.connect_securely(self.port, self._tls)

    async def paused_client(self) -> None:
        """Read large entries slowly while others leave theirs unread. Fails if it is disconnected."""
        client = await LedgerClient.connect(self.port, address=PAUSED_ADDRESS)
        for _ in range(2):
            await asyncio.sleep(0.5)
            async with asyncio.timeout(20):
                await client.read_after_pause(LEDGER_ID, 4, PAUSE_S)
        client.close()

    async def serve_normally(self) -> None:
        """Use the bookie as many clients do, until its caches are full, and measure its memory."""
        await self.client.store_entries(USUAL_LEDGER_ID, USUAL_ENTRIES, ENTRY_SIZE)
        clients = [await LedgerClient.connect(self.port) for _ in range(USUAL_CLIENTS)]
        await asyncio.gather(*(client.call() for client in clients))
        await asyncio.gather(*(client.read_after_pause(LEDGER_ID, ENTRIES // 4, 0) for client in clients))
        for first in range(0, USUAL_ENTRIES, 4):
            await self.client.read_after_pause(USUAL_LEDGER_ID, 4, 0, first=first)
        for client in clients:
            client.close()
        for _ in range(20):
            await self.healthy_calls()
        await asyncio.sleep(SETTLE_S)
        self.size_normal = self.services.resident_size("bookie")

    async def until_memory_is_back(self) -> None:
        until = time.monotonic() + RETURN_MAX_S
        most = MEMORY_FACTOR_MAX * self.size_normal
        while self.services.resident_size("bookie") > most:
            sizes = [size >> 20 for size in (self.services.resident_size("bookie"), self.size_before, self.size_normal)]
            assert time.monotonic() < until, f"{sizes[0]} MiB after, {sizes[1]} before, {sizes[2]} in normal use"
            await asyncio.sleep(0.2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BOOKIE_TLS_CERTIFICATE_FILE", str(certificate("bookie")))
        patch.setenv("BOOKIE_TLS_KEY_FILE", str(key("bookie")))
        async with services(tmp_path_factory.mktemp("ledger-port"), "bookie") as running:
            client = await LedgerClient.connect(running.ports["ledger"])
            await client.store_entries(LEDGER_ID, ENTRIES, ENTRY_SIZE)
            found = World(running, client)
            await found.serve_normally()
            yield found
            client.close()


@pytest.mark.parametrize(
    ("attack", "clients", "reasons"),
    [
        ("silent", CLIENTS, ["for_others"]),
        ("unfinished", CLIENTS, ["unfinished", "paused"]),
        ("slow", CLIENTS, ["for_others"]),
        ("unread", CLIENTS, ["blocks_others", "unread"]),
        ("readers", CLIENTS, []),
        ("garbage", CLIENTS, ["bindery_bookie_bad_frames"]),
        ("operations", 20, []),
        ("polls", CLIENTS, ["for_others"]),
        ("handshakes", CLIENTS, ["handshakes"]),
        ("drains", CLIENTS, ["handshakes"]),
        ("secured", CLIENTS, ["secured", "handshakes"]),
    ],
)
async def test_healthy_clients_are_served_during_an_attack(
    world: World, attack: str, clients: int, reasons: list[str]
) -> None:
    before, calls, size_max = await world.ends(), 0, 0
    world.slowest_s, world.slowest, world.size_before = 0.0, "", world.services.resident_size("bookie")
    paused = asyncio.create_task(world.paused_client()) if attack == "unread" else None
    attackers = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bindery_e2e.attacks.ledger_attacks", attack, "--port", str(world.port)),
        *("--clients", str(clients), "--seconds", str(ATTACK_S)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        while attackers.returncode is None:
            await world.healthy_calls()
            calls += 1
            size_max = max(size_max, world.services.resident_size("bookie"))
            world.services.check()
            await asyncio.sleep(0.05)
    finally:
        if attackers.returncode is None:
            attackers.kill()
    output, _ = await attackers.communicate()
    if paused is not None:
        await paused
    await world.until_memory_is_back()
    world.services.check()
    ends = await world.ends() - before
    figures = {
        "slowest_s": round(world.slowest_s, 3),
        "slowest": world.slowest,
        "calls": calls,
        "size_max_mib": size_max >> 20,
        "ends": dict(ends),
    }
    print(
        attack,
        json.loads(output),
        figures,
        f"before {world.size_before >> 20} after {world.services.resident_size('bookie') >> 20}",
    )
    assert not reasons or sum(ends[reason] for reason in reasons) > 0, "the reason is not counted"
    assert world.slowest_s <= CALL_MAX_S, f"{world.slowest} took {world.slowest_s:.1f} s"
    assert calls >= 1
