"""Policies with a real ZooKeeper, real bookies and a real broker: what they release is deleted, the disk space comes
back, and producers see what the policies document.

Nothing here waits for a time: every wait is for a condition, so that a busy machine only makes the tests slower. A
ledger ends after LEDGER_ENTRIES messages, so the number of messages decides which ledgers are closed.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from bindery.standalone.throwaway import ThrowawayCluster
from bindery_core.ids import LedgerId
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.zookeeper import ZooKeeperStore
from bindery_pulsar import znode_layout

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]  # a busy machine may need minutes

TIMEOUT_S = 180.0
MIB = 2**20
LEDGER_ENTRIES = 4
RETENTION_S = 3
"""Retention of topics without a policy: the policy itself has whole minutes."""
ENVIRONMENT = {
    "BROKER_MAINTENANCE_INTERVAL_S": "1",
    "BROKER_LEDGER_AGE_S_MIN": "0",
    "BROKER_LEDGER_ENTRIES_MAX": str(LEDGER_ENTRIES),
    "BROKER_LEDGER_RETENTION_ACKED_S": str(RETENTION_S),
    "BOOKIE_STORAGE_ENTRY_LOG_SIZE_MAX": str(MIB),
    "BOOKIE_STORAGE_GC_WAIT_TIME_S": "2",
    "BOOKIE_STORAGE_GC_WAIT_TIME_MIN_S": "2",
}
NO_RETENTION = {"time_s": 0, "size_max": 0}


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThrowawayCluster]:
    with ThrowawayCluster(bookies=3, environment=ENVIRONMENT) as running:
        yield running


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not await condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.2)


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


class Topic:
    """A topic with a subscription `s`."""

    def __init__(self, cluster: ThrowawayCluster, client: httpx.AsyncClient, name: str) -> None:
        self.name = name
        self.path = f"/v1/topics/public/default/{name}"
        self._cluster = cluster
        self._client = client

    async def ask(self, method: str, path: str = "", *, status: int = 200, **options: Any) -> Any:
        """Repeat the request until the broker has the topic. Returns the JSON of the answer."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            answer = await self._client.request(method, self.path + path, **options)
            if answer.status_code not in (503, 504):
                assert answer.status_code == status, answer.text
                return answer.json()
            assert time.monotonic() < deadline, answer.text
            await asyncio.sleep(0.2)

    async def begin(self, **policies: Any) -> None:
        """Create the topic and its subscription, then set the policies."""
        await self.ask("PUT", "/subscriptions/s", status=201, json={})
        await self.change(**policies)

    async def change(self, **policies: Any) -> None:
        await self.ask("PUT", "/policies", json=policies)

    async def attempt(self, size: int = 100) -> httpx.Response:
        """Send one message. The topic is open, so an answer that is not 200 is that of a policy."""
        return await self._client.post(f"{self.path}/messages", content=b"x" * size)

    async def send(self, count: int, *, size: int = 100) -> set[int]:
        """Send messages. Returns the ids of their ledgers."""
        found = set()
        for _ in range(count):
            answer = await self.ask("POST", "/messages", content=b"x" * size)
            found.add(int(answer["message_ids"][0].split(":")[0]))
        return found

    async def subscription(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.ask("GET"))["subscriptions"]["s"]
        return found

    async def clear(self) -> None:
        await self.ask("POST", "/subscriptions/s/clear", json={})

    async def ledgers(self) -> dict[int, dict[str, Any]]:
        return {one["ledger_id"]: one for one in (await self.ask("GET", "/retention"))["ledgers"]}

    async def are_gone(self, ledgers: Iterable[int]) -> bool:
        """Return whether the ledgers are deleted in the metadata, by which the bookies collect them."""
        async with metadata(self._cluster) as store:
            return not any([await store.exists(LedgersLayout().ledger(LedgerId(one))) for one in ledgers])

    async def exists(self) -> bool:
        async with metadata(self._cluster) as store:
            path = znode_layout.managed_ledger(tenant="public", namespace="default", topic=self.name)
            return await store.exists(path) is not None


@asynccontextmanager
async def metadata(cluster: ThrowawayCluster) -> AsyncIterator[ZooKeeperStore]:
    store = await ZooKeeperStore.connect(cluster.zookeeper)
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
async def client(cluster: ThrowawayCluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=TIMEOUT_S) as running:
        yield running


async def test_a_time_to_live_deletes_the_ledgers_and_the_disk_space_comes_back(
    cluster: ThrowawayCluster, client: httpx.AsyncClient
) -> None:
    topic, count = Topic(cluster, client, "ttl"), 20
    await topic.begin(retention=NO_RETENTION)
    stored = await topic.send(count, size=MIB)

    async def is_on_disk() -> bool:
        return log_bytes(cluster) >= 2 * count * MIB

    await until(is_on_disk, "the bookies did not write the messages")
    assert (await topic.subscription())["backlog_entries"] == count
    await topic.change(message_ttl_s=1)

    async def is_expired() -> bool:
        return (await topic.subscription())["backlog_entries"] == 0

    await until(is_expired, "the messages did not expire")
    assert (await topic.subscription())["expired"] == count
    await topic.send(LEDGER_ENTRIES)  # so that the ledger of the last of them ends

    async def are_deleted() -> bool:
        return await topic.are_gone(stored)

    await until(are_deleted, "the ledgers were not deleted")

    async def is_released() -> bool:
        return log_bytes(cluster) < count * MIB // 2

    await until(is_released, "the bookies did not delete the entry logs")


async def test_a_retention_by_size_keeps_the_newest_ledgers(
    cluster: ThrowawayCluster, client: httpx.AsyncClient
) -> None:
    topic, size_max = Topic(cluster, client, "by-size"), 3 * MIB
    await topic.begin(retention={"time_s": None, "size_max": size_max})
    first = await topic.send(LEDGER_ENTRIES, size=MIB // 4)
    later = await topic.send(5 * LEDGER_ENTRIES, size=MIB // 4)
    assert not await topic.are_gone(first)  # the subscription needs them
    await topic.clear()

    async def is_deleted() -> bool:
        return await topic.are_gone(first)

    await until(is_deleted, "the oldest ledger was not deleted")

    async def is_within() -> bool:
        found = await topic.ledgers()
        return sum(one["size"] for one in found.values()) <= size_max

    await until(is_within, "the topic kept more than the size")
    kept = [one for number, one in (await topic.ledgers()).items() if number in later]
    assert {one["code"] for one in kept if one["closed_at"]} == {"retention"}
    assert sum(one["size"] for one in kept) > size_max - 2 * MIB


async def test_a_retention_by_time_keeps_ledgers_for_that_time(
    cluster: ThrowawayCluster, client: httpx.AsyncClient
) -> None:
    """One topic has the time of the settings, a second one a longer one by its policy."""
    short, long = Topic(cluster, client, "short"), Topic(cluster, client, "long")
    await short.begin()
    await long.begin(retention={"time_s": 3600, "size_max": None})
    kept = await long.send(LEDGER_ENTRIES)
    await long.send(1)
    released = await short.send(LEDGER_ENTRIES)
    await short.send(1)
    closed: dict[int, int] = {}

    async def is_retained() -> bool:
        closed.update({number: one["closed_at"] for number, one in (await short.ledgers()).items() if one["closed_at"]})
        return released <= set(closed)

    await until(is_retained, "the full ledger was not closed")
    await short.clear()
    await long.clear()
    gone_at = 0

    async def is_deleted() -> bool:
        nonlocal gone_at
        are_gone = await short.are_gone(released)
        gone_at = time.time_ns() // 1_000_000
        return are_gone

    await until(is_deleted, "the ledgers were not deleted after their time")
    assert gone_at >= max(closed[number] for number in released) + RETENTION_S * 1000
    # The same rounds of maintenance kept those of the other topic.
    assert {one["code"] for number, one in (await long.ledgers()).items() if number in kept} == {"retention"}
    await long.change(retention=NO_RETENTION)

    async def is_released() -> bool:
        return await long.are_gone(kept)

    await until(is_released, "the ledgers were kept although the retention was shortened")


@pytest.mark.parametrize(
    ("quota", "unit"),
    [("backlog_quota_size", {"limit": 2_000}), ("backlog_quota_age", {"limit": 1})],
    ids=["size", "age"],
)
@pytest.mark.parametrize(
    ("action", "status", "code"),
    [
        ("producer_request_hold", 429, "backlog_quota_exceeded"),
        ("producer_exception", 507, "backlog_quota_refused"),
    ],
)
async def test_a_quota_refuses_producers_until_the_backlog_is_read(
    cluster: ThrowawayCluster,
    client: httpx.AsyncClient,
    action: str,
    status: int,
    code: str,
    quota: str,
    unit: dict[str, int],
) -> None:
    topic = Topic(cluster, client, f"{quota}-{action}")
    await topic.begin()
    await topic.send(4, size=1_000)
    await topic.change(**{quota: {**unit, "action": action}})
    answers: list[httpx.Response] = []

    async def is_refused() -> bool:
        answers.append(await topic.attempt())
        return answers[-1].status_code != 200

    await until(is_refused, "the quota did not refuse the producer")
    problem = answers[-1].json()
    assert (answers[-1].status_code, problem["code"]) == (status, code)
    assert (problem["facts"]["subscription"], problem["facts"]["limit"]) == ("s", unit["limit"])
    assert ("retry-after" in answers[-1].headers) == (status == 429)
    assert (await topic.subscription())["backlog_entries"] >= 4  # nothing is lost
    await topic.clear()

    async def is_admitted() -> bool:
        return (await topic.attempt()).status_code == 200

    await until(is_admitted, "the producer was not admitted after the backlog was read")


async def test_a_quota_that_evicts_drops_the_oldest_messages_and_refuses_nobody(
    cluster: ThrowawayCluster, client: httpx.AsyncClient
) -> None:
    topic, count = Topic(cluster, client, "evicted"), 12
    await topic.begin(
        backlog_quota_size={"limit": 4_500, "action": "consumer_backlog_eviction"}, retention=NO_RETENTION
    )
    stored = await topic.send(count, size=1_000)

    async def is_evicted() -> bool:
        assert (await topic.attempt()).status_code == 200
        return int((await topic.subscription())["evicted"]) >= count - 4

    await until(is_evicted, "the backlog was not evicted")

    async def are_deleted() -> bool:
        return await topic.are_gone({min(stored)})

    await until(are_deleted, "the ledger of evicted messages was not deleted")


async def test_an_inactive_topic_is_deleted_with_its_ledgers(
    cluster: ThrowawayCluster, client: httpx.AsyncClient
) -> None:
    topic = Topic(cluster, client, "inactive")
    await topic.begin(retention=NO_RETENTION)
    stored = await topic.send(LEDGER_ENTRIES + 1)
    await topic.change(inactive_topics={"mode": "delete_when_subscriptions_caught_up", "seconds_max": 1})
    await topic.change(message_ttl_s=1)  # reads the backlog without a request

    async def is_deleted() -> bool:
        return not await topic.exists()

    await until(is_deleted, "the inactive topic was not deleted")

    async def are_gone() -> bool:
        return await topic.are_gone(stored)

    await until(are_gone, "the ledgers of the deleted topic were not deleted")
    assert (await client.get(topic.path)).status_code == 404
