"""`bindery produce --access` and `bindery topics release` against a broker that records requests."""

from collections.abc import Callable
from typing import Any

import pytest
from bindery.main import app
from bindery.topics import exclusive, produce
from bindery.topics.broker_api import Broker, BrokerRefused, BrokerUnreachable
from bindery_core.errors import BadRequest
from typer.testing import CliRunner, Result

ACCESS = "/v1/topics/public/default/t/producers/p%2F1/access"


def refused(status: int, code: str) -> BrokerRefused:
    return BrokerRefused(code, http_status=status, problem={"code": code})


class Requests:
    """Replaces the broker's client. `answers`: by method, what is raised first; then all succeed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: list[BaseException]) -> None:
        self.calls: list[tuple[str, str]] = []
        self.options: list[dict[str, Any]] = []
        self._answers = answers
        monkeypatch.setattr(Broker, "request", self._request)
        monkeypatch.setattr(exclusive.time, "sleep", lambda _: None)

    def _request(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        self.calls.append((method, path))
        self.options.append(options)
        if waiting := self._answers.get(method):
            raise waiting.pop(0)
        answers: dict[str, Callable[[], dict[str, Any]]] = {
            "PUT": lambda: {"producer": "p/1", "producer_epoch": 7},
            "POST": lambda: {"message_ids": ["1:0:-1:-1"]},
            "DELETE": lambda: {"released": True},
        }
        return answers[method]()

    @property
    def methods(self) -> list[str]:
        return [method for method, _ in self.calls]


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that send messages are not repeated."""
    monkeypatch.setattr(produce, "REPEAT_S", 0.0)


def run(mode: str = "exclusive", *arguments: str) -> Result:
    command = ["produce", "t", __file__, "--producer", "p/1", "--access", mode, *arguments]
    return CliRunner().invoke(app, command)


@pytest.mark.parametrize("mode", ["exclusive", "exclusive_with_fencing", "wait_for_exclusive"])
def test_the_topic_is_taken_before_the_messages_and_released_after_them(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    requests = Requests(monkeypatch)
    assert run(mode).exit_code == 0
    assert requests.calls == [("PUT", ACCESS), ("POST", "/v1/topics/public/default/t/messages"), ("DELETE", ACCESS)]
    take, send, release = requests.options
    assert take["json"]["access_mode"] == mode
    assert ("wait_ms" in take["json"]) == (mode == "wait_for_exclusive")
    assert (send["params"]["producer"], send["params"]["producer_epoch"]) == ("p/1", 7)
    assert release["params"] == {"producer_epoch": 7}


@pytest.mark.parametrize("error", [refused(413, "too_large"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_the_topic_is_released_if_the_command_fails(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    requests = Requests(monkeypatch, POST=[error])
    assert run().exit_code != 0
    assert requests.methods == ["PUT", "POST", "DELETE"]


def test_a_topic_that_another_producer_has_gets_no_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(monkeypatch, PUT=[refused(409, "producer_fenced")])
    result = run()
    assert isinstance(result.exception, BrokerRefused)
    assert requests.methods == ["PUT"]


def test_the_wait_goes_on_until_the_topic_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [refused(409, "producer_busy"), refused(409, "producer_fenced"), refused(503, "not_owner")]
    requests = Requests(monkeypatch, PUT=[*errors, BrokerUnreachable("the connection broke")])
    result = run("wait_for_exclusive")
    assert result.exit_code == 0
    assert requests.methods == ["PUT"] * 5 + ["POST", "DELETE"]
    assert result.stderr.count("waiting for the topic") == 1


def test_a_wait_that_is_interrupted_releases_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(monkeypatch, PUT=[refused(409, "producer_busy"), KeyboardInterrupt()])
    assert run("wait_for_exclusive").exit_code != 0
    assert requests.methods == ["PUT", "PUT"]


def test_a_topic_that_cannot_be_released_is_reported_with_the_command_that_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = Requests(monkeypatch, DELETE=[refused(400, "bad_request")])
    result = run()
    assert result.exit_code == 0
    assert requests.methods == ["PUT", "POST", "DELETE"]
    assert "`bindery topics release t p/1`" in result.stderr


def test_a_producer_that_was_fenced_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {method: [refused(409, "producer_fenced")] for method in ("POST", "DELETE")}
    Requests(monkeypatch, **errors)
    result = run()
    assert isinstance(result.exception, BrokerRefused)
    assert "warning" not in result.stderr


def test_access_needs_the_name_of_a_producer() -> None:
    result = CliRunner().invoke(app, ["produce", "t", __file__, "--access", "exclusive"])
    assert isinstance(result.exception, BadRequest)


def test_an_operator_releases_a_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(monkeypatch)
    result = CliRunner().invoke(app, ["topics", "release", "t", "p/1"])
    assert (result.exit_code, result.stdout) == (0, "t is released\n")
    assert (requests.calls, requests.options) == ([("DELETE", ACCESS)], [{"params": {}}])
