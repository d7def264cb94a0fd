"""The gate: which requests are hot, what errors are answered and logged, request ids, and the count of answers."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import structlog
from asgi_call import GONE, Line, http_scope, piece
from bindery_broker.http.budget import ByteBudget
from bindery_broker.http.exchange import SCOPE_KEY, ClientGone, Exchange, json_reply
from bindery_broker.http.gate import REMEMBERED_MAX, REMEMBERED_PATH_SIZE_MAX, Carry, Gate, HotRoutes
from bindery_broker.http.route import HotRoute
from bindery_broker.http.v1.paths import SUBSCRIPTION
from bindery_broker.settings import BrokerSettings
from bindery_core.errors import BadRequest, BinderyError, NoSuchTopic, TooLarge
from broker_harness import ROUTES, Clock
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

HOT = [route for route in ROUTES if isinstance(route, HotRoute)]
PROBE = "/v1/topics/public/default/t/subscriptions/s/probe"
"""Path of the hot operation of these tests."""
TOOK_S = 0.25
"""How long the operations of these tests take on the simulated clock."""
START = {"type": "http.response.start", "status": 200, "headers": []}


class FakeBroker:
    """What the gate needs of a broker. `counted`: (operation, status, seconds) of each answer."""

    def __init__(self, *, access_log: bool) -> None:
        self.clock = Clock()
        self.settings = BrokerSettings(access_log=access_log)
        self.metrics = self
        self.counted: list[tuple[str, int, float]] = []

    def now(self) -> float:
        return self.clock.now()

    def answered(self, operation: str, status: int, seconds: float) -> None:
        self.counted.append((operation, status, seconds))


class Here:
    """Runs every operation in this process, and remembers the exchanges."""

    def __init__(self, broker: Any) -> None:
        self.broker = broker
        self.ran: list[Exchange] = []

    async def run(self, exchange: Exchange, operation: Callable[[Exchange], Awaitable[Response]]) -> Response:
        self.ran.append(exchange)
        return await operation(exchange)


class Front:
    """A gate before one hot operation, `probe`, and an application for all other requests."""

    def __init__(
        self, act: Callable[[Exchange], Awaitable[Response]] | None = None, *, access_log: bool = False
    ) -> None:
        """`act`: what both the hot operation and the application do."""
        self.broker = FakeBroker(access_log=access_log)
        self.here = Here(self.broker)
        self.budget = ByteBudget(100)
        self.passed: list[tuple[dict[str, Any], Receive, Send]] = []
        """The calls of the application."""
        self._act = act or reply
        probe = HotRoute(SUBSCRIPTION + "/probe", self._probe, methods=["POST"], operation_id="probe")
        self.gate = Gate(self._app, at_owner=self.here, budget=self.budget, routes=HotRoutes([probe]))

    async def _probe(self, exchange: Exchange) -> Response:
        self.broker.clock.advance(TOOK_S)
        return await self._act(exchange)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.passed.append((dict(scope), receive, send))
        if scope["type"] == "http":
            await (await self._probe(scope[SCOPE_KEY]))(scope, receive, send)

    async def call(self, method: str = "POST", path: str = PROBE, *, line: Line | None = None, **scope: Any) -> Line:
        line = line or Line()
        await self.gate(http_scope(method, path, **scope), line.receive, line.send)
        return line


async def reply(_exchange: Exchange) -> Response:
    return json_reply("done")


def failing(error: Exception, *, after_start: bool = False) -> Callable[[Exchange], Awaitable[Response]]:
    """Return an operation that raises `error`, before or after the start of its answer."""

    async def fail(exchange: Exchange) -> Response:
        if after_start:
            await exchange.answer(dict(START))
        raise error

    return fail


def error_of(status: int) -> BinderyError:
    return type("MadeUp", (BinderyError,), {"status": status, "code": "made_up"})("made up", number=7)


# -- finding hot routes


@pytest.fixture
def hot() -> HotRoutes:
    return HotRoutes(HOT)


@pytest.mark.parametrize("route", HOT, ids=lambda route: route.operation_id)
def test_hot_routes_are_found_by_the_gate(hot: HotRoutes, route: HotRoute) -> None:
    (method,) = route.methods
    path = route.path_format.format(tenant="t", namespace="n", topic="x%20y", subscription="s%2Fu")
    for _ in range(2):  # the second time from the cache
        found = hot.find(method, path.encode())
        assert found is not None
        assert found.route is route
        assert found.topic.short == "t/n/x y"
        assert found.params.get("subscription", "s/u") == "s/u"


def test_other_operations_are_left_to_the_framework(hot: HotRoutes) -> None:
    assert hot.find("GET", b"/v1/topics/t/n/x/messages") is None
    assert hot.find("PUT", b"/v1/topics/t/n/x/messages") is None
    assert hot.find("POST", b"/v2/topics") is None
    assert hot.find("HEAD", b"/v1/topics/t/n/x/subscriptions/s/stream") is None
    with pytest.raises(BadRequest):
        hot.find("POST", b"/v1/topics/t/n/%ff/messages")
    with pytest.raises(BadRequest):
        hot.find("POST", b"/v1/topics/t/n/\xff/messages")
    with pytest.raises(TooLarge):
        hot.find("POST", b"/v1/topics/t/n/" + b"x" * 300 + b"/messages")


def test_the_cache_of_paths_is_limited(hot: HotRoutes) -> None:
    assert REMEMBERED_MAX == 4_096
    for number in range(REMEMBERED_MAX + 10):
        hot.find("POST", f"/v1/topics/t/n/x{number}/messages".encode())
    assert hot.remembered.cache_info().currsize == REMEMBERED_MAX


def test_only_short_paths_are_cached(hot: HotRoutes) -> None:
    assert REMEMBERED_PATH_SIZE_MAX == 512
    short = b"/v1/topics/t/n/x/messages".ljust(512, b"/")
    found = hot.find("POST", short)
    assert found is not None
    assert hot.find("POST", short) is found
    assert hot.remembered.cache_info().currsize == 1
    long = hot.find("POST", short + b"/")
    assert long is not None
    assert long.topic.short == "t/n/x"
    assert hot.remembered.cache_info().currsize == 1


# -- serving


async def test_a_hot_operation_is_called_without_the_framework() -> None:
    front = Front()
    line = await front.call()
    assert (line.status, line.body) == (200, b'"done"\n')
    assert front.passed == []
    (exchange,) = front.here.ran
    assert exchange.topic.short == "public/default/t"
    assert exchange.path_params == {"tenant": "public", "namespace": "default", "topic": "t", "subscription": "s"}
    assert front.broker.counted == [("probe", 200, TOOK_S)]


async def test_the_framework_gets_the_encoded_path_without_trailing_slashes() -> None:
    front = Front()
    line = await front.call("PUT", "/v1/a b//", raw_path=b"/v1/a%20b//")
    assert (line.status, line.body) == (200, b'"done"\n')
    ((scope, _, _),) = front.passed
    assert (scope["method"], scope["path"]) == ("PUT", "/v1/a%20b")
    assert scope[SCOPE_KEY].path == "/v1/a b//"
    assert front.here.ran == []
    assert front.broker.counted == [("none", 200, TOOK_S)]


async def test_the_framework_gets_get_for_head_and_the_client_no_body() -> None:
    front = Front()
    line = await front.call("HEAD", "/v1/topics")
    assert (line.status, line.body) == (200, b"")
    ((scope, _, _),) = front.passed
    assert scope["method"] == "GET"
    assert scope[SCOPE_KEY].method == "HEAD"


async def test_the_server_s_scope_keeps_head() -> None:
    """The server omits the body of such a response itself: with GET it would miss the body that it never gets."""
    front, line, scope = Front(), Line(), http_scope("HEAD", "/v1/topics")
    await front.gate(scope, line.receive, line.send)
    assert scope["method"] == "HEAD"


@pytest.mark.parametrize(
    ("path", "operation"), [("/docs", "docs"), ("/openapi.json", "docs"), ("/v1/topics", "none"), ("/docs/x", "none")]
)
async def test_the_pages_are_counted_as_one_operation(path: str, operation: str) -> None:
    front = Front()
    await front.call("GET", path)
    assert front.broker.counted == [(operation, 200, TOOK_S)]


async def test_what_is_not_http_goes_to_the_framework_unchanged() -> None:
    front = Front()
    line, scope = Line(), {"type": "lifespan"}
    await front.gate(scope, line.receive, line.send)
    assert front.passed == [({"type": "lifespan"}, line.receive, line.send)]
    assert front.broker.counted == []


async def test_a_body_is_charged_to_the_budget_until_the_answer_is_sent() -> None:
    used = []

    async def read(exchange: Exchange) -> Response:
        await exchange.read_body(size_max=10)
        used.append(exchange.budget.used)
        raise NoSuchTopic("gone")

    front = Front(read)
    assert (await front.call(line=Line(piece(b"abc")))).status == 404
    assert used == [3]
    assert front.budget.used == 0


# -- request ids


@pytest.mark.parametrize("value", [b"mine-1", b"!~", b"x" * 128])
async def test_a_valid_request_id_is_kept(value: bytes) -> None:
    line = await Front().call(headers=[(b"x-other", b"other"), (b"x-request-id", value)])
    assert line.headers[-1] == (b"x-request-id", value)


@pytest.mark.parametrize("value", [b"", b"no good", b"x" * 129, b"\xc3\xa9", b"a\n", b"\x7f"])
async def test_an_invalid_request_id_is_replaced_by_a_serial_number(value: bytes) -> None:
    front = Front()
    for serial in (b"1", b"2"):
        line = await front.call(headers=[(b"x-request-id", value)])
        assert line.headers[-1] == (b"x-request-id", serial)
    line = await front.call(headers=[(b"x-other", b"mine-1")])
    assert line.headers[-1] == (b"x-request-id", b"3")


# -- errors


@pytest.mark.parametrize(
    ("status", "is_logged"),
    [
        (400, False),
        (404, False),
        (499, False),
        (500, True),
        (501, True),
        (502, True),
        (503, False),
        (504, False),
        (505, True),
    ],
)
async def test_errors_that_need_attention_are_logged(status: int, is_logged: bool) -> None:
    front = Front(failing(error_of(status)))
    with structlog.testing.capture_logs() as logs:
        line = await front.call(headers=[(b"x-request-id", b"mine")])
    assert line.status == status
    assert line.problem()["code"] == "made_up"
    assert line.problem()["facts"] == {"number": 7}
    assert line.headers[-1] == (b"x-request-id", b"mine")
    assert front.broker.counted == [("probe", status, TOOK_S)]
    events = [{name: value for name, value in event.items() if name not in ("exc_info", "module")} for event in logs]
    expected = {
        "event": "request_failed",
        "log_level": "error",
        "method": "POST",
        "path": PROBE,
        "operation": "probe",
        "request_id": "mine",
        "error": "made up",
        "error_code": "made_up",
        "error_number": 7,
    }
    assert events == ([expected] if is_logged else [])


@pytest.mark.parametrize(("method", "path", "operation"), [("POST", PROBE, "probe"), ("GET", "/v1/topics", "none")])
async def test_an_unexpected_error_is_logged_and_answered_without_its_text(
    method: str, path: str, operation: str
) -> None:
    error = RuntimeError("secret detail")
    front = Front(failing(error))
    with structlog.testing.capture_logs() as logs:
        line = await front.call(method, path)
    assert line.status == 500
    assert line.problem()["code"] == "internal"
    assert b"secret" not in line.body
    assert front.broker.counted == [(operation, 500, TOOK_S)]
    (event,) = logs
    assert event["event"] == "request_failed"
    assert (event["operation"], event["path"], event["method"]) == (operation, path, method)
    assert (event["error"], event["error_kind"]) == ("secret detail", "RuntimeError")
    assert event["exc_info"] is error


@pytest.mark.parametrize("error", [RuntimeError("late"), NoSuchTopic("late"), error_of(500)], ids=str)
async def test_an_error_after_the_start_of_the_answer_breaks_the_connection(error: Exception) -> None:
    """The server closes the connection when the application raises, so that the client sees an incomplete answer."""
    front, line = Front(failing(error, after_start=True)), Line()
    with pytest.raises(type(error), match=r"late|made up"):
        await front.call(line=line)
    assert [message["type"] for message in line.sent] == ["http.response.start"]
    assert front.broker.counted == [("probe", 200, TOOK_S)]


async def test_invalid_names_in_a_hot_path_are_answered_with_a_problem() -> None:
    front = Front()
    line = await front.call("POST", "/v1/topics/a b/default/t/subscriptions/s/probe")
    assert line.problem()["code"] == "bad_request"
    assert front.broker.counted == [("none", 400, 0.0)]


@pytest.mark.parametrize(("method", "path", "operation"), [("POST", PROBE, "probe"), ("PUT", "/v1/topics", "none")])
async def test_a_client_that_is_gone_gets_no_answer_and_is_counted(method: str, path: str, operation: str) -> None:
    async def read(exchange: Exchange) -> Response:
        await exchange.read_body(size_max=10)
        raise AssertionError("unreachable")

    front = Front(read)
    with structlog.testing.capture_logs() as logs:
        line = await front.call(method, path, line=Line(piece(b"abc", more=True), GONE))
    assert line.sent == []
    assert front.broker.counted == [(operation, 499, TOOK_S)]
    assert front.budget.used == 0
    assert logs == []


async def test_the_error_that_an_ordinary_operation_left_is_answered() -> None:
    async def leave(exchange: Exchange) -> Response:
        exchange.failure = NoSuchTopic("no such topic", topic="a/b/c")
        return Silent()

    front = Front(leave)
    line = await front.call("GET", "/v1/topics")
    assert line.status == 404
    assert line.problem()["facts"] == {"topic": "a/b/c"}


class Silent(Response):
    """Sends nothing."""

    async def __call__(self, _scope: Scope, _receive: Receive, _send: Send) -> None:
        return


# -- the middleware


async def carried(scope: dict[str, Any], error: Exception | None = None) -> list[Any]:
    """Call an application through the middleware. Returns the arguments that the application got."""
    got: list[Any] = []

    async def app(*arguments: Any) -> None:
        got.extend(arguments)
        if error is not None:
            raise error

    line = Line()
    await Carry(app)(scope, line.receive, line.send)
    assert got == [scope, line.receive, line.send]
    return got


@pytest.mark.parametrize("error", [RuntimeError("made up"), NoSuchTopic("made up"), ClientGone()], ids=repr)
async def test_the_middleware_passes_errors_to_the_exchange(error: Exception) -> None:
    exchange = Exchange(http_scope(), *_line(), at_owner=Here(None), budget=ByteBudget(1), request_id="1")
    await carried({**http_scope(), SCOPE_KEY: exchange}, error)
    assert exchange.failure is error


async def test_the_middleware_leaves_other_calls_alone() -> None:
    await carried(http_scope())
    await carried({"type": "lifespan"})
    error = RuntimeError("made up")
    with pytest.raises(RuntimeError, match="made up"):
        await carried({"type": "lifespan"}, error)


def _line() -> tuple[Receive, Send]:
    line = Line()
    return line.receive, line.send


# -- the access log


async def test_the_access_log_has_one_event_per_request() -> None:
    front = Front(access_log=True)
    with structlog.testing.capture_logs() as logs:
        await front.call(headers=[(b"x-request-id", b"mine")])
    (event,) = logs
    event.pop("module", None)
    assert event == {
        "event": "request",
        "log_level": "info",
        "method": "POST",
        "path": PROBE,
        "status": 200,
        "operation": "probe",
        "ms": 250.0,
        "request_id": "mine",
    }


async def test_requests_are_not_logged_unless_the_access_log_is_on() -> None:
    with structlog.testing.capture_logs() as logs:
        await Front().call()
    assert logs == []
