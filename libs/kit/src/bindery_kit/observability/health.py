"""Health: report whether the process is alive, has started and is ready, with the reasons if it is not.

| path      | 200 if                                     | body                                                        |
|-----------|--------------------------------------------|-------------------------------------------------------------|
| /livez    | no part has failed                         | `{"status": "ok"}` or `{"status": "failed", "reasons": {}}` |
| /startupz | the start is complete                      | before: `{"status": "starting", "progress": {...}}`         |
| /readyz   | started, alive and not blocked             | `{"status": "not_ready", "reasons": {part: why}}`, and      |
|           |                                            | `notes` of parts, which do not affect the status            |
| /metrics  | always                                     | the service's, and `bindery_ready`, `bindery_not_ready`     |

Otherwise the status is 503. Each part sets and clears its reason under its own name (`metadata`, `disk`, `cookie`), so
parts do not clear the reasons of one another. `OpsApp` serves the four paths in front of any ASGI app, without a web
framework.

Invariants: a process that failed is never ready; the start ends once and does not begin again.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

from bindery_kit.observability.metrics_page import Page, labels

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


PARTS_SHOWN: Final = ("startup", "metadata")
"""Parts of every service. Metrics include them even if they do not block, so that alerts can see the change."""


class MetricsPage(Protocol):
    """The content of /metrics: `bindery_kit.observability.metrics.Metrics`, or a page of the service."""

    @property
    def content_type(self) -> str: ...

    def render(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class StartupProgress:
    """The current step of the start: `done` of `total` `unit`s. `total`: 0 if unknown."""

    step: str
    done: int = 0
    total: int = 0
    unit: str = ""


class Health:
    """Health of the process, which its parts report and `OpsApp` serves."""

    def __init__(self) -> None:
        self._failed: dict[str, str] = {}
        self._blocked: dict[str, str] = {}
        self._notes: dict[str, str] = {}
        self._started = False
        self._progress = StartupProgress("starting")

    @property
    def is_live(self) -> bool:
        return not self._failed

    @property
    def is_started(self) -> bool:
        return self._started

    @property
    def is_ready(self) -> bool:
        return self._started and not self._failed and not self._blocked

    @property
    def reasons(self) -> dict[str, str]:
        """Return part -> why it is not ready; empty if ready."""
        starting = {} if self._started else {"startup": self._progress.step}
        return {**starting, **self._blocked, **self._failed}

    def progress(self, step: str, *, done: int = 0, total: int = 0, unit: str = "") -> None:
        """Set the current step of the start, for example `replaying the journal`."""
        self._progress = StartupProgress(step, done, total, unit)

    def started(self) -> None:
        """Record that the start is complete."""
        self._started = True

    def block(self, part: str, reason: str) -> None:
        """Make the process not ready until `clear`, for example `block("metadata", "session lost")`."""
        self._blocked[part] = reason

    def clear(self, part: str) -> None:
        self._blocked.pop(part, None)

    def note(self, part: str, text: str | None) -> None:
        """Set a note, which does not affect readiness; None removes it."""
        if text is None:
            self._notes.pop(part, None)
        else:
            self._notes[part] = text

    def fail(self, part: str, reason: str) -> None:
        """Record that a part has failed permanently. The process must then be restarted."""
        self._failed[part] = reason

    def live_answer(self) -> tuple[int, dict[str, Any]]:
        """Return HTTP status and body of /livez."""
        return (200, {"status": "ok"}) if self.is_live else (503, {"status": "failed", "reasons": dict(self._failed)})

    def ready_answer(self) -> tuple[int, dict[str, Any]]:
        notes = {"notes": dict(self._notes)} if self._notes else {}
        if self.is_ready:
            return 200, {"status": "ready", **notes}
        return 503, {"status": "not_ready", "reasons": self.reasons, **notes}

    def startup_answer(self) -> tuple[int, dict[str, Any]]:
        if self._started:
            return 200, {"status": "started"}
        return 503, {"status": "starting", "progress": asdict(self._progress)}

    def metrics(self) -> bytes:
        """Return readiness and the parts that block it, as text for Prometheus."""
        blocked = dict.fromkeys(PARTS_SHOWN, 0) | dict.fromkeys(self.reasons, 1)
        page = Page()
        page.add("bindery_ready", "gauge", "1: ready, as in /readyz.", [("", int(self.is_ready))])
        page.add(
            "bindery_not_ready",
            "gauge",
            "1: this part blocks readiness.",
            [(labels({"part": part}), value) for part, value in sorted(blocked.items())],
        )
        return page.render()


METRICS_PATHS: Final = ("/metrics", "/metrics/")
"""Pulsar's brokers redirect the first one to the second one, so Prometheus may be configured with either."""
RENDERED_MAX: Final = 20
"""Maximum number of times per second that /metrics is rendered."""


class OpsApp:
    """ASGI: /livez, /readyz, /startupz and /metrics. `app` serves all other paths; without it they are 404. `parts`
    render further metrics in the format of Prometheus."""

    def __init__(
        self,
        health: Health,
        metrics: MetricsPage,
        *,
        app: AsgiApp | None = None,
        parts: Sequence[Callable[[], bytes]] = (),
        prepare: Sequence[Callable[[], Awaitable[None]]] = (),
    ) -> None:
        """`prepare`: awaited before each page of metrics, for parts that need several turns of the event loop."""
        self._health = health
        self._metrics = metrics
        self._app = app
        self._parts = (self._metrics.render, self._health.metrics, *parts)
        self._prepare = tuple(prepare)
        self._page = b""
        self._rendered = 0
        """Number of pages rendered in the current second."""
        self._second_ends_s = 0.0

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "http":
            if scope["path"] in METRICS_PATHS and self._prepare:
                return self._respond_prepared(scope, send)
            answer = self._answer(scope["path"])
            if answer is not None:
                return self._respond(scope, send, *answer)
        return (self._app or self._nothing_else)(scope, receive, send)

    async def _respond_prepared(self, scope: Scope, send: Send) -> None:
        for prepare in self._prepare:
            await prepare()
        answer = self._answer(scope["path"])
        assert answer is not None
        await self._respond(scope, send, *answer)

    async def _nothing_else(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await answer_lifespan(receive, send)
        elif scope["type"] == "http":
            body = {
                "type": "about:blank",
                "title": "not found",
                "status": 404,
                "code": "not_found",
                "detail": scope["path"],
            }
            await self._respond(scope, send, 404, _json(body), "application/problem+json")
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _metrics_page(self) -> bytes:
        """Return the metrics. Above RENDERED_MAX requests per second they are not rendered again, because anybody can
        request them, and a page takes milliseconds of the event loop."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._second_ends_s:
            self._second_ends_s = now_s + 1.0
            self._rendered = 0
        if self._rendered < RENDERED_MAX:
            self._rendered += 1
            self._page = b"".join(part() for part in self._parts)
        return self._page

    def _answer(self, path: str) -> tuple[int, bytes, str] | None:
        if path in METRICS_PATHS:
            return 200, self._metrics_page(), self._metrics.content_type
        if path == "/livez":
            status, body = self._health.live_answer()
        elif path == "/readyz":
            status, body = self._health.ready_answer()
        elif path == "/startupz":
            status, body = self._health.startup_answer()
        else:
            return None
        return status, _json(body), "application/json"

    async def _respond(self, scope: Scope, send: Send, status: int, body: bytes, content_type: str) -> None:
        headers = [(b"content-type", content_type.encode()), (b"cache-control", b"no-store")]
        if scope["method"] not in ("GET", "HEAD"):
            status, body = 405, b""
            headers = [(b"allow", b"GET, HEAD")]
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode() + b"\n"


async def answer_lifespan(receive: Receive, send: Send) -> None:
    """Answer the lifespan messages of an app that has nothing to do at its start and end."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
