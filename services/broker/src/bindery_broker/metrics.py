"""The broker's metrics of requests and memory, `bindery_broker_*`. Those of topics are in `topic_metrics`."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate

from bindery_kit.multiplex.peers import PeerLinks
from bindery_kit.multiplex.served import ServedRequests
from bindery_kit.observability.metrics import LATENCY_BUCKETS_S, SIZE_BUCKETS, Metrics
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from bindery_broker.limits.accounts import Accounts
from bindery_broker.namespaces.policy_store import PolicyStore
from bindery_broker.topics.topics import Topics


class BrokerMetrics:
    def __init__(self, metrics: Metrics, topics: Topics, policies: PolicyStore, accounts: Accounts) -> None:
        self._requests = _RequestCollector()
        self.produce_bytes = metrics.histogram(
            "produce_request_bytes", "Bytes of produce requests.", buckets=SIZE_BUCKETS
        )
        self.in_flight_bytes = metrics.gauge("request_bytes_in_flight", "Bytes of request bodies held.")
        self.response_bytes = metrics.gauge(
            "response_bytes", "Bytes of messages in responses that are not read by their clients yet."
        )
        self.response_bytes.set_function(lambda: topics.responses.used)
        self.read_ahead_bytes = metrics.gauge(
            "read_ahead_bytes", "Bytes of messages that were read for consumers and not delivered yet."
        )
        self.read_ahead_bytes.set_function(lambda: topics.read_ahead.used)
        self.proxied = metrics.counter("http_proxied_total", "Requests passed on to a topic's owner.")
        self.peer_connections = metrics.gauge(
            "peer_connections", "Connections to other brokers over which many requests run."
        )
        self.peer_requests = metrics.gauge("peer_requests", "Requests to other brokers in progress over them.")
        self.peer_unread_bytes = metrics.gauge(
            "peer_unread_bytes", "Bytes of answers of other brokers that clients have not read yet."
        )
        self.served_connections = metrics.gauge(
            "peer_served_connections", "Connections of other brokers over which many requests run."
        )
        self.served_requests = metrics.gauge("peer_served_requests", "Requests of other brokers in progress over them.")
        self.policies_unreadable = metrics.gauge(
            "policies_unreadable", "Nodes with policies of namespaces and topics in use that cannot be decoded."
        )
        self.policies_unreadable.set_function(lambda: len(policies.unreadable))
        self.accounts = metrics.gauge("limit_accounts", "Clients, tenants and namespaces with limits, in memory.")
        self.accounts.set_function(lambda: len(accounts))
        self.requests_held = metrics.gauge("requests_held", "Requests that wait while their topics move.")
        self._handed_over = metrics.counter(
            "bundles_handed_over_total", "Bundles that this broker has handed over to another one."
        )
        self._not_taken = metrics.counter(
            "bundles_not_taken_total", "Bundles that this broker gave up, and that no other broker took at once."
        )
        self._handover_seconds = metrics.histogram(
            "bundle_handover_seconds",
            "Time from the begin of a hand-over until the next owner has the bundle.",
            buckets=LATENCY_BUCKETS_S,
        )
        metrics.registry.register(self._requests)
        metrics.registry.register(_LimitCollector(accounts))

    def handed_over(self, seconds: float, *, is_taken: bool) -> None:
        """Count a hand-over. `is_taken`: whether another broker has the bundle now."""
        (self._handed_over if is_taken else self._not_taken).inc()
        self._handover_seconds.observe(seconds)

    def watch_peers(self, links: PeerLinks | None, served: ServedRequests | None) -> None:
        """Show the connections to other brokers (`links`), and those of other brokers (`served`)."""
        self.peer_connections.set_function(lambda: 0 if links is None else len(links.links))
        self.peer_requests.set_function(lambda: 0 if links is None else links.requests)
        self.peer_unread_bytes.set_function(lambda: 0 if links is None else links.held.used)
        self.served_connections.set_function(lambda: 0 if served is None else served.connections)
        self.served_requests.set_function(lambda: 0 if served is None else served.count)

    def answered(self, operation: str, status: int, seconds: float) -> None:
        """Count a finished request. `status`: HTTP status of the answer; `seconds`: duration."""
        self._requests.add(operation, status, seconds)


class _LimitCollector(Collector):
    """The requests that waited or were refused because of a limit of a client, a tenant or a namespace."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        refused = CounterMetricFamily(
            "bindery_broker_limit_refused",
            "Requests refused with 429, by the kind of the owner of the limit and by the limit.",
            labels=["kind", "limit"],
        )
        for (owner, limit), count in self._accounts.refused.items():
            refused.add_metric([owner, limit], count)
        yield refused
        yield CounterMetricFamily(
            "bindery_broker_limit_delayed", "Requests that waited for their turn.", value=self._accounts.delayed
        )


class _Durations:
    """Numbers of requests by bucket, and the sum of their seconds."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BUCKETS_S) + 1)
        self.sum_s = 0.0


class _RequestCollector(Collector):
    """Counts finished requests without the locks of prometheus_client, which take longer than the counting: only the
    event loop counts."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], int] = {}
        """By operation and status, which are few."""
        self._durations: dict[str, _Durations] = {}
        """By operation."""

    def describe(self) -> Iterable[Metric]:
        return []

    def add(self, operation: str, status: int, seconds: float) -> None:
        outcome = (operation, status)
        count = self._counts.get(outcome, 0)
        self._counts[outcome] = count + 1
        if not count:
            self._durations.setdefault(operation, _Durations())
        durations = self._durations[operation]
        durations.counts[bisect_left(LATENCY_BUCKETS_S, seconds)] += 1
        durations.sum_s += seconds

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "bindery_broker_http_requests",
            "Requests answered, by operation and status.",
            labels=["operation", "status"],
        )
        for (operation, status), count in self._counts.items():
            requests.add_metric([operation, str(status)], count)
        yield requests
        seconds = HistogramMetricFamily(
            "bindery_broker_http_request_seconds", "Time to answer a request.", labels=["operation"]
        )
        names = [*map(floatToGoString, LATENCY_BUCKETS_S), "+Inf"]
        for operation, durations in self._durations.items():
            buckets = zip(names, accumulate(durations.counts), strict=True)
            seconds.add_metric([operation], buckets=list(buckets), sum_value=durations.sum_s)
        yield seconds
