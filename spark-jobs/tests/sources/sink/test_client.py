"""Requests to brokers: what is repeated, what is not, and what errors say."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from bindery_core.errors import BadRequest
from bindery_pulsar.topic_name import TopicName
from bindery_spark.sources.sink.client import Brokers, SinkRefused, SinkUnavailable

T = TopicName.parse("t")
LINES = [b'{"payload":"a","sequence_id":0}', b'{"payload":"b","sequence_id":1024}']


class World:
    """Brokers a and b whose answers are scripted, on a clock that only moves when the client sleeps."""

    def __init__(self, *answers: httpx.Response | Exception, retry_s: float = 60, token_file: str = "") -> None:
        self.answers = list(answers)
        self.hosts: list[str] = []
        self.bodies: list[bytes] = []
        self.tokens: list[str | None] = []
        self.at_request: Callable[[], None] = lambda: None
        self.now = 0.0
        self.brokers = Brokers(
            ["http://a", "http://b"],
            timeout_s=5,
            retry_s=retry_s,
            now=lambda: self.now,
            sleep=self.sleep,
            randomness=random.Random(1),
            transport=httpx.MockTransport(self.handle),
            token_file=token_file,
        )

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def handle(self, request: httpx.Request) -> httpx.Response:
        self.hosts.append(request.url.host)
        self.bodies.append(request.content)
        self.tokens.append(request.headers.get("authorization"))
        self.at_request()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def send(self) -> None:
        self.brokers.send(T, "p", LINES, [7, 9])


def problem(status: int, **content: object) -> httpx.Response:
    return httpx.Response(status, json={"detail": "made up", "code": "made_up", **content})


DONE = httpx.Response(200, json={"message_ids": ["1:0", "1:1"]})


@pytest.mark.parametrize(
    "failure",
    [
        *(problem(status) for status in (429, 502, 503, 504)),
        problem(409, code="idempotency_key_in_use"),
        httpx.ConnectError("refused"),
        httpx.ReadError("cut"),
        httpx.RemoteProtocolError("cut"),
        httpx.ReadTimeout("slow"),
        httpx.Response(207, json={"results": [{"message_id": "1:0"}, {"error": {"status": 503, "detail": "later"}}]}),
        httpx.Response(503, text="<html>a proxy</html>"),
    ],
)
def test_temporary_failures_are_repeated_with_the_same_content_at_another_broker(
    failure: httpx.Response | Exception,
) -> None:
    world = World(failure, failure, DONE)
    world.send()
    assert world.hosts == ["a", "b", "a"]
    assert world.bodies == [b"\n".join(LINES)] * 3
    assert world.now > 0.2


def test_repeating_ends_after_a_time_with_the_last_reason() -> None:
    world = World(problem(503), retry_s=20)
    with pytest.raises(SinkUnavailable, match=r"rows 7 to 9 of topic public/default/t within 20 s.*made up \(503"):
        world.send()
    assert 10 < world.now <= 20


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (problem(400, facts={"index": 1}), r"row 9 was refused: made up \(400, made_up\)"),
        (problem(413), "rows 7 to 9 of topic public/default/t were refused"),
        (problem(409), "were refused"),
        (httpx.Response(500, text="oops"), r"oops \(500\)"),
        (
            httpx.Response(
                207, json={"results": [{"message_id": "1:0"}, {"error": {"status": 409, "detail": "terminated"}}]}
            ),
            "row 9 was refused: terminated",
        ),
    ],
)
def test_other_failures_are_not_repeated_and_name_the_row(answer: httpx.Response, reason: str) -> None:
    world = World(answer)
    with pytest.raises(SinkRefused, match=reason):
        world.send()
    assert world.hosts == ["a"]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda: httpx.Response(200, json={"last_sequence_id": 5}), 5),
        (lambda: httpx.Response(200, json={"last_sequence_id": -1}), -1),
        (lambda: problem(404, code="no_such_topic"), -1),
    ],
)
def test_the_last_sequence_id_of_a_producer(answer: Callable[[], httpx.Response], expected: int) -> None:
    world = World(problem(503), answer())
    assert world.brokers.last_sequence_id(T, "spark-x-0") == expected


def test_a_broker_that_does_not_deduplicate_is_refused() -> None:
    with pytest.raises(SinkRefused, match="the brokers are too old"):
        World(problem(404, code="not_found")).brokers.last_sequence_id(T, "p")
    with pytest.raises(SinkRefused, match="made up"):
        World(problem(500)).brokers.last_sequence_id(T, "p")
    assert json.loads(LINES[0])["sequence_id"] == 0


# --- credentials ------------------------------------------------------------------------------------------------------

DENIED = problem(401, detail="the token has expired", code="unauthorized")


def replace(path: Path, token: str) -> None:
    new = path.with_name("new")
    new.write_text(token + "\n")
    new.rename(path)


def test_every_request_has_the_token_of_the_file_as_it_is_then(tmp_path: Path) -> None:
    path = tmp_path / "token"
    replace(path, "one")
    world = World(httpx.Response(200, json={"last_sequence_id": 5}), DONE, token_file=str(path))
    world.brokers.last_sequence_id(T, "p")
    replace(path, "two")
    world.send()
    assert world.tokens == ["Bearer one", "Bearer two"]
    assert World(DONE).tokens == []
    world = World(DONE)
    world.send()
    assert world.tokens == [None]


def test_a_token_that_is_replaced_during_a_request_is_sent_at_once(tmp_path: Path) -> None:
    path = tmp_path / "token"
    replace(path, "one")
    world = World(DENIED, DONE, token_file=str(path))
    world.at_request = lambda: replace(path, "two") if len(world.tokens) == 1 else None
    world.send()
    assert (world.tokens, world.now) == (["Bearer one", "Bearer two"], 0)


@pytest.mark.parametrize(
    ("answer", "has_token", "what_to_do"),
    [
        (DENIED, False, "No token was sent: name its file in option token_file or BINDERY_TOKEN_FILE"),
        (DENIED, True, "Put a token that the brokers accept into "),
        (problem(403), True, "bindery permissions grant"),
    ],
)
def test_a_refused_job_ends_at_once_and_says_what_to_do(
    tmp_path: Path, answer: httpx.Response, has_token: bool, what_to_do: str
) -> None:
    path = tmp_path / "token"
    replace(path, "s3cret")
    world = World(answer, token_file=str(path) if has_token else "")
    with pytest.raises(SinkRefused, match=r"rows 7 to 9 of topic public/default/t: the broker refuses this job") as e:
        world.send()
    assert what_to_do in str(e.value)
    assert json.loads(answer.content)["detail"] in str(e.value)
    assert "s3cret" not in str(e.value)
    assert (world.hosts, world.now) == (["a"], 0)


def test_certificates_that_no_broker_proves_end_the_job_and_one_of_two_does_not() -> None:
    untrusted = httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate")
    world = World(untrusted)
    with pytest.raises(SinkRefused, match=r"no broker is trusted: .*in option ca_file or BINDERY_HTTP_CA_FILE"):
        world.send()
    assert world.hosts == ["a", "b"]
    world = World(untrusted, DONE)
    world.send()
    assert world.hosts == ["a", "b"]


@pytest.mark.parametrize("content", ["two words", "caf\u00e9", "a\x00b"])
def test_a_file_that_is_no_token_is_refused_before_anything_is_sent(tmp_path: Path, content: str) -> None:
    path = tmp_path / "token"
    replace(path, content)
    world = World(DONE, token_file=str(path))
    with pytest.raises(BadRequest, match="a file whose first line is not a token") as error:
        world.send()
    assert content not in str(error.value)
    assert world.hosts == []
    with pytest.raises(BadRequest, match="cannot use option token_file or BINDERY_TOKEN_FILE: cannot read"):
        World(DONE, token_file=str(tmp_path / "none"))
