"""Answer 503 on the HTTP port while the broker starts. Requests for health paths do not reach this application.

This module uses no web framework, because FastAPI is imported while the port already answers.
"""

from collections.abc import Awaitable

from bindery_kit.http.problem import problem_response
from bindery_kit.observability.health import AsgiApp, Receive, Scope, Send


class LateApp:
    def __init__(self) -> None:
        self._app: AsgiApp | None = None

    def put(self, app: AsgiApp) -> None:
        """From now on requests go to `app`."""
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return (self._app or _starting)(scope, receive, send)


async def _starting(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
    elif scope["type"] == "http":
        response = problem_response(status=503, code="starting", detail="the broker is starting; see /startupz")
        await response(scope, receive, send)
    else:
        await send({"type": "websocket.close", "code": 1013})
