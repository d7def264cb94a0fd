"""The parameters in paths: the topic they name, and their documentation for hot and ordinary operations."""

from typing import Any

import httpx
import pytest
from bindery_broker.http.v1 import paths
from broker_harness import TOPIC, problem
from fastapi import FastAPI

NAME = {"pattern": r"^[-=:.A-Za-z0-9_]+$", "minLength": 1, "maxLength": 128}
FREE = {"pattern": r"^[^/\x00-\x1f\x7f]+$", "minLength": 1, "maxLength": 80}
SCHEMAS: dict[str, dict[str, Any]] = {
    "tenant": {"type": "string", "title": "Tenant", **NAME},
    "namespace": {"type": "string", "title": "Namespace", **NAME},
    "topic": {"type": "string", "title": "Topic", **FREE},
    "subscription": {"type": "string", "title": "Subscription", **FREE},
    "consumer": {
        "type": "string",
        "title": "Consumer",
        "pattern": r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]+$(?![\s\S])",
        "minLength": 1,
        "maxLength": 256,
    },
    "message_id": {
        "type": "string",
        "title": "Message Id",
        "pattern": r"^[0-9]{1,19}:[0-9]{1,19}(:(-1|[0-9]{1,10})){0,2}$(?![\s\S])",
        "maxLength": 64,
    },
}
BEGINNINGS = {
    "tenant": "The tenant,",
    "namespace": "The namespace,",
    "topic": "The topic's local name,",
    "subscription": "The subscription,",
    "consumer": "The consumer's name,",
    "message_id": "`ledgerId:entryId:partition:batchIndex`;",
}


def an_app() -> FastAPI:
    app = FastAPI()

    @app.get(paths.SUBSCRIPTION + "/{consumer:segment}/{message_id:segment}")
    async def show(
        name: paths.Topic,
        subscription: paths.SubscriptionName,
        consumer: paths.Consumer,
        message_id: paths.MessageIdPath,
    ) -> list[str]:
        return [name.full, subscription, consumer, message_id]

    return app


def check_documented(parameters: list[dict[str, Any]], *names: str) -> None:
    assert [parameter["name"] for parameter in parameters] == list(names)
    for parameter in parameters:
        name = parameter["name"]
        assert (parameter["in"], parameter["required"]) == ("path", True)
        assert parameter["description"].startswith(BEGINNINGS[name])
        assert {key: value for key, value in parameter["schema"].items() if key != "description"} == SCHEMAS[name]


def test_the_paths_of_topics_and_subscriptions() -> None:
    assert paths.TOPIC == "/v1/topics/{tenant:segment}/{namespace:segment}/{topic:segment}"
    assert paths.SUBSCRIPTION.removeprefix(paths.TOPIC) == "/subscriptions/{subscription:segment}"


def test_the_parameters_of_hot_operations_are_documented() -> None:
    check_documented(paths.TOPIC_PARAMETERS, "tenant", "namespace", "topic")
    check_documented(paths.SUBSCRIPTION_PARAMETERS, "tenant", "namespace", "topic", "subscription")


def test_the_parameters_of_ordinary_operations_are_documented_alike() -> None:
    ((_, operations),) = an_app().openapi()["paths"].items()
    check_documented(
        sorted(operations["get"]["parameters"], key=lambda parameter: list(SCHEMAS).index(parameter["name"])), *SCHEMAS
    )


@pytest.mark.parametrize(("topic", "local"), [("t", "t"), ("x%20y", "x y")])
async def test_an_operation_gets_the_topic_that_the_path_names(topic: str, local: str) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=an_app()), base_url="http://one") as client:
        answer = await client.get(f"/v1/topics/a/b/{topic}/subscriptions/s/c/5:0")
    assert answer.json() == [f"persistent://a/b/{local}", "s", "c", "5:0"]


@pytest.mark.parametrize("consumer", ["%0A", "c%0A", "c%C2%85", "c%E2%80%A8d", "c" * 257])
async def test_a_path_with_a_wrong_consumer_name_is_refused(broker, consumer: str) -> None:
    await broker.produce("a")
    await broker.receive()
    answer = await broker.client.delete(f"{TOPIC}/subscriptions/s/consumers/{consumer}")
    problem(answer, status=400, code="bad_request")
