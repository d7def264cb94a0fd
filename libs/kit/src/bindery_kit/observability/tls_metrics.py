"""TlsMetrics: the certificates that a process uses, as metrics.

| metric                                         | meaning                                                       |
|------------------------------------------------|---------------------------------------------------------------|
| `bindery_tls_certificate_expiry_seconds{port}` | when the certificate in use expires, in seconds since 1970    |
| `bindery_tls_reload_failed{port}`              | 1: the files have changed and cannot be used, so the ones     |
|                                                | before them are in use                                        |

`port` is what the certificate is for: `http`, `ledger`, or what this process connects to: `peers`, `bookies`.
"""

from bindery_identity.tls import TlsFiles

from bindery_kit.observability.metrics_page import Page, labels


class TlsMetrics:
    """The files of a process. `render` is a part of its metrics page; empty without TLS."""

    def __init__(self) -> None:
        self._files: dict[str, TlsFiles] = {}

    def add(self, port: str, files: TlsFiles | None) -> None:
        """Show `files` from now on; None: this port has no TLS. Also ignored if no file is configured."""
        if files is not None and files.paths:
            self._files[port] = files

    @property
    def files(self) -> tuple[TlsFiles, ...]:
        return tuple(self._files.values())

    def render(self) -> bytes:
        """Return the metrics as text for Prometheus."""
        if not self._files:
            return b""
        page = Page()
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
