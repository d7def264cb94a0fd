"""Compaction with real processes: by itself, by request, and through kill -9 of the broker while it copies."""

import asyncio
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from bindery.standalone.throwaway import ThrowawayCluster
from bindery_client.client import LedgerClient
from bindery_core.errors import NoSuchLedger
from bindery_metadata.stores.zookeeper import ZooKeeperStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

TIMEOUT_S = 90.0
NDJSON = {"content-type": "application/x-ndjson"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThrowawayCluster]:
    environment = {"BROKER_MAINTENANCE_INTERVAL_S": "0.5", "BROKER_ZOOKEEPER_SESSION_MS": "4000"}
    with ThrowawayCluster(bookies=3, environment=environment) as running:
        yield running


class Topic:
    """One topic, by HTTP. Requests are repeated while the broker is down."""

    def __init__(self, cluster: ThrowawayCluster, name: str, http: httpx.AsyncClient) -> None:
        self.name = name
        self._http = http
        self._url = f"{cluster.url}/v1/topics/public/default/{name}"
        self._requests = 0

    async def ask(self, method: str, path: str = "", **options: Any) -> Any:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                answer = await self._http.request(method, self._url + path, **options)
                if answer.status_code in (200, 201):
                    return answer.json()
                last = f"{answer.status_code} {answer.text}"
            except httpx.TransportError as error:
                last = repr(error)
            assert time.monotonic() < deadline, last
            await asyncio.sleep(0.05)

    async def publish(self, values: dict[str, str | None], *, batch: bool = True) -> None:
        """None: a tombstone."""
        self._requests += 1
        lines = [json.dumps({"key": key, "payload": value or ""}) for key, value in values.items()]
        await self.ask(
            "POST",
            "/messages" if batch else "/messages?batch=false",
            content="\n".join(lines),
            headers={**NDJSON, "idempotency-key": f"{self.name}-{self._requests}"},
        )

    async def status(self) -> Any:
        return await self.ask("GET", "/compaction")

    async def compact(self) -> Any:
        """Return the status once a compaction that this call began has ended."""
        await self.ask("PUT", "/compaction")
        return await self.ended()

    async def ended(self) -> Any:
        deadline = time.monotonic() + TIMEOUT_S
        while (found := await self.status())["status"] == "RUNNING":
            assert time.monotonic() < deadline, json.dumps(found)
            await asyncio.sleep(0.02)
        return found

    async def table(self) -> dict[str, str]:
        return await Table(self).read()


class Table:
    """A reader that continues where it was, and begins again if deletions may have been compacted meanwhile, by the
    rule of docs/compaction.md."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self._start = "earliest"
        self._horizon: str | None = None
        self.values: dict[str, str] = {}
        self.begun = 0

    async def read(self) -> dict[str, str]:
        while True:
            path = f"/messages?compacted=true&max=100&start={self._start}"
            page = await self._topic.ask("GET", path)
            horizon = (await self._topic.status())["horizon"]
            if horizon != self._horizon:
                must_begin = self._horizon is not None or self._start != "earliest"
                self._horizon = horizon
                if must_begin:
                    self._start, self.values = "earliest", {}
                    self.begun += 1
                    continue
            for message in page["messages"]:
                if message["payload"]:
                    self.values[message["key"]] = message["payload"]
                else:
                    self.values.pop(message["key"], None)
            self._start = page["next"]
            if not page["messages"]:
                return self.values


async def compacted_ledgers(cluster: ThrowawayCluster, topic: str) -> list[int]:
    """Return the compacted ledgers of a topic in the metadata, in force or not."""
    store = await ZooKeeperStore.connect(cluster.zookeeper)
    client = await LedgerClient.connect(store, randomness=random.Random(1))
    found = []
    async for ledger_id in client.list_ledgers():
        try:
            metadata = await client.metadata(ledger_id)
        except NoSuchLedger:
            continue
        if metadata.custom.get("pulsar/compactedTopic") == f"persistent://public/default/{topic}".encode():
            found.append(int(ledger_id))
    await client.close()
    await store.close()
    return found


async def test_a_threshold_compacts_by_itself_and_a_table_forgets_removed_keys(cluster):
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as http:
        topic = Topic(cluster, "table", http)
        wanted = {f"k{n}": f"{n}" for n in range(300)}
        await topic.publish(wanted)
        first = await topic.compact()
        assert (first["status"], first["keys"]) == ("SUCCESS", 300), first
        reader = Table(topic)
        assert await reader.read() == wanted
        # Nothing compacts by itself before there is a policy.
        await topic.publish({"k0": None, "k1": "new"})
        await asyncio.sleep(1.5)
        assert (await topic.status())["ledger_id"] == first["ledger_id"]
        wanted |= {"k1": "new"}
        del wanted["k0"]
        assert await reader.read() == wanted
        assert reader.begun == 0
        changed = {f"k{n}": f"{n} again" for n in range(3, 200)}
        await topic.publish({"k2": None, **changed})
        wanted |= changed
        del wanted["k2"]
        await topic.ask("PUT", "/policies", json={"compaction_threshold": 2_000})
        deadline = time.monotonic() + TIMEOUT_S
        while (found := await topic.status())["ledger_id"] == first["ledger_id"]:
            assert time.monotonic() < deadline, json.dumps(found)
            await asyncio.sleep(0.05)
        assert found["status"] in ("RUNNING", "SUCCESS"), found  # a round may begin the next one
        assert (await topic.ended())["bytes_not_compacted"] < 2_000
        assert await reader.read() == wanted  # with the deletion of k2, which only the uncompacted topic had
        assert reader.begun == 1
        assert await topic.table() == wanted
        assert await compacted_ledgers(cluster, "table") == [(await topic.status())["ledger_id"]]


async def test_a_broker_killed_while_it_compacts_leaves_the_former_state_and_no_ledger(cluster):
    chance = random.Random(3)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as http:
        topic = Topic(cluster, "killed", http)
        wanted: dict[str, str] = {}

        async def publish_round(number: int) -> None:
            for first in range(0, 2_000, 100):
                values = {f"k{key}": f"{number} " + "x" * 4_000 for key in range(first, first + 100)}
                await topic.publish(values, batch=False)
                wanted.update(values)

        await publish_round(0)
        before = await topic.compact()
        assert before["status"] == "SUCCESS", before
        kills = 0
        for number in range(1, 8):
            await topic.publish({f"k{chance.randrange(2_000)}": f"{number}"})
            await topic.ask("PUT", "/compaction")
            while (found := await topic.status())["status"] == "RUNNING" and not found["entries_written"]:
                await asyncio.sleep(0)
            if found["status"] == "RUNNING":
                cluster.kill("broker-0")
                kills += 1
                after = await topic.status()
                assert after["ledger_id"] in await compacted_ledgers(cluster, "killed")
                if after["ledger_id"] == before["ledger_id"]:  # it had not ended when the signal arrived
                    assert after["horizon"] == before["horizon"]
            else:
                assert found["status"] == "SUCCESS", found
            table = await topic.table()
            assert table.keys() == wanted.keys()
            assert [value for value in table.values() if value == str(number)] == [str(number)]
            before = await topic.ended()
            if kills == 2:
                break
        assert kills == 2
        last = await topic.compact()
        assert last["status"] == "SUCCESS", last
        assert (await topic.table()).keys() == wanted.keys()
        assert await compacted_ledgers(cluster, "killed") == [last["ledger_id"]]
