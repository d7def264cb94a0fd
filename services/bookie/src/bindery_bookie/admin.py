"""AdminApp: the part of BookKeeper's admin HTTP API that one bookie answers, as a small ASGI application.

| path                          | method   | answer                                                                    |
|-------------------------------|----------|---------------------------------------------------------------------------|
| /heartbeat                    | GET      | text `OK`                                                                 |
| /api/v1/bookie/info           | GET      | `{"freeSpace", "totalSpace"}`, bytes                                      |
| /api/v1/bookie/state          | GET      | running, readOnly, shuttingDown, availableForHighPriorityWrites           |
| /api/v1/bookie/state/readonly | GET, PUT | `{"readOnly"}`, and `reasons` of ours; PUT sets the operator's own reason |
| /api/v1/bookie/is_ready       | GET      | text `OK`, or 503 with the reasons                                        |
| /api/v1/config/server_config  | GET      | every setting as text                                                     |

Probes and metrics (`/livez`, `/readyz`, `/startupz`, `/metrics`) are `bindery_kit.health.OpsApp`'s, in front of this.
Written on bare ASGI: a web framework would cost a bookie more memory and start-up time than all that it serves.
Source: BookKeeper HttpRouter.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from bindery_kit.health import Health, Receive, Scope, Send

from bindery_bookie.state import READ_ONLY_ADMIN, BookieState
from bindery_bookie.store import EntryStore

BODY_SIZE_MAX: Final = 4096
_PATHS: Final = {
    "/heartbeat": ("GET",),
    "/api/v1/bookie/info": ("GET",),
    "/api/v1/bookie/state": ("GET",),
    "/api/v1/bookie/state/readonly": ("GET", "PUT"),
    "/api/v1/bookie/is_ready": ("GET",),
    "/api/v1/config/server_config": ("GET",),
}
Answer = tuple[int, str, bytes]
"""Status, content type, body."""


class AdminApp:
    """`settings()`: every setting's name and value as text, secrets masked."""

    def __init__(
        self, store: EntryStore, state: BookieState, health: Health, settings: Callable[[], Mapping[str, str]]
    ) -> None:
        self._store = store
        self._state = state
        self._health = health
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        path, method = scope["path"], "GET" if scope["method"] == "HEAD" else scope["method"]
        allowed = _PATHS.get(path)
        headers = []
        if allowed is None:
            answer = _problem(404, "not_found", f"nothing is served at {path}; there is: {', '.join(_PATHS)}")
        elif method not in allowed:
            answer = _problem(405, "method_not_allowed", f"{method} is not served at {path}")
            headers.append((b"allow", ", ".join(allowed).encode()))
        elif method == "PUT":
            answer = self._put_read_only(await _body(receive))
        else:
            answer = self._get(path)
        status, content_type, body = answer
        headers += [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    def _get(self, path: str) -> Answer:
        match path:
            case "/heartbeat":
                return _text(200, "OK\n")
            case "/api/v1/bookie/info":
                total, free = self._store.disk_usage()
                return _json(200, {"freeSpace": free, "totalSpace": total})
            case "/api/v1/bookie/state":
                return _json(
                    200,
                    {
                        "running": self._state.running,
                        "readOnly": self._state.read_only,
                        "shuttingDown": self._state.shutting_down,
                        "availableForHighPriorityWrites": self._state.accepts_add(priority=1),
                    },
                )
            case "/api/v1/bookie/state/readonly":
                return self._read_only()
            case "/api/v1/bookie/is_ready":
                return _text(200, "OK") if self._health.is_ready else _json(503, {"reasons": self._health.reasons})
            case "/api/v1/config/server_config":
                return _json(200, dict(self._settings()))
        raise AssertionError(path)

    def _read_only(self) -> Answer:
        return _json(200, {"readOnly": self._state.read_only, "reasons": self._state.reasons})

    def _put_read_only(self, body: bytes | None) -> Answer:
        if body is None:
            return _problem(413, "too_large", f"the body may have {BODY_SIZE_MAX} bytes")
        try:
            wanted = json.loads(body)["readOnly"]
        except (ValueError, KeyError, TypeError):
            wanted = None
        if not isinstance(wanted, bool):
            return _problem(400, "bad_request", 'the body must be {"readOnly": true} or {"readOnly": false}')
        self._state.set_read_only(READ_ONLY_ADMIN, "an operator asked for it" if wanted else None)
        return self._read_only()


def _json(status: int, body: Mapping[str, Any]) -> Answer:
    return status, "application/json", json.dumps(body, indent=2).encode() + b"\n"


def _text(status: int, body: str) -> Answer:
    return status, "text/plain; charset=utf-8", body.encode()


def _problem(status: int, code: str, detail: str) -> Answer:
    body = {
        "type": f"urn:bindery:problem:{code}",
        "title": code.replace("_", " "),
        "status": status,
        "code": code,
        "detail": detail,
    }
    return status, "application/problem+json", json.dumps(body).encode() + b"\n"


async def _body(receive: Receive) -> bytes | None:
    """The request's body; None over BODY_SIZE_MAX."""
    body: bytes = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b""
        body += message.get("body", b"")
        if len(body) > BODY_SIZE_MAX:
            return None
        if not message.get("more_body"):
            return body


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
