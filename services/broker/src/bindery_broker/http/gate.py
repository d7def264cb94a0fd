"""Route each HTTP request: hot operations are called directly, all others through FastAPI.

FastAPI's middleware, routers and request handling cost more than everything else that happens before a message is
stored; see docs/adr. The gate turns the errors of both paths into problems. Every answer has `X-Request-Id`: the
client's id if it is valid, else a serial number.
"""

import functools
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from bindery_core.errors import BinderyError
from bindery_kit.access.audit_trail import entry_of
from bindery_kit.http.problem import problem_of, problem_response
from bindery_kit.http.request_id import RequestIds
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_pulsar.topic_name import TopicName
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from bindery_broker.errors import NotOwner
from bindery_broker.http import paths
from bindery_broker.http.at_owner import AtOwner
from bindery_broker.http.budget import ByteBudget
from bindery_broker.http.charging.allowance import Limiter
from bindery_broker.http.exchange import (
    NOT_OWNER_HEADER,
    PROXIED_HEADER,
    SCOPE_KEY,
    ClientGone,
    Exchange,
    has_reasons,
    reason_reply,
)
from bindery_broker.http.peers.senders import Senders
from bindery_broker.http.route import HotRoute

REMEMBERED_MAX: Final = 4_096
"""Maximum number of paths whose routes are cached."""
REMEMBERED_PATH_SIZE_MAX: Final = 512
"""Maximum bytes of a path whose route is cached."""
CLIENT_GONE: Final = 499
"""Status in logs and metrics of a request whose client disconnected before the answer. Source: nginx."""
RECEIVE: Final = "receive"
"""Id of the hot operation whose answer waits for the limits of bytes; a stream waits by itself."""
_PAGES: Final = ("/docs", "/openapi.json")
_LIMITS_PATH: Final = "/v1/limits"
"""Path of the limits of the caller, which does not wait for the limits of bytes: a client with a debt must see it."""

log = get_logger(__name__)


class HotMatch(NamedTuple):
    route: HotRoute
    params: dict[str, Any]
    """Shared by all requests of this path: do not change it."""
    topic: TopicName


class HotRoutes:
    """Find hot routes by method and path. Clients repeat paths, so the results for short ones are cached."""

    def __init__(self, routes: Iterable[HotRoute]) -> None:
        self._routes = list(routes)
        self.remembered = functools.lru_cache(REMEMBERED_MAX)(self._find)

    def find(self, method: str, raw_path: bytes) -> HotMatch | None:
        """Return the match; None: not a hot operation. Raises BadRequest or TooLarge if the topic name is invalid."""
        if len(raw_path) <= REMEMBERED_PATH_SIZE_MAX:
            return self.remembered(method, raw_path)
        return self._find(method, raw_path)

    def _find(self, method: str, raw_path: bytes) -> HotMatch | None:
        path = paths.route_path(raw_path)
        for route in self._routes:
            found = route.path_regex.match(path) if method in route.methods else None
            if found is not None:
                params = {name: route.param_convertors[name].convert(text) for name, text in found.groupdict().items()}
                topic = paths.topic_of(params["tenant"], params["namespace"], params["topic"])
                return HotMatch(route, params, topic)
        return None


class Carry:
    """Middleware that passes errors to the gate, before Starlette's outer middleware answers them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            scope[SCOPE_KEY].failure = error


class Gate:
    def __init__(
        self,
        app: ASGIApp,
        *,
        at_owner: AtOwner,
        budget: ByteBudget,
        routes: HotRoutes,
        limiter: Limiter | None = None,
        senders: Senders | None = None,
    ) -> None:
        """`limiter`: limits of clients, tenants and namespaces; None: there are none. `senders`: tells the requests of
        other brokers; None: any client may send their headers."""
        self._senders = senders
        self._ids = RequestIds()
        self._limiter = limiter
        self._app = app
        self._at_owner = at_owner
        self._broker = at_owner.broker
        self._budget = budget
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._senders is not None:
            self._senders.check(scope)
        exchange = Exchange(
            scope, receive, send, at_owner=self._at_owner, budget=self._budget, request_id=self._ids.of(scope)
        )
        began = exchange.began = self._broker.now()
        try:
            await self._serve(exchange)
        except ClientGone:
            exchange.status = CLIENT_GONE
        finally:
            exchange.finish()
            took = self._broker.now() - began
            self._broker.metrics.answered(exchange.operation, exchange.status, took)
            if self._broker.settings.access_log:
                log.info(
                    "request",
                    method=exchange.method,
                    path=exchange.path,
                    status=exchange.status,
                    operation=exchange.operation,
                    ms=round(took * 1000, 3),
                    request_id=exchange.request_id,
                )

    async def _serve(self, exchange: Exchange) -> None:
        try:
            scope, raw_path = exchange.scope, exchange.raw_path
            if self._limiter is not None and not self._limiter.is_off:
                await exchange.admit(self._limiter)
            found = self._routes.find(exchange.asked_method, raw_path)
            if found is None:
                await self._ordinary(exchange)
                return
            route, scope["path_params"], exchange.topic_name = found
            exchange.operation = route.unique_id
            if exchange.allowance is not None and route.unique_id == RECEIVE:
                await exchange.allowance.wait_to_send(wait_s_max=self._broker.settings.receive_wait_ms_max / 1000)
            response: Response = await self._at_owner.run(exchange, route.endpoint)
            if not exchange.respond(response):
                await response(scope, exchange.receive, exchange.answer)
        except BinderyError as error:
            await self._problem(exchange, error)
        except ClientGone:
            raise
        except Exception as error:
            self._log_failure(exchange, error)
            if exchange.is_answered:
                raise
            detail = "internal error; see the broker's log"
            response = problem_response(status=500, code="internal", detail=detail)
            if has_reasons(exchange.raw_path):
                response = reason_reply(500, detail)
            await response(exchange.scope, exchange.receive, exchange.answer)

    async def _ordinary(self, exchange: Exchange) -> None:
        """Run an operation through FastAPI, with the path still percent-encoded, and with GET for HEAD.

        FastAPI has no HEAD routes.
        """
        scope = exchange.scope
        if exchange.path in _PAGES:
            exchange.operation = "docs"
        is_free = exchange.path.rstrip("/") == _LIMITS_PATH
        if exchange.allowance is not None and exchange.asked_method == "GET" and not is_free:
            await exchange.allowance.wait_to_send()
        if scope["method"] == "HEAD":  # a copy, because the server itself reads the method in its scope
            scope = exchange.scope = {**scope, "method": "GET"}
        scope["path"] = paths.route_path(exchange.raw_path)
        scope[SCOPE_KEY] = exchange
        try:
            await self._app(scope, exchange.receive, exchange.answer)
        finally:
            del scope[SCOPE_KEY]  # they refer to each other: no cyclic garbage
        if exchange.failure is not None:
            raise exchange.failure

    async def _problem(self, exchange: Exchange, error: BinderyError) -> None:
        if error.status >= 500 and error.status not in (503, 504):
            self._log_failure(exchange, error)
        if exchange.is_answered:
            raise error
        entry = entry_of(exchange.scope)
        if entry is not None:
            if entry.operation is None and exchange.operation != "none":
                entry.describe(exchange.operation, exchange.scope.get("path_params", {}))
            entry.request_id, entry.code = exchange.request_id, error.code
        response: Response = problem_of(error)
        if has_reasons(exchange.raw_path):
            response = reason_reply(error.status, str(error))
            if "retry-after" in (headers := problem_of(error).headers):
                response.raw_headers.append((b"retry-after", headers["retry-after"].encode()))
        if isinstance(error, NotOwner) and exchange.header(PROXIED_HEADER):
            response.raw_headers.append((NOT_OWNER_HEADER, b"1"))
        await response(exchange.scope, exchange.receive, exchange.answer)

    def _log_failure(self, exchange: Exchange, error: Exception) -> None:
        log.error(
            "request_failed",
            method=exchange.method,
            path=exchange.path,
            operation=exchange.operation,
            request_id=exchange.request_id,
            **error_fields(error),
            exc_info=error,
        )
