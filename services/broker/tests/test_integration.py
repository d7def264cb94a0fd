"""The broker as a process with a real ZooKeeper and real bookies: answered requests survive kill -9 and a stop."""

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from bindery.standalone.plan import BROKER_HTTP_PORT, HOST
from bindery.standalone.throwaway import BUNDLES_STAY, ThrowawayCluster
from bindery_broker.ownership.bundles import Bundle
from bindery_client.client import LedgerClient
from bindery_core.errors import NoSuchLedger
from bindery_core.formats.ledger_metadata import LedgerState
from bindery_core.ids import LedgerId
from bindery_metadata.stores.zookeeper import ZooKeeperStore
from bindery_pulsar.topic_name import TopicName

pytestmark = pytest.mark.integration

TOPIC = "/v1/topics/public/default/t"
SUB = f"{TOPIC}/subscriptions/s"
TIMEOUT_S = 40.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThrowawayCluster]:
    with ThrowawayCluster(bookies=3, brokers=2, environment=BUNDLES_STAY) as running:
        yield running


def urls(cluster: ThrowawayCluster) -> list[str]:
    return [f"http://{HOST}:{BROKER_HTTP_PORT + cluster.port_offset + i}" for i in range(2)]


async def ask(client: httpx.AsyncClient, method: str, url: str, **kwargs: object) -> httpx.Response:
    """Repeat the request until it succeeds: a broker may be down or not yet the owner."""
    deadline = time.monotonic() + TIMEOUT_S
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
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        lines = "\n".join(json.dumps({"payload": f"m{n}"}) for n in range(100))
        answer = await ask(
            client,
            "POST",
            f"{first}{TOPIC}/messages?batch=false",
            content=lines,
            headers={"content-type": "application/x-ndjson"},
        )
        ids = answer.json()["message_ids"]
        assert len(set(ids)) == 100
        # Each broker answers, also the one that forwards the request. The answer names the owner.
        found = [(await ask(client, "GET", f"{url}{TOPIC}")).json() for url in (first, second)]
        assert [(stats["owner"], stats["entries"]) for stats in found] == [(found[0]["owner"], 100)] * 2
        owner = found[0]["owner"]
        other = first if owner == second else second
        received = await ask(client, "POST", f"{other}{SUB}/receive", json={"consumer": "c", "max": 100})
        assert received.status_code == 200, received.text
        assert [m["payload"] for m in received.json()["messages"]] == [f"m{n}" for n in range(100)]
        acked = random.Random(7).sample(ids, 60)
        assert (await ask(client, "POST", f"{other}{SUB}/ack", json={"message_ids": acked})).status_code == 200

        cluster.kill(f"broker-{urls(cluster).index(owner)}")
        left = [message_id for message_id in ids if message_id not in set(acked)]
        answer = await ask(client, "POST", f"{other}{SUB}/receive", json={"consumer": "d", "max": 100})
        assert answer.status_code == 200, answer.text
        assert [m["message_id"] for m in answer.json()["messages"]] == left
        answer = await ask(client, "GET", f"{other}{TOPIC}/messages?max=1000")
        assert answer.status_code == 200, answer.text
        assert [m["message_id"] for m in answer.json()["messages"]] == ids
        more = await ask(client, "POST", f"{other}{TOPIC}/messages", content=b"after")
        assert more.json()["message_ids"][0] not in ids


async def test_a_broker_that_stops_finishes_requests_and_releases_its_topics_at_once(cluster):
    first, second = urls(cluster)
    topic = "/v1/topics/public/default/stopping"
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        produced = (await ask(client, "POST", f"{second}{topic}/messages", content=b"a")).json()["message_ids"]
        # Without this subscription, entries that `s` skips may be trimmed.
        await ask(client, "PUT", f"{second}{topic}/subscriptions/keep", json={})
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
        store = await ZooKeeperStore.connect(cluster.zookeeper)
        path = Bundle.of(TopicName.parse("public/default/stopping")).owner_path
        lease = await store.exists(path)
        assert lease is not None
        os.kill(pid, signal.SIGTERM)
        answer = await waiting  # the call in progress is answered, not aborted
        assert (answer.status_code, answer.json()) == (200, {"messages": []})
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.001)
        # The znode of a broker that was killed would exist until its session ends, seconds later.
        left = await store.exists(path)
        assert left is None or left.ephemeral_owner != lease.ephemeral_owner
        await store.close()
        while True:  # while the broker stops, it may still answer forwarded requests
            stats = (await ask(client, "GET", f"{other}{topic}")).json()
            if stats["owner"] == other:
                break
            await asyncio.sleep(0.05)
        read = await ask(client, "GET", f"{other}{topic}/messages")
        assert [m["message_id"] for m in read.json()["messages"]] == produced
        assert stats["subscriptions"]["s"]["backlog_entries"] == 0


async def open_ledgers(client: LedgerClient, topic: str) -> list[LedgerId]:
    """Return the open ledgers of the topic and of its cursors."""
    name = f"public/default/persistent/{topic}".encode()
    found = []
    async for ledger_id in client.list_ledgers():
        try:
            metadata = await client.metadata(ledger_id)
        except NoSuchLedger:
            continue
        if metadata.custom.get("pulsar/managed-ledger") == name and metadata.state is not LedgerState.CLOSED:
            found.append(ledger_id)
    return found


async def test_recovery_of_open_ledgers_does_not_disturb_the_owner_of_the_topic(cluster):
    """Healing recovers the open ledgers of a lost or drained bookie in this way. Here the topic is under load."""
    url, topic = urls(cluster)[1], "/v1/topics/public/default/healed"
    rounds, producers = 8, 3
    store = await ZooKeeperStore.connect(cluster.zookeeper)
    ledgers = await LedgerClient.connect(store, randomness=random.Random(5))
    told: dict[str, str] = {}
    recovered: set[LedgerId] = set()
    stop = asyncio.Event()
    ended = 0

    async def produce(http: httpx.AsyncClient, producer: int) -> None:
        nonlocal ended
        number = 0
        while not stop.is_set():
            words = [f"{producer}/{number + i}" for i in range(3)]
            number += 3
            answer = await http.post(
                f"{url}{topic}/messages?batch=false",
                content="\n".join(json.dumps({"payload": w}) for w in words),
                headers={"content-type": "application/x-ndjson"},
            )
            assert answer.status_code == 200, answer.text
            told.update(zip(answer.json()["message_ids"], words, strict=True))
        ended += 1

    async def consume(http: httpx.AsyncClient, delivered: dict[str, str]) -> None:
        while ended < producers or len(delivered) < len(told):  # the last requests may still be in progress
            answer = await http.post(
                f"{url}{topic}/subscriptions/s/receive", json={"consumer": "c", "max": 50, "wait_ms": 100}
            )
            assert answer.status_code == 200, answer.text
            got = {message["message_id"]: message["payload"] for message in answer.json()["messages"]}
            assert not got.keys() & delivered.keys(), "acknowledged, and delivered again"
            delivered.update(got)
            if got:
                answer = await http.post(f"{url}{topic}/subscriptions/s/ack", json={"message_ids": list(got)})
                assert answer.status_code == 200, answer.text

    async with httpx.AsyncClient(timeout=TIMEOUT_S) as http:
        await ask(http, "PUT", f"{url}{topic}", json={})
        await ask(http, "PUT", f"{url}{topic}/subscriptions/s", json={})
        await ask(http, "PUT", f"{url}{topic}/subscriptions/keep", json={})
        delivered: dict[str, str] = {}
        async with asyncio.TaskGroup() as group:
            for producer in range(producers):
                group.create_task(produce(http, producer))
            group.create_task(consume(http, delivered))
            own: set[LedgerId] = set()
            tries = 0
            while tries < rounds or (not recovered - own and tries < 8 * rounds):  # a cursor often moves on too soon
                tries += 1
                before = len(told)
                async with asyncio.timeout(TIMEOUT_S):
                    while len(told) < before + 20:
                        await asyncio.sleep(0.01)
                for ledger_id in await open_ledgers(ledgers, "healed"):
                    try:
                        await (await ledgers.open(ledger_id, recover=True)).release()
                    except NoSuchLedger:  # a cursor has moved on meanwhile
                        continue
                    recovered.add(ledger_id)
                internal = (await ask(http, "GET", f"{url}{topic}/internal")).json()
                own |= {LedgerId(ledger["ledgerId"]) for ledger in internal["ledgers"]}
            stop.set()
        found: dict[str, str] = {}
        start = "earliest"
        while page := (await ask(http, "GET", f"{url}{topic}/messages?max=1000&start={start}")).json():
            if not page["messages"]:
                break
            found |= {message["message_id"]: message["payload"] for message in page["messages"]}
            start = page["next"]
    await ledgers.close()
    await store.close()
    assert found == told
    assert delivered == told
    assert list(delivered) == list(found), "delivered as one series"
    for producer in range(producers):
        words = [word for word in found.values() if word.startswith(f"{producer}/")]
        assert words == [f"{producer}/{i}" for i in range(len(words))]
    assert len(recovered & own) >= rounds // 2
    assert recovered - own, "cursor ledgers among them"


async def test_the_process_refuses_a_public_address_without_insecure(cluster):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bindery_broker",
        "--host",
        "0.0.0.0",
        "--port",
        "0",
        "--zookeeper",
        cluster.zookeeper,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(30):
        _, words = await process.communicate()
    assert process.returncode == 2
    assert b"--insecure" in words
