"""ProcessPage: render /metrics of a service: metrics of the process, then the text that its parts render.

Services import this module when the HTTP server starts: the import of prometheus_client takes a tenth of a second, and
the ledger port of a bookie must not wait for it.
"""

from collections.abc import Callable
from typing import Final

from bindery_kit.observability.metrics import Metrics

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of the page. Source: BookKeeper uses the same."""


class ProcessPage:
    """A `bindery_kit.observability.health.MetricsPage`. `parts` render text in the format of Prometheus."""

    def __init__(self, subsystem: str, *parts: Callable[[], bytes]) -> None:
        self._process = Metrics(subsystem)
        self._parts = parts

    @property
    def content_type(self) -> str:
        return CONTENT_TYPE

    def render(self) -> bytes:
        return b"".join((self._process.render(), *(part() for part in self._parts)))
