"""AuditTrail: the ASGI application of a port, with a line in the audit log for each change and each refusal.

It is the outermost application, so that it sees every answer. What only the application behind it knows, this one adds
to the `AuditEntry` in the state of the scope:

    entry = entry_of(scope)                           None without an audit log
    await entry.begin("createTopic", {"topic": "x"})  before the change; raises AuditLogUnavailable
    entry.describe("produce", {...}, code="forbidden")    for a request that may be refused

| what the application does                    | lines                                                             |
|----------------------------------------------|-------------------------------------------------------------------|
| begins a change and answers                  | `change_started`, `change_finished` with the status of the answer |
| begins a change and ends without an answer   | `change_started`, `change_finished` without a status              |
| begins a change, whose first line fails      | `change_finished` with 503, and `change_started` if the file      |
|                                              | takes it nevertheless                                             |
| answers 401 or 403, no change begun          | `denied`                                                          |
| anything else                                | none                                                              |

The line is written before the first byte of the answer is passed on. If `change_finished` cannot be written, the answer
is sent nevertheless: the change is made, and `change_started` says by whom.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Any, Final

from bindery_identity.principal import Principal

from bindery_kit.access.audit_log import AuditLog, AuditLogUnavailable
from bindery_kit.limits.address_counts import group_of
from bindery_kit.observability.health import AsgiApp, Receive, Scope, Send

STATE_KEY: Final = "audit"
"""Key of the entry in the state of the scope."""
DENIED: Final = frozenset((401, 403))
"""Statuses of refusals for lack of permission."""
FAILED: Final = 400
"""Lowest status of an error."""
NOT_BEGUN: Final = "not_begun"
"""Code in the log of a change that is not made, because the client was gone when its first line was written."""
REQUEST_ID: Final = b"x-request-id"
IS_PROXIED: Final = "is_proxied"
"""Key in the state of the scope that the application sets to True if another process of the service passed the request
on, and has proved it."""


class AuditEntry:
    """What is known about one request. `role`: of the client, if the application knows it without a Principal."""

    __slots__ = (
        "_change", "_is_finished", "_log", "_scope", "code", "operation", "request_id", "resource",
        "role",
    )  # fmt: skip

    def __init__(self, log: AuditLog, scope: Scope) -> None:
        self._log = log
        self._scope = scope
        self._change: str | None = None
        self._is_finished = False
        self.operation: str | None = None
        self.resource: Mapping[str, Any] = {}
        self.role: str | None = None
        self.request_id: str | None = None
        self.code: str | None = None
        """Code of the error in the answer."""

    @property
    def is_open(self) -> bool:
        """Whether a change has begun whose answer is not sent yet."""
        return self._change is not None and not self._is_finished

    @property
    def has_begun(self) -> bool:
        return self._change is not None

    def describe(self, operation: str, resource: Mapping[str, Any], *, request_id: str | None = None) -> None:
        """Set what the request is about, unless a change has begun: the parts of a change do not describe it."""
        if self._change is not None:
            return
        self.operation, self.resource = operation, resource
        if request_id is not None:
            self.request_id = request_id

    async def begin(self, operation: str, resource: Mapping[str, Any], *, request_id: str | None = None) -> None:
        """Record that a change begins. Only the first call counts: a change may consist of others.

        Raises AuditLogUnavailable if the line cannot be written and such changes are refused.
        """
        if self._change is not None:
            return
        self.describe(operation, resource, request_id=request_id)
        change = self._log.next_change()
        fields = {"change": change, **self._request()}
        try:
            await self._log.write("change_started", fields)
        except AuditLogUnavailable as error:
            if self._log.refuses:
                self._log.revoke({**fields, "status": error.status, "code": error.code})
                raise
        except asyncio.CancelledError:
            self._log.revoke({**fields, "status": None, "code": NOT_BEGUN})
            raise
        self._change = change

    async def finish(self, status: int | None) -> None:
        """Record the answer of the change; None: there was none. It never fails."""
        if self._is_finished:
            return
        self._is_finished = True
        fields = {"change": self._change, **self._request(), **self._outcome(status)}
        with contextlib.suppress(AuditLogUnavailable):  # counted and logged; the change is made
            await self._log.write("change_finished", fields)

    async def deny(self, status: int) -> None:
        """Record a refusal. It never fails."""
        group = group_of(self._scope.get("client"))
        await self._log.deny(group, {**self._request(), **self._outcome(status)})

    def _outcome(self, status: int | None) -> dict[str, Any]:
        has_failed = status is None or status >= FAILED
        return {"status": status, "code": self.code if has_failed else None}

    def _request(self) -> dict[str, Any]:
        scope = self._scope
        principal = scope["state"].get("principal")
        role, original_role = self.role, None
        if isinstance(principal, Principal):
            role, original_role = principal.role, principal.original_role
        client = scope.get("client")
        return {
            "request_id": self.request_id,
            "role": role,
            "original_role": original_role,
            "method": scope["method"],
            "path": _path(scope),
            "operation": self.operation,
            "resource": self.resource,
            "client": client[0] if client else None,
            "is_proxied": scope["state"].get(IS_PROXIED, False),
        }


def entry_of(scope: Mapping[str, Any]) -> AuditEntry | None:
    """Return the entry of a request; None without an audit log."""
    entry = scope.get("state", {}).get(STATE_KEY)
    return entry if isinstance(entry, AuditEntry) else None


class AuditTrail:
    """`app`: the application of a port."""

    def __init__(self, app: AsgiApp, log: AuditLog) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        entry = AuditEntry(self._log, scope)
        scope.setdefault("state", {})[STATE_KEY] = entry
        try:
            await self._app(scope, receive, _Recorded(entry, send))
        finally:
            if entry.is_open:
                # Also if the client has gone and this task is cancelled: the line must be written all the same.
                await asyncio.shield(entry.finish(None))


def trail(log: AuditLog | None) -> Callable[[AsgiApp], AsgiApp] | None:
    """Return what puts an AuditTrail in front of an application; None without a log."""
    return None if log is None else partial(AuditTrail, log=log)


class _Recorded:
    """The `send` of a request: it writes the line before it passes on the beginning of the answer.

    `__self__` is that of the server's own `send`, by which short responses skip ASGI
    (`bindery_kit.http.http_request.request_of`). Such responses are neither refusals nor answers of changes.
    """

    __slots__ = ("__self__", "_entry", "_send")

    def __init__(self, entry: AuditEntry, send: Send) -> None:
        self._entry = entry
        self._send = send
        self.__self__ = getattr(send, "__self__", None)

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            entry, status = self._entry, message["status"]
            if entry.is_open:
                await entry.finish(status)
            elif status in DENIED and not entry.has_begun:
                if entry.request_id is None:
                    entry.request_id = _answered_id(message)
                await entry.deny(status)
        await self._send(message)


def _path(scope: Scope) -> str:
    """Return the path as it was sent, without the query."""
    raw = scope.get("raw_path")
    if raw is None:
        return str(scope["path"])
    text: str = raw.partition(b"?")[0].decode("latin-1")
    return text


def _answered_id(message: Mapping[str, Any]) -> str | None:
    for name, value in message.get("headers", ()):
        if name == REQUEST_ID:
            return str(value.decode("latin-1"))
    return None
