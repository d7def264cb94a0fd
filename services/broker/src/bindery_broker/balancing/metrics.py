"""Metrics of load balancing: Pulsar's names and labels where they say the same.

Source: Pulsar ModularLoadManagerImpl (updateLoadBalancingMetrics, updateBundleUnloadingMetrics,
updateBundleSplitMetrics).
"""

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bindery_broker.balancing.balancing import Balancing


class BalancingMetrics(Collector):
    def __init__(self, balancing: Balancing, *, cluster: str) -> None:
        self._balancing = balancing
        self._cluster = cluster

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        balancing = self._balancing
        report = balancing.report_now()
        for name, text, value in (
            ("pulsar_lb_cpu_usage", "CPU of the broker in percent of one core.", report.cpu.percent),
            ("pulsar_lb_memory_usage", "Memory of the broker in percent of its limit.", report.memory.percent),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["cluster", "broker", "metric"])
            gauge.add_metric([self._cluster, balancing.name, "loadBalancing"], value)
            yield gauge
        split, unload = "bundlesSplit", "bundleUnloading"
        for name, what, text, count in (
            ("pulsar_lb_bundles_split", split, "Hot bundles that this broker has split.", balancing.splits),
            ("pulsar_lb_unload_bundle", unload, "Bundles that this broker has moved as the leader.", balancing.moves),
            ("pulsar_lb_unload_broker", unload, "Brokers from which they moved, once per round.", balancing.sources),
        ):
            counter = CounterMetricFamily(name, text, labels=["cluster", "metric"])
            counter.add_metric([self._cluster, what], count)
            yield counter
        yield GaugeMetricFamily(
            "bindery_broker_balancing_leader",
            "1: this broker moves bundles.",
            value=int(balancing.leadership.is_leader),
        )
        yield GaugeMetricFamily(
            "bindery_broker_load_units", "Load by which brokers are compared.", value=balancing.weight
        )
        yield CounterMetricFamily(
            "bindery_broker_bundles_assigned",
            "Bundles without owner that other brokers took at the request of this one.",
            value=balancing.assigned,
        )
        yield CounterMetricFamily(
            "bindery_broker_bundle_moves_failed", "Moves that failed.", value=balancing.moves_failed
        )
