"""Metrics: the Prometheus registry of a process. Names begin with `bindery_`; histogram buckets are defined here.

The same buckets make latencies of bookie, client and broker comparable, and Prometheus can add them up.
"""

from collections.abc import Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

LATENCY_BUCKETS_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper bounds in seconds: from an add that is answered from memory to the longest timeout."""

SIZE_BUCKETS: Final = (128, 512, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304)
"""Upper bounds in bytes: from a small message to almost the largest entry."""

COUNT_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
"""Upper bounds of the number of items in one batch."""

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST


class Metrics:
    """The registry of a process. `subsystem` follows `bindery_` in each name, as in `bindery_bookie_adds_total`."""

    def __init__(self, subsystem: str, *, with_process: bool = True) -> None:
        self.subsystem = subsystem
        self.registry = CollectorRegistry()
        if with_process:
            ProcessCollector(registry=self.registry)
            PlatformCollector(registry=self.registry)
            GCCollector(registry=self.registry)

    @property
    def content_type(self) -> str:
        return CONTENT_TYPE

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, help, labels, namespace="bindery", subsystem=self.subsystem, registry=self.registry)

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(name, help, labels, namespace="bindery", subsystem=self.subsystem, registry=self.registry)

    def histogram(
        self, name: str, help: str, labels: Sequence[str] = (), *, buckets: Sequence[float] = LATENCY_BUCKETS_S
    ) -> Histogram:
        """Return a new histogram. `name` ends in its unit: `_seconds`, `_bytes`, `_count`."""
        return Histogram(
            name, help, labels, namespace="bindery", subsystem=self.subsystem, registry=self.registry, buckets=buckets
        )

    def render(self) -> bytes:
        """Return the text for Prometheus, of content type CONTENT_TYPE."""
        return generate_latest(self.registry)
