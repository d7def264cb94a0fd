"""`bindery topics compact` against a broker in memory."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from bindery.main import app
from bindery.topics import commands
from typer.testing import CliRunner, Result

Serve = Callable[[Callable[[httpx.Request], httpx.Response]], None]
DONE: dict[str, Any] = {
    "status": "SUCCESS", "last_error": "", "keys": 1, "entries_read": 5, "horizon": "3:4", "bytes_not_compacted": 0,
}  # fmt: skip


def compact(*words: str) -> Result:
    return CliRunner().invoke(app, ["topics", "compact", "prices", *words])


@pytest.fixture
def calls(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(commands, "COMPACTION_POLL_S", 0)
    made: list[str] = []
    answers = [{**DONE, "status": "RUNNING", "horizon": None}, {**DONE, "status": "RUNNING"}, DONE]

    def broker(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/topics/public/default/prices/compaction"
        made.append(request.method)
        return httpx.Response(200, json=answers[min(len(made), len(answers)) - 1])

    serve(broker)
    return made


def test_it_starts_a_compaction_and_waits_for_its_end(calls: list[str]) -> None:
    done = compact()
    assert (done.exit_code, done.stdout) == (
        0, "SUCCESS: 1 key, 5 entries read\ncompacted up to 3:4, 0 bytes since then\n",
    )  # fmt: skip
    assert calls == ["PUT", "GET", "GET"]


def test_the_status_starts_nothing(calls: list[str]) -> None:
    assert json.loads(compact("--status", "--json").stdout)["status"] == "RUNNING"
    assert calls == ["GET"]


def test_an_error_is_a_failure(serve: Serve) -> None:
    failed = {**DONE, "status": "ERROR", "last_error": "too many keys", "horizon": None}
    serve(lambda _request: httpx.Response(200, json=failed))
    done = compact()
    assert (done.exit_code, done.stdout) == (1, "ERROR: too many keys\nnever compacted, 0 bytes since then\n")
