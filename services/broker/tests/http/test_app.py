"""The application as a whole: gate, framework, pages and what belongs to no operation."""

import asyncio
import re
from collections.abc import AsyncIterator

import pytest
from asgi_call import Line
from bindery_broker.http.app import BrokerApp
from bindery_broker.http.proxy import Proxy
from bindery_kit.http.page_headers import page_headers
from broker_harness import TOPIC, Harness, problem

IN_FLIGHT = "bindery_broker_request_bytes_in_flight"


class FakeProxy(Proxy):
    closed = 0

    async def close(self) -> None:
        self.closed += 1
        await super().close()


def metric(broker: Harness, name: str) -> str:
    (row,) = [row for row in broker.metrics.render().decode().splitlines() if row.startswith(f"{name} ")]
    return row.partition(" ")[2]


async def test_hot_and_ordinary_operations_are_served(broker: Harness) -> None:
    await broker.produce("a")
    assert (await broker.client.get("/v1/topics")).json() == {"topics": ["public/default/t"]}


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1",
        "/v1/topics/a",
        "/v1/topics/a/b",
        "/v1/topics/a/b/c/d",
        f"{TOPIC}/subscriptions/s/consumers",
        "/favicon.ico",
    ],
)
async def test_unknown_paths_are_answered_with_a_problem_and_never_redirected(broker: Harness, path: str) -> None:
    problem(await broker.client.get(path), status=404, code="not_found")


@pytest.mark.parametrize("path", ["/admin/v2/x", "/admin/v2/persistent/a/b/c/d/e/f", "/lookup/v2/x", "/admin/v3/x"])
async def test_unknown_paths_of_pulsars_api_are_answered_as_pulsar_answers(broker: Harness, path: str) -> None:
    answer = await broker.client.get(path)
    assert (answer.status_code, answer.json()) == (404, {"reason": f"Not Found: GET {path}"})
    assert answer.headers["content-type"] == "application/json"


async def test_wrong_methods_and_names_of_pulsars_api_are_answered_as_pulsar_answers(broker: Harness) -> None:
    answer = await broker.client.patch("/admin/v2/persistent/public/default/t")
    assert answer.status_code == 405
    assert answer.json() == {"reason": "Method Not Allowed: PATCH /admin/v2/persistent/public/default/t"}
    assert "DELETE" in answer.headers["allow"]
    answer = await broker.client.get("/admin/v2/persistent/public/default/t%FF/stats")
    assert answer.status_code == 400
    assert "UTF-8" in answer.json()["reason"]


async def test_wrong_parameters_are_answered_with_a_problem(broker: Harness) -> None:
    found = problem(await broker.client.get("/v1/topics?max=0"), status=400, code="bad_request")
    assert [error["where"] for error in found["errors"]] == ["query.max"]


async def test_a_valid_request_id_is_kept_and_an_invalid_one_is_replaced(broker: Harness) -> None:
    answer = await broker.client.get("/v1/topics")
    assert answer.headers["x-request-id"]
    answer = await broker.client.get("/v1/topics", headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    answer = await broker.client.get("/v1/topics", headers={"x-request-id": "no good"})
    assert answer.headers["x-request-id"] != "no good"


async def test_head_answers_without_a_body(broker: Harness) -> None:
    await broker.produce("a")
    answer = await broker.client.head(TOPIC)
    assert (answer.status_code, answer.content) == (200, b"")


async def test_unexpected_errors_are_answered_with_a_problem(broker: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(**_options: object) -> None:
        raise RuntimeError("made up")

    monkeypatch.setattr(broker.broker.names, "topics", broken)
    problem(await broker.client.get("/v1/topics"), status=500, code="internal")


async def test_the_bytes_of_bodies_in_flight_are_a_metric(broker: Harness) -> None:
    seen = []

    async def body() -> AsyncIterator[bytes]:
        yield b"abc"
        while metric(broker, IN_FLIGHT) == "0.0":
            await asyncio.sleep(0)
        seen.append(metric(broker, IN_FLIGHT))
        yield b"d"

    async with broker.serve():
        assert (await broker.client.post(f"{TOPIC}/messages", content=body())).status_code == 200
        assert seen == ["3.0"]
        assert metric(broker, IN_FLIGHT) == "0.0"


async def test_websockets_are_refused(broker: Harness) -> None:
    line = Line()
    await broker.app({"type": "websocket"}, line.receive, line.send)
    assert line.sent == [{"type": "websocket.close", "code": 1008}]


async def test_the_openapi_document_is_made_once_and_lists_operations_only(broker: Harness) -> None:
    document = broker.app.openapi()
    assert broker.app.openapi() is document
    assert (document["info"]["title"], document["info"]["version"]) == ("Bindery broker", "1.0.0")
    assert "/docs" not in document["paths"]
    assert document["paths"]["/v1/topics"]["get"]["operationId"] == "listTopics"
    assert "ReceiveBody" in document["components"]["schemas"]
    assert (await broker.client.get("/openapi.json")).json() == document


async def test_the_page_shows_the_document(broker: Harness) -> None:
    answer = await broker.client.get("/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "<h1>Bindery broker</h1>" in answer.text
    assert "/v1/topics" in answer.text
    style = answer.text.partition("<style>")[2].partition("</style>")[0]
    assert {name: answer.headers.get(name) for name in page_headers("")} == page_headers(style)
    assert not re.search(r"<[^>]* style=|<script", answer.text), "the policy would ignore it"
    problem(await broker.client.get("/redoc"), status=404, code="not_found")


async def test_the_proxy_is_closed_with_the_application(broker: Harness) -> None:
    proxy = FakeProxy()
    app = BrokerApp(broker.broker, proxy=proxy)
    assert proxy.closed == 0
    await app.close()
    assert proxy.closed == 1
    await BrokerApp(broker.broker).close()
