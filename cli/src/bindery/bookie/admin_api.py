"""Client of the HTTP API of a bookie, with errors that name the fix."""

import os
from typing import Any, Final

import httpx
from bindery_core.errors import BinderyError, NotThere, Unauthorized

from bindery.common.credentials import read_token
from bindery.common.json_http import JsonHttp, answerer_of, problem_of, tls_advice
from bindery.common.url_options import TOKEN_FILE

DEFAULT_URL: Final = "http://127.0.0.1:8000"
PREFIX: Final = "/api/v1/bookie"
TIMEOUT_S: Final = 30.0
"""Timeout in seconds of one request."""


class BookieUnreachable(BinderyError):
    """No bookie answers at the URL."""

    code = "bookie_unreachable"


class BookieRefused(BinderyError):
    """The response is an error, or the server at the URL is not a bookie."""

    code = "refused"


class NotServed(NotThere):
    """The bookie does not serve this path (an older version, or a disabled feature), or has no such object."""

    code = "not_found"


class BookieAdmin(JsonHttp):
    """`with BookieAdmin(url, token_file) as bookie: bookie.get("disks")`: JSON in and out.

    Raises BookieUnreachable, BookieRefused, NotServed, Unauthorized.
    """

    def __init__(self, url: str | None, token_file: str | None) -> None:
        token = _token(token_file)
        super().__init__(
            url or os.environ.get("BINDERY_BOOKIE_URL") or DEFAULT_URL,
            timeout_s=TIMEOUT_S,
            headers={"Authorization": f"Bearer {token}"} if token else None,
        )

    def put(self, path: str, body: Any = None) -> Any:
        return self.request("PUT", path, **({} if body is None else {"json": body}))

    def delete(self, path: str) -> Any:
        return self.request("DELETE", path)

    def request(self, method: str, path: str, **options: Any) -> Any:
        """Send a request. Return the JSON or the text of the response; None if it is empty."""
        try:
            answer = self._http.request(method, f"{PREFIX}/{path}", **options)
        except httpx.ConnectError as error:
            if advice := tls_advice(error):
                raise BookieUnreachable(f"cannot reach the bookie at {self.url}: {advice}") from error
            raise BookieUnreachable(
                f"no bookie answers at {self.url}: is it running? --url or BINDERY_BOOKIE_URL names another; its port "
                "is the bookie's --http-port"
            ) from error
        except httpx.TimeoutException as error:
            raise BookieUnreachable(f"the bookie at {self.url} did not answer within {TIMEOUT_S:.0f} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise BookieUnreachable(f"cannot reach the bookie at {self.url}: {error}") from error
        if answer.status_code >= 400:
            raise _refusal(answer, self.url)
        try:
            return answer.json() if answer.content else None
        except ValueError:
            return answer.text


def _refusal(answer: httpx.Response, url: str) -> BinderyError:
    problem = problem_of(answer)
    who = answerer_of(problem)
    if who not in (None, "a bookie"):
        return BookieRefused(f"{url} is {who}, not a bookie; --url or BINDERY_BOOKIE_URL names one's --http-port")
    detail = str(problem.get("detail") or problem.get("title") or answer.text[:500] or answer.reason_phrase)
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        if detail.startswith("no tokens are configured"):  # a token of ours would not help
            return Unauthorized(detail)
        return Unauthorized(f"{detail}; pass --token-file, or set BINDERY_BOOKIE_TOKEN_FILE or BINDERY_BOOKIE_TOKEN")
    if answer.status_code == httpx.codes.NOT_FOUND:
        return NotServed(detail)
    return BookieRefused(f"{detail} ({answer.status_code})")


def _token(token_file: str | None) -> str:
    """Return the token from the file or from the environment. Command lines are readable by every user."""
    name = token_file or os.environ.get("BINDERY_BOOKIE_TOKEN_FILE")
    token = os.environ.get("BINDERY_BOOKIE_TOKEN", "").strip()
    name = name or ("" if token else os.environ.get(TOKEN_FILE.variable))
    return read_token(name) if name else token
