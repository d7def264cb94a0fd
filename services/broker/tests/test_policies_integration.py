"""Policies with a real ZooKeeper and real bookies: what they release is deleted, and the disk space comes back."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
from bindery.standalone.throwaway import ThrowawayCluster
from bindery_broker.namespaces.policy_store import PolicyStore
from bindery_metadata.stores.zookeeper import ZooKeeperStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]  # a busy machine may need minutes

TOPIC = "/v1/topics/public/default/t"
TIMEOUT_S = 180.0
SIZE = 20 * 2**20
ENVIRONMENT = {
    "BROKER_MAINTENANCE_INTERVAL_S": "1",
    "BROKER_LEDGER_AGE_S_MIN": "0",
    "BROKER_LEDGER_AGE_S_MAX": "3",
    "BOOKIE_STORAGE_ENTRY_LOG_SIZE_MAX": str(2**20),
    "BOOKIE_STORAGE_GC_WAIT_TIME_S": "2",
    "BOOKIE_STORAGE_GC_WAIT_TIME_MIN_S": "2",
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThrowawayCluster]:
    with ThrowawayCluster(bookies=3, environment=ENVIRONMENT) as running:
        yield running


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not await condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.5)


async def ask(client: httpx.AsyncClient, method: str, path: str, **kwargs: Any) -> httpx.Response:
    """Repeat the request until the broker has the topic."""
    answer = await client.request(method, path, **kwargs)
    deadline = time.monotonic() + TIMEOUT_S
    while answer.status_code in (503, 504):
        assert time.monotonic() < deadline, answer.text
        await asyncio.sleep(0.2)
        answer = await client.request(method, path, **kwargs)
    return answer


def log_bytes(cluster: ThrowawayCluster) -> int:
    """Return the bytes of all entry logs. A file may be deleted meanwhile."""
    total = 0
    for path in cluster.directory.root.rglob("*.log"):
        if path.parent.name == "current" and "journal" not in str(path):
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                continue
    return total


async def test_expired_messages_give_their_disk_space_back_and_a_quota_refuses(cluster: ThrowawayCluster) -> None:
    store = await ZooKeeperStore.connect(cluster.zookeeper)
    policies = PolicyStore(store, cluster="bindery")
    quota = {"limitSize": SIZE // 2, "limitTime": -1, "limit": SIZE // 2, "policy": "producer_exception"}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=TIMEOUT_S) as client:
        body = {"consumer": "c", "wait_ms": 0, "session_ttl_ms": 1_000}
        assert (await ask(client, "POST", f"{TOPIC}/subscriptions/s/receive", json=body)).status_code == 200
        for _ in range(SIZE // 2**20):
            answer = await ask(client, "POST", f"{TOPIC}/messages", content=b"x" * 2**20)
            assert answer.status_code == 200, answer.text

        async def is_on_disk() -> bool:
            return log_bytes(cluster) >= 2 * SIZE

        await until(is_on_disk, "the bookies did not write the messages")

        # A quota below the backlog refuses producers, with the reason.
        await policies.update_namespace(
            "public", "default", lambda record: {**record, "backlog_quota_map": {"destination_storage": quota}}
        )

        async def is_refused() -> bool:
            return (await client.post(f"{TOPIC}/messages", content=b"more")).status_code == 507

        await until(is_refused, "the quota did not come into force")
        problem = (await client.post(f"{TOPIC}/messages", content=b"more")).json()
        assert (problem["code"], problem["facts"]["subscription"]) == ("backlog_quota_refused", "s")

        # A time to live empties the backlog, so that producers are admitted and the ledgers are deleted.
        before = {one["ledger_id"] for one in (await client.get(f"{TOPIC}/retention")).json()["ledgers"]}
        await policies.update_namespace("public", "default", lambda record: {**record, "message_ttl_in_seconds": 1})

        async def is_admitted() -> bool:
            return (await client.post(f"{TOPIC}/messages", content=b"more")).status_code == 200

        await until(is_admitted, "the backlog did not expire")

        async def is_trimmed() -> bool:
            ledgers = (await client.get(f"{TOPIC}/retention")).json()["ledgers"]
            return not before & {one["ledger_id"] for one in ledgers if one["size"] > 2**20}

        await until(is_trimmed, "the ledgers were not deleted")
        stats = (await client.get(TOPIC)).json()
        assert stats["subscriptions"]["s"]["expired"] >= SIZE // 2**20

        async def is_released() -> bool:
            return log_bytes(cluster) < SIZE

        await until(is_released, "the bookies did not delete the entry logs")
    await policies.close()
    await store.close()
