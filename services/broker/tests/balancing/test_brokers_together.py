"""Several brokers over one store: they choose from one another's reports, and the leader moves bundles."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from bindery_broker.balancing.brokers import Brokers
from bindery_broker.ownership.bundles import bundles_of
from bindery_broker.ownership.divisions import Divisions
from bindery_broker.ownership.records import decode_broker
from bindery_client.memory.memory import MemoryLedgers
from bindery_metadata.stores.memory import MemoryTree
from broker_harness import Clock, Harness, make_namespaces

SETTINGS = {"report_interval_s": 0.1, "interval_s": 0.1, "report_interval_s_max": 1}
UNMOVED = {"interval_s": 3600}
"""Settings with which the leader moves nothing."""
NAMESPACE = "public/many"


class Cluster:
    """Brokers that come and go."""

    def __init__(self) -> None:
        self.tree, self.ledgers = MemoryTree(), MemoryLedgers()
        boundaries = [f"0x{i * 0x08000000:08x}" for i in range(32)] + ["0xffffffff"]
        make_namespaces(self.tree, NAMESPACE, bundles={"boundaries": boundaries, "numBundles": 32})
        self.brokers: list[Harness] = []
        self.tasks: list[asyncio.Task[None]] = []

    def add(self, name: str, **settings: float) -> Harness:
        harness = Harness(
            tree=self.tree,
            ledgers=self.ledgers,
            clock=_RealClock(),
            url=f"http://{name}",
            balancing={**SETTINGS, **settings},
        )
        for other in self.brokers:
            harness.peers[other.broker.balancing.name] = other.client._transport  # type: ignore[assignment]
            other.peers[name] = harness.client._transport  # type: ignore[assignment]
        self.brokers.append(harness)
        self.tasks.append(asyncio.create_task(harness.broker.balancing.run()))
        return harness

    async def bundles(self) -> list:
        divisions = Divisions(self.tree.connect())
        return bundles_of(*NAMESPACE.split("/"), await divisions.boundaries(*NAMESPACE.split("/")))

    def counts(self) -> list[int]:
        return [len(one.broker.ownership.held) for one in self.brokers]

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for one in self.brokers:
            await one.close()


class _RealClock(Clock):
    def now(self) -> float:
        return asyncio.get_running_loop().time()


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    found = Cluster()
    yield found
    await found.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


def sees(cluster: Cluster) -> bool:
    return all(len(one.broker.balancing.brokers.records) == len(cluster.brokers) for one in cluster.brokers)


async def test_unowned_bundles_are_spread_whichever_broker_is_asked(cluster):
    first = cluster.add("one", **UNMOVED)
    cluster.add("two", **UNMOVED)
    cluster.add("three", **UNMOVED)
    await until(lambda: sees(cluster))
    for bundle in await cluster.bundles():
        await first.broker.ownership.locate(bundle)
    assert sum(cluster.counts()) == 32
    assert all(7 <= count <= 15 for count in cluster.counts()), cluster.counts()


async def test_a_broker_that_does_not_answer_is_replaced_by_another(cluster):
    first = cluster.add("one", **UNMOVED)
    cluster.add("two", **UNMOVED)
    await until(lambda: sees(cluster))
    first.peers.clear()
    for bundle in await cluster.bundles():
        assert await first.broker.ownership.locate(bundle) is None
    assert cluster.counts() == [32, 0]


async def test_a_draining_broker_gets_nothing(cluster):
    first = cluster.add("one", **UNMOVED)
    second = cluster.add("two", **UNMOVED)
    await until(lambda: sees(cluster))
    await second.broker.balancing.drain()
    await until(lambda: first.broker.balancing.brokers.records["two"].draining)
    for bundle in await cluster.bundles():
        assert first.broker.balancing.choose(bundle) == "one"
        assert second.broker.balancing.choose(bundle) == "one"
        assert second.broker.balancing.choose(bundle, exclude=["one"]) is None
    for bundle in await cluster.bundles():
        assert (await second.broker.ownership.locate(bundle)).http_url == "http://one"


async def test_a_new_broker_gets_its_share_and_then_nothing_moves(cluster):
    first = cluster.add("one")
    for bundle in await cluster.bundles():
        assert await first.broker.ownership.locate(bundle) is None
    cluster.add("two")
    await until(lambda: all(12 <= count <= 20 for count in cluster.counts()))
    moves = lambda: sum(one.broker.balancing.moves for one in cluster.brokers)  # noqa: E731
    await until(lambda: sum(cluster.counts()) == 32 and moves() >= 12)  # a round is counted at its end
    assert moves() <= 20
    before = moves()
    await asyncio.sleep(1)
    assert moves() <= before + 2


async def test_there_is_one_leader_and_another_when_it_ends(cluster):
    cluster.add("one")
    cluster.add("two")
    leaders = lambda: [one for one in cluster.brokers if one.broker.balancing.leadership.is_leader]  # noqa: E731
    await until(lambda: len(leaders()) == 1)
    store = cluster.tree.connect()
    leader = leaders()[0]
    found = (await cluster.brokers[0].client.get("/admin/v2/brokers/leaderBroker")).json()
    assert found["brokerId"] == leader.broker.balancing.name
    await leader.broker.balancing.drain()
    await until(lambda: leaders() != [] and leaders() != [leader])
    # Pulsar's brokers send lookups to the leader, so the node is theirs as soon as one of them is there.
    pulsar = b'{"webServiceUrl": "http://p:8080", "pulsarServiceUrl": "pulsar://p:6650"}'
    await store.create("/loadbalance/brokers/p:8080", pulsar, ephemeral=True)
    async with asyncio.timeout(60):
        while await store.exists("/loadbalance/leader") is not None:
            await asyncio.sleep(0.02)
    assert len(leaders()) == 1
    await store.create("/loadbalance/leader", b'{"serviceUrl": "http://p:8080"}', ephemeral=True)
    await asyncio.sleep(0.5)
    assert (await store.get("/loadbalance/leader")).data == b'{"serviceUrl": "http://p:8080"}'


async def test_brokers_and_their_bundles_are_listed(cluster):
    first = cluster.add("one")
    await until(lambda: sees(cluster))
    bundle = (await cluster.bundles())[0]
    answer = await first.client.post(f"/v1/namespaces/{NAMESPACE}/take", json={"bundle": bundle.name})
    assert answer.json() == {"namespace": NAMESPACE, "bundle": bundle.name, "owner": "http://one"}
    answer = await first.client.post(f"/v1/namespaces/{NAMESPACE}/take", json={"bundle": "0x1_0x2"})
    assert answer.status_code == 400
    await until(lambda: first.broker.balancing.brokers.records["one"].num_bundles == 1)
    [one] = (await first.client.get("/v1/brokers")).json()["brokers"]
    assert (one["broker"], one["kind"], one["bundles"], one["draining"]) == ("one", "bindery", 1, False)
    found = (await first.client.get("/v1/brokers/one/bundles")).json()
    assert [item["bundle"] for item in found["bundles"]] == [str(bundle)]
    assert (await first.client.get("/v1/brokers/missing/bundles")).status_code == 404


async def test_a_hot_bundle_is_split_by_its_owner(cluster):
    first = cluster.add("one")
    for number in range(12):
        await first.produce("x", topic=f"/v1/topics/public/default/t{number}")
    before = len(first.broker.ownership.held)
    object.__setattr__(first.broker.balancing.settings, "split_topics", 2)
    await until(lambda: first.broker.balancing.splits >= 2)
    assert len(first.broker.ownership.held) > before
    for number in range(12):
        await first.produce("y", topic=f"/v1/topics/public/default/t{number}")


async def test_a_record_that_cannot_be_read_is_no_candidate():
    tree = MemoryTree()
    store = tree.connect()
    brokers = Brokers(store)
    brokers.start()
    await store.create("/loadbalance/brokers/x:1", b"\xff nonsense", ephemeral=True, make_parents=True)
    await until(lambda: "x:1" in brokers.records)
    assert not brokers.records["x:1"].bindery
    assert decode_broker(b'{"pulsarServiceUrl": "pulsar://p:1", "cpu": "NaN"}').is_pulsar
    await store.delete("/loadbalance/brokers/x:1", version=None)
    await until(lambda: not brokers.records)
    await brokers.close()
