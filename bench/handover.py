"""Measure what clients see while brokers restart one after another, and how long topics of a killed broker are away.

`--rate 2000 --consumers 50 --restarts 1 --kills 20`: messages per second of all producers, consumers with long polls,
rolling restarts of all three brokers by SIGTERM, and kills by SIGKILL of the broker that owns most of the topics. All
processes and the clients share this machine: with few cores the rate is that of the clients.

During restarts, every outcome other than success is a failed call. During kills, clients repeat their requests.
"""

import argparse
import asyncio
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Final

import httpx
from bindery.standalone.plan import SESSION_TIMEOUT_S
from bindery.standalone.throwaway import ThrowawayCluster

sys.path.insert(0, str(Path(__file__).parents[1] / "services/broker/tests"))

from handover_traffic import Traffic

BROKERS: Final = 3
TOPICS: Final = 16
PRODUCERS: Final = 32
READY_S_MAX: Final = 120.0


async def until_ready(cluster: ThrowawayCluster, number: int, since: int) -> None:
    async with asyncio.timeout(READY_S_MAX), httpx.AsyncClient(trust_env=False) as http:
        while True:
            if cluster.has_restarted(f"broker-{number}", since=since):
                try:
                    if (await http.get(f"{cluster.broker_url(number)}/readyz")).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass
            await asyncio.sleep(0.1)


async def owners(urls: list[str], topics: list[str]) -> dict[str, int]:
    """Return the number of the broker that owns each topic."""
    found = {}
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        for topic in topics:
            for url in urls:
                try:
                    answer = await http.get(f"{url}{topic}")
                except httpx.HTTPError:
                    continue
                if answer.status_code == 200:
                    found[topic] = urls.index(answer.json()["owner"])
                    break
    return found


def traffic(urls: list[str], options: argparse.Namespace, *, is_patient: bool, name: str) -> Traffic:
    return Traffic(
        urls,
        topics=TOPICS,
        producers=PRODUCERS,
        consumers=options.consumers,
        pause_s=PRODUCERS * options.batch / options.rate,
        batch=options.batch,
        is_patient=is_patient,
        name=name,
    )


async def restart(cluster: ThrowawayCluster, urls: list[str], options: argparse.Namespace) -> None:
    async with traffic(urls, options, is_patient=False, name="restart") as load:
        began = time.monotonic()
        await asyncio.sleep(5)
        calm_until = time.monotonic()
        for _ in range(options.restarts):
            for number in range(BROKERS):
                pid, at = cluster.pid(f"broker-{number}"), time.monotonic()
                os.kill(pid, signal.SIGTERM)
                await until_ready(cluster, number, pid)
                print(f"broker-{number}: stopped and ready again after {time.monotonic() - at:.1f} s", flush=True)
        ended = time.monotonic()
    seen = load.seen
    sent = sum(seen.sent.values())
    print(
        f"{sent} messages sent, {sent / (ended - began):.0f}/s; {seen.repeated} deliveries of a message received before"
    )
    print(
        f"produce before the restarts: p50 {1000 * seen.percentile(0.5, until=calm_until):.0f} ms, "
        f"p99 {1000 * seen.percentile(0.99, until=calm_until):.0f} ms"
    )
    print(
        f"produce during the restarts: p50 {1000 * seen.percentile(0.5, since=calm_until, until=ended):.0f} ms, "
        f"p99 {1000 * seen.percentile(0.99, since=calm_until, until=ended):.0f} ms, "
        f"max {1000 * seen.percentile(1.0, since=calm_until, until=ended):.0f} ms"
    )
    report(load)


async def kill(cluster: ThrowawayCluster, urls: list[str], options: argparse.Namespace) -> None:
    gaps: list[float] = []
    async with traffic(urls, options, is_patient=True, name="kill") as load:
        await asyncio.sleep(3)
        for _ in range(options.kills):
            at = await owners(urls, load.topics)
            victim = Counter(at.values()).most_common(1)[0][0]
            hit = [topic for topic, owner in at.items() if owner == victim]
            pid = cluster.kill(f"broker-{victim}")
            killed_at = time.monotonic()
            await until_ready(cluster, victim, pid)
            async with asyncio.timeout(READY_S_MAX):
                while any(load.seen.stored_at[topic][-1] < killed_at + 0.05 for topic in hit):
                    await asyncio.sleep(0.05)
            gaps += [
                next(at for at in load.seen.stored_at[topic] if at > killed_at + 0.05) - killed_at for topic in hit
            ]
            await asyncio.sleep(1)
    gaps.sort()
    print(
        f"{options.kills} kills, {len(gaps)} topics hit; session timeout {SESSION_TIMEOUT_S} s; served again after "
        + ", ".join(
            f"p{share} {gaps[min(len(gaps) - 1, len(gaps) * share // 100)]:.2f} s" for share in (50, 90, 99, 100)
        )
    )
    report(load)


def report(load: Traffic) -> None:
    problems = load.seen.problems()
    print(f"problems: {len(problems)}")
    for problem in problems[:20]:
        print(f"  {problem}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=int, default=2_000)
    parser.add_argument("--batch", type=int, default=10, help="messages per request")
    parser.add_argument("--consumers", type=int, default=50)
    parser.add_argument("--restarts", type=int, default=1)
    parser.add_argument("--kills", type=int, default=20)
    options = parser.parse_args()
    with ThrowawayCluster(bookies=3, brokers=BROKERS) as cluster:
        urls = [cluster.broker_url(number) for number in range(BROKERS)]
        if options.restarts:
            asyncio.run(restart(cluster, urls, options))
        if options.kills:
            asyncio.run(kill(cluster, urls, options))


if __name__ == "__main__":
    main()
