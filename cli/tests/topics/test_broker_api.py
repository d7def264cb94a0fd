"""The client of a broker: paths, and errors that name the fix."""

from collections.abc import Callable

import httpx
import pytest
from bindery.topics.broker_api import (
    Broker,
    BrokerRefused,
    BrokerUnreachable,
    broker_url,
    subscription_path,
    topic_path,
)
from bindery_core.errors import BadRequest

Handler = Callable[[httpx.Request], httpx.Response]


@pytest.mark.parametrize(
    ("topic", "path"),
    [
        ("t", "/v1/topics/public/default/t"),
        ("a/b/c", "/v1/topics/a/b/c"),
        ("persistent://a/b/c", "/v1/topics/a/b/c"),
        ("persistent://t", "/v1/topics/public/default/t"),
        ("a/b/c d%ü", "/v1/topics/a/b/c%20d%25%C3%BC"),
    ],
)
def test_a_topic_has_a_path(topic: str, path: str) -> None:
    assert topic_path(topic) == path


@pytest.mark.parametrize("topic", ["", "a/b", "a//c", "/b/c", "a/b/", "a/b/c/d", "persistent://"])
def test_another_text_is_not_a_topic(topic: str) -> None:
    with pytest.raises(BadRequest, match="not the name of a topic") as caught:
        topic_path(topic)
    assert caught.value.facts == {"topic": topic}


def test_a_subscription_is_quoted() -> None:
    assert subscription_path("a/b c") == "/subscriptions/a%2Fb%20c"


def test_the_url_comes_from_the_option_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BINDERY_URL", raising=False)
    assert broker_url(None) == "http://127.0.0.1:8080"
    monkeypatch.setenv("BINDERY_URL", "http://env:1/")
    assert broker_url(None) == "http://env:1"
    assert broker_url("http://option:2//") == "http://option:2"


def test_json_goes_in_and_out(serve: Callable[[Handler], None]) -> None:
    requests: list[tuple[str, str, bytes]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        requests.append((request.method, str(request.url), request.read()))
        return httpx.Response(200, content=b'{"a":1}' if request.method == "GET" else b"")

    serve(handler)
    with Broker("http://h:1") as broker:
        assert broker.get("/v1/x", limit=2, after=None) == {"a": 1}
        assert broker.post("/v1/y", {"b": 2}) is None
    assert requests == [("GET", "http://h:1/v1/x?limit=2", b""), ("POST", "http://h:1/v1/y", b'{"b":2}')]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (httpx.ConnectError("refused"), "no broker answers at http://h:1: is it running?"),
        (httpx.ReadTimeout("late"), "did not answer within 60 s; the outcome of the request is unknown"),
        (httpx.ReadError("reset"), "the connection to the broker at http://h:1 broke: reset"),
    ],
)
def test_a_lost_broker_is_named(serve: Callable[[Handler], None], error: Exception, words: str) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise error

    serve(handler)
    with Broker("http://h:1") as broker, pytest.raises(BrokerUnreachable) as caught:
        broker.get("/v1/x")
    assert words in str(caught.value)
    assert caught.value.code == "broker_unreachable"


def test_a_server_that_sends_no_json_is_not_a_broker(serve: Callable[[Handler], None]) -> None:
    serve(lambda _: httpx.Response(200, content=b"<html>"))
    with Broker("http://h:1") as broker, pytest.raises(BrokerUnreachable, match="http://h:1 is not a broker"):
        broker.get("/v1/x")


@pytest.mark.parametrize(
    ("status", "body", "message", "problem"),
    [
        (404, b'{"detail":"no such topic","code":"no_such_topic"}', "no such topic (404, no_such_topic)",
         {"detail": "no such topic", "code": "no_such_topic"}),
        (500, b'{"detail":"broken"}', "broken (500)", {"detail": "broken"}),
        (400, b"plain text", "plain text (400)", {}),
        (503, b"", "Service Unavailable (503)", {}),
        (502, b"x" * 600, "x" * 500 + " (502)", {}),
        (404, b'{"detail":"nothing is served at /x; see /api/v1/bookie/state"}',
         "http://h:1 is a bookie, not a broker; --url or BINDERY_URL names one",
         {"detail": "nothing is served at /x; see /api/v1/bookie/state"}),
        (404, b'{"detail":"nothing is served at /x; the API is described at /docs"}',
         "nothing is served at /x; the API is described at /docs (404)",
         {"detail": "nothing is served at /x; the API is described at /docs"}),
    ],
)  # fmt: skip
def test_a_refusal_has_the_reason_and_the_status(
    serve: Callable[[Handler], None], status: int, body: bytes, message: str, problem: dict[str, str]
) -> None:
    serve(lambda _: httpx.Response(status, content=body))
    with Broker("http://h:1") as broker, pytest.raises(BrokerRefused) as caught:
        broker.get("/x")
    assert str(caught.value) == message
    assert (caught.value.http_status, caught.value.problem, caught.value.code) == (status, problem, "refused")
