"""Attack the HTTP port of each service at its limit of connections, in a container's memory.

The attackers use other addresses than the healthy client. While they attack, each call of the healthy client succeeds
within HEALTHY_S; the process lives, counts why it refused them, and does not flood its log. At the end it returns its
memory to the system.
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
ATTACK_S: Final = float(os.environ.get("BINDERY_ATTACK_S", "3"))
"""Minimum seconds of each attack; it goes on until all connections were opened."""
HEALTHY_S: Final = 25.0
"""Maximum seconds of each request of the healthy client. It took 18 at a load of 25 on two cores; in CI, the tests on
Kubernetes use the same processors."""
PAUSE_S: Final = 0.1
COSTLY_PER_S: Final = 1000
"""Maximum number of connections per second if each takes about a millisecond of a process."""
MEMORY_FACTOR: Final = 1.2
"""Maximum resident memory after an attack, relative to that before all of them."""
MEMORY_FACTOR_GOAL: Final = 1.15
"""What is waited for."""
AT_ONCE_SIZE_MAX: Final = 128 * 1024
"""Maximum bytes of a slow body that are sent at once: of all connections, ten times what a broker holds."""
CALM_S: Final = 12.0
"""Maximum seconds until the memory has returned: two intervals of `MemoryRelease`."""
SETTLE_S: Final = 12.0
"""Seconds after normal use until its memory has returned, too, and is measured."""
LOG_SIZE: Final = 4096
"""Maximum bytes that a process logs in an attack, and"""
LOG_SIZE_PER_S: Final = 1024
"""more per second. A line is about 250 bytes, and thousands of requests are refused per second."""
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
    """`late`: large heads. `unread`: at most as many requests per connection as may wait. `many`: path of small
    responses. `body`: path that takes a body of `size` bytes."""
    slow = attacks.slow_bodies(body, size=size, at_once=min(size // 2, AT_ONCE_SIZE_MAX), content_type=body_type)
    full = ("idle_for_others", "connections")
    return [
        Case("silent", attacks.silent, ("idle_for_others",)),
        Case("heads", attacks.heads, ("heads_size",)),
        Case("large heads", late, ("heads_size", "unread_size", *full), reads=False, per_s=COSTLY_PER_S),
        Case("slow bodies", slow, ("bodies_size", "body_timeout", *full)),
        Case("unread", unread, ("unread_size", "heads_size", *full), reads=False, per_s=COSTLY_PER_S),
        Case("pipelines", attacks.pipelines(many), ("invalid_http",), reads=False, per_s=COSTLY_PER_S),
        Case("garbage", attacks.garbage, ("invalid_http",)),
    ]


def of_operators(*, many: str, body: str) -> list[Case]:
    return cases(
        late=attacks.large_heads("GET", METRICS),
        unread=attacks.unread(METRICS, times=16),
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


async def test_services_withstand_all_attacks(tmp_path: Path) -> None:
    async with services(tmp_path, *CASES) as running:
        for name in CASES:
            await running.serve_normally(name)
        await asyncio.sleep(SETTLE_S)
        async with asyncio.TaskGroup() as group:  # the two processes that have few connections
            for name in ("bookie", "auditor"):
                group.create_task(withstand_all(running, name))
        await withstand_all(running, "broker")


async def withstand_all(running: Services, name: str) -> None:
    before_size = running.resident_size(name)
    rows = []
    try:
        for case in CASES[name]:
            rows.append(await withstand(running, name, case, before_size))
            before_size = min(before_size, running.resident_size(name))  # what was needed at the start has gone, too
    finally:
        print(f"\n{name}: {before_size / MIB:.1f} MiB before the attacks")
        print(*rows, sep="\n")


async def withstand(running: Services, name: str, case: Case, before_size: int) -> str:
    """Attack, and return the figures."""
    before = await running.refused(name)
    log_size, began = running.log_size(name), time.monotonic()
    slowest_s, calls, peak_size = 0.0, 0, 0
    async with attacks.siege(
        running.ports[name], case.attack, count=CONNECTIONS[name], reads=case.reads, per_s=case.per_s
    ) as one:
        while time.monotonic() < began + ATTACK_S or one.counts["opened"] < CONNECTIONS[name]:
            slowest_s = max(slowest_s, await running.healthy_call(name))
            running.check()
            peak_size = max(peak_size, running.resident_size(name))
            calls += 1
            assert slowest_s <= HEALTHY_S, f"{case.name}: a request of the healthy client took {slowest_s:.1f} s"
            await asyncio.sleep(PAUSE_S)
        counts = dict(one.counts)
    refused = refused_more(before, await running.refused(name), case.reasons)
    assert refused > 0, f"{case.name}: nothing was refused for {case.reasons}: {await running.refused(name)}"
    log_size, log_s = running.log_size(name) - log_size, time.monotonic() - began
    log_size_max = LOG_SIZE + LOG_SIZE_PER_S * log_s
    assert log_size <= log_size_max, (
        f"{case.name}: {log_size} bytes of log in {log_s:.0f} s, end: {running.log(name)[-1000:]}"
    )
    calm_s = await until_memory_returned(running, name, before_size, case)
    size = running.resident_size(name)
    return (
        f"    {case.name:<12} {counts['opened']:>5} connections, {refused:>5} refused, {log_size:>5} bytes of log; "
        f"{calls:>2} healthy calls, slowest request {slowest_s:.2f} s; at most {peak_size / MIB:.1f} MiB, "
        f"{size / MIB:.1f} MiB ({size / before_size - 1:+.0%}) {calm_s:.0f} s later"
    )


async def until_memory_returned(running: Services, name: str, before_size: int, case: Case) -> float:
    began = time.monotonic()
    while (factor := running.resident_size(name) / before_size) > MEMORY_FACTOR_GOAL:
        if (taken := time.monotonic() - began) > CALM_S:
            assert factor <= MEMORY_FACTOR, f"{name}, {case.name}: {factor:.2f} times the memory after {taken:.0f} s"
            break
        await asyncio.sleep(0.2)
    return time.monotonic() - began
