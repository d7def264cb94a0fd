"""Requests, responses and routes of an admin API on bare ASGI.

A web framework would cost a bookie more memory and start-up time than the API itself.

All input of clients is limited: query strings by QUERY_SIZE_MAX, bodies by BODY_SIZE_MAX, heads by the server. Errors
are RFC 9457 problems with status and code of the error tree, as in every service.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar
from urllib.parse import parse_qsl

from bindery_core.errors import BadRequest, BinderyError, TooLarge
from bindery_core.ids import ID_MAX

from bindery_kit.admin.content_types import Headers, check_json_type

if TYPE_CHECKING:
    from bindery_kit.observability.health import Receive

BODY_SIZE_MAX: Final = 64 * 1024
"""Maximum size of a request body in bytes."""
QUERY_SIZE_MAX: Final = 4096
"""Maximum size of a query string in bytes."""
PARAMETERS_MAX: Final = 32
"""Maximum number of query parameters."""
RETRY_AFTER_S: Final = 1
"""Value in seconds of the Retry-After header of 429 and 503."""

ContextT = TypeVar("ContextT")
"""The context that a service passes to its handlers."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request that a route handles."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_trusted: bool = True
    """Whether the request has a valid token, or the port requires none at all."""
    in_path: Mapping[str, str] = field(default_factory=dict)
    """Values of the names in braces of the route's path, decoded; not empty, and without a slash."""
    headers: Headers = ()
    """Names in lower case."""

    def number(self, name: str, default: int | None = None, *, low: int = 0, high: int = ID_MAX) -> int:
        """Return a parameter of path or query: decimal, or hex with `0x`.

        Raises BadRequest if it is not a number in low..high, or if it is missing and has no default.
        """
        text = self.in_path.get(name, self.query.get(name))
        if text is None:
            if default is None:
                raise BadRequest(f"the parameter {name} is missing", parameter=name)
            return default
        try:
            value = int(text, 16) if text[:2] in ("0x", "0X") else int(text)
        except ValueError:
            raise BadRequest(f"{name} must be a number", parameter=name, found=text[:100]) from None
        if not low <= value <= high:
            raise BadRequest(f"{name} must be in {low}..{high}", parameter=name, found=value)
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return a parameter that is `true` or `false`. Raises BadRequest."""
        text = self.query.get(name)
        if text is None:
            return default
        if text.lower() not in ("true", "false"):
            raise BadRequest(f"{name} must be true or false", parameter=name, found=text[:100])
        return text.lower() == "true"

    def json_object(self, *, may_be_empty: bool = False, only: Sequence[str] = ()) -> dict[str, Any]:
        """Return the body. Raises BadRequest if it is not a JSON object, UnsupportedMediaType without the type of JSON.

        If `only` is given, other members raise BadRequest, because a misspelled member would be ignored silently.
        """
        if not self.body.strip():
            if may_be_empty:
                return {}
            raise BadRequest("empty request body: a JSON object is expected")
        check_json_type(self.headers)
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise BadRequest("the body must be a JSON object")
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise BadRequest("the body has an unpaired surrogate, which is no character") from None
        for name in value:
            if only and name not in only:
                raise BadRequest(f"unknown member; the body may have only {', '.join(only)}", member=name)
        return value


def boolean(body: Mapping[str, Any], name: str, default: bool | None = None) -> bool | None:
    """Return a member of a body that is true, false or missing. Raises BadRequest."""
    value = body.get(name, default)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false", member=name)
    return value


@dataclass(frozen=True, slots=True)
class Answer:
    """The response to a request."""

    status: int
    content_type: str
    body: bytes | AsyncIterator[bytes]
    """An iterator is streamed; an error before its first piece becomes an error response."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    code: str | None = None
    """Code of the error that it reports."""


@dataclass(frozen=True, slots=True)
class Route(Generic[ContextT]):
    """One method of one path. Methods other than GET need a token; GET needs one only if `is_guarded`."""

    method: str
    path: str
    """`{name}` matches any segment."""
    handler: Callable[[ContextT, Request], Awaitable[Answer]]
    is_guarded: bool = False
    """Whether GET needs a token, because the response is confidential or expensive."""
    is_heavy: bool = False
    """Whether requests take long, so that HEAVY_MAX limits concurrent requests."""
    during_start: bool = False
    """Whether it is served before storage and metadata are available."""
    is_cluster_wide: bool = False
    """Whether it changes the state of the whole cluster, for which other tokens may be needed."""
    get_changes: bool = False
    """Whether a GET changes something nevertheless."""

    @property
    def is_change(self) -> bool:
        return self.method != "GET" or self.get_changes

    @property
    def needs_token(self) -> bool:
        return self.is_guarded or self.method != "GET"


def json_answer(body: Any, status: int = 200) -> Answer:
    return Answer(status, "application/json", json.dumps(body, indent=2).encode() + b"\n")


def text_answer(body: str, status: int = 200) -> Answer:
    return Answer(status, "text/plain; charset=utf-8", body.encode())


def problem(
    status: int, code: str, detail: str, *, headers: tuple[tuple[bytes, bytes], ...] = (), **facts: Any
) -> Answer:
    """Return an error response (RFC 9457) with the same fields as `bindery_kit.http.problem`."""
    body = {
        "type": f"urn:bindery:problem:{code}",
        "title": code.replace("_", " "),
        "status": status,
        "code": code,
        "detail": detail,
        "facts": facts,
    }
    if status in (429, 503):
        headers = (*headers, (b"retry-after", str(RETRY_AFTER_S).encode()))
    return Answer(status, "application/problem+json", json.dumps(body, default=str).encode() + b"\n", headers, code)


def problem_of(error: BinderyError) -> Answer:
    """Return `error` as a response, with the status and code of its class."""
    headers = ((b"www-authenticate", b"Bearer"),) if error.status == 401 else ()
    return problem(error.status, error.code, str(error), headers=headers, **error.facts)


def parse_query(text: bytes) -> dict[str, str]:
    """Return the parameters; if one is repeated, its last value counts.

    Raises BadRequest for a query string that is too long, has too many parameters, or is not text.
    """
    if len(text) > QUERY_SIZE_MAX:
        raise BadRequest("the query string is too long", size=len(text), size_max=QUERY_SIZE_MAX)
    try:
        return dict(
            parse_qsl(text.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=PARAMETERS_MAX)
        )
    except ValueError:
        raise BadRequest("the query string cannot be read") from None


async def read_body(receive: "Receive") -> bytes:
    """Return the body; empty if the client disconnects. Raises TooLarge above BODY_SIZE_MAX."""
    body: bytes = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b""
        body += message.get("body", b"")
        if len(body) > BODY_SIZE_MAX:
            raise TooLarge("the body is too large", size_max=BODY_SIZE_MAX)
        if not message.get("more_body"):
            return body


async def stream_object(pairs: AsyncIterator[tuple[str, Any]]) -> AsyncIterator[bytes]:
    """Yield a JSON object member by member, so that the memory does not depend on the number of members."""
    first = True
    async for name, value in pairs:
        yield (b"{\n  " if first else b",\n  ") + json.dumps(name).encode() + b" : " + json.dumps(value).encode()
        first = False
    yield b"{ }\n" if first else b"\n}\n"
