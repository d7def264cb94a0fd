"""`bindery topics create` and `partitions` against a broker in memory."""

import json
from collections.abc import Callable
from typing import Any

import httpx
from bindery.main import app
from bindery.topics.stats_text import topic_lines
from typer.testing import CliRunner, Result

Serve = Callable[[Callable[[httpx.Request], httpx.Response]], None]
TOPIC = "/v1/topics/public/default/orders"


class Topics:
    """A broker with at most one topic."""

    def __init__(self, partitions: int | None = None) -> None:
        self.partitions = partitions
        self.puts: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET" and self.partitions is None:
            return httpx.Response(404, json={"code": "no_such_topic", "detail": "no such topic"})
        created = self.partitions is None
        if request.method == "PUT":
            self.puts.append(request.url.path)
            self.partitions = json.loads(request.read() or b'{"partitions": 0}')["partitions"]
        answer = {"topic": "public/default/orders", "partitions": self.partitions, "created": created}
        return httpx.Response(200, json=answer)


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["topics", *words])


def test_a_topic_is_created_with_and_without_partitions(serve: Serve) -> None:
    serve(topics := Topics())
    assert run("create", "orders", "--partitions", "4").stdout == "public/default/orders is created\n"
    assert topics.partitions == 4
    assert run("create", "orders", "--partitions", "4").stdout == "public/default/orders exists\n"
    assert run("create", "orders", "--partitions", "5").exit_code != 0
    assert topics.partitions == 4
    serve(topics := Topics())
    assert run("create", "orders").stdout == "public/default/orders is created\n"
    assert topics.puts == [TOPIC]


def test_partitions_are_shown_and_added_and_no_topic_is_created_by_it(serve: Serve) -> None:
    serve(topics := Topics(2))
    assert run("partitions", "orders").stdout == "2\n"
    assert run("partitions", "orders", "--set", "3").stdout == "3\n"
    assert topics.puts == [f"{TOPIC}/partitions"]
    serve(topics := Topics())
    assert run("partitions", "orders", "--set", "3").exit_code != 0
    assert topics.puts == []


def test_statistics_of_a_partitioned_topic_have_a_line_for_each_partition() -> None:
    sums: dict[str, Any] = dict.fromkeys(
        ("entries", "size", "ledgers", "messages_in", "bytes_in", "messages_out", "bytes_out", "messages_in_per_s",
         "bytes_in_per_s", "messages_out_per_s", "bytes_out_per_s", "backlog_bytes"), 1,
    )  # fmt: skip
    sums |= {"topic": "a/b/c", "oldest_unacked_age_ms": None, "last_published_at": None, "subscriptions": {}}
    one = {**sums, "owner": "http://one", "first": "0:0", "last": "0:1"}
    lines = list(topic_lines({**sums, "partitions": {"0": one, "1": {**one, "owner": "http://two"}}}, now_ms=0))
    assert lines[1].split() == ["partitions", "2"]
    assert [line.split()[:2] for line in lines[-2:]] == [["0", "http://one"], ["1", "http://two"]]
