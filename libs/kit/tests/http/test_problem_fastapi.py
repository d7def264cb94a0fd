"""Errors and refusals of a FastAPI application are RFC 9457 problems."""

import httpx
import pytest
from bindery_kit.http.problem import CONTENT_TYPE


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [("missing", 404, "no_such_topic"), ("busy", 429, "too_many_requests"), ("damaged", 500, "damaged_storage")],
)
async def test_a_bindery_error_becomes_a_problem(client: httpx.AsyncClient, kind: str, status: int, code: str) -> None:
    answer = await client.get(f"/fail/{kind}")
    assert answer.status_code == status
    assert answer.headers["content-type"] == CONTENT_TYPE
    body = answer.json()
    assert (body["code"], body["status"], body["type"]) == (code, status, f"urn:bindery:problem:{code}")
    assert ("retry-after" in answer.headers) == (status == 429)


async def test_the_facts_of_an_error_are_fields(client: httpx.AsyncClient) -> None:
    body = (await client.get("/fail/missing")).json()
    assert body["facts"] == {"topic": "a/b/c"}
    assert body["detail"] == "no such topic: topic=a/b/c"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("DELETE", "/count", 405, "method_not_allowed"),
        ("POST", "/count", 400, "validation_failed"),
        ("POST", "/metrics", 405, None),
    ],
)
async def test_errors_of_the_framework_are_problems(
    client: httpx.AsyncClient, method: str, path: str, status: int, code: str | None
) -> None:
    answer = await client.request(method, path, content=b'{"count": "many"}')
    assert answer.status_code == status
    if code:
        assert answer.json()["code"] == code


async def test_a_wrong_field_is_named(client: httpx.AsyncClient) -> None:
    body = (await client.post("/count", json={"count": "many"})).json()
    assert body["errors"][0]["where"] == "body.count"
