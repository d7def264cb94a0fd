"""`bindery produce` against a broker that records requests: batches, lingering, errors in the middle of a file."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from bindery.main import app
from bindery.topics import produce
from bindery.topics.broker_api import Broker, BrokerRefused, BrokerUnreachable
from bindery.topics.produce import BATCH_LINES_MAX, LINE_SIZE_MAX, LINGER_S, LineRefused, _batches, _message_line
from bindery_core.errors import BadRequest
from typer.testing import CliRunner, Result


class Requests:
    """Replaces the broker's client. Refuses line `bad` of the whole input as the broker does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, bad: bytes = b"\0", fail_from: int = 99) -> None:
        self.bodies: list[bytes] = []
        self.options: list[dict[str, Any]] = []
        self._bad = bad
        self._fail_from = fail_from
        monkeypatch.setattr(Broker, "request", self._request)

    def _request(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        if len(self.bodies) + 1 >= self._fail_from:
            raise BrokerUnreachable("the connection broke")
        lines = options["content"].splitlines()
        for number, line in enumerate(lines, 1):
            if line == self._bad:
                problem = {"detail": f"line {number}: Expected `object`", "code": "bad_request"}
                raise BrokerRefused(f"{problem['detail']} (400)", http_status=400, problem=problem)
        self.bodies.append(options["content"])
        self.options.append(options)
        return {"message_ids": [f"1:{at}" for at in range(len(lines))]}


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are not repeated, unless a test says so."""
    monkeypatch.setattr(produce, "REPEAT_S", 0.0)


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["produce", "t", *arguments], input=stdin)


@pytest.fixture
def pipe() -> Iterator[tuple[IO[bytes], int]]:
    read, write = os.pipe()
    with os.fdopen(read, "rb") as stream:
        yield stream, write
        with contextlib.suppress(OSError):  # closed by the test
            os.close(write)


def batches_of(data: bytes, path: Path) -> list[list[bytes]]:
    path.write_bytes(data)
    with path.open("rb") as stream:
        return list(_batches(stream))


def test_lines_are_grouped_into_requests_of_bounded_size(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    assert [len(batch) for batch in batches_of(b"x\n" * (2 * BATCH_LINES_MAX + 1), file)] == [
        BATCH_LINES_MAX,
        BATCH_LINES_MAX,
        1,
    ]
    assert [len(batch) for batch in batches_of((b"y" * 600_000 + b"\n") * 3, file)] == [2, 1]
    assert batches_of(b"a\n\nb", file) == [[b"a\n", b"\n", b"b"]]
    assert batches_of(b"", file) == []
    with pytest.raises(BadRequest, match="longer than"):
        batches_of(b"z" * (LINE_SIZE_MAX + 1), file)


def test_a_line_is_sent_although_the_writer_pauses(pipe: tuple[IO[bytes], int]) -> None:
    stream, write = pipe
    batches = _batches(stream)
    os.write(write, b"one\ntwo\nhal")
    began = time.monotonic()
    assert next(batches) == [b"one\n", b"two\n"]
    assert LINGER_S * 0.9 <= time.monotonic() - began < 20 * LINGER_S, "only whole lines, after the linger time"
    os.write(write, b"f\n")
    assert next(batches) == [b"half\n"]
    os.write(write, b"last")
    os.close(write)
    assert list(batches) == [[b"last"]]


def test_a_writer_that_never_pauses_does_not_delay_a_line(pipe: tuple[IO[bytes], int]) -> None:
    stream, write = pipe
    stopped = threading.Event()

    def keep_writing() -> None:
        while not stopped.wait(LINGER_S / 10):
            os.write(write, b"x\n")

    writer = threading.Thread(target=keep_writing)
    writer.start()
    try:
        assert len(next(_batches(stream))) < BATCH_LINES_MAX
    finally:
        stopped.set()
        writer.join()


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        (b"text\n", "payload", "text"),
        (b"dos\r\n", "payload", "dos"),
        (b"\n", "payload", ""),
        (b"\xff", "payload_base64", "/w=="),
    ],
)
def test_a_line_is_sent_as_text_if_it_is_utf_8(line: bytes, field: str, value: str) -> None:
    assert json.loads(_message_line(line, {"key": "k"})) == {field: value, "key": "k"}


def test_a_bad_line_is_reported_with_its_number_in_the_file_and_how_to_continue(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    requests = Requests(monkeypatch, bad=b"{bad")
    file = tmp_path / "messages.ndjson"
    lines = ['{"payload": "a"}'] * 1210
    lines[1199] = "{bad"
    file.write_text("\n".join(lines))
    result = run(str(file), "--ndjson")
    assert isinstance(result.exception, LineRefused)
    assert str(result.exception) == (
        f"{file}, line 1200: Expected `object`; 1000 messages sent, none from line 1001 on. Correct the line, then "
        f"continue with `tail -n +1001 {file} | bindery produce ... --ndjson`"
    )
    assert sum(map(len, (body.splitlines() for body in requests.bodies))) == 1000


def test_a_broken_connection_is_reported_with_the_number_of_sent_messages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Requests(monkeypatch, fail_from=2)
    file = tmp_path / "messages.ndjson"
    file.write_text('{"payload": "a"}\n' * 700)
    result = run(str(file), "--ndjson")
    assert isinstance(result.exception, BrokerUnreachable)
    assert "500 messages sent before this error" in result.stderr


def test_key_tags_and_properties_apply_to_message_objects(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requests = Requests(monkeypatch)
    file = tmp_path / "messages.ndjson"
    file.write_text('{"payload": "a"}\n')
    assert run(str(file), "--ndjson", "--key", "k", "--tags", "x||y", "--property", "colour=dark blue").exit_code == 0
    (options,) = requests.options
    assert options["params"] == {"key": "k", "tags": "x||y"}
    assert options["headers"]["bindery-property-colour"] == "dark%20blue"
    refused = run(str(file), "--ndjson", "--property", "Colour=blue").exception
    assert isinstance(refused, BadRequest)
    assert "lower-case letters" in str(refused)


@pytest.mark.parametrize(
    ("option", "field"),
    [
        (("--deliver-after", "1m30s"), {"deliver_after_ms": 90_000}),
        (("--deliver-at", "2026-12-01T08:00:00Z"), {"deliver_at": 1_796_112_000_000}),
    ],
)
def test_a_delay_applies_to_files_lines_and_message_objects(
    option: tuple[str, str], field: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    requests = Requests(monkeypatch)
    file, lines = tmp_path / "payload", tmp_path / "lines"
    file.write_text("x")
    lines.write_text('{"payload": "x"}\n')
    assert run(str(file), *option).exit_code == 0
    assert run(str(lines), "--ndjson", *option).exit_code == 0
    assert [options["params"] for options in requests.options] == [field, field]
    assert run(str(file), "--property", "A=b", *option).exit_code == 0
    assert field.items() <= json.loads(requests.bodies[2]).items(), "the property needs a message object"
    line = json.loads(_message_line(b"x\n", produce._delivery_time(**_options(option))))
    assert line == {"payload": "x", **field}


def _options(option: tuple[str, str]) -> dict[str, Any]:
    name, value = option
    return {"after": value, "at": None} if name == "--deliver-after" else {"after": None, "at": value}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--deliver-after", "1s", "--deliver-at", "2026-12-01T08:00:00Z"], "exclude each other"),
        (["--deliver-after", "soon"], "not a duration"),
        (["--deliver-at", "2026-12-01T08:00:00"], "not a time with its zone"),
    ],
)
def test_a_wrong_delay_is_refused_before_anything_is_sent(
    options: list[str], reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    requests = Requests(monkeypatch)
    file = tmp_path / "payload"
    file.write_text("x")
    refused = run(str(file), *options).exception
    assert isinstance(refused, BadRequest)
    assert reason in str(refused)
    assert requests.bodies == []


def test_an_array_is_refused_with_the_conversion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requests = Requests(monkeypatch)
    file = tmp_path / "messages.json"
    file.write_text('\n[{"payload": "a"}]\n')
    refused = run(str(file), "--ndjson").exception
    assert isinstance(refused, BadRequest)
    assert "jq -c '.[]'" in str(refused)
    assert requests.bodies == []


def test_empty_input_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requests = Requests(monkeypatch)
    empty = tmp_path / "empty"
    empty.touch()
    result = run(str(empty))
    assert f"warning: {empty} is empty: sending an empty message" in result.stderr
    assert len(requests.bodies) == 1
    result = run(str(empty), "--ndjson")
    assert (result.exit_code, result.stdout) == (0, "0 messages sent\n")
    assert f"warning: {empty} is empty: no message was sent" in result.stderr


def test_messages_that_were_not_stored_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "payload"
    file.write_text("x")
    answer = {"results": [{"message_id": "1:0"}, {"error": {"detail": "no bookies", "code": "not_stored"}}]}
    monkeypatch.setattr(produce, "_send_file", lambda *arguments: answer)
    result = run(str(file))
    assert (result.exit_code, result.stdout) == (1, "1 message sent\n")
    assert result.stderr == "bindery: 1 message not stored; first error: no bookies (not_stored)\n"
    result = run(str(file), "--json")
    assert json.loads(result.stderr)["error"]["code"] == "not_stored"


def answers(monkeypatch: pytest.MonkeyPatch, *results: Any) -> list[dict[str, Any]]:
    """Let the broker give these answers, or raise these errors, in turn. Returns the options of the requests."""
    options: list[dict[str, Any]] = []
    left = list(results)

    def request(_broker: Broker, _method: str, _path: str, **given: Any) -> Any:
        options.append(given)
        result = left.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(Broker, "request", request)
    monkeypatch.setattr(produce, "REPEAT_S", 60.0)
    monkeypatch.setattr(produce.time, "sleep", lambda _seconds: None)
    return options


def refused(status: int, code: str = "try_again") -> BrokerRefused:
    return BrokerRefused("made up", http_status=status, problem={"code": code})


def test_a_request_is_repeated_with_its_key_until_everything_is_stored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "payload"
    file.write_text("x")
    partly = {"results": [{"error": {"code": "try_again", "detail": "made up"}}]}
    errors = [BrokerUnreachable("cut"), refused(503), refused(504), refused(429), refused(409, produce.IN_USE)]
    options = answers(monkeypatch, *errors, partly, {"message_ids": ["1:0"]})
    result = run(str(file))
    assert (result.exit_code, result.stdout) == (0, "1 message sent\n")
    assert len(options) == 7
    assert len({one["headers"]["idempotency-key"] for one in options}) == 1


@pytest.mark.parametrize("error", [refused(400), refused(409, "conflict"), refused(422), refused(500)], ids=str)
def test_a_refused_request_is_not_repeated(
    error: BrokerRefused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "payload"
    file.write_text("x")
    options = answers(monkeypatch, error)
    assert run(str(file)).exception is error
    assert len(options) == 1


def test_a_wrong_address_is_reported_at_once_but_a_broker_that_restarts_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "payload"
    file.write_text("x")
    absent = BrokerUnreachable("no broker")
    absent.is_absent = True
    assert len(answers(monkeypatch, absent)) == 0
    assert run(str(file)).exception is absent
    options = answers(monkeypatch, {"message_ids": ["1:0"]}, absent, absent, {"message_ids": ["1:1"]})
    assert run(str(file), str(file)).exit_code == 0
    assert len(options) == 4


def test_each_request_has_another_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requests = Requests(monkeypatch)
    file = tmp_path / "payload"
    file.write_text("x")
    assert run(str(file), str(file), "--idempotency-key", "mine").exit_code == 0
    assert [one["headers"]["idempotency-key"] for one in requests.options] == ["mine-1", "mine-2"]
    run(str(file))
    run(str(file))
    keys = [one["headers"]["idempotency-key"] for one in requests.options[2:]]
    assert len(set(keys)) == 2


def test_sequence_ids_count_the_messages_of_a_producer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requests = Requests(monkeypatch)
    file = tmp_path / "lines"
    file.write_text('{"payload": "a"}\n\n' * (BATCH_LINES_MAX // 2) + '{"payload": "b"}\n')
    assert run(str(file), "--ndjson", "--producer", "p", "--sequence-id", "5").exit_code == 0
    assert [one["params"] for one in requests.options] == [
        {"producer": "p", "sequence_id": 5},
        {"producer": "p", "sequence_id": 5 + BATCH_LINES_MAX // 2},
    ]
    assert all("idempotency-key" not in one["headers"] for one in requests.options)


def test_with_a_key_of_the_user_requests_do_not_depend_on_the_time(pipe: tuple[IO[bytes], int]) -> None:
    stream, write = pipe
    os.write(write, b"one\n")
    timer = threading.Timer(3 * LINGER_S, lambda: (os.write(write, b"two\n"), os.close(write)))
    timer.start()
    assert list(_batches(stream, lingers=False)) == [[b"one\n", b"two\n"]]
    timer.join()


@pytest.mark.parametrize(
    "options", [["--sequence-id", "1"], ["--producer", "p", "--sequence-id", "1", "--idempotency-key", "k"]]
)
def test_options_that_do_not_fit_are_refused(options: list[str]) -> None:
    assert isinstance(run(*options, stdin="x").exception, BadRequest)
