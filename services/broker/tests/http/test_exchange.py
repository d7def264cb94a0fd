"""One request: its headers, query and body within limits, and its answer."""

import asyncio
import gc
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from asgi_call import GONE, Line, http_scope, piece
from bindery_broker.http.budget import ByteBudget
from bindery_broker.http.exchange import (
    QUERY_SIZE_MAX,
    Answered,
    ClientGone,
    Exchange,
    Reply,
    json_reply,
)
from bindery_broker.settings import BrokerSettings
from bindery_core.errors import BadRequest, TooLarge, TooManyRequests, UnsupportedMediaType
from bindery_identity.principal import Method, Principal
from bindery_pulsar.topic_name import TopicName
from bindery_simulation.loop import SimLoop

JSON = [(b"content-type", b"application/json")]
START = {"type": "http.response.start", "status": 201, "headers": [(b"a", b"1")]}


class FakeBroker:
    settings = BrokerSettings(control_bytes_max=1_024)


class Lasting:
    """A broker in simulated time."""

    settings = BrokerSettings()

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        self.set_back_s = 0.0

    def clock(self) -> int:
        return int((self.loop.time() - self.set_back_s) * 1000)


class Owner:
    broker = FakeBroker()


class Options(msgspec.Struct, forbid_unknown_fields=True):
    max: int = 100
    name: str = ""


class Required(msgspec.Struct):
    name: str


def exchange_on(line: Line, *, budget: ByteBudget | None = None, **scope: Any) -> Exchange:
    return Exchange(
        http_scope(**scope),
        line.receive,
        line.send,
        at_owner=Owner(),
        budget=budget or ByteBudget(10_000),
        request_id="mine",
    )


def exchange(*messages: Any, **options: Any) -> Exchange:
    return exchange_on(Line(*messages), **options)


# -- the request


def test_a_new_exchange_is_not_answered_and_its_client_is_there() -> None:
    found = exchange(method="PUT", path="/a b")
    assert (found.method, found.path, found.operation, found.status) == ("PUT", "/a b", "none", 0)
    assert (found.is_answered, found.gone, found.failure, found.topic_name) == (False, False, None, None)
    assert found.broker is Owner.broker


def test_the_method_is_that_of_the_client_after_the_scope_has_another() -> None:
    found = exchange(method="HEAD")
    found.scope["method"] = "GET"
    assert found.method == "HEAD"


def test_the_raw_path_is_the_path_if_the_server_gives_none() -> None:
    assert exchange(path="/a b", raw_path=b"/a%20b").raw_path == b"/a%20b"
    assert exchange(path="/é").raw_path == b"/\xc3\xa9"


def test_the_topic_is_the_name_that_the_route_found() -> None:
    found, name = exchange(), TopicName.parse("a/b/c")
    found.topic_name = name
    assert found.topic is name


def test_a_header_is_the_first_one_of_its_name() -> None:
    found = exchange(headers=[(b"a", b"1"), (b"b", b"2"), (b"b", b"3")])
    assert found.header(b"b") == b"2"
    assert found.header(b"c") == b""


@pytest.mark.parametrize(
    ("header", "media_type"),
    [(b" Text/Plain ; charset=utf-8; x=1", "text/plain"), (b"a/b", "a/b"), (b"\xe9", "é"), (b"", "")],
)
def test_the_media_type_is_in_lower_case_without_parameters(header: bytes, media_type: str) -> None:
    assert exchange(headers=[(b"content-type", header)]).media_type() == media_type


@pytest.mark.parametrize(
    ("accept", "is_accepted"),
    [
        (b"application/json", True),
        (b"text/plain;q=1, application/json ; q=0.5", True),
        (b"application/jsonl", False),
        (b"text/plain", False),
        (b"text/plain;application/json", False),
        (b"*/*", False),
        (b"", False),
    ],
)
def test_a_type_is_accepted_if_accept_names_it(accept: bytes, is_accepted: bool) -> None:
    assert exchange(headers=[(b"accept", accept)]).accepts(b"application/json") is is_accepted


# -- the query


def test_a_query_is_read_once_for_the_framework() -> None:
    found = exchange(query=b"a=1%202&b=")
    assert dict(found.query_params) == {"a": "1 2", "b": ""}
    assert found.query_params is found.query_params


def test_a_query_is_converted_to_its_type() -> None:
    assert exchange(query=b"max=5&name=x").query(Options) == Options(max=5, name="x")
    assert exchange(query=b"name=").query(Options) == Options(max=100, name="")
    assert exchange().query(Options) == Options()
    assert exchange(query=b"name=x").query(Required) == Required(name="x")


@pytest.mark.parametrize(
    "query", [b"max=x", b"colour=red", b"max=1&max=1", b"name=%FF", b"name=\xff"], ids=lambda query: ascii(query)
)
def test_a_wrong_query_is_refused(query: bytes) -> None:
    with pytest.raises(BadRequest):
        exchange(query=query).query(Options)


def test_a_missing_parameter_is_refused() -> None:
    with pytest.raises(BadRequest, match="name"):
        exchange().query(Required)


def test_the_parameter_that_is_given_twice_is_named() -> None:
    with pytest.raises(BadRequest) as caught:
        _ = exchange(query=b"a=1&b=2&a=1").query_params
    assert caught.value.facts == {"parameter": "a"}


def test_the_size_of_a_query_is_limited() -> None:
    assert QUERY_SIZE_MAX == 262_144
    assert len(exchange(query=b"a=".ljust(262_144, b"x")).query_params["a"]) == 262_142
    with pytest.raises(TooLarge) as caught:
        _ = exchange(query=b"a=".ljust(262_145, b"x")).query_params
    assert caught.value.facts == {"size": 262_145, "size_max": 262_144}


# -- the body


async def test_a_body_is_read_once_and_charged_until_the_end() -> None:
    budget = ByteBudget(10)
    budget.take(5)
    found = exchange(piece(b"ab", more=True), piece(b"", more=True), piece(b"c"), budget=budget)
    assert await found.read_body(size_max=3) == b"abc"
    assert await found.read_body(size_max=3) == b"abc"
    assert budget.used == 8
    found.finish()
    assert budget.used == 5
    found.finish()
    assert budget.used == 5


async def test_a_body_may_be_one_piece_or_empty() -> None:
    assert await exchange(piece(b"ab")).read_body(size_max=2) == b"ab"
    assert await exchange({"type": "http.request"}).read_body(size_max=0) == b""


def test_an_exchange_without_a_body_returns_nothing_to_the_budget() -> None:
    budget = ByteBudget(10)
    budget.take(5)
    exchange(budget=budget).finish()
    assert budget.used == 5


async def test_a_body_that_is_announced_too_large_is_refused_unread() -> None:
    headers = [(b"content-length", b"3")]
    assert await exchange(piece(b"abc"), headers=headers).read_body(size_max=3) == b"abc"
    line = Line(piece(b"abc"))
    with pytest.raises(TooLarge) as caught:
        await exchange_on(line, headers=headers).read_body(size_max=2)
    assert caught.value.facts == {"size": 3, "size_max": 2}
    assert len(line.unread) == 1
    with pytest.raises(BadRequest, match="not a content length"):
        await exchange(piece(b"abc"), headers=[(b"content-length", b"-3")]).read_body(size_max=3)


async def test_a_body_of_unknown_size_is_refused_at_the_piece_that_exceeds_the_limit() -> None:
    budget = ByteBudget(10)
    line = Line(piece(b"ab", more=True), piece(b"cd", more=True), piece(b"e"))
    found = exchange_on(line, budget=budget)
    with pytest.raises(TooLarge) as caught:
        await found.read_body(size_max=3)
    assert caught.value.facts == {"size": 4, "size_max": 3}
    assert len(line.unread) == 1
    assert budget.used == 0


async def test_a_body_beyond_the_budget_is_refused() -> None:
    budget = ByteBudget(3)
    found = exchange(piece(b"ab", more=True), piece(b"cd"), budget=budget)
    with pytest.raises(TooManyRequests):
        await found.read_body(size_max=100)
    found.finish()
    assert budget.used == 0


async def test_ordinary_operations_have_the_limit_of_the_settings() -> None:
    assert len(await exchange(piece(b"x" * 1_024)).body()) == 1_024
    with pytest.raises(TooLarge):
        await exchange(piece(b"x" * 1_025)).body()


async def test_a_client_that_leaves_during_its_body_is_gone() -> None:
    found = exchange(piece(b"ab", more=True), GONE)
    with pytest.raises(ClientGone):
        await found.read_body(size_max=100)
    assert found.gone is True


async def test_a_body_in_many_pieces_takes_the_memory_of_its_bytes() -> None:
    found = exchange(*(piece(b"ab", more=True) for _ in range(50_000)), piece(b""), budget=ByteBudget(1_000_000))
    tracemalloc.start()
    try:
        assert len(await found.read_body(size_max=1_000_000)) == 100_000
        _, peak_size = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_size < 500_000


# -- JSON


@pytest.mark.parametrize("content_type", [b"application/json", b"Application/JSON ; charset=utf-8"])
async def test_a_json_body_is_decoded_to_its_type(content_type: bytes) -> None:
    headers = [(b"content-type", content_type)]
    for _ in range(2):  # the second time with the same decoder
        assert await exchange(piece(b'{"max": 5}'), headers=headers).json_body(Options) == Options(max=5)


@pytest.mark.parametrize("content_type", [b"text/plain", b"application/x-www-form-urlencoded", b"", None])
async def test_a_json_body_of_another_type_is_refused_unread(content_type: bytes | None) -> None:
    line = Line(piece(b"{}"))
    headers = [] if content_type is None else [(b"content-type", content_type)]
    with pytest.raises(UnsupportedMediaType, match="-H 'Content-Type: application/json'") as caught:
        await exchange_on(line, headers=headers).json_body(Options)
    assert caught.value.facts == {"content_type": (content_type or b"none").decode()}
    assert len(line.unread) == 1


@pytest.mark.parametrize("header", [(b"content-encoding", b"gzip"), (b"transfer-encoding", b"gzip, chunked")])
async def test_an_encoded_body_is_refused_unread(header: tuple[bytes, bytes]) -> None:
    line = Line(piece(b"abc"))
    with pytest.raises(UnsupportedMediaType):
        await exchange_on(line, headers=[header]).read_body(size_max=3)
    assert len(line.unread) == 1
    not_encoded = [(b"content-encoding", b"identity"), (b"transfer-encoding", b"chunked")]
    assert await exchange_on(line, headers=not_encoded).read_body(size_max=3) == b"abc"


async def test_a_body_that_is_not_json_is_refused_with_its_place() -> None:
    with pytest.raises(BadRequest) as caught:
        await exchange(piece(b'{\n"max" 5}'), headers=JSON).json_body(Options)
    assert caught.value.facts == {"line": 2, "column": 7}
    for wrong in (b'{"max": "x"}', b'{"name": "\xff"}'):
        with pytest.raises(BadRequest, match="body: ") as caught:
            await exchange(piece(wrong), headers=JSON).json_body(Options)
        assert caught.value.facts == {}


async def test_the_framework_gets_the_decoded_body_and_its_type() -> None:
    found = exchange(piece(b'{"a": [1]}'), headers=[(b"content-type", b"APPLICATION/JSON;x"), (b"x-other", b"1")])
    await found.load_json()
    await found.load_json()
    assert await found.json() == {"a": [1]}
    assert found.headers.items() == [("x-other", "1"), ("content-type", "application/json")]


async def test_the_framework_gets_no_body_that_is_not_json() -> None:
    with pytest.raises(UnsupportedMediaType):
        await exchange(piece(b"{}"), headers=[(b"content-type", b"text/plain")]).load_json()
    with pytest.raises(BadRequest) as caught:
        await exchange(piece(b"[1 2]"), headers=JSON).load_json()
    assert caught.value.facts == {"line": 1, "column": 4}


# -- forwarding


async def pieces(found: Exchange, *, size_max: int) -> list[bytes]:
    return [chunk async for chunk in found.stream_body(size_max=size_max)]


async def test_a_body_is_forwarded_in_its_pieces_uncharged() -> None:
    budget = ByteBudget(1)
    found = exchange(piece(b"ab", more=True), piece(b"", more=True), piece(b"c"), budget=budget)
    assert await pieces(found, size_max=3) == [b"ab", b"c"]
    assert budget.used == 0


async def test_a_body_that_was_read_is_forwarded_again() -> None:
    found = exchange(piece(b"abc"))
    await found.read_body(size_max=3)
    assert await pieces(found, size_max=3) == [b"abc"]
    assert await pieces(found, size_max=3) == [b"abc"]


async def test_a_forwarded_body_is_limited() -> None:
    with pytest.raises(TooLarge) as caught:
        await pieces(exchange(piece(b"ab", more=True), piece(b"cd")), size_max=3)
    assert caught.value.facts == {"size": 4, "size_max": 3}


# -- the connection


@pytest.mark.parametrize("is_forwarded", [False, True])
async def test_the_connection_is_watched_after_the_body(is_forwarded: bool) -> None:
    line = Line(piece(b"a"), piece(b""), GONE)
    found = exchange_on(line)
    if is_forwarded:
        await pieces(found, size_max=1)
    else:
        await found.read_body(size_max=1)
    called = []
    await found.watch_connection(lambda: called.append(found.gone))
    assert called == [True]
    assert not line.unread


async def test_the_connection_is_not_watched_before_the_body_was_read() -> None:
    line = Line(piece(b"a"), GONE)
    with pytest.raises(AssertionError):
        await exchange_on(line).watch_connection(lambda: None)
    assert len(line.unread) == 2


# -- the answer


async def test_an_answer_gets_the_request_id() -> None:
    line = Line()
    found = exchange_on(line)
    await found.answer(dict(START))
    assert (found.status, found.is_answered) == (201, True)
    await found.answer({"type": "http.response.body", "body": b"x"})
    assert line.sent == [
        {"type": "http.response.start", "status": 201, "headers": [(b"a", b"1"), (b"x-request-id", b"mine")]},
        {"type": "http.response.body", "body": b"x"},
    ]


async def test_the_answer_to_head_has_no_body() -> None:
    line = Line()
    found = exchange_on(line, method="HEAD")
    await found.answer(dict(START))
    await found.answer({"type": "http.response.body", "body": b"x", "more_body": False})
    assert (line.status, line.sent[1]) == (201, {"type": "http.response.body", "body": b"", "more_body": False})


async def test_a_stream_is_sent_in_chunks() -> None:
    line = Line()
    found = exchange_on(line)
    await found.start_stream(200, [(b"a", b"1")])
    await found.send_chunk(b"x", more=True)
    await found.send_chunk(b"", more=False)
    assert line.sent == [
        {"type": "http.response.start", "status": 200, "headers": [(b"a", b"1"), (b"x-request-id", b"mine")]},
        {"type": "http.response.body", "body": b"x", "more_body": True},
        {"type": "http.response.body", "body": b"", "more_body": False},
    ]


async def test_a_reply_is_two_messages() -> None:
    line = Line()
    answer = Reply(202, b"abc", b"text/plain", ((b"a", b"1"),))
    assert (answer.status_code, answer.body, answer.background) == (202, b"abc", None)
    await answer(http_scope(), line.receive, line.send)
    headers = [(b"content-type", b"text/plain"), (b"content-length", b"3"), (b"a", b"1")]
    assert line.sent == [
        {"type": "http.response.start", "status": 202, "headers": headers},
        {"type": "http.response.body", "body": b"abc"},
    ]


def test_a_json_reply_ends_with_a_newline() -> None:
    answer = json_reply({"a": 1})
    assert (answer.status_code, answer.body) == (200, b'{"a":1}\n')
    assert answer.raw_headers == [(b"content-type", b"application/json"), (b"content-length", b"8")]
    assert json_reply([], status=207).status_code == 207


async def test_nothing_more_is_sent_of_an_answer_that_is_already_sent() -> None:
    line = Line()
    await Answered()(http_scope(), line.receive, line.send)
    assert line.sent == []


# -- credentials during a call

DAY_S = 86_400.0


def _ends_after(*, expires_at_s: float, set_back_s: float = 0.0) -> float:
    """Return the seconds after which a call ends whose credentials expire. The clock is set back after a day."""
    loop = SimLoop()  # type: ignore[abstract]
    broker = Lasting(loop)
    one = exchange()
    one.at_owner = type("At", (), {"broker": broker})()  # type: ignore[assignment]
    one.scope["state"] = {"principal": Principal(role="r", method=Method.TOKEN, expires_at_s=expires_at_s)}
    ends: list[float] = []

    async def wait() -> None:
        with one.until_expiry(lambda: ends.append(loop.time())):
            await asyncio.sleep(DAY_S)
            broker.set_back_s = set_back_s
            await asyncio.sleep(60 * DAY_S)

    task = loop.create_task(wait())
    loop.run_until(task.done, time_max=100 * DAY_S, callbacks_max=1_000_000)
    assert len(ends) == int(one.is_expired)
    return ends[0] if ends else -1.0


def test_a_call_lasts_as_long_as_its_credentials_also_for_weeks() -> None:
    assert _ends_after(expires_at_s=30 * DAY_S) == pytest.approx(30 * DAY_S, abs=1)
    assert _ends_after(expires_at_s=1_000 * DAY_S) == -1.0
    assert _ends_after(expires_at_s=1e300) == -1.0
    assert _ends_after(expires_at_s=-5.0) == pytest.approx(0, abs=1)


def test_a_call_ends_by_the_clock_that_decides_about_credentials() -> None:
    assert _ends_after(expires_at_s=10 * DAY_S, set_back_s=DAY_S) == pytest.approx(11 * DAY_S, abs=1)


def test_a_call_ends_once_when_its_credentials_are_taken_back() -> None:
    watchers: list[Callable[[], None]] = []

    class Credentials:
        def watch(self, on_refused: Callable[[], None]) -> Callable[[], None]:
            watchers.append(on_refused)
            return lambda: watchers.remove(on_refused)

    async def run() -> None:
        one = exchange()
        one.scope["state"] = {"credentials": Credentials()}
        ended: list[bool] = []
        with one.until_expiry(lambda: ended.append(one.is_expired)):
            (refuse,) = watchers
            refuse()
            refuse()
        assert (ended, watchers) == ([True], [])

    asyncio.run(run())


async def test_a_call_that_has_ended_leaves_no_cyclic_garbage() -> None:
    """The next collection is far away, and a client may send thousands of requests with large headers before it."""
    one = exchange()
    one.at_owner = type("At", (), {"broker": Lasting(SimLoop())})()  # type: ignore[abstract,assignment]
    one.scope["state"] = {"principal": Principal(role="r", method=Method.TOKEN, expires_at_s=1e12)}
    gone = weakref.ref(one)
    gc.collect()
    gc.disable()
    try:
        with one.until_expiry(lambda: None):
            await asyncio.sleep(0)
        del one
        assert gone() is None
    finally:
        gc.enable()
