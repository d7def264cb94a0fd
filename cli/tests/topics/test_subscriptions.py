"""`bindery subscriptions` and `bindery topics cancel` against a broker in memory: requests, questions, results."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from bindery.common import output
from bindery.main import app
from bindery_core.errors import BadRequest
from typer.testing import CliRunner, Result

Serve = Callable[[Callable[[httpx.Request], httpx.Response]], None]
PATH = "/v1/topics/public/default/orders/subscriptions/billing"
ABOUT: dict[str, Any] = {
    "subscription": "billing",
    "type": None,
    "mark_delete": "5:1",
    "read_position": "5:2",
    "backlog_entries": 7,
    "oldest_unacked_at": 1_700_000_000_000,
    "consumers": [{"consumer": "c1", "unacked": 2, "connected_since": 1_700_000_000_000}],
    "properties": {"team": "a"},
}
EXPLANATION = {
    "subscription": ABOUT,
    "states": {"leased": 2, "ready": 0},
    "limits": {},
    "summary": "7 entries are not acknowledged",
    "blocked_by": [],
}


class Requests(list[tuple[str, str, Any]]):
    """Method, path with its query, and body of each request."""


@pytest.fixture
def requests(serve: Serve) -> Requests:
    found = Requests()

    def handler(request: httpx.Request) -> httpx.Response:
        content = request.read()
        found.append((request.method, request.url.raw_path.decode(), json.loads(content) if content else None))
        if request.url.path.endswith("/explain"):
            message = {"message_id": "5:2", "code": "leased", "detail": "consumer c1 holds the message"}
            with_message = {"message": message} if request.url.query else {}
            return httpx.Response(200, json={**with_message, **EXPLANATION})
        if request.method == "DELETE":
            return httpx.Response(200, json={"deleted": "billing"})
        if request.method == "PUT":
            return httpx.Response(201, json={"topic": "public/default/orders", "created": True})
        return httpx.Response(200, json={"next": "5:9"})

    serve(handler)
    return found


def run(*arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, ["subscriptions", *arguments], input=answer)


MOVES: list[tuple[list[str], str, dict[str, Any]]] = [
    (["seek", "orders", "billing", "--to", "earliest"], "seek", {"message_id": "earliest"}),
    (["seek", "orders", "billing", "--to", "5:0:-1:0"], "seek", {"message_id": "5:0:-1:0"}),
    (["seek", "orders", "billing", "--time", "1970-01-01T00:00:01Z"], "seek", {"timestamp": 1_000}),
    (["seek", "orders", "billing", "--time", "@1700000000000"], "seek", {"timestamp": 1_700_000_000_000}),
    (["seek", "orders", "billing", "--percent", "0"], "seek", {"percent": 0}),
    (["skip", "orders", "billing", "--entries", "3"], "skip", {"entries": 3}),
    (["expire", "orders", "billing", "--older-than", "1h"], "expire", {"older_than_ms": 3_600_000}),
    (["clear", "orders", "billing"], "clear", {}),
]


@pytest.mark.parametrize(("arguments", "verb", "body"), MOVES, ids=[" ".join(move[0][3:]) or "clear" for move in MOVES])
def test_a_subscription_is_moved_after_a_confirmation(
    arguments: list[str], verb: str, body: dict[str, Any], requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    unattended = run(*arguments)
    assert unattended.exit_code == 2
    assert "7 entries are not acknowledged, 1 consumer is connected: pass --yes" in unattended.stderr
    assert requests == [("GET", f"{PATH}/explain", None)]

    requests.clear()
    moved = run(*arguments, "--yes")
    assert (moved.exit_code, moved.stdout) == (0, "billing continues at 5:9\n")
    assert requests == [("POST", f"{PATH}/{verb}", body)]
    assert json.loads(run(*arguments, "--yes", "--json").stdout) == {"next": "5:9"}

    requests.clear()
    monkeypatch.setattr(output, "is_interactive", lambda: True)
    assert run(*arguments, answer="n\n").exit_code == 1
    assert requests == [("GET", f"{PATH}/explain", None)]
    assert run(*arguments, answer="y\n").exit_code == 0
    assert requests[-1] == ("POST", f"{PATH}/{verb}", body)


def test_a_subscription_is_created(requests: Requests) -> None:
    done = run("create", "orders", "billing", "--initial", "latest", "--tags", "a||b", "--property", "team=x=y")
    assert (done.exit_code, done.stdout) == (0, "billing is created\n")
    body = {"initial": "latest", "tags": "a||b", "subscription_properties": {"team": "x=y"}}
    assert requests == [("PUT", PATH, body)]


def test_a_subscription_is_deleted_after_a_confirmation(requests: Requests) -> None:
    assert run("delete", "orders", "billing").exit_code == 2
    assert requests == [("GET", f"{PATH}/explain", None)]
    done = run("delete", "orders", "billing", "--force", "--yes")
    assert (done.exit_code, done.stdout) == (0, "billing is deleted\n")
    assert requests[1:] == [("DELETE", f"{PATH}?force=true", None)]


def test_a_subscription_is_shown(requests: Requests) -> None:
    lines = run("show", "orders", "billing").stdout.splitlines()
    assert ["backlog", "entries", "7"] in [line.split() for line in lines]
    assert ["oldest", "unacked", "at", "2023-11-14", "22:13:20Z"] in [line.split() for line in lines]
    assert ["c1", "2", "2023-11-14", "22:13:20Z"] in [line.split() for line in lines]
    assert json.loads(run("show", "orders", "billing", "--json").stdout) == ABOUT
    assert requests == [("GET", f"{PATH}/explain", None)] * 2


def test_a_subscription_and_a_message_are_explained(requests: Requests) -> None:
    whole = run("explain", "orders", "billing").stdout
    assert whole == "7 entries are not acknowledged\nmessages read and not acknowledged: leased 2\n"
    one = run("explain", "orders", "billing", "5:2", "--consumer", "c1")
    assert one.stdout == "5:2 leased: consumer c1 holds the message\n"
    assert requests[1] == ("GET", f"{PATH}/explain?message_id=5%3A2&consumer=c1", None)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["seek", "orders", "billing", "--yes"], "exactly one of --to, --time and --percent"),
        (
            ["seek", "orders", "billing", "--to", "latest", "--percent", "5"],
            "exactly one of --to, --time and --percent",
        ),
        (["seek", "orders", "billing", "--time", "today"], "not a time; the formats"),
        (["expire", "orders", "billing", "--older-than", "soon"], "not a duration"),
        (["create", "orders", "billing", "--initial", "5:0"], "--initial is earliest or latest"),
        (["create", "orders", "billing", "--property", "x"], "a property has the form NAME=VALUE"),
        (["explain", "orders", "billing", "--consumer", "c1"], "--consumer needs a MESSAGE_ID"),
    ],
)
def test_wrong_options_are_refused_before_any_request(arguments: list[str], reason: str, requests: Requests) -> None:
    refused = run(*arguments).exception
    assert isinstance(refused, BadRequest)
    assert str(refused).startswith(reason)
    assert requests == []


def test_a_list_has_all_pages_and_damaged_subscriptions(serve: Serve) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if "after" not in request.url.params:
            return httpx.Response(200, json={"subscriptions": [{"subscription": "a"}], "next": "a"})
        assert request.url.params["after"] == "a"
        return httpx.Response(200, json={"subscriptions": [{"subscription": "b"}], "damaged": {"c": "no ledger"}})

    serve(handler)
    for words in (["subscriptions", "list"], ["topics", "subscriptions"]):
        done = CliRunner().invoke(app, [*words, "orders", "--json"])
        assert json.loads(done.stdout) == [{"subscription": "a"}, {"subscription": "b"}]
        assert done.stderr == "subscription c is damaged: no ledger\n"


@pytest.mark.parametrize(
    ("results", "text", "exit_code"),
    [
        ({"a": "cancelled", "b": "cancelled"}, "a: cancelled\nb: cancelled\n", 0),
        ({"a": "cancelled", "b": "already_delivered"}, "a: cancelled\nb: already_delivered\n", 1),
        ({}, "no subscriptions: a later one delivers the message\n", 0),
    ],
)
def test_a_delayed_message_is_cancelled(results: dict[str, str], text: str, exit_code: int, serve: Serve) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert (request.method, request.url.raw_path) == ("DELETE", b"/v1/topics/a/b/c/messages/5%3A0%3A-1%3A-1")
        return httpx.Response(200, json={"cancelled": results})

    serve(handler)
    done = CliRunner().invoke(app, ["topics", "cancel", "a/b/c", "5:0:-1:-1"])
    assert (done.stdout, done.exit_code) == (text, exit_code)
    done = CliRunner().invoke(app, ["topics", "cancel", "a/b/c", "5:0:-1:-1", "--json"])
    assert (json.loads(done.stdout), done.exit_code) == ({"cancelled": results}, exit_code)
