"""HttpStats: what an HTTP port refused and what its clients hold, as metrics.

| metric                              | meaning                                                               |
|-------------------------------------|-----------------------------------------------------------------------|
| `bindery_http_connections`          | open connections                                                      |
| `bindery_http_held_bytes{kind}`     | bytes of heads, bodies that are not taken yet, and unread responses   |
| `bindery_http_held_bytes_max{kind}` | their limits                                                          |
| `bindery_http_refused_total{reason}`| refused requests, and connections that were ended because of a limit  |
"""

from collections import Counter
from typing import Final

from bindery_kit.limits.held_bytes import HeldBytes
from bindery_kit.observability.metrics_page import Page, labels

CONNECTION_SIZE: Final = 8 * 1024
"""Approximate memory in bytes of an idle connection."""


class HttpStats:
    """Counters of one server. Reasons are constants of the code, so their number bounds the memory."""

    def __init__(self) -> None:
        self.connections = 0
        self._connections_peak = 0
        """The most connections since the last `take_peak_size`."""
        self.refused: Counter[str] = Counter()
        self._held: tuple[HeldBytes, ...] = ()

    def watch(self, *held: HeldBytes) -> None:
        self._held = held

    @property
    def needed_size(self) -> int:
        """Approximate bytes of memory that the clients need now."""
        return CONNECTION_SIZE * self.connections + sum(held.used for held in self._held)

    def connected(self) -> None:
        """Count one more connection."""
        self.connections += 1
        if self.connections > self._connections_peak:
            self._connections_peak = self.connections

    def take_peak_size(self) -> int:
        """Return the most that `needed_size` can have been since the last call."""
        peak, self._connections_peak = self._connections_peak, self.connections
        return CONNECTION_SIZE * peak + sum(held.take_peak() for held in self._held)

    def count(self, reason: str) -> None:
        self.refused[reason] += 1

    def render(self) -> bytes:
        """Return the metrics as text for Prometheus."""
        page = Page()
        page.add("bindery_http_connections", "gauge", "Open HTTP connections.", [("", self.connections)])
        kinds = [(labels({"kind": held.kind}), held) for held in self._held]
        page.add(
            "bindery_http_held_bytes",
            "gauge",
            "Bytes that HTTP clients make this process hold.",
            [(kind, held.used) for kind, held in kinds],
        )
        page.add(
            "bindery_http_held_bytes_max", "gauge", "Limit of these bytes.", [(kind, h.limit) for kind, h in kinds]
        )
        page.add(
            "bindery_http_refused_total",
            "counter",
            "HTTP requests and connections that a limit or check refused.",
            [(labels({"reason": reason}), count) for reason, count in sorted(self.refused.items())],
        )
        return page.render()
