"""The operation that handles a path, found by the hot routes or by FastAPI."""

import subprocess
import sys

import pytest
from bindery_broker.http.route import HotRoute
from broker_harness import ROUTES, TOPIC, problem
from starlette.routing import Match

HOT = [route for route in ROUTES if isinstance(route, HotRoute)]


def fill(template: str) -> str:
    return template.format(
        tenant="t", namespace="n", topic="x%20y", subscription="s%2Fu", consumer="c", message_id="1%3A2"
    )


def test_produce_and_consume_operations_are_hot():
    assert {route.operation_id for route in HOT} == {"produce", "receive", "ack", "nack", "stream"}


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
    content = b"{}" if method == "PUT" else None
    problem(await broker.client.request(method, f"{path}?{query}", content=content), status=400, code="bad_request")


@pytest.mark.parametrize("content_type", [None, "application/json", "application/x-www-form-urlencoded"])
async def test_a_json_body_is_accepted_with_the_content_type_of_curl(broker, content_type):
    headers = {} if content_type is None else {"content-type": content_type}
    answer = await broker.client.put(f"{TOPIC}/subscriptions/s", content=b'{"initial":"latest"}', headers=headers)
    assert (answer.status_code, answer.json()["created"]) == (201, True)
    assert answer.content.endswith(b"\n")


async def test_wrong_fields_of_ordinary_bodies_are_named(broker):
    answer = await broker.client.put(f"{TOPIC}/subscriptions/s", json={"initial": 5, "colour": "red"})
    found = problem(answer, status=400, code="bad_request")
    assert {error["where"] for error in found["errors"]} == {"body.initial", "body.colour"}


def test_the_web_framework_is_not_imported_before_the_port_answers():
    script = "import bindery_broker.main, sys; sys.exit('fastapi' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0
