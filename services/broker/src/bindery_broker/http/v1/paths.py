"""Paths of the v1 API and the parameters in them."""

from typing import Annotated, Any, Final

import msgspec
from bindery_core.errors import BadRequest
from bindery_pulsar.topic_name import TopicName
from fastapi import Depends, Path

from bindery_broker.http.paths import topic_of
from bindery_broker.http.v1.schemas import ID_PATTERN, NAME_SIZE_MAX, NO_CONTROLS, ConsumerName, ProducerName

TOPIC: Final = "/v1/topics/{tenant:segment}/{namespace:segment}/{topic:segment}"
SUBSCRIPTION: Final = TOPIC + "/subscriptions/{subscription:segment}"


_NAME: Final = {"pattern": r"^[-=:.A-Za-z0-9_]+$", "minLength": 1, "maxLength": 128}
_FREE: Final = {"pattern": r"^[^/\x00-\x1f\x7f]+$", "minLength": 1, "maxLength": 80}
_FREE_DESCRIPTION: Final = "percent-encoded; at most 255 bytes as an HTML form value."
_DESCRIBED: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "tenant": ("The tenant, for example `public`; not `.` or `..`.", _NAME),
    "namespace": ("The namespace, for example `default`; not `.` or `..`.", _NAME),
    "topic": (f"The topic's local name, {_FREE_DESCRIPTION}", _FREE),
    "subscription": (f"The subscription, {_FREE_DESCRIPTION}", _FREE),
    "consumer": (
        "The consumer's name, percent-encoded.",
        {"pattern": NO_CONTROLS, "minLength": 1, "maxLength": NAME_SIZE_MAX},
    ),
    "producer": (
        "The producer's name, percent-encoded.",
        {"pattern": NO_CONTROLS, "minLength": 1, "maxLength": NAME_SIZE_MAX},
    ),
    "message_id": (
        "`ledgerId:entryId:partition:batchIndex`; the last two are optional.",
        {"pattern": ID_PATTERN, "maxLength": 64},
    ),
}
"""Description and JSON schema by parameter. The schemas only document: `topic_of` and the operations validate."""


def _path(name: str) -> Any:
    description, schema = _DESCRIBED[name]
    return Path(description=description, json_schema_extra=schema)


def _documented(*names: str) -> list[dict[str, Any]]:
    """Return the OpenAPI parameters of a hot route, which FastAPI does not see."""
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "description": _DESCRIBED[name][0],
            "schema": {"type": "string", "title": name.title(), **_DESCRIBED[name][1]},
        }
        for name in names
    ]


TOPIC_PARAMETERS: Final = _documented("tenant", "namespace", "topic")
SUBSCRIPTION_PARAMETERS: Final = _documented("tenant", "namespace", "topic", "subscription")

Tenant = Annotated[str, _path("tenant")]
Namespace = Annotated[str, _path("namespace")]
LocalName = Annotated[str, _path("topic")]
SubscriptionName = Annotated[str, _path("subscription")]
MessageIdPath = Annotated[str, _path("message_id")]


async def _consumer_name(consumer: Annotated[str, _path("consumer")]) -> str:
    try:
        return msgspec.convert(consumer, ConsumerName)
    except msgspec.ValidationError as error:
        raise BadRequest(f"not a consumer's name: {error}") from error


async def _producer_name(producer: Annotated[str, _path("producer")]) -> str:
    try:
        return msgspec.convert(producer, ProducerName)
    except msgspec.ValidationError as error:
        raise BadRequest(f"not a producer's name: {error}") from error


async def _topic_name(tenant: Tenant, namespace: Namespace, topic: LocalName) -> TopicName:
    return topic_of(tenant, namespace, topic)


Topic = Annotated[TopicName, Depends(_topic_name)]
Consumer = Annotated[str, Depends(_consumer_name)]
Producer = Annotated[str, Depends(_producer_name)]
