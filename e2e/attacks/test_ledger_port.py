"""The ledger port of a bookie with 512 MiB under attack: it lives, serves others, and returns the memory.

Each attack comes from other addresses than the healthy clients: one that keeps its connection, one that connects for
each call, and a broker. They never wait longer than CALL_MAX_S.
"""

import asyncio
import json
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
from bindery_simulation.certificates import certificate, key

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]
CALL_MAX_S: Final = 5.0
CLIENTS: Final = 2000
"""The bookie's default limit of connections."""
ATTACK_S: Final = 3.0
RETURN_MAX_S: Final = 60.0
MEMORY_FACTOR_MAX: Final = 1.2
ENTRY_SIZE: Final = 2**20
COUNTERS: Final = ("bindery_bookie_connections_ended_total{", "bindery_bookie_bad_frames")


class World:
    def __init__(self, running: Services, client: LedgerClient) -> None:
        self.services = running
        self.client = client
        """Connected before the first attack."""
        self.size_before = 0
        """Resident memory before the attack, in bytes."""
        self.slowest_s = 0.0

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
        async with asyncio.timeout(3 * CALL_MAX_S):
            seconds = [await self.client.call()]
            began = time.monotonic()
            fresh = await LedgerClient.connect(self.port)
            await fresh.call()
            fresh.close()
            seconds += [time.monotonic() - began, await self.services.healthy_call("broker")]
        self.slowest_s = max(self.slowest_s, *seconds)

    async def until_memory_is_back(self) -> None:
        until = time.monotonic() + RETURN_MAX_S
        while self.services.resident_size > MEMORY_FACTOR_MAX * self.size_before:
            sizes = [size >> 20 for size in (self.size_before, self.services.resident_size)]
            assert time.monotonic() < until, f"{sizes[1]} MiB after the attack, {sizes[0]} MiB before"
            await asyncio.sleep(0.2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BOOKIE_TLS_CERTIFICATE_FILE", str(certificate("bookie")))
        patch.setenv("BOOKIE_TLS_KEY_FILE", str(key("bookie")))
        async with services(tmp_path_factory.mktemp("ledger-port"), inside="bookie") as running:
            client = await LedgerClient.connect(running.ports["ledger"])
            await client.store_entries(LEDGER_ID, ENTRIES, ENTRY_SIZE)
            for _ in range(50):
                await client.call()
            yield World(running, client)
            client.close()


@pytest.mark.parametrize(
    ("attack", "clients", "reasons"),
    [
        ("silent", CLIENTS, ["for_others"]),
        ("unfinished", CLIENTS, ["unfinished"]),
        ("slow", CLIENTS, ["for_others"]),
        ("unread", CLIENTS, ["blocks_others", "unread"]),
        ("garbage", CLIENTS, ["bindery_bookie_bad_frames"]),
        ("operations", 20, ["blocks_others", "unread"]),
        ("polls", CLIENTS, ["for_others"]),
        ("handshakes", CLIENTS, ["handshakes"]),
        ("drains", CLIENTS, ["handshakes"]),
        ("secured", CLIENTS, []),
    ],
)
async def test_healthy_clients_are_served_during_an_attack(
    world: World, attack: str, clients: int, reasons: list[str]
) -> None:
    before, calls, size_max = await world.ends(), 0, 0
    world.slowest_s, world.size_before = 0.0, world.services.resident_size
    attackers = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bindery_e2e.attacks.ledger_attacks", attack, "--port", str(world.port)),
        *("--clients", str(clients), "--seconds", str(ATTACK_S)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        while attackers.returncode is None:
            await world.healthy_calls()
            calls += 1
            size_max = max(size_max, world.services.resident_size)
            world.services.check()
            await asyncio.sleep(0.05)
    finally:
        if attackers.returncode is None:
            attackers.kill()
    output, _ = await attackers.communicate()
    await world.until_memory_is_back()
    world.services.check()
    ends = await world.ends() - before
    figures = {
        "slowest_s": round(world.slowest_s, 3),
        "calls": calls,
        "size_max_mib": size_max >> 20,
        "ends": dict(ends),
    }
    print(
        attack,
        json.loads(output),
        figures,
        f"before {world.size_before >> 20} after {world.services.resident_size >> 20}",
    )
    assert not reasons or sum(ends[reason] for reason in reasons) > 0, "the reason is not counted"
    assert world.slowest_s <= CALL_MAX_S
    assert calls > 1
