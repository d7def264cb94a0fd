"""The two kinds of operations: ordinary ones, which FastAPI handles, and hot ones, which the gate calls directly.

Both are FastAPI routes of one application and one OpenAPI document; both run on the broker that owns their topic.
"""

from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec
from bindery_core.errors import BinderyError
from bindery_kit.access.audit_trail import entry_of
from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from bindery_broker.access import audited
from bindery_broker.http import openapi, paths
from bindery_broker.http.exchange import SCOPE_KEY, Exchange

HotOperation = Callable[[Exchange], Awaitable[Response]]
Handler = Callable[[Request], Coroutine[Any, Any, Response]]
ROUTED_OPERATIONS: Final = frozenset(("listDeadLetters", "redriveDeadLetters", "purgeDeadLetters"))
"""Operations that may run at the owner of another topic than that in the path."""
UNOWNED_OPERATIONS: Final = frozenset(
    (
        "getSchema", "listSchemaVersions", "getSchemaVersion", "uploadSchema", "compareSchema", "deleteSchema",
        "topicPartitions", "setPartitions", "deletePartitions",
    )
)  # fmt: skip
"""Operations that any broker runs, although their path names a topic, which need not exist."""
DEFAULT_BODIES: Final = frozenset(("subscribe",))
"""Operations whose body may be left out. Only PUT: a browser sends a POST without a content type for any other site."""
_methods: Final[dict[str, set[str]]] = {}
"""Methods by path, for the `Allow` header of a 405: a route object holds only its own methods."""


class JsonLine(JSONResponse):
    """JSON that ends with a newline, as every answer of the broker does."""

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content) + b"\n"


class OwnedRoute(APIRoute):
    """An ordinary operation."""

    methods: set[str]

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        _methods.setdefault(self.path_format, set()).update(self.methods)

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()
        has_body = self.body_field is not None

        async def operation(exchange: Exchange) -> Response:
            if has_body:
                await exchange.load_json(may_be_empty=self.unique_id in DEFAULT_BODIES)
            return await handle(exchange)

        return self._at_owner(operation)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in self.methods:
            allowed = ", ".join(sorted(_methods[self.path_format]))
            raise HTTPException(405, headers={"Allow": allowed})
        await super().handle(scope, receive, send)

    def _at_owner(self, operation: HotOperation) -> Handler:
        is_change = audited.is_change(self.unique_id, self.methods)

        async def handler(request: Request) -> Response:
            exchange: Exchange = request.scope[SCOPE_KEY]
            exchange.operation = self.unique_id
            params = request.path_params
            if "topic" in params and self.unique_id not in UNOWNED_OPERATIONS:
                in_path = paths.topic_of(params["tenant"], params["namespace"], params["topic"])
                routed_by = exchange.routed_by if self.unique_id in ROUTED_OPERATIONS else None
                exchange.topic_name = routed_by or in_path
            entry = entry_of(exchange.scope)
            if entry is None:
                return await exchange.at_owner.run(exchange, operation)
            entry.describe(self.unique_id, params, request_id=exchange.request_id)
            try:
                begin = partial(entry.begin, self.unique_id, params) if is_change else None
                return await exchange.at_owner.run(exchange, operation, begin=begin)
            except BinderyError as error:
                entry.code = error.code
                raise

        return handler


class HotRoute(OwnedRoute):
    """An operation that FastAPI does not handle: its endpoint takes the exchange and validates the request itself.

    HEAD is not served: the only hot GET operation is the endless stream.
    """

    endpoint: HotOperation

    def get_route_handler(self) -> Handler:
        handle = self._at_owner(self.endpoint)

        async def handler(request: Request) -> Response:
            exchange: Exchange = request.scope[SCOPE_KEY]
            if exchange.method not in self.methods:
                exchange.operation = self.unique_id
                raise HTTPException(405, headers={"Allow": ", ".join(sorted(_methods[self.path_format]))})
            return await handle(request)

        return handler


def hot(
    router: APIRouter,
    method: str,
    path: str,
    *,
    operation_id: str,
    summary: str,
    answers: Mapping[int, Any],
    errors: Collection[int],
    path_parameters: Sequence[openapi.Json],
    query: type[msgspec.Struct],
    body: Mapping[str, Any] | type[msgspec.Struct] | None = None,
    media_types: Collection[str] = ("application/json",),
    response_class: type[Response] = JsonLine,
) -> Callable[[HotOperation], HotOperation]:
    """Register a hot operation.

    `operation_id` is also the operation's name in logs and metrics. All parameters after it only document the operation
    in OpenAPI: the endpoint validates the request. `body`: a struct, or OpenAPI's `requestBody`.
    """
    extra: dict[str, Any] = {"parameters": [*path_parameters, *openapi.query_parameters(query)]}
    if isinstance(body, type):
        schema = openapi.reference(body)
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    elif body is not None:
        extra["requestBody"] = dict(body)

    def register(endpoint: HotOperation) -> HotOperation:
        router.add_api_route(
            path,
            endpoint,
            methods=[method],
            status_code=200,
            operation_id=operation_id,
            summary=summary,
            openapi_extra=extra,
            response_class=response_class,
            response_description=openapi.TITLES[200],
            responses={**openapi.answers(answers, media_types), **openapi.problems(*errors)},
            route_class_override=HotRoute,
        )
        return endpoint

    return register
