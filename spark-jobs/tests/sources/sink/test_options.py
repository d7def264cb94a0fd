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
        ({"url": "https://me:s3cret@broker:8080"}, "must not contain credentials"),
        ({"url": "me:s3cret@broker"}, "must not contain credentials"),
        ({**URL, "token": "s3cret"}, "name a file, in token_file"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, str], reason: str) -> None:
    with pytest.raises(BadRequest, match=reason) as error:
        SinkOptions.parse(given)
    assert "s3cret" not in str(error.value)


def test_files_are_named_by_options_or_the_environment() -> None:
    environment = {"BINDERY_HTTP_CA_FILE": "/ca", "BINDERY_TOKEN_FILE": "/token", "BINDERY_CLIENT_TOKEN_FILE": "/other"}
    options = SinkOptions.parse(URL, environment)
    assert (options.ca_file, options.token_file) == ("/ca", "/token")
    options = SinkOptions.parse({**URL, "ca_file": "/my/ca", "token_file": "/my/token"}, environment)
    assert (options.ca_file, options.token_file) == ("/my/ca", "/my/token")
    assert SinkOptions.parse({**URL, "token_file": ""}, environment).token_file == "/token"
