"""Match the segments of a path while they are percent-encoded, then decode them: a `%2F` stays inside its segment."""

import functools
from typing import Final
from urllib.parse import quote, unquote_to_bytes

from bindery_core.errors import BadRequest
from bindery_pulsar.topic_name import TopicName
from starlette.convertors import Convertor, register_url_convertor

SEGMENT_SIZE_MAX: Final = 4_096
"""Maximum characters of a percent-encoded segment."""
_TOPICS_CACHED_MAX: Final = 4_096


class SegmentConvertor(Convertor[str]):
    """Matches the text between two slashes, even if it is empty: `public//t` is a bad name, not an unknown path."""

    regex = "[^/]*"

    def convert(self, value: str) -> str:
        """Return the decoded segment. Raises BadRequest if it is too long or not UTF-8."""
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
    """Return the path to match: still percent-encoded, without trailing slashes.

    Raises BadRequest if the path is not UTF-8, or if a segment is `.` or `..`, plain or percent-encoded: clients and
    proxies resolve those to another path, and no topic or subscription may have such a name.
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


@functools.lru_cache(_TOPICS_CACHED_MAX)
def topic_of(tenant: str, namespace: str, local: str) -> TopicName:
    """Return the validated name. Results are cached, because clients repeat names. Raises BadRequest, TooLarge."""
    return TopicName.of(tenant=tenant, namespace=namespace, local=local)


def path_of(topic: TopicName) -> str:
    """Return the path of a topic in the v1 API."""
    return "/v1/topics/" + "/".join(quote(part, safe="") for part in (topic.tenant, topic.namespace, topic.local))
