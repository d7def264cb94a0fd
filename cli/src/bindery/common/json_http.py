"""What the clients of the services' HTTP APIs share: a connection that ends with its block, and problems as answers."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

import httpx
from bindery_core.errors import BadRequest

_SERVED: Final = {
    "/v1/recovery/status": "an auditor",
    "/api/v1/bookie/state": "a bookie",
    "the API is described at /docs": "a broker",
}
"""Who answers, by a part of what it says about a path that it does not serve."""
_URL: Final = re.compile(r"https?://[^\s/?#@]+[^\s?#]*", re.IGNORECASE)


class JsonHttp(ABC):
    """`with` closes it. Proxies of the environment are not asked: a service is reached directly."""

    def __init__(self, url: str, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> None:
        """Raises BadRequest: that is no URL."""
        try:
            is_url = bool(_URL.fullmatch(url) and httpx.URL(url).host)
        except httpx.InvalidURL:
            is_url = False
        if not is_url:
            raise BadRequest(f"not a URL: want http://host:port, not {url}")
        self.url = url.rstrip("/")
        self._http = httpx.Client(base_url=self.url, timeout=timeout_s, trust_env=False, headers=headers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def get(self, path: str, **params: Any) -> Any:
        """`params` that are None are left out."""
        return self.request("GET", path, params={name: value for name, value in params.items() if value is not None})

    @abstractmethod
    def request(self, method: str, path: str, **options: Any) -> Any:
        """Ask, and answer with JSON. Raises the service's own errors."""


def problem_of(answer: httpx.Response) -> dict[str, Any]:
    """The problem (RFC 9457) that an error answer carries; empty: it carries none."""
    try:
        problem = answer.json()
    except ValueError:
        return {}
    return problem if isinstance(problem, dict) else {}


def answerer_of(problem: Mapping[str, Any]) -> str | None:
    """Which of our services does not serve what was asked for, with its article; None: it is not told."""
    detail = str(problem.get("detail") or "")
    if not detail.startswith("nothing is served at "):
        return None
    served = detail.partition("; ")[2]  # before it stands what was asked for
    return next((who for part, who in _SERVED.items() if part in served), None)
