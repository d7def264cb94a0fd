"""`bindery limits`, against answers of a broker."""

import json
from collections.abc import Callable

import httpx
from bindery.main import app
from typer.testing import CliRunner

ANSWER = {
    "owners": [
        {
            "kind": "role",
            "name": "etl",
            "limits": [
                {"limit": "requests", "rate": 100.0, "burst": 100.0, "available": -5.0, "retry_after_s": 0.05},
                {"limit": "connections", "rate": 10.0, "burst": 10.0, "available": 9.0, "retry_after_s": 0.0},
            ],
        },
        {"kind": "tenant", "name": "public", "limits": []},
    ]
}


def test_limits_are_shown_with_what_is_left(serve: Callable[[Callable[[httpx.Request], httpx.Response]], None]) -> None:
    asked = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append((request.url.path, dict(request.url.params)))
        return httpx.Response(200, json=ANSWER)

    serve(handler)
    shown = CliRunner().invoke(app, ["limits", "--tenant", "public"])
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.splitlines() == [
        "role etl:",
        "  100 requests/s, -5 of 100 available, retry after 0.05 s",
        "  10 connections, 9 of 10 available",
        "tenant public: no limits",
    ]
    as_json = CliRunner().invoke(app, ["limits", "--json"])
    assert json.loads(as_json.stdout) == ANSWER
    assert asked == [("/v1/limits", {"tenant": "public"}), ("/v1/limits", {})]


def test_without_a_caller_that_is_limited(serve: Callable[[Callable[[httpx.Request], httpx.Response]], None]) -> None:
    serve(lambda _request: httpx.Response(200, json={"owners": []}))
    assert CliRunner().invoke(app, ["limits"]).stdout == "clients without a role have no limits\n"
