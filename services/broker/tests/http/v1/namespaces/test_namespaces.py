"""Tenants and namespaces over HTTP, and that topics need a namespace."""

import asyncio
import json

import pytest
from bindery_broker.namespaces.policies import EffectivePolicies
from bindery_broker.namespaces.records import BUNDLES_MAX
from bindery_core.errors import MetadataUnavailable
from broker_harness import TOPIC, Harness, make_namespaces, payloads, problem

IN_N = "/v1/topics/t/n/x"


async def make(broker, name="t/n", **body):
    tenant = name.partition("/")[0]
    assert (await broker.client.put(f"/v1/tenants/{tenant}", json={})).status_code in (200, 201)
    answer = await broker.client.put(f"/v1/namespaces/{name}", json=body)
    assert answer.status_code == 201, answer.text


async def test_a_tenant_is_created_changed_and_deleted(broker):
    answer = await broker.client.put("/v1/tenants/t", json={"admin_roles": ["b", "a"]})
    assert answer.status_code == 201
    assert answer.json() == {"tenant": "t", "admin_roles": ["a", "b"], "allowed_clusters": ["bindery"]}
    answer = await broker.client.put("/v1/tenants/t", json={"allowed_clusters": ["other"]})
    assert answer.status_code == 200
    assert answer.json() == {"tenant": "t", "admin_roles": ["a", "b"], "allowed_clusters": ["other"]}
    assert (await broker.client.get("/v1/tenants/t")).json() == answer.json()
    assert json.loads(broker.znodes()["/admin/policies/t"][0]) == {
        "adminRoles": ["a", "b"],
        "allowedClusters": ["other"],
    }
    assert (await broker.client.get("/v1/tenants")).json() == {"tenants": ["public", "t"]}
    assert (await broker.client.get("/v1/tenants?max=1")).json() == {"tenants": ["public"], "next": "public"}
    assert (await broker.client.get("/v1/tenants?after=public")).json() == {"tenants": ["t"]}
    assert (await broker.client.delete("/v1/tenants/t")).json() == {"deleted": "t"}
    for method in ("GET", "DELETE"):
        found = problem(await broker.client.request(method, "/v1/tenants/t"), status=404, code="no_such_tenant")
        assert "bindery tenants create t" in found["detail"]


async def test_a_tenant_with_namespaces_is_not_deleted(broker):
    await make(broker)
    found = problem(await broker.client.delete("/v1/tenants/t"), status=409, code="tenant_not_empty")
    assert found["facts"]["namespaces"] == ["n"]
    assert (await broker.client.delete("/v1/namespaces/t/n")).status_code == 200
    assert (await broker.client.delete("/v1/tenants/t")).status_code == 200


async def test_a_namespace_is_created_listed_and_shown(broker):
    found = await broker.client.put("/v1/namespaces/t/n", json={})
    problem(found, status=404, code="no_such_tenant")
    await make(broker, policies={"message_ttl_s": 60})
    again = await broker.client.put("/v1/namespaces/t/n", json={"policies": {"message_ttl_s": 5}})
    assert (again.status_code, again.json()) == (200, {"namespace": "t/n", "created": False})
    assert (await broker.client.get("/v1/namespaces/t/n")).json() == {
        "namespace": "t/n",
        "policies": {"message_ttl_s": 60},
        "bundles": 4,
        "topics": 0,
        "deleted": False,
    }
    assert (await broker.client.get("/v1/namespaces")).json() == {"namespaces": ["public/default", "t/n"]}
    assert (await broker.client.get("/v1/namespaces/t")).json() == {"namespaces": ["t/n"]}
    problem(await broker.client.get("/v1/namespaces/missing"), status=404, code="no_such_tenant")
    problem(await broker.client.get("/v1/namespaces/t/missing"), status=404, code="no_such_namespace")
    stored = json.loads(broker.znodes()["/admin/policies/t/n"][0])
    assert stored == {
        "replication_clusters": ["bindery"],
        "bundles": {
            "boundaries": ["0x00000000", "0x40000000", "0x80000000", "0xc0000000", "0xffffffff"],
            "numBundles": 4,
        },
        "message_ttl_in_seconds": 60,
    }


async def test_pages_of_namespaces_follow_one_another(broker):
    expected = ["public/default"]
    for tenant in ("a", "a-b", "b"):
        for number in range(3):
            make_namespaces(broker.tree, f"{tenant}/n{number}")
            expected.append(f"{tenant}/n{number}")
    expected.sort(key=lambda name: name.split("/"))
    seen, after = [], ""
    while True:
        page = (await broker.client.get(f"/v1/namespaces?max=2{after}")).json()
        seen += page["namespaces"]
        if "next" not in page:
            break
        after = f"&after={page['next']}"
    assert seen == expected


@pytest.mark.parametrize("name", ["t/a b", "t/" + "x" * 200, "..%2F/n"])
async def test_names_that_no_path_can_hold_are_refused(broker, name):
    make_namespaces(broker.tree, "t/n")
    answer = await broker.client.put(f"/v1/namespaces/{name}", json={})
    assert answer.status_code in (400, 404, 413), answer.text
    assert [path for path in broker.znodes() if path.startswith("/admin/policies/t/")] == ["/admin/policies/t/n"]


async def test_a_namespace_has_the_number_of_bundles_that_it_was_created_with(broker):
    await broker.client.put("/v1/tenants/t", json={})
    for wrong in (0, -1, BUNDLES_MAX + 1, "x"):
        problem(await broker.client.put("/v1/namespaces/t/n", json={"bundles": wrong}), status=400, code="bad_request")
    assert (await broker.client.put("/v1/namespaces/t/n", json={"bundles": 3})).status_code == 201
    assert (await broker.client.get("/v1/namespaces/t/n")).json()["bundles"] == 3
    stored = json.loads(broker.znodes()["/admin/policies/t/n"][0])["bundles"]
    assert stored == {"boundaries": ["0x00000000", "0x55555555", "0xaaaaaaaa", "0xffffffff"], "numBundles": 3}
    for local in "abcdefgh":
        await broker.produce("m", topic=f"/v1/topics/t/n/{local}")
    names = {"0x00000000_0x55555555", "0x55555555_0xaaaaaaaa", "0xaaaaaaaa_0xffffffff"}
    assert {bundle.name for bundle in broker.broker.ownership.held} == names
    assert (await broker.client.put("/v1/namespaces/t/n", json={"bundles": 9})).json()["created"] is False
    assert (await broker.client.get("/v1/namespaces/t/n")).json()["bundles"] == 3


@pytest.mark.parametrize("path", ["/v1/tenants/t", "/v1/namespaces/t/n", "/v1/namespaces/t/n/policies"])
async def test_a_body_must_be_json(broker, path):
    make_namespaces(broker.tree, "t/n")
    before = broker.znodes()
    answer = await broker.client.put(path, content=b"{}", headers={"content-type": "text/plain"})
    problem(answer, status=415, code="unsupported_media_type")
    problem(await broker.client.put(path, json=[]), status=400, code="bad_request")
    assert broker.znodes() == before


# -- topics need a namespace ---------------------------------------------------------------------------------------


async def test_a_typo_makes_no_namespace_and_takes_no_bundle(broker):
    before = broker.znodes()
    receive = {"consumer": "c", "wait_ms": 0}
    for answer in (
        await broker.client.post(f"{IN_N}/messages", content=b"x"),
        await broker.client.put(IN_N),
        await broker.client.post(f"{IN_N}/subscriptions/s/receive", json=receive),
        await broker.client.put(f"{IN_N}/subscriptions/s", json={}),
    ):
        found = problem(answer, status=404, code="no_such_namespace")
        assert "bindery namespaces create t/n" in found["detail"]
    assert broker.znodes() == before
    assert broker.broker.ownership.held == []
    await make(broker)
    await broker.produce("a", topic=IN_N)
    assert payloads(await broker.receive(topic=IN_N)) == ["a"]


async def test_topics_of_an_older_cluster_work_without_policies_of_their_namespace(broker, tree, ledgers, clock):
    make_namespaces(tree, "t/n")
    await broker.produce("a", topic=IN_N)
    await broker.close()
    store = tree.connect()
    await store.delete("/admin/policies/t/n", version=None)
    other = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://two")
    await other.produce("b", topic=IN_N)
    assert payloads(await other.receive(topic=IN_N)) == ["a", "b"]
    problem(await other.client.put("/v1/topics/t/n/new"), status=404, code="no_such_namespace")
    await other.close()
    await store.close()


async def test_topics_are_created_as_the_policies_of_the_namespace_say(broker):
    await make(broker, policies={"auto_create_topics": False, "auto_create_subscriptions": False})
    problem(await broker.client.post(f"{IN_N}/messages", content=b"x"), status=404, code="no_such_topic")
    assert (await broker.client.put(IN_N)).status_code == 201
    await broker.produce("a", topic=IN_N)
    problem(await broker.receive_raw(topic=IN_N), status=404, code="no_such_subscription")
    await broker.client.put(f"{IN_N}/subscriptions/s", json={})
    assert payloads(await broker.receive(topic=IN_N)) == ["a"]


async def test_a_namespace_overrides_that_brokers_create_no_topics(tree, ledgers, clock):
    make_namespaces(tree, "t/n", autoTopicCreationOverride={"allowAutoTopicCreation": True})
    broker = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://one", auto_create_topics=False)
    problem(await broker.client.post(f"{TOPIC}/messages", content=b"x"), status=404, code="no_such_topic")
    await broker.produce("a", topic=IN_N)
    await broker.close()


async def test_the_number_of_topics_of_a_namespace_is_limited(broker):
    await make(broker, policies={"topics_per_namespace_max": 2})
    for number in range(2):
        await broker.produce("a", topic=f"/v1/topics/t/n/{number}")
    answer = await broker.client.post("/v1/topics/t/n/third/messages", content=b"x")
    assert problem(answer, status=409, code="too_many_topics")["facts"]["topics_per_namespace_max"] == 2
    await broker.produce("b", topic="/v1/topics/t/n/0")


# -- deletion ------------------------------------------------------------------------------------------------------


async def test_a_namespace_with_topics_is_deleted_only_with_force(broker):
    await make(broker)
    await broker.produce("a", topic=IN_N)
    await broker.receive(topic=IN_N)
    found = problem(await broker.client.delete("/v1/namespaces/t/n"), status=409, code="namespace_not_empty")
    assert (found["facts"]["count"], found["facts"]["topics"]) == (1, ["x"])
    await broker.produce("b", topic="/v1/topics/t/n/new")
    answer = await broker.client.delete("/v1/namespaces/t/n?force=true")
    assert answer.json() == {"deleted": "t/n", "topics": ["t/n/new", "t/n/x"]}
    assert not [path for path in broker.znodes() if path.startswith(("/admin/policies/t/", "/managed-ledgers/t/n"))]
    assert not [ledger for ledger in broker.ledgers.ledgers.values() if not ledger.deleted]
    problem(await broker.client.post(f"{IN_N}/messages", content=b"x"), status=404, code="no_such_namespace")
    problem(await broker.client.delete("/v1/namespaces/t/n"), status=404, code="no_such_namespace")


async def test_a_deletion_reaches_the_topics_of_other_brokers(broker, tree, ledgers, clock):
    other = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://two")
    broker.peers["two"] = other.client._transport
    await make(broker)
    for number in range(8):
        await (broker if number % 2 else other).client.put(f"/v1/topics/t/n/{number}")
    answer = await broker.client.delete("/v1/namespaces/t/n?force=true")
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["topics"]) == len(set(answer.json()["topics"])) == 8
    assert not [path for path in broker.znodes() if path.startswith("/managed-ledgers/t/n")]
    await other.close()


async def test_a_deletion_that_failed_is_continued_and_no_topic_is_created_meanwhile(broker, monkeypatch):
    await make(broker)
    await broker.produce("a", topic=IN_N)
    topics = broker.broker.topics
    whole = topics.delete

    async def fail(name, *, force):
        raise MetadataUnavailable("made up")

    monkeypatch.setattr(topics, "delete", fail)
    answer = await broker.client.delete("/v1/namespaces/t/n?force=true")
    problem(answer, status=503, code="metadata_unavailable")
    assert (await broker.client.get("/v1/namespaces/t/n")).json()["deleted"] is True
    problem(await broker.client.put("/v1/topics/t/n/new"), status=409, code="namespace_deleted")
    problem(await broker.client.put("/v1/namespaces/t/n", json={}), status=409, code="namespace_deleted")
    answer = await broker.client.put("/v1/namespaces/t/n/policies", json={"message_ttl_s": 1})
    problem(answer, status=409, code="namespace_deleted")
    monkeypatch.setattr(topics, "delete", whole)
    problem(await broker.client.delete("/v1/namespaces/t/n"), status=409, code="namespace_not_empty")
    assert (await broker.client.get("/v1/namespaces/t/n")).json()["deleted"] is True
    assert (await broker.client.delete("/v1/namespaces/t/n?force=true")).json()["topics"] == ["t/n/x"]
    await make(broker)


async def test_the_policies_of_its_topics_are_deleted_with_a_namespace(broker):
    await make(broker)
    await broker.client.put(IN_N)
    assert (await broker.client.put(f"{IN_N}/policies", json={"producers_max": 1})).status_code == 200
    assert (await broker.client.delete(IN_N)).status_code == 200
    assert not [path for path in broker.znodes() if path.startswith("/bindery/topic-policies/t")]
    await broker.client.put(IN_N)
    await broker.client.put(f"{IN_N}/policies", json={"producers_max": 1})
    assert (await broker.client.delete("/v1/namespaces/t/n?force=true")).status_code == 200
    assert not [path for path in broker.znodes() if path.startswith("/bindery/topic-policies/t")]


# -- policies ------------------------------------------------------------------------------------------------------


async def test_policies_of_a_namespace_are_merged_replaced_and_removed(broker):
    await make(broker)
    path = "/v1/namespaces/t/n/policies"
    retention = {"time_s": 3600, "size_max": None}
    answer = await broker.client.put(path, json={"message_ttl_s": 60, "retention": retention})
    assert answer.json() == {"policies": {"message_ttl_s": 60, "retention": retention}}
    answer = await broker.client.put(path, json={"message_ttl_s": None, "inactive_topics": "none"})
    assert answer.json() == {"policies": {"retention": retention, "inactive_topics": "none"}}
    answer = await broker.client.put(f"{path}?mode=replace", json={"producers_max": 2})
    assert answer.json() == {"policies": {"producers_max": 2}} == (await broker.client.get(path)).json()
    assert (await broker.client.delete(f"{path}/producers_max")).json() == {"policies": {}}
    answer = await broker.client.delete(f"{path}/producers")
    assert "producers_max" in problem(answer, status=400, code="invalid_policy")["facts"]["policies"]


async def test_a_change_applies_at_once_to_loaded_topics_and_on_other_brokers(broker, tree, ledgers, clock):
    other = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://two")
    await make(broker)
    await broker.produce("a", topic=IN_N)
    (topic,) = broker.broker.topics
    assert topic.policies.message_ttl_s == 0
    await broker.client.put("/v1/namespaces/t/n/policies", json={"message_ttl_s": 60})
    assert topic.policies.message_ttl_s == 60
    await other.client.put(f"{IN_N}/policies", json={"message_ttl_s": 5})
    async with asyncio.timeout(10):
        while topic.policies.message_ttl_s != 5:
            await asyncio.sleep(0)
    await other.close()


async def test_policies_in_force_have_their_sources(broker):
    await make(broker, policies={"message_ttl_s": 60, "producers_max": 3})
    await broker.client.put(IN_N)
    answer = await broker.client.put(f"{IN_N}/policies", json={"producers_max": 1, "dispatch_rate": "none"})
    assert answer.json() == {"policies": {"producers_max": 1, "dispatch_rate": "none"}}
    found = (await broker.client.get(f"{IN_N}/policies?effective=true")).json()
    assert found["topic"] == "t/n/x"
    effective = found["effective"]
    assert list(effective) == list(EffectivePolicies.__dataclass_fields__)
    assert effective["producers_max"] == {"value": 1, "source": "topic"}
    assert effective["dispatch_rate"] == {"value": None, "source": "topic"}
    assert effective["message_ttl_s"] == {"value": 60, "source": "namespace"}
    assert effective["unacked_per_consumer_max"] == {"value": 10_000, "source": "broker"}
    assert effective["subscription_types"]["value"] == ["exclusive", "failover", "key_shared", "shared"]
    assert (await broker.client.get(f"{IN_N}/policies")).json() == answer.json()
    answer = await broker.client.delete(f"{IN_N}/policies/producers_max")
    assert answer.json() == {"policies": {"dispatch_rate": "none"}}
    for method in ("GET", "PUT"):
        answer = await broker.client.request(method, "/v1/topics/t/n/missing/policies", json={})
        problem(answer, status=404, code="no_such_topic")
    answer = await broker.client.put(f"{IN_N}/policies", json={"topics_per_namespace_max": 1})
    assert "a topic cannot set this policy" in problem(answer, status=400, code="invalid_policy")["detail"]
