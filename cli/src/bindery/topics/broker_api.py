"""Client of the HTTP API of a broker, with errors that name the fix."""

import os
from typing import Any, Final
from urllib.parse import quote

import httpx
from bindery_core.errors import BadRequest, BinderyError

from bindery.common.credentials import read_token
from bindery.common.json_http import JsonHttp, answerer_of, problem_of, tls_advice
from bindery.common.url_options import TOKEN_FILE

DEFAULT_URL: Final = "http://127.0.0.1:8080"
TIMEOUT_S: Final = 60.0
"""Timeout in seconds of one request, longer than the broker waits for messages."""


class BrokerUnreachable(BinderyError):
    """No broker answers at the URL, or the connection broke: the outcome of a request may be unknown."""

    code = "broker_unreachable"
    is_absent = False
    """Whether nothing listens at the URL, so that nothing was sent."""


AGAIN: Final = frozenset((408, 429, 503, 504))
"""Statuses after which a request that stores nothing twice is repeated."""


class BrokerRefused(BinderyError):
    """The broker returned an error: `http_status`, and `problem` as in RFC 9457."""

    code = "refused"

    def __init__(self, message: str, /, *, http_status: int, problem: dict[str, Any]) -> None:
        super().__init__(message)
        self.http_status = http_status
        self.problem = problem

    @property
    def is_temporary(self) -> bool:
        """Whether the same request may succeed later."""
        return self.http_status in AGAIN


def broker_url(url: str | None) -> str:
    """Return `url`, or BINDERY_URL, or DEFAULT_URL."""
    return (url or os.environ.get("BINDERY_URL") or DEFAULT_URL).rstrip("/")


def topic_path(topic: str) -> str:
    """Return the URL path of a topic: TENANT/NAMESPACE/NAME, also with `persistent://`, or NAME in public/default."""
    name = topic.removeprefix("persistent://")
    parts = name.split("/")
    if len(parts) == 1:
        parts = ["public", "default", *parts]
    if len(parts) != 3 or not all(parts):
        raise BadRequest("not the name of a topic; the format is NAME or TENANT/NAMESPACE/NAME", topic=topic)
    return "/v1/topics/" + "/".join(quote(part, safe="") for part in parts)


def subscription_path(name: str) -> str:
    """Return the URL path of a subscription, relative to the path of its topic."""
    return f"/subscriptions/{quote(name, safe='')}"


def consumer_path(name: str) -> str:
    """Return the URL path of a consumer, relative to the path of its subscription."""
    return f"/consumers/{quote(name, safe='')}"


class Broker(JsonHttp):
    """`with Broker(url) as broker: broker.get(path)`: JSON in and out. Sends the token of the running command, if
    it has one. Raises BrokerUnreachable, BrokerRefused."""

    def __init__(self, url: str | None) -> None:
        file = TOKEN_FILE.value()
        headers = {"Authorization": f"Bearer {read_token(file)}"} if file else None
        super().__init__(broker_url(url), timeout_s=TIMEOUT_S, headers=headers)

    def post(self, path: str, body: Any) -> Any:
        return self.request("POST", path, json=body)

    def request(self, method: str, path: str, **options: Any) -> Any:
        try:
            answer = self._http.request(method, path, **options)
        except httpx.ConnectError as error:
            if advice := tls_advice(error):
                raise BrokerUnreachable(f"cannot reach the broker at {self.url}: {advice}") from error
            absent = BrokerUnreachable(
                f"no broker answers at {self.url}: is it running? `make run` (or `bindery standalone`) starts one; "
                "--url or BINDERY_URL names another"
            )
            absent.is_absent = True
            raise absent from error
        except httpx.TimeoutException as error:
            raise BrokerUnreachable(
                f"the broker at {self.url} did not answer within {TIMEOUT_S:.0f} s; "
                "the outcome of the request is unknown"
            ) from error
        except httpx.HTTPError as error:
            raise BrokerUnreachable(f"the connection to the broker at {self.url} broke: {error}") from error
        if answer.status_code >= 400:
            raise _refusal(answer, self.url)
        try:
            return answer.json() if answer.content else None
        except ValueError as error:
            raise BrokerUnreachable(f"{self.url} is not a broker; set --url or BINDERY_URL") from error


def _refusal(answer: httpx.Response, url: str) -> BrokerRefused:
    problem = problem_of(answer)
    who = answerer_of(problem)
    if who not in (None, "a broker"):
        return BrokerRefused(
            f"{url} is {who}, not a broker; --url or BINDERY_URL names one",
            http_status=answer.status_code,
            problem=problem,
        )
    detail = problem.get("detail") or answer.text[:500] or answer.reason_phrase
    code = problem.get("code", "")
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        detail = f"{detail}; pass --token-file, or set {TOKEN_FILE.variable}"
    return BrokerRefused(
        f"{detail} ({answer.status_code}{', ' + code if code else ''})", http_status=answer.status_code, problem=problem
    )
