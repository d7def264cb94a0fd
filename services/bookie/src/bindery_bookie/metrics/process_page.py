"""ProcessPage: /metrics of a bookie: what the process uses (prometheus_client knows), then what the bookie counts.

A module of its own, imported when the HTTP server starts: prometheus_client takes a tenth of a second to import, and
the ledger port does not wait for that.
"""

from collections.abc import Callable
from typing import Final

from bindery_kit.observability.metrics import Metrics

from bindery_bookie.metrics.bookie import BookieMetrics

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""As BookKeeper answers."""


class ProcessPage:
    """A `bindery_kit.observability.health.MetricsPage`. `more`: what other parts of the process count, as text."""

    def __init__(self, metrics: BookieMetrics, *, more: Callable[[], bytes] = bytes) -> None:
        self._process = Metrics("bookie")
        self._bookie = metrics
        self._more = more

    @property
    def content_type(self) -> str:
        return CONTENT_TYPE

    def render(self) -> bytes:
        return self._process.render() + self._bookie.render() + self._more()
