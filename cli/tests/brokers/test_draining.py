"""`bindery brokers drain` and `undrain`, against a broker in memory."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from bindery.brokers import draining
from bindery.main import app
from typer.testing import CliRunner, Result

Serve = Callable[[Callable[[httpx.Request], httpx.Response]], None]


def status(state: str, *, moved: int, left: int, blocked: bool = False) -> dict[str, Any]:
    return {
        "broker": "b0:8080",
        "state": state,
        "moved": moved,
        "left": left,
        "rate": 2.0,
        "seconds": moved / 2,
        "eta_s": left / 2,
        "blocked": blocked,
    }


class Broker:
    """Answers each request with the next of `answers`, and keeps the requests."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[str, str]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.calls.append((request.method, request.url.path))
        return httpx.Response(200, json=self.answers.pop(0))


def run(*words: str) -> Result:
    return CliRunner().invoke(app, words)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "POLL_S", 0.0)


def test_a_drain_is_started_and_its_progress_is_shown_by_the_same_command(serve: Serve) -> None:
    serve(broker := Broker(status("draining", moved=1, left=3)))
    result = run("brokers", "drain", "b0:8080")
    assert (result.exit_code, result.stdout) == (0, "b0:8080: 1 moved, 3 left, 2 bundles/s, about 2 s left\n")
    assert broker.calls == [("POST", "/v1/brokers/b0:8080/drain")]


def test_wait_ends_when_the_broker_has_no_bundles(serve: Serve) -> None:
    steps = [
        status("draining", moved=0, left=4),
        status("draining", moved=3, left=1),
        status("drained", moved=4, left=0),
    ]
    serve(broker := Broker(*steps))
    result = run("brokers", "drain", "--wait")
    assert (result.exit_code, result.stdout) == (0, "b0:8080 is drained: 4 bundles moved in 2.0 s\n")
    assert broker.calls == [("POST", "/v1/brokers/local/drain"), *[("GET", "/v1/brokers/local/drain")] * 2]


def test_wait_prints_the_steps_as_json(serve: Serve) -> None:
    serve(Broker(status("draining", moved=0, left=1), status("drained", moved=1, left=0)))
    lines = [json.loads(line) for line in run("brokers", "drain", "--wait", "--json").stdout.splitlines()]
    assert [line["state"] for line in lines] == ["draining", "drained"]
    assert lines[0]["kind"] == "progress"
    assert lines[0]["eta_s"] == 0.5


def test_wait_fails_if_no_other_broker_takes_the_bundles(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "BLOCKED_S", -1.0)
    serve(Broker(status("draining", moved=0, left=2, blocked=True)))
    result = run("brokers", "drain", "--wait")
    assert result.exit_code == 1
    assert "no other broker takes the 2 bundles that b0:8080 still has" in result.stderr


def test_wait_fails_if_somebody_cancels_the_drain(serve: Serve) -> None:
    serve(Broker(status("draining", moved=0, left=2), status("active", moved=1, left=1)))
    result = run("brokers", "drain", "--wait")
    assert (result.exit_code, result.stdout) == (1, "b0:8080 is not being drained; it has 1 bundle\n")


def test_a_drain_is_cancelled(serve: Serve) -> None:
    serve(broker := Broker(status("active", moved=1, left=1)))
    assert run("brokers", "undrain", "b0:8080").stdout == "b0:8080 takes bundles again; it has 1 bundle\n"
    assert broker.calls == [("POST", "/v1/brokers/b0:8080/undrain")]
