"""The ASGI entry: match, find the owner, handle, answer; every error as a problem.

A handler that meets a topic which just moved (TopicFenced, NotOwner) is run once more, on the owner that is found then;
handlers raise those only when nothing was written. Every answer carries `X-Request-Id`: the client's, if it sent a
sensible one, else a number of ours.
"""

import asyncio
import itertools
import re
from typing import Final

from bindery_core.errors import BinderyError, TopicFenced
from bindery_kit.logs import error_fields, get_logger
from bindery_kit.problem import problem_of, problem_response
from starlette.responses import Response

from bindery_broker.broker import Broker
from bindery_broker.bundles import Bundle
from bindery_broker.errors import NotOwner
from bindery_broker.http import openapi
from bindery_broker.http.budget import ByteBudget
from bindery_broker.http.exchange import ClientGone, Exchange, Receive, Reply, Scope, Send
from bindery_broker.http.proxy import PROXIED_HEADER, Proxy, redirect
from bindery_broker.http.router import MethodNotAllowed, Route, Router
from bindery_broker.http.routes import ROUTES

ATTEMPTS_MAX: Final = 2
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_SET_BY_REPLY: Final = frozenset((b"content-length", b"content-type"))

log = get_logger(__name__)


class BrokerApp:
    def __init__(self, broker: Broker, *, proxy: Proxy | None = None) -> None:
        self._broker = broker
        self._proxy = proxy or Proxy()
        self._router = Router(ROUTES)
        self._budget = ByteBudget(broker.settings.in_flight_bytes_max)
        broker.metrics.in_flight_bytes.set_function(lambda: self._budget.used)
        self._serials = itertools.count(1)
        self._document = openapi.document(ROUTES)
        self._pages = {
            "/openapi.json": Reply(200, openapi.encode(self._document)),
            "/docs": Reply(200, openapi.page(self._document), b"text/html; charset=utf-8"),
        }
        self._creates = {
            route.operation_id
            for route in ROUTES
            if route.operation_id in ("produce", "createTopic", "receive", "stream", "subscribe")
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        request_id = self._request_id(scope)
        exchange = Exchange(scope, receive, send, budget=self._budget, request_id=request_id)
        began = self._broker.now()
        operation, status = "none", 0
        try:
            operation, status = await self._serve(exchange)
        except ClientGone:
            status = 499
        finally:
            exchange.finish()
            took = self._broker.now() - began
            self._broker.metrics.answered(operation, status, took)
            if self._broker.settings.access_log:
                log.info(
                    "request", method=scope["method"], path=scope["path"], status=status, operation=operation,
                    ms=round(took * 1000, 3), request_id=request_id,
                )  # fmt: skip

    async def close(self) -> None:
        await self._proxy.close()

    async def _serve(self, exchange: Exchange) -> tuple[str, int]:
        """Answer; (operation, status) for the records."""
        operation = "none"
        try:
            page = self._pages.get(exchange.scope["path"])
            if page is not None and exchange.method in ("GET", "HEAD"):
                await exchange.reply(page)
                return "docs", page.status
            raw_path = exchange.scope.get("raw_path") or exchange.scope["path"].encode()
            route, exchange.params, exchange.topic_name = self._router.match(exchange.method, raw_path)
            operation = route.operation_id
            return operation, await self._handle(route, exchange)
        except BinderyError as error:
            return operation, await self._problem(exchange, error)
        except (ClientGone, asyncio.CancelledError):
            raise
        except Exception as error:
            log.error(
                "request_failed", method=exchange.method, path=exchange.scope["path"], operation=operation,
                request_id=exchange.request_id, **error_fields(error), exc_info=error,
            )  # fmt: skip
            if exchange.is_answered:
                raise
            response = problem_response(
                status=500, code="internal", detail="an error of ours; the service's log has the details"
            )
            await exchange.reply(_as_reply(response))
            return operation, 500

    async def _handle(self, route: Route, exchange: Exchange) -> int:
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                if exchange.topic_name is not None and self._broker.topics.loaded(exchange.topic_name) is None:
                    status = await self._elsewhere(route, exchange)
                    if status is not None:
                        return status
                reply = await route.handler(self._broker, exchange)
            except (TopicFenced, NotOwner) as error:
                if attempt < ATTEMPTS_MAX and not exchange.is_answered:
                    continue
                raise NotOwner(f"the topic is moving, ask again: {error}", **error.facts) from error
            if reply is None:  # a stream that answered for itself
                return 200
            await exchange.reply(reply)
            return int(reply.status)
        raise AssertionError("unreachable")

    async def _elsewhere(self, route: Route, exchange: Exchange) -> int | None:
        """Pass the request to the topic's owner; its status, or None when the owner is this broker."""
        name = exchange.name
        remote = await self._broker.locate(name, create=route.operation_id in self._creates)
        if remote is None:
            return None
        if exchange.header(PROXIED_HEADER):
            raise NotOwner("this broker does not own the topic; ask again", topic=name.short, owner=remote.http_url)
        if b"redirect=true" in exchange.scope["query_string"]:
            await exchange.reply(redirect(exchange, remote.http_url))
            return 307
        self._broker.metrics.proxied.inc()
        try:
            await self._proxy.forward(exchange, remote.http_url, body_size_max=self._broker.settings.request_bytes_max)
        except NotOwner:
            self._broker.ownership.forget_remote(Bundle.of(name))
            raise
        return 200

    async def _problem(self, exchange: Exchange, error: BinderyError) -> int:
        if error.status >= 500 and error.status not in (503, 504):
            log.error(
                "request_failed", method=exchange.method, path=exchange.scope["path"],
                request_id=exchange.request_id, **error_fields(error), exc_info=error,
            )  # fmt: skip
        if exchange.is_answered:
            raise error
        reply = _as_reply(problem_of(error))
        if isinstance(error, MethodNotAllowed):
            reply = Reply(reply.status, reply.body, reply.content_type, ((b"allow", error.allowed.encode()),))
        await exchange.reply(reply)
        return error.status

    def _request_id(self, scope: Scope) -> str:
        for name, value in scope["headers"]:
            if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
                return str(value.decode("ascii"))
        return str(next(self._serials))


def _as_reply(response: Response) -> Reply:
    headers = tuple((k, v) for k, v in response.raw_headers if k not in _SET_BY_REPLY)
    return Reply(
        response.status_code, bytes(response.body), response.headers["content-type"].encode("latin-1"), headers
    )


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
