"""Send a request to a broker and classify its response.

| response                                               | outcome                                                    |
|--------------------------------------------------------|------------------------------------------------------------|
| 200, 201, 207                                          | ok; 207 has an outcome for each message                    |
| none: no connection                                    | failed: nothing was sent                                   |
| problem+json with a `code`, status 4xx or 503          | failed: the broker guarantees that nothing was written     |
| the same with 408, or with a code of lost ownership    | unknown: an add may have been in flight                    |
| all others: 500, 504, a proxy's page, timeout, broken connection | unknown                                          |

A 503 without a `code` comes from a proxy before the broker, which does not prove anything about the request.
Source: bindery_core.errors (503 and 429 are raised only when nothing happened, OutcomeUnknown is 504).
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx

Endpoint = Callable[[], Awaitable[str]]
"""Returns the current base URL of a broker, such as `http://127.0.0.1:8080`. If it raises, it is called again later."""
UNKNOWN_CODES: Final = frozenset(("lost_ownership", "ledger_fenced", "ledger_closed", "topic_fenced"))
DONE: Final = frozenset((200, 201, 207))
RETRY_PAUSE_S: Final = 0.2
CONNECT_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a request. `kind`: "ok", "failed" or "unknown". `status`: 0 if there was no response."""

    kind: str
    status: int = 0
    body: Any = None
    error: str = ""


def fixed(url: str) -> Endpoint:
    """An endpoint with a constant URL."""

    async def here() -> str:
        return url

    return here


def in_turn(urls: Sequence[str]) -> Endpoint:
    """An endpoint of several brokers, which are asked in turn."""
    turns = itertools.cycle(urls)

    async def there() -> str:
        return next(turns)

    return there


def refusal_kind(status: int, code: object) -> str:
    """Outcome of a request that was answered by a problem with this status and code."""
    if not isinstance(code, str) or not code:
        return "unknown"
    if status == 503 or (400 <= status < 500 and status != 408 and code not in UNKNOWN_CODES):
        return "failed"
    return "unknown"


class BrokerAccess:
    """The current broker URL and the requests of all clients of one run."""

    def __init__(self, endpoint: Endpoint, *, timeout_s: float, is_kept: bool = True) -> None:
        """`is_kept`: whether a URL is used until a request to it fails; otherwise, each request asks the endpoint."""
        self._endpoint = endpoint
        self._is_kept = is_kept
        self._timeout = httpx.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s))
        self._lookup = asyncio.Lock()
        self._url = ""

    def client(self, *, longer_s: float = 0.0) -> httpx.AsyncClient:
        """A client with its own connections. `longer_s`: seconds of a long poll, added to the response timeout."""
        timeout = httpx.Timeout((self._timeout.read or 0.0) + longer_s, connect=self._timeout.connect)
        return httpx.AsyncClient(timeout=timeout, trust_env=False)

    async def base_url(self) -> str:
        """The base URL; waits until the endpoint returns one."""
        while True:
            async with self._lookup:
                if not self._url:
                    try:
                        self._url = (await self._endpoint()).rstrip("/")
                    except Exception:  # an endpoint may fail while faults are injected
                        self._url = ""
            if self._url:
                return self._url
            await asyncio.sleep(RETRY_PAUSE_S)

    async def call(self, http: httpx.AsyncClient, method: str, path: str, **request: Any) -> Outcome:
        """Send a request once, and wait for its response only. Await `base_url` before the request is recorded."""
        url = self._url if self._is_kept else await self._endpoint()
        if not url:
            return Outcome("failed", error="no broker's address is known: nothing was sent")
        try:
            response = await http.request(method, url + path, **request)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol) as error:
            self._discard(url)
            return Outcome("failed", error=f"nothing was sent: {type(error).__name__} {error}")
        except httpx.HTTPError as error:
            self._discard(url)
            return Outcome("unknown", error=f"{type(error).__name__} {error}")
        return outcome_of(response)

    def _discard(self, url: str) -> None:
        """Request a new URL from the endpoint, unless another client already did."""
        if self._url == url:
            self._url = ""


def outcome_of(response: httpx.Response) -> Outcome:
    """Classify a response by the table of the module."""
    try:
        body = response.json() if response.content else None
    except ValueError:
        body = None
    if response.status_code in DONE and body is not None:
        return Outcome("ok", response.status_code, body)
    error = f"{response.status_code} {response.text[:250]}"
    is_problem = response.headers.get("content-type", "").startswith("application/problem+json")
    code = body.get("code") if is_problem and isinstance(body, dict) else None
    return Outcome(refusal_kind(response.status_code, code), response.status_code, body, error)
