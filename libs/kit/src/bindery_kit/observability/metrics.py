"""Metrics: one registry a process, names that begin with `bindery_`, histogram buckets fixed in one place.

Fixed buckets make the same latency comparable between bookie, client and broker, and let Prometheus add them up.
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
"""Seconds: from an add answered out of memory to the longest time limit that we set."""

SIZE_BUCKETS: Final = (128, 512, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304)
"""Bytes: from a small message to nearly the largest entry."""

COUNT_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
"""Things in one batch."""

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST


class Metrics:
    """The registry of a process. `subsystem` follows `bindery_` in each name: `bindery_bookie_adds_total`."""

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
        """`name` ends in its unit: `_seconds`, `_bytes`, `_count`."""
        return Histogram(
            name, help, labels, namespace="bindery", subsystem=self.subsystem, registry=self.registry, buckets=buckets
        )

    def render(self) -> bytes:
        """The text that Prometheus reads; its content type is CONTENT_TYPE."""
        return generate_latest(self.registry)
