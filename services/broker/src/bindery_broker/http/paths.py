"""Paths: segments are matched as they come and decoded afterwards, so that a `%2F` stays inside its segment."""

import functools
from typing import Annotated, Any, Final
from urllib.parse import unquote_to_bytes

from bindery_core.errors import BadRequest
from bindery_pulsar.topic_name import TopicName
from fastapi import Depends, Path
from starlette.convertors import Convertor, register_url_convertor

from bindery_broker.http.schemas import ID_PATTERN

TOPIC: Final = "/v1/topics/{tenant:segment}/{namespace:segment}/{topic:segment}"
SUBSCRIPTION: Final = TOPIC + "/subscriptions/{subscription:segment}"
SEGMENT_SIZE_MAX: Final = 4_096
_TOPICS_REMEMBERED: Final = 4_096


class SegmentConvertor(Convertor[str]):
    """What stands between two slashes, which may be nothing: `public//t` is a bad name rather than no path of ours."""

    regex = "[^/]*"

    def convert(self, value: str) -> str:
        """Raises BadRequest."""
        if len(value) > SEGMENT_SIZE_MAX:
            raise BadRequest("a part of the path is too long", size=len(value), size_max=SEGMENT_SIZE_MAX)
        if "%" not in value:
            return value
        try:
            return unquote_to_bytes(value).decode()
        except UnicodeDecodeError as error:
            raise BadRequest("a part of the path is not UTF-8 once decoded") from error

    def to_string(self, value: str) -> str:
        raise NotImplementedError("paths are not made from routes")


register_url_convertor("segment", SegmentConvertor())


def route_path(raw_path: bytes) -> str:
    """The path to match: not decoded, without slashes at its end. Raises BadRequest.

    Also for a segment that is `.` or `..`, written so or percent-encoded: clients and proxies take it for a way to
    another path, and nothing of ours has such a name.
    """
    try:
        path = "/" + raw_path.decode().strip("/")
    except UnicodeDecodeError as error:
        raise BadRequest("the path is not UTF-8") from error
    if "/." in path or "/%2" in path:
        for segment in path.split("/"):
            if unquote_to_bytes(segment) in (b".", b".."):
                raise BadRequest("a part of the path is . or ..", part=segment)
    return path


@functools.lru_cache(_TOPICS_REMEMBERED)
def topic_of(tenant: str, namespace: str, local: str) -> TopicName:
    """Clients repeat themselves, so names are remembered. Raises BadRequest, TooLarge."""
    return TopicName.of(tenant=tenant, namespace=namespace, local=local)


def _path(description: str, **schema: Any) -> Any:
    """A parameter that is described here and checked by the thing it names."""
    return Path(description=description, json_schema_extra=schema)


_NAME: Final = {"pattern": r"^[-=:.A-Za-z0-9_]+$", "minLength": 1, "maxLength": 128}
_FREE: Final = {"pattern": r"^[^/\x00-\x1f\x7f]+$", "minLength": 1, "maxLength": 80}
_FREE_ABOUT: Final = "percent-encoded; at most 255 bytes as an HTML form value."

Tenant = Annotated[str, _path("The tenant, `public` for instance; not `.` or `..`.", **_NAME)]
Namespace = Annotated[str, _path("The namespace, `default` for instance; not `.` or `..`.", **_NAME)]
LocalName = Annotated[str, _path(f"The topic's local name, {_FREE_ABOUT}", **_FREE)]
SubscriptionName = Annotated[str, _path(f"The subscription, {_FREE_ABOUT}", **_FREE)]
Consumer = Annotated[str, _path("The consumer's name, percent-encoded.", **{**_FREE, "maxLength": 256})]
MessageIdPath = Annotated[
    str,
    _path("`ledgerId:entryId:partition:batchIndex`, the last two optional.", pattern=ID_PATTERN, maxLength=64),
]


async def topic_parameter(tenant: Tenant, namespace: Namespace, topic: LocalName) -> TopicName:
    return topic_of(tenant, namespace, topic)


async def subscription_parameter(subscription: SubscriptionName) -> str:
    return subscription


Topic = Annotated[TopicName, Depends(topic_parameter)]
Subscription = Annotated[str, Depends(subscription_parameter)]
