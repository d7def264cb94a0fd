"""TlsMetrics: the certificates and tokens that a process uses, as metrics.

| metric                                         | meaning                                                       |
|------------------------------------------------|---------------------------------------------------------------|
| `bindery_tls_certificate_expiry_seconds{port}` | when the certificate in use expires, in seconds since 1970    |
| `bindery_tls_reload_failed{port}`              | 1: the files have changed and cannot be used, so the ones     |
|                                                | before them are in use                                        |
| `bindery_token_expiry_seconds{port}`           | when the token that the process presents expires; none if it  |
|                                                | does not expire, or is a shared secret                        |

`port` is what the certificate or token is for: `http`, `ledger`, or what this process connects to: `peers`, `bookies`,
`openid`, `zookeeper`.
"""

from collections.abc import Callable

from bindery_core.errors import Unauthorized
from bindery_identity.tls import TlsFiles
from bindery_identity.tokens import unverified

from bindery_kit.observability.metrics_page import Page, labels


class TlsMetrics:
    """The files of a process. `render` is a part of its metrics page; empty without TLS."""

    def __init__(self) -> None:
        self._files: dict[str, TlsFiles] = {}
        self._tokens: dict[str, Callable[[], bytes | None]] = {}

    def add(self, port: str, files: TlsFiles | None) -> None:
        """Show `files` from now on; None: this port has no TLS. Also ignored if no file is configured."""
        if files is not None and files.paths:
            self._files[port] = files

    def add_token(self, port: str, token: Callable[[], bytes | None]) -> None:
        """Show when the token expires that `token` returns; None: there is none."""
        self._tokens[port] = token

    @property
    def files(self) -> tuple[TlsFiles, ...]:
        return tuple(self._files.values())

    def render(self) -> bytes:
        """Return the metrics as text for Prometheus."""
        tokens = [
            (labels({"port": port}), expires_at_s)
            for port, token in sorted(self._tokens.items())
            if (expires_at_s := _expiry(token())) is not None
        ]
        page = Page()
        if tokens:
            page.add(
                "bindery_token_expiry_seconds",
                "gauge",
                "When the token that this process presents expires, in seconds since 1970.",
                tokens,
            )
        if not self._files:
            return page.render() if tokens else b""
        expiries = [
            (labels({"port": port}), files.expires_at_s)
            for port, files in sorted(self._files.items())
            if files.expires_at_s is not None
        ]
        page.add(
            "bindery_tls_certificate_expiry_seconds",
            "gauge",
            "When the TLS certificate in use expires, in seconds since 1970.",
            expiries,
        )
        page.add(
            "bindery_tls_reload_failed",
            "gauge",
            "1 while changed TLS files cannot be used, so that the earlier ones are.",
            [(labels({"port": port}), int(files.failure is not None)) for port, files in sorted(self._files.items())],
        )
        return page.render()


def _expiry(token: bytes | None) -> float | None:
    """Return the claim `exp` of a token; None if it has none, or is not a signed one."""
    if token is None:
        return None
    try:
        expires_at_s = unverified(token)[1].get("exp")
    except Unauthorized:
        return None
    return float(expires_at_s) if isinstance(expires_at_s, int | float) else None
