"""Pulsar's admin calls on tenants, namespaces and the policies of a namespace."""

import pytest
from bindery_broker.namespaces import records

N = "/admin/v2/namespaces/public/default"
JSON = {"content-type": "application/json"}


@pytest.fixture
async def broker(broker):
    """With a policy that only Pulsar knows; the harness has made the namespace."""
    path = "/admin/policies/public/default"
    node = await broker.store.get(path)
    policies = records.decode(node.data, path=path) | {"of_pulsar_only": [1]}
    await broker.store.set(path, records.encode(policies), version=node.stat.version)
    return broker


async def test_tenants_and_namespaces_are_shown(broker):
    get = broker.client.get
    assert (await get("/admin/v2/tenants")).json() == ["public"]
    assert (await get("/admin/v2/tenants/public")).json() == {"adminRoles": [], "allowedClusters": ["bindery"]}
    assert (await get("/admin/v2/tenants/x")).json() == {"reason": "Tenant does not exist"}
    assert (await get("/admin/v2/namespaces/public")).json() == ["public/default"]
    assert (await get("/admin/v2/namespaces/x")).json() == {"reason": "Tenant not found"}
    assert (await get(N)).json()["replication_clusters"] == ["bindery"]
    assert (await get(f"{N}/bundles")).json()["numBundles"] == 4
    for path in ("", "/topics", "/retention"):
        answer = await get(f"/admin/v2/namespaces/public/x{path}")
        assert (answer.status_code, answer.json()) == (404, {"reason": "Namespace does not exist"})


async def test_tenants_are_created_changed_and_deleted(broker):
    put, post, delete = broker.client.put, broker.client.post, broker.client.delete
    path = "/admin/v2/tenants/shop"
    body = '{"adminRoles": ["b", "a"], "allowedClusters": ["bindery"]}'
    assert (await put(path, content=body, headers=JSON)).status_code == 204
    assert (await broker.client.get(path)).json() == {"adminRoles": ["a", "b"], "allowedClusters": ["bindery"]}
    assert (await put(path, content=body, headers=JSON)).json() == {"reason": "Tenant already exist"}
    assert (await post(path, content='{"adminRoles": ["c"]}', headers=JSON)).status_code == 204
    assert (await broker.client.get(path)).json() == {"adminRoles": ["c"], "allowedClusters": ["bindery"]}
    refused = await put("/admin/v2/tenants/x", content='{"allowedClusters": ["mars"]}', headers=JSON)
    assert (refused.status_code, refused.json()) == (412, {"reason": "Clusters do not exist: mars"})
    assert (await put("/admin/v2/tenants/a%20b", content="{}", headers=JSON)).status_code == 412
    assert (await broker.client.get("/admin/v2/tenants")).json() == ["public", "shop"]
    assert (await put("/admin/v2/namespaces/shop/n")).status_code == 204
    refused = await delete(path)
    assert (refused.status_code, refused.json()) == (409, {"reason": "The tenant still has active namespaces"})
    assert (await delete("/admin/v2/namespaces/shop/n")).status_code == 204
    assert (await delete(path)).status_code == 204
    assert (await delete(path)).json() == {"reason": "Tenant doesn't exist"}
    assert (await post(path, content="{}", headers=JSON)).json() == {"reason": "Tenant does not exist"}


async def test_a_tenant_is_deleted_with_its_topics_by_force(broker):
    assert (await broker.client.put("/admin/v2/tenants/shop")).status_code == 204
    assert (await broker.client.put("/admin/v2/namespaces/shop/n")).status_code == 204
    assert (await broker.client.post("/v1/topics/shop/n/t/messages", content=b"a")).status_code == 200
    refused = await broker.client.delete("/admin/v2/namespaces/shop/n")
    assert (refused.status_code, refused.json()) == (409, {"reason": "Cannot delete non empty namespace"})
    assert (await broker.client.delete("/admin/v2/tenants/shop?force=true")).status_code == 204
    assert (await broker.client.get("/admin/v2/tenants")).json() == ["public"]
    assert (await broker.client.post("/v1/topics/shop/n/t/messages", content=b"a")).status_code == 404


async def test_a_namespace_is_created_with_policies(broker):
    put, path = broker.client.put, "/admin/v2/namespaces/public/fresh"
    body = '{"bundles": {"numBundles": 3}, "message_ttl_in_seconds": 7, "properties": {}, "of_pulsar_only": 1}'
    assert (await put(path, content=body, headers=JSON)).status_code == 204
    found = (await broker.client.get(path)).json()
    assert (found["message_ttl_in_seconds"], found["of_pulsar_only"], "properties" in found) == (7, 1, False)
    thirds = {"boundaries": ["0x00000000", "0x55555555", "0xaaaaaaaa", "0xffffffff"], "numBundles": 3}
    assert found["bundles"] == thirds
    assert (await broker.client.get(f"{path}/bundles")).json() == thirds
    assert (await put(path)).json() == {"reason": "Namespace already exists"}
    missing = await put("/admin/v2/namespaces/none/n")
    assert (missing.status_code, missing.json()) == (404, {"reason": "Tenant does not exist"})
    other = "/admin/v2/namespaces/public/other"
    assert (await put(other, content='{"message_ttl_in_seconds": "x"}', headers=JSON)).status_code == 412
    halves = '{"bundles": {"numBundles": 1, "boundaries": ["0x00000000", "0x80000000"]}}'
    refused = await put(other, content=halves, headers=JSON)
    reason = "Input bundles do not cover the whole hash range. first:0x00000000, last:0x80000000"
    assert (refused.status_code, refused.json()) == (400, {"reason": reason})
    assert (await put(other, content='{"bundles": {"numBundles": 5000}}', headers=JSON)).status_code == 400
    assert (await broker.client.get("/admin/v2/namespaces/public/other")).status_code == 404
    gone = await broker.client.delete("/admin/v2/namespaces/public/other")
    assert (gone.status_code, gone.json()) == (404, {"reason": "Namespace public/other does not exist."})


async def test_topics_of_a_namespace_are_listed(broker):
    await broker.produce("a")
    assert (await broker.client.get(f"{N}/topics")).json() == ["persistent://public/default/t"]
    assert (await broker.client.get(f"{N}/topics?mode=NON_PERSISTENT")).json() == []


@pytest.mark.parametrize(
    ("name", "value", "method"),
    [
        ("retention", '{"retentionTimeInMinutes":60,"retentionSizeInMB":100}', "POST"),
        ("messageTTL", "3600", "POST"),
        ("deduplication", "true", "POST"),
        ("persistence", '{"bookkeeperEnsemble":2,"bookkeeperWriteQuorum":2,"bookkeeperAckQuorum":2}', "POST"),
        ("autoTopicCreation", '{"allowAutoTopicCreation":true,"topicType":"non-partitioned"}', "POST"),
        ("autoSubscriptionCreation", '{"allowAutoSubscriptionCreation":false}', "POST"),
        ("delayedDelivery", '{"tickTime":1000,"active":true,"maxDeliveryDelayInMillis":0}', "POST"),
        ("subscriptionExpirationTime", "60", "POST"),
        ("maxProducersPerTopic", "5", "POST"),
        ("maxConsumersPerTopic", "5", "POST"),
        ("maxConsumersPerSubscription", "5", "POST"),
        ("maxSubscriptionsPerTopic", "5", "POST"),
        ("maxTopicsPerNamespace", "5", "POST"),
        ("maxUnackedMessagesPerConsumer", "5", "POST"),
        ("maxUnackedMessagesPerSubscription", "5", "POST"),
        ("compactionThreshold", "1048576", "PUT"),
    ],
)
async def test_a_policy_is_set_read_and_removed(broker, name, value, method):
    path = f"{N}/{name}"
    before = (await broker.client.get(N)).json()
    assert (await broker.client.get(path)).status_code == 204
    assert (await broker.client.request(method, path, content=value, headers=JSON)).status_code == 204
    assert (await broker.client.get(path)).text.strip() == value
    assert (await broker.client.delete(path)).status_code == 204
    assert (await broker.client.get(path)).status_code == 204
    assert (await broker.client.get(N)).json() == before
    assert before["of_pulsar_only"] == [1]


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [("messageTTL", '"x"', 400), ("retention", "5", 400), ("retention", '{"retentionTimeInMinutes":"x"}', 412)],
)
async def test_a_wrong_policy_is_refused_and_changes_nothing(broker, name, value, status):
    before = (await broker.client.get(N)).json()
    answer = await broker.client.post(f"{N}/{name}", content=value, headers=JSON)
    assert (answer.status_code, set(answer.json())) == (status, {"reason"})
    assert (await broker.client.get(N)).json() == before
