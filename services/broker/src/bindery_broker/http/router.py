"""Routes by path shape: the segments' number and the fixed ones among them.

A template is `/v1/topics/{tenant}/{namespace}/{topic}/messages`. Segments are split before they are decoded, so that a
`%2F` stays inside its segment.
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

from bindery_core.errors import BadRequest, BinderyError

from bindery_broker.topic_name import TopicName

SEGMENT_SIZE_MAX = 4_096
REMEMBERED_MAX = 4_096
REMEMBERED_PATH_SIZE_MAX = 512

Handler = Callable[..., Awaitable[Any]]


class NotFound(BinderyError):
    status = 404
    code = "not_found"


class MethodNotAllowed(BinderyError):
    status = 405
    code = "method_not_allowed"

    def __init__(self, allowed: Iterable[str]) -> None:
        self.allowed = ", ".join(sorted(allowed))
        super().__init__("the method is not served here", allowed=self.allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    method: str
    template: str
    handler: Handler
    operation_id: str
    summary: str
    tag: str
    query: type | None = None
    body: type | None = None
    """JSON body; None: none, or what `raw_body` says."""
    raw_body: bool = False
    """Messages to produce."""
    responses: dict[int, type] = field(default_factory=dict)
    media_types: tuple[str, ...] = ("application/json",)
    endless: bool = False
    """The answer streams until somebody hangs up."""
    errors: tuple[int, ...] = ()
    """Statuses of problems beside 400, 500, 503 and 504, which every operation has."""

    @property
    def needs_topic(self) -> bool:
        return "{topic}" in self.template


class Match(NamedTuple):
    route: Route
    params: dict[str, str]
    """Shared by all requests of this path: not to be changed."""
    topic: TopicName | None


class Router:
    def __init__(self, routes: Iterable[Route]) -> None:
        self._known: dict[tuple[str, bytes], Match] = {}
        self.routes = list(routes)
        self._shapes: dict[int, dict[tuple[tuple[int, str], ...], dict[str, Route]]] = {}
        self._names: dict[str, tuple[tuple[int, str], ...]] = {}
        for route in self.routes:
            segments = route.template.strip("/").split("/")
            fixed = tuple((i, s) for i, s in enumerate(segments) if not s.startswith("{"))
            self._names[route.template] = tuple((i, s[1:-1]) for i, s in enumerate(segments) if s.startswith("{"))
            methods = self._shapes.setdefault(len(segments), {}).setdefault(fixed, {})
            assert route.method not in methods, route.template
            methods[route.method] = route
        for shapes in self._shapes.values():  # most fixed segments first: `stats` is not a topic's name
            ordered = sorted(shapes.items(), key=lambda item: -len(item[0]))
            shapes.clear()
            shapes.update(ordered)

    def match(self, method: str, raw_path: bytes) -> "Match":
        """The route, its decoded parameters and the topic they name. Clients repeat themselves: short paths are
        remembered. Raises NotFound, MethodNotAllowed, BadRequest (not UTF-8, not a topic's name), TooLarge."""
        known = self._known.get((method, raw_path))
        if known is None:
            route, params = self._match(method, raw_path)
            topic = None
            if route.needs_topic:
                topic = TopicName.of(tenant=params["tenant"], namespace=params["namespace"], local=params["topic"])
            known = Match(route, params, topic)
            if len(raw_path) <= REMEMBERED_PATH_SIZE_MAX:
                if len(self._known) >= REMEMBERED_MAX:
                    self._known.clear()
                self._known[method, raw_path] = known
        return known

    def _match(self, method: str, raw_path: bytes) -> tuple[Route, dict[str, str]]:
        try:
            segments = raw_path.decode().strip("/").split("/")
        except UnicodeDecodeError as error:
            raise BadRequest("the path is not UTF-8") from error
        for fixed, methods in self._shapes.get(len(segments), {}).items():
            if all(segments[i] == text for i, text in fixed):
                route = methods.get(method)
                if route is None and method == "HEAD":
                    route = methods.get("GET")
                if route is None or (method == "HEAD" and route.endless):
                    raise MethodNotAllowed(methods)
                return route, {name: _decode(segments[i]) for i, name in self._names[route.template]}
        raise NotFound("nothing is served at this path; the API is described at /docs")


def _decode(segment: str) -> str:
    if len(segment) > SEGMENT_SIZE_MAX:
        raise BadRequest("a part of the path is too long", size=len(segment), size_max=SEGMENT_SIZE_MAX)
    if "%" not in segment:
        return segment
    try:
        return unquote_to_bytes(segment).decode()
    except UnicodeDecodeError as error:
        raise BadRequest("a part of the path is not UTF-8 once decoded") from error
