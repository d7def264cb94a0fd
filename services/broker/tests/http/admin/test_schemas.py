"""Pulsar's admin calls on schemas."""

import json

import pytest
from broker_harness import make_namespaces

S = "/admin/v2/schemas/public/default/t"
TOPIC = "/admin/v2/persistent/public/default/t"
V1 = "/v1/topics/public/default/t/schema"
JSON = {"content-type": "application/json"}


def avro(*fields):
    return json.dumps({"type": "record", "name": "R", "fields": list(fields)})


ONE = {"type": "AVRO", "schema": avro({"name": "a", "type": "int"}), "properties": {"k": "v"}}
TWO = {"type": "AVRO", "schema": avro({"name": "a", "type": "int"}, {"name": "b", "type": "int", "default": 0})}
OTHER = {"type": "AVRO", "schema": avro({"name": "a", "type": "string"})}


async def upload(broker, payload, path=S):
    answer = await broker.post(f"{path}/schema", payload)
    assert answer.status_code == 200, answer.text
    return answer.json()["version"]["version"]


async def test_versions_are_uploaded_shown_and_deleted(broker):
    assert (await broker.client.get(f"{S}/schema")).json() == {"reason": "Schema not found"}
    assert (await broker.client.get(f"{S}/schemas")).json() == {"getSchemaResponses": []}
    assert (await broker.client.get(f"{S}/metadata")).content == b""
    assert (await broker.client.delete(f"{S}/schema")).json() == {"version": -1}
    assert await upload(broker, ONE) == 0
    assert await upload(broker, ONE) == 0
    assert await upload(broker, TWO) == 1
    first = {
        "version": 0,
        "type": "AVRO",
        "timestamp": broker.clock.wall_ms,
        "data": ONE["schema"],
        "properties": {"k": "v"},
    }
    assert (await broker.client.get(f"{S}/schema/0")).json() == first
    newest = (await broker.client.get(f"{S}/schema")).json()
    assert (newest["version"], newest["data"], newest["properties"]) == (1, TWO["schema"], {})
    assert (await broker.client.get(f"{S}/schemas")).json() == {"getSchemaResponses": [first, newest]}
    stored = (await broker.client.get(f"{S}/metadata")).json()
    assert [entry["version"] for entry in stored["index"]] == [0, 1]
    assert stored["info"] == stored["index"][1]
    missing = await broker.client.get(f"{S}/schema/7")
    assert (missing.status_code, missing.json()) == (404, {"reason": "Schema not found"})
    assert (await broker.post(f"{S}/version", ONE)).json() == {"version": 0}
    assert (await broker.post(f"{S}/version", {**TWO, "schema": avro()})).json() == {"version": -1}
    assert (await broker.client.delete(f"{S}/schema")).json() == {"version": 2}
    assert (await broker.client.get(f"{S}/schema")).status_code == 404
    assert (await broker.client.get(f"{S}/schema/0")).status_code == 404
    assert await upload(broker, OTHER) == 3
    assert (await broker.client.delete(f"{S}/schema?force=true")).json() == {"version": 4}


async def test_compatibility_is_that_of_the_namespace(broker):
    await upload(broker, ONE)
    found = await broker.post(f"{S}/compatibility", TWO)
    assert (found.status_code, found.json()) == (202, {"compatibility": True, "schemaCompatibilityStrategy": "FULL"})
    for path in ("compatibility", "schema"):
        answer = await broker.post(f"{S}/{path}", OTHER)
        assert answer.status_code == 409
        assert "not compatible" in answer.json()["reason"]
    strategy = "/admin/v2/namespaces/public/default/schemaCompatibilityStrategy"
    assert (await broker.client.put(strategy, json="ALWAYS_COMPATIBLE")).status_code == 204
    assert await upload(broker, OTHER) == 1


@pytest.mark.parametrize(
    ("payload", "status", "reason"),
    [
        ({"type": "AVRO", "schema": "{"}, 422, "not JSON"),
        ({"type": "AVRO", "schema": '{"type": "recordx"}'}, 422, "not an Avro schema"),
        ({"type": "ODD", "schema": ""}, 422, "no such type of schema: ODD"),
        ({"type": "NONE", "schema": ""}, 422, "delete the schema instead"),
        ({"type": "KEY_VALUE", "schema": ""}, 400, "KEY_VALUE"),
        ({"type": "STRING", "schema": "\ud800"}, 400, ""),
        ({"type": "STRING"}, 400, "missing required field `schema`"),
        ([], 400, "body"),
        (None, 400, "body"),
    ],
)
async def test_a_wrong_schema_is_refused(broker, payload, status, reason):
    for path in ("schema", "compatibility", "version"):
        answer = await broker.client.post(f"{S}/{path}", content=json.dumps(payload), headers=JSON)
        assert answer.status_code == status, answer.text
        assert reason in answer.json()["reason"]
    assert (await broker.client.get(f"{S}/schemas")).json() == {"getSchemaResponses": []}


async def test_the_namespace_must_exist(broker, tree):
    missing = S.replace("default", "none")
    for path in ("schema", "compatibility", "version"):
        answer = await broker.post(f"{missing}/{path}", ONE)
        assert (answer.status_code, answer.json()) == (404, {"reason": "Namespace does not exist"})
    for path in (V1, f"{V1}/compatibility"):
        answer = await broker.post(path.replace("default", "none"), {"type": "STRING"})
        assert (answer.status_code, answer.json()["code"]) == (404, "no_such_namespace")
    make_namespaces(tree, "public/leaving", deleted=True)
    answer = await broker.post(V1.replace("default", "leaving"), {"type": "STRING"})
    assert answer.json()["code"] == "namespace_deleted"
    assert not [path for path in broker.znodes() if path.startswith("/schemas/")]


async def test_a_topic_is_deleted_with_its_schema(broker):
    await broker.client.put(TOPIC)
    await upload(broker, ONE)
    await upload(broker, TWO)
    ledgers = len(broker.ledgers.ledgers)
    assert (await broker.client.delete(TOPIC)).status_code == 204
    assert (await broker.client.get(f"{S}/schema")).status_code == 404
    assert not [path for path in broker.znodes() if path.startswith("/schemas/public/default/")]
    assert len(broker.ledgers.ledgers) < ledgers
    assert await upload(broker, OTHER) == 0


async def test_a_partitioned_topic_is_deleted_with_its_schema(broker):
    await broker.client.put(f"{TOPIC}/partitions", content="2")
    await upload(broker, ONE, S + "-partition-1")
    assert (await broker.client.get(f"{S}/schema")).json()["version"] == 0
    assert (await broker.client.delete(f"{TOPIC}-partition-1")).status_code == 204
    assert (await broker.client.get(f"{S}/schema")).status_code == 200
    assert (await broker.client.delete(f"{TOPIC}/partitions")).status_code == 204
    assert (await broker.client.get(f"{S}/schema")).status_code == 404
