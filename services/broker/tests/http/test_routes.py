"""The operation that handles a path, found by the hot routes or by FastAPI."""

import subprocess
import sys

import pytest
from bindery_broker.http.route import HotRoute
from bindery_broker.http.v1 import paths
from bindery_broker.http.v1.namespaces import models
from bindery_broker.http.v1.upkeep.draining import DRAIN
from broker_harness import ROUTES, TOPIC, problem
from starlette.routing import Match

ANY_TOPIC = paths.TOPIC
PRODUCE = f"{ANY_TOPIC}/messages"
SUBSCRIPTION = paths.SUBSCRIPTION
TYPES_OF_WEB_PAGES = [
    None,
    "",
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "text/plain; application/json",
    "text/plain, application/json",
    "application/jsonp",
    "application/problem+json",
    "application/json|text/plain",
    "text/plain|application/json",
    "application/json|application/json",
]
"""Values of Content-Type that a foreign page can send unasked, or that could be mistaken for JSON. `|`: two headers."""
HOT = [route for route in ROUTES if isinstance(route, HotRoute)]


def fill(template: str) -> str:
    return template.format(
        tenant="t",
        namespace="n",
        topic="x%20y",
        subscription="s%2Fu",
        consumer="c",
        message_id="1%3A2",
        producer="p",
        version="7",
        local="x%20y",
        policy="message_ttl_s",
        role="clerk",
        broker="b:8080",
    )


def test_produce_and_consume_operations_are_hot():
    assert {route.operation_id for route in HOT} == {
        "produce",
        "receive",
        "ack",
        "nack",
        "retry",
        "stream",
        "storeCopies",
    }


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.operation_id)
def test_each_route_is_found_by_its_template_and_by_no_other(route):
    (method,) = route.methods
    scope = {"type": "http", "method": method, "path": fill(route.path_format)}
    matches = [(found, *found.matches(scope)) for found in ROUTES]
    ((only, _, child),) = [match for match in matches if match[1] is Match.FULL]
    assert only is route
    params = child["path_params"]
    assert params.get("topic", "x y") == "x y"
    assert params.get("subscription", "s/u") == "s/u"
    assert params.get("message_id", "1:2") == "1:2"


async def test_a_fixed_segment_has_precedence_over_a_parameter(broker):
    await broker.produce("a")
    assert "lastConfirmedEntry" in (await broker.client.get(f"{TOPIC}/internal")).json()


async def test_a_trailing_slash_is_ignored(broker):
    assert (await broker.client.get("/v1/topics/")).json() == {"topics": []}
    assert (await broker.client.post(f"{TOPIC}/messages/", content=b"x")).status_code == 200
    assert (await broker.client.get(f"{TOPIC}/")).json()["entries"] == 1


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", f"{TOPIC}/messages", "GET, POST"),
        ("POST", TOPIC, "DELETE, GET, PUT"),
        ("POST", "/v1/topics", "GET"),
        ("HEAD", f"{TOPIC}/subscriptions/s/stream", "GET"),
        ("HEAD", f"{TOPIC}/subscriptions/s/ack", "POST"),
        ("POST", "/docs", "GET"),
    ],
)
async def test_an_unsupported_method_is_refused_with_the_supported_ones(broker, method, path, allowed):
    answer = await broker.client.request(method, path)
    assert answer.status_code == 405
    assert answer.headers["allow"] == allowed
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("query", ["redirect=maybe", "colour=red", "redirect=true&redirect=true", "redirect=%FF"])
@pytest.mark.parametrize(("method", "path"), [("GET", TOPIC), ("PUT", f"{TOPIC}/subscriptions/s"), ("DELETE", TOPIC)])
async def test_a_wrong_query_is_refused_by_ordinary_operations_too(broker, method, path, query):
    await broker.produce("a")
    body = {} if method == "PUT" else None
    problem(await broker.client.request(method, f"{path}?{query}", json=body), status=400, code="bad_request")


JSON_ROUTES = [
    ("PUT", "", b"{}"),
    ("POST", "/receive", b'{"consumer":"c","wait_ms":0}'),
    ("POST", "/ack", b'{"message_ids":["0:0"]}'),
    ("POST", "/nack", b'{"message_ids":["0:0"]}'),
    ("POST", "/retry", b'{"message_ids":["0:0"]}'),
    ("POST", "/seek", b'{"message_id":"earliest"}'),
    ("POST", "/reset", b'{"initial":"earliest"}'),
    ("POST", "/skip", b'{"entries":1}'),
    ("POST", "/expire", b'{"older_than_ms":1}'),
    ("POST", "/clear", b"{}"),
    ("POST", "/dead-letters/redrive", b"{}"),
    ("POST", "/dead-letters/purge", b"{}"),
    ("POST", "/unknown", b'{"message_ids":["0:0"]}'),
    ("POST", "/hand-back", b'{"consumer":"c","request_id":"a"}'),
    ("POST", "/held", b'{"consumer":"c","request_id":"a"}'),
]


def test_the_list_of_json_routes_is_complete():
    found = {(method, route.path.removeprefix(SUBSCRIPTION)) for route in ROUTES for method in route.methods - {"GET"}}
    assert {(method, path) for method, path, _ in JSON_ROUTES} | {
        ("POST", PRODUCE),
        ("PUT", ANY_TOPIC),
        ("DELETE", ANY_TOPIC),
        ("DELETE", ""),
        ("DELETE", ANY_TOPIC + "/messages/{message_id:segment}"),
        ("DELETE", "/consumers/{consumer:segment}"),
        ("PUT", ANY_TOPIC + "/producers/{producer:segment}/access"),  # its content type: test_exclusive_producers
        ("DELETE", ANY_TOPIC + "/producers/{producer:segment}/access"),
        ("PUT", ANY_TOPIC + "/partitions"),  # its content type: test_lifecycle of partitioned topics
        ("DELETE", ANY_TOPIC + "/partitions"),
        ("POST", ANY_TOPIC + "/moves"),  # its content type: test_moves_to_peers
        ("POST", ANY_TOPIC + "/moves/copies"),
        ("POST", ANY_TOPIC + "/schema"),  # their content types: test_schema_registry
        ("POST", ANY_TOPIC + "/schema/compatibility"),
        ("DELETE", ANY_TOPIC + "/schema"),
        ("PUT", ANY_TOPIC + "/compaction"),
        ("POST", ANY_TOPIC + "/unload"),  # their content types: test_unloading
        ("POST", models.NAMESPACE + "/unload"),
        ("POST", models.NAMESPACE + "/split"),  # its content type: test_bundles
        ("POST", models.NAMESPACE + "/take"),
        ("POST", DRAIN),
        ("POST", DRAIN.replace("drain", "undrain")),
        *((method, path) for path in (models.TENANT, models.NAMESPACE) for method in ("PUT", "DELETE")),
        *(("PUT", path) for path in (models.POLICIES, models.TOPIC_POLICIES)),  # test_namespaces, test_policies
        *(("DELETE", path) for path in (models.POLICY, models.TOPIC_POLICY)),
        *((m, path) for path in (models.NAMESPACE_PERMISSION, models.TOPIC_PERMISSION) for m in ("PUT", "DELETE")),
    } == found


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=utf-8"])
async def test_a_json_body_is_accepted_with_its_content_type(broker, content_type):
    headers = {"content-type": content_type}
    answer = await broker.client.put(f"{TOPIC}/subscriptions/s", content=b'{"initial":"latest"}', headers=headers)
    assert (answer.status_code, answer.json()["created"]) == (201, True)
    assert answer.content.endswith(b"\n")


@pytest.mark.parametrize("content_type", TYPES_OF_WEB_PAGES, ids=str)
@pytest.mark.parametrize(("method", "path", "body"), JSON_ROUTES)
async def test_a_json_body_with_a_content_type_that_web_pages_can_send_changes_nothing(
    broker, method, path, body, content_type
):
    await broker.produce("a")
    await broker.receive(sub="other")
    topic = next(iter(broker.broker.topics))
    before = (set(topic.subscriptions), topic.ledger.internal_stats())
    headers = [] if content_type is None else [("content-type", one) for one in content_type.split("|")]
    answer = await broker.client.request(method, f"{TOPIC}/subscriptions/s{path}", content=body, headers=headers)
    found = problem(answer, status=415, code="unsupported_media_type")
    assert "-H 'Content-Type: application/json'" in found["detail"]
    assert (set(topic.subscriptions), topic.ledger.internal_stats()) == before
    answer = await broker.client.request(
        method, f"{TOPIC}/subscriptions/s{path}", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code != 415


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip", "GZIP", "x"])
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [*((method, f"/subscriptions/s{path}", body) for method, path, body in JSON_ROUTES), ("POST", "/messages", b"a")],
)
async def test_an_encoded_body_is_refused(broker, method, path, body, encoding):
    await broker.produce("a")
    headers = {"content-type": "application/json", "content-encoding": encoding}
    answer = await broker.client.request(method, TOPIC + path, content=body, headers=headers)
    found = problem(answer, status=415, code="unsupported_media_type")
    assert "without Content-Encoding" in found["detail"]
    (topic,) = broker.broker.topics
    assert (topic.ledger.entries_count, dict(topic.subscriptions)) == (1, {})


async def test_wrong_fields_of_ordinary_bodies_are_named(broker):
    answer = await broker.client.put(f"{TOPIC}/subscriptions/s", json={"initial": 5, "colour": "red"})
    found = problem(answer, status=400, code="bad_request")
    assert {error["where"] for error in found["errors"]} == {"body.initial", "body.colour"}


GETS = [route for route in ROUTES if "GET" in route.methods]
QUERIES = {"stream": "?consumer=c&session_ttl_ms=1000"}


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("route", GETS, ids=lambda route: route.operation_id)
async def test_safe_methods_create_no_topic_and_take_no_bundle(broker, route, method):
    before = (broker.znodes(), set(broker.ledgers.ledgers))
    answer = await broker.client.request(method, fill(route.path_format) + QUERIES.get(route.operation_id, ""))
    expected = {
        "listTopics": 200,
        "listSchemaVersions": 200,
        "listTenants": 200,
        "listNamespaces": 200,
        "listBrokers": 200,
        "showLimits": 200,
        "explainPermission": 400,
        "stream": 405 if method == "HEAD" else 404,
    }
    assert answer.status_code == expected.get(route.operation_id, 404)
    assert (broker.znodes(), set(broker.ledgers.ledgers)) == before
    assert (len(broker.broker.topics), broker.broker.ownership.held) == (0, [])


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("route", GETS, ids=lambda route: route.operation_id)
async def test_safe_methods_change_no_loaded_topic(broker, route, method):
    await broker.produce("a")
    (topic,) = broker.broker.topics
    before = (broker.znodes(), set(broker.ledgers.ledgers), topic.ledger.internal_stats())
    path = route.path_format.format(
        tenant="public",
        namespace="default",
        topic="t",
        subscription="missing",
        consumer="c",
        message_id="0:0",
        producer="p",
        version="0",
        local="t",
        policy="message_ttl_s",
        broker="b:8080",
    )
    await broker.client.request(method, path + QUERIES.get(route.operation_id, ""))
    assert (broker.znodes(), set(broker.ledgers.ledgers), topic.ledger.internal_stats()) == before
    assert not topic.subscriptions


def test_the_web_framework_is_not_imported_before_the_port_answers():
    script = "import bindery_broker.main, sys; sys.exit('fastapi' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0
