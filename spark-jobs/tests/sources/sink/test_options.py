"""Options of writes to topics."""

import pytest
from bindery_core.errors import BadRequest
from bindery_spark.sources.sink.options import SinkOptions

URL = {"url": "http://broker:8080"}


def test_defaults_and_all_options() -> None:
    options = SinkOptions.parse({"topic": "t"}, {"BINDERY_URL": "http://a:1/, http://b:2"})
    assert options.urls == ("http://a:1", "http://b:2")
    assert options.topic is not None
    assert options.topic.full == "persistent://public/default/t"
    assert (options.sink_id, options.request_messages, options.request_bytes) == ("", 1_000, 2**20)
    assert (options.timeout_s, options.retry_s) == (30.0, 300.0)
    given = {**URL, "sink_id": "me", "request_messages": "7", "request_bytes": "2KiB", "timeout_s": "1", "retry_s": "2"}
    options = SinkOptions.parse({**given, "checkpointLocation": "/x", "queryName": "q"})
    assert options == SinkOptions(
        urls=("http://broker:8080",),
        sink_id="me",
        request_messages=7,
        request_bytes=2048,
        timeout_s=1.0,
        retry_s=2.0,
    )


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"topic": "t"}, "option url must be the URL of a broker"),
        ({"url": "broker:8080"}, "option url must be the URL of a broker"),
        ({**URL, "topic": "a/b"}, "topic"),
        ({**URL, "sink_id": "a/b"}, "option sink_id"),
        ({**URL, "sink_id": "x" * 101}, "option sink_id"),
        ({**URL, "request_messages": "0"}, "option request_messages"),
        ({**URL, "request_messages": "10001"}, "option request_messages"),
        ({**URL, "request_bytes": "9MiB"}, "option request_bytes"),
        ({**URL, "zookeeper": "h:1"}, "unknown option zookeeper"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, str], reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        SinkOptions.parse(given)
