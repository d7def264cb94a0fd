"""Base of the clients of the HTTP APIs: a connection that ends with its block, and problem details (RFC 9457)."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

import httpx
from bindery_core.errors import BadRequest
from bindery_identity.tls import TlsFiles, client_tls

from bindery.common.url_options import CA_FILE

_SERVED: Final = {
    "/v1/recovery/status": "an auditor",
    "/api/v1/bookie/state": "a bookie",
    "the API is described at /docs": "a broker",
}
"""Part of the error for a path that is not served -> the service that returns it."""
_URL: Final = re.compile(r"https?://[^\s/?#@\\]+(/[^\s?#\\]*)?", re.IGNORECASE)
_CREDENTIALS: Final = re.compile(r"[^/?#]*://[^/?#]*@")


class JsonHttp(ABC):
    """A connection that `with` closes. Proxies from the environment are not used."""

    def __init__(self, url: str, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> None:
        """Raises BadRequest if `url` is not a URL, or if it has credentials."""
        if _CREDENTIALS.match(url):
            raise BadRequest(
                "the URL has credentials before its @, which are not sent: use http://host:port and --token-file"
            )
        try:
            is_url = bool(_URL.fullmatch(url) and httpx.URL(url).host)
        except httpx.InvalidURL:
            is_url = False
        if not is_url:
            raise BadRequest(f"not a URL: {url}; the format is http://host:port")
        self.url = url.rstrip("/")
        verify: Any = True
        if self.url.lower().startswith("https:"):
            verify = _tls().context
        self._http = httpx.Client(base_url=self.url, timeout=timeout_s, trust_env=False, headers=headers, verify=verify)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def get(self, path: str, **params: Any) -> Any:
        """Send a GET request. Parameters that are None are omitted."""
        return self.request("GET", path, params={name: value for name, value in params.items() if value is not None})

    @abstractmethod
    def request(self, method: str, path: str, **options: Any) -> Any:
        """Send a request and return the JSON of the response. Raises the errors of the service."""


def _tls() -> TlsFiles:
    """Return the TLS of https URLs. Raises BadRequest."""
    file = CA_FILE.value()
    try:
        return client_tls(ca_file=file)
    except BadRequest as error:
        raise BadRequest(f"cannot use the CA file {file} (--ca-file or {CA_FILE.variable}): {error}") from error


def tls_advice(error: httpx.TransportError) -> str:
    """Return what to do about a connection that failed because of TLS; empty if it failed because of something else."""
    text = str(error)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return (
            f"the certificate is not trusted: {text}. Pass --ca-file, or set {CA_FILE.variable}; the host of the URL "
            "must be one that the certificate contains"
        )
    if "SSL" in text:
        return f"TLS failed: {text}. Is it an https port?"
    return ""


def problem_of(answer: httpx.Response) -> dict[str, Any]:
    """Return the problem details of an error response; empty if it has none."""
    try:
        problem = answer.json()
    except ValueError:
        return {}
    return problem if isinstance(problem, dict) else {}


def answerer_of(problem: Mapping[str, Any]) -> str | None:
    """Return the kind of service that returned `problem` for a path it does not serve; None if it is unknown."""
    detail = str(problem.get("detail") or "")
    if not detail.startswith("nothing is served at "):
        return None
    served = detail.partition("; ")[2]  # the part before it names the requested path
    return next((who for part, who in _SERVED.items() if part in served), None)
