"""A topic is deleted while many clients use it and repeat each request that fails.

The cluster is in memory, and each call to it takes a random number of turns of the event loop before and after its
effect, so that a seed decides how the deletion and the requests interleave. The clients send what reconnecting
producers, consumers, readers and schema registries send; each of these requests can create part of a topic.

| deletion    | the clients                 | afterwards                                                            |
|-------------|-----------------------------|-----------------------------------------------------------------------|
| by force    | go on for the whole time    | nothing is left but the record that holds the name                    |
| plain       | may create the topic again  | the topic has what was published after the deletion, and nothing else |
| partitioned | go on for the whole time    | as by force, for each partition                                       |
"""

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
import pytest
from bindery_broker.topics.forced_deletions import ROOT as HOLDS_ROOT
from bindery_client.memory.memory import MemoryLedgers
from bindery_metadata.stores.memory import MemoryTree
from broker_harness import TOPIC, Clock, Harness, payloads
from managed_ledger_faults import Plan

T = TypeVar("T")
CLIENTS = 50
PARTITIONS = 6
PAUSE_TURNS_MAX = 6
"""Maximum number of turns that a call waits before and after its effect."""
BEFORE = 120
"""Requests that clients complete before the deletion begins."""
AFTER = 120
"""Requests that clients complete after the deletion."""
REFUSALS = {404, 409, 503, 504}
"""Answers of a topic that is being deleted, or is held, or moves; 504 if a message was being stored."""
ATTEMPTS_MAX = 200
SCHEMA = {"type": "STRING"}


class Pauses(Plan):
    """Calls do not fail, but take time."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, die_at=None, fault_rate=0.0)

    async def run(self, work: Callable[[], Awaitable[T]], errors: Any) -> T:
        await self._pause()
        answer = await work()
        await self._pause()
        return answer

    async def _pause(self) -> None:
        for _ in range(self.random.randrange(PAUSE_TURNS_MAX + 1)):
            await asyncio.sleep(0)


@dataclass
class Published:
    payload: str
    began: int
    ended: int


@dataclass
class Race:
    """Clients that send requests until `stop`, and what they have published."""

    brokers: list[Harness]
    random: random.Random
    kinds: list[str]
    published: list[Published] = field(default_factory=list)
    done: int = 0
    is_stopped: bool = False
    _ticks: "itertools.count[int]" = field(default_factory=itertools.count)

    def tick(self) -> int:
        return next(self._ticks)

    async def client(self, number: int) -> None:
        broker = self.brokers[number % len(self.brokers)]
        for round_number in itertools.count():
            if self.is_stopped:
                return
            kind = self.random.choice(self.kinds)
            answer = await getattr(self, f"_{kind}")(broker, number, round_number)
            assert answer.is_success or answer.status_code in REFUSALS, (kind, answer.status_code, answer.text)
            self.done += 1
            for _ in range(self.random.randrange(20)):
                await asyncio.sleep(0)

    async def until(self, done: int) -> None:
        while self.done < done:
            await asyncio.sleep(0)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            for number in range(CLIENTS):
                tasks.create_task(self.client(number))
            try:
                yield
            finally:
                self.is_stopped = True

    async def _produce(self, broker: Harness, number: int, round_number: int) -> httpx.Response:
        payload = f"{number}.{round_number}"
        began = self.tick()
        answer = await broker.client.post(f"{TOPIC}/messages?key=k{number % 5}", content=payload)
        if answer.is_success:
            self.published.append(Published(payload, began, self.tick()))
        return answer

    async def _delay(self, broker: Harness, number: int, round_number: int) -> httpx.Response:
        return await broker.client.post(f"{TOPIC}/messages?deliver_after_ms=3600000", content=f"later {round_number}")

    async def _produce_once(self, broker: Harness, number: int, round_number: int) -> httpx.Response:
        headers = {"idempotency-key": f"{number}-{round_number // 2}"}
        return await broker.client.post(f"{TOPIC}/messages", content=f"once {number}", headers=headers)

    async def _receive(self, broker: Harness, number: int, round_number: int) -> httpx.Response:
        answer = await broker.receive_raw(f"c{number}", sub=f"s{number % 4}")
        if answer.is_success and (messages := answer.json()["messages"]):
            return await broker.ack([message["message_id"] for message in messages], sub=f"s{number % 4}")
        return answer

    async def _subscribe(self, broker: Harness, number: int, round_number: int) -> httpx.Response:
        return await broker.client.put(f"{TOPIC}/subscriptions/p{number % 7}", json={"initial": "earliest"})

    async def _read(self, broker: Harness, number: int, round_number: int) -> httpx.Response:
        return await broker.client.get(f"{TOPIC}/messages?start=earliest")

    async def _schema(self, broker: Harness, number: int, round_number: int) -> httpx.Response:
        return await broker.client.post(f"{TOPIC}/schema", json=SCHEMA)

    async def _policy(self, broker: Harness, number: int, round_number: int) -> httpx.Response:
        return await broker.client.put(f"{TOPIC}/policies", json={"message_ttl_s": 100 + number})

    async def _compact(self, broker: Harness, number: int, round_number: int) -> httpx.Response:
        return await broker.client.put(f"{TOPIC}/compaction")


ALL = ["produce", "produce", "delay", "produce_once", "receive", "subscribe", "read", "schema", "policy", "compact"]
UNCONNECTED = [kind for kind in ALL if kind != "receive"]


class Cluster:
    def __init__(self, seed: int, *, brokers: int) -> None:
        self.tree, self.ledgers, self.clock = MemoryTree(), MemoryLedgers(), Clock()
        self.random = random.Random(seed)
        self.brokers = [
            Harness(
                tree=self.tree,
                ledgers=self.ledgers,
                clock=self.clock,
                url=f"http://b{number}",
                plan=Pauses(seed + number),
                delayed_delivery_max_delay_s=7200,
            )
            for number in range(brokers)
        ]
        for one in self.brokers:
            for other in self.brokers:
                if other is not one:
                    one.peers[other.broker.url.removeprefix("http://")] = httpx.ASGITransport(app=other.app)
        self.before: set[str] = set()

    @property
    def any(self) -> Harness:
        return self.random.choice(self.brokers)

    async def __aenter__(self) -> "Cluster":
        """Create a topic with all that it can have, and delete it, so that the parents of its znodes exist."""
        race = Race([self.brokers[0]], self.random, ALL)
        for kind in ("produce", "delay", "subscribe", "schema", "policy", "compact"):
            assert (await getattr(race, f"_{kind}")(self.brokers[0], 0, 0)).is_success, kind
        await self.delete(force=False)
        assert (await self.any.client.put(f"{TOPIC}/partitions", json={"partitions": PARTITIONS})).status_code == 201
        await self.delete(force=False, path=f"{TOPIC}/partitions")
        assert not self.ledgers.ledgers
        self.before = set(self.brokers[0].znodes())
        assert not [path for path in self.before if path.endswith(("/t", "/t-partition-0"))]
        return self

    async def __aexit__(self, *_: object) -> None:
        for one in self.brokers:
            await one.close()

    def race(self, kinds: list[str]) -> Race:
        return Race(self.brokers, self.random, kinds)

    async def delete(self, *, force: bool, path: str = TOPIC) -> None:
        """Repeat the deletion until it succeeds, as its error says."""
        for _ in range(ATTEMPTS_MAX):
            answer = await self.any.client.delete(f"{path}?force={json.dumps(force)}")
            if answer.status_code == 200:
                return
            assert answer.status_code in {409, 503}, answer.text
        raise AssertionError(answer.text)

    async def drain(self) -> None:
        """Let what runs in the background end."""
        for _ in range(2_000):
            await asyncio.sleep(0)

    async def read_all(self) -> set[str]:
        """Return the payloads of the topic."""
        found: set[str] = set()
        start = "earliest"
        while True:
            answer = await self.any.client.get(f"{TOPIC}/messages?start={start}")
            assert answer.status_code == 200, answer.text
            if not (messages := answer.json()["messages"]):
                return found
            found |= set(payloads(messages))
            start = answer.json()["next"]

    def left_over(self) -> set[str]:
        """Return the znodes that did not exist before, besides those that hold names and own bundles."""
        found = set(self.brokers[0].znodes()) - self.before
        return {path for path in found if not path.startswith((HOLDS_ROOT, "/namespace/"))}

    def check_gone(self) -> None:
        assert not self.left_over()
        assert not [(ledger.ledger_id, ledger.metadata.custom) for ledger in self.ledgers.ledgers.values()]

    async def check_creation(self, *, partitions: int = 0) -> None:
        """Create the topic, which must be a new one in all respects."""
        path = f"{TOPIC}/partitions" if partitions else TOPIC
        answer = await self.any.client.put(path, json={"partitions": partitions} if partitions else None)
        assert answer.status_code == 201, answer.text
        assert (await self.any.client.get(f"{TOPIC}/schema/versions")).json() == {"versions": []}
        assert (await self.any.client.get(f"{TOPIC}/policies")).json()["policies"] == {}
        assert (await self.any.client.get(f"{TOPIC}/subscriptions")).json()["subscriptions"] == []
        await self.any.produce("new")
        assert payloads(await self.any.receive()) == ["new"]
        await self.delete(force=True)
        await self.drain()
        self.check_gone()


@pytest.mark.parametrize(("seed", "brokers"), [(0, 1), (1, 1), (2, 2), (3, 2)])
async def test_clients_never_revive_any_part_of_a_topic_that_is_deleted_by_force(seed: int, brokers: int) -> None:
    async with Cluster(seed, brokers=brokers) as cluster:
        race = cluster.race(ALL)
        async with race.running():
            await race.until(BEFORE)
            await cluster.delete(force=True)
            await race.until(race.done + AFTER)
        await cluster.drain()
        assert race.published
        cluster.check_gone()
        await cluster.check_creation()


@pytest.mark.parametrize("seed", range(2))
async def test_a_topic_is_gone_although_it_moves_between_brokers_while_it_is_deleted(seed: int) -> None:
    async with Cluster(seed, brokers=2) as cluster:
        race = cluster.race(ALL)
        async with race.running():
            await race.until(BEFORE)
            async with asyncio.TaskGroup() as tasks:
                deletion = tasks.create_task(cluster.delete(force=True))
                while not deletion.done():
                    await cluster.any.client.post("/v1/namespaces/public/default/unload", json={})
            await race.until(race.done + AFTER)
        await cluster.drain()
        cluster.check_gone()
        await cluster.check_creation()


@pytest.mark.parametrize(("seed", "brokers"), [(0, 1), (1, 2), (2, 2)])
async def test_after_a_plain_deletion_the_topic_has_only_what_came_later(seed: int, brokers: int) -> None:
    async with Cluster(seed, brokers=brokers) as cluster:
        race = cluster.race(UNCONNECTED)
        async with race.running():
            await race.until(BEFORE)
            began = race.tick()
            await cluster.delete(force=False)
            ended = race.tick()
            await race.until(race.done + AFTER)
        await cluster.drain()
        found = await cluster.read_all()
        before = {one.payload for one in race.published if one.ended < began}
        after = {one.payload for one in race.published if one.began > ended}
        assert before
        assert after
        assert not found & before
        assert after <= found
        await cluster.delete(force=True)
        await cluster.drain()
        cluster.check_gone()


@pytest.mark.parametrize(("seed", "brokers"), [(0, 1), (1, 2), (2, 2)])
async def test_clients_never_revive_a_partition_of_a_topic_that_is_deleted(seed: int, brokers: int) -> None:
    async with Cluster(seed, brokers=brokers) as cluster:
        answer = await cluster.any.client.put(f"{TOPIC}/partitions", json={"partitions": PARTITIONS})
        assert answer.status_code == 201, answer.text
        race = cluster.race([kind for kind in ALL if kind not in ("compact", "read")])
        async with race.running():
            await race.until(BEFORE)
            await cluster.delete(force=True, path=f"{TOPIC}/partitions")
            await race.until(race.done + AFTER)
        await cluster.drain()
        assert race.published
        cluster.check_gone()
        await cluster.check_creation(partitions=PARTITIONS)
