"""Attack the HTTP port of each service at its limit of connections, in a container's memory.

The attackers use other addresses than the healthy client. While they attack, each call of the healthy client succeeds
within HEALTHY_S; the process lives, counts why it refused them, and returns its memory to the system at the end.
"""

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from bindery_e2e.attacks import http_attacks as attacks
from bindery_e2e.attacks.services import BIG_TOPIC, TOPIC, Services, refused_more, services

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
ATTACK_S: Final = float(os.environ.get("BINDERY_ATTACK_S", "5"))
"""Seconds of each attack."""
HEALTHY_S: Final = 5.0
"""Maximum seconds of each request of the healthy client."""
PAUSE_S: Final = 0.1
COSTLY_PER_S: Final = 500
"""Maximum number of connections per second if each requests a response that takes milliseconds."""
MEMORY_FACTOR: Final = 1.2
"""Maximum resident memory after an attack, relative to that before all of them."""
AT_ONCE_SIZE_MAX: Final = 128 * 1024
"""Maximum bytes of a slow body that are sent at once: of all connections, ten times what a broker holds."""
CALM_S: Final = 60.0
"""Maximum seconds until the memory has returned."""
SETTLE_S: Final = 13.0
"""Seconds after normal use until its memory has returned, too, and is measured."""
MIB: Final = 2**20
METRICS: Final = "/metrics"


@dataclass(frozen=True)
class Case:
    name: str
    attack: attacks.Attack
    reasons: tuple[str, ...]
    """One of them is counted."""
    reads: bool = True
    """Whether the attackers read responses."""
    per_s: int = attacks.PER_S
    """Maximum number of connections that are opened per second."""


def cases(
    *, late: attacks.Attack, unread: attacks.Attack, many: str, body: str, body_type: str, size: int
) -> list[Case]:
    """`late`: large heads. `many`: path of small responses. `body`: path that takes a body of `size` bytes."""
    slow = attacks.slow_bodies(body, size=size, at_once=min(size // 2, AT_ONCE_SIZE_MAX), content_type=body_type)
    full = ("idle_for_others", "connections")
    return [
        Case("silent", attacks.silent, ("idle_for_others",)),
        Case("heads", attacks.heads, ("heads_size",)),
        Case("large heads", late, ("heads_size", "unread_size", *full), reads=False, per_s=COSTLY_PER_S),
        Case("slow bodies", slow, ("bodies_size", "body_timeout", *full)),
        Case("unread", unread, ("unread_size", "heads_size", *full), reads=False, per_s=COSTLY_PER_S),
        Case("pipelines", attacks.pipelines(many), ("invalid_http", "unread_size", "heads_size", *full), reads=False),
        Case("garbage", attacks.garbage, ("invalid_http",)),
    ]


def of_operators(*, many: str, body: str) -> list[Case]:
    return cases(
        late=attacks.large_heads("GET", METRICS),
        unread=attacks.unread(METRICS, times=20),
        many=many,
        body=body,
        body_type="application/json",
        size=60_000,
    )


CASES: Final = {
    "broker": cases(
        late=attacks.large_heads(
            "POST", f"{TOPIC}-empty/subscriptions/s/receive", body='{"consumer": "c", "wait_ms": 30000}'
        ),
        unread=attacks.unread(f"{BIG_TOPIC}/messages?start=earliest&max=10", times=1),
        many="/v1/topics",
        body=f"{TOPIC}/messages",
        body_type="application/octet-stream",
        size=4 * MIB,
    ),
    "bookie": of_operators(many="/api/v1/bookie/state", body="/api/v1/bookie/gc"),
    "auditor": of_operators(many="/v1/recovery/status", body="/v1/recovery/pause"),
}
CONNECTIONS: Final = {"broker": 5200, "bookie": 400, "auditor": 400}
"""More than each port allows by default."""


@pytest.mark.parametrize("name", CASES)
async def test_a_service_withstands_all_attacks(name: str, tmp_path: Path) -> None:
    async with services(tmp_path, inside=name) as running:
        await running.serve_normally()
        await asyncio.sleep(SETTLE_S)
        before_size = running.resident_size
        print(f"\n    {name}: {before_size // MIB} MiB before the attacks")
        for case in CASES[name]:
            await withstand(running, case, before_size)


async def withstand(running: Services, case: Case, before_size: int) -> None:
    before = await running.refused()
    slowest_s, calls, peak_size = 0.0, 0, 0
    async with attacks.siege(
        running.port, case.attack, count=CONNECTIONS[running.inside], reads=case.reads, per_s=case.per_s
    ) as one:
        until = time.monotonic() + ATTACK_S
        while time.monotonic() < until or one.counts["opened"] < CONNECTIONS[running.inside]:
            slowest_s = max(slowest_s, await running.healthy_call(running.inside))
            running.check()
            peak_size = max(peak_size, running.resident_size)
            calls += 1
            assert slowest_s <= HEALTHY_S, f"{case.name}: a request of the healthy client took {slowest_s:.1f} s"
            await asyncio.sleep(PAUSE_S)
        counts = dict(one.counts)
    refused = refused_more(before, await running.refused(), case.reasons)
    assert refused > 0, f"{case.name}: nothing was refused for {case.reasons}: {await running.refused()}"
    calm_s = await until_memory_returned(running, before_size * MEMORY_FACTOR, case.name)
    print(
        f"    {case.name}: {counts['opened']} connections, {refused} refused; {calls} healthy calls, slowest request "
        f"{slowest_s:.2f} s; at most {peak_size // MIB} MiB, {running.resident_size // MIB} MiB {calm_s:.0f} s later"
    )


async def until_memory_returned(running: Services, size_max: float, name: str) -> float:
    began = time.monotonic()
    while running.resident_size > size_max:
        taken = time.monotonic() - began
        assert taken < CALM_S, f"{name}: {running.resident_size // MIB} MiB, more than {size_max // MIB:.0f}"
        await asyncio.sleep(0.5)
    return time.monotonic() - began
