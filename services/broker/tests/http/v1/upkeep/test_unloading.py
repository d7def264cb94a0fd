"""Unloads of topics and bundles: several brokers, brokers of Pulsar, failures in the middle."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from bindery_broker.errors import OwnedByPulsar
from bindery_broker.http.v1.upkeep.unloading import UnloadQuery
from bindery_broker.ownership import holds
from bindery_broker.ownership.bundles import Bundle
from bindery_broker.topics import topics as topics_module
from bindery_broker.topics.topic import Topic
from bindery_core.errors import MetadataUnavailable
from bindery_metadata.stores.memory import MemoryTree
from bindery_pulsar.topic_name import TopicName
from broker_harness import TOPIC, Harness, ids, make_namespaces, payloads, problem, settle

NAME = TopicName.parse("public/default/t")
BUNDLE = Bundle.of(NAME)
SPACE = "/v1/namespaces/public/default"
ADMIN = "/admin/v2/namespaces/public/default"
PULSAR = {"nativeUrl": "pulsar://three:6650", "httpUrl": "http://three", "disabled": False, "advertisedListeners": {}}
"""What a Pulsar broker stores as the owner of a bundle."""
PULSAR_BROKER = {"webServiceUrl": "http://three", "pulsarServiceUrl": "pulsar://three:6650", "lastStats": {}}


class PulsarBroker:
    """Owns bundles as a broker of Apache Pulsar, and records the requests that it gets."""

    def __init__(self, tree: MemoryTree) -> None:
        self.store = tree.connect()
        self.requests: list[str] = []
        self.status = 204

    async def register(self) -> None:
        path = "/loadbalance/brokers/three:8080"
        await self.store.create(path, json.dumps(PULSAR_BROKER).encode(), ephemeral=True, make_parents=True)

    async def own(self, bundle: Bundle = BUNDLE, **fields: Any) -> None:
        value = json.dumps({**PULSAR, **fields}).encode()
        await self.store.create(bundle.owner_path, value, ephemeral=True, make_parents=True)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(f"{request.method} {request.url.path}")
        if self.status < 300 and request.url.path.endswith("/unload"):
            await self.store.delete(BUNDLE.owner_path, version=None)
        return httpx.Response(self.status, text="a reason")


@pytest.fixture
async def pair(tree, ledgers, clock) -> AsyncIterator[tuple[Harness, Harness]]:
    one = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://one")
    two = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://two")
    one.peers["two"] = httpx.ASGITransport(app=two.app)
    two.peers["one"] = httpx.ASGITransport(app=one.app)
    yield one, two
    await one.close()
    await two.close()


@pytest.fixture
def pulsar(tree, pair) -> PulsarBroker:
    broker = PulsarBroker(tree)
    for harness in pair:
        harness.peers["three"] = broker  # type: ignore[assignment]
    return broker


async def unload(harness: Harness, **query: Any) -> dict[str, Any]:
    answer = await harness.post(f"{SPACE}/unload", {}, params=query)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def owners(answer: dict[str, Any]) -> dict[str, str]:
    return {one["bundle"]: one["owner"] for one in answer["bundles"] if one["owner"]}


async def test_after_an_unload_another_broker_has_everything(pair):
    one, two = pair
    await one.client.put(f"{TOPIC}/subscriptions/s")
    await one.produce("a", "b", "c")
    got = await one.receive()
    await one.ack([ids(got)[1]])
    found = await unload(one)
    assert owners(found) == {BUNDLE.name: "http://one"}
    assert len(found["bundles"]) == 4
    assert one.broker.ownership.held == []
    assert len(one.broker.topics) == 0
    assert await two.store.exists(BUNDLE.owner_path) is None
    assert payloads(await two.receive(consumer="c2")) == ["a", "c"]
    assert two.broker.ownership.held == [BUNDLE]
    await one.produce("d")  # passed on
    assert (await one.client.get(TOPIC)).json()["owner"] == "http://two"


async def test_any_broker_unloads_bundles_of_another(pair):
    one, two = pair
    await one.produce("a")
    assert owners(await unload(two, bundle=BUNDLE.name, hold_s=0)) == {BUNDLE.name: "http://one"}
    assert one.broker.ownership.held == []
    assert owners(await unload(two)) == {}


@pytest.mark.parametrize("path", ["unload", f"{BUNDLE.name}/unload"])
async def test_pulsars_calls_unload_as_well(pair, path):
    one, two = pair
    await one.produce("a")
    assert (await two.client.put(f"{ADMIN}/{path}")).status_code == 204
    assert one.broker.ownership.held == []
    assert (await two.client.put(f"{ADMIN}/{path}")).status_code == 204


@pytest.mark.parametrize(
    ("path", "status", "reason"),
    [
        ("public/none/unload", 404, "Namespace not found"),
        ("public/none/0x00000000_0x40000000/unload", 404, "Namespace not found"),
        ("public/default/0x00000000/unload", 412, "Invalid bundle range: 0x00000000"),
        (
            "public/default/0x00000001_0x40000000/unload",
            412,
            "Cannot find bundle public/default/0x00000001_0x40000000 in the bundles list",
        ),
        (
            "public/default/0x00000000_0x80000000/unload",
            412,
            "Invalid upper boundary for bundle public/default/0x00000000_0x80000000. "
            "Expected upper boundary of public/default/0x00000000_0x40000000",
        ),
    ],
)
async def test_pulsars_calls_refuse_as_pulsar(broker, path, status, reason):
    answer = await broker.client.put(f"/admin/v2/namespaces/{path}")
    assert (answer.status_code, answer.json()["reason"]) == (status, reason)


async def test_wrong_unloads_are_refused(broker):
    problem(await broker.post("/v1/namespaces/public/none/unload", {}), status=404, code="no_such_namespace")
    wrong = await broker.post(f"{SPACE}/unload", {}, params={"bundle": "0x0_0x1"})
    assert "no such bundle" in problem(wrong, status=400, code="bad_request")["detail"]
    for hold_s in (-1, 61):
        answer = await broker.post(f"{SPACE}/unload", {}, params={"hold_s": hold_s})
        problem(answer, status=400, code="bad_request")
    assert UnloadQuery.model_fields["hold_s"].default is None


@pytest.mark.parametrize("path", [f"{SPACE}/unload", f"{TOPIC}/unload"])
async def test_a_web_page_of_another_site_cannot_unload(broker, path):
    await broker.produce("a")
    answer = await broker.client.post(path, content=b"{}", headers={"content-type": "text/plain"})
    problem(answer, status=415, code="unsupported_media_type")
    assert broker.broker.ownership.held == [BUNDLE]
    assert len(broker.broker.topics) == 1


async def test_a_topic_is_unloaded_and_opened_again_by_the_next_request(pair):
    one, two = pair
    await one.produce("a")
    (topic,) = one.broker.topics
    assert (await two.post(f"{TOPIC}/unload", {})).json() == {"unloaded": "public/default/t"}
    assert not topic.is_open
    assert one.broker.ownership.held == [BUNDLE]
    await one.produce("b")
    problem(await one.post("/v1/topics/public/default/none/unload", {}), status=404, code="no_such_topic")


async def test_requests_during_an_unload_wait_for_the_next_owner(pair, monkeypatch):
    """A producer and a waiting consumer notice nothing but the time that it takes."""
    one, _ = pair
    await one.client.put(f"{TOPIC}/subscriptions/s")
    await one.produce("a")
    await one.ack(ids(await one.receive()))
    waiting = asyncio.create_task(one.receive(wait_ms=20_000))
    await settle()
    closes, go_on = asyncio.Event(), asyncio.Event()
    close_really = Topic.close

    async def close(topic: Topic, why: str = "") -> None:
        closes.set()
        await go_on.wait()
        await close_really(topic, why)

    monkeypatch.setattr(Topic, "close", close)
    unloading = asyncio.create_task(unload(one))
    await closes.wait()
    assert json.loads((await one.store.get(BUNDLE.owner_path)).data)["disabled"] is True
    assert not one.broker.ownership.is_mine(BUNDLE)
    producing = asyncio.create_task(one.produce("b"))
    go_on.set()
    assert owners(await unloading) == {BUNDLE.name: "http://one"}
    await producing
    assert payloads(await waiting) == ["b"]


async def test_an_unload_goes_on_without_the_client_that_asked(pair, monkeypatch):
    one, two = pair
    await one.produce("a")
    closes, go_on = asyncio.Event(), asyncio.Event()
    close_really = Topic.close

    async def close(topic: Topic, why: str = "") -> None:
        closes.set()
        await go_on.wait()
        await close_really(topic, why)

    monkeypatch.setattr(Topic, "close", close)
    asked = asyncio.create_task(unload(one))
    await closes.wait()
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    go_on.set()
    await settle()
    assert one.broker.ownership.held == []
    assert payloads([(await two.client.get(f"{TOPIC}/messages")).json()["messages"][0]]) == ["a"]


async def test_a_topic_that_does_not_close_does_not_hold_its_bundle(pair, monkeypatch):
    one, two = pair
    await one.produce("a")

    async def close(_topic: Topic, _why: str = "") -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(topics_module, "CLOSE_S_MAX", 0.01)
    monkeypatch.setattr(Topic, "close", close)
    await unload(one)
    assert len(one.broker.topics) == 0
    monkeypatch.undo()
    await two.produce("b")
    assert two.broker.ownership.held == [BUNDLE]


async def test_a_crash_in_the_middle_frees_the_bundle_with_the_session(pair, tree, monkeypatch):
    one, two = pair
    await one.client.put(f"{TOPIC}/subscriptions/s")
    await one.produce("a")
    closes = asyncio.Event()

    async def close(_topic: Topic, _why: str = "") -> None:
        closes.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Topic, "close", close)
    unloading = asyncio.create_task(unload(one))
    await closes.wait()
    problem(await two.receive_raw(), status=503, code="not_owner")
    tree.expire(one.store)
    await settle()
    monkeypatch.undo()
    assert payloads(await two.receive()) == ["a"]
    unloading.cancel()
    await asyncio.gather(unloading, return_exceptions=True)


async def test_an_unload_that_cannot_begin_changes_nothing(pair):
    one, _ = pair
    await one.produce("a")
    (topic,) = one.broker.topics
    one.store.fail_next(MetadataUnavailable("made up"))
    with pytest.raises(MetadataUnavailable):
        await one.broker.unload(BUNDLE, hold_s=0)
    assert topic.is_open
    assert one.broker.ownership.is_mine(BUNDLE)
    await one.produce("b")


async def test_the_release_is_repeated_until_the_store_answers(pair, monkeypatch):
    one, two = pair
    await one.produce("a")
    monkeypatch.setattr(holds, "RELEASE_RETRY_S", 0.0)
    topics_unload = one.broker.topics.unload

    async def then_fail(bundle: Bundle) -> None:
        await topics_unload(bundle)
        one.store.fail_next(MetadataUnavailable("made up"))

    monkeypatch.setattr(one.broker.topics, "unload", then_fail)
    assert await one.broker.unload(BUNDLE, hold_s=0)
    assert await two.store.exists(BUNDLE.owner_path) is None


async def test_while_a_bundle_is_held_no_broker_of_bindery_takes_it(pair, pulsar):
    one, two = pair
    await one.produce("a")
    await pulsar.register()
    await unload(one)
    asked = [asyncio.create_task(harness.client.get(TOPIC)) for harness in pair]
    await settle()
    assert not any(task.done() for task in asked)
    assert await two.store.exists(f"/bindery/holds/{BUNDLE}") is not None
    await pulsar.own()
    for task in asked:
        found = problem(await task, status=409, code="owned_by_pulsar")["facts"]
        assert found["owner"] == "http://three"
        assert found["native_url"] == "pulsar://three:6650"
    assert pulsar.requests == []


async def test_when_a_hold_ends_the_first_broker_that_is_asked_takes_the_bundle(pair):
    one, two = pair
    await one.produce("a")
    await unload(one, hold_s=0.05)
    assert (await two.client.get(TOPIC)).json()["owner"] == "http://two"
    assert await two.store.exists(f"/bindery/holds/{BUNDLE}") is None


async def test_a_hold_ends_with_its_broker(pair):
    one, two = pair
    await one.produce("a")
    await unload(one, hold_s=60)
    asked = asyncio.create_task(two.client.get(TOPIC))
    await settle()
    assert not asked.done()
    await one.broker.close()
    assert (await asked).json()["owner"] == "http://two"


async def test_bundles_of_pulsar_brokers_are_unloaded_there(pair, pulsar):
    one, _ = pair
    await one.produce("a")
    await unload(one)
    await pulsar.own()
    assert owners(await unload(one)) == {BUNDLE.name: "http://three"}
    assert pulsar.requests == [f"PUT {ADMIN}/{BUNDLE.name}/unload"]
    await one.produce("b")


async def test_a_refusal_of_a_pulsar_broker_is_passed_on(pair, pulsar):
    one, _ = pair
    await pulsar.own()
    pulsar.status = 500
    found = problem(await one.post(f"{SPACE}/unload", {}), status=503, code="try_again")["facts"]
    assert found["answer"] == "a reason"
    assert found["owner"] == "http://three"


async def test_requests_for_topics_of_a_pulsar_broker(pair, pulsar):
    """Requests of `/v1` are refused with the owner. Calls that Pulsar has as well are redirected there."""
    one, _ = pair
    await pulsar.own()
    for answer in (
        await one.client.post(f"{TOPIC}/messages", content=b"a"),
        await one.receive_raw(),
        await one.client.put(TOPIC),
    ):
        found = problem(answer, status=409, code="owned_by_pulsar")
        assert found["facts"]["owner"] == "http://three"
        assert found["facts"]["native_url"] == "pulsar://three:6650"
        assert f"bindery namespaces unload public/default --bundle {BUNDLE.name}" in found["detail"]
    path = "/admin/v2/persistent/public/default/t"
    answer = await one.client.put(f"{path}?x=1")
    assert (answer.status_code, answer.headers["location"]) == (307, f"http://three{path}?x=1")
    assert len(one.broker.topics) == 0
    assert one.broker.ownership.held == []
    await pulsar.store.delete(BUNDLE.owner_path, version=None)
    await settle()
    await one.produce("a")


async def test_a_bundle_that_a_pulsar_broker_unloads_is_about_to_change_its_owner(pair, pulsar):
    one, _ = pair
    await pulsar.own(disabled=True)
    problem(await one.client.put(TOPIC), status=503, code="not_owner")
    await pulsar.store.delete(BUNDLE.owner_path, version=None)
    assert (await one.client.put(TOPIC)).status_code == 201


async def test_a_broker_that_pulsar_has_replaced_writes_nothing_more(pair, pulsar, ledgers):
    """The session of this broker expires; a Pulsar broker takes the bundle. The topic here stops at once."""
    one, _ = pair
    await one.produce("a")
    (topic,) = one.broker.topics
    await one.store.delete(BUNDLE.owner_path, version=None)
    await pulsar.own()
    await settle()
    assert not topic.is_open
    problem(await one.client.post(f"{TOPIC}/messages", content=b"b"), status=409, code="owned_by_pulsar")
    with pytest.raises(OwnedByPulsar):
        await one.broker.locate(NAME, create=True)


async def test_nobody_is_answered_by_a_half_open_topic(pair, monkeypatch):
    """A topic that is being opened when its bundle is unloaded is closed before the bundle is released."""
    one, two = pair
    await one.produce("a")
    await one.post(f"{TOPIC}/unload", {})
    opening, go_on = asyncio.Event(), asyncio.Event()
    open_really = topics_module.ManagedLedger.open

    async def opened(*args: Any, **kwargs: Any) -> Any:
        opening.set()
        await go_on.wait()
        return await open_really(*args, **kwargs)

    monkeypatch.setattr(topics_module.ManagedLedger, "open", opened)
    asked = asyncio.create_task(one.client.get(TOPIC))
    await opening.wait()
    unloading = asyncio.create_task(unload(one))
    await settle()
    assert await two.store.exists(BUNDLE.owner_path) is not None
    go_on.set()
    await unloading
    assert (await asked).status_code == 200  # opened again, after the unload
    assert payloads((await two.client.get(f"{TOPIC}/messages")).json()["messages"]) == ["a"]


async def test_namespaces_with_other_bundles_are_served_and_unloaded(pair, tree):
    """A Pulsar broker has divided the namespace, and splits a bundle of it later."""
    one, two = pair
    make_namespaces(tree, "t/sixteen", bundles={"numBundles": 16})
    topics = [f"/v1/topics/t/sixteen/x{number**9}" for number in range(16)]
    for topic in topics:
        await one.produce("a", topic=topic)
    held = one.broker.ownership.held
    assert len(held) > 4
    assert {bundle.upper - bundle.lower for bundle in held} <= {2**28, 2**28 - 1}
    path = "/lookup/v2/topic/persistent/t/sixteen/x1/bundle"
    assert (await two.client.get(path)).text in {bundle.name for bundle in held}
    found = (await two.post("/v1/namespaces/t/sixteen/unload", {})).json()["bundles"]
    assert len(found) == 16
    assert sum(one["owner"] == "http://one" for one in found) == len(held)

    local = json.dumps({"bundles": {"numBundles": 32}}).encode()
    await two.store.create("/admin/local-policies/t/sixteen", local, make_parents=True)
    for topic in topics:
        await two.produce("b", topic=topic)
        assert (await one.client.get(topic)).json()["entries"] == 2
    assert {bundle.upper - bundle.lower for bundle in two.broker.ownership.held} <= {2**27, 2**27 - 1}
