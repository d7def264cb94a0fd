"""`bindery brokers` against a broker in memory."""

import json
from collections.abc import Callable
from typing import Any

import httpx
from bindery.main import app
from typer.testing import CliRunner

Serve = Callable[[Callable[[httpx.Request], httpx.Response]], None]
LOAD = {
    "messages_in_rate": 3.0, "messages_out_rate": 4.0, "bytes_in_rate": 1024.0, "bytes_out_rate": 1024.0,
    "topics": 5, "consumers": 1, "producers": 0,
}  # fmt: skip
LIST: dict[str, Any] = {
    "leader": "a:1",
    "brokers": [
        {
            "broker": name, "url": f"http://{name}", "kind": "bindery", "version": "1", "leader": name == "a:1",
            "draining": name == "b:1", "weight": 12.6, "cpu_percent": 7.2, "memory_mib": 64.0,
            "memory_limit_mib": 512.0, "bundles": 2, "load": LOAD, "reported_at": 1,
        }
        for name in ("a:1", "b:1")
    ],
}  # fmt: skip


def test_brokers_and_their_bundles(serve: Serve) -> None:
    paths = []

    def answer(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.path)
        if request.url.path == "/v1/brokers":
            return httpx.Response(200, json=LIST)
        found = {"broker": "a:1", "count": 3, "bundles": [{"bundle": "t/n/0x0_0x1", "weight": 9.0, "load": LOAD}]}
        return httpx.Response(200, json=found)

    serve(answer)
    runner = CliRunner()
    lines = runner.invoke(app, ["brokers", "list"]).stdout.splitlines()
    assert lines[0].split()[:4] == ["broker", "kind", "role", "bundles"]
    assert lines[1].split() == [
        "a:1",
        "bindery",
        "leader",
        "2",
        "5",
        "7/s",
        "2.0",
        "KiB/s",
        "7",
        "%",
        "64.0",
        "MiB",
        "13",
    ]
    assert lines[2].split()[2] == "draining"
    assert json.loads(runner.invoke(app, ["brokers", "list", "--json"]).stdout) == LIST
    lines = runner.invoke(app, ["brokers", "bundles", "a:1"]).stdout.splitlines()
    assert lines[1].split()[:3] == ["t/n/0x0_0x1", "5", "7/s"]
    assert lines[2] == "and 2 with less load"
    assert paths == ["/v1/brokers", "/v1/brokers", "/v1/brokers/a:1/bundles"]
