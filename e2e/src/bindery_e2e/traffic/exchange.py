"""One request to a broker, and what its answer means.

| came back                                              | means                                                      |
|--------------------------------------------------------|------------------------------------------------------------|
| 200, 201, 207                                          | done; 207 tells it for each message                        |
| no connection could be made                            | failed: nothing was sent                                   |
| problem+json with a `code`, status 4xx or 503          | failed: the broker says that nothing was written           |
| ... but 408, or a code of lost ownership               | unknown: something may have been in flight                 |
| anything else: 500, 504, a proxy's own page, a time-out, a cut connection | unknown                                 |

A 503 without a `code` comes from something between us and the broker, which cannot know.
Source: bindery_core.errors (503 and 429 are raised only when nothing happened, OutcomeUnknown is 504).
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import httpx

Endpoint = Callable[[], Awaitable[str]]
"""Where a broker is now: a base URL such as `http://127.0.0.1:8080`. May raise; it is asked again after a pause."""
UNKNOWN_CODES: Final = frozenset(("lost_ownership", "ledger_fenced", "ledger_closed", "topic_fenced"))
DONE: Final = frozenset((200, 201, 207))
RETRY_PAUSE_S: Final = 0.2
CONNECT_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """`kind` is "ok", "failed" or "unknown"; `status` 0 when there was no answer."""

    kind: str
    status: int = 0
    body: Any = None
    error: str = ""


def fixed(url: str) -> Endpoint:
    """An endpoint that never moves."""

    async def here() -> str:
        return url

    return here


def refusal_kind(status: int, code: object) -> str:
    """What a problem with this status and code says about the request."""
    if not isinstance(code, str) or not code:
        return "unknown"
    if status == 503 or (400 <= status < 500 and status != 408 and code not in UNKNOWN_CODES):
        return "failed"
    return "unknown"


class Door:
    """The way to the brokers for all clients of one run."""

    def __init__(self, endpoint: Endpoint, *, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._timeout = httpx.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s))
        self._asking = asyncio.Lock()
        self._url = ""

    def client(self, *, longer_s: float = 0.0) -> httpx.AsyncClient:
        """A client with connections of its own. `longer_s`: what a long poll adds to the time an answer may take."""
        timeout = httpx.Timeout((self._timeout.read or 0.0) + longer_s, connect=self._timeout.connect)
        return httpx.AsyncClient(timeout=timeout, trust_env=False)

    async def open(self) -> str:
        """The base URL; waits until the endpoint names one."""
        while True:
            async with self._asking:
                if not self._url:
                    try:
                        self._url = (await self._endpoint()).rstrip("/")
                    except Exception:  # a provider may fail: the cluster is being broken
                        self._url = ""
            if self._url:
                return self._url
            await asyncio.sleep(RETRY_PAUSE_S)

    async def call(self, http: httpx.AsyncClient, method: str, path: str, **request: Any) -> Outcome:
        """Send one request, once. Call `open` before it is recorded: this waits for nothing but the answer."""
        url = self._url
        if not url:
            return Outcome("failed", error="no broker's address is known: nothing was sent")
        try:
            answer = await http.request(method, url + path, **request)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol) as error:
            self._moved(url)
            return Outcome("failed", error=f"nothing was sent: {type(error).__name__} {error}")
        except httpx.HTTPError as error:
            self._moved(url)
            return Outcome("unknown", error=f"{type(error).__name__} {error}")
        return outcome_of(answer)

    def _moved(self, url: str) -> None:
        """Ask the endpoint anew, unless somebody did meanwhile."""
        if self._url == url:
            self._url = ""


def outcome_of(answer: httpx.Response) -> Outcome:
    """See the module's table."""
    try:
        body = answer.json() if answer.content else None
    except ValueError:
        body = None
    if answer.status_code in DONE and body is not None:
        return Outcome("ok", answer.status_code, body)
    error = f"{answer.status_code} {answer.text[:250]}"
    is_problem = answer.headers.get("content-type", "").startswith("application/problem+json")
    code = body.get("code") if is_problem and isinstance(body, dict) else None
    return Outcome(refusal_kind(answer.status_code, code), answer.status_code, body, error)
