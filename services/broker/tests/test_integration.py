"""The broker as a process on a real ZooKeeper and real bookies: what was answered survives kill -9 and a clean stop."""

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator

import httpx
import pytest
from bindery.standalone.plan import BROKER_HTTP_PORT, HOST
from bindery.standalone.throwaway import ThrowawayCluster

pytestmark = pytest.mark.integration

TOPIC = "/v1/topics/public/default/t"
SUB = f"{TOPIC}/subscriptions/s"
PATIENCE_S = 40.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThrowawayCluster]:
    with ThrowawayCluster(bookies=3, brokers=2) as running:
        yield running


def urls(cluster: ThrowawayCluster) -> list[str]:
    return [f"http://{HOST}:{BROKER_HTTP_PORT + cluster.port_offset + i}" for i in range(2)]


async def ask(client: httpx.AsyncClient, method: str, url: str, **kwargs: object) -> httpx.Response:
    """Until it is answered: a broker that is down or not the owner yet is asked again."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            answer = await client.request(method, url, **kwargs)
            if answer.status_code not in (503, 504, 429):
                return answer
            last = answer.text
        except httpx.TransportError as error:
            last = repr(error)
        assert time.monotonic() < deadline, last
        await asyncio.sleep(0.1)


async def test_messages_and_acknowledgements_survive_the_death_of_their_broker(cluster):
    first, second = urls(cluster)
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        lines = "\n".join(json.dumps({"payload": f"m{n}"}) for n in range(100))
        answer = await ask(
            client, "POST", f"{first}{TOPIC}/messages?batch=false", content=lines,
            headers={"content-type": "application/x-ndjson"},
        )  # fmt: skip
        ids = answer.json()["message_ids"]
        assert len(set(ids)) == 100
        # The other broker passes on, and names the owner.
        stats = (await ask(client, "GET", f"{second}{TOPIC}")).json()
        assert (stats["owner"], stats["entries"]) == (first, 100)
        received = await ask(client, "POST", f"{second}{SUB}/receive", json={"consumer": "c", "max": 100})
        assert [m["payload"] for m in received.json()["messages"]] == [f"m{n}" for n in range(100)]
        acked = random.Random(7).sample(ids, 60)
        assert (await ask(client, "POST", f"{second}{SUB}/ack", json={"message_ids": acked})).status_code == 200

        cluster.kill("broker-0")
        left = [message_id for message_id in ids if message_id not in set(acked)]
        answer = await ask(client, "POST", f"{second}{SUB}/receive", json={"consumer": "d", "max": 100})
        assert [m["message_id"] for m in answer.json()["messages"]] == left
        read = (await ask(client, "GET", f"{second}{TOPIC}/messages?max=1000")).json()["messages"]
        assert [m["message_id"] for m in read] == ids
        more = await ask(client, "POST", f"{second}{TOPIC}/messages", content=b"after")
        assert more.json()["message_ids"][0] not in ids


async def test_a_broker_that_is_told_to_stop_finishes_and_hands_over_at_once(cluster):
    first, second = urls(cluster)
    topic = "/v1/topics/public/default/stopping"
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        produced = (await ask(client, "POST", f"{second}{topic}/messages", content=b"a")).json()["message_ids"]
        await ask(client, "PUT", f"{second}{topic}/subscriptions/keep", json={})  # or what `s` skips may be trimmed
        owner = (await ask(client, "GET", f"{second}{topic}")).json()["owner"]
        other = first if owner == second else second
        await ask(client, "GET", f"{other}/readyz")
        waiting = asyncio.create_task(
            client.post(
                f"{owner}{topic}/subscriptions/s/receive",
                json={"consumer": "c", "initial": "latest", "wait_ms": 30_000},
            )
        )
        await asyncio.sleep(0.3)
        pid = cluster.pid(f"broker-{urls(cluster).index(owner)}")
        began = time.monotonic()
        os.kill(pid, signal.SIGTERM)
        answer = await waiting  # the call under way is answered, not cut
        assert (answer.status_code, answer.json()) == (200, {"messages": []})
        while True:  # while it stops it may still answer what is passed on to it
            stats = (await ask(client, "GET", f"{other}{topic}")).json()
            if stats["owner"] == other:
                break
            await asyncio.sleep(0.05)
        # Well before the session (10 s) of a broker that just vanished would have expired.
        assert time.monotonic() - began < 8
        read = await ask(client, "GET", f"{other}{topic}/messages")
        assert [m["message_id"] for m in read.json()["messages"]] == produced
        assert stats["subscriptions"]["s"]["backlog_entries"] == 0


async def test_the_process_refuses_an_open_address_without_saying_so(cluster):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bindery_broker", "--host", "0.0.0.0", "--port", "0", "--zookeeper", cluster.zookeeper,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(20):
        _, words = await process.communicate()
    assert process.returncode == 2
    assert b"--insecure" in words
