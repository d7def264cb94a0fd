"""AdminApp: the ASGI application of an admin API. It finds a request's route, checks its token, and answers errors.

Invariants: if there is an `Access` for a route, no handler of a method other than GET runs before it has accepted the
request; a request whose handler fails or takes too long gets an error response, and other requests are not affected.

`bindery_kit.observability.health.OpsApp` serves probes and metrics (`/livez`, `/readyz`, `/startupz`, `/metrics`) in
front of it.
Source: BookKeeper HttpRouter.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Generic, cast
from urllib.parse import unquote

from bindery_core.errors import BadRequest, BinderyError, Forbidden, TooManyRequests, Unauthorized

from bindery_kit.access.allowed_names import EVERYBODY, AllowedNames
from bindery_kit.access.audit_trail import REQUEST_ID, AuditEntry, entry_of
from bindery_kit.admin.access import OPEN, AdminAccess
from bindery_kit.admin.content_types import check_codings
from bindery_kit.admin.http import (
    QUERY_SIZE_MAX,
    Answer,
    ContextT,
    Request,
    Route,
    parse_query,
    problem,
    problem_of,
    read_body,
)
from bindery_kit.observability.health import Receive, Scope, Send, answer_lifespan
from bindery_kit.observability.logs import error_fields, get_logger

REQUEST_TIMEOUT_S: Final = 60.0
"""Time limit in seconds for one request; a request that exceeds it is answered with 504."""
SEND_TIMEOUT_S: Final = 30.0
"""Maximum time in seconds to send one piece of a streamed response; a client that reads more slowly is disconnected."""
HEAVY_MAX: Final = 4
"""Maximum number of concurrent requests that read much or wait for other machines; further requests wait. Requests with
and without a token are counted separately, so that requests without one cannot block operators."""
HEAVY_WAIT_S: Final = 3.0
"""Maximum time in seconds that such a request waits, in the order of arrival; then it gets 429. Without waiting,
clients that repeat their requests at once would take every place that becomes free."""

_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
RESOURCE_PARAMETERS: Final = ("ledger_id", "bookie_id", "bookie_src")
"""Parameters of the query that name what a request is about, for the audit log."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRule:
    """Who may send requests of a route. `role`: its name, and `setting`: where its names are, for errors."""

    role: str
    setting: str
    allowed: AllowedNames


class AdminApp(Generic[ContextT]):
    """`access`: the checks of routes with and without `is_cluster_wide`. `is_open`: whether routes without
    `during_start` can be served. `service`: name of the service in errors. `rules`: who may use the routes (method,
    path); routes without a rule are for all whom `access` admits. `confidential`: who is shown confidential parts of
    responses, of those whose token is good."""

    def __init__(
        self,
        context: ContextT,
        routes: Sequence[Route[ContextT]],
        *,
        access: AdminAccess,
        is_open: Callable[[], bool] = lambda: True,
        service: str,
        rules: Mapping[tuple[str, str], RoleRule] | None = None,
        confidential: AllowedNames = EVERYBODY,
    ) -> None:
        self._context = context
        self._rules = rules or {}
        self._confidential = confidential
        self._access = access
        self._is_open = is_open
        self._service = service
        self._routes: dict[str, dict[str, Route[ContextT]]] = {}
        for route in routes:
            methods = self._routes.setdefault(route.path, {})
            assert route.method not in methods, f"{route.method} {route.path} is there twice"
            methods[route.method] = route
        self._patterns = [path for path in self._routes if "{" in path]
        self._heavy = {True: asyncio.Semaphore(HEAVY_MAX), False: asyncio.Semaphore(HEAVY_MAX)}
        """Places for heavy requests: of trusted clients, and of others."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await answer_lifespan(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        entry = entry_of(scope)
        answer = await self._answer(scope, receive, entry)
        if entry is not None:
            entry.code = answer.code
        pieces: AsyncIterator[bytes] | None = None
        length: tuple[tuple[bytes, bytes], ...] = ()
        if isinstance(answer.body, bytes):
            first = answer.body
            length = ((b"content-length", str(len(first)).encode()),)
        else:
            pieces, first = answer.body, b""
        headers = [
            (b"content-type", answer.content_type.encode()),
            (b"cache-control", b"no-store"),
            *answer.headers,
            *length,
        ]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        if pieces is not None:
            await self._send_pieces(pieces, receive, send, none_wanted=scope["method"] == "HEAD")
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else first})

    async def _send_pieces(
        self, pieces: AsyncIterator[bytes], receive: Receive, send: Send, *, none_wanted: bool
    ) -> None:
        """Send all pieces, or stop when the client disconnects."""
        gone = asyncio.create_task(_until_gone(receive))
        try:
            async with contextlib.aclosing(cast(AsyncGenerator[bytes, None], pieces)):
                if none_wanted:
                    return
                async for piece in pieces:
                    async with asyncio.timeout(SEND_TIMEOUT_S):
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                    if gone.done():
                        return
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)

    async def _answer(self, scope: Scope, receive: Receive, entry: AuditEntry | None) -> Answer:
        path, method = scope["path"], "GET" if scope["method"] == "HEAD" else scope["method"]
        methods, in_path = self._find(scope)
        if methods is None:
            return self.not_found(path)
        route = methods.get(method)
        if route is None:
            allowed = ", ".join(methods)
            return problem(
                405,
                "method_not_allowed",
                f"{method} is not served at {path}; methods: {allowed}",
                headers=((b"allow", allowed.encode()),),
            )
        try:
            if len(scope["query_string"]) > QUERY_SIZE_MAX:
                return problem(414, "query_too_long", f"the query string may have {QUERY_SIZE_MAX} bytes")
            if entry is not None:
                resource = {**in_path, **_ids_of(scope["query_string"])}
                entry.describe(f"{route.method} {route.path}", resource, request_id=_request_id(scope))
            is_trusted = self._admit(route, scope, entry)
            body = b""
            if method != "GET":
                check_codings(scope["headers"])
                body = await read_body(receive)
            query = parse_query(scope["query_string"])
            request = Request(method, path, query, body, is_trusted, in_path, scope["headers"])
            if entry is not None and entry.operation is not None and route.is_change:
                await entry.begin(entry.operation, entry.resource)
            return await self._run(route, request)
        except BinderyError as error:
            return problem_of(error)
        except Exception as error:
            log.error("admin_request_broken", method=method, path=path, **error_fields(error))
            return problem(500, "internal", f"internal error: the log of the {self._service} has the cause")

    def _find(self, scope: Scope) -> tuple[Mapping[str, Route[ContextT]] | None, Mapping[str, str]]:
        """Return the routes at a request's path by method, and the values of the path's names."""
        path = scope["path"]
        methods = self._routes.get(path)
        if methods is not None or not self._patterns:
            return methods, {}
        # The path as it was sent, so that an encoded slash is not a separator.
        raw = scope.get("raw_path") or path.encode()
        words = raw.partition(b"?")[0].decode("ascii", "replace").split("/")
        for pattern in self._patterns:
            found = _match(pattern.split("/"), words)
            if found is not None:
                return self._routes[pattern], found
        return None, {}

    def _admit(self, route: Route[ContextT], scope: Scope, entry: AuditEntry | None) -> bool:
        """Return whether the client may see confidential parts: its token is good or the port requires none.

        Raises Unauthorized if the route needs a token, and Forbidden if its bearer may not use the route.
        """
        rule = self._rules.get((route.method, route.path))
        is_limited = rule is not None and not rule.allowed.is_everybody
        access = self._access.cluster if route.is_cluster_wide else self._access.own
        if access is None:
            return self._access == OPEN
        try:
            who = access.check(scope["headers"])
        except Unauthorized:
            if route.needs_token or route.method != "GET" or is_limited:
                raise
            return False
        if entry is not None:
            entry.role = who
        if rule is not None and not rule.allowed.allows(who):
            raise Forbidden(
                f"{route.method} {route.path} needs the role {rule.role}, which {who} does not have: add the name to "
                f"{rule.setting} of this {self._service}",
                name=who,
            )
        if route.method != "GET":
            log.info("admin_request", method=route.method, path=route.path, who=who)
        return self._confidential.allows(who)

    async def _run(self, route: Route[ContextT], request: Request) -> Answer:
        if not (route.during_start or self._is_open()):
            return problem(503, "starting", f"the {self._service} is starting: /startupz shows the progress")
        is_trusted = request.is_trusted
        if route.is_heavy:
            await self._wait_for_place(self._heavy[is_trusted])
        is_over = True
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                answer = await route.handler(self._context, request)
                if isinstance(answer.body, bytes):
                    return answer
                pieces = self._all_pieces(answer.body, route, is_trusted=is_trusted)
                await anext(pieces)  # an error before the first piece determines the status
                is_over = False
                return replace(answer, body=pieces)
        except TimeoutError:
            return problem(504, "timeout", f"no answer within {REQUEST_TIMEOUT_S:g} s")
        finally:
            if is_over and route.is_heavy:
                self._heavy[is_trusted].release()

    async def _wait_for_place(self, places: asyncio.Semaphore) -> None:
        """Wait in the order of arrival. Raises TooManyRequests after HEAVY_WAIT_S."""
        try:
            async with asyncio.timeout(HEAVY_WAIT_S):
                await places.acquire()
        except TimeoutError:
            raise TooManyRequests(
                "too many requests of this kind are in progress; retry", requests_max=HEAVY_MAX
            ) from None

    async def _all_pieces(
        self, pieces: AsyncIterator[bytes], route: Route[ContextT], *, is_trusted: bool
    ) -> AsyncGenerator[bytes, None]:
        """Yield an empty piece when the first piece is available, then all pieces. The last one ends the request."""
        is_started = False
        try:
            async with contextlib.aclosing(cast(AsyncGenerator[bytes, None], pieces)):
                first = await anext(pieces)
                is_started = True
                yield b""
                yield first
                async for piece in pieces:
                    yield piece
        finally:
            if is_started and route.is_heavy:
                self._heavy[is_trusted].release()

    def not_found(self, path: str) -> Answer:
        """Return the response for an unknown path."""
        there = ", ".join(sorted(self._routes))
        return problem(404, "not_found", f"nothing is served at {path[:200]}; paths: {there}")


def _match(pattern: Sequence[str], words: Sequence[str]) -> dict[str, str] | None:
    """Return the values of the names of `pattern` in `words`, or None if they do not match. Both are path segments."""
    if len(pattern) != len(words):
        return None
    found: dict[str, str] = {}
    for name, word in zip(pattern, words, strict=True):
        if name.startswith("{"):
            text = unquote(word)
            if not text or "/" in text:
                return None
            found[name[1:-1]] = text
        elif name != unquote(word):
            return None
    return found


def _ids_of(query_string: bytes) -> dict[str, str]:
    """Return the parameters that name what a request is about; none of a query that cannot be read."""
    try:
        query = parse_query(query_string)
    except BadRequest:
        return {}
    return {name: query[name] for name in RESOURCE_PARAMETERS if name in query}


def _request_id(scope: Scope) -> str | None:
    """Return the request id that the client chose, if it is a valid one."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID and _REQUEST_ID.fullmatch(value):
            return str(value.decode("ascii"))
    return None


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
