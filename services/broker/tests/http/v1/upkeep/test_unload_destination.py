"""Unloads with a destination: brokers of Bindery and of Pulsar, and those that do not take the bundle."""

import json
from typing import Any

import httpx
import pytest
from bindery_broker.ownership.bundles import Bundle
from bindery_broker.ownership.records import encode_broker, own_record
from bindery_metadata.stores.memory import MemoryTree
from bindery_pulsar.topic_name import TopicName
from broker_harness import TOPIC, Harness, payloads, problem

BUNDLE = Bundle.of(TopicName.parse("public/default/t"))
SPACE = "/v1/namespaces/public/default"
ADMIN = f"/admin/v2/namespaces/public/default/{BUNDLE.name}/unload"
INACTIVE = {"reason": "Not allowed unload namespace bundle to inactive destination broker"}


class PulsarBroker:
    """A broker of Apache Pulsar: takes the bundle when it is asked for a topic, and unloads it."""

    def __init__(self, tree: MemoryTree) -> None:
        self.store = tree.connect()
        self.requests: list[str] = []
        self.takes = True
        self.takes_back = False

    async def own(self) -> None:
        record = {"nativeUrl": "pulsar://three:6650", "httpUrl": "http://three", "disabled": False}
        await self.store.create(BUNDLE.owner_path, json.dumps(record).encode(), ephemeral=True, make_parents=True)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.raw_path.decode()
        self.requests.append(f"{request.method} {path}")
        if path.startswith("/lookup") and self.takes:
            await self.own()
        elif "/unload" in path:
            await self.store.delete(BUNDLE.owner_path, version=None)
            if self.takes_back:
                await self.own()
        return httpx.Response(200 if self.takes else 503, json={})


@pytest.fixture
async def pulsar(tree, pair) -> PulsarBroker:
    """Registers all brokers."""
    broker = PulsarBroker(tree)
    for harness in pair:
        harness.peers["three"] = broker  # type: ignore[assignment]
        url = harness.broker.url
        path = f"/loadbalance/brokers/{url.removeprefix('http://')}"
        await harness.store.create(path, encode_broker(own_record(url)), ephemeral=True, make_parents=True)
    record = {"webServiceUrl": "http://three", "pulsarServiceUrl": "pulsar://three:6650"}
    await broker.store.create("/loadbalance/brokers/three", json.dumps(record).encode(), ephemeral=True)
    return broker


async def unload(harness: Harness, destination: str, **query: Any) -> httpx.Response:
    return await harness.post(f"{SPACE}/unload", {}, params={"destination": destination, **query})


async def owner(harness: Harness) -> str | None:
    found = (await harness.client.get(f"{SPACE}/bundles")).json()["bundles"]
    owner: str | None = next(one["owner"] for one in found if one["bundle"] == BUNDLE.name)
    return owner


@pytest.mark.parametrize("asked", [0, 1])
@pytest.mark.parametrize(("destination", "to"), [("two", 1), ("one", 0)])
async def test_the_destination_has_the_bundle_at_once(pair, pulsar, asked, destination, to):
    start = pair[1 - to]
    await start.produce("a")
    answer = await unload(pair[asked], destination)
    assert answer.status_code == 200, answer.text
    assert [one["owner"] for one in answer.json()["bundles"] if one["owner"]] == [start.broker.url]
    assert pair[to].broker.ownership.held == [BUNDLE]
    assert await owner(start) == pair[to].broker.url
    await start.produce("b")
    assert payloads((await pair[to].client.get(f"{TOPIC}/messages")).json()["messages"]) == ["a", "b"]
    again = await unload(pair[asked], destination)
    assert [one["owner"] for one in again.json()["bundles"]] == [None] * 4
    assert len(list(pair[to].broker.topics)) == 1


@pytest.mark.parametrize("destination", ["two", "http://two", "https://two/"])
async def test_pulsars_call_takes_a_destination(pair, pulsar, destination):
    one, two = pair
    await one.produce("a")
    assert (await one.client.put(ADMIN, params={"destinationBroker": destination})).status_code == 204
    assert two.broker.ownership.held == [BUNDLE]


async def test_a_broker_that_is_not_live_gets_nothing(pair, pulsar):
    one, _ = pair
    await one.produce("a")
    for destination in ("four", "http://four:80", "a/b"):
        answer = await one.client.put(ADMIN, params={"destinationBroker": destination})
        assert (answer.status_code, answer.json()) == (412, INACTIVE)
    found = problem(await unload(one, "four"), status=400, code="bad_request")
    assert found["facts"]["destination"] == "four"
    problem(await unload(one, "a/b"), status=400, code="bad_request")
    assert one.broker.ownership.held == [BUNDLE]
    assert len(list(one.broker.topics)) == 1


async def test_a_bundle_without_topics_waits_for_its_destination(pair, pulsar):
    one, two = pair
    await one.produce("a")
    await one.client.delete(TOPIC)
    assert (await unload(one, "two", bundle=BUNDLE.name)).status_code == 200
    await two.produce("b")
    assert two.broker.ownership.held == [BUNDLE]


async def test_a_pulsar_broker_takes_the_bundle_when_it_is_asked_for_a_topic(pair, pulsar):
    one, two = pair
    await one.produce("a")
    assert (await unload(two, "three")).status_code == 200
    assert await owner(one) == "http://three"
    assert pulsar.requests == ["GET /lookup/v2/topic/persistent/public/default/t?authoritative=true"]
    problem(await two.client.put(TOPIC), status=409, code="owned_by_pulsar")


async def test_a_pulsar_broker_that_does_not_take_it_is_an_error_and_the_topic_is_served(pair, pulsar):
    one, two = pair
    await one.produce("a")
    pulsar.takes = False
    found = problem(await unload(one, "three", hold_s=0), status=503, code="try_again")["facts"]
    assert (found["destination"], found["owner"], found["status"]) == ("three", None, 503)
    await two.produce("b")


async def test_a_bundle_comes_from_a_pulsar_broker_unless_that_takes_it_back(pair, pulsar):
    one, two = pair
    await one.produce("a")
    assert (await unload(one, "three")).status_code == 200
    pulsar.takes_back = True
    found = problem(await unload(one, "two"), status=503, code="try_again")["facts"]
    assert found["owner"] == "http://three"
    pulsar.takes_back = False
    assert (await unload(one, "two")).status_code == 200
    assert two.broker.ownership.held == [BUNDLE]
    assert payloads((await one.client.get(f"{TOPIC}/messages")).json()["messages"]) == ["a"]


class Others:
    """An assigner that chooses another broker for every bundle."""

    def is_elsewhere(self, bundle: Bundle) -> bool:
        return True

    async def assign(self, bundle: Bundle) -> None:
        raise AssertionError(f"{bundle} has a destination")


async def test_the_destination_takes_it_also_if_its_load_speaks_for_another_broker(pair, pulsar):
    """A Pulsar broker keeps nobody from the bundle that it unloads."""
    one, two = pair
    await one.produce("a")
    assert (await unload(one, "three")).status_code == 200
    two.broker.ownership.assigner = Others()
    assert (await unload(one, "two")).status_code == 200
    assert two.broker.ownership.held == [BUNDLE]


async def test_pulsar_brokers_move_bundles_among_themselves(pair, pulsar):
    one, _ = pair
    await one.produce("a")
    assert (await unload(one, "three")).status_code == 200
    record = {"webServiceUrl": "http://five", "pulsarServiceUrl": "pulsar://five:6650"}
    await pulsar.store.create("/loadbalance/brokers/five", json.dumps(record).encode(), ephemeral=True)
    one.peers["five"] = pulsar
    problem(await unload(one, "five"), status=503, code="try_again")  # both brokers are the same one here
    assert f"PUT {ADMIN}?destinationBroker=five" in pulsar.requests
