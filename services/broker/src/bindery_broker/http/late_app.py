"""Answer requests on the HTTP port without the broker: 503 while it starts, and refusals of clients that are unknown.

Requests for health paths do not reach these. Errors have the form of the path: problems, or that of Pulsar's admin API.
This module uses no web framework, because FastAPI is imported while the port already answers.
"""

import json
from collections.abc import Awaitable
from typing import Final

from bindery_core.errors import BinderyError
from bindery_kit.http.problem import problem_of, problem_response
from bindery_kit.http.request_id import RequestIds
from bindery_kit.observability.health import AsgiApp, Receive, Scope, Send
from starlette.responses import Response

PULSAR_PATHS: Final = ("/admin/", "/lookup/")
"""Beginnings of the paths whose errors have the form of Pulsar's admin API."""
_ids: Final = RequestIds(prefix="refused-")


class LateApp:
    def __init__(self) -> None:
        self._app: AsgiApp | None = None

    def put(self, app: AsgiApp) -> None:
        """From now on requests go to `app`."""
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return (self._app or _starting)(scope, receive, send)


async def refuse_unknown(
    scope: Scope, receive: Receive, send: Send, error: BinderyError, challenges: list[str]
) -> None:
    """Answer a request whose client is not authenticated. `challenges`: values of `WWW-Authenticate`."""
    response = problem_of(error)
    if scope["path"].startswith(PULSAR_PATHS):
        response = Response(json.dumps({"reason": str(error)}), error.status, media_type="application/json")
    for challenge in challenges:
        response.headers.append("www-authenticate", challenge)
    response.headers["x-request-id"] = _ids.of(scope)
    await response(scope, receive, send)


async def _starting(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
    elif scope["type"] == "http":
        response = problem_response(status=503, code="starting", detail="the broker is starting; see /startupz")
        response.headers["x-request-id"] = _ids.of(scope)
        await response(scope, receive, send)
    else:
        await send({"type": "websocket.close", "code": 1013})
