"""Pulsar's admin calls on brokers, and calls that reach a broker that does not own the topic."""

import asyncio
import json

import httpx
import pytest
from bindery_broker.ownership.records import encode_broker, own_record
from bindery_core.version import VERSION
from broker_harness import Harness

P = "/admin/v2/persistent/public/default/t"
JSON = {"content-type": "application/json"}


@pytest.fixture
async def two(tree, ledgers, clock):
    one, other = (Harness(tree=tree, ledgers=ledgers, clock=clock, url=f"http://{name}") for name in ("one", "two"))
    for here, there in ((one, other), (other, one)):
        here.peers[there.client.base_url.host] = httpx.ASGITransport(app=there.app)
    yield one, other
    await one.close()
    await other.close()


async def test_any_broker_answers_for_the_owner(two):
    one, other = two
    assert (await one.client.put(P, headers=JSON)).status_code == 204
    assert (await other.client.get(f"{P}/stats")).json()["ownerBroker"] == "one"
    assert (await other.client.put(f"{P}/subscription/s", content='"earliest"', headers=JSON)).status_code == 204
    answer = await other.client.post(f"{P}/subscription/none/skip_all", headers=JSON)
    assert answer.status_code == 404
    assert answer.json() == {"reason": "Subscription none not found for topic persistent://public/default/t"}
    found = await other.client.get("/lookup/v2/topic/persistent/public/default/t")
    assert "http://one" in found.json()["reason"]
    moved = await other.client.get(f"{P}/stats?redirect=true")
    assert (moved.status_code, moved.headers["location"]) == (307, f"http://one{P}/stats?redirect=true")


async def test_live_brokers_are_listed(two):
    one, other = two
    health = await one.client.get("/admin/v2/brokers/health")
    assert (health.status_code, health.json()) == (
        500,
        {"reason": "the broker is not registered in the metadata store"},
    )
    for harness in two:
        assert await harness.broker.balancing.registration.register()
    assert (await one.client.get("/admin/v2/brokers")).json() == ["one", "two"]
    assert (await other.client.get("/admin/v2/brokers/bindery")).json() == ["one", "two"]
    assert (await other.client.get("/admin/v2/brokers/other")).json() == {"reason": "Cluster does not exist"}
    health = await one.client.get("/admin/v2/brokers/health")
    assert (health.text, health.headers["content-type"]) == ("ok", "text/plain")
    assert (await one.client.get("/admin/v2/brokers/ready")).text == "ok"
    assert (await one.client.get("/admin/v2/brokers/version")).text == VERSION
    assert (await one.client.get("/admin/v2/brokers/configuration/runtime")).json() == {"clusterName": "bindery"}
    await one.broker.balancing.drain()
    assert (await one.client.get("/admin/v2/brokers/health")).status_code == 500


async def test_owned_bundles_and_loaded_topics_are_shown(broker):
    await broker.client.put(P, headers=JSON)
    owned = (await broker.client.get("/admin/v2/brokers/bindery/one/ownedNamespaces")).json()
    state = {"broker_assignment": "shared", "is_controlled": False, "is_active": True}
    assert owned == {"public/default/0x80000000_0xc0000000": state}
    assert (await broker.client.get("/admin/v2/brokers/bindery/two/ownedNamespaces")).status_code == 404
    topics = (await broker.client.get("/admin/v2/broker-stats/topics")).json()
    ((name, stats),) = topics["public/default"]["0x80000000_0xc0000000"]["persistent"].items()
    assert (name, stats["msgInCounter"]) == ("persistent://public/default/t", 0)


async def test_the_bundles_of_another_broker_are_asked_for_there(two):
    one, _ = two
    for harness in two:
        assert await harness.broker.balancing.registration.register()
    # A registration whose address leads to another broker, and a broker of Pulsar.
    await one.store.create("/loadbalance/brokers/three", encode_broker(own_record("http://two")), ephemeral=True)
    record = {"webServiceUrl": "http://four:8080", "pulsarServiceUrl": "pulsar://four:6650"}
    await one.store.create("/loadbalance/brokers/four", json.dumps(record).encode(), ephemeral=True)
    for harness in two:
        harness.broker.balancing.brokers.start()
        while len(harness.broker.balancing.brokers.records) < 4:
            await asyncio.sleep(0)
    await one.client.put(P, headers=JSON)
    path = "/admin/v2/brokers/bindery/{}/ownedNamespaces"
    state = {"broker_assignment": "shared", "is_controlled": False, "is_active": True}
    owner, idle = ("one", "two") if one.broker.ownership.held else ("two", "one")
    for harness in two:
        answer = await harness.client.get(path.format(owner))
        assert (answer.status_code, answer.json()) == (200, {"public/default/0x80000000_0xc0000000": state})
        assert (await harness.client.get(path.format(idle))).json() == {}
    answer = await one.client.get(path.format("three:8080"))
    assert (answer.status_code, answer.json()) == (404, {"reason": "no broker three:8080 is live"})
    answer = await one.client.get(path.format("three"))
    assert (answer.status_code, answer.json()) == (404, {"reason": "this broker is two, not three"})
    answer = await one.client.get(path.format("four"))
    assert (answer.status_code, answer.headers["location"]) == (307, f"http://four:8080{path.format('four')}")
    for harness in two:
        await harness.broker.balancing.brokers.close()


async def test_clusters_are_shown(broker):
    assert (await broker.client.get("/admin/v2/clusters")).json() == ["bindery"]
    found = (await broker.client.get("/admin/v2/clusters/bindery")).json()
    assert found == {"serviceUrl": "http://one", "brokerServiceUrl": ""}
    assert (await broker.client.get("/admin/v2/clusters/x")).json() == {"reason": "Cluster does not exist"}


async def test_no_setting_can_be_changed_while_a_broker_runs(broker):
    base = "/admin/v2/brokers/configuration"
    assert (await broker.client.get(base)).json() == []
    assert (await broker.client.get(f"{base}/values")).json() == {}
    answer = await broker.client.post(f"{base}/clusterName/other", headers=JSON)
    assert (answer.status_code, answer.json()) == (412, {"reason": "Can't update non-dynamic configuration"})
    answer = await broker.client.delete(f"{base}/clusterName")
    assert (answer.status_code, answer.json()) == (412, {"reason": "Can't delete non-dynamic configuration"})


async def test_where_the_metadata_is_stored(broker):
    found = (await broker.client.get("/admin/v2/brokers/internal-configuration")).json()
    assert found["metadataStoreUrl"] == f"zk:{broker.settings.zookeeper}"
    assert found["ledgersRootPath"] == "/ledgers"


@pytest.mark.parametrize("stored", [None, b"", b"{", b"[]", b'{"serviceUrl": 1}', b"\xff"])
async def test_brokers_of_bindery_have_no_leader(broker, stored):
    if stored is not None:
        await broker.store.create("/loadbalance/leader", stored, make_parents=True)
    answer = await broker.client.get("/admin/v2/brokers/leaderBroker")
    assert answer.status_code == 404
    assert answer.json()["reason"].startswith("Couldn't find leader broker")


async def test_the_leader_of_pulsars_brokers_is_named(broker):
    stored = b'{"brokerId": "p:8080", "serviceUrl": "http://p:8080", "more": 1}'
    await broker.store.create("/loadbalance/leader", stored, make_parents=True)
    found = (await broker.client.get("/admin/v2/brokers/leaderBroker")).json()
    assert found == {"brokerId": "p:8080", "serviceUrl": "http://p:8080"}


async def test_a_broker_reports_its_bundles(broker):
    await broker.client.put(P, headers=JSON)
    found = (await broker.client.get("/admin/v2/broker-stats/load-report")).json()
    assert found["bundles"] == ["public/default/0x80000000_0xc0000000"]
    assert (found["webServiceUrl"], found["loadReportType"]) == ("http://one", "LocalBrokerData")
    assert (await broker.client.get("/admin/v2/brokers/backlog-quota-check")).status_code == 204


async def test_bookies_are_listed(broker):
    assert (await broker.client.get("/admin/v2/bookies/all")).json() == {"bookies": []}
    for path in ("b2", "b1", "readonly", "readonly/b3"):
        await broker.store.create(f"/ledgers/available/{path}", make_parents=True)
    found = (await broker.client.get("/admin/v2/bookies/all")).json()
    assert [one["bookieId"] for one in found["bookies"]] == ["b1", "b2", "b3"]
