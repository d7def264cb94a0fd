"""`bindery consume` against a broker in memory: acknowledgements, options that exclude each other, reconnecting."""

import json
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from bindery.main import app
from bindery.topics.broker_api import Broker, BrokerRefused, BrokerUnreachable
from bindery.topics.consume import LEAVE_TIMEOUT_S, RETRY_S_MAX, Retries, _print_message, _read, _receive
from bindery_core.errors import BadRequest
from typer.testing import CliRunner


class Recorder:
    """Replaces a broker: returns `messages` once, records the requests, and raises `failures` first."""

    def __init__(self, messages: list[str], failures: list[Exception | None] | None = None) -> None:
        self.messages = messages
        self.calls: list[tuple[str, Any]] = []
        self.bodies: list[dict[str, Any]] = []
        self._failures = failures or []

    def post(self, path: str, body: Any) -> Any:
        verb = path.rpartition("/")[2]
        self.calls.append((verb, body.get("message_ids") or body.get("ack")))
        self.bodies.append(body)
        if self._failures and (error := self._failures.pop(0)) is not None:
            raise error
        if verb != "receive":
            return {}
        batch, self.messages = self.messages, []
        return {"messages": [{"message_id": message_id} for message_id in batch]}

    def request(self, method: str, path: str, **options: Any) -> Any:
        consumer = path.rpartition("/")[2]
        assert (method, {body["consumer"] for body in self.bodies}) == ("DELETE", {consumer})
        assert options["timeout"] == LEAVE_TIMEOUT_S
        self.calls.append(("leave", None))
        if self._failures and (error := self._failures.pop(0)) is not None:
            raise error

    def get(self, path: str, **query: Any) -> Any:
        self.calls.append(("get", query["start"]))
        if self._failures and (error := self._failures.pop(0)) is not None:
            raise error
        batch, self.messages = self.messages[:1], self.messages[1:]
        return {"messages": batch, "next": f"{query['start']}+{len(batch)}"}


def receive(
    broker: Recorder, *, follow: bool = False, maximum: int | None = None, retries: Retries | None = None
) -> Any:
    retries = retries or Retries(is_enabled=False)
    fields = {"type": "shared"}
    return _receive(broker, "/t", "s", fields, follow=follow, maximum=maximum, retries=retries)  # type: ignore[arg-type]


def test_printed_messages_are_acknowledged_and_the_others_returned() -> None:
    broker = Recorder(["1", "2", "3"])
    source = receive(broker)
    assert next(source)["message_id"] == "1"
    assert next(source)["message_id"] == "2"
    source.close()  # the reader of the pipe is gone, possibly before it read the second
    assert broker.calls == [("receive", None), ("ack", ["1"]), ("leave", None)]


def test_a_drained_subscription_ends_consume() -> None:
    broker = Recorder(["1"])
    assert len(list(receive(broker))) == 1
    assert broker.calls == [("receive", None), ("receive", ["1"]), ("leave", None)]


def test_the_consumer_leaves_also_if_the_last_acknowledgement_fails() -> None:
    broker = Recorder(["1", "2"], [None, BROKEN])
    source = receive(broker)
    next(source)
    next(source)
    with pytest.raises(BrokerUnreachable):
        source.close()
    assert broker.calls == [("receive", None), ("ack", ["1"]), ("leave", None)]


def test_a_consumer_that_cannot_leave_is_no_failure() -> None:
    broker = Recorder(["1"], [None, None, BROKEN])
    assert len(list(receive(broker, maximum=1))) == 1
    assert broker.calls == [("receive", None), ("ack", ["1"]), ("leave", None)]


def test_acknowledgements_are_repeated_in_a_request_whose_outcome_is_unknown() -> None:
    broker = Recorder(["1"], [None, BROKEN])
    retries = Retries(is_enabled=True, sleep=lambda seconds: None)
    source = receive(broker, follow=True, retries=retries)
    assert next(source)["message_id"] == "1"
    broker.messages = ["2"]
    assert next(source)["message_id"] == "2"
    source.close()
    assert broker.calls == [("receive", None), ("receive", ["1"]), ("receive", ["1"]), ("leave", None)]
    assert [body["request_id"] for body in broker.bodies] == ["0", "1", "1"]


BROKEN = BrokerUnreachable("the connection broke")
MOVING = BrokerRefused("the topic is moving", http_status=503, problem={})
BUSY = BrokerRefused("too many requests", http_status=429, problem={})
GONE = BrokerRefused("no such topic", http_status=404, problem={})


def test_follow_reconnects_with_growing_delays_and_continues_at_its_position(
    capsys: pytest.CaptureFixture[str],
) -> None:
    slept: list[float] = []
    retries = Retries(is_enabled=True, sleep=slept.append)
    broker = Recorder(["a", "b"], [None, BROKEN, BUSY, MOVING])
    source = _read(broker, "/t", "earliest", follow=True, maximum=2, retries=retries)  # type: ignore[arg-type]
    assert list(source) == ["a", "b"]
    assert broker.calls == [("get", "earliest"), *[("get", "earliest+1")] * 4]
    assert len(slept) == 3
    assert slept == sorted(slept)
    assert max(slept) < RETRY_S_MAX
    assert capsys.readouterr().err == "connection lost, reconnecting: the connection broke\nreconnected\n"


def test_an_acknowledgement_is_repeated_after_the_connection_broke() -> None:
    broker = Recorder(["1"], [None, BROKEN])
    retries = Retries(is_enabled=True, sleep=lambda seconds: None)
    assert len(list(receive(broker, follow=True, maximum=1, retries=retries))) == 1
    assert broker.calls == [("receive", None), ("ack", ["1"]), ("ack", ["1"]), ("leave", None)]


@pytest.mark.parametrize(
    ("is_enabled", "failures"),
    [(False, [None, BROKEN]), (True, [BROKEN]), (True, [None, GONE])],
    ids=["without follow", "never connected", "not temporary"],
)
def test_other_errors_end_consume(is_enabled: bool, failures: list[Exception | None]) -> None:
    broker = Recorder(["a", "b"], failures)
    retries = Retries(is_enabled=is_enabled, sleep=lambda seconds: None)
    source = _read(broker, "/t", "earliest", follow=True, maximum=2, retries=retries)  # type: ignore[arg-type]
    with pytest.raises((BrokerUnreachable, BrokerRefused)):
        list(source)


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("latest", "latest"),
        ("5:0", "5:0"),
        ("5:0:-1:3", "5:0:-1:3"),
        ("1970-01-01T00:00:01Z", "@1000"),
        ("@5", "@5"),
        ("1m", "@940000"),
    ],
)
def test_reading_begins_at_a_place_or_a_time(given: str, sent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[str] = []

    def get(_broker: Broker, _path: str, **query: Any) -> dict[str, Any]:
        starts.append(query["start"])
        return {"messages": [], "next": "6:0"}

    monkeypatch.setattr(Broker, "get", get)
    monkeypatch.setattr("bindery.common.operator.now_ms", lambda: 1_000_000)
    assert CliRunner().invoke(app, ["consume", "t", "--start", given]).exit_code == 0
    assert starts == [sent]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["-s", "me"], "--subscription needs --ack"),
        (["--type", "failover"], "--type needs --ack"),
        (["--priority", "0"], "--priority needs --ack"),
        (["--key-range", "0-1"], "--key-range needs --ack"),
        (["--no-durable"], "--no-durable needs --ack"),
        (["--ack", "--start", "earliest"], "--start cannot be used"),
        (["--start", "soon"], "--start is earliest, latest, a message id, or a time"),
        (["--start", "5"], "--start is earliest, latest, a message id, or a time"),
        (["--ack", "--type", "key_shared", "--priority", "1"], "--priority has no effect with --type key_shared"),
        (["--ack", "--key-range", "0-1"], "--key-range needs --type key_shared"),
        (["--ack", "--allow-out-of-order"], "--allow-out-of-order needs --type key_shared"),
        (["--ack", "--type", "key_shared", "--key-range", "5-4"], "not a range of key hashes"),
        (["--ack", "--type", "key_shared", "--key-range", "0-65536"], "not a range of key hashes"),
        (["--ack", "--type", "key_shared", "--key-range", "0"], "not a range of key hashes"),
    ],
)
def test_options_without_effect_are_refused(arguments: list[str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Broker, "request", lambda *_, **__: pytest.fail("no request"))
    refused = CliRunner().invoke(app, ["consume", "t", *arguments]).exception
    assert isinstance(refused, BadRequest)
    assert str(refused).startswith(reason)


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ([], {"type": "shared"}),
        (["--priority", "2"], {"type": "shared", "priority": 2}),
        (["--type", "failover", "--no-durable"], {"type": "failover", "durable": False}),
        (["--type", "key_shared", "--allow-out-of-order"],
         {"type": "key_shared", "key_shared": {"allow_out_of_order": True}}),
        (["--type", "key_shared", "--key-range", "0-9", "--key-range", "20-65535"],
         {"type": "key_shared", "key_shared": {"mode": "sticky", "ranges": [[0, 9], [20, 65_535]]}}),
    ],
)  # fmt: skip
def test_options_of_the_subscription_are_sent(
    arguments: list[str], fields: dict[str, Any], serve: Callable[[Callable[[httpx.Request], httpx.Response]], None]
) -> None:
    bodies: list[dict[str, Any]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            bodies.append(json.loads(request.read()))
        return httpx.Response(200, json={"messages": []})

    serve(handler)
    done = CliRunner().invoke(app, ["consume", "t", "--ack", *arguments])
    assert done.exit_code == 0, done.output
    (body,) = bodies
    assert {
        name: value for name, value in body.items() if name not in ("consumer", "request_id", "max", "wait_ms")
    } == fields


def test_what_stops_the_consumer_is_printed_once(
    serve: Callable[[Callable[[httpx.Request], httpx.Response]], None],
) -> None:
    message = {"message_id": "5:0:-1:-1", "payload": "a"}
    reason = {"code": "not_active", "detail": "consumer \x1bc1 is the active one", "consumer": "c1"}
    answers = [{"messages": [], "blocked": reason}, {"messages": [], "blocked": reason}, {"messages": [message]}]

    def handler(request: httpx.Request) -> httpx.Response:
        is_receive = request.url.path.endswith("/receive")
        return httpx.Response(200, json=answers.pop(0) if is_receive else {"acknowledged": 1})

    serve(handler)
    done = CliRunner().invoke(app, ["consume", "t", "--ack", "--follow", "--max", "1", "--type", "failover"])
    assert (done.exit_code, done.stdout) == (0, "a\n")
    assert done.stderr == "bindery: no messages: consumer \\u001bc1 is the active one\n"


def test_payloads_that_are_not_decoded_are_printed_as_stored_with_one_warning(
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    noted: set[str] = set()
    for number, reason in enumerate(["chunk", "chunk", "encrypted"]):
        message = {"message_id": f"5:{number}", "payload_base64": "AP8=", "encoding": {"reason": reason}}
        _print_message(message, noted, as_json=False)
    out, err = capsysbinary.readouterr()
    assert out == b"\x00\xff\n" * 3
    first, second = err.decode().splitlines()
    assert "5:0 is not decoded (chunk)" in first
    assert "5:2 is not decoded (encrypted)" in second
    _print_message(message, noted, as_json=True)
    assert b'"reason": "encrypted"' in capsysbinary.readouterr().out


def test_a_terminal_gets_no_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"message_id": "5:0", "payload": "a\x1b[2J\tb\nc\x9b"}, {"message_id": "5:1", "payload_base64": "AP8="}]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for message in messages:
        _print_message(message, set(), as_json=False)
    assert capsys.readouterr().out == "a\\u001b[2J   b\nc\\u009b\n\\u0000\\xff\n"
    _print_message(messages[0], set(), as_json=True)
    line = capsys.readouterr().out
    assert line[:-1].isprintable()
    assert json.loads(line) == messages[0]
