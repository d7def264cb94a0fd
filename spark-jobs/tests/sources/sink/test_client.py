"""Requests to brokers: what is repeated, what is not, and what errors say."""

import json
import random
from collections.abc import Callable

import httpx
import pytest
from bindery_pulsar.topic_name import TopicName
from bindery_spark.sources.sink.client import Brokers, SinkRefused, SinkUnavailable

T = TopicName.parse("t")
LINES = [b'{"payload":"a","sequence_id":0}', b'{"payload":"b","sequence_id":1024}']


class World:
    """Brokers a and b whose answers are scripted, on a clock that only moves when the client sleeps."""

    def __init__(self, *answers: httpx.Response | Exception, retry_s: float = 60) -> None:
        self.answers = list(answers)
        self.hosts: list[str] = []
        self.bodies: list[bytes] = []
        self.now = 0.0
        self.brokers = Brokers(
            ["http://a", "http://b"],
            timeout_s=5,
            retry_s=retry_s,
            now=lambda: self.now,
            sleep=self.sleep,
            randomness=random.Random(1),
            transport=httpx.MockTransport(self.handle),
        )

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def handle(self, request: httpx.Request) -> httpx.Response:
        self.hosts.append(request.url.host)
        self.bodies.append(request.content)
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
