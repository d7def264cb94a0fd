"""The schema of a topic over HTTP: any broker answers, also before the topic exists."""

import json
from collections.abc import AsyncIterator

import httpx
import pytest
from broker_harness import TOPIC, Harness, problem

SCHEMA = f"{TOPIC}/schema"


def avro(*fields: object, name: str = "A") -> dict[str, object]:
    return {"type": "record", "name": name, "fields": list(fields)}


INT = {"name": "n", "type": "int"}
OPTIONAL = {"name": "m", "type": ["null", "int"], "default": None}


@pytest.fixture
async def second(broker: Harness) -> AsyncIterator[Harness]:
    harness = Harness(tree=broker.tree, ledgers=broker.ledgers, clock=broker.clock, url="http://two")
    broker.peers["two"] = httpx.ASGITransport(app=harness.app)
    harness.peers["one"] = httpx.ASGITransport(app=broker.app)
    yield harness
    await harness.close()


async def test_an_uploaded_schema_is_shown_by_every_broker_and_makes_no_topic(broker, second):
    body = {"type": "AVRO", "definition": avro(INT), "properties": {"team": "a"}}
    answer = await broker.post(SCHEMA, body)
    assert (answer.status_code, answer.json()) == (201, {"version": 0, "created": True})
    answer = await second.post(SCHEMA, {**body, "definition": json.dumps(avro(INT), indent=2)})
    assert (answer.status_code, answer.json()) == (200, {"version": 0, "created": False})
    shown = (await second.client.get(SCHEMA)).json()
    assert json.loads(shown.pop("definition")) == avro(INT)
    assert shown == {"version": 0, "type": "AVRO", "properties": {"team": "a"}, "created_at": broker.clock.wall_ms}
    assert (await second.client.get(f"{SCHEMA}/versions/0")).json()["version"] == 0
    assert (await broker.client.get("/v1/topics")).json() == {"topics": []}
    assert broker.broker.ownership.held == second.broker.ownership.held == []


async def test_versions_and_their_deletion(broker):
    for fields in ([INT], [INT, OPTIONAL]):
        await broker.post(SCHEMA, {"type": "JSON", "definition": avro(*fields)})
    assert (await broker.client.get(f"{SCHEMA}/versions")).json() == {"versions": [0, 1]}
    problem(await broker.client.get(f"{SCHEMA}/versions/2"), status=404, code="no_such_schema")
    assert (await broker.client.delete(SCHEMA)).json() == {"version": 2}
    problem(await broker.client.get(SCHEMA), status=404, code="no_such_schema")
    problem(await broker.client.get(f"{SCHEMA}/versions/1"), status=404, code="no_such_schema")
    problem(await broker.client.delete(SCHEMA), status=404, code="no_such_schema")
    assert (await broker.client.delete(f"{SCHEMA}?force=true")).json() == {"version": 3}
    assert (await broker.post(SCHEMA, {"type": "STRING"})).json() == {"version": 4, "created": True}


async def test_an_incompatible_schema_is_a_conflict_with_the_reason(broker):
    await broker.post(SCHEMA, {"type": "AVRO", "definition": avro(INT)})
    wrong = {"type": "AVRO", "definition": avro({"name": "n", "type": "string"})}
    found = problem(await broker.post(SCHEMA, wrong), status=409, code="incompatible_schema")
    assert "version 0" in found["detail"]
    assert "/fields/0/type" in found["detail"]
    compared = (await broker.post(f"{SCHEMA}/compatibility", wrong)).json()
    assert (compared["compatible"], compared["strategy"], compared["version"]) == (False, "FULL", None)
    assert "/fields/0/type" in compared["reason"]
    right = {"type": "AVRO", "definition": avro(INT)}
    assert (await broker.post(f"{SCHEMA}/compatibility", right)).json() == {
        "compatible": True, "version": 0, "strategy": "FULL", "reason": None,
    }  # fmt: skip
    assert (await broker.client.get(f"{SCHEMA}/versions")).json() == {"versions": [0]}


async def test_the_strategy_is_a_policy(broker):
    policies = {"schema_compatibility": "ALWAYS_COMPATIBLE"}
    assert (await broker.client.put("/v1/namespaces/public/default/policies", json=policies)).status_code == 200
    await broker.post(SCHEMA, {"type": "AVRO", "definition": avro(INT)})
    assert (await broker.post(SCHEMA, {"type": "STRING"})).json() == {"version": 1, "created": True}


async def test_partitions_have_the_schema_of_their_topic(broker):
    await broker.post(f"{TOPIC}-partition-3/schema", {"type": "STRING"})
    assert (await broker.client.get(SCHEMA)).json()["type"] == "STRING"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"type": "AVRO", "definition": "{"}, "invalid_schema"),
        ({"type": "AVRO"}, "invalid_schema"),
        ({"type": "STRING", "definition": "x"}, "invalid_schema"),
        ({"type": "KEY_VALUE"}, "not_supported"),
        ({"type": "NONE"}, "bad_request"),
        ({"type": "string"}, "bad_request"),
        ({"type": "STRING", "colour": "red"}, "bad_request"),
        ({"type": "STRING", "properties": {"a": 1}}, "bad_request"),
        ({"definition": "x"}, "bad_request"),
        ([], "bad_request"),
    ],
)
@pytest.mark.parametrize("path", [SCHEMA, f"{SCHEMA}/compatibility"])
async def test_a_wrong_body_is_refused(broker, path, body, code):
    problem(await broker.post(path, body), status=400, code=code)
    assert (await broker.client.get(f"{SCHEMA}/versions")).json() == {"versions": []}


@pytest.mark.parametrize("path", [SCHEMA, f"{SCHEMA}/compatibility"])
async def test_a_body_must_be_json(broker, path):
    answer = await broker.client.post(path, content=b'{"type":"STRING"}', headers={"content-type": "text/plain"})
    problem(answer, status=415, code="unsupported_media_type")


@pytest.mark.parametrize("version", ["x", "-1", "1.5", str(2**63), ""])
async def test_a_wrong_version_is_refused(broker, version):
    answer = await broker.client.get(f"{SCHEMA}/versions/{version}")
    assert answer.status_code in (400, 200 if version == "" else 400)


async def test_a_definition_may_not_be_too_large(broker):
    answer = await broker.post(SCHEMA, {"type": "AVRO", "definition": " " * 200_000})
    assert problem(answer, status=413, code="too_large")["facts"]["size_max"] == 131_072


async def test_a_lost_schema_fails_checks_while_messages_flow(broker, second):
    await broker.post(SCHEMA, {"type": "AVRO", "definition": avro(INT)})
    for ledger_id in list(broker.ledgers.ledgers):
        await broker.broker.topics.client.delete(ledger_id)
    found = problem(
        await second.post(SCHEMA, {"type": "AVRO", "definition": avro(INT, OPTIONAL)}), status=500, code="corrupt"
    )
    assert "delete the schema" in found["detail"]
    problem(await second.client.get(SCHEMA), status=500, code="corrupt")
    assert len(await second.produce("a")) == 1
    assert [one["payload"] for one in await second.receive()] == ["a"]
    assert (await second.client.delete(SCHEMA)).json() == {"version": 1}
    assert (await second.post(SCHEMA, {"type": "STRING"})).json() == {"version": 2, "created": True}
