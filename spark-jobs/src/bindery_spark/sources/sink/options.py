"""Options of writes to `bindery-topic`. Pure.

| option           | default             | meaning                                                                     |
|------------------|---------------------|-----------------------------------------------------------------------------|
| url              | BINDERY_URL         | URL of a broker, or several, separated by commas: executors must reach them |
| topic            | the column `topic`  | `t`, `tenant/namespace/t` or `persistent://...`                             |
| sink_id          | streams: the id of  | name of this write. A repeated write with the same id, batch and rows       |
|                  | the query; tables:  | stores nothing twice                                                        |
|                  | a random id         |                                                                             |
| request_messages | 1000                | maximum messages of one request                                             |
| request_bytes    | 1MiB                | size of a request, in bytes of JSON, from which it is sent                  |
| timeout_s        | 30                  | maximum seconds of one request                                              |
| ca_file          | BINDERY_HTTP_CA_FILE| CA certificates (PEM) that sign those of https URLs, on the executors; else |
|                  |                     | those that their systems trust                                              |
| token_file       | BINDERY_TOKEN_FILE  | file on the executors with the bearer token, read again when it changes     |
| retry_s          | 300                 | maximum seconds for which a request is repeated before the task fails       |

Spark prints options, so none is a secret: a token is not an option, and a URL with credentials is refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from bindery_core.errors import BadRequest
from bindery_pulsar.topic_name import TopicName

from bindery_spark.sources.options import NOTHING, GivenOptions

URL_VARIABLE: Final = "BINDERY_URL"
CA_FILE_VARIABLE: Final = "BINDERY_HTTP_CA_FILE"
TOKEN_FILE_VARIABLE: Final = "BINDERY_TOKEN_FILE"  # noqa: S105
FILES: Final = ("ca_file", "token_file")
"""Options that name files on the executors."""
SINK_ID: Final = re.compile(r"[-A-Za-z0-9_.:]{1,100}")
"""What a sink id may be: it is a part of the names of producers."""
REQUEST_MESSAGES_MAX: Final = 10_000
"""Maximum messages of a request that a broker accepts by default."""
REQUEST_BYTES_MAX: Final = 8 * 2**20
"""A request has one more message than that at most; a broker accepts 16 MiB by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """Parsed options, see the module."""

    urls: tuple[str, ...]
    topic: TopicName | None = None
    sink_id: str = ""
    """Empty: not given."""
    request_messages: int = 1_000
    request_bytes: int = 2**20
    timeout_s: float = 30.0
    retry_s: float = 300.0
    ca_file: str = ""
    token_file: str = ""

    @classmethod
    def parse(cls, options: Mapping[str, str], environment: Mapping[str, str] = NOTHING) -> "SinkOptions":
        """Parse `options`. Raises BadRequest with the option's name and its valid values."""
        names = ("url", "topic", "sink_id", "request_messages", "request_bytes", "timeout_s", "retry_s")
        # Spark passes the name of a query and the location of its checkpoint to its sink, too.
        given = GivenOptions(options, environment, (*names, *FILES, "checkpointlocation", "queryname"))
        text = given.text("url", environment.get(URL_VARIABLE, ""))
        urls = tuple(url.strip().rstrip("/") for url in text.split(",") if url.strip())
        if "@" in text:  # the value may contain a password, so that the error must not
            raise BadRequest(
                "option url must not contain credentials, because Spark prints options: remove what is before the @, "
                "and name a file with a token in option token_file"
            )
        if not urls or not all(url.startswith(("http://", "https://")) for url in urls):
            raise BadRequest("option url must be the URL of a broker, like http://broker:8080", value=text)
        topic = given.text("topic", "")
        sink_id = given.text("sink_id", "")
        if sink_id and SINK_ID.fullmatch(sink_id) is None:
            raise BadRequest("option sink_id must be 1 to 100 letters, digits, or - _ . :", value=sink_id)
        messages = given.count("request_messages", 1_000)
        size = int(given.size("request_bytes", 2**20)) or 1
        if messages > REQUEST_MESSAGES_MAX:
            raise BadRequest(f"option request_messages must be at most {REQUEST_MESSAGES_MAX}", value=messages)
        if size > REQUEST_BYTES_MAX:
            raise BadRequest(f"option request_bytes must be at most {REQUEST_BYTES_MAX}", value=size)
        return cls(
            urls=urls,
            topic=TopicName.parse(topic) if topic else None,
            sink_id=sink_id,
            request_messages=messages,
            request_bytes=size,
            timeout_s=given.seconds("timeout_s", 30.0),
            retry_s=given.seconds("retry_s", 300.0),
            ca_file=given.text("ca_file", "") or environment.get(CA_FILE_VARIABLE, ""),
            token_file=given.text("token_file", "") or environment.get(TOKEN_FILE_VARIABLE, ""),
        )
